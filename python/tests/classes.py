"""Classes that the tests of `sconce_model` run."""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any, Literal

import sconce_model
from sconce_model import Body, Input, Model, Task, TaskError


@sconce_model.one_pass("/v1/embeddings")
def lengths(texts: list[str]) -> list[list[float]]:
    return [[len(text), 0.5] for text in texts]


@sconce_model.one_pass("/v1/score")
def overlaps(pairs: list[tuple[str, str]]) -> list[float]:
    return [len(set(one) & set(other)) / len(set(one) | set(other)) for one, other in pairs]


class Fussy(Model):
    """Has opinions of its inputs, which are words."""

    urls = ("/v1/embeddings", "/count")
    media_types = {"/count": ["text/plain"]}  # noqa: RUF012 - as people write it

    class Options:
        factor: float = 2
        mode: Literal["plain", "loud"] = "plain"
        words: list[str] = ["one"]  # noqa: RUF012 - as people write it
        name: str

    def load(self, device: str, dtype: str, options: Options) -> None:
        if options.mode == "loud":
            raise RuntimeError("it is too loud")
        self.factor, self.found = options.factor, (device, dtype, self.worker.seed)

    def preprocess(self, task: Task) -> list[Input]:
        if task.content_type == "text/plain":
            return [Input(word, tokens=len(word)) for word in task.body.decode().split()]
        return super().preprocess(task)

    def forward(self, batch: list[Input]) -> Any:
        texts = [it.value for it in batch]
        if "memory" in texts:
            raise MemoryError("too long")
        if "refused" in texts:
            raise TaskError(422, "no such word", "input")
        if "broken" in texts:
            raise KeyError("broken")
        if "few" in texts:
            return []
        bad = TaskError(409, "in its place")
        return [bad if text == "placed" else array("f", [len(text) * self.factor]) for text in texts]

    def finish(self, task: Task, outputs: list[Any]) -> Any:
        if task.body == b"giant":
            return Body(bytes((1 << 30) + 1), "application/octet-stream")
        if task.url == "/count":
            return Body(str(int(sum(it[0] for it in outputs))).encode(), "text/x-count")
        return {"found": self.found, "sums": [it[0] for it in outputs], "tokens": task.tokens}

    def probe(self) -> Any:
        return {"input": "fine"}


class Teller(Model):
    """Counts, and says what becomes of it."""

    urls = ("/tell",)

    async def stream(self, task: Task) -> AsyncIterator[Any]:
        count, way = task.field("count"), task.field("way", "sleep")
        try:
            for number in range(count):
                if way == "sleep":
                    await asyncio.sleep(0.01)
                elif way == "fail" and number == 1:
                    raise ValueError("one is too many")
                elif way == "blocked":
                    time.sleep(0.01)  # noqa: ASYNC251 - what people do
                yield f"{number} "
        except asyncio.CancelledError as error:
            print("told of", *error.args, flush=True)
            raise


class Deaf(Model):
    urls = ("/v1/embeddings",)

    def forward(self, batch: list[Input]) -> Any:
        os._exit(7)
