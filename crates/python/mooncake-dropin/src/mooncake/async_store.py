"""The store for asyncio: every call ``name`` is there as the coroutine ``async_name``, too."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from mooncake.store import MooncakeDistributedStore


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """A store whose calls can be awaited: ``await store.async_get(key)``.

    Each runs in the event loop's default pool of threads, which the calls of a store don't block for one another.
    """

    def __getattr__(self, name: str) -> Any:
        call = None
        if name.startswith("async_") and not name.startswith("async__"):
            call = getattr(type(self), name.removeprefix("async_"), None)
        if not callable(call):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        bound = getattr(self, name.removeprefix("async_"))

        @functools.wraps(bound)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(bound, *args, **kwargs)

        return awaited
