"""``mooncake.store`` when holders and masters go, and what layerwise connectors do with it."""

import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("mooncake.store", reason="layercake-mooncake is not installed")

from conftest import child_env, run_child, wait_until  # noqa: E402
from dropin import PRELUDE, check, clients, running_master  # noqa: E402
from masters import Master  # noqa: E402

MIB = 1 << 20


@pytest.fixture(scope="module")
def master():
    with running_master("--default_kv_lease_ttl=300", "--client_ttl=60") as (address, _):
        yield address


def test_what_a_killed_process_held_is_absent_at_once_though_nobody_touched_it():
    with running_master("--client_ttl=60") as (address, _), clients(address, 16 * MIB, 0) as (holder, client):
        assert holder.do("store.put_batch(['a', 'b'], [b'1', b'2'])") == 0
        assert client.do("store.batch_is_exist(['a', 'b', 'c'])") == [1, 1, 0]
        holder.kill()
        start = time.monotonic()
        wait_until(lambda: client.do("store.batch_is_exist(['a', 'b'])") == [0, 0])
        assert time.monotonic() - start < 2
        assert client.do("store.batch_is_readable(['a', 'b'])") == [0, 0]
        assert client.do("store.put('new', b'x')") == -200


def test_transfers_of_whole_objects_that_fail_say_that_the_memory_is_free():
    free = {-702, -704}
    with running_master("--client_ttl=60") as (address, _), clients(address, 16 * MIB, 0) as (holder, client):
        assert client.do("store.put_batch([f'k{i}' for i in range(3)], [bytes(100)] * 3)") == 0
        assert client.do("alive.append(alloc(4096)) or store.register_buffer(alive[-1], 4096)") == 0
        assert client.do("store.batch_put_session_start(['s'], [100])") == [0]
        assert client.do("store.batch_get_session_start(['k2'])") == [0]
        holder.kill()
        assert client.do("store.get_into('k0', alive[-1], 4096)") in free
        found = client.do("store.batch_get_into(['k0', 'k1'], [alive[-1]] * 2, [100] * 2)")
        assert set(found) <= free
        assert client.do("store.get('k0')") == b""
        ranges = "(['{}'], [[alive[-1]]], [[10]], [[0]])[0]"
        assert client.do("store.batch_get_into_multi_buffer_ranges" + ranges.format("k2")) == -800
        assert client.do("store.batch_put_from_multi_buffer_ranges" + ranges.format("s")) == -800
        assert client.do("store.batch_put_session_end(['s'])")[0] < 0


def test_a_value_that_another_client_replaced_meanwhile_says_that_the_memory_is_free(master):
    code = """
stores, sources, codes = [new(), new()], [alloc(MIB), alloc(MIB)], [set(), set()]
end = time.monotonic() + 60
def work(store, source, codes, others):
    # Until one of them took the key from the other.
    while not (codes | others) - {0} and time.monotonic() < end:
        codes.add(store.upsert_from("same", source, MIB))
threads = [threading.Thread(target=work, args=(stores[i], sources[i], codes[i], codes[1 - i])) for i in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert (codes[0] | codes[1]) - {0} == {-1700}, codes
"""
    check(code, master, LAYERCAKE_LOG="off")


def test_an_end_whose_memory_was_taken_back_finds_no_object():
    with Master() as master, clients(f"127.0.0.1:{master.rpc}", 16 * MIB, 0) as (holder, client):
        assert client.do("alive.append(alloc(4096)) or store.batch_put_session_start(list('abc'), [100] * 3)") == [0] * 3
        write = "store.batch_put_from_multi_buffer_ranges(['{}'], [[alive[-1]]], [[100]], [[0]])"
        assert client.do(write.format("a")) == [100]
        assert holder.do("store.close()") == 0
        assert client.do(write.format("b")) == [-800]
        for asked in (1, 2):
            assert client.do("store.batch_put_session_end(list('abc'))") == [-704] * 3
            assert master.metrics()["master_batch_exist_key_requests_total"] == asked, "once for all keys"
        assert client.do("store.batch_put_session_revoke(list('abc'))") == [0] * 3


