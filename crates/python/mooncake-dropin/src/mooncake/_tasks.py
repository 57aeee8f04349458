"""What ``query_task`` tells about the copy or the move of a replica."""

from __future__ import annotations

from mooncake._enums import TaskStatus, TaskType


class QueryTaskResponse:
    """How a task stands."""

    __slots__ = ("assigned_client", "created_at_ms_epoch", "id", "last_updated_at_ms_epoch", "message", "status", "type")

    def __init__(self) -> None:
        self.id = (0, 0)
        self.type = TaskType.REPLICA_COPY
        self.status = TaskStatus.PENDING
        #: Milliseconds since the epoch.
        self.created_at_ms_epoch = 0
        self.last_updated_at_ms_epoch = 0
        #: The client that does it, which is the one that was asked to.
        self.assigned_client = (0, 0)
        #: Why it failed.
        self.message = ""

    @classmethod
    def _of(cls, task, kind, status, created, updated, message) -> QueryTaskResponse:
        response = cls()
        response.id, response.assigned_client = tuple(task), (task[0], 0)
        response.type, response.status = TaskType(kind), TaskStatus(status)
        response.created_at_ms_epoch, response.last_updated_at_ms_epoch = created, updated
        response.message = message
        return response

    def __repr__(self) -> str:
        return (
            f"QueryTaskResponse(id={self.id[0]}-{self.id[1]}, type={int(self.type)}, status={int(self.status)}, "
            f"created_at={self.created_at_ms_epoch}, last_updated_at={self.last_updated_at_ms_epoch}, "
            f'message="{self.message}")'
        )
