//! The `sconce` binary as a child process: its settings, its log, its workers, its signals, its end.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::processes::children;
use super::wait::{PATIENCE, until, until_within};

/// What a service logs by default, and when the echo model begins a forward pass that sleeps.
const LOGGED: &str = "warn,sconce=info,sconce::model=debug,sconce::slot=debug,lapin=off";

/// The settings file.
const FILE: &str = "sconce.toml";

/// The settings of one service: an echo pool with queues of its own.
#[derive(Clone)]
pub struct Settings {
    pub name: String,
    pub tasks: String,
    pub replies: String,
    pub dead: String,
    url: String,
    control: String,
    heartbeat: String,
    set: Vec<(String, String)>,
    /// Further pools: name, task queue, model.
    beside: Vec<[String; 3]>,
    /// Further queues of each pool: the end of the name, behind that of the first queue, and further keys.
    further: Vec<[String; 2]>,
    environment: Vec<(String, String)>,
    program: PathBuf,
}

impl Settings {
    /// An `echo?faults` pool on one CPU slot. Queue names are unique in this process.
    pub fn echo(url: impl Into<String>) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("pool-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let queue = |kind: &str| format!("{name}.{kind}");
        let (tasks, replies, dead) = (queue("tasks"), queue("replies"), queue("dead"));
        let (set, beside, environment, control) = (Vec::new(), Vec::new(), Vec::new(), String::new());
        let further = Vec::new();
        let (url, heartbeat) = (url.into(), "20s".to_owned());
        let program = PathBuf::from(env!("CARGO_BIN_EXE_sconce"));
        Self {
            name,
            tasks,
            replies,
            dead,
            url,
            control,
            heartbeat,
            set,
            beside,
            further,
            environment,
            program,
        }
    }

    /// Any setting, by its dotted path: `.set("pool[0].batch.max_requests", 4)`. Later ones win.
    pub fn set(mut self, path: &str, value: impl std::fmt::Display) -> Self {
        self.set.push((path.to_owned(), value.to_string()));
        self
    }

    /// A further pool with one CPU worker and the same reply queue; returns its task queue.
    pub fn beside(&mut self, name: &str, model: impl std::fmt::Display) -> String {
        let queue = format!("{}.{name}", self.tasks);
        self.beside.push([name.to_owned(), queue.clone(), model.to_string()]);
        queue
    }

    /// Each pool has a further queue: `[[pool.queue]]` in the place of `task_queue`. Its name is that of the pool's first
    /// queue, a dot and `end`; `keys` are further keys of it, such as `share = 2`.
    pub fn with_queue(mut self, end: &str, keys: &str) -> Self {
        self.further.push([end.to_owned(), keys.to_owned()]);
        self
    }

    /// The setting that names the queues of a pool.
    fn queues(&self, first: &str) -> String {
        if self.further.is_empty() {
            return format!("task_queue = {first:?}");
        }
        let further = self.further.iter().map(|[end, keys]| {
            let comma = if keys.is_empty() { "" } else { ", " };
            format!(", {{ name = \"{first}.{end}\"{comma}{keys} }}")
        });
        format!("queue = [{{ name = {first:?} }}{}]", further.collect::<String>())
    }

    /// Served by an example, which has models of its own.
    pub fn by(mut self, program: &str) -> Self {
        self.program = self.program.with_file_name("examples").join(program);
        assert!(self.program.exists(), "cargo build --example {program} makes it");
        self
    }

    /// Run by a script, which runs the program.
    pub fn by_script(mut self, script: PathBuf) -> Self {
        self.program = script;
        self
    }

    /// With remote control, over an exchange of its own. Without it a launcher has no connection.
    pub fn controlled(mut self) -> Self {
        self.control = format!("{}.control", self.name);
        self
    }

    /// `broker.heartbeat`, in the file: a change of it concerns every worker.
    pub fn heartbeat(mut self, heartbeat: &str) -> Self {
        heartbeat.clone_into(&mut self.heartbeat);
        self
    }

    /// The control exchange.
    pub fn control(&self) -> &str {
        &self.control
    }

    /// An environment variable.
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The same queues, reached by another address.
    pub fn over(mut self, url: impl Into<String>) -> Self {
        self.url = url.into();
        self
    }

    fn toml(&self, gates: &Path) -> String {
        let Self { name, tasks, replies, dead, url, control, heartbeat, .. } = self;
        // Other models refuse an option that they do not know.
        let is_echo =
            self.set.iter().all(|(path, model)| path != "pool[0].model" || model.starts_with("echo"));
        let options = if is_echo { format!("options = {{ gates = {gates:?} }}") } else { String::new() };
        let pool = |[name, queue, model]: &[String; 3]| {
            format!(
                "[[pool]]\nname = {name:?}\n{}\nreply_queue = {replies:?}\n\
                 dead_letter_queue = {dead:?}\nmodel = {model:?}\ndevices = [\"cpu\"]\nthreads = 1\n\n",
                self.queues(queue)
            )
        };
        let beside: String = self.beside.iter().map(pool).collect();
        let queues = self.queues(tasks);
        format!(
            "[broker]\nurl = {url:?}\nheartbeat = {heartbeat:?}\n\n[[pool]]\nname = {name:?}\n{queues}\n\
             reply_queue = {replies:?}\ndead_letter_queue = {dead:?}\nmodel = \"echo?faults\"\n\
             devices = [\"cpu\"]\nthreads = 1\n{options}\n\n{beside}[launcher]\nrestart_delay = \"100ms\"\n\n[admin]\n\
             listen = \"127.0.0.1:0\"\ncontrol_exchange = {control:?}\n"
        )
    }
}