def test_two_replicas_outlive_one_of_their_holders():
    with running_master("--client_ttl=60") as (address, _), clients(address, 16 * MIB, 16 * MIB, 0) as (a, _, client):
        keys, values = "[f'k{i}' for i in range(20)]", "[bytes([i]) * 1000 for i in range(20)]"
        assert client.do("alive.append(ReplicateConfig()) or setattr(alive[-1], 'replica_num', 2)") is None
        assert client.do(f"store.put_batch({keys}, {values}, alive[-1])") == 0
        a.kill()
        assert client.do(f"store.get_batch({keys}) == {values}") is True
        assert client.do(f"store.batch_is_exist({keys})") == [1] * 20
        assert client.do("[store.put(f'more{i}', b'x') for i in range(10)]") == [0] * 10


def test_a_dead_master_costs_milliseconds():
    with running_master() as (address, process), clients(address, 16 * MIB) as (client,):
        assert client.do("store.put('k', b'v')") == 0
        process.kill()
        process.wait()
        wait_until(lambda: client.do("store.batch_is_exist(['k'])") == [-900])
        assert client.do("store.health_check()") == 2
        start = time.monotonic()
        for _ in range(10):
            assert client.do("store.put('l', b'v')") == -900
            assert client.do("store.get('k')") == b""
            assert client.do("store.batch_get_session_start(['k'])") == [-900]
        assert time.monotonic() - start < 1
        assert client.do("store.close()") == 0


def test_probing_for_ever_does_not_keep_memory(master):
    code = """
store = new(8 * MIB)
keys = [f"p{i}" for i in range(6)]
assert store.put_batch(keys, [bytes(MIB)] * 6) == 0
assert store.batch_is_exist(keys) == [1] * 6
assert store.put("large", bytes(4 * MIB)) == -200, "what was probed is protected"
end = time.monotonic() + 5
while store.put("large", bytes(4 * MIB)) == -200:
    assert time.monotonic() < end, "probes kept everything"
    store.batch_is_exist(keys)
    time.sleep(0.02)
assert 0 in store.batch_is_exist(keys)
"""
    check(code, master, LAYERCAKE_LOG="error")


def test_copies_and_moves(master):
    code = """
import random
from mooncake.store import TaskStatus, TaskType
stores = [new() for _ in range(3)]
first, second, third = (store.get_hostname() for store in stores)
config = ReplicateConfig()
config.preferred_segment = first
value = random.randbytes(3 * MIB + 7)
assert stores[0].put("task", value, config) == 0

def ended(store, begun):
    task, code = begun
    assert code == 0
    end = time.monotonic() + 5
    while time.monotonic() < end:
        state, code = store.query_task(task)
        assert code == 0 and state.id == task
        if state.status in (TaskStatus.SUCCESS, TaskStatus.FAILED):
            return state
        time.sleep(0.005)

def holders():
    replicas = stores[0].get_replica_desc("task")
    return sorted(replica.get_memory_descriptor().buffer_descriptor.transport_endpoint for replica in replicas)

state = ended(stores[1], stores[1].create_copy_task("task", [second]))
assert (state.type, state.status, state.message) == (TaskType.REPLICA_COPY, TaskStatus.SUCCESS, "")
assert holders() == sorted([first, second])
state = ended(stores[1], stores[1].create_move_task("task", first, third))
assert (state.type, state.status) == (TaskType.REPLICA_MOVE, TaskStatus.SUCCESS)
assert holders() == sorted([second, third]) and stores[0].get("task") == value
assert stores[0].create_copy_task("task", ["nobody:1"]) == ((0, 0), -600)
assert stores[0].create_copy_task("task", []) == ((0, 0), -600)
assert stores[0].create_copy_task("none", [first]) == ((0, 0), -704)
assert stores[0].create_move_task("task", first, second) == ((0, 0), -600)
assert stores[0].query_task((1, 2)) == (None, -1400)
assert stores[0].batch_replica_clear(["task"], third) == [], "it is leased"
time.sleep(0.4)
assert stores[0].batch_replica_clear(["task", "none"], third) == ["task"]
assert holders() == [second] and stores[0].get("task") == value
assert stores[0].remove("task", True) == 0
"""
    check(code, master, LAYERCAKE_LOG="error")


