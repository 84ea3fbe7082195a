"""sentence-transformers' CrossEncoder in one process: batches of 32, which it sorts by length itself."""

import os

import torch
from sentence_transformers import CrossEncoder

from .asked import bodies, serve

if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["THREADS"]))
    model = CrossEncoder(os.environ["MODEL"], device="cpu")

    def scores(requests):
        """All pairs of all requests together."""
        pairs = [(it["query"], document) for it in requests for document in it["documents"]]
        found = iter(model.predict(pairs, batch_size=32, show_progress_bar=False))
        return [[next(found) for _ in it["documents"]] for it in requests]

    serve(scores, bodies())
