"""CLIP of transformers in one process: vectors of the texts or images of requests for embeddings. Files are decoded by
Pillow. Batches of 16."""

import base64
import io
import os

import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from .asked import bodies, serve

BATCH = 16


def embedder(folder, threads):
    """The function from request bodies to vectors."""
    torch.set_num_threads(threads)
    model = CLIPModel.from_pretrained(folder).eval()
    processor = CLIPImageProcessorPil.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(model.config.text_config.max_position_embeddings)
    tokenizer.enable_padding(pad_id=model.config.text_config.eos_token_id)

    def image(body):
        file = base64.b64decode(body["input"]["image_url"]["url"].split(",", 1)[1])
        return Image.open(io.BytesIO(file)).convert("RGB")

    @torch.inference_mode()
    def embed(requests):
        found = []
        for start in range(0, len(requests), BATCH):
            batch = requests[start : start + BATCH]
            if isinstance(batch[0]["input"], str):
                encoded = tokenizer.encode_batch([body["input"] for body in batch])
                ids, mask = (torch.tensor([getattr(it, part) for it in encoded]) for part in ("ids", "attention_mask"))
                output = model.text_model(input_ids=ids, attention_mask=mask).pooler_output
                vectors = model.text_projection(output)
            else:
                pixels = processor([image(body) for body in batch], return_tensors="pt")["pixel_values"]
                vectors = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
            found.extend(torch.nn.functional.normalize(vectors).numpy())
        return found

    return embed


if __name__ == "__main__":
    serve(embedder(os.environ["MODEL"], int(os.environ["THREADS"])), bodies())
