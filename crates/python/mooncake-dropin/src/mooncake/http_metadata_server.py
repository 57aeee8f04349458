"""The command ``mooncake_http_metadata_server``: values by key over HTTP, in which transfer engines find each other."""

from __future__ import annotations

import argparse
import signal
import sys

from layercake._native import mooncake_master


def main(arguments: list[str] | None = None) -> int:
    """Runs the server until it is told to stop. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="mooncake_http_metadata_server", description="Values by key over HTTP.")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: 0.0.0.0)")
    parser.add_argument("--log-level", default="INFO", help="without effect: LAYERCAKE_LOG sets the level")
    parsed = parser.parse_args(arguments)
    if not 0 <= parsed.port <= 65535:
        parser.error(f"--port {parsed.port}: 0 to 65535 is accepted")
    # The server listens for it, and Python's own handler would have its say as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code, text = mooncake_master.run_metadata_server(parsed.host, parsed.port)
    if code:
        print(f"mooncake_http_metadata_server: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
