"""Layerwise KV-cache store and transfer system for LLM inference.

A cluster is a master, members that lend memory, and members that read and write objects; every :class:`Store` is a
member, and may lend memory as well. For one process there is :func:`serve`::

    import layercake

    with layercake.serve(capacity="256MiB") as cluster:
        store = cluster.store
        store.put("greeting", b"hello")
        assert store.get("greeting") == b"hello"

Objects can be written and read range by range, layer after layer, between one start and one end::

    with store.start_put("block", size=2 * 4096) as session:
        session.write(0, layer_0)
        session.write(4096, layer_1)
    with store.start_get("block") as session:
        session.read_into(4096, layer_1)

Memory of one process is moved to and from memory of another, without a store, by a :class:`TransferEngine`::

    engine = layercake.TransferEngine()
    engine.register(address, size)
    engine.write("host:port", [address], [address_there], [size])

Wherever bytes are passed in or out, an object with the buffer protocol, a numpy array, a torch tensor in host memory or a
tuple ``(address, length)`` will do. Sizes and offsets are bytes, times are seconds. What goes wrong is one of the
exceptions of :mod:`layercake.errors`. No call leaves transfers behind: when it returns or raises, the
memory that it was given is the caller's again.

After a fork, a child of a process that has used this package can not use it: all raises :class:`ForkError`. Start workers by
spawn, or fork before the first use; importing is no use.
"""

from . import errors
from ._native import (
    Cluster,
    GetSession,
    PutSession,
    ReplicateConfig,
    Store,
    Transfer,
    TransferEngine,
    __version__,
    serve,
)
from .errors import *  # noqa: F403

__all__ = [
    "Cluster",
    "GetSession",
    "PutSession",
    "ReplicateConfig",
    "Store",
    "Transfer",
    "TransferEngine",
    "__version__",
    "errors",
    "serve",
    *errors.__all__,
]
