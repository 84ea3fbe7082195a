//! What is answered by a class in Python.

use std::fs;

use serde_json::json;

use super::rig::{Rig, line};
use super::runs::{TINY, answers_of, start, statuses};

#[test]
fn a_class_in_a_file_answers_each_text_in_its_place() {
    let texts: Vec<String> = (0..50).map(|n| "x".repeat(n + 1)).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let (ended, answers) = answers_of(TINY, "Tiny", &texts, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(answers.len(), 50);
    for (n, answer) in answers.iter().enumerate() {
        let body = &answer["response"]["body"];
        assert_eq!(body["data"][0]["embedding"][0], json!(n as f64 + 1.0), "{answer}");
        assert_eq!((&body["model"], &body["object"]), (&json!("Tiny"), &json!("list")));
        assert!(body["usage"]["prompt_tokens"].as_u64().unwrap() >= 1, "{answer}");
    }
}

#[test]
fn an_output_is_continued_by_the_same_file_and_class_alone() {
    let rig = Rig::new(&[line("r-0", json!({"input": "a"}))]);
    let code = TINY.replace("class Tiny", "class Other(sconce_model.Model):\n    urls = []\n\nclass Tiny");
    let ended = start(&rig, &code, "Tiny", &[]).wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let ended = start(&rig, &code, "Tiny", &[]).wait();
    assert!(ended.stderr.contains("all 1 lines are answered already"), "{}", ended.stderr);
    for (code, class) in [(code.clone(), "Other"), (format!("{code}# changed"), "Tiny")] {
        let ended = start(&rig, &code, class, &[]).wait();
        assert_eq!(ended.code, Some(64), "{}", ended.stderr);
        for words in [
            "made with model \"python:tiny_class.py:Tiny\" (files sha256 ",
            &format!("this run has model \"python:tiny_class.py:{class}\" (files sha256 "),
        ] {
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
    }
}

#[test]
fn all_inputs_of_a_task_are_computed_together_and_options_reach_the_class() {
    let code = r#"
import sconce_model

class Scaled(sconce_model.Model):
    urls = ["/v1/embeddings"]

    class Options:
        factor: float = 1.0

    def load(self, device, dtype, options):
        assert (device, dtype) == ("cpu", "float32"), (device, dtype)
        self.factor = options.factor

    def forward(self, batch):
        return [[self.factor * len(one.value), len(batch)] for one in batch]
"#;
    let rig = Rig::new(&[line("r-0", json!({"input": ["a", "bb", "ccc"]}))]);
    let ended = start(&rig, code, "Scaled", &["--set", "pool[0].options.factor=2.5"]).wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let data = &rig.answers()[0]["response"]["body"]["data"];
    let vectors: Vec<_> = (0..3).map(|n| data[n]["embedding"].clone()).collect();
    assert_eq!(vectors, [json!([2.5, 3.0]), json!([5.0, 3.0]), json!([7.5, 3.0])]);
}

#[test]
fn a_class_may_prepare_and_finish_its_tasks_itself() {
    let code = r#"
import sconce_model
from sconce_model import Body, Input, TaskError

class Words(sconce_model.Model):
    urls = ["/v1/words"]

    def preprocess(self, task):
        words = task.field("text").split()
        if not words:
            raise TaskError(400, "there is no word", "text")
        if words == ["internal"]:
            raise KeyError("a mistake of the class")
        task.state = len(words)
        return [Input(word, tokens=1) for word in words]

    def forward(self, batch):
        return [one.value.upper() for one in batch]

    def finish(self, task, outputs):
        if outputs == ["PLAIN"]:
            return Body(b"plain", "text/plain")
        return {"words": task.state, "text": " ".join(outputs)}
"#;
    let texts = ["two words", "", "internal", "plain"];
    let lines: Vec<String> = texts
        .iter()
        .enumerate()
        .map(|(n, text)| {
            json!({"custom_id": n.to_string(), "method": "POST", "url": "/v1/words", "body": {"text": text}})
                .to_string()
        })
        .collect();
    let rig = Rig::new(&lines);
    let ended = start(&rig, code, "Words", &[]).wait();
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let answers = rig.answers();
    assert_eq!(statuses(&answers), [200, 400, 500, 200]);
    assert_eq!(answers[0]["response"]["body"], json!({"words": 2, "text": "TWO WORDS"}));
    let error = |n: usize| &answers[n]["response"]["body"]["error"];
    assert_eq!((&error(1)["message"], &error(1)["param"]), (&json!("there is no word"), &json!("text")));
    assert!(error(2)["message"].as_str().unwrap().contains("a mistake of the class"), "{}", answers[2]);
    assert!(answers[3].to_string().contains("plain"), "{}", answers[3]);
}

#[test]
fn a_class_may_take_bodies_of_every_media_type() {
    let code = r#"
import sconce_model

class Any(sconce_model.Model):
    urls = ["/any"]
    media_types = ["*/*"]

    def preprocess(self, task):
        return [sconce_model.Input(f"{task.content_type} of {len(task.body)} bytes")]

    def forward(self, batch):
        return [one.value for one in batch]

    def finish(self, task, outputs):
        return {"body": outputs[0]}
"#;
    let row = |body| json!({"custom_id": "r", "method": "POST", "url": "/any", "body": body}).to_string();
    let rig = Rig::new(&[row(json!({})), row(json!("data:image/png;base64,ZmlsZQ=="))]);
    let ended = start(&rig, code, "Any", &[]).wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let bodies: Vec<_> =
        rig.answers().iter().map(|answer| answer["response"]["body"]["body"].clone()).collect();
    assert_eq!(bodies, ["application/json of 2 bytes", "image/png of 4 bytes"]);
}

#[test]
fn the_tasks_of_a_stream_run_side_by_side_and_each_gets_its_own_text() {
    let code = r#"
import asyncio
import sconce_model

class Slow(sconce_model.Model):
    urls = ["/v1/slow"]
    running = most = 0

    async def stream(self, task):
        Slow.running += 1
        Slow.most = max(Slow.most, Slow.running)
        try:
            for part in range(3):
                yield f"{task.field('text')}{part} "
                # Until three run at once, which they do only side by side.
                while Slow.most < 3:
                    await asyncio.sleep(0.01)
            if task.field("text") == "c":
                raise ValueError("c has no end")
        finally:
            Slow.running -= 1

    def finish(self, task, outputs):
        return {"text": "".join(outputs), "most": Slow.most}
"#;
    let lines: Vec<String> = ["a", "b", "c", "d", "e"]
        .iter()
        .map(|text| {
            json!({"custom_id": text, "method": "POST", "url": "/v1/slow", "body": {"text": text, "stream": true}}).to_string()
        })
        .collect();
    let rig = Rig::new(&lines);
    let ended = start(&rig, code, "Slow", &["--set", "pool[0].options.concurrency=3"]).wait();
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let answers = rig.answers();
    assert_eq!(statuses(&answers), [200, 200, 500, 200, 200]);
    for (answer, text) in answers.iter().zip(["a", "b", "c", "d", "e"]).filter(|(_, text)| *text != "c") {
        let expected = json!({"text": format!("{text}0 {text}1 {text}2 "), "most": 3});
        assert_eq!(answer["response"]["body"], expected);
    }
    assert!(answers[2].to_string().contains("c has no end"), "{}", answers[2]);
}

#[test]
fn check_config_imports_the_class_and_says_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let code = r#"
import os
import sconce_model
assert os.environ["CUDA_VISIBLE_DEVICES"] == ""

class Named(sconce_model.Model):
    urls = ["/v1/embeddings", "/v1/score"]

    class Options:
        depth: int = 3

    def load(self, device, dtype, options):
        raise SystemError("check-config loads no model")

    def forward(self, batch):
        return [[1.0] for _ in batch]
"#;
    fs::write(folder.path().join("named_class.py"), code).unwrap();
    let settings = format!(
        "[[pool]]\nmodel = \"python:./named_class.py:Named\"\ndevices = \"cpu\"\n[pool.python]\npath = [{:?}]\n\
         [pool.python.env]\nTOKEN = \"hush\"\n[pool.options]\ndepth = 7\n",
        super::runs::PACKAGE
    );
    let file = folder.path().join("sconce.toml");
    fs::write(&file, settings).unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_sconce"))
        .arg("check-config")
        .arg(&file)
        .env_remove("AMQP_URL")
        .output()
        .unwrap();
    let [said, error] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert_eq!(output.status.code(), Some(0), "{said}\n{error}");
    for expected in [
        "/v1/embeddings (application/json), /v1/score (application/json)",
        "its module was imported now by \"python3\", without a GPU",
        "option depth (int) = 7",
        "\"TOKEN\" = \"***\"",
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    assert!(!said.contains("hush"), "{said}");
}
