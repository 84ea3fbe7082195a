"""`make bench`, second part: reranking, images, and CLIP's texts and images beside what people use. Prints a table, and writes it into
benches/RESULTS.md.

Each system is measured ROUNDS (3) times, in turns, on the cores of CORES, with RabbitMQ on the same cores.
"""

import base64
import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

from . import page, sconce, texts
from .processes import Asked, end, spawn
from .rabbit import Rabbit
from .scene import FOLDER, MODEL, SEED, pin, say

DOCUMENTS = 20
"""Of a request."""
REQUESTS = 60
PHOTOS = 240
IMAGES = Path("models/efficientnet-lite0")
PAIRS = FOLDER / "cross-encoder"
CLIP = FOLDER / "clip"
CLIP_INPUTS = 160
BEGIN, END = "<!-- `make bench` writes kinds from here -->", "<!-- kinds to here -->"


def make_cross_encoder():
    """MiniLM with a head of random numbers: no trained cross-encoder can be had without a hub, and the time
    does not depend on the numbers."""
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    torch.manual_seed(SEED)
    model = BertForSequenceClassification.from_pretrained(MODEL, num_labels=1)
    model.save_pretrained(PAIRS)
    AutoTokenizer.from_pretrained(MODEL, model_max_length=512).save_pretrained(PAIRS)


def write_requests(file):
    """Questions of 8 words, each with documents of the lengths of `texts`."""
    lines = FOLDER / "documents.jsonl"
    texts.write(lines, REQUESTS * DOCUMENTS, SEED, MODEL / "tokenizer.json")
    documents = [json.loads(line)["input"] for line in lines.read_text().splitlines()]
    with open(file, "w", encoding="utf-8") as out:
        for number in range(REQUESTS):
            own = documents[number * DOCUMENTS : (number + 1) * DOCUMENTS]
            query = " ".join(" ".join(own).split()[:8])
            body = {"query": query, "documents": own}
            out.write(json.dumps({"custom_id": str(number), "url": "/v1/rerank", "body": body}) + "\n")


def write_photos(file):
    """The photographs of examples/images, over and over."""
    photos = sorted(Path("examples/images").glob("*.jpg"))
    with open(file, "w", encoding="utf-8") as out:
        for number in range(PHOTOS):
            data = base64.b64encode(photos[number % len(photos)].read_bytes()).decode()
            body = {"image_url": f"data:image/jpeg;base64,{data}"}
            out.write(json.dumps({"custom_id": str(number), "url": "/classify", "body": body}) + "\n")


def make_clip():
    """A model of the size of ViT-B/32 with random weights, and the tokenizer of the fixtures."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    fixture = Path("tests/fixtures/tiny-clip")
    small = json.loads((fixture / "config.json").read_text())["text_config"]
    ids = {name: small[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(SEED)
    CLIPModel(CLIPConfig(text_config=ids)).save_pretrained(CLIP)
    described = json.loads((fixture / "preprocessor_config.json").read_text())
    described |= {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
    (CLIP / "preprocessor_config.json").write_text(json.dumps(described))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (CLIP / name).write_text((fixture / name).read_text())


def write_clip_inputs(texts_file, photos_file):
    """Captions of some ten words, and the photographs of examples/images, each a task."""
    photos = sorted(Path("examples/images").glob("*.jpg"))
    words = "a photo of the cat beside cup coffee rocket on its launch pad in garden with flower".split()
    with open(texts_file, "w", encoding="utf-8") as texts_out, open(photos_file, "w", encoding="utf-8") as photos_out:
        for number in range(CLIP_INPUTS):
            caption = " ".join(words[(number * 7 + at * (1 + number % 5)) % len(words)] for at in range(10))
            data = base64.b64encode(photos[number % len(photos)].read_bytes()).decode()
            image = {"image_url": {"url": f"data:image/jpeg;base64,{data}"}}
            for out, given in ((texts_out, caption), (photos_out, image)):
                line = {"custom_id": str(number), "url": "/v1/embeddings", "body": {"input": given}}
                out.write(json.dumps(line) + "\n")


class Place:
    """What `sconce.Pool` asks a scene for."""

    def __init__(self, cores):
        self.environment = dict(os.environ)
        self.workers = len(cores)

    def log(self, name):
        """Where a program's stderr goes."""
        return FOLDER / "logs" / f"{name}.log"


