//! Classes that fail, hang, print, fork and die: only the text at fault is answered with an error, and nothing outlives the
//! worker.

use std::fs;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::processes::{children, lives};
use super::rig::{Rig, eventually, line};
use super::runs::{TINY, answers_of, pools_of, run_of, start, statuses};

/// Eight texts, the fourth with this one.
fn with(bad: &str) -> [&str; 8] {
    ["a", "b", "c", bad, "e", "f", "g", "h"]
}

#[test]
fn a_text_that_fails_is_an_error_alone() {
    for (bad, status, message) in [("fail", 500, "a bad text"), ("refuse", 400, "no such text")] {
        let (ended, answers) = answers_of(TINY, "Tiny", &with(bad), &[]);
        assert_eq!(ended.code, Some(87), "{}", ended.stderr);
        let expected: Vec<i64> = (0..8).map(|n| if n == 3 { status } else { 200 }).collect();
        assert_eq!(statuses(&answers), expected, "{bad}");
        assert!(answers[3].to_string().contains(message), "{}", answers[3]);
    }
}

#[test]
fn a_text_that_kills_its_process_is_an_error_alone_also_if_it_does_so_by_a_signal() {
    for bad in ["exit", "kill"] {
        let (ended, answers) = answers_of(TINY, "Tiny", &with(bad), &[]);
        assert_eq!(ended.code, Some(87), "{}", ended.stderr);
        let expected: Vec<i64> = (0..8).map(|n| if n == 3 { 500 } else { 200 }).collect();
        assert_eq!(statuses(&answers), expected, "{bad}: {}", ended.stderr);
    }
}

#[test]
fn a_text_that_takes_longer_than_the_timeout_is_an_error_alone() {
    for bad in ["hang", "stop"] {
        let (ended, answers) = answers_of(TINY, "Tiny", &with(bad), &["--set", "pool[0].batch.timeout=1s"]);
        assert_eq!(ended.code, Some(87), "{}", ended.stderr);
        let expected: Vec<i64> = (0..8).map(|n| if n == 3 { 500 } else { 200 }).collect();
        assert_eq!(statuses(&answers), expected, "{bad}: {}", ended.stderr);
    }
}

#[test]
fn a_batch_without_memory_is_halved_until_it_fits() {
    let code = TINY.replace(
        "        return [[",
        "        if len(batch) > 2:\n            raise MemoryError()\n        return [[",
    );
    let rig = Rig::new(&[line("r-0", json!({"input": ["a", "bb", "c", "d", "e", "f", "g", "h"]}))]);
    let ended = start(&rig, &code, "Tiny", &[]).wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let data = rig.answers()[0]["response"]["body"]["data"].clone();
    assert_eq!((&data[1]["embedding"], data.as_array().unwrap().len()), (&json!([2.0, 2.0]), 8));
}

#[test]
fn a_gigabyte_of_output_is_left_out_of_the_log_and_out_of_the_frames() {
    let code = TINY.replace(
        "HERE = ",
        "block = (\"x\" * 99 + \"\\n\") * 10_000\nfor _ in range(1_000):\n    sys.stdout.write(block)\nsys.stderr.write(\"y\" * 50_000_000)\nHERE = ",
    );
    let (ended, answers) = answers_of(&code, "Tiny", &["a"], &[]);
    assert_eq!((ended.code, statuses(&answers)), (Some(0), vec![200]), "{}", ended.stderr.len());
    assert!(ended.stderr.len() < 1_000_000, "{}", ended.stderr.len());
}

#[test]
fn an_import_that_takes_longer_than_a_batch_may_is_waited_for_and_the_run_says_so() {
    let code = TINY.replace("HERE = ", "time.sleep(9)\nHERE = ");
    let rig = Rig::new(&[line("r-0", json!({"input": "a"}))]);
    let ended = start(&rig, &code, "Tiny", &["--set", "pool[0].batch.timeout=1s"]).wait();
    assert_eq!((ended.code, statuses(&rig.answers())), (Some(0), vec![200]), "{}", ended.stderr);
    assert!(ended.stderr.contains("still importing its module"), "{}", ended.stderr);
}

#[test]
fn an_import_without_an_end_does_not_hold_up_a_stop() {
    let code = TINY.replace(
        "HERE = Path(__file__).parent\n",
        "HERE = Path(__file__).parent\n(HERE / \"new\").write_text(str(os.getpid()))\n(HERE / \"new\").rename(HERE / \"pids\")\n\
         time.sleep(1000)\n",
    );
    let (rig, run) = run_of(&code, "Tiny", &["a"], &[]);
    let importing = pids(&rig.path(""));
    run.signal(Signal::SIGINT);
    let ended = run.wait();
    assert!(ended.code.is_some_and(|code| code != 0), "{}", ended.stderr);
    assert_gone(&importing);
}

