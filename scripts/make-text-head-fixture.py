#!/usr/bin/env python3
"""Makes tests/fixtures/text-head, for examples/text-head: a head of two linear layers with seeded random weights, the
index that lists its file beside that of all-MiniLM-L6-v2, and the scores that PyTorch and transformers find for texts
of different lengths.

Run with: scripts/fetch-model; python scripts/make-text-head-fixture.py
Made with transformers 5.24.0, torch 2.15.0, safetensors 0.8.0.
"""

import json
import pathlib

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "all-MiniLM-L6-v2"
FOLDER = ROOT / "tests" / "fixtures" / "text-head"
INNER, LABELS = 32, 3
TEXTS = [
    "Please call me back at once, the cellar is full of water!",
    "",
    "What a lovely evening.",
    "The tide carries each message to the shore, and whoever waits there reads it by the light of a candle. " * 8,
    "ok",
    "Ein Leuchter hält die Kerze.",
    "The meeting was moved to Thursday; nothing else has changed, and nobody needs to do anything about it.",
]

torch.manual_seed(20261129)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
encoder = AutoModel.from_pretrained(MODEL, dtype=torch.float32).eval()
head = torch.nn.ModuleDict({
    "dense": torch.nn.Linear(encoder.config.hidden_size, INNER),
    "out": torch.nn.Linear(INNER, LABELS),
})
for layer in head.values():
    torch.nn.init.normal_(layer.weight, std=0.2)

FOLDER.mkdir(parents=True, exist_ok=True)
tensors = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
save_file(tensors, FOLDER / "head.safetensors")
with safe_open(MODEL / "model.safetensors", "pt") as file:
    weight_map = {name: "bert.safetensors" for name in file.keys()}
weight_map |= {name: "head.safetensors" for name in tensors}
index = json.dumps({"weight_map": weight_map})
(FOLDER / "model.safetensors.index.json").write_text(index + "\n")

expected = []
with torch.no_grad():
    for text in TEXTS:
        tokens = tokenizer(text, return_tensors="pt")
        pooled = encoder(**tokens).last_hidden_state[0].mean(0)
        scores = torch.sigmoid(head["out"](torch.relu(head["dense"](pooled))))
        print(tokens.input_ids.shape[1], scores.tolist())
        expected.append({"text": text, "scores": scores.tolist()})
(FOLDER / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")
