//! Labels of tokens through the public interface of a model, held against the pipeline `token-classification` of the
//! transformers library (`scripts/make-token-label-fixtures.py`).

use std::path::PathBuf;

use sconce::model::tasks::token_labels::{self, TokenLabelNetwork, TokenLabelProcessor, WindowInput};
use sconce::model::{Device, Effort, Forward, Inputs, LoadSpec, Processor, SizedInput};
use sconce::protocol::{Body, Message, TaskError, TaskErrorKind};
use serde_json::{Value, json};

const TOLERANCE: f64 = 1e-5;
const MODELS: [&str; 7] = [
    "token-bert",
    "token-bert-cased",
    "token-roberta",
    "token-xlm-roberta",
    "token-distilbert",
    "token-mpnet",
    "token-modernbert",
];

type Model = (TokenLabelProcessor, TokenLabelNetwork);
/// A preprocessed task, whose inputs are all made.
type Prepared = (<TokenLabelProcessor as Processor>::Context, Vec<SizedInput<WindowInput>>);

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn load(name: &str) -> Model {
    let spec =
        LoadSpec { max_inputs: 2_000, ..LoadSpec::new(fixture(name).to_str().expect("a path in UTF-8")) };
    token_labels::load(&spec, &Device::Cpu).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn preprocess(processor: &TokenLabelProcessor, body: &Value) -> Result<Prepared, TaskError> {
    let message = Message { body: body.to_string().into(), ..Message::default() };
    let (context, inputs) = processor.preprocess(&message)?;
    Ok((context, inputs.all()?))
}

/// The reply to a request, whose inputs are computed in batches of 32.
fn reply((processor, network): &mut Model, body: &Value) -> Result<Body, TaskError> {
    let (context, inputs) = preprocess(processor, body)?;
    let mut outputs = Vec::new();
    for batch in inputs.chunks(32) {
        let batch: Vec<&WindowInput> = batch.iter().map(|sized| &sized.input).collect();
        let batch = network.forward(&batch).unwrap_or_else(|error| panic!("{error}"));
        outputs.extend(batch.into_iter().map(|output| output.unwrap_or_else(|error| panic!("{error}"))));
    }
    processor.finish(context, outputs)
}

fn answer(model: &mut Model, body: &Value) -> Value {
    let reply = reply(model, body).unwrap_or_else(|error| panic!("{body}: {error}"));
    serde_json::from_slice(&reply.bytes).expect("JSON")
}

fn refused(model: &mut Model, body: &Value) -> TaskError {
    match reply(model, body) {
        Ok(_) => panic!("{body} is answered"),
        Err(error) => error,
    }
}

/// The same entities, in all but the last digits of their scores.
fn assert_same(ours: &Value, theirs: &Value, what: &str) {
    let (ours, theirs) = (ours.as_array().expect("a list"), theirs.as_array().expect("a list"));
    assert_eq!(ours.len(), theirs.len(), "{what}: {ours:?} instead of {theirs:?}");
    for (one, right) in ours.iter().zip(theirs) {
        let score = |entity: &Value| entity["score"].as_f64().expect("a score");
        assert!((score(one) - score(right)).abs() <= TOLERANCE, "{what}: {one} instead of {right}");
        let mut one = one.clone();
        one["score"] = right["score"].clone();
        assert_eq!(&one, right, "{what}");
    }
}

/// The cases of a fixture: a request, and the list of entities of each of its texts.
fn cases(name: &str) -> Vec<Value> {
    let file = std::fs::read(fixture(name).join("expected.json")).expect("a fixture");
    serde_json::from_slice(&file).expect("JSON")
}

/// The entities of a case in a reply, of which a fixture may have only those at both ends.
fn entities_of(case: &Value, reply: &Value) -> Value {
    let Some(count) = case["count"].as_u64() else { return reply.clone() };
    let (all, kept) = (reply.as_array().expect("a list"), case["entities"].as_array().expect("a list").len());
    assert_eq!(all.len() as u64, count);
    [&all[..kept / 2], &all[all.len() - kept / 2..]].concat().into()
}

/// The text that a fixture names by itself or as many times a part.
fn text_of(case: &Value) -> String {
    let times = case["times"].as_u64().unwrap_or(1) as usize;
    case["text"].as_str().expect("a text").repeat(times)
}

#[test]
fn entities_are_those_of_the_transformers_library_together_and_alone() {
    for name in MODELS {
        let mut model = load(name);
        let cases = cases(name);
        assert!(cases.len() > 50, "{name}");
        let mut all_options: Vec<&Value> = Vec::new();
        for options in cases.iter().map(|case| &case["options"]) {
            if !all_options.contains(&options) {
                all_options.push(options);
            }
        }
        for options in all_options {
            let alike: Vec<&Value> = cases.iter().filter(|case| &case["options"] == options).collect();
            let body = |input: Value| {
                let mut body = options.clone();
                body["input"] = input;
                body
            };
            let texts: Vec<String> = alike.iter().map(|case| text_of(case)).collect();
            let together = answer(&mut model, &body(json!(texts)));
            for ((case, text), ours) in alike.iter().zip(&texts).zip(together.as_array().expect("a list")) {
                let what = format!("{name}, {options}: {}", case["text"]);
                assert_same(&entities_of(case, ours), &case["entities"], &what);
                let alone = answer(&mut model, &body(json!(text)));
                assert_same(&entities_of(case, &alone), &case["entities"], &what);
            }
        }
    }
}

#[test]
fn offsets_count_characters_of_the_text_as_it_was_sent() {
    let mut model = load("token-bert");
    let text = "👩‍👩‍👧‍👦 é\u{301}té\tİstanbul, 北京 — שלום WORLD";
    let body = json!({"input": text, "aggregation_strategy": "none", "ignore_labels": []});
    let characters: Vec<char> = text.chars().collect();
    let found = answer(&mut model, &body);
    let mut last = 0;
    for token in found.as_array().expect("a list") {
        let [start, end] = ["start", "end"].map(|key| token[key].as_u64().expect("a number") as usize);
        assert!(last <= start && start < end && end <= characters.len(), "{token}");
        assert!(!characters[start..end].iter().any(|it| it.is_whitespace()), "{token}");
        last = end;
    }
    let [start, end] = [characters.len() - 5, characters.len()];
    assert!(found.as_array().is_some_and(|all| all.iter().any(|it| it["start"] == start)));
    assert_eq!(last, end);
}

#[test]
fn a_long_text_is_cut_and_counted_or_read_in_windows_or_refused() {
    let mut model = load("token-bert");
    let long = "Anna of Oslo ".repeat(200);
    let cut = reply(&mut model, &json!({"input": [long, "Anna"], "ignore_labels": []})).expect("a reply");
    assert_eq!(cut.headers["truncated"].as_i64(), Some(1));
    let error = refused(&mut model, &json!({"input": ["a", long], "truncate": false}));
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("input[1]")));
    assert!(error.message.contains("at most 64 tokens"), "{error}");
    let whole = json!({"input": long, "truncate": false, "stride": 7, "ignore_labels": []});
    let whole = reply(&mut model, &whole).expect("a reply");
    assert!(!whole.headers.contains_key("truncated"));
    let entities: Vec<Value> = serde_json::from_slice(&whole.bytes).expect("JSON");
    assert!(entities.last().is_some_and(|last| last["end"].as_u64() > Some(2_400)));
}

