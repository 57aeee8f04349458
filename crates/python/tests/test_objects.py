"""Whole objects: put, get, and what becomes of them."""

import array
import ctypes
import mmap
import random

import numpy as np
import pytest

import layercake
from conftest import MIB, wait_until


def test_an_object_comes_back_as_it_was(store, key, rng):
    for size in (1, 100, 4096, 65_537, 3 * MIB + 1):
        k, data = key(), rng.randbytes(size)
        assert store.put(k, data) is True
        assert store.get(k) == data
        assert store.size(k) == size
        assert store.exists(k)


def test_the_first_value_of_a_key_stays(store, key):
    k = key()
    assert store.put(k, b"first") is True
    assert store.put(k, b"second, longer") is False
    assert store.get(k) == b"first"


def test_upsert_replaces(store, key):
    k = key()
    for value in (b"one", b"and another", b"2"):
        store.upsert(k, value)
        assert store.get(k) == value


class Tensor:
    """What the package asks a tensor for."""

    def __init__(self, data: np.ndarray, device: str = "cpu", contiguous: bool = True):
        self.data, self.contiguous = data, contiguous
        self.device = type("device", (), {"type": device})

    def data_ptr(self):
        return self.data.ctypes.data

    def numel(self):
        return self.data.size

    def element_size(self):
        return self.data.itemsize

    def is_contiguous(self):
        return self.contiguous


def lent(kind: str, data: bytes):
    """The same bytes in another kind of object, and something that must outlive it."""
    match kind:
        case "bytes":
            return data, None
        case "bytearray":
            return bytearray(data), None
        case "memoryview":
            return memoryview(data), None
        case "array":
            return array.array("d", data), None
        case "numpy":
            return np.frombuffer(data, dtype=np.float32).reshape(4, -1), None
        case "ctypes":
            return (ctypes.c_char * len(data)).from_buffer_copy(data), None
        case "tensor":
            return Tensor(np.frombuffer(data, dtype=np.int16).copy()), None
        case "address":
            memory = mmap.mmap(-1, len(data))
            memory.write(data)
            view = (ctypes.c_char * len(data)).from_buffer(memory)
            return (ctypes.addressof(view), len(data)), view


KINDS = ["bytes", "bytearray", "memoryview", "array", "numpy", "ctypes", "tensor", "address"]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_taken_from_any_object_that_lends_memory(store, key, rng, kind):
    k, data = key(), rng.randbytes(4096)
    source, keep = lent(kind, data)
    store.put(k, source)
    assert store.get(k) == data
    del keep


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bytes", "memoryview", "numpy")])
def test_and_put_into_any_that_is_writable(store, key, rng, kind):
    k, data = key(), rng.randbytes(4096)
    store.put(k, data)
    target, keep = lent(kind, bytes(4096))
    assert store.get_into(k, target) == 4096
    match kind:
        case "address":
            assert ctypes.string_at(*target) == data
        case "tensor":
            assert target.data.tobytes() == data
        case _:
            assert bytes(target) == data
    del keep


def test_a_buffer_may_be_roomy_and_must_not_be_small(store, key):
    k = key()
    store.put(k, b"12345")
    room = bytearray(b"........")
    assert store.get_into(k, room) == 5
    assert room == b"12345..."
    with pytest.raises(layercake.InvalidArgument, match="4 bytes.*5"):
        store.get_into(k, bytearray(4))


def test_buffers_that_can_not_be_used_are_refused_with_the_reason(store, key):
    k = key()
    store.put(k, b"123")
    with pytest.raises(TypeError, match="read-only"):
        store.get_into(k, bytes(8))
    with pytest.raises(ValueError, match="contiguous"):
        store.put(key(), memoryview(bytes(16))[::2])
    with pytest.raises(ValueError, match="cuda"):
        store.put(key(), Tensor(np.zeros(4), device="cuda"))
    with pytest.raises(ValueError, match="contiguous"):
        store.put(key(), Tensor(np.zeros(4), contiguous=False))
    with pytest.raises(TypeError, match="buffer protocol"):
        store.put(key(), "text")
    with pytest.raises(layercake.InvalidArgument, match="0 bytes"):
        store.put(key(), b"")


def test_one_bad_entry_never_fails_its_neighbours(store, key, rng):
    good, other, data = key(), key(), rng.randbytes(100)
    stored = store.put_many([(good, data), (key(), b""), (good, b"again"), (other, data[:50])])
    assert stored[0] is True and stored[2] is False and stored[3] is True
    assert isinstance(stored[1], layercake.InvalidArgument)

    found = store.get_many([good, key(), "", other, good])
    assert [found[i] for i in (0, 3, 4)] == [data, data[:50], data]
    assert isinstance(found[1], layercake.NotFound)
    assert isinstance(found[2], layercake.InvalidArgument)

    assert store.exists_many([good, key(), other])[:3] == [True, False, True]
    assert store.exists_many([good, other], readable=True) == [True, True]

    one, small, two = bytearray(100), bytearray(10), bytearray(60)
    done = store.get_into_many([(good, one), (other, small), (other, two)])
    assert (done[0], done[2]) == (100, 50) and isinstance(done[1], layercake.InvalidArgument)
    assert one == data and two == data[:50] + bytes(10) and small == bytes(10)


