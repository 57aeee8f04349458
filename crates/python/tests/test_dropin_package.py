"""The distribution layercake-mooncake as it is installed."""

import importlib
import inspect
import pathlib
import shutil
from importlib import metadata

import pytest

mooncake = pytest.importorskip("mooncake", reason="layercake-mooncake is not installed")

from conftest import check_child, run_child  # noqa: E402


def test_it_needs_exactly_the_version_it_was_made_for():
    version = metadata.version("layercake")
    assert metadata.version("layercake-mooncake") == version
    needs = [need.replace(" ", "") for need in metadata.requires("layercake-mooncake")]
    assert needs == [f"layercake=={version}"]


def test_importing_says_nothing():
    assert check_child("import mooncake") == ""


@pytest.mark.parametrize("module", ["mooncake.store", "mooncake.engine"])
def test_everything_public_is_documented(module):
    loaded = importlib.import_module(module)
    without = []
    for name in loaded.__all__:
        thing = getattr(loaded, name)
        members = vars(thing).items() if inspect.isclass(thing) else ()
        named = {f"{name}.{member}": value for member, value in members if not member.startswith("_") and callable(value)}
        without += [where for where, value in (named | {name: thing}).items() if not inspect.getdoc(value)]
    assert without == []


@pytest.mark.parametrize(
    ("trace", "name"),
    [
        ("mooncake_transfer_engine_non_cuda-0.3.13.dist-info", "mooncake-transfer-engine-non-cuda"),
        ("mooncake_transfer_engine-0.3.9.dist-info", "mooncake-transfer-engine"),
        ("mooncake/store.cpython-311-x86_64-linux-gnu.so", "mooncake-transfer-engine"),
    ],
)
def test_mooncake_itself_beside_it_is_noticed_with_the_fix(tmp_path, trace, name):
    shutil.copytree(pathlib.Path(mooncake.__file__).parent, tmp_path / "mooncake")
    beside = tmp_path / trace
    if trace.endswith(".so"):
        beside.write_bytes(b"")
    else:
        beside.mkdir()
    done = run_child("import mooncake", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    assert f"pip uninstall {name}" in done.stderr and "layercake-mooncake" in done.stderr
