"""`benches/RESULTS.md`: replaces what stands between its markers with the last run, and nothing else."""

import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PAGE = Path("benches/RESULTS.md")
PLOT = Path("benches/performance.svg")
BEGIN, END = "<!-- `make bench` writes from here -->", "<!-- to here -->"
PEERS = ("celery", "sentence-transformers", "torch", "onnxruntime")


def _said(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout.strip()


def processor():
    """The name of this machine's processor."""
    fields = dict(re.findall(r"^([^:]+):\s+(.*)$", _said("lscpu"), re.MULTILINE))
    flags = fields.get("Flags", "").split()
    vectors = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    words = [fields.get("Model name", "?"), f"family {fields.get('CPU family')} model {fields.get('Model')}"]
    return ", ".join(filter(None, [*words, vectors, fields.get("Hypervisor vendor")]))


def conditions(scene, rounds):
    """Where, when, with what and how quietly it was measured."""
    rabbit = _said("dpkg-query", "--show", "--showformat=${Version}", "rabbitmq-server")
    commit = _said("git", "describe", "--always", "--dirty")
    peers = ", ".join(f"{name} {version(name)}" for name in PEERS)
    cores = ", ".join(map(str, scene.cores))
    command = f"make bench ROUNDS={len(rounds)} TEXTS={scene.count} CORES={cores.replace(' ', '')}"
    place = f"everything on the cores {cores}"
    if scene.broker_cores != scene.cores:
        others = ",".join(map(str, scene.broker_cores))
        command += f" BROKER_CORES={others}"
        place = f"RabbitMQ and clients on the cores {others}, everything else on {cores}"
    others = max(it["others"] for it in rounds)
    quiet = f"other programs used {others:.0%} of their time"
    rust, python = _said("rustc", "--version"), platform.python_version()
    tokens = f"{scene.tokens / scene.count:.1f} tokens on average"
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return [
        f"- {when} UTC, commit `{commit}`, `{command}`",
        f"- {processor()}; Linux {platform.release()}; {place}; {quiet}",
        f"- RabbitMQ {rabbit}; {rust}; Python {python}, {peers}",
        f"- {scene.count:,} texts of {tokens}, all-MiniLM-L6-v2 in f32",
    ]


def rounds_of(count):
    """How a table's numbers follow from its rounds, as the end of a sentence."""
    return "those of one round" if count == 1 else f"medians of {count} rounds in turns"


def _curve(points):
    lines = ["| offered texts/s | of the closed loop | answered | p50 ms | p99 ms |", "|---|---|---|---|---|"]
    for it in points:
        cells = [f"{it['offered']:.0f}", f"{it['share']:.0%}", f"{it['answered']:.0f}"]
        cells += [f"{it['p50']:.0f}", f"{it['p99']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(conditions, table, points):
    """Puts the run into the page."""
    parts = ["\n".join(conditions), table]
    parts += [f"![Throughput and latency against load]({PLOT.name})", _curve(points)]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, behind = rest.split(END)
    run = "\n\n".join(parts)
    PAGE.write_text(f"{before}{BEGIN}\n\n{run}\n\n{END}{behind}", encoding="utf-8")
