"""The part of `make bench` for models in Python. Measures the class of examples/python/models/embedder.py, which is MiniLM by
sentence-transformers, in process, under Celery, and as a pool of sconce; and the overhead of sconce with an empty class. Prints a
table, and writes it into benches/RESULTS.md.

Each system has as many processes as CORES, with one thread each, and computes in f32. Each task has one text of `texts`, with 35
tokens on average. sconce and the process without a queue compute batches of up to MAX_TOKENS tokens; Celery computes each task
alone. Each system is measured ROUNDS (3) times, in turns, with RabbitMQ and the clients on the same cores.
"""

import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from . import page, sconce, texts
from .kinds import Kind, Place, replace, rows_of
from .processes import Asked
from .rabbit import Rabbit
from .scene import FOLDER, MODEL, SEED, pin, say

TEXTS = 1_000
MAX_TOKENS = 1_024
OVERHEAD_TEXTS, OVERHEAD_TASKS = 32, 2_000
# The targets: milliseconds of overhead a batch, and the rates over RabbitMQ and of `run-batch` in proportion to that in process,
# and over RabbitMQ in proportion to that of Celery.
MAX_OVERHEAD_MS, MIN_OVER_RABBITMQ, MIN_RUN_BATCH, MIN_OVER_CELERY = 0.3, 0.9, 0.95, 1.3
CLASSES = Path("examples/python/models").resolve()
BEGIN, END = "<!-- `make bench` writes Python models from here -->", "<!-- Python models to here -->"


def write_tasks(lines, file):
    """A task for each text, as a batch line."""
    texts.write(lines, TEXTS, SEED, MODEL / "tokenizer.json")
    with open(file, "w", encoding="utf-8") as out:
        for number, line in enumerate(lines.read_text().splitlines()):
            task = {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings"}
            out.write(json.dumps({**task, "body": {"input": json.loads(line)["input"]}}) + "\n")


class Classes(Kind):
    """The class in process, under Celery, and in sconce."""

    def __init__(self, place, broker, cores, lines, file):
        super().__init__(place, broker, "python", MODEL, file)
        # One thread each; in sconce that is `threads = 1`.
        self.environment |= {"OMP_NUM_THREADS": "1", "MAX_TOKENS": str(MAX_TOKENS)}
        self.lines = str(lines.resolve())

        def pool(place_of, *settings):
            own = [f"pool[0].python.executable={sys.executable}", 'pool[0].python.path=["python/src", "benches"]']
            return sconce.Pool(place, (broker, cores), f"python:{place_of}", "bench.python", own + list(settings))

        model = [f"pool[0].options.model={MODEL.resolve()}", f"pool[0].batch.max_tokens={MAX_TOKENS}"]
        self.embedder = pool(f"{CLASSES}/embedder.py:Embedder", *model)
        self.empty = pool("peers.python_class:Empty")
        self.pool = lambda _: self.embedder

    def in_process(self):
        """As many processes as sconce has workers, at the same time: their rates together."""
        with ExitStack() as stack:
            command = [sys.executable, "-m", "peers.python_class_client"]
            environment = {**self.environment, "TEXTS_FILE": self.lines}
            log = self.place.log("python-class")
            every = [stack.enter_context(Asked(command, log, environment)) for _ in range(self.place.workers)]
            for peer in every:
                peer.ready()
            for peer in every:
                peer.ask("measure")
            return sum(peer.answer()["texts_per_second"] for peer in every)

    def run_batch(self):
        """Rows a second without a broker, from the first that is computed to the last."""
        output = FOLDER / "python-answers.jsonl"
        for old in (output, Path(f"{output}.run.json")):
            old.unlink(missing_ok=True)
        flags = ["--devices", ",".join(["cpu"] * self.place.workers), "--json", *self.embedder.settings]
        command = [sconce.PROGRAM, "run-batch", "-i", self.file, "-o", str(output), *flags]
        environment = {**os.environ, **self.embedder.environment}
        with open(self.place.log("run-batch"), "ab") as log:
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=log, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed; see {log.name}")
        report = json.loads(done.stdout.splitlines()[-1])
        if report["lines"] != TEXTS or report["errors"]:
            raise SystemExit(f"not every row was answered: {report}")
        return report["lines_per_second"]

    def overhead(self):
        """Milliseconds from the start of a batch to its end, with a `forward` that returns at once and one task at a time."""
        file = FOLDER / "python-overhead.jsonl"
        inputs = [json.loads(line)["input"] for line in Path(self.lines).read_text().splitlines()]
        short = sorted(inputs, key=len)[:OVERHEAD_TEXTS]
        file.write_text(json.dumps({"input": short}) + "\n")
        with sconce.Workers(self.empty, 1):
            one_by_one = ("--in-flight", 1, "--warmup", 100, "--tasks", OVERHEAD_TASKS)
            return self.empty.bench("--input", str(file.resolve()), *one_by_one)["compute_ms"]["p50"]


def main():
    """Measures each system in turns, then writes the table."""
    rounds = int(os.environ.get("ROUNDS") or 3)
    cores, _, _ = pin()
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    lines, file = FOLDER / "python-texts.jsonl", FOLDER / "python-tasks.jsonl"
    write_tasks(lines, file)
    rates, overheads = {}, []
    with Rabbit(cores) as rabbit:
        classes = Classes(Place(cores), rabbit.url, cores, lines, file)
        for number in range(rounds):
            say(f"models in Python, round {number + 1} of {rounds}")
            for name, measure in (
                ("class: in process", classes.in_process),
                ("class: sconce over RabbitMQ", lambda: classes.ours(2 * TEXTS, 256 * len(cores))),
                ("class: `run-batch`", classes.run_batch),
                ("class: Celery", classes.celery),
            ):
                value = measure()
                say(f"{name} {value:.1f} a second")
                rates.setdefault(name, []).append(value)
            overheads.append(classes.overhead())
            say(f"an empty forward of {OVERHEAD_TEXTS} texts: {overheads[-1]:.3f} ms")
    write(rates, overheads, cores, rounds)


def write(rates, overheads, cores, rounds):
    """Puts the table into the page, with the targets and whether they are reached."""

    def ratio(ours, theirs):
        return statistics.median(one / other for one, other in zip(rates[ours], rates[theirs], strict=True))

    ours, in_process = "class: sconce over RabbitMQ", "class: in process"
    targets = [
        ("over RabbitMQ : in process", ratio(ours, in_process), MIN_OVER_RABBITMQ),
        ("`run-batch` : in process", ratio("class: `run-batch`", in_process), MIN_RUN_BATCH),
        ("over RabbitMQ : Celery with the same class", ratio(ours, "class: Celery"), MIN_OVER_CELERY),
    ]
    lines = rows_of(rates, "texts/s", cores, rounds)
    lines += [f"The class is sentence-transformers with MiniLM, {len(cores)} processes of one thread everywhere, texts of"]
    lines += ["35 tokens on average.", "", "| measured | target | median | |", "|---|---|---|---|"]
    lines += [f"| {what} | ≥ {least} × | {value:.2f} × | {'✓' if value >= least else '✗'} |" for what, value, least in targets]
    value = statistics.median(overheads)
    mark = "✓" if value <= MAX_OVERHEAD_MS else "✗"
    lines += [f"| an empty `forward`, a batch of {OVERHEAD_TEXTS} short texts | ≤ {MAX_OVERHEAD_MS} ms | {value:.2f} ms | {mark} |"]
    table = "\n".join(lines)
    replace(page.PAGE, (BEGIN, END), table)
    print(table)


if __name__ == "__main__":
    main()
