//! Models of texts and images through their public interface, held against what the transformers library computes
//! (`scripts/make-text-image-fixtures.py`).
#![cfg(feature = "candle-transformers")]

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sconce::model::nets::text_image::{TextImageNetwork, TextOrImage};
use sconce::model::tasks::text_image::{self, TextImageProcessor};
use sconce::model::{Device, Dtype, Forward as _, LoadError, LoadSpec, Processor as _};
use sconce::protocol::{Body, Headers, Message, Properties, TaskError, TaskErrorKind};
use serde_json::{Value, json};

/// The most difference of numbers from those of the reference.
const TOLERANCE: f64 = 1e-4;
/// The same for photographs that another decoder decodes to slightly other pixels.
const OTHER_PIXELS: f64 = 2e-2;
const FAMILIES: [&str; 2] = ["tiny-clip", "tiny-siglip"];

type Model = (TextImageProcessor, TextImageNetwork);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

fn try_load(folder: &Path, dtype: Dtype) -> Result<Model, LoadError> {
    let source = folder.to_str().expect("a path in UTF-8");
    text_image::load(&LoadSpec { dtype, max_inputs: 8, ..LoadSpec::new(source) }, &Device::Cpu)
}

fn load(name: &str) -> Model {
    try_load(&fixture(name), Dtype::F32).unwrap_or_else(|error| panic!("{error}"))
}

fn expected(name: &str) -> Value {
    let path = fixture(name).join("expected.json");
    serde_json::from_slice(&std::fs::read(path).expect("fixtures")).expect("JSON")
}

fn message(url: &str, body: &Value) -> Message {
    let headers: Headers = [("url".to_owned(), url.into())].into();
    Message { properties: Properties { headers, ..Properties::default() }, body: body.to_string().into() }
}

fn photograph(file: &str) -> Vec<u8> {
    let path = root().join("examples/images").join(file);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A photograph as an input among texts.
fn image(file: &str) -> Value {
    json!({"image_url": {"url": data_url(file)}})
}

fn data_url(file: &str) -> String {
    let media_type = match file.rsplit_once('.').map(|(_, extension)| extension) {
        Some("jpg") => "image/jpeg",
        Some("webp") => "image/webp",
        _ => "image/png",
    };
    format!("data:{media_type};base64,{}", STANDARD.encode(photograph(file)))
}

fn answer(model: &mut Model, message: &Message) -> Result<Value, TaskError> {
    let reply = reply(model, message)?;
    Ok(serde_json::from_slice(&reply.bytes).expect("JSON"))
}

fn reply((processor, network): &mut Model, message: &Message) -> Result<Body, TaskError> {
    let (context, inputs) = processor.preprocess(message)?;
    let inputs = inputs.all()?;
    let inputs: Vec<&TextOrImage> = inputs.iter().map(|sized| &sized.input).collect();
    let outputs = network.forward(&inputs).unwrap_or_else(|error| panic!("{error}"));
    let outputs = outputs.into_iter().collect::<Result<_, _>>()?;
    processor.finish(context, outputs)
}

fn vectors(model: &mut Model, input: &Value) -> Vec<Value> {
    let reply = answer(model, &message("/v1/embeddings", &json!({ "input": input })));
    let reply = reply.unwrap_or_else(|error| panic!("{error}"));
    reply["data"].as_array().expect("vectors").iter().map(|row| row["embedding"].clone()).collect()
}

/// The largest difference of two lists of numbers.
fn difference(one: &Value, other: &Value) -> f64 {
    let numbers = |list: &Value| -> Vec<f64> {
        list.as_array().expect("a list").iter().map(|number| number.as_f64().expect("a number")).collect()
    };
    let (one, other) = (numbers(one), numbers(other));
    assert_eq!(one.len(), other.len());
    one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn items<'a>(list: &'a Value, field: &str) -> Vec<&'a Value> {
    list.as_array().expect("a list").iter().map(|item| &item[field]).collect()
}

#[test]
fn texts_and_photographs_in_one_request_have_the_vectors_of_transformers() {
    for name in FAMILIES {
        let (mut model, expected) = (load(name), expected(name));
        let texts = items(&expected["texts"], "text");
        let files = items(&expected["images"], "file");
        // Alternating, so that the order of the reply is seen. The pool takes 8 inputs in a task.
        let images: Vec<Value> = files.iter().map(|file| image(file.as_str().expect("a name"))).collect();
        for ((text, image), index) in texts.iter().zip(&images).zip(0..) {
            let found = vectors(&mut model, &json!([text, image]));
            let (of_text, of_image) = (&expected["texts"][index], &expected["images"][index]);
            let off = difference(&found[0], &of_text["vector"]);
            assert!(off < TOLERANCE, "{name}: {text} is off by {off}");
            let off = difference(&found[1], &of_image["vector"]);
            let tolerance = if of_image["exact"] == true { TOLERANCE } else { OTHER_PIXELS };
            assert!(off < tolerance, "{name}: {} is off by {off}", of_image["file"]);
        }
    }
}

