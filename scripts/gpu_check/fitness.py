"""Promises about a card that is to prove itself before it is given work."""

import re

from . import sconce
from .findings import NotMeasured

TEXTS = 16
RATES = [re.compile(rf"\b{name}=([\d.]+)") for name in ("gflops", "possible_gflops")]


def check(scene, findings):
    """All of them."""
    findings.check(
        "before its first task the card multiplied rightly and fast enough", lambda: _proven(scene)
    )
    findings.check("a card that is slower than asked takes no work", lambda: _slow(scene))


def _run(scene, *settings):
    model = scene.models[0]
    ended, answers = scene.embed(model, model.texts.first(TEXTS), settings, SCONCE_LOG="debug")
    return ended, [answer["status_code"] for answer in answers]


def _proven(scene):
    scene.needs_gpu()
    ended, codes = _run(scene)
    sconce.ended_well(ended)
    rates = [rate.search(ended.err) for rate in RATES]
    if None in rates:
        return False, "its worker said nothing of it"
    reached, possible = (float(rate.group(1)) for rate in rates)
    share = 100 * reached / possible
    return codes == [
        200
    ] * TEXTS, f"{reached:,.0f} of {possible:,.0f} GFLOP/s in f32 ({share:.0f} %), then {TEXTS} texts"


def _slow(scene):
    scene.needs_gpu()
    # What no card reaches: all that its clock makes possible.
    settings = ("pool[0].min_speed=1", "launcher.max_quick_failures=1")
    ended, codes = _run(scene, *settings)
    if ended.code == 0:
        raise NotMeasured("this card is as fast as it can be")
    said = next((line for line in ended.err.splitlines() if "too_slow" in line), ended.last_words())
    return "too_slow" in said and not codes, f"exit {ended.code}, {len(codes)} texts answered; {said[-300:]}"
