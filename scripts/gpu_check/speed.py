"""What is timed against what: texts through the embedded queue, the same model without a queue, and PyTorch,
in turn, on the same weights, texts and dtype."""

import statistics
import time

from . import card, pytorch, sconce
from .findings import NotMeasured

AHEAD, QUEUE, BUSY = 1.5, 5.0, 90.0
"""What is aimed at: times PyTorch; percent of the bare forward pass that the queue may cost; percent of the
time in which the device computes."""
BATCHES = {"cuda": (32, 64, 128, 256, 512), "cpu": (8, 32)}
"""PyTorch takes the best of these."""
USUAL = 32
"""What sentence-transformers takes by itself."""
TRIED = {"cuda": 2_048, "cpu": 64}
"""Texts to find the best with."""
MOST = 100_000
"""Texts in a file."""
BARE = 8_192
"""Texts that the bare forward pass goes round."""


class Rivals:
    """PyTorch in its best form, and sentence-transformers in its usual one."""

    def __init__(self, scene, model, dtype):
        torch, device = scene.torch, scene.torch_device
        kind, shape, folder = pytorch.dtype(dtype), model.shape, model.folder
        self.torch = torch
        self.rate = card.matrix_rate(torch, device, kind)
        both = [make(folder, shape, device, kind) for make in (pytorch.by_itself, pytorch.in_transformers)]
        texts = model.texts.first(TRIED[device.type])
        self.best = max(self._tried(filter(None, both), texts, BATCHES[device.type]))
        usual = pytorch.in_sentence_transformers(folder, device, kind)
        self.usual = max(self._tried([usual], texts, [USUAL])) if usual else None

    def _tried(self, rivals, texts, batches):
        """Texts a second, batch, name, and who it is."""
        for rival in rivals:
            for batch in batches:
                rival.embed(texts[: 2 * batch], batch)
                yield self.timed(rival, texts, batch), batch, rival.name, rival

    def timed(self, rival, texts, batch):
        """Texts a second. The vectors are on the host when it ends, so that nothing is left to wait for."""
        if hasattr(rival, "tokens"):
            rival.tokens.prepare(texts)
        start = time.perf_counter()
        rival.embed(texts, batch)
        return len(texts) / (time.perf_counter() - start)

    def round(self, texts):
        """One measurement of each."""
        _, batch, _, rival = self.best
        found = {"pytorch": self.timed(rival, texts, batch)}
        if self.usual:
            found["sentence_transformers"] = self.timed(self.usual[3], texts, USUAL)
        self.free()
        return found

    def free(self):
        """Gives back memory of the card that nothing is kept in."""
        if self.torch.cuda.is_available():
            self.torch.cuda.empty_cache()


def _queued(scene, model, dtype, texts):
    """Through the embedded queue."""
    settings = [f"pool[0].dtype={dtype}"]
    with card.Load(scene.uuid) as load:
        arguments, _ = scene.sconce.arguments(texts, model.folder, scene.uuid, settings)
        begin = time.monotonic()
        report = sconce.ended_well(scene.sconce.run(*arguments)).report()
        end = time.monotonic()
    scene.sconce.forget()
    if report["errors"] or report["lines"] != len(texts):
        raise RuntimeError(
            f"{report['lines']} of {len(texts)} texts answered, {report['errors']} with an error"
        )
    return {
        "texts": report["lines_per_second"],
        "tokens": report["tokens_per_second"],
        "busy": report["device_busy_percent"],
        "busy_by_driver": load.percent(begin, end, report["seconds"]),
        "mean_tokens": report["tokens"] / report["inputs"],
        "batch_tokens": report["batch"]["mean_tokens"],
    }


def _bare(scene, model, dtype, texts, seconds):
    """The same model on the same device, batch after batch."""
    given = scene.sconce.folder / "bare.jsonl"
    sconce.write(given, texts)
    settings = [word for it in [*scene.sconce.settings, f"pool[0].dtype={dtype}"] for word in ("--set", it)]
    command = ["bench-device", "--model", model.folder, "--device", scene.uuid, "-i", given]
    command += ["--tasks", len(texts), "--time", f"{max(1, round(1000 * seconds))}ms", "--json", *settings]
    report = sconce.ended_well(scene.sconce.run(*command)).report()
    return {
        "bare_tokens": report["forward"]["tokens_per_second"],
        "prepared_texts": report["prepare"]["inputs_per_second"],
    }


def measure(scene, model, dtype, seconds, rounds):
    """A row of the table: medians over the rounds. Each measurement takes about so many seconds."""
    try:
        rivals = Rivals(scene, model, dtype)
        rate = rivals.best[0]
    except NotMeasured:
        rivals = None
        rate = _queued(scene, model, dtype, model.texts.first(TRIED["cuda" if scene.on_gpu else "cpu"]))[
            "texts"
        ]
    texts = model.texts.first(max(64, min(MOST, int(rate * seconds))))
    found = []
    for _ in range(rounds):
        one = _queued(scene, model, dtype, texts)
        one.update(_bare(scene, model, dtype, texts[:BARE], seconds))
        if rivals:
            one.update(rivals.round(texts))
        found.append(one)
    return _row(model.shape, dtype, len(texts), found, rivals)


def _row(shape, dtype, count, rounds, rivals):
    """Ratios are taken within each round."""

    def middle(value):
        values = [value(one) for one in rounds]
        return None if None in values else statistics.median(values)

    row = {name: middle(lambda one, name=name: one[name]) for name in rounds[0]}
    row.update(model=shape.name, dtype=dtype, count=count, rounds=len(rounds))
    row["queue_percent"] = middle(lambda one: 100 * (1 - one["tokens"] / one["bare_tokens"]))
    if rivals:
        best = [name for name in ("pytorch", "sentence_transformers") if name in row]
        row["ahead"] = middle(lambda one: one["texts"] / max(one[name] for name in best))
        row["pytorch_is"] = f"{rivals.best[2]}, batches of {rivals.best[1]}"
        row["matrix_rate"] = rivals.rate
        row["matrix_percent"] = 100 * row["tokens"] * shape.flop_per_token / rivals.rate
    return row


def judge(scene, findings, row):
    """The aims, for one row."""
    name = f"{row['model']} in {row['dtype']}"

    def aim(value, kept, words):
        if value is None:
            raise NotMeasured(words)
        if not scene.on_gpu:
            raise NotMeasured(f"no GPU; on this CPU {words}")
        return kept(value), words

    ahead, queue = row.get("ahead"), row["queue_percent"]
    words = f"{ahead:.2f} × the faster of PyTorch and sentence-transformers" if ahead else "without PyTorch"
    findings.check(f"{name}: {AHEAD} × PyTorch", lambda: aim(ahead, lambda it: it >= AHEAD, words))
    words_of_queue = f"{queue:.1f} % ({row['tokens']:,.0f} of {row['bare_tokens']:,.0f} tokens/s)"
    what = f"{name}: the queue costs at most {QUEUE:g} % of the bare forward pass"
    findings.check(what, lambda: aim(queue, lambda it: it <= QUEUE, words_of_queue))
    driver, own = row["busy_by_driver"], row["busy"]
    busy = own if driver is None else driver
    words_of_busy = f"{own:.1f} % by the worker's clock, {'unknown' if driver is None else f'{driver:.1f} %'} by the driver's"
    what = f"{name}: the device is busy {BUSY:g} % of the time"
    findings.check(what, lambda: aim(busy, lambda it: it >= BUSY, words_of_busy))
