"""The Celery application that sconce is compared with, as people write it: one text a task, a model
for each worker process, one thread each, late acks, results as JSON through RabbitMQ (`rpc://`)."""

import os

from celery import Celery
from celery.signals import worker_process_init

app = Celery("peers", broker=os.environ["BROKER_URL"], backend="rpc://")
app.conf.task_acks_late = True

_model = None


@worker_process_init.connect
def load(**_):
    """In the process that computes, after the fork."""
    global _model
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    _model = SentenceTransformer(os.environ["MODEL"], device="cpu")


@app.task
def embed(text):
    """The vector of a text."""
    return _model.encode(text, show_progress_bar=False).tolist()
