"""Replies and their parts, and what their bodies mean. Pure."""

from __future__ import annotations

import array
import base64
import email.message
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

JSON = "application/json"


@dataclass(frozen=True)
class _Content:
    """What a reply and its parts have in common: a media type and bytes."""

    body: bytes = field(repr=False)
    """As it came: OpenAI's JSON, or the bytes of another `content_type`, such as a sound."""
    content_type: str

    @property
    def media_type(self) -> str:
        """The content type without its parameters, in small letters, such as `audio/wav`."""
        return self.content_type.partition(";")[0].strip().lower()

    @property
    def content(self) -> Any:
        """The body by its content type: what the JSON means, the str of `text/*`, or else the bytes."""
        if self._is_json():
            return self.json()
        return self._decoded() if self._is_text() else self.body

    def json(self) -> Any:
        """The body, if it is JSON; else raises BadReply."""
        if not self._is_json():
            raise errors.BadReply(f"it is {self.content_type}, and not JSON: read its body or content")
        return json.loads(self.body)

    def _is_json(self) -> bool:
        return self.media_type in ("", "application/json") or self.media_type.endswith("+json")

    def _is_text(self) -> bool:
        return self.media_type.startswith("text/")

    def _decoded(self) -> str:
        parameters = email.message.Message()
        parameters["Content-Type"] = self.content_type
        charset = parameters.get_content_charset("utf-8")
        try:
            return self.body.decode(charset)
        except (LookupError, UnicodeDecodeError) as error:
            raise errors.BadReply(f"it is {self.content_type}, and cannot be decoded: {error}") from None


@dataclass(frozen=True)
class Reply(_Content):
    """The final answer to a task: `body`, a media type (`content_type`), and headers.

    `json()` reads OpenAI's bodies; the types of the `openai` package do too: `ChatCompletion.model_validate(…)`.
    """

    correlation_id: str
    status: str
    status_code: int
    headers: Mapping[str, Any]
    """All headers: `worker`, `device`, `model`, `queue_us`, `compute_us`, `truncated`, `seed` and others."""

    @property
    def text(self) -> str:
        """The body of a reply that is `text/*`; else the generated text, of the first choice if there are several."""
        return self._decoded() if self._is_text() else _text(self.json()["choices"][0])


@dataclass(frozen=True)
class Part(_Content):
    """A piece of a reply that is still being generated: a chunk of JSON, or bytes of another `content_type`."""

    stream_id: str
    """New for each run of the task."""
    seq: int
    """Counts from 0 in a run. Numbers may be missing: a part can be lost, and the final reply has all the text."""
    restarted: bool
    """The first part of a second or later run: drop the text of the parts before it."""

    @property
    def chunk(self) -> dict[str, Any]:
        """One chunk as OpenAI's, such as `{"object": "chat.completion.chunk", "choices": […]}`; else raises BadReply."""
        chunk: dict[str, Any] = self.json()
        return chunk

    @property
    def text(self) -> str:
        """The text that this part adds: its body if it is `text/*`, or that of all its choices; often one."""
        return self._decoded() if self._is_text() else "".join(map(_text, self.chunk.get("choices", ())))


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

    def part(self, headers: Mapping[str, Any], body: bytes, content_type: str | None) -> Part | None:
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
        return Part(body, content_type or JSON, stream_id, seq, restarted)


def reply(body: bytes, content_type: str | None, correlation_id: str, headers: Mapping[str, Any] | None) -> Reply:
    """Reads a message of the type `reply`. Raises the error that it carries."""
    headers = dict(headers or {})
    try:
        status, status_code = str(headers["status"]), int(headers["status_code"])
    except (KeyError, TypeError, ValueError):
        raise errors.BadReply(f"a reply without a status: headers {headers}") from None
    read = Reply(body, content_type or JSON, correlation_id, status, status_code, headers)
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
