#!/usr/bin/env python3
"""Makes tests/fixtures/tiny-blip: a small BLIP with seeded random weights, and the texts that transformers writes for
photographs in examples/images, for sconce to be held against.

Run with: python scripts/make-blip-fixture.py
Made with transformers 5.23.0, torch 2.15.0, tokenizers 0.23.2, pillow 13.0.0.
"""

import json
import pathlib

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BlipConfig, BlipForConditionalGeneration
from transformers.image_utils import load_image
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

ROOT = pathlib.Path(__file__).resolve().parent.parent
PHOTOS = ROOT / "examples" / "images"
FOLDER = ROOT / "tests" / "fixtures" / "tiny-blip"
CORPUS = [
    "a photograph of a cat asleep on a chair", "a rocket on its launch pad in the evening", "a cup of coffee and a spoon",
    "a red flower in a garden", "a palace behind a lake", "a photographer with a camera on a tripod",
] * 20
PROMPTS = ["", "a photograph of"]
TOKENS = 12

torch.manual_seed(20261126)
tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
tokenizer.decoder = decoders.WordPiece()
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", 2), ("[SEP]", 3)])
tokenizer.add_special_tokens(["[DEC]"])
start = tokenizer.token_to_id("[DEC]")

tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 16}
config = BlipConfig(
    text_config={**tower, "vocab_size": tokenizer.get_vocab_size(), "encoder_hidden_size": 48,
                 "max_position_embeddings": 64, "bos_token_id": start, "sep_token_id": 3, "eos_token_id": 3,
                 "pad_token_id": 0},
    vision_config={**tower, "hidden_size": 48, "image_size": 32, "patch_size": 8},
    projection_dim=16, image_text_hidden_size=16,
)
model = BlipForConditionalGeneration(config).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.4)
FOLDER.mkdir(parents=True, exist_ok=True)
model.save_pretrained(FOLDER)
(FOLDER / "generation_config.json").unlink(missing_ok=True)
(FOLDER / "model.safetensors").chmod(0o644)
tokenizer.save(str(FOLDER / "tokenizer.json"))
described = {
    "image_processor_type": "BlipImageProcessor", "do_convert_rgb": True, "do_resize": True,
    "size": {"height": 32, "width": 32}, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
(FOLDER / "preprocessor_config.json").write_text(json.dumps(described, indent=1) + "\n")

processor = BlipImageProcessorPil(**described)
rows = []
for path in sorted(path for path in PHOTOS.iterdir() if path.suffix in (".jpg", ".png", ".webp")):
    pixels = processor(load_image(str(path)), return_tensors="pt")["pixel_values"]
    for prompt in PROMPTS:
        ids = [start, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        with torch.no_grad():
            image = model.vision_model(pixel_values=pixels)[0]
            margins = []
            prompt_length = len(ids)
            while len(ids) < prompt_length + TOKENS:
                logits = model.text_decoder(input_ids=torch.tensor([ids]), encoder_hidden_states=image).logits[0, -1]
                best = logits.topk(2).values
                margins.append(float(best[0] - best[1]))
                ids.append(int(logits.argmax()))
                if ids[-1] == config.text_config.sep_token_id:
                    break
            # The library's own loop gives the same tokens.
            given = torch.tensor([ids[:prompt_length] + [0]])
            found = model.generate(pixel_values=pixels, input_ids=given, max_new_tokens=TOKENS, do_sample=False)[0].tolist()
            assert [id for id in found if id] == [id for id in ids if id], (found, ids)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        rows.append({"file": path.name, "prompt": prompt, "text": text, "tokens": len(ids) - prompt_length,
                     "least_margin": min(margins)})
(FOLDER / "expected.json").write_text(json.dumps({"max_new_tokens": TOKENS, "rows": rows}, indent=1) + "\n")
for row in rows:
    print(row)