#[test]
fn windows_and_bytes_of_a_text_are_bounded_before_they_cost_anything() {
    let mut model = load("token-bert");
    let error = refused(&mut model, &json!({"input": "a", "stride": 62}));
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("stride")));
    assert!(error.message.contains("stride is 62; it must be less than 62"), "{error}");
    let text = "a ".repeat(10_000);
    let error = refused(&mut model, &json!({"input": ["b", text], "stride": 61}));
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::TooLarge, Some("input[1]")));
    assert!(error.message.contains("10000 tokens, which are 9939 windows"), "{error}");
    let error = refused(&mut model, &json!({"input": vec!["a ".repeat(1_500); 5], "stride": 59}));
    assert_eq!(error.kind, TaskErrorKind::TooLarge, "{error}");
    assert!(error.message.contains("more than 1029 windows together"), "{error}");
    let text = "a ".repeat(1 << 20);
    let begun = std::time::Instant::now();
    let error = refused(&mut model, &json!({"input": text, "stride": 1}));
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::TooLarge, Some("input")));
    assert!(error.message.contains("2097152 bytes; with stride at most 262144"), "{error}");
    let cut = reply(&mut model, &json!({"input": text})).expect("a reply");
    assert_eq!(cut.headers["truncated"].as_i64(), Some(1));
    assert!(begun.elapsed().as_secs() < 5, "{:?}", begun.elapsed());
}

