"""Text by transformers' `generate`, token by token, with the bodies of OpenAI's completions.

    sconce launch --set 'pool[0].model=python:./writer.py:Writer' --set 'pool[0].options.model="HuggingFaceTB/SmolLM2-135M"'

Each task runs `generate` on a thread of its own, up to `concurrency` at once. A cancelled task stops at its next token. For the
models that sconce serves itself (docs/models.md), its own generation is much faster, since it batches the tokens of all tasks.
Needs `pip install torch transformers`, and with the option `gguf_file` also gguf and accelerate.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

import torch
from transformers import AsyncTextIteratorStreamer, AutoModelForCausalLM, AutoTokenizer

from sconce_model import Model, Task, TaskError


class Writer(Model):
    urls = ("/v1/completions",)

    class Options:
        model: str
        gguf_file: Optional[str] = None  # noqa: UP045 - Python 3.9 reads it
        max_prompt: int = 4096  # in tokens; without this bound one prompt could take all memory
        max_tokens: int = 1024
        concurrency: int = 4

    def load(self, device: str, dtype: str, options: Options) -> None:
        files = {"gguf_file": options.gguf_file} if options.gguf_file else {}
        self.tokenizer = AutoTokenizer.from_pretrained(options.model, **files)
        network = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype), **files)
        self.network, self.device, self.options = network.to(device).eval(), device, options
        # asyncio has few threads on a small host, and sconce cancels a stream that waits for a thread for too long.
        self.threads = ThreadPoolExecutor(options.concurrency)

    async def stream(self, task: Task) -> AsyncIterator[Any]:
        prompt, max_tokens = task.field("prompt"), task.field("max_tokens", 16)
        if not isinstance(prompt, str) or not prompt:
            raise TaskError(400, "prompt must be a text", "prompt")
        if type(max_tokens) is not int or not 1 <= max_tokens <= self.options.max_tokens:
            raise TaskError(400, f"max_tokens must be from 1 to {self.options.max_tokens}", "max_tokens")
        ids = self.tokenizer(prompt, return_tensors="pt").to(self.device)
        if (count := ids["input_ids"].shape[1]) > self.options.max_prompt:
            raise TaskError(413, f"the prompt has {count} tokens; this pool takes {self.options.max_prompt}", "prompt")
        streamer = AsyncTextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        ended = threading.Event()

        def is_ended(ids: Any, scores: Any, **_: Any) -> Any:
            return torch.full((ids.shape[0],), ended.is_set(), dtype=torch.bool, device=ids.device)

        def generate() -> str:
            rules = {"max_new_tokens": max_tokens, "do_sample": False, "stopping_criteria": [is_ended]}
            with torch.inference_mode():
                written = self.network.generate(**ids, **rules, streamer=streamer)
            return "length" if written.shape[1] - ids["input_ids"].shape[1] == max_tokens else "stop"

        running = asyncio.get_running_loop().run_in_executor(self.threads, generate)
        # If `generate` fails, the streamer would never end by itself.
        running.add_done_callback(lambda _: streamer.end())
        try:
            async for text in streamer:
                if text:
                    yield {"object": "text_completion", "choices": [{"index": 0, "text": text}]}
            last = {"index": 0, "text": "", "finish_reason": await running}
            yield {"object": "text_completion", "choices": [last]}
        finally:
            ended.set()  # If the task was cancelled, the thread ends at its next token.

    def finish(self, task: Task, outputs: list[Any]) -> Any:
        choices = [part["choices"][0] for part in outputs]
        whole = {**choices[-1], "text": "".join(choice["text"] for choice in choices)}
        return {"object": "text_completion", "choices": [whole]}
