"""One round: each system once, one after the other, nothing else running. Returns plain numbers."""

from contextlib import ExitStack

from . import sconce
from .processes import children, private_megabytes, worker_processes
from .quiet import Others
from .scene import say

IN_FLIGHT = 256
"""Tasks under way for each worker: more than it takes into its hands at once."""
ECHOED = 20_000
ALONE = 300
"""Tasks one by one, for the latency."""
STARTS = 3


def round_of(scene):
    """Measures everything once."""
    found = {}
    others = Others(scene.all_cores)
    workers = scene.workers
    with sconce.Workers(scene.embedding, workers) as launch:
        found["sconce"] = _texts_per_second(scene, scene.embedding, workers)
        found["sconce_private_mb"] = _mean([private_megabytes(pid) for pid in worker_processes(launch.pid)])
        alone = ("--input", scene.one_text, "--in-flight", 1, "--warmup", 50, "--tasks", ALONE)
        report = scene.embedding.bench(*alone)
        found["beyond_forward_ms"] = report["latency_ms"]["p50"] - report["compute_ms"]["p50"]
        found["forward_ms"] = report["compute_ms"]["p50"]
    # Side by side what differs by little.
    found |= _in_process(scene)
    with sconce.Workers(scene.embedding, 1):
        found["sconce_one_worker"] = _texts_per_second(scene, scene.embedding, 1)
    if scene.apart:
        for name, count in (("apart", workers), ("apart_one_worker", 1)):
            with sconce.Workers(scene.apart, count):
                found[name] = _texts_per_second(scene, scene.apart, count)
    found["celery"] = _ask(scene.celery)
    found["celery_private_mb"] = _mean([private_megabytes(pid) for pid in children(scene.celery_worker.pid)])
    found["sentence_transformers"] = _ask(scene.sentence_transformers)
    found["onnx_runtime"] = _ask(scene.onnx_runtime)
    found["ready_s"] = _median([sconce.seconds_to_ready(scene.embedding) for _ in range(STARTS)])
    found |= _echo(scene)
    found["others"] = others.share()
    say(", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    return found


def _texts_per_second(scene, pool, workers):
    many = ("--in-flight", IN_FLIGHT * workers, "--tasks", scene.count)
    return pool.bench("--input", scene.texts, *many)["tasks_per_second"]


def _ask(peer):
    peer.ask("measure")
    return peer.answer()["texts_per_second"]


def _in_process(scene):
    """All at the same time, and their rates together."""
    for process in scene.in_process:
        process.ask("measure")
    answers = [process.answer() for process in scene.in_process]
    return {
        "in_process": sum(it["texts_per_second"] for it in answers),
        "products_flops": sum(it["products_flops"] for it in answers),
    }


def _echo(scene):
    many = ("--input", scene.texts, "--in-flight", IN_FLIGHT * scene.workers, "--tasks", ECHOED)
    with sconce.Workers(scene.echo, scene.workers):
        ours = scene.echo.bench(*many)["tasks_per_second"]
    with ExitStack() as stack:
        for consumer in sconce.bare_consumers(scene, "bench.echo", scene.workers):
            stack.enter_context(consumer).ready()
        theirs = scene.echo.bench(*many)["tasks_per_second"]
    return {"echo": ours, "bare_consumer": theirs}


def load_curve(scene, capacity, shares, seconds):
    """Open-loop runs at shares of what a closed loop reaches: the load that comes, what is answered, and
    how long it takes."""
    points = []
    with sconce.Workers(scene.embedding, scene.workers):
        for share in shares:
            rate = capacity * share
            tasks = ("--warmup", round(rate), "--tasks", max(100, round(rate * seconds)))
            report = scene.embedding.bench("--input", scene.texts, "--rate", f"{rate:.3f}", *tasks)
            latency = {name: report["latency_ms"][name] for name in ("p50", "p99")}
            points.append(
                {"share": share, "offered": rate, "answered": report["tasks_per_second"], **latency}
            )
            say(f"at {share:.0%} of {capacity:.0f} texts/s: p50 {latency['p50']:.0f} ms")
    return points


def _mean(values):
    return sum(values) / len(values)


def _median(values):
    return sorted(values)[len(values) // 2]
