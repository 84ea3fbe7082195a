"""The promise about a device that is out of memory. Other programs can take it at any time: here PyTorch
does, once the worker has its model and before it has its first task."""

import os
import signal
import time

from . import sconce
from .findings import NotMeasured

FULL = "out of memory"
"""In the driver's words."""
TEXTS = 3_000
WORDS = 400
TOKENS = 262_144
"""Of a batch; as many as fit when the worker starts."""
LEFT = 400 << 20
"""Bytes that are left free."""
PATIENCE = 20
"""Seconds until a launcher has started its worker."""


def check(scene, findings):
    """It."""
    promise = "out of device memory, a batch is split and every text answered"
    findings.check(promise, lambda: _split(scene))


def _free(scene):
    return scene.torch.cuda.mem_get_info(scene.torch_device)[0]


def _split(scene):
    scene.needs_gpu()
    sconce.is_linux()
    torch = scene.torch
    model = max(scene.models, key=lambda it: it.shape.flop_per_token)
    texts = [" ".join(model.texts.words[:WORDS])] * TEXTS
    tokens = TOKENS
    while tokens > 8_192 and not _fits(scene, model, tokens):
        tokens //= 2
    settings = _settings(tokens)
    begun = time.monotonic()
    sconce.ended_well(scene.embed(model, texts[:1], settings)[0])
    usual = time.monotonic() - begun
    arguments, made = scene.sconce.arguments(texts, model.folder, scene.uuid, settings)
    launcher = scene.sconce.start(*arguments, SCONCE_LOG="warn")
    taken = []
    try:
        _loaded(launcher, usual)
        taken = _take(scene)
        os.kill(launcher.pid, signal.SIGCONT)
        ended = scene.sconce.end(launcher)
    finally:
        launcher.kill()
        del taken
        torch.cuda.empty_cache()
    codes = [answer["status_code"] for answer in sconce.answers(made)]
    halved = [line for line in ended.err.splitlines() if "trying its halves" in line and FULL in line]
    if not halved:
        raise NotMeasured(f"batches of {tokens} tokens found room beside what PyTorch took")
    kept = ended.code == 0 and codes == [200] * TEXTS
    seen = f"{codes.count(200)} of {TEXTS} texts answered; batches of {tokens} tokens at first"
    return kept, f"{seen}, {len(halved)} halved: {halved[0][28:170]}"


def _settings(tokens):
    return [f"pool[0].batch.max_tokens={tokens}", "pool[0].batch.max_requests=2048"]


def _fits(scene, model, tokens):
    settings = [*_settings(tokens), f"pool[0].devices={scene.uuid}", f"pool[0].model={model.folder}"]
    return scene.sconce.devices(settings).code == 0


def _loaded(launcher, usual):
    """Stops the launcher, so that no task comes, until its worker has its model: that, and one text, take
    `usual` seconds."""
    end = time.monotonic() + PATIENCE
    while not sconce.workers(launcher.pid):
        if time.monotonic() > end or launcher.poll() is not None:
            raise NotMeasured("no worker was started")
        time.sleep(0.005)
    # The first line to the worker is on its way; the model takes longer than that.
    time.sleep(0.1)
    os.kill(launcher.pid, signal.SIGSTOP)
    time.sleep(usual + 2)


def _take(scene):
    """Takes what is free, but for a little."""
    torch, taken = scene.torch, []
    while True:
        size = min(_free(scene) - LEFT, 8 << 30)
        if size < 16 << 20:
            return taken
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=scene.torch_device))
        except torch.cuda.OutOfMemoryError:
            return taken
