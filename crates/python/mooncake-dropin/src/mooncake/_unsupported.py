"""Calls of Mooncake's store that Layercake has no counterpart for: they exist, and say what to use."""

from __future__ import annotations

from typing import Any, NoReturn


class UnsupportedCalls:
    """Mixed into the store."""

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int, /) -> int:
        """Not supported: use :meth:`setup`."""
        _use("setup(local_hostname, metadata_server, global_segment_size, ...)", "init_all")

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Not supported: every process is a client of its own, with :meth:`setup`."""
        _use("setup(..., global_segment_size=0) in each process", "setup_dummy")

    def alloc_from_mem_pool(self, size: int, /) -> int:
        """Not supported: there is no pool that a client lends from. Use ``BufferPool``."""
        _use("BufferPool(store).acquire(size).ptr", "alloc_from_mem_pool")

    def mount_segment(self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = "") -> dict[str, Any]:
        """Not supported: a client lends what :meth:`setup` is told."""
        _use("setup(global_segment_size=...)", "mount_segment")

    def allocate_and_mount_segment(self, size: int, protocol: str = "tcp", location: str = "") -> dict[str, Any]:
        """Not supported: a client lends what :meth:`setup` is told. Another client can lend more."""
        _use("setup(global_segment_size=...), or a second client", "allocate_and_mount_segment")

    def unmount_segment(self, segment_ids: list[str], grace_period_seconds: int = 0) -> int:
        """Not supported: :meth:`close` withdraws what the client lends."""
        _use("close()", "unmount_segment")

    def unmount_and_free_segment(self, segment_ids: list[str], grace_period_seconds: int = 0) -> int:
        """Not supported: :meth:`close` withdraws what the client lends."""
        _use("close()", "unmount_and_free_segment")

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Not supported: there are no disk segments."""
        raise NotImplementedError("unmount_local_disk_segment: there are no disk segments, so there is none to unmount")

    def get_offload_rpc_read_count(self) -> int:
        """Reads that a disk answered: 0, since there are none."""
        return 0

    def _get_pyclient_capsule(self) -> object:
        raise NotImplementedError("no C++ object lies behind this store: pass the store itself")


def _use(instead: str, name: str) -> NoReturn:
    raise NotImplementedError(f"{name} is not supported: use {instead}")
