"""The processes of an experiment with vLLM: a master, processes that lend memory, engines.

Each is a process group of its own, ended by whoever started it; nothing else is touched. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from multiprocessing.connection import Listener

HERE = pathlib.Path(__file__).parent
LOOPBACK = "127.0.0.1"

LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
answer = store.setup(sys.argv[1], "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[3])
print("ready" if answer == 0 else f"setup answered {answer}", flush=True)
sys.stdin.read()
store.close()
"""


class Broken(Exception):
    """The experiment itself could not be carried out."""


def until(what, within, condition):
    """Polls until the condition gives something true, and gives that."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise Broken(f"{what}: not within {within} s")


class Lab:
    def __init__(self, options):
        self.options = options
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="vllm-faults-"))
        self.running = []
        self.lenders = []
        self.engines = []
        self.master = None
        self.port, self.metrics_port = _free_port(), _free_port()

    def __enter__(self):
        return self

    def __exit__(self, kind, _value, _trace):
        for engine in self.engines:
            engine.quit()
        for process in reversed(self.running):
            end(process)
        if kind is None:
            for left in self.folder.iterdir():
                left.unlink()
            self.folder.rmdir()

    def start_master(self):
        words = shlex.split(self.options.master_cmd)
        ports = {"host": LOOPBACK, "port": self.port, "metrics_port": self.metrics_port}
        self.master = self._start("master", [word.format(**ports) for word in words])
        until("the master answers", 20, lambda: self.get("/health") is not None or self._fail_if_ended(self.master))

    def start_lender(self):
        arguments = [LOOPBACK, str(self.options.pool_mib << 20), f"{LOOPBACK}:{self.port}"]
        process = self._start(
            f"lender-{len(self.lenders)}",
            [self.options.python, "-c", LENDER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        said = process.stdout.readline().decode().strip()
        if said != "ready":
            raise Broken(f"a process that lends memory: {said or 'ended'}; see {self.folder}")
        self.lenders.append(process)
        return process

    def start_engine(self, on_failure, replicas=1):
        engine = Engine(self, f"engine-{len(self.engines)}", on_failure, replicas)
        self.engines.append(engine)
        return engine

    def get(self, path):
        """A page of the master's HTTP port, or `None` where it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.metrics_port}{path}", timeout=2) as answer:
                return answer.read().decode()
        except OSError:
            return None

    def stored(self):
        return len((self.get("/get_all_keys") or "").split())

    def used_bytes(self):
        """Bytes that objects take in each segment."""
        segments = json.loads(self.get("/get_segments_detail") or "[]")
        if isinstance(segments, dict):
            segments = segments.get("segments", [])
        return sorted(segment["allocator_used_bytes"] for segment in segments)

    def environment(self, **more):
        options = self.options
        paths = [options.pythonpath, os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "VLLM_HOST_IP": LOOPBACK,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # More of them wait by spinning, which hides what loading costs.
            "OMP_NUM_THREADS": "1",
            # Engines agree on the hashes of blocks only with one seed.
            "PYTHONHASHSEED": "0",
            "TQDM_DISABLE": "1",
            **more,
        }

    def _start(self, name, arguments, **more):
        env = more.pop("env", None) or self.environment()
        with open(self.folder / f"{name}.log", "ab") as log:
            more = {"stdin": subprocess.DEVNULL, "stdout": log, **more}
            process = subprocess.Popen(arguments, env=env, stderr=log, start_new_session=True, **more)
        self.running.append(process)
        return process

    def _fail_if_ended(self, process):
        if process.poll() is not None:
            raise Broken(f"{process.args[0]} ended with {process.returncode}; see {self.folder}")
        return False


class Engine:
    """A vLLM engine in a child process."""

    def __init__(self, lab, name, on_failure, replicas):
        options = lab.options
        configuration = lab.folder / f"{name}.json"
        configuration.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"{LOOPBACK}:{lab.port}",
                    "protocol": "tcp",
                    "device_name": "",
                    "mode": "standalone-store",
                    "global_segment_size": 0,
                    "local_buffer_size": 64 << 20,
                }
            )
        )
        config = {
            "model": str(options.model),
            "dtype": options.dtype,
            "block_size": options.block_size,
            "max_model_len": 2048,
            "on_failure": on_failure,
            "replicas": replicas,
        }
        path = str(lab.folder / f"{name}.socket")
        with Listener(path, family="AF_UNIX") as listener:
            self.process = lab._start(
                name,
                [options.python, str(HERE / "engine_child.py"), path, json.dumps(config)],
                env=lab.environment(MOONCAKE_CONFIG_PATH=str(configuration)),
            )
            listener._listener._socket.settimeout(options.start_within)
            try:
                self.pipe = listener.accept()
            except TimeoutError:
                raise Broken(f"{name} does not start; see {lab.folder}") from None
        self.provider = self._answer(options.start_within)

    def ask(self, operation, argument=None, within=600):
        self.send(operation, argument)
        return self._answer(within)

    def send(self, operation, argument=None):
        self.pipe.send((operation, argument))

    def _answer(self, within):
        try:
            if not self.pipe.poll(within):
                raise Broken(f"the engine does not answer within {within} s")
            outcome, value = self.pipe.recv()
        except EOFError:
            raise Broken("the engine ended") from None
        if outcome == "failed":
            raise Broken(f"the engine: {value}")
        return value

    answer = _answer

    def quit(self):
        with contextlib.suppress(Broken, OSError):
            self.ask("quit", within=20)

    def cpu_seconds(self):
        return cpu_seconds(self.process)


def cpu_seconds(process):
    """Time on a processor of a running process, all its threads together."""
    after_name = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def kill(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def end(process):
    if process.poll() is not None:
        return
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            return


def _free_port():
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
