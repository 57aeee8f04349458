"""``setup`` of ``mooncake.store``: what it is told, and masters that are not there."""

import contextlib
import signal
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("mooncake.store", reason="layercake-mooncake is not installed")

from conftest import child_env, run_child  # noqa: E402
from dropin import PRELUDE, check, running_master  # noqa: E402


@pytest.fixture(scope="module")
def master():
    with running_master() as (address, _):
        yield address


@contextlib.contextmanager
def hanging():
    """An address at which attempts to connect are neither accepted nor refused: the queue of its listener is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        while True:
            attempt = stack.enter_context(socket.socket())
            attempt.settimeout(0.3)
            try:
                attempt.connect(listener.getsockname())
            except TimeoutError:
                break
        yield "127.0.0.1:%d" % listener.getsockname()[1]


SETUP = """
print("begun", flush=True)
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1])
print(code, flush=True)
"""


def test_a_master_that_neither_accepts_nor_refuses_is_waited_for_no_longer_than_one_that_refuses():
    with hanging() as address:
        begun = time.monotonic()
        done = run_child(PRELUDE + SETUP, address, LAYERCAKE_SETUP_TIMEOUT="0.5")
        assert done.returncode == 0 and int(done.stdout.split()[-1]) < 0, done
        assert time.monotonic() - begun < 15, "an attempt has two seconds"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_master(number):
    code = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
"""
    with hanging() as address:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code + SETUP, address],
            env=child_env(LAYERCAKE_SETUP_TIMEOUT="60"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(number)
            out, err = process.communicate(timeout=15)
            assert out == "", "setup did not return"
            assert process.returncode == 143 or "KeyboardInterrupt" in err
        finally:
            process.kill()
            process.communicate()


def test_a_dict_may_say_what_arguments_may(master):
    code = """
def setup(**more):
    store = MooncakeDistributedStore()
    needed = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "master_server_addr": sys.argv[1]}
    code = store.setup(needed | {"global_segment_size": 0} | more)
    assert store.close() == 0
    return code

def type_error(**more):
    try:
        setup(**more)
    except TypeError:
        return True

for flag in (0, 1, False, True, "0", "false", "ON", None):
    assert setup(enable_ssd_offload=flag, enable_client_http_server=flag) == 0, flag
for port in (0, 65535, "9300", None):
    assert setup(client_http_port=port) == 0, port
for name in ("tenant_id", "protocol", "rdma_devices", "ssd_offload_path", "local_buffer_size"):
    assert setup(**{name: None}) == 0, name
assert setup(global_segment_size="1.5 MB") == 0
for bad in ({"client_http_port": 65536}, {"client_http_port": "much"}, {"enable_ssd_offload": "perhaps"}, {"local_hostname": None},
            {"global_segment_size": "99999999999TB"}, {"tenant_id": "x" * 5000}, {"global_segment_size": -1}, {"global_segment_size": True},
            {"local_buffer_size": -1}, {"global_segment_size": 0.5}, {"global_segment_size": 1e30}, {"global_segment_size": 1}):
    assert setup(**bad) == -600, bad
assert setup(tenant_id="", global_segment_size=float(1 << 20), mode="embedded") == 0
for wrong, name in (({"local_hostname": ["a"]}, "local_hostname"), ({1: 2}, "1")):
    try:
        MooncakeDistributedStore().setup({"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE"} | wrong)
        raise SystemExit(f"{wrong} was accepted")
    except TypeError as error:
        assert name in str(error), error
assert type_error(client_http_port=-1) and type_error(enable_ssd_offload=0.5) and type_error(tenant_id=7)

store = MooncakeDistributedStore()
arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1])
assert store.setup(*arguments, client_http_port=65536) == -600
assert store.setup(*arguments, tenant_id=None, enable_ssd_offload=None) == 0
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1, 0, "tcp", "", sys.argv[1]) == -600
"""
    done = run_child(PRELUDE + code, master)
    assert done.returncode == 0, done.stderr
    assert "mode in the configuration has no effect" in done.stderr
    assert "global_segment_size is 1: at least 4096 bytes" in done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:99999", "127.0.0.1:0", "", ":5", "127.0.0.1:x"])
def test_what_is_no_address_of_a_master_is_not_waited_for(address):
    begun = time.monotonic()
    done = run_child(PRELUDE + SETUP, address, LAYERCAKE_SETUP_TIMEOUT="600")
    assert done.stdout.split()[-1] == "-600" and time.monotonic() - begun < 60
    assert f'master_server_addr is "{address}"' in done.stderr


# No host has an address of this range, which is for documents.
ELSEWHERE = "192.0.2.7"


def test_nothing_is_listened_on_but_what_was_named(master):
    code = """
from mooncake.engine import TransferEngine
arguments = ("P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1])
assert MooncakeDistributedStore().setup(sys.argv[2], *arguments) == -600
assert TransferEngine().initialize(sys.argv[2], "P2PHANDSHAKE", "tcp", "") == -1
"""
    done = run_child(PRELUDE + code, master, ELSEWHERE)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f'"{ELSEWHERE}" stands for {ELSEWHERE}, which is no address of this host') == 2, done.stderr


