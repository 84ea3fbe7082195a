"""sentence-transformers in one process: batches of 32, which it sorts by length itself."""

import os

import torch
from sentence_transformers import SentenceTransformer

from .asked import serve

if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["THREADS"]))
    model = SentenceTransformer(os.environ["MODEL"], device="cpu")
    assert next(model.parameters()).dtype == torch.float32
    serve(lambda texts: model.encode(texts, batch_size=32, show_progress_bar=False))
