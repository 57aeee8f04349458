"""What `mooncake` has beside stores and engines: pools of buffers, host memory, shared segments, asyncio, tables of embeddings."""

import asyncio
import gc
import inspect
import multiprocessing
import os
import threading

import numpy
import pytest

pytest.importorskip("mooncake", reason="layercake-mooncake is not installed")

from conftest import MIB, check_child  # noqa: E402
from mooncake import buffer_pool, store as names  # noqa: E402
from mooncake.async_store import MooncakeDistributedStoreAsync  # noqa: E402
from mooncake.engine import RpcInterface, SharedSegment, TransferEngine, create_rpc_client, create_rpc_server  # noqa: E402
from mooncake.store import BufferPool, EngramStore, EngramStoreConfig, MooncakeDistributedStore  # noqa: E402


@pytest.fixture(scope="module")
def store(cluster):
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 * MIB, "tcp", "", cluster.master) == 0
    yield store
    store.close()


def test_a_buffer_is_registered_and_comes_back(store, key, rng):
    pool = BufferPool(store)
    data = rng.randbytes(100_000)
    with pool.acquire(len(data)) as lease:
        assert lease.size == len(lease.buffer) == len(data) and lease.buffer.format == "B"
        assert store.register_buffer(lease.ptr, 10) == -600, "it is registered already"
        lease.buffer[:] = data
        name = key()
        assert store.put_from(name, lease.ptr, len(data)) == 0
        address = lease.ptr
    with pytest.raises(RuntimeError, match="lease is closed"):
        _ = lease.ptr
    with pytest.raises(RuntimeError, match="lease is closed"):
        _ = lease.buffer
    lease.release()
    with pool.buffer(70_000) as again:
        assert again.ptr == address, "of the same size class"
        assert store.get_into(name, again.ptr, 100_000) == 100_000
        with pytest.raises(RuntimeError, match="active leases"):
            pool.close()
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(10)
    assert store.register_buffer(address, 10) == 0 == store.unregister_buffer(address)


def test_a_lease_is_not_released_while_there_are_views_of_its_bytes(store):
    pool = BufferPool(store, max_regions=1, block_on_exhaustion=False)
    lease = pool.acquire(100)
    for view in (lambda: lease.buffer, lambda: lease.buffer[2:5], lambda: numpy.frombuffer(lease.buffer, "B")):
        held = view()
        with pytest.raises(RuntimeError, match="cannot release buffer while exported views exist"):
            lease.release()
        held[0] = 7
        assert lease.buffer[0:3].tobytes().count(7) == 1, "the lease is as it was"
        lease.buffer[:3] = bytes(3)
        del held
    lease.release()
    with pool.acquire(100):
        pass
    lease = pool.acquire(100)
    view = lease.buffer
    del lease
    gc.collect()
    with pytest.raises(RuntimeError, match="all buffers are lent"):
        pool.acquire(100)
    del view
    with pool.acquire(100):
        pass
    pool.close()


def test_a_pool_is_its_process_s_and_a_child_s_writes_are_its_own(cluster):
    code = """
    import os, sys
    from layercake.errors import ForkError
    from mooncake.store import BufferPool, MooncakeDistributedStore
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1]) == 0
    pool = BufferPool(store)
    lease = pool.acquire(100)
    view = lease.buffer
    view[:4] = b"mine"
    child = os.fork()
    if child == 0:
        view[:4] = b"your"
        calls = (lambda: pool.acquire(10), lambda: pool.prewarm(10, 1), pool.close, lambda: lease.ptr, lambda: lease.buffer, lease.release)
        refused = 0
        for call in calls:
            try:
                call()
            except ForkError:
                refused += 1
        del view, lease, pool
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    assert bytes(view[:4]) == b"mine"
    del view
    lease.release()
    pool.close()
    """
    check_child(code, cluster.master)


def test_a_full_pool_waits_or_says_so(store):
    pool = BufferPool(store, max_bytes=4 * MIB, min_size_class=MIB, block_on_exhaustion=False)
    leases = [pool.acquire(MIB) for _ in range(4)]
    with pytest.raises(RuntimeError, match="all buffers are lent"):
        pool.acquire(1)
    with pytest.raises(RuntimeError, match="all buffers are lent"):
        pool.acquire(1, block=True, timeout=0.05)
    with pytest.raises(RuntimeError, match="exceeds pool capacity"):
        pool.acquire(4 * MIB + 1)
    got = []
    waiter = threading.Thread(target=lambda: got.append(pool.acquire(MIB, block=True, timeout=20)))
    waiter.start()
    leases.pop().release()
    waiter.join()
    assert got[0].size == MIB
    for lease in (*leases, *got):
        lease.release()
    with pool.acquire(4 * MIB) as large:
        assert large.size == 4 * MIB, "free buffers of other sizes make room"
    pool.close()


