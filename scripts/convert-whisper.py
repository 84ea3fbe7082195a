#!/usr/bin/env python3
"""Turns a Whisper model of CTranslate2 into a folder as the Hugging Face hub would hold it, with weights in f16.

Run with: python3 scripts/convert-whisper.py SOURCE FOLDER   (standard library only)

The folder SOURCE has model.bin, config.json and tokenizer.json of CTranslate2. Nothing of it is executed: model.bin is
a list of named arrays. The tensors get the names of transformers and keep their bits. Joint projections of queries,
keys and values are divided into three; the bias of the keys, which Whisper does not have, must be zero.

If SOURCE has model.safetensors, it is a folder of the hub already: its f32 weights, which OpenAI published in f16, are
written in f16, and the other files are copied. The same weights give the same bytes on both ways.
"""

import json
import pathlib
import shutil
import struct
import sys
from typing import NamedTuple

VERSION = 6
# By the numbers of types in model.bin.
TYPES = {0: ("F32", 4), 1: ("I8", 1), 2: ("I16", 2), 3: ("I32", 4), 4: ("F16", 2)}
POSITIONS = 1_500
# <|0.00|> to <|30.00|> in steps of 0.02 s; older tokenizer.json files do not list them.
TIMESTAMPS = 1_501
# The most timestamp tokens by which the first one of a window may be away from 0: 1 s.
MAX_INITIAL_TIMESTAMP = 50


class Array(NamedTuple):
    """A tensor: its type's name, its shape and its bytes row by row."""
    kind: str
    shape: tuple
    data: bytes

    def rows(self, first, last):
        """Some rows; a vector's rows are its numbers."""
        each = len(self.data) // self.shape[0]
        return Array(self.kind, (last - first, *self.shape[1:]), self.data[first * each:last * each])

    def parts(self, count):
        """The array cut into so many equal parts."""
        each = self.shape[0] // count
        return [self.rows(part * each, (part + 1) * each) for part in range(count)]


