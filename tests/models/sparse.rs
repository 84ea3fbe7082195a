//! Sparse vectors through the public interface of a model, held against what sentence-transformers' SparseEncoder answers
//! (`scripts/make-sparse-fixtures.py`), also with a real SPLADE (`scripts/fetch-splade`).

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as NumberType, TensorView, serialize_to_file};
use sconce::model::nets::encoder::sparse::{SparseInput, SparseNetwork};
use sconce::model::tasks::sparse::{self, SparseProcessor};
use sconce::model::{Device, Dtype, Forward, LoadSpec, Processor};
use sconce::protocol::{Body, Message, TaskError, TaskErrorKind};
use serde_json::{Value, json};

/// The largest difference of a number.
const TOLERANCE: f64 = 1e-4;
const FIXTURES: [&str; 5] =
    ["sparse-bert", "sparse-distilbert", "sparse-roberta", "sparse-mpnet", "sparse-modernbert"];

type Model = (SparseProcessor, SparseNetwork);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

fn spec(folder: &Path) -> LoadSpec {
    LoadSpec { max_inputs: 2_000, ..LoadSpec::new(folder.to_str().expect("a path in UTF-8")) }
}

fn load(folder: &Path) -> Model {
    sparse::load(&spec(folder), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"))
}

/// The reply to a request, whose inputs are computed together.
fn reply((processor, network): &mut Model, body: &Value) -> Result<Body, TaskError> {
    let message = Message { body: body.to_string().into(), ..Message::default() };
    let (context, inputs) = processor.preprocess(&message)?;
    let inputs = inputs.all()?;
    let inputs: Vec<&SparseInput> = inputs.iter().map(|sized| &sized.input).collect();
    let outputs = network.forward(&inputs).unwrap_or_else(|error| panic!("{error}"));
    processor.finish(context, outputs.into_iter().collect::<Result<_, _>>()?)
}

fn vectors(model: &mut Model, body: &Value) -> Vec<Vec<(u64, f64)>> {
    let reply = reply(model, body).unwrap_or_else(|error| panic!("{body}: {error}"));
    let vectors: Vec<Vec<Value>> = serde_json::from_slice(&reply.bytes).expect("lists");
    let pair =
        |pair: &Value| (pair["index"].as_u64().expect("an index"), pair["value"].as_f64().expect("a value"));
    vectors.iter().map(|vector| vector.iter().map(pair).collect()).collect()
}

/// The texts of a fixture, and their vectors.
fn expected(name: &str) -> (Vec<String>, Vec<Vec<(u64, f64)>>) {
    let file = std::fs::read(fixture(name).join("expected.json")).expect("a fixture");
    let rows: Vec<Value> = serde_json::from_slice(&file).expect("JSON");
    let rows = rows.into_iter().map(|row| {
        let vector = serde_json::from_value(row["vector"].clone()).expect("pairs");
        (row["text"].as_str().expect("a text").to_owned(), vector)
    });
    rows.unzip()
}

/// A number that is missing counts as 0, since rounding decides whether a tiny one is above 0.
fn assert_close(ours: &[(u64, f64)], theirs: &[(u64, f64)], tolerance: f64, what: &str) {
    assert!(ours.is_sorted_by(|a, b| a.0 < b.0), "{what}: {ours:?}");
    let of = |pairs: &[(u64, f64)], index: u64| {
        pairs.iter().find(|pair| pair.0 == index).map_or(0.0, |pair| pair.1)
    };
    for (index, _) in ours.iter().chain(theirs) {
        let (a, b) = (of(ours, *index), of(theirs, *index));
        assert!((a - b).abs() <= tolerance, "{what}: {a} instead of {b} at {index}");
    }
}

fn equals_the_reference(model: &mut Model, name: &str) {
    let (texts, right) = expected(name);
    let together = vectors(model, &json!({"inputs": texts}));
    assert_eq!(together.len(), texts.len());
    for ((text, right), ours) in texts.iter().zip(&right).zip(&together) {
        assert_close(ours, right, TOLERANCE, &format!("{name}: {text}"));
        let alone = vectors(model, &json!({"inputs": text}));
        assert_eq!(&alone[..], std::slice::from_ref(ours), "{name}: {text}, alone");
    }
}

#[test]
fn vectors_are_those_of_a_sparse_encoder_together_and_to_the_bit_alone() {
    for name in FIXTURES {
        equals_the_reference(&mut load(&fixture(name)), name);
    }
}

/// transformers 5.24 sets `lm_head.decoder.bias` to zeros if the files lack it, and adds no `lm_head.bias` in its place.
#[test]
fn a_head_that_is_not_tied_has_no_bias_but_its_own() {
    let (own, of_tied) = ("lm_head.decoder.bias", "lm_head.bias");
    let bytes = std::fs::read(fixture("sparse-roberta").join("model.safetensors")).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensors: Vec<_> = file.iter().filter(|(name, _)| *name != own).collect();
    let shape = file.tensor(own).expect("the bias").shape().to_vec();
    let zeros = vec![0; 4 * shape[0]];
    let zeros = (own, TensorView::new(NumberType::F32, shape, &zeros).expect("a tensor"));
    let mut all = Vec::new();
    for (with_zeros, is_tied) in [(false, false), (true, false), (false, true)] {
        let copy = tempfile::tempdir().expect("a folder");
        let mut cp = std::process::Command::new("cp");
        let status = cp.arg("-r").arg(fixture("sparse-roberta").join(".")).arg(copy.path()).status();
        assert!(status.expect("cp").success());
        let tensors = tensors.iter().cloned().chain(with_zeros.then(|| zeros.clone()));
        serialize_to_file(tensors, None, &copy.path().join("model.safetensors")).expect("written");
        let path = copy.path().join("config.json");
        let config = std::fs::read(&path).expect("a file");
        let mut config: Value = serde_json::from_slice(&config).expect("JSON");
        config["tie_word_embeddings"] = json!(is_tied);
        std::fs::write(&path, config.to_string()).expect("written");
        all.push(vectors(
            &mut load(copy.path()),
            &json!({"inputs": ["the tide", "A man is playing a guitar"]}),
        ));
    }
    assert_eq!(all[0], all[1]);
    assert!(file.tensor(of_tied).is_ok() && all[0] != all[2], "a tied head uses the other name");
}

#[test]
fn the_vectors_of_a_real_splade_are_those_of_a_sparse_encoder() {
    let folder = root().join("models/splade-tiny");
    assert!(folder.join("model.safetensors").exists(), "run scripts/fetch-splade");
    let mut model = load(&folder);
    equals_the_reference(&mut model, "splade-tiny");
    for dtype in [Dtype::Bf16, Dtype::Int8] {
        let spec = LoadSpec { dtype, ..spec(&folder) };
        let mut model = sparse::load(&spec, &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
        let (texts, right) = expected("splade-tiny");
        for (right, ours) in right.iter().zip(vectors(&mut model, &json!({"inputs": texts}))) {
            assert_close(&ours, right, 0.1, dtype.name());
        }
    }
}

#[test]
fn top_k_and_threshold_choose_among_the_numbers_of_the_whole_vector() {
    let mut model = load(&fixture("sparse-mpnet"));
    let texts = ["A man is playing a guitar", "the tide"];
    let whole = vectors(&mut model, &json!({"inputs": texts}));
    let threshold = whole[0][whole[0].len() / 2].1;
    for (top_k, threshold) in [(7, 0.0), (1_000, threshold), (5, threshold)] {
        let chosen = vectors(&mut model, &json!({"inputs": texts, "top_k": top_k, "threshold": threshold}));
        for (whole, chosen) in whole.iter().zip(chosen) {
            let mut best: Vec<_> = whole.iter().copied().filter(|pair| pair.1 >= threshold).collect();
            best.sort_by(|a, b| b.1.total_cmp(&a.1));
            best.truncate(top_k);
            best.sort_by_key(|pair| pair.0);
            assert_eq!(chosen, best, "{top_k} {threshold}");
        }
    }
}

#[test]
fn the_number_of_a_models_files_is_the_default_of_top_k() {
    let mut model = load(&fixture("sparse-distilbert"));
    let by_default = vectors(&mut model, &json!({"inputs": "the tide"}));
    assert_eq!(by_default[0].len(), 20);
    assert!(vectors(&mut model, &json!({"inputs": "the tide", "top_k": 1_000}))[0].len() > 20);
}

#[test]
fn prompts_are_the_models() {
    let mut model = load(&fixture("sparse-bert"));
    let by_default = vectors(&mut model, &json!({"inputs": "the tide"}));
    assert_eq!(vectors(&mut model, &json!({"inputs": "the tide", "prompt_name": "query"})), by_default);
    let bare =
        vectors(&mut model, &json!({"inputs": ["the tide", "query: the tide"], "prompt_name": "document"}));
    assert_ne!(bare[0], by_default[0]);
    assert_eq!(bare[1], by_default[0]);
    let error = reply(&mut model, &json!({"inputs": "a", "prompt_name": "passage"})).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("prompt_name"));
}

#[test]
fn a_long_text_is_cut_and_counted_or_refused() {
    let mut model = load(&fixture("sparse-mpnet"));
    let long = "the tide carries a message ".repeat(40);
    let cut = reply(&mut model, &json!({"inputs": ["a", long]})).expect("a reply");
    assert_eq!(cut.headers["truncated"].as_i64(), Some(1));
    let error = reply(&mut model, &json!({"inputs": ["a", long], "truncate": false})).unwrap_err();
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("inputs[1]")));
    assert!(error.message.contains("at most 64 tokens"), "{error}");
}

