"""Translation by transformers' Marian, with the bodies of LibreTranslate: {"q": "Guten Abend.", "source": "de", "target": "en"}.

    sconce launch --set 'pool[0].model=python:./translator.py:Translator' \\
        --set 'pool[0].options.model="Helsinki-NLP/opus-mt-de-en"'

Needs `pip install torch transformers sentencepiece`. Without a hub, `python translator.py tiny FOLDER` makes a tiny model
with random weights, whose answers mean nothing: it shows that everything works together.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

from sconce_model import Input, Model, Task, TaskError


class Translator(Model):
    urls = ("/translate",)

    class Options:
        model: str
        max_tokens: int = 512
        """The most tokens of a text, and of its translation. Longer texts are refused."""

    def load(self, device: str, dtype: str, options: Options) -> None:
        self.tokenizer = MarianTokenizer.from_pretrained(options.model)
        self.network = MarianMTModel.from_pretrained(options.model, dtype=getattr(torch, dtype)).to(device).eval()
        self.device, self.max_tokens = device, options.max_tokens

    def preprocess(self, task: Task) -> list[Input]:
        texts, inputs = task.field("q"), []
        if isinstance(texts, str):
            task.state, texts = "one text", [texts]
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise TaskError(400, "q must be a text or a list of texts", "q")
        for index, text in enumerate(texts):
            ids = self.tokenizer(text)["input_ids"]
            if len(ids) > self.max_tokens:
                raise TaskError(422, f"q[{index}] has {len(ids)} tokens, more than {self.max_tokens}", "q")
            inputs.append(Input(ids, tokens=len(ids)))
        return inputs

    def forward(self, batch: list[Input]) -> Any:
        padded = self.tokenizer.pad({"input_ids": [it.value for it in batch]}, return_tensors="pt").to(self.device)
        with torch.inference_mode():
            return self.network.generate(**padded, max_new_tokens=self.max_tokens).cpu()

    def finish(self, task: Task, outputs: list[Any]) -> Any:
        # This runs on the thread of `preprocess`, so that no two threads call the tokenizer at once.
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return {"translatedText": texts[0] if task.state == "one text" else texts}


def make_tiny(folder: str) -> None:
    """A tokenizer trained on this file, and two small layers with random weights."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    def path(name: str) -> str:
        return str(Path(folder, name))

    Path(folder).mkdir(parents=True, exist_ok=True)
    lines = Path(__file__).read_text().splitlines()
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=path("source"), vocab_size=200, hard_vocab_limit=False
    )
    pieces = SentencePieceProcessor(model_file=path("source.model"))
    names = [pieces.id_to_piece(index) for index in range(len(pieces))] + ["<pad>"]
    Path(path("vocab.json")).write_text(json.dumps({name: index for index, name in enumerate(names)}))
    for name in ("source.spm", "target.spm"):
        shutil.copy(path("source.model"), path(name))
    MarianTokenizer(path("source.spm"), path("target.spm"), path("vocab.json")).save_pretrained(folder)
    pad = len(names) - 1
    small = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in small.items()}
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 2, "forced_eos_token_id": 2}
    torch.manual_seed(0)
    MarianMTModel(MarianConfig(vocab_size=len(names), d_model=64, **ids, **sizes)).save_pretrained(folder)
    print(f"{folder}: a tiny Marian with random weights; its answers mean nothing")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "tiny":
        sys.exit("usage: translator.py tiny FOLDER")
    make_tiny(sys.argv[2])