def test_many_replicas_are_dropped_in_one_call(master):
    code = """
import random
stores = [new() for _ in range(2)]
first, second = (store.get_hostname() for store in stores)
values = {f"drop{i}": random.randbytes(10_000 + i) for i in range(40)}
config = ReplicateConfig()
config.replica_num = 2
for name, value in list(values.items())[:30]:
    assert stores[0].put(name, value, config) == 0
config.replica_num, config.preferred_segment = 1, second
for name, value in list(values.items())[30:]:
    assert stores[0].put(name, value, config) == 0

keys = ["none", *values, ""]
assert stores[0].batch_replica_clear(keys, second) == list(values)
found = stores[0].batch_get_replica_desc(keys)
assert list(found) == list(values)[:30], "what lay nowhere else is gone"
assert all(len(replicas) == 1 for replicas in found.values())
assert stores[1].close() == 0
assert all(stores[0].get(name) == values[name] for name in found)
"""
    check(code, master)


def test_a_tenant_is_told_where_the_master_knows_none():
    code = "store = new(tenant_id='team'); assert store.put('t', b'v') == 0 and new().get('t') == b'v'"
    with running_master() as (address, _):
        done = run_child(PRELUDE + code, address)
    assert done.returncode == 0, done.stderr
    assert "team" in done.stderr and "one key space" in done.stderr


# One rank's side of a layerwise connector: blocks of a paged cache, saved and loaded layer by layer.
LAYERWISE = """
LAYERS, PAGE, BLOCKS = 4, 1000, 6

class Rank:
    def __init__(self, rank):
        self.rank, self.store = rank, new(32 * MIB)
        self.cache = alloc(LAYERS * BLOCKS * PAGE)
        assert self.store.register_buffer(self.cache, LAYERS * BLOCKS * PAGE) == 0

    def keys(self, blocks, shared):
        return [f"block-{block}" if shared else f"block-{block}@{self.rank}" for block in blocks]

    def at(self, layer, block):
        return self.cache + (layer * BLOCKS + block) * PAGE

    def value(self, layer, block, seed):
        return (seed + 37 * layer + 11 * block) % 251 + 1

    def rows(self, layer, blocks):
        return [[self.at(layer, block)] for block in blocks], [[PAGE]] * len(blocks), [[layer * PAGE]] * len(blocks)

    def save(self, blocks, seed, shared=False, fail_after=None):
        there = self.store.batch_is_readable(self.keys(blocks, shared))
        missing = [block for block, found in zip(blocks, there) if found != 1]
        codes = self.store.batch_put_session_start(self.keys(missing, shared), [LAYERS * PAGE] * len(missing))
        assert set(codes) <= {0, -705}, codes
        mine = [block for block, code in zip(missing, codes) if code == 0]
        keys = self.keys(mine, shared)
        for layer in range(LAYERS):
            for block in mine:
                ctypes.memset(self.at(layer, block), self.value(layer, block, seed), PAGE)
            assert self.store.batch_put_from_multi_buffer_ranges(keys, *self.rows(layer, mine)) == [PAGE] * len(mine)
            if layer == fail_after:
                assert self.store.batch_put_session_revoke(keys) == [0] * len(mine)
                return []
        assert self.store.batch_put_session_end(keys) == [0] * len(mine)
        return mine

    def load(self, blocks, seed, shared=False):
        ctypes.memset(self.cache, 0, LAYERS * BLOCKS * PAGE)
        started = self.store.batch_get_session_start(self.keys(blocks, shared))
        good = [block for block, code in zip(blocks, started) if code == 0]
        keys = self.keys(good, shared)
        for layer in range(LAYERS):
            assert self.store.batch_get_into_multi_buffer_ranges(keys, *self.rows(layer, good)) == [PAGE] * len(good)
            for block in good:
                want = bytes([self.value(layer, block, seed)]) * PAGE
                assert ctypes.string_at(self.at(layer, block), PAGE) == want
        assert self.store.batch_get_session_end(keys) == 0
        return good

everything = list(range(BLOCKS))
"""


def test_two_ranks_save_in_chunks_and_load_what_is_readable(master):
    code = """
ranks = [Rank(0), Rank(1)]
for rank in ranks:
    assert rank.save([0, 1], rank.rank) == [0, 1]
    assert rank.store.batch_is_readable(rank.keys(everything, False)) == [1, 1, 0, 0, 0, 0]
    assert rank.save(everything, rank.rank) == [2, 3, 4, 5], "what is readable is not put again"
for rank in ranks:
    assert rank.load(everything, rank.rank) == everything
assert ranks[0].store.batch_is_readable(ranks[1].keys(everything, False)) == [1] * BLOCKS
ranks[0].store.remove_all(True)
"""
    check(LAYERWISE + code, master)


