"""Sends each question as a Celery task and collects the answers: `many` is answered with tokens a second."""

import os
import sys
import time

from .asked import bodies, say
from .celery_kinds import compute

if __name__ == "__main__":
    sequences, tokens = int(os.environ["SEQUENCES"]), int(os.environ["TOKENS"])
    asked = bodies()[:sequences]
    [it.get() for it in [compute.delay({**body, "max_tokens": 4}) for body in asked[:2]]]
    say({"ready": True})
    for _ in sys.stdin:
        start = time.perf_counter()
        [it.get() for it in [compute.delay(body) for body in asked]]
        say({"tokens_per_second": len(asked) * tokens / (time.perf_counter() - start)})
