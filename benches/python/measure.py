"""Measures whichever provider of the `mooncake` modules the interpreter imports, with all processes on loopback.

    python measure.py --master 'mooncake_master --rpc_port {port} --metrics_port {metrics_port}' [--short] [--profile FOLDER] SCENARIO

Prints one JSON object: for each kind of work of the scenario the median of all rounds, by unit (a piece, a key, a call):
microseconds, processor microseconds of all processes together, GB/s (1e9 bytes) and processor seconds per GB where
bytes are moved, percentiles where single calls are timed; and where the kernel lets them be counted, system calls,
context switches and page faults, and whose code the processors are in, in percent. Every byte is compared. `cargo xtask bench --compare` runs this for several
providers in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scenarios
from cluster import CallFailed, Child, Master
from costs import Meter, can_count, processes

ALL = [*scenarios.ON_A_STORE, "lanes", "engine", "connections"]

FULL = argparse.Namespace(
    objects=64, layers=32, page=64 << 10, small=500, batches=200, batch=32, exist=20_000, segment=4 << 30, target=128 << 20
)
SHORT = argparse.Namespace(
    objects=16, layers=8, page=64 << 10, small=100, batches=20, batch=32, exist=2_000, segment=256 << 20, target=16 << 20
)


def rounds(round: Callable[[int], None], meter: Meter, repeat: int) -> dict[str, Any]:
    round(0)
    meter.mode = "measure"
    for number in range(repeat):
        round(1 + number)
    if can_count():
        if meter.profiles:
            meter.profiles.mkdir(parents=True, exist_ok=True)
        for number, mode in enumerate(("count", "profile")):
            meter.mode = mode
            round(1 + repeat + number)
    return meter.results()


def run(name: str, command: str, size: argparse.Namespace, repeat: int, profiles: Path | None) -> dict[str, Any]:
    """One scenario, with a master and children of its own."""
    if name == "engine":
        children: list[Child] = []
        meter = Meter(lambda: [os.getpid(), *(child.pid for child in children)], profiles)
        children, round = scenarios.engine(size, meter)
        return rounds(round, meter, repeat)
    master = Master(command)
    children, store = [], None
    try:
        if name == "connections":
            return scenarios.connections(master, 8)
        meter = Meter(lambda: [os.getpid(), *processes(master.pid), *(child.pid for child in children)], profiles)
        work, embedded = scenarios.ON_A_STORE.get(name, (None, False))
        if not embedded:
            children.append(Child("segment", master=master.address, size=size.segment))
        if work is None:
            more, round = scenarios.lanes(master.address, size, meter)
            children += more
            repeat = min(repeat, 2)  # it is long
        else:
            store = scenarios.store_of(master.address, embedded, size)
            round = work(store, size, meter, name)
        return rounds(round, meter, repeat)
    finally:
        if store:
            store.close()
        for child in reversed(children):
            child.stop()
        master.stop()


def end_all_after(seconds: float) -> None:
    """Ends this process and all its children when the time is over, whatever they wait for."""
    os.setpgid(0, 0)

    def end() -> None:
        print(f"not done after {seconds} s", file=sys.stderr, flush=True)
        os.killpg(0, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", choices=ALL)
    parser.add_argument("--master", required=True, help="command; {port} and {metrics_port} are filled in")
    parser.add_argument("--short", action="store_true", help="small sizes, for trying it out")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="a folder in which perf's samples are kept")
    parser.add_argument("--deadline", type=float, default=600, help="seconds after which everything is ended")
    arguments = parser.parse_args()
    end_all_after(arguments.deadline)
    try:
        result = run(arguments.scenario, arguments.master, SHORT if arguments.short else FULL, arguments.repeat, arguments.profile)
    except CallFailed as failure:
        result = {"error": str(failure)}
    print(json.dumps(result), flush=True)
    # Some providers keep threads of their own that nothing ends.
    os._exit(0)


if __name__ == "__main__":
    main()
