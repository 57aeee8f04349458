"""The processes that lend memory: the store service with its REST interface, its configuration, and the plain client."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import urllib.parse

import pytest

pytest.importorskip("mooncake.store", reason="layercake-mooncake is not installed")

from conftest import child_env, run_child, wait_until  # noqa: E402
from masters import MIB, Master, ask, command, free_port  # noqa: E402
from mooncake.mooncake_config import DEFAULT_GLOBAL_SEGMENT_SIZE, DEFAULT_LOCAL_BUFFER_SIZE, MooncakeConfig  # noqa: E402

SERVICE = [sys.executable, "-m", "mooncake.mooncake_store_service"]


@pytest.fixture(scope="module")
def master():
    with Master("--default_kv_lease_ttl=200") as master:
        yield master


def configuration(folder, master=None, **more) -> str:
    """A file with what the service needs."""
    values = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "16MB",
        "local_buffer_size": "1MB",
        "protocol": "tcp",
        "device_name": "",
        "master_server_address": f"127.0.0.1:{master.rpc if master else 1}",
    }
    path = folder / "mooncake.json"
    path.write_text(json.dumps(values | more))
    return str(path)


class Service:
    """A running service."""

    def __init__(self, *arguments: str, **env: str):
        self.port = free_port()
        self.process = subprocess.Popen(
            [*SERVICE, f"--port={self.port}", "--host=127.0.0.1", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_env(**env),
        )

    def ready(self) -> Service:
        wait_until(self.answers, timeout=20)
        return self

    def answers(self) -> bool:
        assert self.process.poll() is None, self.process.stderr.read()
        try:
            return self.ask("GET", "/api/exist/k")[0] == 200
        except OSError:
            return False

    def ask(self, method: str, path: str, body: bytes | None = None):
        return ask(f"http://127.0.0.1:{self.port}{path}", method, body)

    def json(self, method: str, path: str, body: object = None):
        encoded = None if body is None else json.dumps(body).encode()
        code, text = self.ask(method, path, encoded)
        return code, json.loads(text)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=10)
        return self.process.returncode, out + err

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def service(master, tmp_path_factory):
    with Service("--config", configuration(tmp_path_factory.mktemp("service"), master)) as service:
        yield service.ready()


# ---------------------------------------------------------------- the REST interface


def test_values_are_put_read_and_removed(service):
    assert service.json("PUT", "/api/put", {"key": "k", "value": "größe"}) == (200, {"status": "success"})
    assert service.ask("GET", "/api/get/k") == (200, "größe")
    assert service.json("GET", "/api/exist/k") == (200, {"exists": True})
    wait_until(lambda: service.json("DELETE", "/api/remove/k")[0] == 200)
    assert service.json("GET", "/api/exist/k") == (200, {"exists": False})
    assert service.json("GET", "/api/get/k") == (404, {"error": "Key not found"})
    assert service.json("DELETE", "/api/remove/k")[0] == 500


def test_keys_may_hold_anything_that_is_escaped(service):
    key = "a/b c%?&ü"
    assert service.json("PUT", "/api/put", {"key": key, "value": "v"})[0] == 200
    assert service.ask("GET", "/api/get/" + urllib.parse.quote(key, safe="")) == (200, "v")
    wait_until(lambda: service.json("DELETE", "/api/remove_all")[1] == {"status": "success removed 1 keys"})


def test_what_the_service_lends_others_use(service, master):
    other = master.store(segment=0)
    assert other.put("from outside", b"x" * MIB) == 0
    assert service.ask("GET", "/api/get/from%20outside") == (200, "x" * MIB)
    other.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("PUT", "/api/put", b"", 400),
        ("PUT", "/api/put", b"[1]", 400),
        ("PUT", "/api/put", b'{"key": "k"}', 400),
        ("PUT", "/api/put", b'{"key": "", "value": "v"}', 400),
        ("PUT", "/api/put", b'{"key": "k", "value": ""}', 400),
        ("PUT", "/api/put", b'{"key": 1, "value": "v"}', 400),
        ("PUT", "/api/put", b"\xff\xfe", 400),
        ("PUT", "/api/put", rb'{"key": "k", "value": "\ud800"}', 400),
        ("PUT", "/api/put", rb'{"key": "\udfff", "value": "v"}', 400),
        ("GET", "/api/get/%ff", None, 400),
        ("DELETE", "/api/remove/%ed%a0%80", None, 400),
        ("DELETE", "/api/remove/never", None, 500),
        ("GET", "/api/get/", None, 404),
        ("GET", "/api/put", None, 405),
        ("PUT", "/api/get/k", b"{}", 405),
        ("GET", "/elsewhere", None, 404),
        ("POST", "/api/reconfigure", b'{"mode": "other"}', 400),
        ("POST", "/api/reconfigure", b'{"mode": "prefill"}', 200),
        ("POST", "/api/reconfigure", b'{"mode": "decode"}', 400),
        ("POST", "/api/reconfigure", b'{"mode": "decode", "path": "/p", "size": 1}', 501),
        ("POST", "/api/mount_shm", b'{"name": "../x", "size": 1}', 400),
        ("POST", "/api/mount_shm", b'{"name": "x", "size": 1}', 501),
        ("POST", "/api/mount", b'{"size": true}', 400),
        ("POST", "/api/mount", b'{"size": 1}', 501),
        ("POST", "/api/unmount", b"{}", 400),
        ("POST", "/api/unmount", b'{"segment_ids": "x"}', 501),
        ("POST", "/api/unmount_shm", b'{"segment_ids": ["x"]}', 501),
        ("POST", "/api/unmount_local_disk", b'{"grace_period_seconds": -1}', 400),
    ],
)
def test_every_request_has_its_answer(service, method, path, body, code):
    status, text = service.ask(method, path, body)
    assert status == code, text
    assert code == 200 or json.loads(text)["error"]


def test_bodies_that_are_too_large_or_of_no_length_are_refused_unread(service):
    for header, value, code in (("Content-Length", str(1 << 40), 413), ("Content-Length", "x", 400), ("Transfer-Encoding", "chunked", 411)):
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
        connection.putrequest("PUT", "/api/put")
        connection.putheader(header, value)
        connection.endheaders()
        assert connection.getresponse().status == code
        connection.close()


# ---------------------------------------------------------------- the process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told_says_nothing_and_withdraws_its_memory(master, tmp_path, number):
    before = master.get("/get_all_segments")[1].splitlines()
    with Service("--config", configuration(tmp_path, master)) as service:
        service.ready()
        assert len(master.get("/get_all_segments")[1].splitlines()) == len(before) + 1
        assert service.stop(number) == (0, "")
    assert master.get("/get_all_segments")[1].splitlines() == before


def test_it_waits_for_its_master_and_can_be_told_to_stop_meanwhile(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(20)
        path = configuration(tmp_path, master_server_address=f"127.0.0.1:{silent.getsockname()[1]}")
        with Service("--config", path) as service:
            connection, _ = silent.accept()
            assert service.stop()[0] == 0
            connection.close()
    path = configuration(tmp_path)
    with Service("--config", path, "--max-wait-time=0") as service:
        out, err = service.process.communicate(timeout=20)
        assert service.process.returncode == 1 and "could not be set up" in err


@pytest.mark.parametrize("change", [{"protocol": "rdma"}, {"metadata_server": "etcd://127.0.0.1:2379"}])
def test_settings_that_waiting_does_not_mend_end_it_at_once(tmp_path, master, change):
    with Service("--config", configuration(tmp_path, master, **change), "--max-wait-time=3600") as service:
        out, err = service.process.communicate(timeout=20)
    assert service.process.returncode == 1 and "can't be set up like that" in err and next(iter(change.values())) in err


def test_values_on_the_command_line_and_in_the_environment(master, tmp_path):
    path = configuration(tmp_path)
    with Service("-Dmaster_server_address=" + f"127.0.0.1:{master.rpc}", "-Dglobal_segment_size=8MB", MOONCAKE_CONFIG_PATH=path) as service:
        service.ready()
        detail = master.json("/get_segments_detail")[1]["segments"]
        assert 8 * MIB in [segment["size_bytes"] for segment in detail]
    with Service(MOONCAKE_MASTER=f"127.0.0.1:{master.rpc}", MOONCAKE_GLOBAL_SEGMENT_SIZE="8MB") as service:
        service.ready()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--config=/no/such/file"], 1, "/no/such/file"),
        (["-Dmaster_server_adress=x"], 1, "did you mean master_server_address"),
        (["-Dglobal_segment_size=much"], 1, "much"),
        (["-Dlocal_hostname"], 2, "KEY=VALUE"),
        (["--port=70000"], 2, "70000"),
        (["--no-such-flag"], 2, "--no-such-flag"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, arguments, code, told):
    if not any(argument.startswith("--config") for argument in arguments):
        arguments = ["--config", configuration(tmp_path), *arguments]
    done = subprocess.run([*SERVICE, *arguments], capture_output=True, text=True, timeout=20, env=child_env())
    assert done.returncode == code and told in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_named(master, service, tmp_path):
    arguments = ["--config", configuration(tmp_path, master), f"--port={service.port}", "--host=127.0.0.1"]
    done = subprocess.run([*SERVICE, *arguments], capture_output=True, text=True, timeout=20, env=child_env())
    assert done.returncode == 1 and str(service.port) in done.stderr and done.stderr.count("\n") == 1


def test_the_plain_client_lends_memory_until_it_is_told_to_stop(master):
    flags = [f"--master_server_address=127.0.0.1:{master.rpc}", "-host", "127.0.0.1", "--global_segment_size=9 MB", "--metadata_server=P2PHANDSHAKE"]
    process = subprocess.Popen(
        [*command("mooncake_client", "mooncake.cli_client"), *flags, "--threads=1", "--port=50052"], env=child_env(), stderr=subprocess.PIPE, text=True
    )
    try:
        sizes = lambda: [segment["size_bytes"] for segment in master.json("/get_segments_detail")[1]["segments"]]  # noqa: E731
        wait_until(lambda: 9 * MIB in sizes(), timeout=20)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=10)[1] == "" and process.returncode == 0
        assert 9 * MIB not in sizes()
    finally:
        process.kill()
    for flags, told in ((["--enable_offload"], "enable_offload"), (["--global_segment_size=much"], "much"), (["--protocol=rdma"], "rdma")):
        done = subprocess.run(
            [*command("mooncake_client", "mooncake.cli_client"), *flags], capture_output=True, text=True, timeout=20, env=child_env()
        )
        assert done.returncode != 0 and told in done.stderr


def test_the_metadata_server_runs_alone():
    port = free_port()
    run = command("mooncake_http_metadata_server", "mooncake.http_metadata_server")
    process = subprocess.Popen([*run, f"--port={port}", "--host=127.0.0.1"], stderr=subprocess.PIPE, text=True, env=child_env())

    def answers() -> bool:
        try:
            return ask(f"http://127.0.0.1:{port}/health")[0] == 200
        except OSError:
            return False

    try:
        wait_until(answers)
        url = f"http://127.0.0.1:{port}/metadata?key=k"
        assert ask(url, "PUT", b"v")[0] == 200 and ask(url) == (200, "v")
        taken = subprocess.run([*run, f"--port={port}", "--host=127.0.0.1"], capture_output=True, text=True, timeout=20)
        assert taken.returncode == 1 and str(port) in taken.stderr
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10)[1] == "" and process.returncode == 0
    finally:
        process.kill()


# ---------------------------------------------------------------- the configuration


def test_a_file_gives_sizes_with_units_and_defaults(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text('{"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "master_server_address": "m:1", "global_segment_size": "1.5GB", "protocol": "TCP"}')
    config = MooncakeConfig.from_file(str(path))
    assert config.global_segment_size == 3 << 29 and config.local_buffer_size == DEFAULT_LOCAL_BUFFER_SIZE
    assert (config.protocol, config.device_name, config.tenant_id, config.client_http_port) == ("tcp", "", "default", 9300)


def test_variables_give_the_same(monkeypatch):
    for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER", "MOONCAKE_LOCAL_HOSTNAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="MOONCAKE_MASTER"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "m:1")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_ENABLED", "no")
    config = MooncakeConfig.load_from_env()
    assert (config.master_server_address, config.local_hostname, config.metadata_server) == ("m:1", "localhost", "P2PHANDSHAKE")
    assert config.global_segment_size == DEFAULT_GLOBAL_SEGMENT_SIZE and config.enable_ssd_offload is False


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"global_segment_size": -1}, "global_segment_size"),
        ({"global_segment_size": True}, "global_segment_size"),
        ({"local_buffer_size": "lots"}, "local_buffer_size"),
        ({"local_hostname": " "}, "local_hostname"),
        ({"master_server_address": 7}, "master_server_address"),
        ({"protocol": ""}, "protocol"),
        ({"enable_ssd_offload": "perhaps"}, "enable_ssd_offload"),
        ({"client_http_port": 70000}, "client_http_port"),
        ({"client_http_port": "x"}, "client_http_port"),
        ({"device_name": ["mlx5_0"]}, "device_name"),
    ],
)
def test_values_that_make_no_sense_are_named(tmp_path, change, told):
    with pytest.raises(ValueError, match=told):
        MooncakeConfig.from_file(configuration(tmp_path, **change))


@pytest.mark.parametrize(("text", "told"), [("{", "no JSON"), ("[1]", "no JSON object"), ("{}", "local_hostname")])
def test_files_that_make_no_sense_are_named(tmp_path, text, told):
    path = tmp_path / "mooncake.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        MooncakeConfig.from_file(str(path))


def test_unknown_keys_are_told_and_those_of_other_readers_are_not(tmp_path, caplog):
    MooncakeConfig.from_file(configuration(tmp_path, mode="embedded", enable_offload=False, use_ascend_direct=False))
    assert caplog.text == ""
    MooncakeConfig.from_file(configuration(tmp_path, tenant_di="x"))
    assert "did you mean 'tenant_id'" in caplog.text


def test_importing_says_nothing():
    done = run_child("import mooncake.mooncake_config, mooncake.mooncake_store_service, mooncake.http_metadata_server, mooncake.cli_client")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
