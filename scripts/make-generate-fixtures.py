#!/usr/bin/env python3
"""Makes tests/fixtures/generate-* and smollm2: what transformers generates, for sconce to be held against.

Run with: python scripts/make-generate-fixtures.py   (needs sentence-transformers, and for smollm2 gguf;
made with transformers 5.23.0 (from mistral on, 5.24.0), tokenizers 0.23.3, torch 2.15.0, gguf 0.19.0). With names
after it (llama, llama3, …, smollm2), it makes these alone.

- generate-*/: a small model with seeded random weights, with its expected.json beside it. llama and qwen3
  are as transformers 5 saves them, llama3 and qwen2 with the settings of transformers 4, as published.
- smollm2/expected.json: the real SmolLM2-135M-Instruct (scripts/fetch-smollm2), whose GGUF is read here by
  hand: its weights as float32 go into transformers' Llama, its vocabulary into a tokenizer.

In expected.json are

- "prompts": texts with their "ids" as the tokenizer gives them (with its <bos>, if it adds one), the logits
  after the last of them ("last_logits", or of smollm2 the 20 "top_logits" with their ids, and the
  "logit_norm" of all), and the 48 ids that follow ("greedy") with their text ("text_out"). Of smollm2 they
  may be fewer: the last is then the <eos>.
- "chats": "messages" as the chat template has them ("rendered", and its "ids"), up to where the answer
  begins; of smollm2 also the answer, of at most 64 ids, likewise.
- "round_trips": texts, their "ids" and what these are as text again ("decoded").
- of smollm2, "metadata" of the file, and "perplexity": a text and the mean "nll" of its ids after the first.

Special tokens are in no decoded text. Everything is float32 on the CPU, each text alone, and the likeliest
token is always clearly likelier than the next (by GAP at least; of smollm2, five times that). Of the tiny
models no text ends by itself.

The weights are of the first seed with which that is so. With the versions above they are the same each time.
"""

import importlib
import itertools
import json
import shutil
import sys

import torch
from tokenizers import (
    AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers,
)
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

sys.dont_write_bytecode = True
shared = importlib.import_module("make-fixtures")
ROOT, FIXTURES, TEXTS = shared.ROOT, shared.FIXTURES, shared.TEXTS

# The functions that make a fixture, by its name.
MADE = {}


def made(function):
    MADE[function.__name__] = function
    return function


