"""Every public name of Mooncake's modules is there, and docs/mooncake-names.md says in which state.

The page lists names and keywords of Mooncake; what is said about each follows from our modules. With `MOONCAKE_PYTHON`,
an interpreter that has Mooncake itself, the list is compared with that. `UPDATE_DOCS=1` writes the page.
"""

import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess

import pytest

pytest.importorskip("mooncake", reason="layercake-mooncake is not installed")

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "mooncake-names.md"
REFUSED = "Not supported: "
MISSING = "missing"

INTRODUCTION = """# The names of Mooncake

`mooncake.store` and `mooncake.engine` of Mooncake 0.3.13.post1, name by name, and what the drop-in (`layercake-mooncake`)
makes of each. What is not supported exists, and raises a `NotImplementedError` that says what to use instead. This page is
written by a test, which compares it with Mooncake itself where that is installed.
"""
OTHERS = """
## Other modules

Modules of the package that are not there fail to import, as modules do. Commands and servers of Mooncake that move bytes
over accelerators, or start programs of its own, have no counterpart.
"""

Names = dict[str, list[str]]


def state_of(module: str, name: str) -> str:
    """What our module has under a name, in the words of its docstring."""
    loaded = importlib.import_module(f"mooncake.{module}")
    head, _, member = name.partition(".")
    value = inspect.getattr_static(loaded, head, None)
    if value is None:
        return MISSING
    whole = _refusal(inspect.getdoc(value))
    if member and not _has(value, member):
        return MISSING
    own = _refusal(inspect.getdoc(getattr(value, member, None))) if member else None
    refusal = own or whole
    return "yes" if refusal is None else f"no: {refusal}"


def _has(cls: type, member: str) -> bool:
    static = inspect.getattr_static(cls, member, None)
    return static is not None or member in getattr(cls, "__dataclass_fields__", {})


def _refusal(doc: str | None) -> str | None:
    """What a docstring says about why something is not supported."""
    doc = " ".join((doc or "").split())
    if not doc.startswith(REFUSED):
        return None
    text = re.sub(r":(?:meth|class):`(\w+)`", r"`\1`", doc.removeprefix(REFUSED)).replace("``", "`")
    return text.rstrip(".")


def row(module: str, name: str, given: list[str]) -> str:
    keywords = ", ".join(f"`{keyword}`" for keyword in given)
    return f"| `{name}` | {keywords} | {state_of(module, name)} |"


def page(modules: dict[str, Names], others: list[str]) -> str:
    parts = [INTRODUCTION]
    for module, names in modules.items():
        rows = [row(module, name, given) for name, given in names.items()]
        parts.append("\n".join([f"\n## `mooncake.{module}`\n", "| name | keywords | there |", "| --- | --- | --- |", *rows, ""]))
    there = {name: importlib.util.find_spec(f"mooncake.{name}") is not None for name in others}
    rows = [f"| `{name}` | {'yes' if found else 'no'} |" for name, found in there.items()]
    parts.append("\n".join([OTHERS, "| module | there |", "| --- | --- |", *rows, ""]))
    return "".join(parts)


def listed() -> tuple[dict[str, Names], list[str]]:
    """The names that the page lists."""
    modules: dict[str, Names] = {}
    others: list[str] = []
    names: Names | None = None
    for line in PAGE.read_text().splitlines():
        if heading := re.fullmatch(r"## `mooncake\.(\w+)`", line):
            names = modules.setdefault(heading[1], {})
        elif line == "## Other modules":
            names = None
        elif (cells := re.fullmatch(r"\| `([\w.]+)` \| (.*?) \| .* \|", line)) and names is not None:
            names[cells[1]] = re.findall(r"`(\w+)`", cells[2])
        elif cells := re.fullmatch(r"\| `(\w+)` \| \w+ \|", line):
            others.append(cells[1])
    return modules, others


@pytest.fixture(scope="module")
def mooncake() -> tuple[dict[str, Names], list[str]]:
    """The names of Mooncake itself, if there is one to ask; else those that the page lists."""
    python = os.environ.get("MOONCAKE_PYTHON")
    if not python:
        return listed()
    # Without the variables of this process, which may name our modules.
    asked = subprocess.run([python, "-E", HERE / "mooncake_names.py"], capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(asked.stdout)
    return found["modules"], found["others"]


def test_the_page_says_what_is_there(mooncake):
    modules, others = mooncake
    assert list(modules) == ["store", "engine"]
    text = page(modules, others)
    if "UPDATE_DOCS" in os.environ:
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "docs/mooncake-names.md is out of date: run this test with UPDATE_DOCS=1"


def test_the_page_lists_what_mooncake_has(mooncake):
    if "MOONCAKE_PYTHON" not in os.environ:
        pytest.skip("MOONCAKE_PYTHON names no interpreter with Mooncake itself: the page can't be compared with it")
    assert listed() == mooncake


def test_no_name_is_missing(mooncake):
    missing = [
        f"{module}.{name}"
        for module, names in mooncake[0].items()
        for name in names
        if state_of(module, name) == MISSING
    ]
    assert missing == []


def test_every_keyword_is_taken(mooncake):
    refused = {}
    for module, names in mooncake[0].items():
        loaded = importlib.import_module(f"mooncake.{module}")
        for name, given in names.items():
            value = loaded
            for part in name.split("."):
                value = getattr(value, part, None)
            if given and state_of(module, name) == "yes":
                # The first of several forms of a call, each with keywords of its own, is what counts.
                taken = inspect.signature(value).parameters
                lacking = [keyword for keyword in given if keyword not in taken]
                if lacking and not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
                    refused[f"{module}.{name}"] = lacking
    assert refused == {}


def test_our_names_are_mooncake_s(mooncake):
    """Nothing is shown that a program written for this could not find there."""
    for module, names in mooncake[0].items():
        loaded = importlib.import_module(f"mooncake.{module}")
        assert set(loaded.__all__) <= {name for name in names if "." not in name}
