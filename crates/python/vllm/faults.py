"""What it costs vLLM when a part of its KV store goes away: real engines, real processes, killed.

Each experiment prints one JSON line; the exit status is 0 if in all of them no request failed that must not fail, and
every answer had the tokens that were computed without the store.

=====================  =================================================================================================
``steady``             nothing is killed: cold, from the store, from vLLM's own cache; CPU seconds for each GB that is loaded
``lender-before``      the process that lends memory is killed between save and load
``master-before``      the master is killed between save and load
``master-restarts``    the master is killed and started anew: how long until prefixes are found again
``lender-during``      the lender is killed while many requests load, which vLLM is to recompute
``lender-during-fail`` the same where vLLM is to fail such requests: only those that were looked up before may fail
``replicas``           two lenders hold every block, and one is killed while many requests load
=====================  =================================================================================================

Made to be run on Mooncake as well, for comparison: there, what fails is told and not held against it (``--observe``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from lab import Broken, Lab, cpu_seconds, kill, until

# Bytes of KV cache for one token of the model that the set-up makes: 30 layers, K and V, 3 heads of 64.
VALUES_PER_TOKEN = 30 * 2 * 3 * 64
BYTES = {"float32": 4, "bfloat16": 2}


def text(seed):
    return "".join(f"Ledger {seed}, line {i}: {i * 7919 % 1000} sacks at {(i * 31 + seed) % 97} coins. " for i in range(400))


def prompts(engine, options, count, blocks, more=40):
    """Prompts that share no block, each some tokens longer than whole blocks."""
    length = blocks * options.block_size + more
    return [engine.ask("encode", text(seed))[:length] for seed in range(count)]


def blocks_of(all_prompts, options):
    return sum((len(ids) - 1) // options.block_size for ids in all_prompts)


def save(lab, engine, all_prompts, options):
    """Computes the prompts, and waits until the store has all their blocks."""
    cold = engine.ask("generate", (all_prompts, options.output_tokens))
    wanted = blocks_of(all_prompts, options)
    end = time.monotonic() + 60
    while lab.stored() < wanted:
        if time.monotonic() > end:
            raise Broken(f"the store has {lab.stored()} of {wanted} blocks")
        time.sleep(0.05)
    return cold


def forget(engine):
    """Empties vLLM's own cache; it refuses while blocks are still being saved."""
    until("vLLM forgets its prefixes", 30, lambda: engine.ask("forget"))


def again(engine, all_prompts, options):
    forget(engine)
    return engine.ask("generate", (all_prompts, options.output_tokens))


def compare(cold, later):
    """Numbers of requests: failed, and answered with other tokens than before."""
    pairs = list(zip(cold["requests"], later["requests"], strict=True))
    failed = sum(after["finish"] == "error" for _, after in pairs)
    wrong = sum(after["finish"] != "error" and after["tokens"] != before["tokens"] for before, after in pairs)
    return failed, wrong


def ttft(answer):
    return round(answer["requests"][0]["ttft_s"], 4)


def steady(lab, options):
    lab.start_master()
    lender = lab.start_lender()
    engine = lab.start_engine("fail")
    # One token is left to compute: all else is loading.
    one = prompts(engine, options, 1, 15, more=1)
    engine.ask("generate", ([one[0][-50:]], 2))
    cold = save(lab, engine, one, options)
    processes = [engine.process, lender, lab.master]
    times, cpu = {"store": [], "local": []}, {"store": [], "local": []}
    wrong = 0
    for _ in range(9):
        for source in ("store", "local"):
            if source == "store":
                forget(engine)
            before = sum(map(cpu_seconds, processes))
            answer = engine.ask("generate", (one, 1))
            cpu[source].append(sum(map(cpu_seconds, processes)) - before)
            times[source].append(ttft(answer))
            if (answer["hit_tokens"] > 0) != (source == "store"):
                raise Broken(f"{answer['hit_tokens']} tokens came from the store, in the turn of {source}")
            wrong += answer["requests"][0]["tokens"] != cold["requests"][0]["tokens"][:1]
    gigabytes = blocks_of(one, options) * options.block_size * VALUES_PER_TOKEN * BYTES[options.dtype] / 1e9
    moved = statistics.median(cpu["store"]) - statistics.median(cpu["local"])
    return {
        "ttft_cold_s": ttft(cold),
        "ttft_store_s": statistics.median(times["store"]),
        "ttft_local_s": statistics.median(times["local"]),
        "cpu_s_per_gb": round(moved / gigabytes, 3),
        "failed": 0,
        "wrong": wrong,
    }


def killed_before(lab, options, which):
    lab.start_master()
    lender = lab.start_lender()
    engine = lab.start_engine("fail")
    one = prompts(engine, options, 1, 8)
    cold = save(lab, engine, one, options)
    warm = again(engine, one, options)
    kill(lender if which == "lender" else lab.master)
    failed, wrong, times = 0, 0, []
    end = time.monotonic() + 20
    while time.monotonic() < end:
        answer = again(engine, one, options)
        more_failed, more_wrong = compare(cold, answer)
        failed, wrong = failed + more_failed, wrong + more_wrong
        if not more_failed:
            times.append(ttft(answer))
        time.sleep(0.5)
    return {
        "ttft_cold_s": ttft(cold),
        "ttft_store_s": ttft(warm),
        "ttft_after_s": [min(times, default=None), max(times, default=None)],
        "requests": len(times) + failed,
        "failed": failed,
        "wrong": wrong,
    }


