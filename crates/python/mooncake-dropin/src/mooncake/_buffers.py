"""Memory for the zero-copy calls: pools of registered buffers, and page-aligned host memory.

A pool takes regions from the system, registers each with its store once, and lends parts of them. Sizes are rounded up to
powers of two, its size classes, so that what comes back fits what is asked for next.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from typing import Any

from layercake.errors import ForkError


class MooncakeHostMemAllocator:
    """Page-aligned host memory by address, in the way of ``malloc`` and ``free``: what is not freed stays, also when the
    allocator is gone."""

    def alloc(self, size: int, /) -> int:
        """The address of ``size`` bytes of zeros."""
        block = Block(_size(size))
        _allocated[block.address] = block
        return block.address

    def free(self, address: int, /) -> int:
        """Frees what :meth:`alloc` gave: 0, or -1 if it is no such address."""
        return -1 if _allocated.pop(address, None) is None else 0


class Block:
    """Page-aligned memory of this process, freed when nobody has it or a view of it any more."""

    def __init__(self, size: int):
        if size == 0:
            raise RuntimeError("0 bytes can't be allocated: at least 1 is needed")
        try:
            # Private: after a fork, what a child writes is its own.
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise RuntimeError(f"{size} bytes can't be allocated: {error}") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size = size

    def view(self, start: int, size: int) -> memoryview:
        return memoryview(self._map)[start : start + size]

    def is_viewed(self) -> bool:
        """Whether somebody has a view of it, or something that stands on one."""
        try:
            # A map is refused another size while it is exported, and this one it has already.
            self._map.resize(self.size)
        except BufferError:
            return True
        return False


# Codes that say that a buffer is not registered: not any more, or its store was closed and knows no buffers.
_CLOSED = 1

# Memory that could not be unregistered.
_stuck: list[Block] = []

# What allocators gave out, by address.
_allocated: dict[int, Block] = {}


def _size(size: Any, name: str = "size") -> int:
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"{name}: an int is needed, not {type(size).__name__}")
    size = size.__index__()
    if not 0 <= size < 1 << 64:
        raise TypeError(f"{name}: an int from 0 to 2**64 - 1 is needed, not {size}")
    return size


class BufferLeaseView:
    """A buffer of a lease, with its lease."""

    def __init__(self, lease: BufferLease):
        self._lease = lease

    @property
    def buffer(self) -> memoryview:
        return self._lease.buffer


class BufferLease:
    """A registered buffer, lent by a :class:`BufferPool` until it is released. As a context manager it is released when the
    block is left."""

    def __init__(self, pool: BufferPool, region: _Region, size: int):
        self._region = region
        self._size = size
        self._pid = os.getpid()
        # Memory whose lease was forgotten goes back, too.
        self._back = weakref.finalize(self, pool._give_back, region)

    def _open(self) -> _Region:
        _check_process(self._pid)
        if not self._back.alive:
            raise RuntimeError("buffer lease is closed")
        return self._region

    @property
    def ptr(self) -> int:
        """Its address."""
        return self._open().block.address

    @property
    def size(self) -> int:
        """Bytes that were asked for."""
        return self._size

    @property
    def buffer(self) -> memoryview:
        """Its bytes, to read and to write. The lease can't be released before all views of them."""
        return self._open().block.view(0, self._size)

    def release(self) -> None:
        """Gives the buffer back. Repeating it is harmless.

        Raises:
            RuntimeError: There are views of its bytes, arrays on them included.
        """
        _check_process(self._pid)
        if self._back.alive and self._region.block.is_viewed():
            raise RuntimeError("cannot release buffer while exported views exist")
        self._back()

    def __enter__(self) -> BufferLease:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Region:
    """Memory registered with a store."""

    def __init__(self, store: Any, size: int):
        self.block = Block(size)
        code = store.register_buffer(self.block.address, size)
        if code != 0:
            raise RuntimeError(f"{size} bytes could not be registered with the store: {code}")


