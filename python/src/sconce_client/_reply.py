"""Replies, parts of replies, and the results of calls. Pure."""

from __future__ import annotations

import email.message
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ._base import BadReply, reading


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
            raise BadReply(f"it is {self.content_type}, and not JSON: read its body or content")
        with reading("its JSON"):
            return json.loads(self.body)

    def _is_json(self) -> bool:
        return self.media_type in ("", "application/json") or self.media_type.endswith("+json")

    def _is_text(self) -> bool:
        return self.media_type.startswith("text/")

    def _decoded(self) -> str:
        with reading(self.content_type):
            parameters = email.message.Message()
            parameters["Content-Type"] = self.content_type
            return self.body.decode(parameters.get_content_charset("utf-8"))


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
        """The body of a reply that is `text/*`, or the text of a transcription; else the generated text, of the first
        choice if there are several."""
        if self._is_text():
            return self._decoded()
        body = self.json()
        text = body.get("text") if isinstance(body, dict) else None
        return text if isinstance(text, str) else _text(self._first_choice())

    @property
    def finish_reason(self) -> str | None:
        """Why generated text ends, of the first choice: `stop`, or `length` at `max_tokens`."""
        reason = self._first_choice().get("finish_reason")
        return reason if isinstance(reason, str) else None

    def _first_choice(self) -> dict[str, Any]:
        body = self.json()
        choices = body.get("choices") if isinstance(body, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise BadReply("the reply has no choices: it is no generated text")
        return choices[0]

    @property
    def usage(self) -> dict[str, Any]:
        """Counts of tokens, such as `prompt_tokens` and `completion_tokens`; empty if the body has none."""
        body = self.json()
        usage = body.get("usage") if isinstance(body, dict) else None
        return usage if isinstance(usage, dict) else {}

    @property
    def truncated(self) -> int:
        """How many texts were longer than the model takes, and were cut."""
        count = self.headers.get("truncated")
        return count if isinstance(count, int) else 0


@dataclass(frozen=True)
class Part(_Content):
    """A piece of a reply that is still being generated: a chunk of JSON, or bytes of another `content_type`."""

    stream_id: str
    """New for each run of the task."""
    seq: int
    """Counts from 0 in a run. Numbers may be missing: a part can be lost, and the final reply has all the text."""
    restarted: bool
    """The first part of a second or later run: drop the text of the parts before it."""
    headers: Mapping[str, Any]
    """The message's headers, such as `sample_rate` of a spoken sentence."""

    @property
    def chunk(self) -> dict[str, Any]:
        """One chunk as OpenAI's, such as `{"object": "chat.completion.chunk", "choices": […]}`; else raises BadReply."""
        chunk = self.json()
        if not isinstance(chunk, dict):
            raise BadReply("the part is no chunk: its JSON is no object")
        return chunk

    @property
    def text(self) -> str:
        """The text that this part adds: its body if it is `text/*`, that of all its choices, often one, or the `delta` of
        a transcription."""
        if self._is_text():
            return self._decoded()
        chunk = self.chunk
        delta = chunk.get("delta")
        with reading("the text of the part"):
            return delta if isinstance(delta, str) else "".join(map(_text, chunk.get("choices", ())))


@dataclass(frozen=True)
class Ranked:
    """A document of `rerank`."""

    index: int
    """Its place in the list of documents."""
    score: float
    """How well it answers the query."""
    document: str


class Segment(NamedTuple):
    """Some words of a recording."""

    start: float
    """Seconds from the beginning of the recording."""
    end: float
    text: str
    channel: int | None = None
    """The channel with these words, counted from 0, if each was transcribed by itself (`channels="split"`)."""


class Word(NamedTuple):
    """A word of a recording."""

    word: str
    start: float
    """Seconds from the beginning of the recording."""
    end: float


@dataclass(frozen=True)
class Transcript:
    """What is said in a recording."""

    text: str
    language: str
    """A code, such as `en`."""
    duration: float
    """Seconds of sound."""
    segments: list[Segment]
    words: list[Word]
    """Empty unless they were asked for by `words=True`."""
    recording_end: str | None = None
    """`unmarked` if nothing in the file says where its sound ends, so that a missing end cannot be noticed."""


class Label(NamedTuple):
    """A label, with its probability."""

    label: str
    score: float


@dataclass(frozen=True)
class Classified:
    """What `classify` says of a text."""

    label: str
    """The best label."""
    score: float
    """Its probability."""
    probs: list[float]
    """The probabilities of all labels, in the model's order."""
    labels: list[Label] = field(default_factory=list)
    """The `top_k` best labels, likeliest first; empty unless `top_k` is given."""


@dataclass(frozen=True)
class Entity:
    """What a model of labels of tokens finds in a text: a name, or a token by itself."""

    label: str
    """The kind of the entity; with `aggregation_strategy="none"` the label of the token."""
    score: float
    """Its probability."""
    word: str
    """What the model's tokenizer makes of its tokens; `text[start:end]` is as the text has it."""
    start: int
    """The first character of the text."""
    end: int
    """The character after the last."""
    index: int | None = None
    """The index of a token; None of an entity."""


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice of any of OpenAI's bodies for text."""
    with reading("the text of a choice"):
        message = choice.get("message") or choice.get("delta") or choice
        text = message.get("content") or message.get("text") or ""
        return text if isinstance(text, str) else ""
