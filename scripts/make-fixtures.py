#!/usr/bin/env python3
"""Makes tests/fixtures: what sentence-transformers answers, for sconce to be held against.

Run with: python scripts/make-fixtures.py   (needs sentence-transformers; made with 6.2.0)

- minilm/expected.json: texts and vectors of the real all-MiniLM-L6-v2 (models/ must hold it).
- tiny-*/: a small model with seeded random weights for each architecture and pooling, saved as
  sentence-transformers saves it (or as it used to), with its expected.json beside it.

Each text goes through alone, so that nothing of padding is in the expected values.
"""

import json
import pathlib
import shutil

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig, BertForMaskedLM, BertModel, DistilBertConfig, DistilBertForMaskedLM,
    PreTrainedTokenizerFast, RobertaConfig, RobertaModel, XLMRobertaConfig, XLMRobertaForMaskedLM,
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


def write_expected(model, folder, texts):
    vectors = [model.encode([text], batch_size=1)[0].tolist() for text in texts]
    rows = [
        {"text": text, "vector": [float(f"{x:.8g}") for x in vector]}
        for text, vector in zip(texts, vectors)
    ]
    # One row a line: a changed fixture shows which text changed.
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    (folder / "expected.json").write_text("[\n" + lines + "\n]\n")


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


def main():
    torch.set_num_threads(2)
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


main()
