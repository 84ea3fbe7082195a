"""What the driver says of the card, by nvidia-smi; and how fast it multiplies, by PyTorch."""

import shutil
import statistics
import subprocess
import threading
import time

from .findings import NotMeasured

PLAIN = ["--format=csv,noheader,nounits"]
EVERY = 250
"""Milliseconds between two looks at the card's load."""
SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrices."""


def smi(*arguments):
    """What nvidia-smi prints, by lines and columns."""
    if not shutil.which("nvidia-smi"):
        raise NotMeasured("no nvidia-smi here")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["nvidia-smi", *PLAIN, *arguments], **pipes, text=True, timeout=60, check=False)
    if done.returncode:
        raise NotMeasured(f"nvidia-smi: {done.stdout.strip()[:200]}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


class Load:
    """Looks at the share of time in which the card computed anything, as long as a `with` lasts."""

    def __init__(self, uuid):
        self.uuid, self.seen = uuid, []

    def __enter__(self):
        self.process = None
        if shutil.which("nvidia-smi") and self.uuid.startswith("GPU-"):
            command = [
                "nvidia-smi",
                "--query-gpu=utilization.gpu",
                *PLAIN,
                "-i",
                self.uuid,
                "-lms",
                str(EVERY),
            ]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self):
        for line in self.process.stdout:
            if line.strip().isdigit():
                self.seen.append((time.monotonic(), int(line)))

    def __exit__(self, *_):
        if self.process:
            self.process.terminate()
            self.process.wait()

    def percent(self, begin, end, seconds):
        """Of the span of so many seconds, between two times, in which it computed most: what is before and
        behind it is the program's start and its end. None where too little was seen."""
        within = [(at, share) for at, share in self.seen if begin <= at <= end]
        spans = [[share for at, share in within if first <= at <= first + seconds] for first, _ in within]
        whole = [span for span in spans if len(span) >= max(4, 0.8 * 1000 * seconds / EVERY)]
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