class BufferPool:
    """Registered buffers for a store's zero-copy calls.

    Args:
        store: A ``MooncakeDistributedStore`` that is set up.
        max_bytes: Most bytes that the pool holds; 0: no limit.
        min_size_class: Smallest size that is taken from the system.
        max_size_class: Largest size that is lent; None: no limit but ``max_bytes``.
        alignment: A power of two. Addresses are aligned to pages, whatever it says.
        block_on_exhaustion: Whether :meth:`acquire` waits for a buffer to come back if all are lent.
        default_timeout: Seconds that it waits; None: for ever.
        max_regions: Most buffers that the pool holds.
        prewarm_size, prewarm_count: Buffers to make at once.
    """

    def __init__(
        self,
        store: Any,
        max_bytes: int = 0,
        min_size_class: int = 65536,
        max_size_class: int | None = None,
        alignment: int = 8388608,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ):
        if not hasattr(store, "register_buffer"):
            raise RuntimeError(f"store: a MooncakeDistributedStore is needed, not {type(store).__name__}")
        if store.health_check() == 1:
            raise RuntimeError("MooncakeDistributedStore is not initialized")
        if _size(alignment, "alignment").bit_count() != 1:
            raise RuntimeError(f"alignment: a power of two is needed, not {alignment}")
        self._store = store
        self._pid = os.getpid()
        self._max_bytes = _size(max_bytes, "max_bytes")
        self._least = max(_size(min_size_class, "min_size_class"), 1)
        self._most = None if max_size_class is None else max(_size(max_size_class, "max_size_class"), self._least)
        self._block = bool(block_on_exhaustion)
        self._timeout = _seconds(default_timeout)
        self._max_regions = None if max_regions is None else _size(max_regions, "max_regions")
        # Guards the rest. A lease that the collector finds may be given back in the middle of any line.
        self._changed = threading.Condition(threading.RLock())
        self._free: dict[int, list[_Region]] = {}
        # Came back with views of them, and are not lent before those are gone.
        self._viewed: list[_Region] = []
        self._bytes = self._regions = self._lent = 0
        self._closed = False
        if prewarm_size is not None:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """Lends a buffer of at least ``size`` bytes.

        Raises:
            RuntimeError: It is larger than the pool may be, or all are lent, or the pool is closed.
        """
        _check_process(self._pid)
        size = _size(size)
        wanted = self._class_of(size)
        wait = self._block if block is None else bool(block)
        seconds = self._timeout if timeout is None else _seconds(timeout)
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                region = self._take(wanted)
                if region is not None:
                    self._lent += 1
                    return BufferLease(self, region, size)
                left = None if end is None else end - time.monotonic()
                if not wait or (left is not None and left <= 0):
                    raise RuntimeError(f"all buffers are lent: {self._bytes} bytes in {self._regions} of them")
                self._changed.wait(left)

    buffer = acquire

    def prewarm(self, size: int, count: int) -> None:
        """Makes ``count`` buffers of ``size`` bytes, so that lending them takes no time."""
        _check_process(self._pid)
        wanted = self._class_of(_size(size))
        with self._changed:
            for _ in range(_size(count, "count") - len(self._free.get(wanted, []))):
                region = self._make(wanted)
                if region is None:
                    raise RuntimeError("the buffers are more than the pool may hold")
                self._free.setdefault(wanted, []).append(region)

    def close(self) -> None:
        """Frees all buffers. Repeating it is harmless.

        Raises:
            RuntimeError: Buffers are lent.
        """
        _check_process(self._pid)
        with self._changed:
            if self._lent:
                raise RuntimeError(f"cannot close buffer pool with active leases: {self._lent} are lent")
            self._closed = True
            self._drop_free()

    def _class_of(self, size: int) -> int:
        wanted = max(1 << max(size - 1, 0).bit_length(), self._least)
        limit = min(filter(None, (self._most, self._max_bytes)), default=None)
        if limit is not None and wanted > limit:
            if size > limit:
                raise RuntimeError("requested buffer size exceeds pool capacity")
            wanted = limit
        return wanted

    def _take(self, size: int) -> _Region | None:
        if self._closed:
            raise RuntimeError("the buffer pool is closed")
        self._sort_viewed()
        free = self._free.get(size)
        return free.pop() if free else self._make(size)

    def _make(self, size: int) -> _Region | None:
        """A new buffer; free ones of other sizes go if there is no room beside them."""
        if self._is_full(size):
            self._drop_free()
            if self._is_full(size):
                return None
        region = _Region(self._store, size)
        self._bytes += size
        self._regions += 1
        return region

    def _is_full(self, size: int) -> bool:
        too_many = self._max_regions is not None and self._regions >= self._max_regions
        return too_many or bool(self._max_bytes and self._bytes + size > self._max_bytes)

    def _sort_viewed(self) -> None:
        viewed, self._viewed = self._viewed, []
        for region in viewed:
            if region.block.is_viewed():
                self._viewed.append(region)
            else:
                self._free.setdefault(region.block.size, []).append(region)

    def _drop_free(self) -> None:
        # A lease may come back in between, and then it stays.
        free, self._free = self._free, {}
        viewed, self._viewed = (self._viewed, []) if self._closed else ([], self._viewed)
        for region in (*viewed, *(region for regions in free.values() for region in regions)):
            code = self._store.unregister_buffer(region.block.address)
            if code != 0 and self._store.health_check() != _CLOSED:
                # Transfers may still touch it: it is neither lent nor freed.
                _stuck.append(region.block)
            self._bytes -= region.block.size
            self._regions -= 1

    def _give_back(self, region: _Region) -> None:
        if self._pid != os.getpid():
            return
        with self._changed:
            self._lent -= 1
            self._viewed.append(region)
            self._sort_viewed()
            self._changed.notify_all()

    def __del__(self) -> None:
        if getattr(self, "_pid", None) == os.getpid() and hasattr(self, "_viewed"):
            self._closed = True
            self._drop_free()


def _check_process(pid: int) -> None:
    if pid != os.getpid():
        raise ForkError("the buffer pool was made before a fork, and is its parent's: make one in this process")


def _seconds(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise TypeError(f"timeout: seconds are needed, 0 or more, not {timeout!r}")
    return float(timeout)


RegisteredBufferPool = BufferPool
RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView
