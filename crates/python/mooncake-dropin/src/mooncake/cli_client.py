"""The command ``mooncake_client``: a process that lends memory to the store, and does nothing else."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading

from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore

RETRY_EVERY = 1.0


def _parse(arguments: list[str] | None) -> MooncakeConfig:
    parser = argparse.ArgumentParser(
        prog="mooncake_client", description="Lend memory to the store. Flags may begin with one dash or two.", allow_abbrev=False
    )
    used = {
        "host": ("0.0.0.0", "the address to listen on, and to tell others"),
        "global_segment_size": ("4 GB", "memory to lend"),
        "master_server_address": ("127.0.0.1:50051", "host:port of the master"),
        "metadata_server": ("http://127.0.0.1:8080/metadata", "accepted: engines of a store are known to the master"),
        "protocol": ("tcp", "how bytes move"),
        "tenant_id": ("default", "accepted: what is lent serves all tenants"),
    }
    without = ("device_names", "enable_http_server", "http_port", "local_buffer_size", "port", "start_offload_rpc_server", "threads")
    for name, (default, about) in used.items():
        parser.add_argument(f"--{name}", f"-{name}", default=default, help=f"{about} (default: {default})")
    for name in without:
        parser.add_argument(f"--{name}", f"-{name}", nargs="?", help="without effect")
    parser.add_argument("--enable_offload", "-enable_offload", nargs="?", const="true", default="false", help="only false is accepted")
    parsed = parser.parse_args(arguments)
    if parsed.enable_offload.lower() not in ("false", "0", "no"):
        parser.error("--enable_offload: objects are kept in memory only, leave it off")
    try:
        return MooncakeConfig(
            # Nobody can connect to every address: without one, this host alone is served.
            local_hostname="localhost" if parsed.host in ("0.0.0.0", "::") else parsed.host,
            metadata_server=parsed.metadata_server,
            global_segment_size=parsed.global_segment_size,
            local_buffer_size=0,
            protocol=parsed.protocol,
            device_name="",
            master_server_address=parsed.master_server_address,
            tenant_id=parsed.tenant_id,
        )
    except ValueError as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> int:
    """Lends until SIGTERM or SIGINT. Waits for a master that is not there. Returns the exit code."""
    config = _parse(arguments)
    logging.basicConfig(level=logging.WARNING)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    store = MooncakeDistributedStore()
    host, size, master = config.local_hostname, config.global_segment_size, config.master_server_address
    while (code := store.setup(host, config.metadata_server, size, 0, config.protocol, "", master)) != 0:
        if code not in (-900, -901):
            print(f"mooncake_client: setup answered {code}", file=sys.stderr)
            return 1
        if stopped.wait(RETRY_EVERY):
            return 0
    stopped.wait()
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
