#!/usr/bin/env python3
"""Makes tests/fixtures/score-*: what cross-encoders and classifiers answer, for sconce to be held against.

Run with: python scripts/make-score-fixtures.py   (needs sentence-transformers; made with 6.2.0,
transformers 5.23.0, tokenizers 0.23.3, torch 2.15.0; the later ones with transformers 5.24.0). With names
after it, of those in MADE, it makes these alone.

Each is a small model with seeded random weights, as a checkpoint of its kind is saved, with its
expected.json beside it:

- one label (bert, xlm-roberta, modernbert, electra, deberta-rerank, qwen3), as CrossEncoder.save_pretrained writes it:
  "pairs", their "logits", and "scores", which are CrossEncoder.predict's with the activation of the model (the sigmoid).
- logits and logits-published: causal models whose logits are the score. logits has LogitScore and a chat template
  with an instruction; "instructed" are the logits with the one of "instruction". logits-published has neither, as
  Qwen3-Reranker was published; its expected values are by the formula of that model's card.
- more (roberta, distilbert, deberta, gemma2), as transformers saves it: "texts", their "logits", and "probs" by the
  config's problem_type (softmax for single_label_classification, sigmoid for multi_label_classification);
  and "pairs" with "pair_logits".
- models of natural language inference (nli-bert, nli-roberta), as transformers saves them: "cases" of
  the pipeline for zero-shot classification, each with its arguments, "labels" and "scores".

The weights are of a seed, but tokenizers learns a vocabulary a little differently each time: made anew,
the fixtures are others, as good as these.

Each goes through alone, so that nothing of padding is in the expected values. Everything is cut at 64
tokens, pairs as transformers' truncation=True does it (longest_first).
"""

import importlib
import json
import shutil
import sys

import torch
from sentence_transformers import CrossEncoder
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification,
    DebertaV2ForSequenceClassification, DistilBertConfig, DistilBertForSequenceClassification, ElectraConfig,
    ElectraForSequenceClassification, Gemma2Config, Gemma2ForSequenceClassification, ModernBertForSequenceClassification,
    Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification, RobertaConfig, RobertaForSequenceClassification,
    XLMRobertaConfig, XLMRobertaForSequenceClassification, pipeline,
)

sys.dont_write_bytecode = True
shared = importlib.import_module("make-fixtures")
FIXTURES, LONG, TEXTS = shared.FIXTURES, shared.LONG, shared.TEXTS


def ones(count):
    """So many words of one token each, to be near the limit on either side of it."""
    return " ".join(["a"] * count)


PAIRS = [
    (TEXTS[0], TEXTS[1]),
    (TEXTS[7], TEXTS[8]),
    (TEXTS[8], TEXTS[7]),
    (TEXTS[2], TEXTS[2]),
    (TEXTS[1], ""),
    ("", TEXTS[1]),
    ("", ""),
    (" ", TEXTS[5]),
    (TEXTS[6], TEXTS[9]),
    (TEXTS[10], TEXTS[25]),
    (TEXTS[11], TEXTS[12]),
    (TEXTS[13], TEXTS[14]),
    (TEXTS[16], TEXTS[17]),
    (TEXTS[18], TEXTS[19]),
    (TEXTS[19], TEXTS[18]),
    (TEXTS[21], TEXTS[23]),
    # Around the limit, which is at 61 tokens of two texts where a pair has 3 special ones, or else at 60.
    (ones(30), ones(30)),
    (ones(31), ones(30)),
    (ones(31), ones(31)),
    (ones(40), ones(25)),
    (ones(25), ones(40)),
    # Both long, of one length and of others; then one alone.
    (LONG * 5, LONG * 5),
    (LONG * 7, LONG * 12),
    (LONG * 12, TEXTS[0]),
    (TEXTS[8], LONG * 12),
    (LONG * 12, ""),
    ("", LONG * 12),
]
FEW = [PAIRS[i] for i in (0, 4, 5, 12, 13, 18, 19, 20, 22, 23, 24)]
ALONE = [TEXTS[i] for i in (*range(20), 20, 21, 23, 25, 27, 29)] + [ones(61), ones(62), ones(63)]


