"""``mooncake.store`` on Layercake: objects by key, shared by all clients of a master.

Results are ints: 0, a number of bytes, or a negative code. Wrong types of arguments raise ``TypeError``. Addresses are ints; memory that
is named by address must stay mapped until the call returns, and registered memory until it is unregistered.
"""

from __future__ import annotations

from layercake._native import mooncake_store as _native

from mooncake._enums import ObjectDataType, ReplicaStatus, SoftPinAction, TaskStatus, TaskType
from mooncake._replicas import Descriptor, DiskDescriptor, MemoryDescriptor, ReplicaDescriptor, complete

__all__ = [
    "BufferHandle",
    "Descriptor",
    "DiskDescriptor",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
]

BufferHandle = _native.BufferHandle


class ReplicateConfig(_native.ReplicateConfig):
    """How the objects of a put are placed and kept. One configuration may serve many puts, of several threads."""

    __slots__ = ()

    @property
    def soft_pin_action(self) -> SoftPinAction:
        """Whether the objects are soft-pinned: evicted last."""
        return SoftPinAction(self._soft_pin_action)

    @soft_pin_action.setter
    def soft_pin_action(self, value: SoftPinAction) -> None:
        self._soft_pin_action = _member(SoftPinAction, value)

    @property
    def with_soft_pin(self) -> bool:
        """``soft_pin_action`` as older versions of Mooncake have it."""
        return self.soft_pin_action is SoftPinAction.ENABLE

    @with_soft_pin.setter
    def with_soft_pin(self, value: bool) -> None:
        self._soft_pin_action = SoftPinAction.ENABLE if value else SoftPinAction.DISABLE

    @property
    def data_type(self) -> ObjectDataType:
        """What the objects hold."""
        return ObjectDataType(self._data_type)

    @data_type.setter
    def data_type(self, value: ObjectDataType) -> None:
        self._data_type = _member(ObjectDataType, value)

    def __repr__(self) -> str:
        return (
            f"ReplicateConfig: {{ replica_num: {self.replica_num}, nof_replica_num: {self.nof_replica_num}, "
            f"dfs_replica_num: {self.dfs_replica_num}, soft_pin_action: {self.soft_pin_action.name}, "
            f"soft_pin_ttl_ms: {'default' if self.soft_pin_ttl_ms is None else self.soft_pin_ttl_ms}, "
            f"with_hard_pin: {self.with_hard_pin}, preferred_segment: {self.preferred_segment!r}, "
            f"preferred_segments: {self.preferred_segments}, prefer_alloc_in_same_node: {self.prefer_alloc_in_same_node}, "
            f"group_ids: {self.group_ids}, data_type: {self.data_type.name} }}"
        )


def _member(kind, value):
    if not isinstance(value, kind):
        raise TypeError(f"a {kind.__name__} is needed, not {value!r}")
    return int(value)


class MooncakeDistributedStore(_native.MooncakeDistributedStore):
    """A client of the store, which may lend memory to it. See ``setup``.

    Calls of any number of threads overlap, and release the interpreter lock while bytes move or the network is waited for. When
    a call returns, no byte of its memory moves any more.
    """

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The replicas of an object; none if it is not there, or not finished."""
        (found,) = self._describe([key])
        return [complete(*replica) for replica in found or ()]

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[ReplicaDescriptor]]:
        """As ``get_replica_desc`` for many; objects that are not there, or not finished, are left out."""
        found = zip(keys, self._describe(keys))
        return {key: [complete(*replica) for replica in replicas] for key, replicas in found if replicas}

    def batch_replica_clear(self, keys: list[str], segment_name: str = "") -> list[str]:
        """Removes objects that nobody has a lease on; gives the keys of those that were removed."""
        return [key for key, code in zip(keys, self.batch_remove(keys)) if code == 0]
