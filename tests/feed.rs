//! `make feed` works: its worker, with a card of no cost, answers what its client sends. What it measures is
//! nobody's promise.

use std::path::Path;
use std::process::Command;

#[test]
fn a_worker_that_computes_nothing_is_fed_and_measured() {
    let feed = Path::new(env!("CARGO_BIN_EXE_sconce")).with_file_name("examples").join("feed");
    assert!(feed.exists(), "cargo test --test feed wants cargo build --example feed before it");
    let load = [("QUEUES", "embedded"), ("INPUTS", "2"), ("ENCODINGS", "base64"), ("SECONDS", "1")];
    let ran = Command::new(feed).envs(load).env("THREADS", "2").output().expect("a program");
    let (table, said) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{said}");
    let row = table.lines().last().unwrap_or_default();
    let cells: Vec<&str> = row.split('|').map(str::trim).collect();
    assert_eq!(cells.get(1..5), Some(&["embedded", "2", "base64", "2"][..]), "{table}");
    assert!(cells.get(5).and_then(|rate| rate.parse::<f64>().ok()).is_some_and(|rate| rate > 0.0), "{table}");
}
