"""The configuration of a client, from a JSON file or from variables, as Mooncake's programs read it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
from typing import Any

from layercake._native import mooncake_master as _native

__all__ = ["DEFAULT_GLOBAL_SEGMENT_SIZE", "DEFAULT_LOCAL_BUFFER_SIZE", "MooncakeConfig"]

logger = logging.getLogger(__name__)

DEFAULT_GLOBAL_SEGMENT_SIZE = 3_355_443_200
DEFAULT_LOCAL_BUFFER_SIZE = 1 << 30

# Keys that other readers of the same file have.
_OF_OTHERS = frozenset(
    "alloc_in_same_node check_server client_server_address enable_offload ipc_socket_path master_metrics_port mode standalone_storage "
    "transfer_timeout use_ascend_direct".split()
)

# The variable of each field, where there is one.
_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}


def _size(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= 0:
            return value
    elif isinstance(value, str):
        size = _native.parse_size(value)
        if size is not None:
            return size
    raise ValueError(f'{name} is {value!r}: a number of bytes, or a text such as "4GB", is accepted')


def _switch(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool | int):
        return bool(value)
    text = str(value).strip().lower()
    if text in ("true", "1", "yes", "on", "enable"):
        return True
    if text in ("", "false", "0", "no", "off", "disable"):
        return False
    raise ValueError(f"{name} is {value!r}: true or false is accepted")


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{name} is {value!r}: a text is accepted")


def _port(name: str, value: Any) -> int:
    text = str(value).strip()
    if not isinstance(value, bool) and text.isascii() and text.isdigit() and int(text) <= 65535:
        return int(text)
    raise ValueError(f"{name} is {value!r}: a port from 0 to 65535 is accepted")


@dataclasses.dataclass
class MooncakeConfig:
    """How a client starts. Sizes may be given as texts with a unit, in powers of 1024.

    Args:
        local_hostname: The name or address that others reach this host by.
        metadata_server: ``"P2PHANDSHAKE"``, or the address of an HTTP metadata server.
        global_segment_size: Bytes to lend; 0: none.
        local_buffer_size: Only checked: values are not staged.
        protocol: ``"tcp"``.
        device_name: Without effect: it names RDMA devices.
        master_server_address: ``host:port`` of the master.
        enable_ssd_offload, ssd_offload_path, enable_client_http_server, client_http_port: Without effect.
        tenant_id: The key space, at a master with tenants.

    Raises:
        ValueError: A value is not accepted; the text names it.
    """

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    def __post_init__(self) -> None:
        for name in ("local_hostname", "metadata_server", "master_server_address", "protocol"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} is {value!r}: a text that is not empty is needed")
        self.protocol = self.protocol.strip().lower()
        self.device_name = _text("device_name", self.device_name or "")
        self.tenant_id = _text("tenant_id", self.tenant_id or "default")
        self.ssd_offload_path = _text("ssd_offload_path", self.ssd_offload_path or "")
        for name in ("global_segment_size", "local_buffer_size"):
            setattr(self, name, _size(name, getattr(self, name)))
        for name in ("enable_ssd_offload", "enable_client_http_server"):
            setattr(self, name, _switch(name, getattr(self, name)))
        self.client_http_port = _port("client_http_port", self.client_http_port)

    @staticmethod
    def from_file(file_path: str) -> MooncakeConfig:
        """Reads a JSON file. Keys that nobody knows are named in a warning."""
        with open(file_path, encoding="utf-8") as file:
            try:
                values = json.load(file)
            except ValueError as error:
                raise ValueError(f"{file_path} is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file_path} holds no JSON object")
        for name in sorted(values.keys() - _VARIABLES.keys() - _OF_OTHERS):
            near = difflib.get_close_matches(name, _VARIABLES, 1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            logger.warning("%s: %r is not known%s", file_path, name, hint)
        for name in ("local_hostname", "metadata_server", "master_server_address"):
            if name not in values:
                raise ValueError(f"{file_path} has no {name}, which is needed")
        return _of_values(values)

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """Reads the file that ``MOONCAKE_CONFIG_PATH`` names, or else variables, of which ``MOONCAKE_MASTER`` is needed."""
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path is not None:
            return MooncakeConfig.from_file(path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ValueError("set MOONCAKE_CONFIG_PATH to a configuration file, or MOONCAKE_MASTER to host:port of the master")
        values = {name: os.environ[variable] for name, variable in _VARIABLES.items() if variable in os.environ}
        return _of_values({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"} | values)


def _of_values(values: dict[str, Any]) -> MooncakeConfig:
    defaults = {
        "global_segment_size": DEFAULT_GLOBAL_SEGMENT_SIZE,
        "local_buffer_size": DEFAULT_LOCAL_BUFFER_SIZE,
        "protocol": "tcp",
        "device_name": "",
    }
    given = {name: value for name, value in values.items() if name in _VARIABLES and value is not None}
    return MooncakeConfig(**(defaults | given))
