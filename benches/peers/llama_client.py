"""llama.cpp in one process, by its own batches: `one`, `many` and `prompts` are answered with tokens a second.

Greedy, without an end: each answer has TOKENS tokens. `many` keeps SEQUENCES sequences in each `llama_batch`, and a
new one takes the place of one that ends, as a server of continuous batches does.
"""

import json
import os
import sys
import time

import llama_cpp as llama
import numpy

from .asked import say

CONTEXT = 1024
"""Tokens of a sequence, prompt and answer."""


class Model:
    """A model with a context for SEQUENCES sequences."""

    def __init__(self, path, threads, sequences):
        llama.llama_backend_init()
        options = llama.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(path.encode(), options)
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = CONTEXT * sequences, 512, sequences
        options.n_threads = options.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, options)
        self.memory = llama.llama_get_memory(self.context)
        self.vocabulary = llama.llama_model_get_vocab(self.model)
        self.words = llama.llama_vocab_n_tokens(self.vocabulary)
        self.batch = llama.llama_batch_init(512, 0, 1)

    def tokens(self, text):
        """The ids of a text."""
        data = text.encode()
        ids = (llama.llama_token * (len(data) + 8))()
        count = llama.llama_tokenize(self.vocabulary, data, len(data), ids, len(ids), False, False)
        return list(ids[:count])

    def decode(self, rows):
        """One step of rows (token, place, sequence, whether its next token is wanted). The next tokens, in order."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for at, (token, place, sequence, is_wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, place, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, is_wanted
        if llama.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama_decode failed")
        found = []
        for at, (*_, is_wanted) in enumerate(rows):
            if is_wanted:
                logits = llama.llama_get_logits_ith(self.context, at)
                found.append(int(numpy.ctypeslib.as_array(logits, (self.words,)).argmax()))
        return found

    def forget(self, sequence):
        """Frees a sequence's keys and values."""
        llama.llama_memory_seq_rm(self.memory, sequence, -1, -1)


def generate(model, prompts, sequences, tokens):
    """Answers all prompts, so many at once. Returns the tokens of the answers."""
    waiting, running, made = list(reversed(prompts)), {}, 0
    while waiting or running:
        for sequence in range(sequences):
            if sequence not in running and waiting:
                running[sequence] = {"left": waiting.pop(), "place": 0, "made": 0}
        rows, owners = [], []
        for sequence, it in running.items():
            take = it["left"][: max(0, 512 - len(rows))]
            it["left"] = it["left"][len(take) :]
            for at, token in enumerate(take):
                is_last = at == len(take) - 1 and not it["left"]
                rows.append((token, it["place"], sequence, is_last))
                it["place"] += 1
                if is_last:
                    owners.append(sequence)
        for sequence, token in zip(owners, model.decode(rows), strict=True):
            it = running[sequence]
            it["made"] += 1
            made += 1
            it["left"] = [token]
            if it["made"] == tokens:
                model.forget(sequence)
                del running[sequence]
    return made


def main():
    """Answers the questions on stdin."""
    sequences, tokens = int(os.environ["SEQUENCES"]), int(os.environ["TOKENS"])
    model = Model(os.environ["MODEL"], int(os.environ["THREADS"]), sequences)
    with open(os.environ["TEXTS_FILE"], encoding="utf-8") as file:
        prompts = [model.tokens(json.loads(line)["body"]["prompt"]) for line in file]
    with open(os.environ["LONG_FILE"], encoding="utf-8") as file:
        long = [model.tokens(json.loads(line)["body"]["prompt"]) for line in file]
    generate(model, prompts[:2], 1, 8)
    say({"ready": True})
    for line in sys.stdin:
        start = time.perf_counter()
        match line.strip():
            case "one":
                made = generate(model, prompts[: len(prompts) // 4], 1, tokens)
            case "many":
                made = generate(model, prompts, sequences, tokens)
            case "prompts":
                generate(model, long, 1, 1)
                made = sum(map(len, long))
        say({"tokens_per_second": made / (time.perf_counter() - start)})


if __name__ == "__main__":
    main()