#[test]
fn exact_pixels_have_exact_vectors() {
    for name in FAMILIES {
        let (mut model, expected) = (load(name), expected(name));
        let exact: Vec<&Value> =
            expected["images"].as_array().expect("images").iter().filter(|it| it["exact"] == true).collect();
        assert!(!exact.is_empty());
        for of_image in exact {
            let file = of_image["file"].as_str().expect("a name");
            let off = difference(&vectors(&mut model, &image(file))[0], &of_image["vector"]);
            assert!(off < TOLERANCE, "{name}: {file} is off by {off}");
        }
    }
}

#[test]
fn an_inputs_vector_does_not_depend_on_its_batch() {
    for name in FAMILIES {
        let mut model = load(name);
        let inputs =
            [json!("a photo of a cat"), image("rocket.png"), json!("coffee in a cup; a spoon beside it")];
        let together = vectors(&mut model, &json!(inputs));
        for (input, found) in inputs.iter().zip(&together) {
            let alone = vectors(&mut model, &json!([input])).remove(0);
            assert!(difference(&alone, found) < 1e-5, "{name}: {input}");
        }
    }
}

#[test]
fn labels_have_the_scores_of_transformers() {
    for name in FAMILIES {
        let (mut model, expected) = (load(name), expected(name));
        let labels = &expected["labels"];
        for of_image in expected["images"].as_array().expect("images") {
            let file = of_image["file"].as_str().expect("a name");
            let body = json!({"image_url": data_url(file), "labels": labels});
            let reply = answer(&mut model, &message("/classify", &body)).expect("a reply");
            let rows = reply.as_array().expect("labels");
            assert_eq!(rows.len(), 4);
            let scores: Vec<f64> = rows.iter().map(|row| row["score"].as_f64().expect("a score")).collect();
            assert!(scores.is_sorted_by(|a, b| a >= b), "{reply}");
            let tolerance = if of_image["exact"] == true { TOLERANCE } else { 10.0 * OTHER_PIXELS };
            for (label, score) in
                labels.as_array().expect("labels").iter().zip(of_image["scores"].as_array().expect("scores"))
            {
                let found = rows.iter().find(|row| &row["label"] == label).expect("the label");
                let off = (found["score"].as_f64().unwrap_or(f64::NAN) - score.as_f64().unwrap_or(0.0)).abs();
                assert!(off < tolerance, "{name}: {file}, {label} is off by {off}");
            }
        }
    }
}

#[test]
fn a_photograph_may_be_the_whole_body() {
    let mut model = load("tiny-clip");
    let alone = vectors(&mut model, &image("rocket.png")).remove(0);
    let mut raw = message("/v1/embeddings", &Value::Null);
    raw.body = photograph("rocket.png").into();
    raw.properties.content_type = Some("image/png".to_owned());
    let reply = answer(&mut model, &raw).expect("a reply");
    assert_eq!(reply["data"][0]["embedding"], alone);
    assert_eq!(reply["usage"]["prompt_tokens"], 17);
    let labels = ["cat", "rocket"].map(sconce::protocol::Value::from).to_vec();
    raw.properties.headers = [
        ("url".to_owned(), "/classify".into()),
        ("labels".to_owned(), sconce::protocol::Value::Array(labels)),
    ]
    .into();
    assert_eq!(answer(&mut model, &raw).expect("a reply").as_array().map(Vec::len), Some(2));
}

#[test]
fn vectors_have_the_length_1_also_with_fewer_dimensions() {
    for name in FAMILIES {
        let mut model = load(name);
        for dimensions in [None, Some(5)] {
            let body = json!({"input": ["a cat", image("rocket.png")], "dimensions": dimensions});
            let reply = answer(&mut model, &message("/v1/embeddings", &body)).expect("a reply");
            for row in reply["data"].as_array().expect("vectors") {
                let numbers = row["embedding"].as_array().expect("numbers");
                assert_eq!(numbers.len(), dimensions.unwrap_or(if name == "tiny-clip" { 24 } else { 32 }));
                let square: f64 = numbers.iter().filter_map(Value::as_f64).map(|x| x * x).sum();
                assert!((square - 1.0).abs() < 1e-5);
            }
        }
    }
}

#[test]
fn labels_that_are_cut_are_counted() {
    let mut model = load("tiny-clip");
    let body = json!({"image_url": data_url("rocket.png"), "labels": ["cat", "cat ".repeat(60)]});
    let cut = reply(&mut model, &message("/classify", &body)).expect("a reply");
    assert_eq!(cut.headers.get("truncated"), Some(&sconce::protocol::Value::I32(1)));
}

