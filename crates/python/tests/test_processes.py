"""Threads, forks, ends of interpreters, and other processes."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import layercake
from conftest import MIB, check_child, child_env, run_child, wait_until


def test_calls_of_many_threads_overlap_and_let_python_run(cluster, key):
    """All threads move bytes at once, while this one counts."""
    with layercake.Store(cluster.master) as store:
        data = os.urandom(4 * MIB)
        keys = [key() for _ in range(6)]
        failed = []

        def work(k):
            try:
                for _ in range(3):
                    store.upsert(k, data)
                    assert store.get(k) == data
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(k,)) for k in keys]
        for thread in threads:
            thread.start()
        ticks = 0
        while any(thread.is_alive() for thread in threads):
            ticks += 1
        for thread in threads:
            thread.join()
        assert not failed
        assert ticks > 100


def test_a_wait_does_not_hold_the_interpreter(store, key):
    session = store.start_put(key(), 1)
    done = threading.Event()

    def wait():
        store.wait_complete([session.key], timeout=30)
        done.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    session.write(0, b"x")
    session.end()
    assert done.wait(20)
    waiter.join()


def test_a_forked_child_gets_an_error_whatever_it_does():
    out = check_child(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        import layercake
        cluster = layercake.serve(capacity="16MiB")
        store = cluster.store
        store.put("k", b"of the parent")
        session = store.start_get("k")
        master = cluster.master
        pid = os.fork()
        if pid == 0:
            for call in (
                lambda: store.get("k"),
                lambda: store.put("k", b"x"),
                lambda: store.close(),
                lambda: session.read(),
                lambda: cluster.close(),
                lambda: store.health,
                lambda: layercake.Store(master),
                lambda: layercake.serve(),
                lambda: layercake.TransferEngine(),
            ):
                try:
                    call()
                except layercake.ForkError as error:
                    assert "spawn" in str(error)
                else:
                    os._exit(1)
            del store, session, cluster
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert session.read() == b"of the parent" and store.put("n", b"x")
        print("parent lives")
        """
    )
    assert out == "parent lives\n"


