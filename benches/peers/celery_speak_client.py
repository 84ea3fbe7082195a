"""Sends texts as Celery tasks and waits for their sounds: `many` sends all at once, `one` the first. Answered with the
seconds of work and of sound."""

import base64
import json
import os
import sys
import time

from .asked import say
from .celery_kinds import compute

RATE = 24_000
HEADER = 44
"""Bytes of a WAV file before its samples."""


def sound(texts):
    """Seconds of sound of the texts' files."""
    files = [base64.b64decode(it.get()) for it in [compute.delay(text) for text in texts]]
    return sum(len(file) - HEADER for file in files) / (2 * RATE)


if __name__ == "__main__":
    texts = json.loads(os.environ["TEXTS"])
    sound(texts[:8])
    say({"ready": True})
    for line in sys.stdin:
        asked = texts[:1] if line.strip() == "one" else texts
        start = time.perf_counter()
        seconds = sound(asked)
        say({"seconds": time.perf_counter() - start, "sound": seconds})
