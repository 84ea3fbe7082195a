#!/usr/bin/env python3
"""Writes the weights of silero-vad from its ONNX file to safetensors. Reads the file's initialisers only, and executes
nothing of it. Needs no package.

src/model/sound/voice/silero_vad.safetensors was made from `silero_vad_16k_op15.onnx` in the Python package
silero-vad==6.2.3 (MIT):

    python3 -m pip download --no-deps silero-vad==6.2.3
    python3 -m zipfile -e silero_vad-6.2.3-py3-none-any.whl package
    scripts/convert-silero-vad.py package/silero_vad/data/silero_vad_16k_op15.onnx src/model/sound/voice/silero_vad.safetensors
"""

import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

SHA256 = "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49"
FLOAT = 1

NAMES = {
    "model.stft.forward_basis_buffer": "stft.weight",
    "model.decoder.rnn.weight_ih": "lstm.weight_ih",
    "model.decoder.rnn.weight_hh": "lstm.weight_hh",
    "model.decoder.rnn.bias_ih": "lstm.bias_ih",
    "model.decoder.rnn.bias_hh": "lstm.bias_hh",
    "model.decoder.decoder.2.weight": "output.weight",
    "model.decoder.decoder.2.bias": "output.bias",
} | {
    f"model.encoder.{layer}.reparam_conv.{kind}": f"encoder.{layer}.{kind}"
    for layer in range(4)
    for kind in ("weight", "bias")
}


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffers message: their numbers and values."""
    at = 0

    def whole_number() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    sizes = {1: 8, 5: 4}
    while at < len(message):
        key = whole_number()
        if key & 7 == 0:
            yield key >> 3, whole_number()
            continue
        size = whole_number() if key & 7 == 2 else sizes[key & 7]
        yield key >> 3, message[at : at + size]
        at += size


def tensor(message: bytes) -> tuple[str, list[int], bytes]:
    """The name, shape and numbers of a TensorProto."""
    name, shape, numbers, kind = "", [], b"", 0
    for field, value in fields(message):
        match field, value:
            case 1, int():
                shape.append(value)
            case 2, int():
                kind = value
            case 8, bytes():
                name = value.decode()
            case 9, bytes():
                numbers = value
    if kind != FLOAT:
        sys.exit(f"{name} is not of 32-bit floats")
    return name, shape, numbers


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    model = source.read_bytes()
    if hashlib.sha256(model).hexdigest() != SHA256:
        sys.exit(f"{source} is not the known file: its sha256 differs")
    graph = next(value for field, value in fields(model) if field == 7)
    tensors = [tensor(value) for field, value in fields(graph) if field == 5]
    header, data = {}, b""
    for name, shape, numbers in sorted(tensors, key=lambda it: NAMES[it[0]]):
        offsets = [len(data), len(data) + len(numbers)]
        header[NAMES[name]] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += numbers
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target.write_bytes(struct.pack("<Q", len(text)) + text + data)


main()
