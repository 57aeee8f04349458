"""SGLang's Mooncake storage class sets, finds and gets pages on the drop-in.

The class is taken from the wheel `sglang` 0.5.23, which `SGLANG_WHEEL` names or the package index gives; nothing of it is
installed. It needs torch.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("mooncake", reason="layercake-mooncake is not installed")

from conftest import child_env  # noqa: E402

VERSION = "0.5.23"
SCRIPT = pathlib.Path(__file__).parent / "sglang_pages.py"


@pytest.fixture(scope="module")
def sglang(tmp_path_factory) -> pathlib.Path:
    """The unpacked wheel."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: SGLang's class can't be loaded")
    folder = tmp_path_factory.mktemp("sglang")
    wheel = os.environ.get("SGLANG_WHEEL") or _download(folder)
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith("sglang/srt/") and name.endswith(".py")]
        archive.extractall(folder, members)
    return folder


def _download(folder: pathlib.Path) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run(
            [*command, "--only-binary=:all:", "--dest", folder, f"sglang=={VERSION}"],
            capture_output=True,
            text=True,
            timeout=100,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the wheel of sglang {VERSION} did not arrive in time")
    wheels = list(folder.glob("sglang-*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"the wheel of sglang {VERSION} can't be had: {done.stderr.strip().splitlines()[-1:]}")
    return wheels[0]


@pytest.mark.timeout(180)
def test_pages_are_set_found_and_read(sglang, cluster):
    done = subprocess.run(
        [sys.executable, SCRIPT, sglang, cluster.master],
        capture_output=True,
        text=True,
        timeout=120,
        env=child_env(),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[-1] == "done"
