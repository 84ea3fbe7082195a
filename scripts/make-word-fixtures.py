#!/usr/bin/env python3
"""Writes tests/fixtures/whisper-tiny.en/words.json: when each word of real recordings was said, by OpenAI's own program.

Needs `pip install torch openai-whisper safetensors`, scripts/fetch-whisper and scripts/fetch-recordings. Made with
openai-whisper 20250625 and torch 2.8.0.
"""

import json
import wave
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from safetensors.torch import load_file
from whisper import transcribe
from whisper.model import ModelDimensions, Whisper

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "models/whisper-tiny.en"
NAMES = {
    "model.": "",
    "layers": "blocks",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn": "cross_attn",
    "self_attn": "attn",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "decoder.layer_norm": "decoder.ln",
    "encoder.layer_norm": "encoder.ln_post",
    "embed_tokens": "token_embedding",
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
}
"""Parts of transformers' names of tensors, and OpenAI's, in the order in which they are replaced."""


def load():
    """The model in OpenAI's program."""
    config, tensors = SimpleNamespace(**json.loads((FOLDER / "config.json").read_text())), {}
    for name, tensor in load_file(FOLDER / "model.safetensors").items():
        for part, other in NAMES.items():
            name = name.replace(part, other)
        tensors[name] = tensor.float()
    sizes = ModelDimensions(
        n_mels=config.num_mel_bins,
        n_audio_ctx=config.max_source_positions,
        n_audio_state=config.d_model,
        n_audio_head=config.encoder_attention_heads,
        n_audio_layer=config.encoder_layers,
        n_vocab=config.vocab_size,
        n_text_ctx=config.max_target_positions,
        n_text_state=config.d_model,
        n_text_head=config.decoder_attention_heads,
        n_text_layer=config.decoder_layers,
    )
    model = Whisper(sizes)
    model.load_state_dict(tensors)
    heads = torch.zeros(sizes.n_text_layer, sizes.n_text_head, dtype=torch.bool)
    for layer, head in json.loads((FOLDER / "generation_config.json").read_text())["alignment_heads"]:
        heads[layer, head] = True
    model.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return model.eval()


def main():
    model, found = load(), {}
    for path in sorted((ROOT / "models/recordings").glob("librivox-*.wav")):
        with wave.open(str(path)) as file:
            assert file.getframerate() == 16000 and file.getnchannels() == 1
            samples = numpy.frombuffer(file.readframes(file.getnframes()), numpy.int16)
        result = transcribe(model, samples.astype(numpy.float32) / 32768, temperature=0.0, word_timestamps=True, fp16=False)
        words = [word for segment in result["segments"] for word in segment["words"]]
        found[str(path.relative_to(ROOT))] = [
            [word["word"].strip(), round(float(word["start"]), 2), round(float(word["end"]), 2)] for word in words
        ]
    lines = [f"{json.dumps(name)}: {json.dumps(words)}" for name, words in found.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (ROOT / "tests/fixtures/whisper-tiny.en/words.json").write_text(text)


if __name__ == "__main__":
    main()
