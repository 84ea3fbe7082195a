"""Processes beside this one: how they are started, spoken to, measured and ended.

None of them outlives this process, in whatever way it ends.
"""

import ctypes
import json
import os
import signal
import subprocess
from pathlib import Path

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def _tie_to_parent(cores):
    if cores:
        os.sched_setaffinity(0, cores)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def spawn(command, log, environment=None, cores=None, **pipes):
    """Starts a process that ends with us, on our cores or on others. Its stderr, and stdout where not
    piped, go to `log`.

    It has a session of its own: Ctrl-C reaches us alone, and we end the others in order.
    """
    with open(log, "ab") as file:
        return subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **(environment or {})},
            stdin=pipes.get("stdin", subprocess.DEVNULL),
            stdout=pipes.get("stdout", file),
            stderr=file,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: _tie_to_parent(cores),
        )


def end(process, patience=20):
    """SIGTERM, and SIGKILL for what does not listen."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def children(pid):
    """The processes that `pid` started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def worker_processes(launcher):
    """The workers of sconce: among the launcher's children is a guard too."""
    return [pid for pid in children(launcher) if _arguments(pid)[1:2] == [b"worker"]]


def _arguments(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def private_megabytes(pid):
    """Memory that no other process shares with `pid`."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    private = [line.split() for line in rollup if line.startswith(("Private_Clean", "Private_Dirty"))]
    return sum(int(words[1]) for words in private) * 1024 / 1e6


class Asked:
    """A process that answers each line with a line of JSON, and blocks on its stdin in between."""

    def __init__(self, command, log, environment=None, cores=None):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.log = log
        self.process = spawn(command, log, environment, cores, **pipes)

    def ready(self):
        """Waits for its first line."""
        self.answer()
        return self

    def ask(self, question):
        """Asks; the answer is `answer`'s."""
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()

    def answer(self):
        """The next line it says."""
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[:4]} has ended; see {self.log}")
        return json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        end(self.process)
