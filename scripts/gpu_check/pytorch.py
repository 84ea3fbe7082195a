"""The same networks in PyTorch: by itself, in transformers, and in sentence-transformers. Each embeds texts
as its users do: sorted by length, in padded batches."""

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from . import weights
from .wordpiece import WordPiece

# Told here, because processes are started beside it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

try:
    import torch
    from torch.nn import functional
except ImportError:
    torch = None


def dtype(name):
    """PyTorch's name of it."""
    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[name]


def versions():
    """Of what is here of it."""
    found = {}
    for name in ("torch", "transformers", "sentence-transformers", "tokenizers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class Tokens:
    """Texts as token ids: by the library `tokenizers`, on all cores; without it by Python, which is not
    timed."""

    def __init__(self, folder, shape):
        self.made = {}
        try:
            from tokenizers import Tokenizer

            self.library = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.library.enable_truncation(shape.longest)
        except ImportError:
            self.library, self.slow = None, WordPiece(folder, shape.longest)

    @property
    def timed(self):
        """Whether this is part of what is timed."""
        return self.library is not None

    def prepare(self, texts):
        """Does beforehand what is not timed."""
        if not self.timed:
            self.made.update((text, self.slow.ids(text)) for text in texts if text not in self.made)

    def ids(self, texts):
        """Of each text."""
        if self.timed:
            return [it.ids for it in self.library.encode_batch(texts)]
        self.prepare(texts)
        return [self.made[text] for text in texts]


class Padded:
    """What PyTorch and transformers share: batches sorted by length, padded to their longest, a mean over
    the tokens, in f32, scaled to length 1. `network` takes ids and mask, and gives token vectors."""

    def __init__(self, name, network, tokens, device):
        self.name, self.network, self.tokens, self.device = name, network, tokens, device

    def prepare(self, texts):
        """Does beforehand what is not timed."""
        self.tokens.prepare(texts)

    def embed(self, texts, batch):
        """A matrix of the texts' vectors, on the host. Ids go to the device once, and are padded there."""
        ids = self.tokens.ids(texts)
        order = sorted(range(len(ids)), key=lambda at: -len(ids[at]))
        sizes = [len(ids[at]) for at in order]
        with torch.inference_mode():
            flat = torch.tensor([id for at in order for id in ids[at]]).to(self.device)
            lengths = torch.tensor(sizes).to(self.device)
            starts = lengths.cumsum(0) - lengths
            found = []
            for first in range(0, len(order), batch):
                part = slice(first, first + batch)
                places = torch.arange(sizes[first], device=self.device)[None, :]
                mask = places < lengths[part, None]
                padded = flat[(starts[part, None] + places).clamp(max=len(flat) - 1)] * mask
                rows = self.network(padded, mask).float() * mask[:, :, None]
                found.append(functional.normalize(rows.sum(1) / lengths[part, None], dim=1))
            found = torch.cat(found)
            back = torch.empty_like(found)
            back[torch.tensor(order, device=self.device)] = found
            return back.cpu()


class Bert:
    """BERT by PyTorch's own functions."""

    def __init__(self, folder, shape, device, kind):
        self.shape, self.tensors = shape, {}
        for name, sizes, raw in weights.read(folder / "model.safetensors"):
            tensor = torch.frombuffer(raw, dtype=torch.float32).reshape(sizes)
            self.tensors[name] = tensor.to(device=device, dtype=kind)
        for layer in range(shape.layers):
            at = f"encoder.layer.{layer}.attention.self"
            for end in ("weight", "bias"):
                parts = [self.tensors.pop(f"{at}.{it}.{end}") for it in ("query", "key", "value")]
                self.tensors[f"{at}.{end}"] = torch.cat(parts)

    def __call__(self, ids, mask):
        of = self.tensors
        positions = of["embeddings.position_embeddings.weight"][: ids.shape[1]]
        kinds = of["embeddings.token_type_embeddings.weight"][0]
        rows = functional.embedding(ids, of["embeddings.word_embeddings.weight"]) + positions + kinds
        rows = self._norm("embeddings.LayerNorm", rows)
        for layer in range(self.shape.layers):
            at = f"encoder.layer.{layer}"
            attended = self._linear(f"{at}.attention.output.dense", self._attention(at, rows, mask))
            rows = self._norm(f"{at}.attention.output.LayerNorm", attended + rows)
            inner = functional.gelu(self._linear(f"{at}.intermediate.dense", rows))
            rows = self._norm(f"{at}.output.LayerNorm", self._linear(f"{at}.output.dense", inner) + rows)
        return rows

    def _attention(self, at, rows, mask):
        texts, longest, hidden = rows.shape
        heads = self._linear(f"{at}.attention.self", rows).view(texts, longest, 3, self.shape.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        return found.transpose(1, 2).reshape(texts, longest, hidden)

    def _linear(self, name, rows):
        return functional.linear(rows, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def _norm(self, name, rows):
        sizes = (self.shape.hidden,)
        return functional.layer_norm(
            rows, sizes, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], 1e-12
        )


def by_itself(folder, shape, device, kind):
    """PyTorch alone."""
    return Padded("PyTorch", Bert(folder, shape, device, kind), Tokens(folder, shape), device)


def in_transformers(folder, shape, device, kind):
    """transformers' own network; none where it is not installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import BertModel
        from transformers.utils import logging
    except ImportError:
        return None
    logging.disable_progress_bar()
    model = BertModel.from_pretrained(folder, attn_implementation="sdpa").to(device=device, dtype=kind).eval()

    def network(ids, mask):
        return model(input_ids=ids, attention_mask=mask.long()).last_hidden_state

    return Padded("transformers", network, Tokens(folder, shape), device)


class SentenceTransformers:
    """sentence-transformers as its users call it."""

    name = "sentence-transformers"

    def __init__(self, folder, device, kind):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(str(folder), device=str(device)).to(dtype=kind).eval()

    def prepare(self, texts):
        """Nothing: all of it is timed."""

    def embed(self, texts, batch):
        """A matrix of the texts' vectors, on the host."""
        return self.model.encode(texts, batch_size=batch, show_progress_bar=False)


def in_sentence_transformers(folder, _, device, kind):
    """sentence-transformers; none where it is not installed."""
    try:
        return SentenceTransformers(folder, device, kind)
    except ImportError:
        return None
