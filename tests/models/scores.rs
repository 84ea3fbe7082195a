//! Scores of pairs and labels of texts through the public interface of a model, held against what
//! sentence-transformers and transformers answer (`scripts/make-score-fixtures.py`).

use std::path::PathBuf;

use sconce::model::load::tokenizer::Tokens;
use sconce::model::nets::encoder::TextNetwork;
use sconce::model::tasks::{labels, pairs};
use sconce::model::{Device, Effort, Forward, LoadSpec, Processor, SizedInput};
use sconce::protocol::{Body, Headers, Message, Properties, TaskError, TaskErrorKind};
use serde_json::{Value, json};

const TOLERANCE: f64 = 1e-5;
/// Models with one label.
const SCORERS: [&str; 8] = [
    "score-bert",
    "score-xlm-roberta",
    "score-modernbert",
    "score-electra",
    "score-deberta-rerank",
    "score-qwen3",
    "score-logits",
    "score-logits-published",
];
/// Models of natural language inference.
const INFERENCE: [&str; 2] = ["score-nli-bert", "score-nli-roberta"];
/// Models with several.
const CLASSIFIERS: [&str; 4] = ["score-roberta", "score-distilbert", "score-deberta", "score-gemma2"];

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn spec(name: &str) -> LoadSpec {
    LoadSpec { max_inputs: 600, ..LoadSpec::new(fixture(name).to_str().expect("a path in UTF-8")) }
}

fn expected(name: &str) -> Value {
    let file = std::fs::read(fixture(name).join("expected.json")).expect("a fixture");
    serde_json::from_slice(&file).expect("JSON")
}

fn message(url: &str, body: &Value) -> Message {
    let headers = Headers::from([("url".into(), url.into())]);
    Message { properties: Properties { headers, ..Properties::default() }, body: body.to_string().into() }
}

/// A preprocessed task, whose inputs are all made.
type Prepared<P> = (<P as Processor>::Context, Vec<SizedInput<<P as Processor>::Input>>);

fn preprocess<P: Processor>(processor: &P, url: &str, body: &Value) -> Result<Prepared<P>, TaskError> {
    let (context, inputs) = processor.preprocess(&message(url, body))?;
    Ok((context, inputs.all()?))
}

/// The reply to a request, whose inputs are computed together.
fn reply<P>((processor, network): &mut (P, TextNetwork), url: &str, body: &Value) -> Body
where
    P: Processor<Input = Tokens, Output = Vec<f32>>,
{
    let (context, inputs) =
        preprocess(processor, url, body).unwrap_or_else(|error| panic!("{body}: {error}"));
    let inputs: Vec<&Tokens> = inputs.iter().map(|sized| &sized.input).collect();
    let outputs = network.forward(&inputs).unwrap_or_else(|error| panic!("{error}"));
    let outputs = outputs.into_iter().map(|output| output.unwrap_or_else(|error| panic!("{error}")));
    processor.finish(context, outputs.collect()).unwrap_or_else(|error| panic!("{error}"))
}

fn answer<P>(model: &mut (P, TextNetwork), url: &str, body: &Value) -> Value
where
    P: Processor<Input = Tokens, Output = Vec<f32>>,
{
    serde_json::from_slice(&reply(model, url, body).bytes).expect("JSON")
}

fn assert_close(ours: &Value, theirs: &Value, what: &str) {
    let numbers = |value: &Value| match value {
        Value::Array(numbers) => numbers.iter().map(|it| it.as_f64().expect("a number")).collect(),
        one => vec![one.as_f64().expect("a number")],
    };
    let (ours, theirs) = (numbers(ours), numbers(theirs));
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (a, b) in ours.iter().zip(&theirs) {
        assert!((a - b).abs() <= TOLERANCE, "{what}: {a} instead of {b}");
    }
}

