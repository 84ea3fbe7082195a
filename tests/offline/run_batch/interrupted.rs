//! Runs that are killed, stopped, torn, started twice, or pointed at somebody else's output.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::rig::{Rig, eventually, slow_lines};
use crate::support::processes::lives;

/// One line a forward pass, so that a run lasts long enough to be stopped in its middle.
const ONE_BY_ONE: [&str; 4] = ["--set", "pool[0].batch.max_requests=1", "--set", "pool[0].prefetch=2"];

#[test]
fn a_killed_run_resumes_without_computing_a_finished_line_again() {
    let rig = Rig::new(&slow_lines(60, 100));
    let run = rig.start_echo(&ONE_BY_ONE);
    rig.wait_for_lines(10);
    let workers = run.workers();
    assert_eq!(workers.len(), 2);
    run.signal(Signal::SIGKILL);
    assert_eq!(run.wait().code, None);
    eventually("the workers of the killed run are gone", || {
        workers.iter().all(|pid| !lives(*pid)).then_some(())
    });
    let before = rig.written();
    let whole = before[..before.rfind('\n').unwrap() + 1].to_owned();
    let done = whole.lines().count();
    assert!((10..60).contains(&done), "{done}");

    let ended = rig.run_echo(&ONE_BY_ONE);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(rig.written().starts_with(&whole), "finished lines stay as they are, ids and all");
    rig.assert_all_answered(60);
    let says = format!("{} of 60 lines answered now, {done} before", 60 - done);
    assert!(ended.stderr.contains(&says), "{}", ended.stderr);
    let now = rig.written();
    assert_eq!(rig.run_echo(&ONE_BY_ONE).code, Some(0));
    assert_eq!(rig.written(), now, "a finished run has nothing to do");
}

/// The kernel continues a worker that is stopped before its launcher's end, and leaves it stopped for ever when it is stopped
/// after it.
#[test]
fn a_stopped_worker_outlives_a_killed_run_by_no_more_than_the_grace() {
    for stopped_first in [false, true] {
        let rig = Rig::new(&slow_lines(4, 600_000));
        let mut command = rig.command(&["--model", "echo", "--devices", "cpu,cpu"]);
        command.args(ONE_BY_ONE).args(["--set", "launcher.shutdown_grace=1s"]).env("SCONCE_LOG", "info");
        let run = rig.start_command(command);
        // The launcher logs this once it has told its guard of the worker.
        eventually("both workers are spawned", || {
            (run.stderr().matches("worker spawned").count() == 2).then_some(())
        });
        let (workers, guard) = (run.workers(), run.guard().expect("a guard"));
        assert_eq!(workers.len(), 2);
        eventually("the guard ignores the signals that end a service", || {
            let status = fs::read_to_string(format!("/proc/{guard}/status")).ok()?;
            let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
            let ignored = u64::from_str_radix(ignored.trim(), 16).ok()?;
            (ignored & (1 << (Signal::SIGTERM as u32 - 1)) != 0).then_some(())
        });
        // As a service manager, a terminal or `killall` may.
        for ended_by in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
            kill(Pid::from_raw(guard as i32), ended_by).expect("a guard");
        }
        let stop = || workers.iter().for_each(|pid| _ = kill(Pid::from_raw(*pid as i32), Signal::SIGSTOP));
        if stopped_first {
            stop();
        }
        run.signal(Signal::SIGKILL);
        if !stopped_first {
            stop();
        }
        assert_eq!(run.wait().code, None);
        eventually("neither workers nor guard are left", || {
            workers.iter().chain([&guard]).all(|pid| !lives(*pid)).then_some(())
        });
    }
}

#[test]
fn a_killed_worker_is_replaced_and_every_line_is_answered_once() {
    // The other worker alone would need seconds, and the killed one is back before that.
    let rig = Rig::new(&slow_lines(60, 150));
    let run = rig.start_echo(&ONE_BY_ONE);
    rig.wait_for_lines(5);
    let victim = run.workers()[0];
    kill(Pid::from_raw(victim as i32), Signal::SIGKILL).unwrap();
    eventually("another worker takes its place", || {
        let workers = run.workers();
        (workers.len() == 2 && !workers.contains(&victim)).then_some(())
    });
    let ended = run.wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    rig.assert_all_answered(60);
}

/// As after a crash behind a sentinel: what is started in the worker's place finds none.
#[test]
fn a_worker_too_late_for_a_sentinel_does_not_keep_the_run_from_its_end() {
    let rig = Rig::new(&slow_lines(8, 100));
    let (program, late) = (rig.path("sconce"), rig.path("late"));
    // By another process: children of other tests would inherit the open file, and a program that is open cannot be run.
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_sconce")).arg(&program).status().unwrap().success());
    fs::write(&late, "#!/bin/sh\ncat >'/dev/null'\n").unwrap();
    fs::set_permissions(&late, fs::Permissions::from_mode(0o755)).unwrap();
    let settings = ["--set", "launcher.shutdown_grace=1s", "--set", "launcher.restart_delay=10ms"];
    let echo = ["--model", "echo", "--devices", "cpu,cpu"];
    let run = rig.start_command(rig.command_of(&program, &[&echo[..], &settings, &ONE_BY_ONE].concat()));
    rig.wait_for_lines(2);
    let victim = run.workers()[0];
    fs::rename(&late, &program).unwrap();
    kill(Pid::from_raw(victim as i32), Signal::SIGKILL).unwrap();
    let ended = run.wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    rig.assert_all_answered(8);
}

