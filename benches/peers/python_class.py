"""A class that computes nothing: what is left is sconce's own part."""

from sconce_model import Model


class Empty(Model):
    """Answers each text with a vector of two numbers."""

    urls = ("/v1/embeddings",)

    def forward(self, batch):
        """At once."""
        return [(0.0, 1.0)] * len(batch)
