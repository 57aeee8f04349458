"""What a piece of work costs: time, and for all processes that take part in it processor time, system calls and
context switches.

Processor time of a process is read from its CPU clock, which counts in nanoseconds. System calls and context
switches are counted by `perf stat`, where the kernel allows that, in a round of its own: counting slows work down.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

EVENTS = {"raw_syscalls:sys_enter": "syscalls", "context-switches": "switches", "page-faults": "faults"}

# Seconds that `perf` may take for an answer.
PATIENCE = 30


def processes(root: int) -> list[int]:
    """A process and all that descend from it."""
    found = [root]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue  # the thread has ended
    return found


def cpu_seconds(process: int) -> float:
    """Processor time of all threads of a process so far."""
    # How the kernel names the CPU clock of another process.
    return time.clock_gettime((~process << 3) | 2)


def private_bytes(process: int) -> int:
    """Resident memory that no other process shares."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def threads(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/task"))


class Perf:
    """`perf` on running processes, switched on and off from here."""

    def __init__(self, arguments: list[str], pids: list[int]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        control, answer = (os.path.join(self.folder.name, name) for name in ("control", "answer"))
        os.mkfifo(control)
        os.mkfifo(answer)
        # Opened for both directions, so that neither side waits for the other.
        self.control, self.answer = os.open(control, os.O_RDWR), os.open(answer, os.O_RDWR)
        command = ["perf", *arguments, "-D", "-1", "--control", f"fifo:{control},{answer}", "-p", ",".join(map(str, pids))]
        self.perf = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def say(self, word: str) -> bool:
        """Whether `perf` has heard it. It may have ended, as it does when a process that it watches does."""
        os.write(self.control, f"{word}\n".encode())
        until = time.monotonic() + PATIENCE
        while self.perf.poll() is None and time.monotonic() < until:
            if select.select([self.answer], [], [], 0.1)[0]:
                os.read(self.answer, 16)
                return True
        return False

    def close(self) -> None:
        self.perf.send_signal(signal.SIGINT)
        try:
            self.perf.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.perf.kill()
            self.perf.wait()
        os.close(self.control)
        os.close(self.answer)
        self.folder.cleanup()


def counts(file: Path, units: int) -> dict[str, float]:
    """What `perf stat` has counted, by unit."""
    found = {}
    for line in file.read_text().splitlines():
        cells = line.split(";")
        if len(cells) > 2 and cells[2] in EVENTS and cells[0].replace(".", "").isdigit():
            found[EVENTS[cells[2]]] = float(cells[0]) / units
    return found


def shares(file: Path) -> dict[str, float]:
    """Whose code the samples of `perf record` lie in, in percent; nothing if they are too few to tell."""
    command = ["perf", "report", "-i", str(file), "--no-children", "-n", "--sort", "dso", "-t", ";", "-q"]
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120)
    found = dict.fromkeys(("in_kernel", "in_python", "in_c_library", "in_provider"), 0.0)
    total = 0
    for line in told.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(";")]
        if len(cells) != 3:
            continue
        samples, where = int(cells[1]), cells[2]
        total += samples
        if where.startswith("[k"):
            name = "in_kernel"
        elif "python" in where or "multiarray" in where:
            name = "in_python"
        elif where.startswith(("libc.", "libm.", "libstdc++", "libgcc", "ld-linux", "[")):
            name = "in_c_library"
        else:
            name = "in_provider"
        found[name] += samples
    return {name: 100 * samples / total for name, samples in found.items()} if total >= 50 else {}


def can_count() -> bool:
    """Whether the kernel lets this user count system calls."""
    command = ["perf", "stat", "-x", ";", "-e", ",".join(EVENTS), "true"]
    try:
        told = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return told.returncode == 0 and "<not supported>" not in told.stderr


@dataclass
class Row:
    """All samples of one kind of work."""

    unit: str
    bytes_each: int
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, float | str]:
        seconds, cpu = float(np.median(self.seconds)), float(np.median(self.cpu))
        figures: dict[str, float | str] = {"unit": self.unit, "us": seconds * 1e6, "cpu_us": cpu * 1e6}
        if self.bytes_each:
            figures["GBps"] = self.bytes_each / seconds / 1e9
            figures["cpu_s_per_GB"] = cpu / self.bytes_each * 1e9
        if self.single:
            figures["p50_us"], figures["p99_us"] = (float(np.percentile(self.single, q)) * 1e6 for q in (50, 99))
        return figures | self.counts


class Meter:
    """Measures rounds of work of the processes `pids`.

    In the mode `count` system calls are counted, in the mode `profile` it is sampled where the processors are, into files
    in the folder `profiles` if there is one; neither round is timed.
    """

    def __init__(self, pids: Callable[[], list[int]], profiles: Path | None = None) -> None:
        self.pids, self.profiles = pids, profiles
        self.rows: dict[str, Row] = {}
        self.mode = "warm up"

    @contextmanager
    def __call__(self, name: str, unit: str, units: int, bytes_each: int = 0) -> Iterator[list[float]]:
        """Measures what runs inside, which does `units` of something. Times of single calls may be put into the list."""
        row = self.rows.setdefault(name, Row(unit, bytes_each))
        single: list[float] = []
        if self.mode in ("count", "profile"):
            with self.watched(name, row, units):
                yield single
            return
        pids = self.pids()
        cpu, start = sum(map(cpu_seconds, pids)), time.perf_counter()
        yield single
        seconds = time.perf_counter() - start
        cpu = sum(map(cpu_seconds, pids)) - cpu
        if self.mode == "measure":
            row.seconds.append(seconds / units)
            row.cpu.append(cpu / units)
            row.single += single

    @contextmanager
    def watched(self, name: str, row: Row, units: int) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(self.profiles or folder, f"{name.replace(' ', '-')}.perf")
            if self.mode == "count":
                arguments = ["stat", "-x", ";", "-e", ",".join(EVENTS)]
            else:
                arguments = ["record", "-e", "cpu-clock", "-F", "5000"]
            perf = Perf([*arguments, "-o", str(file)], self.pids())
            try:
                counted = perf.say("enable")
                yield
                counted = perf.say("disable") and counted
            finally:
                perf.close()
            if not counted:
                return
            if self.mode == "count":
                row.counts |= counts(file, units)
                file.unlink()
            else:
                row.counts |= shares(file)

    def results(self) -> dict[str, dict[str, float | str]]:
        return {name: row.figures() for name, row in self.rows.items()}
