"""Mooncake's transfer engine, on Layercake: memory of one process moved to and from that of another."""

from __future__ import annotations

import enum
import json

from layercake._native import mooncake_engine as _native

InnerTransferEngine = _native.InnerTransferEngine
TransferNotify = _native.TransferNotify


class TransferOpcode(enum.Enum):
    """The direction of a transfer, as seen by the one who asks for it."""

    Read = 0
    Write = 1

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value


Read = TransferOpcode.Read
Write = TransferOpcode.Write


class TransferEngine(_native.TransferEngine):
    __doc__ = _native.TransferEngine.__doc__

    TransferOpcode = TransferOpcode

    def get_engine_ptr(self) -> int:
        """Not supported: use :meth:`get_engine`."""
        raise NotImplementedError(
            "no C++ object lies behind this engine, so there is no pointer to one: use get_engine(), which a store takes as "
            "engine="
        )

    def get_local_topology(self, device_name: str | None = None) -> str:
        """The devices of this host that transfers use, as JSON: its memory, and no network adapter."""
        return json.dumps({"cpu:0": [[], []]}, indent="\t")

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Nothing is to be warmed up without EFA: 0."""
        return 0


# What is built in.
SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False
