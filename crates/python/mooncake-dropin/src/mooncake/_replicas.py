"""What ``get_replica_desc`` tells about replicas. All of them lie in memory."""

from __future__ import annotations

from mooncake._enums import ReplicaStatus


class Descriptor:
    """Where the bytes of a replica lie."""

    __slots__ = ("buffer_address", "size", "transport_endpoint")

    def __init__(self) -> None:
        #: Bytes.
        self.size = 0
        #: Offset in the owner's segment; never 0 for a replica.
        self.buffer_address = 0
        #: ``host:port`` of the engine that owns the segment.
        self.transport_endpoint = ""

    def __repr__(self) -> str:
        return (
            f"Descriptor(size={self.size}, buffer_address={self.buffer_address:#x}, "
            f"transport_endpoint={self.transport_endpoint!r})"
        )


class MemoryDescriptor:
    """A replica in memory."""

    __slots__ = ("buffer_descriptor",)

    def __init__(self) -> None:
        self.buffer_descriptor = Descriptor()

    def __repr__(self) -> str:
        return f"MemoryDescriptor({self.buffer_descriptor!r})"


class DiskDescriptor:
    """A replica on a disk. There are none yet."""

    __slots__ = ("file_path", "object_size")

    def __init__(self) -> None:
        self.file_path = ""
        self.object_size = 0


class ReplicaDescriptor:
    """One replica of an object."""

    __slots__ = ("_memory", "status")

    def __init__(self) -> None:
        self.status = ReplicaStatus.UNDEFINED
        self._memory = MemoryDescriptor()

    def is_memory_replica(self) -> bool:
        """Whether it lies in memory: always."""
        return True

    def is_disk_replica(self) -> bool:
        """Whether it lies in a file system: never."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Whether it lies on a disk of its owner: never."""
        return False

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Where it lies."""
        return self._memory

    def get_disk_descriptor(self) -> DiskDescriptor:
        """Raises ``RuntimeError``: it does not lie on a disk."""
        raise RuntimeError("the replica lies in memory: ask get_memory_descriptor()")

    def __repr__(self) -> str:
        return f"ReplicaDescriptor({self.status!s}, {self._memory!r})"


def complete(size: int, offset: int, endpoint: str) -> ReplicaDescriptor:
    """The description of a readable replica."""
    replica = ReplicaDescriptor()
    replica.status = ReplicaStatus.COMPLETE
    buffer = replica.get_memory_descriptor().buffer_descriptor
    buffer.size, buffer.buffer_address, buffer.transport_endpoint = size, offset, endpoint
    return replica