def write(folder, expected):
    # One value a line: a changed fixture shows which text changed.
    parts = []
    for key, values in expected.items():
        lines = ",\n".join(json.dumps(value, separators=(",", ":")) for value in values)
        parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
    path = folder / "expected.json"
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    sizes = [f.stat().st_size for f in folder.rglob("*") if f.is_file()]
    assert sum(sizes) < 500_000 and path.stat().st_size < 60_000
    flat = torch.tensor(expected["logits"])
    print(folder.name, "bytes", sum(sizes), "logits", tuple(flat.shape), "of spread", flat.std(0).tolist())


def save(name, network, tokenizer, kind=None):
    folder = FIXTURES / f"score-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    shared.randomise(network).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": kind}, indent=2))
    return folder


def reranker(name, network, tokenizer, kind=None):
    raw = save(f"{name}-raw", network, tokenizer, kind)
    folder = FIXTURES / f"score-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    CrossEncoder(str(raw), device="cpu").save_pretrained(str(folder), create_model_card=False)
    shutil.rmtree(raw)
    model = CrossEncoder(str(folder), device="cpu")
    assert model.max_seq_length == 64 and isinstance(model.activation_fn, torch.nn.Sigmoid)
    logits = [model.predict([pair], activation_fn=torch.nn.Identity())[0] for pair in PAIRS]
    scores = [model.predict([pair])[0] for pair in PAIRS]
    write(folder, {"pairs": PAIRS, "logits": shared.short(logits), "scores": shared.short(scores)})


def classifier(name, network, tokenizer):
    folder = save(name, network, tokenizer)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 64

    @torch.inference_mode()
    def logits(*texts):
        # As a batch of one: transformers takes a second text that is empty, outside of a batch, for none.
        batch = [[text] for text in texts]
        return model(**tokenizer(*batch, truncation=True, return_tensors="pt")).logits[0]

    alone = [logits(text) for text in ALONE]
    single = model.config.problem_type == "single_label_classification"
    probs = [row.softmax(0) if single else row.sigmoid() for row in alone]
    rows = {"logits": alone, "probs": probs, "pair_logits": [logits(*pair) for pair in FEW]}
    rows = {key: [shared.short(row) for row in values] for key, values in rows.items()}
    write(folder, {"texts": ALONE, "logits": rows["logits"], "probs": rows["probs"],
                   "pairs": FEW, "pair_logits": rows["pair_logits"]})


def without_types(tokenizer):
    tokenizer.model_max_length = 64
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def bert():
    tokenizer = shared.wordpiece(300)
    config = BertConfig(**shared.shape(tokenizer, max_position_embeddings=64, type_vocab_size=2, num_labels=1))
    # The class is what has transformers tell the two texts apart by token_type_ids.
    reranker("bert", BertForSequenceClassification(config), tokenizer, "BertTokenizer")


def xlm_roberta():
    tokenizer = without_types(shared.unigram(300))
    config = XLMRobertaConfig(**shared.shape(
        tokenizer, max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5,
        num_labels=1))
    reranker("xlm-roberta", XLMRobertaForSequenceClassification(config), tokenizer)


def roberta():
    tokenizer = without_types(shared.byte_bpe(330))
    names = ("negative", "neutral", "positive")
    config = RobertaConfig(**shared.shape(
        tokenizer, max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5,
        id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)},
        problem_type="single_label_classification"))
    classifier("roberta", RobertaForSequenceClassification(config), tokenizer)


def distilbert():
    tokenizer = without_types(shared.wordpiece(300))
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64,
        initializer_range=0.3, num_labels=4, problem_type="multi_label_classification")
    classifier("distilbert", DistilBertForSequenceClassification(config), tokenizer)


