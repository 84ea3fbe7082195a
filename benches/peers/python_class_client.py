"""The class of examples/python/models/embedder.py in one process, without a queue. Batches have up to MAX_TOKENS tokens, as those
of sconce, and take the texts in their order."""

import os

import torch
from embedder import Embedder

import sconce_model

from .asked import serve, texts

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = sconce_model.load(Embedder, options={"model": os.environ["MODEL"]})
    max_tokens = int(os.environ["MAX_TOKENS"])

    def embed(some_texts):
        """The vectors of texts."""
        vectors, batch, tokens = [], [], 0
        for text in some_texts:
            (one,) = model.preprocess(sconce_model.Task.of({"input": text}, "/v1/embeddings"))
            if batch and tokens + one.tokens > max_tokens:
                vectors += model.forward(batch)
                batch, tokens = [], 0
            batch.append(one)
            tokens += one.tokens
        return vectors + model.forward(batch)

    serve(embed, texts())