def test_a_process_that_only_imported_the_package_may_fork(cluster):
    """And the children never share an identity."""
    check_child(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        import layercake
        master = sys.argv[1]
        pids = []
        for number in range(2):
            pid = os.fork()
            if pid == 0:
                name = f"child-{number}"
                mine = layercake.ReplicateConfig(preferred_segments=[name])
                with layercake.Store(master, capacity="4MiB", name=name) as store:
                    store.put(name, bytes([number]) * 1000, mine)
                    assert store.get(name) == bytes([number]) * 1000
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
        """,
        cluster.master,
    )


def test_spawned_workers_are_processes_like_any_other(tmp_path, cluster, key):
    cluster.store.put("for workers", b"x" * 1000)
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys
            import layercake

            def work(master):
                with layercake.Store(master) as store:
                    return len(store.get("for workers"))

            if __name__ == "__main__":
                with layercake.Store(sys.argv[1]) as store:
                    with multiprocessing.get_context("spawn").Pool(2) as pool:
                        print(pool.map(work, [sys.argv[1]] * 4))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(program), cluster.master],
        capture_output=True,
        text=True,
        timeout=60,
        env=child_env(),
    )
    assert (done.stdout, done.stderr) == ("[1000, 1000, 1000, 1000]\n", "")


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "cluster.close()",
        "del cluster, store",
        "store.close(); del cluster",
        "keep = store.start_put('open', 10)",
        "import sys; sys.modules['kept'] = (cluster, store)",
        "import atexit; atexit.register(lambda: store.put('late', b'x'))",
        "other = layercake.Store(cluster.master)",
        "store = layercake.serve(capacity='4MiB').store; import gc; gc.collect(); store.put('k', b'x')",
        "cycle = []; cycle.append((cycle, store, cluster)); del cycle, store, cluster",
        """
import threading, time
def spin():
    while True:
        try:
            store.put("k", bytes(100000)); store.get("k")
        except layercake.LayercakeError:
            pass
for _ in range(3):
    threading.Thread(target=spin, daemon=True).start()
time.sleep(0.2)
""",
    ],
)
def test_the_interpreter_ends_in_any_order(ending):
    started = time.monotonic()
    check_child(
        "import layercake\ncluster = layercake.serve(capacity='16MiB')\nstore = cluster.store\nstore.put('k', b'x')\n"
        + ending,
        timeout=40,
    )
    assert time.monotonic() - started < 20


def test_a_process_that_ends_withdraws_what_it_lent(cluster):
    out = check_child(
        """
        import sys, layercake
        store = layercake.Store(sys.argv[1], name="leaver", capacity="8MiB")
        store.put("of the leaver", b"x", layercake.ReplicateConfig(preferred_segments=["leaver"]))
        print([s["name"] for s in store.segments()].count("leaver"))
        """,
        cluster.master,
    )
    assert out == "1\n"
    assert all(segment["name"] != "leaver" for segment in cluster.store.segments())
    assert not cluster.store.exists("of the leaver")


def test_processes_share_objects(cluster, key, rng):
    k, data = key(), rng.randbytes(MIB)
    cluster.store.put(k, data)
    for transports in ("tcp", "shm"):
        out = check_child(
            """
            import sys, hashlib, layercake
            with layercake.Store(sys.argv[1]) as store:
                data = store.get(sys.argv[2])
                store.put(sys.argv[2] + sys.argv[3], data[::-1])
                print(hashlib.sha256(data).hexdigest(), *store.stats()["transports"])
            """,
            cluster.master,
            k,
            transports,
            LAYERCAKE_TRANSPORTS=transports,
        )
        assert out.split()[0] == hashlib.sha256(data).hexdigest()
        assert set(out.split()[1:]) & {"shm", "tcp"} == {transports}
        assert cluster.store.get(k + transports) == data[::-1]


def test_a_member_with_the_wrong_token_is_told_so():
    token = "a secret of some length"
    with layercake.serve(capacity="16MiB", token=token) as cluster:
        cluster.store.put("k", b"x")
        with layercake.Store(cluster.master, token=token) as store:
            assert store.get("k") == b"x"
        for wrong in ({}, {"token": "another secret of some length"}):
            with pytest.raises(layercake.AuthenticationError, match="token") as raised:
                layercake.Store(cluster.master, **wrong)
            assert token not in str(raised.value)
        out = check_child(
            "import sys, layercake; print(layercake.Store(sys.argv[1]).get('k'))",
            cluster.master,
            LAYERCAKE_TOKEN=token,
        )
        assert out == "b'x'\n"


def test_a_master_that_is_none_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = "127.0.0.1:%d" % free.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(layercake.MasterUnreachable, match=nobody.replace(".", r"\.")):
        layercake.Store(nobody)
    assert time.monotonic() - started < 5
    with socket.socket() as web:
        web.bind(("127.0.0.1", 0))
        web.listen()

        def answer():
            try:
                while True:
                    peer, _ = web.accept()
                    peer.recv(100)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                    peer.close()
            except OSError:
                pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = "127.0.0.1:%d" % web.getsockname()[1]
        with pytest.raises(layercake.MasterUnreachable, match=address.replace(".", r"\.")):
            layercake.Store(address)
        web.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def spawn(code: str, *args: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_env(),
    )


SERVE = """
import sys, layercake
cluster = layercake.serve(capacity="32MiB")
print(cluster.master, flush=True)
sys.stdin.read()
"""

LEND = """
import sys, layercake
store = layercake.Store(sys.argv[1], name="lender", capacity="32MiB")
print("lending", flush=True)
sys.stdin.read()
"""


def test_a_lost_master_costs_milliseconds_and_readers_go_on():
    server = spawn(SERVE)
    try:
        master = server.stdout.readline().strip()
        with layercake.Store(master, capacity="32MiB", name="mine") as store:
            mine = layercake.ReplicateConfig(preferred_segments=["mine"])
            data = os.urandom(100_000)
            store.put("k", data, mine)
            reader = store.start_get("k")
            server.send_signal(signal.SIGKILL)
            server.wait()
            wait_until(lambda: store.health == "master lost")
            assert reader.read() == data, "no master is needed for that"
            slowest = 0.0
            for _ in range(20):
                started = time.monotonic()
                with pytest.raises(layercake.MasterUnreachable) as raised:
                    store.exists("k")
                assert raised.value.retryable
                slowest = max(slowest, time.monotonic() - started)
            assert slowest < 1
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def own_cluster():
    """A cluster that a test may damage."""
    with layercake.serve(capacity=16 * MIB) as cluster:
        yield cluster


def test_a_lender_that_dies_costs_its_objects_and_nothing_else(own_cluster, key, rng):
    store, (lost, kept) = own_cluster.store, (key(), key())
    lender = spawn(LEND, own_cluster.master)
    try:
        assert lender.stdout.readline() == "lending\n"
        data = rng.randbytes(200_000)
        store.put(lost, data, layercake.ReplicateConfig(preferred_segments=["lender"]))
        store.put(kept, data, layercake.ReplicateConfig(preferred_segments=[store.name]))
        assert [r["name"] for r in store.stat(lost)["replicas"]] == ["lender"]
        reader = store.start_get(lost)
        lender.send_signal(signal.SIGKILL)
        lender.wait()
        started = time.monotonic()
        with pytest.raises(layercake.LayercakeError):
            reader.read()
        with pytest.raises(layercake.LayercakeError):
            store.get(lost)
        assert not store.exists(lost), "what can't be served is not promised"
        assert time.monotonic() - started < 10
        assert store.get(kept) == data
    finally:
        lender.kill()
        lender.wait()


def test_a_signal_ends_a_process_at_once():
    server = spawn(SERVE)
    server.stdout.readline()
    server.send_signal(signal.SIGTERM)
    assert server.wait(10) == -signal.SIGTERM


def test_ctrl_c_is_an_exception():
    code = """
        import os, signal, sys, layercake
        cluster = layercake.serve(capacity="16MiB")
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                cluster.store.put("k", b"x")
        except KeyboardInterrupt:
            print("interrupted")
        """
    assert run_child(code).stdout == "interrupted\n"


def test_a_long_wait_can_be_interrupted():
    code = """
        import os, signal, threading, time, layercake
        cluster = layercake.serve(capacity="16MiB")
        session = cluster.store.start_put("k", 10)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        try:
            cluster.store.wait_complete(["k"], timeout=60)
        except KeyboardInterrupt:
            assert time.monotonic() - started < 20
            print("interrupted")
        """
    done = run_child(code)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_log_lines_are_silent_unless_asked_for():
    code = """
        import layercake
        with layercake.serve(capacity="16MiB") as cluster:
            cluster.store.put("k", b"x")
        """
    assert run_child(code).stderr == ""
    assert "DEBUG" in run_child(code, LAYERCAKE_LOG="debug").stderr
    assert run_child(code, LAYERCAKE_LOG="this is = no filter").stderr == ""
