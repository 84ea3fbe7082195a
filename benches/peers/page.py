"""`docs/performance.md`: replaces what stands between its markers with the last run, and nothing else."""

import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

PAGE = Path("docs/performance.md")
PLOT = Path("docs/performance.svg")
BEGIN, END = "<!-- `make bench` writes from here -->", "<!-- to here -->"
PEERS = ("celery", "sentence-transformers", "torch", "onnxruntime")


def _said(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout.strip()


def _processor():
    fields = dict(re.findall(r"^([^:]+):\s+(.*)$", _said("lscpu"), re.MULTILINE))
    flags = fields.get("Flags", "").split()
    vectors = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    words = [fields.get("Model name", "?"), f"family {fields.get('CPU family')} model {fields.get('Model')}"]
    return ", ".join(filter(None, [*words, vectors, fields.get("Hypervisor vendor")]))


def _conditions(scene, rounds):
    rabbit = _said("dpkg-query", "--show", "--showformat=${Version}", "rabbitmq-server")
    commit = _said("git", "describe", "--always", "--dirty")
    peers = ", ".join(f"{name} {version(name)}" for name in PEERS)
    cores = ", ".join(map(str, scene.cores))
    command = f"make bench ROUNDS={rounds} TEXTS={scene.count} CORES={cores.replace(' ', '')}"
    return [
        f"- {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, commit `{commit}`, `{command}`",
        f"- {_processor()}; Linux {platform.release()}; everything on the cores {cores}",
        f"- RabbitMQ {rabbit}; {_said('rustc', '--version')}; Python {platform.python_version()}, {peers}",
        f"- {scene.count:,} texts of {scene.tokens / scene.count:.1f} tokens on average, all-MiniLM-L6-v2 in f32",
    ]


def _curve(points):
    lines = ["| offered texts/s | of the closed loop | answered | p50 ms | p99 ms |", "|---|---|---|---|---|"]
    for it in points:
        cells = [f"{it['offered']:.0f}", f"{it['share']:.0%}", f"{it['answered']:.0f}"]
        cells += [f"{it['p50']:.0f}", f"{it['p99']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(scene, rounds, table, points):
    """Puts the run into the page."""
    parts = ["\n".join(_conditions(scene, rounds)), table]
    parts += [f"![Throughput and latency against load]({PLOT.name})", _curve(points)]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, behind = rest.split(END)
    run = "\n\n".join(parts)
    PAGE.write_text(f"{before}{BEGIN}\n\n{run}\n\n{END}{behind}", encoding="utf-8")
