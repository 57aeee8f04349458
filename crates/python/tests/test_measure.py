"""The programs of the comparison with peers run on the drop-in, and their figures are all there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[3] / "benches/python"
MASTER = f"{Path(sys.executable).with_name('mooncake_master')} --rpc_port {{port}} --metrics_port {{metrics_port}}"

ROWS = {
    "ranges": ["put start", "put", "put end", "get start", "get", "get end"],
    "embedded": ["put start", "put", "put end", "get start", "get", "get end"],
    "multi buffers": ["put", "get"],
    "small": ["put", "get"],
    "batches": ["put", "get"],
    "lanes": ["put", "get"],
    "exist": ["batch", "single"],
    "engine": ["write", "read", "write 4 KiB"],
}


def measure(scenario: str) -> dict:
    command = [sys.executable, str(PROGRAMS / "measure.py"), "--master", MASTER, "--short", "--repeat", "1", scenario]
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", ROWS)
def test_a_scenario_has_a_figure_for_all_it_does(scenario: str) -> None:
    rows = measure(scenario)
    assert list(rows) == ROWS[scenario], rows
    for row in rows.values():
        assert row["us"] > 0 and row["cpu_us"] > 0, rows


@pytest.mark.timeout(900)
def test_the_memory_of_a_client_is_told() -> None:
    rows = measure("connections")
    assert rows["client"]["KiB"] > 0 and rows["client threads"]["count"] > 0, rows
