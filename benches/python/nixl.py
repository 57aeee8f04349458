"""The scenario `engine` on NIXL (UCX, from memory to memory of two processes), with the figures of `measure.py`.

    python nixl.py [--short] [--repeat N]

Needs `nixl-cu12` and numpy. The peer process plays its role by `--target`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from costs import Meter
from measure import FULL, SHORT, end_all_after, rounds
from scenarios import SMALL, Round, same


def agent(name: str) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def target(size: int) -> None:
    """Offers memory, and tells what lies in it when asked."""
    nixl, memory = agent("target"), np.zeros(size, np.uint8)
    nixl.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    metadata = base64.b64encode(nixl.get_agent_metadata()).decode()
    print("ANSWER " + json.dumps([metadata, memory.ctypes.data]), flush=True)
    for _ in sys.stdin:
        print("ANSWER " + json.dumps(hashlib.sha256(memory.data).hexdigest()), flush=True)
    os._exit(0)


class Target:
    def __init__(self, size: int) -> None:
        command = [sys.executable, __file__, "--target", str(size)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)

    def answer(self) -> Any:
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        sys.exit("the target ended early")

    def sum(self) -> str:
        self.process.stdin.write("sum\n")
        self.process.stdin.flush()
        return self.answer()


def engine(child: Target, size: argparse.Namespace, meter: Meter) -> Round:
    metadata, base = child.answer()
    nixl = agent("initiator")
    source = np.random.default_rng(7).integers(0, 255, (size.target // size.page, size.page), np.uint8)
    back = np.zeros_like(source)
    for each in (source, back):
        nixl.register_memory([(each.ctypes.data, each.nbytes, 0, "")], "DRAM")
    remote = nixl.add_remote_agent(base64.b64decode(metadata))
    order = np.random.default_rng(8).permutation(len(source))
    far = [base + int(place) * size.page for place in order]
    placed = np.empty_like(source)
    placed[order] = source
    want = hashlib.sha256(placed.data).hexdigest()

    def transfer(operation: str, near: Any, there: Any) -> None:
        handle = nixl.initialize_xfer(operation, near, there, remote, b"")
        state = nixl.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = nixl.check_xfer_state(handle)
        if state != "DONE":
            sys.exit(f"a transfer ended as {state}")
        nixl.release_xfer_handle(handle)

    def pieces(places: list[int], length: int) -> Any:
        return nixl.get_xfer_descs([(place, length, 0) for place in places], "DRAM")

    def round(number: int) -> None:
        back[:] = 0
        from_, to = ([at.ctypes.data for at in of] for of in (source, back))
        near, into, there = pieces(from_, size.page), pieces(to, size.page), pieces(far, size.page)
        with meter("write", "piece", len(far), size.page):
            transfer("WRITE", near, there)
        if child.sum() != want:
            sys.exit("other bytes arrived than were sent")
        with meter("read", "piece", len(far), size.page):
            transfer("READ", into, there)
        same(back, source, "engine")
        near, there = pieces(from_[:1], SMALL), pieces(far[:1], SMALL)
        with meter("write 4 KiB", "call", size.small) as single:
            for _ in range(size.small):
                start = time.perf_counter()
                transfer("WRITE", near, there)
                single.append(time.perf_counter() - start)

    return round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small sizes, for trying it out")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--target", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        return target(arguments.target)
    end_all_after(600)
    size = SHORT if arguments.short else FULL
    child = Target(size.target)
    meter = Meter(lambda: [os.getpid(), child.process.pid])
    print(json.dumps(rounds(engine(child, size, meter), meter, arguments.repeat)), flush=True)
    child.process.kill()
    child.process.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
