//! A launcher over workers that are shell scripts, which leave their traces in a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sconce::config::{self, Assignment, Launcher};
use sconce::launcher::gpus::Gpus;
use sconce::launcher::order::Handle;
use sconce::launcher::status_board::StatusBoard;
use sconce::launcher::{Host, LaunchSpec, PreparedLauncher, plan};
use sconce::protocol::admin::State;
use sconce::shutdown::{Exit, Phase, Stop};

use crate::support::wait::until;

pub const PATIENCE: Duration = Duration::from_secs(60);
pub const READY: &str = r#"echo '{"event":"ready","device":"cpu","load_ms":1}'"#;

/// Traces what it is told until it is told to end, and then ends in order.
pub const OBEY: &str =
    r#"while read -r line; do trace "$line"; case $line in *finish*|*drain*) exit 0;; esac; done"#;

/// Waits until a slot is in this state.
pub async fn slot_is(board: &StatusBoard, slot: &str, state: State) {
    let what = format!("{slot} is {}", state.name());
    let is = || board.read(|status| status.slots.get(slot).is_some_and(|entry| entry.report.state == state));
    until(&what, || async { is().then_some(()) }).await;
}

/// A launcher over a script, in a folder in which the script leaves its traces.
pub struct Stage {
    folder: tempfile::TempDir,
    pub assignments: Vec<Assignment>,
    pub policy: Launcher,
    pub stop: Stop,
}

impl Stage {
    /// `slots` workers that run `script`. There, `$slot` is the slot's index and `$start` the first
    /// command; `life` numbers the lives of a slot from 1. `trace` writes a line to the slot's trace.
    pub fn new(slots: usize, script: &str) -> Self {
        let host = Host {
            name: "host".into(),
            launcher: "host".into(),
            cores: 1,
            gpus: Gpus::default(),
            visible: None,
            cuda: None,
        };
        Self::on(&host, &vec!["cpu"; slots], script)
    }

    /// A slot for each of the devices, on a host that has them.
    pub fn on(host: &Host, devices: &[&str], script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("script"), script.to_owned() + "\n").unwrap();
        let stub = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/stub-worker.sh");
        std::os::unix::fs::symlink(stub, folder.path().join("worker.sh")).unwrap();
        let listed = serde_json::to_string(devices).unwrap();
        let set = |path: &str, value: &str| (path.to_owned(), value.to_owned());
        let flags = [
            set("pool[0].devices", &listed),
            set("broker.url", "amqp://user:s3cr3t@nowhere/%2f"),
            set("launcher.restart_delay", "100ms"),
            set("launcher.restart_delay_max", "1s"),
            set("launcher.max_quick_failures", "4"),
            set("launcher.shutdown_grace", "5s"),
        ];
        let settings = config::load(&[], [], &flags).unwrap().settings;
        let assignments = plan(&settings, host).unwrap();
        assert_eq!(assignments.len(), devices.len());
        Self { folder, assignments, policy: settings.launcher, stop: Stop::default() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn lines(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.path(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn launching(&self) -> PreparedLauncher {
        PreparedLauncher::new(LaunchSpec {
            worker_program: &self.path("worker.sh"),
            guard_program: None,
            policy: &self.policy,
            stop: &self.stop,
            raw_lines: None,
        })
    }

    /// Runs it to its end.
    pub async fn run(&self) -> Exit {
        let run = self.launching().run(&self.assignments);
        let limit = tokio::time::timeout(PATIENCE, run).await;
        limit.unwrap_or_else(|_| panic!("the launcher does not end; {:?}", self.lines("trace-0")))
    }

    /// Runs it, and beside it whoever looks at it and asks it, who may end it; the exit.
    pub async fn run_asked<F: Future<Output = ()>>(
        &self,
        ask: impl FnOnce(Handle, Arc<StatusBoard>) -> F,
    ) -> Exit {
        let launching = self.launching();
        let meanwhile = ask(launching.handle(), launching.board());
        let both = async { tokio::join!(launching.run(&self.assignments), meanwhile).0 };
        tokio::time::timeout(PATIENCE, both).await.expect("the launcher ends")
    }

    /// Runs it, and `meanwhile` beside it.
    pub async fn run_and(&self, meanwhile: impl Future<Output = ()>) -> Exit {
        tokio::join!(self.run(), meanwhile).0
    }

    /// Waits until a file of the stage holds `count` lines.
    pub async fn wait_for_lines(&self, name: &str, count: usize) {
        let what = format!("{name} has {count} lines");
        until(&what, || async { (self.lines(name).len() >= count).then_some(()) }).await;
    }

    pub fn drain(&self) {
        self.stop.advance(Phase::Returning, "test");
    }

    /// Kills the slot's last process.
    pub fn kill(&self, slot: usize) {
        self.kill_process(&self.lines(&format!("pid-{slot}"))[0]);
    }

    /// Kills a process.
    pub fn kill_process(&self, pid: &str) {
        let pid = nix::unistd::Pid::from_raw(pid.parse().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    }

    /// Whether the slot's last process lives.
    pub fn lives(&self, slot: usize) -> bool {
        let pid = self.lines(&format!("pid-{slot}"));
        let stat = fs::read_to_string(Path::new("/proc").join(&pid[0]).join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    }
}
