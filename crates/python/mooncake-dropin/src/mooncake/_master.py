"""The command ``mooncake_master``."""

from __future__ import annotations

import signal
import sys

from layercake._native import mooncake_master


def main() -> int:
    """Runs the master until it is told to stop. Returns the exit code."""
    # The master listens for it, and Python's own handler would have its say as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code, text = mooncake_master.run(sys.argv[1:])
    if code:
        print(f"mooncake_master: {text}", file=sys.stderr)
    elif text:
        print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
