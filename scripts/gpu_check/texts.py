"""What is embedded: texts made from a seed, mostly short, some long, as texts are. Pure."""

import math
import random

from . import vocabulary

MEDIAN, SPREAD = 40, 0.8
"""Of a text's words: its logarithm is spread normally."""
SHORTEST, LONGEST = 3, 210
"""Words: five tokens with the special ones, and about 256."""
ENDED = 0.15
"""The part of words that has an ending, which is a piece of its own."""

ODD = [
    "",
    " \t ",
    "a",
    "UPPER CASE and lower",
    "stops, commas -- and! marks? 1 2 34 567",
    "[CLS] named [SEP]",
    "unknown: {}~^ signs",
    "x" * 150,
]
"""Beside them, where results are compared."""


class Texts:
    """Endless ones, in the same order whenever the seed is the same."""

    def __init__(self, pieces, shape, seed):
        self.words = vocabulary.words(pieces)
        self.longest = min(LONGEST, shape.longest)
        self.chosen = random.Random(f"{seed}/texts")
        self.made = []

    def first(self, count):
        """The first so many."""
        while len(self.made) < count:
            words = round(math.exp(self.chosen.gauss(math.log(MEDIAN), SPREAD)))
            self.made.append(self._text(max(SHORTEST, min(words, self.longest))))
        return self.made[:count]

    def mixed(self, count):
        """`count` texts to compare results by: odd ones, the longest, and the first of all."""
        return [*ODD, self._text(2 * self.longest), *self.first(count)][:count]

    def _text(self, words):
        chosen = self.chosen
        # Some words are frequent, as they are anywhere.
        picked = [self.words[int(len(self.words) * chosen.random() ** 3)] for _ in range(words)]
        ended = [it + chosen.choice(vocabulary.ENDINGS) if chosen.random() < ENDED else it for it in picked]
        return " ".join(ended)
