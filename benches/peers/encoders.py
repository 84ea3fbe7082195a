"""`make bench`, encoders of other shapes: a decoder as an encoder, DeBERTa, labels of tokens; beside Celery and what people
use. Prints a table, and writes it into benches/RESULTS.md.

Weights are random, since no trained ones can be had without a hub, and the time does not depend on them. Texts are those
of `texts`, 35 tokens on average, one a task. Each system is measured ROUNDS (3) times, in turns, on the cores of CORES,
with RabbitMQ on the same cores. TEXTS (240) a round. SHAPES: which of them, such as `qwen3,deberta`; by default all.
"""

import json
import os

from . import page, texts
from .kinds import Kind, Place, replace, rows_of
from .rabbit import Rabbit
from .scene import FOLDER, MODEL, SEED, pin, say

TEXTS = int(os.environ.get("TEXTS") or 240)
BEGIN, END = "<!-- `make bench` writes encoders from here -->", "<!-- encoders to here -->"
URLS = {"qwen3": "/v1/embeddings", "deberta": "/v1/embeddings", "token-labels": "/token-classification"}


def _network(shape, vocabulary):
    """A network of this shape with random weights."""
    import torch
    import transformers as of

    torch.manual_seed(SEED)
    if shape == "qwen3":
        # Qwen3-Embedding-0.6B, but for the size of its vocabulary, which takes no time.
        return of.Qwen3Model(
            of.Qwen3Config(
                vocab_size=vocabulary,
                hidden_size=1024,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                intermediate_size=3072,
                max_position_embeddings=32_768,
                rope_theta=1_000_000,
                tie_word_embeddings=True,
            )
        )
    if shape == "deberta":
        # DeBERTa-v3-base, but for its vocabulary.
        return of.DebertaV2Model(
            of.DebertaV2Config(
                vocab_size=vocabulary,
                hidden_size=768,
                num_hidden_layers=12,
                num_attention_heads=12,
                intermediate_size=3072,
                max_position_embeddings=512,
                type_vocab_size=0,
                relative_attention=True,
                position_buckets=256,
                norm_rel_ebd="layer_norm",
                share_att_key=True,
                pos_att_type=["p2c", "c2p"],
                position_biased_input=False,
                layer_norm_eps=1e-7,
            )
        )
    names = dict(enumerate(["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]))
    ids = {name: index for index, name in names.items()}
    return of.BertForTokenClassification(of.BertConfig(vocab_size=vocabulary, id2label=names, label2id=ids))


def make(shape, folder):
    """Writes a model of this shape with MiniLM's tokenizer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL, model_max_length=512)
    network = _network(shape, len(tokenizer))
    if shape == "token-labels":
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return
    raw = folder.with_name(f"{folder.name}-raw")
    network.save_pretrained(raw)
    # MiniLM's class would pass token types, which these networks do not have.
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(raw)
    mode = "lasttoken" if shape == "qwen3" else "mean"
    modules = [Transformer(str(raw), max_seq_length=512), Pooling(network.config.hidden_size, pooling_mode=mode), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)


def write_tasks(shape, file):
    """A task for each text."""
    lines = FOLDER / "encoder-texts.jsonl"
    texts.write(lines, TEXTS, SEED, MODEL / "tokenizer.json")
    with open(file, "w", encoding="utf-8") as out:
        for number, line in enumerate(lines.read_text().splitlines()):
            body = {"input": json.loads(line)["input"]}
            out.write(json.dumps({"custom_id": str(number), "url": URLS[shape], "body": body}) + "\n")


def main():
    """Measures, then writes."""
    rounds = int(os.environ.get("ROUNDS") or 3)
    shapes = (os.environ.get("SHAPES") or ",".join(URLS)).split(",")
    cores, _, _ = pin()
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    place = Place(cores)
    found = {}
    with Rabbit(cores) as rabbit:
        for shape in shapes:
            folder, file = FOLDER / f"encoder-{shape}", FOLDER / f"encoder-{shape}.jsonl"
            if not (folder / "model.safetensors").exists():
                make(shape, folder)
            write_tasks(shape, file)
            kind = Kind(place, rabbit.url, f"encoder-{shape}", folder, file)
            for number in range(rounds):
                say(f"{shape}, round {number + 1} of {rounds}")
                for name, measure in (
                    (f"{shape}: sconce over RabbitMQ", lambda kind=kind: kind.ours(2 * TEXTS, 64)),
                    (f"{shape}: sconce int8 over RabbitMQ", lambda kind=kind: kind.ours(2 * TEXTS, 64, "int8")),
                    (f"{shape}: Celery + PyTorch", lambda kind=kind: kind.celery()),
                ):
                    value = measure()
                    say(f"{name} {value:.1f} a second")
                    found.setdefault(name, []).append(value)
    write(found, cores, rounds)


def write(found, cores, rounds):
    """Puts the table into the page, with its conditions."""
    lines = rows_of(found, "texts/s", cores, rounds)
    lines += ["Random weights of the shapes of"]
    lines += ["Qwen3-Embedding-0.6B, DeBERTa-v3-base (vectors) and BERT-base with nine labels of tokens; texts of 35 tokens on"]
    lines += ["average, one a task."]
    table = "\n".join(lines)
    replace(page.PAGE, (BEGIN, END), table)
    print(table)


if __name__ == "__main__":
    main()
