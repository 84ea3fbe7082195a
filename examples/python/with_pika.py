"""Embeds texts with pika alone (`pip install pika`):

    SCONCE_BROKER__URL=amqp://… python with_pika.py [QUEUE]
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pika
import pika.exceptions

URL = os.environ.get("SCONCE_BROKER__URL") or os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/%2f")
QUEUE = sys.argv[1] if len(sys.argv) > 1 else "sconce.tasks"
TEXTS = ["how do I light a room?", "a lamp on the wall", "a queue of tasks"]
TIMEOUT = 60.0  # seconds

with pika.BlockingConnection(pika.URLParameters(URL)) as connection:
    channel = connection.channel()
    channel.confirm_delivery()  # from here on basic_publish waits for the broker's word
    replies = channel.queue_declare("", exclusive=True).method.queue

    for number, text in enumerate(TEXTS):
        properties = pika.BasicProperties(
            content_type="application/json",
            correlation_id=str(number),
            reply_to=replies,
            delivery_mode=2,  # the task survives a restart of the broker
            expiration=str(int(TIMEOUT * 1000)),  # nobody computes what nobody waits for
        )
        body = json.dumps({"input": text}).encode()
        try:
            # The task queue is not declared here: its arguments are sconce's. `mandatory` says if it is missing.
            channel.basic_publish("", QUEUE, body, properties, mandatory=True)
        except pika.exceptions.UnroutableError:
            sys.exit(f"no such queue: {QUEUE}. Is the pool running?")

    missing = {str(number): text for number, text in enumerate(TEXTS)}
    until = time.monotonic() + TIMEOUT
    for _, reply, answer in channel.consume(replies, auto_ack=True, inactivity_timeout=1):
        if reply is not None and answer is not None:  # else: a second without a message
            waited_for = missing.pop(reply.correlation_id or "", None)
            if waited_for is not None:  # else: a second reply to the same task
                content = json.loads(answer)
                headers: dict[str, Any] = dict(reply.headers or {})
                if headers["status"] == "succeeded":
                    print(f"{waited_for}: {content['data'][0]['embedding'][:3]}")
                else:
                    print(f"{waited_for}: {headers['status_code']} {content['error']['message']}")
        if not missing:
            break
        if time.monotonic() > until:
            sys.exit(f"no reply within {TIMEOUT} s to: {list(missing.values())}")
    channel.cancel()
