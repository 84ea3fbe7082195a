"""The programs of this repository, as they are measured: `sconce` itself, and the two beside it."""

import json
import os
import subprocess
import time

from .processes import Asked, end, spawn

RELEASE = "target/release"
PROGRAM = f"{RELEASE}/sconce"
PREFETCH = 128
"""Of echo workers and bare consumers alike; what a worker of one thread has by itself."""
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "CANDLE_NUM_THREADS": "1"}
BOOT = 60
"""Most seconds until workers are ready."""


class Pool:
    """Where tasks go, and with which settings workers take them. `broker` is its address, and the cores
    of the client."""

    def __init__(self, scene, broker, model, queue, settings=()):
        self.scene = scene
        url, self.client_cores = broker
        pairs = [f"pool[0].model={model}", f"pool[0].task_queue={queue}", "pool[0].threads=1", *settings]
        if features := os.environ.get("CPU_FEATURES"):
            pairs.append(f"pool[0].cpu_features={features}")
        self.settings = [word for pair in pairs for word in ("--set", pair)]
        self.environment = {"SCONCE_BROKER__URL": url, "SCONCE_LOG_FORMAT": "json"}

    def bench(self, *arguments):
        """Runs `sconce bench`; returns its report."""
        command = [PROGRAM, "bench", *self.settings, "--json", *map(str, arguments)]
        environment = {**self.scene.environment, **self.environment}
        with open(self.scene.log("bench"), "ab") as log:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                check=False,
                preexec_fn=lambda: os.sched_setaffinity(0, self.client_cores),
            )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed; see {log.name}")
        report = json.loads(done.stdout)
        if report["succeeded"] != report["tasks"]:
            raise SystemExit(f"not every task succeeded: {report}")
        return report

    def vectors(self, path, count):
        """The vectors of the first texts of a file, by `sconce publish`."""
        with open(path, "rb") as file:
            lines = b"".join(file.readline() for _ in range(count))
        command = [PROGRAM, "publish", *self.settings, "--input", "-", "--wait"]
        environment = {**self.scene.environment, **self.environment}
        done = subprocess.run(command, env=environment, input=lines, stdout=subprocess.PIPE, check=True)
        return [json.loads(line)["body"]["data"][0]["embedding"] for line in done.stdout.splitlines()]


class Workers:
    """`sconce launch` with so many workers, within a `with`."""

    def __init__(self, pool, count):
        self.pool = pool
        self.count = count

    def __enter__(self):
        log = self.pool.scene.log("launch")
        with open(log, "ab") as file:
            start = file.tell()
        devices = ", ".join(['"cpu"'] * self.count)
        command = [PROGRAM, "launch", *self.pool.settings, "--set", f"pool[0].devices=[{devices}]"]
        self.process = spawn(command, log, self.pool.environment)
        self.pid = self.process.pid
        deadline = time.monotonic() + BOOT
        while _ready(log, start) < self.count:
            if time.monotonic() > deadline or self.process.poll() is not None:
                end(self.process)
                raise SystemExit(f"the workers are not ready; see {log}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_):
        end(self.process)


def _ready(log, start):
    with open(log, encoding="utf-8") as file:
        file.seek(start)
        return sum('"worker ready"' in line for line in file)


def seconds_to_ready(pool):
    """From the start of one worker process to the line that says that it takes tasks."""
    command = [PROGRAM, "worker", *pool.settings]
    start = time.perf_counter()
    environment = {**pool.environment, **ONE_THREAD}
    process = spawn(command, pool.scene.log("worker"), environment, stdout=subprocess.PIPE)
    try:
        for line in process.stdout:
            if json.loads(line)["event"] == "ready":
                return time.perf_counter() - start
        raise SystemExit(f"a worker ended before it was ready; see {pool.scene.log('worker')}")
    finally:
        end(process)


def bare_consumers(scene, queue, count):
    """Consumers that do what an echo worker does for RabbitMQ, and nothing else."""
    command = [f"{RELEASE}/examples/bare_consumer", scene.broker, queue, PREFETCH]
    return [Asked(command, scene.log("bare_consumer")) for _ in range(count)]


def in_process(scene, count, seconds):
    """The encoder without a queue, as often as there are workers."""
    command = [f"{RELEASE}/examples/in_process", scene.model, scene.texts, seconds]
    return [Asked(command, scene.log("in_process"), ONE_THREAD) for _ in range(count)]
