//! `sconce devices`, and what `devices` of a pool means, over a driver's library that answers from a
//! table: the real one is opened in the same way.

#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::support::nvml::{DIVIDED, LOST, PARTS, WHOLE, driver};

fn sconce(libraries: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command.args(arguments).env_remove("SCONCE_CONFIG").env_remove("AMQP_URL");
    command.envs(variables.iter().copied());
    command.env("LD_LIBRARY_PATH", libraries).output().unwrap()
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn gpus_are_counted_by_bus_with_their_parts_and_what_is_wrong_with_them() {
    let driver = driver();
    let output = sconce(driver.path(), &["devices", "--json"], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let nvidia = &report(&output)["nvidia"];
    let column = |name: &str| -> Vec<Value> {
        nvidia["gpus"].as_array().unwrap().iter().map(|gpu| gpu[name].clone()).collect()
    };
    assert_eq!(column("uuid"), [WHOLE, DIVIDED, LOST]);
    assert_eq!(column("compute_capability"), [json!([8, 0]), json!([8, 0]), Value::Null]);
    assert_eq!(column("memory")[0], json!({"total": 80u64 << 30, "free": 79u64 << 30}));
    assert_eq!(column("processes")[0], json!([{"pid": 4321, "memory": 1 << 30}]));
    let parts: Vec<_> = column("parts")[1].as_array().unwrap().iter().map(|it| it["uuid"].clone()).collect();
    assert_eq!(parts, PARTS);
    assert!(column("fault")[2].as_str().unwrap().contains("off the bus"), "{nvidia:#}");
    assert_eq!((&nvidia["driver"], &nvidia["cuda"]), (&json!("580.65.06"), &json!("13.0")));
}

#[test]
fn a_person_reads_the_same() {
    let driver = driver();
    let output = sconce(driver.path(), &["devices"], &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    for words in [
        "cuda:0",
        WHOLE,
        "79.00 GiB of 80.00 GiB free",
        "process 4321",
        "1.00 GiB",
        "divided by MIG into 2",
        PARTS[1],
        "12.00 GiB of 40.00 GiB free",
        "OUT OF ORDER",
        "580.65.06",
        "embed/0",
    ] {
        assert!(text.contains(words), "{words:?} is not in:\n{text}");
    }
}

/// Nothing is started: the refusal comes before the broker is looked for.
#[test]
fn a_launcher_refuses_what_is_no_device_here_and_lists_what_is() {
    let driver = driver();
    for (entry, why) in [
        ("cuda:3", "there are 3 GPUs"),
        ("cuda:2", "off the bus"),
        ("cuda:1", "divided by MIG"),
        ("GPU-f", "none of this name"),
        ("MIG-5a1b", "both begin so"),
        ("tpu", "a device is"),
    ] {
        let devices = format!("pool[0].devices=[\"{entry}\"]");
        let output = sconce(driver.path(), &["launch", "--set", &devices], &[]);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(78), "{said}");
        for words in [why, &format!("{entry:?}"), &format!("cuda:0 = {WHOLE}"), PARTS[0]] {
            assert!(said.contains(words), "{entry}: {words:?} is not in {said}");
        }
    }
}

/// Files of these names that are no libraries, so that a driver of this machine is not found either.
#[test]
fn a_machine_without_a_driver_says_so() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libnvidia-ml.so.1", "libnvidia-ml.so"] {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    let output = sconce(folder.path(), &["devices"], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(String::from_utf8(output.stdout).unwrap().contains("no NVIDIA driver here"));
    let output = sconce(folder.path(), &["launch", "--set", "pool[0].devices=[\"cuda:0\"]"], &[]);
    assert_eq!(output.status.code(), Some(78));
    assert!(said(&output).contains("no NVIDIA driver here"), "{}", said(&output));
}

/// Error numbers of nvml.h.
#[test]
fn each_way_to_have_no_driver_has_its_own_words() {
    let folder = driver();
    let asked = ["devices", "--json", "--set", "pool[0].devices=[\"cuda:0\"]"];
    for (number, why) in
        [("9", "not loaded"), ("4", "may not talk"), ("18", "reboot after an update"), ("999", "NVML")]
    {
        let output = sconce(folder.path(), &asked, &[("NVML_FAILS", number)]);
        assert_eq!(output.status.code(), Some(78));
        let unknown = report(&output)["nvidia"]["unknown"].to_string();
        assert!(unknown.contains(why), "{number}: {unknown}");
        assert!(said(&output).contains(why), "{number}: {}", said(&output));
    }
}

#[test]
fn a_reader_that_leaves_ends_a_command_quietly_and_its_checks_still_count() {
    let driver = driver();
    for (arguments, exit) in [
        (&["devices"][..], 0),
        (&["check-config", "--set", "pool[0].model=echo"], 0),
        (&["check-config", "--set", "broker.tls.ca_file=/nowhere"], 78),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
        command.args(arguments).env_remove("SCONCE_CONFIG").env("LD_LIBRARY_PATH", driver.path());
        let output = command.stdout(writer).output().unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(exit), "{arguments:?}: {said}");
        assert!(!said.contains("ipe") && (exit == 78) == said.contains("/nowhere"), "{said}");
    }
}
