"""Speech by hibari-tts, in several voices. A voice is loaded when it is first asked for, and kept in a cache.

    sconce launch --set 'pool[0].model=python:./speaker.py:Speaker'

Each worker has a process, and so a cache of its own. It needs no lock, because `forward` runs on one thread. Needs
`pip install hibari-tts`, which contains the voice heart. The other voices come from the hub.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from importlib.resources import files
from typing import Any

from hibari import Hibari, write_wav

from sconce_model import Body, Input, Model, Task, TaskError


class Speaker(Model):
    urls = ("/v1/audio/speech",)

    class Options:
        voice: str = "heart"
        """The voice of tasks that name none."""
        kept_voices: int = 4

    def load(self, device: str, dtype: str, options: Options) -> None:
        if device != "cpu":
            raise ValueError(f"hibari-tts computes on CPUs; the pool has the device {device}")
        self.known = json.loads((files("hibari") / "assets/voices.json").read_text())
        self.default, self.kept_voices = options.voice, options.kept_voices
        self.voices: OrderedDict[str, Any] = OrderedDict()
        self.voice(self.default)

    def voice(self, name: str) -> Any:
        """The voice from the cache. If a new one finds the cache full, the least recently used one is removed."""
        if name not in self.voices:
            while len(self.voices) >= self.kept_voices:
                self.voices.popitem(last=False)
            self.voices[name] = Hibari(name)
        self.voices.move_to_end(name)
        return self.voices[name]

    def preprocess(self, task: Task) -> list[Input]:
        text, voice = task.field("input"), task.field("voice", self.default)
        if not isinstance(text, str) or not text.strip():
            raise TaskError(400, "input must be a text", "input")
        if not isinstance(voice, str) or voice not in self.known:
            raise TaskError(400, f"voice is {voice!r}; there are {', '.join(self.known)}", "voice")
        # One input for each sentence, so that a long text does not hold up short ones.
        return [Input((voice, it), tokens=len(it)) for it in Hibari.split_sentences(text)]

    def forward(self, batch: list[Input]) -> Any:
        return [self.voice(voice)(sentence, seed=0) for voice, sentence in (it.value for it in batch)]

    def finish(self, task: Task, outputs: list[Any]) -> Any:
        import numpy

        file = io.BytesIO()
        write_wav(file, numpy.concatenate(outputs))
        return Body(file.getvalue(), "audio/wav")
