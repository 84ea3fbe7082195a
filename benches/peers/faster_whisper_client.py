"""faster-whisper in one process: `long`, `batched` and `short` are answered with seconds, `texts` with the texts of the
short recordings. Greedy, in the number type of COMPUTE_TYPE, with its voice activity detection."""

import json
import os
import sys
import time
from pathlib import Path

from faster_whisper import BatchedInferencePipeline, WhisperModel

from .asked import say

BATCH = 8


def recogniser(threads):
    """A function from a file to its text, and one that computes the windows of a file in batches."""
    model = WhisperModel(
        os.environ["CT2_MODEL"], device="cpu", compute_type=os.environ["COMPUTE_TYPE"], cpu_threads=threads
    )
    batched = BatchedInferencePipeline(model=model)

    def text(segments):
        return " ".join(segment.text.strip() for segment in segments)

    return (
        lambda file: text(model.transcribe(file, beam_size=1, language="en", vad_filter=True)[0]),
        lambda file: text(batched.transcribe(file, beam_size=1, language="en", batch_size=BATCH)[0]),
    )


def main():
    """Answers the questions on stdin."""
    one_by_one, batched = recogniser(int(os.environ["THREADS"]))
    long, short = os.environ["LONG_FILE"], json.loads(os.environ["SHORT_FILES"])
    one_by_one(short[0])
    batched(short[0])
    say({"ready": True})
    for line in sys.stdin:
        start, found = time.perf_counter(), {}
        match line.strip():
            case "long":
                one_by_one(long)
            case "batched":
                batched(long)
            case "short":
                one_by_one(short[0])
            case "texts":
                found = {"texts": {Path(file).stem: one_by_one(file) for file in short}}
        say({"seconds": time.perf_counter() - start, **found})


if __name__ == "__main__":
    main()
