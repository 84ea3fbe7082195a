"""The other end of `processes.Asked`: a peer that embeds texts in a process of its own."""

import json
import os
import sys
import time

WARM_UP = 64
"""Texts embedded before each measurement."""


def texts():
    """The texts of the file that TEXTS_FILE names."""
    with open(os.environ["TEXTS_FILE"], encoding="utf-8") as file:
        return [json.loads(line)["input"] for line in file]


def bodies():
    """The request bodies of the batch lines in the file that TEXTS_FILE names."""
    with open(os.environ["TEXTS_FILE"], encoding="utf-8") as file:
        return [json.loads(line)["body"] for line in file]


def serve(embed, everything=None):
    """Answers `vectors N` with the vectors of the first N texts, `measure` with texts a second.

    `embed` takes a list of texts, or of what `everything` lists, and returns for each a list of floats.
    """
    everything = texts() if everything is None else everything
    embed(everything[:WARM_UP])
    say({"ready": True})
    for line in sys.stdin:
        match line.split():
            case ["vectors", count]:
                say({"vectors": [list(map(float, it)) for it in embed(everything[: int(count)])]})
            case ["measure"]:
                embed(everything[:WARM_UP])
                start = time.perf_counter()
                embed(everything)
                say({"texts_per_second": len(everything) / (time.perf_counter() - start)})


def say(value):
    """One line of JSON."""
    print(json.dumps(value), flush=True)
