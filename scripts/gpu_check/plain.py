"""BERT in Python alone, in double precision: what results are held against where there is no PyTorch.
For tiny networks only."""

import array
import math
from operator import mul

from . import weights
from .wordpiece import WordPiece


def _dot(one, other):
    return sum(map(mul, one, other))


def _gelu(x):
    return x * 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


class Plain:
    """One model."""

    def __init__(self, folder, shape):
        self.shape = shape
        self.tokenizer = WordPiece(folder, shape.longest)
        self.tensors = {}
        for name, sizes, raw in weights.read(folder / "model.safetensors"):
            numbers = array.array("f", bytes(raw)).tolist()
            width = sizes[-1]
            rows = [numbers[at : at + width] for at in range(0, len(numbers), width)]
            self.tensors[name] = rows if len(sizes) > 1 else numbers

    def embed(self, texts):
        """The normalised vector of each text, and its tokens."""
        ids = [self.tokenizer.ids(text) for text in texts]
        return [self._vector(it) for it in ids], [len(it) for it in ids]

    def _vector(self, ids):
        words, places, kinds = (
            self.tensors[f"embeddings.{it}_embeddings.weight"] for it in ("word", "position", "token_type")
        )
        rows = [[a + b + c for a, b, c in zip(words[id], places[at], kinds[0])] for at, id in enumerate(ids)]
        rows = self._norm("embeddings.LayerNorm", rows)
        for layer in range(self.shape.layers):
            rows = self._layer(f"encoder.layer.{layer}", rows)
        mean = [sum(column) / len(rows) for column in zip(*rows)]
        length = math.sqrt(_dot(mean, mean))
        return [it / length for it in mean]

    def _layer(self, at, rows):
        attended = self._linear(f"{at}.attention.output.dense", self._attention(f"{at}.attention.self", rows))
        rows = self._norm(f"{at}.attention.output.LayerNorm", _sum(attended, rows))
        inner = [[_gelu(it) for it in row] for row in self._linear(f"{at}.intermediate.dense", rows)]
        return self._norm(f"{at}.output.LayerNorm", _sum(self._linear(f"{at}.output.dense", inner), rows))

    def _attention(self, at, rows):
        width = self.shape.hidden // self.shape.heads
        queries, keys, values = (self._linear(f"{at}.{it}", rows) for it in ("query", "key", "value"))
        found = [[] for _ in rows]
        for head in range(self.shape.heads):
            part = slice(head * width, (head + 1) * width)
            columns = list(zip(*(value[part] for value in values)))
            for row, query in zip(found, queries):
                scores = [_dot(query[part], key[part]) / math.sqrt(width) for key in keys]
                most = max(scores)
                shares = [math.exp(score - most) for score in scores]
                whole = sum(shares)
                row += [_dot(shares, column) / whole for column in columns]
        return found

    def _linear(self, name, rows):
        matrix, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return [[_dot(row, of) + shift for of, shift in zip(matrix, bias)] for row in rows]

    def _norm(self, name, rows):
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        found = []
        for row in rows:
            mean = sum(row) / len(row)
            centred = [it - mean for it in row]
            scale = 1.0 / math.sqrt(_dot(centred, centred) / len(row) + 1e-12)
            found.append([it * scale * w + b for it, w, b in zip(centred, weight, bias)])
        return found


def _sum(one, other):
    return [[a + b for a, b in zip(*rows)] for rows in zip(one, other)]
