"""What all measurements share: cores, broker, model, texts, folder; and the peers that wait in it."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from . import sconce, texts
from .processes import Asked, end, spawn
from .rabbit import Rabbit

MODEL = Path("models/all-MiniLM-L6-v2")
FOLDER = Path("target/peers")
SEED = 20261121
IN_PROCESS_SECONDS = 5
CHECKED = 8
"""Texts whose vectors must be the same everywhere."""


def say(words):
    """Tells the person who waits."""
    print(f"bench: {words}", file=sys.stderr, flush=True)


def rounds_of(what, measure):
    """What `measure` returns in each of ROUNDS rounds."""
    rounds = int(os.environ.get("ROUNDS") or 3)
    found = []
    for number in range(rounds):
        say(f"{what}, round {number + 1} of {rounds}")
        found.append(measure())
    return found


def _asked(name):
    return [int(core) for core in os.environ.get(name, "").split(",") if core]


def pin():
    """Ties this process, hence all that it starts, to the cores of CORES; by default the first two.
    Returns them, those of RabbitMQ and the clients: the same, or BROKER_CORES; and as many of those that
    nobody has, none where they are too few."""
    every = sorted(os.sched_getaffinity(0))
    cores = _asked("CORES") or every[:2]
    broker_cores = _asked("BROKER_CORES") or cores
    free = [core for core in every if core not in {*cores, *broker_cores}][: len(cores)]
    os.sched_setaffinity(0, cores)
    return cores, broker_cores, free if len(free) == len(cores) else []


class Scene:
    """Everything that runs during all rounds. Peers that are not being measured block on a pipe or on
    the broker."""

    def __init__(self, count):
        self.cores, self.broker_cores, self.free_cores = pin()
        self.all_cores = sorted({*self.cores, *self.broker_cores, *self.free_cores})
        self.workers = len(self.cores)
        self.logs = FOLDER / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        for old in self.logs.iterdir():
            old.unlink()
        self.model = str(MODEL.resolve())
        self.texts = str((FOLDER / f"texts-{count}.jsonl").resolve())
        self.count = count
        self.tokens = texts.write(self.texts, count, SEED, MODEL / "tokenizer.json")
        self.one_text = str((FOLDER / "one-text.jsonl").resolve())
        texts.write(self.one_text, 1, SEED, MODEL / "tokenizer.json")
        self.environment = dict(os.environ)

    def log(self, name):
        """Where a program's stderr goes."""
        return self.logs / f"{name}.log"

    def __enter__(self):
        self.stack = ExitStack()
        try:
            self._set()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_):
        self.stack.close()

    def _set(self):
        say(f"starting RabbitMQ and the peers on the cores {self.cores}")
        self.broker = self.stack.enter_context(Rabbit(self.broker_cores)).url
        here = (self.broker, self.broker_cores)
        self.embedding = sconce.Pool(self, here, self.model, "bench.embed")
        self.echo = sconce.Pool(self, here, "echo", "bench.echo", [f"pool[0].prefetch={sconce.PREFETCH}"])
        self.apart = None
        if self.free_cores:
            there = (self.stack.enter_context(Rabbit(self.free_cores)).url, self.free_cores)
            self.apart = sconce.Pool(self, there, self.model, "bench.embed")
        self.sentence_transformers = self._peer("sentence_transformers_client", THREADS=self.workers)
        onnx = (FOLDER / "minilm.onnx").resolve()
        self.onnx_runtime = self._peer("onnx_runtime_client", THREADS=self.workers, ONNX_FILE=onnx)
        celery = [sys.executable, "-m", "celery", "-A", "peers.celery_app", "worker", "--loglevel", "WARNING"]
        environment = {**self._peer_environment(), "OMP_NUM_THREADS": "1"}
        self.celery_worker = spawn([*celery, "--concurrency", self.workers], self.log("celery"), environment)
        self.stack.callback(end, self.celery_worker)
        self.celery = self._peer("celery_client", self.broker_cores)
        self.in_process = sconce.in_process(self, self.workers, IN_PROCESS_SECONDS)
        for process in self.in_process:
            self.stack.enter_context(process).ready()

    def _peer_environment(self, **more):
        own = {"BROKER_URL": self.broker, "MODEL": self.model, "TEXTS_FILE": self.texts, **more}
        return {name: str(value) for name, value in own.items()}

    def _peer(self, module, cores=None, **more):
        command = [sys.executable, "-m", f"peers.{module}"]
        peer = Asked(command, self.log(module), self._peer_environment(**more), cores)
        return self.stack.enter_context(peer).ready()

    def check_vectors(self):
        """Ends the run where somebody's vectors are others than sentence-transformers'."""
        with sconce.Workers(self.embedding, self.workers):
            found = {"sconce": self.embedding.vectors(self.texts, CHECKED)}
        for name in ("celery", "onnx_runtime"):
            found[name] = _vectors(getattr(self, name))
        reference = _vectors(self.sentence_transformers)
        for name, vectors in found.items():
            worst = min(_cosine(*pair) for pair in zip(vectors, reference, strict=True))
            if not worst > 0.9999:
                raise SystemExit(f"the vectors of {name} are not those of sentence-transformers: {worst}")
        say(f"vectors of {', '.join(found)} equal those of sentence-transformers")


def _vectors(peer):
    peer.ask(f"vectors {CHECKED}")
    return peer.answer()["vectors"]


def _cosine(one, other):
    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    return dot(one, other) / (dot(one, one) * dot(other, other)) ** 0.5
