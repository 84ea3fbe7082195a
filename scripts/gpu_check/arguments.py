"""The command line of `make gpu-check`."""

import argparse
from pathlib import Path

from .shapes import BERT_BASE, MINILM, SHAPES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs/gpu.md"
BUILT = [ROOT / "target/cuda/release/sconce", ROOT / "target/release/sconce"]
DTYPES = ("bf16", "f16", "f32")

HELP = """Checks on this machine what sconce promises of a GPU, and measures it beside PyTorch. Needs
Python 3.9 with PyTorch, and the program; no broker, no network, no weights: those are made here, from a seed.
Prints PASS, FAIL or "not measured" for each promise as it goes, then a table. Exits with 0 when nothing
failed, with 1 when something did."""


def _names(known):
    def read(text):
        names = text.split(",")
        wrong = [name for name in names if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
        return names

    return read


def parse():
    """What is asked."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=HELP)
    add = parser.add_argument
    program = "the program; by default target/cuda/release/sconce, which is built where cargo is"
    add("--sconce", type=Path, help=program)
    add("--device", default="cuda:0", help="cuda:0, a UUID, or cpu, where what is CUDA's is not measured")
    add("--quick", action="store_true", help="speed in bf16 alone, in one round")
    add(
        "--seconds",
        type=float,
        default=540,
        help="about how long it may take; what is not done by then is not",
    )
    add("--rounds", type=int, default=3, help="how often everything is timed, in turn (3)")
    add("--measure", type=float, help="seconds of one measurement; by default as many as there are")
    add("--no-speed", action="store_true", help="check promises alone, time nothing")
    add("--shapes", type=_names(SHAPES), default=[BERT_BASE.name, MINILM.name], help="bert-base,minilm; tiny")
    add("--dtypes", type=_names(DTYPES), default=list(DTYPES), help="bf16,f16,f32")
    choices = ("torch", "plain", "none")
    add("--reference", choices=choices, help="what results are held against; by default torch where it is")
    add("--set", action="append", default=[], metavar="PATH=VALUE", help="a setting of sconce, for all runs")
    add("--seed", type=int, default=20261122, help="of weights and texts")
    add("--out", type=Path, default=ROOT / "target/gpu-check", help="folder for results and the log")
    add(
        "--write-docs",
        type=Path,
        nargs="?",
        const=DOCS,
        metavar="PAGE",
        help="write results into docs/gpu.md",
    )
    add("--results", type=Path, metavar="JSON", help="check nothing; take the results of another run")
    asked = parser.parse_args()
    asked.timed = asked.dtypes
    if asked.quick:
        asked.rounds, asked.timed = 1, ["bf16"]
    return asked
