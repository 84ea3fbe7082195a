"""Changed replies, without a broker: whatever they hold, reading them gives a result or an error of the client's own."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import pickle
import random
import struct
from collections.abc import Sequence
from datetime import datetime, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, Callable

import aio_pika
import pamqp.frame
import pika
import pytest
from aiormq.abc import DeliveredMessage
from aiormq.connection import FrameReceiver
from pamqp.commands import Basic
from test_bodies import PNG, RAW
from test_strange import BRACKETS, GOOD, TABLES, Raw, nested

from sconce_client import BadReply, Part, Reply, SconceError, TaskError, _frames, _task, _wire, aio, sync

STRANGE: list[Any] = [
    None, True, -1, 0, 2**63, 10**4000, 1e308, math.nan, math.inf, -math.inf, "", "=", "input[3]", "input[" + "9" * 5000 + "]",
    "\ud800", "\x00", "é" * 40, [], {}, [[]], [None], {"": None}, {"content": [1]}, {"message": "a"}, [{"index": -1}],
]  # fmt: skip
BAD_BODIES = [
    b"",
    b"\xff",
    b"{",
    b"[1,",
    BRACKETS,
    b'{"a":' * 50_000,
    b"9" * 5000,
    b"NaN",
    b"null",
    b"[" * 900 + b"]" * 900,
]
MEDIA = [
    None, "", "text/plain", "text/plain; charset=\x00", "text/plain; charset=undefined", "text/plain; charset*0*=x''%ff",
    "application/json; charset=utf-16", "audio/wav", b"\xff", "text/x; charset=idna", "a" * 255, "text/\n; charset=hex",
]  # fmt: skip
HEADERS = {
    "status": "succeeded",
    "status_code": 200,
    "truncated": 1,
    "warning": "w",
    "stream_id": "s",
    "seq": 0,
    "worker": "a",
}
STRANGE_HEADERS: list[Any] = [
    *STRANGE[:-1], b"\xff", bytearray(b"a"), Decimal("NaN"), Decimal(7), datetime.now(timezone.utc), pika.compat.long(400), 404,
    "400", "failed", "9" * 5000,
]  # fmt: skip


def defaults() -> _task.Defaults:
    client = _task.Defaults()
    client._queue, client._timeout = "q", 1.0
    return client


def embed(errors: str | None, as_array: bool) -> Callable[[_task.Defaults], _task.Call[Any]]:
    return lambda client: _task.embed(client, _task.text_packs(["a", "b"], 2), as_array, {"errors": errors})


TWO: dict[str, Any] = {
    "data": [{"index": 1, "embedding": RAW}, {"index": 0, "embedding": RAW}],
    "usage": {"prompt_tokens": 2},
}
REFUSED = {"index": 0, "error": {"message": "input[0] no", "param": "input[0]", "code": "c"}}
CALLS: list[tuple[Callable[[_task.Defaults], _task.Call[Any]], Any]] = [
    (embed(None, False), TWO),
    (embed(None, True), TWO),
    (embed("each", False), {"data": [REFUSED, TWO["data"][0]]}),
    (
        lambda client: _task.classify(client, ["a"], 8, {}),
        {"data": [{"index": 0, "label": "l", "probs": [0.5, 0.5], "labels": [{"label": "l", "score": 0.5}]}]},
    ),
    (lambda client: _task.classify_by(client, ["a"], ["x"], 8, {}), [[{"label": "x", "score": 0.5}]]),
    (lambda client: _task.embed_sparse(client, ["a"], 8, {}), [[{"index": 7, "value": 0.5}]]),
    (
        lambda client: _task.token_labels(client, ["a"], 8, {}),
        [[{"entity_group": "PER", "score": 0.5, "word": "a", "start": 0, "end": 1}]],
    ),
    (
        lambda client: _task.rerank(client, "q", ["a", "b"], {}),
        {"results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]},
    ),
    (lambda client: _task.score(client, "a", "b", {}), {"data": [{"index": 0, "score": 0.5}]}),
    (lambda client: _task.classify_image(client, PNG, None, {}), [{"label": "cat", "score": 0.9}]),
    (lambda client: _task.caption(client, PNG, None, {}), [{"generated_text": "a cat"}]),
    (lambda client: _task.generate_images(client, "a cat", {}), {"data": [{"b64_json": RAW}]}),
    (
        lambda client: _task.transcribe(client, b"fLaC", None, False, True, {}),
        {
            "text": "a", "language": "en", "duration": 1.0, "segments": [{"start": 0, "end": 1, "text": "a", "channel": 1}],
            "words": [{"word": "a", "start": 0, "end": 1}],
        },
    ),
    (lambda client: _task.speak(client, "a", {}), {}),
    (lambda client: _task.voices(client), {"voices": [{"id": "a"}]}),
    (
        lambda client: _task.speak(client, "a", {}),
        {"choices": [{"message": {"content": "a"}, "delta": {"content": "a"}, "finish_reason": "stop"}], "usage": {"n": 1}},
    ),
    (
        lambda client: embed("each", False)(client),
        {"error": {"message": "input[1] no", "param": "input[1]", "code": "c", "type": "t"}},
    ),
]  # fmt: skip
"""Each with a body that answers it, or that is read by a Reply's own properties, or that is an error."""


