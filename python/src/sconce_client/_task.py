"""Tasks, and the calls that are made of them: how inputs are packed and answers gathered. Pure."""

from __future__ import annotations

import base64
import copy
import difflib
import json
import operator
import os
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Generic, TypedDict, TypeVar, Union

from . import _wire
from ._base import BadReply, reading
from ._reply import Classified, Entity, Label, Ranked, Reply, Segment, Transcript, Word
from .errors import BadRequest, InputError, ReplyWarning, TaskError, TextsTruncated, TooLarge

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from typing_extensions import Self, TypeGuard, Unpack

QUEUE = "sconce.tasks"
CONTROL_EXCHANGE = "sconce.control"
CANCEL = "control.cancel"
PART = "reply.part"
ROWS_PER_TASK = 32
OWN_PARAMETERS = ("as_array", "rows_per_task")
"""Of the client's methods, and not of a body. A name that is nearly one of them is taken for a mistake, and not for a field of a body."""
NOBODY = "; nobody consumes from it now"
"""What a time-out adds if so."""
LOOK_WITHIN = 1.0
"""Seconds, after a time-out, to learn from the broker whether anybody consumes."""
PUBLISHED_AT_MOST = 5
"""So often a task is published that the broker never confirms: it may be what the broker closes the channel for."""

Body = Union[bytes, Mapping[str, Any]]
Scalar = Union[str, int, bool]
Texts = Union[str, Sequence[str]]
Prompt = Union[str, Sequence[Any]]
Messages = Union[str, Sequence[Mapping[str, Any]]]
File = Union[bytes, str, "os.PathLike[str]"]
Input = TypeVar("Input", str, Sequence[int], Mapping[str, Any])
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
            "headers": {**published_now(), **self.headers},
        }


