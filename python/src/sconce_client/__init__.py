"""Client of sconce: model inference behind RabbitMQ.

`Client` is over pika (`pip install "sconce-client[pika]"`), `AsyncClient` over aio-pika (`…[aio-pika]`). Both
have the same methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._reply import Classified, Entity, Label, Part, Ranked, Reply, Segment, Transcript, Word
from .errors import (
    BadReply,
    BadRequest,
    Cancelled,
    ClientClosed,
    ConnectionFailed,
    Expired,
    Failed,
    InputError,
    NoSuchQueue,
    NotAccepted,
    NotServed,
    OutOfMemory,
    ReplyWarning,
    SconceError,
    TaskError,
    TaskTimeout,
    TextsTruncated,
    TooLarge,
)

if TYPE_CHECKING:
    from .aio import AsyncClient, AsyncStream
    from .sync import Client, Stream

__version__ = "0.1.0"

_WHERE = {"Client": "sync", "Stream": "sync", "AsyncClient": "aio", "AsyncStream": "aio"}

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BadReply",
    "BadRequest",
    "Cancelled",
    "Classified",
    "Client",
    "ClientClosed",
    "ConnectionFailed",
    "Entity",
    "Expired",
    "Failed",
    "InputError",
    "Label",
    "NoSuchQueue",
    "NotAccepted",
    "NotServed",
    "OutOfMemory",
    "Part",
    "Ranked",
    "Reply",
    "ReplyWarning",
    "SconceError",
    "Segment",
    "Stream",
    "TaskError",
    "TaskTimeout",
    "TextsTruncated",
    "TooLarge",
    "Transcript",
    "Word",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Lazily, because each client needs a library that the user of the other one may not have.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
