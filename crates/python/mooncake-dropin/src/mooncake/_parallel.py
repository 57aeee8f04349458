"""Tensors stored as the parts that ranks hold, and read as whole or as parts for other ranks.

A part is stored under the key and its place: ``{key}_tp_{rank}`` where tensor parallelism is all there is, else
``{key}__{axis}__{axis}`` with ``{kind}_{rank}of{size}`` and what further tells it apart. What is split leaves a manifest under
``{key}__parallelism_manifest``, or ``{key}__writer_manifest`` for parts that are only split to be written by several.

A read gives exactly the part that was asked for, or None; Mooncake may give another one where the sizes differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mooncake._tensor_layout import Axis, Header, Manifest, NotATensor, dtype_code, header_at, header_of, shards_of, tensor_of
from mooncake._tensors import INVALID, Piece, TensorCalls, copied, integer, lists, plain, refused, shard_suffix

if TYPE_CHECKING:
    import torch

_KINDS = ("dp", "tp", "ep", "pp")
_TP = _KINDS.index("tp")
# What stands before the part of an axis that has one.
_PARTS = {"ep": "eid", "pp": "sid"}
_MODES = ("as_stored", "shard", "full")


@dataclass
class ParallelAxis:
    """One way in which a tensor is split over ranks: ``kind`` is "dp", "tp", "ep" or "pp"; "tp" needs ``split_dim``."""

    kind: str = ""
    rank: int = 0
    size: int = 1
    split_dim: int | None = None
    expert_id: int | None = None
    stage_id: int | None = None


@dataclass
class TensorParallelism:
    """All ways in which a tensor is split."""

    axes: list[ParallelAxis] = field(default_factory=list)


@dataclass
class ReadTarget:
    """What to read: the part that was stored ("as_stored"), one for these ranks ("shard"), or all of it ("full")."""

    mode: str = "as_stored"
    parallelism: TensorParallelism | None = None


def axes_of(parallelism: Any) -> list[Axis]:
    """The axes of a ``TensorParallelism``, checked."""
    given = getattr(parallelism, "axes", None)
    if not isinstance(given, (list, tuple)) or not 0 < len(given) <= 4:
        raise NotATensor("a TensorParallelism with 1 to 4 axes is needed")
    axes = [_axis(axis) for axis in given]
    if len({axis.kind for axis in axes}) < len(axes):
        raise NotATensor("an axis is given twice")
    return axes


def _axis(given: Any) -> Axis:
    kind = str(getattr(given, "kind", "")).lower()
    if kind not in _KINDS:
        raise NotATensor(f"axis {kind!r}: dp, tp, ep and pp are known")
    rank, size = _number(given, "rank"), _number(given, "size")
    split_dim, part = _number(given, "split_dim"), {"ep": "expert_id", "pp": "stage_id"}.get(kind)
    if rank is None or size is None or not rank < size:
        raise NotATensor(f"axis {kind}: rank {rank} of {size}")
    if kind == "tp" and split_dim is None:
        raise NotATensor("axis tp: split_dim is needed")
    return Axis(_KINDS.index(kind), rank, size, -1 if split_dim is None else split_dim, (part and _number(given, part)) or 0)


def _number(given: Any, name: str) -> int | None:
    value = getattr(given, name, None)
    if value is None:
        return None
    integer(**{name: value})
    if not 0 <= value < 1 << 31:
        raise NotATensor(f"{name} is {value}")
    return int(value)


def _suffix(axes: list[Axis]) -> str:
    if [axis.kind for axis in axes] == [_TP]:
        return shard_suffix(axes[0].rank)
    texts = []
    for axis in axes:
        text = f"{_KINDS[axis.kind]}_{axis.rank}of{axis.size}"
        if axis.kind == _TP:
            text += f"_sd{axis.split_dim}"
        elif part := _PARTS.get(_KINDS[axis.kind]):
            text += f"_{part}{axis.part}"
        texts.append(text)
    return "__" + "__".join(texts)


def _tp_of(axes: list[Axis]) -> Axis | None:
    return next((axis for axis in axes if axis.kind == _TP), None)


def _at_rank(axes: list[Axis], tp: Axis, rank: int) -> list[Axis]:
    """The same place, but for the rank along a split that may be another one."""
    return [replace(tp, rank=rank) if axis.kind == _TP else axis for axis in axes]


def _cut(obj: Any, axes: list[Axis]) -> list[tuple[str, Piece]]:
    """The part at these axes, and the manifest if it is split.

    With tensor parallelism alone the tensor is the part. With further axes it is the whole, of which the part is taken.
    """
    tensor = tensor_of(obj)
    tp = _tp_of(axes)
    if tp is None:
        return [(_suffix(axes), Piece(header_of(tensor, axes), tensor))]
    if not 0 <= tp.split_dim < tensor.dim():
        raise NotATensor(f"a tensor of {tensor.dim()} dimensions has no dimension {tp.split_dim}")
    if len(axes) == 1:
        part, whole = tensor, list(tensor.shape)
        whole[tp.split_dim] *= tp.size
    else:
        part, whole = shards_of(tensor, tp.size, tp.split_dim)[tp.rank], list(tensor.shape)
    placed = [replace(axis, length=part.shape[tp.split_dim]) if axis.kind == _TP else axis for axis in axes]
    return [(_suffix(axes), Piece(header_of(part, placed, whole), part)), _manifest("__parallelism_manifest", part, tp, whole)]


def _manifest(suffix: str, tensor: torch.Tensor, tp: Axis, whole: list[int]) -> tuple[str, bytes]:
    return suffix, Manifest(dtype_code(tensor) or 0, tp.split_dim, tp.size, tuple(whole)).pack()


def _cut_for_writer(obj: Any, partition: Any) -> list[tuple[str, Any]]:
    """One writer's part of a whole tensor."""
    rank, size, split_dim = (_number(partition, name) for name in ("rank", "size", "split_dim"))
    if rank is None or size is None or split_dim is None or not rank < size:
        raise NotATensor("writer_partition: rank, size and split_dim are needed")
    tensor = tensor_of(obj)
    part = shards_of(tensor, size, split_dim)[rank]
    axis = Axis(_TP, rank, size, split_dim, length=part.shape[split_dim])
    piece = Piece(header_of(part, [axis], tensor.shape), part)
    return [(_writer_suffix(axis, rank), piece), _manifest("__writer_manifest", part, axis, list(tensor.shape))]


