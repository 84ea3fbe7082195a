"""The examples, as a user runs them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import wave
from pathlib import Path

import kombu
import pika
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


def workers_of(launcher: Kept) -> list[int]:
    """The processes of its workers: the keeper's child is the launcher."""

    def children(pid: int) -> list[int]:
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]

    found = []
    for pid in (worker for parent in children(launcher.keeper.pid) for worker in children(parent)):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if arguments[1:2] == [b"worker"]:
            found.append(pid)
    return found


def test_a_conversation_loses_nothing_when_workers_are_killed(
    broker: Broker, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    program = request.config.getoption("--sconce").resolve()
    pool = {"task_queue": "talk", "dead_letter_queue": "talk.dead", "model": ROOT / "models/hibari", "threads": 1}
    pool["devices"] = '["cpu", "cpu", "cpu"]'
    settings = [word for name, value in pool.items() for word in ("--set", f"pool[0].{name}={value}")]
    launcher = Kept(tmp_path / "log", "TERM", [str(program), "launch", *settings], {"SCONCE_BROKER__URL": broker.url})
    try:
        until("three workers are ready", lambda: launcher.log().count("worker ready") == 3)

        def spoken(name: str, kill_after: tuple[int, ...]) -> bytes:
            """What the example writes, if a worker is killed each time that so many lines have been spoken."""
            out = tmp_path / name
            command = [sys.executable, "conversation.py", "--queue", "talk", "--out", str(out)]
            environment = {**os.environ, "AMQP_URL": broker.url}
            with subprocess.Popen(
                command, cwd=FOLDER, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as running:
                assert running.stderr is not None and running.stdout is not None
                for count, told in enumerate(running.stderr, 1):
                    if count in kill_after:
                        os.kill(workers_of(launcher)[count % 2], signal.SIGKILL)
                said = running.stdout.read()
            assert running.returncode == 0 and "20 lines, spoken by " in said, said
            assert "speakers share 1 voice, at different speeds" in told
            return out.read_bytes()

        undisturbed = spoken("undisturbed.wav", ())
        killed = spoken("killed.wav", (1, 4))
        died = [line for line in launcher.log().splitlines() if "the worker died with these tasks" in line]
        assert len(died) == 2, launcher.log()
        assert killed == undisturbed
        with wave.open(str(tmp_path / "killed.wav")) as sound:
            assert sound.getnframes() > 40 * sound.getframerate()
    finally:
        launcher.end()


def test_a_conversation_of_one_line(broker: Broker, sconce: Sconce, tmp_path: Path) -> None:
    dialogue, out = tmp_path / "dialogue.txt", tmp_path / "out.wav"
    dialogue.write_text("Ann: Yes.\n")
    done = run("conversation", "--queue", "speak", "--out", str(out), str(dialogue), AMQP_URL=broker.url)
    assert (done.returncode, done.stdout) == (0, f"{out}: 1 line, spoken by 1 worker\n"), done


def test_a_conversation_says_that_it_waits(broker: Broker) -> None:
    command = [sys.executable, "conversation.py", "--queue", "idle.talk"]
    environment = {**os.environ, "AMQP_URL": broker.url}
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.queue_declare("idle.talk", durable=True)
        with subprocess.Popen(command, cwd=FOLDER, env=environment, stderr=subprocess.PIPE, text=True) as running:
            assert running.stderr is not None
            told = running.stderr.readline()
            running.kill()
        channel.queue_delete("idle.talk")
    assert told.endswith("nobody consumes from it now; waiting for workers\n"), told


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    done = run("spoken_summaries", str(tmp_path / "none"))
    assert (done.returncode, done.stderr) == (1, f"{tmp_path / 'none'}: No such file or directory\n"), done


def test_spoken_summaries(broker: Broker, sconce: Sconce, tmp_path: Path) -> None:
    recordings, out = tmp_path / "recordings", tmp_path / "out"
    recordings.mkdir()
    shutil.copy(ROOT / "models/recordings/librivox-0930.wav", recordings)
    shutil.copy(ROOT / "models/recordings/librivox-0870.wav", recordings)
    (recordings / "broken.flac").write_bytes(b"fLaC, and then nothing")
    queues = ["--transcribe", "speech", "--generate", "text", "--speak", "speak"]
    done = run("spoken_summaries", str(recordings), "--out", str(out), *queues, AMQP_URL=broker.url)
    assert done.returncode == 1 and done.stderr.startswith("broken.flac: "), done
    assert (out / "librivox-0930.wav.txt").read_text() == "He might even have been made amiable himself.\n"
    for name in ("librivox-0870.wav", "librivox-0930.wav"):
        assert (out / f"{name}.summary.txt").read_text().strip() in done.stdout
        with wave.open(str(out / f"{name}.summary.wav")) as sound:
            assert sound.getframerate() == 24_000 and sound.getnframes() > 24_000
    assert not (out / "broken.flac.summary.wav").exists()
    done = run("spoken_summaries", str(recordings), "--out", str(recordings), *queues, AMQP_URL=broker.url)
    assert done.returncode == 1 and "is the folder of the recordings" in done.stderr, done
