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
LEAST, MOST = 64, 100_000
"""Texts in a file."""
BARE = 8_192
"""Texts that the bare forward pass goes round."""


class Rivals:
    """PyTorch in its best form, and sentence-transformers in its usual one, where they are installed."""

    def __init__(self, scene, findings, model, dtype):
        self.torch, self.device = scene.torch, scene.torch_device
        self.texts = model.texts.first(TRIED[self.device.type])
        given = (model.folder, model.shape, self.device, pytorch.dtype(dtype))
        self.rate = card.matrix_rate(self.torch, self.device, given[-1])
        self.best = self._best(pytorch.by_itself(*given))
        self.usual = None
        # A library that does not run here is no fault of ours.
        with findings.tolerated():
            library = pytorch.in_transformers(*given)
            if library:
                self.best = max(self.best, self._best(library), key=lambda it: it[0])
        with findings.tolerated():
            usual = pytorch.in_sentence_transformers(*given)
            if usual:
                self._timed(usual, self.texts, USUAL)
            self.usual = usual

    def _best(self, rival):
        """Texts a second, with which batches, and who it is."""
        found = []
        for batch in BATCHES[self.device.type]:
            self._timed(rival, self.texts[: 2 * batch], batch)
            found.append((self._timed(rival, self.texts, batch), batch, rival))
        return max(found, key=lambda it: it[0])

    def _timed(self, rival, texts, batch):
        """Texts a second. The vectors are on the host when it ends, so that nothing is left to wait for."""
        rival.prepare(texts)
        start = time.perf_counter()
        rival.embed(texts, batch)
        return len(texts) / (time.perf_counter() - start)

    def round(self, texts):
        """One measurement of each."""
        _, batch, rival = self.best
        found = {"pytorch": self._timed(rival, texts, batch)}
        if self.usual:
            found["sentence_transformers"] = self._timed(self.usual, texts, USUAL)
        if self.device.type == "cuda":
            # What nothing is kept in is given back before it is our turn.
            self.torch.cuda.empty_cache()
        return found

    def __str__(self):
        _, batch, rival = self.best
        untimed = "" if rival.tokens.timed else ", tokenised before"
        return f"{rival.name}, batches of {batch}{untimed}"


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
        answered = f"{report['lines']} of {len(texts)} texts are answered"
        raise RuntimeError(f"{answered}, {report['errors']} with an error")
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


def measure(scene, findings, which, seconds, rounds):
    """A row of the table: medians over the rounds, in each of which all take turns. Each measurement takes
    about so many seconds. None where it failed."""
    row = {}
    what = f"{which[0].shape.name} in {which[1]}: every text of a long run is answered"
    findings.check(what, lambda: _measured(scene, findings, which, (seconds, rounds), row))
    return row


def _measured(scene, findings, which, effort, row):
    (model, dtype), (seconds, rounds) = which, effort
    try:
        rivals = Rivals(scene, findings, model, dtype)
        rate = rivals.best[0]
    except NotMeasured:
        rivals = None
        rate = _queued(scene, model, dtype, model.texts.first(LEAST))["texts"]
    texts = model.texts.first(max(LEAST, min(MOST, int(rate * seconds))))
    found = []
    for _ in range(rounds):
        one = _queued(scene, model, dtype, texts)
        one.update(_bare(scene, model, dtype, texts[:BARE], seconds))
        if rivals:
            one.update(rivals.round(texts))
        found.append(one)
    row.update(_row(model.shape, dtype, len(texts), found, rivals))
    return True, f"{rounds} times {len(texts):,}"


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
        row["pytorch_is"] = str(rivals)
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
    by_driver = "unknown" if driver is None else f"{driver:.1f} %"
    words_of_busy = f"{own:.1f} % by the worker's clock, {by_driver} by the driver's"
    what = f"{name}: the device is busy {BUSY:g} % of the time"
    findings.check(what, lambda: aim(busy, lambda it: it >= BUSY, words_of_busy))
