#!/usr/bin/env python3
"""Makes the image fixtures: what Pillow and transformers make of an image, for sconce to be held against.

Run with: python scripts/make-image-fixtures.py   (models/efficientnet-lite0 must be there)
Made with pillow 13.0.0, transformers 5.23.0, torch 2.15.0, scikit-image 0.26.0, scikit-learn 1.9.1.

- examples/images/*: photographs for the examples; whose they are stands in the README beside them.
- tests/fixtures/images/*: one small file of each kind; expected/*: its pixels, upright and as RGB.
  resized/*: Pillow's resize by each filter. preprocessed.safetensors: what transformers' processors
  make of some of them, [height, width, 3]. expected.json says which is which.
- tests/fixtures/tiny-vit, tiny-resnet/*: small models with seeded random weights, and their expected.json.
- tests/fixtures/efficientnet-lite0/expected.json: what the real model says, by the net written below.

The photographs are chelsea, coffee, camera and rocket of scikit-image (CC0 or public domain), and china
and flower of scikit-learn (CC BY 2.0, for the examples only).
"""

import json
import pathlib
import shutil
import struct
import subprocess
import tempfile
import zlib

import numpy as np
import skimage
import sklearn
import torch
from PIL import Image, ImageOps
from safetensors.numpy import save_file
from efficientnet_lite import EfficientNetLite
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification
from transformers.image_utils import load_image
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.efficientnet.image_processing_pil_efficientnet import EfficientNetImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
IMAGES = FIXTURES / "images"
PHOTOS = ROOT / "examples" / "images"
SKIMAGE = pathlib.Path(skimage.__file__).parent / "data"
SKLEARN = pathlib.Path(sklearn.__file__).parent / "datasets" / "images"
ORIENTATION = 0x0112
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

PROCESSORS = {
    "vit": (ViTImageProcessorPil, {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 32, "width": 32},
        "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, **HALF}),
    "bit": (BitImageProcessorPil, {
        "image_processor_type": "BitImageProcessor", "do_convert_rgb": True, "do_resize": True,
        "size": {"shortest_edge": 40}, "resample": 3, "do_center_crop": True,
        "crop_size": {"height": 32, "width": 32}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, **IMAGENET}),
    "convnext": (ConvNextImageProcessorPil, {
        "image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875, "do_resize": True,
        "size": {"shortest_edge": 32}, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, **IMAGENET}),
    # As published for google/efficientnet-b0, but for the size: nearest neighbour, divided by std twice.
    "efficientnet": (EfficientNetImageProcessorPil, {
        "image_processor_type": "EfficientNetImageProcessor", "do_resize": True,
        "size": {"height": 32, "width": 24}, "resample": 0, "do_center_crop": False,
        "crop_size": {"height": 289, "width": 289}, "do_rescale": True, "rescale_factor": 1 / 255,
        "rescale_offset": False, "do_normalize": True, "include_top": True,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.47853944, 0.4732864, 0.47434163]}),
    # As transformers wrote it before 4.22; the crop is larger than the resized image.
    "clip-old": (CLIPImageProcessorPil, {
        "feature_extractor_type": "CLIPFeatureExtractor", "do_resize": True, "size": 20, "resample": 3,
        "do_center_crop": True, "crop_size": 25, "do_normalize": True, **IMAGENET}),
}


def photo(name, folder=SKIMAGE):
    return Image.open(folder / name).convert("RGB")


def jpeg(image, name, folder=IMAGES, **options):
    image.save(folder / name, "JPEG", **{"quality": 85} | options)


def png(image, name, folder=IMAGES, **options):
    image.save(folder / name, "PNG", optimize=True, **options)


def webp(image, name, folder=IMAGES, **options):
    image.save(folder / name, "WEBP", method=6, **options)


def png_by_hand(name, width, height, depth, kind, rows):
    """A PNG of a kind that Pillow does not write; `rows` are the bytes of each row."""
    def chunk(tag, data):
        return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    (IMAGES / name).write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))


