"""Whether we were alone: which share of the cores' time went to processes that are not ours."""

import os
import time
from pathlib import Path

from .processes import children

TICKS = os.sysconf("SC_CLK_TCK")


def _busy(cores):
    """Seconds that programs ran on the cores, or that the host took from them."""
    lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    fields = {line.split()[0]: line.split()[1:] for line in lines}
    # user, nice, system, steal; interrupts belong to nobody.
    return sum(int(fields[f"cpu{core}"][at]) for core in cores for at in (0, 1, 2, 7)) / TICKS


def _ours(pid):
    """Seconds that a process ran, and all that it started, and those of them that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS + sum(map(_ours, children(pid)))
    except FileNotFoundError:
        return 0.0


class Others:
    """Counts from when it is made."""

    def __init__(self, cores):
        self.cores = cores
        self.start = self._now()

    def _now(self):
        return time.monotonic(), _busy(self.cores) - _ours(os.getpid())

    def share(self):
        """Of the time since the start."""
        seconds, used = (now - then for now, then in zip(self._now(), self.start, strict=True))
        return max(0.0, used / (seconds * len(self.cores)))