class Reader:
    """Reads model.bin from front to back."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def bytes(self, count):
        if count > len(self.data) - self.at:
            raise SystemExit("model.bin is cut off")
        self.at += count
        return self.data[self.at - count:self.at]

    def number(self, form):
        return struct.unpack("<" + form, self.bytes(struct.calcsize("<" + form)))[0]

    def text(self):
        return self.bytes(self.number("H")).rstrip(b"\0").decode()


def read_arrays(path):
    """The arrays of model.bin by their names."""
    reader = Reader(path.read_bytes())
    version, spec, _revision = reader.number("I"), reader.text(), reader.number("I")
    if version != VERSION or spec != "WhisperSpec":
        raise SystemExit(f"{path} is {spec} of version {version}, not WhisperSpec of version {VERSION}")
    arrays = {}
    for _ in range(reader.number("I")):
        name = reader.text()
        shape = tuple(reader.number("I") for _ in range(reader.number("B")))
        kind = reader.number("B")
        if kind not in TYPES:
            raise SystemExit(f"{name} has the unknown type {kind}")
        arrays[name] = Array(TYPES[kind][0], shape, reader.bytes(reader.number("I")))
    return arrays


class Converter:
    """Collects the tensors of transformers from the arrays."""

    def __init__(self, arrays):
        self.arrays, self.tensors = arrays, {}

    def put(self, name, array):
        if array.kind not in ("F16", "F32"):
            raise SystemExit(f"{name} is {array.kind}; only f16 and f32 are converted")
        self.tensors["model." + name] = array

    def take(self, name, source):
        self.put(name, self.arrays[source])

    def norm(self, name, source):
        self.take(f"{name}.weight", f"{source}/layer_norm/gamma")
        self.take(f"{name}.bias", f"{source}/layer_norm/beta")

    def linear(self, names, source):
        """One projection, or several that were joined."""
        for kind in ("weight", "bias"):
            for name, part in zip(names, self.arrays[f"{source}/{kind}"].parts(len(names))):
                if name.endswith("k_proj") and kind == "bias":
                    if any(part.data):
                        raise SystemExit(f"{source} has a bias of the keys, which Whisper does not have")
                    continue
                self.put(f"{name}.{kind}", part)

    def attention(self, name, source, is_across):
        parts = [f"{name}.{part}_proj" for part in "qkv"]
        if is_across:
            self.linear(parts[:1], f"{source}/linear_0")
            self.linear(parts[1:], f"{source}/linear_1")
            self.linear([f"{name}.out_proj"], f"{source}/linear_2")
        else:
            self.linear(parts, f"{source}/linear_0")
            self.linear([f"{name}.out_proj"], f"{source}/linear_1")
        self.norm(f"{name}_layer_norm", source)

    def layers(self, side):
        """Converts the layers of the encoder or the decoder. Returns their number."""
        count = 0
        while f"{side}/layer_{count}/ffn/linear_0/weight" in self.arrays:
            to, source = f"{side}.layers.{count}", f"{side}/layer_{count}"
            self.attention(f"{to}.self_attn", f"{source}/self_attention", False)
            if side == "decoder":
                self.attention(f"{to}.encoder_attn", f"{source}/attention", True)
            self.linear([f"{to}.fc1"], f"{source}/ffn/linear_0")
            self.linear([f"{to}.fc2"], f"{source}/ffn/linear_1")
            self.norm(f"{to}.final_layer_norm", f"{source}/ffn")
            count += 1
        self.norm(f"{side}.layer_norm", side)
        self.take(f"{side}.embed_positions.weight", f"{side}/position_encodings/encodings")
        return count

    def number(self, name):
        return struct.unpack("<h", self.arrays[name].data)[0]

    def config(self):
        """Converts all tensors. Returns config.json."""
        layers = {side: self.layers(side) for side in ("encoder", "decoder")}
        for convolution in ("conv1", "conv2"):
            for kind in ("weight", "bias"):
                self.take(f"encoder.{convolution}.{kind}", f"encoder/{convolution}/{kind}")
        self.take("decoder.embed_tokens.weight", "decoder/embeddings/weight")
        width, mels, _ = self.tensors["model.encoder.conv1.weight"].shape
        positions, _ = self.tensors["model.encoder.embed_positions.weight"].shape
        if positions != POSITIONS:
            raise SystemExit(f"the encoder has {positions} positions, not {POSITIONS}")
        context, _ = self.tensors["model.decoder.embed_positions.weight"].shape
        return {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "d_model": width,
            "num_mel_bins": mels,
            "encoder_layers": layers["encoder"],
            "decoder_layers": layers["decoder"],
            "encoder_attention_heads": self.number("encoder/num_heads"),
            "decoder_attention_heads": self.number("decoder/num_heads"),
            "encoder_ffn_dim": self.tensors["model.encoder.layers.0.fc1.weight"].shape[0],
            "decoder_ffn_dim": self.tensors["model.decoder.layers.0.fc1.weight"].shape[0],
            "max_source_positions": positions,
            "max_target_positions": context,
            "vocab_size": self.tensors["model.decoder.embed_tokens.weight"].shape[0],
            "activation_function": "gelu",
            "scale_embedding": False,
            "tie_word_embeddings": True,
            "torch_dtype": "float16",
        }


def generation_config(source, config, tokenizer):
    """The settings of decoding, whose special tokens are those of tokenizer.json."""
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    languages = {name: i for name, i in ids.items() if ids["<|startoftranscript|>"] < i < ids["<|translate|>"]}
    is_multilingual = config["vocab_size"] >= 51_865
    if ids["<|notimestamps|>"] + 1 + TIMESTAMPS > config["vocab_size"]:
        raise SystemExit("the vocabulary has no room for timestamps")
    settings = {
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "is_multilingual": is_multilingual,
        "alignment_heads": source["alignment_heads"],
        "suppress_tokens": source["suppress_ids"],
        "begin_suppress_tokens": source["suppress_ids_begin"],
        "max_initial_timestamp_index": MAX_INITIAL_TIMESTAMP,
        "max_length": config["max_target_positions"],
        "return_timestamps": False,
    }
    if is_multilingual:
        tasks = {"task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}}
        settings |= {"lang_to_id": languages} | tasks
    return settings


def write_safetensors(path, tensors):
    header, parts, end = {"__metadata__": {"format": "pt"}}, [], 0
    for name, array in sorted(tensors.items()):
        offsets = [end, end + len(array.data)]
        header[name] = {"dtype": array.kind, "shape": list(array.shape), "data_offsets": offsets}
        parts.append(array.data)
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def of_hub(path):
    """The tensors of a safetensors file in f16."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, start = json.loads(data[8:8 + length]), 8 + length
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        numbers = data[start + first:start + last]
        if entry["dtype"] == "F32":
            count = len(numbers) // 4
            numbers = struct.pack(f"<{count}e", *struct.unpack(f"<{count}f", numbers))
        elif entry["dtype"] != "F16":
            raise SystemExit(f"{name} is {entry['dtype']}; only f16 and f32 are converted")
        # The last layer is the token embeddings again.
        if name != "proj_out.weight":
            tensors[name] = Array("F16", tuple(entry["shape"]), numbers)
    return tensors


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main():
    if len(sys.argv) != 3:
        raise SystemExit("usage: convert-whisper.py SOURCE FOLDER")
    source, folder = map(pathlib.Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    if (source / "model.safetensors").exists():
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            shutil.copyfile(source / name, folder / name)
        write_safetensors(folder / "model.safetensors", of_hub(source / "model.safetensors"))
        return
    converter = Converter(read_arrays(source / "model.bin"))
    config = converter.config()
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    settings = generation_config(json.loads((source / "config.json").read_text()), config, tokenizer)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", settings)
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    # Last, as a folder with weights counts as whole.
    write_safetensors(folder / "model.safetensors", converter.tensors)


if __name__ == "__main__":
    main()
