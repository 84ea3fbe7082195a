"""What a launcher writes to its worker. A check that starts a worker by itself, with another device than it
is shown, needs that line: it is overheard here, so that nothing in this program has to know its form."""

import json
import os
import shutil
import signal
import time

from .findings import NotMeasured
from .sconce import is_linux, workers

PATIENCE = 20
"""Seconds."""


def overheard(sconce):
    """The assignment of a worker, as the launcher of `run-batch` wrote it. Its program is exchanged for one
    that only listens, and its worker killed, so that the launcher starts that."""
    is_linux()
    folder = sconce.folder / "overheard"
    folder.mkdir(exist_ok=True)
    program, heard, stub = folder / "sconce", folder / "start.json", folder / "stub"
    shutil.copy2(sconce.path, program)
    stub.write_text(
        f"#!/bin/sh\nhead -n 1 >'{heard}.new' && mv '{heard}.new' '{heard}'\nexit 1\n", encoding="utf-8"
    )
    stub.chmod(0o755)
    slow = [{"input": "a", "sleep_ms": 1000 * PATIENCE}]
    arguments, _ = sconce.arguments(slow, "echo", "cpu", ["launcher.restart_delay=10ms"])
    launcher = sconce.start(*arguments, program=program)
    try:
        victims = _until(lambda: workers(launcher.pid), launcher)
        os.replace(stub, program)
        os.kill(victims[0], signal.SIGKILL)
        _until(heard.exists, launcher)
    finally:
        launcher.kill()
        sconce.end(launcher)
    return json.loads(heard.read_text(encoding="utf-8"))


def _until(look, launcher):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and launcher.poll() is None:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise NotMeasured("a launcher's first line to its worker could not be overheard")
