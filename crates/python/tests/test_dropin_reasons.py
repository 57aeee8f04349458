"""What the drop-in writes down about calls that it refuses, or that fail: why, once for a call, and no flood."""

import pytest

pytest.importorskip("mooncake.store", reason="layercake-mooncake is not installed")

from conftest import run_child  # noqa: E402
from dropin import PRELUDE, running_master  # noqa: E402


@pytest.fixture(scope="module")
def master():
    with running_master() as (address, _):
        yield address


def lines(code: str, master: str) -> list[str]:
    """What a client writes down; its assertions hold."""
    done = run_child(PRELUDE + code, master)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ('store.put_from("u", 1 << 40, 10)', -1700, ('"u"', "0x10000000000", "unmapped")),
        ('store.put("k" * 70000, b"x")', -600, ("70000 bytes", "65535")),
        ('store.put("v", b"")', -600, ('"v"',)),
        ('store.batch_put_from(["a", "b"], [1], [1])[0]', -600, ('"a", "b"', "2 keys need lists", "1, 1")),
        ('store.batch_put_from_multi_buffers(["m"], [[1, 2]], [[1]])[0]', -600, ('"m"', "differ in length")),
        ('store.put_batch(["e", "f"], [b"x", b""])', -600, ("value 1 is empty",)),
        ('store.remove_by_regex("(")', -600, ("(",)),
        ('store.put("g", b"x", config(group_ids=["a", "b"]))', -600, ("group_ids has 2 entries",)),
        ('store.put("n", b"x", config(nof_replica_num=1))', -600, ("nof_replica_num is 1",)),
        ('store.put("r", b"x", config(replica_num=0))', -600, ("replica_num is 0",)),
        ('store.put("t", b"x", config(soft_pin_action=SoftPinAction.ENABLE, soft_pin_ttl_ms=1 << 63))', -600, ("soft_pin_ttl_ms",)),
        ('store.batch_put_session_start(["s"], [1 << 63])[0]', -200, ('"s"', "9223372036854775808 bytes")),
        ('store.batch_put_session_start(["s"], [(1 << 64) - 1])[0]', -200, ('"s"', "no segment has room")),
        ('store.batch_put_session_end(["s"])[0]', -600, ('"s"', "no session")),
        ('store.get_into("there", 4096, 1)', -600, ("5 bytes does not fit into buffers of 1",)),
        ('store.get_into_ranges([4096], [["there"]], [[[0]]], [[[0]]], [[[5]]])[0][0][0]', -600, ('"there"', "no registered buffer")),
        ('store.create_move_task("there", store.get_hostname(), store.get_hostname())[1]', -600, ('"there"',)),
        ('MooncakeDistributedStore().put("k", b"x")', -600, ("not set up",)),
    ],
)
def test_a_call_that_is_refused_says_why(master, call, code, words):
    run = f"""
from mooncake.store import SoftPinAction
store = new()
store.remove("there", True)
assert store.put("there", b"value") == 0

def config(**fields):
    config = ReplicateConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config

code = {call}
assert code == {code}, code
"""
    said = lines(run, master)
    assert len(said) == 1, said
    assert all(word in said[0] for word in (str(code), *words)), said


def test_a_batch_that_fails_is_one_line_and_repeated_failures_are_no_flood(master):
    code = """
store = new(2 * MIB)
memory = alloc(MIB)
keys = [f"k{index}" for index in range(300)]
hard = ReplicateConfig()
hard.with_hard_pin = True
assert store.put("full", bytes(1 << 20), hard) == 0
sizes = [4 * MIB] * 300
assert store.batch_put_session_start(keys, sizes) == [-200] * 300
for _ in range(500):
    assert store.put_from("", memory, 10) == -600
"""
    said = lines(code, master)
    batch = [line for line in said if "batch_put_session_start" in line]
    assert len(batch) == 1 and "300 of 300" in batch[0] and "-200" in batch[0] and '"k0", "k1", "k2", …' in batch[0], said
    assert "k3" not in batch[0] and "no room" in batch[0]
    assert 1 <= len([line for line in said if "put_from:" in line]) < 100, "eight at once, and few after"


def test_what_is_no_failure_is_not_written_down(master):
    code = """
store = new()
assert store.put("once", b"x") == 0 == store.put("once", b"y")
assert store.get("nothing") == b"" and store.get_size("nothing") == -704 and store.remove("nothing") == -704
assert store.batch_get_session_start(["nothing"]) == [-704]
assert store.batch_put_session_start(["open", "once"], [5, 5]) == [0, -705] and store.get_size("open") == -703
assert store.batch_put_session_end(["open", "open"]) == [0, 0]
assert store.get("once") == b"x" and store.remove("once") == -706
"""
    assert lines(code, master) == []
