"""Pools of registered buffers: the names of :mod:`mooncake.store` in a module of their own."""

from mooncake.store import BufferPool, RegisteredBufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
