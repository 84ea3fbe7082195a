"""Sends each request as a Celery task and collects the results."""

from .asked import bodies, serve
from .celery_kinds import compute


def all_of(requests):
    """All tasks first, then all results: as fast as this client can."""
    results = [compute.delay(body) for body in requests]
    return [result.get() for result in results]


if __name__ == "__main__":
    serve(all_of, bodies())
