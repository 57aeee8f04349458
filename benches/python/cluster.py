"""The processes of a measurement: a master, and children that play a role and take orders line by line."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"


class CallFailed(Exception):
    """A call of the provider that should have succeeded."""


def check(holds: bool, what: object) -> None:
    if not holds:
        raise CallFailed(str(what))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def open_store(master: str, segment: int, buffer: int) -> Any:
    """A store of the `mooncake` that this interpreter imports."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(f"{HOST}:{free_port()}", "P2PHANDSHAKE", segment, buffer, "tcp", "", master)
    check(code == 0, f"setup: {code}")
    return store


class Process:
    """A program whose output is kept for the case that it fails."""

    def __init__(self, command: list[str], **streams: Any) -> None:
        self.log = tempfile.TemporaryFile("w+")
        streams = {"stdout": self.log} | streams
        self.process = subprocess.Popen(command, stderr=self.log, text=True, **streams)

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()[-2000:]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Master(Process):
    def __init__(self, command: str) -> None:
        port = free_port()
        super().__init__(shlex.split(command.format(port=port, metrics_port=free_port())))
        self.address = f"{HOST}:{port}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((HOST, port)) == 0:
                    return
            time.sleep(0.02)
        self.stop()
        raise SystemExit(f"the master does not listen on {self.address}: {self.said()}")


class Child(Process):
    """Another process of this program in one of the roles of `roles.py`."""

    def __init__(self, role: str, **arguments: Any) -> None:
        command = [sys.executable, str(Path(__file__).with_name("roles.py")), role, json.dumps(arguments)]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.ready = self.answer()

    def send(self, order: str) -> None:
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next answer; the provider may print other lines."""
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        self.process.wait()
        raise SystemExit(f"a child process ended early: {self.said()}")

    def ask(self, order: str) -> Any:
        self.send(order)
        return self.answer()

    def stop(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            super().stop()
