"""What no caller should pass: an exception that names it, and an interpreter that lives on."""

import pytest

from conftest import check_child

SETUP = """
import ctypes, sys
import layercake
from layercake import *
cluster = serve(capacity="16MiB")
store = cluster.store
store.put("k", b"0123456789")
memory = bytearray(4096)
here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
put = store.start_put("open", 100)
get = store.start_get("k")
"""

ALIVE = """
assert store.put("alive", b"yes") and store.get("alive") == b"yes"
cluster.close()
print("alive")
"""


def refused(call: str, error: str, names: str = "") -> str:
    return f"""
try:
    {call}
except {error} as raised:
    assert {names!r} in str(raised), str(raised)
else:
    sys.exit("not refused: " + {call!r})
"""


TYPES = [
    ("store.put(1, b'x')", "key"),
    ("store.put(None, b'x')", "key"),
    ("store.put('k', None)", "buffer"),
    ("store.put('k', 5)", "buffer"),
    ("store.put('\\ud800', b'x')", "UTF-8"),
    ("store.get(b'\\xff')", ""),
    ("store.get_many('k')", "list"),
    ("store.get_many([1])", "key"),
    ("store.get_many({'k'})", "list"),
    ("store.start_put('n', True)", "int"),
    ("store.start_put('n', -1)", "-1"),
    ("store.start_put('n', 2**64)", "2**64"),
    ("store.start_put('n', 1.0)", "int"),
    ("store.start_put('n', float('nan'))", "int"),
    ("store.start_put('n', '1')", "int"),
    ("store.start_puts(['n'], [True])", "int"),
    ("store.start_puts(['n'], 'x')", "list"),
    ("store.start_puts(['n'], b'x')", "list"),
    ("store.start_puts(['n'], {1})", "list"),
    ("put.write(True, b'x')", "int"),
    ("put.write(-1, b'x')", "-1"),
    ("put.write(0, (here,))", "address"),
    ("put.write(0, (here, True))", "int"),
    ("put.write(0, (-1, 5))", "-1"),
    ("store.write_ranges([put], [[here]], [[True]], [[0]])", "int"),
    ("store.write_ranges([put], [[here]], [[-5]], [[0]])", "-5"),
    ("store.write_ranges([put], [here], [[5]], [[0]])", "list"),
    ("store.write_ranges([1], [[here]], [[5]], [[0]])", ""),
    ("store.write_ranges([get], [[here]], [[5]], [[0]])", ""),
    ("store.write_ranges(put, [[here]], [[5]], [[0]])", ""),
    ("store.register_buffer(here, -1)", "-1"),
    ("store.register_buffer(memory, 5)", "int"),
    ("store.wait_complete(['k'], -1)", "seconds"),
    ("store.wait_complete(['k'], float('nan'))", "seconds"),
    ("store.wait_complete(['k'], True)", "seconds"),
    ("ReplicateConfig(replicas=True)", "int"),
    ("ReplicateConfig(1)", ""),
    ("ReplicateConfig(unknown=1)", "unknown"),
    ("serve(capacity=-1)", "-1"),
    ("serve(capacity=True)", "int"),
    ("PutSession()", ""),
    ("GetSession()", ""),
    ("store.put('k', b'x', 5)", "ReplicateConfig"),
]

