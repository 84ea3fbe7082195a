//! Captions of images through the public interface of a model, held against what the transformers library writes
//! (`scripts/make-blip-fixture.py`).
#![cfg(feature = "candle-transformers")]

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sconce::model::tasks::caption::{self, CaptionInput, CaptionNetwork, CaptionProcessor};
use sconce::model::{
    Advance, Device, Dtype, Feed, Generate as _, LoadError, LoadSpec, Processor as _, Row, SizedInput, Slot,
};
use sconce::protocol::{Message, TaskError, TaskErrorKind};
use serde_json::{Value, json};

/// A photograph that every decoder decodes to the same pixels.
const EXACT: &str = "rocket.png";
/// With pixels that differ a little, the two likeliest tokens may change places if their logits are as near as this.
const NEAR: f64 = 0.15;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fixture() -> PathBuf {
    root().join("tests/fixtures/tiny-blip")
}

fn try_load(dtype: Dtype) -> Result<(CaptionProcessor, CaptionNetwork), LoadError> {
    let folder = fixture();
    let source = folder.to_str().expect("a path in UTF-8");
    caption::load(&LoadSpec { dtype, max_inputs: 8, ..LoadSpec::new(source) }, &Device::Cpu)
}

fn load() -> (CaptionProcessor, CaptionNetwork) {
    try_load(Dtype::F32).unwrap_or_else(|error| panic!("{error}"))
}

fn message(body: &Value) -> Message {
    Message { body: body.to_string().into(), ..Message::default() }
}

fn image(file: &str) -> String {
    let bytes = std::fs::read(root().join("examples/images").join(file)).expect("a photograph");
    STANDARD.encode(bytes)
}

/// Computes sequences together, each prompt in chunks of this size. Returns the tokens of each.
fn compute(network: &mut CaptionNetwork, inputs: &[SizedInput<CaptionInput>], chunk: usize) -> Vec<Vec<u32>> {
    let slots: Vec<Slot> = (0..inputs.len()).map(Slot).collect();
    for (slot, sized) in slots.iter().zip(inputs) {
        network.open(*slot, &sized.input).expect("an open sequence");
    }
    let rows: Vec<Row> = slots.iter().map(|slot| Row { slot: *slot, feed: Feed::Encode }).collect();
    for advance in network.step(&rows).expect("encoded images") {
        assert_eq!(advance, Ok(Advance::Fed));
    }
    let mut left: Vec<usize> = inputs.iter().map(|sized| sized.tokens).collect();
    let mut found: Vec<Option<Vec<u32>>> = vec![None; inputs.len()];
    while found.iter().any(Option::is_none) {
        let running: Vec<usize> = (0..inputs.len()).filter(|index| found[*index].is_none()).collect();
        let feed = |index: &usize| Feed::Tokens(left[*index].clamp(1, chunk));
        let rows: Vec<Row> =
            running.iter().map(|index| Row { slot: slots[*index], feed: feed(index) }).collect();
        for ((index, row), advance) in running.iter().zip(&rows).zip(network.step(&rows).expect("a step")) {
            left[*index] = left[*index].saturating_sub(row.feed.tokens());
            if let Advance::Done(_, tokens) = advance.expect("a row") {
                network.close(slots[*index]);
                found[*index] = Some(tokens);
            }
        }
    }
    found.into_iter().flatten().collect()
}

fn answer(
    (processor, network): &mut (CaptionProcessor, CaptionNetwork),
    body: &Value,
    chunk: usize,
) -> Result<Value, TaskError> {
    let (context, inputs) = processor.preprocess(&message(body))?;
    let inputs = inputs.all()?;
    for sized in &inputs {
        assert_eq!(sized.encode_tokens, 17, "16 patches and a class");
    }
    let outputs = compute(network, &inputs, chunk);
    let reply = processor.finish(context, outputs)?;
    Ok(serde_json::from_slice(&reply.bytes).expect("JSON"))
}

