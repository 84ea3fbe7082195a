"""Turns a folder of recordings into transcripts and spoken summaries, through the queues of three pools:

    pip install "./python[aio-pika]"    # in the repository's folder
    sconce launch --config config/pools.toml
    python spoken_summaries.py models/recordings --out summaries

For the recording `talk.wav` it writes the transcript `talk.wav.txt`, and a summary as text, `talk.wav.summary.txt`, and
as sound, `talk.wav.summary.wav`.
All recordings are processed concurrently: while one is transcribed, another is summarised or spoken. If one fails,
its name and the error are printed, and the others continue. SmolLM2-135M is a small model: of a recording of a few words
it may invent what nobody said.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from sconce_client import AsyncClient, SconceError

SUFFIXES = {".wav", ".flac", ".mp3", ".ogg"}
INSTRUCTION = "Summarize in one short sentence what is said here:\n\n"


async def main() -> None:
    parser = argparse.ArgumentParser(description="Turns recordings into transcripts and spoken summaries.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("summaries"))
    parser.add_argument("--transcribe", default="sconce.speech", metavar="QUEUE")
    parser.add_argument("--generate", default="sconce.text", metavar="QUEUE")
    parser.add_argument("--speak", default="sconce.speak", metavar="QUEUE")
    args = parser.parse_args()
    try:
        recordings = sorted(path for path in args.folder.iterdir() if path.suffix.lower() in SUFFIXES)
    except OSError as error:
        sys.exit(f"{args.folder}: {error.strerror}")
    if not recordings:
        sys.exit(f"{args.folder} has no files that end with {', '.join(sorted(SUFFIXES))}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.out.samefile(args.folder):
        sys.exit(f"--out {args.out} is the folder of the recordings; the next run would take the summaries for recordings")

    async with AsyncClient(timeout=3600) as client:
        queues = args.transcribe, args.generate, args.speak
        transcriber, writer, speaker = (client.with_options(queue=queue) for queue in queues)

        async def summarize(recording: Path) -> bool:
            """Processes one recording. Returns whether it succeeded."""
            try:
                transcript = (await transcriber.transcribe(recording)).text
                (args.out / f"{recording.name}.txt").write_text(transcript + "\n", encoding="utf-8")
                if not transcript:
                    print(f"{recording.name}: there is no speech in it")
                    return True
                reply = await writer.chat(INSTRUCTION + transcript, max_tokens=80, temperature=0)
                summary = reply.text.strip()
                (args.out / f"{recording.name}.summary.txt").write_text(summary + "\n", encoding="utf-8")
                (args.out / f"{recording.name}.summary.wav").write_bytes(await speaker.speak(summary))
            except (SconceError, ValueError) as error:
                print(f"{recording.name}: {error}", file=sys.stderr)
                return False
            print(f"{recording.name}: {summary}")
            return True

        succeeded = await asyncio.gather(*(summarize(recording) for recording in recordings))
    if not all(succeeded):
        sys.exit(1)


asyncio.run(main())
