"""What the clients do over a real broker, with a worker of the test's own, or none."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any, Callable

import pika
import pytest
from conftest import Broker, until
from pika.adapters.blocking_connection import BlockingChannel

from sconce_client import (
    BadReply,
    Client,
    ClientClosed,
    ConnectionFailed,
    NoSuchQueue,
    NotAccepted,
    SconceError,
    TaskTimeout,
)

Answer = Callable[[BlockingChannel, pika.BasicProperties, bytes], None]


class Hand:
    """A connection of the test's own, and the queues that it makes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection = pika.BlockingConnection(pika.URLParameters(url))
        self.channel = self.connection.channel()

    def queue(self, **arguments: Any) -> str:
        # Exclusive ones end with the test; anyone may publish to them.
        return str(self.channel.queue_declare("", exclusive=True, arguments=arguments).method.queue)

    def waiting(self, queue: str) -> int:
        return int(self.channel.queue_declare(queue, passive=True).method.message_count)

    def answers(self, tasks: int, answer: Answer) -> str:
        """A queue whose first tasks are answered so, on a thread."""
        ready: list[str] = []

        def work() -> None:
            with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
                channel = connection.channel()
                queue = channel.queue_declare("", exclusive=True).method.queue
                ready.append(str(queue))
                for count, (_, properties, body) in enumerate(channel.consume(queue, auto_ack=True), 1):
                    answer(channel, properties, body)
                    if count == tasks:
                        break
                channel.cancel()

        threading.Thread(target=work, daemon=True).start()
        return until("the worker consumes", lambda: ready)[0]


def reply(channel: BlockingChannel, task: pika.BasicProperties, body: Any, kind: str = "reply", **headers: Any) -> None:
    properties = pika.BasicProperties(
        type=kind,
        correlation_id=task.correlation_id,
        content_type=headers.pop("content_type", "application/json"),
        headers=headers or {"status": "succeeded", "status_code": 200},
    )
    channel.basic_publish("", task.reply_to or "", body if isinstance(body, bytes) else json.dumps(body), properties)


@pytest.fixture
def hand(broker: Broker) -> Iterator[Hand]:
    hand = Hand(broker.url)
    yield hand
    if hand.connection.is_open:
        hand.connection.close()


def test_what_a_task_looks_like(connect: Callable[..., Any], hand: Hand) -> None:
    seen: list[pika.BasicProperties] = []

    def answer(channel: BlockingChannel, task: pika.BasicProperties, body: bytes) -> None:
        seen.append(task)
        reply(channel, task, body, content_type="audio/wav", status="succeeded", status_code=200)

    queue = hand.answers(1, answer)
    sound = bytes(range(256))
    answered = connect().request(
        sound, queue=queue, content_type="audio/wav", headers={"language": "en"}, timeout=9.5, priority=3
    )
    assert (answered.body, answered.content_type, answered.status_code) == (sound, "audio/wav", 200)
    [task] = seen
    assert task.content_type == "audio/wav" and task.delivery_mode == 2 and task.priority == 3
    assert task.headers is not None and task.headers["language"] == "en" and "url" not in task.headers
    assert task.correlation_id == task.message_id == answered.correlation_id
    assert 8000 < int(task.expiration or 0) <= 9500


def test_second_replies_are_dropped(connect: Callable[..., Any], hand: Hand) -> None:
    tasks: list[tuple[pika.BasicProperties, bytes]] = []

    def answer(channel: BlockingChannel, task: pika.BasicProperties, body: bytes) -> None:
        tasks.append((task, body))
        if len(tasks) == 3:
            for earlier, sent in reversed(tasks):
                reply(channel, earlier, {"first": json.loads(sent)})
                reply(channel, earlier, {"second": json.loads(sent)})
            reply(channel, pika.BasicProperties(correlation_id="a stranger", reply_to=task.reply_to), {})

    client = connect(queue=hand.answers(3, answer))
    futures = [client.submit({"number": number}) for number in range(3)]
    assert [future.result(30).json() for future in futures] == [{"first": {"number": n}} for n in range(3)]


def test_a_run_that_begins_again_shows(connect: Callable[..., Any], hand: Hand) -> None:
    def answer(channel: BlockingChannel, task: pika.BasicProperties, _: bytes) -> None:
        for run, seq in [("a", 0), ("a", 1), ("b", 0), ("a", 2), ("b", 2), ("b", 2), ("b", 3)]:
            chunk = {"choices": [{"index": 0, "delta": {"content": f"{run}{seq} "}}]}
            reply(channel, task, chunk, "reply.part", stream_id=run, seq=seq)
        reply(channel, task, {"choices": [{"message": {"content": "b0 b1 b2 b3 "}}]})

    stream = connect().stream({}, queue=hand.answers(1, answer))
    text = ""
    for part in stream:
        text = part.text if part.restarted else text + part.text
    assert text == "b0 b2 b3 "
    assert stream.result().text == "b0 b1 b2 b3 "


def test_what_is_no_reply(connect: Callable[..., Any], hand: Hand) -> None:
    queue = hand.answers(1, lambda channel, task, _: reply(channel, task, {}, other="header"))
    with pytest.raises(BadReply):
        connect().request({}, queue=queue)


def test_a_queue_that_does_not_exist(connect: Callable[..., Any], hand: Hand) -> None:
    with pytest.raises(NoSuchQueue, match="no such queue: 'nobody.made.it'") as caught:
        connect().request({}, queue="nobody.made.it")
    assert caught.value.queue == "nobody.made.it"
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        hand.waiting("nobody.made.it")