VALUES = [
    ("store.put('', b'x')", "InvalidArgument", "0 bytes"),
    ("store.put('k' * 65536, b'x')", "InvalidArgument", "65536"),
    ("store.put('n', b'')", "InvalidArgument", "0 bytes"),
    ("store.put('n', (0, 5))", "InvalidArgument", "null"),
    ("store.put('n', (1 << 40, 5))", "InvalidArgument", "0x10000000000"),
    ("store.put('n', (here, 2**64 - 1))", "InvalidArgument", "end of the address space"),
    ("store.get_into('k', (1 << 40, 50))", "InvalidArgument", "0x10000000000"),
    ("store.start_put('n', 0)", "InvalidArgument", ""),
    ("store.start_put('n', 2**64 - 1)", "LayercakeError", ""),
    ("put.write(0, b'')", "InvalidArgument", "0 bytes"),
    ("put.write(99, b'ab')", "InvalidArgument", "100"),
    ("put.write(2**64 - 1, b'ab')", "InvalidArgument", "18446744073709551615"),
    ("put.write(0, (here + 2**46, 5))", "InvalidArgument", "not memory"),
    ("store.register_buffer(0, 5)", "InvalidArgument", "null"),
    ("store.register_buffer(here, 0)", "InvalidArgument", "0 bytes"),
    ("store.register_buffer(1 << 40, 5)", "InvalidArgument", "device"),
    ("store.register_buffer(here, 2**64 - 1)", "InvalidArgument", ""),
    ("store.unregister_buffer(here)", "InvalidArgument", "no registered buffer"),
    ("store.remove_matching('(')", "InvalidArgument", ""),
    ("store.longest_prefix([''])", "InvalidArgument", "0 bytes"),
    ("ReplicateConfig(replicas=0)", "InvalidArgument", "replicas"),
    ("serve(capacity='lots')", "InvalidArgument", "lots"),
    ("serve(capacity='1 parsec')", "InvalidArgument", "parsec"),
    ("serve(capacity=2**60)", "InvalidArgument", "segment"),
    ("serve(listen='0.0.0.0:0')", "InvalidArgument", "token"),
    ("serve(listen='nowhere.invalid:1')", "InvalidArgument", "nowhere.invalid"),
    ("serve(lease=0)", "InvalidArgument", "lease"),
    ("Store()", "MasterUnreachable", "127.0.0.1:50061"),
    ("Store('localhost')", "InvalidArgument", "host:port"),
    ("Store('http://localhost:1')", "InvalidArgument", "host:port"),
    ("Store('10.1.2.3:5')", "AuthenticationError", "token"),
    ("Store(cluster.master, token='short')", "InvalidArgument", "token"),
    ("Store(cluster.master, token='a' * 32, insecure=True)", "InvalidArgument", "insecure"),
    ("Store(cluster.master, transports='rdma')", "InvalidArgument", "rdma"),
    ("Store(cluster.master, tenant='')", "InvalidArgument", "tenant"),
    ("Store(cluster.master, name='')", "InvalidArgument", "name"),
    ("Store(cluster.master, listen='0.0.0.0')", "InvalidArgument", "token"),
    ("Store(cluster.master, timeout=0)", "InvalidArgument", "call"),
    ("Store(cluster.master, capacity=100)", "InvalidArgument", "4096"),
]


def test_wrong_types_are_type_errors_that_say_what_is_needed():
    calls = "".join(refused(call, "TypeError", names) for call, names in TYPES if "xff" not in call)
    assert check_child(SETUP + calls + ALIVE).splitlines()[-1] == "alive"


@pytest.mark.parametrize("part", range(3))
def test_wrong_values_are_refused_by_name(part):
    calls = "".join(refused(call, error, names) for call, error, names in VALUES[part::3])
    assert check_child(SETUP + calls + ALIVE).splitlines()[-1] == "alive"


def test_memory_that_went_away_before_the_call_is_refused():
    check_child(
        SETUP
        + """
import mmap
gone = mmap.mmap(-1, 1 << 20)
view = ctypes.c_char.from_buffer(gone)
address = ctypes.addressof(view)
del view
gone.close()
for call in (
    lambda: put.write(0, (address, 100)),
    lambda: store.put("n", (address, 100)),
    lambda: store.get_into("k", (address, 100)),
    lambda: get.read_into(0, (address, 10)),
    lambda: store.register_buffer(address, 1 << 20),
):
    try:
        call()
    except InvalidArgument as raised:
        assert "not memory" in str(raised)
    else:
        sys.exit("not refused")
# Mapped, and not for writing.
locked = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
import numpy
address = numpy.frombuffer(locked, dtype=numpy.uint8).ctypes.data
try:
    store.get_into("k", (address, 100))
except InvalidArgument as raised:
    assert "write to" in str(raised)
else:
    sys.exit("not refused")
"""
        + ALIVE
    )


def test_every_method_of_a_closed_store_says_so():
    check_child(
        SETUP
        + """
store.close()
for call in (
    lambda: store.get("k"),
    lambda: store.put("k", b"x"),
    lambda: store.exists_many(["k"]),
    lambda: store.start_put("n", 5),
    lambda: store.write_ranges([put], [[here]], [[5]], [[0]]),
    lambda: store.status(),
    lambda: store.register_buffer(here, 100),
):
    try:
        call()
    except Closed:
        pass
    else:
        sys.exit("not refused")
for session in (put, get):
    try:
        session.write(0, b"x") if session is put else session.read()
    except LayercakeError:
        pass
    else:
        sys.exit("not refused")
assert store.health == "closed" and store.name
"""
    )
