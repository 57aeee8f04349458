"""Types of the native half. The documentation is in the docstrings."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self, SupportsIndex, TypeAlias

from typing_extensions import Buffer

from .errors import LayercakeError

__version__: str

class _Tensor(Protocol):
    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...

# Bytes in host memory: an object with the buffer protocol, a torch tensor, or (address, length).
_Bytes: TypeAlias = Buffer | _Tensor | tuple[SupportsIndex, SupportsIndex]
_Key: TypeAlias = str | bytes
_Keys: TypeAlias = Sequence[_Key]
_Size: TypeAlias = SupportsIndex | str
# A sequence of integers, or a one-dimensional integer array.
_Ints: TypeAlias = Sequence[SupportsIndex] | Buffer
# Rows of those, or a two-dimensional integer array.
_Rows: TypeAlias = Sequence[_Ints] | Buffer

class ReplicateConfig:
    def __init__(
        self,
        *,
        replicas: SupportsIndex = 1,
        preferred_segments: Sequence[str] = (),
        prefer_same_node: bool = False,
        soft_pin: bool = False,
        soft_pin_ttl: float | None = None,
        hard_pin: bool = False,
    ) -> None: ...
    @property
    def replicas(self) -> int: ...
    @property
    def preferred_segments(self) -> list[str]: ...
    @property
    def prefer_same_node(self) -> bool: ...
    @property
    def soft_pin(self) -> bool: ...
    @property
    def soft_pin_ttl(self) -> float | None: ...
    @property
    def hard_pin(self) -> bool: ...

class PutSession:
    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def written(self) -> int: ...
    @property
    def missing(self) -> list[tuple[int, int]]: ...
    def write(self, offset: SupportsIndex, data: _Bytes) -> int: ...
    def end(self) -> None: ...
    def revoke(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        class_: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool: ...

class GetSession:
    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int: ...
    def read(self, offset: SupportsIndex = 0, length: SupportsIndex | None = None) -> bytes: ...
    def read_into(self, offset: SupportsIndex, buffer: _Bytes) -> int: ...
    def end(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        class_: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool: ...

class Store:
    def __init__(
        self,
        master: str | None = None,
        *,
        name: str | None = None,
        capacity: _Size = 0,
        tenant: str = "default",
        token: str | None = None,
        insecure: bool = False,
        listen: str | None = None,
        advertise: str | None = None,
        transports: str | None = None,
        engine: TransferEngine | None = None,
        huge_pages: bool = False,
        checksums: bool = True,
        timeout: float = 5.0,
        ready_timeout: float = 60.0,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def health(self) -> Literal["serving", "closed", "master lost"]: ...
    def close(self, timeout: float = 5.0) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        class_: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool: ...
    def put(
        self,
        key: _Key,
        data: _Bytes,
        config: ReplicateConfig | None = None,
        *,
        group: str | None = None,
    ) -> bool: ...
    def upsert(
        self,
        key: _Key,
        data: _Bytes,
        config: ReplicateConfig | None = None,
        *,
        group: str | None = None,
    ) -> None: ...
    def put_many(
        self, items: Sequence[tuple[_Key, _Bytes]], config: ReplicateConfig | None = None
    ) -> list[bool | LayercakeError]: ...
    def get(self, key: _Key) -> bytes: ...
    def get_many(self, keys: _Keys) -> list[bytes | LayercakeError]: ...
    def get_into(self, key: _Key, buffer: _Bytes) -> int: ...
    def get_into_many(
        self, items: Sequence[tuple[_Key, _Bytes]]
    ) -> list[int | LayercakeError]: ...
    def exists(self, key: _Key) -> bool: ...
    def exists_many(
        self, keys: _Keys, *, readable: bool = False
    ) -> list[bool | LayercakeError]: ...
    def longest_prefix(
        self, keys: Sequence[_Key], window: SupportsIndex = 64
    ) -> tuple[int, int]: ...
    def size(self, key: _Key) -> int: ...
    def remove(self, key: _Key, *, force: bool = False) -> None: ...
    def remove_many(
        self, keys: _Keys, *, force: bool = False
    ) -> list[LayercakeError | None]: ...
    def remove_matching(self, pattern: str, *, force: bool = False) -> int: ...
    def remove_all(self, *, force: bool = False) -> int: ...
    def wait_complete(self, keys: _Keys, timeout: float) -> list[LayercakeError | None]: ...
    def start_put(
        self,
        key: _Key,
        size: SupportsIndex,
        config: ReplicateConfig | None = None,
        *,
        group: str | None = None,
        replace: bool = False,
        epoch: SupportsIndex = 0,
        index: SupportsIndex = 0,
    ) -> PutSession: ...
    def start_puts(
        self,
        keys: _Keys,
        sizes: _Ints,
        config: ReplicateConfig | None = None,
        *,
        replace: bool = False,
        epoch: SupportsIndex = 0,
        index: SupportsIndex = 0,
    ) -> list[PutSession | LayercakeError]: ...
    def write_ranges(
        self,
        sessions: Sequence[PutSession],
        addresses: _Rows,
        sizes: _Rows,
        offsets: _Rows,
    ) -> list[int | LayercakeError]: ...
    def end_puts(self, sessions: Sequence[PutSession]) -> list[LayercakeError | None]: ...
    def revoke_puts(self, sessions: Sequence[PutSession]) -> list[LayercakeError | None]: ...
    def start_get(
        self, key: _Key, *, epoch: SupportsIndex = 0, index: SupportsIndex = 0
    ) -> GetSession: ...
    def start_gets(
        self, keys: _Keys, *, epoch: SupportsIndex = 0, index: SupportsIndex = 0
    ) -> list[GetSession | LayercakeError]: ...
    def read_ranges(
        self,
        sessions: Sequence[GetSession],
        addresses: _Rows,
        sizes: _Rows,
        offsets: _Rows,
    ) -> list[int | LayercakeError]: ...
    def end_gets(self, sessions: Sequence[GetSession]) -> None: ...
    def register_buffer(self, address: SupportsIndex, size: SupportsIndex) -> None: ...
    def unregister_buffer(self, address: SupportsIndex) -> None: ...
    def stat(self, key: _Key) -> dict[str, Any]: ...
    def keys(
        self, prefix: str = "", *, limit: int = 1000, after: _Key | None = None
    ) -> list[str]: ...
    def status(self) -> dict[str, Any]: ...
    def segments(self) -> list[dict[str, Any]]: ...
    def stats(self) -> dict[str, Any]: ...

class Transfer:
    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> int | None: ...
    def cancel(self) -> None: ...

class TransferEngine:
    def __init__(
        self,
        listen: str | None = None,
        *,
        advertise: str | None = None,
        token: str | None = None,
        insecure: bool = False,
        transports: str | None = None,
    ) -> None: ...
    @property
    def address(self) -> str: ...
    def register(
        self, address: SupportsIndex, size: SupportsIndex, *, access: Literal["rw", "r", "w", ""] = "rw"
    ) -> None: ...
    def unregister(self, address: SupportsIndex) -> None: ...
    def write(
        self,
        peer: str,
        addresses: _Ints,
        remote_addresses: _Ints,
        sizes: _Ints,
        *,
        timeout: float | None = None,
    ) -> int: ...
    def read(
        self,
        peer: str,
        addresses: _Ints,
        remote_addresses: _Ints,
        sizes: _Ints,
        *,
        timeout: float | None = None,
    ) -> int: ...
    def submit_write(
        self,
        peer: str,
        addresses: _Ints,
        remote_addresses: _Ints,
        sizes: _Ints,
        *,
        timeout: float | None = None,
    ) -> Transfer: ...
    def submit_read(
        self,
        peer: str,
        addresses: _Ints,
        remote_addresses: _Ints,
        sizes: _Ints,
        *,
        timeout: float | None = None,
    ) -> Transfer: ...
    def probe(self, peer: str) -> None: ...
    def notify(self, peer: str, name: str, message: bytes) -> None: ...
    def notifications(self) -> list[tuple[str, bytes]]: ...
    def stats(self) -> dict[str, int]: ...
    def close(self, timeout: float = 5.0) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        class_: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool: ...

class Cluster:
    @property
    def master(self) -> str: ...
    @property
    def store(self) -> Store: ...
    def close(self, timeout: float = 5.0) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        class_: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool: ...

def serve(
    capacity: _Size = ...,
    *,
    listen: str = "127.0.0.1:0",
    lease: float = 10.0,
    name: str | None = None,
    token: str | None = None,
    insecure: bool = False,
    transports: str | None = None,
) -> Cluster: ...
