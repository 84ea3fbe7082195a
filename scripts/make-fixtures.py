#!/usr/bin/env python3
"""Makes tests/fixtures: what sentence-transformers answers, for sconce to be held against.

Run with: python scripts/make-fixtures.py   (needs sentence-transformers; made with 6.2.0,
transformers 5.23.0). With names after it, of those in LATER (mpnet, nomic, modernbert, prompts, qwen3,
qwen2-both-ways, gemma3-both-ways), it makes these alone.

- minilm/expected.json: texts and vectors of the real all-MiniLM-L6-v2 (models/ must hold it).
- tiny-*/: a small model with seeded random weights for each architecture and pooling, saved as
  sentence-transformers saves it (or as it used to), with its expected.json beside it. Where the model
  has prompts, expected.json is without one, and prompted.json has a row for each name of a prompt.

Each text goes through alone, so that nothing of padding is in the expected values.
"""

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig, BertForMaskedLM, BertModel, DistilBertConfig, DistilBertForMaskedLM, Gemma3TextConfig,
    Gemma3TextModel, ModernBertConfig,
    ModernBertModel, MPNetConfig, MPNetModel, NomicBertConfig, NomicBertModel, PreTrainedTokenizerFast,
    Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3Model, RobertaConfig, RobertaModel, XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
LONG = "The tide comes in twice a day, and each time it carries something else up the beach. "

TEXTS = [
    "Hello, world!",
    "A man is playing a guitar on a small stage.",
    "a",
    "",
    " ",
    " \t\n  ",
    "   leading and trailing space   ",
    "The quick brown fox jumps over the lazy dog.",
    "RabbitMQ delivers each message at least once; a consumer that dies leaves it to the next one.",
    "UPPER CASE and lower case, naïve café Ångström — “quotes” … and dashes–",
    "😀 emoji 👩‍👩‍👧‍👦 family 🇩🇪 flag 👍🏽",
    "日本語の文章をベクトルにする。",
    "今天天气很好，我们去公园散步吧。",
    "한국어 문장입니다.",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "שלום עולם",
    "Смешанный text with 中文 and العربية in one line 123 4,567.89",
    "control\u0000 chars\u0007 and\u200b zero\u00adwidth\ufeff marks\u0085",
    "[CLS] a text that names [SEP] and [MASK] itself [PAD]",
    "<s> likewise </s> <mask> <pad>",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "x" * 150,
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
    "https://example.org/a/b?c=d&e=%20f#g",
    "{\"json\": [1, 2.5, null, true]}",
    "e\u0301 combining versus \u00e9 composed",
    LONG,
    LONG * 3,
    LONG * 7,
    LONG * 12,
    LONG * 40,
    "word " * 253 + "end",
    "word " * 254 + "end",
    "word " * 600,
]


def short(values):
    return [float(f"{x:.8g}") for x in values]


def write_rows(path, rows):
    # One row a line: a changed fixture shows which text changed.
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text("[\n" + lines + "\n]\n")


def write_expected(model, folder, texts):
    vectors = [model.encode([text], batch_size=1)[0].tolist() for text in texts]
    rows = [{"text": text, "vector": short(vector)} for text, vector in zip(texts, vectors)]
    write_rows(folder / "expected.json", rows)


def write_prompted(folder):
    model = SentenceTransformer(str(folder), device="cpu")
    names = json.loads((folder / "config_sentence_transformers.json").read_text())["prompts"]
    write_rows(folder / "prompted.json", [
        {"prompt_name": name, "text": text,
         "vector": short(model.encode([text], prompt_name=name, batch_size=1)[0].tolist())}
        for name in names for text in (TEXTS[1], TEXTS[3], TEXTS[28])])


def corpus():
    return TEXTS[:28] + ["the a of and to in is that for it on was with as by at from message queue"] * 4


def wordpiece(vocab):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        corpus(), trainers.WordPieceTrainer(vocab_size=vocab, special_tokens=special, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=64)


def byte_bpe(vocab):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>",
        unk_token="<unk>", pad_token="<pad>", mask_token="<mask>", model_max_length=62)


def unigram(vocab):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(corpus(), trainers.UnigramTrainer(
        vocab_size=vocab, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], unk_token="<unk>",
        show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    # No model_max_length: the cap is the model's positions, less the two that RoBERTa skips.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>",
        unk_token="<unk>", pad_token="<pad>", mask_token="<mask>")