/// A class that forks a child, starts a program, and leaves a daemon that has a session, a group and an environment of its
/// own and no parent. Only a SIGKILL ends them. Their ids, and that of the class's process, are in `pids`.
fn forking() -> String {
    TINY.replace(
        "HERE = Path(__file__).parent\n",
        r#"HERE = Path(__file__).parent
signal.pthread_sigmask(signal.SIG_BLOCK, set(range(1, signal.NSIG)) - {signal.SIGKILL, signal.SIGSTOP})
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def fork():
    child = os.fork()
    if not child:
        while True:
            time.sleep(1)
    program = subprocess.Popen(["sleep", "1000"])
    parent_of_daemon = "import os; os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); os.close(1); " \
        "os.execve('/bin/sleep', ['sleep', '1000'], {})"
    daemon = int(subprocess.run([sys.executable, "-c", parent_of_daemon], stdout=subprocess.PIPE, check=True).stdout)
    (HERE / "pids.new").write_text(f"{os.getpid()} {child} {program.pid} {daemon}")
    (HERE / "pids.new").rename(HERE / "pids")
"#,
    )
    .replace(
        "class Tiny(sconce_model.Model):\n",
        "class Tiny(sconce_model.Model):\n    def load(self, *_):\n        fork()\n\n",
    )
}

/// The ids of the processes of the run in this folder.
fn pids(folder: &Path) -> Vec<u32> {
    let text = eventually("the class is loaded", || fs::read_to_string(folder.join("pids")).ok());
    text.split(' ').map(|pid| pid.parse().unwrap()).collect()
}

fn assert_gone(pids: &[u32]) {
    eventually("the processes are gone", || pids.iter().all(|pid| !lives(*pid)).then_some(()));
}

#[test]
fn no_process_of_a_class_outlives_a_run_that_ends() {
    let (rig, run) = run_of(&forking(), "Tiny", &["a", "b"], &[]);
    let ended = run.wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_gone(&pids(rig.path("pids").parent().unwrap()));
}

#[test]
fn no_process_of_a_class_outlives_a_worker_that_is_killed() {
    let (rig, run) = run_of(&forking(), "Tiny", &["hang"], &[]);
    let first = pids(&rig.path(""));
    let worker = eventually("there is a worker", || run.workers().pop());
    // As a service manager does to all processes of a service.
    let supervisor = children(worker, "python-process").pop().unwrap();
    kill(Pid::from_raw(supervisor as i32), Signal::SIGTERM).unwrap();
    kill(Pid::from_raw(worker as i32), Signal::SIGKILL).unwrap();
    assert_gone(&first);
    run.signal(Signal::SIGINT);
    run.signal(Signal::SIGINT);
    run.wait();
    assert_gone(&pids(&rig.path("")));
}

#[test]
fn no_process_of_a_class_outlives_a_launcher_that_is_killed() {
    let (rig, run) = run_of(&forking(), "Tiny", &["hang"], &["--set", "launcher.shutdown_grace=1s"]);
    let of_class = pids(&rig.path(""));
    let worker = eventually("there is a worker", || run.workers().pop());
    // Stopped, so that it cannot kill anything itself.
    kill(Pid::from_raw(worker as i32), Signal::SIGSTOP).unwrap();
    run.signal(Signal::SIGKILL);
    assert_gone(&of_class);
    assert_gone(&[worker]);
}

#[test]
fn the_death_of_an_idle_process_ends_its_worker_which_is_started_again() {
    let rig = Rig::new(&[line("r-0", json!({"input": "a"}))]);
    let folder = rig.path("");
    fs::create_dir(folder.join("loaded")).unwrap();
    let idle = r#"
import os, threading
from pathlib import Path
import sconce_model

LOADED = Path(__file__).parent / "loaded"

class Idle(sconce_model.Model):
    urls = ["/v1/score"]

    def load(self, *_):
        (LOADED / str(os.getpid())).write_text("")
        if len(list(LOADED.iterdir())) == 1:
            threading.Timer(0.3, lambda: os._exit(7)).start()

    def forward(self, batch):
        return [1.0 for _ in batch]
"#;
    // The other pool's only task waits until the idle one was loaded twice.
    let code = TINY.replace(
        "        for one in batch:\n",
        "        while len(list((HERE / \"loaded\").iterdir())) < 2:\n            time.sleep(0.01)\n        for one in batch:\n",
    );
    fs::write(folder.join("tiny_class.py"), code).unwrap();
    fs::write(folder.join("idle_class.py"), idle).unwrap();
    let file = pools_of(&rig, &[("tiny", "./tiny_class.py:Tiny"), ("idle", "./idle_class.py:Idle")]);
    let mut command = rig.command(&["--config", &file]);
    command.env("SCONCE_LOG", "info");
    let ended = rig.start_command(command).wait();
    assert_eq!((ended.code, statuses(&rig.answers())), (Some(0), vec![200]), "{}", ended.stderr);
    assert!(ended.stderr.contains("the Python process has ended (exit status: 7)"), "{}", ended.stderr);
}
