"""What can go wrong: one class for each `status_code` of a reply, and those of the client itself."""

from __future__ import annotations

import json
import re
from typing import Any

from ._base import UNREADABLE, BadReply, SconceError
from ._reply import Reply

__all__ = [
    "BadReply",
    "BadRequest",
    "Cancelled",
    "ClientClosed",
    "ConnectionFailed",
    "Expired",
    "Failed",
    "InputError",
    "NoSuchQueue",
    "NotAccepted",
    "NotServed",
    "OutOfMemory",
    "ReplyWarning",
    "SconceError",
    "TaskError",
    "TaskTimeout",
    "TextsTruncated",
    "TooLarge",
]

_INDEXED = re.compile(r"(\w+)\[([0-9]{1,9})\]")
"""The path of one input, such as `input[3]`."""


class ConnectionFailed(SconceError, ConnectionError):
    """The broker cannot be reached, or refuses this client. The message names its address and the cause."""


class ClientClosed(SconceError):
    """The client was closed before the reply came, or before the task was given to it."""


class NoSuchQueue(SconceError):
    """The broker returned the task, because its queue does not exist. `queue` is the queue's name."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"no such queue: {queue!r}. Is the pool running? This client never declares the task queue")
        self.queue = queue

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.queue,)


class NotAccepted(SconceError):
    """The broker did not confirm the task: its queue is full, or the task is larger than the broker takes."""


class TaskTimeout(SconceError, TimeoutError):
    """No reply came in time. The task may have been dropped, or may still be computed. The message says if nobody consumes
    from the queue."""


class ReplyWarning(UserWarning):
    """The result of a reply may mislead. The message is that of the worker."""


class TextsTruncated(UserWarning):
    """Texts were longer than the model takes, and were cut. `truncate=False` has them refused instead."""


class InputError(SconceError):
    """Why one input of `embed(…, errors="each")`, or of `embed_images`, has no vector. It stands in the vector's place."""

    def __init__(self, index: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.index, self.message, self.param, self.code = index, message, param, code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.index, self.message, self.param, self.code)


class TaskError(SconceError):
    """A reply with an error. `status_code` says which, `param` names the field at fault, `reply` is all of it."""

    status_code = 0

    def __init__(self, reply: Reply, offset: int = 0) -> None:
        """offset: how many inputs of the call stood before those of the task. `reply` counts without them."""
        try:
            error = json.loads(reply.body)["error"]
        except UNREADABLE:
            error = {}
        if not isinstance(error, dict):
            error = {"message": error}
        # Of another type they say nothing.
        said = {key: value for key, value in error.items() if isinstance(value, str)}
        message, param = said.get("message", ""), said.get("param")
        self.index: int | None = None
        """Which input is at fault, if it is one alone: its place in the list that the call was given."""
        if param and (found := _INDEXED.match(param)):
            self.index = int(found[2]) + offset
            moved = f"{found[1]}[{self.index}]{param[found.end() :]}"
            message, param = message.replace(param, moved, 1), moved
        super().__init__(f"{reply.status_code} {reply.status}: {message or 'no message'}")
        self.reply = reply
        self.status_code = reply.status_code
        self.message = message
        self.type = said.get("type")
        self.param = param
        self.code = said.get("code")
        self._offset = offset

    def moved(self, offset: int) -> TaskError:
        """The same error, with the inputs counted from the call's first one."""
        return type(self)(self.reply, offset)

    def __reduce__(self) -> tuple[Any, ...]:
        # multiprocessing and Celery carry exceptions to another process.
        return type(self), (self.reply, self._offset)


class BadRequest(TaskError):
    """400: the body is wrong; `param` names the field."""


class NotServed(TaskError):
    """404: the pool serves another model, or another path."""


class Expired(TaskError, TaskTimeout):
    """408: the deadline had passed before a worker computed the task."""


class TooLarge(TaskError):
    """413: the task, its answer, or the time that it would take is over a limit."""


class Cancelled(TaskError):
    """499: on request."""


class Failed(TaskError):
    """500: the model failed on this task at each attempt."""


class OutOfMemory(TaskError):
    """507: the device had no memory for this task at each attempt."""


BY_STATUS_CODE: dict[int, type[TaskError]] = {
    400: BadRequest,
    404: NotServed,
    408: Expired,
    413: TooLarge,
    499: Cancelled,
    500: Failed,
    507: OutOfMemory,
}


def of_reply(reply: Reply) -> TaskError:
    """The error of a reply whose status is not `succeeded`."""
    return BY_STATUS_CODE.get(reply.status_code, TaskError)(reply)
