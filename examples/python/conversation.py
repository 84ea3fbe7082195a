"""Synthesizes a dialogue on all workers of a pool, and writes it as one WAV file:

    pip install "./python[aio-pika]"    # in the repository's folder
    sconce launch --set 'pool[0].model=models/hibari' --set 'pool[0].devices=["cpu", "cpu"]'
    python conversation.py [--queue sconce.tasks] [--out conversation.wav] [dialogue.txt]

Each line of the file is `Name: what is said`. Every line is a task of its own, so that all workers speak at the same
time, each on its device with its own model. The lines are joined here, in the order of the file. If a worker dies,
RabbitMQ gives its tasks to another one. Each line has a seed, so the sound does not depend on the worker that computed it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import wave
from dataclasses import dataclass
from pathlib import Path

from sconce_client import AsyncClient, Reply, SconceError, TaskTimeout

PAUSE = 0.35  # seconds between two lines
SPEEDS = (1.0, 1.15, 0.88, 1.3, 0.78)
"""The speed of the first speaker who gets a voice, of the second one, and so on."""


@dataclass(frozen=True)
class Line:
    number: int
    """In its file, from 1."""
    text: str
    voice: str
    speed: float


def read_dialogue(path: Path, voices: list[str]) -> list[Line]:
    """Reads the lines, and gives each speaker a voice. If there are more speakers than voices, they share the voices at
    different speeds."""
    speakers: list[str] = []
    lines = []
    try:
        written = path.read_text(encoding="utf-8")
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    for number, line in enumerate(written.splitlines(), 1):
        if not line.strip():
            continue
        speaker, colon, text = line.partition(":")
        if not colon or not text.strip():
            sys.exit(f"{path}:{number}: {line!r} is not `Name: what is said`")
        if speaker not in speakers:
            speakers.append(speaker)
        reuse, voice = divmod(speakers.index(speaker), len(voices))
        lines.append(Line(number, text.strip(), voices[voice], SPEEDS[reuse % len(SPEEDS)]))
    if not lines:
        sys.exit(f"{path} has no line of the form `Name: what is said`")
    return lines


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


async def find_voices(client: AsyncClient) -> list[str]:
    """The pool's voices. Says so if it has to wait for them."""
    try:
        return await client.with_options(timeout=2).voices()
    except TaskTimeout as error:
        print(f"{error}; waiting for workers", file=sys.stderr, flush=True)
    return await client.voices()


async def main() -> None:
    parser = argparse.ArgumentParser(description="Synthesizes a dialogue on all workers of a pool.")
    parser.add_argument("dialogue", nargs="?", type=Path, default=Path(__file__).with_name("dialogue.txt"))
    parser.add_argument("--queue", default="sconce.tasks", help="the task queue of a pool that speaks")
    parser.add_argument("--out", type=Path, default=Path("conversation.wav"))
    args = parser.parse_args()
    if not args.out.absolute().parent.is_dir():
        sys.exit(f"{args.out.parent} is no folder, so {args.out} cannot be written")

    async with AsyncClient(queue=args.queue) as client:
        try:
            voices = await find_voices(client)
        except SconceError as error:
            sys.exit(f"the voices of the queue {args.queue}: {error}")
        lines = read_dialogue(args.dialogue, voices)
        speakers = len({(line.voice, line.speed) for line in lines})

        async def speak(line: Line) -> Reply:
            body = {"input": line.text, "voice": line.voice, "speed": line.speed, "seed": line.number}
            reply = await client.request({**body, "response_format": "pcm"}, url="/v1/audio/speech")
            print(f"line {line.number} by {reply.headers['worker']}", file=sys.stderr, flush=True)
            return reply

        answers = await asyncio.gather(*(speak(line) for line in lines), return_exceptions=True)

    replies = []
    for line, answer in zip(lines, answers):
        if isinstance(answer, SconceError):
            sys.exit(f"{args.dialogue}:{line.number}: {line.text!r}: {answer}")
        if isinstance(answer, BaseException):
            raise answer
        replies.append(answer)
    rate = int(replies[0].headers["sample_rate"])  # samples per second

    with wave.open(str(args.out), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        for reply in replies:
            out.writeframes(reply.body + bytes(2 * int(PAUSE * rate)))
    workers = len({reply.headers["worker"] for reply in replies})
    print(f"{args.out}: {count(len(lines), 'line')}, spoken by {count(workers, 'worker')}")
    if speakers > len(voices):
        print(f"{speakers} speakers share {count(len(voices), 'voice')}, at different speeds", file=sys.stderr)


asyncio.run(main())