def test_a_queue_that_is_full(connect: Callable[..., Any], hand: Hand) -> None:
    queue = hand.queue(**{"x-max-length": 1, "x-overflow": "reject-publish"})
    client = connect(queue=queue)
    client.submit({})
    until("the queue is full", lambda: hand.waiting(queue) == 1)
    with pytest.raises(NotAccepted, match="does not take the task"):
        client.request({})


def test_a_time_out_takes_the_task_from_its_queue(connect: Callable[..., Any], hand: Hand) -> None:
    queue = hand.queue()
    with pytest.raises(TaskTimeout, match=f"no reply from the queue '{queue}' within 0.5 s"):
        connect(queue=queue, timeout=0.5).request({})
    until("the broker has dropped the task", lambda: hand.waiting(queue) == 0)


def test_a_time_out_says_that_nobody_consumes(connect: Callable[..., Any], hand: Hand) -> None:
    queue = f"idle-{uuid.uuid4().hex}"
    hand.channel.queue_declare(queue, durable=True)
    client = connect(queue=queue, timeout=0.5)
    try:
        futures = [client.submit({}) for _ in range(3)]
        for future in futures:
            with pytest.raises(TaskTimeout, match=f"'{queue}' within 0.5 s; nobody consumes from it now$"):
                future.result(30)
        hand.channel.basic_consume(queue, lambda *_: None)
        with pytest.raises(TaskTimeout, match=f"'{queue}' within 0.5 s$"):
            client.request({})
    finally:
        hand.channel.queue_delete(queue)
    # The same connection goes on, also after the broker has refused to tell of another's exclusive queue.
    exclusive = hand.queue()
    for _ in range(2):
        with pytest.raises(TaskTimeout, match=f"'{exclusive}' within 0.5 s$"):
            client.request({}, queue=exclusive)
    answering = hand.answers(1, lambda channel, task, body: reply(channel, task, body))
    assert client.request({}, queue=answering, timeout=30).status_code == 200


def test_so_many_are_on_their_way(connect: Callable[..., Any], hand: Hand) -> None:
    queue = hand.queue()
    client = connect(queue=queue, max_in_flight=2)
    futures = [client.submit({}) for _ in range(2)]
    until("both wait", lambda: hand.waiting(queue) == 2)
    with pytest.raises(TaskTimeout):
        client.request({}, timeout=0.3)
    assert hand.waiting(queue) == 2
    futures[0].cancel()
    third = client.submit({})
    until("there is room for a third", lambda: hand.waiting(queue) == 3)
    assert not third.done()


def test_a_closed_client_leaves_nothing_hanging(connect: Callable[..., Any], hand: Hand) -> None:
    queue = hand.queue()
    client = connect(queue=queue)
    future = client.submit({})
    stream = client.stream({})
    until("both wait", lambda: hand.waiting(queue) == 2)
    client.close()
    for ended in (future.result, stream.result, lambda: list(stream), lambda: client.request({})):
        with pytest.raises(ClientClosed):
            ended()
    client.close()


def test_nobody_to_connect_to(connect: Callable[..., Any], broker: Broker) -> None:
    nowhere = "amqp://guest:secret@127.0.0.1:1/%2f"
    for options, cause in [
        ({"url": nowhere}, "refused"),
        ({"url": "amqp://guest:secret@no.such.host.invalid/"}, "(?i)name|address"),
        ({"url": broker.url.replace("guest:guest", "guest:secret")}, "ACCESS_REFUSED"),
        ({"url": broker.url.replace("%2f", "elsewhere")}, "(?i)vhost elsewhere|no such virtual host"),
        ({"url": broker.url.replace("amqp:", "amqps:")}, "(?i)ssl"),
        ({"reply_queue": "nobody.made.it"}, "NOT_FOUND - no queue 'nobody.made.it'"),
    ]:
        with pytest.raises(ConnectionFailed, match=cause) as caught:
            connect(**options)
        told = str(caught.value)
        address = options.get("url", broker.url)
        scheme, host = address.split("guest:")[0], address.split("@")[1]
        assert told.startswith(f"no connection to {scheme}guest:***@{host}: "), told
        assert "\n" not in told and "secret" not in told and len(told) < 300, told
    with pytest.raises(ConnectionFailed, match="127.0.0.1:1/.*; to .*127.0.0.1:2/"):
        connect(f"{nowhere},{nowhere.replace(':1/', ':2/')}")
    assert connect(f"{nowhere},{broker.url}") is not None


def test_a_broker_that_does_not_answer(connect: Callable[..., Any]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"amqp://guest:secret@127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(ConnectionFailed, match="no answer within 0.5 s") as caught:
            connect(url, connect_timeout=0.5)
        assert "guest:***@127.0.0.1" in str(caught.value)


def test_what_amqp_cannot_carry(connect: Callable[..., Any], hand: Hand) -> None:
    queue = hand.queue()
    client = connect(queue=queue)
    with pytest.raises(Exception, match=r"(?i)ubyte|range|0 and 255|0 <= number"):
        client.request({}, priority=1000)
    client.submit({})
    until("the next one is published", lambda: hand.waiting(queue) == 1)


def test_two_of_one_name(connect: Callable[..., Any], hand: Hand) -> None:
    queue = hand.queue()
    client = connect(queue=queue)
    client.submit({}, correlation_id="one")
    until("it waits", lambda: hand.waiting(queue) == 1)
    with pytest.raises(ValueError, match="is on its way"):
        client.request({}, correlation_id="one")


def test_a_fork_is_refused(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(broker.url) as client, monkeypatch.context() as patched:
        patched.setattr("os.getpid", lambda: 1)
        with pytest.raises(SconceError, match="fork"):
            client.request({})