def modernbert():
    tokenizer = shared.modern_bpe(330)
    config = shared.modern_config(
        tokenizer, global_attn_every_n_layers=3, classifier_pooling="mean", num_labels=1)
    reranker("modernbert", ModernBertForSequenceClassification(config), tokenizer)


def electra():
    tokenizer = shared.wordpiece(300)
    config = ElectraConfig(**shared.shape(
        tokenizer, max_position_embeddings=64, embedding_size=16, type_vocab_size=2, num_labels=1))
    reranker("electra", ElectraForSequenceClassification(config), tokenizer, "ElectraTokenizer")


def inference(name, network, tokenizer, kind=None):
    folder = save(name, network, tokenizer, kind)
    classify = pipeline("zero-shot-classification", model=str(folder), device="cpu")
    assert classify.tokenizer.model_max_length == 64
    cases = []
    for text in (TEXTS[1], " ", TEXTS[11], LONG, LONG * 12):
        for candidates in (["music"], ["music", "the tide", "a queue"], ["été", "no", "yes", "perhaps", "it depends"]):
            for multi_label in (False, True):
                for template in ({}, {"hypothesis_template": "It is about {}, they say"}):
                    found = classify(text, candidates, multi_label=multi_label, **template)
                    cases.append({"input": text, "labels": candidates, "multi_label": multi_label, **template,
                                  "expected": list(zip(found["labels"], shared.short(found["scores"])))})
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (folder / "expected.json").write_text("[\n" + lines + "\n]\n")
    print(folder.name, "bytes", sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()), cases[4]["expected"])


def named(*names):
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def nli_bert():
    tokenizer = shared.wordpiece(300)
    config = BertConfig(**shared.shape(tokenizer, max_position_embeddings=64, type_vocab_size=2),
                        **named("contradiction", "neutral", "entailment"))
    inference("nli-bert", BertForSequenceClassification(config), tokenizer, "BertTokenizer")


def nli_roberta():
    """Its first label is entailment, so that contradiction is taken to be the last."""
    tokenizer = without_types(shared.byte_bpe(330))
    config = RobertaConfig(**shared.shape(
        tokenizer, max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5),
        **named("ENTAILMENT", "NEUTRAL", "CONTRADICTION"))
    inference("nli-roberta", RobertaForSequenceClassification(config), tokenizer)


def deberta():
    """A model of natural language inference, as those for zero-shot classification."""
    tokenizer = shared.deberta_pieces(300, model_max_length=64)
    names = ("entailment", "neutral", "contradiction")
    config = shared.deberta_config(
        tokenizer, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)},
        problem_type="single_label_classification")
    classifier("deberta", DebertaV2ForSequenceClassification(config), tokenizer)


def deberta_rerank():
    """Without model_max_length: the limit is max_position_embeddings, as of deberta-v3-base."""
    tokenizer = shared.deberta_pieces(300)
    config = shared.deberta_config(tokenizer, num_labels=1)
    reranker("deberta-rerank", DebertaV2ForSequenceClassification(config), tokenizer)


def qwen3():
    """The tokenizer ends texts with the padding token, which the head does not count."""
    tokenizer = shared.qwen_bpe(330)
    config = Qwen3Config(**shared.decoder_shape(tokenizer, num_labels=1))
    network = shared.with_padding(Qwen3ForSequenceClassification(config))
    with torch.no_grad():
        network.score.weight.normal_(std=0.3)
    reranker("qwen3", network, tokenizer)


def gemma2():
    tokenizer = shared.unigram(300)
    tokenizer.model_max_length = 64
    names = ("negative", "neutral", "positive")
    config = Gemma2Config(
        **shared.decoder_shape(tokenizer), sliding_window=8, query_pre_attn_scalar=8,
        id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)},
        problem_type="single_label_classification")
    network = shared.with_padding(Gemma2ForSequenceClassification(config))
    with torch.no_grad():
        network.score.weight.normal_(std=0.3)
    classifier("gemma2", network, tokenizer)


QUESTION = ('Judge whether the Document meets the requirements based on the Query and the Instruct provided. '
            'Note that the answer can only be "yes" or "no".')
