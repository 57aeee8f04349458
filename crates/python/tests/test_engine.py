"""Transfer engines: memory of one process moved to and from that of another."""

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import layercake
from conftest import MIB, check_child, child_env

PEER = """
import ctypes, os, sys, layercake
engine = layercake.TransferEngine(token=os.environ.get("TOKEN"))
size = int(sys.argv[1])
memory = bytearray(size)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
engine.register(address, size)
print(engine.address, address, flush=True)
for line in sys.stdin:
    command = line.split()
    match command[0]:
        case "fill":
            memory[:] = bytes([int(command[1])]) * size
            print("filled", flush=True)
        case "sum":
            print(sum(memory), flush=True)
        case "again":
            engine.unregister(address)
            engine.register(address, size)
            print("registered", flush=True)
        case "read-only":
            engine.unregister(address)
            engine.register(address, size, access="r")
            print("registered", flush=True)
        case "inbox":
            print(engine.notifications(), flush=True)
"""


class Peer:
    """An engine with registered memory in a process of its own."""

    def __init__(self, size: int, **env: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PEER), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_env(**env),
        )
        self.name, address = self.process.stdout.readline().split()
        self.address = int(address)

    def tell(self, command: str) -> str:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Memory:
    """Page-aligned memory with an address."""

    def __init__(self, size: int):
        self.map = mmap.mmap(-1, size)
        self.view = (ctypes.c_char * size).from_buffer(self.map)
        self.address = ctypes.addressof(self.view)

    def __getitem__(self, where: slice) -> bytes:
        return bytes(self.view.raw[where])

    def __setitem__(self, where: slice, data: bytes) -> None:
        start = where.start or 0
        self.view[start : start + len(data)] = data


@pytest.fixture(params=["shm", "tcp"])
def transports(request):
    return request.param


def test_bytes_go_there_and_back(transports, rng):
    size = MIB
    here = Memory(size)
    data = rng.randbytes(size)
    with (
        Peer(size, LAYERCAKE_TRANSPORTS=transports) as peer,
        layercake.TransferEngine(transports=transports) as engine,
    ):
        engine.register(here.address, size)
        here[:] = data
        cuts = sorted({0, size, *(rng.randrange(size) for _ in range(50))})
        starts, sizes = np.array(cuts[:-1], dtype=np.uint64), np.diff(cuts)
        order = np.array(rng.sample(range(len(sizes)), len(sizes)))
        starts, sizes = starts[order], sizes[order]
        written = engine.write(peer.name, starts + here.address, starts + peer.address, sizes)
        assert written == size
        assert int(peer.tell("sum")) == sum(data)
        here[:] = bytes(size)
        assert engine.read(peer.name, [here.address], [peer.address], [size]) == size
        assert here[:] == data
        assert engine.stats() == {f"{transports} write": size, f"{transports} read": size}
        engine.unregister(here.address)


def test_memory_that_is_not_registered_here_will_do_for_a_call_and_not_beyond(rng):
    here, data = Memory(4096), rng.randbytes(4096)
    here[:] = data
    with Peer(4096) as peer, layercake.TransferEngine() as engine:
        assert engine.write(peer.name, [here.address], [peer.address], [4096]) == 4096
        assert int(peer.tell("sum")) == sum(data)
        with pytest.raises(layercake.InvalidArgument, match="no registered buffer"):
            engine.submit_write(peer.name, [here.address], [peer.address], [4096])
        engine.register(here.address, 4096)
        transfer = engine.submit_write(peer.name, [here.address], [peer.address], [4096])
        assert transfer.wait() == 4096
        assert transfer.done and transfer.wait(0) == 4096
        transfer.cancel()


def test_pieces_without_bytes_are_skipped_and_none_is_fine():
    with Peer(4096) as peer, layercake.TransferEngine() as engine:
        assert engine.write(peer.name, [], [], []) == 0
        assert engine.write(peer.name, [0, 0], [0, 5], [0, 0]) == 0


def test_what_a_peer_does_not_show_is_out_of_reach():
    here = Memory(4096)
    with Peer(4096) as peer, layercake.TransferEngine() as engine:
        for remote, size in (
            (peer.address - 1, 10),
            (peer.address + 4090, 10),
            (peer.address + 4096, 1),
            (1 << 40, 1),
            (2**64 - 1, 5),
        ):
            with pytest.raises(layercake.InvalidArgument, match="shows no memory"):
                engine.write(peer.name, [here.address], [remote], [size])
        assert peer.tell("sum") == "0"
        assert engine.write(peer.name, [here.address], [peer.address], [10]) == 10