def test_an_empty_batch_has_no_answers(store):
    assert store.put_many([]) == []
    assert store.get_many([]) == []
    assert store.exists_many([]) == []
    assert store.remove_many([]) == []
    assert store.start_puts([], []) == []
    assert store.start_gets([]) == []
    assert store.longest_prefix([]) == (0, 0)


def test_removal_respects_leases_unless_forced(store, key):
    k = key()
    store.put(k, b"x")
    store.remove(k)
    with pytest.raises(layercake.NotFound):
        store.remove(k)
    store.put(k, b"x")
    with store.start_get(k):
        with pytest.raises(layercake.Leased):
            store.remove(k)
        store.remove(k, force=True)
    assert not store.exists(k)


def test_the_end_of_the_last_session_gives_the_lease_back(store, key):
    k = key()
    store.put(k, b"x")
    store.start_get(k).end()
    store.remove(k)


def test_removal_by_pattern_counts(store, key):
    keys = [key() for _ in range(5)]
    store.put_many([(k, b"v") for k in keys])
    prefix = keys[0].rsplit("/", 1)[0]
    assert store.keys(prefix + "/") == sorted(keys)
    assert store.keys(prefix + "/", limit=2, after=sorted(keys)[0]) == sorted(keys)[1:3]
    import re

    assert store.remove_matching("^" + re.escape(prefix) + "/[0-2]$") == 3
    assert store.exists_many(keys).count(True) == 2
    with pytest.raises(layercake.InvalidArgument):
        store.remove_matching("(")


def test_a_prefix_ends_at_the_first_miss(store, key):
    keys = [key() for _ in range(10)]
    store.put_many([(k, b"v") for k in keys[:4] + keys[5:]])
    for window in (1, 3, 64):
        blocks, epoch = store.longest_prefix(keys, window)
        assert blocks == 4 and epoch > 0


def test_stat_says_where_an_object_lies(store, key):
    k = key()
    store.put(k, b"12345", layercake.ReplicateConfig(hard_pin=True), group="g")
    stat = store.stat(k)
    assert stat["size"] == 5 and stat["state"] == "complete"
    assert stat["group"] == "g" and stat["hard_pinned"] and not stat["soft_pinned"]
    assert [replica["name"] for replica in stat["replicas"]] == [store.name]
    with pytest.raises(layercake.NotFound):
        store.stat(key())
    assert any(segment["name"] == store.name for segment in store.segments())
    assert store.status()["objects"] >= 1


def test_a_full_store_says_so_or_makes_room(key):
    with layercake.serve(capacity=8 * MIB, lease=0.2) as cluster:
        store = cluster.store
        pinned = layercake.ReplicateConfig(hard_pin=True)
        results = store.put_many([(key(), bytes(MIB)) for _ in range(12)], pinned)
        refused = [result for result in results if result is not True]
        assert refused and all(isinstance(error, layercake.NoSpace) for error in refused)
        assert all(error.retryable for error in refused)
        store.remove_all(force=True)
        wait_until(lambda: store.status()["quarantined_bytes"] == 0)
        for _ in range(30):
            assert store.put(key(), bytes(MIB)) is True
        assert store.status()["evicted_objects"] > 0


def test_a_random_history_matches_a_dictionary(cluster, key):
    """Whatever was last stored under a key is what two clients read."""
    rng, model, keys = random.Random(7), {}, [key() for _ in range(6)]
    with layercake.Store(cluster.master) as other:
        for _ in range(400):
            store, k = rng.choice([cluster.store, other]), rng.choice(keys)
            match rng.randrange(4):
                case 0:
                    value = rng.randbytes(rng.randrange(1, 9000))
                    assert store.put(k, value) is (k not in model)
                    model.setdefault(k, value)
                case 1:
                    model[k] = rng.randbytes(rng.randrange(1, 9000))
                    store.upsert(k, model[k])
                case 2:
                    removed = store.remove_many([k], force=True)[0]
                    assert (removed is None) == (model.pop(k, None) is not None)
                case _:
                    found = store.get_many(keys)
                    for each, value in zip(keys, found, strict=True):
                        if each in model:
                            assert value == model[each]
                        else:
                            assert isinstance(value, layercake.NotFound)


def test_scalars_have_bytes_to_read_and_to_write(store, key):
    name = key()
    store.put(name, ctypes.c_uint32(0x01020304))
    number = ctypes.c_uint32()
    assert store.get_into(name, number) == 4 and number.value == 0x01020304
    store.put(other := key(), np.array(2.5))
    value = np.array(0.0)
    assert store.get_into(other, value) == 8 and value == 2.5
    with pytest.raises(TypeError, match="read-only"):
        store.get_into(name, np.float32(5))
