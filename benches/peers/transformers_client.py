"""transformers' `generate` in one process, in f32: `one` and `many` are answered with tokens a second."""

import json
import os
import sys
import time

from .asked import say
from .transformers_model import Generator

if __name__ == "__main__":
    sequences, tokens = int(os.environ["SEQUENCES"]), int(os.environ["TOKENS"])
    generator = Generator(os.environ["MODEL"], int(os.environ["THREADS"]))
    with open(os.environ["TEXTS_FILE"], encoding="utf-8") as file:
        prompts = [json.loads(line)["body"]["prompt"] for line in file]
    generator.texts(prompts[:1], 4)
    say({"ready": True})
    for line in sys.stdin:
        size = sequences if line.strip() == "many" else 1
        asked = prompts[:sequences] if size > 1 else prompts[:2]
        start = time.perf_counter()
        for first in range(0, len(asked), size):
            generator.texts(asked[first : first + size], tokens)
        say({"tokens_per_second": len(asked) * tokens / (time.perf_counter() - start)})
