"""Runs a class in this process, as a worker does it: no broker and no Rust program. For tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._class import options_from, routes
from ._errors import TaskError
from ._model import Body, Input, Model, Task
from ._work import computed, finished, load, prepared


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
        """The body as JSON.

        Raises: the task's error.
        """
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
    one for the first of the class's URLs: bytes, or anything else as JSON. `batch` inputs of all tasks are computed together; if
    that fails, they are halved, until the input at fault is alone.
    """
    model = load(kind, device, dtype, options)
    url, types = next(iter(routes(type(model)).items()))
    every = [it if isinstance(it, Task) else Task.of(it, url, types[0]) for it in tasks]
    if hasattr(model, "stream"):
        most = options_from(type(model), options or {}).concurrency
        return asyncio.run(_streamed(model, every, most))
    replies, inputs = [Reply() for _ in every], []
    for number, task in enumerate(every):
        try:
            inputs += [(number, one) for one in prepared(model, task)]
        except Exception as error:  # noqa: BLE001 - the class's own
            replies[number] = _failed(error)
    outputs: list[list[Any]] = [[] for _ in every]
    for start in range(0, len(inputs), batch):
        some = inputs[start : start + batch]
        for (number, _), output in zip(some, _halved(model, [one for _, one in some])):
            outputs[number].append(output)
    for reply, task, found in zip(replies, every, outputs):
        if not reply.error:
            try:
                reply.body = _finished(model, task, found)
            except Exception as error:  # noqa: BLE001 - the class's own
                reply.status_code, reply.error = _failed(error).status_code, error
    return replies


def _failed(error: BaseException) -> Reply:
    return Reply(error.status if isinstance(error, TaskError) else 500, error=error)


def _halved(model: Model, batch: list[Input]) -> list[Any]:
    """An output, or an exception, for each input."""
    try:
        return list(computed(model, batch))
    except Exception as error:  # noqa: BLE001 - the class's own
        if len(batch) == 1:
            return [error]
    half = len(batch) // 2
    return _halved(model, batch[:half]) + _halved(model, batch[half:])


def _finished(model: Model, task: Task, outputs: list[Any]) -> Body:
    for output in outputs:
        if isinstance(output, BaseException):
            raise output
    return finished(model, task, outputs)


async def _streamed(model: Model, tasks: list[Task], most: int) -> list[Reply]:
    places = asyncio.Semaphore(most)

    async def answered(task: Task) -> Reply:
        parts: list[Any] = []
        async with places:
            try:
                async for part in model.stream(task):
                    parts.append(part)
                return Reply(body=finished(model, task, parts), parts=[Body.of(part) for part in parts])
            except Exception as error:  # noqa: BLE001 - the class's own
                failed = _failed(error)
                failed.parts = [Body.of(part) for part in parts]
                return failed

    return await asyncio.gather(*map(answered, tasks))