GAP = 2e-3
PROMPTS = [
    "Hello, world!",
    "The quick brown fox jumps over",
    TEXTS[9] + "\n\n" + TEXTS[10] + " 12345",
    " ".join([TEXTS[26], TEXTS[8], TEXTS[1], TEXTS[23], TEXTS[24]]),
]
CHATS = [
    [{"role": "user", "content": "What is a message queue?"}],
    [{"role": "system", "content": "You answer in one word. "}, {"role": "user", "content": "  Café or tea? ☕\n"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"},
     {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello, what can I do for you?"},
     {"role": "user", "content": "Count to 3:\n1\n2\n"}],
]
ROUND_TRIPS = [
    "Hello, world!", "", " ", "  two spaces before, two after  ", "\n", "\r\n\ttabs and\n\n\nnew lines \n ",
    *(TEXTS[i] for i in (9, 10, 11, 12, 13, 14, 16, 17, 23, 24, 25)),
    "0 1 12 123 1234 3.14159 2026-01-31 ½ ² ٣", "I'll say it's WE'VE got they'd", "ﬁ Å ﷺ ① 𝔘𝔫𝔦",
    "😀😀 👍🏽!!! ...???", "a<|im_start|>user\nb<|im_end|> c", "a <|eot_id|> b<|begin_of_text|>c",
    "<think> no </think>", "<|im_start", "planes \U000e0041 \U0010fffd \U000f0000 and \u0000\u0001\u001f\u007f",
    # With bytes that SmolLM2 has no token for.
    "a\u0004b \u0016 \U00050000 c",
]


def write(path, expected):
    # One value a line: a changed fixture shows which text changed.
    parts = []
    for key, value in expected.items():
        if isinstance(value, list):
            lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def short(logits):
    return [round(x, 6) for x in logits.tolist()]


@torch.inference_mode()
def generate(model, ids, count, stop=None):
    """The logits after the ids, the greedy ids, and by how much the closest choice was clear."""
    assert len(ids) + count <= model.config.max_position_embeddings
    first, out, gap, cache, step = None, [], float("inf"), None, ids
    while len(out) < count and (not out or out[-1] != stop):
        answer = model(torch.tensor([step]), past_key_values=cache, use_cache=True)
        logits, cache = answer.logits[0, -1], answer.past_key_values
        first = logits if first is None else first
        best = logits.topk(2)
        gap = min(gap, (best.values[0] - best.values[1]).item())
        step = [best.indices[0].item()]
        out += step
    return first, out, gap


def chat(tokenizer, messages):
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    # The template is where its <bos> comes from: the tokenizer adds none to what is rendered.
    assert ids == tokenizer(rendered, add_special_tokens=False).input_ids
    return {"messages": messages, "rendered": rendered, "ids": ids}


def round_trip(tokenizer, file, text):
    ids = tokenizer(text).input_ids
    # Nothing of the answer is of transformers rather than of the tokenizer's file.
    assert ids == file.encode(text).ids
    return {"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=True)}


# Llama 3's, then the one of Llama 3.2 without its tools.
LLAMA_TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
LLAMA3_TEMPLATE = r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message #}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
# Qwen2.5's and Qwen3's, without their tools.
QWEN2_TEMPLATE = r"""{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
QWEN3_TEMPLATE = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def bpe(numbers, special, *, normalizer=None):
    """A byte-level BPE with the special tokens after it. A number is cut as numbers says."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=normalizer is None))
    if normalizer:
        tokenizer.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(WORDS.replace("NUMBER", numbers)), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.train_from_iterator(shared.corpus(), trainers.BpeTrainer(
        vocab_size=400 - len(special), special_tokens=[], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    tokenizer.add_special_tokens(special)
    return tokenizer


def llama_tokenizer(template):
    """As Llama 3's: with a <bos>, and numbers in threes."""
    bos = "<|begin_of_text|>"
    tokenizer = bpe("{1,3}", [bos, "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
                              "<|eot_id|>"])
    frame = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, frame])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token="<|eot_id|>", clean_up_tokenization_spaces=False,
        chat_template=template, model_max_length=256, model_input_names=["input_ids", "attention_mask"])


def qwen_tokenizer(template, *more):
    """As Qwen2's: NFC, each digit alone, and no <bos>."""
    tokenizer = bpe("", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in more])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False, chat_template=template, model_max_length=256,
        model_input_names=["input_ids", "attention_mask"])


def shape(tokenizer, **more):
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return dict(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, intermediate_size=96, max_position_embeddings=256,
                initializer_range=0.25) | ids | more


def answers(model, tokenizer):
    """The prompts, or nothing where a text ends, goes in a small circle or is not clear."""
    rows = []
    for text in ["a" if tokenizer.bos_token is None else "", *PROMPTS]:
        ids = tokenizer(text).input_ids
        last, greedy, gap = generate(model, ids, 48)
        if gap < GAP or len(set(greedy)) < 12 or set(greedy) & set(tokenizer.all_special_ids):
            return None
        rows.append({"text": text, "ids": ids, "last_logits": short(last), "greedy": greedy,
                     "text_out": tokenizer.decode(greedy, skip_special_tokens=True)})
    assert len(rows[0]["ids"]) == 1 and 140 <= len(rows[-1]["ids"]) <= 190, [len(row["ids"]) for row in rows]
    return rows


