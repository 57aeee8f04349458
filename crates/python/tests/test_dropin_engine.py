"""`mooncake.engine`: transfers by address between processes, and what is answered to bad calls."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

pytest.importorskip("mooncake", reason="layercake-mooncake is not installed")

from conftest import MIB, check_child, child_env, wait_until  # noqa: E402
from dropin import Memory  # noqa: E402
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode  # noqa: E402

PEER = """
import ctypes, mmap, sys
from mooncake.engine import TransferEngine
size = int(sys.argv[1])
memory = mmap.mmap(-1, size)
address = ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.register_memory(address, size) == 0
print(f"127.0.0.1:{engine.get_rpc_port()}", address, flush=True)
for line in sys.stdin:
    match line.split():
        case ["fill", byte]:
            memory[:] = bytes([int(byte)]) * size
            print("filled", flush=True)
        case ["show", start, end]:
            print(memory[int(start) : int(end)].hex(), flush=True)
        case ["again"]:
            print(engine.unregister_memory(address), engine.register_memory(address, size), flush=True)
        case ["inbox"]:
            print([(notify.name, notify.msg) for notify in engine.get_notifies()], flush=True)
"""


class Peer:
    """An engine with registered memory in a process of its own."""

    def __init__(self, size: int = MIB, **env: str):
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

    def show(self, start: int, end: int) -> bytes:
        return bytes.fromhex(self.tell(f"show {start} {end}"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def engine() -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


@pytest.fixture
def here(engine) -> Memory:
    memory = Memory(MIB)
    assert engine.register_memory(memory.address, MIB) == 0
    return memory


def test_scattered_pieces_go_there_and_back(transport, engine, here, rng):
    data = rng.randbytes(MIB)
    here[:] = data
    cuts = sorted({0, MIB, *(rng.randrange(MIB) for _ in range(2000))})
    pieces = list(zip(cuts, cuts[1:], strict=False))
    rng.shuffle(pieces)
    local = [here.address + start for start, _ in pieces]
    sizes = [end - start for start, end in pieces]
    with Peer(LAYERCAKE_TRANSPORTS=transport) as peer:
        remote = [peer.address + start for start, _ in pieces]
        assert engine.batch_transfer_sync_write(peer.name, local, remote, sizes) == 0
        assert peer.show(0, MIB) == data
        here[:] = bytes(MIB)
        assert engine.batch_transfer_sync_read(peer.name, local, remote, sizes) == 0
        assert here[:] == data


def test_the_three_ways_to_name_a_direction_agree(engine, here, rng):
    data = rng.randbytes(300)
    here[:300] = data
    with Peer() as peer:
        ours, theirs = here.address, peer.address
        assert engine.transfer_sync_write(peer.name, ours, theirs, 100) == 0
        assert engine.transfer_sync(peer.name, ours + 100, theirs + 100, 100, TransferOpcode.Write) == 0
        assert engine.batch_transfer_sync(peer.name, [ours + 200], [theirs + 200], [100], TransferEngine.TransferOpcode(1)) == 0
        assert peer.show(0, 300) == data
        number = engine.batch_transfer_async(peer.name, [ours + 1000], [theirs], [300], TransferOpcode.Read)
        assert engine.get_batch_transfer_status([number]) == 0
        assert here[1000:1300] == data


def test_a_message_follows_the_bytes(engine, here):
    with Peer() as peer:
        sent = TransferNotify("layer 3", "bytes are there: ✓")
        assert engine.transfer_sync(peer.name, here.address, peer.address, 10, TransferOpcode.Write, sent) == 0
        assert engine.transfer_sync(peer.name, here.address, peer.address + MIB, 10, TransferOpcode.Write, sent) == -1
        assert peer.tell("inbox") == str([("layer 3", "bytes are there: ✓")])
        assert peer.tell("inbox") == "[]"


def test_numbers_stay_good_after_the_end(engine, here):
    with Peer() as peer:
        good = engine.transfer_submit_write(peer.name, here.address, peer.address, MIB)
        bad = engine.batch_transfer_async_write(peer.name, [here.address], [peer.address + MIB], [1])
        assert 0 < good < bad
        assert engine.get_batch_transfer_status([good]) == 0
        assert engine.get_batch_transfer_status([good, bad]) == -1
        for _ in range(2):
            assert engine.transfer_check_status(good) == 1
            assert engine.transfer_check_status(bad) == -1
        assert engine.transfer_check_status(bad + 1) == -1
        assert engine.get_batch_transfer_status([bad + 1]) == -1


def test_what_is_not_registered_here_has_moved_when_an_asynchronous_call_returns(engine, rng):
    memory, data = Memory(8192), rng.randbytes(8192)
    memory[:] = data
    with Peer() as peer:
        number = engine.transfer_submit_write(peer.name, memory.address, peer.address, 8192)
        memory[:] = bytes(8192)
        assert engine.transfer_check_status(number) == 1
        assert peer.show(0, 8192) == data


def test_memory_that_the_peer_registered_anew_is_found(engine, here, rng):
    here[:100] = data = rng.randbytes(100)
    with Peer() as peer:
        assert engine.transfer_sync_write(peer.name, here.address, peer.address, 10) == 0
        assert peer.tell("again") == "0 0"
        number = engine.transfer_submit_write(peer.name, here.address, peer.address, 100)
        assert engine.get_batch_transfer_status([number]) == 0
        assert peer.show(0, 100) == data


def test_many_threads_share_an_engine(transport, engine, here, rng):
    here[:] = data = rng.randbytes(MIB)
    step = MIB // 64
    with Peer(LAYERCAKE_TRANSPORTS=transport) as peer:
        codes = []

        def write(first: int) -> None:
            for at in range(first, 64, 8):
                start = at * step
                codes.append(engine.transfer_sync_write(peer.name, here.address + start, peer.address + start, step))

        threads = [threading.Thread(target=write, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert codes == [0] * 64
        assert peer.show(0, MIB) == data


def test_a_batch_to_register_is_all_or_nothing(engine, here):
    one, two = Memory(4096), Memory(4096)
    assert engine.batch_register_memory([one.address, here.address, two.address], [4096] * 3) == -7
    assert engine.unregister_memory(one.address) == -3
    assert engine.batch_register_memory([one.address, two.address], [4096] * 2, location="cpu:0") == 0
    assert engine.batch_unregister_memory([one.address, 123, two.address]) == -3
    assert engine.batch_unregister_memory([one.address]) == -3
    assert engine.batch_unregister_memory([]) == 0


def test_managed_memory_is_freed_once_and_in_one_way(engine):
    address = engine.allocate_managed_buffer(5000)
    assert engine.write_bytes_to_buffer(address, b"\x00\xff\x01", 3) == 0
    assert engine.write_bytes_to_buffer(address + 3, "text", 2) == 0
    assert engine.read_bytes_from_buffer(address, 6) == b"\x00\xff\x01te\x00"
    assert engine.write_bytes_to_buffer(address, "h", 5) == -1
    assert engine.unregister_memory(address) == -3
    assert engine.free_managed_buffer(address + 1, 10) < 0
    assert engine.free_managed_buffer(address, 5000) == 0
    assert engine.free_managed_buffer(address, 5000) < 0
    assert engine.allocate_managed_buffer(1 << 45) == 0


def test_what_a_peer_registered_first_is_its_first_buffer(engine):
    other = TransferEngine()
    assert other.initialize("127.0.0.1:1", "P2PHANDSHAKE", "tcp", "") == 0
    name = f"localhost:{other.get_rpc_port()}"
    assert engine.get_first_buffer_address(name) == 0
    low, high = sorted([Memory(4096), Memory(4096)], key=lambda memory: memory.address)
    assert other.register_memory(high.address, 4096) == 0
    assert other.register_memory(low.address, 4096) == 0
    assert engine.get_first_buffer_address(name) == high.address
    assert engine.send_probe(name) == 0


def test_a_peer_that_was_killed_or_never_there(engine, here):
    with Peer() as peer:
        assert engine.send_probe(peer.name) == 0
        os.kill(peer.process.pid, signal.SIGKILL)
        peer.process.wait()
        wait_until(lambda: engine.send_probe(peer.name) == -102)
        assert engine.transfer_sync_write(peer.name, here.address, peer.address, 10) == -1
        assert engine.transfer_submit_write(peer.name, here.address, peer.address, 10) == 0
        assert engine.get_first_buffer_address(peer.name) == 0
    for name in ("", "nowhere", "nowhere:", ":1", "127.0.0.1:99999"):
        assert engine.send_probe(name) == -101
        assert engine.transfer_sync_write(name, here.address, here.address, 10) == -1


def test_one_more_initialize_starts_anew(engine, here):
    before = engine.get_rpc_port()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "TCP", "") == 0
    assert engine.get_rpc_port() != before
    assert engine.unregister_memory(here.address) == -3
    assert engine.register_memory(here.address, MIB) == 0


def test_the_inner_engine_outlives_the_outer_one(rng):
    engine = TransferEngine()
    assert engine.get_engine() is None
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    name, inner = f"127.0.0.1:{engine.get_rpc_port()}", engine.get_engine()
    asking = TransferEngine()
    assert asking.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    del engine
    assert asking.send_probe(name) == 0
    del inner
    wait_until(lambda: asking.send_probe(name) != 0)


REFUSED = [
    ("127.0.0.1", "P2PHANDSHAKE", "carrier-pigeon"),
    ("127.0.0.1", "P2PHANDSHAKE", "rdma"),
    ("127.0.0.1", "", "tcp"),
    ("127.0.0.1", "etcd://127.0.0.1:1", "tcp"),
    ("a name.that is none", "P2PHANDSHAKE", "tcp"),
]


@pytest.mark.parametrize(("host", "metadata", "protocol"), REFUSED)
def test_what_an_engine_can_t_be_started_with(engine, host, metadata, protocol):
    assert TransferEngine().initialize(host, metadata, protocol, "") == -1
    assert engine.initialize_ext(host, metadata, protocol, "", "etcd") == -1
    assert engine.get_rpc_port() > 0, "the one that runs is kept"


def test_rdma_falls_back_where_that_was_asked_for():
    code = """
    from mooncake.engine import TransferEngine
    print(TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "mlx5_0"))
    """
    assert check_child(code, MC_FORCE_TCP="1", LAYERCAKE_LOG="off") == "0\n"


def test_directions_and_messages_are_as_in_mooncake():
    assert [repr(TransferOpcode.Read), str(TransferOpcode.Write)] == ["<TransferOpcode.Read: 0>", "TransferOpcode.Write"]
    assert int(TransferOpcode.Write) == 1 and TransferOpcode.Write != 1
    assert list(TransferOpcode.__members__) == ["Read", "Write"]
    notify = TransferNotify()
    assert (notify.name, notify.msg) == ("", "")
    notify.name, notify.msg = "a", "b"
    assert repr(notify) == 'TransferNotify(name="a", msg="b")'


# Each runs in a process of its own: nothing of it may end the interpreter.
BAD_VALUES = [
    "engine.transfer_sync_write(name, 0, there, 10)",
    "engine.transfer_sync_write(name, 4096, there, 10)",
    "engine.transfer_sync_read(name, 4096, there, 10)",
    "engine.transfer_sync_write(name, here, there, 2**63)",
    "engine.transfer_sync_write(name, here, 2**64 - 5, 10)",
    "engine.transfer_sync_write(name, 2**64 - 5, there, 10)",
    "engine.batch_transfer_sync_write(name, [here] * 2, [there, there + 1], [10, 2**40])",
    "engine.batch_transfer_sync_write(name, [here], [], [])",
    "engine.transfer_check_status(0)",
    "engine.transfer_check_status(2**64 - 1)",
    "engine.get_batch_transfer_status([1, 2, 3])",
    "engine.register_memory(0, 4096)",
    "engine.register_memory(4096, 4096)",
    "engine.register_memory(fresh, 0)",
    "engine.register_memory(fresh, 2**63)",
    "engine.register_memory(2**64 - 4096, 8192)",
    "engine.batch_register_memory([fresh], [4096, 4096])",
    "engine.unregister_memory(here + 1)",
    "engine.free_managed_buffer(here, 10)",
    "engine.write_bytes_to_buffer(0, 'x', 1)",
    "engine.write_bytes_to_buffer(4096, b'x', 1)",
    "engine.write_bytes_to_buffer(here, 'x', 2**60)",
    "TransferEngine().get_rpc_port()",
    "TransferEngine().register_memory(fresh, 4096)",
    "TransferEngine().transfer_sync_write(name, here, there, 10)",
    "TransferEngine().batch_transfer_sync_read(name, [here], [there], [10])",
    "TransferEngine().transfer_check_status(1)",
    "TransferEngine().get_batch_transfer_status([1])",
    "TransferEngine().free_managed_buffer(here, 1)",
    "TransferEngine().send_probe(name)",
]
NEUTRAL = {
    "engine.read_bytes_from_buffer(0, 10)": b"",
    "engine.read_bytes_from_buffer(4096, 10)": b"",
    "engine.read_bytes_from_buffer(here, 2**62)": b"",
    "engine.batch_transfer_async_write(name, [here], [there], [1, 2])": 0,
    "engine.transfer_submit_write(name, 4096, there, 10)": 0,
    "engine.transfer_sync_write(name, here, there, 0)": 0,
    "engine.batch_transfer_sync_read(name, [here], [there], [0])": 0,
    "engine.get_batch_transfer_status([])": 0,
    "TransferEngine().allocate_managed_buffer(10)": 0,
    "TransferEngine().get_first_buffer_address(name)": 0,
    "TransferEngine().transfer_submit_write(name, here, there, 10)": 0,
    "TransferEngine().get_notifies()": [],
    "TransferEngine().get_engine()": None,
}
WRONG_TYPES = [
    "engine.transfer_sync_write(name, -1, there, 10)",
    "engine.transfer_sync_write(name, True, there, 10)",
    "engine.transfer_sync_write(name, 1.5, there, 10)",
    "engine.transfer_sync_write(name, here, there, 2**64)",
    "engine.transfer_sync_write(b'x', here, there, 1)",
    "engine.transfer_sync_write(None, here, there, 1)",
    "engine.transfer_sync(name, here, there, 1, 1)",
    "engine.transfer_sync(name, here, there, 1, TransferOpcode.Write, 'x')",
    "engine.batch_transfer_sync_write(name, here, there, 1)",
    "engine.batch_transfer_sync_write(name, ['x'], [there], [1])",
    "engine.batch_transfer_sync_write(name, {here}, [there], [1])",
    "engine.register_memory('x', 1)",
    "engine.register_memory(fresh, -1)",
    "engine.batch_register_memory(None, [1])",
    "engine.allocate_managed_buffer(-5)",
    "engine.read_bytes_from_buffer(here, -1)",
    "engine.write_bytes_to_buffer(here, 5, 1)",
    "engine.transfer_check_status('x')",
    "engine.initialize('127.0.0.1', 'P2PHANDSHAKE', 5, '')",
    "engine.initialize('127.0.0.1')",
    "TransferNotify(b'x', 'y')",
]
BAD_CALLS = """
import ctypes, mmap, sys
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

