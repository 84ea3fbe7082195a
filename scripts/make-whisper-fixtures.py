#!/usr/bin/env python3
"""Makes tests/fixtures/whisper-random and whisper-tiny.en: what transformers recognises, for sconce to be held against.

Run with: python scripts/make-whisper-fixtures.py   (scripts/fetch-whisper and scripts/fetch-recordings must have run)
Made with transformers 5.24.0, tokenizers 0.23.3, torch 2.15.0, soundfile 0.14.0.

- whisper-random/: a small multilingual model of 128 mel bins with seeded random weights in f16, and its expected files.
- whisper-tiny.en/: the same expected files for the real tiny.en.

numbers.safetensors has, for the first sound, the encoder's output at some "positions" ("encoded"), and the logits of
some "ids" after the first token of the decoder ("logits"). expected.json has for each sound, by its path,

- "cases": the tokens with which the decoder begins ("initial"), and those that follow it by OpenAI's rules ("tokens"),
  with their text, the mean of their logarithmic probabilities, and the probability of "no speech"; of whisper-random,
  for several languages, tasks and prompts;
- "language", of whisper-random: the probabilities of all languages.

The rules are written here a second time, after OpenAI's decoding.py. Tokens of tiny.en are also compared with those of
transformers' own generate. Everything is float32 on the CPU, each sound alone, and the likeliest token is always
likelier than the next by GAP at least.
"""

import json
import pathlib
import re
import sys

import numpy as np
import soundfile
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
RATE = 16_000
GAP = 1e-3
# By which the first timestamp may be away from 0, in tokens of 0.02 s.
MAX_INITIAL = 50
SOUNDS = ["tests/fixtures/sound/reading.flac", "tests/fixtures/sound/short.flac"]
RECORDINGS = [f"models/recordings/librivox-{name}.wav" for name in ("0870", "0880", "0890", "0920", "0930")]
RECORDINGS += [f"models/recordings/cards-00{number}.wav" for number in range(1, 6)]

TEXTS = [
    "the family of Dashwood had long been settled in Sussex", "their estate was large",
    "and their residence was at Norland Park", "in the centre of their property", "a message queue",
]
LANGUAGES = ["en", "de", "ja"]
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>",
           "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]


def samples(path):
    found, rate = soundfile.read(ROOT / path, dtype="float32")
    assert rate == RATE and len(found) <= 30 * RATE
    return found


