"""`mooncake.engine`: what becomes of memory and names when engines are dropped, started anew, or shared with a store."""

import signal
import subprocess
import sys

import pytest

pytest.importorskip("mooncake", reason="layercake-mooncake is not installed")

from conftest import MIB, child_env, run_child  # noqa: E402
from dropin import Memory, running_master  # noqa: E402
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode  # noqa: E402
from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: E402

WRITER = """
import ctypes, mmap, sys
from mooncake.engine import TransferEngine
name, address, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
memory = mmap.mmap(-1, size)
memory[:] = b"w" * size
here = ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.register_memory(here, size) == 0
while engine.transfer_sync_write(name, here, address, size) == 0:
    print("written", flush=True)
print("refused", flush=True)
"""


@pytest.mark.parametrize("how", ["dropped", "started anew"])
def test_memory_is_the_program_s_alone_once_its_engine_has_gone(transport, how):
    size = 8 * MIB
    memory, engine = Memory(size), TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.address, size) == 0
    arguments = [f"127.0.0.1:{engine.get_rpc_port()}", str(memory.address), str(size)]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True, env=child_env()
    ) as writer:
        for _ in range(3):
            assert writer.stdout.readline() == "written\n"
        if how == "dropped":
            del engine
        else:
            assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        memory[:] = bytes(size)
        assert writer.stdout.read().endswith("refused\n")
    assert memory[:] == bytes(size)


@pytest.mark.parametrize("answers", [True, False], ids=["master answers", "master is stopped"])
def test_memory_is_the_program_s_alone_once_the_last_store_that_shares_its_engine_has_gone(transport, answers):
    size = 8 * MIB
    memory, engine = Memory(size), TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.address, size) == 0
    arguments = [f"127.0.0.1:{engine.get_rpc_port()}", str(memory.address), str(size)]
    with running_master() as (address, master):
        stores = [MooncakeDistributedStore() for _ in range(2)]
        for store, segment in zip(stores, (16 * MIB, 0), strict=True):
            setup = ("127.0.0.1", "P2PHANDSHAKE", segment, 0, "tcp", "", address)
            assert store.setup(*setup, engine=engine.get_engine()) == 0
        del store
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True, env=child_env()
        ) as writer:
            assert writer.stdout.readline() == "written\n"
            del engine
            if not answers:
                master.send_signal(signal.SIGSTOP)
            while stores:
                memory[:1] = b"?"
                # Written to as long as a store is there.
                while memory[:1] != b"w":
                    assert writer.stdout.readline() == "written\n"
                stores.pop()
            memory[:] = bytes(size)
            assert writer.stdout.read().endswith("refused\n")
        assert memory[:] == bytes(size)


def test_messages_are_so_long_and_kept_up_to_so_many_bytes():
    memory, engine, peer = Memory(4096), TransferEngine(), TransferEngine()
    for one in (engine, peer):
        assert one.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert peer.register_memory(memory.address, 4096) == 0
    name, here = f"127.0.0.1:{peer.get_rpc_port()}", Memory(4096)
    here[:5] = b"hello"
    arguments = (name, here.address, memory.address, 5, TransferOpcode.Write)
    longest = 64 << 10
    assert engine.transfer_sync(*arguments, TransferNotify("n", "x" * longest)) == -1
    assert memory[:5] == bytes(5), "it is refused before anything moves"
    for at in range(300):
        title = f"{at:03}"
        assert engine.transfer_sync(*arguments, TransferNotify(title, "x" * (longest - 3))) == 0
    assert memory[:5] == b"hello"
    kept = peer.get_notifies()
    assert [notify.name for notify in kept] == [f"{at:03}" for at in range(300 - 256, 300)]
    assert {len(notify.msg) for notify in kept} == {longest - 3}
    assert peer.get_notifies() == []


def test_sequences_that_memory_has_no_room_for_are_an_error():
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    with pytest.raises(MemoryError):
        engine.batch_unregister_memory(range(1 << 60))
    assert engine.batch_unregister_memory(range(3)) == -3


