"""The process of a worker's model: started by the worker, which calls `main` and speaks with it over two sockets. This
holds the class, its inputs and its outputs, and nothing else: batches, tasks and replies are the worker's. The main thread
computes batches or runs streams; a second one prepares and finishes tasks beside it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from . import _bodies
from ._class import computed, find, finished, load, options_from, options_of, prepared, probe_of, routes, type_name
from ._errors import ClassProblem, TaskError, is_lasting, last_line, place, short_traceback, told
from ._model import JSON, Body, Input, Model, Task, Worker
from ._wire import VERSION, Channel, header, header_length, quit, written

LONG_BODY = 64 << 10
"""In bytes."""
DTYPES = {"auto": "float32", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass
class Held:
    """All that is kept of a task, until the worker drops it."""

    task: Task
    inputs: list[Input]
    outputs: dict[int, Any] = field(default_factory=dict)


class Process:
    """One model, and the tasks that the worker has in hand."""

    def __init__(self, model: Model, channel: Channel) -> None:
        self.model, self.channel = model, channel
        self.is_stream, self.has_values = hasattr(model, "stream"), has_values(type(model))
        # Written by the side thread. The main thread reads what the worker has been told of, until the worker drops it.
        self.held: dict[int, Held] = {}

    # The side thread.

    def serve_side(self, channel: Channel) -> None:
        """Prepares and finishes tasks, one after the other."""
        try:
            while True:
                frame = channel.read()
                for number in frame.get("drop", ()):
                    self.held.pop(number, None)
                if frame["type"] == "drop":
                    continue
                if frame["type"] not in ("prepare", "finish"):
                    quit(f"the worker sent {frame['type']!r} on the side channel")
                try:
                    answer = (self.prepare if frame["type"] == "prepare" else self.finish)(frame)
                except BaseException as error:  # noqa: BLE001 - the class's own
                    answer = written("refused", task=frame["task"], **told(error))
                channel.write(answer)
        except BaseException as error:  # noqa: BLE001 - without this thread the process is of no use
            quit(short_traceback(error))

    def prepare(self, frame: dict[str, Any]) -> bytes:
        task = Task(frame["buffers"][0], frame["url"], frame.get("content_type") or JSON, frame.get("headers") or {})
        whole = [Input(None, len(task.body) // 4 or 1, len(task.body))]
        inputs = whole if self.is_stream else prepared(self.model, task)
        fields: dict[str, Any] = {"template": None}
        if self.has_values:
            made = _bodies.template(task, len(inputs), self.model.worker)
            fields = {"template": {"content_type": JSON, "as": made.kind}, "buffers": made.pieces}
        self.held[frame["task"]] = Held(task, inputs)
        if len(task.body) > LONG_BODY:
            task.__dict__.pop("_json", None)  # some ten times as large as the body; `finish` may read it again
        sizes: dict[str, Any] = {"tokens": [one.tokens for one in inputs], "bytes": [one.bytes for one in inputs]}
        return written("prepared", task=frame["task"], **sizes, parts=self.is_stream and wants_parts(task), **fields)

    def finish(self, frame: dict[str, Any]) -> bytes:
        held = self.held[frame["task"]]
        outputs = [held.outputs[index] for index in range(len(held.inputs))]
        return written("finished", task=frame["task"], **finished(self.model, held.task, outputs).fields())

    # The main thread.

    def serve_batches(self) -> None:
        """Computes batches, one after the other."""
        while True:
            frame = self.channel.read()
            if frame["type"] != "forward":
                quit(f"the worker sent {frame['type']!r} on the model channel")
            failure = None
            try:
                answer = self.forward(frame["inputs"])
            except BaseException as error:  # noqa: BLE001 - the class's own
                failure = told(error)
            if failure:  # The exception is gone, and with it the tensors of its frames.
                answer = written("failed", **failure)
                if failure["kind"] == "out_of_memory" and "torch" in sys.modules:
                    import_module("torch").cuda.empty_cache()
            self.channel.write(answer)

    def forward(self, ranges: list[list[int]]) -> bytes:
        places = [(task, index) for task, first, count in ranges for index in range(first, first + count)]
        outputs = computed(self.model, [self.held[task].inputs[index] for task, index in places])
        found = [] if self.has_values and _bodies.is_matrix(outputs) else list(_bodies.own(outputs))
        errors = [[at, told(one)] for at, one in enumerate(found) if isinstance(one, BaseException)]
        fields: dict[str, Any] = {"count": len(places), "errors": errors}
        if not self.has_values:
            for (task, index), output in zip(places, found):
                self.held[task].outputs[index] = output
            return written("outputs", **fields)
        lengths, buffers = _bodies.rows(outputs)
        return written("outputs", [b"".join(buffers)], lengths=lengths, **fields)

    async def serve_streams(self) -> None:
        """Starts and cancels streams, side by side on this loop."""
        reader, self.writer = await asyncio.open_unix_connection(sock=self.channel.socket)
        self.turn = asyncio.Lock()
        running: dict[int, asyncio.Task[None]] = {}
        # Those that the worker has cancelled, and that have not ended.
        self.cancelled: set[int] = set()

        def ended(number: int, task: asyncio.Task[None]) -> None:
            del running[number]
            self.cancelled.discard(number)
            if task.cancelled():  # before its first step
                self.put_cancelled(number)

        while True:
            try:
                frame = header(await reader.readexactly(header_length(await reader.readexactly(4))))
            except (asyncio.IncompleteReadError, OSError):
                quit()
            number = frame["task"]
            if frame["type"] == "stream":
                running[number] = asyncio.ensure_future(self.answer(number))
                running[number].add_done_callback(lambda it, of=number: ended(of, it))  # type: ignore[misc]
            elif frame["type"] == "cancel" and number in running:
                self.cancelled.add(number)
                running[number].cancel(frame.get("reason"))
            elif frame["type"] != "cancel":
                quit(f"the worker sent {frame['type']!r} on the model channel")

    async def answer(self, number: int) -> None:
        """Runs one stream, and ends it with exactly one frame."""
        try:
            body = await self.streamed(number)
            self.put("done", task=number, **body.fields())
        except BaseException as error:  # noqa: BLE001 - the class's own
            # Without a cancel of the worker, a `CancelledError` is the class's own.
            if isinstance(error, asyncio.CancelledError) and number in self.cancelled:
                self.put_cancelled(number)
            else:
                self.put("ended", task=number, **told(error))

    def put_cancelled(self, number: int) -> None:
        self.put("ended", task=number, kind="task", status=499, message="cancelled", param=None)

    async def streamed(self, number: int) -> Body:
        """The whole reply; its parts are sent meanwhile."""
        task, parts = self.held[number].task, []
        generator: Any = self.model.stream(task)
        try:
            async for part in generator:
                parts.append(part)
                if type(self.model).finish is Model.finish and not isinstance(part, str):
                    finished(self.model, task, parts)  # raises, before the requester gets a part
                self.put("part", task=number, **Body.of(part).fields())
                async with self.turn:  # before Python 3.11 two cannot wait at once
                    await self.writer.drain()
                await asyncio.sleep(0)  # a stream that awaits nothing can be cancelled here, and others go on
        except asyncio.CancelledError as cancelled:
            # If it was this function that waited, the generator stands at a `yield`, and is told there.
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                await generator.athrow(cancelled)
            await generator.aclose()
            raise
        return finished(self.model, task, parts)

    def put(self, type_: str, buffers: Any = (), **fields: Any) -> None:
        """Sends a frame, without waiting for the worker to read it."""
        self.writer.write(written(type_, buffers, **fields))


def has_values(kind: type[Model]) -> bool:
    """Whether the worker writes the replies itself, from the numbers of `forward`."""
    return hasattr(kind, "forward") and kind.finish is Model.finish


def wants_parts(task: Task) -> bool:
    """Whether the requester wants parts: by the body's `stream`, or by a header of this name."""
    with suppress(TaskError):
        return task.field("stream", False) is True
    return task.headers.get("stream") is True


