"""The drop-in's commands, run by tests."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

from conftest import child_env, wait_until
from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def command(name: str = "mooncake_master", module: str = "mooncake._master") -> list[str]:
    """How a command is run: as it is installed, or as a module."""
    beside = pathlib.Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    return [found] if found else [sys.executable, "-m", module]


def ask(url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, str]:
    """The status and the text of an answer over HTTP."""
    request = urllib.request.Request(url, data=body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Master:
    """A running command on free ports of the loopback."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None):
        self.rpc, self.http, self.metadata = free_port(), free_port(), free_port()
        local = ("rpc_address", "metrics_host", "http_metadata_server_host")
        self.process = subprocess.Popen(
            [
                *command(),
                f"--rpc_port={self.rpc}",
                f"--metrics_port={self.http}",
                f"--http_metadata_server_port={self.metadata}",
                *(f"--{flag}=127.0.0.1" for flag in local),
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_env(**(env or {})),
        )
        try:
            wait_until(self.is_ready)
        except BaseException:
            self.process.kill()
            raise

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.process.stderr.read()
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, port: int | None = None):
        return ask(f"http://127.0.0.1:{port or self.http}{path}", method, body)

    def get(self, path: str):
        return self.ask(path)

    def json(self, path: str, method: str = "GET", body: bytes | None = None):
        code, text = self.ask(path, method, body)
        return code, json.loads(text)

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics")[1].splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def store(self, segment: int = 16 * MIB, **setup) -> MooncakeDistributedStore:
        store = MooncakeDistributedStore()
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 * MIB, "tcp", "", f"127.0.0.1:{self.rpc}", **setup)
        assert code == 0
        return store

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Ends it, and returns its exit code and what it wrote."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=10)
        return self.process.returncode, out + err

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
