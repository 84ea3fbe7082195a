"""A RabbitMQ node and a `sconce launch` for the whole run, both real, and a client of either kind for each test."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Callable, TypeVar

import pytest

from sconce_client import AsyncClient, AsyncStream, Client, Part, Reply

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "models/recordings"
PATIENCE = 60.0
T = TypeVar("T")

POOLS = {
    "embed": ROOT / "models/all-MiniLM-L6-v2",
    "text": ROOT / "models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf",
    "speech": ROOT / "models/whisper-tiny.en",
    "speak": ROOT / "models/hibari",
    "images": ROOT / "models/efficientnet-lite0",
    "text-image": ROOT / "tests/fixtures/tiny-clip",
    "image-generation": ROOT / "tests/fixtures/tiny-diffusion",
    "caption": ROOT / "tests/fixtures/tiny-blip",
    "rerank": ROOT / "tests/fixtures/score-bert",
    "classify": ROOT / "tests/fixtures/score-roberta",
    "inference": ROOT / "tests/fixtures/score-nli-bert",
    "sparse": ROOT / "tests/fixtures/sparse-bert",
    "token-labels": ROOT / "tests/fixtures/token-bert",
    "echo": "echo",
    "script": "script",
}

# Ends what it has started when its stdin ends, in whatever way the tests end.
KEEPER = '"$@" >"$LOG" 2>&1 </dev/null & child=$!; cat >/dev/null; { kill -"$END" $child; wait $child; } 2>/dev/null'


def until(what: str, probe: Callable[[], T]) -> T:
    """Asks again and again until the answer is true."""
    begun = time.monotonic()
    while not (found := probe()):
        assert time.monotonic() < begun + PATIENCE, f"not within {PATIENCE} s: {what}"
        time.sleep(0.02)
    return found


class Kept:
    """A program that lives as long as the tests."""

    def __init__(self, log: Path, end: str, command: list[str], environment: dict[str, str]) -> None:
        self.path = log
        environment = {**os.environ, **environment, "LOG": str(log), "END": end}
        self.keeper = subprocess.Popen(["sh", "-c", KEEPER, "sh", *command], stdin=subprocess.PIPE, env=environment)

    def log(self) -> str:
        return self.path.read_text(errors="replace") if self.path.exists() else ""

    def end(self) -> None:
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()
        self.keeper.wait(PATIENCE)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Broker:
    """A node of RabbitMQ with ports and a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.port, distribution = free_ports(2)
        (folder / "rabbitmq.conf").write_text("loopback_users = none\n")
        self.environment = {
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"sconce-python-{os.getpid()}-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            # So that the start script becomes the node.
            "RABBITMQ_ALLOW_INPUT": "true",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none",
            "RABBITMQ_CTL_ERL_ARGS": "+S 1:1 +sbwt none",
            # Debian's scripts in /usr/sbin switch to the user rabbitmq, whose folder this is not.
            "PATH": f"/usr/lib/rabbitmq/bin:{os.environ['PATH']}",
        }
        ports = {"RABBITMQ_NODE_PORT": str(self.port), "RABBITMQ_DIST_PORT": str(distribution)}
        limited = ["sh", "-c", "ulimit -n 65536 2>/dev/null; exec rabbitmq-server"]
        self.kept = Kept(folder / "out", "KILL", limited, {**self.environment, **ports})
        until("RabbitMQ takes connections", self.runs)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2f"

    def runs(self) -> bool:
        """Whether it greets who speaks AMQP."""
        assert self.kept.keeper.poll() is None and "BOOT FAILED" not in self.kept.log(), self.kept.log()
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2) as connection:
                connection.settimeout(2)
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return connection.recv(1) == b"\x01"
        except OSError:
            return False

    def ctl(self, *arguments: str) -> str:
        command = ["rabbitmqctl", "-q", *arguments]
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Sconce:
    """`sconce launch` with a pool for each thing that the client does. A queue has the name of its pool."""

    def __init__(self, program: Path, broker: Broker, folder: Path) -> None:
        tables = (
            f'[[pool]]\nname = "{name}"\ntask_queue = "{name}"\nreply_queue = "{name}.replies"\n'
            f'dead_letter_queue = "{name}.dead"\nmodel = "{model}"\ndevices = ["cpu"]\nthreads = 1\n'
            f'allowed_sources = ["{RECORDINGS.as_uri()}/"]\n'
            for name, model in POOLS.items()
        )
        self.cancelled = 0
        [port] = free_ports(1)
        self.admin = f"http://127.0.0.1:{port}"
        settings = folder / "sconce.toml"
        settings.write_text(f'[broker]\nurl = "{broker.url}"\n[admin]\nlisten = "127.0.0.1:{port}"\n' + "".join(tables))
        clean = [name for name in os.environ if name == "AMQP_URL" or name.startswith("SCONCE_")]
        command = ["env", *(f"-u{name}" for name in clean), str(program), "launch", "--config", str(settings)]
        self.kept = Kept(folder / "log", "TERM", command, {})
        until("all workers consume", self.is_ready)

    def is_ready(self) -> bool:
        assert self.kept.keeper.poll() is None and "slot given up" not in self.kept.log(), self.kept.log()
        return all(f'sconce_broker_connected{{pool="{pool}",slot="{pool}/0"}} 1' in self.metrics() for pool in POOLS)

    def metrics(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.admin}/metrics", timeout=PATIENCE) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return ""

    def count(self, metric: str, *labels: str) -> float:
        """The sum of a counter over all its series that have these labels."""
        lines = (line for line in self.metrics().splitlines() if line.startswith(metric))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))

    def runs(self, tasks: int) -> None:
        """Waits until so many tasks of the pool `script` are computed. What metrics say is up to a second old."""
        until(f"{tasks} tasks run", lambda: self.count("sconce_in_flight_tasks", 'pool="script"') == tasks)

    def cancels_one(self) -> None:
        """Waits until the pool `script` has cancelled one more task than at the last call."""
        self.cancelled += 1
        count = partial(self.count, "sconce_tasks_total", 'pool="script"', 'status="cancelled"')
        until(f"the worker has cancelled {self.cancelled} tasks", lambda: count() == self.cancelled)