class Kind:
    """One kind of requests: a pool of sconce, peers in process, and Celery."""

    def __init__(self, place, broker, name, model, file):
        self.name, self.file, self.place = name, str(file), place
        cores = sorted(os.sched_getaffinity(0))

        def pool(dtype):
            own = [f"pool[0].dtype={dtype}"]
            return sconce.Pool(place, (broker, cores), str(model.resolve()), f"bench.{name}", own)

        self.pool = pool
        own = {"BROKER_URL": broker, "MODEL": model.resolve(), "TEXTS_FILE": Path(file).resolve()}
        own |= {"THREADS": place.workers, "ONNX_FILE": (FOLDER / "lite0.onnx").resolve()}
        own |= {"KIND": name, "QUEUE": f"celery.{name}"}
        self.environment = {key: str(value) for key, value in own.items()}

    def ask(self, module, **more):
        """The rate of one peer, started for this measurement alone."""
        environment = {**self.environment, **more}
        with Asked([sys.executable, "-m", f"peers.{module}"], self.place.log(module), environment) as peer:
            peer.ready().ask("measure")
            return peer.answer()["texts_per_second"]

    def celery(self):
        """The rate of Celery, with a worker process for each core."""
        app = [sys.executable, "-m", "celery", "-A", "peers.celery_kinds", "worker", "--loglevel", "WARNING"]
        environment = {**self.environment, "OMP_NUM_THREADS": "1"}
        worker = spawn([*app, "--concurrency", self.place.workers], self.place.log("celery-kinds"), environment)
        try:
            return self.ask("celery_kinds_client")
        finally:
            end(worker)

    def ours(self, count, in_flight, dtype="f32"):
        """The rate of sconce over RabbitMQ, with a worker for each core.

        Batches take inputs of all tasks in turn, so that tasks under way end together: far more are measured than
        are under way.
        """
        pool = self.pool(dtype)
        with sconce.Workers(pool, self.place.workers):
            many = ("--in-flight", in_flight, "--warmup", in_flight, "--tasks", count)
            return pool.bench("--input", self.file, *many)["tasks_per_second"]


def main():
    """Measures, then writes."""
    rounds = int(os.environ.get("ROUNDS") or 3)
    cores, _, _ = pin()
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    if not (PAIRS / "model.safetensors").exists():
        make_cross_encoder()
    if not (CLIP / "model.safetensors").exists():
        make_clip()
    requests, photos = FOLDER / "requests.jsonl", FOLDER / "photos.jsonl"
    captions, images_file = FOLDER / "clip-texts.jsonl", FOLDER / "clip-images.jsonl"
    write_requests(requests)
    write_photos(photos)
    write_clip_inputs(captions, images_file)
    place = Place(cores)
    found = {}
    with ExitStack() as stack:
        broker = stack.enter_context(Rabbit(cores)).url
        rerank = Kind(place, broker, "rerank", PAIRS, requests)
        images = Kind(place, broker, "images", IMAGES, photos)
        clip_texts = Kind(place, broker, "clip-texts", CLIP, captions)
        clip_images = Kind(place, broker, "clip-images", CLIP, images_file)
        for number in range(rounds):
            say(f"kinds, round {number + 1} of {rounds}")
            for name, measure in (
                ("pairs: sconce over RabbitMQ", lambda: rerank.ours(3 * REQUESTS, 16) * DOCUMENTS),
                ("pairs: sconce int8 over RabbitMQ", lambda: rerank.ours(3 * REQUESTS, 16, "int8") * DOCUMENTS),
                ("pairs: CrossEncoder in process", lambda: rerank.ask("cross_encoder_client") * DOCUMENTS),
                ("pairs: Celery + CrossEncoder", lambda: rerank.celery() * DOCUMENTS),
                ("images: sconce over RabbitMQ", lambda: images.ours(2 * PHOTOS, 32)),
                ("images: ONNX Runtime in process", lambda: images.ask("images_client", BACKEND="onnx")),
                ("images: PyTorch in process", lambda: images.ask("images_client", BACKEND="torch")),
                ("images: Celery + PyTorch", images.celery),
                ("CLIP, texts: sconce over RabbitMQ", lambda: clip_texts.ours(2 * CLIP_INPUTS, 64)),
                ("CLIP, texts: transformers in process", lambda: clip_texts.ask("clip_client")),
                ("CLIP, texts: Celery + transformers", clip_texts.celery),
                ("CLIP, images: sconce over RabbitMQ", lambda: clip_images.ours(CLIP_INPUTS, 32)),
                ("CLIP, images: transformers in process", lambda: clip_images.ask("clip_client")),
                ("CLIP, images: Celery + transformers", clip_images.celery),
            ):
                value = measure()
                say(f"{name} {value:.1f} a second")
                found.setdefault(name, []).append(value)
    write(found, cores, rounds)


def rows_of(found, unit, cores, rounds):
    """The lines of a table: medians, and how many times a peer's rate ours is (the median of the rounds' ratios)."""
    lines = [f"| system | {unit} | ours, × |", "|---|---|---|"]
    for name, rates in found.items():
        ours = found[f"{name.split(':')[0]}: sconce over RabbitMQ"]
        ratio = statistics.median(own / rate for own, rate in zip(ours, rates, strict=True))
        lines.append(f"| {name} | {statistics.median(rates):.1f} | {ratio:.2f} |")
    named = ",".join(map(str, cores))
    return [*lines, "", f"The rates are {page.rounds_of(rounds)}, on the cores {named}, which RabbitMQ shares."]


def write(found, cores, rounds):
    """Puts the table into the page, with its conditions."""
    lines = rows_of(found, "a second", cores, rounds)
    lines += ["Photographs of about 400"]
    lines += ["pixels as JPEG; decoding and resizing are within all figures. Requests of 20 documents, of 35 tokens each"]
    lines += ["on average; weights of MiniLM with a head of random numbers. CLIP has the size of ViT-B/32 and random"]
    lines += ["weights; its texts have ten words."]
    table = "\n".join(lines)
    replace(page.PAGE, (BEGIN, END), table)
    print(table)


def replace(file, marks, table):
    """Writes a table between two marks of a page."""
    begin, finish = marks
    before, rest = file.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(finish)
    file.write_text(f"{before}{begin}\n{table}\n{finish}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
