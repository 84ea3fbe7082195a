"""Embeds texts with pika alone: AMQP_URL=amqp://… python with_pika.py [QUEUE]"""

from __future__ import annotations

import json
import os
import sys
import time

import pika
import pika.exceptions

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/%2f")
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
    for _, properties, body in channel.consume(replies, auto_ack=True, inactivity_timeout=1):
        # None: a second without a message. Not in `missing`: a second reply to the same task.
        text = missing.pop(properties.correlation_id, None) if properties else None
        if text is not None:
            answer = json.loads(body)
            if properties.headers["status"] == "succeeded":
                print(f"{text}: {answer['data'][0]['embedding'][:3]}")
            else:
                print(f"{text}: {properties.headers['status_code']} {answer['error']['message']}")
        if not missing:
            break
        if time.monotonic() > until:
            sys.exit(f"no reply within {TIMEOUT} s to: {list(missing.values())}")
    channel.cancel()
