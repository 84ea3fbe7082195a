"""A vocabulary of word pieces, made from a seed, and the tokenizer's files that hold it. Pure."""

import json
import random

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP, UNK = 2, 3, 1
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
ENDINGS = ["ing", "ed", "er", "ly", "ness", "s", "al", "ity", "less", "ful"]
ONSETS = [
    "b",
    "br",
    "c",
    "d",
    "dr",
    "f",
    "g",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "r",
    "s",
    "st",
    "t",
    "v",
    "w",
]
VOWELS = ["a", "e", "i", "o", "u", "ea", "ou"]


def pieces(size, seed):
    """`size` pieces, each once: special ones, letters, endings, then words of syllables."""
    found = dict.fromkeys(SPECIAL)
    found.update(dict.fromkeys(LETTERS + ",.!?-"))
    found.update(dict.fromkeys("##" + letter for letter in LETTERS))
    found.update(dict.fromkeys("##" + ending for ending in ENDINGS))
    chosen = random.Random(f"{seed}/vocabulary")
    while len(found) < size:
        syllables = chosen.choice((1, 2, 2, 3))
        word = "".join(chosen.choice(ONSETS) + chosen.choice(VOWELS) for _ in range(syllables))
        found[word] = None
    return list(found)[:size]


def words(vocabulary):
    """Those of the pieces that are words."""
    return [piece for piece in vocabulary if len(piece) > 1 and piece.isalpha()]


def tokenizer(vocabulary):
    """`tokenizer.json`, as the library `tokenizers` reads it."""

    def special(name, kind):
        return {"SpecialToken": {"id": name, "type_id": kind}}

    def text(name, kind):
        return {"Sequence": {"id": name, "type_id": kind}}

    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = [special("[CLS]", 0), text("A", 0), special("[SEP]", 0)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": at, "content": name, **added} for at, name in enumerate(SPECIAL)],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": first,
            "pair": [*first, text("B", 1), special("[SEP]", 1)],
            "special_tokens": {
                name: {"id": name, "ids": [SPECIAL.index(name)], "tokens": [name]}
                for name in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: at for at, piece in enumerate(vocabulary)},
        },
    }


def write(folder, vocabulary, longest):
    """Writes what a tokenizer is loaded from, by us and by transformers."""
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    settings = {
        "tokenizer_class": "BertTokenizerFast",
        "do_lower_case": True,
        "model_max_length": longest,
        **dict(zip(names, SPECIAL)),
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(vocabulary)), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
