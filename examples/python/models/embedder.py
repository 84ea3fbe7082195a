"""Sentence embeddings by sentence-transformers, behind sconce's queue; `make demo-python` runs it on real texts.

    sconce launch --set 'pool[0].model=python:./embedder.py:Embedder'

Needs `pip install sentence-transformers`, beside `sconce-client`. If the model has prompts, they are not used.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from sconce_model import Input, Model, Task


class Embedder(Model):
    urls = ("/v1/embeddings",)

    class Options:
        model: str = "sentence-transformers/all-MiniLM-L6-v2"

    def load(self, device: str, dtype: str, options: Options) -> None:
        self.network = SentenceTransformer(options.model, device=device, model_kwargs={"dtype": getattr(torch, dtype)})
        self.tokenizer, self.max_tokens = self.network.tokenizer, self.network.max_seq_length
        self.rows_per_pass = 8 if device == "cpu" else 128

    def preprocess(self, task: Task) -> list[Input]:
        # The tokenizer is called on this thread only, since two threads must not call it at once. `pad` only builds tensors.
        texts = [it.value for it in super().preprocess(task)]
        tokenized = self.tokenizer(texts, truncation=True, max_length=self.max_tokens)["input_ids"]
        return [Input(ids, tokens=len(ids)) for ids in tokenized]

    def forward(self, batch: list[Input]) -> Any:
        # Computes a few texts of similar lengths at a time, since on a CPU padding costs as much as text. For texts of 35 tokens
        # on average this is three times as fast as the whole batch at once.
        by_length = sorted(range(len(batch)), key=lambda index: batch[index].tokens)
        vectors: list[Any] = [None] * len(batch)
        for start in range(0, len(by_length), self.rows_per_pass):
            rows = by_length[start : start + self.rows_per_pass]
            padded = self.tokenizer.pad({"input_ids": [batch[index].value for index in rows]}, return_tensors="pt")
            with torch.inference_mode():
                embeddings = self.network(dict(padded.to(self.network.device)))["sentence_embedding"]
            for index, vector in zip(rows, embeddings.float().cpu().numpy()):
                vectors[index] = vector
        return vectors

    def probe(self) -> Any:
        return {"input": "a candle in a sconce"}
