#!/usr/bin/env python3
"""Makes tests/fixtures: what sentence-transformers answers, for sconce to be held against.

Run with: python scripts/make-fixtures.py   (needs sentence-transformers; made with 6.2.0,
transformers 5.23.0; the later ones with 5.24.0). With names after it, of those in LATER, it makes these alone.

- minilm/expected.json: texts and vectors of the real all-MiniLM-L6-v2 (models/ must hold it).
- tiny-*/: a small model with seeded random weights for each architecture and pooling, saved as
  sentence-transformers saves it (or as it used to), with its expected.json beside it. Where the model
  has prompts, expected.json is without one, and prompted.json has a row for each name of a prompt.
- torch/: the weights of tiny-bert-cls as torch.save writes them, whole and in shards, and small files of
  other contents. Made with torch 2.15.0.

Each text goes through alone, so that nothing of padding is in the expected values.
"""

import io
import json
import os
import pathlib
import shutil
import sys
import tempfile

import sentencepiece
import torch
from safetensors.torch import load_file
from sentencepiece import sentencepiece_model_pb2
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Dropout, LayerNorm, Normalize, Pooling, Transformer
from tokenizers import (
    AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers,
)
from transformers import (
    BertConfig, BertForMaskedLM, BertModel, DebertaV2Config, DebertaV2Model, DistilBertConfig, DistilBertForMaskedLM,
    ElectraConfig, ElectraModel, Gemma3TextConfig, Gemma3TextModel, ModernBertConfig, ModernBertModel, MPNetConfig,
    MPNetModel, NomicBertConfig, NomicBertModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
    Qwen3Model, RobertaConfig, RobertaModel, T5Config, T5EncoderModel, XLMRobertaConfig,
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


def write_variants(folder, changes):
    """What the same weights answer if these properties of config.json are changed."""
    rows = []
    for change in changes:
        with tempfile.TemporaryDirectory() as other:
            shutil.copytree(folder, other, dirs_exist_ok=True)
            path = pathlib.Path(other) / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
            model = SentenceTransformer(other, device="cpu")
            texts = [TEXTS[1], TEXTS[29]]
            vectors = [short(model.encode([text], batch_size=1)[0].tolist()) for text in texts]
            rows.append({"change": change, "texts": texts, "vectors": vectors})
    write_rows(folder / "variants.json", rows)


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


def t5_pieces(vocab):
    """T5's pieces: an end token after each text, and none before it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(corpus(), trainers.UnigramTrainer(
        vocab_size=vocab, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", model_max_length=160,
        model_input_names=["input_ids", "attention_mask"])


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


def deberta_pieces(vocab, **more):
    """A vocabulary of SentencePiece and the steps before it, as version 4 of transformers wrote tokenizer.json for
    DeBERTa v3. (Version 5 makes other steps if tokenizer_class is DebertaV2Tokenizer.) Of SentencePiece's table of
    characters, which has 240 KB, this one has a few."""
    rules = {"\ufb01": "fi", "\u2026": "...", "\u00a0": " ", "\u3000": " ", "\u00c5": "A\u030a", "\u0007": ""}
    code = lambda text: " ".join(f"{ord(character):X}" for character in text)
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
        file.writelines(f"{code(a)}\t{code(b)}\n" for a, b in rules.items())
        file.flush()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus()), model_writer=model, vocab_size=vocab - 1, model_type="unigram",
            normalization_rule_tsv=file.name, hard_vocab_limit=False, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
            pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]", minloglevel=2)
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    tokenizer = Tokenizer(models.Unigram([(piece.piece, piece.score) for piece in proto.pieces], unk_id=3))
    tokenizer.normalizer = normalizers.Sequence([
        normalizers.Strip(), normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap),
        normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"], **more)


def deberta_config(tokenizer, **more):
    """As DeBERTa v3's. Distances of more than 4 share buckets, and from 40 on all share one."""
    return DebertaV2Config(**shape(tokenizer) | dict(
        max_position_embeddings=64, max_relative_positions=40, relative_attention=True, position_buckets=8,
        norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type="p2c|c2p", layer_norm_eps=1e-7,
        position_biased_input=False, type_vocab_size=0, pooler_hidden_size=32, pooler_hidden_act="gelu") | more)


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


def electra():
    """With embeddings that are narrower than the layers, as ELECTRA-small has them."""
    torch.manual_seed(25)
    tokenizer = wordpiece(300)
    config = ElectraConfig(**shape(tokenizer, max_position_embeddings=64, embedding_size=16))
    finish(tiny("electra", ElectraModel(config), tokenizer, "cls", True))


def t5(name, seed, feed_forward):
    """As sentence-t5 without its Dense module. Some texts are longer than the last bucket of distances."""
    torch.manual_seed(seed)
    tokenizer = t5_pieces(300)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, n_positions=160,
        feed_forward_proj=feed_forward, initializer_factor=1.0, pad_token_id=0, eos_token_id=1)
    network = T5EncoderModel(config)
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            if "relative_attention_bias" in key:
                parameter.mul_(4)
    finish(tiny(name, network, tokenizer, "mean", True))


