"""Promises about what is here and what is refused: the build, the devices, their names, too many copies."""

import os

from . import card
from .findings import PASS, NotMeasured

REFUSED = 78
"""The exit code of settings that cannot be."""
MOST_WORKERS = 1024
"""That settings take."""


def starts(sconce, findings):
    """The first of them, without which there is nothing to check."""
    findings.check("the build starts and says its version", lambda: _starts(sconce))
    if findings.count(PASS) == 0:
        raise SystemExit(1)


def check(scene, findings):
    """All others."""
    findings.check("`sconce devices` shows the card as the driver does", lambda: _shown(scene))
    findings.check("every name of a card means that card", lambda: _named(scene))
    findings.check("a wrong, doubled or empty entry is refused", lambda: _refused(scene))
    findings.check("too many copies are refused with the numbers", lambda: _too_many(scene))


def _starts(sconce):
    ended = sconce.run("--version")
    size = os.path.getsize(sconce.path) / 1e6
    return ended.code == 0 and ended.out.startswith("sconce "), f"{ended.out.strip()}, {size:.1f} MB"


def _shown(scene):
    scene.needs_gpu()
    asked = "--query-gpu=uuid,name,memory.total,driver_version,compute_cap"
    rows = {row[0]: row for row in card.smi(asked)}
    _, name, memory, driver, capability = rows[scene.uuid]
    ours = scene.card
    # NVML tells bytes, nvidia-smi whole MiB.
    same = ours["name"] == name and abs(ours["memory"]["total"] / 2**20 - float(memory)) <= 1
    same &= ".".join(map(str, ours["compute_capability"])) == capability
    same &= scene.host["nvidia"]["driver"] == driver and len(rows) == len(scene.host["nvidia"]["gpus"])
    return same, f"{scene.uuid}, {name}, {memory} MiB, driver {driver}, compute capability {capability}"


def _slots(scene, devices):
    ended = scene.sconce.devices(["pool[0].model=echo", f"pool[0].devices={devices}"])
    return ended, {slot["device"] for slot in ended.report()["slots"]} if ended.code == 0 else set()


def _named(scene):
    scene.needs_gpu()
    number = scene.host["nvidia"]["gpus"].index(scene.card)
    names = [f"cuda:{number}", scene.uuid, scene.uuid[: len("GPU-00000000")]]
    for name in names:
        ended, devices = _slots(scene, f'["{name}"]')
        if devices != {scene.uuid}:
            return False, f"{name} means {sorted(devices)}: {ended.last_words()}"
    _, every = _slots(scene, "auto")
    count = len(scene.host["nvidia"]["gpus"])
    return scene.uuid in every, f"{', '.join(names)}; auto takes {len(every)} of {count}"


def _refused(scene):
    cards = scene.host["nvidia"]["gpus"]
    # Where there is no driver, that is why.
    of_card = ("there are", "none of this name") if cards else ("", "")
    entries = {f'["cuda:{len(cards)}"]': of_card[0], '["GPU-no-such-card"]': of_card[1]}
    entries.update({'["tpu"]': "a device is", "[]": "expected"})
    if scene.card:
        entries[f'["cuda:{cards.index(scene.card)}", "{scene.uuid}"]'] = "there already"
    for entry, why in entries.items():
        ended, _ = _slots(scene, entry)
        if ended.code != REFUSED or why not in ended.err:
            return False, f"{entry} ends with exit {ended.code}: {ended.last_words()}"
    return True, f"{', '.join(entries)}: exit {REFUSED} each; the last: {ended.last_words()}"


def _too_many(scene):
    scene.needs_gpu()
    if not scene.card.get("memory"):
        raise NotMeasured("the driver does not say how much memory is free")
    settings = [f"pool[0].devices={scene.uuid}", f"pool[0].workers_per_device={MOST_WORKERS}"]
    ended = scene.sconce.devices([*settings, f"pool[0].model={scene.models[0].folder}"])
    error = ended.report()["error"] or ""
    kept = ended.code == REFUSED and "too many copies" in error and "GiB" in error
    return kept, f"{MOST_WORKERS} workers: exit {ended.code}, … {error[error.find(' need ') :][:120]}"
