"""Promises about results: those of PyTorch, the same alone and in a batch, and a bad input that costs its
neighbours nothing."""

import math

from . import plain, pytorch, sconce
from .findings import NotMeasured

TOLERANCE = {"f32": (1e-5, 0.99999), "f16": (2e-3, 0.9999), "bf16": (1e-2, 0.999)}
"""Of vectors of length 1, against f32: the largest difference of a number, and the least cosine."""
REFERENCES = {"torch": "PyTorch", "plain": "Python's"}
TEXTS, FEW = 192, 24
"""Compared in each shape; where Python alone computes them, fewer."""
NOTHING = "there is nothing to compare with"


def check(scene, findings):
    """All of them, for each model."""
    for model in scene.models:
        _check(scene, findings, model)


def _check(scene, findings, model):
    name = model.shape.name
    texts = model.texts.mixed(FEW if scene.reference == "plain" else TEXTS)
    try:
        expected, tokens = _reference(scene, model, texts)
    except NotMeasured as reason:
        expected, tokens = None, str(reason)
    found = {}
    for dtype in dict.fromkeys(["f32", *scene.asked.dtypes]):
        what = f"{name} in {dtype}: results within {TOLERANCE[dtype][0]:g} of the reference in f32"
        given = (texts, expected, tokens)
        findings.check(what, lambda dtype=dtype, given=given: _equal(scene, model, dtype, given, found))
        what = f"{name} in {dtype}: alone as in a batch"
        findings.check(what, lambda dtype=dtype: _alone(scene, model, dtype, texts, found))
    what = f"{name}: tokens are counted as the library counts them"
    findings.check(what, lambda: _counted(tokens, found))
    what = f"{name}: one bad input of many fails alone"
    findings.check(what, lambda: _bad(scene, model, texts, found))


def _reference(scene, model, texts):
    """Vectors and tokens of each text."""
    if scene.reference == "plain":
        return plain.Plain(model.folder, model.shape).embed(texts)
    device, kind = scene.torch_device, pytorch.dtype("f32")
    theirs = pytorch.by_itself(model.folder, model.shape, device, kind)
    vectors = theirs.embed(texts, 16).double().tolist()
    return vectors, [len(ids) for ids in theirs.tokens.ids(texts)]


def distance(ours, theirs):
    """The largest difference of a number, and the least cosine, between two lists of vectors."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} vectors, and not {len(theirs)}")
    differences = [abs(a - b) for one, other in zip(ours, theirs) for a, b in zip(one, other)]
    if not all(map(math.isfinite, differences)):
        raise ValueError("a vector holds what is no number")
    return max(differences), min(cosine(one, other) for one, other in zip(ours, theirs))


def cosine(one, other):
    """Of two vectors."""

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b))

    return dot(one, other) / (dot(one, one) * dot(other, other)) ** 0.5


def within(dtype, measured):
    """Whether a distance is tolerated."""
    (most, least), (limit, floor) = measured, TOLERANCE[dtype]
    return most <= limit and least >= floor


def _equal(scene, model, dtype, given, found):
    texts, expected, why = given
    settings = [f"pool[0].dtype={dtype}"]
    ended, responses = scene.embed(model, texts, settings)
    sconce.ended_well(ended)
    found[dtype], found["tokens"] = sconce.vectors(responses)
    found[dtype, "batch"] = ended.report()["batch"]
    if expected is None:
        raise NotMeasured(why)
    measured = distance(found[dtype], expected)
    # Two texts apart, so that it is seen what a mix-up would cost.
    apart = cosine(expected[-1], expected[-2])
    seen = f"{len(texts)} texts differ from {REFERENCES[scene.reference]} by {measured[0]:.2g} at most"
    seen += f", cosine {measured[1]:.7f} at least (two texts of them: {apart:.3f})"
    return within(dtype, measured), seen + _theirs(scene, model, dtype, texts, expected)


def _theirs(scene, model, dtype, texts, expected):
    """What PyTorch itself loses in that dtype, on a card; a CPU takes minutes for it."""
    if dtype == "f32" or scene.reference != "torch" or not scene.on_gpu:
        return ""
    theirs = pytorch.by_itself(model.folder, model.shape, scene.torch_device, pytorch.dtype(dtype))
    most, least = distance(theirs.embed(texts, 16).tolist(), expected)
    return f"; PyTorch in {dtype}: {most:.2g}, {least:.7f}"


def _alone(scene, model, dtype, texts, found):
    if dtype not in found:
        raise NotMeasured(NOTHING)
    settings = [f"pool[0].dtype={dtype}", "pool[0].batch.max_requests=1"]
    ended, responses = scene.embed(model, texts, settings)
    report = sconce.ended_well(ended).report()
    most, least = distance(sconce.vectors(responses)[0], found[dtype])
    together = found[dtype, "batch"]["mean_inputs"]
    seen = f"{report['batch']['passes']} passes of one text against {together:g} a pass: {most:.2g} at most"
    kept = report["batch"]["mean_inputs"] == 1 < together and within(dtype, (most, least))
    return kept, f"{seen}, cosine {least:.7f} at least"


def _counted(tokens, found):
    if isinstance(tokens, str) or "tokens" not in found:
        raise NotMeasured(tokens if isinstance(tokens, str) else NOTHING)
    differ = sum(a != b for a, b in zip(found["tokens"], tokens))
    return not differ, f"{sum(tokens)} tokens of {len(tokens)} texts, {differ} texts counted otherwise"


def _bad(scene, model, texts, found):
    # Refused by what they are, by what they name, and by the network's own limits.
    bad = [{"input": 7}, {"input": ["a", None]}, {"input": "a", "model": "no-such"}, {"input": [10**9]}]
    lines = list(texts)
    for at, body in enumerate(bad):
        lines.insert(5 * at + 2, body)
    ended, responses = scene.embed(model, lines)
    sconce.ended_well(ended)
    codes = [responses[lines.index(body)]["status_code"] for body in bad]
    others = [response for line, response in zip(lines, responses) if not isinstance(line, dict)]
    measured = distance(sconce.vectors(others)[0], found["f32"])
    kept = codes == [400, 400, 404, 400] and within("f32", measured)
    seen = f"{len(bad)} of {len(lines)} answered with {codes}, the others as before"
    return kept, f"{seen} (within {measured[0]:.2g})"
