"""Embedding tables in the store: one object a head, rows looked up by number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_ITEM_BYTES = 4


@dataclass
class EngramStoreConfig:
    """Rows of each head's table, and elements of a row."""

    table_vocab_sizes: list[int] = field(default_factory=lambda: [1024])
    embedding_dim: int = 64


class EngramStore:
    """The tables of one layer, each of float32 rows."""

    def __init__(self, layer_id: int, config: EngramStoreConfig, store: Any = None):
        self._rows = [int(rows) for rows in config.table_vocab_sizes]
        self._dim = int(config.embedding_dim)
        if not self._rows or min(self._rows) <= 0 or self._dim <= 0:
            raise RuntimeError(f"tables of {self._rows} rows of {self._dim} elements: at least one of each is needed")
        self._keys = [f"engram:l{layer_id}:h{head}" for head in range(len(self._rows))]
        self._store = store

    def get_store_keys(self) -> list[str]:
        """The key of each head's table."""
        return list(self._keys)

    def get_num_heads(self) -> int:
        """Tables, one a head."""
        return len(self._rows)

    def get_embedding_dim(self) -> int:
        """Elements of a row."""
        return self._dim

    def get_table_vocab_sizes(self) -> list[int]:
        """Rows of each table."""
        return list(self._rows)

    def populate(self, embedding_buffers: list) -> None:
        """Stores the tables: a float32 array of rows for each head."""
        import numpy as np

        store = self._needed()
        if len(embedding_buffers) != len(self._keys):
            raise RuntimeError("embedding_buffers size must match num_heads")
        tables = []
        for table, rows in zip(embedding_buffers, self._rows, strict=True):
            if not isinstance(table, np.ndarray):
                raise RuntimeError("embedding_buffers must be NumPy arrays")
            if table.dtype != np.float32 or table.size != rows * self._dim:
                raise RuntimeError(f"a table of {rows} rows of {self._dim} float32 is needed, not {table.dtype} {table.shape}")
            tables.append(np.ascontiguousarray(table))
        codes = store.batch_put_from(self._keys, [table.ctypes.data for table in tables], [table.nbytes for table in tables])
        if any(codes):
            raise RuntimeError(f"the tables were not stored: {codes}")

    def lookup(self, row_ids: Any) -> np.ndarray:
        """The rows of these numbers, of shape [B, L, H]: [B, L, H, D]."""
        import numpy as np

        store = self._needed()
        ids = np.asarray(row_ids)
        if ids.ndim != 3 or ids.shape[2] != len(self._keys) or ids.dtype.kind not in "iu":
            raise RuntimeError("row_ids array must have shape [B, L, H]")
        if ((ids < 0) | (ids >= np.array(self._rows))).any():
            raise RuntimeError("EngramStore lookup failed: a row is beyond its table")
        found = np.empty((*ids.shape, self._dim), dtype=np.float32)
        if ids.size:
            self._read(store, ids, found)
        return found

    def _read(self, store: Any, ids: np.ndarray, found: np.ndarray) -> None:
        import numpy as np

        row = self._dim * _ITEM_BYTES
        heads = range(len(self._keys))
        places = np.arange(ids.size, dtype=np.uint64).reshape(ids.shape) * row
        per_head = ids.shape[0] * ids.shape[1]
        targets = [[(places[:, :, head].ravel()).tolist() for head in heads]]
        sources = [[(ids[:, :, head].ravel().astype(np.uint64) * row).tolist() for head in heads]]
        sizes = [[[row] * per_head for _ in heads]]
        if store.register_buffer(found.ctypes.data, found.nbytes) != 0:
            raise RuntimeError("EngramStore lookup failed: the result could not be registered")
        try:
            read = store.get_into_ranges([found.ctypes.data], [self._keys], targets, sources, sizes)
        finally:
            store.unregister_buffer(found.ctypes.data)
        if any(code != row for codes in read[0] for code in codes):
            raise RuntimeError("EngramStore lookup failed")

    def remove_from_store(self, force: bool = False) -> int:
        """Removes the tables; how many were there."""
        return sum(code == 0 for code in self._needed().batch_remove(self._keys, force))

    def _needed(self) -> Any:
        if self._store is None:
            raise RuntimeError("EngramStore lookup failed: it was made without a store")
        return self._store
