"""Embeds texts with aio-pika alone (`pip install aio-pika`):

    SCONCE_BROKER__URL=amqp://… python with_aio_pika.py [QUEUE]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from aio_pika.exceptions import PublishError

URL = os.environ.get("SCONCE_BROKER__URL") or os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/%2f")
QUEUE = sys.argv[1] if len(sys.argv) > 1 else "sconce.tasks"
TEXTS = ["how do I light a room?", "a lamp on the wall", "a queue of tasks"]
TIMEOUT = 60.0  # seconds


async def main() -> None:
    async with await aio_pika.connect(URL) as connection:
        # Confirms, and an exception for a task that no queue takes.
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        replies = await channel.declare_queue(exclusive=True)
        waiting: dict[str, asyncio.Future[AbstractIncomingMessage]] = {}

        async def on_reply(message: AbstractIncomingMessage) -> None:
            future = waiting.pop(message.correlation_id or "", None)
            if future is not None and not future.done():  # else: a second reply to the same task
                future.set_result(message)

        await replies.consume(on_reply, no_ack=True)

        async def embed(number: int, text: str) -> str:
            waiting[str(number)] = reply = asyncio.get_running_loop().create_future()
            message = aio_pika.Message(
                json.dumps({"input": text}).encode(),
                content_type="application/json",
                correlation_id=str(number),
                reply_to=replies.name,
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                expiration=TIMEOUT,  # in seconds here: nobody computes what nobody waits for
            )
            # The task queue is not declared here: its arguments are sconce's.
            await channel.default_exchange.publish(message, QUEUE, mandatory=True)
            answered = await asyncio.wait_for(reply, TIMEOUT)
            answer = json.loads(answered.body)
            if answered.headers["status"] != "succeeded":
                return f"{text}: {answered.headers['status_code']} {answer['error']['message']}"
            return f"{text}: {answer['data'][0]['embedding'][:3]}"

        try:
            for line in await asyncio.gather(*(embed(number, text) for number, text in enumerate(TEXTS))):
                print(line)
        except PublishError:
            sys.exit(f"no such queue: {QUEUE}. Is the pool running?")


asyncio.run(main())
