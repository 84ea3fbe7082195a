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

    def preprocess(self, task: Task) -> list[Input]:
        # Here, beside `forward`, and nowhere else: a tokenizer must not be called by two threads at once.
        texts = [it.value for it in super().preprocess(task)]
        every = self.tokenizer(texts, truncation=True, max_length=self.most)["input_ids"]
        return [Input(ids, tokens=len(ids)) for ids in every]

    def forward(self, batch: list[Input]) -> Any:
        padded = self.tokenizer.pad({"input_ids": [it.value for it in batch]}, return_tensors="pt")
        with torch.inference_mode():
            return self.network(dict(padded.to(self.network.device)))["sentence_embedding"]

    def probe(self) -> Any:
        return {"input": "a candle in a sconce"}
