"""The package as it is installed: quiet, typed, documented."""

import ast
import inspect
import pathlib
from importlib import metadata

import pytest

import layercake
import layercake._native
from conftest import check_child

PACKAGE = pathlib.Path(layercake.__file__).parent


def test_importing_says_nothing_and_starts_nothing():
    out = check_child(
        """
        import os, threading, layercake
        assert threading.active_count() == 1
        assert os.listdir("/proc/self/task") == [str(os.getpid())]
        """
    )
    assert out == ""


def test_the_version_is_the_distribution_s():
    assert layercake.__version__ == metadata.version("layercake")


def classes_and_functions(tree: ast.Module):
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}"
        elif isinstance(node, ast.FunctionDef):
            yield node.name


def test_the_stubs_name_what_is_there_and_all_of_it():
    assert (PACKAGE / "py.typed").is_file()
    stubs = set(classes_and_functions(ast.parse((PACKAGE / "_native.pyi").read_text())))
    found = set()
    for name, thing in vars(layercake._native).items():
        if inspect.isclass(thing):
            found.add(name)
            names = (m for m in vars(thing) if not m.startswith("__") or m in ("__enter__", "__exit__"))
            found |= {f"{name}.{member}" for member in names}
        elif callable(thing):
            found.add(name)
    assert found == {name for name in stubs if not name.endswith(".__init__")}


def parameters_of_stub(function: ast.FunctionDef):
    """Name, kind and default of each."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    for at, (parameter, default) in enumerate(zip(positional, defaults, strict=True)):
        only = at < len(given.posonlyargs) or parameter.arg == "self"
        kind = inspect.Parameter.POSITIONAL_ONLY if only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        yield parameter.arg, kind, default and ast.unparse(default)
    for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield parameter.arg, inspect.Parameter.KEYWORD_ONLY, default and ast.unparse(default)


def parameters_of(thing):
    for parameter in inspect.signature(thing).parameters.values():
        default = None if parameter.default is inspect.Parameter.empty else repr(parameter.default)
        # What Rust computes has no text.
        yield parameter.name, parameter.kind, "..." if default == "Ellipsis" else default


def test_the_stubs_have_the_signatures_that_are_there():
    differ = {}

    def compare(name, function, thing, skip):
        stub, found = list(parameters_of_stub(function))[skip:], list(parameters_of(thing))
        same = len(stub) == len(found) and all(
            one[:2] == other[:2] and (one[2] == other[2] or (other[2] == "..." and one[2] is not None))
            for one, other in zip(stub, found, strict=True)
        )
        if not same and not name.endswith("__exit__"):
            differ[name] = (stub, found)

    for node in ast.parse((PACKAGE / "_native.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            compare(node.name, node, getattr(layercake._native, node.name), 0)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            cls = getattr(layercake._native, node.name)
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.decorator_list:
                    is_init = member.name == "__init__"
                    thing = cls if is_init else getattr(cls, member.name)
                    compare(f"{node.name}.{member.name}", member, thing, int(is_init))
    assert differ == {}


def test_everything_public_is_documented():
    for name in layercake.__all__:
        thing = getattr(layercake, name)
        if not inspect.isclass(thing):
            continue
        assert thing.__doc__, name
        for member, value in vars(thing).items():
            if not member.startswith("_") and callable(value):
                assert value.__doc__, f"{name}.{member}"


def test_exceptions_are_what_their_names_say():
    for name in layercake.errors.__all__:
        assert issubclass(getattr(layercake, name), layercake.LayercakeError)
    assert issubclass(layercake.NotFound, KeyError)
    assert issubclass(layercake.InvalidArgument, ValueError)
    assert issubclass(layercake.MasterUnreachable, ConnectionError)
    assert issubclass(layercake.MasterTimeout, TimeoutError)
    assert str(layercake.NotFound("no quotes")) == "no quotes"


@pytest.mark.parametrize("page", ["crates/python/README.md", "README.md"])
def test_the_readme_example_runs(page):
    text = (pathlib.Path(__file__).parents[3] / page).read_text()
    blocks = text.split("```python\n")[1:]
    assert blocks
    for block in blocks:
        check_child(block.split("```")[0])
