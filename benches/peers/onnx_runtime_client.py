"""ONNX Runtime in one process: batches of 8 sorted by length, which is where it is fastest.

The network is exported once, into the folder that ONNX_FILE is in; pooling is numpy's.
"""

import os
from pathlib import Path

import numpy
import onnxruntime
from tokenizers import Tokenizer

from .asked import serve

BATCH = 8


def export(folder, file):
    """Writes the network as ONNX, batch and length variable.

    By PyTorch's older exporter: the vectors of the newer one's network are wrong (torch 2.15).
    """
    import torch
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        """The token vectors alone."""

        def __init__(self):
            super().__init__()
            self.network = AutoModel.from_pretrained(folder).eval()

        def forward(self, ids, mask):
            return self.network(input_ids=ids, attention_mask=mask).last_hidden_state

    example = torch.ones(2, 8, dtype=torch.long)
    axes = {name: {0: "texts", 1: "tokens"} for name in ("ids", "mask", "hidden")}
    names = {"input_names": ["ids", "mask"], "output_names": ["hidden"], "dynamic_axes": axes}
    torch.onnx.export(Hidden(), (example, example), file, dynamo=False, opset_version=17, **names)


def embedder(folder, file, threads):
    """The function that embeds texts."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def embed(texts):
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = [None] * len(texts)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            encoded = tokenizer.encode_batch([texts[index] for index in batch])
            ids = numpy.array([text.ids for text in encoded])
            mask = numpy.array([text.attention_mask for text in encoded])
            (hidden,) = session.run(["hidden"], {"ids": ids, "mask": mask})
            sums = (hidden * mask[:, :, None]).sum(1)
            sums /= numpy.linalg.norm(sums, axis=1, keepdims=True)
            for index, vector in zip(batch, sums, strict=True):
                vectors[index] = vector
        return vectors

    return embed


if __name__ == "__main__":
    target = Path(os.environ["ONNX_FILE"])
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        export(os.environ["MODEL"], str(target.with_suffix(".part")))
        target.with_suffix(".part").rename(target)
    serve(embedder(os.environ["MODEL"], str(target), int(os.environ["THREADS"])))
