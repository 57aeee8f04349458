"""The enumerations of ``mooncake.store``."""

from __future__ import annotations

import enum


class _Enum(enum.IntEnum):
    """Members are ints, and show themselves with their class, as Mooncake's do."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    __format__ = object.__format__


class ReplicaStatus(_Enum):
    """Where a replica is in its life."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class SoftPinAction(_Enum):
    """What a put does about the soft pin of its object: a pinned object is evicted last."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class TaskStatus(_Enum):
    """How a copy or a move stands."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


class TaskType(_Enum):
    """What a task does."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class ObjectDataType(_Enum):
    """What an object holds. Kept with a configuration, and of no effect."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9