class Reference:
    """A model of transformers with its special tokens."""

    def __init__(self, folder):
        self.model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = json.loads((folder / "generation_config.json").read_text())
        self.suppressed, self.suppressed_first = settings["suppress_tokens"], settings["begin_suppress_tokens"]
        config = self.model.config
        self.extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
        self.context = config.max_target_positions
        self.most = self.context // 2
        self.ids = {name: self.tokenizer.token_to_id(name) for name in self.tokenizer.get_vocab()}
        self.end = self.ids["<|endoftext|>"]
        self.first_time = self.ids["<|notimestamps|>"] + 1
        self.no_speech = self.ids.get("<|nospeech|>", self.ids.get("<|nocaptions|>"))

    def features(self, sound):
        return self.extractor(sound, sampling_rate=RATE, return_tensors="pt")["input_features"]

    def encode(self, sound):
        return self.model.model.encoder(self.features(sound)).last_hidden_state

    def logits(self, encoded, ids, cache=None):
        """The logits after each of the ids, which follow those in the cache."""
        out = self.model(decoder_input_ids=torch.tensor([ids]), encoder_outputs=(encoded,), past_key_values=cache)
        return out.logits[0], out.past_key_values

    def allowed(self, logits, answer):
        """The logits without the tokens that OpenAI's rules forbid after `answer`."""
        logits = logits.clone()
        logits[self.suppressed] = -torch.inf
        logits[self.first_time - 1] = -torch.inf
        if not answer:
            logits[self.suppressed_first] = -torch.inf
            logits[:self.first_time] = -torch.inf
            logits[self.first_time + MAX_INITIAL + 1:] = -torch.inf
            return logits
        is_time = [token >= self.first_time for token in answer]
        is_open = is_time[-1] and len(answer) > 1 and not is_time[-2]
        if is_open:
            logits[:self.end] = -torch.inf
        elif is_time[-1]:
            logits[self.first_time:] = -torch.inf
        last = [token for token in answer if token >= self.first_time][-1]
        logits[self.first_time:last + (0 if is_open else 1)] = -torch.inf
        return logits

    def choose(self, raw, answer):
        """The next token, its logarithmic probability, and by how much the choice was clear."""
        logits = self.allowed(raw, answer)
        times, texts = logits[self.first_time:].logsumexp(0), logits[:self.first_time].max()
        gap = abs((times - texts).item())
        if times > texts:
            logits[:self.first_time] = -torch.inf
        best = logits.topk(2)
        token = best.indices[0].item()
        gap = min(gap, (best.values[0] - best.values[1]).item())
        return token, logits.log_softmax(0)[token].item(), gap

    @torch.inference_mode()
    def decode(self, encoded, initial):
        """What follows `initial`, and by how much the closest choice was clear."""
        answer, total, gap = [], 0.0, float("inf")
        start = initial.index(self.ids["<|startoftranscript|>"])
        logits, cache = self.logits(encoded, initial)
        no_speech = logits[start].softmax(0)[self.no_speech].item()
        while len(answer) < min(self.most, self.context - len(initial)):
            token, logprob, clear = self.choose(logits[-1], answer)
            answer.append(token)
            total, gap = total + logprob, min(gap, clear)
            if token == self.end:
                break
            logits, cache = self.logits(encoded, [token], cache)
        tokens = [token for token in answer if token != self.end]
        text = self.tokenizer.decode([token for token in tokens if token < self.end])
        return {"initial": initial, "tokens": tokens, "text": text,
                "avg_logprob": round(total / (len(tokens) + 1), 6), "no_speech_prob": round(no_speech, 6)}, gap

    @torch.inference_mode()
    def numbers(self, sound, ids):
        """Numbers of the encoder and of the first step."""
        encoded = self.encode(sound)
        positions = sorted({*range(4), *range(0, 1_500, 61), *range(1_496, 1_500)})
        logits = self.logits(encoded, [self.ids["<|startoftranscript|>"]])[0][0]
        return {
            "positions": np.array(positions, dtype="int32"),
            "encoded": np.ascontiguousarray(encoded[0, positions].numpy()),
            "ids": np.array(ids, dtype="int32"),
            "logits": np.ascontiguousarray(logits[ids].numpy()),
        }