def _writer_suffix(tp: Axis, rank: int) -> str:
    return f"__writer_{rank}of{tp.size}_sd{tp.split_dim}"


class ParallelCalls(TensorCalls):
    """Mixed into the store beside the plain tensor calls."""

    def _put_parallel(
        self, keys: Any, tensors: Any, parallelisms: Any, partitions: Any, config: Any, replace_them: bool = False
    ) -> list[int]:
        columns = {"keys": keys, "tensors_list": tensors}
        for name, column in (("parallelisms", parallelisms), ("writer_partitions", partitions)):
            if column is not None:
                columns[name] = column
        if not lists(**columns) or (parallelisms is not None and partitions is not None):
            return [INVALID] * len(keys)
        nothing = [None] * len(keys)
        rows = zip(tensors, parallelisms or nothing, partitions or nothing, strict=True)
        cuts = [lambda row=row: _parts(*row) for row in rows]
        return self._put_with_manifests(keys, cuts, config, replace_them)

    def _put_with_manifests(self, keys: Any, cuts: Any, config: Any, replace_them: bool) -> list[int]:
        """Stores the parts, and then the manifests of those that were."""
        manifests: dict[int, tuple[str, bytes]] = {}

        def pieces(index: int, cut: Any) -> list[tuple[str, Piece]]:
            parts = cut()
            manifests.update({index: part for part in parts if isinstance(part[1], bytes)})
            return [part for part in parts if not isinstance(part[1], bytes)]

        wrapped = [lambda index=index, cut=cut: pieces(index, cut) for index, cut in enumerate(cuts)]
        codes = self._put_cut(keys, wrapped, config, replace_them)
        for index, (suffix, data) in manifests.items():
            if codes[index] == 0:
                put = self.upsert if replace_them else self.put
                codes[index] = put(keys[index] + suffix, data, *([] if config is None else [config]))
        return codes

    def _put_parallel_at(
        self, keys: Any, addresses: Any, sizes: Any, parallelisms: Any, partitions: Any, config: Any, replace_them: bool = False
    ) -> list[int]:
        if not lists(keys=keys, buffer_ptrs=addresses, sizes=sizes):
            return [INVALID] * len(keys)
        tensors = []
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            integer(buffer_ptr=address, size=size)
            try:
                tensors.append(_Stored(copied(address, size), header_at(address, size).is_shard))
            except NotATensor as error:
                refused(error, key)
                tensors.append(None)
        return self._put_parallel(keys, tensors, parallelisms, partitions, config, replace_them)

    def put_tensor_with_parallelism(
        self, key: str, tensor: Any, parallelism: Any = None, config: Any = None, writer_partition: Any = None
    ) -> int:
        """Stores the part of a tensor that a rank holds; without ``parallelism`` the tensor itself. With
        ``writer_partition``, an object with ``rank``, ``size`` and ``split_dim``, one writer's part of a whole tensor."""
        return self._put_parallel([key], [tensor], _one(parallelism), _one(writer_partition), config)[0]

    def batch_put_tensor_with_parallelism(
        self, keys: list[str], tensors_list: list, parallelisms: Any = None, config: Any = None, writer_partitions: Any = None
    ) -> list[int]:
        """As :meth:`put_tensor_with_parallelism`, for each."""
        return self._put_parallel(keys, tensors_list, parallelisms, writer_partitions, config)

    def upsert_tensor_with_parallelism(
        self, key: str, tensor: Any, parallelism: Any = None, config: Any = None, writer_partition: Any = None
    ) -> int:
        """As :meth:`put_tensor_with_parallelism`, in the place of what is there."""
        return self._put_parallel([key], [tensor], _one(parallelism), _one(writer_partition), config, True)[0]

    def batch_upsert_tensor_with_parallelism(
        self, keys: list[str], tensors_list: list, parallelisms: Any = None, config: Any = None, writer_partitions: Any = None
    ) -> list[int]:
        """As :meth:`upsert_tensor_with_parallelism`, for each."""
        return self._put_parallel(keys, tensors_list, parallelisms, writer_partitions, config, True)

    def put_tensor_with_parallelism_from(
        self, key: str, buffer_ptr: int, size: int, parallelism: Any = None, config: Any = None, writer_partition: Any = None
    ) -> int:
        """As :meth:`put_tensor_with_parallelism`, of a tensor that lies with its header at an address. A whole tensor is split,
        and with tensor parallelism alone the parts of all ranks are stored."""
        columns = (_one(parallelism), _one(writer_partition))
        return self._put_parallel_at([key], [buffer_ptr], [size], *columns, config)[0]

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        parallelisms: Any = None,
        config: Any = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """As :meth:`put_tensor_with_parallelism_from`, for each."""
        return self._put_parallel_at(keys, buffer_ptrs, sizes, parallelisms, writer_partitions, config)

    def upsert_tensor_with_parallelism_from(
        self, key: str, buffer_ptr: int, size: int, parallelism: Any = None, config: Any = None, writer_partition: Any = None
    ) -> int:
        """As :meth:`put_tensor_with_parallelism_from`, in the place of what is there."""
        columns = (_one(parallelism), _one(writer_partition))
        return self._put_parallel_at([key], [buffer_ptr], [size], *columns, config, True)[0]

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        parallelisms: Any = None,
        config: Any = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """As :meth:`upsert_tensor_with_parallelism_from`, for each."""
        return self._put_parallel_at(keys, buffer_ptrs, sizes, parallelisms, writer_partitions, config, True)

    def get_tensor_with_parallelism(self, key: str, target: ReadTarget | None = None) -> torch.Tensor | None:
        """What a :class:`ReadTarget` names, put together from the parts where needed; None if a part is missing."""
        mode, axes = _wanted(target)
        if axes is None:
            return None
        if mode != "full":
            (found,) = self._get_headed([key + (_suffix(axes) if axes else "")])
            if found is not None and _is_at(found[0], axes):
                return found[1]
            if mode == "as_stored":
                return None
        whole = self._whole(key, axes)
        if mode == "full" or whole is None:
            return whole
        tp = _tp_of(axes)
        try:
            return None if tp is None else shards_of(whole, tp.size, tp.split_dim)[tp.rank]
        except NotATensor as error:
            refused(error, key)
            return None

    def _whole(self, key: str, axes: list[Axis]) -> torch.Tensor | None:
        """The whole tensor: as it was put, or of the parts of several writers, or of the ranks of one place."""
        whole = self.get_tensor(key)
        if whole is not None:
            return whole
        for suffix in ("__writer_manifest", "__parallelism_manifest"):
            manifest = Manifest.unpack(self.get(key + suffix))
            if manifest is None:
                continue
            tp = Axis(_TP, 0, manifest.size, manifest.split_dim)
            places = [[replace(tp, rank=rank)] for rank in range(tp.size)]
            names = [_writer_suffix(tp, rank) for rank in range(tp.size)]
            if suffix == "__parallelism_manifest":
                places = [_at_rank(axes or [tp], tp, rank) for rank in range(tp.size)]
                names = [_suffix(place) for place in places]
            parts = self._get_headed([key + name for name in names])
            if all(part is not None and _is_at(part[0], place) for part, place in zip(parts, places, strict=True)):
                return _joined([tensor for _, tensor in parts], manifest)
        return None

    def batch_get_tensor_with_parallelism(self, keys: list[str], targets: Any = None) -> list[torch.Tensor | None]:
        """As :meth:`get_tensor_with_parallelism`, for each."""
        if not lists(keys=keys, targets=keys if targets is None else targets):
            return [None] * len(keys)
        wanted = [None] * len(keys) if targets is None else targets
        return [self.get_tensor_with_parallelism(key, target) for key, target in zip(keys, wanted, strict=True)]

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: ReadTarget | None = None
    ) -> torch.Tensor | None:
        """As :meth:`get_tensor_with_parallelism`, to an address, header first. The tensor shares that memory."""
        integer(buffer_ptr=buffer_ptr, size=size)
        tensor = self.get_tensor_with_parallelism(key, target)
        if tensor is None:
            return None
        _, axes = _wanted(target)
        tensor = tensor.contiguous()
        header = header_of(tensor, axes or ())
        return self._write_at(Piece(header, tensor), header, buffer_ptr, size)

    def batch_get_tensor_with_parallelism_into(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], targets: Any = None
    ) -> list[Any]:
        """As :meth:`get_tensor_with_parallelism_into`, for each."""
        if not lists(keys=keys, buffer_ptrs=buffer_ptrs, sizes=sizes, targets=keys if targets is None else targets):
            return [INVALID] * len(keys)
        wanted = [None] * len(keys) if targets is None else targets
        rows = zip(keys, buffer_ptrs, sizes, wanted, strict=True)
        return [self.get_tensor_with_parallelism_into(*row) for row in rows]