def mpnet_pieces(vocab):
    """BERT's words and RoBERTa's frame of special tokens, as MPNet has them."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    special = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]"]
    tokenizer.train_from_iterator(
        corpus(), trainers.WordPieceTrainer(vocab_size=vocab - 1, special_tokens=special, show_progress=False))
    mask = AddedToken("<mask>", lstrip=True)
    tokenizer.add_special_tokens([mask])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>",
        unk_token="[UNK]", pad_token="<pad>", mask_token=mask, model_max_length=64,
        model_input_names=["input_ids", "attention_mask"])


def modern_bpe(vocab):
    """A byte-level BPE with BERT's special tokens after it, as ModernBERT has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=vocab - 5, special_tokens=[], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    mask = AddedToken("[MASK]", lstrip=True)
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]", mask])
    frame = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=frame)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token=mask, model_max_length=64, model_input_names=["input_ids", "attention_mask"])


def modern_config(tokenizer, **more):
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad")}
    return ModernBertConfig(
        **shape(tokenizer) | ids | dict(num_hidden_layers=4, max_position_embeddings=64, local_attention=16),
        bos_token_id=tokenizer.cls_token_id, eos_token_id=tokenizer.sep_token_id, **more)


def shape(tokenizer, **more):
    return dict(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                intermediate_size=64, initializer_range=0.3, **more)


def randomise(model):
    # Biases and norms too, which transformers leaves at 0 and 1: a forgotten one must show.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tiny(name, network, tokenizer, pooling, normalize, *, max_seq_length=None, lower=False, prompts=None):
    folder = FIXTURES / f"tiny-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    raw = FIXTURES / f"raw-{name}"
    randomise(network).save_pretrained(raw)
    tokenizer.save_pretrained(raw)
    transformer = Transformer(str(raw), max_seq_length=max_seq_length, do_lower_case=lower)
    modules = [transformer, Pooling(32, pooling_mode=pooling)] + ([Normalize()] if normalize else [])
    model = SentenceTransformer(modules=modules, device="cpu", **(prompts or {}))
    model.save(str(folder), create_model_card=False)
    # The weights as they were published: with the prefix of the head model where there is one.
    shutil.copy(raw / "model.safetensors", folder / "model.safetensors")
    shutil.rmtree(raw)
    return folder


def finish(folder):
    model = SentenceTransformer(str(folder), device="cpu")
    limit = model.max_seq_length
    if "xlm" in folder.name:
        model.max_seq_length = limit = 62  # sentence-transformers itself fails past this position
    texts = [TEXTS[i] for i in (0, 1, 3, 4, 6, 8, 9, 10, 11, 14, 17, 19, 27, 29)]
    write_expected(model, folder, texts)
    print(folder.name, "max_seq_length", limit, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))


def legacy_layout(folder, modes):
    """Rewrites the module files as sentence-transformers 2 wrote them."""
    kinds = ["Transformer", "Pooling", "Normalize"]
    count = len(json.loads((folder / "modules.json").read_text()))
    paths = ["", "1_Pooling", "2_Normalize"]
    (folder / "modules.json").write_text(json.dumps([
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kinds[i]}"}
        for i in range(count)], indent=1))
    keys = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens"]
    config = {"word_embedding_dimension": 32}
    config |= {f"pooling_mode_{key}": key.removesuffix("_token").removesuffix("_tokens") in modes
               or key.removesuffix("_tokens") in modes for key in keys}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config, indent=1))


