"""Runs a class in this process, as a worker does it: no broker and no Rust program. For tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

from ._class import computed, finished, load, options_from, prepared, probe_of, usual
from ._errors import TaskError
from ._model import Body, Input, Model, Task


@dataclass
class Reply:
    """What the requester of a task would get."""

    status_code: int = 200
    body: Body | None = None
    parts: list[Body] = field(default_factory=list)
    """Of a stream."""
    error: BaseException | None = None
    """Why there is no body: a `TaskError`, or what the class has raised, with its traceback."""

    def json(self) -> Any:
        """The body as JSON. Raises the task's error."""
        self.raise_error()
        assert self.body is not None
        return json.loads(self.body.data)

    def raise_error(self) -> None:
        """Raises the task's error, if it has one."""
        if self.error:
            raise self.error


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
    one for the first of the class's URLs: bytes, or anything else as JSON. `batch` inputs of all tasks are computed together; if
    that fails, they are halved, until the input at fault is alone.
    """
    if isinstance(tasks, (Mapping, str, bytes, Task)):
        raise TypeError(f"tasks is a {type(tasks).__name__}; it is a list of tasks, or of their bodies")
    model = load(kind, device, dtype, options)
    if probe := probe_of(model):  # which a worker computes before it takes work
        [reply] = _answers(model, [probe], options, batch)
        reply.raise_error()
    return _answers(model, [it if isinstance(it, Task) else Task.of(it, *usual(type(model))) for it in tasks], options, batch)


def _answers(model: Model, every: list[Task], options: Mapping[str, Any] | None, batch: int) -> list[Reply]:
    if hasattr(model, "stream"):
        most = options_from(type(model), options or {}).concurrency
        return asyncio.run(_streamed(model, every, most))
    ready = [_tried(prepared, model, task) for task in every]
    rows = [one for inputs in ready if isinstance(inputs, list) for one in inputs]
    outputs = iter([it for at in range(0, len(rows), batch) for it in _halved(model, rows[at : at + batch])])
    replies = []
    for task, inputs in zip(every, ready):
        found = inputs if isinstance(inputs, Exception) else [next(outputs) for _ in inputs]
        bad = found if isinstance(found, Exception) else next((it for it in found if isinstance(it, Exception)), None)
        replies.append(_reply(bad or _tried(finished, model, task, found)))
    return replies


def _tried(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result, or the exception."""
    try:
        return work(*arguments)
    except Exception as error:  # noqa: BLE001 - the class's own
        return error


def _reply(found: Any) -> Reply:
    if not isinstance(found, Exception):
        return Reply(body=found)
    if not isinstance(found, TaskError):
        return Reply(500, error=found)
    return Reply(found.status if found.status in (404, 408, 413) else 400, error=found)  # as the worker does


def _halved(model: Model, batch: list[Input]) -> list[Any]:
    """An output, or an exception, for each input."""
    outputs = _tried(computed, model, batch)
    if not isinstance(outputs, Exception):
        return list(outputs)
    half = len(batch) // 2
    return _halved(model, batch[:half]) + _halved(model, batch[half:]) if half else [outputs]


async def _streamed(model: Model, tasks: list[Task], most: int) -> list[Reply]:
    places = asyncio.Semaphore(most)

    async def answered(task: Task) -> Reply:
        parts: list[Any] = []
        async with places:
            try:
                async for part in model.stream(task):
                    parts.append(part)
                reply = _reply(finished(model, task, parts))
            except Exception as error:  # noqa: BLE001 - the class's own
                reply = _reply(error)
        reply.parts = [Body.of(part) for part in parts]
        return reply

    return await asyncio.gather(*map(answered, tasks))
