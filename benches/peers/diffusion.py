"""Seconds a step of image generation, beside diffusers: `python -m peers.diffusion`. Prints a table.

Both run the same denoising network of random weights and the same scheduler, in f32, with a thread for each of CORES (see
`scene.pin`): the fixture of the tests, and one of the sizes of Stable Diffusion 1.5. A step with guidance calls the network
for two prompts. sconce runs the whole pipeline, diffusers only the network and the scheduler. A step's time is the difference between a long
and a short run, divided by the difference of their steps, so that loading and decoding do not count.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from . import sconce
from .scene import FOLDER, SEED, pin, say

FIXTURE = Path("tests/fixtures/tiny-diffusion")
LARGE = FOLDER / "diffusion"
CASES = (("the fixture, 64 × 64 pixels", FIXTURE, 64, (50, 550)), ("the sizes of version 1.5, 256 × 256 pixels", LARGE, 256, (1, 6)))


def make_large():
    """A pipeline of the sizes of Stable Diffusion 1.5 with random weights, and the tokenizer of the fixture."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(SEED)
    shutil.copytree(FIXTURE, LARGE, ignore=shutil.ignore_patterns("unet", "vae", "text_encoder", "expected.json"))
    UNet2DConditionModel(cross_attention_dim=768, sample_size=64).save_pretrained(LARGE / "unet")
    AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    ).save_pretrained(LARGE / "vae")
    ids = json.loads((FIXTURE / "text_encoder/config.json").read_text())
    named = {name: ids[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12, **named)).save_pretrained(
        LARGE / "text_encoder"
    )


def ours(model, side, counts, cores):
    """Seconds a step of sconce: a worker with all cores, by `run-batch`, one image after the other."""
    # The first run reads the weights from the disk, the others find them in the page cache.
    _, *seconds = [run_batch(model, side, steps, cores) for steps in (counts[0], *counts)]
    return (seconds[1] - seconds[0]) / (counts[1] - counts[0])


def run_batch(model, side, steps, cores):
    """Seconds until an image is written."""
    rows, found = FOLDER / "images.jsonl", FOLDER / "images.out.jsonl"
    body = {"prompt": "a candle in a sconce", "steps": steps, "size": f"{side}x{side}", "seed": 7}
    rows.write_text(json.dumps({"custom_id": "0", "url": "/v1/images/generations", "body": body}) + "\n", encoding="utf-8")
    for old in FOLDER.glob(f"{found.name}*"):
        old.unlink()
    settings = (f"model={model}", 'devices=["cpu"]', f"threads={len(cores)}", "options.max_steps=1000")
    given = [part for setting in settings for part in ("--set", f"pool[0].{setting}")]
    begun = time.perf_counter()
    command = [sconce.PROGRAM, "run-batch", *given, "--input", rows, "--output", found]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - begun
    answer = json.loads(found.read_text())
    assert answer["response"]["status_code"] == 200, answer
    return seconds


def theirs(model, side, counts, cores):
    """Seconds a step of diffusers, in a process of its own."""
    script = [sys.executable, "-m", "peers.diffusion", "step", str(model), str(side), *map(str, counts), str(len(cores))]
    return float(subprocess.run(script, check=True, capture_output=True, text=True).stdout.split()[-1])


def step(model, side, few, many, threads):
    """Prints the seconds of a step."""
    import torch
    from diffusers import UniPCMultistepScheduler, UNet2DConditionModel

    torch.set_num_threads(threads)
    network = UNet2DConditionModel.from_pretrained(Path(model) / "unet").eval()
    prompts = torch.randn(2, 77, network.config.cross_attention_dim)

    def run(steps):
        scheduler = UniPCMultistepScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
        scheduler.set_timesteps(steps)
        latents = torch.randn(1, 4, side // 8, side // 8)
        begun = time.perf_counter()
        with torch.no_grad():
            for timestep in scheduler.timesteps:
                without, wanted = network(torch.cat([latents] * 2), timestep, encoder_hidden_states=prompts).sample.chunk(2)
                latents = scheduler.step(without + 7.5 * (wanted - without), timestep, latents).prev_sample
        return time.perf_counter() - begun

    run(1)
    shorter, longer = run(few), run(many)
    print((longer - shorter) / (many - few))


def main():
    """Measures in turns, and prints."""
    rounds = int(os.environ.get("ROUNDS") or 3)
    cores, _, _ = pin()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (LARGE / "vae").exists():
        shutil.rmtree(LARGE, ignore_errors=True)
        make_large()
    print("| seconds a step | sconce | diffusers |\n|---|---|---|")
    for name, model, side, counts in CASES:
        found = []
        for number in range(rounds):
            say(f"{name}, round {number + 1} of {rounds}")
            found.append((ours(model, side, counts, cores), theirs(model, side, counts, cores)))
        mine, others = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"| {name} | {mine:.3g} | {others:.3g} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        _, _, model_folder, *numbers = sys.argv
        step(model_folder, *map(int, numbers))
    else:
        main()
