#!/usr/bin/env python3
"""Makes tests/fixtures/tiny-diffusion and tiny-diffusion-v: small Stable Diffusion pipelines with seeded random weights,
in the layouts of versions 1.5 and 2.1, and what diffusers and transformers compute with them, for sconce to be held
against: tokens, vectors of prompts, latents after each step, and images.

Run with: python scripts/make-diffusion-fixtures.py
Made with diffusers 0.42.1, transformers 5.23.0, torch 2.15.0, tokenizers 0.23.2.
"""

import json
import math
import pathlib
import shutil

import numpy
import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel, UniPCMultistepScheduler
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "tests" / "fixtures"
CORPUS = [
    "a photograph of a cat asleep on a chair", "a rocket on its launch pad in the evening", "a cup of coffee and a spoon",
    "a red flower in a garden", "a palace behind a lake, oil painting", "a photographer with a camera on a tripod",
] * 20
START, END = "<|startoftext|>", "<|endoftext|>"
MASK = 2**64 - 1


def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def noise(seed, count):
    """The noise that sconce draws for a seed: Box–Muller over its counter-based generator."""
    key = splitmix64(splitmix64(seed))
    uniform = lambda position: (splitmix64(key ^ position) >> 11) / 2.0**53
    numbers = []
    for position in range(0, count, 2):
        radius = math.sqrt(-2.0 * math.log(1.0 - uniform(position)))
        angle = 2.0 * math.pi * uniform(position + 1)
        numbers += [radius * math.cos(angle), radius * math.sin(angle)]
    return numpy.array(numbers[:count], dtype=numpy.float32)


def make_tokenizer(folder, pad):
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=620, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocabulary = tokenizer.get_vocab()
    for symbol in alphabet:
        vocabulary.setdefault(symbol + "</w>", len(vocabulary))
    vocabulary[START], vocabulary[END] = len(vocabulary), len(vocabulary) + 1
    folder.mkdir(parents=True)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": pad}
    (folder / "special_tokens_map.json").write_text(json.dumps(special) + "\n")
    described = {**special, "pad_token": END, "model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described) + "\n")
    return CLIPTokenizer(vocab=vocabulary, merges=[tuple(pair.split(" ")) for pair in pairs], **special), len(vocabulary)


def save(folder, model, name, prefix=""):
    """Saves weights in f16, and gives the model these rounded weights. `prefix` is put before the names of tensors."""
    model.eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.2 / math.sqrt(parameter[0].numel()))
    tensors = {key: value.half().contiguous() for key, value in model.state_dict().items() if value.is_floating_point()}
    model.load_state_dict({key: value.float() for key, value in tensors.items()}, strict=False)
    folder.mkdir(parents=True, exist_ok=True)
    # transformers has a method of the configuration for this, diffusers has one of the model.
    describe = getattr(model.config, "to_json_string", None) or model.to_json_string
    (folder / "config.json").write_text(json.dumps(json.loads(describe()), indent=1) + "\n")
    save_file({prefix + key: value for key, value in tensors.items()}, folder / name, metadata={"format": "pt"})
    (folder / name).chmod(0o644)


def make(name, seed, text, unet, prediction, pad, cases):
    torch.manual_seed(seed)
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer, vocabulary = make_tokenizer(folder / "tokenizer", pad)
    text_encoder = CLIPTextModel(CLIPTextConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_attention_heads=4, max_position_embeddings=77,
        bos_token_id=vocabulary - 2, eos_token_id=vocabulary - 1, pad_token_id=1, projection_dim=32, **text))
    # Published files have the names of older versions of transformers.
    save(folder / "text_encoder", text_encoder, "model.safetensors", "text_model." if name == "tiny-diffusion" else "")
    network = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
        cross_attention_dim=32, norm_num_groups=32, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **unet)
    save(folder / "unet", network, "diffusion_pytorch_model.safetensors")
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 8, 16, 16), layers_per_block=1,
        norm_num_groups=8, sample_size=64, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, scaling_factor=0.18215)
    save(folder / "vae", vae, "diffusion_pytorch_model.safetensors")
    (folder / "scheduler").mkdir()
    described = {
        "_class_name": "PNDMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
        "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1,
        "trained_betas": None, "clip_sample": False, "prediction_type": prediction,
    }
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(described, indent=1) + "\n")
    index = {
        "_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1",
        "feature_extractor": [None, None], "safety_checker": [None, None], "requires_safety_checker": False,
        "scheduler": ["diffusers", "PNDMScheduler"], "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"], "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")

    def encode(prompt):
        ids = tokenizer(prompt, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        return ids[0].tolist(), text_encoder(ids)[0]

    rows = []
    with torch.no_grad():
        for case in cases:
            ids, wanted = encode(case["prompt"])
            _, unwanted = encode(case["negative_prompt"])
            kind = DDIMScheduler if case["scheduler"] == "ddim" else UniPCMultistepScheduler
            scheduler = kind.from_config({key: value for key, value in described.items() if key != "_class_name"})
            scheduler.set_timesteps(case["steps"])
            height, width = case["height"] // 8, case["width"] // 8
            latents = torch.from_numpy(noise(case["seed"], 4 * height * width)).reshape(1, 4, height, width)
            after = []
            for timestep in scheduler.timesteps:
                given = scheduler.scale_model_input(latents, timestep)
                found = network(given, timestep, encoder_hidden_states=wanted).sample
                if case["guidance_scale"] > 1:
                    without = network(given, timestep, encoder_hidden_states=unwanted).sample
                    found = without + case["guidance_scale"] * (found - without)
                latents = scheduler.step(found, timestep, latents).prev_sample
                after.append([round(float(number), 6) for number in latents.flatten()])
            image = vae.decode(latents / vae.config.scaling_factor).sample
            pixels = ((image / 2 + 0.5).clamp(0, 1) * 255).round()[0].permute(1, 2, 0)
            rows.append({
                **case, "ids": ids, "timesteps": scheduler.timesteps.tolist(),
                "vector": [round(float(number), 6) for number in wanted[0, 3]],
                "latents": after, "pixels": pixels.flatten().int().tolist(),
            })
            print(name, case["scheduler"], "latents", latents.std().item(), "pixels", pixels.mean().item(), pixels.std().item(), ids[:12])
    (folder / "expected.json").write_text(json.dumps(rows) + "\n")


CASES = [
    {"prompt": "A cat, asleep on its CHAIR", "negative_prompt": "", "scheduler": "ddim", "steps": 4, "guidance_scale": 4.0,
     "height": 40, "width": 56, "seed": 7},
    {"prompt": "a palace behind  a lake: oil painting, it's 1999 — naïve", "negative_prompt": "a rocket",
     "scheduler": "unipc", "steps": 5, "guidance_scale": 3.0, "height": 48, "width": 32, "seed": 8},
    {"prompt": "coffee " * 90, "negative_prompt": "", "scheduler": "unipc", "steps": 1, "guidance_scale": 1.0, "height": 32,
     "width": 32, "seed": 9},
]
make("tiny-diffusion", 20261127, {"num_hidden_layers": 2, "hidden_act": "quick_gelu"},
     {"attention_head_dim": 8}, "epsilon", END, CASES)
make("tiny-diffusion-v", 20261128, {"num_hidden_layers": 2, "hidden_act": "gelu"},
     {"attention_head_dim": (4, 8), "use_linear_projection": True}, "v_prediction", "!", CASES[:2])
