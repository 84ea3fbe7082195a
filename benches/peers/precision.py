"""The part of `make bench` that measures lower precision: embeddings in f32, bf16 and int8, beside ONNX Runtime and OpenVINO.
Prints a table with speed and accuracy, and writes it into benches/RESULTS.md.

Each system is measured ROUNDS (3) times, in turns, on the cores of CORES, with RabbitMQ on the same cores. The texts are
real: the first paragraphs of docstrings of PyTorch and transformers. Accuracy is against sconce's own vectors in f32, whose
numbers differ from those of sentence-transformers by less than 0.000 01.
"""

import ast
import importlib.util
import json
import random
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy

from . import page, sconce
from .kinds import Place, replace
from .measure import IN_FLIGHT
from .processes import Asked
from .rabbit import Rabbit
from .scene import FOLDER, MODEL, SEED, pin, rounds_of, say

PACKAGES = ("torch", "transformers")
TEXTS = 1_500
QUERIES = 300
"""Of the texts; the others are searched."""
NEIGHBOURS = 10
LENGTHS = range(40, 1_200)
"""Characters of a text."""
BEGIN, END = "<!-- `make bench` writes precision from here -->", "<!-- precision to here -->"
OURS = ("f32", "bf16", "int8")
PEERS = (
    ("ONNX Runtime in process, f32", "onnx_runtime_client", "f32"),
    ("ONNX Runtime in process, int8", "onnx_runtime_client", "int8"),
    ("OpenVINO in process, f32", "openvino_client", "f32"),
    ("OpenVINO in process, bf16", "openvino_client", "bf16"),
)


def docstrings(package):
    """The first paragraphs of the docstrings of a package's modules, classes and functions, in order."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    for path in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


def write_texts(path):
    """Writes TEXTS different texts, chosen by SEED."""
    every = {text: None for package in PACKAGES for text in docstrings(package) if len(text) in LENGTHS}
    chosen = random.Random(SEED).sample(list(every), TEXTS)
    path.write_text("".join(json.dumps({"input": text}) + "\n" for text in chosen), encoding="utf-8")


class Embeddings:
    """Measures each system with the same texts."""

    def __init__(self, place, broker, cores):
        self.place, self.broker, self.cores = place, broker, cores
        self.file = FOLDER / "docstrings.jsonl"
        write_texts(self.file)
        self.model = str(MODEL.resolve())

    def ours(self, dtype):
        """Texts per second with a worker for each core, and the vectors of all texts."""
        settings = [f"pool[0].dtype={dtype}"]
        pool = sconce.Pool(self.place, (self.broker, self.cores), self.model, "bench.precision", settings)
        with sconce.Workers(pool, self.place.workers):
            in_flight = IN_FLIGHT * self.place.workers
            many = pool.bench("--input", self.file, "--in-flight", in_flight, "--tasks", 2 * TEXTS)
            return many["tasks_per_second"], pool.vectors(self.file, TEXTS)

    def peer(self, module, dtype):
        """As `ours`, for a peer that has all cores."""
        own = {"MODEL": self.model, "TEXTS_FILE": self.file.resolve(), "THREADS": self.place.workers}
        own |= {"ONNX_FILE": (FOLDER / "minilm.onnx").resolve(), "DTYPE": dtype}
        environment = {key: str(value) for key, value in own.items()}
        with Asked([sys.executable, "-m", f"peers.{module}"], self.place.log(module), environment) as peer:
            peer.ready().ask("measure")
            rate = peer.answer()["texts_per_second"]
            peer.ask(f"vectors {TEXTS}")
            return rate, peer.answer()["vectors"]


def round_of(embeddings):
    """For each system: texts per second, mean and least cosine, and recall."""
    results = {f"sconce over RabbitMQ, {dtype}": embeddings.ours(dtype) for dtype in OURS}
    flags = Path("/proc/cpuinfo").read_text().split()
    for name, module, dtype in PEERS:
        if dtype != "bf16" or {"avx512_bf16", "amx_bf16"} & set(flags):
            results[name] = embeddings.peer(module, dtype)
    exact = numpy.array(results[f"sconce over RabbitMQ, {OURS[0]}"][1])
    found = {name: (rate, *accuracy(numpy.array(vectors), exact)) for name, (rate, vectors) in results.items()}
    for name, (rate, mean, least, recall) in found.items():
        say(f"{name}: {rate:.0f} texts/s, cosine {mean:.5f} on average, {least:.5f} at least, recall {recall:.4f}")
    return found


def accuracy(vectors, exact):
    """The mean and the least cosine with the exact vectors, and the share of each query's nearest texts that are found."""
    lengths = numpy.linalg.norm(vectors, axis=1) * numpy.linalg.norm(exact, axis=1)
    cosines = (vectors * exact).sum(1) / lengths
    theirs, right = nearest(vectors), nearest(exact)
    hits = sum(len(set(one) & set(other)) for one, other in zip(theirs, right, strict=True))
    return float(cosines.mean()), float(cosines.min()), hits / right.size


def nearest(vectors):
    """For each query the indices of the nearest texts."""
    scores = vectors[:QUERIES] @ vectors[QUERIES:].T
    return numpy.argsort(-scores, axis=1)[:, :NEIGHBOURS]


def main():
    """Measures, then writes."""
    cores, _, _ = pin()
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        embeddings = Embeddings(Place(cores), stack.enter_context(Rabbit(cores)).url, cores)
        found = rounds_of("precision", lambda: round_of(embeddings))
    write(found, cores)


def write(found, cores):
    """The table: medians of rates, and the ratios of sconce's rate in int8 and bf16 to each system's (medians over rounds)."""
    lines = ["| system | texts/s | sconce int8, × | sconce bf16, × | mean cosine | least cosine | recall@10 |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name in found[0]:
        rate, mean, least, recall = (statistics.median(it[name][part] for it in found) for part in range(4))
        ratios = [
            statistics.median(it[f"sconce over RabbitMQ, {dtype}"][0] / it[name][0] for it in found)
            for dtype in ("int8", "bf16")
        ]
        cells = [name, f"{rate:.0f}", *(f"{ratio:.2f}" for ratio in ratios)]
        cells += [f"{mean:.5f}", f"{least:.5f}", f"{recall:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    named = ",".join(map(str, cores))
    lines += ["", f"{page.processor()}. The rates are {page.rounds_of(len(found))}, on the cores {named}, which RabbitMQ shares; MiniLM,"]
    lines += [f"{TEXTS:,} first paragraphs of docstrings of PyTorch and transformers. Peers have all cores in one process, and sort the"]
    lines += ["texts by length. ONNX Runtime's int8 is dynamic, with a scale for each channel. Cosines and recall@10 are against the"]
    lines += [f"vectors of f32; {QUERIES} of the texts are queries, the others are searched."]
    replace(page.PAGE, (BEGIN, END), "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
