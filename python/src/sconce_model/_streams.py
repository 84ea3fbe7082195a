"""Runs streams side by side, on the model channel. Ends each with exactly one frame."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from ._class import call_finish
from ._errors import failure_of
from ._model import Body, Model, Task
from ._tasks import HeldTask
from ._wire import Channel, encode

_CANCELLED: dict[str, Any] = {"kind": "task", "status": 499, "message": "cancelled", "param": None}


class Streams:
    """The streams that run. `start` and `cancel` hand over to the event loop of the main thread, where everything else runs. A
    stream that blocks the loop thus does not block the worker."""

    def __init__(self, model: Model, channel: Channel, held: dict[int, HeldTask]) -> None:
        self.model, self.channel, self.held = model, channel, held
        self.loop = asyncio.new_event_loop()
        self.running: dict[int, asyncio.Task[bytes]] = {}
        self.cancelled: set[int] = set()
        """The running streams that the worker has cancelled."""

    def start(self, frame: dict[str, Any]) -> None:
        """Starts the stream of a task that is held."""
        self.loop.call_soon_threadsafe(self._start, frame["task"])

    def cancel(self, frame: dict[str, Any]) -> None:
        """Cancels the stream of a task, unless it has ended meanwhile."""
        self.loop.call_soon_threadsafe(self._cancel, frame["task"], frame["reason"])

    def _start(self, number: int) -> None:
        stream = self.running[number] = self.loop.create_task(self._answer(number))
        stream.add_done_callback(lambda ended: self._end(number, ended))

    def _cancel(self, number: int, reason: str) -> None:
        if number in self.running:
            self.cancelled.add(number)
            self.running[number].cancel(reason)

    def _end(self, number: int, stream: asyncio.Task[bytes]) -> None:
        del self.running[number]
        self.cancelled.discard(number)
        self.channel.write(encode("ended", task=number, **_CANCELLED) if stream.cancelled() else stream.result())

    async def _answer(self, number: int) -> bytes:
        """The frame that ends a stream. Raises `CancelledError` if the worker has cancelled it."""
        try:
            body = await self._run(number, self.held[number].task)
            return encode("done", task=number, **body.fields())
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and number in self.cancelled:
                raise
            return encode("ended", task=number, **failure_of(error))

    async def _run(self, number: int, task: Task) -> Body:
        """The whole reply. Sends its parts meanwhile."""
        parts: list[Any] = []
        generator: Any = self.model.stream(task)
        try:
            async for part in generator:
                parts.append(part)
                if type(self.model).finish is Model.finish and not isinstance(part, str):
                    call_finish(self.model, task, parts)  # Raises, before the requester gets the part.
                self.channel.write(encode("part", task=number, **Body.of(part).fields()))
                await asyncio.sleep(0)  # A stream that awaits nothing is cancelled here, and lets others go on.
        except asyncio.CancelledError as cancelled:
            # If this function was waiting, and not the generator, the generator stands at a `yield` and is told there.
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                await generator.athrow(cancelled)
            await generator.aclose()
            raise
        return call_finish(self.model, task, parts)
