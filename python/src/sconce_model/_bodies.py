"""Requests and replies that a class need not read and write itself: those of `/v1/embeddings` and of `/v1/score`, as OpenAI and
vLLM define them. A reply is made of texts and of the numbers that stand between them, so that the worker can write the numbers."""

from __future__ import annotations

import base64
import json
import numbers
from array import array
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import TYPE_CHECKING, Any

from ._errors import TaskError

if TYPE_CHECKING:
    from ._model import Task, Worker

SCORE = "/v1/score"
URLS = ("/v1/embeddings", SCORE)
_NEUTRAL = {"dimensions": None, "errors": "task", "prompt_name": None, "truncate": True, "raw_scores": False, "instruction": None}
"""Fields that such a model does not have, each with the only value that is accepted, since it changes nothing."""
_EXPECTED = "without `finish` the output of an input is a vector of real numbers, or a number"


def texts_or_pairs(task: Task, worker: Worker) -> list[Any]:
    """The inputs that the body names: texts, or for `/v1/score` pairs of texts. Raises `TaskError`."""
    name = task.field("model", None)
    if name is not None:
        known = {str(it).rpartition("/")[2] for it in (worker.model_name, *worker.served_names)}
        if not isinstance(name, str) or name.rpartition("/")[2] not in known:
            raise TaskError(404, f"model is {name!r}; this pool serves {', '.join(sorted(known))}", "model")
    for field, neutral in _NEUTRAL.items():
        if (value := task.field(field, neutral)) != neutral:
            raise TaskError(400, f"{field} is {value!r}, and this model has no {field}", field)
    if task.url != SCORE:
        return _texts(task, "input")
    left, right = _texts(task, "text_1"), _texts(task, "text_2")
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise TaskError(400, f"text_1 has {len(left)} texts and text_2 has {len(right)}", "text_1")
    return list(zip(left, right))


def _texts(task: Task, name: str) -> list[str]:
    texts = task.field(name)
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, list) or not texts:
        raise TaskError(400, f"{name} must be a text or a list of texts", name)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TaskError(400, f"{name}[{index}] must be a text", f"{name}[{index}]")
    return texts


def form_of(task: Task) -> str:
    """How the reply to a task gives an output: "number" for a score; for a vector "json", or "base64" of its bytes.
    Raises `TaskError`."""
    if task.url == SCORE:
        return "number"
    encoding = task.field("encoding_format", "float") if task.media_type.endswith("json") else "float"
    if encoding not in ("float", "base64"):
        raise TaskError(400, f'encoding_format is {encoding!r}; it must be "float" or "base64"', "encoding_format")
    return "base64" if encoding == "base64" else "json"


def reply_around(task: Task, count: int, worker: Worker) -> list[bytes]:
    """The reply to a task of `count` inputs without its outputs: each output stands between two of these texts."""
    kind, start = "score" if task.url == SCORE else "embedding", '{"object":"list","data":['
    items = [f'{{"object":"{kind}","index":{index},"{kind}":' for index in range(count)]
    name = next(iter(worker.served_names), worker.model_name)
    usage = {"prompt_tokens": task.tokens, "total_tokens": task.tokens}
    end = f'],"model":{json.dumps(name)},"usage":{json.dumps(usage)}}}'
    # Items are not encoded by `json`, which would take several times as long for a task of many texts.
    texts = [start + items[0], *("}," + item for item in items[1:]), "}" + end] if items else [start + end]
    return [text.encode() for text in texts]


def reply(task: Task, outputs: Sequence[Any], worker: Worker) -> bytes:
    """The whole reply, as the worker writes it for a class without `finish`."""
    form, (start, *texts) = form_of(task), reply_around(task, len(outputs), worker)
    return start + b"".join(_json_of(output, form) + text for output, text in zip(outputs, texts))


def _json_of(output: Any, form: str) -> bytes:
    data = f32(output)
    if form == "base64":
        return json.dumps(base64.b64encode(data).decode()).encode()
    vector = array("f", data).tolist()
    if form == "number" and len(vector) != 1:
        raise ValueError(f"forward returned {len(vector)} numbers for a text; a score is one")
    return json.dumps(vector[0] if form == "number" else vector, allow_nan=False).encode()


def f32(value: Any) -> bytes:
    """A vector, or a number, as little-endian numbers of 32 bits. Raises `TypeError` for anything else."""
    if isinstance(value, numbers.Real):
        return array("f", [float(value)]).tobytes()
    if (vector := _array(value)) is not None:
        return _array_f32(vector, 1)
    if isinstance(value, (str, bytes, bytearray, Mapping, AbstractSet)) or not hasattr(value, "__len__"):
        raise TypeError(f"forward returned {type(value).__name__} for an input; {_EXPECTED}")
    return array("f", value).tobytes()


def _array(value: Any) -> Any:
    """An array of NumPy, or a tensor of PyTorch as such an array; None for anything else."""
    if hasattr(value, "detach"):
        # NumPy has no bfloat16.
        value = value.detach().cpu() if value.is_complex() else value.detach().float().cpu()
        return value.numpy()
    return value if hasattr(value, "astype") else None


def _array_f32(value: Any, max_dimensions: int) -> bytes:
    if value.ndim > max_dimensions:
        raise TypeError(f"forward returned an array of the shape {tuple(value.shape)}; {_EXPECTED}")
    # Complex numbers, texts and dates; places without a number.
    if value.dtype.kind in "cSUmM" or hasattr(value, "mask"):
        what = "with a mask" if hasattr(value, "mask") else f"of {value.dtype}"
        raise TypeError(f"forward returned an array {what}; {_EXPECTED}")
    return bytes(value.astype("<f4").tobytes())


def is_matrix(outputs: Any) -> bool:
    """Whether these are an array or a tensor of numbers, which cannot hold a `TaskError`."""
    return hasattr(outputs, "detach") or hasattr(outputs, "astype") and outputs.dtype.kind != "O"


def copy_of(outputs: Any) -> Any:
    """Outputs that stay while the next batch is computed, which may reuse the memory of an array or a tensor."""
    if hasattr(outputs, "detach"):
        return outputs.detach().clone()
    return outputs.copy() if hasattr(outputs, "astype") else outputs


def vectors(outputs: Any) -> tuple[list[int], bytes]:
    """How many numbers each output has, and the numbers of all as `f32` gives them. An error in place of an output has none."""
    if is_matrix(outputs) and outputs.ndim == 2:
        return [outputs.shape[1]] * len(outputs), _array_f32(_array(outputs), 2)
    kinds = set(map(type, outputs))
    # Lists of Python's own numbers are common, and quicker all at once.
    if kinds <= {list, tuple}:
        return [len(one) for one in outputs], array("f", chain.from_iterable(outputs)).tobytes()
    if kinds <= {float, int}:
        return [1] * len(outputs), array("f", outputs).tobytes()
    every = [b"" if isinstance(output, Exception) else f32(output) for output in outputs]
    return [len(one) // 4 for one in every], b"".join(every)
