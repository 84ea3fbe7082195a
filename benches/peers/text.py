"""`make bench`, third part: text generation beside llama.cpp, transformers and Celery. Prints a table, and writes it
into benches/RESULTS.md.

Each system is measured ROUNDS (3) times, in turns, on the cores of CORES, with RabbitMQ on the same cores. All have
the weights of one GGUF file, answer the same questions greedily, and give TOKENS tokens to each. GGUF names another
file than SmolLM2's; its table is printed alone, without the systems of Python.
"""

import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

from . import page, sconce
from .kinds import Place, replace
from .processes import Asked, end, private_megabytes, spawn, worker_processes
from .rabbit import Rabbit
from .scene import FOLDER, pin, rounds_of, say

SMOLLM2 = Path("models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf")
MODEL = Path(os.environ.get("GGUF") or SMOLLM2)
QUESTIONS = Path("examples/demo/chats.jsonl")
PROSE = Path("/usr/share/common-licenses/GPL-3")
"""A real text, which every Debian has."""
WORDS = 220
"""Of a long prompt; some 300 tokens."""
SEQUENCES, TOKENS = 16, 64
TASKS = 48
"""Of a measurement of many sequences; of one sequence it is a quarter."""
BEGIN, END = "<!-- `make bench` writes text from here -->", "<!-- text to here -->"


def write_prompts(short, long):
    """Questions, over and over, and passages of a long text. Nothing is reused: each has a cache of its own."""
    questions = [json.loads(line)["body"]["messages"][0]["content"] for line in QUESTIONS.read_text().splitlines()]
    words = PROSE.read_text().split()
    passages = [" ".join(words[at : at + WORDS]) for at in range(0, len(words) - WORDS, WORDS)]
    for file, prompts, tokens in (
        (short, [questions[number % len(questions)] for number in range(TASKS)], TOKENS),
        (long, passages, 1),
    ):
        with open(file, "w", encoding="utf-8") as out:
            for number, prompt in enumerate(prompts):
                body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
                body["cache_salt"] = str(number)
                line = {"custom_id": str(number), "url": "/v1/completions", "body": body}
                out.write(json.dumps(line) + "\n")
    return len(passages)


class Text:
    """The systems that are compared."""

    def __init__(self, stack, place, broker, cores):
        self.stack, self.place, self.cores = stack, place, cores
        self.short, self.long = FOLDER / "questions.jsonl", FOLDER / "passages.jsonl"
        self.passages = write_prompts(self.short, self.long)
        threads = [f"pool[0].threads={len(cores)}"]
        self.pool = sconce.Pool(place, (broker, cores), str(MODEL.resolve()), "bench.text", threads)
        own = {"BROKER_URL": broker, "MODEL": MODEL.resolve(), "TEXTS_FILE": self.short.resolve()}
        own |= {"LONG_FILE": self.long.resolve(), "THREADS": len(cores), "SEQUENCES": SEQUENCES}
        own |= {"TOKENS": TOKENS, "KIND": "text", "QUEUE": "celery.text"}
        self.environment = {key: str(value) for key, value in own.items()}

    def ours(self, file, tasks, in_flight):
        """Tokens of answers, and of prompts, a second, over RabbitMQ: one worker with all cores."""
        with sconce.Workers(self.pool, 1):
            many = ("--in-flight", in_flight, "--warmup", 2, "--tasks", tasks)
            report = self.pool.bench("--input", file, *many)
        made = report["generated_tokens_per_second"]
        return made, report["tokens_per_second"] - made

    def memory(self):
        """Private megabytes of the second of two workers, after some work of both."""
        with sconce.Workers(self.pool, 2) as workers:
            self.pool.bench("--input", self.short, "--in-flight", 8, "--warmup", 0, "--tasks", 8)
            return min(private_megabytes(pid) for pid in worker_processes(workers.pid))

    def engine(self, sequences):
        """Tokens of answers a second without a queue."""
        command = [f"{sconce.RELEASE}/examples/generate_in_process", MODEL, self.bodies(), sequences, 8]
        environment = {"RAYON_NUM_THREADS": str(len(self.cores)), "CANDLE_NUM_THREADS": str(len(self.cores))}
        with Asked(command, self.place.log("generate_in_process"), environment) as engine:
            return engine.answer()["answer_tokens_per_second"]

    def bodies(self):
        """The questions as bodies alone."""
        file = FOLDER / "question-bodies.jsonl"
        lines = [json.loads(line)["body"] for line in self.short.read_text().splitlines()]
        file.write_text("".join(json.dumps(body) + "\n" for body in lines))
        return file

    def peer(self, module, *questions):
        """Tokens a second of a peer that is started for this alone."""
        with Asked([sys.executable, "-m", f"peers.{module}"], self.place.log(module), self.environment) as peer:
            peer.ready()
            found = []
            for question in questions:
                peer.ask(question)
                found.append(peer.answer()["tokens_per_second"])
            return found

    def celery(self):
        """Tokens a second of Celery, with a worker process for each core."""
        app = [sys.executable, "-m", "celery", "-A", "peers.celery_kinds", "worker", "--loglevel", "WARNING"]
        environment = {**self.environment, "OMP_NUM_THREADS": "1"}
        worker = spawn([*app, "--concurrency", len(self.cores)], self.place.log("celery-text"), environment)
        try:
            return self.peer("celery_text_client", "many")[0]
        finally:
            end(worker)


