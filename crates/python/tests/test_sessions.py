"""Range sessions through Python."""

import ctypes
import threading

import numpy as np
import pytest

import layercake
from conftest import wait_until


def address(buffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_ranges_in_any_order_make_an_object(store, key, rng):
    k, data = key(), rng.randbytes(50_000)
    cuts = sorted({0, 50_000, *(rng.randrange(1, 50_000) for _ in range(40))})
    spans = list(zip(cuts, cuts[1:], strict=False))
    rng.shuffle(spans)
    with store.start_put(k, len(data)) as session:
        for start, end in spans:
            assert not store.exists(k)
            assert session.write(start, data[start:end]) == end - start
        assert session.written == len(data) and session.missing == []
    assert store.get(k) == data
    with store.start_get(k) as session:
        assert session.size == len(data)
        for start, end in spans:
            assert session.read(start, end - start) == data[start:end]
        assert session.read() == data
        room = bytearray(1000)
        assert session.read_into(17, room) == 1000
        assert room == data[17:1017]


def test_layers_of_many_blocks_move_in_one_call_each(cluster, key, rng):
    """Save and load as a connector does: per layer one call, over all blocks."""
    blocks, layers, entry = 13, 5, 700
    size = layers * 2 * entry
    keys = [key() for _ in range(blocks)]
    source = bytearray(rng.randbytes(blocks * size))
    target = bytearray(len(source))
    with layercake.Store(cluster.master) as store:
        for buffer in (source, target):
            store.register_buffer(address(buffer), len(buffer))
        base = address(source)
        puts = store.start_puts(keys, [size] * blocks)
        sizes = np.full((blocks, 2), entry, dtype=np.int64)
        for layer in range(layers):
            offsets = np.array([[2 * layer * entry, (2 * layer + 1) * entry]] * blocks, dtype=np.uint64)
            addresses = base + np.arange(blocks, dtype=np.uint64)[:, None] * np.uint64(size) + offsets
            assert store.write_ranges(puts, addresses, sizes, offsets) == [2 * entry] * blocks
        assert store.end_puts(puts) == [None] * blocks
        gets = store.start_gets(keys)
        base = address(target)
        for layer in range(layers):
            offsets = [[2 * layer * entry, (2 * layer + 1) * entry]] * blocks
            addresses = [[base + block * size + offset for offset in offsets[block]] for block in range(blocks)]
            done = store.read_ranges(gets, addresses, [[entry, entry]] * blocks, offsets)
            assert done == [2 * entry] * blocks
        store.end_gets(gets)
        assert target == source
        for buffer in (source, target):
            store.unregister_buffer(address(buffer))
        stats = store.stats()
        assert stats["bytes_written"] == stats["bytes_read"] == stats["bytes_verified"] == len(source)


def test_an_object_with_a_gap_is_not_published(store, key):
    k = key()
    session = store.start_put(k, 100)
    session.write(0, bytes(40))
    session.write(60, bytes(40))
    with pytest.raises(layercake.Incomplete, match="40"):
        session.end()
    assert session.missing == [(40, 60)]
    session.write(40, bytes(20))
    session.end()
    assert store.size(k) == 100


def test_only_one_writer_starts_and_the_others_can_follow(cluster, key):
    k, data = key(), bytes(range(100))
    with layercake.Store(cluster.master) as other:
        session = cluster.store.start_put(k, 100)
        with pytest.raises(layercake.AlreadyExists):
            other.start_put(k, 100)
        with pytest.raises(layercake.NotReady):
            other.get(k)
        assert isinstance(other.wait_complete([k], timeout=0.05)[0], layercake.NotReady)
        session.write(0, data)
        follower = threading.Thread(target=session.end)
        follower.start()
        assert other.wait_complete([k], timeout=20) == [None]
        follower.join()
        assert other.get(k) == data
        with pytest.raises(layercake.AlreadyExists):
            other.start_put(k, 1)


def test_a_revoked_key_is_free_at_once(store, key):
    k = key()
    session = store.start_put(k, 10)
    session.revoke()
    with pytest.raises(layercake.SessionEnded):
        session.write(0, bytes(10))
    with pytest.raises(layercake.SessionEnded):
        session.end()
    assert store.put(k, b"new") is True


def test_leaving_a_block_by_an_exception_revokes(store, key):
    k = key()
    with pytest.raises(ZeroDivisionError):
        with store.start_put(k, 1) as session:
            session.write(0, b"x")
            raise ZeroDivisionError
    assert store.put(k, b"free") is True


def test_a_session_may_be_ended_inside_its_block(store, key):
    k = key()
    with store.start_put(k, 1) as session:
        session.write(0, b"x")
        session.end()
    assert store.get(k) == b"x"


def test_a_dropped_session_is_revoked_in_the_background(store, key):
    k = key()
    del_me = store.start_put(k, 10)
    del del_me
    wait_until(lambda: store.put(k, b"free"))


def test_readers_keep_their_version_when_it_is_replaced(store, key):
    k, old, new = key(), bytes(5000), b"\1" * 3000
    store.put(k, old)
    reader = store.start_get(k)
    with store.start_put(k, len(new), replace=True) as session:
        session.write(0, new)
        assert store.get(k) == old
    assert store.get(k) == new
    try:
        assert reader.read() == old
    except layercake.LayercakeError:
        pass  # An error is as good: never a mixture.
    reader.end()


def test_entries_of_a_batch_fail_alone(store, key):
    taken, free = key(), key()
    store.put(taken, b"x")
    sessions = store.start_puts([taken, free, "", free], [1, 10, 1, 1])
    assert isinstance(sessions[0], layercake.AlreadyExists)
    assert isinstance(sessions[1], layercake.PutSession)
    assert isinstance(sessions[2], layercake.InvalidArgument)
    assert isinstance(sessions[3], layercake.AlreadyExists)

    ended = store.start_put(key(), 10)
    ended.revoke()
    source = bytearray(b"0123456789")
    done = store.write_ranges(
        [sessions[1], ended, sessions[1]],
        [[address(source)], [address(source)], [address(source)]],
        [[5], [5], [5]],
        [[0], [0], [8]],
    )
    assert done[0] == 5
    assert isinstance(done[1], layercake.SessionEnded)
    assert isinstance(done[2], layercake.InvalidArgument), "beyond the object"
    assert sessions[1].missing == [(5, 10)], "nothing of a refused entry was written"
    done = store.end_puts([sessions[1], ended])
    assert isinstance(done[0], layercake.Incomplete) and isinstance(done[1], layercake.SessionEnded)
    assert store.revoke_puts([sessions[1]]) == [None]


def test_lists_of_different_lengths_are_refused_before_anything_moves(store, key):
    session = store.start_put(key(), 10)
    source = bytearray(10)
    row = [[address(source)]]
    for table in ((row, [[5]], []), (row, [], [[0]]), (row * 2, [[5]], [[0]]), (row, [[5, 5]], [[0]])):
        with pytest.raises(layercake.InvalidArgument, match="length|row 0"):
            store.write_ranges([session], *table)
    with pytest.raises(layercake.InvalidArgument, match="length"):
        store.start_puts([key()], [1, 2])
    assert session.written == 0
    session.revoke()


def test_sessions_of_another_store_are_refused(cluster, key):
    with layercake.Store(cluster.master) as other:
        session = other.start_put(key(), 10)
        with pytest.raises(layercake.InvalidArgument, match="another store"):
            cluster.store.end_puts([session])
        session.revoke()


def test_closing_a_store_gives_its_open_sessions_up(cluster, key):
    k = key()
    other = layercake.Store(cluster.master)
    session = other.start_put(k, 10)
    other.close()
    assert cluster.store.put(k, b"free") is True
    with pytest.raises(layercake.LayercakeError):
        session.end()
    with pytest.raises(layercake.Closed):
        other.get(k)
    other.close()


def test_reads_outside_the_object_are_refused(store, key):
    k = key()
    store.put(k, b"0123456789")
    with store.start_get(k) as session:
        for offset, length in ((0, 0), (0, 11), (10, 1), (2**64 - 1, 2), (5, 2**63)):
            with pytest.raises(layercake.InvalidArgument):
                session.read(offset, length)
        with pytest.raises(layercake.InvalidArgument):
            session.read_into(8, bytearray(3))
        assert session.read(9) == b"9"
    with pytest.raises(layercake.SessionEnded):
        session.read()
