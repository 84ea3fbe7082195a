"""A convolutional network of PyTorch that reads handwritten digits: trained here, then served.

    python digits.py train digits.pt      # takes some seconds, with 1,797 scanned digits that scikit-learn contains
    sconce launch --set 'pool[0].model=python:./digits.py:Digits' --set 'pool[0].options.weights="digits.pt"'

A task is an image of one dark digit on light paper: the bytes of a PNG, JPEG or WebP file, with `content_type` image/….
Needs `pip install torch pillow`, and scikit-learn for the training.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import torch
from PIL import Image, ImageOps

from sconce_model import Input, Model, Task, TaskError

SIDE = 8
MAX_PIXELS = 1 << 22
"""Of an image that is decoded. Larger ones are refused, since a small file can hold a giant image."""


def network() -> Any:
    layers = torch.nn
    return layers.Sequential(
        layers.Conv2d(1, 32, 3, padding=1),
        layers.ReLU(),
        layers.Conv2d(32, 64, 3, padding=1),
        layers.ReLU(),
        layers.MaxPool2d(2),
        layers.Flatten(),
        layers.Linear(64 * (SIDE // 2) ** 2, 10),
    )


class Digits(Model):
    urls = ("/classify",)
    media_types = ("image/*",)

    class Options:
        weights: str
        top_k: int = 3

    def load(self, device: str, dtype: str, options: Options) -> None:
        self.device, self.dtype, self.top_k = device, getattr(torch, dtype), options.top_k
        self.network = network()
        self.network.load_state_dict(torch.load(options.weights, map_location="cpu", weights_only=True))
        self.network.to(device, self.dtype).eval()

    def preprocess(self, task: Task) -> list[Input]:
        try:
            image = Image.open(io.BytesIO(task.body))
            if image.width * image.height > MAX_PIXELS:
                raise TaskError(413, f"{image.width} × {image.height} pixels are more than {MAX_PIXELS}")
            grey = ImageOps.invert(image.convert("L")).resize((SIDE, SIDE), Image.Resampling.BOX)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise TaskError(400, f"the image cannot be read ({type(error).__name__})") from None
        return [Input(torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).view(1, SIDE, SIDE))]

    def forward(self, batch: list[Input]) -> Any:
        images = torch.stack([it.value for it in batch]).to(self.device, self.dtype) / 255
        with torch.inference_mode():
            return self.network(images).float().softmax(-1).cpu()

    def finish(self, task: Task, outputs: list[Any]) -> Any:
        scores, labels = outputs[0].topk(self.top_k)
        return [{"label": str(label), "score": score} for label, score in zip(labels.tolist(), scores.tolist())]


def train(file: str) -> None:
    """Trains the network, writes its weights, and prints how many of the digits that it was not trained with it reads correctly."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, labels = (torch.from_numpy(it) for it in load_digits(return_X_y=True))
    images, shuffled = images.float().view(-1, 1, SIDE, SIDE) / 16, torch.randperm(len(labels))
    training, held_out = shuffled[:1500], shuffled[1500:]
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(15):
        for batch in training[torch.randperm(len(training))].split(50):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    accuracy = (model(images[held_out]).argmax(-1) == labels[held_out]).float().mean()
    torch.save(model.state_dict(), file)
    print(f"{file}: {accuracy:.1%} of {len(held_out)} other digits are read correctly")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "train":
        sys.exit("usage: digits.py train FILE")
    train(sys.argv[2])