fn rows<'a>(value: &'a Value, name: &str) -> &'a Vec<Value> {
    value[name].as_array().unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn scores_are_those_of_a_cross_encoder_together_and_alone() {
    for name in SCORERS {
        let mut model = pairs::load(&spec(name), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
        let expected = expected(name);
        let pairs = rows(&expected, "pairs");
        let side = |index: usize| pairs.iter().map(|pair| pair[index].clone()).collect::<Vec<_>>();
        for (field, raw_scores) in [("scores", false), ("logits", true)] {
            let body = json!({"text_1": side(0), "text_2": side(1), "raw_scores": raw_scores});
            let together = answer(&mut model, "/v1/score", &body);
            assert_eq!((&together["object"], rows(&together, "data").len()), (&json!("list"), pairs.len()));
            for (index, right) in rows(&expected, field).iter().enumerate() {
                let what = format!("{name}, {field}: {}", pairs[index]);
                assert_eq!(together["data"][index]["index"], index);
                assert_close(&together["data"][index]["score"], right, &what);
                let alone =
                    json!({"text_1": pairs[index][0], "text_2": pairs[index][1], "raw_scores": raw_scores});
                let alone = answer(&mut model, "/v1/score", &alone);
                assert_close(&alone["data"][0]["score"], right, &format!("{what}, alone"));
            }
        }
    }
}

#[test]
fn an_instruction_is_a_part_of_the_prompt_or_refused() {
    for name in ["score-logits", "score-logits-published"] {
        let mut model = pairs::load(&spec(name), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
        let expected = expected(name);
        let pairs = rows(&expected, "pairs");
        let side = |index: usize| pairs.iter().map(|pair| pair[index].clone()).collect::<Vec<_>>();
        let instruction = &expected["instruction"][0];
        let body = json!({
            "text_1": side(0), "text_2": side(1), "raw_scores": true, "instruction": instruction
        });
        let together = answer(&mut model, "/v1/score", &body);
        for (index, right) in rows(&expected, "instructed").iter().enumerate() {
            assert_close(&together["data"][index]["score"], right, &format!("{name}: {}", pairs[index]));
        }
        let body = json!({
            "query": pairs[0][0], "documents": [pairs[0][1]], "raw_scores": true, "instruction": instruction
        });
        let reranked = answer(&mut model, "/v1/rerank", &body);
        assert_close(&reranked["results"][0]["relevance_score"], &expected["instructed"][0], name);
        let body = json!({"query": "q", "documents": ["a"], "instruction": "x".repeat(5_000)});
        let Err(error) = preprocess(&model.0, "/v1/rerank", &body) else { panic!("it is too long") };
        assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::TooLarge, Some("instruction")));
        let long = "the tide carries a message ".repeat(60);
        let cut = reply(&mut model, "/v1/rerank", &json!({"query": "q", "documents": ["a", long]}));
        assert_eq!(cut.headers["truncated"].as_i64(), Some(1));
    }
    let (processor, _) =
        pairs::load(&spec("score-qwen3"), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let body = json!({"query": "q", "documents": ["a"], "instruction": "find it"});
    let Err(error) = preprocess(&processor, "/v1/rerank", &body) else { panic!("it takes none") };
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("instruction")));
    let body = json!({"query": "q", "documents": ["a"], "instruction": null});
    assert!(preprocess(&processor, "/v1/rerank", &body).is_ok());
}

