"""What the tests of the drop-in share: masters, and children that are clients of them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import socket
import subprocess
import sys
from collections.abc import Iterator

from conftest import check_child, child_env, wait_until

# What children begin with: a master, as the tests of the store need it, and stores of it.
PRELUDE = """
import ctypes, mmap, sys, threading, time
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

MIB = 1 << 20

def new(segment=16 * MIB, master=sys.argv[1], **more):
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, MIB, "tcp", "", master, **more) == 0
    return store

def alloc(size):
    memory = mmap.mmap(-1, size)
    view = (ctypes.c_char * size).from_buffer(memory)
    alive.append((memory, view))
    return ctypes.addressof(view)

alive = []
"""


@contextlib.contextmanager
def running_master(*flags: str):
    """A master in a process of its own, and its address."""
    port = free_port()
    code = "import sys; from mooncake._master import main; sys.exit(main())"
    arguments = [f"--rpc_port={port}", f"--metrics_port={free_port()}", *flags]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=child_env(), stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(port))
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
        return True
    return False


def check(code: str, master: str, *args: str, **kwargs) -> str:
    """The output of a client that must end well and say nothing else."""
    return check_child(PRELUDE + code, master, *args, **kwargs)


class Client:
    """A client in a process of its own, which does what it is told until it is killed."""

    LOOP = """
import traceback
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except BaseException:
        print(repr(traceback.format_exc()), flush=True)
"""

    def __init__(self, master: str, segment: int) -> None:
        code = PRELUDE + f"store = new({segment})\n" + self.LOOP
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, master],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_env(),
            text=True,
        )

    def do(self, expression: str):
        """The value of an expression there, in which ``store`` is its client."""
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return eval(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def clients(master: str, *segments: int) -> Iterator[list[Client]]:
    """Clients that lend so many bytes."""
    started = [Client(master, segment) for segment in segments]
    try:
        for client in started:
            assert client.do("store.health_check()") == 0
        yield started
    finally:
        for client in started:
            with contextlib.suppress(OSError):
                client.kill()


class Memory:
    """Page-aligned memory with an address."""

    def __init__(self, size: int):
        self.map = mmap.mmap(-1, size)
        self.view = (ctypes.c_char * size).from_buffer(self.map)
        self.address = ctypes.addressof(self.view)

    def __getitem__(self, where: slice) -> bytes:
        return self.map[where]

    def __setitem__(self, where: slice, data: bytes) -> None:
        self.map[where] = data
