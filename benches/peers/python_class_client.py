"""The class of examples/python/models/embedder.py in one process, without a queue: batches as sconce makes them, of up to
MAX_TOKENS tokens, in the order of the texts."""

import os

import torch
from embedder import Embedder

import sconce_model

from .asked import serve, texts

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = sconce_model.load(Embedder, options={"model": os.environ["MODEL"]})
    most = int(os.environ["MAX_TOKENS"])

    def embed(some):
        """The vectors of texts."""
        found, batch, tokens = [], [], 0
        for text in some:
            (one,) = model.preprocess(sconce_model.Task.of({"input": text}, "/v1/embeddings"))
            if batch and tokens + one.tokens > most:
                found += model.forward(batch)
                batch, tokens = [], 0
            batch.append(one)
            tokens += one.tokens
        return found + model.forward(batch)

    serve(embed, texts())
