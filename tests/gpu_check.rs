//! `scripts/gpu-check` and `sconce bench-device` on the CPU: what is judged is judged rightly, and what has
//! no GPU to be seen on is said to be not measured. Without PyTorch: a tiny network is computed in Python.

#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

#[cfg(feature = "cuda")]
#[path = "support/emulator.rs"]
mod emulator;

const SCONCE: &str = env!("CARGO_BIN_EXE_sconce");
const PAGE: &str = "before\n<!-- `make gpu-check` writes from here -->\nold\n<!-- to here -->\nbehind\n";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn run(mut command: Command) -> Output {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("SCONCE_") || name == "AMQP_URL" {
            command.env_remove(&*name);
        }
    }
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{out}\n{err}")
}

/// The check with a tiny network; later arguments win.
fn command(program: &Path, out: &Path) -> Command {
    let mut command = Command::new("python3");
    command.arg(root().join("scripts/gpu-check")).arg("--sconce").arg(program).arg("--out").arg(out);
    command.args(["--device", "cpu", "--shapes", "tiny", "--dtypes", "f32", "--reference", "plain"]);
    command.env("TMPDIR", out.parent().unwrap());
    command
}

fn results(out: &Path) -> Option<Value> {
    let written = fs::read(out.join("gpu-check.json")).ok();
    written.map(|bytes| serde_json::from_slice(&bytes).unwrap())
}

fn check(program: &Path, out: &Path, more: &[&str]) -> (Output, Option<Value>) {
    let mut command = command(program, out);
    command.args(more);
    (run(command), results(out))
}