def test_a_lease_that_was_forgotten_comes_back(store):
    pool = BufferPool(store, max_regions=1, block_on_exhaustion=False)
    pool.acquire(10)
    gc.collect()
    with pool.acquire(10):
        pass
    pool.close()


def test_pools_are_made_beforehand_and_refused(store):
    pool = BufferPool(store, prewarm_size=MIB, prewarm_count=3, max_bytes=3 * MIB, block_on_exhaustion=False)
    leases = [pool.acquire(MIB) for _ in range(3)]
    assert len({lease.ptr for lease in leases}) == 3
    with pytest.raises(RuntimeError, match="more than the pool may hold"):
        pool.prewarm(MIB, 1)
    with pytest.raises(RuntimeError, match="not initialized"):
        BufferPool(MooncakeDistributedStore())
    with pytest.raises(RuntimeError, match="MooncakeDistributedStore is needed"):
        BufferPool(5)
    for alignment in (0, 3):
        with pytest.raises(RuntimeError, match="alignment"):
            BufferPool(store, alignment=alignment)
    for size in (-1, "x", True, 1.5, 1 << 64):
        with pytest.raises(TypeError):
            pool.acquire(size)
    assert names.RegisteredBufferPool is BufferPool is buffer_pool.BufferPool is buffer_pool.RegisteredBufferPool
    assert names.RegisteredBufferLease is names.BufferLease


def test_copies_that_are_kept_stay_what_they_are_and_others_make_room(store, key, rng):
    sizes = [200_000, 200_001, 190_000, 70_000, 100, 5 << 20]
    data = {key(): rng.randbytes(size) for size in sizes * 4}
    for name, value in data.items():
        assert store.put(name, value) == 0
    names_ = list(data)
    held, views = {}, []
    for turn in range(60):
        name = rng.choice(names_)
        handle = store.get_buffer(name)
        assert len(handle) == len(data[name]) and bytes(memoryview(handle)) == data[name]
        held[turn] = (name, handle)
        if turn % 3 == 0:
            views.append((name, memoryview(handle)))
        if len(held) > 8:
            del held[rng.choice(list(held))]
        del handle
    for name, handle in held.values():
        assert bytes(memoryview(handle)) == data[name]
    for name, view in views:
        assert bytes(view) == data[name], "a view keeps its bytes when the handle is gone"
    view.cast("B")[:4] = b"\1\2\3\4"
    assert store.get(name) == data[name], "the object is not touched"


def test_host_memory_by_address(store, key):
    allocator = names.MooncakeHostMemAllocator()
    address = names.MooncakeHostMemAllocator().alloc(10_000)
    assert address % 4096 == 0
    assert TransferEngine.write_bytes_to_buffer(address, b"abc", 3) == 0
    assert store.put_from(name := key(), address, 5) == 0
    assert store.get(name) == b"abc\0\0"
    assert allocator.free(address) == 0
    assert allocator.free(address) == -1 == allocator.free(12345)
    for size in (0, 1 << 62):
        with pytest.raises(RuntimeError, match="can't be allocated"):
            allocator.alloc(size)
    with pytest.raises(TypeError):
        allocator.alloc(-1)


def test_threads_are_bound_to_nodes():
    code = """
    import os
    from mooncake.store import bind_to_numa_node
    before = os.sched_getaffinity(0)
    bind_to_numa_node(4095)
    bind_to_numa_node(-1)
    assert os.sched_getaffinity(0) == before
    bind_to_numa_node(0)
    print(os.sched_getaffinity(0) <= set(range(os.cpu_count())))
    """
    assert check_child(code) == "True\n"
    with pytest.raises(TypeError):
        names.bind_to_numa_node("0")


def _other_end(pipe):
    segment, blob = SharedSegment.create("shared", 5000, 2, 1)
    pipe.send(blob)
    segment.complete(pipe.recv())
    assert segment.ready() and segment.size() == 8192
    seen = TransferEngine.read_bytes_from_buffer(segment.base_addr(), 5)
    TransferEngine.write_bytes_to_buffer(segment.base_addr() + 4096, b"there", 5)
    pipe.send(seen)


