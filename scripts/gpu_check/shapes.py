"""The networks that are made, by their sizes. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A network of BERT's kind."""

    name: str
    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    positions: int
    longest: int
    """Tokens that texts are cut to."""

    @property
    def flop_per_token(self):
        """Of the linear layers alone, as `make bench` counts them: attention's products, 1 to 3 % more at
        these lengths, are left out."""
        return self.layers * 2 * (4 * self.hidden**2 + 2 * self.hidden * self.inner)


BERT_BASE = Shape("bert-base", 12, 768, 12, 3072, 30522, 512, 512)
MINILM = Shape("minilm", 6, 384, 12, 1536, 30522, 512, 256)
TINY = Shape("tiny", 2, 64, 2, 128, 600, 64, 24)
"""For the test of this program: small enough to be computed in Python alone."""

SHAPES = {shape.name: shape for shape in (BERT_BASE, MINILM, TINY)}