/// Promises with this status.
fn with_status(results: &Value, status: &str) -> Vec<String> {
    let all = results["findings"].as_array().unwrap().iter();
    let wanted = all.filter(|it| it["status"] == status);
    wanted.map(|it| it["promise"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn what_a_cpu_can_show_passes_and_what_it_cannot_is_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.md");
    fs::write(&page, PAGE).unwrap();
    let more = ["--measure", "0.2", "--rounds", "2", "--write-docs", page.to_str().unwrap()];
    let (output, results) = check(Path::new(SCONCE), &folder.path().join("out"), &more);
    let results = results.unwrap_or_else(|| panic!("{}", said(&output)));
    assert_eq!((output.status.code(), with_status(&results, "FAIL")), (Some(0), vec![]), "{}", said(&output));
    let passed = with_status(&results, "PASS");
    for promise in [
        "the build starts",
        "a wrong, doubled or empty entry is refused",
        "every reply names the device",
        "a worker whose device is not there ends",
        "tiny in f32: results within 1e-05",
        "tiny in f32: alone as in a batch",
        "tiny: tokens are counted",
        "tiny: one bad input of many fails alone",
        "tiny in f32: every text of a long run is answered",
    ] {
        assert!(passed.iter().any(|it| it.starts_with(promise)), "{promise:?} is not in {passed:#?}");
    }
    let not_measured = with_status(&results, "not measured");
    for promise in ["the launcher never opens CUDA", "out of device memory", "tiny in f32: 1.5 × PyTorch"] {
        assert!(not_measured.iter().any(|it| it.starts_with(promise)), "{promise:?}: {not_measured:#?}");
    }
    let row = &results["rows"][0];
    for number in ["texts", "tokens", "bare_tokens", "busy", "mean_tokens"] {
        assert!(row[number].as_f64().unwrap() > 0.0, "{number}: {row:#}");
    }
    assert!(row["ahead"].is_null() && row["busy_by_driver"].is_null(), "{row:#}");
    let written = fs::read_to_string(&page).unwrap();
    assert!(written.starts_with("before\n") && written.ends_with("behind\n") && !written.contains("old"));
    assert!(written.contains("| tiny | f32 |"), "{written}");
    let left: Vec<PathBuf> = fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().path()).collect();
    assert_eq!(left.len(), 2, "the page and the results, and nothing else: {left:?}");
}

/// A program that is asked for f32 and computes in bf16, as a card might that does not say so.
#[test]
fn results_that_are_not_the_references_fail_with_the_distance() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("other");
    let script = format!(
        "#!/bin/sh\ncase $1 in\nrun-batch) exec {SCONCE} \"$@\" --set pool[0].dtype=bf16 ;;\nesac\nexec {SCONCE} \"$@\"\n"
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let (output, results) = check(&program, &folder.path().join("out"), &["--no-speed"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let results = results.unwrap();
    assert_eq!(with_status(&results, "FAIL"), ["tiny in f32: results within 1e-05 of the reference in f32"]);
    assert!(said(&output).contains("texts differ from Python's by 0.00"), "{}", said(&output));
}

#[test]
fn a_program_that_does_not_start_and_a_card_that_is_not_there_are_failures() {
    let folder = tempfile::tempdir().unwrap();
    let (output, results) = check(Path::new("/bin/false"), &folder.path().join("out"), &[]);
    assert_eq!((output.status.code(), results), (Some(1), None), "{}", said(&output));
    assert!(said(&output).contains("FAIL          the build starts"), "{}", said(&output));
    let (output, _) = check(Path::new(SCONCE), &folder.path().join("out"), &["--device", "cuda:99"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("no cuda:99 here"), "{}", said(&output));
}

fn bench_device(more: &[&str]) -> Output {
    let mut command = Command::new(SCONCE);
    command.args(["bench-device", "--model"]).arg(root().join("tests/fixtures/tiny-bert-cls"));
    command.args(["--tasks", "50", "--time", "50ms", "--words", "2-20"]).args(more);
    run(command)
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
    for words in ["tiny-bert-cls in f32 on cpu", "50 tasks, 50 inputs", "prepare", "forward", "a batch"] {
        assert!(said(&output).contains(words), "{words:?} is not in {}", said(&output));
    }
}

#[test]
fn a_device_or_a_task_that_cannot_be_is_named() {
    let output = bench_device(&["--device", "tpu"]);
    assert_eq!(output.status.code(), Some(78));
    assert!(said(&output).contains("device \"tpu\" cannot be used"), "{}", said(&output));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tasks.jsonl");
    fs::write(&file, "{\"input\": 7}\n").unwrap();
    let mut command = Command::new(SCONCE);
    command.args(["bench-device", "--model"]).arg(root().join("tests/fixtures/tiny-bert-cls"));
    command.args(["--device", "cpu", "--input"]).arg(&file);
    let output = run(command);
    assert_eq!(output.status.code(), Some(64));
    assert!(said(&output).contains("task 1: "), "{}", said(&output));
}

/// The same on a GPU that is made of this CPU. Run by `.ci/cuda`.
#[cfg(feature = "cuda")]
mod on_a_gpu {
    use super::*;

    const GPU: &str = "GPU-a0000000-1111-2222-3333-444444444444";
    /// Says of the first card of tests/fixtures/nvml what the driver would.
    const SMI: &str = r#"#!/bin/sh
case $* in
*uuid,name*)
    echo "GPU-a0000000-1111-2222-3333-444444444444, NVIDIA A100-SXM4-80GB, 81920, 580.65.06, 8.0"
    echo "GPU-c0000000-1111-2222-3333-444444444444, NVIDIA A100-SXM4-80GB, 81920, 580.65.06, 8.0"
    echo "GPU-e0000000-1111-2222-3333-444444444444, NVIDIA A100-SXM4-80GB, 81920, 580.65.06, 8.0"
    ;;
*utilization*) echo 97 ;;
*clocks*) echo "1410, 400" ;;
esac
"#;

    #[test]
    fn every_promise_that_needs_no_pytorch_passes() {
        let folder = tempfile::tempdir().unwrap();
        let smi = folder.path().join("nvidia-smi");
        fs::write(&smi, SMI).unwrap();
        fs::set_permissions(&smi, fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = command(Path::new(SCONCE), &folder.path().join("out"));
        command.args(["--device", "cuda:0", "--dtypes", "f32,f16,bf16", "--measure", "0.5", "--rounds", "1"]);
        let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
        command.env("PATH", path).env("LD_LIBRARY_PATH", &*emulator::DRIVER).env("EMULATED_GPUS", GPU);
        // A megahertz, of which it reaches all.
        command.env("EMULATED_CLOCK", "1000");
        let output = run(command);
        let results = results(&folder.path().join("out")).unwrap_or_else(|| panic!("{}", said(&output)));
        // Of the emulated one's speed nothing is promised.
        let failed = with_status(&results, "FAIL");
        let speed = |promise: &String| promise.contains("the queue costs") || promise.contains("busy 90 %");
        assert!(failed.iter().all(speed), "{}", said(&output));
        let not_measured = with_status(&results, "not measured");
        // PyTorch, and a card that is slower than its clock.
        let missing = ["1.5 × PyTorch", "out of device memory", "slower than asked"];
        let without = |promise: &String| missing.iter().any(|words| promise.contains(words));
        assert!(not_measured.iter().all(without), "{}", said(&output));
        assert!(with_status(&results, "PASS").len() >= 20, "{}", said(&output));
    }
}