def test_a_segment_is_the_same_memory_in_two_processes():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_other_end, args=(there,))
    child.start()
    segment, blob = SharedSegment.create("shared", 5000, 2, 0)
    assert not segment.ready() and SharedSegment.supported()
    blobs = [blob, here.recv()]
    segment.complete(blobs)
    TransferEngine.write_bytes_to_buffer(segment.base_addr(), b"hello", 5)
    here.send(blobs)
    assert here.recv() == b"hello"
    child.join()
    assert child.exitcode == 0
    assert TransferEngine.read_bytes_from_buffer(segment.base_addr() + 4096, 5) == b"there"
    assert (segment.device_addr(), segment.size()) == (0, 8192)
    mine = f"layercake_{os.getpid()}_"
    assert any(name.startswith(mine) for name in os.listdir("/dev/shm"))
    del segment
    assert not any(name.startswith(mine) for name in os.listdir("/dev/shm"))


def test_segments_that_are_refused():
    segment, blob = SharedSegment.create("one", 4096, 1, 0)
    _, other = SharedSegment.create("two", 4096, 1, 0)
    for blobs in ([], [blob, blob], [other], [blob[:-1]], [b"x" * len(blob)]):
        with pytest.raises(RuntimeError, match="InvalidArgument"):
            segment.complete(blobs)
    for size, world, rank in ((0, 1, 0), (1 << 47, 1, 0), (10, 1, 1), (10, 0, 0)):
        with pytest.raises(RuntimeError, match="InvalidArgument"):
            SharedSegment.create("x", size, world, rank)
    with pytest.raises(NotImplementedError, match="host_register=False"):
        SharedSegment.create("x", 4096, 1, 0, host_register=True)
    assert not SharedSegment.supported(host_register=True) and not SharedSegment.supported(mmap=False)
    with pytest.raises(TypeError, match="No constructor"):
        SharedSegment()


def test_blobs_of_shared_segments_open_nothing_else(tmp_path):
    owner, blob = SharedSegment.create("one", 4096, 2, 0)
    end, other = SharedSegment.create("one", 4096, 2, 1)
    path = tmp_path / "layercake_1_0123456789abcdef"
    path.write_bytes(bytes(4096))
    for place in (path, "/dev/shm/../" + str(path)[1:], "/dev/shm/layercake_1_../../etc/passwd", "/dev/zero", ""):
        forged = blob[:-64] + os.fsencode(place)[:64].ljust(64, b"\0")
        with pytest.raises(RuntimeError, match="names no memory"):
            end.complete([forged, other])
    end.complete([blob, other])
    owner.complete([blob, other])
    for name, size, world, rank in (("x", 4096.0, 1, 0), (b"x", 4096, 1, 0), ("x", True, 1, 0), ("x", 4096, 1, 0.0)):
        with pytest.raises(TypeError):
            SharedSegment.create(name, size, world, rank)


def test_a_forked_child_leaves_its_parent_s_segment_alone():
    code = """
    import os, sys
    from mooncake.engine import SharedSegment
    owner, blob = SharedSegment.create("one", 4096, 2, 0)
    if (child := os.fork()) == 0:
        del owner
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    end, other = SharedSegment.create("one", 4096, 2, 1)
    end.complete([blob, other])
    path = owner._path
    del owner
    assert not os.path.exists(path)
    """
    assert check_child(code) == ""


def test_a_lease_may_come_back_while_free_buffers_go():
    class Store:
        """One that runs what a collector might, in the middle of anything."""

        def __init__(self):
            self.then, self.code, self.health = lambda: None, 0, 0

        def health_check(self):
            return self.health

        def register_buffer(self, address, size):
            return 0

        def unregister_buffer(self, address):
            self.then()
            return self.code

    store = Store()
    pool = BufferPool(store, max_bytes=4 * MIB, min_size_class=MIB, block_on_exhaustion=False)
    leases = [pool.acquire(MIB) for _ in range(4)]
    late = leases.pop()
    for lease in leases:
        lease.release()
    store.then = late.release
    with pytest.raises(RuntimeError, match="all buffers are lent"):
        pool.acquire(4 * MIB)
    store.then = lambda: None
    with pool.acquire(4 * MIB) as lease:
        address = lease.ptr
        lease.buffer[:5] = b"stays"
    del lease
    store.code = -600
    pool.close()
    # Transfers may still touch it, so that it is not unmapped.
    assert TransferEngine.read_bytes_from_buffer(address, 5) == b"stays"


