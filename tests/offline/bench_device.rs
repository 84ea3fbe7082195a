//! `sconce bench-device` on the CPU: what its report says of a model, and which errors name their cause.

#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-bert-cls");
    command.args(["bench-device", "--model"]).arg(model);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("SCONCE_") || name == "AMQP_URL" {
            command.env_remove(&*name);
        }
    }
    command
}

fn bench_device(more: &[&str]) -> Output {
    command().args(["--tasks", "50", "--time", "50ms", "--words", "2-20"]).args(more).output().unwrap()
}

fn said(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{out}\n{err}")
}

#[test]
fn a_device_is_measured_in_batches_as_a_worker_forms_them() {
    let output = bench_device(&["--device", "cpu", "--set", "pool[0].batch.max_tokens=100", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&report["device"], &report["dtype"], &report["tasks"]),
        (&"cpu".into(), &"f32".into(), &50.into())
    );
    assert_eq!(report["inputs"], 50);
    let number = |value: &Value| value.as_f64().unwrap();
    let most = number(&report["batch"]["tokens"]["max"]);
    assert!(most <= 100.0 && number(&report["batch"]["inputs"]["max"]) > 1.0, "{report:#}");
    let (passes, mean) = (number(&report["passes"]), number(&report["batch"]["tokens"]["mean"]));
    let (seconds, rate) =
        (number(&report["forward"]["seconds"]), number(&report["forward"]["tokens_per_second"]));
    let computed = passes * mean;
    assert!(seconds >= 0.05 && (rate * seconds / computed - 1.0).abs() < 0.05, "{report:#}");
    assert!(
        number(&report["prepare"]["inputs_per_second"]) > 0.0 && number(&report["forward_ms"]["p50"]) > 0.0
    );
    let output = bench_device(&["--device", "cpu"]);
    for words in ["tiny-bert-cls in f32 on cpu", "50 tasks, 50 inputs", "prepare", "forward", "per batch"] {
        assert!(said(&output).contains(words), "{words:?} is not in {}", said(&output));
    }
}

#[test]
fn a_device_or_a_task_that_cannot_be_used_is_named() {
    let output = bench_device(&["--device", "tpu"]);
    assert_eq!(output.status.code(), Some(78));
    assert!(said(&output).contains("device \"tpu\" cannot be used"), "{}", said(&output));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tasks.jsonl");
    fs::write(&file, "{\"input\": 7}\n").unwrap();
    let output = command().args(["--device", "cpu", "--input"]).arg(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(64));
    assert!(said(&output).contains("task 1: "), "{}", said(&output));
}
