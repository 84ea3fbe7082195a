"""What the driver says of the card, by nvidia-smi; and how fast it multiplies, by PyTorch."""

import shutil
import statistics
import subprocess
import threading
import time
from contextlib import suppress

from .findings import NotMeasured

EVERY = 0.25
"""Seconds between two looks at the card's load."""
SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrices."""


def smi(*arguments):
    """What nvidia-smi prints, by lines and columns."""
    if not shutil.which("nvidia-smi"):
        raise NotMeasured("no nvidia-smi here")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = ["nvidia-smi", "--format=csv,noheader,nounits", *arguments]
    done = subprocess.run(command, **pipes, text=True, timeout=60, check=False)
    if done.returncode:
        raise NotMeasured(f"nvidia-smi: {done.stdout.strip()[:200]}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


class Load:
    """Looks at the share of time in which the card computed anything, as long as a `with` lasts."""

    def __init__(self, uuid):
        self.uuid, self.seen = uuid, []
        self.over = threading.Event()
        self.looking = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self.looking.start()
        return self

    def _look(self):
        # Nothing to see on a CPU, and where the driver does not say.
        with suppress(NotMeasured, ValueError, subprocess.TimeoutExpired):
            while self.uuid != "cpu" and not self.over.wait(EVERY):
                ((share,),) = smi("--query-gpu=utilization.gpu", "-i", self.uuid)
                self.seen.append((time.monotonic(), float(share)))

    def __exit__(self, *_):
        self.over.set()
        self.looking.join()

    def percent(self, begin, end, seconds):
        """Of the span of so many seconds, between two times, in which it computed most: what is before and
        behind it is the program's start and its end. None where too little was seen."""
        within = [(at, share) for at, share in self.seen if begin <= at <= end]
        spans = [[share for at, share in within if first <= at <= first + seconds] for first, _ in within]
        whole = [span for span in spans if len(span) >= max(4, seconds / EVERY / 2)]
        return max(map(statistics.mean, whole), default=None)


def matrix_rate(torch, device, dtype):
    """Floating-point operations a second of the fastest of some products of two square matrices."""
    size = SIZE[device.type]
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, begun = 0.0, time.perf_counter()
    for _ in range(30):
        _wait(torch, device)
        start = time.perf_counter()
        one @ other
        _wait(torch, device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
        if time.perf_counter() - begun > 2:
            break
    return best


def _wait(torch, device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
