#!/usr/bin/env python3
"""Makes the sound fixtures: what transformers, silero-vad and other decoders make of a recording.

Run with: python scripts/make-sound-fixtures.py   (scripts/fetch-recordings must have run; ffmpeg, lame, oggenc and
opusenc must be there)
Made with numpy 2.4.6, soundfile 0.14.0, transformers 5.24.0, torch 2.15.0, silero-vad 6.2.3, onnxruntime 1.32.0,
lame 3.100, vorbis-tools 1.4.2, opus-tools 0.2, ffmpeg 5.1.9.

Of tests/fixtures/sound:
- reading.flac: five sentences of a LibriVox reading (public domain) with pauses of faint noise between, 28.7 s, 16 kHz.
- short.*: its third sentence in every format; short.mp3 and short.ogg in stereo at 44.1 kHz, the right channel at half
  the loudness; short-mono.mp3 does not say where it ends; cut.mp3 was cut out of a stream: its first packets refer to bits that are not there.
- features.safetensors: some frames of Whisper's features of the reading, 80 and 128 mel bins, by transformers.
- silero.json: probabilities of speech in the reading by silero-vad's ONNX network, and its own speech timestamps with
  several parameters, of the reading and of probabilities that are drawn by `drawn` below.
"""

import json
import pathlib
import subprocess
import tempfile

import numpy as np
import soundfile
import torch
from safetensors.numpy import save_file
from silero_vad import load_silero_vad
from silero_vad.utils_vad import get_speech_timestamps
from transformers import WhisperFeatureExtractor

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORDINGS = ROOT / "models" / "recordings"
FIXTURES = ROOT / "tests" / "fixtures" / "sound"
SENTENCES = ["0870", "0880", "0890", "0920", "0930"]
RATE = 16_000
HOP = 512

PARAMETERS = [
    {"threshold": 0.5, "min_speech_duration_ms": 250, "min_silence_duration_ms": 100, "speech_pad_ms": 30},
    {"threshold": 0.5, "min_speech_duration_ms": 100, "min_silence_duration_ms": 160, "speech_pad_ms": 400},
    {"threshold": 0.3, "min_speech_duration_ms": 0, "min_silence_duration_ms": 2000, "speech_pad_ms": 0},
    {"threshold": 0.55, "min_speech_duration_ms": 500, "min_silence_duration_ms": 400, "speech_pad_ms": 1000},
]


def run(*command):
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def reading():
    """The sentences, the places where they begin, and the samples between."""
    random = np.random.default_rng(35)
    parts, places = [], []
    for name in SENTENCES:
        samples, rate = soundfile.read(RECORDINGS / f"librivox-{name}.wav", dtype="int16")
        assert rate == RATE
        # Noise of one or two steps, as a quiet recording has.
        parts.append(random.integers(-2, 3, int(0.8 * RATE)).astype("int16"))
        places.append(sum(map(len, parts)))
        parts.append(samples)
    return np.concatenate(parts), places


def short_files(samples):
    with tempfile.TemporaryDirectory() as folder:
        wav, stereo = pathlib.Path(folder) / "short.wav", pathlib.Path(folder) / "stereo.wav"
        soundfile.write(wav, samples, RATE, subtype="PCM_16")
        soundfile.write(FIXTURES / "short.flac", samples, RATE, subtype="PCM_16")
        run("ffmpeg", "-y", "-i", wav, "-af", "pan=stereo|c0=c0|c1=0.5*c0,aresample=44100", stereo)
        run("lame", "--quiet", "-b", "96", "--resample", "44.1", "--add-id3v2", "--tt", "short", stereo, FIXTURES / "short.mp3")
        # Mono, without a Xing header, which would say where it ends.
        run("ffmpeg", "-y", "-i", wav, "-ar", "44100", "-ac", "1", stereo.with_name("mono.wav"))
        run("lame", "--quiet", "-t", "-b", "32", "--resample", "44.1", "-m", "m", stereo.with_name("mono.wav"),
            FIXTURES / "short-mono.mp3")
        run("oggenc", "-Q", "-q", "3", "-s", "1", stereo, "-o", FIXTURES / "short.ogg")
        run("opusenc", "--quiet", "--bitrate", "12", wav, FIXTURES / "short.opus")
        # Without the Xing header and the first packets, to whose bits the others refer.
        run("lame", "--quiet", "-t", "--cbr", "-b", "32", wav, pathlib.Path(folder) / "plain.mp3")
        data = (pathlib.Path(folder) / "plain.mp3").read_bytes()
        start = data.index(data[:2], 1_000)
        (FIXTURES / "cut.mp3").write_bytes(data[start:])


