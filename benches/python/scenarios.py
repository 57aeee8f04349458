"""The scenarios. Each is a function that prepares, and returns what one round does.

A round does its work inside of the meter and compares every byte that came back outside of it.
"""

from __future__ import annotations

import hashlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from cluster import HOST, Child, check, open_store
from costs import Meter, private_bytes, processes

SMALL = 4096

Round = Callable[[int], None]


def same(got: np.ndarray, sent: np.ndarray, what: str) -> None:
    """Bytes that differ make all other figures worthless."""
    if not np.array_equal(got, sent):
        sys.exit(f"{what}: other bytes came back than were sent")


def memory(store: Any, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes to send, and room for what comes back; both registered."""
    source = np.random.default_rng(7).integers(0, 255, shape, np.uint8)
    target = np.zeros(shape, np.uint8)
    for each in (source, target):
        check(store.register_buffer(each.ctypes.data, each.nbytes) == 0, "register_buffer")
    return source, target


def all_are(codes: list[int], want: int, what: str) -> None:
    check(all(code == want for code in codes), f"{what}: {list(codes[:3])} instead of {want}")


def remove(store: Any, keys: list[str]) -> None:
    store.batch_remove(keys, True)


def ranges(store: Any, size: Namespace, meter: Meter, tag: str) -> Round:
    """Sessions: every object has two entries per layer, and each call moves one layer of all objects."""
    objects, layers, page = size.objects, size.layers, size.page
    source, target = memory(store, objects, layers, 2, page)
    length, pieces = layers * 2 * page, objects * layers * 2

    def calls(of: np.ndarray) -> list[tuple[list, list, list]]:
        def row(layer: int) -> tuple[list, list, list]:
            offsets = [layer * 2 * page, (layer * 2 + 1) * page]
            places = [[of.ctypes.data + index * length + offset for offset in offsets] for index in range(objects)]
            return places, [[page, page]] * objects, [offsets] * objects

        return [row(layer) for layer in range(layers)]

    writes, reads = calls(source), calls(target)

    def round(number: int) -> None:
        keys = [f"{tag}/{number}/{index:08}" for index in range(objects)]
        target[:] = 0
        with meter("put start", "key", objects):
            codes = store.batch_put_session_start(keys, [length] * objects)
        all_are(codes, 0, "put start")
        with meter("put", "piece", pieces, page) as single:
            for call in writes:
                start = time.perf_counter()
                codes = store.batch_put_from_multi_buffer_ranges(keys, *call)
                single.append(time.perf_counter() - start)
                all_are(codes, 2 * page, "put")
        with meter("put end", "key", objects):
            codes = store.batch_put_session_end(keys)
        all_are(codes, 0, "put end")
        with meter("get start", "key", objects):
            codes = store.batch_get_session_start(keys)
        all_are(codes, 0, "get start")
        with meter("get", "piece", pieces, page) as single:
            for call in reads:
                start = time.perf_counter()
                codes = store.batch_get_into_multi_buffer_ranges(keys, *call)
                single.append(time.perf_counter() - start)
                all_are(codes, 2 * page, "get")
        with meter("get end", "key", objects):
            store.batch_get_session_end(keys)
        same(target, source, tag)
        remove(store, keys)

    return round


def multi_buffers(store: Any, size: Namespace, meter: Meter, tag: str) -> Round:
    """Whole objects of many pieces. No more than 32: the peer's queue of a TCP connection holds so many pieces."""
    objects, pieces, page = min(size.objects, 32), size.layers * 2, size.page
    source, target = memory(store, objects, pieces, page)

    def places(of: np.ndarray) -> list[list[int]]:
        return [[of[index, piece].ctypes.data for piece in range(pieces)] for index in range(objects)]

    sizes, from_, to = [[page] * pieces] * objects, places(source), places(target)

    def round(number: int) -> None:
        keys = [f"{tag}/{number}/{index:08}" for index in range(objects)]
        target[:] = 0
        with meter("put", "piece", objects * pieces, page):
            codes = store.batch_put_from_multi_buffers(keys, from_, sizes)
        all_are(codes, 0, "put")
        with meter("get", "piece", objects * pieces, page):
            codes = store.batch_get_into_multi_buffers(keys, to, sizes)
        all_are(codes, pieces * page, "get")
        same(target, source, tag)
        remove(store, keys)

    return round


def small(store: Any, size: Namespace, meter: Meter, tag: str) -> Round:
    """Objects of 4 KiB, one call each."""
    source, target = memory(store, size.small, SMALL)

    def round(number: int) -> None:
        keys = [f"{tag}/{number}/{index:08}" for index in range(size.small)]
        target[:] = 0
        for name, of, call, want in (("put", source, store.put_from, 0), ("get", target, store.get_into, SMALL)):
            base, codes = of.ctypes.data, []
            with meter(name, "call", len(keys)) as single:
                for index, key in enumerate(keys):
                    start = time.perf_counter()
                    codes.append(call(key, base + index * SMALL, SMALL))
                    single.append(time.perf_counter() - start)
            all_are(codes, want, name)
        same(target, source, tag)
        remove(store, keys)

    return round


def batches(store: Any, size: Namespace, meter: Meter, tag: str) -> Round:
    """Objects of 4 KiB in batches of 32."""
    source, target = memory(store, size.batches, size.batch, SMALL)

    def round(number: int) -> None:
        keys = [[f"{tag}/{number}/{batch}/{index}" for index in range(size.batch)] for batch in range(size.batches)]
        target[:] = 0
        for name, of, call, want in (("put", source, store.batch_put_from, 0), ("get", target, store.batch_get_into, SMALL)):
            rows = [(names, [at.ctypes.data for at in part], [SMALL] * size.batch) for names, part in zip(keys, of, strict=True)]
            codes: list[int] = []
            with meter(name, "key", size.batches * size.batch):
                for row in rows:
                    codes += call(*row)
            all_are(codes, want, name)
        same(target, source, tag)
        remove(store, [key for names in keys for key in names])

    return round


def exist(store: Any, size: Namespace, meter: Meter, tag: str) -> Round:
    """Look-ups of many keys, of which every other is there, and of one."""
    keys = [f"{tag}/{index:08}" for index in range(size.exist)]
    there = keys[::2]
    for at in range(0, len(there), 500):
        part = there[at : at + 500]
        check(store.put_batch(part, [b"x"] * len(part)) == 0, "put_batch")
    want = [1, 0] * (len(keys) // 2)

    def round(number: int) -> None:
        with meter("batch", "key", len(keys)):
            found = store.batch_is_exist(keys)
        check(list(found) == want, "batch_is_exist finds others than are there")
        with meter("single", "call", size.small) as single:
            for key in there[: size.small]:
                start = time.perf_counter()
                store.is_exist(key)
                single.append(time.perf_counter() - start)

    return round


def lanes(master: str, size: Namespace, meter: Meter) -> tuple[list[Child], Round]:
    """Four processes with eight threads each, all with batches of 32 objects of 4 KiB."""
    shape = {"lanes": 8, "batches": max(size.batches // 8, 1), "batch": size.batch, "size": SMALL}
    children = [Child("lanes", master=master, **shape) for _ in range(4)]
    keys = len(children) * shape["lanes"] * shape["batches"] * size.batch

    def everyone(order: str) -> list[Any]:
        for child in children:
            child.send(order)
        return [failure for child in children for failure in child.answer()]

    def round(number: int) -> None:
        for verb in ("put", "get"):
            with meter(verb, "key", keys):
                failed = everyone(f"{verb} {number}")
            check(not failed, failed)
        if failed := everyone(f"check {number}"):
            sys.exit(f"lanes: {failed[0]}")

    return children, round


def engine(size: Namespace, meter: Meter) -> tuple[list[Child], Round]:
    """Scattered writes and reads of another process's memory, and writes of 4 KiB."""
    from mooncake.engine import TransferEngine

    child = Child("target", size=size.target)
    peer, base = child.ready
    engine = TransferEngine()
    check(engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0, "initialize")
    source = np.random.default_rng(7).integers(0, 255, (size.target // size.page, size.page), np.uint8)
    back = np.zeros_like(source)
    for each in (source, back):
        check(engine.register_memory(each.ctypes.data, each.nbytes) == 0, "register_memory")
    order = np.random.default_rng(8).permutation(len(source))
    remote = [base + int(place) * size.page for place in order]
    lengths = [size.page] * len(source)
    placed = np.empty_like(source)
    placed[order] = source
    want = hashlib.sha256(placed.data).hexdigest()

    def round(number: int) -> None:
        back[:] = 0
        from_, to = ([at.ctypes.data for at in of] for of in (source, back))
        with meter("write", "piece", len(lengths), size.page):
            code = engine.batch_transfer_sync_write(peer, from_, remote, lengths)
        check(code == 0, f"write: {code}")
        if child.ask("sum") != want:
            sys.exit("engine: other bytes arrived than were sent")
        with meter("read", "piece", len(lengths), size.page):
            code = engine.batch_transfer_sync_read(peer, to, remote, lengths)
        check(code == 0, f"read: {code}")
        same(back, source, "engine")
        with meter("write 4 KiB", "call", size.small) as single:
            for _ in range(size.small):
                start = time.perf_counter()
                code = engine.transfer_sync_write(peer, from_[0], remote[0], SMALL)
                single.append(time.perf_counter() - start)
                check(code == 0, f"small write: {code}")

    return [child], round


def connections(master: Any, clients: int) -> dict[str, dict[str, float]]:
    """What one more client that does nothing costs, in memory and threads."""
    lasting = Child("idle", master=master.address)
    used = lambda: sum(map(private_bytes, processes(master.pid)))
    before = used()
    children = [Child("idle", master=master.address) for _ in range(clients)]
    after = used()
    figures = {
        "client": {"KiB": float(np.median([child.ready[0] for child in children])) / 1024},
        "client threads": {"count": float(np.median([child.ready[1] for child in children]))},
        "master": {"KiB": (after - before) / clients / 1024},
    }
    for child in (lasting, *children):
        child.stop()
    return figures


#: Scenarios on a store, and whether its own process lends the memory.
ON_A_STORE = {
    "ranges": (ranges, False),
    "multi buffers": (multi_buffers, False),
    "small": (small, False),
    "batches": (batches, False),
    "exist": (exist, False),
    "embedded": (ranges, True),
}


def store_of(master: str, embedded: bool, size: Namespace) -> Any:
    return open_store(master, size.segment if embedded else 0, 64 << 20)
