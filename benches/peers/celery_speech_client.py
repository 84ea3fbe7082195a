"""Sends a recording as often as TASKS says as Celery tasks and waits for their texts: `many` is answered with seconds."""

import os
import sys
import time

from .asked import say
from .celery_kinds import compute

if __name__ == "__main__":
    file, tasks = os.environ["LONG_FILE"], int(os.environ["TASKS"])
    short = os.environ["WARM_UP_FILE"]
    [it.get() for it in [compute.delay(short) for _ in range(2 * tasks)]]
    say({"ready": True})
    for _ in sys.stdin:
        start = time.perf_counter()
        [it.get() for it in [compute.delay(file) for _ in range(tasks)]]
        say({"seconds": time.perf_counter() - start})
