"""What a stranger puts into a reply queue, over a real broker: it is the fault of one task at most, and never of the next."""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import pika
import pytest
from conftest import Broker, until
from pika.adapters.blocking_connection import BlockingChannel
from test_broker import Hand, hand, reply

from sconce_client import BadReply, BadRequest, Failed, Reply

__all__ = ["hand"]

BRACKETS = b"[" * 100_000


class Raw(pika.BasicProperties):
    """Properties as bytes, which no library would write: a table of headers, and what follows it with its flags."""

    def __init__(self, correlation_id: str | None, table: bytes, flags: int = 0, after: bytes = b"") -> None:
        super().__init__()
        if correlation_id is not None:
            own = correlation_id.encode()
            flags, after = flags | 1 << 10, after + bytes([len(own)]) + own
        self.raw = struct.pack(">HI", flags | 1 << 13, len(table)) + table + after

    def encode(self) -> list[bytes]:
        return [self.raw]


def nested(levels: int) -> bytes:
    """A value of arrays in arrays."""
    value = b"V"
    for _ in range(levels):
        value = b"A" + struct.pack(">I", len(value)) + value
    return value


GOOD = b"\x06statusS\x00\x00\x00\x09succeeded\x0bstatus_codeI\x00\x00\x00\xc8"
TABLES = {
    "timestamp": GOOD + b"\x01aT" + struct.pack(">Q", 2**62),
    "latest timestamp": GOOD + b"\x01aT" + struct.pack(">Q", 2**64 - 1),
    "deep": GOOD + b"\x01a" + nested(2000),
    "long": GOOD + b"\x00V" * 60_000,
    "status in an array": b"\x06statusA\x00\x00\x00\x01V\x0bstatus_codeI\x00\x00\x00\xc8",
}
"""Of replies to a task. RabbitMQ takes and delivers each of them."""


def strange(correlation_id: str | None) -> list[Raw]:
    """Properties that RabbitMQ takes, and that at least one of the libraries does not."""
    return [
        *(Raw(correlation_id, table) for table in TABLES.values()),
        Raw(None, GOOD + b"\x01\xffV"),
        Raw(None, GOOD, 1 << 10, b"\x02\xff\xfe"),  # a correlation_id that is not UTF-8
        Raw(None, GOOD, 1 << 6, struct.pack(">Q", 2**62)),  # the property `timestamp`
    ]


@pytest.fixture
def named(hand: Hand) -> Iterator[str]:
    """A durable reply queue for one client."""
    name = f"replies-{uuid.uuid4().hex}"
    hand.channel.queue_declare(name, durable=True)
    yield name
    hand.channel.queue_delete(name)


def echo(channel: BlockingChannel, task: pika.BasicProperties, body: bytes) -> None:
    reply(channel, task, json.loads(body))


