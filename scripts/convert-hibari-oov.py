#!/usr/bin/env python3
"""Turns hibari's networks for unknown words (Apache-2.0) into safetensors with weights in f32.

Run with: python3 scripts/convert-hibari-oov.py ASSETS FOLDER   (standard library only)

ASSETS is the folder `hibari/assets` of the Python package hibari-tts. FOLDER gets oov_us.safetensors and
oov_gb.safetensors, and copies of the tables that the crate sconce-phonemes reads. Nothing of the networks is executed:
as with convert-hibari.py, whose reader of ONNX files this script uses, their named arrays are taken. A matrix gets the
name of the bias that is added to its product, and is turned to `[outputs, inputs]`.
"""

import array
import importlib.util
import pathlib
import shutil
import sys

TABLES = [
    *(f"lexicon_{accent}_{rank}.json.gz" for accent in ("us", "gb") for rank in ("gold", "silver")),
    "tagger.json.gz", "tokenizer_exceptions.json", "normalize.json", "oov.json", "oov_gb.json",
]


def beside(name):
    """A script of this folder, as a module."""
    path = pathlib.Path(__file__).resolve().parent / name
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hibari = beside("convert-hibari.py")


def weights(onnx):
    """All tensors of the network by their names in PyTorch, in f32."""
    found = onnx.weights()
    for product in onnx.nodes:
        matrix = onnx.tensors.get(product.inputs[1]) if product.kind == "MatMul" else None
        if matrix is None:
            continue
        added = onnx.next(product.outputs[0], "Add")
        [bias] = [name for name in added.inputs if name.endswith("bias") and name in onnx.tensors]
        depth, width = matrix.shape
        numbers = array.array("f")
        for column in range(width):
            numbers.extend(matrix.numbers[column::width])
        found[bias.removesuffix("bias") + "weight"] = hibari.Tensor((width, depth), numbers)
    return found


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__.split("\n\n")[1])
    assets, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for accent, file in (("us", "oov.onnx"), ("gb", "oov_gb.onnx")):
        hibari.write(folder / f"oov_{accent}.safetensors", weights(hibari.Onnx(assets / file)))
    for name in TABLES:
        shutil.copyfile(assets / name, folder / name)


if __name__ == "__main__":
    main()
