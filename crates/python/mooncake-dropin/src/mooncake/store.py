"""``mooncake.store`` on Layercake: objects by key, shared by all clients of a master.

Results are ints: 0, a number of bytes, or a negative code. Wrong types of arguments raise ``TypeError``. Addresses are ints; memory that
is named by address must stay mapped until the call returns, and registered memory until it is unregistered.
"""

from __future__ import annotations

from layercake._native import mooncake_store as _native

from mooncake._buffers import (
    BufferLease,
    BufferLeaseView,
    BufferPool,
    MooncakeHostMemAllocator,
    RegisteredBufferLease,
    RegisteredBufferLeaseView,
    RegisteredBufferPool,
)
from mooncake._engram import EngramStore, EngramStoreConfig
from mooncake._enums import ObjectDataType, ReplicaStatus, SoftPinAction, TaskStatus, TaskType
from mooncake._host import MooncakeDistributedNoFRegister, bind_to_numa_node, get_alloc_func_addr, get_free_func_addr
from mooncake._parallel import ParallelAxis, ParallelCalls, ReadTarget, TensorParallelism
from mooncake._replicas import Descriptor, DiskDescriptor, MemoryDescriptor, ReplicaDescriptor, complete
from mooncake._tasks import QueryTaskResponse
from mooncake._unsupported import UnsupportedCalls

__all__ = [
    "ACTIVATION",
    "COMPLETE",
    "FAILED",
    "GENERAL",
    "GRADIENT",
    "INITIALIZED",
    "KVCACHE",
    "METADATA",
    "OPTIMIZER_STATE",
    "PENDING",
    "PROCESSING",
    "REMOVED",
    "REPLICA_COPY",
    "REPLICA_MOVE",
    "SAMPLE",
    "SUCCESS",
    "TENSOR",
    "UNDEFINED",
    "UNKNOWN",
    "WEIGHT",
    "BufferHandle",
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "Descriptor",
    "DiskDescriptor",
    "EngramStore",
    "EngramStoreConfig",
    "MemoryDescriptor",
    "MooncakeDistributedNoFRegister",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
]

BufferHandle = _native.BufferHandle

# Members of the enumerations, which Mooncake has as names of the module, too.
ACTIVATION = ObjectDataType.ACTIVATION
COMPLETE = ReplicaStatus.COMPLETE
FAILED = TaskStatus.FAILED
GENERAL = ObjectDataType.GENERAL
GRADIENT = ObjectDataType.GRADIENT
INITIALIZED = ReplicaStatus.INITIALIZED
KVCACHE = ObjectDataType.KVCACHE
METADATA = ObjectDataType.METADATA
OPTIMIZER_STATE = ObjectDataType.OPTIMIZER_STATE
PENDING = TaskStatus.PENDING
PROCESSING = TaskStatus.PROCESSING
REMOVED = ReplicaStatus.REMOVED
REPLICA_COPY = TaskType.REPLICA_COPY
REPLICA_MOVE = TaskType.REPLICA_MOVE
SAMPLE = ObjectDataType.SAMPLE
SUCCESS = TaskStatus.SUCCESS
TENSOR = ObjectDataType.TENSOR
UNDEFINED = ReplicaStatus.UNDEFINED
UNKNOWN = ObjectDataType.UNKNOWN
WEIGHT = ObjectDataType.WEIGHT


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


class MooncakeDistributedStore(ParallelCalls, UnsupportedCalls, _native.MooncakeDistributedStore):
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
        """Removes objects that nobody has a lease on, or their replicas in one segment; gives the keys of these."""
        codes = self._drop_replicas(keys, segment_name) if segment_name else self.batch_remove(keys)
        return [key for key, code in zip(keys, codes) if code == 0]

    def query_task(self, task_id: tuple[int, int]) -> tuple[QueryTaskResponse | None, int]:
        """How a copy or a move that this client began stands, and 0; or ``None`` and a code."""
        if not isinstance(task_id, (tuple, list)) or len(task_id) != 2:
            raise TypeError(f"the id of a task is two ints, not {task_id!r}")
        state, code = self._query_task(*task_id)
        return (state and QueryTaskResponse._of(task_id, *state), code)
