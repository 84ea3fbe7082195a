"""Synthesizes a dialogue on all workers of a pool, and writes it as one WAV file:

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

from sconce_client import AsyncClient, Reply, SconceError

RATE = 24_000  # samples per second of hibari
PAUSE = 0.35  # seconds between two lines
SPEEDS = (1.0, 1.15, 0.88, 1.3, 0.78)  # the first for the first name of each voice, and so on


@dataclass(frozen=True)
class Line:
    text: str
    voice: str
    speed: float


def read_dialogue(path: Path, voices: list[str]) -> list[Line]:
    """Reads the lines, and gives each name a voice. After the last voice they are used again, at another speed."""
    names: list[str] = []
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        name, colon, text = line.partition(":")
        if not colon or not text.strip():
            sys.exit(f"{path}:{number}: {line!r} is not `Name: what is said`")
        if name not in names:
            names.append(name)
        reuse, voice = divmod(names.index(name), len(voices))
        lines.append(Line(text.strip(), voices[voice], SPEEDS[reuse % len(SPEEDS)]))
    return lines


async def main() -> None:
    parser = argparse.ArgumentParser(description="Synthesizes a dialogue on all workers of a pool.")
    parser.add_argument("dialogue", nargs="?", type=Path, default=Path(__file__).with_name("dialogue.txt"))
    parser.add_argument("--queue", default="sconce.tasks", help="the task queue of a pool that speaks")
    parser.add_argument("--out", type=Path, default=Path("conversation.wav"))
    args = parser.parse_args()

    async with AsyncClient(queue=args.queue) as client:
        listed = await client.request({}, url="/v1/audio/voices")
        lines = read_dialogue(args.dialogue, [voice["id"] for voice in listed.json()["voices"]])

        async def speak(number: int, line: Line) -> Reply:
            body = {"input": line.text, "voice": line.voice, "speed": line.speed, "seed": number}
            try:
                reply = await client.request({**body, "response_format": "pcm"}, url="/v1/audio/speech")
            except SconceError as error:
                sys.exit(f"{args.dialogue}, line {number + 1} ({line.text!r}): {error}")
            print(f"line {number + 1} by {reply.headers['worker']}", file=sys.stderr, flush=True)
            return reply

        replies = await asyncio.gather(*(speak(number, line) for number, line in enumerate(lines)))

    with wave.open(str(args.out), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        for reply in replies:
            out.writeframes(reply.body + bytes(2 * int(PAUSE * RATE)))
    workers = len({reply.headers["worker"] for reply in replies})
    print(f"{args.out}: {len(lines)} lines, spoken by {workers} workers")


asyncio.run(main())
