"""What the other processes of a measurement do: `roles.py ROLE ARGUMENTS`, orders on standard input.

Each answers `ANSWER` and a JSON value when it is ready, and once for every order. It ends with its input.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from cluster import HOST, check, open_store
from costs import private_bytes, threads

Orders = Callable[[str], Any]


def answer(value: Any) -> None:
    print("ANSWER " + json.dumps(value), flush=True)


def segment(master: str, size: int) -> tuple[Any, Orders]:
    """Lends memory."""
    store = open_store(master, size, 16 << 20)
    return None, lambda order: store.close()


def target(size: int) -> tuple[Any, Orders]:
    """Lets a peer write to and read from its memory."""
    from mooncake.engine import TransferEngine

    engine, memory = TransferEngine(), np.zeros(size, np.uint8)
    check(engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0, "initialize")
    check(engine.register_memory(memory.ctypes.data, size) == 0, "register_memory")

    def order(text: str) -> str:
        check(engine.get_rpc_port() > 0, "the engine is alive")
        return hashlib.sha256(memory.data).hexdigest()

    return [f"{HOST}:{engine.get_rpc_port()}", memory.ctypes.data], order


def idle(master: str) -> tuple[Any, Orders]:
    """Is connected, and has made one call."""
    import mooncake.store  # so that its code does not count

    before = private_bytes(os.getpid()), threads(os.getpid())
    store = open_store(master, 0, 16 << 20)
    check(store.is_exist("nothing") == 0, "is_exist")
    after = private_bytes(os.getpid()), threads(os.getpid())
    return [after[0] - before[0], after[1] - before[1]], lambda order: store.close()


def lanes(master: str, lanes: int, batches: int, batch: int, size: int) -> tuple[Any, Orders]:
    """Threads of one client, each of which puts and gets batches of small objects."""
    store, name = open_store(master, 0, 16 << 20), os.getpid()
    source = np.random.default_rng(name).integers(0, 255, (lanes, batch, size), np.uint8)
    target = np.zeros((lanes, batches, batch, size), np.uint8)
    for memory in (source, target):
        check(store.register_buffer(memory.ctypes.data, memory.nbytes) == 0, "register_buffer")

    def lane(at: int, round: str, verb: str, failed: list[str]) -> None:
        for number in range(batches):
            keys = [f"lanes/{name}/{round}/{at}/{number}/{index}" for index in range(batch)]
            base = source[at].ctypes.data if verb == "put" else target[at, number].ctypes.data
            call, want = (store.batch_put_from, 0) if verb == "put" else (store.batch_get_into, size)
            codes = call(keys, [base + index * size for index in range(batch)], [size] * batch)
            if any(code != want for code in codes):
                failed.append(f"{verb} {codes[:3]}")

    def order(text: str) -> list[str]:
        verb, round = text.split()
        failed: list[str] = []
        if verb == "check":
            same = all(np.array_equal(target[at, number], source[at]) for at in range(lanes) for number in range(batches))
            target[:] = 0
            return [] if same else ["other bytes came back"]
        team = [threading.Thread(target=lane, args=(at, round, verb, failed)) for at in range(lanes)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        return failed[:1]

    return None, order


def main() -> None:
    role = {"segment": segment, "target": target, "idle": idle, "lanes": lanes}[sys.argv[1]]
    ready, order = role(**json.loads(sys.argv[2]))
    answer(ready)
    for line in sys.stdin:
        answer(order(line.strip()))
    sys.stdout.flush()
    # Some providers keep threads of their own that nothing ends.
    os._exit(0)


if __name__ == "__main__":
    main()
