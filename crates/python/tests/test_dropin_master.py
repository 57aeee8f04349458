"""The command mooncake_master: its flags, its HTTP ports, and what it says when it can't start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.parse

import pytest

pytest.importorskip("mooncake.store", reason="layercake-mooncake is not installed")

from conftest import child_env  # noqa: E402
from masters import MIB, Master, command, free_port  # noqa: E402
from mooncake.store import ReplicateConfig  # noqa: E402


@pytest.fixture(scope="module")
def master():
    with Master("--default_kv_lease_ttl=60000", "--enable_http_metadata_server") as master:
        yield master


@pytest.fixture
def store(master):
    store = master.store()
    yield store
    store.remove_all(True)
    store.close()


def refused(*flags: str, **env: str) -> str:
    """What the command says when it does not start."""
    done = subprocess.run([*command(), *flags], capture_output=True, text=True, timeout=20, env=child_env(**env))
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert done.stderr.startswith("mooncake_master: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# ---------------------------------------------------------------- the process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_soon_says_nothing_and_ends_when_told(number):
    begun = time.monotonic()
    with Master() as master:
        assert time.monotonic() - begun < 5  # the machine may be busy; alone it takes a tenth of a second
        store = master.store()
        assert store.put("k", b"v") == 0
        assert master.stop(number) == (0, "")
        assert store.health_check() != 0 or store.get("k") == b""
        store.close()


def test_help_lists_the_flags_and_version_is_one_line():
    for flag, told in (("--help", "--default_kv_lease_ttl"), ("-help", "--rpc_port"), ("--version", "layercake")):
        done = subprocess.run([*command(), flag], capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, "")
        assert told in done.stdout


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--no_such_flag=1"], "no_such_flag"),
        (["--metrics_prt=1"], "did you mean --metrics_port"),
        (["--rpc_port=banana"], "banana"),
        (["--rpc_port=65536"], "65535"),
        (["--default_kv_lease_ttl=-5"], "default_kv_lease_ttl"),
        (["--eviction_high_watermark_ratio=1.5"], "at most 1"),
        (["--client_ttl"], "needs a value"),
        (["--enable_ha"], "leave it off"),
        (["stray"], "stray"),
        (["--rpc_address=no.such.host.invalid"], "rpc_address"),
        (["--enable_multi_tenants"], "tenant_quota_connector_uri"),
        (["--config_path=/no/such/file.yaml"], "/no/such/file.yaml"),
    ],
)
def test_flags_that_make_no_sense_are_refused_in_a_line_that_says_what_to_change(flags, told):
    assert told in refused(*flags)


def test_a_port_in_use_is_named_whichever_it_is():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        local = [f"--{host}=127.0.0.1" for host in ("rpc_address", "metrics_host", "http_metadata_server_host")]
        free = [f"--rpc_port={free_port()}", f"--metrics_port={free_port()}"]
        for flags in (
            [f"--rpc_port={port}", f"--metrics_port={free_port()}"],
            [f"--rpc_port={free_port()}", f"--metrics_port={port}"],
            [*free, "--enable_http_metadata_server", f"--http_metadata_server_port={port}"],
        ):
            assert f"127.0.0.1:{port}" in refused(*local, *flags)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "quotas.yaml"),
        ("version: 2\n", "version"),
        ("version: 1\ntenants:\n  - name: a\n    quota: lots\n", "lots"),
        ("version: 1\ntenants:\n  - name: a\n    quota: 0\n", "quota"),
        ("version: 1\ntenants: 7\n", "tenants"),
        ("\t{", "quotas.yaml"),
    ],
)
def test_a_quota_file_that_makes_no_sense_is_refused(tmp_path, text, told):
    path = tmp_path / "quotas.yaml"
    path.write_text(text)
    assert told in refused("--enable_multi_tenants=true", f"--tenant_quota_connector_uri={path}")


def test_off_loopback_it_says_once_that_it_is_open_unless_there_is_a_token():
    with Master("--rpc_address=0.0.0.0") as master:
        code, said = master.stop()
        assert code == 0 and said.count("\n") == 1 and "LAYERCAKE_TOKEN" in said
    token = {"LAYERCAKE_TOKEN": "a token that is long enough"}
    with Master("--rpc_address=0.0.0.0", env=token) as master:
        assert master.stop() == (0, "")
    assert "LAYERCAKE_TOKEN" in refused(LAYERCAKE_TOKEN="short")


def test_a_token_that_is_empty_is_as_good_as_none():
    with Master(env={"LAYERCAKE_TOKEN": ""}) as master:
        store = master.store()
        assert store.put("k", b"v") == 0
        store.close()
        assert master.stop() == (0, "")


def test_flags_come_from_a_file_behind_the_command_line(tmp_path):
    path = tmp_path / "master.yaml"
    path.write_text("default_kv_lease_ttl: 60000\neviction_ratio: 0.1\n")
    with Master(f"--config_path={path}") as master:
        store = master.store()
        assert store.put("k", b"v") == 0 and store.is_exist("k") == 1
        assert store.remove("k") == -706
        store.close()


# ---------------------------------------------------------------- queries


def test_unknown_paths_and_methods_are_not_found(master):
    for path, method in (("/", "GET"), ("/health", "POST"), ("/api/v1/remove_all", "GET"), ("/metrics/x", "GET")):
        assert master.ask(path, method)[0] == 404


def test_it_says_how_it_is(master):
    code, health = master.json("/health")
    assert code == 200 and health["status"] == "ok" and health["service_ready"] is True
    assert (master.get("/role")[1], master.get("/ha_status")[1]) == ("leader", "serving")
    assert master.json("/leader")[1]["present"] is False


def test_keys_of_any_letters_are_listed_and_queried(master, store):
    keys = ["plain", "with, comma", "with space & sign=1", "with\"quote", "größe/深さ"]
    for key in keys:
        assert store.put(key, key.encode()) == 0
    assert sorted(master.get("/get_all_keys")[1].splitlines()) == sorted(keys)
    for key in keys:
        code, answer = master.json("/query_key?key=" + urllib.parse.quote(key, safe=""))
        assert code == 200 and answer["data"][0]["size_"] == len(key.encode())
    code, answer = master.json("/batch_query_keys?keys=plain,none,,plain")
    assert code == 200 and set(answer["data"]) == {"plain", "none"}
    assert answer["data"]["plain"]["ok"] and answer["data"]["none"]["error"] == "OBJECT_NOT_FOUND"


def test_a_query_leases_what_it_finds(master, store):
    assert store.put("k", b"v") == 0
    assert store.remove("k") == 0
    assert store.put("k", b"v") == 0
    assert master.json("/query_key?key=k")[0] == 200
    assert store.remove("k") == -706


def test_queries_that_find_nothing_say_so(master, store):
    assert store.batch_put_session_start(["open"], [10], ReplicateConfig()) == [0]
    for query, code, error in (
        ("/query_key?key=none", 404, -704),
        ("/query_key", 404, -704),
        ("/query_key?key=open", 404, -703),
        ("/query_key?key=" + "x" * 40_000, 404, -704),
        ("/api/v1/segments/status", 400, -600),
        ("/api/v1/segments/status?segment=none", 404, -101),
    ):
        status, answer = master.json(query)
        assert (status, answer["success"], answer["error_code"]) == (code, False, error), query
    assert master.json("/batch_query_keys")[0] == master.json("/batch_query_keys?keys=,")[0] == 400
    assert master.get("/query_segment?segment=none")[0] == 500
    assert store.batch_put_session_revoke(["open"]) == [0]


def test_segments_are_listed_while_their_owner_is_there(master):
    store = master.store(segment=16 * MIB)
    name = store.get_hostname()
    assert master.get("/get_all_segments")[1].splitlines() == [name]
    assert store.put("k", b"x" * 1000) == 0
    code, detail = master.json("/get_segments_detail")
    assert code == 200 and detail["total_segments"] == 1
    [segment] = detail["segments"]
    assert (segment["segment_name"], segment["size_bytes"], segment["status"]) == (name, 16 * MIB, "OK")
    assert segment["allocator_used_bytes"] == 1000
    assert f"Used(bytes): 1000\nCapacity(bytes) : {16 * MIB}\n" in master.get(f"/query_segment?segment={name}")[1]
    assert master.json(f"/api/v1/segments/status?segment={name}")[1]["status_name"] == "OK"
    store.close()
    assert master.get("/get_all_segments")[1] == ""


def test_objects_are_removed_over_http_leased_ones_by_force(master, store):
    for key in ("a", "b", "c"):
        assert store.put(key, b"x") == 0
    assert store.is_exist("a") == 1
    assert master.json("/api/v1/remove_all", "POST", b"")[1] == {"success": True, "removed_count": 2}
    assert master.json("/api/v1/remove_all?force=true", "POST", b"")[1]["removed_count"] == 1


# ---------------------------------------------------------------- metrics


def test_metrics_count_what_happened(master, store):
    before = master.metrics()

    def since(name: str) -> float:
        return master.metrics()[name] - before[name]

    assert store.put("one", b"x" * 1000) == 0
    assert store.get("one") == b"x" * 1000
    assert store.get("none") == b""
    assert store.batch_is_exist(["one", "none"]) == [1, 0]
    assert since("master_put_start_requests_total") == since("master_put_end_requests_total") == 1
    assert since("master_value_size_bytes_count") == 1 and since("master_value_size_bytes_sum") == 1000
    assert since('master_value_size_bytes_bucket{le="4096.000000"}') == 1
    assert since("mem_cache_hit_bytes_total") >= 1000
    assert since("total_get_nums_") >= 2 and since("valid_get_nums_") >= 1
    assert since("master_batch_exist_key_items_total") == 2
    now = master.metrics()
    assert now["master_key_count"] == 1 and now["master_allocated_bytes"] == 1000
    assert now["master_active_clients"] == 1 and now["master_total_capacity_bytes"] == 16 * MIB
    assert now[f'segment_allocated_bytes{{segment="{store.get_hostname()}"}}'] == 1000
    assert now["layercake_master_objects"] == 1
    summary = master.get("/metrics/summary")[1]
    assert summary.startswith("role=leader") and "Keys: 1 " in summary and summary.count("\n") == 1


def test_bytes_held_for_readers_of_removed_objects_do_not_count(master, store):
    assert store.put("k", b"x" * MIB) == 0
    assert store.is_exist("k") == 1 and store.remove("k", True) == 0
    now = master.metrics()
    assert now["master_key_count"] == now["master_allocated_bytes"] == 0
    assert now["master_put_start_discarded_staging_size"] > 0


# ---------------------------------------------------------------- the metadata server


def test_the_metadata_server_keeps_values_by_key(master):
    def ask(method: str, path: str = "/metadata?key=a", body: bytes | None = None):
        return master.ask(path, method, body, port=master.metadata)

    assert ask("GET", "/health") == (200, "OK")
    assert ask("GET")[0] == ask("DELETE")[0] == 404
    assert ask("PUT", body=b"one")[0] == ask("PUT", body=b"two")[0] == 200
    assert ask("GET") == (200, "two")
    assert ask("PUT", "/metadata?key=mooncake%2Fram%2Fh", b"")[0] == 200
    assert ask("GET", "/metadata?key=mooncake%2Fram%2Fh") == (200, "")
    assert ask("DELETE")[0] == 200 and ask("GET")[0] == 404
    for method in ("GET", "PUT", "DELETE"):
        assert ask(method, "/metadata", b"x" if method == "PUT" else None)[0] == 400
    assert ask("POST", body=b"x")[0] == 404


def test_the_metadata_server_has_room_for_so_much_and_values_for_so_much():
    with Master("--enable_http_metadata_server") as master:

        def ask(method: str, key: str, body: bytes | None = None) -> int:
            return master.ask(f"/metadata?key={key}", method, body, port=master.metadata)[0]

        assert ask("PUT", "large", bytes(MIB + 1)) == 413
        assert ask("GET", "large") == 404
        taken = 0
        while (code := ask("PUT", f"k{taken}", bytes(MIB))) == 200:
            taken += 1
            assert taken < 1000, "there is no end"
        assert code == 507 and taken > 100 and ask("GET", f"k{taken}") == 404
        # What is there can still be replaced, and what goes makes room.
        assert ask("PUT", "k0", bytes(MIB)) == 200
        assert ask("PUT", "k0", b"small") == 200 and ask("PUT", f"k{taken}", bytes(MIB)) == 200
        assert ask("DELETE", "k1") == 200 and ask("PUT", f"k{taken + 1}", bytes(MIB)) == 200
        assert ask("PUT", f"k{taken + 2}", bytes(MIB)) == 507
        assert master.stop() == (0, "")


# ---------------------------------------------------------------- tenants


def test_without_quotas_all_tenants_share_one_key_space(master):
    one, two = master.store(tenant_id="t1"), master.store(segment=0, tenant_id="t2")
    assert one.put("k", b"one") == 0
    assert two.get("k") == b"one"
    assert master.json("/api/v1/tenant_quotas")[1]["error_code"] == -1011
    assert master.ask("/api/v1/tenant_quotas?tenant_id=t1", "DELETE")[0] == 409
    assert master.json("/query_key?key=k&tenant_id=t1")[0] == 200
    one.close()
    two.close()


@pytest.fixture
def strict(tmp_path):
    path = tmp_path / "quotas.yaml"
    path.write_text("version: 1\ntenants:\n  - name: t1\n    quota: 4MB\n  - {name: t2, quota: 100}\n")
    flags = ("--enable_multi_tenants=true", f"--tenant_quota_connector_uri={path}", "--default_kv_lease_ttl=60000")
    with Master(*flags) as master:
        master.quotas = path
        yield master


def test_quotas_hold_by_tenant_and_a_full_one_evicts_its_own(strict):
    owner = strict.store(segment=32 * MIB)
    one, two = strict.store(segment=0, tenant_id="t1"), strict.store(segment=0, tenant_id="t2")
    assert owner.put("k", b"x") == -1700, "the call is over, and its memory is free"
    assert owner.batch_put_session_start(["k"], [1]) == [-1701]
    assert two.put("small", b"x" * 100) == 0
    assert two.put("large", b"x" * 101) == -1700
    for number in range(8):
        assert one.put(f"k{number}", b"x" * MIB) == 0
    assert one.batch_is_exist([f"k{number}" for number in range(8)]) == [0] * 4 + [1] * 4
    assert one.put("k8", b"x" * MIB) == -1700  # all that is left is leased
    code, quota = strict.json("/api/v1/tenant_quotas?tenant_id=t1")
    assert code == 200 and quota["data"]["charged_bytes"] == 4 * MIB
    metrics = strict.metrics()
    assert metrics['mooncake_tenant_quota_charged_bytes{tenant_id="t1"}'] == 4 * MIB
    assert metrics['mooncake_tenant_evict_bytes_total{tenant_id="t1"}'] == 4 * MIB
    assert metrics['mooncake_tenant_quota_reject_total{tenant_id="t1",reason="quota_exceeded"}'] == 1
    assert strict.json("/query_key?key=small")[0] == 404
    assert strict.json("/query_key?key=small&tenant_id=t2")[0] == 200
    assert strict.get("/get_all_keys?tenant_id=t2")[1] == "small\n"
    assert strict.json("/api/v1/remove_all?force=true", "POST", b"")[1]["removed_count"] == 5
    for store in (owner, one, two):
        store.close()


def test_quotas_change_over_http_and_reach_their_file(strict):
    def put(tenant: str, body: str):
        return strict.json(f"/api/v1/tenant_quotas?tenant_id={tenant}", "PUT", body.encode())

    code, answer = put("t3", '{"requested_quota_bytes": 5000000}')
    assert code == 200 and answer["data"]["requested_quota_bytes"] == 5_000_000
    assert put("odd%22name", '{"requested_quota_bytes": 1}')[0] == 200
    for body in ("", "{}", '{"requested_quota_bytes": 0}', '{"requested_quota_bytes": -1}', "[]"):
        assert put("t3", body)[1]["error_code"] == -600, body
    assert put("", '{"requested_quota_bytes": 5}')[0] == 400
    assert strict.ask("/api/v1/tenant_quotas?tenant_id=t2", "DELETE")[0] == 200
    assert strict.ask("/api/v1/tenant_quotas?tenant_id=t2", "DELETE")[0] == 404
    assert strict.ask("/api/v1/tenant_quotas", "DELETE")[0] == 400
    assert [row["tenant_id"] for row in strict.json("/api/v1/tenant_quotas")[1]["data"]] == ['odd"name', "t1", "t3"]
    with Master("--enable_multi_tenants=true", f"--tenant_quota_connector_uri=file://{strict.quotas}") as again:
        assert again.json("/api/v1/tenant_quotas")[1] == strict.json("/api/v1/tenant_quotas")[1]


def test_a_tenant_that_stores_something_keeps_its_quota(strict):
    owner, one = strict.store(), strict.store(segment=0, tenant_id="t1")
    assert one.put("k", b"x") == 0
    code, answer = strict.json("/api/v1/tenant_quotas?tenant_id=t1", "DELETE")
    assert (code, answer["error_message"]) == (409, "TENANT_NOT_EMPTY")
    owner.close()
    one.close()


def test_a_change_that_can_not_reach_its_file_says_so(strict):
    strict.quotas.unlink()
    os.rmdir(strict.quotas.parent)
    code, answer = strict.json("/api/v1/tenant_quotas?tenant_id=t3", "PUT", b'{"requested_quota_bytes": 5}')
    assert code == 500 and "quotas.yaml" in answer["error_message"]
    assert strict.json("/api/v1/tenant_quotas?tenant_id=t3")[1]["data"]["requested_quota_bytes"] == 5


def test_evictions_and_missing_replicas_are_counted_under_the_names_that_dashboards_have():
    with Master("--default_kv_lease_ttl=1") as master:
        store = master.store(8 * MIB)
        config = ReplicateConfig()
        config.replica_num = 2
        assert store.put("two", b"x", config) == 0
        for index in range(20):
            assert store.put(f"k{index}", bytes(MIB)) == 0
        metrics = master.metrics()
        for name in ("evicted_key_count", "evicted_size_bytes", "attempted_evictions_total", "successful_evictions_total"):
            of_memory = f"master_{name.removesuffix('_total')}_mem"
            assert metrics[f"master_{name}"] == metrics[of_memory] > 0, name
        assert metrics["master_attempted_evictions_total"] >= metrics["master_successful_evictions_total"]
        assert metrics["master_put_start_partial_allocations_total"] == 1
        store.close()


def test_an_allocator_that_nobody_has_is_refused():
    refused = subprocess.run([*command(), "--memory_allocator=foo"], capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and "memory_allocator" in refused.stderr, refused
