"""Engines of `mooncake.engine` that find each other at an HTTP metadata server."""

import contextlib
import http.server
import socket
import socketserver
import threading
import time
import urllib.parse

import pytest

pytest.importorskip("mooncake", reason="layercake-mooncake is not installed")

from conftest import check_child, run_child, wait_until  # noqa: E402
from dropin import Memory  # noqa: E402
from mooncake.engine import TransferEngine  # noqa: E402
from mooncake.store import MooncakeDistributedStore  # noqa: E402


class Metadata(http.server.BaseHTTPRequestHandler):
    """A metadata server: values by key, as Mooncake's keeps them."""

    values: dict[str, bytes] = {}
    asked: list[str] = []
    # Seconds that a look-up takes.
    delay = 0.0

    def _key(self) -> str:
        where = urllib.parse.urlsplit(self.path)
        assert where.path == "/metadata"
        return urllib.parse.parse_qs(where.query)["key"][0]

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        self.values[self._key()] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_GET(self):
        time.sleep(self.delay)
        self.asked.append(self._key())
        value = self.values.get(self._key())
        self._answer(404 if value is None else 200, value or b"")

    def do_DELETE(self):
        self._answer(404 if self.values.pop(self._key(), None) is None else 200)

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    Metadata.values, Metadata.asked, Metadata.delay = {}, [], 0.0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metadata"
        server.shutdown()
        thread.join()


def listed(name: str, metadata: str, code: int = 0) -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize(name, metadata, "tcp", "") == code
    return engine


def test_peers_are_found_by_name_at_a_metadata_server(metadata, rng):
    here, there, data = Memory(4096), Memory(4096), rng.randbytes(4096)
    asking, answering = listed("127.0.0.1:17001", metadata), listed("127.0.0.1:17002", metadata)
    assert asking.register_memory(here.address, 4096) == 0 == answering.register_memory(there.address, 4096)
    here[:] = data
    assert asking.transfer_sync_write("127.0.0.1:17002", here.address, there.address, 4096) == 0
    assert there[:] == data
    assert asking.get_first_buffer_address("127.0.0.1:17002") == there.address
    assert asking.transfer_sync_read(f"127.0.0.1:{answering.get_rpc_port()}", here.address, there.address, 10) == 0
    assert asking.send_probe("nobody") == -101
    # One that starts anew under the same name is found where it is now.
    assert answering.initialize("127.0.0.1:17002", metadata, "tcp", "") == 0
    assert answering.register_memory(there.address, 4096) == 0
    wait_until(lambda: asking.transfer_sync_write("127.0.0.1:17002", here.address, there.address, 4096) == 0)
    del asking
    wait_until(lambda: len(Metadata.values) == 1)


@pytest.mark.parametrize("last", ["", "del engine", "engine = [engine]; engine.append(engine)"])
def test_no_entry_stays_when_an_interpreter_ends(metadata, last):
    code = """
import sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1:17003", sys.argv[1], "tcp", "") == 0
"""
    Metadata.delay = 0.5
    assert check_child(code + last, metadata) == ""
    # Whether the name is free, and whether the entry is still its own.
    # An engine of a test before this one may still be ending.
    own = "layercake/engine/127.0.0.1:17003"
    assert [name for name in Metadata.asked if name == own] == [own] * 2
    assert own not in Metadata.values


def test_a_peer_that_is_named_by_its_address_is_looked_up_once(metadata):
    here, there = Memory(4096), Memory(4096)
    asking, answering = listed("127.0.0.1:17001", metadata), TransferEngine()
    assert answering.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert asking.register_memory(here.address, 4096) == 0 == answering.register_memory(there.address, 4096)
    name = f"127.0.0.1:{answering.get_rpc_port()}"
    for _ in range(20):
        assert asking.transfer_sync_write(name, here.address, there.address, 4096) == 0
    assert Metadata.asked == ["layercake/engine/127.0.0.1:17001", f"layercake/engine/{name}"]


def test_a_name_that_comes_later_is_found_at_once(metadata):
    asking = listed("127.0.0.1:17001", metadata)
    assert asking.send_probe("127.0.0.1:17002") < 0
    _there = listed("127.0.0.1:17002", metadata)
    assert asking.send_probe("127.0.0.1:17002") == 0