def changed(random: random.Random, value: Any) -> Any:
    """The value, with one thing in it in another's place, or missing."""
    if isinstance(value, (dict, list)) and value and random.random() < 0.8:
        key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        copy = value.copy()
        if random.random() < 0.2:
            del copy[key]
        else:
            copy[key] = changed(random, value[key])
        return copy
    return random.choice(STRANGE)


def body(random: random.Random, good: Any) -> bytes:
    if random.random() < 0.1:
        return random.choice(BAD_BODIES)
    for _ in range(random.randrange(3)):
        good = changed(random, good)
    raw = bytearray(json.dumps(good).encode())
    if random.random() < 0.2:
        raw[random.randrange(len(raw))] = random.randrange(256)
    return bytes(raw)


def headers(random: random.Random) -> dict[Any, Any]:
    made: dict[Any, Any] = dict(HEADERS)
    for _ in range(random.choice([0, 0, 1, 2])):
        made[random.choice([*HEADERS, b"\xff", "other"])] = random.choice(STRANGE_HEADERS)
    if random.random() < 0.3:
        made.update(status="failed", status_code=random.choice([400, 413, 500, 7]))
    if random.random() < 0.2:
        del made[random.choice(list(made))]
    return made


def read(it: Reply | Part) -> None:
    """All that a user may read."""
    for name in ("media_type", "content", "text", "finish_reason", "usage", "truncated", "chunk", "json"):
        if not hasattr(type(it), name):
            continue
        try:
            found = getattr(it, name)
            if callable(found):
                found()
        except SconceError as error:
            assert str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_changed_bodies_and_headers(number: int) -> None:
    chance = random.Random(number)
    make, good = CALLS[number]
    kinds = set()
    for _ in range(800):
        call = make(defaults())
        assert len(list(call.tasks)) == 1
        raw, media, its = body(chance, good), chance.choice([None, None, None, *MEDIA]), headers(chance)
        answer: Reply | TaskError
        try:
            answer = _wire.reply(raw, media, "c", its)  # type: ignore[arg-type] # pika's bytes, too
            read(answer)
            result = call.result([answer])
        except TaskError as error:
            try:
                assert pickle.loads(pickle.dumps(error)).message == error.message
                result = call.result([call.failed(0, error)])
            except SconceError as other:
                result = other
        except SconceError as error:
            result = error
        kinds.add(type(result))
        try:
            part = _wire.Runs().part(its, raw, media)  # type: ignore[arg-type]
            if part is not None:
                read(part)
        except SconceError as error:
            kinds.add(type(error))
    assert len(kinds) > 1, "nothing was changed, or all was refused"


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, 1, len(payload)) + payload + b"\xce"


def header(properties: bytes) -> bytes:
    return frame(2, struct.pack(">HHQ", 60, 0, 2) + properties)


def delivery(exchange: bytes = b"", routing_key: bytes = b"q") -> bytes:
    names = b"".join(bytes([len(name)]) + name for name in (exchange, routing_key))
    return frame(1, b"\x00\x3c\x00\x3c" + b"\x03tag" + struct.pack(">QB", 7, 0) + names)


