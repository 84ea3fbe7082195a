"""The part of `make bench` that measures speech synthesis: sconce beside the package hibari-tts (ONNX Runtime), in process
and behind Celery. Prints a table, and writes it into benches/RESULTS.md.

Each system is measured ROUNDS (3) times, in turns, on the cores of CORES, with RabbitMQ on the same cores. All have the
weights of the voice "heart". The package computes the published network, whose weights and activations have 8 bits;
sconce computes it in f32, and in another row with int8.
"""

import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

from . import page, sconce
from .kinds import Place, replace
from .processes import Asked, end, spawn
from .rabbit import Rabbit
from .scene import FOLDER, pin, rounds_of, say

MODEL = Path("models/hibari")
SENTENCES = Path("examples/demo/sentences.txt")
REPEATS = 8
"""How often each sentence is spoken in a measurement."""
LATENCY_TASKS = 20
"""Tasks sent one at a time, for the latency."""
BEGIN, END = "<!-- `make bench` writes synthesis from here -->", "<!-- synthesis to here -->"
PACKAGE, CELERY, OURS = "hibari-tts in process", "Celery + hibari-tts", "sconce over RabbitMQ"


class Synthesis:
    """The systems that are compared."""

    def __init__(self, place, broker, cores):
        self.place, self.cores, self.broker = place, cores, broker
        lines = [line for line in SENTENCES.read_text().splitlines() if line and not line.startswith("#")]
        self.texts = lines * REPEATS
        self.file, self.one = FOLDER / "spoken.jsonl", FOLDER / "spoken-one.jsonl"
        for file, texts in ((self.file, self.texts), (self.one, self.texts[:1])):
            with open(file, "w", encoding="utf-8") as out:
                for number, text in enumerate(texts):
                    line = {"custom_id": str(number), "url": "/v1/audio/speech", "body": {"input": text}}
                    out.write(json.dumps(line) + "\n")

    def peer(self, module, threads):
        """Starts a peer. Returns its `sound` and `seconds` for all sentences, and the median latency of one, in seconds."""
        own = {"TEXTS": json.dumps(self.texts), "THREADS": threads, "BROKER_URL": self.broker}
        own |= {"QUEUE": "celery.speak", "KIND": "speak"}
        environment = {key: str(value) for key, value in own.items()}
        with Asked([sys.executable, "-m", f"peers.{module}"], self.place.log(module), environment) as peer:
            peer.ready().ask("many")
            many = peer.answer()
            seconds = []
            for _ in range(LATENCY_TASKS):
                peer.ask("one")
                seconds.append(peer.answer()["seconds"])
        return many, statistics.median(seconds)

    def celery(self):
        """As `peer`, for Celery with a worker process for each core."""
        app = [sys.executable, "-m", "celery", "-A", "peers.celery_kinds", "worker", "--loglevel", "WARNING"]
        environment = {"BROKER_URL": self.broker, "QUEUE": "celery.speak", "KIND": "speak", "OMP_NUM_THREADS": "1"}
        worker = spawn([*app, "--concurrency", len(self.cores)], self.place.log("celery-speak"), environment)
        try:
            return self.peer("celery_speak_client", 1)
        finally:
            end(worker)

    def ours(self, dtype):
        """Sentences per second with a worker for each core, and the median latency of one sentence, in seconds."""
        settings, model = [f"pool[0].dtype={dtype}"], str(MODEL.resolve())
        pool = sconce.Pool(self.place, (self.broker, self.cores), model, "bench.speak", settings)
        with sconce.Workers(pool, self.place.workers):
            tasks = len(self.texts)
            many = pool.bench("--input", self.file, "--in-flight", 64, "--warmup", 16, "--tasks", tasks)
            one = pool.bench("--input", self.one, "--in-flight", 1, "--warmup", 2, "--tasks", LATENCY_TASKS)
        return many["tasks_per_second"], one["latency_ms"]["p50"] / 1_000


def round_of(synthesis):
    """For each system: seconds of sound a second, and seconds for one sentence."""
    found = {}
    for threads in sorted({1, len(synthesis.cores)}):
        many, one = synthesis.peer("hibari_client", threads)
        found[f"{PACKAGE}, threads: {threads}"] = (many["sound"] / many["seconds"], one)
    of_celery, one = synthesis.celery()
    found[f"{CELERY}, a process for each core"] = (of_celery["sound"] / of_celery["seconds"], one)
    # The package's durations are used for all systems; they are the same.
    sound_of_sentence = many["sound"] / len(synthesis.texts)
    for dtype, name in (("f32", OURS), ("int8", f"{OURS}, int8"), ("bf16", f"{OURS}, bf16")):
        rate, one = synthesis.ours(dtype)
        found[name] = (rate * sound_of_sentence, one)
    for name, (speed, one) in found.items():
        say(f"{name}: {speed:.1f} × real time, one sentence {1_000 * one:.1f} ms")
    return found


def main():
    """Measures, then writes."""
    cores, _, _ = pin()
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        synthesis = Synthesis(Place(cores), stack.enter_context(Rabbit(cores)).url, cores)
        found = rounds_of("synthesis", lambda: round_of(synthesis))
    write(found, synthesis, cores)


def write(found, synthesis, cores):
    """The table: medians, and how many times a peer's rate ours is (the median of the rounds' ratios)."""
    lines = ["| system | × real time | ours, × | one sentence, ms |", "|---|---|---|---|"]
    for name in found[0]:
        ratio = statistics.median(of_round[OURS][0] / of_round[name][0] for of_round in found)
        speed, one = (statistics.median(of_round[name][part] for of_round in found) for part in (0, 1))
        lines.append(f"| {name} | {speed:.0f} | {ratio:.2f} | {1_000 * one:.1f} |")
    named = ",".join(map(str, cores))
    lines += ["", f"The rates are {page.rounds_of(len(found))}, on the cores {named}, which RabbitMQ shares. A measurement speaks"]
    lines += [f"{len(synthesis.texts)} sentences (`{SENTENCES}`, {REPEATS} times) with the voice \"heart\". All systems start from text. sconce"]
    lines += ["has one worker with one thread for each core. The last column is the time until the sound of one sentence has"]
    lines += ["arrived, on idle workers."]
    replace(page.PAGE, (BEGIN, END), "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