BEFORE = f"<|im_start|>system\n{QUESTION}<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
PAIR_TEMPLATE = (
    BEFORE + "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first"
    " | default('" + INSTRUCT + "') }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}" + AFTER)
CHAT_TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
                 "{% endfor %}<|im_start|>assistant\n")
OTHER_INSTRUCT = "Find what contradicts the query"


def causal_reranker():
    texts = [BEFORE, AFTER, INSTRUCT, "<Instruct>: <Query>: <Document>: "] * 6 + ["yes", "no"] * 20
    tokenizer = shared.qwen_bpe(400, end=False, more=texts)
    tokenizer.model_max_length = 160
    config = Qwen3Config(**shared.decoder_shape(tokenizer, max_position_embeddings=256, tie_word_embeddings=True))
    return shared.randomise(shared.with_padding(Qwen3ForCausalLM(config))), tokenizer


def logits():
    network, tokenizer = causal_reranker()
    tokenizer.chat_template = PAIR_TEMPLATE
    raw, folder = FIXTURES / "raw-logits", FIXTURES / "score-logits"
    shutil.rmtree(folder, ignore_errors=True)
    network.save_pretrained(raw)
    tokenizer.save_pretrained(raw)
    CrossEncoder(str(raw), device="cpu").save_pretrained(str(folder), create_model_card=False)
    shutil.rmtree(raw)
    model = CrossEncoder(str(folder), device="cpu")
    assert model.max_seq_length == 160 and isinstance(model.activation_fn, torch.nn.Sigmoid)
    plain = torch.nn.Identity()
    found = [model.predict([pair], activation_fn=plain)[0] for pair in PAIRS]
    scores = [model.predict([pair])[0] for pair in PAIRS]
    instructed = [model.predict([pair], activation_fn=plain, prompt=OTHER_INSTRUCT)[0] for pair in PAIRS]
    write(folder, {"pairs": PAIRS, "logits": shared.short(found), "scores": shared.short(scores),
                   "instruction": [OTHER_INSTRUCT], "instructed": shared.short(instructed)})


def logits_published():
    network, tokenizer = causal_reranker()
    tokenizer.chat_template = CHAT_TEMPLATE
    folder = FIXTURES / "score-logits-published"
    shutil.rmtree(folder, ignore_errors=True)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    assert yes is not None and no is not None and yes != no
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (BEFORE, AFTER))
    room = tokenizer.model_max_length - len(before) - len(after)

    @torch.inference_mode()
    def logit(query, document, instruction=INSTRUCT):
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = tokenizer.encode(text, add_special_tokens=False, truncation="longest_first", max_length=room)
        ids = torch.tensor([[*before, *ids, *after]])
        both = network(input_ids=ids, logits_to_keep=1).logits[0, -1, [no, yes]]
        return (both.log_softmax(0)[1] - both.log_softmax(0)[0]).item()

    found = [logit(*pair) for pair in PAIRS]
    write(folder, {"pairs": PAIRS, "logits": shared.short(found),
                   "scores": shared.short(torch.tensor(found, dtype=torch.float64).sigmoid().tolist()),
                   "instruction": [OTHER_INSTRUCT],
                   "instructed": shared.short([logit(*pair, OTHER_INSTRUCT) for pair in PAIRS])})


MADE = {"bert": bert, "xlm-roberta": xlm_roberta, "roberta": roberta, "distilbert": distilbert,
        "modernbert": modernbert, "electra": electra, "nli-bert": nli_bert, "nli-roberta": nli_roberta,
        "deberta": deberta, "deberta-rerank": deberta_rerank, "qwen3": qwen3, "gemma2": gemma2, "logits": logits,
        "logits-published": logits_published}


def main():
    torch.set_num_threads(2)
    names = sys.argv[1:] or list(MADE)
    for name in names:
        torch.manual_seed(40 + list(MADE).index(name))
        MADE[name]()


if __name__ == "__main__":
    main()