def features(samples):
    """Frames at both ends, at the end of the sound, and some between."""
    frames = sorted({*range(8), *range(2_992, 3_000), *range(2_860, 2_880), *range(0, 3_000, 37)})
    tensors = {"frames": np.array(frames, dtype="int32")}
    for mels in (80, 128):
        extractor = WhisperFeatureExtractor(feature_size=mels)
        found = extractor(samples / 32_768.0, sampling_rate=RATE, return_tensors="np")["input_features"][0]
        assert found.shape == (mels, 3_000)
        tensors[f"mels{mels}"] = np.ascontiguousarray(found[:, frames], dtype="float32")
        # A whole window of sound, so that its end is mirrored.
        window = np.resize(samples, 30 * RATE) / 32_768.0
        found = extractor(window, sampling_rate=RATE, return_tensors="np")["input_features"][0]
        tensors[f"whole{mels}"] = np.ascontiguousarray(found[:, frames], dtype="float32")
    save_file(tensors, FIXTURES / "features.safetensors")


class Given:
    """Stands for a network: gives probabilities that are known."""

    def __init__(self, probabilities):
        self.probabilities = probabilities

    def reset_states(self):
        self.next = iter(self.probabilities)

    def __call__(self, window, rate):
        return torch.tensor([next(self.next)])


def drawn(seed, count):
    """Probabilities of speech with pauses: it changes between both every few windows. The tests draw them again."""
    state, level, left, found = seed, 0, 0, []
    for _ in range(count):
        if left == 0:
            state = (state * 1_664_525 + 1_013_904_223) % 2**32
            level, left = 1 - level, 1 + (state >> 24) % (200 if level == 0 else 16)
        left -= 1
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        found.append((0.6 if level else 0.0) + 0.39 * (state >> 8) / 2**24)
    return found


def timestamps(probabilities, samples, parameters):
    found = get_speech_timestamps(torch.zeros(samples), Given(probabilities), sampling_rate=RATE,
                                  max_speech_duration_s=30, **parameters)
    return [[speech["start"], speech["end"]] for speech in found]


def silero(samples):
    model = load_silero_vad(onnx=True)
    wave = torch.from_numpy(samples / 32_768.0).float()
    probabilities = [round(float(p), 6) for p in model.audio_forward(wave[None], RATE)[0]]
    cases = []
    for parameters in PARAMETERS:
        cases.append({"parameters": parameters, "reading": timestamps(probabilities, len(samples), parameters)})
        for seed in range(1, 4):
            count = 6_000
            found = timestamps(drawn(seed, count), count * HOP - 100, parameters)
            cases[-1][f"drawn{seed}"] = found
    text = json.dumps({"probabilities": probabilities, "cases": cases}, separators=(",", ":"))
    (FIXTURES / "silero.json").write_text(text + "\n")


def main():
    FIXTURES.mkdir(parents=True, exist_ok=True)
    samples, places = reading()
    soundfile.write(FIXTURES / "reading.flac", samples, RATE, subtype="PCM_16")
    lengths = [len(soundfile.read(RECORDINGS / f"librivox-{name}.wav")[0]) for name in SENTENCES]
    short_files(samples[places[2]:places[2] + lengths[2]])
    features(samples)
    silero(samples)
    said = [(RECORDINGS / f"librivox-{name}.txt").read_text().strip() for name in SENTENCES]
    sentences = [{"start": place, "end": place + length, "text": text}
                 for place, length, text in zip(places, lengths, said)]
    (FIXTURES / "reading.json").write_text(json.dumps(sentences, indent=1) + "\n")


if __name__ == "__main__":
    main()