def master_restarts(lab, options):
    lab.start_master()
    lab.start_lender()
    engine = lab.start_engine("fail")
    one = prompts(engine, options, 1, 8)
    cold = save(lab, engine, one, options)
    kill(lab.master)
    lab.start_master()
    began, failed, wrong, requests = time.monotonic(), 0, 0, 0
    while True:
        answer = again(engine, one, options)
        requests += 1
        more_failed, more_wrong = compare(cold, answer)
        failed, wrong = failed + more_failed, wrong + more_wrong
        if answer["hit_tokens"] > 0 or time.monotonic() - began > 60:
            break
        time.sleep(0.2)
    return {
        "found_again_after_s": round(time.monotonic() - began, 2) if answer["hit_tokens"] else None,
        "requests": requests,
        "failed": failed,
        "wrong": wrong + (answer["hit_tokens"] == 0),
    }


def killed_during(lab, options, which, on_failure, replicas):
    lab.start_master()
    for _ in range(replicas):
        lab.start_lender()
    engine = lab.start_engine(on_failure, replicas)
    many = prompts(engine, options, options.requests, 3)
    cold = save(lab, engine, many, options)
    least = blocks_of(many, options) * options.block_size * VALUES_PER_TOKEN * BYTES[options.dtype]
    used = lab.used_bytes()
    if len(used) != replicas or used[0] < least:
        raise Broken(f"not every block has {replicas} replicas: {used} bytes are in use, {least} wanted in each")
    engine.ask("arm", (None, 0))
    began = time.monotonic()
    warm = again(engine, many, options)
    took = time.monotonic() - began
    loads = engine.ask("seen")["loads"]
    if warm["hit_tokens"] == 0 or loads < 4:
        raise Broken(f"{loads} loads and {warm['hit_tokens']} tokens from the store even before the kill")
    forget(engine)
    victim = lab.lenders[-1] if which == "lender" else lab.master
    engine.ask("arm", (victim.pid, max(2, loads // 4)))
    answer = engine.ask("generate", (many, options.output_tokens))
    seen = engine.ask("seen")
    if victim.poll() is None and seen["loads"] < loads // 4:
        raise Broken(f"the kill never came: {seen['loads']} loads")
    victim.wait(10)
    after = again(engine, many, options)
    failed, wrong = compare(cold, answer)
    failed_after, wrong_after = compare(cold, after)
    return {
        "requests": len(many),
        "warm_s": round(took, 2),
        "hit_tokens": [warm["hit_tokens"], answer["hit_tokens"], after["hit_tokens"]],
        # Looked up before the kill and not yet loaded: vLLM counts on these.
        "exposed": seen["asked_before"] - seen["loaded_before"],
        **seen,
        "failed": failed,
        "failed_after": failed_after,
        "wrong": wrong + wrong_after,
    }


EXPERIMENTS = {
    "steady": (steady, 0),
    "lender-before": (lambda lab, options: killed_before(lab, options, "lender"), 0),
    "master-before": (lambda lab, options: killed_before(lab, options, "master"), 0),
    "master-restarts": (master_restarts, 0),
    "lender-during": (lambda lab, options: killed_during(lab, options, "lender", "recompute", 1), 0),
    "master-during": (lambda lab, options: killed_during(lab, options, "master", "recompute", 1), 0),
    # Those that vLLM had looked up before the kill; later ones must find the store empty.
    "lender-during-fail": (lambda lab, options: killed_during(lab, options, "lender", "fail", 1), "exposed"),
    "replicas": (lambda lab, options: killed_during(lab, options, "lender", "fail", 2), 0),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--pythonpath", default="", help="folder with the `mooncake` to use")
    parser.add_argument("--master-cmd", required=True, help="the master; {host}, {port} and {metrics_port} are filled in")
    parser.add_argument("--only", choices=EXPERIMENTS, action="append", help="which experiments (default: all)")
    parser.add_argument("--observe", action="store_true", help="report, and fail only if an experiment can't be carried out")
    parser.add_argument("--dtype", choices=BYTES, default="float32")
    parser.add_argument("--requests", type=int, default=50, help="requests that load at once")
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--pool-mib", type=int, default=2048)
    parser.add_argument("--start-within", type=float, default=240)
    options = parser.parse_args()
    good = True
    for name in options.only or EXPERIMENTS:
        experiment, may_fail = EXPERIMENTS[name]
        result = {"test": name}
        try:
            with Lab(options) as lab:
                result |= experiment(lab, options)
                result["provider"] = lab.engines[0].provider
            allowed = result[may_fail] if isinstance(may_fail, str) else may_fail
            ok = result["wrong"] == 0 and result["failed"] <= allowed and not result.get("failed_after")
        except Broken as broken:
            result["broken"] = str(broken)
            ok = False
        result["ok"] = ok
        good &= ok or (options.observe and "broken" not in result)
        print(json.dumps(result), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
