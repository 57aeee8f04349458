"""``mooncake.store``: what programs rely on beside results, each in a process of its own."""

import time

import pytest

pytest.importorskip("mooncake.store", reason="layercake-mooncake is not installed")

from conftest import check_child, run_child  # noqa: E402
from dropin import PRELUDE, check, running_master  # noqa: E402

@pytest.fixture(scope="module")
def master():
    with running_master("--default_kv_lease_ttl=300") as (address, _):
        yield address


def test_importing_needs_neither_numpy_nor_torch_and_says_nothing():
    code = """
    import sys
    sys.modules["numpy"] = sys.modules["torch"] = None
    import mooncake.store
    """
    assert check_child(code) == ""


def test_a_child_of_a_fork_is_told_so_and_its_parent_goes_on(master):
    code = """
import os
store = new()
assert store.put("fork", b"before") == 0
child = os.fork()
if child == 0:
    import layercake
    refused = 0
    for call in (lambda: store.get("fork"), lambda: store.batch_is_exist(["fork"]), store.close, store.health_check,
                 lambda: MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1])):
        try:
            call()
        except layercake.ForkError:
            refused += 1
    del store
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
assert store.get("fork") == b"before"
assert store.remove("fork", True) == 0
"""
    check(code, master)


def test_a_handle_is_its_process_s_alone(master):
    code = """
import os
import layercake
store = new()
data = os.urandom(100_000)
assert store.put("handle", data) == 0
handle, view = store.get_buffer("handle"), memoryview(store.get_buffer("handle"))
child = os.fork()
if child == 0:
    refused = 0
    for call in (handle.ptr, handle.size, lambda: len(handle), lambda: memoryview(handle), lambda: repr(handle)):
        try:
            call()
        except layercake.ForkError:
            refused += 1
    refused += bytes(view) == data
    del handle, view
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
assert bytes(memoryview(handle)) == data == bytes(view)
assert store.remove("handle", True) == 0
"""
    check(code, master)


def test_buffers_that_stayed_registered_are_in_nobody_s_way(master):
    code = """
import os
store = new()
data = os.urandom(5000)
assert store.put("stale", data) == 0
# As a program has it that frees memory without unregistering it: the heap gives the place to others.
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
places = sorted(libc.malloc(5000) for _ in range(4000))[2000:]
assert places[-1] - places[0] < 2000 * 5100, "in one piece"
for place in places[:-1]:
    libc.free(place)
assert store.register_buffer(places[0], places[-1] - places[0]) == 0
for _ in range(20):
    assert bytes(store.get_buffer("stale")) == data
for at in range(20):
    key = f"gaps {at}"
    assert store.batch_put_session_start([key], [5000]) == [0]
    assert store.batch_put_session_end([key]) == [0]
    assert store.get(key) == bytes(5000)
    assert store.remove(key, True) == 0
assert store.remove("stale", True) == 0
"""
    check(code, master)


def test_a_copy_for_which_there_is_no_memory_is_none(master):
    code = """
import os, resource
store = new(segment=128 * MIB)
assert store.put("large", bytes(64 * MIB)) == 0
assert store.get_buffer("missing") is None
with open("/proc/self/statm") as statm:
    now = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (now + 32 * MIB, limits[1]))
none = store.get_buffer("large")
resource.setrlimit(resource.RLIMIT_AS, limits)
assert none is None
assert store.get_buffer("large").size() == 64 * MIB
assert store.remove("large", True) == 0
"""
    # What the allocator has reserved of the address space beforehand is no part of the limit.
    check(code, master, LAYERCAKE_LOG="off", MIMALLOC_DISALLOW_ARENA_ALLOC="1")


def test_a_store_that_was_made_before_a_fork_may_be_set_up_in_the_child(master):
    code = """
import os
store = MooncakeDistributedStore()
child = os.fork()
if child == 0:
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1])
    os._exit(0 if code == 0 and store.close() == 0 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    check(code, master)


ENDS = {
    "with an open store": "",
    "with sessions open": """
assert store.batch_put_session_start(["open"], [MIB]) == [0]
assert store.put("read", b"x") == 0 and store.batch_get_session_start(["read"]) == [0]
""",
    "in a cycle": "store.self = None; cycle = [store]; cycle.append(cycle); del store, cycle",
    "while threads move bytes": """