class Command:
    """Pickled as a call of os.system: by its own name, posix.system."""

    def __reduce__(self):
        return os.system, ("true",)


def torch_files():
    folder = FIXTURES / "torch"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "shards").mkdir(parents=True)
    model = BertForMaskedLM.from_pretrained(FIXTURES / "tiny-bert-cls")
    # As transformers 3 wrote it: with position_ids, and with a matrix under two names.
    state = model.state_dict()
    state["bert.embeddings.position_ids"] = torch.arange(64).expand((1, -1))
    assert state["cls.predictions.decoder.weight"].data_ptr() == model.bert.embeddings.word_embeddings.weight.data_ptr()
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in list(state):
        for new, before in old.items():
            if new in name:
                state[name.replace(new, before)] = state.pop(name)
    torch.save(state, folder / "pytorch_model.bin")
    # Without the head, and as parameters in half the files.
    parts = [{}, {}]
    for name, tensor in model.bert.state_dict().items():
        is_layer = name.startswith("encoder")
        parts[is_layer][name] = tensor if is_layer else torch.nn.Parameter(tensor)
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for name, part in zip(names, parts):
        torch.save(part, folder / "shards" / name)
    (folder / "shards" / "pytorch_model.bin.index.json").write_text(json.dumps({
        "metadata": {}, "weight_map": {key: name for name, part in zip(names, parts) for key in part}}, indent=1))

    numbers = torch.tensor([1.5, -2.0, 0.0, 1024.0, -0.25, 3.0])
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}
    types = {name: numbers.to(dtype) for name, dtype in kinds.items()}
    kinds = {"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "u8": torch.uint8}
    types |= {name: torch.arange(6).to(dtype) for name, dtype in kinds.items()}
    types |= {"i8": torch.arange(6).to(torch.int8), "bool": torch.ones(6, dtype=torch.bool)}
    types |= {"matrix": numbers.reshape(2, 3), "part": numbers[2:5], "scalar": torch.tensor(7.0),
              "empty": torch.empty(0, 4)}
    torch.save(types, folder / "types.bin")
    embeddings = "bert.embeddings.word_embeddings.weight"
    torch.save({f"module.{embeddings}": numbers[:2].reshape(2, 1).clone()}, folder / "parallel.bin")
    torch.save({"transformer.encoder.embed_tokens.weight": numbers[2:5].clone()}, folder / "t5.bin")
    torch.save({"a.weight": numbers.reshape(2, 3).t()}, folder / "transposed.bin")
    torch.save({"a": numbers}, folder / "older.bin", _use_new_zipfile_serialization=False)
    torch.save({"a": numbers, "b": Command()}, folder / "command.bin")
    torch.save({"a": numbers.to(torch.float8_e4m3fn)}, folder / "f8.bin")
    for path in sorted(folder.rglob("*.bin")):
        print(path.relative_to(FIXTURES), path.stat().st_size)


def with_head(name, tokenizer, modules, prompts=None):
    """A small BERT with these modules after it, as sentence-transformers saves them."""
    folder = FIXTURES / f"tiny-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    raw = FIXTURES / f"raw-{name}"
    config = BertConfig(
        **shape(tokenizer, max_position_embeddings=64, type_vocab_size=2) | dict(num_hidden_layers=1))
    randomise(BertModel(config, add_pooling_layer=False)).save_pretrained(raw)
    tokenizer.save_pretrained(raw)
    transformer = Transformer(str(raw), max_seq_length=32)
    model = SentenceTransformer(modules=[transformer] + [randomise(it) for it in modules], device="cpu", **(prompts or {}))
    model.save(str(folder), create_model_card=False)
    shutil.rmtree(raw)
    return folder


def legacy_types(folder):
    """Names the modules as sentence-transformers 2 to 4 did."""
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type'].rsplit('.', 1)[1]}"
    (folder / "modules.json").write_text(json.dumps(modules, indent=1))


def heads():
    torch.manual_seed(25)
    # All modes together, and a prompt that is not pooled, which is the default.
    modes = ["weightedmean", "cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens"]
    folder = with_head("unpooled-prompt", wordpiece(300), [Pooling(32, pooling_mode=modes, include_prompt=False)], {
        "prompts": {"query": "query: the tide ", "passage": "passage: "}, "default_prompt_name": "query"})
    finish(folder)
    write_prompted(folder)
    # As decoders have it: the tokenizer adds only a token at the end, which gives the vector. The beginnings of long
    # texts are cut.
    tokenizer = wordpiece(300)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=[("[SEP]", 3)])
    folder = with_head("last-token", tokenizer, [Pooling(32, pooling_mode="lasttoken"), Normalize()])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"truncation_side": "left", "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    finish(folder)
    # As EmbeddingGemma.
    finish(with_head("dense", wordpiece(300), [
        Pooling(32, pooling_mode="mean"), Dense(32, 48, bias=False, activation_function=torch.nn.Identity()),
        Dense(48, 24, bias=False, activation_function=torch.nn.Identity()), Normalize()]))
    # As LaBSE.
    folder = with_head("dense-tanh", wordpiece(300), [Pooling(32, pooling_mode="cls"), Dense(32, 32), Normalize()])
    legacy_types(folder)
    finish(folder)
    # The flags of older files, and the other modules.
    folder = with_head("layer-norm", wordpiece(300), [
        Pooling(32, pooling_mode=["max", "weightedmean"]), Normalize(), LayerNorm(64), Dropout(0.5),
        Dense(64, 20, activation_function=torch.nn.GELU())])
    flags = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False,
             "pooling_mode_max_tokens": True, "pooling_mode_mean_sqrt_len_tokens": False,
             "pooling_mode_weightedmean_tokens": True, "pooling_mode_lasttoken": False, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags, indent=1))
    finish(folder)