def _is_at(header: Header, axes: list[Axis]) -> bool:
    """Whether a part is the one at these axes; anything is, where none are named."""
    places = [[(axis.kind, axis.rank, axis.size, axis.split_dim, axis.part) for axis in side] for side in (header.axes, axes)]
    return not axes or places[0] == places[1]


def _joined(parts: list[torch.Tensor], manifest: Manifest) -> torch.Tensor | None:
    import torch

    fits = all(part.dim() == len(manifest.whole) and part.dtype == parts[0].dtype for part in parts)
    whole = torch.cat(parts, dim=manifest.split_dim) if fits else None
    return whole if whole is not None and tuple(whole.shape) == manifest.whole else None


@dataclass(frozen=True)
class _Stored:
    """A tensor that lay at an address, and whether its header called it a part."""

    tensor: Any
    is_shard: bool


def _one(value: Any) -> list[Any] | None:
    return None if value is None else [value]


def _parts(given: Any, parallelism: Any, partition: Any) -> list[tuple[str, Any]]:
    stored = given if isinstance(given, _Stored) else None
    tensor = stored.tensor if stored else given
    if partition is not None:
        return _cut_for_writer(tensor, partition)
    if parallelism is None:
        return plain(tensor)
    axes = axes_of(parallelism)
    tp = _tp_of(axes)
    if stored is None or stored.is_shard or tp is None or len(axes) > 1:
        return _cut(tensor, axes)
    shards = shards_of(tensor_of(tensor), tp.size, tp.split_dim)
    cuts = [_cut(shard, _at_rank(axes, tp, rank)) for rank, shard in enumerate(shards)]
    return [cut[0] for cut in cuts] + cuts[0][1:]


def _wanted(target: Any) -> tuple[str, list[Axis] | None]:
    """The mode and the axes of a target; no axes where none are named, None where they make no sense."""
    if target is None:
        return "as_stored", []
    mode = getattr(target, "mode", None)
    if not isinstance(mode, str) or not hasattr(target, "parallelism"):
        raise TypeError(f"target: a ReadTarget is needed, not {type(target).__name__}")
    if mode.lower() not in _MODES:
        raise RuntimeError(f"ReadTarget mode {mode!r}: as_stored, shard and full are known")
    try:
        axes = [] if target.parallelism is None else axes_of(target.parallelism)
    except NotATensor as error:
        refused(error, mode)
        return mode.lower(), None
    if mode.lower() == "shard" and not axes:
        return mode.lower(), None
    return mode.lower(), axes