#[test]
fn documents_come_back_best_first_with_the_scores_of_their_pairs() {
    let mut model = pairs::load(&spec("score-bert"), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let query = "what carries a message?";
    let documents =
        ["the tide", "A man is playing a guitar", "RabbitMQ delivers each message", "", "a queue"];
    let body = json!({"text_1": query, "text_2": documents});
    let scores = answer(&mut model, "/v1/score", &body);
    let body = json!({"query": query, "documents": documents, "top_n": 4, "return_documents": true});
    let reranked = answer(&mut model, "/v1/rerank", &body);
    let results = rows(&reranked, "results");
    assert_eq!(results.len(), 4);
    for pair in results.windows(2) {
        assert!(pair[0]["relevance_score"].as_f64() >= pair[1]["relevance_score"].as_f64(), "{pair:?}");
    }
    for result in results {
        let index = result["index"].as_u64().expect("an index") as usize;
        assert_close(&result["relevance_score"], &scores["data"][index]["score"], "the same pair");
        assert_eq!(result["document"]["text"], documents[index]);
    }
    assert_eq!(reranked["model"], "score-bert");
    assert_eq!(reranked["usage"], scores["usage"]);
    assert!(
        answer(&mut model, "/v1/rerank", &json!({"query": "q", "texts": ["a"]}))["results"][0]["document"]
            .is_null()
    );
}

#[test]
fn labels_are_those_of_the_transformers_library_together_and_alone() {
    for name in CLASSIFIERS {
        let mut model = labels::load(&spec(name), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
        let expected = expected(name);
        let texts = rows(&expected, "texts");
        for (field, raw_scores) in [("probs", false), ("logits", true)] {
            let together =
                answer(&mut model, "/classify", &json!({"input": texts, "raw_scores": raw_scores}));
            for (index, right) in rows(&expected, field).iter().enumerate() {
                let what = format!("{name}, {field}: {}", texts[index]);
                assert_close(&together["data"][index]["probs"], right, &what);
                let alone = json!({"input": texts[index], "raw_scores": raw_scores});
                assert_close(&answer(&mut model, "/classify", &alone)["data"][0]["probs"], right, &what);
            }
        }
    }
}

#[test]
fn labels_have_the_names_of_the_files() {
    let mut model =
        labels::load(&spec("score-roberta"), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let answer = answer(&mut model, "/classify", &json!({"input": ["hello", "a queue"], "top_k": 2}));
    for one in rows(&answer, "data") {
        assert_eq!(one["num_classes"], 3);
        assert_eq!(one["label"], one["labels"][0]["label"]);
        assert!(["negative", "neutral", "positive"].contains(&one["label"].as_str().expect("a label")));
        assert_eq!(rows(one, "labels").len(), 2);
    }
}

#[test]
fn a_long_text_is_cut_and_counted_or_refused() {
    let long = "the tide carries a message ".repeat(40);
    let mut model = pairs::load(&spec("score-bert"), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let body = json!({"query": "q", "documents": ["a", long, "b", long]});
    let cut = reply(&mut model, "/v1/rerank", &body);
    assert_eq!(cut.headers["truncated"].as_i64(), Some(2));
    let body = json!({"query": "q", "documents": ["a", long], "truncate": false});
    let Err(error) = preprocess(&model.0, "/v1/rerank", &body) else { panic!("it is too long") };
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("documents[1]")));
    assert!(error.message.contains("at most 64 tokens"), "{error}");
    let whole =
        reply(&mut model, "/v1/rerank", &json!({"query": "q", "documents": ["a"], "truncate": false}));
    assert!(!whole.headers.contains_key("truncated"));
    let mut model =
        labels::load(&spec("score-distilbert"), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let cut = reply(&mut model, "/classify", &json!({"input": [long, "a"]}));
    assert_eq!(cut.headers["truncated"].as_i64(), Some(1));
    let Err(error) = preprocess(&model.0, "/classify", &json!({"input": long, "truncate": false})) else {
        panic!("it is too long")
    };
    assert_eq!(error.param.as_deref(), Some("input"));
}

#[test]
fn each_document_is_an_input_of_its_own_within_the_limit() {
    let (processor, _) =
        pairs::load(&spec("score-bert"), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let body = |count: usize| json!({"query": "q", "documents": vec!["a document"; count]});
    assert_eq!(
        preprocess(&processor, "/v1/rerank", &body(500)).unwrap_or_else(|_| panic!("500")).1.len(),
        500
    );
    let Err(error) = preprocess(&processor, "/v1/rerank", &body(10_000)) else { panic!("too many") };
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert_eq!(error.message, "documents holds 10000 items; this pool takes at most 600");
}

#[test]
fn labels_of_the_request_have_the_scores_of_the_pipeline_for_zero_shot_classification() {
    for name in INFERENCE {
        let mut model = labels::load(&spec(name), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
        for case in expected(name).as_array().expect("cases") {
            let mut body = case.clone();
            let right =
                body.as_object_mut().and_then(|body| body.remove("expected")).expect("labels with scores");
            let right: Vec<(String, f64)> = serde_json::from_value(right).expect("labels with scores");
            let ours = answer(&mut model, "/classify", &body);
            // The same text in a list, with another one.
            let text = body["input"].take();
            body["input"] = json!(["hello", text]);
            let list = answer(&mut model, "/classify", &body);
            assert_eq!(
                (list[1].clone(), list[0].as_array().map(Vec::len)),
                (ours.clone(), Some(right.len()))
            );
            for (ours, (label, score)) in ours.as_array().expect("a list").iter().zip(right) {
                assert_eq!(ours["label"], label, "{name}: {case}");
                assert_close(&ours["score"], &score.into(), &format!("{name}: {case}"));
            }
        }
    }
}

#[test]
fn a_model_of_natural_language_inference_also_has_labels_of_its_own() {
    let mut model =
        labels::load(&spec("score-nli-bert"), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let own = answer(&mut model, "/classify", &json!({"input": "hello", "top_k": 3}));
    let names: Vec<&Value> = rows(&own["data"][0], "labels").iter().map(|label| &label["label"]).collect();
    assert!(names.contains(&&json!("entailment")) && names.len() == 3, "{own}");
    let best =
        answer(&mut model, "/classify", &json!({"input": "hello", "labels": ["a", "b", "c"], "top_k": 1}));
    assert_eq!(best.as_array().map(Vec::len), Some(1));
}

#[test]
fn labels_of_the_request_are_refused_where_they_do_not_fit() {
    let load = |name: &str| labels::load(&spec(name), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let refusal = |model: &(labels::LabelProcessor, TextNetwork), body: &Value| {
        let Err(error) = preprocess(&model.0, "/classify", body) else { panic!("{body}") };
        (error.kind, error.param.unwrap_or_default(), error.message)
    };
    let (kind, param, message) = refusal(&load("score-roberta"), &json!({"input": "a", "labels": ["x"]}));
    assert_eq!((kind, &*param), (TaskErrorKind::BadInput, "labels"));
    assert!(
        message.contains("natural language inference") && message.contains("negative, neutral"),
        "{message}"
    );
    let mut model = load("score-nli-roberta");
    // Only the text is cut, and a label must leave room for it.
    let long = "the tide carries a message ".repeat(40);
    let cut = reply(&mut model, "/classify", &json!({"input": [long, "a"], "labels": ["x", "y"]}));
    assert_eq!(cut.headers["truncated"].as_i64(), Some(2));
    let (_, param, message) =
        refusal(&model, &json!({"input": ["a", long], "labels": ["x"], "truncate": false}));
    assert_eq!(param, "input[1]");
    assert!(message.contains("at most 64 tokens"), "{message}");
    let label = "the tide ".repeat(90);
    let (_, param, message) = refusal(&model, &json!({"input": "a", "labels": ["x", label]}));
    assert_eq!(param, "labels[1]");
    assert!(message.contains("leaves no room for a text"), "{message}");
    // Pairs count, and are made on demand.
    let texts = vec!["a"; 300];
    let (kind, _, message) = refusal(&model, &json!({"input": texts, "labels": ["x", "y", "z"]}));
    assert_eq!(kind, TaskErrorKind::TooLarge);
    assert_eq!(message, "300 texts and 3 labels are 900 pairs; this pool takes at most 600");
    let (_, inputs) = preprocess(&model.0, "/classify", &json!({"input": texts, "labels": ["x", "y"]}))
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(inputs.len(), 600);
    assert_ne!(inputs[0].input.ids, inputs[1].input.ids);
    assert_eq!(inputs[1].input, inputs[599].input);
}

#[test]
fn of_two_long_texts_the_longer_one_keeps_the_odd_token() {
    let mut model = pairs::load(&spec("score-bert"), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let letters = |count: usize, letter: fn(usize) -> usize| {
        (0..count).map(|at| char::from(b'a' + letter(at) as u8).to_string()).collect::<Vec<_>>().join(" ")
    };
    let (long, short) = (letters(66, |at| at % 26), letters(65, |at| 25 - at % 26));
    for (first, second, theirs) in [(&long, &short, 0.062_540_67), (&short, &long, 0.935_993_5)] {
        let body = json!({"text_1": first, "text_2": second, "raw_scores": true});
        assert_close(&answer(&mut model, "/v1/score", &body)["data"][0]["score"], &json!(theirs), "odd");
    }
}

#[test]
fn prompts_count_in_the_cost_of_a_task_and_their_bytes_are_bounded() {
    let model =
        pairs::load(&spec("score-logits-published"), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let documents = vec![""; 30];
    let small = message("/v1/rerank", &json!({"query": "a", "documents": documents}));
    assert_eq!(model.0.effort(&small), Effort::Usual);
    let large = json!({"query": "a ".repeat(2 << 20), "documents": documents});
    let error = preprocess(&model.0, "/v1/rerank", &large).err().expect("a refusal");
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert!(error.message.contains("at most 67108864"), "{error}");
}
