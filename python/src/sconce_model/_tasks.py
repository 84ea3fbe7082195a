"""Holds tasks until the worker drops them: prepares them, computes batches of their inputs, and finishes them."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from . import _bodies
from ._class import call_finish, call_forward, call_preprocess, gives_numbers
from ._errors import TaskError, failure_of
from ._model import Input, Model, Task
from ._wire import encode

MAX_KEPT_JSON = 64 << 10
"""The longest body, in bytes, whose JSON is kept after it was prepared."""


@dataclass
class HeldTask:
    """All that is kept of a task."""

    task: Task
    inputs: list[Input]
    outputs: dict[int, Any] = field(default_factory=dict)
    """By the index of the input. Empty if they are numbers, which the worker keeps."""


class Tasks:
    """The tasks that are held, by the worker's numbers. `forward` runs on the main thread and the other methods on the side
    thread. They may touch the same task, but not at once: the worker awaits each answer before it asks for more of this task."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.held: dict[int, HeldTask] = {}

    def drop(self, frame: dict[str, Any]) -> None:
        """Forgets the tasks that have left the worker. Each frame on the side channel may name some."""
        for number in frame.get("drop", ()):
            self.held.pop(number, None)

    def prepare(self, frame: dict[str, Any]) -> bytes:
        """Makes the inputs of a new task, and if the outputs are numbers, the reply around them."""
        self.drop(frame)
        try:
            task = Task(frame["buffers"][0], frame["url"], frame["content_type"], frame["headers"])
            is_stream = hasattr(self.model, "stream")
            whole_body = Input(None, len(task.body) // 4 or 1, len(task.body))
            inputs = [whole_body] if is_stream else call_preprocess(self.model, task)
            reply: dict[str, Any] = {}
            if gives_numbers(type(self.model)):
                texts = _bodies.reply_around(task, len(inputs), self.model.worker)
                reply = {"form": _bodies.form_of(task), "buffers": texts}
            self.held[frame["task"]] = HeldTask(task, inputs)
            if len(task.body) > MAX_KEPT_JSON:
                # It takes some ten times the memory of the body, and `finish` can read it again.
                task.__dict__.pop("_json", None)
            sizes: dict[str, Any] = {"tokens": [one.tokens for one in inputs], "bytes": [one.bytes for one in inputs]}
            wants_parts = is_stream and _wants_parts(task)
            return encode("prepared", task=frame["task"], parts=wants_parts, **sizes, **reply)
        except BaseException as error:  # noqa: BLE001 - whatever the class raises
            return encode("refused", task=frame["task"], **failure_of(error))

    def forward(self, frame: dict[str, Any]) -> bytes:
        """Computes a batch, whose inputs are given as ranges: a task, the index of its first input, and the number of inputs."""
        try:
            ranges = [(self.held[task], range(first, first + count)) for task, first, count in frame["inputs"]]
            places = [(task, index) for task, indices in ranges for index in indices]
            outputs = call_forward(self.model, [task.inputs[index] for task, index in places])
            errors = [] if _bodies.is_matrix(outputs) else _errors_in(outputs)
            if gives_numbers(type(self.model)):
                lengths, numbers = _bodies.vectors(outputs)
                return encode("outputs", [numbers], lengths=lengths, count=len(places), errors=errors)
            for (task, index), output in zip(places, _bodies.copy_of(outputs)):
                task.outputs[index] = output
            return encode("outputs", count=len(places), errors=errors)
        except BaseException as error:  # noqa: BLE001 - whatever the class raises
            failure = failure_of(error)
        # Here the exception is gone, and with it the tensors that its frames refer to.
        if failure["kind"] == "out_of_memory" and "torch" in sys.modules:
            import_module("torch").cuda.empty_cache()
        return encode("failed", **failure)

    def finish(self, frame: dict[str, Any]) -> bytes:
        """Writes the reply of a task, all of whose outputs are there."""
        self.drop(frame)
        try:
            held = self.held[frame["task"]]
            outputs = [held.outputs[index] for index in range(len(held.inputs))]
            return encode("finished", task=frame["task"], **call_finish(self.model, held.task, outputs).fields())
        except BaseException as error:  # noqa: BLE001 - whatever the class raises
            return encode("refused", task=frame["task"], **failure_of(error))


def _errors_in(outputs: Any) -> list[list[Any]]:
    return [[index, failure_of(output)] for index, output in enumerate(outputs) if isinstance(output, Exception)]


def _wants_parts(task: Task) -> bool:
    """Whether the requester wants the reply in parts: by the field `stream` of the body, or by a header of this name."""
    with suppress(TaskError):
        return task.field("stream", False) is True
    return task.headers.get("stream") is True