def tiny(name, kind, config, tokenizer, *, jinja_file=True, rewrite=None):
    for seed in itertools.count(60):
        torch.manual_seed(seed)
        network = shared.randomise(kind(config)).eval()
        if config.vocab_size > len(tokenizer):
            # Rows after the last token, to round the size up, as Qwen2 has them. They are never the likeliest.
            with torch.no_grad():
                network.lm_head.weight[len(tokenizer):] = 0
        drawn = answers(network, tokenizer)
        if drawn:
            break
    folder = FIXTURES / f"generate-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=jinja_file)
    if rewrite:
        for file, change in rewrite.items():
            old = json.loads((folder / file).read_text())
            # A value of None takes the key away.
            new = {key: value for key, value in (old | change).items() if value is not None}
            (folder / file).write_text(json.dumps(dict(sorted(new.items())), indent=2) + "\n")
    # What is expected is of the files, and the same as before they were written.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, file = AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = answers(model, tokenizer)
    for row, before in zip(prompts, drawn, strict=True):
        # Some products of other memory differ in the last place.
        assert row["greedy"] == before["greedy"]
        assert max(abs(a - b) for a, b in zip(row["last_logits"], before["last_logits"], strict=True)) < 1e-5
    write(folder / "expected.json", {
        "prompts": prompts, "chats": [chat(tokenizer, messages) for messages in CHATS],
        "round_trips": [round_trip(tokenizer, file, text) for text in ROUND_TRIPS]})
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert size < 600_000
    print(folder.name, "bytes", size, "seed", seed, "ids", [len(row["ids"]) for row in prompts],
          "distinct", [len(set(row["greedy"])) for row in prompts])


@made
def llama():
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    config = transformers.LlamaConfig(**shape(tokenizer, rms_norm_eps=1e-5, tie_word_embeddings=False))
    tiny("llama", transformers.LlamaForCausalLM, config, tokenizer)


@made
def llama3():
    """The wavelengths of its rope are on each side of the two limits, and between them."""
    tokenizer = llama_tokenizer(LLAMA3_TEMPLATE)
    ends = tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"])
    scaling = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
               "original_max_position_embeddings": 32, "rope_type": "llama3"}
    config = transformers.LlamaConfig(**shape(
        tokenizer, rms_norm_eps=1e-5, tie_word_embeddings=True, eos_token_id=ends,
        rope_parameters=scaling | {"rope_theta": 500.0}))
    tiny("llama3", transformers.LlamaForCausalLM, config, tokenizer, jinja_file=False, rewrite={
        "config.json": {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": 500.0, "dtype": None,
                        "torch_dtype": "float32", "transformers_version": "4.45.0"},
        "generation_config.json": {"do_sample": True, "temperature": 0.6, "top_p": 0.9,
                                   "transformers_version": "4.45.0"}})


@made
def qwen2():
    """With a sliding window that is not in use, and a vocabulary larger than the tokenizer's."""
    tokenizer = qwen_tokenizer(QWEN2_TEMPLATE)
    config = transformers.Qwen2Config(**shape(
        tokenizer, vocab_size=416, tie_word_embeddings=False, bos_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}))
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    tiny("qwen2", transformers.Qwen2ForCausalLM, config, tokenizer, jinja_file=False, rewrite={
        "config.json": {"rope_parameters": None, "rope_theta": 1000000.0, "dtype": None, "torch_dtype": "float32",
                        "layer_types": None, "max_window_layers": 1, "sliding_window": 32,
                        "use_sliding_window": False, "transformers_version": "4.43.1"},
        "generation_config.json": {"eos_token_id": ends, "do_sample": True, "repetition_penalty": 1.1,
                                   "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.43.1"}})


@made
def qwen3():
    """With heads wider than their part of the hidden size, and added tokens that are not special."""
    tokenizer = qwen_tokenizer(QWEN3_TEMPLATE, "<think>", "</think>")
    config = transformers.Qwen3Config(**shape(
        tokenizer, head_dim=24, tie_word_embeddings=True, bos_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}))
    tiny("qwen3", transformers.Qwen3ForCausalLM, config, tokenizer)


def small(tokenizer, **more):
    """As shape, for files of about 150 KB."""
    return shape(tokenizer, **{"hidden_size": 32, "head_dim": 16, "intermediate_size": 64,
                               "initializer_range": 0.35} | more)


