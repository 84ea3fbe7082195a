"""The package hibari-tts in one process: `many` speaks all sentences, `one` the first of them, and both are answered with
the seconds of work and of sound. THREADS are those of ONNX Runtime."""

import json
import os
import sys
import time

from hibari import Hibari

from .asked import say


def speaker(threads):
    """A function from a text to its samples."""
    voice = Hibari(threads=threads)
    voice("Warm up.")
    return voice


def main():
    """Answers the questions on stdin."""
    voice, texts = speaker(int(os.environ["THREADS"])), json.loads(os.environ["TEXTS"])
    say({"ready": True})
    for line in sys.stdin:
        asked = texts[:1] if line.strip() == "one" else texts
        start = time.perf_counter()
        samples = sum(len(voice(text)) for text in asked)
        say({"seconds": time.perf_counter() - start, "sound": samples / voice.sample_rate})


if __name__ == "__main__":
    main()