def test_strange_messages_at_the_head_of_a_named_queue(
    connect: Callable[..., Any], hand: Hand, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    messages = strange("nobody's")
    for properties in messages:
        hand.channel.basic_publish("", named, b"{}", properties)
    until("all of them wait", lambda: hand.waiting(named) == len(messages))
    with caplog.at_level(logging.WARNING, "sconce_client"):
        client = connect(queue=hand.answers(20, echo), reply_queue=named, timeout=5)
        begun = time.monotonic()
        assert client.request({"a": 1}).json() == {"a": 1}
        assert time.monotonic() - begun < 1
        # And when they come while the client consumes.
        for properties in messages:
            hand.channel.basic_publish("", named, b"{}", properties)
            assert client.request({"a": 2}).json() == {"a": 2}
        until("all are delivered", lambda: hand.waiting(named) == 0)
        assert client.request({"a": 3}).json() == {"a": 3}  # behind all of them
    client.close()
    assert hand.waiting(named) <= 1, "not acknowledged"
    said = [record.getMessage() for record in caplog.records if record.name == "sconce_client"]
    assert [one for one in said if "lost the broker" in one] == []
    dropped = [one for one in said if named in one]
    assert len(dropped) >= 2 * 4 and all("cannot be decoded" in one for one in dropped), said


def test_a_strange_reply_fails_its_own_task(connect: Callable[..., Any], hand: Hand) -> None:
    def answer(channel: BlockingChannel, task: pika.BasicProperties, body: bytes) -> None:
        kind = json.loads(body)
        if isinstance(kind, str):
            channel.basic_publish("", task.reply_to or "", b"{}", Raw(task.correlation_id, TABLES[kind]))
        else:
            reply(channel, task, kind)

    client = connect(queue=hand.answers(2 * len(TABLES), answer), timeout=10)
    for kind in TABLES:
        bad, good = client.submit(json.dumps(kind).encode()), client.submit({"good": kind})
        with pytest.raises(BadReply):
            bad.result(30)
        assert good.result(30).json() == {"good": kind}


def test_a_strange_routing_key(connect: Callable[..., Any], hand: Hand, named: str) -> None:
    hand.channel.queue_bind(named, "amq.fanout")
    client = connect(queue=hand.answers(1, echo), reply_queue=named, timeout=5)
    channel: Any = hand.channel
    channel._impl.basic_publish("amq.fanout", b"\xff", b"{}", pika.BasicProperties())
    hand.connection.process_data_events(0)
    begun = time.monotonic()
    assert client.request({"a": 1}).json() == {"a": 1}
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize(
    ("body", "code", "kind"),
    [
        (BRACKETS, 500, Failed),
        (b'{"error": {"message": ' + b"[" * 900 + b"]" * 900 + b"}}", 500, Failed),
        (b'{"error": {"message": "no", "param": "input[' + b"9" * 5000 + b']"}}', 400, BadRequest),
        (b'{"error": {"message": "no", "param": ' + b"9" * 5000 + b"}}", 400, BadRequest),
    ],
    ids=["brackets", "deep message", "long index", "long number"],
)
def test_a_strange_error_fails_its_own_task(
    connect: Callable[..., Any], hand: Hand, body: bytes, code: int, kind: type[Exception]
) -> None:
    tasks: list[pika.BasicProperties] = []

    def answer(channel: BlockingChannel, task: pika.BasicProperties, _: bytes) -> None:
        tasks.append(task)
        if len(tasks) == 2:  # in one piece, and the good one last
            reply(channel, tasks[0], body, status="failed", status_code=code)
            reply(channel, tasks[1], {"good": 1})

    client = connect(queue=hand.answers(2, answer), timeout=10)
    bad, good = client.submit({}), client.submit({})
    with pytest.raises(kind):
        bad.result(30)
    assert good.result(30).json() == {"good": 1}


def test_a_strange_part_fails_its_own_task(connect: Callable[..., Any], hand: Hand) -> None:
    def answer(channel: BlockingChannel, task: pika.BasicProperties, body: bytes) -> None:
        if json.loads(body).get("stream"):
            reply(channel, task, {}, "reply.part", stream_id="s", seq="9" * 5000)
        else:
            reply(channel, task, {})

    client = connect(queue=hand.answers(2, answer), timeout=10)
    with pytest.raises(BadReply):
        list(client.stream({}))
    assert client.request({}).status_code == 200


@contextmanager
def flooding(broker: Broker, queue: str, a_second: int) -> Iterator[None]:
    """So many undecodable messages a second, from a requester of its own."""
    ends = threading.Event()

    def flood() -> None:
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            while not ends.wait(1 / a_second):
                channel.basic_publish("", queue, b"{}", Raw("nobody's", TABLES["timestamp"]))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_a_flood_does_not_slow_the_tasks_of_another(
    connect: Callable[..., Any], hand: Hand, broker: Broker, record_property: Callable[[str, object], None]
) -> None:
    reply_queues: list[str] = []

    def answer(channel: BlockingChannel, task: pika.BasicProperties, body: bytes) -> None:
        reply_queues.append(task.reply_to or "")
        time.sleep(0.001)  # that the tasks are under way while strange messages come
        reply(channel, task, json.loads(body))

    client = connect(queue=hand.answers(1000, answer), timeout=30)

    def seconds() -> float:
        begun = time.monotonic()
        futures = [client.submit({"number": number}) for number in range(64)]
        replies: list[Reply] = [future.result(60) for future in futures]
        assert [one.json()["number"] for one in replies] == list(range(64))
        return time.monotonic() - begun

    seconds()
    calm = min(seconds() for _ in range(3))
    with flooding(broker, reply_queues[-1], 20):
        time.sleep(0.3)
        flooded = min(seconds() for _ in range(3))
    record_property("seconds", (calm, flooded))
    print(f"64 tasks: {calm:.3f} s, with a flood {flooded:.3f} s")
    assert len(set(reply_queues)) == 1, "the connection was lost"
    assert flooded < 3 * calm + 0.1


def test_delays_grow_while_connections_do_not_last(
    connect: Callable[..., Any], broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    user = f"user-{uuid.uuid4().hex}"
    broker.ctl("add_user", user, "secret")
    broker.ctl("set_permissions", user, ".*", ".*", ".*")
    url = broker.url.replace("guest:guest", f"{user}:secret")
    with caplog.at_level(logging.WARNING, "sconce_client"):
        connect(url)
        for _ in range(3):
            until("it is connected", lambda: user in broker.ctl("list_connections", "user"))
            broker.ctl("close_all_user_connections", user, "test")
    lost: list[Any] = [record.args for record in caplog.records if "lost the broker" in record.msg]
    delays = [args[1] for args in lost]
    assert len(delays) >= 3 and sorted(delays) == delays, delays
    assert delays[2] >= 2 * delays[0], delays
