//! Images from texts through the public interface of a model, held against what diffusers and transformers compute
//! (`scripts/make-diffusion-fixtures.py`).
#![cfg(feature = "candle-transformers")]

use std::io::Cursor;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sconce::model::tasks::image_generation::{self, ImageGenerator, ImageInput, ImageProcessor};
use sconce::model::{
    Advance, Device, Dtype, Feed, Generate as _, LoadError, LoadSpec, Processor as _, Row, SizedInput, Slot,
};
use sconce::protocol::{Body, Message, Properties, TaskError, TaskErrorKind};
use serde_json::{Value, json};

/// The largest accepted error of latents, relative to their Euclidean norm. candle-transformers approximates GELU by tanh
/// in the denoising network.
const LATENT_TOLERANCE: f64 = 2e-3;
/// The largest accepted difference of a color, of 255.
const COLOR_TOLERANCE: u8 = 2;

type Loaded = (ImageProcessor, ImageGenerator);

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn try_load(folder: &Path, dtype: Dtype, options: &[(&str, Value)]) -> Result<Loaded, LoadError> {
    let source = folder.to_str().expect("a path in UTF-8");
    let options = options.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    image_generation::load(&LoadSpec { dtype, options, ..LoadSpec::new(source) }, &Device::Cpu)
}

fn load(name: &str, scheduler: &str) -> Loaded {
    let options = [("scheduler", json!(scheduler)), ("max_steps", json!(8)), ("max_images", json!(3))];
    try_load(&fixture(name), Dtype::F32, &options).unwrap_or_else(|error| panic!("{error}"))
}

fn message(body: &Value) -> Message {
    Message { body: body.to_string().into(), ..Message::default() }
}

fn prepared(
    processor: &ImageProcessor,
    message: &Message,
) -> Result<(image_generation::ImageContext, Vec<SizedInput<ImageInput>>), TaskError> {
    let (context, inputs) = processor.preprocess(message)?;
    Ok((context, inputs.all()?))
}

/// Makes images together, and calls `seen` with the latents of the first one after each step.
fn make(
    generator: &mut ImageGenerator,
    inputs: &[SizedInput<ImageInput>],
    mut seen: impl FnMut(&[f32]),
) -> Vec<Vec<u8>> {
    let slots: Vec<Slot> = (0..inputs.len()).map(Slot).collect();
    for (slot, sized) in slots.iter().zip(inputs) {
        generator.open(*slot, &sized.input).expect("an open sequence");
    }
    let rows: Vec<Row> = slots.iter().map(|slot| Row { slot: *slot, feed: Feed::Encode }).collect();
    for advance in generator.step(&rows).expect("encoded prompts") {
        assert_eq!(advance, Ok(Advance::Fed));
    }
    let mut found: Vec<Option<Vec<u8>>> = vec![None; inputs.len()];
    let mut steps = 0;
    while found.iter().any(Option::is_none) {
        let running: Vec<usize> = (0..inputs.len()).filter(|index| found[*index].is_none()).collect();
        let rows: Vec<Row> =
            running.iter().map(|index| Row { slot: slots[*index], feed: Feed::Tokens(1) }).collect();
        steps += 1;
        for (index, advance) in running.iter().zip(generator.step(&rows).expect("a step")) {
            match advance.expect("a row") {
                Advance::More(step) => assert_eq!(step, steps),
                Advance::Done(None, pixels) => {
                    assert_eq!(inputs[*index].answer_tokens, steps, "the decoder is a step of its own");
                    generator.close(slots[*index]);
                    found[*index] = Some(pixels);
                }
                other => panic!("{other:?}"),
            }
        }
        if let Some(latents) = generator.latents(slots[0]) {
            seen(latents);
        }
    }
    found.into_iter().flatten().collect()
}

fn reply(model: &mut Loaded, message: &Message) -> Result<Body, TaskError> {
    let (context, inputs) = prepared(&model.0, message)?;
    let outputs = make(&mut model.1, &inputs, |_| {});
    model.0.finish(context, outputs)
}

struct Decoded {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
    parameters: String,
}

