"""Which texts are embedded: the same for every system, made from a seed.

Lengths are spread as those of sentences and paragraphs are, log-normally, between 4 and 256 tokens and
35 on average. Words are those of the model's own vocabulary, each one token, so that a text's tokens are
counted without a tokenizer: its words and two special ones.
"""

import json
import math
import random
import statistics

SHORTEST, LONGEST, MEAN = 4, 256, 35
SPREAD = 0.8
"""Of the logarithm."""
SPECIAL = 2


def lengths(count):
    """Tokens of each text, in order of size: the quantiles of the distribution."""
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((index + 0.5) / count) for index in range(count)]

    def at(median):
        sizes = (round(median * math.exp(SPREAD * it)) for it in quantiles)
        return [min(LONGEST, max(SHORTEST, size)) for size in sizes]

    # The cuts at both ends move the mean, so the median is searched for.
    return min(
        (at(MEAN * step / 200) for step in range(100, 200)), key=lambda it: abs(sum(it) - MEAN * count)
    )


def write(path, count, seed, tokenizer):
    """Writes `count` texts, one task a line; returns the tokens of all."""
    with open(tokenizer, encoding="utf-8") as file:
        vocabulary = json.load(file)["model"]["vocab"]
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and word.islower())
    chosen = random.Random(seed)
    sizes = lengths(count)
    chosen.shuffle(sizes)
    with open(path, "w", encoding="utf-8") as file:
        for size in sizes:
            text = " ".join(chosen.choices(words, k=size - SPECIAL))
            file.write(json.dumps({"input": text}) + "\n")
    return sum(sizes)
