"""The tensor calls of `mooncake.store`, and the buffers that go with them."""

import ctypes
import gc
import struct
import threading

import pytest

pytest.importorskip("mooncake", reason="layercake-mooncake is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed: tensors can't be tried")

from conftest import MIB  # noqa: E402
from mooncake.store import (  # noqa: E402
    MooncakeDistributedStore,
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
)

HEADER = 304


@pytest.fixture(scope="module")
def store(cluster):
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 * MIB, "tcp", "", cluster.master) == 0
    yield store
    store.close()


@pytest.fixture
def whole():
    return torch.arange(24, dtype=torch.float32).reshape(4, 6)


class Memory:
    """Memory with an address, registered with a store."""

    def __init__(self, size: int):
        self.bytes = bytearray(size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.size = size


@pytest.fixture
def memory(store):
    memory = Memory(MIB)
    assert store.register_buffer(memory.address, memory.size) == 0
    yield memory
    assert store.unregister_buffer(memory.address) == 0


def tp(rank: int, size: int, split_dim: int = 0) -> TensorParallelism:
    axis = ParallelAxis()
    axis.kind, axis.rank, axis.size, axis.split_dim = "tp", rank, size, split_dim
    parallelism = TensorParallelism()
    parallelism.axes = [axis]
    return parallelism


def with_expert(parallelism: TensorParallelism, rank: int) -> TensorParallelism:
    return TensorParallelism([*parallelism.axes, ParallelAxis("ep", rank, 4, expert_id=3)])


class Part:
    def __init__(self, rank, size, split_dim):
        self.rank, self.size, self.split_dim = rank, size, split_dim


DTYPES = [
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool", "float16",
    "bfloat16", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_comes_back_as_it_was(store, key, rng, name):
    dtype = getattr(torch, name)
    raw = torch.frombuffer(bytearray(rng.randbytes(960)), dtype=torch.uint8)
    tensor = (raw % 2).bool() if name == "bool" else raw.view(dtype)
    tensor = tensor.reshape(2, 3, -1)
    name = key()
    assert store.put_tensor(name, tensor) == 0
    back = store.get_tensor(name)
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(5.0),
        lambda: torch.zeros(0, 4),
        lambda: torch.zeros([1] * 8),
        lambda: torch.arange(24).reshape(4, 6).t(),
        lambda: torch.arange(24)[::3],
        lambda: torch.ones(3, requires_grad=True),
    ],
    ids=["scalar", "empty", "eight dimensions", "transposed", "strided", "with a gradient"],
)
def test_shapes_and_strides(store, key, make):
    name, tensor = key(), make()
    assert store.put_tensor(name, tensor) == 0
    back = store.get_tensor(name)
    assert back.shape == tensor.shape and torch.equal(back, tensor.detach())


def test_an_object_begins_with_mooncake_s_header(store, key, whole):
    name = key()
    assert store.put_tensor(name, whole) == 0
    data = store.get(name)
    assert data[:4] == b"NOOM" and len(data) == store.get_size(name) == HEADER + 96
    assert struct.unpack_from("<HHIIIIQQ", data, 4) == (1, HEADER, 0, 2, 0, 0, HEADER, 96)
    assert struct.unpack_from("<8q8q", data, 40) == (4, 6, *[-1] * 6) * 2
    assert data[168:HEADER] == bytes(136)
    assert data[HEADER:] == whole.numpy().tobytes()


def test_the_first_value_stays_and_upsert_replaces(store, key, whole):
    name = key()
    assert store.put_tensor(name, whole) == 0
    assert store.pub_tensor(name, whole + 1, ReplicateConfig()) == 0
    assert torch.equal(store.get_tensor(name), whole)
    before = store.get_tensor(name)
    assert store.upsert_tensor(name, whole.to(torch.bfloat16)) == 0
    assert store.get_tensor(name).dtype == torch.bfloat16
    assert store.upsert_pub_tensor(name, whole[:2], ReplicateConfig()) == 0
    assert store.batch_upsert_pub_tensor([name], [whole[:1]], ReplicateConfig()) == [0]
    assert store.batch_upsert_tensor([name], [whole[:3]]) == [0]
    assert torch.equal(store.get_tensor(name), whole[:3])
    gc.collect()
    assert torch.equal(before, whole), "a tensor that was read keeps its bytes"


