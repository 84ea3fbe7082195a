#!/usr/bin/env python3
"""Makes tests/fixtures/gemma-3-270m/expected.json: what llama.cpp computes with Gemma 3 270M (scripts/fetch-gemma3).

Run with: python scripts/make-gemma3-fixture.py   (needs llama-cpp-python; made with 0.3.36)

- "prompts": texts with their "ids", the ids that follow greedily ("greedy") with their "text_out", and the smallest
  distance in the logits between the likeliest token and the next ("gap") of each. llama.cpp rounds the activations to
  8 bits, so where the gap is small another token may be chosen.
- "perplexity": a text, its "ids", and the mean "nll" of its ids after the first.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "gemma-3-270m" / "gemma-3-270m-q4_k_m.gguf"
PROMPTS = [
    "The capital of France is",
    "My favourite season is autumn, because",
    "def fibonacci(n):\n    \"\"\"Returns the n-th number of Fibonacci.\"\"\"\n",
    "Die Hauptstadt von Österreich ist",
    "日本の首都は",
    "  two spaces, an emoji 😀 and a\ttab",
]
ANSWER = 32


def novel():
    """The text that the fixture of SmolLM2 has too."""
    source = (ROOT / "scripts" / "make-generate-fixtures.py").read_text()
    begin = source.index("NOVEL = (") + len("NOVEL = ")
    return eval(source[begin : source.index("\n\n\n", begin)])


def main():
    model = Llama(str(MODEL), n_ctx=1024, n_batch=1024, logits_all=True, verbose=False, type_k=0, type_v=0)
    rows = []
    for text in PROMPTS:
        ids = model.tokenize(text.encode(), add_bos=True, special=False)
        model.reset()
        out, gap, step = [], float("inf"), ids
        while len(out) < ANSWER:
            model.eval(step)
            logits = np.array(model.scores[model.n_tokens - 1])
            first, second = np.sort(logits)[-2:][::-1]
            gap = min(gap, float(first - second))
            step = [int(logits.argmax())]
            out += step
        rows.append({"text": text, "ids": ids, "greedy": out, "gap": round(gap, 4),
                     "text_out": model.detokenize(out, prev_tokens=ids).decode(errors="replace")})
    text = novel()
    ids = model.tokenize(text.encode(), add_bos=True, special=False)
    model.reset()
    model.eval(ids)
    scores = np.array(model.scores[: len(ids)], dtype=np.float64)
    scores -= scores.max(-1, keepdims=True)
    logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    nll = -logprobs[np.arange(len(ids) - 1), ids[1:]].mean()
    importlib.import_module("make-generate-fixtures").write(
        ROOT / "tests" / "fixtures" / "gemma-3-270m" / "expected.json",
        {"prompts": rows, "perplexity": {"text": text, "ids": ids, "nll": round(float(nll), 6)}})
    print("nll", nll, [row["gap"] for row in rows])


if __name__ == "__main__":
    main()