def test_calls_can_be_awaited_and_overlap(cluster, key):
    async def use() -> list[bytes]:
        store = MooncakeDistributedStoreAsync()
        assert await store.async_setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", cluster.master) == 0
        keys = [key() for _ in range(50)]
        codes = await asyncio.gather(*[store.async_put(name, name.encode()) for name in keys])
        assert codes == [0] * 50
        assert store.get(keys[7]) == keys[7].encode()
        assert inspect.iscoroutinefunction(store.async_batch_is_exist)
        values = await asyncio.gather(*[store.async_get(name) for name in keys])
        assert await store.async_close() == 0
        for name in ("async_nothing", "async_", "async___init__", "nothing"):
            with pytest.raises(AttributeError):
                getattr(store, name)
        return [value == name.encode() for value, name in zip(values, keys, strict=True)]

    assert asyncio.run(use()) == [True] * 50


def test_rows_of_tables_are_looked_up(store):
    np = pytest.importorskip("numpy")
    config = EngramStoreConfig()
    assert (config.table_vocab_sizes, config.embedding_dim) == ([1024], 64)
    config.table_vocab_sizes, config.embedding_dim = [40, 30], 8
    tables = EngramStore(7, config, store)
    assert tables.get_store_keys() == ["engram:l7:h0", "engram:l7:h1"]
    assert (tables.get_num_heads(), tables.get_embedding_dim(), tables.get_table_vocab_sizes()) == (2, 8, [40, 30])
    rng = np.random.default_rng(1)
    rows = [rng.random((size, 8), dtype=np.float32) for size in (40, 30)]
    tables.populate(rows)
    ids = np.stack([rng.integers(0, 40, (3, 5)), rng.integers(0, 30, (3, 5))], axis=2)
    found = tables.lookup(ids)
    assert found.shape == (3, 5, 2, 8)
    assert np.array_equal(found, np.stack([rows[0][ids[:, :, 0]], rows[1][ids[:, :, 1]]], axis=2))
    assert tables.lookup(np.zeros((0, 5, 2), dtype=np.int64)).shape == (0, 5, 2, 8)
    for bad in (np.array([[[0, 30]]]), np.array([[[-1, 0]]]), np.array([0, 1]), np.zeros((1, 1, 2))):
        with pytest.raises(RuntimeError):
            tables.lookup(bad)
    for bad in ([rows[0]], [rows[0], [1.0]], [rows[0], rows[0]]):
        with pytest.raises(RuntimeError):
            tables.populate(bad)
    assert tables.remove_from_store(True) == 2
    with pytest.raises(RuntimeError, match="lookup failed"):
        tables.lookup(ids)
    with pytest.raises(RuntimeError, match="without a store"):
        EngramStore(7, config).lookup(ids)


UNSUPPORTED = [
    (lambda store: store.init_all("tcp", "", 1), "setup"),
    (lambda store: store.setup_dummy(1, 1, "x"), "setup"),
    (lambda store: store.alloc_from_mem_pool(1), "BufferPool"),
    (lambda store: store.mount_segment("/x", 1), "setup"),
    (lambda store: store.allocate_and_mount_segment(1), "setup"),
    (lambda store: store.unmount_segment(["x"]), "close"),
    (lambda store: store.unmount_and_free_segment(["x"]), "close"),
    (lambda store: store.unmount_local_disk_segment(), "no disk"),
    (lambda store: names.get_alloc_func_addr(), "MooncakeHostMemAllocator"),
    (lambda store: names.get_free_func_addr(), "MooncakeHostMemAllocator"),
    (lambda store: names.MooncakeDistributedNoFRegister().real_register("h", 1, "e", 0, 1, 1, "m"), "setup"),
    (lambda store: names.MooncakeDistributedNoFRegister().real_unregister_by_endpoint("h", 1, "e", 0, "m"), "setup"),
    (lambda store: TransferEngine().get_engine_ptr(), "get_engine"),
    (lambda store: RpcInterface(), "TransferNotify"),
    (lambda store: create_rpc_client(), "TransferNotify"),
    (lambda store: create_rpc_server(0, 1), "TransferNotify"),
]


@pytest.mark.parametrize(("call", "instead"), UNSUPPORTED)
def test_what_is_not_supported_names_what_is(store, call, instead):
    with pytest.raises(NotImplementedError, match=instead):
        call(store)