fn decode(file: &[u8]) -> Decoded {
    let mut reader = png::Decoder::new(Cursor::new(file)).read_info().expect("a PNG file");
    let (width, height) = (reader.info().width, reader.info().height);
    let parameters = reader.info().utf8_text[0].get_text().expect("a text");
    let mut pixels = vec![0; 3 * width as usize * height as usize];
    reader.next_frame(&mut pixels).expect("an image");
    Decoded { width, height, pixels, parameters }
}

fn json_of(body: &Body) -> Value {
    serde_json::from_slice(&body.bytes).expect("JSON")
}

fn files(reply: &Value) -> Vec<Vec<u8>> {
    let images = reply["data"].as_array().expect("images");
    images
        .iter()
        .map(|image| STANDARD.decode(image["b64_json"].as_str().expect("base64")).expect("a file"))
        .collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("numbers").iter().map(|number| number.as_f64().expect("a number")).collect()
}

fn distance(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let error: f64 = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    (error / expected.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

#[test]
fn latents_and_images_are_those_of_diffusers() {
    for name in ["tiny-diffusion", "tiny-diffusion-v"] {
        let expected = std::fs::read(fixture(name).join("expected.json")).expect("the fixture");
        let cases: Vec<Value> = serde_json::from_slice(&expected).expect("JSON");
        assert!(cases.len() > 1);
        for case in cases {
            let mut model = load(name, case["scheduler"].as_str().expect("a scheduler"));
            let (width, height) = (&case["width"], &case["height"]);
            let body = json!({
                "prompt": case["prompt"], "negative_prompt": case["negative_prompt"], "steps": case["steps"],
                "guidance_scale": case["guidance_scale"], "seed": case["seed"], "size": format!("{width}x{height}"),
            });
            let (context, inputs) = prepared(&model.0, &message(&body)).expect("a task");
            let mut after = case["latents"].as_array().expect("latents").iter();
            let mut worst = 0.0_f64;
            let outputs = make(&mut model.1, &inputs, |latents| {
                // After the last step comes the decoder.
                if let Some(expected) = after.next() {
                    worst = worst.max(distance(latents, &numbers(expected)));
                }
            });
            assert!(after.next().is_none(), "{case}");
            assert!(worst < LATENT_TOLERANCE, "{name} {}: latents are off by {worst}", case["scheduler"]);
            let body = model.0.finish(context, outputs).expect("a reply");
            let decoded = decode(&files(&json_of(&body))[0]);
            assert_eq!((json!(decoded.width), json!(decoded.height)), (width.clone(), height.clone()));
            let expected = numbers(&case["pixels"]);
            let differences =
                decoded.pixels.iter().zip(&expected).map(|(found, it)| found.abs_diff(*it as u8));
            let largest = differences.max().expect("pixels");
            assert!(largest <= COLOR_TOLERANCE, "{name} {}: a color is off by {largest}", case["scheduler"]);
        }
    }
}

#[test]
fn an_image_is_the_same_alone_and_among_others() {
    let mut model = load("tiny-diffusion", "unipc");
    let three = json!({"prompt": "a cat", "n": 3, "seed": 40, "steps": 3, "size": "32x48"});
    let together = json_of(&reply(&mut model, &message(&three)).expect("images"));
    let seeds: Vec<u64> = together["data"]
        .as_array()
        .expect("images")
        .iter()
        .filter_map(|image| image["seed"].as_u64())
        .collect();
    assert_eq!(seeds, [40, 41, 42]);
    for (file, seed) in files(&together).iter().zip(seeds) {
        let alone = json!({"prompt": "a cat", "seed": seed, "steps": 3, "size": "32x48"});
        let alone = json_of(&reply(&mut model, &message(&alone)).expect("an image"));
        assert_eq!(&files(&alone)[0], file, "{seed}");
    }
}

#[test]
fn without_a_seed_the_tasks_id_decides() {
    let mut model = load("tiny-diffusion", "ddim");
    let mut image = |id: &str| {
        let mut message = message(&json!({"prompt": "a cat", "steps": 1, "size": "32x32"}));
        message.properties = Properties { message_id: Some(id.to_owned()), ..Properties::default() };
        let reply = json_of(&reply(&mut model, &message).expect("an image"));
        let seed = reply["data"][0]["seed"].as_u64().expect("a seed");
        assert!(seed < 1 << 53, "{seed}");
        files(&reply).remove(0)
    };
    let first = image("a");
    assert_eq!(first, image("a"));
    assert_ne!(first, image("b"));
}

#[test]
fn a_file_says_how_it_was_made_and_a_cut_prompt_is_counted() {
    let mut model = load("tiny-diffusion", "ddim");
    let body = json!({"prompt": "coffee ".repeat(90), "negative_prompt": "a spoon", "steps": 2, "seed": 7,
        "guidance_scale": 2.5, "response_format": "png"});
    let body = reply(&mut model, &message(&body)).expect("a file");
    assert_eq!(body.content_type, "image/png");
    assert_eq!(body.headers.get("seed").and_then(|seed| seed.as_str()), Some("7"));
    assert_eq!(body.headers.get("truncated").and_then(|count| count.as_i64()), Some(1));
    let decoded = decode(&body.bytes);
    assert_eq!((decoded.width, decoded.height), (64, 64), "the size of the training");
    let lines: Vec<&str> = decoded.parameters.lines().collect();
    assert_eq!(lines[1], "Negative prompt: a spoon");
    assert_eq!(
        lines[2],
        "Steps: 2, Sampler: ddim, CFG scale: 2.5, Seed: 7, Size: 64x64, Model: tiny-diffusion"
    );
}

#[test]
fn parts_report_the_progress_of_each_image() {
    let (processor, _) = load("tiny-diffusion", "ddim");
    let body = json!({"prompt": "a cat", "n": 2, "steps": 5, "stream": true});
    let (mut context, inputs) = prepared(&processor, &message(&body)).expect("a task");
    assert_eq!((inputs.len(), inputs[0].encode_tokens, inputs[0].tokens), (2, 154, 0));
    let parts = processor.parts(&mut context, 1, vec![1, 2, 3]);
    let expected = json!({"type": "image_generation.progress", "index": 1, "step": 3, "steps": 5});
    assert_eq!(parts.iter().map(json_of).collect::<Vec<_>>(), [expected]);
}

#[test]
fn a_failed_row_changes_no_image() {
    let (processor, mut generator) = load("tiny-diffusion", "unipc");
    let body = json!({"prompt": "a cat", "steps": 2, "seed": 1, "size": "32x32"});
    let (_, inputs) = prepared(&processor, &message(&body)).expect("a task");
    let expected = make(&mut generator, &inputs, |_| {});
    generator.open(Slot(0), &inputs[0].input).expect("a sequence");
    let step = |generator: &mut ImageGenerator, slot: usize, feed| {
        generator.step(&[Row { slot: Slot(slot), feed }]).expect("a step").remove(0)
    };
    assert!(step(&mut generator, 0, Feed::Tokens(1)).is_err(), "before its prompt");
    assert_eq!(step(&mut generator, 0, Feed::Encode), Ok(Advance::Fed));
    assert!(step(&mut generator, 0, Feed::Encode).is_err(), "its prompt twice");
    assert!(step(&mut generator, 1, Feed::Tokens(1)).is_err(), "a slot that was not opened");
    assert_eq!(step(&mut generator, 0, Feed::Tokens(1)), Ok(Advance::More(1)));
    assert_eq!(step(&mut generator, 0, Feed::Tokens(1)), Ok(Advance::More(2)));
    assert_eq!(step(&mut generator, 0, Feed::Tokens(1)), Ok(Advance::Done(None, expected[0].clone())));
}

#[test]
fn refusals_name_the_field() {
    let mut model = load("tiny-diffusion", "ddim");
    for (fields, kind, param, named) in [
        (json!({"n": 4}), TaskErrorKind::TooLarge, "n", "at most 3"),
        (json!({"steps": 9}), TaskErrorKind::TooLarge, "steps", "max_steps"),
        (json!({"steps": 0}), TaskErrorKind::BadInput, "steps", "got 0"),
        (json!({"size": "60x64"}), TaskErrorKind::BadInput, "size", "multiples of 8"),
        (json!({"size": "0x64"}), TaskErrorKind::BadInput, "size", "multiples of 8"),
        (json!({"size": "8x64"}), TaskErrorKind::BadInput, "size", "at least 16"),
        (json!({"size": "1024x1024"}), TaskErrorKind::TooLarge, "size", "max_pixels"),
        (
            json!({"size": "9223372036854775800x9223372036854775800"}),
            TaskErrorKind::TooLarge,
            "size",
            "max_pixels",
        ),
        (
            json!({"prompt": "coffee ".repeat(90), "truncate": false}),
            TaskErrorKind::BadInput,
            "prompt",
            "at most 77",
        ),
        (json!({"model": "other"}), TaskErrorKind::UnknownModel, "model", "other"),
    ] {
        let mut body = json!({"prompt": "a cat", "steps": 1});
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        let error = reply(&mut model, &message(&body)).expect_err("a refusal");
        assert_eq!((error.kind, error.param.as_deref()), (kind, Some(param)), "{error}");
        assert!(error.message.contains(named), "{error}");
    }
    let error = try_load(&fixture("tiny-diffusion"), Dtype::Bf16, &[]).err().expect("a refusal").to_string();
    assert!(error.contains("bf16"), "{error}");
}

#[test]
fn as_many_steps_as_the_training_had_are_made_without_a_timestep_twice() {
    for (scheduler, most) in [("ddim", 1_000), ("unipc", 999)] {
        let options = [("scheduler", json!(scheduler)), ("max_steps", json!(1_000))];
        let (processor, mut generator) = try_load(&fixture("tiny-diffusion"), Dtype::F32, &options)
            .unwrap_or_else(|error| panic!("{error}"));
        let body =
            |steps: usize| json!({"prompt": "a", "steps": steps, "size": "16x16", "guidance_scale": 0});
        assert!(prepared(&processor, &message(&body(most + 1))).is_err(), "{scheduler}");
        let (_, inputs) = prepared(&processor, &message(&body(most))).expect("a task");
        assert_eq!(make(&mut generator, &inputs, |_| {}).len(), 1);
        assert!(generator.capacity().tokens > inputs[0].answer_tokens + 2, "with room for the probe");
    }
}

#[test]
fn f16_computes_nearly_the_same() {
    // Loading compares a step with that in f32, and refuses a number format that differs by more than its tolerance.
    let loaded = try_load(&fixture("tiny-diffusion"), Dtype::F16, &[]);
    assert!(loaded.is_ok(), "{}", loaded.err().expect("an error"));
}

#[test]
fn a_setting_that_is_not_computed_as_published_is_refused_by_name() {
    for (file, field, value, named) in [
        (
            "unet/config.json",
            "addition_embed_type",
            json!("text_time"),
            "addition_embed_type is \"text_time\"",
        ),
        ("unet/config.json", "in_channels", json!(9), "in_channels is 9"),
        ("unet/config.json", "cross_attention_dim", json!(64), "cross_attention_dim is 64"),
        ("unet/config.json", "norm_num_groups", json!(24), "24 (norm_num_groups)"),
        ("unet/config.json", "sample_size", json!(1_u64 << 40), "sample_size is 1099511627776"),
        ("unet/config.json", "downsample_padding", json!(1_u64 << 40), "downsample_padding is 1099511627776"),
        ("unet/config.json", "attention_head_dim", json!([8]), "1 attention_head_dim"),
        ("vae/config.json", "shift_factor", json!(0.1), "shift_factor is 0.1"),
        ("vae/config.json", "block_out_channels", json!([]), "block_out_channels"),
        ("text_encoder/config.json", "hidden_act", json!("relu"), "hidden_act is \"relu\""),
        ("scheduler/scheduler_config.json", "thresholding", json!(true), "thresholding"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        copy(&fixture("tiny-diffusion"), folder.path());
        let path = folder.path().join(file);
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
        config[field] = value;
        std::fs::write(&path, config.to_string()).expect("a file");
        let error = try_load(folder.path(), Dtype::F32, &[]).err().expect("a refusal").to_string();
        assert!(error.contains(named) && error.contains(file), "{file} {field}: {error}");
    }
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            std::fs::create_dir(&target).expect("a folder");
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("a file");
        }
    }
}