/// Where the forward pass of a task waits, which names it as `hold`. Closed at first.
pub struct Gate {
    pub name: String,
    file: PathBuf,
}

impl Gate {
    /// A forward pass waits there, or has.
    pub fn is_held(&self) -> bool {
        self.file.with_extension("held").exists()
    }

    /// Waits until one does.
    pub async fn held(&self) {
        until(&format!("a forward pass waits at {}", self.name), || async { self.is_held().then_some(()) })
            .await;
    }

    /// Lets it go on.
    pub fn open(&self) {
        fs::write(&self.file, "").expect("a file");
    }
}

/// A running `sconce`, killed with its workers when dropped.
pub struct Sconce {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    folder: tempfile::TempDir,
}

impl Sconce {
    /// `sconce launch`.
    pub fn launch(settings: &Settings) -> Self {
        Self::run(settings, &["launch"])
    }

    /// `sconce launch`, once its worker consumes.
    pub async fn launched(settings: &Settings) -> Self {
        let sconce = Self::launch(settings);
        sconce.consumes(1).await;
        sconce
    }

    /// Any command that takes settings: `--config` and `--set` are put behind `arguments`.
    pub fn run(settings: &Settings, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join(FILE);
        fs::write(&file, settings.toml(folder.path())).expect("a settings file");
        let mut command = Command::new(&settings.program);
        command.args(arguments).arg("--config").arg(&file);
        for (path, value) in &settings.set {
            command.arg("--set").arg(format!("{path}={value}"));
        }
        without_settings(&mut command);
        command.env("SCONCE_LOG", LOGGED).env("SCONCE_LOG_FORMAT", "human");
        command.envs(settings.environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        die_with_the_test(&mut command);
        let mut child = command.spawn().expect("the sconce binary");
        let lines = Arc::default();
        follow(child.stdout.take(), &lines);
        follow(child.stderr.take(), &lines);
        Self { child, lines, folder }
    }

    /// Writes other settings in the place of those it was started with.
    pub fn rewrite(&self, settings: &Settings) {
        fs::write(self.folder.path().join(FILE), settings.toml(self.folder.path())).expect("a settings file");
    }

    /// Where it serves metrics and health.
    pub async fn admin(&self) -> String {
        let served = until("it serves metrics", || async {
            let log = self.log();
            let line = log.lines().find(|line| line.contains("serving /metrics"))?;
            Some(line.split_once("address=")?.1.trim().to_owned())
        });
        format!("http://{}", served.await)
    }

    /// A gate for a task of its echo pool.
    pub fn gate(&self) -> Gate {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("gate-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        Gate { file: self.folder.path().join(&name), name }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything written so far, to stdout and stderr.
    pub fn log(&self) -> String {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }

    /// The lines written so far, from the one with this number on.
    pub fn lines_from(&self, first: usize) -> Vec<String> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().skip(first).cloned().collect()
    }

    /// The exit code, once it has ended; as [`Sconce::exit_code`] gives it.
    pub fn ended(&mut self) -> Option<i32> {
        self.child.try_wait().expect("a child").map(code)
    }

    /// How many lines contain `words`.
    pub fn logged(&self, words: &str) -> usize {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter(|line| line.contains(words)).count()
    }

    /// Waits for a line that contains `words`.
    pub async fn wait_for_log(&self, words: &str) {
        self.wait_for_log_times(words, 1).await;
    }

    /// Waits until `times` lines contain `words`.
    pub async fn wait_for_log_times(&self, words: &str, times: usize) {
        let what = format!("{times} × {words:?} in the log");
        until(&what, || async { (self.logged(words) >= times).then_some(()) }).await;
    }

    /// Waits until its workers have begun to consume so many times.
    pub async fn consumes(&self, times: usize) {
        self.wait_for_log_times("consuming", times).await;
    }

    /// The worker processes, oldest first.
    pub fn workers(&self) -> Vec<u32> {
        children(self.pid(), "worker")
    }

    /// The process that guards the workers.
    pub fn guard(&self) -> Option<u32> {
        children(self.pid(), "guard").pop()
    }

    /// Waits until there are `count` workers, and gives them.
    pub async fn wait_for_workers(&self, count: usize) -> Vec<u32> {
        until(&format!("{count} workers"), || async {
            let workers = self.workers();
            (workers.len() == count).then_some(workers)
        })
        .await
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.pid() as i32), signal);
    }

    /// Waits for the end: the exit code, or minus the signal that ended it.
    pub async fn exit_code(&mut self) -> i32 {
        self.exit_code_within(PATIENCE).await
    }

