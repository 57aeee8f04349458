"""The interface of Mooncake's Python client, on Layercake.

``mooncake.store`` and ``mooncake.engine`` behave as Mooncake's do where those are right. The distribution that provides
them is ``layercake-mooncake``; Mooncake's own puts files of the same names into the same folder, so only one of
the two can be installed.
"""

from __future__ import annotations

import pathlib
import warnings


def _mooncake_beside(folder: pathlib.Path) -> list[str]:
    """Distributions of Mooncake itself that share the folder."""
    found = {path.name.split("-")[0] for path in folder.parent.glob("mooncake_transfer_engine*.dist-info")}
    if not found and any(folder.glob("*.so")):
        found = {"mooncake_transfer_engine"}
    return sorted(name.replace("_", "-") for name in found)


def _warn_of_mooncake(folder: pathlib.Path) -> None:
    beside = _mooncake_beside(folder)
    if beside:
        names = " ".join(beside)
        warnings.warn(
            f"Mooncake itself ({names}) is installed beside layercake-mooncake, and which of the two is imported is a matter "
            f"of chance. Keep one: `pip uninstall {names}` and then `pip install --force-reinstall --no-deps "
            "layercake-mooncake`, or `pip uninstall layercake-mooncake` and reinstall the other.",
            RuntimeWarning,
            stacklevel=3,
        )


_warn_of_mooncake(pathlib.Path(__file__).parent)