#[test]
fn sigterm_drains_and_the_same_command_goes_on() {
    let rig = Rig::new(&slow_lines(60, 100));
    let run = rig.start_echo(&ONE_BY_ONE);
    rig.wait_for_lines(5);
    let workers = run.workers();
    run.signal(Signal::SIGTERM);
    let ended = run.wait();
    assert_eq!(ended.code, Some(84), "{}", ended.stderr);
    assert!(ended.stderr.contains("run the same command again to continue"), "{}", ended.stderr);
    assert!(workers.iter().all(|pid| !lives(*pid)), "a worker outlived its run");
    assert!(rig.left_behind().is_empty());
    let (before, done) = (rig.written(), rig.answers().len());
    assert!((5..60).contains(&done), "{done}");
    assert_eq!(rig.run_echo(&ONE_BY_ONE).code, Some(0));
    assert!(rig.written().starts_with(&before));
    rig.assert_all_answered(60);
}

#[test]
fn a_second_sigterm_ends_the_run_at_once() {
    let rig = Rig::new(&slow_lines(4, 600_000));
    let run = rig.start_echo(&[&ONE_BY_ONE[..], &["--set", "launcher.shutdown_grace=10m"]].concat());
    let workers = eventually("both workers run", || Some(run.workers()).filter(|found| found.len() == 2));
    // Again and again, because two signals of a kind at once would be one.
    eventually("the run ends", || {
        run.signal(Signal::SIGTERM);
        (!lives(run.pid())).then_some(())
    });
    let ended = run.wait();
    assert_eq!(ended.code, Some(84), "{}", ended.stderr);
    assert!(workers.iter().all(|pid| !lives(*pid)), "a worker outlived its run");
}

#[test]
fn a_torn_last_line_is_written_anew_and_the_lines_before_it_stay() {
    let rig = Rig::new(&slow_lines(8, 0));
    assert_eq!(rig.run_echo(&[]).code, Some(0));
    let whole = rig.written();
    let start = whole.trim_end().rfind('\n').unwrap() + 1;
    for keep in [1, 17, whole.len() - start - 2] {
        fs::write(rig.output(), &whole[..start + keep]).unwrap();
        assert_eq!(rig.run_echo(&[]).code, Some(0));
        assert!(rig.written().starts_with(&whole[..start]));
        rig.assert_all_answered(8);
    }
    // Whole but for its newline.
    fs::write(rig.output(), whole.trim_end()).unwrap();
    assert_eq!(rig.run_echo(&[]).code, Some(0));
    rig.assert_all_answered(8);
}

#[test]
fn an_output_that_is_not_this_inputs_is_refused_and_not_touched() {
    let rig = Rig::new(&slow_lines(3, 0));
    let foreign = "my only copy of a thesis\nin two lines\n";
    let other = r#"{"id":"batch_req_1","custom_id":"else","response":{"status_code":200,"request_id":"1","body":{}},"error":null}"#;
    for (content, words) in [(foreign.to_owned(), "line 1"), (format!("{other}\n"), "else")] {
        fs::write(rig.output(), &content).unwrap();
        let ended = rig.run_echo(&[]);
        assert!(!matches!(ended.code, Some(0) | None), "{ended:?}");
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
        assert_eq!(rig.written(), content);
    }
}

#[test]
fn two_runs_never_write_one_output() {
    let rig = Rig::new(&slow_lines(40, 150));
    let first = rig.start_echo(&ONE_BY_ONE);
    rig.wait_for_lines(2);
    let second = rig.run_echo(&ONE_BY_ONE);
    assert!(!matches!(second.code, Some(0) | None), "{second:?}");
    assert!(second.stderr.contains(rig.output().to_str().unwrap()), "{}", second.stderr);
    assert!(second.stderr.contains("another run"), "{}", second.stderr);
    let ended = first.wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    rig.assert_all_answered(40);
}

#[test]
fn two_runs_started_together_leave_one_output() {
    let rig = Rig::new(&slow_lines(30, 10));
    let runs = [rig.start_echo(&ONE_BY_ONE), rig.start_echo(&ONE_BY_ONE)];
    let codes: Vec<_> = runs.into_iter().map(|run| run.wait().code).collect();
    assert!(codes.contains(&Some(0)), "{codes:?}");
    rig.assert_all_answered(30);
}

#[test]
fn no_worker_is_left_when_the_run_is_over() {
    let rig = Rig::new(&slow_lines(20, 150));
    let run = rig.start_echo(&ONE_BY_ONE);
    let workers = eventually("both workers run", || Some(run.workers()).filter(|found| found.len() == 2));
    assert_eq!(run.wait().code, Some(0));
    assert!(workers.iter().all(|pid| !lives(*pid)));
    assert!(rig.left_behind().is_empty());
}
