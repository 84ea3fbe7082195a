#!/usr/bin/env python3
"""Turns voices of hibari (speech synthesis, Apache-2.0) into a model folder for sconce, with weights in f32.

Run with: python3 scripts/convert-hibari.py ASSETS FOLDER VOICE=FILE.onnx ...   (standard library only)

ASSETS is the folder `hibari/assets` of the Python package hibari-tts. Each FILE.onnx is the network of one voice, such
as heart=ASSETS/hibari.onnx. Nothing of them is executed: from the ONNX file come its named arrays, and which of them
are multiplied with which bias. The matrices are 8 bits with one scale each; they are multiplied by it. Tensors keep the
names that they had in PyTorch; a matrix gets the name of its bias.

FOLDER gets config.json, and VOICE.safetensors for each voice.
"""

import array
import json
import pathlib
import struct
import sys
from typing import NamedTuple

FLOAT, INT8 = 1, 3
TYPE_NAMES = {FLOAT: "f", INT8: "b"}
# Not among the network's arrays: how they are used.
SAMPLE_RATE, HOP, HEADS = 24_000, 300, 2


class Tensor(NamedTuple):
    """An array of an ONNX file: its shape, and its numbers row by row."""
    shape: tuple
    numbers: array.array


class Node(NamedTuple):
    """One operation of an ONNX file."""
    kind: str
    inputs: list
    outputs: list
    dilations: list


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def fields(data):
    """The fields of a protobuf message: numbers with their values, which are whole numbers or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(data, at)
        elif wire == 2:
            size, at = varint(data, at)
            if size > len(data) - at:
                raise SystemExit("the ONNX file is cut off")
            value, at = data[at:at + size], at + size
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value, at = data[at:at + size], at + size
        else:
            raise SystemExit(f"the ONNX file has a field of the unknown wire type {wire}")
        yield number, value


def integers(value):
    """A repeated field of whole numbers: one of them, or several that are packed."""
    if isinstance(value, int):
        return [value]
    at, found = 0, []
    while at < len(value):
        number, at = varint(value, at)
        found.append(number)
    return found


def tensor(data):
    """The name of a TensorProto, and the tensor; None for a type that no weight has."""
    name, kind, shape, raw = "", 0, [], b""
    listed = []
    for number, value in fields(data):
        if number == 1:
            shape += integers(value)
        elif number == 2:
            kind = value
        elif number == 4:
            raw += bytes(value)
        elif number == 5:
            listed += integers(value)
        elif number == 8:
            name = bytes(value).decode()
        elif number == 9:
            raw = bytes(value)
    if kind not in TYPE_NAMES:
        return name, None
    numbers = array.array(TYPE_NAMES[kind], listed)
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    count = 1
    for side in shape:
        count *= side
    if count != len(numbers):
        raise SystemExit(f"{name} has {len(numbers)} numbers, and its shape {shape} needs {count}")
    return name, Tensor(tuple(shape), numbers)


def node(data):
    kind, inputs, outputs, dilations = "", [], [], []
    for number, value in fields(data):
        if number == 1:
            inputs.append(bytes(value).decode())
        elif number == 2:
            outputs.append(bytes(value).decode())
        elif number == 4:
            kind = bytes(value).decode()
        elif number == 5:
            attribute = list(fields(value))
            if (1, b"dilations") in [(number, bytes(value)) for number, value in attribute if number == 1]:
                dilations = [i for number, value in attribute if number == 8 for i in integers(value)]
    return Node(kind, inputs, outputs, dilations)


class Onnx:
    """The arrays and operations of an ONNX file."""

    def __init__(self, path):
        self.path, self.tensors, self.nodes = path, {}, []
        for number, graph in fields(memoryview(pathlib.Path(path).read_bytes())):
            if number != 7:
                continue
            for number, value in fields(graph):
                if number == 5:
                    name, found = tensor(value)
                    self.tensors[name] = found
                elif number == 1:
                    self.nodes.append(node(value))
        self.users = {}
        for each in self.nodes:
            for name in each.inputs:
                self.users.setdefault(name, []).append(each)

    def refuse(self, reason):
        raise SystemExit(f"{self.path} is no network of hibari as this script knows it: {reason}")

    def next(self, name, kind):
        """The only user of this result that is an operation of this kind."""
        found = [each for each in self.users.get(name, []) if each.kind == kind]
        if len(found) != 1:
            self.refuse(f"{name} has {len(found)} users of the kind {kind}, not one")
        return found[0]

    def bias_of(self, product):
        """The name of the bias that is added to a product of 8-bit numbers."""
        cast = self.next(product.outputs[0], "Cast")
        scaled = self.next(cast.outputs[0], "Mul")
        added = self.next(scaled.outputs[0], "Add")
        biases = [name for name in added.inputs if name.endswith("bias") and name in self.tensors]
        if len(biases) != 1:
            self.refuse(f"the product {product.outputs[0]} has no bias")
        return biases[0]

    def weights(self):
        """All tensors of the network by their names in PyTorch, in f32."""
        weights = {}
        for name, found in self.tensors.items():
            if name.startswith(("m.", "pn.")) and found is not None:
                weights[name] = found
        for product in self.nodes:
            if product.kind != "MatMulInteger":
                continue
            quantized = self.tensors[product.inputs[1]]
            stem = product.inputs[1].removesuffix("_quantized")
            [scale] = self.tensors[stem + "_scale"].numbers
            if any(self.tensors[stem + "_zero_point"].numbers):
                self.refuse(f"{stem} has a zero point other than 0")
            name = self.bias_of(product).removesuffix("bias") + "weight"
            depth, width = quantized.shape
            # From `[depth, width]` to `[width, depth]`, as linear layers are published.
            numbers = array.array("f")
            for column in range(width):
                numbers.extend(scale * x for x in quantized.numbers[column::width])
            weights[name] = Tensor((width, depth), numbers)
        return weights

    def uses(self, name):
        return len(self.users.get(name, []))

    def dilation(self, name):
        [found] = self.users[name]
        return found.dilations[0]


def count(weights, pattern):
    """How many of the numbered names there are, from 0 on."""
    number = 0
    while pattern.format(number) in weights:
        number += 1
    return number


def config(onnx, weights):
    """The sizes of the network."""
    def text(prefix):
        symbols, width = weights[f"{prefix}.emb.weight"].shape
        return {
            "width": width,
            "inner": weights[f"{prefix}.attn.linear1.bias"].shape[0],
            "convolutions": count(weights, prefix + ".convs.{}.dw.weight"),
            "layers": onnx.uses(f"{prefix}.attn.norm1.weight"),
            "heads": HEADS,
        }

    blocks = count(weights, "pn.pro.{}.dw.weight")
    return {
        "model_type": "hibari",
        "sample_rate": SAMPLE_RATE,
        "hop": HOP,
        "symbols": weights["m.text.emb.weight"].shape[0],
        "text": text("m.text"),
        "prosody": {
            **text("pn.text"),
            "dilations": [onnx.dilation(f"pn.pro.{block}.dw.weight") for block in range(blocks)],
        },
        "decoder": {
            "width": weights["m.dec_in.bias"].shape[0],
            "inner": weights["m.dec.0.pw1.bias"].shape[0],
            "blocks": count(weights, "m.dec.{}.dw.weight"),
        },
    }


def write(path, weights):
    """Writes a safetensors file."""
    header, at = {}, 0
    for name in sorted(weights):
        size = 4 * len(weights[name].numbers)
        header[name] = {"dtype": "F32", "shape": list(weights[name].shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(weights):
            numbers = weights[name].numbers
            if sys.byteorder == "big":
                numbers = numbers[:]
                numbers.byteswap()
            file.write(numbers.tobytes())


def main():
    if len(sys.argv) < 4 or not all("=" in voice for voice in sys.argv[3:]):
        raise SystemExit(__doc__.split("\n\n")[1])
    assets, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    known = json.loads((assets / "voices.json").read_text())
    sizes, voices = None, []
    for argument in sys.argv[3:]:
        voice, path = argument.split("=", 1)
        if voice not in known:
            raise SystemExit(f"the voice {voice!r} is unknown; the package knows {', '.join(known)}")
        onnx = Onnx(path)
        weights = onnx.weights()
        found = config(onnx, weights)
        if sizes not in (None, found):
            raise SystemExit(f"{path} has other sizes than the voices before it")
        sizes = found
        write(folder / f"{voice}.safetensors", weights)
        voices.append({"id": voice, "name": voice.capitalize(), "language": known[voice]["language"]})
    vocabulary = json.loads((assets / "vocab.json").read_text())
    text = json.dumps({**sizes, "voices": voices, "vocabulary": vocabulary}, indent=1, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