#[test]
fn a_task_whose_vectors_have_too_many_numbers_is_refused_with_413_and_the_next_is_not() {
    let mut model = load(&fixture("sparse-modernbert"));
    let text = expected("sparse-modernbert").0[9].clone();
    let numbers = vectors(&mut model, &json!({"inputs": text}))[0].len();
    let body = json!({"inputs": vec![text.clone(); 400_000 / numbers + 1]});
    let error = reply(&mut model, &body).unwrap_err();
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert!(error.message.contains("more than 400000 numbers together"), "{error}");
    let body = json!({"inputs": vec![text; 400_000 / numbers + 1], "top_k": 8});
    assert!(vectors(&mut model, &body).iter().all(|vector| vector.len() == 8));
}

#[test]
fn what_is_not_supported_is_refused_by_name_when_the_model_is_loaded() {
    let refused = |of: &str, file: &str, content: &Value| {
        let copy = tempfile::tempdir().expect("a folder");
        let mut cp = std::process::Command::new("cp");
        let status = cp.arg("-r").arg(fixture(of).join(".")).arg(copy.path()).status();
        assert!(status.expect("cp").success());
        let path = copy.path().join(file);
        let old = std::fs::read(&path).ok().and_then(|old| serde_json::from_slice::<Value>(&old).ok());
        let content = match (old, content) {
            (Some(Value::Object(mut old)), Value::Object(new)) => {
                old.extend(new.clone());
                Value::Object(old)
            }
            _ => content.clone(),
        };
        std::fs::write(path, content.to_string()).expect("a file");
        match sparse::load(&spec(copy.path()), &Device::Cpu) {
            Ok(_) => panic!("{file}: {content}"),
            Err(error) => error.to_string(),
        }
    };
    let pooling = "1_SpladePooling/config.json";
    for (of, file, content, part) in [
        ("sparse-bert", pooling, json!({"pooling_strategy": "mean"}), "pooling_strategy is \"mean\""),
        ("sparse-bert", pooling, json!({"activation_function": "elu"}), "activation_function is \"elu\""),
        ("sparse-bert", "modules.json", json!([{"type": "a.Router", "path": ""}]), "lists [\"Router\"]"),
        (
            "sparse-bert",
            "modules.json",
            json!([{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]),
            "Transformer, SpladePooling is supported",
        ),
        (
            "sparse-bert",
            "config_sentence_transformers.json",
            json!({"max_active_dims": 0}),
            "max_active_dims is 0",
        ),
        (
            "sparse-bert",
            "config.json",
            json!({"tie_word_embeddings": false}),
            "cls.predictions.decoder.weight is missing",
        ),
        (
            "sparse-modernbert",
            "config.json",
            json!({"classifier_activation": "relu"}),
            "classifier_activation is",
        ),
        ("tiny-bert-max", "config.json", json!({}), "Pooling"),
        ("tiny-nomic", "config.json", json!({}), "the head for masked tokens of Nomic is not supported"),
    ] {
        let error = refused(of, file, &content);
        assert!(error.contains(part), "{of} {file}: {error}");
    }
}