#[test]
fn a_long_text_in_windows_is_prepared_apart_from_other_tasks() {
    let (processor, _) = load("token-bert");
    let inputs = |words: usize| {
        let body = json!({"input": "a ".repeat(words), "stride": 0}).to_string();
        match processor.preprocess(&Message { body: body.into(), ..Message::default() }) {
            Ok((_, inputs)) => inputs,
            Err(error) => panic!("{error}"),
        }
    };
    assert!(matches!(inputs(100), Inputs::All(all) if all.len() == 2));
    assert!(matches!(inputs(20_000), Inputs::Later(_)));
    assert_eq!(inputs(20_000).all().map(|all| all.len()), Ok(323));
}

#[test]
fn a_reply_that_would_be_too_large_is_refused() {
    let mut model = load("token-bert");
    let texts = vec![". ".repeat(62); 1_990];
    let body = json!({"input": texts, "aggregation_strategy": "none", "ignore_labels": []});
    let error = refused(&mut model, &body);
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert!(error.message.contains("more than 8388608 bytes"), "{error}");
}

#[test]
fn the_end_of_a_text_is_kept_or_its_windows_are_counted_from_there_if_the_model_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in fixture("token-bert").read_dir().expect("a folder") {
        let file = file.expect("a file");
        std::fs::copy(file.path(), folder.path().join(file.file_name())).expect("a copy");
    }
    let path = folder.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    config["truncation_side"] = json!("left");
    config["model_max_length"] = json!(8);
    std::fs::write(&path, config.to_string()).expect("written");
    let spec = LoadSpec { max_inputs: 2_000, ..LoadSpec::new(folder.path().to_str().expect("UTF-8")) };
    let mut model = token_labels::load(&spec, &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let text = "one two three four five six seven eight nine ten eleven";
    let found = |reply: &Value| {
        let one = |entity: &Value| {
            let score = entity["score"].as_f64().expect("a score");
            (entity["start"].as_u64().expect("a place"), (score * 1e4).round() / 1e4)
        };
        reply.as_array().expect("a list").iter().map(one).collect::<Vec<_>>()
    };
    let cut = json!({"input": text, "aggregation_strategy": "none", "ignore_labels": []});
    let theirs = [(47, 0.644), (49, 0.5683), (51, 0.3949), (52, 0.4391), (53, 0.57), (54, 0.5086)];
    assert_eq!(found(&answer(&mut model, &cut)), theirs);
    let windows = json!({"input": text, "stride": 2, "ignore_labels": []});
    let theirs =
        [(0, 0.3652), (5, 0.5343), (6, 0.4903), (8, 0.4476), (10, 0.4622), (14, 0.3339), (22, 0.6289)];
    assert_eq!(found(&answer(&mut model, &windows))[..7], theirs);
}

#[test]
fn a_short_message_with_many_windows_is_refused_and_is_never_brief() {
    let mut model = load("token-bert");
    let body = json!({"input": ". ".repeat(1_800), "stride": 61});
    let error = refused(&mut model, &body);
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert!(error.message.contains("windows of 62 tokens with 61 in common; at most 1025"), "{error}");
    let message = Message { body: json!({"input": "a"}).to_string().into(), ..Message::default() };
    assert_eq!(model.0.effort(&message), Effort::Usual);
}
