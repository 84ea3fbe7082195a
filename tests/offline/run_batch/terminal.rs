//! The progress bar: on a terminal, and nowhere else.

use std::process::{Command, Stdio};

use super::rig::{Rig, slow_lines};

const ONE_BY_ONE: [&str; 4] = ["--set", "pool[0].batch.max_requests=1", "--set", "pool[0].prefetch=2"];

#[test]
fn there_is_no_progress_bar_where_stderr_is_no_terminal() {
    let rig = Rig::new(&slow_lines(20, 20));
    let ended = rig.run_echo(&ONE_BY_ONE);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(!ended.stderr.contains(['\r', '\x1b']), "{:?}", ended.stderr);
    assert_eq!(ended.stderr.lines().count(), 1, "the summary alone: {}", ended.stderr);
    assert_eq!(ended.stdout, "");
}

#[test]
fn on_a_terminal_a_progress_bar_shows_lines_rate_and_time_left() {
    let rig = Rig::new(&slow_lines(40, 50));
    let run = rig.command(&[&["--model", "echo", "--devices", "cpu"], &ONE_BY_ONE[..]].concat());
    let quoted = |text: &std::ffi::OsStr| format!("'{}'", text.to_str().unwrap());
    let words: Vec<_> = std::iter::once(run.get_program()).chain(run.get_args()).map(quoted).collect();
    // A terminal of 120 columns, whatever the test itself runs on.
    let mut script = Command::new("script");
    script.args(["-qec", &format!("stty cols 120; {}", words.join(" ")), "/dev/null"]);
    script.env("TERM", "xterm").env("TMPDIR", rig.temp()).env_remove("AMQP_URL").stdin(Stdio::null());
    let output = script.output().expect("`script` of util-linux gives the program a terminal");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{shown}");
    assert!(shown.contains("lines [") && shown.contains("/40"), "{shown:?}");
    assert!(shown.contains("/s") && shown.contains("left"), "{shown:?}");
    assert!(shown.contains("40 of 40 lines answered now"), "{shown:?}");
    rig.assert_all_answered(40);
}
