"""How a tensor lies in an object: a header of 304 bytes, then its elements in C order.

The layout is Mooncake's, so that buffers made for its ``*_from`` calls, and filled by its ``*_into`` calls, mean the same
here. All numbers are little-endian::

    0    4s   "NOOM"
    4    u16  version, 1
    6    u16  bytes of the header, 304
    8    u32  element type
    12   u32  dimensions, at most 8
    16   u32  1: a shard of a larger tensor
    20   u32  0
    24   u64  where the elements begin, 304
    32   u64  bytes of the elements
    40   8 x i64  shape of the whole tensor; -1 where there is no dimension
    104  8 x i64  shape of what is here
    168  u32  axes, at most 4; u32 0
    176  4 x axis: u32 kind, index, rank, size; i32 split dimension or -1; u32 expert or stage; u32 length
    288  16 x 0

torch is imported when a tensor is first met, not with this module.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layercake._native import mooncake_engine as _native

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 304
_MAGIC = b"NOOM"
_MANIFEST_MAGIC = b"NAMW"
_VERSION = 1
_MAX_DIMENSIONS = 8
_MAX_AXES = 4
_FIXED = struct.Struct("<4sHHIIIIQQ")
_SHAPE = struct.Struct("<8q")
_AXES = struct.Struct("<II")
_AXIS = struct.Struct("<IIIIiII")
_MANIFEST = struct.Struct("<4sHHIIIIQ")
MANIFEST_BYTES = _MANIFEST.size + _SHAPE.size

# Element types by code: their names in torch.
_DTYPES = (
    "float32",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
)
_ITEM_BYTES = (4, 8, 1, 1, 2, 2, 4, 4, 8, 8, 1, 2, 2, 1, 1)


class NotATensor(ValueError):
    """What is there is no tensor in this layout, or no tensor that it can hold."""


@dataclass(frozen=True)
class Axis:
    """One way in which a tensor is a part of something larger."""

    kind: int
    rank: int
    size: int
    split_dim: int = -1
    part: int = 0
    length: int = 0


@dataclass(frozen=True)
class Header:
    """What the header of a tensor says."""

    dtype: int
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[Axis, ...] = ()

    @property
    def is_shard(self) -> bool:
        return bool(self.axes)

    @property
    def elements(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def data_bytes(self) -> int:
        return self.elements * _ITEM_BYTES[self.dtype]

    def pack(self) -> bytes:
        fixed = (_MAGIC, _VERSION, HEADER_BYTES, self.dtype, len(self.shape), int(self.is_shard), 0)
        axes = b"".join(
            _AXIS.pack(axis.kind, index, axis.rank, axis.size, axis.split_dim, axis.part, axis.length)
            for index, axis in enumerate(self.axes)
        )
        packed = (
            _FIXED.pack(*fixed, HEADER_BYTES, self.data_bytes)
            + _pack_shape(self.whole)
            + _pack_shape(self.shape)
            + _AXES.pack(len(self.axes), 0)
            + axes
        )
        return packed.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header:
        """Reads a header; the bytes may go on behind it."""
        if len(data) < HEADER_BYTES:
            raise NotATensor(f"{len(data)} bytes are less than the {HEADER_BYTES} of a tensor's header")
        magic, version, size, dtype, dimensions, _, _, start, length = _FIXED.unpack_from(data)
        if (magic, version, size, start) != (_MAGIC, _VERSION, HEADER_BYTES, HEADER_BYTES):
            raise NotATensor("the bytes don't begin with a tensor's header")
        if dtype >= len(_DTYPES) or dimensions > _MAX_DIMENSIONS:
            raise NotATensor(f"element type {dtype} in {dimensions} dimensions: 15 types and 8 dimensions are known")
        count, _ = _AXES.unpack_from(data, 168)
        if count > _MAX_AXES:
            raise NotATensor(f"{count} axes: at most {_MAX_AXES} are known")
        axes = []
        for index in range(count):
            kind, _, rank, ranks, split_dim, part, extent = _AXIS.unpack_from(data, 176 + index * _AXIS.size)
            axes.append(Axis(kind, rank, ranks, split_dim, part, extent))
        header = cls(dtype, _unpack_shape(data, 40, dimensions), _unpack_shape(data, 104, dimensions), tuple(axes))
        if header.data_bytes != length:
            raise NotATensor(f"{length} bytes are no {_DTYPES[dtype]} tensor of shape {header.shape}")
        return header


def _pack_shape(shape: Sequence[int]) -> bytes:
    return _SHAPE.pack(*shape, *[-1] * (_MAX_DIMENSIONS - len(shape)))


def _unpack_shape(data: bytes | memoryview, at: int, dimensions: int) -> tuple[int, ...]:
    shape = _SHAPE.unpack_from(data, at)[:dimensions]
    if any(length < 0 for length in shape):
        raise NotATensor(f"{shape} is no shape")
    return shape


@dataclass(frozen=True)
class Manifest:
    """Of what kind the shards under a key are."""

    dtype: int
    split_dim: int
    size: int
    whole: tuple[int, ...]

    def pack(self) -> bytes:
        fixed = (_MANIFEST_MAGIC, _VERSION, MANIFEST_BYTES, self.dtype, len(self.whole), self.split_dim, self.size, 0)
        return _MANIFEST.pack(*fixed) + _pack_shape(self.whole)

    @classmethod
    def unpack(cls, data: bytes) -> Manifest | None:
        if len(data) != MANIFEST_BYTES:
            return None
        magic, version, size, dtype, dimensions, split_dim, shards, _ = _MANIFEST.unpack_from(data)
        if (magic, version, size) != (_MANIFEST_MAGIC, _VERSION, MANIFEST_BYTES):
            return None
        if dtype >= len(_DTYPES) or not split_dim < dimensions <= _MAX_DIMENSIONS or not shards:
            return None
        return cls(dtype, split_dim, shards, _unpack_shape(data, _MANIFEST.size, dimensions))


def tensor_of(obj: Any) -> torch.Tensor:
    """The object, in host memory and in C order, if it is a tensor that can be stored."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor):
        raise NotATensor(f"a torch tensor is needed, not {type(obj).__name__}")
    if dtype_code(obj) is None:
        raise NotATensor(f"tensors of {obj.dtype} can't be stored")
    if obj.dim() > _MAX_DIMENSIONS:
        raise NotATensor(f"a tensor of {obj.dim()} dimensions: at most {_MAX_DIMENSIONS} can be stored")
    return obj.detach().cpu().contiguous()


