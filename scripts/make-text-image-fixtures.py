#!/usr/bin/env python3
"""Makes the fixtures of models for texts and images: small CLIP and SigLIP models with seeded random weights, and what
transformers computes with them, for sconce to be held against.

Run with: python scripts/make-text-image-fixtures.py
Made with transformers 5.23.0, torch 2.15.0, tokenizers 0.23.2, pillow 13.0.0.

tests/fixtures/tiny-clip, tiny-siglip: the model as transformers saves it, and expected.json: vectors (of length 1) of
texts and of the photographs in examples/images, and the scores of labels for each photograph.
"""

import json
import pathlib

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

ROOT = pathlib.Path(__file__).resolve().parent.parent
PHOTOS = ROOT / "examples" / "images"
TEXTS = [
    "a photo of a cat",
    "A rocket, on its launch pad!",
    "",
    "coffee in a cup; a spoon beside it",
    "a very long description of a photograph of a flower in a garden " * 4,
]
LABELS = ["cat", "rocket", "cup of coffee", "flower"]
TEMPLATE = "This is a photo of {}."
CORPUS = [*TEXTS, *LABELS, TEMPLATE, "palace photographer garden launch pad cup spoon description long very"] * 20
EXACT = ["rocket.png"]
"""Of the photographs, those that every decoder decodes to the same pixels."""


def clip_tokenizer(size):
    """A byte-level tokenizer with the parts of CLIP's own. The token that ends a text has the largest id."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 2, end_of_word_suffix="</w>", initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    written = json.loads(tokenizer.to_str())
    vocabulary = written["model"]["vocab"]
    special = ["<|startoftext|>", "<|endoftext|>"]
    vocabulary.update({token: len(vocabulary) + number for number, token in enumerate(special)})
    written["model"]["unk_token"] = "<|endoftext|>"
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.add_special_tokens(special)
    start, end = (tokenizer.token_to_id(token) for token in special)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("<|endoftext|>", end), ("<|startoftext|>", start), trim_offsets=False, add_prefix_space=False
    )
    return tokenizer


def siglip_tokenizer(size):
    """A unigram tokenizer with the parts of SigLIP's own."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[[:punct:]]"), ""), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    return tokenizer


def ids_of(tokenizer, texts, length, pad=None):
    """The ids of each text, cut to the model's length; filled up with `pad` if there is one."""
    tokenizer.enable_truncation(length)
    rows = [tokenizer.encode(text).ids for text in texts]
    tokenizer.no_truncation()
    return rows if pad is None else [row + [pad] * (length - len(row)) for row in rows]


def photographs():
    return sorted(path for path in PHOTOS.iterdir() if path.suffix in (".jpg", ".png", ".webp"))


def save(folder, model, tokenizer, described, tokenizer_config):
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps(described, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1) + "\n")


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True)


@torch.no_grad()
def expected(folder, model, rows, processor):
    """Writes what the model computes. `rows` gives the ids of texts."""
    def text_vectors(texts):
        outputs = [model.text_model(input_ids=torch.tensor([row])).pooler_output for row in rows(texts)]
        pooled = torch.cat(outputs)
        return unit(model.text_projection(pooled) if hasattr(model, "text_projection") else pooled)

    files = photographs()
    images = torch.cat([processor(load_image(str(path)), return_tensors="pt")["pixel_values"] for path in files])
    pooled = model.vision_model(pixel_values=images).pooler_output
    vectors = unit(model.visual_projection(pooled) if hasattr(model, "visual_projection") else pooled)
    labels = text_vectors([TEMPLATE.format(label) for label in LABELS])
    scores = vectors @ labels.T * model.logit_scale.exp()
    if hasattr(model, "logit_bias"):
        scores = torch.sigmoid(scores + model.logit_bias)
    else:
        scores = scores.softmax(-1)
    found = {
        "texts": [{"text": text, "vector": row} for text, row in zip(TEXTS, text_vectors(TEXTS).tolist())],
        "images": [
            {"file": path.name, "exact": path.name in EXACT, "vector": vector, "scores": of_labels}
            for path, vector, of_labels in zip(files, vectors.tolist(), scores.tolist())
        ],
        "labels": LABELS,
    }
    (folder / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def clip():
    torch.manual_seed(20261126)
    tokenizer = clip_tokenizer(420)
    vocabulary = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id("<|endoftext|>")
    assert end == vocabulary - 1
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": vocabulary, "max_position_embeddings": 24, "eos_token_id": end,
                     "bos_token_id": end - 1, "pad_token_id": end},
        vision_config={**tower, "hidden_size": 48, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    model = CLIPModel(config).eval()
    # The library's own initial weights are so small that all inputs would have nearly the same vector.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    described = {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True, "do_resize": True,
        "size": {"shortest_edge": 32}, "resample": 3, "do_center_crop": True,
        "crop_size": {"height": 32, "width": 32}, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    folder = ROOT / "tests/fixtures/tiny-clip"
    processor = CLIPImageProcessorPil(**described)
    save(folder, model, tokenizer, described, {"pad_token": "<|endoftext|>", "model_max_length": 24})
    expected(folder, model, lambda texts: ids_of(tokenizer, texts, 24), processor)


def siglip():
    torch.manual_seed(20261127)
    tokenizer = siglip_tokenizer(160)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = SiglipConfig(
        text_config={**tower, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 16,
                     "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
    )
    model = SiglipModel(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    torch.nn.init.constant_(model.logit_scale, 2.0)
    torch.nn.init.constant_(model.logit_bias, -1.5)
    described = {
        "image_processor_type": "SiglipImageProcessor", "do_convert_rgb": None, "do_resize": True,
        "size": {"height": 32, "width": 32}, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }
    folder = ROOT / "tests/fixtures/tiny-siglip"
    processor = SiglipImageProcessorPil(**described)
    save(folder, model, tokenizer, described, {"pad_token": "<pad>", "model_max_length": 16})
    expected(folder, model, lambda texts: ids_of(tokenizer, texts, 16, pad=0), processor)


if __name__ == "__main__":
    clip()
    siglip()
