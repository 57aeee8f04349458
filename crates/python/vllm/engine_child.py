"""One vLLM engine that answers its driver over a socket: run by ``faults.py``, not by hand.

Arguments: the socket's path and a JSON configuration. Messages are pairs of an operation's name and its argument; each gets
one answer, ``("done", value)`` or ``("failed", reason)``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from multiprocessing.connection import Client


class Watch:
    """Counts what vLLM asks of its store, and kills a process in the midst of it, at a counted load."""

    def __init__(self):
        self.lock = threading.Lock()
        self.victim = None
        self.reset()

    def reset(self, victim=None, at_load=0):
        with self.lock:
            self.victim, self.at_load = victim, at_load
            self.loads, self.loaded_before, self.asked_before = 0, 0, set()

    def looked_up(self, keys):
        with self.lock:
            if self.victim is not None:
                # The prompts share no block: the first one names the request.
                self.asked_before.update(keys[:1])

    def load(self):
        with self.lock:
            self.loads += 1
            if self.victim is not None and self.loads == self.at_load:
                os.killpg(self.victim, signal.SIGKILL)
                self.victim, self.loaded_before = None, self.loads - 1

    def seen(self):
        """Requests looked up before the kill, and loads begun before and in all."""
        with self.lock:
            return {"asked_before": len(self.asked_before), "loaded_before": self.loaded_before, "loads": self.loads}


WATCH = Watch()


def watch_the_store(replicas):
    """Puts classes that count, and that ask for replicas, in the place of those that vLLM will import."""
    import mooncake.store as module

    class Store(module.MooncakeDistributedStore):
        def batch_is_exist(self, keys, *more):
            answers = super().batch_is_exist(keys, *more)
            WATCH.looked_up(keys)
            return answers

        def batch_get_into_multi_buffers(self, *arguments, **named):
            WATCH.load()
            return super().batch_get_into_multi_buffers(*arguments, **named)

    class Config(module.ReplicateConfig):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.replica_num = replicas

    path = module.__file__
    module.MooncakeDistributedStore = Store
    if replicas > 1:
        module.ReplicateConfig = Config
    return path


def start(config):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model=config["model"],
        dtype=config["dtype"],
        seed=0,
        # Compiling would take longer than all requests together.
        enforce_eager=True,
        block_size=config["block_size"],
        max_model_len=config["max_model_len"],
        # Without them there are no times of single requests.
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="MooncakeStoreConnector",
            kv_role="kv_both",
            kv_buffer_device="cpu",
            kv_load_failure_policy=config["on_failure"],
        ),
    )


def external_hits(llm):
    """Prompt tokens that came from the store, since the start."""
    return sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name.endswith("external_prefix_cache_hits") and hasattr(metric, "value")
    )


def generate(llm, prompts, tokens):
    from vllm import SamplingParams

    before = external_hits(llm)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    requests = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "finish": output.outputs[0].finish_reason,
            "ttft_s": output.metrics.first_token_latency if output.metrics else None,
        }
        for output in outputs
    ]
    return {"requests": requests, "hit_tokens": int(external_hits(llm) - before)}


def forget(llm):
    """Empties vLLM's own cache of prefixes, and leaves the store alone. `False`: not yet possible."""
    if llm.reset_prefix_cache():
        return True
    # Blocks that were being saved are freed in the engine's next step, and it makes one only for a request.
    generate(llm, [[1, 2, 3]], 1)
    return llm.reset_prefix_cache()


def main():
    driver = Client(sys.argv[1], family="AF_UNIX")
    config = json.loads(sys.argv[2])
    provider = watch_the_store(config["replicas"])
    llm = start(config)
    operations = {
        "encode": lambda text: llm.get_tokenizer()(text).input_ids,
        "generate": lambda given: generate(llm, *given),
        "forget": lambda _: forget(llm),
        # Kills a process group when the load of this number begins.
        "arm": lambda given: WATCH.reset(*given),
        "seen": lambda _: WATCH.seen(),
    }
    driver.send(("done", provider))
    while True:
        operation, argument = driver.recv()
        if operation == "quit":
            driver.send(("done", None))
            return
        try:
            driver.send(("done", operations[operation](argument)))
        except Exception as error:
            driver.send(("failed", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
