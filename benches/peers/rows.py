"""The table: which numbers of a round are set against which, and what is wanted of them."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

FLOP_PER_TOKEN = 6 * 2 * (4 * 384 * 384 + 2 * 384 * 1536)
"""Of the linear layers alone. Attention's products, 1.5 % more at 35 tokens, are left out."""


@dataclass
class Row:
    """One line. `value` takes a round, `detail` the median of each of its numbers."""

    what: str
    target: str
    value: Callable
    passes: Callable
    detail: Callable
    unit: str = "×"


def at_least(limit):
    """The target of a ratio that should be large."""
    return {"target": f"≥ {limit} ×", "passes": lambda value: value >= limit}


def below(limit, unit):
    """The target of what should be small."""
    return {"target": f"< {limit} {unit}", "passes": lambda value: value < limit, "unit": unit}


def _over(ours, theirs):
    def detail(n):
        return f"{n[ours]:,.0f} / {n[theirs]:,.0f} a second"

    return {"value": lambda n: n[ours] / n[theirs], "detail": detail}


def _apart(workers):
    return [
        Row(
            f"RabbitMQ and client on other cores, {workers} workers : the encoder without a queue",
            **at_least(0.95),
            **_over("apart", "in_process"),
        ),
        Row("the same : 1 worker", **at_least(1.9), **_over("apart", "apart_one_worker")),
    ]


def rows(workers, tokens_per_text):
    """Those of every run, for so many workers and texts of so many tokens on average."""

    def limit(n):
        return n["products_flops"] / (FLOP_PER_TOKEN * tokens_per_text)

    def gigaflops(n):
        return f"{n['sconce']:,.0f} / {limit(n):,.0f} texts/s ({n['products_flops'] / 1e9:,.0f} GFLOP/s)"

    return [
        Row(
            f"RabbitMQ, {workers} workers : Celery + sentence-transformers, {workers} processes",
            **at_least(2.5),
            **_over("sconce", "celery"),
        ),
        Row(
            "the same : sentence-transformers in process, batches of 32",
            **at_least(1.6),
            **_over("sconce", "sentence_transformers"),
        ),
        Row(
            "the same : ONNX Runtime in process, batches of 8",
            target="",
            passes=lambda _: None,
            **_over("sconce", "onnx_runtime"),
        ),
        Row(
            "the same : the arithmetic limit",
            **at_least(0.65),
            value=lambda n: n["sconce"] / limit(n),
            detail=gigaflops,
        ),
        Row("the same : its own encoder without a queue", **at_least(0.95), **_over("sconce", "in_process")),
        Row(
            f"`echo`, {workers} workers : {workers} bare lapin consumers",
            **at_least(0.8),
            **_over("echo", "bare_consumer"),
        ),
        Row(f"{workers} workers : 1 worker", **at_least(1.9), **_over("sconce", "sconce_one_worker")),
        Row(
            "a task on an idle worker, beyond its forward pass (p50)",
            **below(3, "ms"),
            value=lambda n: n["beyond_forward_ms"],
            detail=lambda n: f"forward pass {n['forward_ms']:.1f} ms",
        ),
        Row(
            "from spawn to `ready`",
            **below(0.5, "s"),
            value=lambda n: n["ready_s"],
            detail=lambda n: "weights in the page cache",
        ),
        Row(
            "private memory of a worker : of a Celery process",
            target="< 1/3",
            passes=lambda value: value < 1 / 3,
            value=lambda n: n["sconce_private_mb"] / n["celery_private_mb"],
            detail=lambda n: f"{n['sconce_private_mb']:,.0f} / {n['celery_private_mb']:,.0f} MB",
        ),
    ]


def table(rounds, workers, tokens_per_text):
    """The rows as Markdown: medians of what each round found, with the least and the most."""
    middle = {name: statistics.median(it[name] for it in rounds) for name in rounds[0]}
    lines = ["| measured | target | median | least – most | | in numbers |", "|---|---|---|---|---|---|"]
    every = rows(workers, tokens_per_text) + (_apart(workers) if "apart" in middle else [])
    for row in every:
        values = [row.value(it) for it in rounds]
        value = statistics.median(values)
        mark = {True: "✓", False: "✗", None: ""}[row.passes(value)]
        spread = f"{min(values):.2f} – {max(values):.2f}"
        cells = [row.what, row.target, f"{value:.2f} {row.unit}", spread, mark, row.detail(middle)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