def deberta():
    """As deberta-v3-base, of which sentence-transformers cuts texts at max_position_embeddings."""
    torch.manual_seed(25)
    tokenizer = deberta_pieces(300)
    finish(tiny("deberta", DebertaV2Model(deberta_config(tokenizer)), tokenizer, "mean", False))


def deberta_v2():
    """All properties that DeBERTa v3 has not: a distance has a vector of its own up to 20, positions have projections of
    their own, embeddings are narrower than the network, and positions and types are added to them."""
    torch.manual_seed(26)
    tokenizer = deberta_pieces(300)
    config = deberta_config(
        tokenizer, max_relative_positions=20, position_buckets=-1, norm_rel_ebd="none", share_att_key=False,
        pos_att_type=["c2p", "p2c"], position_biased_input=True, type_vocab_size=2, embedding_size=24,
        hidden_act="gelu_new")
    folder = tiny("deberta-v2", DebertaV2Model(config), tokenizer, "cls", True)
    finish(folder)
    write_variants(folder, [
        {"pos_att_type": "c2p"}, {"pos_att_type": ["p2c"]}, {"pos_att_type": None}, {"relative_attention": False},
        {"type_vocab_size": 0}, {"position_biased_input": False}, {"hidden_act": "relu", "layer_norm_eps": 1e-3}])


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


LATER = {
    "mpnet": mpnet,
    "nomic": nomic,
    "modernbert": modernbert,
    "prompts": prompts,
    "heads": heads,
    "torch": torch_files,
    "electra": electra,
    "t5": lambda: t5("t5", 26, "relu"),
    "t5-gated": lambda: t5("t5-gated", 27, "gated-gelu"),
    "deberta": deberta,
    "deberta-v2": deberta_v2,
    "qwen3": qwen3,
    "qwen2-both-ways": qwen2_both_ways,
    "gemma3-both-ways": gemma3_both_ways,
}


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
