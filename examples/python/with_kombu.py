"""Embeds texts with kombu, Celery's library for messages (`pip install kombu`):

    SCONCE_BROKER__URL=amqp://… python with_kombu.py [QUEUE]
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

from kombu import Connection, Consumer, Producer, Queue, uuid

URL = os.environ.get("SCONCE_BROKER__URL") or os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/%2f")
QUEUE = sys.argv[1] if len(sys.argv) > 1 else "sconce.tasks"
TEXTS = ["how do I light a room?", "a lamp on the wall", "a queue of tasks"]
TIMEOUT = 60.0  # seconds

missing = {str(number): text for number, text in enumerate(TEXTS)}


def on_reply(answer: Any, message: Any) -> None:
    text = missing.pop(message.properties["correlation_id"], None)
    if text is None:  # a second reply to the same task
        return
    if message.headers["status"] == "succeeded":
        print(f"{text}: {answer['data'][0]['embedding'][:3]}")
    else:
        print(f"{text}: {message.headers['status_code']} {answer['error']['message']}")


def on_return(*_: Any) -> None:
    sys.exit(f"no such queue: {QUEUE}. Is the pool running?")


with Connection(URL, transport_options={"confirm_publish": True}) as connection:
    channel = connection.channel()
    # With a name of its own: kombu declares a queue again, also one that the broker has named.
    replies = Queue(f"replies.{uuid()}", exclusive=True, durable=False)
    producer = Producer(channel, serializer="json", on_return=on_return)
    with Consumer(channel, [replies], callbacks=[on_reply], accept=["json"], no_ack=True):
        for number, text in enumerate(TEXTS):
            # No `declare=`: the task queue's arguments are sconce's. The default exchange, by the queue's name.
            producer.publish(
                {"input": text},
                exchange="",
                routing_key=QUEUE,
                mandatory=True,
                correlation_id=str(number),
                reply_to=replies.name,
                delivery_mode=2,
                expiration=TIMEOUT,  # in seconds here: nobody computes what nobody waits for
            )
        until = time.monotonic() + TIMEOUT
        while missing:
            try:
                connection.drain_events(timeout=max(0.01, until - time.monotonic()))
            except socket.timeout:
                sys.exit(f"no reply within {TIMEOUT} s to: {list(missing.values())}")