def memory(size):
    keep.append(mmap.mmap(-1, size))
    return ctypes.addressof((ctypes.c_char * size).from_buffer(keep[-1]))

keep = []
engine, peer = TransferEngine(), TransferEngine()
here, there, fresh = memory(1 << 20), memory(1 << 20), memory(4096)
for one, address in ((engine, here), (peer, there)):
    assert one.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert one.register_memory(address, 1 << 20) == 0
name = f"127.0.0.1:{peer.get_rpc_port()}"
for call in sys.argv[1:]:
    try:
        print(repr(eval(call)))
    except Exception as error:
        print(type(error).__name__)
assert engine.transfer_sync_write(name, here, there, 1 << 20) == 0
"""


def answers(calls: list[str]) -> list[str]:
    return check_child(BAD_CALLS, *calls, LAYERCAKE_LOG="off").splitlines()


def test_bad_values_are_answered_with_a_negative_code():
    given = dict(zip(BAD_VALUES, answers(BAD_VALUES), strict=True))
    assert {call: answer for call, answer in given.items() if not answer.startswith("-")} == {}


def test_what_there_is_no_code_for_is_answered_with_nothing():
    given = dict(zip(NEUTRAL, answers(list(NEUTRAL)), strict=True))
    assert given == {call: repr(answer) for call, answer in NEUTRAL.items()}


def test_wrong_types_raise():
    given = dict(zip(WRONG_TYPES, answers(WRONG_TYPES), strict=True))
    assert {call: answer for call, answer in given.items() if answer != "TypeError"} == {}


@pytest.mark.parametrize(
    "last",
    [
        "[engine.transfer_submit_write(name, here, there, SIZE) for _ in range(20)]",
        "[threading.Thread(target=write, daemon=True).start() for _ in range(4)]",
        "engine.transfer_submit_write(name, engine.allocate_managed_buffer(SIZE), there, SIZE)",
        "del peer",
    ],
    ids=["under way", "daemon threads", "managed memory", "peer gone"],
)
def test_the_interpreter_ends_whatever_goes_on(transport, last):
    code = """
    import ctypes, mmap, threading
    from mooncake.engine import TransferEngine

    SIZE = 16 << 20
    def memory():
        keep.append(mmap.mmap(-1, SIZE))
        return ctypes.addressof((ctypes.c_char * SIZE).from_buffer(keep[-1]))
    def write():
        while True:
            engine.batch_transfer_sync_write(name, [here], [there], [SIZE])
    keep = []
    engine, peer, here, there = TransferEngine(), TransferEngine(), memory(), memory()
    for one, address in ((engine, here), (peer, there)):
        assert one.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert one.register_memory(address, SIZE) == 0
    name = f"127.0.0.1:{peer.get_rpc_port()}"
    assert engine.transfer_sync_write(name, here, there, SIZE) == 0
    """
    assert check_child(textwrap.dedent(code) + last, timeout=20, LAYERCAKE_TRANSPORTS=transport) == ""


def test_a_forked_child_is_told_and_goes_on():
    code = """
    import os
    from mooncake.engine import TransferEngine
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    if os.fork() == 0:
        try:
            engine.get_rpc_port()
        except Exception as error:
            print(type(error).__name__, flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), engine.get_rpc_port() > 0)
    """
    assert check_child(code) == "ForkError\n0 True\n"
