"""transformers' `generate` with the weights of a GGUF file, which it turns into f32."""

from pathlib import Path


class Generator:
    """A model and its tokenizer."""

    def __init__(self, path, threads):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        folder, name = str(Path(path).parent), Path(path).name
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)

    def texts(self, prompts, tokens):
        """Greedy answers of exactly so many tokens."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        with self.torch.inference_mode():
            made = self.model.generate(
                **inputs, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False
            )
        return self.tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :])