def test_memory_registered_anew_is_found_and_rights_hold():
    here = Memory(4096)
    here[:] = b"\1" * 4096
    with Peer(4096) as peer, layercake.TransferEngine() as engine:
        for _ in range(3):
            assert engine.write(peer.name, [here.address], [peer.address], [4096]) == 4096
            assert peer.tell("again") == "registered"
        assert peer.tell("read-only") == "registered"
        assert engine.read(peer.name, [here.address], [peer.address], [4096]) == 4096
        with pytest.raises(layercake.TransferFailed, match="direction"):
            engine.write(peer.name, [here.address], [peer.address], [4096])


def test_a_peer_that_dies_is_an_error_and_its_successor_is_reached():
    here = Memory(4096)
    with layercake.TransferEngine() as engine:
        with Peer(4096) as peer:
            engine.write(peer.name, [here.address], [peer.address], [10])
            peer.process.send_signal(signal.SIGKILL)
            peer.process.wait()
            for _ in range(3):
                started = time.monotonic()
                with pytest.raises(ConnectionError):
                    engine.write(peer.name, [here.address], [peer.address], [10])
                assert time.monotonic() - started < 5
            with pytest.raises(layercake.TransferFailed, match="reached"):
                engine.probe(peer.name)
        with Peer(4096) as successor:
            assert engine.write(successor.name, [here.address], [successor.address], [10]) == 10


def test_a_peer_that_stands_still_costs_its_deadline():
    here = Memory(MIB)
    with (
        Peer(MIB, LAYERCAKE_TRANSPORTS="tcp") as peer,
        layercake.TransferEngine(transports="tcp") as engine,
    ):
        engine.write(peer.name, [here.address], [peer.address], [10])
        peer.process.send_signal(signal.SIGSTOP)
        os.waitpid(peer.process.pid, os.WUNTRACED)
        started = time.monotonic()
        with pytest.raises(layercake.TransferFailed):
            engine.write(peer.name, [here.address], [peer.address], [MIB], timeout=0.5)
        assert time.monotonic() - started < 5
        peer.process.send_signal(signal.SIGCONT)


def test_a_signal_ends_the_wait_for_a_transfer():
    code = """
        import ctypes, os, signal, sys, threading, layercake
        name, address, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        memory = bytearray(size)
        here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        engine = layercake.TransferEngine(transports="tcp")
        engine.register(here, size)
        engine.probe(name)
        print("ready", flush=True)
        sys.stdin.readline()
        moving = engine.submit_write(name, [here], [address], [size], timeout=60)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            moving.wait()
        except KeyboardInterrupt:
            assert not moving.done
            print("interrupted")
        """
    size = 64 * MIB
    with Peer(size) as peer:
        arguments = [peer.name, str(peer.address), str(size)]
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_env(),
        )
        try:
            assert child.stdout.readline() == "ready\n"
            peer.process.send_signal(signal.SIGSTOP)
            assert child.communicate("\n", timeout=60)[0] == "interrupted\n"
        finally:
            child.kill()
            child.communicate()


def test_nobody_and_somebody_else_are_told_apart():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = "127.0.0.1:%d" % free.getsockname()[1]
    with layercake.TransferEngine() as engine:
        with pytest.raises(layercake.TransferFailed, match="can't be reached"):
            engine.probe(nobody)
        for bad in ("", "localhost", ":5", "localhost:port", "localhost:99999", "http://localhost:5", "a b:5"):
            with pytest.raises(layercake.LayercakeError):
                engine.probe(bad)
        with layercake.serve(capacity=MIB) as cluster:
            with pytest.raises(layercake.TransferFailed, match="no Layercake transfer engine"):
                engine.probe(cluster.master)
        engine.probe(engine.address)


def test_only_peers_with_the_token_are_told_anything():
    token = "a secret of some length"
    here = Memory(4096)
    with Peer(4096, TOKEN=token) as peer:
        with layercake.TransferEngine(token=token) as engine:
            assert engine.write(peer.name, [here.address], [peer.address], [10]) == 10
        for wrong in (None, "another secret of some length"):
            with layercake.TransferEngine(token=wrong) as engine:
                with pytest.raises(layercake.AuthenticationError, match="token"):
                    engine.write(peer.name, [here.address], [peer.address], [10])
    with Peer(4096) as open_peer, layercake.TransferEngine(token=token) as engine:
        with pytest.raises(layercake.AuthenticationError, match="token"):
            engine.probe(open_peer.name)
    with pytest.raises(layercake.InvalidArgument, match="token"):
        layercake.TransferEngine("0.0.0.0")