ALL_KINDS = GOOD + b"".join(
    b"\x01" + bytes([0x61 + number]) + value
    for number, value in enumerate(
        [
            b"t\x01", b"b\xff", b"s\xff\xff", b"I\xff\xff\xff\xff", b"l" + b"\xff" * 8, b"f\x00\x00\x00\x00", b"d" + b"\x00" * 8,
            b"D\x02\x00\x00\x00\x07", b"S\x00\x00\x00\x02ab", b"x\x00\x00\x00\x01a", b"V", b"T" + struct.pack(">Q", 1_700_000_000),
            nested(3), b"F\x00\x00\x00\x03\x01aV",
        ]
    )
)  # fmt: skip
"""A table with a value of each type."""
PROPERTIES = [
    Raw("one", ALL_KINDS, 1 << 12 | 1 << 11, b"\x02\x05").raw,
    *(Raw("one", table).raw for table in TABLES.values()),
    Raw("one", GOOD + b"\x01ad" + struct.pack(">d", math.nan)).raw,
    Raw("one", GOOD + b"\x01ad" + struct.pack(">d", math.inf)).raw,
    Raw("one", GOOD, 1 << 12, b"\x07").raw,
    *(Raw("one", GOOD + b"\x01a" + nested(levels)).raw for levels in range(100, 1000, 7)),
    Raw(None, GOOD, 1 << 10 | 1 << 8 | 1 << 6 | 1 << 5, b"\x03one\x0260" + struct.pack(">Q", 2**62) + b"\x05reply").raw,
]  # fmt: skip


def strange_frames(chance: random.Random) -> list[tuple[bytes, bytes, bytes]]:
    """Messages as frames: a delivery, a header and a body, the first with nothing changed."""
    made = [(delivery(), header(PROPERTIES[0]), frame(3, b"{}"))]
    made += [(delivery(), header(properties), frame(3, b"{}")) for properties in PROPERTIES]
    for _ in range(3000):
        changed = bytearray(chance.choice([PROPERTIES[0], PROPERTIES[1], PROPERTIES[-1]]))
        for _ in range(chance.choice([1, 1, 2, 8])):
            at = chance.randrange(len(changed))
            changed[at] = chance.choice([0, 1, 0x41, 0x46, 0x54, 0x7F, 0xFF, chance.randrange(256)])
        if chance.random() < 0.1:
            del changed[chance.randrange(2, len(changed)) :]
        names = [bytes(chance.randrange(256) for _ in range(chance.randrange(4))) for _ in range(2)]
        made.append((delivery(*names), header(bytes(changed)), frame(3, b"{}")))
    return made


def check(answers: Sequence[object]) -> None:
    """What the task `one` was answered with: at least one reply, and else errors of this client."""
    assert isinstance(answers[0], Reply), answers[0]
    assert all(isinstance(answer, (Reply, SconceError, type(None))) for answer in answers)
    kinds = [type(answer).__name__ for answer in answers]
    assert kinds.count("Reply") > 100 and kinds.count("BadReply") > 100, kinds


def test_changed_frames_under_pika() -> None:
    chance, answers = random.Random(1), []
    link: Any = object.__new__(sync._Link)
    link._named_queue = None
    frames = _frames.Frames(pika.frame.decode_frame)
    for message in strange_frames(chance):
        stream, given = b"".join(message), b""
        while stream:
            size = chance.choice([1, 5, 100, len(stream)])
            given, stream = given + frames.feed(stream[:size]), stream[size:]
        seen: list[Any] = []
        while given:
            consumed, decoded = pika.frame.decode_frame(given)
            seen.append(decoded)
            given = given[consumed:]
        deliver, content, body = seen
        assert deliver.method.delivery_tag == 7 and content.body_size == 2 and body.fragment == b"{}"
        waiting = sync._Waiting(_task.Task("q", b"", correlation_id="one"), None)
        link._waiting = {"one": waiting}
        link._on_message(None, deliver.method, content.properties, b"{}")
        answers.append((waiting.future.exception() or waiting.future.result()) if waiting.future.done() else None)
    check(answers)