source = alloc(8 * MIB)
assert store.register_buffer(source, 8 * MIB) == 0
def work():
    while True:
        store.upsert_from("busy", source, 8 * MIB)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
""",
    "after the master": "sys.argv[1] = None",
}


@pytest.mark.parametrize("how", ENDS)
def test_the_interpreter_may_end_in_any_order(master, how):
    start = time.monotonic()
    # Calls that closing cuts short fail, and say so.
    check("store = new(32 * MIB)\n" + ENDS[how], master, LAYERCAKE_LOG="error")
    assert time.monotonic() - start < 10


def test_threads_overlap_and_let_others_run(master):
    code = """
store = new(256 * MIB)
size = 8 * MIB
buffers = [alloc(size) for _ in range(4)]
for buffer in buffers:
    assert store.register_buffer(buffer, size) == 0
ticks, stop = [0], threading.Event()
def tick():
    while not stop.is_set():
        ticks[0] += 1
        time.sleep(0.001)
ticker = threading.Thread(target=tick)
ticker.start()
codes = []
def work(index):
    ctypes.memset(buffers[index], index + 1, size)
    for turn in range(4):
        key = f"overlap-{index}-{turn}"
        codes.append(store.put_from(key, buffers[index], size))
        codes.append(store.get_into(key, buffers[index], size) - size)
        codes.append(store.remove(key, True))
threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
stop.set()
ticker.join()
assert codes == [0] * 48, codes
assert ticks[0] > 5, ticks
for index, buffer in enumerate(buffers):
    assert ctypes.string_at(buffer, size) == bytes([index + 1]) * size
"""
    check(code, master, LAYERCAKE_LOG="error")


def test_closing_while_calls_run_ends_them_with_codes(master):
    code = """
store = new(64 * MIB)
source = alloc(4 * MIB)
assert store.register_buffer(source, 4 * MIB) == 0
seen, closed = [], threading.Event()
def work(index):
    last = False
    while not last:
        # At least one call of each kind begins behind the close.
        last = closed.is_set()
        seen.append(store.upsert_from(f"closing-{index}", source, 4 * MIB))
        seen.append(store.batch_is_exist(["closing-0", "closing-1"])[0])
threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
for thread in threads: thread.start()
while len(seen) < 30: time.sleep(0.001)
assert store.close() == 0
closed.set()
for thread in threads: thread.join()
assert all(type(code) is int and code <= 1 for code in seen)
assert seen[-1] < 0 and store.get("closing-0") == b""
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 0, "tcp", "", sys.argv[1]) == 0
assert store.register_buffer(source, 4 * MIB) == 0
assert store.put_from("again", source, 10) == 0
"""
    done = run_child(PRELUDE + code, master)
    assert done.returncode == 0, done.stderr


def test_room_behind_the_end_of_an_object_is_left_alone(master):
    code = """
import random, resource
store = new()
value = random.randbytes(10_000)
assert store.put("k", value) == 0
room = 512 * MIB
memory = alloc(room)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

def begin(length):
    return ctypes.string_at(memory, length)