def test_what_is_no_tensor(store, key, whole):
    name = key()
    for value in (5, None, b"x", "x", [1.0], torch.zeros(2, dtype=torch.complex64), torch.zeros([1] * 9)):
        assert store.put_tensor(name, value) == -600
        assert store.upsert_tensor(name, value) == -600
    assert store.put_tensor("", whole) == -600
    assert store.get_tensor(name) is None
    good = store.batch_put_tensor([name, key()], [whole, 7])
    assert good == [0, -600]
    for data in (b"x", b"x" * 400, store.get(name)[:-1], store.get(name) + b"x", b"NOOM" + b"\xff" * 396):
        raw = key()
        assert store.put(raw, data) == 0
        assert store.get_tensor(raw) is None


def test_batches(store, key, whole):
    names = [key() for _ in range(20)]
    tensors = [whole + index for index in range(20)]
    assert store.batch_pub_tensor(names, tensors, ReplicateConfig()) == [0] * 20
    missing = key()
    back = store.batch_get_tensor([names[7], missing, names[3], names[7]])
    assert back[1] is None and torch.equal(back[0], tensors[7])
    assert torch.equal(back[2], tensors[3]) and torch.equal(back[3], tensors[7])
    assert store.batch_put_tensor(names, tensors[1:]) == [-600] * 20
    assert store.batch_put_tensor([], []) == [] == store.batch_get_tensor([])
    with pytest.raises(TypeError):
        store.batch_put_tensor(names, whole)
    with pytest.raises(TypeError):
        store.batch_get_tensor("key")


def test_tensors_in_the_caller_s_memory(store, key, whole, memory):
    name, size = key(), HEADER + 96
    assert store.put_tensor(name, whole) == 0
    back = store.get_tensor_into(name, memory.address, memory.size)
    assert back.data_ptr() == memory.address + HEADER and torch.equal(back, whole)
    assert store.get_tensor_into(name, memory.address, size) is not None
    assert store.get_tensor_into(name, memory.address, size - 1) is None
    assert store.get_tensor_into(key(), memory.address, size) is None
    two = [memory.address, memory.address + 4096]
    assert store.batch_get_tensor_into([name, key()], two, [4096] * 2)[1] is None
    assert store.batch_get_tensor_into([name, name], two[:1], [4096] * 2) == [-600] * 2
    # What is there now can be stored from there.
    copies = [key() for _ in range(4)]
    assert store.put_tensor_from(copies[0], memory.address, size) == 0
    assert store.batch_put_tensor_from(copies[1:3], [memory.address] * 2, [size] * 2) == [0, 0]
    assert store.upsert_tensor_from(copies[0], memory.address, size) == 0
    assert store.batch_upsert_tensor_from(copies[3:], [memory.address], [size]) == [0]
    assert all(torch.equal(tensor, whole) for tensor in store.batch_get_tensor(copies))
    wrong = key()
    for bad in (0, 100, size - 1, size + 1):
        assert store.put_tensor_from(wrong, memory.address, bad) == -600
    assert store.put_tensor_from(wrong, 4096, size) == -600
    assert store.put_tensor_from(wrong, 0, size) == -600
    assert store.batch_put_tensor_from([wrong], two, [size]) == [-600]
    assert store.get_size(wrong) == -704


