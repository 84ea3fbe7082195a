#!/usr/bin/env python3
"""Makes the fixtures of speech synthesis: what hibari's network and signal processing give for some phonemes.

Run with: python scripts/make-hibari-fixtures.py   (scripts/fetch-hibari must have run)
Made with numpy 2.4.6, scipy 1.17.1, onnx 1.23.2, onnxruntime 1.32.0, hibari-tts 0.2.1.

The published network computes in 8 bits, with one scale for all activations of a product, so that its results differ
by several percent from those of exact arithmetic. The reference here is the same graph with f32 products of the same
weights, computed by onnxruntime. Waveforms are made by the package's own `dsp.py`, with the noise of sconce's generator,
which `noise` below states once more.

Of tests/fixtures:
- hibari/expected.safetensors: with the real weights, for each of PHONEMES: durations, F0, a sample of the spectra, and
  the waveform in 16 bits.
- tiny-hibari/: a random network of the same architecture with two voices, and for each voice what it gives.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from safetensors.numpy import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "hibari"
FIXTURES = ROOT / "tests" / "fixtures"
PHONEMES = {
    "hello": ("həlˈO ðˈɛɹ.", 1.0),
    "fox": ("ðə kwˈɪk bɹˈWn fˈɑks ʤˈʌmps ˌOvəɹ ðə lˈAzi dˈɔɡ, ænd ɹˈʌnz əwˈA.", 1.0),
    "slow": ("jˈɛs.", 0.5),
}
SEED = 7
# Every SPECTRUM_STEP-th number of a spectrum is kept, row by row.
SPECTRUM_STEP = 97


def mixed(x):
    """The output function of SplitMix64, as in src/model/sequences/sampler.rs."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def noise(seed, sentence, frames, bins):
    """Complex numbers `[frames, bins]` whose parts are normally distributed, by Box and Muller."""
    key = mixed(mixed(np.array(seed, np.uint64)) ^ np.uint64(sentence))
    frame = mixed(key ^ np.arange(frames, dtype=np.uint64))[:, None]
    bits = mixed(frame ^ np.arange(bins, dtype=np.uint64)[None, :])
    radius = np.sqrt(-2.0 * np.log(((bits >> np.uint64(40)) + np.uint64(1)) / 2.0**24))
    angle = 2.0 * np.pi * ((bits & np.uint64(0xFFFFFF)) / 2.0**24)
    return radius * np.cos(angle) + 1j * radius * np.sin(angle)


def gelu(x):
    from scipy.special import erf
    return 0.5 * x * (1.0 + erf(x / np.sqrt(2.0)))