before = peak()
assert store.get_into("k", memory, room) == len(value) and begin(len(value) + 1) == value + bytes(1)
# What follows need not even be mapped.
other = memory + MIB
assert store.batch_get_into(["k", "k"], [memory, other], [room, 1 << 40]) == [len(value)] * 2
assert ctypes.string_at(other, len(value) + 1) == value + bytes(1)
assert peak() - before < room // 4, "all of the room was touched"
assert store.remove("k", True) == 0
"""
    check(code, master)


# Each is a call that must neither crash nor hang, and what it may answer with.
BAD_CALLS = [
    "store.put_from('k', 0, 10)",
    "store.put_from('k', 1 << 63, 1 << 63)",
    "store.put_from('k', (1 << 64) - 1, 10)",
    "store.put_from('k', hole, 4096)",
    "store.get_into('there', hole, 4096)",
    "store.get_into('there', 0, 4096)",
    "store.get_into('there', 8, 1 << 60)",
    "store.batch_put_from(['k'], [hole], [1 << 40])",
    "store.batch_get_into(['there'], [hole], [10])",
    "store.batch_get_into_multi_buffers(['there'], [[hole]], [[5]])",
    "store.batch_put_from_multi_buffers(['k'], [[0, 0]], [[5, 5]])",
    "store.batch_put_from_multi_buffers(['k', 'l'], [[good]], [[5]])",
    "store.register_buffer(hole, 4096)",
    "store.register_buffer(good, (1 << 64) - 1)",
    "store.register_buffer(0, 4096)",
    "store.unregister_buffer(12345)",
    "store.batch_put_session_start(['s'], [1 << 63])",
    "store.batch_put_session_start([''], [1])",
    "store.batch_put_session_start(['x' * 65536], [1])",
    "store.batch_put_session_end(['never'])",
    "store.put('x' * 65536, b'v')",
    "store.put('', b'v')",
    "store.put('k', b'')",
    "store.remove_by_regex('([')",
    "store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 0, 'pigeon', '', sys.argv[1])",
    "store.setup('127.0.0.1', '', 0, 0, 'tcp', '', sys.argv[1])",
    "store.setup({'local_hostname': '127.0.0.1', 'metadata_server': 'P2PHANDSHAKE', 'colour': 'red'})",
    "store.setup({'local_hostname': '127.0.0.1', 'metadata_server': 'P2PHANDSHAKE', 'global_segment_size': 'much'})",
    "MooncakeDistributedStore().setup('127.0.0.1', 'P2PHANDSHAKE', 0, 0, 'tcp', '', 'etcd://somewhere')",
]

WRONG_TYPES = [
    "store.put(5, b'v')",
    "store.put('k', 'text')",
    "store.put('k', (8, 8))",
    "store.put('k', None)",
    "store.put_from('k', True, 10)",
    "store.put_from('k', good, -1)",
    "store.put_from('k', good, 1 << 64)",
    "store.put_from('k', 1.5, 10)",
    "store.put_from('k', float('nan'), 10)",
    "store.batch_put_from(['k'], [good], [True])",
    "store.batch_put_from('k', [good], [1])",
    "store.batch_put_from(['k'], good, [1])",
    "store.batch_put_from_multi_buffers(['k'], [good], [[1]])",
    "store.batch_put_session_start(['k'], [-1])",
    "store.batch_get_into_multi_buffer_ranges(['k'], [[good]], [[1]], [['0']])",
    "store.get_into_ranges([good], ['k'], [[[0]]], [[[0]]], [[[1]]])",
    "store.batch_is_exist('abc')",
    "store.batch_is_exist(None)",
    "store.batch_is_exist(['\\udc80'])",
    "store.put('k', b'v', 5)",
    "store.setup('127.0.0.1')",
    "store.setup(None, None)",
    "setattr(ReplicateConfig(), 'replica_num', -1)",
    "setattr(ReplicateConfig(), 'soft_pin_action', 1)",
    "setattr(ReplicateConfig(), 'group_ids', 'ab')",
]


def in_a_child(master: str, call: str, answer: str) -> None:
    code = f"""
store = new()
good = alloc(4096)
memory = mmap.mmap(-1, MIB)
view = ctypes.c_char.from_buffer(memory)
hole = ctypes.addressof(view)
del view
memory.close()
assert store.upsert("there", bytes(4096)) == 0
{answer.format(call=call)}
assert store.upsert("there", b"x") == 0 or store.health_check() == 1
print("lives")
"""
    done = run_child(PRELUDE + code, master, LAYERCAKE_SETUP_TIMEOUT="0.1")
    assert done.returncode == 0 and done.stdout == "lives\n", f"{done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("call", BAD_CALLS)
def test_a_bad_value_is_answered_with_a_code(master, call):
    answer = """
found = {call}
found = found if type(found) is list else [found]
assert found and all(type(code) is int and code < 0 for code in found), found
"""
    in_a_child(master, call, answer)


def test_wrong_types_raise_type_error(master):
    calls = "\n".join(
        f"""
try:
    {call}
except TypeError:
    pass
else:
    raise AssertionError({call!r})