def test_where_addresses_are_translated_a_setting_says_where_to_listen(master):
    code = """
store = MooncakeDistributedStore()
assert store.setup(sys.argv[2], "P2PHANDSHAKE", MIB, 0, "tcp", "", sys.argv[1]) == 0
assert store.get_hostname().startswith(sys.argv[2] + ":")
"""
    done = run_child(PRELUDE + code, master, ELSEWHERE, LAYERCAKE_LISTEN="127.0.0.1")
    assert done.returncode == 0, done.stderr
    done = run_child(PRELUDE + code, master, ELSEWHERE, LAYERCAKE_LISTEN="127.0.0.1:5")
    assert "LAYERCAKE_LISTEN is" in done.stderr


def test_a_dict_and_an_engine_share_the_engine(master, rng):
    code = """
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
name = f"127.0.0.1:{engine.get_rpc_port()}"
config = {"local_hostname": name, "metadata_server": "P2PHANDSHAKE", "master_server_addr": sys.argv[1]}
for way in ({"config": config}, {"local_hostname": config}):
    store = MooncakeDistributedStore()
    assert store.setup(**way, engine=engine.get_engine()) == 0
    # What was registered here is known there: they are one.
    memory = alloc(4096)
    assert store.register_buffer(memory, 4096) == 0
    assert engine.register_memory(memory, 4096) < 0
    assert store.close() == 0
    assert engine.register_memory(memory, 4096) == 0 == engine.unregister_memory(memory)
try:
    MooncakeDistributedStore().setup(config, engine=7)
    raise SystemExit("7 is no engine")
except TypeError:
    pass
"""
    check(code, master)


def test_closing_a_store_waits_no_longer_for_transfers_of_the_engine_that_it_shares(master):
    code = """
import os, signal, subprocess
from mooncake.engine import TransferEngine
LEN = 96 * MIB

def started():
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine, f"127.0.0.1:{engine.get_rpc_port()}"

if sys.argv[2:] == ["peer"]:
    engine, name = started()
    memory = alloc(LEN)
    assert engine.register_memory(memory, LEN) == 0
    print(name, memory, flush=True)
    sys.stdin.read()
    sys.exit()

peer = subprocess.Popen([sys.executable, "-c", CODE, sys.argv[1], "peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
try:
    there, target = peer.stdout.readline().split()
    engine, name = started()
    store = MooncakeDistributedStore()
    assert store.setup(name, "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1], engine=engine.get_engine()) == 0
    memory = alloc(LEN)
    assert store.register_buffer(memory, LEN) == 0
    assert engine.transfer_sync_write(there, memory, int(target), 10) == 0
    os.kill(peer.pid, signal.SIGSTOP)
    codes = []
    write = threading.Thread(target=lambda: codes.append(engine.transfer_sync_write(there, memory, int(target), LEN)))
    write.start()
    write.join(1)
    assert write.is_alive(), codes
    start = time.monotonic()
    assert store.close() == 0
    print(time.monotonic() - start)
finally:
    peer.kill()
    peer.communicate()
write.join()
"""
    code = f"CODE = {PRELUDE + code!r}\nexec(CODE)\n"
    done = run_child(code, master, LAYERCAKE_TRANSPORTS="tcp")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 10, "three seconds are allowed, whatever is in flight"