class Network:
    """The architecture in NumPy and f64, on rows `[time, channels]`."""

    def __init__(self, weights, config):
        self.weights = {name: value.astype(np.float64) for name, value in weights.items()}
        self.config = config

    def linear(self, x, name):
        return x @ self.weights[name + ".weight"].squeeze(-1 if self.weights[name + ".weight"].ndim == 3 else ()).T \
            + self.weights[name + ".bias"]

    def norm(self, x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * self.weights[name + ".weight"] + self.weights[name + ".bias"]

    def convolution(self, x, name, dilation=1):
        weight, bias = self.weights[name + ".weight"], self.weights[name + ".bias"]
        taps = weight.shape[2]
        half = taps // 2 * dilation
        padded = np.pad(x, ((half, half), (0, 0)))
        out = np.zeros((len(x), weight.shape[0])) + bias
        for tap in range(taps):
            rows = padded[tap * dilation: tap * dilation + len(x)]
            is_depthwise = weight.shape[1] == 1 and x.shape[1] != 1
            out += rows * weight[:, 0, tap] if is_depthwise else rows @ weight[:, :, tap].T
        return out

    def block(self, x, name, dilation=1):
        y = self.norm(self.convolution(x, name + ".dw", dilation), name + ".norm")
        y = self.linear(gelu(self.linear(y, name + ".pw1")), name + ".pw2")
        return x + self.weights[name + ".gamma"] * y

    def attention(self, x, name, heads):
        width = x.shape[1]
        qkv = x @ self.weights[name + ".in_proj_weight"].T + self.weights[name + ".in_proj_bias"]
        q, k, v = (part.reshape(len(x), heads, -1).transpose(1, 0, 2) for part in np.split(qkv, 3, axis=1))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(width // heads)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        context = (scores / scores.sum(-1, keepdims=True)) @ v
        return self.linear(context.transpose(1, 0, 2).reshape(len(x), width), name + ".out_proj")

    def text(self, ids, prefix, sizes):
        x = self.weights[prefix + ".emb.weight"][ids]
        for block in range(sizes["convolutions"]):
            x = self.block(x, f"{prefix}.convs.{block}")
        attn = prefix + ".attn"
        # One layer, applied several times.
        for _ in range(sizes["layers"]):
            x = x + self.attention(self.norm(x, attn + ".norm1"), attn + ".self_attn", sizes["heads"])
            x = x + self.linear(gelu(self.linear(self.norm(x, attn + ".norm2"), attn + ".linear1")), attn + ".linear2")
        return self.norm(x, prefix + ".norm")

    def __call__(self, ids, speed):
        """Durations in half frames, F0 in Hz `[frames]`, and the five spectra `[frames, 5, bins]`."""
        config = self.config
        text = self.text(ids, "m.text", config["text"])
        prosody = self.text(ids, "pn.text", config["prosody"])
        rates = self.linear(gelu(self.convolution(prosody, "pn.dur.0")), "pn.dur.2")[:, 0]
        durations = np.maximum(np.round((np.exp(rates) - 1.0) / speed), 1.0).astype(int)
        tokens = np.repeat(np.arange(len(ids)), durations)
        x = self.linear(prosody[tokens], "pn.pro_in")
        for block, dilation in enumerate(config["prosody"]["dilations"]):
            x = self.block(x, f"pn.pro.{block}", dilation)
        # Two numbers of each kind for each row: one for each of its two frames.
        out = self.linear(x, "pn.pro_out").reshape(-1, 2, 2)
        f0, energy = out[:, 0].reshape(-1) * 100.0, out[:, 1].reshape(-1) * 5.0
        features = [np.repeat(text[tokens], 2, axis=0), np.log(1.0 + np.maximum(f0, 0.0))[:, None] / 5.0,
                    energy[:, None] / 5.0]
        x = self.convolution(np.concatenate(features, axis=1), "m.dec_in")
        for block in range(config["decoder"]["blocks"]):
            x = self.block(x, f"m.dec.{block}")
        spectra = self.linear(self.norm(x, "m.dec_norm"), "m.head")
        return durations, f0, spectra.reshape(len(x), 5, -1)


def exact(path, to):
    """Writes the ONNX network `path` to `to`, with f32 products in the place of those of 8 bits."""
    model = onnx.load(path)
    graph = model.graph
    arrays = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    source, nodes, made = {}, [], {}
    for node in graph.node:
        if node.op_type == "DynamicQuantizeLinear":
            source[node.output[0]] = node.input[0]
        elif node.op_type == "MatMulInteger":
            name = node.input[1]
            made[name] = arrays[name].astype(np.float32) * arrays[name.removesuffix("_quantized") + "_scale"]
            nodes.append(helper.make_node("MatMul", [source[node.input[0]], name + "_f32"], [node.output[0]]))
        elif node.output[0].endswith("_quant_scales_mul:0"):
            pass
        elif any(name.endswith("_quant_scales_mul:0") for name in node.input):
            nodes.append(helper.make_node("Identity", [node.input[0]], [node.output[0]]))
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(numpy_helper.from_array(value, name + "_f32") for name, value in made.items())
    onnx.save(model, to)


def waveform(spectra, f0, config, seed, sentence):
    """The package's synthesis of the network's results, with this noise."""
    from hibari import dsp
    hop = config["hop"]
    dsp.HOP, dsp.N_FFT = hop, 4 * hop
    dsp.WIN = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(4 * hop) / (4 * hop))).astype(np.float32)
    dsp.WIN_SRC = dsp.WIN / hop
    dsp._ola_norm.cache_clear()
    dsp._interp_w.cache_clear()
    drawn = noise(seed, sentence, len(f0), spectra.shape[2]).T

    class Drawn:
        def standard_normal(self, shape, dtype):
            assert shape == (drawn.shape[0], 2 * drawn.shape[1])
            return np.ascontiguousarray(drawn.astype(np.complex64)).view(np.float32)

    parts = [np.ascontiguousarray(part.T.astype(np.float32)) for part in spectra.transpose(1, 0, 2)]
    return dsp.synth(*parts, f0.astype(np.float32), Drawn())


def expected(name, durations, f0, spectra, sound):
    return {
        f"{name}.durations": np.asarray(durations, np.int32),
        f"{name}.f0": f0.astype(np.float32),
        f"{name}.spectra": spectra.reshape(-1)[::SPECTRUM_STEP].astype(np.float32),
        f"{name}.sound": np.round(np.clip(sound, -1.0, 1.0) * 32767.0).astype(np.int16),
    }


def real(package):
    config = json.loads((MODEL / "config.json").read_text())
    network = Network(load_file(MODEL / "heart.safetensors"), config)
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        exact(package / "assets" / "hibari.onnx", file.name)
        options = onnxruntime.SessionOptions()
        # Warnings name every 8-bit array, which is no longer used.
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(file.name, options, providers=["CPUExecutionProvider"])
    kept = {}
    for name, (phonemes, speed) in PHONEMES.items():
        ids = np.array([0, *(config["vocabulary"][c] for c in phonemes), 0])
        durations, f0, spectra = network(ids, speed)
        out = session.run(None, {"ids": ids[None], "speed": np.array([speed], np.float32)})
        theirs = np.stack([part[0].T for part in out[:5]], axis=1)
        assert theirs.shape == spectra.shape, (theirs.shape, spectra.shape)
        print(name, "of", len(f0), "frames is off by", abs(theirs - spectra).max(), abs(out[5][0] - f0).max())
        assert abs(theirs - spectra).max() < 1e-3
        assert abs(out[5][0] - f0).max() < 5e-2
        f0 = out[5][0]
        kept |= expected(name, durations, f0, theirs, waveform(theirs, f0, config, SEED, 0))
    (FIXTURES / "hibari").mkdir(exist_ok=True)
    save_file(kept, FIXTURES / "hibari" / "expected.safetensors")


