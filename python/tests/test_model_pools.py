"""Classes in Python behind RabbitMQ: workers, clients and processes, all real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, ROOT, Broker, Kept, until

import sconce_model
from sconce_client import BadRequest, Cancelled, Client, Failed

HERE = Path(__file__).resolve().parent
SOURCES = Path(sconce_model.__file__).resolve().parents[1]
POOLS = {
    "vectors": (f"python:{HERE}/classes.py:lengths", ""),
    "words": ("python:classes:Fussy", 'name = "a"\nfactor = 3'),
    "tales": ("python:classes:Teller", "concurrency = 2"),
}


@pytest.fixture(scope="module")
def launched(
    broker: Broker, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kept]:
    folder = tmp_path_factory.mktemp("models")
    tables = (
        f'[[pool]]\nname = "{name}"\ntask_queue = "{name}"\nreply_queue = "{name}.replies"\ndead_letter_queue = "{name}.dead"\n'
        f'model = "{model}"\ndevices = ["cpu"]\nthreads = 1\nretry = {{ delay = "100ms" }}\n'
        f'[pool.python]\nexecutable = "{sys.executable}"\npath = ["{HERE}", "{SOURCES}"]\n'
        f"[pool.options]\n{options}\n"
        for name, (model, options) in POOLS.items()
    )
    settings = folder / "sconce.toml"
    settings.write_text(f'[broker]\nurl = "{broker.url}"\n' + "".join(tables))
    program = request.config.getoption("--sconce").resolve()
    kept = Kept(folder / "log", "TERM", [str(program), "launch", "--config", str(settings)], {})

    def is_ready() -> bool:
        assert kept.keeper.poll() is None, kept.log()
        queues = dict(line.split("\t") for line in broker.ctl("list_queues", "name", "consumers").splitlines()[1:])
        return all(queues.get(name) == "1" for name in POOLS)

    until("all workers consume", is_ready)
    yield kept
    kept.end()


@pytest.fixture
def client(broker: Broker, launched: Kept) -> Iterator[Client]:
    with Client(broker.url, timeout=PATIENCE) as client:
        yield client


def test_a_functions_vectors(client: Client) -> None:
    texts = [f"{'long ' * number}text" for number in range(100)]
    vectors = client.with_options(queue="vectors").embed(texts, rows_per_task=7)
    assert vectors == [[float(len(text)), 0.5] for text in texts]
    body = {"input": "four", "encoding_format": "base64"}
    reply = client.request(body, queue="vectors", url="/v1/embeddings").json()
    assert reply["data"][0]["embedding"] == "AACAQAAAAD8=" and reply["usage"]["total_tokens"] == 1


def test_bad_inputs_fail_alone(client: Client) -> None:
    words = ["fine", "refused", "placed", "a", "broken"]
    asked = [client.submit({"input": [word, "x"]}, queue="words", url="/v1/embeddings") for word in words]
    errors = [one.exception(PATIENCE) for one in asked]
    assert [type(error) for error in errors] == [type(None), BadRequest, BadRequest, type(None), Failed], errors
    assert "in its place" in str(errors[2]) and "KeyError: 'broken'" in str(errors[4])
    assert asked[0].result().json()["sums"] == [12.0, 3.0]
    with pytest.raises(BadRequest, match="input must be a text or a list of texts"):
        client.request({"input": {}}, queue="words", url="/v1/embeddings")


def test_a_body_and_a_reply_that_are_no_json(client: Client) -> None:
    reply = client.request(b"two words", content_type="text/plain", queue="words", url="/count")
    assert (reply.content_type, reply.body) == ("text/x-count", b"24")


def test_a_stream_is_sent_in_parts_and_cancelled(client: Client, launched: Kept) -> None:
    told = client.with_options(queue="tales")
    with told.stream({"count": 20}, url="/tell") as stream:
        parts = [part.text for part in stream]
    assert stream.result().text == "".join(f"{number} " for number in range(20))
    assert parts and "".join(parts) in stream.result().text
    endless = told.submit({"count": 10**9}, url="/tell", correlation_id="endless")
    with told.stream({"count": 10**9}, url="/tell") as stream:
        next(iter(stream))
        told.cancel("endless")
        assert isinstance(endless.exception(PATIENCE), Cancelled)
    until("both are told", lambda: launched.log().count("told of") == 2)
    assert told.request({"count": 1}, url="/tell").text == "0 "


def test_a_new_process_takes_the_place_of_one_that_is_killed(client: Client, launched: Kept) -> None:
    def models() -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            try:
                is_model = b"from sconce_model.__main__ import main" in (folder / "cmdline").read_bytes()
                is_ours = f"{HERE}:{SOURCES}".encode() in (folder / "environ").read_bytes()
            except OSError:
                continue
            if is_model and is_ours:
                found.append(int(folder.name))
        return found

    before = models()
    assert len(before) == len(POOLS)
    asked = [client.submit({"input": "fine"}, queue="words", url="/v1/embeddings") for _ in range(20)]
    for one in before:
        os.kill(one, signal.SIGKILL)
    assert all(one.result(PATIENCE).json()["sums"] == [12.0] for one in asked)
    until("all are back", lambda: len(models()) == len(POOLS) and not set(models()) & set(before))
    assert client.with_options(queue="vectors").embed(["four"]) == [[4.0, 0.5]]


def test_each_worker_has_a_model_of_its_own(request: pytest.FixtureRequest) -> None:
    program = request.config.getoption("--sconce").resolve()
    command: list[Any] = [sys.executable, ROOT / "examples/python/models/verify_workers.py", program, "cpu", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0 and done.stdout.count("yes: ") == 6, done
