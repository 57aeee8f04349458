"""What concerns the host, not the store: where threads run, and names that need native code which is not there."""

from __future__ import annotations

import ctypes
import os
import pathlib
import platform
from typing import NoReturn

_NODES = pathlib.Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1


def bind_to_numa_node(node: int) -> None:
    """Has the calling thread run on the processors of a node, and take its memory from there if there is some.

    Nothing happens for a node that is not there.
    """
    if isinstance(node, bool) or not isinstance(node, int):
        raise TypeError(f"node: an int is needed, not {type(node).__name__}")
    try:
        text = (_NODES / f"node{node}" / "cpulist").read_text()
        os.sched_setaffinity(0, _processors(text))
    except (OSError, ValueError):
        return
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None:
        words = (ctypes.c_ulong * 16)()
        words[node // 64 % 16] = 1 << node % 64
        # Memory of other nodes does, too: what it answers does not matter.
        ctypes.CDLL(None, use_errno=True).syscall(number, _MPOL_PREFERRED, words, 1024)


def _processors(text: str) -> set[int]:
    """Of a list such as ``0-3,8``."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def get_alloc_func_addr() -> int:
    """Not supported: use ``MooncakeHostMemAllocator().alloc``."""
    return _no_function("alloc")


def get_free_func_addr() -> int:
    """Not supported: use ``MooncakeHostMemAllocator().free``."""
    return _no_function("free")


def _no_function(name: str) -> NoReturn:
    raise NotImplementedError(f"there is no C function to point to: use MooncakeHostMemAllocator().{name}, by address as well")


class MooncakeDistributedNoFRegister:
    """Not supported: there are no NVMe-over-Fabrics segments here. Lend memory with ``MooncakeDistributedStore.setup``."""

    def real_register(
        self, local_hostname: str, port: int, endpoint: str, base: int, size: int, block: int, master: str, /
    ) -> int:
        """Raises ``NotImplementedError``."""
        _no_fabrics()

    def real_unregister_by_endpoint(self, local_hostname: str, port: int, endpoint: str, base: int, master: str, /) -> int:
        """Raises ``NotImplementedError``."""
        _no_fabrics()


def _no_fabrics() -> NoReturn:
    raise NotImplementedError(
        "NVMe over Fabrics is not supported: lend memory with MooncakeDistributedStore.setup(global_segment_size=...)"
    )
