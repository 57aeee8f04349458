"""What a batch call of the drop-in costs besides moving bytes: rows of 64 bytes from lists and from numpy arrays.

    python bench/dropin.py [ROUNDS]

Prints microseconds a call, the best of several rounds, for memory in this process. "per row" is what each further
row costs. Range calls are measured with every row in one session's object (`one object`) and in one object each
(`an object a row`); the other calls have an object a row.
"""

from __future__ import annotations

import sys

import layercake
import numpy as np
from calls import ROWS, SIZE, best
from mooncake.store import MooncakeDistributedStore


def show(call: str, shape: str, source: str, seconds: list[float]) -> None:
    per_row = (seconds[-1] - seconds[0]) / (ROWS[-1] - ROWS[0])
    cells = " ".join(f"{each * 1e6:>12.1f}" for each in seconds)
    print(f"{call:<22} {shape:<16} {source:<6} {cells} {per_row * 1e6:>9.2f}", flush=True)


def table(base: int, objects: int, each: int, source: str) -> list:
    """Addresses, sizes and offsets, a row for each object."""
    offsets = np.arange(objects * each, dtype=np.uint64).reshape(objects, each) * np.uint64(SIZE)
    arguments = [offsets + np.uint64(base), np.full((objects, each), SIZE, dtype=np.uint64), offsets % np.uint64(each * SIZE)]
    return [argument.tolist() for argument in arguments] if source == "list" else arguments


def ranges(store: MooncakeDistributedStore, base: int, shape: str, source: str, rounds: int) -> None:
    lines = {"write ranges": [], "read ranges": []}
    for rows in ROWS:
        objects = 1 if shape == "one object" else rows
        each, repeat = rows // objects, max(1, 2000 // rows)
        keys = [f"{shape}/{source}/{rows}/{index}" for index in range(objects)]
        arguments = table(base, objects, each, source)
        assert store.batch_put_session_start(keys, [each * SIZE] * objects) == [0] * objects
        write = lambda: store.batch_put_from_multi_buffer_ranges(keys, *arguments)  # noqa: E731
        lines["write ranges"].append(best(write, rounds, repeat))
        assert write() == [each * SIZE] * objects
        assert store.batch_put_session_end(keys) == [0] * objects
        assert store.batch_get_session_start(keys) == [0] * objects
        read = lambda: store.batch_get_into_multi_buffer_ranges(keys, *arguments)  # noqa: E731
        lines["read ranges"].append(best(read, rounds, repeat))
        assert read() == [each * SIZE] * objects
        store.batch_get_session_end(keys)
    for call, seconds in lines.items():
        show(call, shape, source, seconds)


def whole(store: MooncakeDistributedStore, base: int, source: str, rounds: int) -> None:
    lines = {"put multi buffers": [], "get multi buffers": [], "get into": [], "exists": [], "exists, none there": []}
    for rows in ROWS:
        repeat = max(1, 200 // rows)
        addresses, sizes, _ = table(base, rows, 1, source)
        flat = [addresses[at][0] for at in range(rows)], [SIZE] * rows
        if source == "numpy":
            flat = np.ascontiguousarray(addresses[:, 0]), np.ascontiguousarray(sizes[:, 0])
        count = iter(range(1 << 30))

        def put(rows=rows, addresses=addresses, sizes=sizes, count=count):
            turn = next(count)
            store.batch_put_from_multi_buffers([f"{turn}/{source}/{rows}/{index}" for index in range(rows)], addresses, sizes)

        lines["put multi buffers"].append(best(put, rounds, repeat))
        keys = [f"0/{source}/{rows}/{index}" for index in range(rows)]
        get = lambda: store.batch_get_into_multi_buffers(keys, addresses, sizes)  # noqa: E731
        lines["get multi buffers"].append(best(get, rounds, repeat))
        assert get() == [SIZE] * rows
        lines["get into"].append(best(lambda: store.batch_get_into(keys, *flat), rounds, repeat))
        lines["exists"].append(best(lambda: store.batch_is_exist(keys), rounds, repeat))
        missing = [f"none/{key}" for key in keys]
        lines["exists, none there"].append(best(lambda: store.batch_is_exist(missing), rounds, repeat))
        store.remove_all(True)
    for call, seconds in lines.items():
        show(call, "an object a row", source, seconds)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    memory = np.zeros(max(ROWS) * SIZE, dtype=np.uint8)
    with layercake.serve() as cluster:
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 30, 0, "tcp", "", cluster.master) == 0
        assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        print(f"{'call':<22} {'shape':<16} {'from':<6} " + " ".join(f"{rows:>7} rows" for rows in ROWS) + "   per row")
        for source in ("list", "numpy"):
            for shape in ("one object", "an object a row"):
                ranges(store, memory.ctypes.data, shape, source, rounds)
            whole(store, memory.ctypes.data, source, rounds)
        assert store.close() == 0


if __name__ == "__main__":
    main()
