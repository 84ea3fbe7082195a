"""EfficientNet-Lite0 in one process, by PyTorch or ONNX Runtime (BACKEND); files are decoded and resized by Pillow.

The network is exported to ONNX once, into the folder that ONNX_FILE is in. Batches of 8, which is where both are
fastest on a few cores.
"""

import base64
import io
import os
import sys
from pathlib import Path

import numpy
import torch
from PIL import Image

from .asked import bodies, serve

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from efficientnet_lite import EfficientNetLite  # noqa: E402

BATCH = 8
EDGE, SIDE = 256, 224
MEAN, DEVIATION = 127 / 255, 128 / 255


def pixels(body):
    """[3, height, width] of one request's image, as torchvision-style inference prepares it."""
    image = Image.open(io.BytesIO(base64.b64decode(body["image_url"].split(",", 1)[1]))).convert("RGB")
    scale = EDGE / min(image.size)
    image = image.resize([int(side * scale) for side in image.size], Image.BICUBIC)
    left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
    image = numpy.asarray(image.crop((left, top, left + SIDE, top + SIDE)), dtype=numpy.float32)
    return ((image / 255 - MEAN) / DEVIATION).transpose(2, 0, 1).astype(numpy.float32)


class Net(torch.nn.Module):
    """The network as a module, for the exporter."""

    def __init__(self, folder):
        super().__init__()
        self.net = EfficientNetLite(Path(folder))
        for name, tensor in self.net.tensors.items():
            self.register_buffer(name.replace(".", "_"), tensor)

    def forward(self, x):
        return self.net.logits(x)


def network(backend, folder, threads):
    """The function from a batch to the labels' numbers."""
    torch.set_num_threads(threads)
    net = Net(folder).eval()
    if backend == "torch":

        def by_torch(x):
            with torch.inference_mode():
                return net(torch.from_numpy(x)).numpy()

        return by_torch
    import onnxruntime

    target = Path(os.environ["ONNX_FILE"])
    if not target.exists():
        part = target.with_suffix(".part")
        example = (torch.zeros(1, 3, SIDE, SIDE),)
        axes = {"x": {0: "images"}, "y": {0: "images"}}
        names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": axes}
        torch.onnx.export(net, example, str(part), dynamo=False, opset_version=17, **names)
        part.rename(target)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(target), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(["y"], {"x": x})[0]


def classifier(backend, folder, threads):
    """The function from requests to the labels' numbers."""
    compute = network(backend, folder, threads)

    def classify(requests):
        found = []
        for start in range(0, len(requests), BATCH):
            found.extend(compute(numpy.stack([pixels(it) for it in requests[start : start + BATCH]])))
        return found

    return classify


if __name__ == "__main__":
    serve(classifier(os.environ["BACKEND"], os.environ["MODEL"], int(os.environ["THREADS"])), bodies())
