"""ONNX Runtime in one process: batches of 8 sorted by length, which is where it is fastest.

The network is exported once, into the folder that ONNX_FILE is in; pooling is numpy's. If DTYPE is int8, the exported
network is quantised: weights in 8 bits for each channel, activations in 8 bits for each tensor, measured in each run
("dynamic").
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


def quantised(file):
    """The path of the network in int8, which is made once."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target = Path(file).with_suffix(".int8.onnx")
    if not target.exists():
        # The weights of 7 bits that `reduce_range` gives are for CPUs without VNNI, where sums in 16 bits could overflow.
        flags = Path("/proc/cpuinfo").read_text().split()
        reduce_range = not {"avx512_vnni", "avx_vnni"} & set(flags)
        part = str(target.with_suffix(".part"))
        quantize_dynamic(file, part, per_channel=True, weight_type=QuantType.QInt8, reduce_range=reduce_range)
        Path(part).rename(target)
    return str(target)


def session(file, threads):
    """The function that computes token vectors from ids and mask."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    loaded = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda ids, mask: loaded.run(["hidden"], {"ids": ids, "mask": mask})[0]


def embedder(folder, compute):
    """The function that embeds texts. `compute` is as `session` returns it."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def embed(texts):
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = [None] * len(texts)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            encoded = tokenizer.encode_batch([texts[index] for index in batch])
            ids = numpy.array([text.ids for text in encoded])
            mask = numpy.array([text.attention_mask for text in encoded])
            hidden = compute(ids, mask)
            sums = (hidden * mask[:, :, None]).sum(1)
            sums /= numpy.linalg.norm(sums, axis=1, keepdims=True)
            for index, vector in zip(batch, sums, strict=True):
                vectors[index] = vector
        return vectors

    return embed


def exported():
    """The path of the exported network."""
    target = Path(os.environ["ONNX_FILE"])
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        export(os.environ["MODEL"], str(target.with_suffix(".part")))
        target.with_suffix(".part").rename(target)
    return str(target)


if __name__ == "__main__":
    network = exported()
    if os.environ.get("DTYPE") == "int8":
        network = quantised(network)
    serve(embedder(os.environ["MODEL"], session(network, int(os.environ["THREADS"]))))
