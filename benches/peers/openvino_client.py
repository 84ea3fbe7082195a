"""OpenVINO in one process, with the network that ONNX Runtime has, in DTYPE (f32 or bf16)."""

import os

import openvino

from .asked import serve
from .onnx_runtime_client import embedder, exported


def session(file, threads, dtype):
    """As `onnx_runtime_client.session`."""
    config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": dtype}
    compiled = openvino.Core().compile_model(file, "CPU", config)
    return lambda ids, mask: compiled([ids, mask])[0]


if __name__ == "__main__":
    serve(embedder(os.environ["MODEL"], session(exported(), int(os.environ["THREADS"]), os.environ["DTYPE"])))