#[test]
fn refusals_name_the_input_and_others_are_answered() {
    let mut model = load("tiny-clip");
    let mut refusal = |url: &str, body: Value| {
        let error = answer(&mut model, &message(url, &body)).expect_err("a refusal");
        (error.kind, error.param.unwrap_or_default())
    };
    let bad = TaskErrorKind::BadInput;
    let broken = json!({"image_url": {"url": "data:image/png;base64,ZmlsZQ=="}});
    assert_eq!(
        refusal("/v1/embeddings", json!({"input": ["a", broken.clone()]})),
        (bad, "input[1].image_url.url".to_owned())
    );
    assert_eq!(
        refusal("/v1/embeddings", json!({"input": "a", "dimensions": 25})),
        (bad, "dimensions".to_owned())
    );
    assert_eq!(
        refusal("/v1/embeddings", json!({"input": "a", "prompt_name": "query"})),
        (bad, "prompt_name".to_owned())
    );
    assert_eq!(
        refusal("/v1/embeddings", json!({"input": ["a".repeat(900)], "truncate": false})),
        (bad, "input[0]".to_owned())
    );
    assert_eq!(refusal("/v1/embeddings", json!({"input": [[1, 9_999]]})), (bad, "input[0]".to_owned()));
    assert_eq!(
        refusal("/classify", json!({"image_url": data_url("rocket.png")})),
        (bad, "labels".to_owned())
    );
    let long =
        json!({"image_url": data_url("rocket.png"), "labels": ["cat", "cat ".repeat(60)], "truncate": false});
    assert_eq!(refusal("/classify", long), (bad, "labels[1]".to_owned()));
    let many: Vec<String> = (0..1_001).map(|index| index.to_string()).collect();
    let (kind, _) = refusal("/classify", json!({"image_url": data_url("rocket.png"), "labels": many}));
    assert_eq!(kind, TaskErrorKind::TooLarge);
    let gif = json!({"image_url": {"url": "data:image/gif;base64,ZmlsZQ=="}});
    let each = json!({"input": ["a", 7, image("rocket.png"), broken, gif, "b"], "errors": "each"});
    let reply = answer(&mut model, &message("/v1/embeddings", &each)).expect("a reply");
    let kinds: Vec<bool> = items(&reply["data"], "embedding").iter().map(|it| it.is_array()).collect();
    assert_eq!(kinds, [true, false, true, false, false, true]);
}

#[test]
fn half_precision_is_close_and_other_precisions_are_refused() {
    for name in FAMILIES {
        let inputs = json!(["a photo of a cat", image("rocket.png")]);
        let exact = vectors(&mut load(name), &inputs);
        let mut half = try_load(&fixture(name), Dtype::F16).unwrap_or_else(|error| panic!("{error}"));
        for (found, exact) in vectors(&mut half, &inputs).iter().zip(&exact) {
            let off = difference(found, exact);
            assert!(off < 0.01, "{name}: {off}");
        }
        for dtype in [Dtype::Bf16, Dtype::Int8] {
            let error = try_load(&fixture(name), dtype).err().expect("a refusal").to_string();
            assert!(error.contains(dtype.name()), "{error}");
        }
    }
}

/// A copy of a model with another `config.json`.
fn changed(name: &str, change: impl Fn(&mut Value)) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(fixture(name)).expect("files").flatten() {
        std::fs::copy(file.path(), folder.path().join(file.file_name())).expect("a copy");
    }
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    change(&mut config);
    std::fs::write(&path, config.to_string()).expect("a file");
    let error = try_load(folder.path(), Dtype::F32).err().expect("a refusal");
    error.to_string()
}

#[test]
fn what_candle_transformers_does_not_compute_is_refused_by_its_name() {
    for (name, pointer, value, part) in [
        ("tiny-clip", "/text_config/hidden_act", json!("gelu"), "text_config.hidden_act is \"gelu\""),
        ("tiny-clip", "/vision_config/hidden_act", json!("gelu"), "vision_config.hidden_act is \"gelu\""),
        ("tiny-clip", "/vision_config/layer_norm_eps", json!(1e-6), "layer_norm_eps is 0.000001"),
        ("tiny-clip", "/vision_config/image_size", json!(40), "image_size is 40"),
        ("tiny-clip", "/vision_config/patch_size", json!(7), "not a multiple of patch_size 7"),
        ("tiny-clip", "/text_config/num_attention_heads", json!(5), "cannot be divided among 5 heads"),
        ("tiny-clip", "/text_config/vocab_size", json!(400), "does not end texts with the token 399"),
        ("tiny-clip", "/projection_dim", json!(7), "projection"),
        ("tiny-siglip", "/text_config/hidden_act", json!("relu"), "text_config.hidden_act is Relu"),
        ("tiny-siglip", "/vision_config/num_channels", json!(4), "num_channels is 4"),
    ] {
        let error = changed(name, |config| {
            let place = config.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}"));
            *place = value.clone();
        });
        assert!(error.contains(part), "{pointer}: {error}");
    }
    let error = changed("tiny-siglip", |config| config["text_config"]["projection_size"] = json!(16));
    assert!(error.contains("projection_size is 16"), "{error}");
}
