"""The tensor calls of a store: plain, and split for tensor parallelism.

A tensor is an object like any other (:mod:`mooncake._tensor_layout`), so everything a store promises for objects holds:
an existing key keeps its first value, ``upsert_*`` replaces. Codes are those of the byte calls; -600 is also what a
thing that is no tensor gets. A tensor on a device is copied to host memory first.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from layercake._native import mooncake_engine as _native
from mooncake._tensor_layout import (
    HEADER_BYTES,
    Axis,
    Header,
    NotATensor,
    header_at,
    header_of,
    memory_at,
    shards_of,
    tensor_in,
    tensor_of,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

INVALID = -600
_READ_FAILED = -1100
_TENSOR_PARALLEL = 1


class Piece:
    """A tensor about to be stored: its header, its elements, and what keeps them."""

    def __init__(self, header: Header, tensor: torch.Tensor):
        self.head = (ctypes.c_ubyte * HEADER_BYTES).from_buffer_copy(header.pack())
        self.tensor = tensor
        self.size = header.data_bytes

    def addresses(self) -> list[int]:
        return [ctypes.addressof(self.head), *([self.tensor.data_ptr()] if self.size else [])]

    def sizes(self) -> list[int]:
        return [HEADER_BYTES, *([self.size] if self.size else [])]

    def elements(self) -> Any:
        return memory_at(self.tensor.data_ptr(), self.size) if self.size else b""


def plain(obj: Any) -> list[tuple[str, Piece]]:
    """One piece, under the key itself."""
    tensor = tensor_of(obj)
    return [("", Piece(header_of(tensor), tensor))]


def tensor_parallel(obj: Any, ranks: int, split_dim: int) -> list[tuple[str, Piece]]:
    """A piece for each rank, and the end of its key."""
    if ranks <= 1:
        return plain(obj)
    tensor = tensor_of(obj)
    pieces = []
    for rank, shard in enumerate(shards_of(tensor, ranks, split_dim)):
        axis = Axis(_TENSOR_PARALLEL, rank, ranks, split_dim, length=shard.shape[split_dim])
        pieces.append((shard_suffix(rank), Piece(header_of(shard, [axis], tensor.shape), shard)))
    return pieces


def shard_suffix(rank: int) -> str:
    return f"_tp_{rank}"


def copied(address: int, size: int) -> torch.Tensor:
    """The tensor at an address, copied."""
    header = header_at(address, size)
    return tensor_in(bytearray(_native.TransferEngine.read_bytes_from_buffer(address, size)), header)


def refused(error: NotATensor, key: str) -> int:
    logger.debug("tensor %r: %s", key, error)
    return INVALID


def lists(**given: Any) -> bool:
    """Whether these are lists of one length; ``TypeError`` if one is no list."""
    for name, value in given.items():
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{name}: a list is needed, not {type(value).__name__}")
    return len({len(value) for value in given.values()}) <= 1


def integer(**given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: an int is needed, not {type(value).__name__}")


class TensorCalls:
    """Mixed into the store, whose byte calls it uses."""

    # ---- what the calls share -----------------------------------------------------------------------------------

    def _put_pieces(self, keys: Sequence[str], pieces: Sequence[Piece], config: Any, replace: bool) -> list[int]:
        if not keys:
            return []
        if replace:
            rest = {} if config is None else {"config": config}
            return [
                self.upsert_parts(key, piece.head, piece.elements(), **rest) for key, piece in zip(keys, pieces, strict=True)
            ]
        addresses, sizes = [piece.addresses() for piece in pieces], [piece.sizes() for piece in pieces]
        return self.batch_put_from_multi_buffers(list(keys), addresses, sizes, *([] if config is None else [config]))

    def _put_cut(
        self,
        keys: Sequence[str],
        cuts: Iterable[Callable[[], list[tuple[str, Piece]]]],
        config: Any = None,
        replace: bool = False,
    ) -> list[int]:
        """Stores what each cut gives for its key. One code a key: the first that is not 0."""
        codes, owners, names, pieces = [0] * len(keys), [], [], []
        for index, (key, cut) in enumerate(zip(keys, cuts, strict=True)):
            try:
                parts = cut()
            except NotATensor as error:
                codes[index] = refused(error, key)
                continue
            for suffix, piece in parts:
                owners.append(index)
                names.append(key + suffix)
                pieces.append(piece)
        for index, code in zip(owners, self._put_pieces(names, pieces, config, replace), strict=True):
            codes[index] = codes[index] or code
        return codes

    def _put_tensors(self, keys: Any, tensors: Any, config: Any = None, replace: bool = False) -> list[int]:
        if not lists(keys=keys, tensors_list=tensors):
            return [INVALID] * len(keys)
        return self._put_cut(keys, [lambda tensor=tensor: plain(tensor) for tensor in tensors], config, replace)

    def _put_tensors_with_tp(self, keys: Any, tensors: Any, ranks: int, split_dim: int, config: Any = None) -> list[int]:
        integer(tp_size=ranks, split_dim=split_dim)
        if not lists(keys=keys, tensors_list=tensors):
            return [INVALID] * len(keys)
        cuts = [lambda tensor=tensor: tensor_parallel(tensor, ranks, split_dim) for tensor in tensors]
        return self._put_cut(keys, cuts, config)

    def _put_at(self, keys: Any, addresses: Any, sizes: Any, put: Callable[..., list[int]]) -> list[int]:
        if not lists(keys=keys, buffer_ptrs=addresses, sizes=sizes):
            return [INVALID] * len(keys)
        codes = [0] * len(keys)
        good = []
        for index, (key, address, size) in enumerate(zip(keys, addresses, sizes, strict=True)):
            integer(buffer_ptr=address, size=size)
            try:
                header = header_at(address, size)
                if HEADER_BYTES + header.data_bytes != size:
                    raise NotATensor(f"the tensor has {HEADER_BYTES + header.data_bytes} bytes, not {size}")
                good.append(index)
            except NotATensor as error:
                codes[index] = refused(error, key)
        if good:
            chosen = [[column[index] for index in good] for column in (keys, addresses, sizes)]
            for index, code in zip(good, put(*chosen), strict=True):
                codes[index] = code
        return codes

    def _put_at_with_tp(self, keys: Any, addresses: Any, sizes: Any, ranks: int, split_dim: int) -> list[int]:
        integer(tp_size=ranks, split_dim=split_dim)
        if ranks <= 1:
            return self._put_at(keys, addresses, sizes, self.batch_put_from)
        if not lists(keys=keys, buffer_ptrs=addresses, sizes=sizes):
            return [INVALID] * len(keys)
        for address, size in zip(addresses, sizes, strict=True):
            integer(buffer_ptr=address, size=size)
        cuts = [
            lambda address=address, size=size: tensor_parallel(copied(address, size), ranks, split_dim)
            for address, size in zip(addresses, sizes, strict=True)
        ]
        return self._put_cut(keys, cuts)

    def _get_headed(self, keys: list[str]) -> list[tuple[Header, torch.Tensor] | None]:
        if not keys:
            return []
        return [self._headed(*entry) for entry in zip(keys, self.batch_get_buffer(keys), strict=True)]

    def _get_tensors(self, keys: list[str]) -> list[torch.Tensor | None]:
        return [found and found[1] for found in self._get_headed(keys)]

    @staticmethod
    def _headed(key: str, handle: Any) -> tuple[Header, torch.Tensor] | None:
        if handle is None:
            return None
        view = memoryview(handle).cast("B")
        try:
            header = Header.unpack(view)
            if HEADER_BYTES + header.data_bytes != len(view):
                raise NotATensor(f"the object has {len(view)} bytes, its tensor {HEADER_BYTES + header.data_bytes}")
            return header, tensor_in(view, header)
        except NotATensor as error:
            refused(error, key)
            return None

    def _get_tensors_into(self, keys: Any, addresses: Any, sizes: Any) -> list[Any]:
        if not lists(keys=keys, buffer_ptrs=addresses, sizes=sizes):
            return [INVALID] * len(keys)
        if not keys:
            return []
        read = self.batch_get_into(list(keys), list(addresses), list(sizes))
        return [self._tensor_at(*entry) for entry in zip(keys, addresses, read, strict=True)]

    @staticmethod
    def _tensor_at(key: str, address: int, size: int) -> torch.Tensor | None:
        if size < 0:
            return None
        try:
            return tensor_in(memory_at(address, size), header_at(address, size))
        except NotATensor as error:
            refused(error, key)
            return None

    @staticmethod
    def _write_at(piece: Piece, header: Header, address: int, size: int) -> torch.Tensor | None:
        """Copies header and elements to an address."""
        write = _native.TransferEngine.write_bytes_to_buffer
        if HEADER_BYTES + piece.size > size or write(address, piece.head, HEADER_BYTES):
            return None
        if piece.size and write(address + HEADER_BYTES, piece.elements(), piece.size):
            return None
        return tensor_in(memory_at(address, size), header)

    # ---- whole tensors ------------------------------------------------------------------------------------------

    def put_tensor(self, key: str, tensor: Any) -> int:
        """Stores a tensor. 0, or a negative code; -600 if it is none."""
        return self._put_tensors([key], [tensor])[0]

    def batch_put_tensor(self, keys: list[str], tensors_list: list) -> list[int]:
        """Stores tensors; a code for each."""
        return self._put_tensors(keys, tensors_list)

    def pub_tensor(self, key: str, tensor: Any, config: Any = None) -> int:
        """As :meth:`put_tensor`, with a ``ReplicateConfig``."""
        return self._put_tensors([key], [tensor], config)[0]

    def batch_pub_tensor(self, keys: list[str], tensors_list: list, config: Any = None) -> list[int]:
        """As :meth:`batch_put_tensor`, with a ``ReplicateConfig``."""
        return self._put_tensors(keys, tensors_list, config)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """Stores a tensor in the place of what is there."""
        return self._put_tensors([key], [tensor], replace=True)[0]

    def batch_upsert_tensor(self, keys: list[str], tensors_list: list) -> list[int]:
        """As :meth:`upsert_tensor`, for each."""
        return self._put_tensors(keys, tensors_list, replace=True)

    def upsert_pub_tensor(self, key: str, tensor: Any, config: Any = None) -> int:
        """As :meth:`upsert_tensor`, with a ``ReplicateConfig``."""
        return self._put_tensors([key], [tensor], config, replace=True)[0]

    def batch_upsert_pub_tensor(self, keys: list[str], tensors_list: list, config: Any = None) -> list[int]:
        """As :meth:`batch_upsert_tensor`, with a ``ReplicateConfig``."""
        return self._put_tensors(keys, tensors_list, config, replace=True)

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Stores a tensor that lies with its header at an address, as :meth:`get_tensor_into` leaves one."""
        return self._put_at([key], [buffer_ptr], [size], self.batch_put_from)[0]

    def batch_put_tensor_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """As :meth:`put_tensor_from`, for each."""
        return self._put_at(keys, buffer_ptrs, sizes, self.batch_put_from)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """As :meth:`put_tensor_from`, in the place of what is there."""
        return self._put_at([key], [buffer_ptr], [size], self.batch_upsert_from)[0]

    def batch_upsert_tensor_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """As :meth:`upsert_tensor_from`, for each."""
        return self._put_at(keys, buffer_ptrs, sizes, self.batch_upsert_from)

    def get_tensor(self, key: str) -> torch.Tensor | None:
        """The tensor under a key; None if there is none."""
        return self._get_tensors([key])[0]

    def batch_get_tensor(self, keys: list[str]) -> list[torch.Tensor | None]:
        """The tensors under these keys, None where there is none."""
        lists(keys=keys)
        return self._get_tensors(list(keys))

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> torch.Tensor | None:
        """Reads header and tensor to an address. The tensor shares that memory; None if there is none."""
        return self._get_tensors_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[Any]:
        """As :meth:`get_tensor_into`, for each; -600 for each if the lists differ in length."""
        return self._get_tensors_into(keys, buffer_ptrs, sizes)

    def get_tensor_into_cuda(self, key: str, tensor: Any) -> int:
        """Not supported: read with :meth:`get_tensor`, and copy the tensor to the device."""
        raise NotImplementedError("this build moves host memory only: use tensor.copy_(store.get_tensor(key))")

    def batch_get_tensor_into_cuda(self, keys: list[str], tensors_list: list) -> list[int]:
        """Not supported: read with :meth:`batch_get_tensor`, and copy the tensors to the device."""
        raise NotImplementedError("this build moves host memory only: copy what batch_get_tensor(keys) gives to the device")

    # ---- split for tensor parallelism ---------------------------------------------------------------------------

    def put_tensor_with_tp(self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> int:
        """Splits a tensor into equal parts and stores each under ``{key}_tp_{rank}``. All ranks are stored, whichever
        calls."""
        return self._put_tensors_with_tp([key], [tensor], tp_size, split_dim)[0]

    def batch_put_tensor_with_tp(
        self, base_keys: list[str], tensors_list: list, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> list[int]:
        """As :meth:`put_tensor_with_tp`, for each."""
        return self._put_tensors_with_tp(base_keys, tensors_list, tp_size, split_dim)

    def pub_tensor_with_tp(
        self, key: str, tensor: Any, config: Any = None, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """As :meth:`put_tensor_with_tp`, with a ``ReplicateConfig``."""
        return self._put_tensors_with_tp([key], [tensor], tp_size, split_dim, config)[0]

    def batch_pub_tensor_with_tp(
        self,
        base_keys: list[str],
        tensors_list: list,
        config: Any = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """As :meth:`pub_tensor_with_tp`, for each."""
        return self._put_tensors_with_tp(base_keys, tensors_list, tp_size, split_dim, config)

    def put_tensor_with_tp_from(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """As :meth:`put_tensor_with_tp`, of a whole tensor that lies with its header at an address."""
        return self._put_at_with_tp([key], [buffer_ptr], [size], tp_size, split_dim)[0]

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """As :meth:`put_tensor_with_tp_from`, for each."""
        return self._put_at_with_tp(base_keys, buffer_ptrs, sizes, tp_size, split_dim)

    def get_tensor_with_tp(self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> torch.Tensor | None:
        """The part of one rank; None if there is none."""
        return self.batch_get_tensor_with_tp([key], tp_rank, tp_size)[0]

    def batch_get_tensor_with_tp(self, base_keys: list[str], tp_rank: int = 0, tp_size: int = 1) -> list[torch.Tensor | None]:
        """As :meth:`get_tensor_with_tp`, for each."""
        keys = self._keys_of_rank(base_keys, tp_rank, tp_size)
        return [None] * len(base_keys) if keys is None else self._get_tensors(keys)

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> torch.Tensor | None:
        """As :meth:`get_tensor_with_tp`, to an address, as :meth:`get_tensor_into`."""
        return self.batch_get_tensor_with_tp_into([key], [buffer_ptr], [size], tp_rank, tp_size)[0]

    def batch_get_tensor_with_tp_into(
        self, base_keys: list[str], buffer_ptrs: list[int], sizes: list[int], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Any]:
        """As :meth:`get_tensor_with_tp_into`, for each."""
        keys = self._keys_of_rank(base_keys, tp_rank, tp_size)
        return [None] * len(base_keys) if keys is None else self._get_tensors_into(keys, buffer_ptrs, sizes)

    @staticmethod
    def _keys_of_rank(keys: list[str], rank: int, ranks: int) -> list[str] | None:
        integer(tp_rank=rank, tp_size=ranks)
        lists(base_keys=keys)
        if ranks <= 1:
            return list(keys)
        return [key + shard_suffix(rank) for key in keys] if 0 <= rank < ranks else None

    # ---- files --------------------------------------------------------------------------------------------------

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Writes the tensor under a key to a file of the package ``safetensors``, named like the key by default."""
        from safetensors.torch import save_file

        tensor = self.get_tensor(key)
        if tensor is None:
            return _READ_FAILED
        try:
            save_file({key: tensor}, key if file_name is None else file_name)
        except OSError as error:
            logger.error("tensor %r was not written: %s", key, error)
            return _READ_FAILED
        return 0

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str | None = None) -> torch.Tensor | None:
        """Reads the tensor of that key, else the first one, from a file, and stores it under the key, which is the file's
        name by default. None if there is none."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if file_name is None:
            raise TypeError("file_name is needed")
        try:
            tensors = load_file(file_name)
        except (OSError, SafetensorError) as error:
            logger.error("no tensor was read: %s", error)
            return None
        wanted = file_name if key is None else key
        tensor = tensors.get(wanted, next(iter(tensors.values()), None))
        if tensor is None or self.put_tensor(wanted, tensor) != 0:
            return None
        return tensor
