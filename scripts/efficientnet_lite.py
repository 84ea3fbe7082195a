"""EfficientNet-Lite in PyTorch: what fixtures are made by, and what `make bench` compares with."""

import json
import math

from safetensors.torch import load_file
from torch.nn import functional


class EfficientNetLite:
    """EfficientNet-Lite as its config.json describes it, in f32; the tensors by their published names."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")

    def convolve(self, x, name, stride=1):
        """A convolution with "same" padding: what is over on an odd count goes right and below."""
        weight = self.tensors[f"{name}.weight"]
        kernel, pads = weight.shape[-1], []
        for length in (x.shape[3], x.shape[2]):
            total = max((math.ceil(length / stride) - 1) * stride + kernel - length, 0)
            pads += [total // 2, total - total // 2]
        groups = x.shape[1] // weight.shape[1]
        return functional.conv2d(functional.pad(x, pads), weight, None, stride, groups=groups)

    def norm(self, x, name):
        mean, variance, weight, bias = (
            self.tensors[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return functional.batch_norm(x, mean, variance, weight, bias, eps=self.config["batch_norm_eps"])

    def block(self, x, name, stride, expanded):
        """A mobile inverted bottleneck; the input is added where the shapes agree."""
        y = x
        if expanded:
            y = functional.relu6(self.norm(self.convolve(y, f"{name}._expand_conv"), f"{name}._bn0"))
        y = functional.relu6(self.norm(self.convolve(y, f"{name}._depthwise_conv", stride), f"{name}._bn1"))
        y = self.norm(self.convolve(y, f"{name}._project_conv"), f"{name}._bn2")
        return x + y if y.shape == x.shape else y

    def logits(self, x):
        config, number = self.config, 0
        x = functional.relu6(self.norm(self.convolve(x, "_conv_stem", 2), "_bn0"))
        for repeats, stride, ratio in zip(
                config["num_block_repeats"], config["strides"], config["expand_ratios"]):
            for repeat in range(repeats):
                x = self.block(x, f"_blocks.{number}", stride if repeat == 0 else 1, ratio != 1)
                number += 1
        x = functional.relu6(self.norm(self.convolve(x, "_conv_head"), "_bn1"))
        return functional.linear(x.mean((2, 3)), self.tensors["_fc.weight"], self.tensors["_fc.bias"])
