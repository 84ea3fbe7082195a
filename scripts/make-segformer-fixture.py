#!/usr/bin/env python3
"""Makes tests/fixtures/tiny-segformer, for examples/segformer: a small SegFormer with seeded random weights, an image of
the size that the example computes, and the probabilities of the labels that transformers finds for it.

Run with: python scripts/make-segformer-fixture.py
Made with transformers 5.23.0, torch 2.15.0, pillow 13.0.0.
"""

import json
import pathlib

import numpy as np
import torch
from PIL import Image
from transformers import SegformerConfig, SegformerForImageClassification

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "tiny-segformer"
SIDE = 224
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])

torch.manual_seed(20261126)
config = SegformerConfig(
    hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 3, 4], depths=[1, 1, 1, 1], mlp_ratios=[2, 2, 2, 2],
    decoder_hidden_size=32, id2label={number: f"label {number}" for number in range(4)},
)
model = SegformerForImageClassification(config).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.3)
FOLDER.mkdir(parents=True, exist_ok=True)
model.save_pretrained(FOLDER)

rows, columns = np.mgrid[0:SIDE, 0:SIDE]
waves = [np.sin(columns / 40) * np.cos(rows / 60), np.sin((columns + rows) / 70), np.cos(rows / 30)]
image = np.stack([np.round((wave + 1) * 7) * 17 for wave in waves], -1).astype(np.uint8)
Image.fromarray(image).save(FOLDER / "image.png", optimize=True)
pixels = ((image / 255 - MEAN) / DEVIATION).transpose(2, 0, 1)[None].astype(np.float32)
with torch.no_grad():
    scores = model(pixel_values=torch.from_numpy(pixels)).logits[0].softmax(-1).tolist()
print("probabilities:", scores)
(FOLDER / "expected.json").write_text(json.dumps(scores) + "\n")