def tokenizer():
    """Bytes, a few merges, and Whisper's special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return made


def random_model(folder, seed):
    """Writes the model of this seed."""
    made = tokenizer()
    ids = {name: made.token_to_id(name) for name in made.get_vocab()}
    first_time = ids["<|notimestamps|>"] + 1
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=first_time + 1_501, num_mel_bins=128, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=1_500, max_target_positions=64, init_std=0.2, decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|endoftext|>"], pad_token_id=ids["<|endoftext|>"],
        suppress_tokens=None, begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # New biases are zero and new norms one, which would hide a mistake.
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "layer_norm" in name:
                parameter.normal_(1.0, 0.1)
            # Otherwise times would have all of the probability.
            elif name == "model.decoder.embed_tokens.weight":
                parameter[first_time:] *= 0.5
    tensors = {name: tensor.to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    tensors.pop("proj_out.weight", None)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", {key: value for key, value in config.to_dict().items() if value is not None})
    made.save(str(folder / "tokenizer.json"))
    suppressed = [ids[name] for name in ("!", "#", "<|startoftranscript|>", "<|translate|>", "<|transcribe|>",
                                         "<|startoflm|>", "<|startofprev|>", "<|nospeech|>")]
    write_json(folder / "generation_config.json", {
        "is_multilingual": True, "suppress_tokens": suppressed,
        "begin_suppress_tokens": [ids["Ġ"], ids["<|endoftext|>"]],
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"], "max_initial_timestamp_index": MAX_INITIAL,
    })


def initial_tokens(reference, language, task, prompt):
    ids = [reference.ids[name] for name in ("<|startoftranscript|>", f"<|{language}|>", f"<|{task}|>")]
    if prompt:
        words = reference.tokenizer.encode(" " + prompt, add_special_tokens=False).ids
        ids = [reference.ids["<|startofprev|>"], *words[-(reference.most - 1):], *ids]
    return ids


@torch.inference_mode()
def languages(reference, encoded):
    ids = [reference.ids[f"<|{code}|>"] for code in LANGUAGES]
    shares = reference.logits(encoded, [reference.ids["<|startoftranscript|>"]])[0][0][ids].softmax(0)
    return {code: round(share, 6) for code, share in zip(LANGUAGES, shares.tolist())}


def of_random():
    folder = FIXTURES / "whisper-random"
    for seed in range(1_000):
        random_model(folder, seed)
        reference, expected, least, lengths = Reference(folder), {}, float("inf"), set()
        for path in SOUNDS:
            with torch.inference_mode():
                encoded = reference.encode(samples(path))
            cases = []
            shares = languages(reference, encoded)
            detected = max(shares, key=shares.get)
            best = sorted(shares.values())
            least = min(least, best[-1] - best[-2])
            for language, task, prompt in [(detected, "transcribe", ""), ("de", "transcribe", ""), ("ja", "translate", ""),
                                           ("en", "transcribe", TEXTS[0]), ("de", "translate", " ".join(TEXTS))]:
                case, gap = reference.decode(encoded, initial_tokens(reference, language, task, prompt))
                cases.append({"language": language, "task": task, "prompt": prompt, **case})
                least = min(least, gap)
                lengths.add(len(case["tokens"]))
                if least < GAP:
                    break
            expected[path] = {"language": shares, "cases": cases}
            if least < GAP:
                break
        detected = {max(it["language"], key=it["language"].get) for it in expected.values()}
        if least >= GAP and len(lengths) > 1:
            print(f"whisper-random: seed {seed}, gap {least:.4f}, lengths {lengths}, languages {detected}")
            break
    write_json(folder / "expected.json", expected)
    ids = list(range(reference.model.config.vocab_size))
    save_file(reference.numbers(samples(SOUNDS[0]), ids), folder / "numbers.safetensors")


@torch.inference_mode()
def generated(reference, sound):
    """The tokens of transformers' own generate. It goes on after the last timestamp, as with a long recording."""
    settings = {"return_timestamps": True, "num_beams": 1, "do_sample": False}
    ids = reference.model.generate(reference.features(sound), **settings)[0].tolist()
    return [token for token in ids if token < reference.end or token >= reference.first_time]


def of_tiny_en():
    reference, expected, least = Reference(ROOT / "models" / "whisper-tiny.en"), {}, float("inf")
    # In the first sound, two times are nearly as likely.
    for path in SOUNDS[1:] + RECORDINGS:
        sound = samples(path)
        with torch.inference_mode():
            encoded = reference.encode(sound)
        case, gap = reference.decode(encoded, [reference.ids["<|startoftranscript|>"]])
        print(f"{path}: gap {gap:.4f}, {case['avg_logprob']}, {case['text']}")
        theirs = generated(reference, sound)
        assert case["tokens"] == theirs[:len(case["tokens"])], (case["tokens"], theirs)
        least = min(least, gap)
        expected[path] = {"cases": [case]}
    assert least >= GAP, least
    folder = FIXTURES / "whisper-tiny.en"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "expected.json", expected)
    with torch.inference_mode():
        encoded = reference.encode(samples(SOUNDS[0]))
        logits = reference.logits(encoded, [reference.ids["<|startoftranscript|>"]])[0][0]
    ids = sorted({*logits.topk(50).indices.tolist(), *range(0, len(logits), 61)})
    save_file(reference.numbers(samples(SOUNDS[0]), ids), folder / "numbers.safetensors")


def write_json(path, value):
    """Writes lists of numbers on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s*(-?\d+(?:,\s*-?\d+)*)\s*\]", lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", text)
    path.write_text(text + "\n", encoding="utf-8")


def main():
    torch.set_num_threads(2)
    for make in sys.argv[1:] or ["random", "tiny_en"]:
        {"random": of_random, "tiny_en": of_tiny_en}[make]()


if __name__ == "__main__":
    main()
