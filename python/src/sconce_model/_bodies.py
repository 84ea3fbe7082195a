"""Requests and replies that a class need not read and write itself: those of `/v1/embeddings` and of `/v1/score`, as OpenAI and
vLLM have them. A reply is a template, pieces around the places of its numbers, so that the worker can write the numbers."""

from __future__ import annotations

import base64
import json
import numbers
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ._errors import TaskError

if TYPE_CHECKING:
    from ._model import Task, Worker

SCORE = "/v1/score"
URLS = ("/v1/embeddings", SCORE)
_UNCHANGED = {"dimensions": None, "errors": "task", "prompt_name": None, "truncate": True, "raw_scores": False, "instruction": None}
"""Fields that such a model does not have, with the values that change nothing."""


_WANTED = "without `finish` the output of an input is a vector of real numbers, or a number"


class Template(NamedTuple):
    """Values are written as `kind`, "json" or "base64" of a vector or "number", between `pieces`, which are one more."""

    kind: str
    pieces: list[bytes]


def values(task: Task, worker: Worker) -> list[tuple[Any, int]]:
    """Texts, or pairs of texts, each with its length."""
    name = task.field("model", None)
    if name is not None:
        known = {str(it).rpartition("/")[2] for it in (worker.model_name, *worker.served_names)}
        if not isinstance(name, str) or name.rpartition("/")[2] not in known:
            raise TaskError(404, f"model is {name!r}; this pool serves {', '.join(sorted(known))}", "model")
    for field, usual in _UNCHANGED.items():
        if (value := task.field(field, usual)) != usual:
            raise TaskError(400, f"{field} is {value!r}, and this model has no {field}", field)
    if task.url != SCORE:
        return [(text, len(text)) for text in _texts(task, "input")]
    left, right = _texts(task, "text_1"), _texts(task, "text_2")
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise TaskError(400, f"text_1 has {len(left)} texts and text_2 has {len(right)}", "text_1")
    return [((one, other), len(one) + len(other)) for one, other in zip(left, right)]


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


def template(task: Task, count: int, worker: Worker) -> Template:
    """The reply to a task, without its numbers."""
    is_score = task.url == SCORE
    encoding = task.field("encoding_format", "float") if task.media_type.endswith("json") else "float"
    if not is_score and encoding not in ("float", "base64"):
        raise TaskError(400, f'encoding_format is {encoding!r}; it must be "float" or "base64"', "encoding_format")
    kind, head = "score" if is_score else "embedding", '{"object":"list","data":['
    items = [f'{{"object":"{kind}","index":{index},"{kind}":' for index in range(count)]
    name = next(iter(worker.served_names), worker.model_name)
    usage = {"prompt_tokens": task.tokens, "total_tokens": task.tokens}
    tail = f'],"model":{json.dumps(name)},"usage":{json.dumps(usage)}}}'
    words = [head + items[0], *("}," + item for item in items[1:]), "}" + tail] if items else [head + tail]
    return Template("number" if is_score else "json" if encoding == "float" else "base64", [it.encode() for it in words])


def filled(made: Template, outputs: Iterable[Any]) -> bytes:
    """The reply, as the worker writes it of a class without `finish`."""
    written = bytearray(made.pieces[0])
    for output, piece in zip(outputs, made.pieces[1:]):
        data = f32(output)
        found = array("f", data).tolist()
        if made.kind == "number" and len(found) != 1:
            raise ValueError(f"forward returned {len(found)} numbers for a text; a score is one")
        value = base64.b64encode(data).decode() if made.kind == "base64" else found[0] if made.kind == "number" else found
        written += json.dumps(value, allow_nan=False).encode() + piece
    return bytes(written)


def f32(value: Any) -> bytes:
    """A vector, or a number, as little-endian numbers of 32 bits."""
    if isinstance(value, numbers.Real):
        return array("f", [float(value)]).tobytes()
    kind = type(value).__name__
    if hasattr(value, "detach"):  # a tensor
        value = value.detach()
        value = value.cpu().numpy() if value.is_complex() else value.float().cpu().numpy()
    if hasattr(value, "astype"):  # an array
        _check_array(value, 1)
        return bytes(value.astype("<f4").tobytes())
    if isinstance(value, (str, bytes, bytearray, Mapping, AbstractSet)) or not hasattr(value, "__len__"):
        raise TypeError(f"forward returned {kind} for an input; {_WANTED}")
    return array("f", value).tobytes()


def _check_array(value: Any, most: int) -> None:
    """Raises `TypeError` for an array of more dimensions, of numbers that are not real, or with places without a number."""
    if value.ndim > most:
        raise TypeError(f"forward returned an array of the shape {tuple(value.shape)}; {_WANTED}")
    if value.dtype.kind in "cSUmM" or hasattr(value, "mask"):
        what = "with a mask" if hasattr(value, "mask") else f"of {value.dtype}"
        raise TypeError(f"forward returned an array {what}; {_WANTED}")


def is_matrix(outputs: Any) -> bool:
    """Whether these are an array or a tensor of numbers, and so hold no errors."""
    if hasattr(outputs, "detach"):
        return not outputs.is_complex()
    return hasattr(outputs, "astype") and outputs.dtype.kind != "O"


def own(outputs: Any) -> Any:
    """Outputs that are kept while the next batch is computed, which may reuse the memory of an array or a tensor."""
    if hasattr(outputs, "detach"):
        return outputs.detach().clone()
    return outputs.copy() if hasattr(outputs, "astype") else outputs


def rows(outputs: Any) -> tuple[Any, list[bytes]]:
    """How many numbers each output has, or all have, and the numbers."""
    if is_matrix(outputs) and outputs.ndim == 2:  # at once
        if hasattr(outputs, "detach"):
            outputs = outputs.detach().float().cpu().numpy()
        _check_array(outputs, 2)
        return int(outputs.shape[1]), [bytes(outputs.astype("<f4").tobytes())]
    kinds = set(map(type, outputs))
    if kinds <= {list, tuple}:
        return [len(one) for one in outputs], [array("f", chain.from_iterable(outputs)).tobytes()]
    if kinds <= {float, int}:
        return 1, [array("f", outputs).tobytes()]
    every = [b"" if isinstance(output, Exception) else f32(output) for output in outputs]
    return [len(one) // 4 for one in every], every