def test_the_name_of_a_running_engine_is_not_given_away(metadata):
    name = "127.0.0.1:17004"
    running, there, here = listed(name, metadata), Memory(4096), Memory(4096)
    assert running.register_memory(there.address, 4096) == 0
    entry = dict(Metadata.values)
    listed(name, metadata, code=-1)
    assert Metadata.values == entry
    asking = listed("127.0.0.1:17005", metadata)
    assert asking.transfer_sync_write(name, here.address, there.address, 4096) == 0
    # A running engine of another name, where one of this name was that crashed.
    for key in list(Metadata.values):
        if key.endswith("17005"):
            Metadata.values["layercake/engine/127.0.0.1:17007"] = Metadata.values[key]
    other = listed("127.0.0.1:17007", metadata)
    del running, other
    # They leave in the background, and have left when their names are asked for.
    again = [listed(name, metadata), listed("127.0.0.1:17007", metadata)]
    assert len(Metadata.values) == 3
    del again


def test_the_name_of_an_engine_that_only_a_dropped_store_shared_is_free(metadata, cluster):
    name = "127.0.0.1:17008"
    for _ in range(10):
        engine, store = listed(name, metadata), MooncakeDistributedStore()
        shared = engine.get_engine()
        assert store.setup(name, metadata, 1 << 20, 0, "tcp", "", cluster.master, engine=shared) == 0
        del engine, shared
        listed(name, metadata, code=-1)
        del store
        # The store leaves its cluster, and then the engine its name.
        again = listed(name, metadata)
        del again


def test_the_name_of_an_engine_that_crashed_is_free(metadata):
    code = """
import os, sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1:17006", sys.argv[1], "tcp", "") == 0
os._exit(0)
"""
    check_child(code, metadata)
    assert len(Metadata.values) == 1, "nobody took it back"
    listed("127.0.0.1:17006", metadata)


def test_metadata_servers_that_are_none(metadata):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/metadata"
    for address in (nobody, "http://", "http:///metadata", "http://127.0.0.1:1/a b", "https://127.0.0.1/metadata"):
        listed("127.0.0.1", address, code=-1)
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        listed("127.0.0.1", f"http://127.0.0.1:{silent.getsockname()[1]}/metadata", code=-1)
    assert time.monotonic() - start < 10


@contextlib.contextmanager
def answering(said: bytes):
    """A service that says this to everyone, and hangs up."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1 << 16)
            self.request.sendall(said)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield "127.0.0.1:%d" % server.server_address[1]
        server.shutdown()
        thread.join()


PAGE = b"<html>It works!</html>"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"220 mail.example.org ESMTP\r\n", "220 mail.example.org"),
        (b"", 'answered ""'),
        (b"\x00\xff" * 100_000, "answered"),
        (b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n", "405 Method Not Allowed"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "404 Not Found"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(PAGE), PAGE), "It works!"),
    ],
    ids=["another protocol", "nothing", "anything", "another service", "no such path", "a page for everything"],
)
def test_other_services_are_no_metadata_servers(said, shown, cluster):
    code = """
import sys
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore
address = f"http://{sys.argv[1]}/metadata"
assert TransferEngine().initialize("127.0.0.1", address, "tcp", "") == -1
# A store needs none, and asks none.
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", address, 1 << 20, 0, "tcp", "", sys.argv[2]) == 0
assert store.put("k", b"v") == 0 == store.close()
"""
    with answering(said) as address:
        done = run_child(code, address, cluster.master)
        assert done.returncode == 0, done.stderr
        assert f"the metadata server at {address}" in done.stderr and shown in done.stderr


@pytest.mark.parametrize("said", [b"220 mail.example.org ESMTP\r\n", b"", b"HTTP/1.1 200 OK\r\n\r\n" + PAGE])
def test_other_services_are_no_masters(said):
    code = """
import sys
from mooncake.store import MooncakeDistributedStore
assert MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1]) == -900
"""
    with answering(said) as address:
        done = run_child(code, address)
        assert done.returncode == 0, done.stderr
        assert address in done.stderr
