"""A process that lends memory to the store, with a REST interface: ``python -m mooncake.mooncake_store_service``.

========================  ======================================================
``PUT /api/put``          ``{"key": ..., "value": ...}``, both texts
``GET /api/get/KEY``      the value's bytes
``GET /api/exist/KEY``    ``{"exists": true}``
``DELETE /api/remove/KEY``, ``DELETE /api/remove_all``
========================  ======================================================

Errors are ``{"error": ...}``: 400 for what makes no sense, 404 for a value that is not there, 500 for what failed, the removal of a key
that is not there among it, and 501 for the calls that mount memory of other processes, which Layercake has not.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import difflib
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore

__all__ = ["MooncakeStoreService", "main", "sync_main"]

logger = logging.getLogger(__name__)

LARGEST_BODY = 100 << 20
# A connection that sends nothing for so long is closed.
IDLE_WITHIN = 60.0
RETRY_EVERY = 1.0
LONGEST_GRACE = 3600

# What setup answers to settings that make no sense, or name what Layercake has not: that does not change by itself.
FOR_GOOD = (-600, -1)


class _Refused(Exception):
    """What a request is answered with instead of a result."""

    def __init__(self, status: int, error: str):
        super().__init__(error)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "layercake"
    timeout = IDLE_WITHIN
    server: _Server

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        try:
            body = self._body()
            status, media, answer = self.server.routes.answer(self.command, path, body)
        except _Refused as refused:
            status, media, answer = _json({"error": str(refused)}, refused.status)
        except NotImplementedError as error:
            status, media, answer = _json({"error": str(error)}, 501)
        except Exception as error:  # noqa: BLE001 - a request must not end the service
            logger.exception("%s %s failed", self.command, path)
            status, media, answer = _json({"error": str(error)}, 500)
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            raise _Refused(411, "a body with Content-Length is needed")
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            raise _Refused(400, f"Content-Length is {length!r}")
        if int(length) > LARGEST_BODY:
            self.close_connection = True
            raise _Refused(413, f"{length} bytes, {LARGEST_BODY} at most are accepted")
        return self.rfile.read(int(length))

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _json(value: Any, status: int = 200) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(value).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], routes: _Routes):
        self.routes = routes
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Without asking for the host's name, which may take long.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]


class _Routes:
    """What each path does."""

    def __init__(self, store: MooncakeDistributedStore, protocol: str):
        self.store = store
        self.protocol = protocol
        self.with_body: dict[tuple[str, str], Callable[[dict[str, Any]], tuple[int, str, bytes]]] = {
            ("PUT", "/api/put"): self.put,
            ("POST", "/api/reconfigure"): self.reconfigure,
            ("POST", "/api/mount_shm"): self.mount_shm,
            ("POST", "/api/unmount_shm"): self.unmount_shm,
            ("POST", "/api/mount"): self.mount,
            ("POST", "/api/unmount"): self.unmount,
            ("POST", "/api/unmount_local_disk"): self.unmount_local_disk,
        }
        self.with_key: dict[tuple[str, str], Callable[[str], tuple[int, str, bytes]]] = {
            ("GET", "/api/get/"): self.get,
            ("GET", "/api/exist/"): self.exist,
            ("DELETE", "/api/remove/"): self.remove,
        }

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        method = "GET" if method == "HEAD" else method
        if (method, path) == ("DELETE", "/api/remove_all"):
            return self.remove_all()
        if run := self.with_body.get((method, path)):
            return run(_object(body))
        # A key may hold slashes where they are escaped.
        folder, _, last = path.rpartition("/")
        run = self.with_key.get((method, folder + "/"))
        if run and last:
            return run(_key(last))
        known = {path for _, path in self.with_body} | {"/api/remove_all"}
        if path in known or (last and folder + "/" in {folder for _, folder in self.with_key}):
            raise _Refused(405, f"{method} is not accepted here")
        raise _Refused(404, f"nothing is at {path}")

    def put(self, request: dict[str, Any]) -> tuple[int, str, bytes]:
        key, value = request.get("key"), request.get("value")
        if not key or value is None:
            raise _Refused(400, "Missing key or value")
        if not isinstance(key, str) or not isinstance(value, str) or not value:
            raise _Refused(400, "key and value must be texts that are not empty")
        try:
            key.encode()
            encoded = value.encode()
        except UnicodeEncodeError as error:
            # JSON can say halves of a character.
            raise _Refused(400, f"key and value must be texts that have a UTF-8 form: {error}") from None
        _check(self.store.put(key, encoded), "PUT operation failed")
        return _json({"status": "success"})

    def get(self, key: str) -> tuple[int, str, bytes]:
        value = self.store.get(key)
        if value == b"":
            # It does not say why.
            self._exists(key, "Exist check failed")
            raise _Refused(500, "GET operation failed")
        return 200, "application/octet-stream", value

    def _exists(self, key: str, failed: str) -> None:
        exists = self.store.is_exist(key)
        if exists == 0:
            raise _Refused(404, "Key not found")
        _check(min(exists, 0), failed)

    def exist(self, key: str) -> tuple[int, str, bytes]:
        exists = self.store.is_exist(key)
        _check(min(exists, 0), "Exist check failed")
        return _json({"exists": exists > 0})

    def remove(self, key: str) -> tuple[int, str, bytes]:
        _check(self.store.remove(key), "Remove operation failed")
        return _json({"status": "success"})

    def remove_all(self) -> tuple[int, str, bytes]:
        removed = self.store.remove_all()
        _check(min(removed, 0), "RemoveAll operation failed")
        return _json({"status": f"success removed {removed} keys"})

    def reconfigure(self, request: dict[str, Any]) -> tuple[int, str, bytes]:
        mode = str(request.get("mode", "")).lower()
        if mode == "prefill":
            # Nothing was ever mounted.
            return _json({"status": "success", "mode": mode})
        if mode != "decode":
            raise _Refused(400, "Invalid mode. Use 'decode' or 'prefill'")
        path, size = request.get("path"), request.get("size")
        if not path or size is None:
            raise _Refused(400, "Missing path or size for decode mode")
        return self._mounted(self.store.mount_segment(path, size, *self._place(request)))

    def mount_shm(self, request: dict[str, Any]) -> tuple[int, str, bytes]:
        name, size = request.get("name"), request.get("size")
        plain = name.removeprefix("/") if isinstance(name, str) else ""
        if size is None or not plain or "/" in plain or plain in (".", ".."):
            raise _Refused(400, "Missing or invalid name or size")
        return self._mounted(self.store.mount_segment(f"/dev/shm/{plain}", size, *self._place(request)))

    def mount(self, request: dict[str, Any]) -> tuple[int, str, bytes]:
        size = request.get("size")
        if type(size) is not int or size <= 0:
            raise _Refused(400, "Invalid size, must be a positive integer")
        _, protocol, location = self._place(request)
        return self._mounted(self.store.allocate_and_mount_segment(size, protocol, location))

    def unmount_shm(self, request: dict[str, Any]) -> tuple[int, str, bytes]:
        return self._unmounted(self.store.unmount_segment(*_segments(request)))

    def unmount(self, request: dict[str, Any]) -> tuple[int, str, bytes]:
        return self._unmounted(self.store.unmount_and_free_segment(*_segments(request)))

    def unmount_local_disk(self, request: dict[str, Any]) -> tuple[int, str, bytes]:
        grace = request.get("grace_period_seconds", 0)
        if type(grace) is not int or not 0 <= grace <= LONGEST_GRACE:
            raise _Refused(400, f"Invalid grace_period_seconds, must be a non-negative integer no greater than {LONGEST_GRACE}")
        return self._unmounted(self.store.unmount_local_disk_segment(grace))

    def _place(self, request: dict[str, Any]) -> tuple[int, str, str]:
        return request.get("offset", 0), request.get("protocol", self.protocol), request.get("location", "")

    def _mounted(self, result: dict[str, Any]) -> tuple[int, str, bytes]:
        _check(result["ret"], f"Mount failed, ret={result['ret']}")
        return _json({"status": "success", "segment_ids": list(result["segment_ids"])})

    def _unmounted(self, code: int) -> tuple[int, str, bytes]:
        _check(code, f"Unmount failed, ret={code}")
        return _json({"status": "success"})


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        raise _Refused(400, "Malformed JSON body") from None
    if not isinstance(value, dict):
        raise _Refused(400, "Request body must be a JSON object")
    return value


def _key(escaped: str) -> str:
    try:
        return unquote(escaped, errors="strict")
    except UnicodeDecodeError as error:
        raise _Refused(400, f"a key is UTF-8: {error}") from None


def _segments(request: dict[str, Any]) -> tuple[list[str], int]:
    ids = request.get("segment_ids", [])
    ids = [ids] if isinstance(ids, str) else ids
    if not ids:
        raise _Refused(400, "Missing segment_ids")
    return ids, request.get("grace_period_seconds", 0)


def _check(code: int, error: str) -> None:
    if code != 0:
        raise _Refused(500, error)


class MooncakeStoreService:
    """The service: a store that lends memory, and the REST interface on it.

    Args:
        config_path: A configuration in JSON; without it, ``MOONCAKE_CONFIG_PATH`` or ``MOONCAKE_MASTER`` say where the master is.
        cli_config: Values that replace those of the configuration, by field.

    Raises:
        ValueError: The configuration makes no sense.
    """

    def __init__(self, config_path: str | None = None, cli_config: dict[str, Any] | None = None):
        config = MooncakeConfig.from_file(config_path) if config_path else MooncakeConfig.load_from_env()
        fields = {field.name for field in dataclasses.fields(config)}
        for name in (cli_config or {}).keys() - fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ValueError(f"there is no setting {name}{hint}")
        self.config = dataclasses.replace(config, **(cli_config or {}))
        self.store: MooncakeDistributedStore | None = None
        self._server: _Server | None = None

    async def start_store_service(self, max_wait_time: float = 60, shutdown_event: asyncio.Event | None = None) -> bool:
        """Sets the store up, trying again for as long as the master is not there. False: it is not there in time, the event
        is set, or the settings can't be used."""
        ends = time.monotonic() + max_wait_time
        stopped = shutdown_event or asyncio.Event()
        while not stopped.is_set():
            store = MooncakeDistributedStore()
            code = await asyncio.to_thread(self._set_up, store)
            if code == 0:
                self.store = store
                return not stopped.is_set()
            if code in FOR_GOOD:
                logger.error("the store can't be set up like that: setup answered %s", code)
                return False
            left = ends - time.monotonic()
            if left <= 0:
                logger.error("the store could not be set up within %s s: setup answered %s", max_wait_time, code)
                return False
            try:
                await asyncio.wait_for(stopped.wait(), min(RETRY_EVERY, left))
            except TimeoutError:
                pass
        return False

    def _set_up(self, store: MooncakeDistributedStore) -> int:
        config = dataclasses.asdict(self.config)
        config["rdma_devices"] = config.pop("device_name")
        config["master_server_addr"] = config.pop("master_server_address")
        return store.setup(config)

    async def start_http_service(self, port: int = 8080, host: str = "0.0.0.0") -> bool:
        """Serves the REST interface of a store that is set up.

        Raises:
            OSError: The address can't be listened on.
        """
        if self.store is None:
            raise RuntimeError("start_store_service comes first")
        self._server = _Server((host, port), _Routes(self.store, self.config.protocol))
        threading.Thread(target=self._server.serve_forever, name="rest", daemon=True).start()
        return True

    @property
    def http_port(self) -> int | None:
        """The port of the REST interface, if it is served."""
        return self._server.server_port if self._server else None

    async def stop(self) -> None:
        """Ends both, and withdraws the memory."""
        server, self._server = self._server, None
        if server:
            await asyncio.to_thread(server.shutdown)
            server.server_close()
        store, self.store = self.store, None
        if store:
            await asyncio.to_thread(store.close)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="mooncake_store_service", description="Lend memory to the store, with a REST interface.")
    parser.add_argument("--config", help="configuration in JSON (default: MOONCAKE_CONFIG_PATH)")
    parser.add_argument("-D", "--define", action="append", default=[], metavar="KEY=VALUE", help="replace a value of the configuration")
    parser.add_argument("--port", type=int, default=8080, help="port of the REST interface (default: 8080)")
    parser.add_argument("--host", default="0.0.0.0", help="address of the REST interface (default: 0.0.0.0)")
    parser.add_argument("--max-wait-time", type=float, default=60, metavar="SECONDS", help="how long to wait for the master (default: 60)")
    parsed = parser.parse_args(arguments)
    for item in parsed.define:
        if "=" not in item:
            parser.error(f"-D {item}: KEY=VALUE is needed")
    if not 0 <= parsed.port <= 65535:
        parser.error(f"--port {parsed.port}: 0 to 65535 is accepted")
    return parsed


async def main(arguments: list[str] | None = None) -> int:
    """Runs the service until SIGTERM or SIGINT. Returns the exit code."""
    parsed = parse_arguments(arguments)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        service = MooncakeStoreService(parsed.config, dict(item.split("=", 1) for item in parsed.define))
    except (OSError, ValueError) as error:
        print(f"mooncake_store_service: {error}", file=sys.stderr)
        return 1
    try:
        if not await service.start_store_service(parsed.max_wait_time, stopped):
            return 0 if stopped.is_set() else 1
        await service.start_http_service(parsed.port, parsed.host)
        if parsed.host not in ("127.0.0.1", "::1", "localhost"):
            logger.warning("the REST interface is open to every host that reaches %s:%s; --host=127.0.0.1 closes it", parsed.host, parsed.port)
        await stopped.wait()
    except OSError as error:
        print(f"mooncake_store_service: can't listen on {parsed.host}:{parsed.port}: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        await service.stop()
    return 0


def sync_main() -> int:
    """The command ``mc_store_rest_server``."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(main())


if __name__ == "__main__":
    sys.exit(sync_main())
