"""`make bench`: measures sconce against its peers, prints the table, and writes it into the documents.

ROUNDS (3): how often each system is measured, in turn. TEXTS (1000): how many texts each embeds. CORES:
the cores that everything runs on, such as `0,1`; by default the first two that this process may use.
BROKER_CORES: others for RabbitMQ and the clients, as if they were on another host. CPU_FEATURES: the `cpu_features` of
sconce's workers, such as avx2. PyTorch then needs ATEN_CPU_CAPABILITY=avx2, ONEDNN_MAX_CPU_ISA=AVX2 and
MKL_ENABLE_INSTRUCTIONS=AVX2 to compute as on the same CPU; ONNX Runtime cannot be told.
"""

import os
import signal
import statistics
import sys

from . import measure, page, plot, rows
from .scene import Scene, rounds_of

SHARES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Of the closed loop's rate: the loads of the plot."""
SECONDS = 6
"""How long each of them lasts."""


def main():
    """Measures, then writes."""
    with Scene(int(os.environ.get("TEXTS") or 1_000)) as scene:
        scene.check_vectors()
        found = rounds_of("texts", lambda: measure.round_of(scene))
        capacity = statistics.median(it["sconce"] for it in found)
        points = measure.load_curve(scene, capacity, SHARES, SECONDS)
    table = rows.table(found, scene.workers, scene.tokens / scene.count)
    conditions = page.conditions(scene, found)
    plot.draw(points, capacity, page.PLOT)
    page.write(conditions, table, points)
    print(table)


# An orderly end, which stops the broker and the peers, also on a polite kill.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
try:
    main()
except KeyboardInterrupt:
    sys.exit(130)