def published_now() -> dict[str, Any]:
    """The header that says when a task or a cancellation is published. A cancellation ends older tasks only."""
    return {"timestamp_in_ms": time.time_ns() // 1_000_000}


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
        """The same client, over the same connection, for another queue, time-out or priority (0 to 255)."""
        if queue is not None and not isinstance(queue, str):
            raise TypeError(f"queue is {queue!r}: it is a queue's name")
        if timeout is not None and not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout is {timeout!r}: it is a number of seconds")
        if priority is not None and not (isinstance(priority, int) and 0 <= priority <= 255):
            raise ValueError(f"priority is {priority!r}: it is a whole number from 0 to 255")
        other = copy.copy(self)
        other._queue = queue or self._queue
        other._timeout = self._timeout if timeout is None else timeout
        other._priority = self._priority if priority is None else priority
        return other

    def _task(self, body: Body, **options: Unpack[TaskOptions]) -> Task:
        """Raises ValueError for what is no task, and TypeError for an unknown option."""
        for name in options.keys() - TaskOptions.__annotations__.keys():
            raise TypeError(
                f"{name} is no option of a task; fields of a request are put into its body, or into headers= if the body is bytes"
            )
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


Answer = Union[Reply, TaskError]


def _raise(_: int, error: TaskError) -> TaskError:
    raise error


@dataclass(frozen=True)
class Call(Generic[T]):
    """Tasks, to be published in order, and what makes the result of their answers, in the same order."""

    tasks: Iterable[Task]
    gather: Callable[[Sequence[Answer]], T]
    failed: Callable[[int, TaskError], TaskError] = _raise
    """Takes the number of a task and its error. Returns the error if the call goes on with it; else raises one."""

    def result(self, answers: Sequence[Answer]) -> T:
        """The result. Warns of texts that were cut, and of what workers warn of, in the name of the caller of the caller's
        caller. Raises BadReply for answers that do not hold it."""
        cut = sum(answer.truncated for answer in answers if isinstance(answer, Reply))
        if cut:
            texts = "1 text was" if cut == 1 else f"{cut} texts were"
            message = f"{texts} longer than the model takes, and cut. With truncate=False they are refused"
            warnings.warn(message, TextsTruncated, stacklevel=4)
        for answer in answers:
            if isinstance(answer, Reply) and (warning := answer.headers.get("warning")):
                warnings.warn(str(warning), ReplyWarning, stacklevel=4)
        with reading("the reply"):
            return self.gather(answers)


def embed(
    client: Defaults, inputs: Iterator[Sequence[Input | InputError]], as_array: bool, more: Mapping[str, Any]
) -> Call[Any]:
    """Packs of inputs, each a task. An InputError among them is not sent, and divides its pack."""
    each = is_each(more)
    if each and as_array:
        raise ValueError('an array has no place for an error: use errors="each" without as_array')
    fixed = fields({**more, "encoding_format": "base64"})
    places: list[range] = []
    """Of the inputs of each task, in the caller's list."""
    unsent: list[InputError] = []

    def tasks() -> Iterator[Task]:
        begin = 0
        for pack in inputs:
            for is_unsent, group in groupby(pack, lambda one: isinstance(one, InputError)):
                run: list[Any] = list(group)
                if is_unsent:
                    unsent.extend(run)
                else:
                    places.append(range(begin, begin + len(run)))
                    yield client._task({"input": run, **fixed}, url="/v1/embeddings")
                begin += len(run)

    def failed(number: int, error: TaskError) -> TaskError:
        error = error.moved(places[number].start)
        # A task whose inputs are all bad fails with the error of the first.
        if each and error.index is not None and isinstance(error, (BadRequest, TooLarge)):
            return error
        raise error

    def vectors(its: range, reply: Reply) -> list[dict[str, Any]]:
        data = _wire.in_order(reply.json())
        if len(data) != len(its):
            raise BadReply(f"the reply has {len(data)} vectors for {len(its)} inputs")
        return data

    def items(answers: Sequence[Answer]) -> list[list[float] | InputError]:
        found: dict[int, list[float] | InputError] = {error.index: error for error in unsent}
        for its, answer in zip(places, answers):
            if isinstance(answer, TaskError):
                words = f"refused, as all {len(its)} inputs of its task; of the first: {answer.message}"
                found.update((index, InputError(index, words, f"input[{index}]", answer.code)) for index in its)
                found[its.start] = InputError(its.start, answer.message, answer.param, answer.code)
                continue
            for index, item in zip(its, vectors(its, answer)):
                found[index] = _input_error(its.start, item) if "error" in item else _wire.vector(item["embedding"])
        return [found[index] for index in sorted(found)]

    def array(answers: Sequence[Answer]) -> NDArray[numpy.float32]:
        replies = ((its, answer) for its, answer in zip(places, answers) if isinstance(answer, Reply))
        return _wire.matrix([item["embedding"] for its, reply in replies for item in vectors(its, reply)])

    return Call(tasks(), array if as_array else items, failed)


def is_each(more: Mapping[str, Any]) -> bool:
    """Whether an input that is refused has an error in its place, and does not fail the call."""
    return more.get("errors") == "each"


def _input_error(offset: int, item: Mapping[str, Any]) -> InputError:
    error, own = item["error"], int(item["index"])
    index, path = own + offset, f"input[{own}]"
    message, param = (str(error.get(key) or "") for key in ("message", "param"))
    moved = f"input[{index}]"
    return InputError(index, message.replace(path, moved, 1), param.replace(path, moved, 1), error.get("code"))


def embed_sparse(
    client: Defaults, texts: Iterable[str], rows: int, more: Mapping[str, Any]
) -> Call[list[dict[int, float]]]:
    """`rows` texts a task."""
    call = _lists_of_items(client, texts, rows, "/embed_sparse", "inputs", more)
    return Call(
        call.tasks,
        lambda replies: [{item["index"]: item["value"] for item in one} for one in call.gather(replies)],
        call.failed,
    )


def classify_by(
    client: Defaults, texts: Iterable[str], labels: Sequence[str], rows: int, more: Mapping[str, Any]
) -> Call[list[list[Label]]]:
    """About `rows` pairs of a text and a label a task: a pool bounds them."""
    if not isinstance(labels, (list, tuple)):
        raise TypeError(f"labels is a list of texts, not {type(labels).__name__}")
    rows = max(1, rows // max(1, len(labels))) if rows > 0 else rows
    call = _lists_of_items(client, texts, rows, "/classify", "input", {**more, "labels": labels})
    return Call(
        call.tasks,
        lambda replies: [[Label(item["label"], item["score"]) for item in one] for one in call.gather(replies)],
        call.failed,
    )


def _lists_of_items(
    client: Defaults, texts: Iterable[str], rows: int, url: str, field: str, more: Mapping[str, Any]
) -> Call[list[list[dict[str, Any]]]]:
    """`rows` texts a task, whose reply is a list with a list for each text."""
    fixed = fields(more)
    counts: list[int] = []

    def tasks() -> Iterator[Task]:
        for pack in text_packs(texts, rows):
            counts.append(len(pack))
            yield client._task({field: pack, **fixed}, url=url)

    def failed(number: int, error: TaskError) -> TaskError:
        # Labels, which all tasks share, have numbers too.
        raise error.moved(number * rows) if (error.param or "").startswith("input") else error

    def gather(replies: Sequence[Answer]) -> list[list[dict[str, Any]]]:
        found: list[list[dict[str, Any]]] = []
        for count, reply in zip(counts, replies):
            assert isinstance(reply, Reply)
            lists = reply.json()
            if not isinstance(lists, list) or len(lists) != count:
                raise BadReply(f"the reply is no list with a list for each of {count} texts")
            found.extend(lists)
        return found

    return Call(tasks(), gather, failed)


def classify(client: Defaults, texts: Iterable[str], rows: int, more: Mapping[str, Any]) -> Call[list[Classified]]:
    """`rows` texts a task."""
    fixed = fields(more)
    tasks = (client._task({"input": pack, **fixed}, url="/classify") for pack in text_packs(texts, rows))

    def failed(number: int, error: TaskError) -> TaskError:
        raise error.moved(number * rows)

    def gather(replies: Sequence[Answer]) -> list[Classified]:
        items = (item for reply in replies if isinstance(reply, Reply) for item in _wire.in_order(reply.json()))
        return [
            Classified(
                item["label"],
                max(item["probs"]),
                item["probs"],
                [Label(label["label"], label["score"]) for label in item.get("labels", ())],
            )
            for item in items
        ]

    return Call(tasks, gather, failed)


def token_labels(client: Defaults, texts: Iterable[str], rows: int, more: Mapping[str, Any]) -> Call[list[list[Entity]]]:
    """`rows` texts a task."""
    fixed = fields(more)
    counts: list[int] = []

    def tasks() -> Iterator[Task]:
        for pack in text_packs(texts, rows):
            counts.append(len(pack))
            yield client._task({"input": pack, **fixed}, url="/token-classification")

    def failed(number: int, error: TaskError) -> TaskError:
        raise error.moved(number * rows)

    def entity(item: Mapping[str, Any]) -> Entity:
        label = item["entity_group"] if "entity_group" in item else item["entity"]
        return Entity(label, item["score"], item["word"], item["start"], item["end"], item.get("index"))

    def gather(replies: Sequence[Answer]) -> list[list[Entity]]:
        found: list[list[Entity]] = []
        for count, reply in zip(counts, replies):
            lists = reply.json() if isinstance(reply, Reply) else []
            if len(lists) != count:
                raise BadReply(f"the reply has the entities of {len(lists)} texts for {count}")
            found += [[entity(item) for item in items] for items in lists]
        return found

    return Call(tasks(), gather, failed)


def rerank(client: Defaults, query: str, documents: Iterable[str], more: Mapping[str, Any]) -> Call[list[Ranked]]:
    """One task: its order is over all documents."""
    texts = list(_texts(documents, "documents"))
    task = client._task({"query": query, "documents": texts, **fields(more)}, url="/v1/rerank")

    def gather(replies: Sequence[Answer]) -> list[Ranked]:
        [reply] = replies
        assert isinstance(reply, Reply)
        results = reply.json()["results"]
        if any(item["index"] < 0 for item in results):
            raise BadReply("the reply ranks what is no document")
        return [Ranked(item["index"], item["relevance_score"], texts[item["index"]]) for item in results]

    return Call([task], gather)


def score(client: Defaults, text_1: Texts, text_2: Texts, more: Mapping[str, Any]) -> Call[list[float]]:
    """One task."""
    first, second = (text if isinstance(text, str) else list(text) for text in (text_1, text_2))
    task = client._task({"text_1": first, "text_2": second, **fields(more)}, url="/v1/score")

    def gather(replies: Sequence[Answer]) -> list[float]:
        return [item["score"] for reply in replies if isinstance(reply, Reply) for item in _wire.in_order(reply.json())]

    return Call([task], gather)


def classify_image(
    client: Defaults, image: File, content_type: str | None, headers: Mapping[str, Any]
) -> Call[list[Label]]:
    """One task; the message's body is the file itself, or JSON with its URL."""
    given = fields(headers)
    labels = headers.get("labels")
    if labels is not None and not isinstance(labels, (list, tuple)):
        raise TypeError(f"labels is a list of texts, not {type(labels).__name__}")
    known = ("top_k", "model", "raw_scores", "labels", "hypothesis_template", "truncate")
    headers = as_headers(known_fields("classify_image", headers, known))
    if is_url(image):
        task = client._task({"image_url": image, **given}, url="/classify")
    else:
        file, name = read_file(image, "image")
        task = client._task(file, url="/classify", content_type=content_type or image_type(file, name), headers=headers)

    def gather(replies: Sequence[Answer]) -> list[Label]:
        found = (item for reply in replies if isinstance(reply, Reply) for item in reply.json())
        return [Label(item["label"], item["score"]) for item in found]

    return Call([task], gather)


def caption(client: Defaults, image: File, content_type: str | None, more: Mapping[str, Any]) -> Call[str]:
    """One task; the message's body is the file itself, or JSON with its URL."""
    known = ("prompt", "max_new_tokens", "model")
    headers = as_headers(known_fields("caption", more, known))
    if is_url(image):
        task = client._task({"image_url": image, **fields(more)}, url="/image-to-text")
    else:
        file, name = read_file(image, "image")
        content_type = content_type or image_type(file, name)
        task = client._task(file, url="/image-to-text", content_type=content_type, headers=headers)

    def gather(replies: Sequence[Answer]) -> str:
        [reply] = replies
        assert isinstance(reply, Reply)
        return str(reply.json()[0]["generated_text"])

    return Call([task], gather)


def generate_images(client: Defaults, prompt: str, more: Mapping[str, Any]) -> Call[list[bytes]]:
    """One task; the reply is JSON with PNG files in base64."""
    for name in ("stream", "response_format"):
        if more.get(name):
            raise TypeError(f"generate_images returns PNG files: for {name} there is request or stream")
    task = client._task({"prompt": prompt, **fields(more)}, url="/v1/images/generations")

    def gather(replies: Sequence[Answer]) -> list[bytes]:
        [reply] = replies
        assert isinstance(reply, Reply)
        return [base64.b64decode(image["b64_json"]) for image in reply.json()["data"]]

    return Call([task], gather)


def transcribe(
    client: Defaults, sound: File, content_type: str | None, translate: bool, words: bool, more: Mapping[str, Any]
) -> Call[Transcript]:
    """One task; the message's body is the file itself, and the parameters are headers; or JSON with the file's URL."""
    if "response_format" in more:
        raise TypeError("transcribe returns a Transcript: for another response_format there is request")
    known = ("language", "task", "prompt", "keywords", "temperature", "vad", "channels", "model")
    asked = {"response_format": "verbose_json", **({"timestamp_granularities": ["word"]} if words else {})}
    headers = {**known_fields("transcribe", more, known), **as_headers(asked)}
    url = "/v1/audio/translations" if translate else "/v1/audio/transcriptions"
    if is_url(sound):
        task = client._task({"file_url": sound, **fields(more), **asked}, url=url)
    else:
        file, name = read_file(sound, "sound")
        task = client._task(file, url=url, content_type=content_type or sound_type(file, name), headers=headers)

    def gather(replies: Sequence[Answer]) -> Transcript:
        [reply] = replies
        assert isinstance(reply, Reply)
        body = reply.json()
        segments = [Segment(one["start"], one["end"], one["text"], one.get("channel")) for one in body["segments"]]
        timed = [Word(one["word"], one["start"], one["end"]) for one in body.get("words", [])]
        end = reply.headers.get("recording_end")
        return Transcript(body["text"], body["language"], body["duration"], segments, timed, end)

    return Call([task], gather)


def speak(client: Defaults, text: str, more: Mapping[str, Any]) -> Call[bytes]:
    """One task; the reply's body is a sound file."""
    if more.get("stream"):
        raise TypeError("speak returns the whole sound; for a part of each sentence there is stream")
    if not isinstance(text, str):
        raise TypeError(f"speak takes a text, not {type(text).__name__}")
    if "input" in more:
        raise TypeError("input is the text itself: give it first")
    spoken = {} if "phonemes" in more else {"input": text}
    task = client._task({**spoken, **fields(more)}, url="/v1/audio/speech")

    def gather(replies: Sequence[Answer]) -> bytes:
        [reply] = replies
        assert isinstance(reply, Reply)
        return reply.body

    return Call([task], gather)


def voices(client: Defaults) -> Call[list[str]]:
    """One task without parameters."""

    def gather(replies: Sequence[Answer]) -> list[str]:
        [reply] = replies
        assert isinstance(reply, Reply)
        return [voice["id"] for voice in reply.json()["voices"]]

    return Call([client._task({}, url="/v1/audio/voices")], gather)


def complete(client: Defaults, prompt: Prompt, more: Mapping[str, Any]) -> Task:
    """A task for `/v1/completions`."""
    return client._task({"prompt": prompt, **fields(more)}, url="/v1/completions")


def chat(client: Defaults, messages: Messages, more: Mapping[str, Any]) -> Task:
    """A task for `/v1/chat/completions`."""
    spoken = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return client._task({"messages": spoken, **fields(more)}, url="/v1/chat/completions")


def is_url(file: File) -> TypeGuard[str]:
    """Whether this is not the path of a file, but a URL, from which a worker fetches it."""
    return isinstance(file, str) and "://" in file


def read_file(file: File, argument: str) -> tuple[bytes, str]:
    """A file's bytes, and its name for errors: its path, or else the argument's name."""
    if isinstance(file, bytes):
        return file, argument
    if not isinstance(file, (str, os.PathLike)):
        raise TypeError(f"{argument} is a path, bytes or a URL, not {type(file).__name__}")
    return Path(file).read_bytes(), str(file)


def image_type(image: bytes, name: str) -> str:
    """The content type of an image file, by its first bytes. Raises ValueError for what sconce does not read."""
    if image.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "image/webp"
    raise ValueError(_unknown(image, name, "JPEG, PNG or WebP"))


def sound_type(sound: bytes, name: str) -> str:
    """The content type of a recording, by its first bytes. Raises ValueError for what sconce does not read."""
    if sound[:4] == b"RIFF" and sound[8:12] == b"WAVE":
        return "audio/wav"
    if sound.startswith(b"fLaC"):
        return "audio/flac"
    if sound.startswith(b"OggS"):
        return "audio/ogg"
    if sound.startswith(b"ID3") or (sound[:1] == b"\xff" and sound[1:2] >= b"\xe0"):
        return "audio/mpeg"
    raise ValueError(_unknown(sound, name, "WAV, FLAC, Ogg or MP3"))


def _unknown(file: bytes, name: str, known: str) -> str:
    begins = f"it begins with {file[:8]!r}" if file else "it is empty"
    return f"{name} is no {known}: {begins}"


def fields(more: Mapping[str, Any]) -> dict[str, Any]:
    """Further fields of a body: without those that are None. Raises TypeError for an option of the client."""
    for name in ("queue", "timeout", "priority"):
        if name in more:
            raise TypeError(f"{name} is no field of a body: use with_options({name}=…)")
    for name in more:
        close = difflib.get_close_matches(name, OWN_PARAMETERS, 1, 0.8)
        if close and name not in OWN_PARAMETERS:
            raise TypeError(f"no parameter {name!r}; did you mean {close[0]}?")
    return {name: value for name, value in more.items() if value is not None}


def known_fields(method: str, more: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """As `fields`, as headers. Workers ignore headers that they do not know, so an unknown name is a TypeError here."""
    given = fields(more)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {close[0]}?" if close else f"; it takes {', '.join(known)}"
            raise TypeError(f"{method} has no parameter {name!r}{meant}")
    return as_headers(given)


def as_headers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields as headers; what is not a text, a whole number or a boolean becomes JSON."""
    # pika writes no floats.
    return {
        name: json.dumps(value) if isinstance(value, (Mapping, list, tuple, float)) else value
        for name, value in given.items()
    }


def text_packs(texts: Iterable[str], rows: int) -> Iterator[list[str]]:
    """Texts, `rows` at a time. Raises TypeError for what is no text."""
    return _packs(_texts(texts, "texts"), rows)


def token_packs(inputs: Iterable[Sequence[int]], rows: int) -> Iterator[list[Sequence[int]]]:
    """Lists of token ids, `rows` at a time. Raises TypeError for what is no list of integers."""
    return _packs(_ids(inputs), rows)


def image_packs(images: Iterable[File], rows: int, each: bool) -> Iterator[list[Mapping[str, Any] | InputError]]:
    """Images as inputs among texts, `rows` at a time. A file becomes a data URL. With `each`, one that cannot be read, or is
    no image, becomes an InputError."""
    if isinstance(images, (str, bytes, Path)):
        raise TypeError("images is a list of images, not one image")
    return _packs((_image_input(image, index, each) for index, image in enumerate(images)), rows)


def _image_input(image: File, index: int, each: bool) -> Mapping[str, Any] | InputError:
    if is_url(image):
        return {"image_url": {"url": image}}
    try:
        file, name = read_file(image, f"images[{index}]")
        kind = image_type(file, name)
    except (OSError, ValueError) as error:
        if not each:
            raise
        return InputError(index, str(error), f"input[{index}]", "invalid_value")
    return {"image_url": {"url": f"data:{kind};base64,{base64.b64encode(file).decode()}"}}


def _texts(texts: Iterable[str], name: str) -> Iterator[str]:
    if isinstance(texts, str):
        raise TypeError(f"{name} is a list of texts, not one text")

    def checked() -> Iterator[str]:
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                hint = "; for token ids there is embed_tokens" if name == "texts" else ""
                raise TypeError(f"{name}[{index}] is no text, but {type(text).__name__}{hint}")
            yield text

    return checked()


def _ids(inputs: Iterable[Sequence[int]]) -> Iterator[list[int]]:
    for index, ids in enumerate(inputs):
        if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
            raise TypeError(f"inputs[{index}] is no list of token ids, but {type(ids).__name__}")
        try:
            yield [operator.index(token) for token in ids]  # numpy's integers, too
        except TypeError:
            raise TypeError(f"inputs[{index}] has what is no token id: {ids!r}") from None


def _packs(rest: Iterator[T], rows: int) -> Iterator[list[T]]:
    if rows < 1:
        raise ValueError(f"rows_per_task is {rows}: it is at least 1")
    return iter(lambda: list(islice(rest, rows)), [])
