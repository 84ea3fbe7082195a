#!/usr/bin/env python3
"""Makes tests/fixtures/sound/voice.json: the probabilities of speech that silero-vad gives reading.flac, in chunks of
512 samples.

Run with: python scripts/make-voice-fixture.py silero_vad_16k_op15.onnx
Made with onnxruntime 1.32.0, soundfile 0.14.0, and the file that scripts/convert-silero-vad.py names.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import soundfile

CHUNK, EDGE = 512, 64
FOLDER = Path(__file__).parent.parent / "tests/fixtures/sound"


def main() -> None:
    session = onnxruntime.InferenceSession(sys.argv[1])
    sound, rate = soundfile.read(FOLDER / "reading.flac", dtype="float32")
    assert rate == 16_000
    sound = np.pad(sound, (EDGE, -len(sound) % CHUNK))
    state, probabilities = np.zeros((2, 1, 128), np.float32), []
    for at in range(0, len(sound) - EDGE, CHUNK):
        inputs = {"input": sound[None, at : at + EDGE + CHUNK], "state": state}
        if any(it.name == "sr" for it in session.get_inputs()):
            inputs["sr"] = np.array(rate, np.int64)
        probability, state = session.run(None, inputs)
        probabilities.append(round(float(probability[0, 0]), 6))
    (FOLDER / "voice.json").write_text(json.dumps(probabilities, separators=(",", ":")) + "\n")


main()
