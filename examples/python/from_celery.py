"""Calls sconce from a Celery task, with sconce-client (`pip install celery "./python[pika]"`).

SCONCE_BROKER__URL=amqp://… celery -A from_celery worker      the tasks' worker
SCONCE_BROKER__URL=amqp://… python from_celery.py             calls one, and prints what it returns

Celery's tasks and sconce's have queues of their own. EMBED_QUEUE names sconce's.
"""

from __future__ import annotations

import os
from functools import lru_cache

from celery import Celery, Task

from sconce_client import BadRequest, Client, NotServed, SconceError, TooLarge

URL = os.environ.get("SCONCE_BROKER__URL") or os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/%2f")
QUEUE = os.environ.get("EMBED_QUEUE", "sconce.tasks")
TEXTS = ["how do I light a room?", "a lamp on the wall", "a queue of tasks"]

app = Celery("from_celery", broker=URL, backend="rpc://")
app.conf.task_serializer = app.conf.result_serializer = "json"  # no pickles
app.conf.accept_content = ["json"]


@lru_cache(maxsize=1)
def sconce() -> Client:
    """One client for each process: made at the first task, which is after Celery's fork."""
    return Client(URL, queue=QUEUE, timeout=60)


@app.task(bind=True, max_retries=3)
def nearest(self: Task[..., str], question: str, texts: list[str]) -> str:
    """Which text is most like the question."""
    try:
        first, *others = sconce().embed([question, *texts])
    except (BadRequest, NotServed, TooLarge):
        raise  # the task is wrong, and stays so
    except SconceError as error:
        raise self.retry(exc=error, countdown=5) from error
    alike = [sum(a * b for a, b in zip(first, other)) for other in others]
    return texts[alike.index(max(alike))]


if __name__ == "__main__":
    print(nearest.delay(TEXTS[0], TEXTS[1:]).get(timeout=90))
