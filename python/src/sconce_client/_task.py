"""Tasks, and the calls that are made of them: how inputs are packed and answers gathered. Pure."""

from __future__ import annotations

import copy
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Callable, Generic, TypedDict, TypeVar, Union

from . import _reply
from ._reply import Classified, Label, Ranked, Reply, Vector

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

QUEUE = "sconce.tasks"
CONTROL_EXCHANGE = "sconce.control"
CANCEL = "control.cancel"
PART = "reply.part"
ROWS_PER_TASK = 32
PUBLISHED_AT_MOST = 5
"""So often a task is published that the broker never confirms: it may be what the broker closes the channel for."""

Body = Union[bytes, Mapping[str, Any]]
Scalar = Union[str, int, bool]
Texts = Union[str, Sequence[str]]
Prompt = Union[str, Sequence[Any]]
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """One message for a task queue."""

    queue: str
    body: bytes = field(repr=False)
    content_type: str = "application/json"
    headers: Mapping[str, Scalar] = field(default_factory=dict)
    priority: int | None = None
    timeout: float | None = None
    """Seconds from now until the client gives up; none: never."""
    expiration: float | None = None
    """Seconds from now until nobody shall compute it."""
    correlation_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    made: float = field(default_factory=time.monotonic, repr=False)

    def remaining(self) -> float | None:
        """Seconds until the time-out; none: no time-out."""
        return None if self.timeout is None else max(0.0, self.made + self.timeout - time.monotonic())

    def expires_in_ms(self) -> int | None:
        """Milliseconds until nobody shall compute it any more, at least one."""
        if self.expiration is None:
            return None
        return max(1, round((self.made + self.expiration - time.monotonic()) * 1000))

    def properties(self, reply_to: str) -> dict[str, Any]:
        """The message's properties, but for `expiration`, whose unit differs between the libraries."""
        return {
            "content_type": self.content_type,
            "correlation_id": self.correlation_id,
            "message_id": self.correlation_id,
            "reply_to": reply_to,
            "delivery_mode": 2,
            "priority": self.priority,
            "headers": {"timestamp_in_ms": time.time_ns() // 1_000_000, **self.headers},
        }


class TaskOptions(TypedDict, total=False):
    """What can be said of any task, beside its body."""

    queue: str
    """The task queue; else the client's."""
    url: str
    """The path that is meant, where a pool answers several, such as `/v1/score`."""
    content_type: str
    """Of a body of bytes, such as `image/png` or `audio/wav`; else JSON."""
    headers: Mapping[str, Scalar]
    """Flat headers: the parameters of a body that is no JSON, `traceparent`, and others."""
    timeout: float
    """Seconds until the client gives up; else the client's. The message's `expiration` is the same."""
    priority: int
    expiration: float
    """Seconds after which nobody shall compute the task, if that is not `timeout`."""
    correlation_id: str
    """One of your own, to cancel the task by; no other task on its way has the same."""


class Defaults:
    """What both clients have in common: how a task is made."""

    _queue: str
    _timeout: float | None
    _priority: int | None = None

    def with_options(
        self, *, queue: str | None = None, timeout: float | None = None, priority: int | None = None
    ) -> Self:
        """The same client, over the same connection, for another queue, time-out or priority."""
        other = copy.copy(self)
        other._queue = queue or self._queue
        other._timeout = self._timeout if timeout is None else timeout
        other._priority = self._priority if priority is None else priority
        return other

    def _task(self, body: Body, **options: Unpack[TaskOptions]) -> Task:
        """Raises ValueError for what is no task."""
        raw = body if isinstance(body, bytes) else json.dumps(body, allow_nan=False).encode()
        if raw.strip() == b"null":
            raise ValueError("a body of JSON null is a sentinel, which stops a worker")
        timeout = options.get("timeout", self._timeout)
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout is {timeout}: it is more than 0 seconds")
        url = {"url": options["url"]} if "url" in options else {}
        return Task(
            options.get("queue", self._queue),
            raw,
            options.get("content_type", "application/json"),
            {**url, **options.get("headers", {})},
            options.get("priority", self._priority),
            timeout,
            options.get("expiration", timeout),
            options.get("correlation_id") or uuid.uuid4().hex,
        )


@dataclass(frozen=True)
class Call(Generic[T]):
    """Tasks, to be published in order, and what makes the answer of their replies, in the same order."""

    tasks: Iterable[Task]
    gather: Callable[[Sequence[Reply]], T]


def urls(url: str | None) -> list[str]:
    """The broker's addresses; several stand with commas. None: those of `AMQP_URL`, else the local broker's."""
    text = url or os.environ.get("AMQP_URL") or "amqp://guest:guest@127.0.0.1:5672/%2f"
    return [part.strip() for part in text.split(",") if part.strip()]


def embed(client: Defaults, texts: Iterable[str], rows: int, more: Mapping[str, Any]) -> Call[list[Vector]]:
    """`rows` texts a task."""
    fixed = fields({"encoding_format": "base64", **more})
    tasks = (client._task({"input": pack, **fixed}, url="/v1/embeddings") for pack in _packs(texts, rows))

    def gather(replies: Sequence[Reply]) -> list[Vector]:
        return [_reply.vector(item["embedding"]) for reply in replies for item in _reply.in_order(reply.json())]

    return Call(tasks, gather)


def classify(client: Defaults, texts: Iterable[str], rows: int, more: Mapping[str, Any]) -> Call[list[Classified]]:
    """`rows` texts a task."""
    fixed = fields(more)
    tasks = (client._task({"input": pack, **fixed}, url="/classify") for pack in _packs(texts, rows))

    def gather(replies: Sequence[Reply]) -> list[Classified]:
        items = (item for reply in replies for item in _reply.in_order(reply.json()))
        return [Classified(item["label"], item["probs"]) for item in items]

    return Call(tasks, gather)


def rerank(client: Defaults, query: str, documents: Sequence[str], more: Mapping[str, Any]) -> Call[list[Ranked]]:
    """One task: its order is over all documents."""
    task = client._task({"query": query, "documents": list(documents), **fields(more)}, url="/v1/rerank")

    def gather(replies: Sequence[Reply]) -> list[Ranked]:
        return [Ranked(item["index"], item["relevance_score"]) for item in replies[0].json()["results"]]

    return Call([task], gather)


def score(client: Defaults, text_1: Texts, text_2: Texts, more: Mapping[str, Any]) -> Call[list[float]]:
    """One task."""
    first, second = (text if isinstance(text, str) else list(text) for text in (text_1, text_2))
    task = client._task({"text_1": first, "text_2": second, **fields(more)}, url="/v1/score")

    def gather(replies: Sequence[Reply]) -> list[float]:
        return [item["score"] for item in _reply.in_order(replies[0].json())]

    return Call([task], gather)


def classify_image(
    client: Defaults, image: bytes, content_type: str | None, headers: Mapping[str, Any]
) -> Call[list[Label]]:
    """One task; the message's body is the file itself."""
    task = client._task(image, content_type=content_type or image_type(image), headers=fields(headers))

    def gather(replies: Sequence[Reply]) -> list[Label]:
        return [Label(item["label"], item["score"]) for item in replies[0].json()]

    return Call([task], gather)


def complete(client: Defaults, prompt: Prompt, more: Mapping[str, Any]) -> Task:
    """A task for `/v1/completions`."""
    return client._task({"prompt": prompt, **fields(more)}, url="/v1/completions")


def chat(client: Defaults, messages: Messages, more: Mapping[str, Any]) -> Task:
    """A task for `/v1/chat/completions`."""
    return client._task({"messages": list(messages), **fields(more)}, url="/v1/chat/completions")


def image_type(image: bytes) -> str:
    """The content type of an image file, by its first bytes. Raises ValueError for what sconce does not read."""
    if image.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "image/webp"
    raise ValueError("neither JPEG, PNG nor WebP: pass content_type")


def fields(more: Mapping[str, Any]) -> dict[str, Any]:
    """Further fields of a body: without those that are None. Raises TypeError for an option of the client."""
    for name in ("queue", "timeout", "priority"):
        if name in more:
            raise TypeError(f"{name} is no field of a body: use with_options({name}=…)")
    return {name: value for name, value in more.items() if value is not None}


def _packs(texts: Iterable[str], rows: int) -> Iterator[list[str]]:
    if isinstance(texts, str):
        raise TypeError("texts is a list of texts, not one text")
    if rows < 1:
        raise ValueError(f"rows_per_task is {rows}: it is at least 1")
    rest = iter(texts)
    return iter(lambda: list(islice(rest, rows)), [])