"""
        for call in WRONG_TYPES
    )
    in_a_child(master, "", calls.replace("{", "{{").replace("}", "}}"))


ODD = {
    "store.put_batch(['odd-a', ''], [b'x', b'y'])": -600,
    "store.batch_is_exist(['odd-a', ''])": [1, 0],
    "store.get_size('')": -704,
    "store.batch_remove(['', 'none'])": [-704, -704],
    "store.get_into('', good, 10)": -704,
    "store.batch_get_session_start([''])": [-704],
    "store.batch_put_from(('odd-b',), (good,), range(10, 11))": [0],
    "store.get_into_ranges([good, good], [['odd-b']], [[[0]]], [[[0]]], [[[1]]])": [[[-600]], [[-600]]],
    "store.get_into_ranges([good], [['odd-b', 'none']], [[[0], [0]]], [[[0], [0]]], [[[1], [1]]])": [[[-600], [-704]]],
    "store.put('odd-c', b'x', config(group_ids=[]))": -600,
    "store.put('odd-c', b'x', config(soft_pin_ttl_ms=5))": -600,
    "store.put('odd-c', b'x', config(prefer_alloc_in_same_node=True))": 0,
    "store.remove('odd-c', 1)": 0,
    "memoryview(store.get_buffer('odd-a')).format": "b",
    "store.query_task((1, 2))": (None, -1400),
    "store.create_copy_task('none', [])": ((0, 0), -600),
    # What no segment has room for is refused as that, whatever lies behind its address.
    "store.batch_put_from(['odd-d', 'odd-e', 'odd-f'], [good] * 3, [10, 1 << 40, 10])": [0, -200, 0],
    "store.batch_put_from_multi_buffers(['odd-g', 'odd-h'], [[good, good], [good]], [[5, 1 << 62], [10]])": [-200, 0],
    "store.upsert_from('odd-e', good, 1 << 40)": -200,
}


def test_answers_to_odd_arguments_are_mooncake_s(master):
    calls = "\n".join(f"found.append({call})" for call in ODD)
    code = f"""
def config(**fields):
    made = ReplicateConfig()
    for name, value in fields.items():
        setattr(made, name, value)
    return made

store = new()
good, found = alloc(4096), []
{calls}
print(repr(found))
"""
    # The destination of ranges is not registered here, which is one more refusal.
    assert check(code, master, LAYERCAKE_LOG="error").strip() == repr(list(ODD.values()))


def test_upserts_of_one_key_by_many_threads_are_all_done(master):
    code = """
store = new()
values = [bytes([number]) * 50_000 for number in range(8)]
codes = []

def replace(number):
    codes.append([store.upsert("same", values[number]) for _ in range(20)])

threads = [threading.Thread(target=replace, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert codes == [[0] * 20] * 8, codes
assert store.get("same") in values
assert store.remove("same", True) == 0
"""
    check(code, master)


def test_values_are_all_that_has_bytes_and_keys_any_sequence(master):
    code = """
import collections
import numpy

class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]

store = new()
scalars = [ctypes.c_int(7), Pair(3, 4.5), numpy.array(7), numpy.float32(5), numpy.datetime64("2026-11-30"),
           numpy.array(["2026-11-30"], "datetime64[D]"), numpy.array(4 + 2j)]
for index, value in enumerate(scalars):
    key = f"scalar {index}"
    expected = value.tobytes() if hasattr(value, "tobytes") else bytes(memoryview(value))
    assert store.put(key, value) == 0, value
    assert store.get(key) == expected, value
    assert store.put_batch([key + "b"], [value]) == 0 == store.put_parts(key + "p", b"x", value)
    assert store.get(key + "b") == expected and store.get(key + "p") == b"x" + expected

keys = ["scalar 0", "none", "scalar 1"]
for kind in (tuple, collections.deque, numpy.array, collections.UserList, lambda keys: numpy.array(keys, object)):
    assert store.batch_is_exist(kind(keys)) == [1, 0, 1], kind
    memory = alloc(4096)
    pointers, sizes = [[memory], [memory + 100], [memory + 200]], [[4], [4], [16]]
    found = store.batch_get_into_multi_buffers(kind(keys), collections.deque(pointers), collections.UserList(sizes))
    assert found == [4, -704, 16], found
    assert store.batch_get_session_start(kind(keys)) == [0, -704, 0]
    assert store.batch_get_session_end(kind(keys)) == 0
for wrong in ("scalar 0", b"scalar 0", {"scalar 0": 1}, {"scalar 0"}, (key for key in keys), 5, None):
    try:
        store.batch_is_exist(wrong)
        raise SystemExit(f"{wrong!r} was taken for keys")
    except TypeError:
        pass
"""
    check(code, master)