@made
def mistral():
    """With a window that most prompts exceed, and biases that only its relatives have."""
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    config = transformers.MistralConfig(**small(tokenizer, sliding_window=24, tie_word_embeddings=False,
                                   rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    tiny("mistral", transformers.MistralForCausalLM, config, tokenizer)


@made
def ministral3():
    """With yarn, and queries that grow with their positions."""
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    rope = {"rope_type": "yarn", "type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1}
    config = transformers.Ministral3Config(**small(tokenizer, tie_word_embeddings=False, rope_parameters=rope))
    tiny("ministral3", transformers.Ministral3ForCausalLM, config, tokenizer)


@made
def yarn():
    """Qwen3 with yarn as its model card describes it: with a factor of cosines and sines."""
    tokenizer = qwen_tokenizer(QWEN3_TEMPLATE, "<think>", "</think>")
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    config = transformers.Qwen3Config(**small(tokenizer, tie_word_embeddings=True, bos_token_id=tokenizer.pad_token_id,
                                 rope_parameters=rope))
    tiny("yarn", transformers.Qwen3ForCausalLM, config, tokenizer)


@made
def gemma():
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    config = transformers.GemmaConfig(**small(tokenizer, hidden_act="gelu", rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0}))
    tiny("gemma", transformers.GemmaForCausalLM, config, tokenizer, rewrite={"config.json": {
        "hidden_act": "gelu", "hidden_activation": None, "tie_word_embeddings": None}})


@made
def gemma2():
    """Caps that change the numbers, and a window in every second layer."""
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    config = transformers.Gemma2Config(**small(
        tokenizer, num_hidden_layers=3, sliding_window=24, query_pre_attn_scalar=16,
        tie_word_embeddings=False, attn_logit_softcapping=3.0, final_logit_softcapping=12.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    tiny("gemma2", transformers.Gemma2ForCausalLM, config, tokenizer)


@made
def gemma3():
    """With the settings of transformers 4: one rope for windows, another one, scaled, for the rest. The network does not
    use the bound of the scores."""
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    scaling = {"factor": 4.0, "rope_type": "linear"}
    config = transformers.Gemma3TextConfig(**small(
        tokenizer, num_hidden_layers=3, sliding_window=24, query_pre_attn_scalar=16, sliding_window_pattern=3,
        attn_logit_softcapping=3.0, tie_word_embeddings=False, rope_parameters={
            "full_attention": scaling | {"rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}))
    tiny("gemma3", transformers.Gemma3ForCausalLM, config, tokenizer, rewrite={"config.json": {
        "rope_parameters": None, "rope_scaling": scaling, "rope_theta": 100000.0, "rope_local_base_freq": 1000.0,
        "layer_types": None, "_sliding_window_pattern": None, "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16, "transformers_version": "4.50.0"}})


@made
def phi3():
    """A part of each head is rotated, by other angles in a pool with a longer context. The short prompts and their
    answers are within the original context, and the last prompt exceeds it."""
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
            "original_max_position_embeddings": 128}
    settings = small(tokenizer, hidden_size=64, tie_word_embeddings=False, rope_parameters=rope, sliding_window=250,
                     original_max_position_embeddings=128)
    del settings["head_dim"]
    config = transformers.Phi3Config(**settings)
    tiny("phi3", transformers.Phi3ForCausalLM, config, tokenizer)


@made
def qwen3_moe():
    tokenizer = qwen_tokenizer(QWEN3_TEMPLATE, "<think>", "</think>")
    config = transformers.Qwen3MoeConfig(**small(
        tokenizer, num_hidden_layers=3, tie_word_embeddings=False, bos_token_id=tokenizer.pad_token_id,
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    tiny("qwen3_moe", transformers.Qwen3MoeForCausalLM, config, tokenizer)


@made
def smollm3():
    """Every fourth layer knows no positions."""
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    config = transformers.SmolLM3Config(**small(
        tokenizer, num_hidden_layers=5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    tiny("smollm3", transformers.SmolLM3ForCausalLM, config, tokenizer)


@made
def granite():
    """All four multipliers, and biases of all matrices."""
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    config = transformers.GraniteConfig(**small(
        tokenizer, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.1, logits_scaling=2.0,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    tiny("granite", transformers.GraniteForCausalLM, config, tokenizer)


@made
def olmo2():
    """The norms follow the sublayers, and those of queries and keys are of all heads together."""
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    settings = small(tokenizer, hidden_size=64, tie_word_embeddings=False, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0})
    del settings["head_dim"]
    tiny("olmo2", transformers.Olmo2ForCausalLM, transformers.Olmo2Config(**settings), tokenizer)


@made
def olmo3():
    """OLMo 2 with windows, as published: the rope is scaled in layers without a window."""
    tokenizer = llama_tokenizer(LLAMA_TEMPLATE)
    scaling = {"attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
               "original_max_position_embeddings": 32, "rope_type": "yarn"}
    settings = small(tokenizer, num_hidden_layers=4, sliding_window=24, tie_word_embeddings=False, rope_parameters={
        "full_attention": scaling | {"rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}})
    del settings["head_dim"]
    tiny("olmo3", transformers.Olmo3ForCausalLM, transformers.Olmo3Config(**settings), tokenizer, rewrite={
        "config.json": {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": 500000.0,
                        "layer_types": None, "transformers_version": "4.57.0"}})


SMOLLM2_PROMPTS = [
    "The capital of France is",
    "My favourite season is autumn, because",
    "def fibonacci(n):\n    \"\"\"Returns the n-th number of Fibonacci.\"\"\"\n",
    "Water boils at 100 degrees Celsius at sea level. At higher altitudes",
    "Photosynthesis",
    "The history of the lighthouse begins with fires on hilltops, which guided ships into harbour at night. "
    "Later the fires were raised on platforms to be seen from farther away. In antiquity, the tower of Pharos at "
    "Alexandria, built in the third century BC, was about 100 metres tall, and a fire at its top was seen, it is "
    "said, 50 kilometres out at sea. The lamps of later centuries burned whale oil, then kerosene, then gas; "
    "in 1823, Augustin-Jean Fresnel",
]
SMOLLM2_CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "You are a helpful assistant who answers briefly."},
     {"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "user", "content": "My name is Anna."},
     {"role": "assistant", "content": "Hello, Anna! How can I help you today?"},
     {"role": "user", "content": "What is my name?"}],
    [{"role": "user", "content": "Write a short poem about the sea."}],
]
# The opening of Pride and Prejudice (Jane Austen, 1813).
NOVEL = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in "
    "want of a wife.\n\n"
    "However little known the feelings or views of such a man may be on his first entering a neighbourhood, "
    "this truth is so well fixed in the minds of the surrounding families, that he is considered as the "
    "rightful property of some one or other of their daughters.\n\n"
    "\"My dear Mr. Bennet,\" said his lady to him one day, \"have you heard that Netherfield Park is let at "
    "last?\"\n\n"
    "Mr. Bennet replied that he had not.\n\n"
    "\"But it is,\" returned she; \"for Mrs. Long has just been here, and she told me all about it.\"\n\n"
    "Mr. Bennet made no answer.\n\n"
    "\"Do not you want to know who has taken it?\" cried his wife impatiently.\n\n"
    "\"You want to tell me, and I have no objection to hearing it.\"\n\n"
    "This was invitation enough.\n\n"
    "\"Why, my dear, you must know, Mrs. Long says that Netherfield is taken by a young man of large fortune "
    "from the north of England; that he came down on Monday in a chaise and four to see the place, and was so"
    " much delighted with it that he agreed with Mr. Morris immediately; that he is to take possession before"
    " Michaelmas, and some of his servants are to be in the house by the end of next week.\"\n\n"
    "\"What is his name?\"\n\n"
    "\"Bingley.\"\n\n"
    "\"Is he married or single?\"\n\n"
    "\"Oh! single, my dear, to be sure! A single man of large fortune; four or five thousand a year. What a "
    "fine thing for our girls!\"\n\n"
    "\"How so? how can it affect them?\"\n\n"
    "\"My dear Mr. Bennet,\" replied his wife, \"how can you be so tiresome! You must know that I am thinking of"
    " his marrying one of them.\"\n")


def read_gguf(path):
    """The metadata of a Llama's GGUF, and its weights by transformers' names."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    assert meta["general.architecture"] == "llama"
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    names = {"token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    weights = {}
    for tensor in reader.tensors:
        *layer, name, _ = tensor.name.split(".")
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if name in heads:
            # The rope of a Llama's GGUF turns neighbours (0, 1), transformers' those half a head apart (0, d/2):
            # the rows of each head lie accordingly.
            rows = values.unflatten(0, (heads[name], -1, 2))
            values = rows.transpose(1, 2).flatten(0, 2)
        prefix = f"layers.{layer[1]}." if layer else ""
        weights[f"model.{prefix}{names[name]}.weight"] = values.contiguous()
    return meta, weights


def gguf_llama(meta, weights):
    config = transformers.LlamaConfig(
        vocab_size=meta["llama.vocab_size"], hidden_size=meta["llama.embedding_length"],
        num_hidden_layers=meta["llama.block_count"], num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        intermediate_size=meta["llama.feed_forward_length"], max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"], tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]})
    model = transformers.LlamaForCausalLM(config)
    left = model.load_state_dict(weights, strict=False)
    # No output.weight in the file: it is the embedding's.
    assert left.missing_keys == ["lm_head.weight"] and not left.unexpected_keys
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.eval()


def gguf_tokenizer(meta):
    """What the file calls pre "smollm": each digit alone, then the words of GPT-2."""
    assert (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"]) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    assert tokenizer.get_vocab_size() == len(tokens)
    names = {name: tokens[meta[f"tokenizer.ggml.{key}_token_id"]] for name, key in (
        ("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=meta["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"], **names)


@made
def smollm2():
    path = ROOT / "models" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    meta, weights = read_gguf(path)
    model, tokenizer = gguf_llama(meta, weights), gguf_tokenizer(meta)
    prompts = []
    for text in SMOLLM2_PROMPTS:
        ids = tokenizer(text).input_ids
        last, greedy, gap = generate(model, ids, 48, tokenizer.eos_token_id)
        text_out = tokenizer.decode(greedy, skip_special_tokens=True)
        print(f"{len(ids)} ids, {len(greedy)} out, gap {gap:.4f}: {text!r} ->\n    {text_out!r}")
        assert gap >= 5 * GAP and not set(greedy[:-1]) & set(tokenizer.all_special_ids)
        top = last.topk(20)
        prompts.append({
            "text": text, "ids": ids, "top_logits": list(zip(top.indices.tolist(), short(top.values))),
            "logit_norm": round(last.double().norm().item(), 4), "greedy": greedy, "text_out": text_out})
    chats = []
    for messages in SMOLLM2_CHATS:
        row = chat(tokenizer, messages)
        _, greedy, gap = generate(model, row["ids"], 64, tokenizer.eos_token_id)
        text_out = tokenizer.decode(greedy, skip_special_tokens=True)
        print(f"{len(row['ids'])} ids, {len(greedy)} out, gap {gap:.4f}: {text_out!r}")
        assert gap >= 5 * GAP and not set(greedy[:-1]) & set(tokenizer.all_special_ids)
        chats.append(row | {"greedy": greedy, "text_out": text_out})
    ids = tokenizer(NOVEL).input_ids
    with torch.inference_mode():
        scores = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    nll = -scores[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean().item()
    print(len(ids), "ids of the novel, nll", nll)
    write(FIXTURES / "smollm2" / "expected.json", {
        "metadata": {
            "bos_token_id": meta["tokenizer.ggml.bos_token_id"], "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
            "unk_token_id": meta["tokenizer.ggml.unknown_token_id"],
            "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
            "add_bos_token": meta["tokenizer.ggml.add_bos_token"], "context_length": meta["llama.context_length"],
            "rope_freq_base": meta["llama.rope.freq_base"],
            "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
            "chat_template": meta["tokenizer.chat_template"]},
        "prompts": prompts, "chats": chats,
        "round_trips": [round_trip(tokenizer, tokenizer.backend_tokenizer, text) for text in ROUND_TRIPS],
        "perplexity": {"text": NOVEL, "ids": ids, "nll": round(nll, 6)}})


def main():
    torch.set_num_threads(2)
    names = sys.argv[1:] or list(MADE)
    for name in names:
        MADE[name]()


if __name__ == "__main__":
    main()