fn expected() -> Value {
    let file = std::fs::read(fixture().join("expected.json")).expect("the fixture");
    serde_json::from_slice(&file).expect("JSON")
}

#[test]
fn captions_are_those_of_transformers_together_and_in_any_chunks() {
    let (mut model, expected) = (load(), expected());
    let rows = expected["rows"].as_array().expect("rows");
    for prompt in ["", "a photograph of"] {
        let of_prompt: Vec<&Value> = rows.iter().filter(|row| row["prompt"] == prompt).collect();
        let images: Vec<String> =
            of_prompt.iter().map(|row| image(row["file"].as_str().expect("a file"))).collect();
        for chunk in [1, 2, 64] {
            // The model holds four sequences by default.
            for (images, rows) in images.chunks(4).zip(of_prompt.chunks(4)) {
                let body = json!({"inputs": images, "prompt": prompt, "max_new_tokens": 12});
                let reply = answer(&mut model, &body, chunk).expect("captions");
                for (found, row) in reply.as_array().expect("a list").iter().zip(rows) {
                    if row["file"] == EXACT || row["least_margin"].as_f64() > Some(NEAR) {
                        assert_eq!(found[0]["generated_text"], row["text"], "{row}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_caption_alone_has_hugging_faces_form_and_ends_after_max_new_tokens() {
    let mut model = load();
    let reply =
        answer(&mut model, &json!({"inputs": image(EXACT), "max_new_tokens": 3}), 64).expect("a caption");
    assert_eq!(reply, json!([{"generated_text": "r r r"}]));
}

#[test]
fn a_failed_row_changes_no_sequence() {
    let (processor, mut network) = load();
    let body = json!({"inputs": image(EXACT), "prompt": "a photograph of", "max_new_tokens": 4});
    let (_, inputs) = processor.preprocess(&message(&body)).expect("a task");
    let inputs = inputs.all().expect("inputs");
    let expected = compute(&mut network, &inputs, 64);
    network.open(Slot(0), &inputs[0].input).expect("a sequence");
    let step = |network: &mut CaptionNetwork, slot: usize, feed| {
        network.step(&[Row { slot: Slot(slot), feed }]).expect("a step").remove(0)
    };
    // Out of turn: before the image, in a closed slot, and the image twice.
    assert!(step(&mut network, 0, Feed::Tokens(1)).is_err());
    assert_eq!(step(&mut network, 0, Feed::Encode), Ok(Advance::Fed));
    assert!(step(&mut network, 0, Feed::Encode).is_err());
    assert!(step(&mut network, 1, Feed::Tokens(1)).is_err());
    let mut last = step(&mut network, 0, Feed::Tokens(inputs[0].tokens));
    while let Ok(Advance::More(())) = last {
        last = step(&mut network, 0, Feed::Tokens(1));
    }
    assert_eq!(last, Ok(Advance::Done(None, expected[0].clone())));
}

#[test]
fn refusals_name_the_field() {
    let mut model = load();
    for (body, kind, param) in [
        (json!({"inputs": image(EXACT), "max_new_tokens": 64}), TaskErrorKind::BadInput, "max_new_tokens"),
        (
            json!({"inputs": image(EXACT), "prompt": "cat ".repeat(70)}),
            TaskErrorKind::BadInput,
            "max_new_tokens",
        ),
        (json!({"inputs": "ZmlsZQ=="}), TaskErrorKind::BadInput, "inputs"),
        (json!({"input": "a text"}), TaskErrorKind::UnknownUrl, "input"),
        (json!({"inputs": image(EXACT), "model": "other"}), TaskErrorKind::UnknownModel, "model"),
    ] {
        let error = answer(&mut model, &body, 64).expect_err("a refusal");
        assert_eq!((error.kind, error.param.as_deref()), (kind, Some(param)), "{error}");
    }
    let error = try_load(Dtype::F16).err().expect("a refusal").to_string();
    assert!(error.contains("in f32 only"), "{error}");
}
