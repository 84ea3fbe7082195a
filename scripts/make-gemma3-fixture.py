#!/usr/bin/env python3
"""Makes tests/fixtures/gemma-3-270m/expected.json: what llama.cpp and transformers compute with the weights of Gemma 3 270M
(scripts/fetch-gemma3).

Run with: python scripts/make-gemma3-fixture.py   (needs llama-cpp-python, transformers, torch and gguf; made with 0.3.36,
5.24.0, 2.15.0 and 0.19.0)

- "prompts": texts with their "ids", and the ids that follow greedily in llama.cpp ("greedy"), with their "text_out".
  llama.cpp rounds the activations to 8 bits, so that some of these are not the likeliest. "behind" says how far their
  logits are at most behind the largest ones by transformers in f32, with the same weights.
- "perplexity": a text, its "ids", and the mean negative log-likelihood of its ids after the first, by transformers
  ("nll") and by llama.cpp ("rounded_nll").
"""

import importlib
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from llama_cpp import Llama
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "gemma-3-270m" / "gemma-3-270m-q4_k_m.gguf"
PROMPTS = [
    "The capital of France is",
    "My favourite season is autumn, because",
    "def fibonacci(n):\n    \"\"\"Returns the n-th number of Fibonacci.\"\"\"\n",
    "Die Hauptstadt von Österreich ist",
    "日本の首都は",
    "  two spaces, an emoji 😀 and a\ttab",
]
ANSWER = 32


def novel():
    """The text that the fixture of SmolLM2 has too."""
    source = (ROOT / "scripts" / "make-generate-fixtures.py").read_text()
    begin = source.index("NOVEL = (") + len("NOVEL = ")
    return eval(source[begin : source.index("\n\n\n", begin)])


def exact():
    """The file's weights in f32, in transformers' network."""
    reader = gguf.GGUFReader(MODEL)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    value = lambda name: reader.fields[f"gemma3.{name}"].contents()
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=value("embedding_length"), intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"), num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"), head_dim=value("attention.key_length"),
        sliding_window=value("attention.sliding_window"), query_pre_attn_scalar=value("attention.key_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    network, weights = Gemma3ForCausalLM(config).eval(), {}
    for key, shape in ((key, tensor.shape) for key, tensor in network.state_dict().items()):
        name = names.get_name(key, try_suffixes=(".weight",))
        if key.startswith("lm_head") or name is None:
            continue
        numbers = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        weights[key] = torch.from_numpy(np.array(numbers, dtype=np.float32)).reshape(shape)
        if key.endswith("norm.weight"):
            weights[key] -= 1
    assert network.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    network.tie_weights()
    return network


@torch.inference_mode()
def main():
    model = Llama(str(MODEL), n_ctx=1024, n_batch=1024, logits_all=True, verbose=False, type_k=0, type_v=0)
    network, rows = exact(), []
    for text in PROMPTS:
        ids = model.tokenize(text.encode(), add_bos=True, special=False)
        model.reset()
        out, step = [], ids
        while len(out) < ANSWER:
            model.eval(step)
            step = [int(np.array(model.scores[model.n_tokens - 1]).argmax())]
            out += step
        all = ids + out
        logits = network(torch.tensor([all])).logits[0]
        behind = [(logits[at - 1].max() - logits[at - 1][all[at]]).item() for at in range(len(ids), len(all))]
        rows.append({"text": text, "ids": ids, "greedy": out, "behind": round(max(behind), 4),
                     "text_out": model.detokenize(out, prev_tokens=ids).decode(errors="replace")})
    text = novel()
    ids = model.tokenize(text.encode(), add_bos=True, special=False)
    model.reset()
    model.eval(ids)
    scores = np.array(model.scores[: len(ids)], dtype=np.float64)
    scores -= scores.max(-1, keepdims=True)
    logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    rounded = -logprobs[np.arange(len(ids) - 1), ids[1:]].mean()
    scores = network(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    nll = -scores[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean()
    perplexity = {"text": text, "ids": ids, "nll": round(nll.item(), 6), "rounded_nll": round(float(rounded), 6)}
    importlib.import_module("make-generate-fixtures").write(
        ROOT / "tests" / "fixtures" / "gemma-3-270m" / "expected.json", {"prompts": rows, "perplexity": perplexity})
    print("nll", nll.item(), rounded, [row["behind"] for row in rows])


if __name__ == "__main__":
    main()
