"""The results as JSON, as a page of Markdown, and in `docs/gpu.md` between its marks."""

import json
import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from . import card, pytorch
from .arguments import ROOT
from .findings import FAIL, NOT_MEASURED, PASS, NotMeasured
from .speed import USUAL

BEGIN, END = "<!-- `make gpu-check` writes from here -->", "<!-- to here -->"


def _commit():
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.run(command, **pipes, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor():
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    names = re.findall(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return names[0] if names else platform.machine()


def conditions(scene, arguments):
    """Where, when and with what it was checked."""
    found = {
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["scripts/gpu-check", *arguments]),
        "commit": _commit(),
        "sconce": scene.sconce.run("--version").out.strip(),
        "binary_bytes": os.path.getsize(scene.sconce.path),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"Linux {platform.release()}, Python {platform.python_version()}",
        "versions": pytorch.versions(),
        "device": scene.uuid,
    }
    if scene.card:
        memory = (scene.card["memory"] or {"total": 0})["total"] / 2**30
        found["card"] = f"{scene.card['name']}, {memory:.0f} GiB, driver {scene.host['nvidia']['driver']}"
        with suppress(NotMeasured):
            asked = "--query-gpu=clocks.max.sm,power.limit"
            clock, power = card.smi(asked, "-i", scene.uuid)[0]
            found["card"] += f", {clock} MHz at most, {power} W"
    return found


def save(folder, results):
    """Writes both files, whole at each moment."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"gpu-check.json": json.dumps(results, indent=1), "gpu-check.md": markdown(results)}
    for name, text in files.items():
        new = folder / f"{name}.new"
        new.write_text(text + "\n", encoding="utf-8")
        os.replace(new, folder / name)


def _number(value, form):
    return "not measured" if value is None else format(value, form)


def table(rows):
    """What was timed."""
    if not rows:
        return "Speed: not measured."
    names = ["model", "dtype", "sconce, texts/s", "tokens/s", "bare, tokens/s", "queue costs"]
    names += [
        "PyTorch, texts/s",
        f"sentence-transformers ({USUAL})",
        "ahead",
        "of the matrix rate",
        "busy (worker, driver)",
    ]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        theirs = _number(row.get("pytorch"), ",.0f")
        busy = f"{_number(row['busy'], '.0f')} %, {_number(row['busy_by_driver'], '.0f')} %"
        cells = [row["model"], row["dtype"], _number(row["texts"], ",.0f"), _number(row["tokens"], ",.0f")]
        cells += [_number(row["bare_tokens"], ",.0f"), f"{row['queue_percent']:.1f} %"]
        cells += [f"{theirs} ({row['pytorch_is']})" if "pytorch_is" in row else theirs]
        cells += [_number(row.get("sentence_transformers"), ",.0f"), f"{_number(row.get('ahead'), '.2f')} ×"]
        cells += [_rate(row), busy.replace("not measured %", "not measured")]
        lines.append(f"| {' | '.join(cells)} |".replace("not measured ×", "not measured"))
    return "\n".join(lines)


def _rate(row):
    if "matrix_rate" not in row:
        return "not measured"
    return f"{row['matrix_percent']:.0f} % of {row['matrix_rate'] / 1e12:,.1f} TFLOP/s"


def markdown(results):
    """The page."""
    where, rows = results["conditions"], results["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items()) or "no PyTorch"
    statuses = [it["status"] for it in results["findings"]]
    counts = ", ".join(f"{statuses.count(it)} {it}" for it in (PASS, FAIL, NOT_MEASURED) if it in statuses)
    lines = [
        f"- {where['when']}, commit `{where['commit']}`, `{where['command']}`: {counts}",
        f"- {where.get('card', 'no GPU')}; {where['processor']}, {where['cores']} cores; {where['system']}",
        f"- {where['sconce']}, a program of {where['binary_bytes'] / 1e6:.0f} MB; {versions}",
    ]
    if rows:
        means = sorted({f"{row['mean_tokens']:.0f}" for row in rows})
        texts = f"texts of {' or '.join(means)} tokens on average, from seed {results['seed']}"
        rounds = sorted({str(row["rounds"]) for row in rows})
        turns = f"the median of {' or '.join(rounds)} rounds, in which all took turns"
        lines.append(f"- {texts}; each number {turns}; TF32 is off on both sides")
    promises = ["| promise | | seen |", "|---|---|---|"]
    for it in results["findings"]:
        cells = (it[name].replace("|", "\\|") for name in ("promise", "status", "evidence"))
        promises.append(f"| {' | '.join(cells)} |")
    return "\n\n".join(["\n".join(lines), table(rows), "\n".join(promises)])


def write_docs(results, path):
    """Puts the page into the document."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, behind = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{markdown(results)}\n\n{END}{behind}", encoding="utf-8")