@pytest.mark.parametrize(("ranks", "split_dim"), [(2, 0), (4, 0), (3, 1), (6, 1)])
def test_a_tensor_is_split_for_its_ranks(store, key, whole, memory, ranks, split_dim):
    name, config = key(), ReplicateConfig()
    parts = whole.chunk(ranks, split_dim)
    assert store.put_tensor_with_tp(name, whole, 0, ranks, split_dim) == 0
    for rank, part in enumerate(parts):
        assert torch.equal(store.get_tensor_with_tp(name, rank, ranks, split_dim), part)
        assert torch.equal(store.get_tensor(f"{name}_tp_{rank}"), part)
        assert torch.equal(store.get_tensor_with_tp_into(name, memory.address, 4096, rank, ranks, split_dim), part)
    assert store.get_tensor_with_tp(name, ranks, ranks) is None is store.get_tensor_with_tp(name, -1, ranks)
    others = [key(), key()]
    assert store.batch_put_tensor_with_tp(others, [whole, whole + 1], 0, ranks, split_dim) == [0, 0]
    back = store.batch_get_tensor_with_tp([*others, key()], 1, ranks)
    assert torch.equal(back[0], parts[1]) and torch.equal(back[1], parts[1] + 1) and back[2] is None
    again = [key(), key()]
    assert store.pub_tensor_with_tp(again[0], whole, config, 0, ranks, split_dim) == 0
    assert store.batch_pub_tensor_with_tp(again[1:], [whole], config, 0, ranks, split_dim) == [0]
    assert store.put_tensor(key_whole := key(), whole) == 0
    assert store.get_tensor_into(key_whole, memory.address, 4096) is not None
    stored = [key(), key()]
    assert store.put_tensor_with_tp_from(stored[0], memory.address, HEADER + 96, 0, ranks, split_dim) == 0
    assert store.batch_put_tensor_with_tp_from(stored[1:], [memory.address], [HEADER + 96], 0, ranks, split_dim) == [0]
    for one in again + stored:
        assert torch.equal(store.get_tensor_with_tp(one, ranks - 1, ranks), parts[-1])


def test_what_can_t_be_split(store, key, whole):
    name = key()
    for ranks, split_dim in ((3, 0), (5, 1), (2, 7), (2, -1)):
        assert store.put_tensor_with_tp(name, whole, 0, ranks, split_dim) == -600
    assert store.put_tensor_with_tp(name, whole, 0, 1, 0) == 0
    assert torch.equal(store.get_tensor_with_tp(name, 0, 1), whole)
    assert store.get_tensor_with_tp(name, 0, 2) is None
    with pytest.raises(TypeError):
        store.put_tensor_with_tp(name, whole, 0, "2", 0)


def test_parts_are_read_as_parts_for_other_ranks_and_as_a_whole(store, key, whole):
    name = key()
    for rank, part in enumerate(whole.chunk(2, 0)):
        assert store.put_tensor_with_parallelism(name, part, tp(rank, 2)) == 0
        if rank == 0:
            assert store.get_tensor_with_parallelism(name, ReadTarget("full")) is None, "a part is missing"
    assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("full")), whole)
    assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("as_stored", tp(1, 2))), whole[2:])
    for rank in range(4):
        assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("shard", tp(rank, 4))), whole[rank : rank + 1])
    assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("shard", tp(0, 1))), whole)
    assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("shard", tp(2, 3, 1))), whole[:, 4:])
    assert store.get_tensor_with_parallelism(name, ReadTarget("shard", tp(0, 3))) is None
    assert store.get_tensor_with_parallelism(name, ReadTarget("as_stored", tp(0, 4))) is None
    assert store.get_tensor_with_parallelism(name) is None
    assert store.upsert_tensor_with_parallelism(name, whole[:2] + 100, tp(0, 2)) == 0
    assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("shard", tp(0, 2))), whole[:2] + 100)


def test_with_further_axes_the_tensor_is_the_whole(store, key, whole):
    name = key()
    for rank in range(2):
        assert store.put_tensor_with_parallelism(name, whole, with_expert(tp(rank, 2), 1)) == 0
    place = with_expert(tp(1, 2), 1)
    assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("shard", place)), whole[2:])
    assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("full", place)), whole)
    assert store.get_tensor_with_parallelism(name, ReadTarget("shard", with_expert(tp(1, 2), 2))) is None
    assert store.is_exist(f"{name}__tp_1of2_sd0__ep_1of4_eid3") == 1
    alone = TensorParallelism([ParallelAxis("pp", 1, 2, stage_id=1)])
    assert store.put_tensor_with_parallelism(name, whole, alone) == 0
    assert store.is_exist(f"{name}__pp_1of2_sid1") == 1
    assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("shard", alone)), whole)


def test_several_writers_of_one_tensor(store, key, whole):
    name = key()
    codes = [store.put_tensor_with_parallelism(name, whole, writer_partition=Part(rank, 3, 1)) for rank in range(3)]
    assert codes == [0] * 3
    assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("full")), whole)
    assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("shard", tp(1, 2))), whole[2:])
    assert store.batch_put_tensor_with_parallelism([key()], [whole], writer_partitions=[Part(0, 2, 0)]) == [0]
    for bad in (Part(3, 3, 1), Part(0, 5, 1), Part(0, 2, None), object()):
        assert store.put_tensor_with_parallelism(key(), whole, writer_partition=bad) == -600
    assert store.put_tensor_with_parallelism(key(), whole, tp(0, 2), writer_partition=Part(0, 2, 0)) == -600


