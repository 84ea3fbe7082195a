"""Sentence embeddings by sentence-transformers, behind sconce's queue; `make demo-python` runs it on real texts.

    sconce launch --set 'pool[0].model=python:./embedder.py:Embedder'

Needs `pip install sentence-transformers`, beside `sconce-client`. Texts get no prompt, also if the model has prompts.
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
        self.tokenizer, self.most = self.network.tokenizer, self.network.max_seq_length
        self.rows = 8 if device == "cpu" else 128

    def preprocess(self, task: Task) -> list[Input]:
        # Here, beside `forward`, and nowhere else: a tokenizer must not be called by two threads at once.
        texts = [it.value for it in super().preprocess(task)]
        every = self.tokenizer(texts, truncation=True, max_length=self.most)["input_ids"]
        return [Input(ids, tokens=len(ids)) for ids in every]

    def forward(self, batch: list[Input]) -> Any:
        # Texts of like lengths together, a few at a time: on a CPU what is padded costs as much as what is not. For texts of
        # 35 tokens on average this is three times as fast as the batch as it comes.
        order = sorted(range(len(batch)), key=lambda at: batch[at].tokens)
        vectors: list[Any] = [None] * len(batch)
        for start in range(0, len(order), self.rows):
            some = order[start : start + self.rows]
            padded = self.tokenizer.pad({"input_ids": [batch[at].value for at in some]}, return_tensors="pt")
            with torch.inference_mode():
                found = self.network(dict(padded.to(self.network.device)))["sentence_embedding"]
            for at, vector in zip(some, found.float().cpu().numpy()):
                vectors[at] = vector
        return vectors

    def probe(self) -> Any:
        return {"input": "a candle in a sconce"}
