"""SGLang's own storage class on the drop-in: run by `test_dropin_sglang.py` as `sglang_pages.py FOLDER MASTER`.

The folder holds the unpacked wheel. Only the modules of the storage class are SGLang's; what else they import, and what
would pull in kernels and servers, is doubled by empty classes.
"""

import importlib.util
import os
import pathlib
import sys
import types

import torch

REAL_PACKAGES = [
    "sglang",
    "sglang.srt",
    "sglang.srt.mem_cache",
    "sglang.srt.mem_cache.storage",
    "sglang.srt.mem_cache.storage.mooncake_store",
]
DOUBLES = {
    "sglang.srt.mem_cache.hybrid_cache": [],
    "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler": ["DevicePoolEntry"],
    "sglang.srt.mem_cache.pool_host": ["HostKVCache", "HostTensorAllocator"],
    "sglang.srt.mem_cache.pool_host.mla": ["MLATokenToKVPoolHost"],
    "sglang.srt.observability": [],
    "sglang.srt.observability.metrics_collector": ["StorageMetrics"],
}
PAGES = 16
PAGE_TOKENS = 4
ELEMENTS = 96


def prepare(root: pathlib.Path) -> None:
    for name in REAL_PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    for name, classes in DOUBLES.items():
        module = types.ModuleType(name)
        for cls in classes:
            setattr(module, cls, type(cls, (), {}))
        sys.modules[name] = module
    if importlib.util.find_spec("requests") is None:
        sys.modules["requests"] = types.ModuleType("requests")


class Pool:
    """Pages of a KV cache in host memory: for each page one object (MLA), or one for keys and one for values."""

    layout = "page_first"
    page_size = PAGE_TOKENS

    def __init__(self, objects: int, allocator=None):
        shape = (PAGES, objects, ELEMENTS)
        self.kv_buffer = torch.empty(shape) if allocator is None else allocator.allocate(shape, torch.float32)
        self.kv_buffer.normal_()
        if objects == 2:
            self.v_buffer = self.kv_buffer

    def get_page_buffer_meta(self, indices):
        pages = sorted({int(index) // PAGE_TOKENS for index in indices})
        parts = [self.kv_buffer[page, part] for page in pages for part in range(self.kv_buffer.shape[1])]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]

    def get_ksize_per_token(self):
        return self.kv_buffer[0].nbytes // PAGE_TOKENS


def tokens(first: int, last: int) -> torch.Tensor:
    return torch.arange(first * PAGE_TOKENS, last * PAGE_TOKENS)


def new_store(master: str, mla: bool, rank: int, ranks: int, **extra):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="some/model",
        extra_config={
            "master_server_address": master,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            # It is divided by the ranks, and Mooncake itself takes no less than this.
            "global_segment_size": ranks * 16 << 20,
            "protocol": "tcp",
            **extra,
        },
    )
    return MooncakeStore(config)


def pages(master: str, name: str, mla: bool, rank: int, ranks: int, **extra) -> None:
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeHostTensorAllocator

    writer, reader = (new_store(master, mla, rank, ranks, **extra) for _ in range(2))
    objects = 1 if mla else 2
    source, target = Pool(objects, MooncakeHostTensorAllocator()), Pool(objects)
    writer.register_mem_pool_host(source)
    reader.register_mem_pool_host(target)
    keys = [f"{name}-{page}" for page in range(8)]

    assert reader.batch_exists(keys) == 0
    assert all(writer.batch_set_v1(keys[:5], tokens(0, 5)))
    assert reader.batch_exists(keys) == 5, "the prefix that is there"
    assert all(writer.batch_set_v1(keys, tokens(0, 8))), "those that are there already are no failure"
    assert reader.batch_exists(keys) == 8

    got = reader.batch_get_v1([*keys, f"{name}-none"], tokens(3, 12))
    assert got == [True] * 8 + [False]
    assert torch.equal(target.kv_buffer[3:11], source.kv_buffer[:8])

    page = source.kv_buffer[9, 0]
    assert writer.set(f"{name}-one", target_location=page.data_ptr(), target_sizes=page.nbytes)
    assert reader.exists(f"{name}-one") and not reader.exists(f"{name}-two")
    room = target.kv_buffer[14, 0]
    assert reader.get(f"{name}-one", target_location=room.data_ptr(), target_sizes=room.nbytes)
    assert torch.equal(page, room)

    writer.close()
    reader.close()


def side_pool(master: str) -> None:
    """Pages of a sliding window beside those of the cache, in the calls that take several pools."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    store = new_store(master, False, 0, 1)
    pool, window = Pool(2), Pool(2)
    store.register_mem_pool_host(pool)
    store.register_mem_host_pool_v2(window, PoolName.SWA)
    keys = [f"hybrid-{page}" for page in range(6)]
    assert all(store.batch_set_v1(keys, tokens(0, 6)))

    def transfer(first: int, last: int, start: int) -> PoolTransfer:
        return PoolTransfer(
            name=PoolName.SWA,
            keys=keys[first:last],
            host_indices=tokens(start, start + last - first),
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )

    assert all(store.batch_set_v2([transfer(2, 4, 2)])[PoolName.SWA])
    found = store.batch_exists_v2(keys, [transfer(2, 4, 2)])
    assert found.kv_hit_pages == 4, found
    before = window.kv_buffer[2:4].clone()
    assert all(store.batch_get_v2([transfer(2, 4, 10)])[PoolName.SWA])
    assert torch.equal(window.kv_buffer[10:12], before)
    store.clear()
    store.close()


def main() -> None:
    prepare(pathlib.Path(sys.argv[1]))
    master = sys.argv[2]
    pages(master, "mha", mla=False, rank=0, ranks=1)
    pages(master, "mla", mla=True, rank=0, ranks=1)
    pages(master, "mha-1of4", mla=False, rank=1, ranks=4)
    pages(master, "mla-3of8", mla=True, rank=3, ranks=8)
    pages(master, "groups", mla=False, rank=0, ranks=1, enable_group_semantics=True)
    side_pool(master)
    print("done")


if __name__ == "__main__":
    os.environ.setdefault("LAYERCAKE_LOG", "error")
    main()