def lowercase_by_setting(folder):
    """Moves the lower-casing out of the tokenizer, to where sentence-transformers 2 asked for it."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 62, "do_lower_case": true}')


def as_published(folder, *, limit, tokens, prompts=None):
    """The settings of sentence-transformers 2, with a limit of its own and another of the tokenizer."""
    legacy_layout(folder, ["mean"])
    (folder / "sentence_bert_config.json").write_text(f'{{"max_seq_length": {limit}, "do_lower_case": false}}')
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": tokens}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({
        "__version__": {"sentence_transformers": "3.3.1", "transformers": "4.48.0", "pytorch": "2.5.1"},
        "prompts": prompts or {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}, indent=2))


def mpnet():
    """As all-mpnet-base-v2. Distances of 8 and more share buckets, up to 47 of the 48 tokens."""
    torch.manual_seed(21)
    tokenizer = mpnet_pieces(300)
    config = MPNetConfig(**shape(tokenizer, max_position_embeddings=66, relative_attention_num_buckets=32))
    folder = tiny("mpnet", MPNetModel(config), tokenizer, "mean", True)
    as_published(folder, limit=48, tokens=64)
    finish(folder)


def nomic():
    """As nomic-embed-text-v1.5, with the settings and tensors by the names of nomic's own code.

    The values are of transformers' own NomicBert. Its save_pretrained writes these (conversion_mapping.py):
    layers.N.* as encoder.layers.N.*, embeddings.LayerNorm as emb_ln, self_attn.{q,k,v}_proj as the rows of
    attn.Wqkv one after another, self_attn.o_proj as attn.out_proj, mlp.up_proj as mlp.fc11, mlp.gate_proj
    (under the SiLU) as mlp.fc12, mlp.down_proj as mlp.fc2, post_attention_layernorm as norm1 and
    post_mlp_layernorm as norm2. Nomic's code rounds the vocabulary up to a multiple of 64 and the inner
    width to one of 256: these are such.
    """
    torch.manual_seed(22)
    tokenizer = wordpiece(300)
    sizes = shape(tokenizer) | dict(vocab_size=320, intermediate_size=256)
    config = NomicBertConfig(**sizes, max_position_embeddings=128, rope_parameters={
        "rope_type": "default", "rope_theta": 1000.0})
    folder = tiny("nomic", NomicBertModel(config), tokenizer, "mean", False)
    as_published(folder, limit=96, tokens=128, prompts={
        name: f"{name if name.startswith('c') else 'search_' + name}: "
        for name in ("query", "document", "classification", "clustering")})
    finish(folder)
    write_prompted(folder)
    names = set(load_file(folder / "model.safetensors"))
    expected = {"embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight",
                "emb_ln.weight", "emb_ln.bias"}
    for layer in range(2):
        expected |= {f"encoder.layers.{layer}.{name}" for name in (
            "attn.Wqkv.weight", "attn.out_proj.weight", "mlp.fc11.weight", "mlp.fc12.weight", "mlp.fc2.weight",
            "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")}
    assert names == expected, names ^ expected
    # Last, because transformers' own NomicBert does not read these.
    code = "nomic-ai/nomic-bert-2048--"
    (folder / "config.json").write_text(json.dumps({
        "activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0,
        "auto_map": {"AutoConfig": f"{code}configuration_hf_nomic_bert.NomicBertConfig",
                     "AutoModel": f"{code}modeling_hf_nomic_bert.NomicBertModel",
                     "AutoModelForMaskedLM": f"{code}modeling_hf_nomic_bert.NomicBertForPreTraining"},
        "bos_token_id": None, "causal": False, "dense_seq_output": True, "embd_pdrop": 0.0,
        "eos_token_id": None, "fused_bias_fc": True, "fused_dropout_add_ln": True, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False,
        "mlp_fc2_bias": False, "model_type": "nomic_bert", "n_embd": 32, "n_head": 4, "n_inner": 256,
        "n_layer": 2, "n_positions": 128, "pad_vocab_size_multiple": 64, "parallel_block": False,
        "parallel_block_tied_norm": False, "prenorm": False, "qkv_proj_bias": False,
        "reorder_and_upcast_attn": False, "resid_pdrop": 0.0, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
        "summary_activation": None, "summary_first_dropout": 0.0, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "torch_dtype": "float32",
        "transformers_version": "4.37.2", "type_vocab_size": 2, "use_cache": True, "use_flash_attn": True,
        "use_rms_norm": False, "use_xentropy": True, "vocab_size": 320}, indent=2))


def modernbert():
    """As modernbert-embed-base, with the settings of transformers 4."""
    torch.manual_seed(23)
    tokenizer = modern_bpe(330)
    folder = tiny("modernbert", ModernBertModel(modern_config(tokenizer)), tokenizer, "mean", True)
    as_published(folder, limit=64, tokens=64)
    config = json.loads((folder / "config.json").read_text())
    for name in ("layer_types", "rope_parameters", "dtype", "tie_word_embeddings"):
        config.pop(name, None)
    config |= {
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        "gradient_checkpointing": False, "layer_norm_eps": 1e-05, "position_embedding_type": "absolute",
        "reference_compile": False, "torch_dtype": "float32", "transformers_version": "4.48.0"}
    (folder / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2))
    finish(folder)


def prompts():
    """tiny-bert-cls's kind, as a model whose task is told by a prompt."""
    torch.manual_seed(24)
    tokenizer = wordpiece(300)
    config = BertConfig(**shape(tokenizer, max_position_embeddings=64, type_vocab_size=2))
    folder = tiny("prompts", BertModel(config, add_pooling_layer=False), tokenizer, "mean", True)
    as_published(folder, limit=32, tokens=64, prompts={"query": "query: ", "passage": "passage: "})
    finish(folder)
    write_prompted(folder)