def described(kind: type[Model], options: Any) -> dict[str, Any]:
    """What the worker is told of a class."""
    own = []
    for name, (wanted, default) in options_of(kind).items():
        values = {"default": None if default is ... else default, "value": getattr(options, name)}
        own.append({"name": name, "type": type_name(wanted), **values})
    return {
        "package": import_module("sconce_client").__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "urls": [{"url": url, "media_types": types} for url, types in routes(kind).items()],
        "options": own,
        "work": "streams" if hasattr(kind, "stream") else "batches",
        "values": has_values(kind),
        "slow": kind.preprocess is not Model.preprocess,
        "concurrency": options.concurrency if hasattr(kind, "stream") else 1,
    }


@contextmanager
def stage(channel: Channel, name: str) -> Iterator[None]:
    """Says why there is no model, and ends, if there is none."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - the class's own, SystemExit too
        message = str(error)
        if not isinstance(error, ClassProblem):
            print(short_traceback(error), file=sys.stderr, flush=True)
            message = f"{name}: {last_line(error)}{place(error)}"
        channel.write(written("failed", kind="operator" if is_lasting(error) else "model", message=message))
        os._exit(1)


def main() -> None:
    """Makes the model that the worker's first frame names, then serves."""
    try:
        channel, side = Channel(3), Channel(4)
    except OSError:
        sys.exit("sconce_model is started by a worker of sconce; to try a class, call sconce_model.testing.run")
    start = channel.read()
    with stage(channel, "import"):
        if start.get("version") != VERSION:
            raise ClassProblem(f"sconce speaks version {start.get('version')} with a model in Python, and sconce_model {VERSION}")
        kind = find(start["file"] or start["module"], start["class"])
        channel.write(written("described", **described(kind, options_from(kind, start["options"]))))
    if start["mode"] == "describe":
        os._exit(0)
    with stage(channel, "load"):
        worker = Worker(**{name: start[name] for name in Worker.__dataclass_fields__})
        device = "cpu" if start["device"] == "cpu" else "cuda:0"
        model = load(kind, device, DTYPES.get(start["dtype"], start["dtype"]), start["options"], worker)
        probe = probe_of(model)
    process = Process(model, channel)
    about = {"url": probe.url, "content_type": probe.content_type} if probe else None
    channel.write(written("ready", [probe.body] if probe else [], probe=about))
    threading.Thread(target=process.serve_side, args=(side,), daemon=True, name="sconce-side").start()
    if process.is_stream:
        asyncio.run(process.serve_streams())
    else:
        process.serve_batches()


if __name__ == "__main__":
    main()
