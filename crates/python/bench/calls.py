"""What a batch call costs besides moving bytes: rows of 64 bytes from lists and from numpy arrays.

    python bench/calls.py [ROUNDS]

Prints microseconds a call, the best of several rounds, for memory in this process. "per row" is what each further
row costs. The same table is written with every row in one session's object (`one object`) and in one object each
(`an object a row`).
"""

from __future__ import annotations

import sys
import time

import numpy as np

import layercake

ROWS = (1, 64, 2048)
SIZE = 64


def best(call, rounds: int, repeat: int) -> float:
    """Seconds that a call takes, undisturbed."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(repeat):
            call()
        times.append((time.perf_counter() - started) / repeat)
    return min(times)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    memory = np.zeros(max(ROWS) * SIZE, dtype=np.uint8)
    base = memory.ctypes.data
    with layercake.serve(capacity="256MiB") as cluster:
        store = cluster.store
        store.register_buffer(base, memory.nbytes)
        print(f"{'call':<12} {'shape':<16} {'from':<6} " + " ".join(f"{rows:>7} rows" for rows in ROWS) + "   per row")
        for shape in ("one object", "an object a row"):
            for source in ("list", "numpy"):
                lines = {"write": [], "read": []}
                for rows in ROWS:
                    objects = 1 if shape == "one object" else rows
                    keys = [f"{shape}/{source}/{rows}/{index}" for index in range(objects)]
                    each = rows // objects
                    puts = store.start_puts(keys, [each * SIZE] * objects)
                    table = np.arange(rows, dtype=np.uint64).reshape(objects, each) * np.uint64(SIZE)
                    addresses = table + np.uint64(base)
                    offsets = table % np.uint64(each * SIZE)
                    sizes = np.full((objects, each), SIZE, dtype=np.uint64)
                    arguments = [addresses, sizes, offsets]
                    if source == "list":
                        arguments = [argument.tolist() for argument in arguments]
                    repeat = max(1, 2000 // rows)
                    lines["write"].append(best(lambda: store.write_ranges(puts, *arguments), rounds, repeat))
                    assert store.end_puts(puts) == [None] * objects
                    gets = store.start_gets(keys)
                    lines["read"].append(best(lambda: store.read_ranges(gets, *arguments), rounds, repeat))
                    store.end_gets(gets)
                for call, seconds in lines.items():
                    per_row = (seconds[-1] - seconds[0]) / (ROWS[-1] - ROWS[0])
                    cells = " ".join(f"{each * 1e6:>12.1f}" for each in seconds)
                    print(f"{call:<12} {shape:<16} {source:<6} {cells} {per_row * 1e6:>9.2f}")
        for rows in ROWS:
            keys = [f"none/{index}" for index in range(rows)]
            seconds = best(lambda: store.exists_many(keys), rounds, max(1, 1000 // rows))
            print(f"{'exists_many':<12} {'':<16} {'list':<6} {rows:>7} rows: {seconds * 1e6:.1f} us")


if __name__ == "__main__":
    main()