def wide(image):
    """16 bits a channel: the 8 bits above, and something below them that rounding would show."""
    pixels = np.asarray(image).astype(np.uint16)
    below = (np.arange(pixels.size).reshape(pixels.shape) * 37 % 256).astype(np.uint16)
    return pixels * 256 + below


def with_orientation(value):
    exif = Image.Exif()
    exif[ORIENTATION] = value
    return exif


def adobe_ycck(path):
    """Marks a CMYK file as YCCK, in Adobe's own segment."""
    data = path.read_bytes()
    place = data.index(b"Adobe") + 11
    path.write_bytes(data[:place] + b"\2" + data[place + 1:])


def make_files():
    shutil.rmtree(IMAGES, ignore_errors=True)
    (IMAGES / "expected").mkdir(parents=True)
    (IMAGES / "resized").mkdir()
    cat, cup = photo("chelsea.png"), photo("coffee.png")
    # Odd lengths, so that the last blocks of a JPEG are not whole.
    large = cat.crop((75, 25, 376, 224))
    small = cup.resize((64, 43), Image.LANCZOS)
    other = cat.resize((64, 43), Image.LANCZOS)
    tiny = cup.resize((33, 22), Image.LANCZOS)
    alpha = Image.fromarray((np.indices((43, 64)).sum(0) * 2.4).astype(np.uint8))
    clear = Image.merge("RGBA", (*small.split(), alpha))

    jpeg(large, "rgb.jpg")
    jpeg(small, "rgb-444.jpg", subsampling=0)
    jpeg(small, "rgb-stored.jpg", keep_rgb=True)
    jpeg(small, "progressive.jpg", progressive=True)
    jpeg(small.convert("L"), "gray.jpg")
    cmyk = Image.merge("CMYK", (*ImageOps.invert(small).split(), small.convert("L").point(lambda x: x // 4)))
    jpeg(cmyk, "cmyk.jpg")
    ink = Image.merge("RGB", cmyk.split()[:3]).convert("YCbCr")
    jpeg(Image.merge("CMYK", (*(ImageOps.invert(x) for x in ink.split()), cmyk.split()[3])), "ycck.jpg")
    adobe_ycck(IMAGES / "ycck.jpg")
    for value in range(2, 9):
        jpeg(tiny, f"exif-{value}.jpg", exif=with_orientation(value))
    png(tiny, "exif-6.png", exif=with_orientation(6))
    webp(tiny, "exif-8.webp", lossless=True, exif=with_orientation(8).tobytes())

    png(small, "rgb.png")
    png(clear, "rgba.png")
    png(Image.merge("LA", (small.convert("L"), alpha)), "la.png")
    png(small.convert("L"), "gray.png")
    png(small.convert("1"), "bits.png")
    png(small.quantize(16), "palette.png")
    png(small.quantize(200), "palette-transparent.png", transparency=bytes(range(50, 250)))
    png(small, "colour-key.png", transparency=small.getpixel((0, 0)))
    Image.fromarray(wide(small.convert("L"))).save(IMAGES / "gray16.png")
    png_by_hand("rgb16.png", 64, 43, 16, 2, [row.astype(">u2").tobytes() for row in wide(small)])
    png_by_hand("rgba16.png", 64, 43, 16, 6, [row.astype(">u2").tobytes() for row in wide(clear)])
    png(small, "animated.png", save_all=True, append_images=[other], duration=100)
    # Only a header that asks for much: 50,000 x 50,000 pixels in 70 bytes.
    png_by_hand("huge.png", 50000, 50000, 8, 2, [])

    webp(small, "rgb.webp", quality=85)
    webp(small, "lossless.webp", lossless=True)
    webp(clear, "alpha.webp", quality=85, exact=True)
    webp(clear, "alpha-lossless.webp", lossless=True, exact=True)
    webp(small, "animated.webp", save_all=True, append_images=[other], duration=100, quality=85)
    animated_alpha(clear, other)
    unusual_jpegs(small)


def unusual_jpegs(small):
    """Files that cameras do not write: several scans without being progressive, colours finer than brightness, factors
    of 3. Written by cjpeg of libjpeg-turbo."""
    with tempfile.TemporaryDirectory() as folder:
        source, scans = pathlib.Path(folder) / "source.ppm", pathlib.Path(folder) / "scans"
        small.save(source)
        for name, factors, script, words in [
            ("scans-of-one.jpg", "2x2", "0;\n1;\n2;\n", []),
            ("scans-of-two.jpg", "2x2", "0;\n1 2;\n", ["-restart", "4B"]),
            ("scans-backwards.jpg", "1x2", "1 2;\n0;\n", []),
            ("fine-colours.jpg", "1x1,2x2,2x2", None, []),
            ("fine-colours-progressive.jpg", "1x1,2x1,2x1", None, ["-progressive"]),
            ("thirds.jpg", "3x1,1x1,1x1", None, []),
        ]:
            scans.write_text(script or "")
            words = [*words, "-scans", scans] if script else words
            command = ["cjpeg", "-quality", "85", "-sample", factors, *words, "-outfile", IMAGES / name, source]
            subprocess.run(command, check=True)


def animated_alpha(clear, other):
    """Animations whose first picture has colours under its transparent pixels, and does not cover the canvas."""
    options = {"save_all": True, "append_images": [other.convert("RGBA")], "duration": 100, "lossless": True, "exact": True}
    webp(clear, "animated-alpha.webp", background=(250, 0, 0, 255), **options)
    file = bytearray((IMAGES / "animated-alpha.webp").read_bytes())
    canvas = file.index(b"VP8X") + 12
    for place, side in (canvas, clear.width + 10), (canvas + 3, clear.height + 6):
        file[place:place + 3] = (side - 1).to_bytes(3, "little")
    # The place of the first picture, in units of two pixels.
    place = file.index(b"ANMF") + 8
    file[place], file[place + 3] = 3, 1
    (IMAGES / "animated-offset.webp").write_bytes(file)


def pixels_of(path):
    """Upright and as RGB, as transformers' pipelines load an image."""
    if path.name == "gray16.png":
        # Pillow clips at 255 here, and so whitens nearly everything; 16-bit colours it divides by 256.
        return Image.fromarray((np.asarray(Image.open(path)) >> 8).astype(np.uint8)).convert("RGB")
    return load_image(str(path))


def lossy(path):
    return path.suffix == ".jpg" or path.name in ("rgb.webp", "alpha.webp", "animated.webp")


def decoded():
    rows = []
    for path in sorted(IMAGES.iterdir()):
        if path.is_file() and path.name != "huge.png":
            image = pixels_of(path)
            png(image, f"expected/{path.name}.png")
            rows.append({
                "file": path.name, "expected": f"expected/{path.name}.png", "width": image.width,
                "height": image.height, "exact": not lossy(path)})
    return rows


def resized():
    """The source is a PNG, so that only the resizing is compared."""
    rows = []
    for source, width, height in (("expected/rgb.jpg.png", 47, 60), ("rgb.png", 41, 70)):
        for resample in range(6):
            file = f"resized/{pathlib.Path(source).name[:-4]}-{resample}.png"
            png(Image.open(IMAGES / source).resize((width, height), resample), file)
            rows.append({
                "file": file, "source": source, "resample": resample, "width": width, "height": height})
    return rows


def preprocessed():
    tensors, rows = {}, []
    for name, (processor, config) in PROCESSORS.items():
        images = ["expected/rgb.jpg.png", "rgb.png", "exif-6.png", "palette.png"]
        for image in images if name in ("bit", "convnext") else images[:2]:
            values = {key: value for key, value in config.items() if not key.endswith("_type")}
            inputs = processor(**values)(load_image(str(IMAGES / image)), return_tensors="np")
            tensor = f"{name}/{image}"
            tensors[tensor] = np.ascontiguousarray(inputs["pixel_values"][0].transpose(1, 2, 0))
            rows.append({"tensor": tensor, "image": image, "processor": name})
    save_file(tensors, IMAGES / "preprocessed.safetensors")
    return rows


def write_lines(path, rows):
    """One row a line: a changed fixture shows which row changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    path.write_text("[\n" + lines + "\n]\n", encoding="utf-8")


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def rounded(tensor):
    return [round(x, 6) for x in tensor.tolist()]


def make_vit():
    torch.manual_seed(21)
    labels = ["cat", "cup", "rocket", "palace", "flower"]
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, initializer_range=0.3, id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)})
    model = ViTForImageClassification(config).eval()
    # Biases and norms too, which transformers leaves at 0 and 1: a forgotten one must show.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "token" in name or "position" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    write_model(model, "tiny-vit", "vit", ("rgb.png", "palette.png", "exif-6.png", "rgb.jpg", "gray.jpg", "lossless.webp"))


def make_resnets():
    for kind in ("bottleneck", "basic"):
        torch.manual_seed(22)
        labels = ["cat", "cup", "rocket", "palace", "flower"]
        model = ResNetForImageClassification(ResNetConfig(
            embedding_size=8, hidden_sizes=[16, 24, 32, 40], depths=[1, 2, 1, 1], layer_type=kind,
            id2label=dict(enumerate(labels)))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
                if name.endswith("running_var"):
                    buffer.copy_(torch.rand_like(buffer) + 0.5)
        write_model(model, f"tiny-resnet/{kind}", "convnext", ("rgb.png", "palette.png", "exif-6.png", "rgb.jpg"))


def write_model(model, name, processor, images):
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    processor, settings = PROCESSORS[processor]
    write_json(folder / "preprocessor_config.json", settings)
    processor = processor(**{key: value for key, value in settings.items() if not key.endswith("_type")})
    rows = []
    for image in images:
        inputs = processor(load_image(str(IMAGES / image)), return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        rows.append({"image": image, "logits": rounded(logits), "probs": rounded(logits.softmax(-1))})
    write_lines(folder / "expected.json", rows)


def classify_photos():
    folder = ROOT / "models" / "efficientnet-lite0"
    net = EfficientNetLite(folder)
    processor = BitImageProcessorPil(**json.loads((folder / "preprocessor_config.json").read_text()))
    paths = sorted(path for path in PHOTOS.iterdir() if path.suffix != ".md") + [IMAGES / "rgb.png"]
    rows = []
    for path in paths:
        inputs = processor(load_image(str(path)), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            logits = net.logits(inputs)[0]
        top = [
            {"index": i, "label": net.config["id2label"][str(i)], "probability": round(p, 6)}
            for p, i in zip(*(x.tolist() for x in logits.softmax(-1).topk(5)))]
        rows.append({"image": str(path.relative_to(ROOT)), "top": top, "logits": rounded(logits)})
        print(path.name, *(f"{row['label']} {row['probability']:.3f}" for row in top[:3]), sep=", ")
    write_lines(FIXTURES / "efficientnet-lite0" / "expected.json", rows)


def make_photos():
    PHOTOS.mkdir(parents=True, exist_ok=True)

    def fit(image, box=None):
        image = image.crop(box or (0, 0, *image.size))
        image.thumbnail((400, 400), Image.LANCZOS)
        return image

    jpeg(fit(photo("chelsea.png")), "cat.jpg", PHOTOS)
    webp(fit(photo("coffee.png")), "coffee.webp", PHOTOS, quality=85)
    jpeg(fit(photo("camera.png").convert("L")), "photographer.jpg", PHOTOS)
    png(fit(photo("rocket.jpg"), (50, 0, 477, 427)).quantize(128), "rocket.png", PHOTOS)
    jpeg(fit(photo("china.jpg", SKLEARN)), "palace.jpg", PHOTOS)
    jpeg(fit(photo("flower.jpg", SKLEARN), (0, 0, 427, 427)), "flower.jpg", PHOTOS)


def main():
    torch.set_num_threads(1)
    make_photos()
    make_files()
    write_json(IMAGES / "expected.json", {
        "decoded": decoded(), "resized": resized(), "preprocessed": preprocessed(),
        "processors": {name: config for name, (_, config) in PROCESSORS.items()}})
    make_vit()
    make_resnets()
    classify_photos()


main()
