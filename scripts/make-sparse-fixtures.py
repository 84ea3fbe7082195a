#!/usr/bin/env python3
"""Makes tests/fixtures/sparse-* and tests/fixtures/splade-tiny: what sentence-transformers' SparseEncoder answers, for
sconce to be held against.

Run with: python scripts/make-sparse-fixtures.py   (needs sentence-transformers; made with 6.2.0, transformers 5.24.0).
With names after it (bert, distilbert, roberta, mpnet, modernbert, splade-tiny), it makes these alone.

- sparse-*/: a small model with seeded random weights for each architecture, as SparseEncoder saves it, with its
  expected.json beside it: texts, and the numbers of their vectors that are not 0. bert has a default prompt, distilbert
  keeps at most 20 numbers (max_active_dims), roberta has a decoder of its own, and modernbert has no modules.json.
- splade-tiny/expected.json: the same for the real SPLADE of scripts/fetch-splade (models/splade-tiny).

Each text goes through alone, so that nothing of padding is in the expected values.
"""

import importlib
import json
import shutil
import sys

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import (
    BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM, ModernBertForMaskedLM, MPNetConfig,
    MPNetForMaskedLM, RobertaConfig, RobertaForMaskedLM,
)

sys.dont_write_bytecode = True
shared = importlib.import_module("make-fixtures")
FIXTURES, LONG, ROOT, TEXTS = shared.FIXTURES, shared.LONG, shared.ROOT, shared.TEXTS
FEW = [TEXTS[i] for i in (0, 1, 3, 4, 8, 9, 10, 11, 19, 27, 29)]


def write(folder, model, texts):
    vectors = [model.encode([text], batch_size=1, convert_to_sparse_tensor=False)[0] for text in texts]
    pairs = [[[i, float(f"{x:.7g}")] for i, x in enumerate(vector.tolist()) if x] for vector in vectors]
    rows = [{"text": text, "vector": vector} for text, vector in zip(texts, pairs)]
    shared.write_rows(folder / "expected.json", rows)
    total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(folder.name, "bytes", total, "numbers", [len(vector) for vector in pairs], "of", len(vectors[0]))
    assert total < 300_000


def save(name, network, tokenizer, strategy, activation, limit=None, **settings):
    folder, raw = FIXTURES / f"sparse-{name}", FIXTURES / f"raw-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    shared.randomise(network)
    with torch.no_grad():
        # About a fifth of the numbers stays above 0.
        bias = network.get_output_embeddings().bias
        bias.sub_(1.3 * network(torch.randint(5, len(tokenizer), (20, 12))).logits.std())
    network.save_pretrained(raw)
    tokenizer.save_pretrained(raw)
    transformer = Transformer(str(raw), transformer_task="fill-mask", max_seq_length=limit)
    pooling = SpladePooling(strategy, activation_function=activation)
    model = SparseEncoder(modules=[transformer, pooling], device="cpu", **settings)
    model.save(str(folder), create_model_card=False)
    shutil.copy(raw / "model.safetensors", folder / "model.safetensors")
    shutil.rmtree(raw)
    write(folder, SparseEncoder(str(folder), device="cpu"), FEW)
    return folder


def bert():
    tokenizer = shared.wordpiece(300)
    config = BertConfig(**shared.shape(tokenizer, max_position_embeddings=64, type_vocab_size=2))
    save("bert", BertForMaskedLM(config), tokenizer, "max", "relu",
         prompts={"query": "query: ", "document": ""}, default_prompt_name="query")


def distilbert():
    tokenizer = shared.wordpiece(300)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64,
        initializer_range=0.3)
    save("distilbert", DistilBertForMaskedLM(config), tokenizer, "sum", "log1p_relu", limit=40, max_active_dims=20)


def roberta():
    tokenizer = shared.byte_bpe(330)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    config = RobertaConfig(**shared.shape(
        tokenizer, max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, tie_word_embeddings=False))
    save("roberta", RobertaForMaskedLM(config), tokenizer, "max", "log1p_relu")


def mpnet():
    tokenizer = shared.mpnet_pieces(300)
    config = MPNetConfig(**shared.shape(tokenizer, max_position_embeddings=66, relative_attention_num_buckets=32))
    save("mpnet", MPNetForMaskedLM(config), tokenizer, "sum", "relu")


def modernbert():
    tokenizer = shared.modern_bpe(330)
    config = shared.modern_config(tokenizer, global_attn_every_n_layers=3)
    folder = save("modernbert", ModernBertForMaskedLM(config), tokenizer, "max", "relu")
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "1_SpladePooling")


def splade_tiny():
    transformer = Transformer(str(ROOT / "models" / "splade-tiny"), transformer_task="fill-mask")
    model = SparseEncoder(modules=[transformer, SpladePooling("max")], device="cpu")
    folder = FIXTURES / "splade-tiny"
    folder.mkdir(exist_ok=True)
    write(folder, model, [TEXTS[i] for i in (1, 3, 7, 8, 9, 11, 18, 22, 26, 27, 30)])


MADE = {"bert": bert, "distilbert": distilbert, "roberta": roberta, "mpnet": mpnet, "modernbert": modernbert,
        "splade-tiny": splade_tiny}


def main():
    torch.set_num_threads(2)
    for name in sys.argv[1:] or list(MADE):
        torch.manual_seed(60 + list(MADE).index(name))
        MADE[name]()


if __name__ == "__main__":
    main()
