"""A model's folder, as sentence-transformers publishes one: weights made from a seed, without a library.
And the weights read back."""

import hashlib
import json
import struct
from statistics import NormalDist

from . import vocabulary

STD = 0.02
"""As BERT's weights begin."""
LOUD = 0.06
"""Of words, so that texts differ in what they say more than they agree in being texts."""
SHARP = 0.05
"""Of queries and keys, so that attention looks at some tokens more than at others."""
NOISE = 0.02
"""Of biases, and of a norm's weights around 1: one that is forgotten must show."""
LEVELS = 256


def tensors(shape):
    """Name, sizes, mean and standard deviation of each tensor."""
    hidden, inner = shape.hidden, shape.inner

    def linear(name, to, of, std=STD):
        return [(f"{name}.weight", (to, of), 0.0, std), (f"{name}.bias", (to,), 0.0, NOISE)]

    def norm(name):
        return [(f"{name}.weight", (hidden,), 1.0, NOISE), (f"{name}.bias", (hidden,), 0.0, NOISE)]

    rows = [("word", shape.vocabulary, LOUD), ("position", shape.positions, STD), ("token_type", 2, STD)]
    found = [(f"embeddings.{it}_embeddings.weight", (count, hidden), 0.0, std) for it, count, std in rows]
    found += norm("embeddings.LayerNorm")
    for layer in range(shape.layers):
        at = f"encoder.layer.{layer}"
        found += linear(f"{at}.attention.self.query", hidden, hidden, SHARP)
        found += linear(f"{at}.attention.self.key", hidden, hidden, SHARP)
        found += linear(f"{at}.attention.self.value", hidden, hidden)
        found += linear(f"{at}.attention.output.dense", hidden, hidden)
        found += norm(f"{at}.attention.output.LayerNorm")
        found += linear(f"{at}.intermediate.dense", inner, hidden)
        found += linear(f"{at}.output.dense", hidden, inner)
        found += norm(f"{at}.output.LayerNorm")
    return found + linear("pooler.dense", hidden, hidden)


def _numbers(seed, name, count, mean, std):
    """`count` numbers as f32, little-endian, spread normally over so many levels: bytes that follow from
    seed and name, each the index of a number. 100 million take a second."""
    draw = NormalDist(mean, std).inv_cdf
    levels = [struct.pack("<f", draw((level + 0.5) / LEVELS)) for level in range(LEVELS)]
    indices = hashlib.shake_256(f"{seed}/{name}".encode()).digest(count)
    numbers = bytearray(4 * count)
    for byte in range(4):
        numbers[byte::4] = indices.translate(bytes(level[byte] for level in levels))
    return numbers


def _size(sizes):
    count = 1
    for size in sizes:
        count *= size
    return count


def _write_weights(path, shape, seed):
    """safetensors: the length of a JSON header, the header, the numbers."""
    header, end = {}, 0
    wanted = tensors(shape)
    for name, sizes, _, _ in wanted:
        begin, end = end, end + 4 * _size(sizes)
        header[name] = {"dtype": "F32", "shape": list(sizes), "data_offsets": [begin, end]}
    written = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    written += b" " * (-len(written) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        for name, sizes, mean, std in wanted:
            file.write(_numbers(seed, name, _size(sizes), mean, std))


def read(path):
    """Name, sizes and bytes of each tensor."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, at in header.items():
            begin, end = at["data_offsets"]
            file.seek(8 + length + begin)
            yield name, at["shape"], bytearray(file.read(end - begin))


def write(folder, shape, seed):
    """Writes the whole model; returns its pieces of words."""
    folder.mkdir(parents=True)
    _write_weights(folder / "model.safetensors", shape, seed)
    pieces = vocabulary.pieces(shape.vocabulary, seed)
    vocabulary.write(folder, pieces, shape.longest)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    files = {
        "config.json": {
            "model_type": "bert",
            "architectures": ["BertModel"],
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "intermediate_size": shape.inner,
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": shape.positions,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "pad_token_id": 0,
        },
        "modules.json": [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (path, kind) in enumerate(kinds)
        ],
        "sentence_bert_config.json": {"max_seq_length": shape.longest, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": shape.hidden, "pooling_mode_mean_tokens": True},
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / "2_Normalize").mkdir()
    return pieces
