"""Replies and their parts, and what the bodies mean. Pure."""

from __future__ import annotations

import array
import base64
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from . import errors

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Vector = Union[list[float], NDArray[numpy.float32]]
else:
    Vector = Any


@dataclass(frozen=True)
class Reply:
    """The final answer to a task. `body` is as it came: OpenAI's JSON, or bytes of another `content_type`."""

    body: bytes = field(repr=False)
    content_type: str
    correlation_id: str
    status: str
    status_code: int
    headers: Mapping[str, Any]
    """All headers: `worker`, `device`, `model`, `queue_us`, `compute_us`, `truncated`, `seed` and others."""

    def json(self) -> Any:
        """The body, if it is JSON. The types of the `openai` package read it: `ChatCompletion.model_validate(…)`."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The generated text: that of the first choice, if there are several."""
        return _text(self.json()["choices"][0])


@dataclass(frozen=True)
class Part:
    """A piece of a reply that is still being generated."""

    chunk: dict[str, Any]
    """One chunk as OpenAI's, such as `{"object": "chat.completion.chunk", "choices": […]}`."""
    stream_id: str
    """New for each run of the task."""
    seq: int
    """Counts from 0 in a run. Numbers may be missing: a part can be lost, and the final reply has all the text."""
    restarted: bool
    """The first part of a second or later run: drop the text of the parts before it."""

    @property
    def text(self) -> str:
        """The text that this part adds, of all its choices; often one."""
        return "".join(_text(choice) for choice in self.chunk.get("choices", ()))


@dataclass(frozen=True)
class Ranked:
    """A document of `rerank`: its place in the request, and how well it answers the query."""

    index: int
    score: float


class Label(NamedTuple):
    """A label, with its probability."""

    label: str
    score: float


class Classified(NamedTuple):
    """The best label of a text, and the probabilities of all labels, in the model's order."""

    label: str
    probs: list[float]


class Runs:
    """Follows the parts of one task over its runs, and drops those that are stale or come twice."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._current: str | None = None
        self._seq = -1

    def part(self, headers: Mapping[str, Any], body: bytes) -> Part | None:
        """The part, or none if it is of an earlier run or was seen before."""
        stream_id, seq = str(headers.get("stream_id")), int(headers.get("seq", 0))
        restarted = False
        if stream_id != self._current:
            if stream_id in self._seen:
                return None
            restarted = self._current is not None
            self._seen.add(stream_id)
            self._current, self._seq = stream_id, -1
        if seq <= self._seq:
            return None
        self._seq = seq
        return Part(json.loads(body), stream_id, seq, restarted)


def reply(body: bytes, content_type: str | None, correlation_id: str, headers: Mapping[str, Any] | None) -> Reply:
    """Reads a message of the type `reply`. Raises the error that it carries."""
    headers = dict(headers or {})
    try:
        status, status_code = str(headers["status"]), int(headers["status_code"])
    except (KeyError, TypeError, ValueError):
        raise errors.BadReply(f"a reply without a status: headers {headers}") from None
    read = Reply(body, content_type or "application/json", correlation_id, status, status_code, headers)
    if status != "succeeded":
        raise errors.of_reply(read)
    return read


def vector(embedding: str | list[float]) -> Vector:
    """An embedding as it stands in a body: base64 of little-endian f32, or a list of numbers.

    Gives a numpy array of float32, of shape (width,), or a list of floats where numpy is not installed.
    """
    raw = base64.b64decode(embedding) if isinstance(embedding, str) else None
    try:
        import numpy
    except ImportError:
        if raw is None:
            return list(embedding)  # type: ignore[arg-type]
        floats = array.array("f", raw)
        if sys.byteorder == "big":
            floats.byteswap()
        return floats.tolist()
    if raw is None:
        return numpy.asarray(embedding, dtype=numpy.float32)
    return numpy.frombuffer(raw, dtype="<f4").astype(numpy.float32)


def in_order(body: Any) -> list[dict[str, Any]]:
    """The `data` of a body, in the order of the inputs."""
    data: list[dict[str, Any]] = body["data"]
    return sorted(data, key=lambda item: int(item["index"]))


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice of any of OpenAI's bodies for text."""
    message = choice.get("message") or choice.get("delta") or choice
    return message.get("content") or message.get("text") or ""
