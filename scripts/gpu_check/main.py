"""The order of things: finds or builds the program, makes the models, checks, measures while time is left,
and writes as it goes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import answers, arguments, discovery, fitness, isolation, memory, page, speed
from .findings import FAIL, NOT_MEASURED, PASS, Findings
from .scene import Scene
from .sconce import Sconce
from .shapes import SHAPES

START, TRY = 6.0, 15.0
"""Seconds, roughly, that a round takes beside what is measured, and that a row takes before its first."""
LEAST, MOST = 1.5, 6.0
"""Seconds of one measurement."""
MEASURED = 4.5
"""Measurements in a round, one of them with its warm-up."""


def main():
    """The exit code."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    asked = arguments.parse()
    if asked.results:
        results = json.loads(asked.results.read_text(encoding="utf-8"))
        print(page.markdown(results))
    else:
        asked.out.mkdir(parents=True, exist_ok=True)
        with open(asked.out / "gpu-check.log", "w", encoding="utf-8") as log:
            results = _run(asked, log)
    if asked.write_docs:
        page.write_docs(results, asked.write_docs)
    return int(any(it["status"] == FAIL for it in results["findings"]))


def _run(asked, log):
    end = time.monotonic() + asked.seconds
    findings = Findings(log)
    # Below the folder that TMPDIR names; gone when this ends.
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        folder = Path(folder)
        sconce = Sconce(_program(asked), folder, log, asked.set)
        discovery.starts(sconce, findings)
        scene = Scene(asked, sconce, folder)
        results = {"conditions": page.conditions(scene, sys.argv[1:]), "seed": asked.seed, "rows": []}
        results["findings"] = findings.rows
        print(f"{results['conditions'].get('card', 'no GPU')}: {scene.uuid}", flush=True)
        for name in asked.shapes:
            scene.make(SHAPES[name])
        for check in (discovery, isolation, fitness, answers, memory):
            check.check(scene, findings)
            sconce.forget()
            page.save(asked.out, results)
        if not asked.no_speed:
            _measure(scene, findings, results, end)
    counts = [f"{findings.count(status)} {status}" for status in (PASS, FAIL, NOT_MEASURED)]
    print(f"\n{page.table(results['rows'])}\n\n{', '.join(counts)}; {asked.out}/gpu-check.md", flush=True)
    return results


def _measure(scene, findings, results, end):
    """Fills the table, the rows that matter most first, each in its part of the time that is left."""
    asked = scene.asked
    wanted = [(model, dtype) for dtype in asked.timed for model in scene.models]
    for at, (model, dtype) in enumerate(wanted):
        left = end - time.monotonic()
        rounds, seconds = _afforded(asked, left, len(wanted) - at)
        name = f"{model.shape.name} in {dtype}"
        if seconds is None:
            findings.add(f"{name}: speed", NOT_MEASURED, f"{left:.0f} s were left; --seconds gives more")
            page.save(asked.out, results)
            continue
        row = speed.measure(scene, findings, (model, dtype), seconds, rounds)
        if row:
            results["rows"].append(row)
            speed.judge(scene, findings, row)
            print(page.table([row]), flush=True)
        page.save(asked.out, results)


def _afforded(asked, left, rows):
    """How many rounds of measurements of how many seconds there is time for, in the next of some rows. None:
    for none. What there is no time for goes without, rather than all with too little."""
    if asked.measure:
        return asked.rounds, asked.measure
    left /= max(1, min(rows, left // (TRY + START + LEAST * MEASURED)))
    for rounds in range(asked.rounds, 0, -1):
        seconds = ((left - TRY) / rounds - START) / MEASURED
        if seconds >= LEAST:
            return rounds, min(MOST, seconds)
    return 1, None


def _program(asked):
    """The program: where it was said to be, where it is built to, or built now."""
    if asked.sconce:
        return asked.sconce
    for path in arguments.BUILT if asked.device == "cpu" else arguments.BUILT[:1]:
        if path.exists():
            return path
    if not shutil.which("cargo"):
        missing = f"{arguments.BUILT[0]} is not there, and no cargo to build it with"
        raise SystemExit(f"gpu-check: {missing}; --sconce PATH names another")
    print("building target/cuda/release/sconce (ten minutes)", flush=True)
    subprocess.run([arguments.ROOT / "scripts/build-cuda"], check=True)
    return arguments.BUILT[0]