def test_messages_arrive_in_order_and_once():
    with Peer(4096) as peer, layercake.TransferEngine() as engine:
        engine.notify(peer.name, "first", b"\0\xff")
        engine.notify(peer.name, "second", b"")
        assert peer.tell("inbox") == "[('first', b'\\x00\\xff'), ('second', b'')]"
        assert peer.tell("inbox") == "[]"


def test_many_threads_share_an_engine(rng):
    """Each thread writes and reads back a part of its own."""
    parts, part = 8, 64 * 1024
    here, there = Memory(parts * part), Memory(parts * part)
    failed = []
    with layercake.TransferEngine() as engine, layercake.TransferEngine() as other:
        engine.register(here.address, parts * part)
        other.register(there.address, parts * part)

        def work(number: int):
            try:
                local, remote = here.address + number * part, there.address + number * part
                span = slice(number * part, (number + 1) * part)
                for turn in range(10):
                    data = os.urandom(part)
                    here[span] = data
                    engine.write(other.address, [local], [remote], [part])
                    assert there[span] == data
                    here[span] = bytes(part)
                    engine.read(other.address, [local], [remote], [part])
                    assert here[span] == data
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_a_store_can_share_an_engine_and_its_buffers(cluster, key):
    here, k = Memory(4096), key()
    here[:] = b"\7" * 4096
    with layercake.TransferEngine() as engine:
        engine.register(here.address, 4096)
        with layercake.Store(cluster.master, engine=engine) as store:
            with pytest.raises(layercake.InvalidArgument, match="overlap"):
                store.register_buffer(here.address, 100)
            store.put(k, (here.address, 4096))
            assert sum(engine.stats().values()) >= 4096
        engine.probe(engine.address)
        with pytest.raises(layercake.InvalidArgument, match="transports"):
            layercake.Store(cluster.master, engine=engine, transports="tcp")
    with pytest.raises(layercake.Closed):
        layercake.Store(cluster.master, engine=engine)
    assert cluster.store.get(k) == b"\7" * 4096


def test_bad_calls_are_refused_and_the_interpreter_lives():
    check_child(
        """
        import ctypes, sys, layercake
        from layercake import *
        engine = TransferEngine()
        memory = bytearray(4096)
        here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        me = engine.address
        engine.register(here, 4096)
        for call, error in (
            (lambda: engine.register(here, 10), InvalidArgument),
            (lambda: engine.register(0, 10), InvalidArgument),
            (lambda: engine.register(1 << 40, 10), InvalidArgument),
            (lambda: engine.register(here + 8192, 0), InvalidArgument),
            (lambda: engine.register(here, -1), TypeError),
            (lambda: engine.register(here, True), TypeError),
            (lambda: engine.register(here, 5, access="x"), InvalidArgument),
            (lambda: engine.unregister(here + 1), InvalidArgument),
            (lambda: engine.write(me, [here], [here], []), InvalidArgument),
            (lambda: engine.write(me, [here], [here], [-1]), TypeError),
            (lambda: engine.write(me, [here], [here], [True]), TypeError),
            (lambda: engine.write(me, here, [here], [5]), TypeError),
            (lambda: engine.write(me, [0], [here], [5]), InvalidArgument),
            (lambda: engine.write(me, [1 << 40], [here], [5]), InvalidArgument),
            (lambda: engine.read(me, [1 << 40], [here], [5]), InvalidArgument),
            (lambda: engine.write(me, [here], [here], [2**64 - 1]), InvalidArgument),
            (lambda: engine.write(5, [here], [here], [5]), TypeError),
            (lambda: engine.write(me, [here], [here], [5], timeout=-1), TypeError),
            (lambda: engine.notify(me, "n", "text"), TypeError),
            (lambda: engine.notify(me, "n", bytes(64 << 10)), InvalidArgument),
            (lambda: TransferEngine(transports="rdma"), InvalidArgument),
            (lambda: TransferEngine("nowhere.invalid"), InvalidArgument),
            (lambda: Transfer(), TypeError),
        ):
            try:
                call()
            except error:
                pass
            else:
                sys.exit("not refused")
        engine.close()
        for call in (lambda: engine.write(me, [here], [here], [5]), lambda: engine.register(here, 5)):
            try:
                call()
            except Closed:
                pass
            else:
                sys.exit("not refused")
        """
    )


def test_a_forked_child_can_not_use_its_parent_s_engine():
    check_child(
        """
        import os, warnings
        warnings.simplefilter("ignore")
        import layercake
        engine = layercake.TransferEngine()
        pid = os.fork()
        if pid == 0:
            try:
                engine.probe(engine.address)
            except layercake.ForkError:
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        engine.probe(engine.address)
        """
    )
