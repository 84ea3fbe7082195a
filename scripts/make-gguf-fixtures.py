#!/usr/bin/env python3
"""Makes tests/fixtures/gguf/*.gguf: the weights of tests/fixtures/generate-*, as llama.cpp's converter stores them.

Run with: python scripts/make-gguf-fixtures.py [NAMES]   (needs gguf, safetensors and llama-cpp-python; made with gguf 0.19.0
and llama-cpp-python 0.3.36). Each file is read by llama.cpp here, whose logits after the prompts of expected.json must be
those of transformers. So a test that reads the file has expected.json too.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
# The architecture in GGUF, and whether the two numbers of a rotated pair are adjacent there.
ARCHITECTURES = {
    "mistral": ("llama", True), "ministral3": ("mistral3", True), "gemma": ("gemma", False),
    "gemma2": ("gemma2", False), "gemma3_text": ("gemma3", False), "phi3": ("phi3", False),
    "qwen3": ("qwen3", False), "qwen3_moe": ("qwen3moe", False), "smollm3": ("smollm3", True),
    "granite": ("granite", True), "olmo2": ("olmo2", False),
}


def adjacent(rows, heads):
    """The rows of a matrix or a bias, so that the two numbers of each pair of a head are adjacent."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def metadata(writer, config, tokenizer):
    name = config["model_type"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1)))
    if rope.get("rope_type") in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope.get("rope_type") == "longrope":
        original, longest = rope["original_max_position_embeddings"], config["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(longest / original) / np.log(original)))
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))
    if config.get("sliding_window") and name in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config["sliding_window"])
    if "sliding_window_pattern" in config:
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    if "rope_local_base_freq" in config:
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    by_id = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    tokens = [by_id.get(id) or added[id]["content"] for id in range(len(by_id) + len(added))]
    kinds = [gguf.TokenType.CONTROL if id in added else gguf.TokenType.NORMAL for id in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if name.startswith("qwen") else "llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])


def convert(name):
    folder = FIXTURES / f"generate-{name}"
    config = json.loads((folder / "config.json").read_text())
    architecture, is_adjacent = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), config["num_hidden_layers"])
    path = FIXTURES / "gguf" / f"{name}.gguf"
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    metadata(writer, config, json.loads((folder / "tokenizer.json").read_text()))
    weights, experts = load_file(folder / "model.safetensors"), {}
    for key, tensor in weights.items():
        if ".experts." in key:
            layer, part = key.split(".")[2], key.split(".")[-2]
            experts.setdefault((layer, part), []).append((int(key.split(".")[5]), tensor))
            continue
        if is_adjacent and ".q_proj." in key:
            tensor = adjacent(tensor, config["num_attention_heads"])
        if is_adjacent and ".k_proj." in key:
            tensor = adjacent(tensor, config["num_key_value_heads"])
        if architecture.startswith("gemma") and key.endswith("norm.weight"):
            tensor = tensor + 1
        # llama.cpp knows Gemma 2 only with tied embeddings.
        gguf_name = names.get_name(key, try_suffixes=(".weight", ".bias")) or {"lm_head.weight": "output.weight"}[key]
        writer.add_tensor(gguf_name, np.ascontiguousarray(tensor))
    for (layer, part), parts in experts.items():
        stacked = np.stack([tensor for _, tensor in sorted(parts, key=lambda it: it[0])])
        kind = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}[part]
        writer.add_tensor(f"blk.{layer}.ffn_{kind}_exps.weight", stacked)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def compare(name, path):
    """llama.cpp reads no window of Mistral, so that its longer prompts differ. Phi-3's short ones differ because a context of
    256 tokens takes the angles for long contexts."""
    from llama_cpp import Llama

    model = Llama(str(path), n_ctx=256, n_batch=256, logits_all=True, verbose=False, type_k=0, type_v=0)
    for prompt in json.loads((FIXTURES / f"generate-{name}" / "expected.json").read_text())["prompts"]:
        model.reset()
        model.eval(prompt["ids"])
        ours = np.array(model.scores[len(prompt["ids"]) - 1])
        off = np.abs(ours - np.array(prompt["last_logits"])).max()
        print(f"{name}, {len(prompt['ids'])} tokens: off by {off:.5f}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = convert(name)
        if name != "gemma2":
            compare(name, path)
