"""Sends each text as a Celery task and collects the results."""

from .asked import serve
from .celery_app import embed as task


def embed(texts):
    """All tasks first, then all results: as fast as this client can."""
    results = [task.delay(text) for text in texts]
    return [result.get() for result in results]


if __name__ == "__main__":
    serve(embed)