def qwen_bpe(vocab, *, end=True, more=()):
    """A byte-level BPE as Qwen's, with the token that Qwen3-Embedding adds at the end of a text if `end`. It also
    learns the texts `more`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([*corpus(), *more], trainers.BpeTrainer(
        vocab_size=vocab - 3, special_tokens=[], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    mark = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    byte_level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = processors.Sequence([byte_level, processors.TemplateProcessing(
        single=f"$A {mark[0]}", pair=f"$A {mark[0]} $B:1 {mark[0]}:1", special_tokens=[mark])]) if end else byte_level
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        model_max_length=64, model_input_names=["input_ids", "attention_mask"])


def decoder_shape(tokenizer, **more):
    return shape(tokenizer, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
                 pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
                 bos_token_id=None) | more


def with_padding(network):
    """With a vector for the padding token, which transformers leaves at 0: it may be the last of each text."""
    table = network.get_input_embeddings()
    with torch.no_grad():
        table.weight[table.padding_idx] = torch.randn(table.weight.shape[1]) * 0.3
    return network


def qwen3():
    """As Qwen3-Embedding: a decoder, causal, whose last token's vector is the text's. Its weights have no prefix."""
    torch.manual_seed(31)
    tokenizer = qwen_bpe(330)
    config = Qwen3Config(**decoder_shape(tokenizer, tie_word_embeddings=True))
    folder = tiny("qwen3", with_padding(Qwen3Model(config)), tokenizer, "lasttoken", True, prompts={
        "prompts": {"query": "Instruct: find passages\nQuery:", "document": ""}})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}, indent=2))
    finish(folder)
    write_prompted(folder)


def qwen2_both_ways():
    """As gte-Qwen2: by `is_causal` a token attends to those after it, too. Its weights are those of a causal model."""
    torch.manual_seed(32)
    tokenizer = qwen_bpe(330)
    config = Qwen2Config(**decoder_shape(tokenizer, tie_word_embeddings=False), attn_implementation="eager")
    config.is_causal = False
    folder = tiny("qwen2-both-ways", with_padding(Qwen2ForCausalLM(config)), tokenizer, "lasttoken", True)
    assert json.loads((folder / "config.json").read_text())["is_causal"] is False
    finish(folder)


def gemma3_both_ways():
    """As EmbeddingGemma's Transformer, with windows that are smaller than most texts."""
    torch.manual_seed(33)
    tokenizer = unigram(300)
    tokenizer.model_max_length = 64
    config = Gemma3TextConfig(
        **decoder_shape(tokenizer, num_hidden_layers=3), sliding_window=8, query_pre_attn_scalar=8,
        use_bidirectional_attention=True, layer_types=["sliding_attention", "sliding_attention", "full_attention"])
    folder = tiny("gemma3-both-ways", with_padding(Gemma3TextModel(config)), tokenizer, "mean", True)
    config = json.loads((folder / "config.json").read_text())
    assert config["sliding_window"] == 8 and config["use_bidirectional_attention"] is True
    finish(folder)


LATER = {"mpnet": mpnet, "nomic": nomic, "modernbert": modernbert, "prompts": prompts, "qwen3": qwen3,
         "qwen2-both-ways": qwen2_both_ways, "gemma3-both-ways": gemma3_both_ways}


def first():
    real = SentenceTransformer(str(ROOT / "models" / "all-MiniLM-L6-v2"), device="cpu")
    (FIXTURES / "minilm").mkdir(parents=True, exist_ok=True)
    write_expected(real, FIXTURES / "minilm", TEXTS)

    torch.manual_seed(20)
    wp = wordpiece(300)
    config = BertConfig(**shape(wp, max_position_embeddings=64, type_vocab_size=2))
    cls = tiny("bert-cls", BertForMaskedLM(config), wp, "cls", True, max_seq_length=32)
    legacy_layout(cls, ["cls"])
    (cls / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    settings = json.loads((cls / "tokenizer_config.json").read_text())
    (cls / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 64}))
    config = BertConfig(**shape(wp, max_position_embeddings=64, hidden_act="gelu_new"))
    peak = tiny("bert-max", BertModel(config, add_pooling_layer=False), wp, "max", False,
                prompts={"prompts": {"query": "query: "}, "default_prompt_name": "query"})
    bpe = byte_bpe(330)
    config = RobertaConfig(**shape(bpe, max_position_embeddings=64, type_vocab_size=1, pad_token_id=1))
    many = tiny("roberta", RobertaModel(config), bpe, ("cls", "max", "mean", "mean_sqrt_len_tokens"), True,
                lower=True)
    lowercase_by_setting(many)
    spm = unigram(300)
    config = XLMRobertaConfig(**shape(spm, max_position_embeddings=64, type_vocab_size=1, pad_token_id=1))
    xlm = tiny("xlm-roberta", XLMRobertaForMaskedLM(config), spm, "mean", True)
    config = DistilBertConfig(
        vocab_size=len(wp), dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64,
        activation="relu", initializer_range=0.3)
    distil = tiny("distilbert", DistilBertForMaskedLM(config), wp, "mean_sqrt_len_tokens", False)
    for folder in (cls, peak, many, xlm, distil):
        finish(folder)


def main():
    torch.set_num_threads(2)
    names = sys.argv[1:]
    unknown = set(names) - set(LATER)
    assert not unknown, f"not one of {list(LATER)}: {unknown}"
    if not names:
        first()
    for name, make in LATER.items():
        if not names or name in names:
            make()


if __name__ == "__main__":
    main()