def dtype_code(tensor: torch.Tensor) -> int | None:
    """The code of a tensor's element type."""
    name = str(tensor.dtype).removeprefix("torch.")
    return _DTYPES.index(name) if name in _DTYPES else None


def header_of(tensor: torch.Tensor, axes: Sequence[Axis] = (), whole: Sequence[int] | None = None) -> Header:
    """The header of a tensor that :func:`tensor_of` gave."""
    code = dtype_code(tensor)
    assert code is not None, "checked by tensor_of"
    shape = tuple(tensor.shape)
    return Header(code, shape if whole is None else tuple(whole), shape, tuple(axes))


def tensor_in(buffer: Any, header: Header) -> torch.Tensor:
    """The tensor that begins with its header in a buffer; it shares the buffer's memory."""
    import torch

    dtype = getattr(torch, _DTYPES[header.dtype])
    if not header.elements:
        return torch.empty(header.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=header.elements, offset=HEADER_BYTES).reshape(header.shape)


def memory_at(address: int, size: int) -> ctypes.Array:
    """Memory of this process as a buffer. The caller vouches for it."""
    return (ctypes.c_ubyte * size).from_address(address)


def header_at(address: int, size: int) -> Header:
    """The header of the tensor at an address; all of the tensor must lie within ``size``."""
    if size < HEADER_BYTES:
        raise NotATensor(f"{size} bytes are less than the {HEADER_BYTES} of a tensor's header")
    header = Header.unpack(_native.TransferEngine.read_bytes_from_buffer(address, HEADER_BYTES))
    if HEADER_BYTES + header.data_bytes > size:
        raise NotATensor(f"the tensor's {HEADER_BYTES + header.data_bytes} bytes are more than {size}")
    return header


def shards_of(tensor: torch.Tensor, size: int, split_dim: int) -> list[torch.Tensor]:
    """Equal parts of a tensor along a dimension."""
    if not 0 <= split_dim < tensor.dim():
        raise NotATensor(f"a tensor of {tensor.dim()} dimensions has no dimension {split_dim}")
    if tensor.shape[split_dim] % size:
        raise NotATensor(f"{tensor.shape[split_dim]} can't be split into {size} equal parts")
    return [shard.contiguous() for shard in tensor.chunk(size, split_dim)] if tensor.shape[split_dim] else [tensor] * size