def test_a_save_that_failed_is_tried_again(master):
    code = """
rank = Rank(0)
assert rank.save(everything, 1, fail_after=1) == []
assert rank.store.batch_is_readable(rank.keys(everything, False)) == [0] * BLOCKS
assert rank.load(everything, 1) == []
assert rank.save(everything, 2) == everything
assert rank.load(everything, 2) == everything
rank.store.remove_all(True)
"""
    check(LAYERWISE + code, master)


def test_ranks_that_share_keys_save_each_block_once(master):
    code = """
ranks = [Rank(n) for n in range(3)]
saved, gate = {}, threading.Barrier(3)
def work(rank):
    gate.wait()
    saved[rank.rank] = rank.save(everything, 9, shared=True)
threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert sorted(sum(saved.values(), [])) == everything
for rank in ranks:
    assert rank.load(everything, 9, shared=True) == everything
ranks[0].store.remove_all(True)
"""
    check(LAYERWISE + code, master)


# A client whose upserts of one key wait for one that a stopped holder takes nothing of.
WAITS_FOR_ITS_TURN = """
import os, signal
holder, own = sys.argv[2], int(sys.argv[3])
def at(name):
    config = ReplicateConfig()
    config.preferred_segment = name
    return config
store = new(own)
here = at(store.get_hostname() if own else holder)
assert store.put("other", b"v", here) == 0
print("ready", flush=True)
sys.stdin.readline()
slow = threading.Thread(target=lambda: store.upsert("k", bytes(8 * MIB), at(holder)))
slow.start()
while store.get_size("k") != -703:
    assert slow.is_alive(), "its holder takes nothing"
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
"""

IS_INTERRUPTED = """
try:
    store.batch_upsert_from(["other", "", "k"], [alloc(10)] * 3, [10] * 3)
    raise SystemExit("it did not end")
except KeyboardInterrupt:
    assert slow.is_alive(), "it waited for its turn"
# Which fails for a reason of its own.
assert store.batch_put_session_end(["not open"]) == [-600]
slow.join()
assert store.get("other") != bytes(10), "nothing was replaced"
assert store.upsert("new", b"v") < 0
"""

# The signal's handler replaces a key that the call wants, too, and has reasons of its own.
HANDLER_UPSERTS = """
class Done(Exception):
    pass
def handler(*_):
    assert store.batch_put_session_end(["not open"]) == [-600]
    begun = time.monotonic()
    assert store.upsert("other", b"new", here) == 0
    assert time.monotonic() - begun < 20, "it waited for the call that it is part of"
    raise Done
signal.signal(signal.SIGINT, handler)
try:
    store.batch_upsert_from(["other", "", "k"], [alloc(10)] * 3, [10] * 3)
    raise SystemExit("it did not end")
except Done:
    assert store.get("other") == b"new"
slow.join()
"""


@pytest.mark.parametrize(
    ("body", "own"), [(IS_INTERRUPTED, 0), (HANDLER_UPSERTS, 16 * MIB)], ids=["interrupted", "handler upserts"]
)
def test_a_signal_ends_the_wait_for_another_upsert_of_the_key(body, own):
    with running_master("--client_ttl=60") as (address, _), clients(address, 16 * MIB) as (holder,):
        child = subprocess.Popen(
            [
                *(sys.executable, "-c", PRELUDE + WAITS_FOR_ITS_TURN + body),
                *(address, holder.do("store.get_hostname()"), str(own)),
            ],
            env=child_env(LAYERCAKE_TRANSPORTS="tcp"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout.readline() == "ready\n"
            holder.process.send_signal(signal.SIGSTOP)
            _, err = child.communicate("\n", timeout=60)
            assert child.returncode == 0, err
            # The batch had a bad key, whose reason is not that of another call's failure.
            (said,) = [line for line in err.splitlines() if "batch_put_session_end" in line]
            assert "no session" in said, said
        finally:
            child.kill()
            child.communicate()
