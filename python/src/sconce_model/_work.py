"""What is done with a class, in this process alone: it is loaded, and asked for inputs, outputs and bodies, which are checked.
The process of a worker and `testing` both do it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._class import checked, options_from
from ._errors import TaskError
from ._model import Body, Input, Model, Task, Worker


def load(
    kind: Any,
    device: str = "cpu",
    dtype: str = "float32",
    options: Mapping[str, Any] | None = None,
    worker: Worker | None = None,
) -> Model:
    """Checks a class, or a function with `one_pass`, and loads the model in this process.

    Raises: `ClassProblem` for a wrong class or wrong options, and whatever `load` raises.
    """
    kind = checked(kind)
    given = options_from(kind, options or {})
    model: Model = kind()
    model.worker = worker or Worker()
    model.load(device, dtype, given)
    return model


def prepared(model: Model, task: Task) -> list[Input]:
    """The inputs of a task, which then knows how many tokens they have.

    Raises: whatever `preprocess` raises; `TaskError` if they are too many.
    """
    inputs = model.preprocess(task)
    if len(inputs) > model.worker.max_inputs:
        raise TaskError(413, f"the task has {len(inputs)} inputs; this pool takes {model.worker.max_inputs}")
    for one in inputs:
        if not isinstance(one, Input):
            raise TypeError(f"preprocess returned a list with {type(one).__name__}; it must be a list of Input")
        one.tokens = int(one.tokens)
        if one.tokens < 1:
            raise ValueError(f"preprocess returned an Input of {one.tokens} tokens; it has at least 1")
        if one.bytes is None:
            one.bytes = _size(one.value)
    task.tokens = sum(one.tokens for one in inputs)
    return inputs


def _size(value: Any) -> int:
    """Bytes of memory, as far as they are easily told."""
    if isinstance(size := getattr(value, "nbytes", None), int):  # arrays and tensors
        return size
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    # Items are taken to be alike, as ids and pixels are.
    return len(value) * (8 + _size(value[0])) if isinstance(value, (list, tuple)) and value else 8


def computed(model: Model, batch: list[Input]) -> Any:
    """The outputs of a batch, as `forward` returned them: one for each input.

    Raises: whatever `forward` raises.
    """
    outputs = model.forward(batch)
    if not hasattr(outputs, "__len__"):
        raise TypeError(f"forward returned {type(outputs).__name__}; it must be a list, an array or a tensor")
    if len(outputs) != len(batch):
        raise ValueError(f"forward returned {len(outputs)} outputs for {len(batch)} inputs")
    return outputs


def finished(model: Model, task: Task, outputs: list[Any]) -> Body:
    """The body of the reply."""
    return Body.of(model.finish(task, outputs))
