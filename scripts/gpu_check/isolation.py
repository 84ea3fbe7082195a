"""Promises about who opens what: the launcher nothing, a worker its own device or none."""

import json
import os
import time
from pathlib import Path

from . import card, sconce, starting
from .findings import NotMeasured

DEVICE_FAILED = 83
TEXTS = 100
BESIDE, MOST = 3e13, 20_000
"""Operations that a CPU takes longer for than a card to load the model; and texts, at most."""


def check(scene, findings):
    """All of them."""
    findings.check("the launcher never opens CUDA, its worker does, on one device", lambda: _launcher(scene))
    findings.check("every reply names the device that computed it", lambda: _replies(scene))
    findings.check("a worker that is shown another device than its own ends", lambda: _other_device(scene))
    findings.check("a worker whose device is not there ends, and takes no other", lambda: _no_device(scene))
    findings.check("a CPU worker works beside a GPU worker", lambda: _beside(scene))


def _opened(pid):
    """Whether a process has opened CUDA, and what of it."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    found = {"libcuda"} if "libcuda.so" in maps else set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(file).startswith("/dev/nvidia-uvm"):
                found.add("nvidia-uvm")
        except OSError:
            continue
    return found


def _shown(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = dict(it.decode(errors="replace").partition("=")[::2] for it in variables)
    return pairs.get("CUDA_VISIBLE_DEVICES")


def _launcher(scene):
    scene.needs_gpu()
    sconce.is_linux()
    model = scene.models[0]
    arguments, _ = scene.sconce.arguments(model.texts.first(TEXTS), model.folder, scene.uuid, ())
    launcher = scene.sconce.start(*arguments)
    seen, worker, shown, computing = set(), None, None, []
    try:
        while launcher.poll() is None:
            try:
                seen |= _opened(launcher.pid)
                for child in sconce.workers(launcher.pid):
                    if "libcuda" in _opened(child):
                        worker, shown = child, _shown(child)
                        computing = computing or _computing()
            except OSError:
                # One of them has just ended.
                pass
            time.sleep(0.05)
    finally:
        sconce.ended_well(scene.sconce.end(launcher))
    if worker is None:
        raise NotMeasured("no worker with libcuda was seen")
    kept = not seen and shown == scene.uuid and launcher.pid not in computing
    listed = f"; nvidia-smi lists {computing}" if computing else ""
    opened = ", ".join(sorted(seen)) or "neither libcuda nor /dev/nvidia-uvm"
    of_worker = f"worker {worker}: libcuda, CUDA_VISIBLE_DEVICES={shown}{listed}"
    return kept, f"launcher {launcher.pid}: {opened}; {of_worker}"


def _computing():
    """Process ids that nvidia-smi lists, which in a container may be others."""
    try:
        return [int(row[0]) for row in card.smi("--query-compute-apps=pid") if row[0].isdigit()]
    except NotMeasured:
        return []


def _replies(scene):
    texts = scene.models[0].texts.mixed(TEXTS)
    ended, answers = scene.embed(scene.models[0], texts)
    devices = sconce.ended_well(ended).report()["devices"]
    return devices == {scene.uuid: len(texts)} and len(answers) == len(texts), f"{devices} of {len(texts)}"


def _worker(scene, device, visible):
    """A worker that is told to use `device`, and shown `visible`."""
    start = starting.overheard(scene.sconce)
    assignment = start["assignment"]
    assignment["device"], assignment["pool"]["model"] = device, str(scene.models[0].folder)
    command = ["worker", "--launched-by", os.getpid(), "--slot", assignment["slot"]]
    more = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # Open until its end, which it would otherwise take for that of its launcher.
    theirs, ours = os.pipe()
    try:
        os.write(ours, json.dumps(start).encode() + b"\n")
        ended = scene.sconce.run(*command, stdin=theirs, **more)
    finally:
        os.close(theirs)
        os.close(ours)
    events = [json.loads(line) for line in ended.out.splitlines()]
    stopped = next((it["cause"] for it in events if it["event"] == "stopped"), "")
    ready = any(it["event"] == "ready" for it in events)
    return ended.code == DEVICE_FAILED and not ready, f"exit {ended.code}: {stopped}", stopped


def _other_device(scene):
    scene.needs_gpu()
    wrong = "GPU-00000000-0000-0000-0000-000000000000"
    kept, seen, words = _worker(scene, wrong, scene.uuid)
    return kept and scene.uuid in words, seen


def _no_device(scene):
    kept, seen, _ = _worker(scene, "GPU-00000000-0000-0000-0000-000000000000", "")
    return kept, seen


def _beside(scene):
    scene.needs_gpu()
    model = scene.models[0]
    # Few at a time, so that the slower of the two gets some.
    settings = ["pool[0].prefetch=8", "pool[0].batch.max_requests=8"]
    count = min(MOST, int(BESIDE / (60 * model.shape.flop_per_token)))
    ended, _ = scene.sconce.embed(model.texts.first(count), model.folder, f"{scene.uuid},cpu", settings)
    devices = sconce.ended_well(ended).report()["devices"]
    return set(devices) == {scene.uuid, "cpu"} and sum(devices.values()) == count, f"{devices}"