def tiny():
    """A random network with small sizes. Its head is biased so that its spectra are those of a quiet sound."""
    random = np.random.default_rng(11)
    hop, symbols = 30, 40
    sizes = {
        "model_type": "hibari", "sample_rate": 24_000, "hop": hop, "symbols": symbols,
        "text": {"width": 16, "inner": 32, "convolutions": 1, "layers": 2, "heads": 2},
        "prosody": {"width": 16, "inner": 24, "convolutions": 2, "layers": 3, "heads": 2, "dilations": [1, 4]},
        "decoder": {"width": 24, "inner": 40, "blocks": 2},
    }
    bins = 2 * hop + 1

    def voice():
        weights = {}

        def put(name, *shape, scale=None):
            scale = scale or 1.0 / np.sqrt(np.prod(shape[1:]) or 1.0)
            weights[name] = (random.standard_normal(shape) * scale).astype(np.float32)

        def linear(name, depth, width, *taps):
            put(name + ".weight", width, depth, *taps)
            put(name + ".bias", width, scale=0.1)

        def norm(name, width):
            put(name + ".weight", width, scale=0.2)
            weights[name + ".weight"] += 1.0
            put(name + ".bias", width, scale=0.2)

        def block(name, width, inner, taps):
            linear(name + ".dw", 1, width, taps)
            norm(name + ".norm", width)
            linear(name + ".pw1", width, inner)
            linear(name + ".pw2", inner, width)
            put(name + ".gamma", width, scale=0.5)

        def text(prefix, sizes):
            width, inner = sizes["width"], sizes["inner"]
            put(prefix + ".emb.weight", symbols, width, scale=1.0)
            for number in range(sizes["convolutions"]):
                block(f"{prefix}.convs.{number}", width, inner, 5)
            attn = prefix + ".attn"
            norm(attn + ".norm1", width)
            norm(attn + ".norm2", width)
            put(attn + ".self_attn.in_proj_weight", 3 * width, width)
            put(attn + ".self_attn.in_proj_bias", 3 * width, scale=0.2)
            linear(attn + ".self_attn.out_proj", width, width)
            linear(attn + ".linear1", width, inner)
            linear(attn + ".linear2", inner, width)
            norm(prefix + ".norm", width)

        text("m.text", sizes["text"])
        text("pn.text", sizes["prosody"])
        prosody, decoder = sizes["prosody"]["width"], sizes["decoder"]["width"]
        linear("pn.dur.0", prosody, prosody, 3)
        linear("pn.dur.2", prosody, 1, 1)
        weights["pn.dur.2.bias"][:] = 1.6
        linear("pn.pro_in", prosody, prosody, 1)
        for number in range(len(sizes["prosody"]["dilations"])):
            block(f"pn.pro.{number}", prosody, sizes["prosody"]["inner"], 7)
        linear("pn.pro_out", prosody, 4, 1)
        weights["pn.pro_out.bias"][:2] = 1.5
        linear("m.dec_in", sizes["text"]["width"] + 2, decoder, 7)
        for number in range(sizes["decoder"]["blocks"]):
            block(f"m.dec.{number}", decoder, sizes["decoder"]["inner"], 7)
        norm("m.dec_norm", decoder)
        linear("m.head", decoder, 5 * bins)
        weights["m.head.bias"] += np.repeat([-3.0, 0.0, -4.0, -4.0, 0.0], bins).astype(np.float32)
        return weights

    folder = FIXTURES / "tiny-hibari"
    folder.mkdir(exist_ok=True)
    vocabulary = {symbol: id + 1 for id, symbol in enumerate(".,?!;: ˈˌaeiouəɛɪʊʌæɑɔbdfɡhklmnpɹstvwz")}
    assert max(vocabulary.values()) < symbols
    voices = [{"id": "one", "name": "One", "language": "en-US"}, {"id": "two", "name": "Two", "language": "en-GB"}]
    config = {**sizes, "voices": voices, "vocabulary": vocabulary}
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    kept = {}
    for each in voices:
        weights = voice()
        save_file(weights, folder / f"{each['id']}.safetensors")
        ids = np.array([0, *(vocabulary[c] for c in "həlˈo, wˈʌn?"), 0])
        durations, f0, spectra = Network(weights, sizes)(ids, 1.0)
        kept |= expected(each["id"], durations, f0, spectra, waveform(spectra, f0, sizes, SEED, 3))
    save_file(kept, folder / "expected.safetensors")


def main():
    import hibari
    package = pathlib.Path(hibari.__file__).parent
    real(package)
    tiny()


if __name__ == "__main__":
    sys.exit(main())
