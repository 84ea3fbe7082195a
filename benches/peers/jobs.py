"""`make bench`, fourth part: one large job over RabbitMQ beside the same file without a broker, and beside people who
wait for answers. Prints a table, and writes it into benches/RESULTS.md. Needs no other system.

ROWS (100,000) short texts by as many workers as CORES; each way ROUNDS (3) times, in turns, RabbitMQ and the client on
the same cores. A ratio is taken within a round. Waiting is short, and measured in three rounds at least.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from . import sconce
from .kinds import Place, replace
from .processes import end, spawn
from .rabbit import Rabbit
from .scene import FOLDER, MODEL, pin, say

WORDS = ["a", "cat", "rain", "the", "of", "river", "old", "under", "stone", "light", "wind", "door"]
PACKED = 32
LOAD, TASKS = 0.3, 2_000
"""The interactive load, as a part of what the pool can do, and its tasks."""
WAITING = 3
"""The fewest rounds of it."""
BEGIN, END = "<!-- `make bench` writes jobs from here -->", "<!-- jobs to here -->"


def write_rows(file, count):
    """Texts of 4 to 12 words, each another."""
    with open(file, "w", encoding="utf-8") as out:
        for number in range(count):
            words = [WORDS[(number * 7 + at * (number % 5 + 1)) % len(WORDS)] for at in range(4 + number % 9)]
            body = {"input": " ".join(words) + f" {number}", "encoding_format": "base64"}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}
            out.write(json.dumps(line) + "\n")


class Jobs:
    """The ways to answer one file."""

    def __init__(self, place, broker, cores, rows):
        self.place, self.workers = place, len(cores)
        self.rows, self.input = rows, FOLDER / f"rows-{rows}.jsonl"
        self.output = FOLDER / "answers.jsonl"
        self.background = ["pool[0].background_queue=bench.jobs.background"]
        self.pool = sconce.Pool(place, (broker, cores), str(MODEL.resolve()), "bench.jobs", self.background)
        write_rows(self.input, rows)

    def fresh(self):
        """The output of no run."""
        for file in (self.output, Path(f"{self.output}.run.json")):
            file.unlink(missing_ok=True)
        return ["-i", str(self.input), "-o", str(self.output)]

    def ran(self, command):
        """A run's report, the CPU seconds of the process itself, and its most memory in MB."""
        environment = {**os.environ, **self.pool.environment}
        with open(self.place.log("jobs"), "ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
            out = process.stdout.read()
            _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed; see {self.place.log('jobs')}")
        report = json.loads(out.splitlines()[-1])
        if report["lines"] != self.rows or report["errors"]:
            raise SystemExit(f"not every row was answered: {report}")
        return report, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024

    def run_batch(self):
        """Rows a second without a broker."""
        devices = ",".join(["cpu"] * self.workers)
        flags = ["--devices", devices, "--json", *self.pool.settings]
        return self.ran([sconce.PROGRAM, "run-batch", *self.fresh(), *flags])[0]["lines_per_second"]

    def submit(self, rows_per_task):
        """Rows a second over RabbitMQ, microseconds of the client's CPU a row, and its most memory."""
        flags = ["--rows-per-task", str(rows_per_task), "--json", *self.pool.settings]
        report, cpu, memory = self.ran([sconce.PROGRAM, "submit", *self.fresh(), *flags])
        return report["lines_per_second"], cpu / self.rows * 1e6, memory

    def interactive(self, rate):
        """The report of people who wait."""
        return self.pool.bench("--rate", round(rate), "--tasks", TASKS, "--warmup", 50)["latency_ms"]

    def beside_a_job(self, rate, *flags):
        """The same while a job runs, which never ends meanwhile."""
        command = [sconce.PROGRAM, "submit", *self.fresh(), *self.pool.settings, "--rows-per-task", PACKED, *flags]
        job = spawn(command, self.place.log("jobs"), self.pool.environment)
        try:
            deadline = time.monotonic() + 60
            while not self.output.exists() or self.output.stat().st_size == 0:
                if time.monotonic() > deadline:
                    raise SystemExit(f"the job does not begin; see {self.place.log('jobs')}")
                time.sleep(0.05)
            return self.interactive(rate)
        finally:
            job.kill()
            end(job)


def main():
    """Measures, prints and writes."""
    rounds, rows = int(os.environ.get("ROUNDS", "3")), int(os.environ.get("ROWS", "100000"))
    cores, _, _ = pin()
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    found = {name: [] for name in ("bare", "packed", "one", "cpu packed", "cpu one", "memory")}
    waited = {name: [] for name in ("alone", "background", "beside")}
    with ExitStack() as stack:
        jobs = Jobs(Place(cores), stack.enter_context(Rabbit(cores)).url, cores, rows)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            found["bare"].append(jobs.run_batch())
            with sconce.Workers(jobs.pool, len(cores)):
                for name, packed in (("packed", PACKED), ("one", 1)):
                    rate, cpu, memory = jobs.submit(packed)
                    found[name].append(rate)
                    found[f"cpu {name}"].append(cpu)
                    found["memory"].append(memory)
        for number in range(max(rounds, WAITING)):
            say(f"waiting beside a job, round {number + 1}")
            with sconce.Workers(jobs.pool, len(cores)):
                most = jobs.pool.bench("--in-flight", 256, "--tasks", TASKS)["tasks_per_second"]
                waited["alone"].append(jobs.interactive(LOAD * most))
                waited["background"].append(jobs.beside_a_job(LOAD * most, "--background"))
            # What a killed job has left is gone with its queue.
            with sconce.Workers(jobs.pool, len(cores)):
                waited["beside"].append(jobs.beside_a_job(LOAD * most))
                jobs.pool.bench("--in-flight", 64, "--tasks", 100, "--timeout", "10m")
    table = write(found, waited, rows, cores, rounds)
    print(table)
    replace(Path("benches/RESULTS.md"), (BEGIN, END), table)


def write(found, waited, rows, cores, rounds):
    """The table of what was found."""
    middle = statistics.median
    ratio = {
        name: middle(one / bare for one, bare in zip(found[name], found["bare"], strict=True))
        for name in ("packed", "one")
    }
    lines = ["| a file of rows | rows/s | × `run-batch` | client's CPU, µs a row |", "|---|---|---|---|"]
    lines.append(f"| `run-batch`, no broker | {middle(found['bare']):.0f} | 1.00 | |")
    for name, words in (("packed", f"`submit`, {PACKED} rows a task"), ("one", "`submit`, one row a task")):
        cpu = middle(found[f"cpu {name}"])
        lines.append(f"| {words} | {middle(found[name]):.0f} | {ratio[name]:.2f} | {cpu:.0f} |")
    lines += ["", f"The client's memory: at most {max(found['memory']):.0f} MB. {rows:,} rows, {len(cores)} workers.", ""]
    lines += [f"| latency of single tasks, published at {LOAD:.0%} of the pool's rate | p50, ms | p99, ms |", "|---|---|---|"]
    for name, words in (
        ("alone", "alone"),
        ("background", "beside a job with `--background`"),
        ("beside", "beside a job in the same queue"),
    ):
        p50, p99 = (middle(report[part] for report in waited[name]) for part in ("p50", "p99"))
        lines.append(f"| {words} | {p50:.0f} | {p99:.0f} |")
    on = f"cores {','.join(map(str, cores))}, RabbitMQ and clients on them too"
    rates = "those of one round" if rounds == 1 else f"medians of {rounds} rounds"
    waits = len(waited["alone"])
    lines += ["", f"The rates are {rates}, the latencies are medians of {waits} rounds; {on}."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
