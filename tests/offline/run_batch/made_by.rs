//! An output is gone on with by what made it, and by nothing else: another model, input or setting is
//! refused, and an input that changes while it is answered ends the run with an error.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::rig::{Ended, Rig, line, slow_lines};

/// A run of three lines of which `done` are answered, as if it had been killed there.
fn interrupted(done: usize) -> Rig {
    let rig = Rig::new(&slow_lines(3, 0));
    let ended = rig.run_echo(&[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let kept: String = rig.written().split_inclusive('\n').take(done).collect();
    fs::write(rig.output(), kept).unwrap();
    rig
}

/// Runs `more`, and panics unless it is refused with all of `words` and changes no file.
fn assert_refused(rig: &Rig, run: impl FnOnce() -> Ended, words: &[&str]) {
    let files = || (rig.written(), fs::read_to_string(rig.made_by()).unwrap());
    let before = files();
    let ended = run();
    assert_eq!(ended.code, Some(64), "{}", ended.stderr);
    for words in words {
        assert!(ended.stderr.contains(words), "{words:?} is not in: {}", ended.stderr);
    }
    assert_eq!(files(), before);
}

/// The digest of the model's files, as the file beside the output has it.
fn weights(rig: &Rig) -> Value {
    let told: Value = serde_json::from_slice(&fs::read(rig.made_by()).unwrap()).unwrap();
    told["pools"][0]["weights"].clone()
}

#[test]
fn another_model_is_refused_with_both_named_and_the_output_is_not_touched() {
    // Also where no line is left to do.
    for done in [2, 3] {
        let rig = interrupted(done);
        let other = || rig.start(&["--model", "echo?faults", "--devices", "cpu"]).wait();
        let remove =
            format!("or remove {} and {}", rig.output().to_str().unwrap(), rig.made_by().to_str().unwrap());
        let words = ["made with model \"echo\";", "this run has model \"echo?faults\":", &remove[..]];
        assert_refused(&rig, other, &words);
        assert_eq!(rig.run_echo(&[]).code, Some(0), "the same run goes on");
        rig.assert_all_answered(3);
    }
}

#[test]
fn another_input_with_the_same_ids_is_refused_with_both_named() {
    let rig = interrupted(1);
    let others: Vec<_> = (0..3).map(|n| line(&format!("r-{n}"), json!({"input": "other"}))).collect();
    let other = others.join("\n") + "\n";
    fs::write(rig.input(), &other).unwrap();
    let now = format!("this run has an input of 3 lines ({} bytes, sha256 ", other.len());
    assert_refused(&rig, || rig.run_echo(&[]), &["made with an input of 3 lines (", &now]);
}

#[test]
fn an_input_that_grew_between_two_runs_is_another_input() {
    // Also where all lines that it had are answered.
    for done in [2, 3] {
        let rig = interrupted(done);
        append(&rig.input(), &line("late", json!({"input": "late"})));
        let words = ["made with an input of 3 lines (", "this run has an input of 4 lines ("];
        assert_refused(&rig, || rig.run_echo(&[]), &words);
    }
}

#[test]
fn a_setting_that_changes_answers_is_compared_and_others_are_not() {
    let rig = interrupted(1);
    let limited = || rig.run_echo(&["--set", "pool[0].max_inputs=7", "--set", "pool[0].dtype=bf16"]);
    assert_refused(&rig, limited, &["made with dtype f32, max_inputs ", "has dtype bf16, max_inputs 7:"]);
    let ended = rig.run_echo(&["--set", "pool[0].batch.max_requests=1", "--set", "pool[0].prefetch=2"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    rig.assert_all_answered(3);
}

#[test]
fn other_weights_of_the_same_name_are_refused_and_a_copied_folder_is_not() {
    let rig = Rig::new(&[line("only", json!({"input": "a cat"}))]);
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-bert-cls");
    let copy = |name: &str| -> PathBuf {
        fs::create_dir(rig.path(name)).unwrap();
        let copied = Command::new("cp").arg("-r").arg(&fixture).arg(rig.path(name)).status().unwrap();
        assert!(copied.success());
        rig.path(name).join("tiny-bert-cls")
    };
    let run = |model: &Path| rig.start(&["--model", model.to_str().unwrap(), "--devices", "cpu"]).wait();
    let ended = run(&fixture);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(rig.answers()[0]["response"]["status_code"], 200);
    assert_eq!(weights(&rig).as_str().unwrap().len(), 64);

    let copied = copy("copied");
    fs::write(copied.join("README.md"), "Nothing that is loaded.").unwrap();
    let ended = run(&copied);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("all 1 lines are answered already"), "{}", ended.stderr);

    let trained = copy("trained").join("model.safetensors");
    let mut bytes = fs::read(&trained).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&trained, bytes).unwrap();
    let words =
        ["made with model \"tiny-bert-cls\" (files sha256 ", "has model \"tiny-bert-cls\" (files sha256 "];
    assert_refused(&rig, || run(trained.parent().unwrap()), &words);
}

#[test]
fn of_a_model_without_files_the_name_alone_is_kept() {
    assert_eq!(weights(&interrupted(3)), Value::Null);
}

#[test]
fn an_output_of_which_nothing_tells_the_maker_goes_on_with_a_warning() {
    let rig = interrupted(2);
    fs::remove_file(rig.made_by()).unwrap();
    let ended = rig.run_echo(&[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let warning = "warning: nothing tells what made the first 2 lines of";
    let warnings = ended.stderr.lines().filter(|line| line.starts_with(warning));
    assert_eq!(warnings.count(), 1, "{}", ended.stderr);
    rig.assert_all_answered(3);
    let other = || rig.start(&["--model", "echo?faults", "--devices", "cpu"]).wait();
    assert_refused(&rig, other, &["made with model \"echo\";"]);
}

#[test]
fn a_file_that_does_not_tell_what_made_the_output_is_named() {
    let rig = interrupted(2);
    fs::write(rig.made_by(), "{\"format\":").unwrap();
    assert_refused(&rig, || rig.run_echo(&[]), &[rig.made_by().to_str().unwrap(), "does not say what made"]);
}

#[test]
fn an_output_without_a_whole_line_may_be_made_by_another_model() {
    let rig = interrupted(0);
    let ended = rig.start(&["--model", "echo?faults", "--devices", "cpu"]).wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    rig.assert_all_answered(3);
    assert_refused(&rig, || rig.run_echo(&[]), &["made with model \"echo?faults\";"]);
}

#[test]
fn an_input_that_grows_meanwhile_is_an_error_behind_the_lines_it_had() {
    let rig = Rig::new(&slow_lines(20, 100));
    let run = rig.start_echo(&["--set", "pool[0].batch.max_requests=1", "--set", "pool[0].prefetch=2"]);
    rig.wait_for_lines(2);
    append(&rig.input(), &line("late", json!({"input": "late"})));
    let ended = run.wait();
    assert_eq!(ended.code, Some(64), "{}", ended.stderr);
    let words = "the input has grown since the run began; 20 of the 20 lines that it had then were answered";
    assert!(ended.stderr.contains(words), "{}", ended.stderr);
    assert!(ended.stderr.contains("20 of 20 lines answered now, 0 before"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("the same command"), "{}", ended.stderr);
    rig.assert_all_answered(20);
    assert!(rig.left_behind().is_empty());
}

fn append(path: &Path, line: &str) {
    let mut file = OpenOptions::new().append(true).open(path).unwrap();
    writeln!(file, "{line}").unwrap();
}