    /// As [`Sconce::exit_code`], with a limit of its own.
    pub async fn exit_code_within(&mut self, limit: Duration) -> i32 {
        let lines = self.lines.clone();
        let child = Mutex::new(&mut self.child);
        let status = until_within(limit, "sconce ends", || async {
            child.lock().unwrap_or_else(PoisonError::into_inner).try_wait().expect("a child")
        })
        .await;
        // The readers hold the lines until the pipes end, which is now.
        let ended = until("the pipes end", || async { (Arc::strong_count(&lines) <= 2).then_some(()) });
        let _ = tokio::time::timeout(Duration::from_secs(5), ended).await;
        code(status)
    }

    /// SIGTERM, and the exit code.
    pub async fn stop(mut self) -> i32 {
        self.signal(Signal::SIGTERM);
        self.exit_code().await
    }
}

impl Drop for Sconce {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let workers = self.workers();
            let _ = self.child.kill();
            for worker in workers {
                let _ = kill(Pid::from_raw(worker as i32), Signal::SIGKILL);
            }
            let _ = self.child.wait();
        }
        if thread::panicking() {
            eprintln!("--- log of sconce {} ---\n{}", self.pid(), self.log());
        }
    }
}

/// Takes what would be settings out of a program's environment.
pub fn without_settings(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("SCONCE_") || name == "AMQP_URL" {
            command.env_remove(&*name);
        }
    }
}

/// A command of `sconce` on a terminal of 120 columns.
pub struct OnTerminal {
    script: Child,
    keys: ChildStdin,
    lines: Arc<Mutex<Vec<String>>>,
}

impl OnTerminal {
    /// Starts it, over the broker at `url`.
    pub fn start(arguments: &str, url: &str, set: &[(&str, &str)]) -> Self {
        let mut command = format!("stty rows 30 cols 120; {} {arguments}", env!("CARGO_BIN_EXE_sconce"));
        for (path, value) in [("broker.url", url)].iter().chain(set) {
            command += &format!(" --set '{path}={value}'");
        }
        let mut script = Command::new("script");
        script.args(["-qec", &command, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        without_settings(&mut script);
        die_with_the_test(&mut script);
        let mut script = script.spawn().expect("`script` of util-linux gives the program a terminal");
        // Held open until the end: `script` ends with its input.
        let keys = script.stdin.take().expect("a pipe");
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let (pipe, shown) = (script.stdout.take(), Arc::clone(&lines));
        thread::spawn(move || {
            let mut bytes = [0; 4_096];
            let mut pipe = pipe.expect("a pipe");
            while let Ok(count @ 1..) = pipe.read(&mut bytes) {
                let piece = String::from_utf8_lossy(&bytes[..count]).into_owned();
                shown.lock().unwrap_or_else(PoisonError::into_inner).push(piece);
            }
        });
        Self { script, keys, lines }
    }

    /// All that it has shown, with what moves the cursor.
    pub fn shown(&self) -> String {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).concat()
    }

    /// Waits until it has shown these words.
    pub async fn wait_for(&self, words: &str) {
        until(&format!("{words:?} on the terminal"), || async { self.shown().contains(words).then_some(()) })
            .await;
    }

    /// Presses keys.
    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("an open terminal");
    }

    /// Waits for its end: its exit code, and all it has shown.
    pub async fn end(mut self) -> (i32, String) {
        let script = Mutex::new(&mut self.script);
        let status = until("the command ends", || async {
            script.lock().unwrap_or_else(PoisonError::into_inner).try_wait().expect("a child")
        })
        .await;
        let lines = &self.lines;
        until("all is read", || async { (Arc::strong_count(lines) == 1).then_some(()) }).await;
        (code(status), self.shown())
    }
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| -status.signal().unwrap_or_default())
}

/// Sends a signal to any process, such as a worker.
pub fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid as i32), signal).expect("a process");
}

#[expect(unsafe_code, reason = "the child ends with a killed test process; prctl is safe after fork")]
fn die_with_the_test(command: &mut Command) {
    // SAFETY: one system call that allocates nothing.
    unsafe {
        command.pre_exec(|| nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).map_err(Into::into));
    }
}

fn follow(pipe: Option<impl Read + Send + 'static>, lines: &Arc<Mutex<Vec<String>>>) {
    let lines = lines.clone();
    thread::spawn(move || {
        for line in pipe.into_iter().flat_map(|pipe| BufReader::new(pipe).split(b'\n')) {
            let Ok(line) = line else { return };
            let line = String::from_utf8_lossy(&line).into_owned();
            lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        }
    });
}

/// The status and body that a URL answers with.
pub async fn http_get(url: String) -> (u16, String) {
    let asked = tokio::task::spawn_blocking(move || {
        let answer = match ureq::get(&url).timeout(Duration::from_secs(20)).call() {
            Ok(answer) | Err(ureq::Error::Status(_, answer)) => answer,
            Err(error) => panic!("{url}: {error}"),
        };
        (answer.status(), answer.into_string().expect("text"))
    });
    asked.await.expect("an answer")
}
