"""Fixtures of the tests: an embedded cluster, and children for what may go wrong badly."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

import layercake

# A shell that starts this in the background has it ignored, which children would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

MIB = 1 << 20


@pytest.fixture(scope="session")
def cluster() -> Iterator[layercake.Cluster]:
    with layercake.serve(capacity=256 * MIB) as cluster:
        yield cluster


@pytest.fixture
def store(cluster: layercake.Cluster) -> layercake.Store:
    return cluster.store


@pytest.fixture
def key(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes keys that no other test has."""
    count = iter(range(1_000_000))
    return lambda: f"{request.node.nodeid}/{next(count)}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.nodeid)


@pytest.fixture(params=["shm", "tcp"])
def transport(request, monkeypatch):
    monkeypatch.setenv("LAYERCAKE_TRANSPORTS", request.param)
    return request.param


def child_env(**extra: str) -> dict[str, str]:
    """The environment of this process, without what would choose a cluster for a child."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LAYERCAKE_")}
    return env | extra


def run_child(code: str, *args: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=child_env(**env),
    )


def check_child(code: str, *args: str, **kwargs) -> str:
    """The output of a child that must end well and say nothing else."""
    done = run_child(code, *args, **kwargs)
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


def wait_until(condition: Callable[[], bool], timeout: float = 10) -> None:
    """Polls a condition of another process or of the background."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)
