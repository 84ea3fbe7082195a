"""The examples, as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kombu
import pytest
from celery import Celery
from conftest import PATIENCE, ROOT, Broker, Kept, Sconce, until

FOLDER = ROOT / "examples/python"


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::SyntaxWarning", f"{name}.py", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.parametrize("name", ["with_pika", "with_aio_pika", "with_kombu"])
def test_a_library_alone(name: str, broker: Broker, sconce: Sconce) -> None:
    done = run(name, "embed", AMQP_URL=broker.url)
    assert done.returncode == 0 and not done.stderr, done
    lines = sorted(done.stdout.splitlines())
    assert [line.split(": [")[0] for line in lines] == [
        "a lamp on the wall",
        "a queue of tasks",
        "how do I light a room?",
    ]

    refused = run(name, "rerank", AMQP_URL=broker.url)
    assert refused.returncode == 0 and refused.stdout.count(": 400 ") == 3, refused

    nowhere = run(name, "nobody.made.it", AMQP_URL=broker.url)
    assert nowhere.returncode == 1 and "no such queue: nobody.made.it" in nowhere.stderr, nowhere


def test_from_celery(broker: Broker, sconce: Sconce, tmp_path: Path) -> None:
    environment = {"AMQP_URL": broker.url, "EMBED_QUEUE": "embed"}
    command = [sys.executable, "-m", "celery", "--workdir", str(FOLDER), "-A", "from_celery", "worker"]
    worker = Kept(tmp_path / "log", "TERM", [*command, "--pool", "solo", "--loglevel", "info"], environment)
    try:
        until("Celery's worker is ready", lambda: " ready." in worker.log() or worker.keeper.poll() is not None)
        done = run("from_celery", **environment)
        assert (done.returncode, done.stdout) == (0, "a lamp on the wall\n"), done.stderr + worker.log()
    finally:
        worker.end()


def test_celery_is_told_that_a_pool_is_no_worker(broker: Broker, sconce: Sconce) -> None:
    app = Celery("stray", broker=broker.url, backend="rpc://")
    app.conf.task_queues = [kombu.Queue("embed", kombu.Exchange(""), "embed", no_declare=True)]
    result = app.send_task("shop.embed", ["a text"], queue="embed")
    with pytest.raises(Exception, match="docs/celery.md") as caught:
        result.get(timeout=PATIENCE)
    assert (type(caught.value).__name__, result.status) == ("RefusedBySconce", "FAILURE")
    app.close()
