//! A run of `sconce run-batch` whose model is a class in Python.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use super::rig::{Ended, Process, Rig, line};

/// The folder with the package `sconce_model`.
pub const PACKAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/python/src");

/// Most classes of these tests: each text is answered with its length and the number of texts in its batch, and a text that
/// is a key of `on` has something done to it.
pub const TINY: &str = r#"
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import sconce_model

HERE = Path(__file__).parent

def hang():
    while True:
        time.sleep(1)

def refuse():
    raise sconce_model.TaskError(422, "no such text", "input")

def fail():
    raise ValueError("a bad text")

class Tiny(sconce_model.Model):
    urls = ["/v1/embeddings"]
    on = {
        "refuse": refuse,
        "fail": fail,
        "exit": lambda: os._exit(3),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hang": hang,
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    }

    def forward(self, batch):
        for one in batch:
            self.on.get(one.value, lambda: None)()
        return [[float(len(one.value)), float(len(batch))] for one in batch]
"#;

/// A run over `texts`, a line each, by the class `class` of this code.
pub fn run_of(code: &str, class: &str, texts: &[&str], more: &[&str]) -> (Rig, Process) {
    let lines: Vec<String> =
        texts.iter().enumerate().map(|(n, text)| line(&format!("r-{n}"), json!({"input": text}))).collect();
    let rig = Rig::new(&lines);
    let process = start(&rig, code, class, more);
    (rig, process)
}

/// Starts a run with this class.
pub fn start(rig: &Rig, code: &str, class: &str, more: &[&str]) -> Process {
    rig.start_command(command(rig, code, class, more))
}

/// The command of a run with this class.
pub fn command(rig: &Rig, code: &str, class: &str, more: &[&str]) -> Command {
    let file = rig.path("tiny_class.py");
    fs::write(&file, code).unwrap();
    let model = format!("python:{}:{class}", file.display());
    let path = format!("pool[0].python.path={PACKAGE}");
    let quick =
        ["launcher.restart_delay=10ms", "launcher.restart_delay_max=100ms", "launcher.quick_failure=1ms"];
    let mut arguments = vec!["--model", &model, "--set", &path];
    arguments.extend(quick.iter().flat_map(|set| ["--set", set]));
    if !more.contains(&"--devices") {
        arguments.extend(["--devices", "cpu"]);
    }
    arguments.extend(more);
    rig.command(&arguments)
}

/// The same to its end.
pub fn answers_of(code: &str, class: &str, texts: &[&str], more: &[&str]) -> (Ended, Vec<Value>) {
    let (rig, process) = run_of(code, class, texts, more);
    let ended = process.wait();
    assert!(rig.left_behind().is_empty(), "{:?}", rig.left_behind());
    (ended, rig.answers())
}

/// The status of each answer.
pub fn statuses(answers: &[Value]) -> Vec<i64> {
    answers.iter().map(|answer| answer["response"]["status_code"].as_i64().unwrap()).collect()
}

/// Writes settings with a pool for each of these classes, and returns their file.
pub fn pools_of(rig: &Rig, classes: &[(&str, &str)]) -> String {
    let pool = |(name, class): &(&str, &str)| {
        format!(
            "[[pool]]\nname = {name:?}\ntask_queue = {name:?}\ndevices = \"cpu\"\nmodel = \"python:{class}\"\n\
             [pool.python]\npath = [{PACKAGE:?}]\n"
        )
    };
    let file = rig.path("sconce.toml");
    fs::write(&file, classes.iter().map(pool).collect::<String>()).unwrap();
    file.to_str().unwrap().to_owned()
}
