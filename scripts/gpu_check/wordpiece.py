"""BERT's tokenizer in Python alone, for texts in ASCII: where the library `tokenizers` is not installed."""

import json
import string

from .vocabulary import CLS, SEP, UNK


class WordPiece:
    """Reads a model's `tokenizer.json`; only its vocabulary."""

    def __init__(self, folder, longest):
        written = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self.vocabulary = written["model"]["vocab"]
        self.special = [it["content"] for it in written["added_tokens"]]
        self.longest = longest

    def ids(self, text):
        """The ids of a text, special ones included, cut to the longest."""
        found = []
        for part, special in self._parts(text):
            found += (
                [self.vocabulary[part]]
                if special
                else [id for word in _words(part) for id in self._word(word)]
            )
        return [CLS, *found[: self.longest - 2], SEP]

    def _parts(self, text):
        """Special pieces that a text names, and what is between them."""
        parts = [(text, False)]
        for name in self.special:
            split = []
            for part, special in parts:
                between = [part] if special else part.split(name)
                for at, piece in enumerate(between):
                    split += [(name, True)] if at else []
                    split.append((piece, special))
            parts = split
        return parts

    def _word(self, word):
        ids, start = [], 0
        while start < len(word):
            end = len(word)
            while end > start and ("##" if start else "") + word[start:end] not in self.vocabulary:
                end -= 1
            if end == start or len(word) > 100:
                return [UNK]
            ids.append(self.vocabulary[("##" if start else "") + word[start:end]])
            start = end
        return ids


def _words(text):
    apart = "".join(f" {it} " if it in string.punctuation else it for it in text.lower())
    return apart.split()
