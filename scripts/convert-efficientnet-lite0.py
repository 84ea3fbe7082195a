#!/usr/bin/env python3
"""Turns EfficientNet-Lite0's PyTorch file into a folder as the Hugging Face hub would hold it.

Run with: python3 scripts/convert-efficientnet-lite0.py WEIGHTS.pth FOLDER   (standard library only)

The file is a pickle in torch's format from before 1.6. Nothing of it is executed: the four names that
it refers to become plain records, and any other name is refused. The tensors keep their names and their
bits (f32); the counters of the batch norms are left out. The same input gives the same bytes.
"""

import json
import pathlib
import pickle
import struct
import sys
from typing import NamedTuple

MAGIC = 0x1950A86A20F9469CFC6C
LABELS = pathlib.Path(__file__).resolve().parent / "imagenet-labels.txt"

# The first row of each list is the first group of blocks.
CONFIG = {
    "architectures": ["EfficientNetLiteForImageClassification"],
    "model_type": "efficientnet_lite",
    "image_size": 224,
    "num_channels": 3,
    "stem_channels": 32,
    "kernel_sizes": [3, 3, 5, 3, 5, 5, 3],
    "strides": [1, 2, 2, 2, 1, 2, 1],
    "in_channels": [32, 16, 24, 40, 80, 112, 192],
    "out_channels": [16, 24, 40, 80, 112, 192, 320],
    "num_block_repeats": [1, 2, 2, 3, 3, 4, 1],
    "expand_ratios": [1, 6, 6, 6, 6, 6, 6],
    "hidden_dim": 1280,
    "hidden_act": "relu6",
    "batch_norm_eps": 0.001,
    "padding": "same",
    "torch_dtype": "float32",
}

# As in training (efficientnet_lite_builder.py, preprocessing.py of tensorflow/tpu): pixels less 127,
# over 128; the middle 224/256 of the shorter side, by bicubic resize to 224.
PREPROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [127 / 255] * 3,
    "image_std": [128 / 255] * 3,
}


class Storage(NamedTuple):
    """A run of numbers that tensors are views of."""
    kind: str
    key: str
    length: int


class Tensor(NamedTuple):
    """A view of a storage; lengths and strides in numbers."""
    storage: Storage
    offset: int
    shape: tuple
    stride: tuple
    requires_grad: bool
    hooks: object


class Entries(dict):
    """Stands for an OrderedDict."""


class FloatStorage:
    kind, size = "F32", 4


class LongStorage:
    kind, size = "I64", 8


NAMES = {
    ("collections", "OrderedDict"): Entries,
    ("torch._utils", "_rebuild_tensor_v2"): Tensor,
    ("torch", "FloatStorage"): FloatStorage,
    ("torch", "LongStorage"): LongStorage,
}
SIZES = {kind.kind: kind.size for kind in (FloatStorage, LongStorage)}


class Reader(pickle.Unpickler):
    """Unpickles numbers, texts, collections and the records above."""

    def find_class(self, module, name):
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"the file refers to {module}.{name}, which no weights need")
        return NAMES[module, name]

    def persistent_load(self, reference):
        word, kind, key, _location, length, view = reference
        if word != "storage" or view is not None:
            raise pickle.UnpicklingError(f"the file refers to {reference!r}, which is no whole storage")
        return Storage(kind.kind, key, length)


def read_weights(path):
    """The file's tensors and, by key, the bytes of each storage."""
    with open(path, "rb") as file:
        magic, version, system = (Reader(file).load() for _ in range(3))
        if magic != MAGIC or version != 1001 or not system["little_endian"]:
            raise SystemExit(f"{path} is not a little-endian file of torch's old format")
        tensors = Reader(file).load()
        kinds = {tensor.storage.key: tensor.storage.kind for tensor in tensors.values()}
        storages = {}
        for key in Reader(file).load():
            (length,) = struct.unpack("<q", file.read(8))
            storages[key] = file.read(length * SIZES[kinds[key]])
        if file.read(1):
            raise SystemExit(f"{path} goes on after its last storage")
    return tensors, storages


def tensor_bytes(name, tensor, storages):
    """The tensor's f32 numbers row by row; torch may have stored them in another order."""
    data = memoryview(storages[tensor.storage.key])
    places = [tensor.offset]
    for length, step in zip(tensor.shape, tensor.stride):
        places = [place + i * step for place in places for i in range(length)]
    first, count = tensor.offset, len(places)
    if not (0 <= min(places) and max(places) < tensor.storage.length == len(data) // 4):
        raise SystemExit(f"{name} reaches past its storage")
    if places == list(range(first, first + count)):
        return data[first * 4:(first + count) * 4]
    return b"".join(data[place * 4:place * 4 + 4] for place in places)


def write_safetensors(path, tensors, storages):
    header, parts, end = {"__metadata__": {"format": "pt"}}, [], 0
    for name, tensor in sorted(tensors.items()):
        if name.endswith(".num_batches_tracked"):
            continue
        if tensor.storage.kind != "F32":
            raise SystemExit(f"{name} is {tensor.storage.kind}, not F32")
        data = tensor_bytes(name, tensor, storages)
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return len(parts)


def labels():
    lines = LABELS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    if len(sys.argv) != 3:
        raise SystemExit("usage: convert-efficientnet-lite0.py WEIGHTS.pth FOLDER")
    folder = pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    names = labels()
    classes = {"num_labels": len(names), "id2label": {str(i): name for i, name in enumerate(names)}}
    write_json(folder / "config.json", CONFIG | classes)
    write_json(folder / "preprocessor_config.json", PREPROCESSOR)
    # Last, as a folder with weights counts as whole.
    write_safetensors(folder / "model.safetensors", *read_weights(sys.argv[1]))


if __name__ == "__main__":
    main()
