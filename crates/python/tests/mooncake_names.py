"""Prints the names of a `mooncake` package as JSON: run by the interpreter that has it, see `test_dropin_names.py`."""

import contextlib
import importlib
import inspect
import json
import pkgutil
import re
import sys

MODULES = ("store", "engine")


def parameters(obj: object) -> list[str]:
    """The names that a call may be given by keyword, as the docstring or the signature tells them."""
    text = inspect.getdoc(obj) or ""
    name = re.escape(getattr(obj, "__name__", ""))
    calls = re.findall(rf"^(?:\d+\. )?{name}\((.*?)\) -> ", text, re.MULTILINE)
    found: list[str] = []
    for call in calls:
        # Defaults of a class have addresses and commas in them, types have brackets.
        call = re.sub(r"<[^<>]*>", "…", re.sub(r"\[[^\]]*\]+", "", call))
        for word in re.findall(r"(?:^|, )\*{0,2}(\w+)(?::|$|(?=,))", call):
            if word not in ("self", "args", "kwargs", *found) and not re.fullmatch(r"arg\d+", word):
                found.append(word)
    return found


def members(cls: type) -> dict[str, list[str]]:
    found = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("mooncake"):
            names = [name for name in vars(base) if not name.startswith("_")]
            found |= {name: parameters(getattr(cls, name)) for name in names}
    return found


def names(module: str) -> dict[str, list[str]]:
    """Names by dotted path."""
    loaded = importlib.import_module(f"mooncake.{module}")
    found = {}
    for name, value in vars(loaded).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        found[name] = parameters(value.__init__ if isinstance(value, type) else value)
        if isinstance(value, type):
            found |= {f"{name}.{member}": given for member, given in members(value).items()}
    return dict(sorted(found.items()))


def main() -> None:
    import mooncake

    with contextlib.redirect_stdout(sys.stderr):
        modules = {module: names(module) for module in MODULES}
    others = sorted(info.name for info in pkgutil.iter_modules(mooncake.__path__) if not info.name.startswith("_"))
    print(json.dumps({"modules": modules, "others": [name for name in others if name not in MODULES]}))


if __name__ == "__main__":
    main()
