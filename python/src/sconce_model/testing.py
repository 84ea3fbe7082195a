"""Runs a class in this process, as a worker does it: no broker and no Rust program. For tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Callable

from ._class import call_finish, call_forward, call_preprocess, load, options_from, probe_of, task_of
from ._errors import TaskError
from ._model import Body, Input, Model, Task


@dataclass
class Reply:
    """What the requester of a task would get."""

    status_code: int = 200
    body: Body | None = None
    parts: list[Body] = field(default_factory=list)
    """The parts that a stream has given."""
    error: Exception | None = None
    """Why there is no body: a `TaskError`, or what the class has raised, with its traceback."""

    def json(self) -> Any:
        """The body as JSON. Raises the task's error if it has one."""
        if self.error:
            raise self.error
        assert self.body is not None
        return json.loads(self.body.data)


def run(
    kind: Any,
    tasks: Iterable[Any],
    *,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    batch: int = 32,
) -> list[Reply]:
    """Loads a class, or a function with `one_pass`, and answers tasks with it, in their order. A task is a `Task`, or the body of
    one for the first of the class's URLs: bytes, or anything else as JSON. `batch` inputs of all tasks are computed together. If
    that fails, they are halved until the input at fault is alone. A stream runs `options.concurrency` tasks at once.
    Raises the error of `load` or of the probe."""
    if isinstance(tasks, (Mapping, str, bytes, Task)):
        raise TypeError(f"tasks is a {type(tasks).__name__}; it is a list of tasks, or of their bodies")
    model = load(kind, device, dtype, options)

    def answer(tasks: list[Task]) -> list[Reply]:
        if hasattr(model, "stream"):
            concurrency = options_from(type(model), options or {}).concurrency
            return asyncio.run(_answer_streams(model, tasks, concurrency))
        return _answer_batches(model, tasks, batch)

    probe = probe_of(model)
    if probe and (error := answer([probe])[0].error):  # A worker does the same before it takes tasks.
        raise error
    return answer([task_of(model, task) for task in tasks])


def _answer_batches(model: Model, tasks: list[Task], batch: int) -> list[Reply]:
    prepared = [_result_or_error(call_preprocess, model, task) for task in tasks]
    rows = [one for inputs in prepared if isinstance(inputs, list) for one in inputs]
    outputs = iter([output for at in range(0, len(rows), batch) for output in _compute(model, rows[at : at + batch])])
    replies = []
    for task, inputs in zip(tasks, prepared):
        own = list(islice(outputs, len(inputs))) if isinstance(inputs, list) else [inputs]
        error = next((it for it in own if isinstance(it, Exception)), None)
        replies.append(_reply(error or _result_or_error(call_finish, model, task, own)))
    return replies


def _compute(model: Model, batch: list[Input]) -> list[Any]:
    """An output, or an exception, for each input."""
    outputs = _result_or_error(call_forward, model, batch)
    if not isinstance(outputs, Exception):
        return list(outputs)
    half = len(batch) // 2
    return _compute(model, batch[:half]) + _compute(model, batch[half:]) if half else [outputs]


def _result_or_error(work: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return work(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever the class raises
        return error


def _reply(result: Body | Exception) -> Reply:
    """The reply with this body or error, with the status that a worker gives it."""
    if isinstance(result, Body):
        return Reply(body=result)
    if not isinstance(result, TaskError):
        return Reply(500, error=result)
    return Reply(result.status if result.status in (404, 408, 413) else 400, error=result)


async def _answer_streams(model: Model, tasks: list[Task], concurrency: int) -> list[Reply]:
    places = asyncio.Semaphore(concurrency)

    async def answer(task: Task) -> Reply:
        parts: list[Any] = []
        async with places:
            try:
                async for part in model.stream(task):
                    parts.append(part)
                reply = _reply(call_finish(model, task, parts))
            except Exception as error:  # noqa: BLE001 - whatever the class raises
                reply = _reply(error)
        reply.parts = [Body.of(part) for part in parts]
        return reply

    return await asyncio.gather(*map(answer, tasks))
