"""Mooncake's transfer engine, on Layercake: memory of one process moved to and from that of another."""

from __future__ import annotations

import enum
import json
from typing import NoReturn

from layercake._native import mooncake_engine as _native
from mooncake._shared_segment import SharedSegment

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "create_rpc_client",
    "create_rpc_server",
]

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


class RpcInterface:
    """Not supported: messages of bytes and tensors between processes. ``transfer_sync(..., notify=TransferNotify(...))``
    moves bytes and tells the peer, whose ``get_notifies()`` gives the message."""

    def __init__(self, *_: object, **__: object) -> None:
        _no_rpc()

    def _refused(self, *_: object, **__: object) -> NoReturn:
        """Not supported: see the class."""
        _no_rpc()

    initialize = initialize_client = initialize_server = start_server = start_server_async = stop_server = _refused
    send_data = send_data_async = send_tensor = send_tensor_async = _refused
    set_data_receive_callback = set_tensor_receive_callback = _refused


CoroRPCInterface = RpcInterface


class ReceivedData:
    """Not supported: what :class:`RpcInterface` receives."""

    def __init__(self, *_: object, **__: object) -> None:
        _no_rpc()

    def _refused(self) -> NoReturn:
        """Not supported: see the class."""
        _no_rpc()

    get_bytes = get_memory_view = _refused
    source_address = data_size = property(_refused)


class ReceivedTensor:
    """Not supported: what :class:`RpcInterface` receives."""

    __init__ = ReceivedData.__init__
    get_data_as_bytes = get_data_size = get_memory_view = ReceivedData._refused
    source_address = dtype = shape = total_bytes = property(ReceivedData._refused)


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Not supported: see :class:`RpcInterface`."""
    _no_rpc()


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Not supported: see :class:`RpcInterface`."""
    _no_rpc()


def _no_rpc() -> NoReturn:
    raise NotImplementedError(
        "the RPC interface is not supported: TransferEngine.transfer_sync(..., notify=TransferNotify(name, msg)) moves "
        "bytes and tells the peer, whose get_notifies() gives the message"
    )


# What is built in.
SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False