def test_a_store_that_shares_an_engine_is_called_as_the_engine_is(cluster, key, rng):
    memory, engine, store = Memory(MIB), TransferEngine(), MooncakeDistributedStore()
    assert engine.initialize("localhost:17001", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.address, MIB) == 0
    shared = engine.get_engine()
    segment = 16 * MIB
    assert store.setup("127.0.0.1:17002", "P2PHANDSHAKE", segment, MIB, "tcp", "", cluster.master, engine=shared) == 0
    name = f"localhost:{engine.get_rpc_port()}"
    assert store.get_hostname() == name
    asking = TransferEngine()
    assert asking.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert asking.get_first_buffer_address(name) == memory.address
    config = ReplicateConfig()
    config.preferred_segment = name
    data = rng.randbytes(MIB)
    memory[:] = data
    assert store.put_from(one := key(), memory.address, MIB, config) == 0
    assert store.get(one) == data
    # The store keeps the engine that it was given, whatever becomes of the object.
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    del engine, shared
    assert store.put_from(two := key(), memory.address, MIB, config) == 0
    assert store.get(two) == data
    assert store.close() == 0


# An engine that only a store has any more, with a transfer under way to a peer that does not take it.
LAST_OWNER = """
import ctypes, mmap, os, signal, subprocess, sys, threading
import layercake
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore

size, segment = 64 << 20, 16 << 20
memory = mmap.mmap(-1, size)
here = ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
cluster = layercake.serve("64MiB")

PEER = '''
import sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
print(engine.get_rpc_port(), engine.allocate_managed_buffer(int(sys.argv[1])), flush=True)
sys.stdin.read()
'''
peer = subprocess.Popen(
    [sys.executable, "-c", PEER, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
port, there = map(int, peer.stdout.readline().split())
name, engine, store = f"127.0.0.1:{port}", TransferEngine(), MooncakeDistributedStore()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.register_memory(here, size) == 0
assert engine.transfer_sync_write(name, here, there, 4096) == 0
shared = engine.get_engine()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 0, "tcp", "", cluster.master, engine=shared) == 0

def arrived():
    # Bytes that wait for the peer in its connections.
    folder = f"/proc/{peer.pid}/fd"
    its = {os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}
    with open("/proc/net/tcp") as table:
        rows = [row.split() for row in table][1:]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in its)

peer.send_signal(signal.SIGSTOP)
try:
    moving = engine.transfer_submit_write(name, here, there, size)
    while arrived() <= 4096:
        pass
    assert engine.transfer_check_status(moving) == 0, "it is under way"
    del engine, shared
    BODY
finally:
    peer.kill()
    peer.wait()
"""

OTHER_THREADS_RUN = """
    # Whoever runs goes on running until it waits.
    sys.setswitchinterval(1000)
    closed = threading.Event()
    closing = threading.Thread(target=lambda: (store.close(), closed.set()))
    closing.start()
    while len(cluster.store.segments()) > 1:
        pass
    for _ in range(50):
        cluster.store.keys()
    assert not closed.is_set(), "the others ran while closing waited for the memory"
    peer.kill()
    closing.join()
"""

OTHER_STORES_START = """
    def drop():
        global store
        del store
    dropping = threading.Thread(target=drop)
    dropping.start()
    while "store" in globals():
        pass
    other = MooncakeDistributedStore()
    assert other.setup("127.0.0.1", "P2PHANDSHAKE", segment, 0, "tcp", "", cluster.master) == 0
    os.write(2, b"is set up\\n")
    peer.kill()
    dropping.join()
"""


@pytest.mark.parametrize("body", [OTHER_THREADS_RUN, OTHER_STORES_START], ids=["closed", "dropped"])
def test_who_lets_go_of_a_busy_engine_keeps_nobody_else_waiting(body):
    code = LAST_OWNER.replace("    BODY\n", body.lstrip("\n"))
    done = run_child(code, LAYERCAKE_TRANSPORTS="tcp", LAYERCAKE_LOG="debug")
    assert done.returncode == 0, done.stderr
    if body is OTHER_STORES_START:
        before, _, _ = done.stderr.partition("is set up\n")
        assert before != done.stderr and "a transfer failed" not in before