def test_parallelism_that_makes_no_sense(store, key, whole):
    name = key()
    wrong = [
        5,
        TensorParallelism(),
        TensorParallelism([ParallelAxis("zz", 0, 2, 0)]),
        tp(2, 2),
        tp(0, 0),
        tp(0, 2, 9),
        TensorParallelism([ParallelAxis("tp", 0, 2)]),
        TensorParallelism(tp(0, 2).axes * 2),
    ]
    for parallelism in wrong:
        assert store.put_tensor_with_parallelism(name, whole, parallelism) == -600
    assert store.batch_put_tensor_with_parallelism([name], [whole], []) == [-600]
    assert store.get_tensor_with_parallelism(name, ReadTarget("shard", wrong[2])) is None
    assert store.get_tensor_with_parallelism(name, ReadTarget("shard")) is None
    with pytest.raises(RuntimeError, match="as_stored"):
        store.get_tensor_with_parallelism(name, ReadTarget("some"))
    with pytest.raises(TypeError):
        store.get_tensor_with_parallelism(name, 5)


def test_parts_from_and_into_the_caller_s_memory(store, key, whole, memory):
    source, names = key(), [key(), key(), key()]
    assert store.put_tensor_with_parallelism(source, whole) == 0
    assert torch.equal(store.get_tensor_with_parallelism_into(source, memory.address, memory.size), whole)
    size = HEADER + 96
    assert store.put_tensor_with_parallelism_from(names[0], memory.address, size, tp(0, 2)) == 0
    assert store.batch_put_tensor_with_parallelism_from(names[1:2], [memory.address], [size], [tp(0, 2)]) == [0]
    assert store.upsert_tensor_with_parallelism_from(names[2], memory.address, size, tp(1, 2)) == 0
    assert store.batch_upsert_tensor_with_parallelism_from(names[2:], [memory.address], [size], [tp(1, 2)]) == [0]
    assert store.batch_upsert_tensor_with_parallelism(names[2:], [whole[2:]], [tp(1, 2)]) == [0]
    full = [ReadTarget("full")] * 3
    assert all(torch.equal(tensor, whole) for tensor in store.batch_get_tensor_with_parallelism(names, full))
    shards = [ReadTarget("shard", tp(1, 2))] * 2
    two = [memory.address + 8192, memory.address + 16384]
    back = store.batch_get_tensor_with_parallelism_into(names[:2], two, [4096] * 2, shards)
    assert all(torch.equal(tensor, whole[2:]) for tensor in back)
    assert store.get_tensor_with_parallelism_into(source, memory.address, size - 1) is None
    assert store.put_tensor_with_parallelism_from(key(), 4096, size, tp(0, 2)) == -600


def test_devices_are_named_as_what_is_missing(store, key, whole):
    for call, given in ((store.get_tensor_into_cuda, whole), (store.batch_get_tensor_into_cuda, [whole])):
        with pytest.raises(NotImplementedError, match="get_tensor"):
            call(key(), given)


def test_files_of_safetensors(store, key, whole, tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    name, path = key(), str(tmp_path / "one.safetensors")
    assert store.put_tensor(name, whole) == 0
    assert store.save_tensor_to_safetensor(name, path) == 0
    assert store.save_tensor_to_safetensor(key(), path) < 0
    other = key()
    assert torch.equal(store.load_tensor_from_safetensor(other, path), whole)
    assert torch.equal(store.get_tensor(other), whole)
    assert store.load_tensor_from_safetensor(other, path + ".none") is None


def test_threads_share_a_store(store, key):
    names = [key() for _ in range(32)]
    tensors = [torch.full((64, 64), float(index)) for index in range(32)]

    def put(first: int) -> None:
        for at in range(first, 32, 4):
            assert store.put_tensor(names[at], tensors[at]) == 0

    threads = [threading.Thread(target=put, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(store.batch_get_tensor(names), tensors, strict=True))
