"""``mooncake.engine.SharedSegment``: memory that several processes of a host map, made by one of them.

Each process creates its end and gets a blob; all blobs, by rank, complete each end. The owner's object keeps the memory's name:
others can complete while it is there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct

_MAGIC = b"LCSG"
_BLOB = struct.Struct("<4sIIIQQ64s")
_LARGEST = 1 << 46
# What memory is called that owners make: blobs come from other processes, and name nothing else.
_FOLDER = "/dev/shm"
_PATH = re.compile(rb"/dev/shm/layercake_[0-9]+_[0-9a-f]{16}")


class SharedSegment:
    """Made by :meth:`create` only."""

    def __init__(self) -> None:
        raise TypeError("mooncake.engine.SharedSegment: No constructor defined! Use SharedSegment.create")

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Whether such segments can be made: mapped ones, not ones that a device knows."""
        return bool(mmap) and not host_register and os.path.isdir(_FOLDER)

    @classmethod
    def create(
        cls,
        name: str,
        size: int,
        world_size: int,
        rank_id: int,
        owner_rank: int = 0,
        device_id: int = 0,
        mmap: bool = True,
        host_register: bool = False,
    ) -> tuple[SharedSegment, bytes]:
        """Phase one: this process's end, and its blob for :meth:`complete`."""
        if not isinstance(name, str):
            raise TypeError(f"name: a str is needed, not {type(name).__name__}")
        for number, what in ((size, "size"), (world_size, "world_size"), (rank_id, "rank_id"), (owner_rank, "owner_rank")):
            if isinstance(number, bool) or not hasattr(number, "__index__"):
                raise TypeError(f"{what}: an int is needed, not {type(number).__name__}")
        size = size.__index__()
        if host_register:
            raise NotImplementedError("this build moves host memory only: create the segment with host_register=False")
        if not 0 < size <= _LARGEST:
            raise RuntimeError(f"InvalidArgument: Shared segment size must be in (0, {_LARGEST}]")
        if not (0 <= rank_id < world_size < 1 << 32 and 0 <= owner_rank < world_size):
            raise RuntimeError("InvalidArgument: Shared segment rank_id and owner_rank must be below world_size")
        self = object.__new__(cls)
        self._name, self._size = name, -(-size // _page()) * _page()
        self._world, self._rank, self._owner = world_size, rank_id, owner_rank
        self._path, self._map, self._ready, self._maker = b"", None, False, os.getpid()
        if rank_id == owner_rank:
            self._make()
        return self, _BLOB.pack(_MAGIC, world_size, rank_id, owner_rank, self._size, _digest(name), self._path)

    def _make(self) -> None:
        path = f"{_FOLDER}/layercake_{os.getpid()}_{os.urandom(8).hex()}"
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RuntimeError(f"a shared segment can't be made: {error}") from error
        self._path = path.encode()
        try:
            os.posix_fallocate(file, 0, self._size)
            self._map = mmap.mmap(file, self._size)
        except OSError as error:
            self._unlink()
            raise RuntimeError(f"{self._size} bytes of shared memory can't be had: {error}") from error
        finally:
            os.close(file)

    def complete(self, blobs: list[bytes]) -> None:
        """Phase two; blobs are indexed by rank. The owner's object must be there until all have completed."""
        if len(blobs) != self._world:
            raise RuntimeError(f"InvalidArgument: {self._world} blobs are needed, not {len(blobs)}")
        path = b""
        for rank, blob in enumerate(blobs):
            data = blob.encode("latin-1") if isinstance(blob, str) else bytes(blob)
            if len(data) != _BLOB.size:
                raise RuntimeError(f"InvalidArgument: the blob of rank {rank} is none")
            magic, world, of, owner, size, digest, name = _BLOB.unpack(data)
            here = (_MAGIC, self._world, rank, self._owner, self._size, _digest(self._name))
            if (magic, world, of, owner, size, digest) != here:
                raise RuntimeError(f"InvalidArgument: the blob of rank {rank} is of another segment")
            path = name.rstrip(b"\0") if rank == owner else path
        if self._map is None:
            self._attach(path)
        self._ready = True

    def _attach(self, path: bytes) -> None:
        if not _PATH.fullmatch(path):
            raise RuntimeError("InvalidArgument: the owner's blob names no memory of a shared segment")
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise RuntimeError(f"the owner's memory can't be mapped: {error}") from error
        try:
            if os.fstat(file).st_size != self._size:
                raise RuntimeError("the owner's memory is of another size")
            self._map = mmap.mmap(file, self._size)
        finally:
            os.close(file)

    def base_addr(self) -> int:
        """Its address in this process; 0 while there is none."""
        return 0 if self._map is None else ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def device_addr(self) -> int:
        """0: no device maps it."""
        return 0

    def ready(self) -> bool:
        """Whether it is complete."""
        return self._ready

    def size(self) -> int:
        """Bytes: whole pages."""
        return self._size

    def _unlink(self) -> None:
        if self._path:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass
            self._path = b""

    def __del__(self) -> None:
        # A forked child has a copy of its parent's end; the name is the parent's.
        if getattr(self, "_path", b"") and self._maker == os.getpid():
            self._unlink()


def _page() -> int:
    return mmap.PAGESIZE


def _digest(name: str) -> int:
    """A number for a name, the same in each process."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value