def test_changed_frames_under_aiormq() -> None:
    async def received(message: tuple[bytes, bytes, bytes]) -> object:
        source = asyncio.StreamReader()
        source.feed_data(b"".join(message))
        source.feed_eof()
        receiver = FrameReceiver(aio._Reader(source))
        (_, _, deliver), (_, _, content), (_, _, body) = [await receiver.get_frame() for _ in message]
        assert receiver.reader.at_eof()
        assert isinstance(deliver, Basic.Deliver) and isinstance(content, pamqp.header.ContentHeader)
        assert deliver.delivery_tag == 7 and content.body_size == 2 and isinstance(body, pamqp.body.ContentBody)
        channel: Any = SimpleNamespace()
        link: Any = object.__new__(aio._Link)
        link._named_queue = None
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        link._waiting = {"one": aio._Waiting(_task.Task("q", b"", correlation_id="one"), None, reply)}
        link._take(aio_pika.IncomingMessage(DeliveredMessage(deliver, content, body.value, channel)))
        return (reply.exception() or reply.result()) if reply.done() else None

    async def all_received() -> list[object]:
        return [await received(message) for message in strange_frames(random.Random(2))]

    check(asyncio.run(all_received()))


def test_frames_that_can_be_decoded_are_not_changed() -> None:
    stream = delivery() + header(PROPERTIES[0]) + frame(3, b"{}") + frame(8, b"")
    for decode in (pika.frame.decode_frame, aio._decode):
        assert _frames.Frames(decode).feed(stream) == stream
        assert _frames.Frames(decode).feed(b"AMQP\x00\x00\x09\x01") == b"AMQP\x00\x00\x09\x01"


def test_a_message_that_cannot_be_decoded_keeps_its_task_and_says_why() -> None:
    for decode in (pika.frame.decode_frame, aio._decode):
        frames = _frames.Frames(decode).feed(header(PROPERTIES[1]))
        _, _, decoded = pamqp.frame.unmarshal(frames)
        assert isinstance(decoded, pamqp.header.ContentHeader) and decoded.properties is not None
        assert decoded.properties.correlation_id == "one"
        with pytest.raises(BadReply, match="cannot be decoded: .*(range|too large)"):
            _wire.reply(b"{}", None, "one", decoded.properties.headers)


def test_tables_in_tables_leave_room_on_the_stack() -> None:
    """pika decodes a frame a few calls deeper than the trial, and whoever logs it prints it deeper still."""

    def deeper(frame: bytes, levels: int = 50) -> None:
        if levels:
            deeper(frame, levels - 1)
        else:
            pika.frame.decode_frame(frame)

    refused = 0
    for levels in range(1, 1000):
        given = header(Raw("one", GOOD + b"\x01a" + nested(levels)).raw)
        taken = _frames.Frames(pika.frame.decode_frame).feed(given)
        refused += taken != given
        deeper(taken)
    assert 100 < refused < 950


@pytest.mark.parametrize(
    "data",
    [
        [{"index": 0, "embedding": RAW}],
        [{"index": 0, "embedding": RAW}, {"index": 0, "embedding": RAW}],
        [{"index": 0, "embedding": RAW}, {"index": 2, "embedding": RAW}],
        [{"index": 0, "embedding": "!!!!"}, {"index": 1, "embedding": "!!!!"}],
        [{"index": 0, "embedding": RAW}, {"index": 1, "embedding": "AAAA"}],
    ],
    ids=["too few", "one twice", "one missing", "no base64", "no whole number"],
)
def test_vectors_of_wrong_shapes(data: list[dict[str, Any]]) -> None:
    for as_array in (False, True):
        call = embed(None, as_array)(defaults())
        list(call.tasks)
        with pytest.raises(BadReply):
            call.result(
                [_wire.reply(json.dumps({"data": data}).encode(), None, "c", HEADERS | {"truncated": 0, "warning": ""})]
            )
    with pytest.raises(BadReply, match="differ in length"):
        _wire.matrix([RAW, base64.b64encode(bytes(4)).decode()])