class BlockingStream:
    """An `AsyncStream` with the methods of a `Stream`."""

    def __init__(self, client: Blocking, stream: AsyncStream) -> None:
        self.client, self.stream = client, stream

    def __iter__(self) -> Iterator[Part]:
        parts = self.stream.__aiter__()
        try:
            while True:
                yield self.client.run(parts.__anext__())
        except StopAsyncIteration:
            return
        finally:
            self.client.run(parts.aclose())  # type: ignore[attr-defined]

    def result(self) -> Reply:
        reply: Reply = self.client.run(self.stream.result())
        return reply


class Blocking:
    """An `AsyncClient` with the methods of a `Client`, so that both pass the same tests."""

    def __init__(self, url: str, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.client = AsyncClient(url, **options)
        self.run(self.client.connect())

    def with_options(self, **options: Any) -> Blocking:
        other = Blocking.__new__(Blocking)
        other.loop, other.client = self.loop, self.client.with_options(**options)
        return other

    def run(self, work: Any) -> Any:
        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(PATIENCE)

    def submit(self, body: Any, **options: Any) -> Future[Reply]:
        return asyncio.run_coroutine_threadsafe(self.client.request(body, **options), self.loop)

    def close(self) -> None:
        self.run(self.client.close())

    def __getattr__(self, name: str) -> Any:
        def method(*arguments: Any, **options: Any) -> Any:
            async def called() -> Any:
                result = getattr(self.client, name)(*arguments, **options)
                return await result if inspect.isawaitable(result) else result

            result = self.run(called())
            return BlockingStream(self, result) if isinstance(result, AsyncStream) else result

        return method


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sconce", default=ROOT / "target/release/sconce", type=Path, help="the program to test with")


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    broker = Broker(tmp_path_factory.mktemp("rabbit"))
    yield broker
    broker.kept.end()


@pytest.fixture(scope="session")
def sconce(
    broker: Broker, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sconce]:
    program = request.config.getoption("--sconce").resolve()
    sconce = Sconce(program, broker, tmp_path_factory.mktemp("sconce"))
    yield sconce
    sconce.kept.end()


@pytest.fixture(params=[Client, Blocking], ids=["pika", "aio-pika"])
def connect(request: pytest.FixtureRequest, broker: Broker) -> Iterator[Callable[..., Any]]:
    """Makes a client of either kind."""
    made = []

    def connect(url: str = broker.url, **options: Any) -> Any:
        made.append(request.param(url, **options))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def client(connect: Callable[..., Any], sconce: Sconce) -> Any:
    return connect()
