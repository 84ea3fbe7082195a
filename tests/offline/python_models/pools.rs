//! Which URLs a class answers, where a command needs to know it before a worker runs.

use std::fs;
use std::process::{Command, Output};

use serde_json::{Value, json};

use super::rig::{Rig, line};
use super::runs::{PACKAGE, pools_of, statuses};

const CLASSES: &str = r#"
import sconce_model

class Lengths(sconce_model.Model):
    urls = ["/v1/embeddings"]

    def forward(self, batch):
        return [[float(len(one.value))] for one in batch]

class Zeros(Lengths):
    def forward(self, batch):
        return [[0.0] for _ in batch]

class Pairs(sconce_model.Model):
    urls = ["/v1/score"]

    def forward(self, batch):
        return [float(len(one.value[0]) + len(one.value[1])) for one in batch]
"#;

fn score(id: &str) -> String {
    let body = json!({"text_1": "a", "text_2": "bb"});
    json!({"custom_id": id, "method": "POST", "url": "/v1/score", "body": body}).to_string()
}

fn rig(lines: &[String]) -> Rig {
    let rig = Rig::new(lines);
    fs::write(rig.path("classes.py"), CLASSES).unwrap();
    rig
}

#[test]
fn a_line_goes_to_the_class_that_answers_its_url() {
    let rig = rig(&[score("r-0"), line("r-1", json!({"input": "abc"})), score("r-2")]);
    let file = pools_of(&rig, &[("lengths", "./classes.py:Lengths"), ("pairs", "./classes.py:Pairs")]);
    let ended = rig.start(&["--config", &file]).wait();
    let answers = rig.answers();
    assert_eq!((ended.code, statuses(&answers)), (Some(0), vec![200, 200, 200]), "{}", ended.stderr);
    let data = |n: usize| &answers[n]["response"]["body"]["data"][0];
    assert_eq!((&data(0)["score"], &data(1)["embedding"]), (&json!(3.0), &json!([3.0])));
}

#[test]
fn a_line_that_two_classes_answer_must_name_the_model_of_one() {
    let named = |model: &str| line(model, json!({"input": "abc", "model": model}));
    let run = |lines: &[String]| {
        let rig = rig(lines);
        let file = pools_of(&rig, &[("lengths", "./classes.py:Lengths"), ("zeros", "./classes.py:Zeros")]);
        let ended = rig.start(&["--config", &file]).wait();
        (ended, rig.answers())
    };
    let (ended, _) = run(&[named("Zeros"), named("Lengths"), line("neither", json!({"input": "abc"}))]);
    assert_eq!(ended.code, Some(64), "{}", ended.stderr);
    let words = "line 3 of the input: the pools \"lengths\", \"zeros\" answer /v1/embeddings: name the model";
    assert!(ended.stderr.contains(words), "{}", ended.stderr);
    let (ended, answers) = run(&[named("Zeros"), named("Lengths")]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let vector = |answer: &Value| answer["response"]["body"]["data"][0]["embedding"][0].clone();
    assert_eq!(answers.iter().map(vector).collect::<Vec<_>>(), [json!(0.0), json!(3.0)]);
}

/// Runs a command on the class `class` of [`CLASSES`].
fn run(command: &str, class: &str, more: &[&str]) -> Output {
    let rig = rig(&[]);
    let model = format!("pool[0].model=python:{}:{class}", rig.path("classes.py").display());
    let path = format!("pool[0].python.path={PACKAGE}");
    let sets = ["--set", &model, "--set", &path, "--set", "pool[0].devices=cpu"];
    Command::new(env!("CARGO_BIN_EXE_sconce"))
        .env_remove("AMQP_URL")
        .arg(command)
        .args(sets)
        .args(more)
        .output()
        .unwrap()
}

#[test]
fn the_tasks_of_a_benchmark_are_for_the_first_url_of_the_class() {
    let few = ["--tasks", "5", "--time", "10ms", "--json"];
    for (class, more) in [("Pairs", &[][..]), ("Lengths", &["--url", "/v1/embeddings"])] {
        let output = run("bench-device", class, &[&few, more].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{class}: {error}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["tasks"], &report["inputs"]), (&json!(5), &json!(5)), "{class}");
    }
}

#[test]
fn a_command_that_cannot_import_the_class_asks_for_the_url() {
    let arguments: [(&str, &[&str]); 2] = [("publish", &["a text"]), ("bench", &["--tasks", "1"])];
    for (command, more) in arguments {
        let broker = ["--set", "broker.url=amqp://127.0.0.1:9", "--set", "broker.give_up_after=1s"];
        let output = run(command, "NoSuch", &[&broker, more].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{command}: {error}");
        assert!(error.contains("give --url") && error.contains("has no NoSuch"), "{command}: {error}");
        let known = run(command, "NoSuch", &[&broker, &["--url", "/v1/score"][..], more].concat());
        let error = String::from_utf8_lossy(&known.stderr);
        assert!(!error.contains("--url") && known.status.code() != Some(0), "{command}: {error}");
    }
}