def round_of(text):
    """Every figure once."""
    found = {}
    llama = text.peer("llama_client", "one", "many", "prompts")
    one, _ = text.ours(text.short, TASKS // 4, 1)
    many, _ = text.ours(text.short, TASKS, SEQUENCES)
    _, prompts = text.ours(text.long, text.passages - 2, 1)
    found["one sequence: sconce over RabbitMQ"] = one
    found["one sequence: its engine without a queue"] = text.engine(1)
    found["one sequence: llama.cpp"] = llama[0]
    found["16 sequences: sconce over RabbitMQ"] = many
    found["16 sequences: its engine without a queue"] = text.engine(SEQUENCES)
    found["16 sequences: llama.cpp, one `llama_batch`"] = llama[1]
    if MODEL == SMOLLM2:
        reference = text.peer("transformers_client", "one", "many")
        found["one sequence: transformers"] = reference[0]
        found["16 sequences: transformers, one batch"] = reference[1]
        found["16 sequences: Celery + transformers"] = text.celery()
    found["prompt processing: sconce over RabbitMQ"] = prompts
    found["prompt processing: llama.cpp"] = llama[2]
    for name, value in found.items():
        say(f"{name} {value:.1f} tokens a second")
    return found


def main():
    """Measures, then writes."""
    cores, _, _ = pin()
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        text = Text(stack, Place(cores), stack.enter_context(Rabbit(cores)).url, cores)
        found = rounds_of("text", lambda: round_of(text))
        memory = text.memory()
    write(found, cores, memory)


def write(found, cores, memory):
    """The table: medians, and how many times a peer's rate ours is (the median of the rounds' ratios)."""
    lines = ["| system | tokens/s | ours, × |", "|---|---|---|"]
    for name in found[0]:
        ours = f"{name.split(':')[0]}: sconce over RabbitMQ"
        ratio = statistics.median(of_round[ours] / of_round[name] for of_round in found)
        lines.append(f"| {name} | {statistics.median(it[name] for it in found):.0f} | {ratio:.2f} |")
    named = ",".join(map(str, cores))
    lines += ["", f"The rates are {page.rounds_of(len(found))}, on the cores {named}, which RabbitMQ shares. {MODEL.stem}, from"]
    lines += [f"one GGUF file; greedy answers of {TOKENS} tokens to short questions; prompts of some 300 tokens. transformers"]
    lines += ["computes the same weights in f32. One worker with all cores."]
    lines += [f"A second worker on the host shares the weights, and needs {memory:.0f} MB of its own."]
    if MODEL == SMOLLM2:
        replace(page.PAGE, (BEGIN, END), "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
