//! Lines that hurt: a forward pass that panics, runs out of memory, or takes its worker with it.

use serde_json::{Value, json};

use super::rig::{Rig, line};

/// Eight lines, the fourth with a fault.
fn with_fault(fault: &str) -> Rig {
    let body = |n: usize| match n {
        3 => json!({"input": "text 3", "fail": fault}),
        _ => json!({"input": format!("text {n}")}),
    };
    Rig::new(&(0..8).map(|n| line(&format!("r-{n}"), body(n))).collect::<Vec<_>>())
}

fn run(rig: &Rig, devices: &str) -> Vec<Value> {
    let quick = ["--set", "launcher.restart_delay=10ms", "--set", "launcher.restart_delay_max=100ms"];
    let ended = rig.start(&[&["--model", "echo?faults", "--devices", devices], &quick[..]].concat()).wait();
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let answers = rig.answers();
    assert_eq!(answers.len(), 8, "{answers:?}");
    for (n, answer) in answers.iter().enumerate() {
        assert_eq!(answer["custom_id"], format!("r-{n}"));
        let status = answer["response"]["status_code"].as_i64().unwrap();
        assert_eq!(status == 200, n != 3, "{answer}");
    }
    assert!(rig.left_behind().is_empty());
    answers
}

#[test]
fn a_line_that_kills_its_workers_is_an_error_and_the_rest_are_answered() {
    let answers = run(&with_fault("exit"), "cpu");
    assert_eq!(answers[3]["response"]["status_code"], 500, "{}", answers[3]);
    assert!(!answers[3]["response"]["body"]["error"]["message"].as_str().unwrap().is_empty());
}

#[test]
fn with_two_workers_a_line_that_kills_does_not_take_its_neighbours_along() {
    run(&with_fault("exit"), "cpu,cpu");
}

#[test]
fn a_panic_or_a_failure_in_the_forward_pass_is_that_lines_error_alone() {
    for (fault, status) in [("panic", 500), ("error", 500), ("oom", 507)] {
        let answers = run(&with_fault(fault), "cpu");
        assert_eq!(answers[3]["response"]["status_code"], status, "{}", answers[3]);
    }
}
