"""The Celery application that reranking, images, text and speech in both directions are compared with: one request a
task, a model for each worker process, one thread each, late acks, results as JSON through RabbitMQ (`rpc://`)."""

import os

from celery import Celery
from celery.signals import worker_process_init

app = Celery("peers_kinds", broker=os.environ["BROKER_URL"], backend="rpc://")
app.conf.task_acks_late = True
app.conf.task_default_queue = os.environ["QUEUE"]

_compute = None


@worker_process_init.connect
def load(**_):
    """In the process that computes, after the fork."""
    global _compute
    if os.environ["KIND"] == "rerank":
        import torch
        from sentence_transformers import CrossEncoder

        torch.set_num_threads(1)
        model = CrossEncoder(os.environ["MODEL"], device="cpu")

        def scores(body):
            pairs = [(body["query"], document) for document in body["documents"]]
            return model.predict(pairs, batch_size=32, show_progress_bar=False).tolist()

        _compute = scores
    elif os.environ["KIND"] == "text":
        from .transformers_model import Generator

        generator = Generator(os.environ["MODEL"], 1)
        _compute = lambda body: generator.texts([body["prompt"]], body["max_tokens"])  # noqa: E731
    elif os.environ["KIND"] == "speech":
        from .faster_whisper_client import recogniser

        _compute, _ = recogniser(1)
    elif os.environ["KIND"] == "speak":
        import base64
        import io

        from hibari.tts import write_wav

        from .hibari_client import speaker

        voice = speaker(1)

        def sound(text):
            file = io.BytesIO()
            write_wav(file, voice(text))
            return base64.b64encode(file.getvalue()).decode()

        _compute = sound
    elif os.environ["KIND"] == "encoder-token-labels":
        import torch
        from transformers import pipeline

        torch.set_num_threads(1)
        label = pipeline("token-classification", os.environ["MODEL"], aggregation_strategy="simple", device="cpu")
        _compute = lambda body: [{**it, "score": float(it["score"])} for it in label(body["input"])]  # noqa: E731
    elif os.environ["KIND"].startswith("encoder-"):
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        encoder = SentenceTransformer(os.environ["MODEL"], device="cpu")
        _compute = lambda body: encoder.encode([body["input"]], show_progress_bar=False)[0].tolist()  # noqa: E731
    elif os.environ["KIND"] == "python":
        import torch
        from embedder import Embedder

        import sconce_model

        torch.set_num_threads(1)
        model = sconce_model.load(Embedder, options={"model": os.environ["MODEL"]})
        inputs = lambda body: model.preprocess(sconce_model.Task.of(body, "/v1/embeddings"))  # noqa: E731
        _compute = lambda body: model.forward(inputs(body))[0].tolist()  # noqa: E731
    elif os.environ["KIND"].startswith("clip"):
        from .clip_client import embedder

        embed = embedder(os.environ["MODEL"], 1)
        _compute = lambda body: embed([body])[0].tolist()  # noqa: E731
    else:
        from .images_client import classifier

        classify = classifier("torch", os.environ["MODEL"], 1)
        _compute = lambda body: classify([body])[0].tolist()  # noqa: E731


@app.task
def compute(body):
    """The answer to one request."""
    return _compute(body)

