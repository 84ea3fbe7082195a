//! A run in a folder of its own: writes the input, starts the program, waits with a bound, reads the
//! output. Owns the folder and the process; both are gone when the test ends.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::support::processes::children;

/// No test waits longer for anything.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Polls until there is an answer.
pub fn eventually<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    patiently(look).unwrap_or_else(|| panic!("waited in vain until {what}"))
}

/// Polls until there is an answer, or nobody has patience any more.
fn patiently<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let until = Instant::now() + PATIENCE;
    loop {
        let found = look();
        if found.is_some() || Instant::now() > until {
            return found;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// An input line for the echo model.
pub fn line(id: &str, body: Value) -> String {
    json!({"custom_id": id, "method": "POST", "url": "/v1/embeddings", "body": body}).to_string()
}

/// `count` lines, each of which takes `sleep_ms` of computing.
pub fn slow_lines(count: usize, sleep_ms: u64) -> Vec<String> {
    let body = |n: usize| json!({"input": format!("text {n}"), "sleep_ms": sleep_ms});
    (0..count).map(|n| line(&format!("r-{n}"), body(n))).collect()
}

/// The folder of a run.
pub struct Rig {
    folder: tempfile::TempDir,
}

/// How a run ended.
#[derive(Debug)]
pub struct Ended {
    /// None: a signal ended it.
    pub code: Option<i32>,
    pub stderr: String,
    pub stdout: String,
}

impl Rig {
    pub fn new(input: &[String]) -> Self {
        let rig = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(rig.temp()).unwrap();
        fs::write(rig.input(), input.join("\n") + "\n").unwrap();
        rig
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn input(&self) -> PathBuf {
        self.path("in.jsonl")
    }

    pub fn output(&self) -> PathBuf {
        self.path("out.jsonl")
    }

    /// What tells what made the output.
    pub fn made_by(&self) -> PathBuf {
        self.path("out.jsonl.run.json")
    }

    /// The temp folder that the program sees.
    pub fn temp(&self) -> PathBuf {
        self.path("tmp")
    }

    /// The program's command line for this run; `more` behind it.
    pub fn command(&self, more: &[&str]) -> Command {
        self.command_of(Path::new(env!("CARGO_BIN_EXE_sconce")), more)
    }

    /// The same of a copy of the program.
    pub fn command_of(&self, program: &Path, more: &[&str]) -> Command {
        let (input, output) = (self.input(), self.output());
        let files = [Path::new("-i"), &input, Path::new("-o"), &output].map(Path::as_os_str);
        let mut command = self.bare_command_of(program);
        command.args(files).args(more);
        command
    }

    /// The command without any files.
    pub fn bare_command(&self) -> Command {
        self.bare_command_of(Path::new(env!("CARGO_BIN_EXE_sconce")))
    }

    fn bare_command_of(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.arg("run-batch");
        command.env_remove("AMQP_URL").env("TMPDIR", self.temp()).stdin(Stdio::null());
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("SCONCE_"))
        {
            command.env_remove(name);
        }
        command
    }

    /// Starts it with the echo model.
    pub fn start_echo(&self, more: &[&str]) -> Process {
        let echo = ["--model", "echo", "--devices", "cpu,cpu"];
        self.start(&[&echo, more].concat())
    }

    /// Starts it with `arguments` alone.
    pub fn start(&self, arguments: &[&str]) -> Process {
        self.start_command(self.command(arguments))
    }

    /// Starts a command.
    pub fn start_command(&self, mut command: Command) -> Process {
        let number = fs::read_dir(self.folder.path()).unwrap().count();
        let (out, err) = (self.path(&format!("stdout-{number}")), self.path(&format!("stderr-{number}")));
        command.stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
        Process { child: command.spawn().unwrap(), out, err }
    }

    /// Runs it to its end with the echo model.
    pub fn run_echo(&self, more: &[&str]) -> Ended {
        self.start_echo(more).wait()
    }

    /// The output's bytes; empty while there is none.
    pub fn written(&self) -> String {
        fs::read_to_string(self.output()).unwrap_or_default()
    }

    /// The output's lines.
    pub fn answers(&self) -> Vec<Value> {
        let written = self.written();
        written.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
    }

    /// Waits until the output holds `count` lines.
    pub fn wait_for_lines(&self, count: usize) {
        eventually(&format!("{count} lines are written"), || {
            (self.written().matches('\n').count() >= count).then_some(())
        });
    }

    /// Panics unless each of `count` lines of [`slow_lines`] is answered well, once, in order.
    pub fn assert_all_answered(&self, count: usize) {
        let answers = self.answers();
        let ids: Vec<_> = answers.iter().map(|answer| answer["custom_id"].as_str().unwrap_or("-")).collect();
        let expected: Vec<_> = (0..count).map(|n| format!("r-{n}")).collect();
        assert_eq!(ids, expected);
        for (n, answer) in answers.iter().enumerate() {
            assert_eq!(answer["response"]["status_code"], 200, "{answer}");
            assert_eq!(answer["response"]["body"]["input"], format!("text {n}"));
        }
    }

    /// What the program left in its temp folder.
    pub fn left_behind(&self) -> Vec<PathBuf> {
        fs::read_dir(self.temp()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

/// A run of the program.
pub struct Process {
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

impl Process {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid() as i32), signal).unwrap();
    }

    pub fn stderr(&self) -> String {
        fs::read_to_string(&self.err).unwrap_or_default()
    }

    /// Its worker processes now.
    pub fn workers(&self) -> Vec<u32> {
        children(self.pid(), "worker")
    }

    /// The process that guards them.
    pub fn guard(&self) -> Option<u32> {
        children(self.pid(), "guard").pop()
    }

    /// Waits for its end; kills it and panics when that takes too long.
    pub fn wait(mut self) -> Ended {
        let ended = patiently(|| self.child.try_wait().unwrap());
        let status = ended.unwrap_or_else(|| panic!("the run does not end; stderr: {}", self.stderr()));
        let stdout = fs::read_to_string(&self.out).unwrap_or_default();
        Ended { code: status.code(), stderr: self.stderr(), stdout }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
