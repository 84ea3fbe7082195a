//! Runs the commands of `docs/start.md` as they are written there, over a virtual host of their own. Two things differ: no
//! package is installed, and a fixture takes the place of the reranker from the hub.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::support::rabbit::Rabbit;
use crate::support::sconce::without_settings;

const VHOST: &str = "start-page";

/// A reader of the page: a folder, and what was exported.
struct Reader {
    folder: tempfile::TempDir,
    variables: Vec<(String, String)>,
    launcher: Option<Child>,
}

impl Reader {
    fn new() -> Self {
        let rabbit = Rabbit::shared();
        rabbit.eval(&format!(
            "ok = rabbit_vhost:add(<<\"{VHOST}\">>, <<\"test\">>), ok = \
             rabbit_auth_backend_internal:set_permissions(<<\"guest\">>, <<\"{VHOST}\">>, <<\".*\">>, <<\".*\">>, \
             <<\".*\">>, <<\"test\">>)."
        ));
        let folder = tempfile::tempdir().expect("a folder");
        symlink(root().join("models"), folder.path().join("models")).expect("models");
        fs::create_dir(folder.path().join("bin")).expect("a folder");
        symlink(env!("CARGO_BIN_EXE_sconce"), folder.path().join("bin/sconce")).expect("the program");
        let url = rabbit.url_for("guest:guest", VHOST);
        let variables =
            vec![("SCONCE_BROKER__URL".into(), url), ("SCONCE_ADMIN__LISTEN".into(), String::new())];
        Self { folder, variables, launcher: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new("bash");
        without_settings(&mut command);
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").expect("a path"));
        command.args(["-c", line]).env("PATH", path).current_dir(self.folder.path());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a line of the page, and gives what it prints. A task that is published while the launcher starts is published
    /// again, because its queue may not exist yet.
    fn follow(&mut self, line: &str) -> String {
        if let Some(variable) = line.strip_prefix("export ") {
            let (name, value) = variable.split_once('=').expect("a value");
            self.variables.push((name.to_owned(), value.to_owned()));
            return String::new();
        }
        if line == "sconce launch" {
            let mut command = self.command("exec sconce launch");
            command.stdout(Stdio::null()).stderr(Stdio::null());
            self.launcher = Some(command.spawn().expect("bash"));
            return String::new();
        }
        let deadline = Instant::now() + Duration::from_secs(90);
        loop {
            let output = self.command(line).output().expect("bash");
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            if output.status.success() {
                return printed;
            }
            let may_start = self.launcher.is_some() && Instant::now() < deadline;
            assert!(may_start, "{line}: {printed}{}", String::from_utf8_lossy(&output.stderr));
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Ctrl-C.
    fn stop(&mut self) {
        let mut launcher = self.launcher.take().expect("a launcher");
        kill(Pid::from_raw(i32::try_from(launcher.id()).expect("an id")), Signal::SIGINT).expect("a signal");
        assert!(launcher.wait().expect("its end").success());
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(launcher) = &mut self.launcher {
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The blocks of code of a section, in one language.
fn blocks(title: &str, language: &str) -> Vec<String> {
    let page = fs::read_to_string(root().join("docs/start.md")).expect("the page");
    let (_, behind) = page.split_once(&format!("\n## {title}\n")).expect("the section");
    let section = behind.split("\n## ").next().expect("the section");
    let begin = format!("```{language}\n");
    let found = section.split(&begin).skip(1).filter_map(|behind| behind.split("```").next());
    found.map(str::to_owned).collect()
}

/// The commands of a section, without comments, and without those that install packages.
fn commands(title: &str) -> Vec<String> {
    let text = blocks(title, "sh").join("");
    let code = text.lines().map(|line| line.split("  #").next().expect("a part").trim().to_owned());
    code.filter(|line| !line.is_empty() && !line.starts_with("sudo ")).collect()
}

/// The body of a printed reply.
fn body(printed: &str) -> Value {
    let line = printed.lines().find_map(|line| serde_json::from_str::<Value>(line).ok());
    line.expect("a reply")["body"].clone()
}

#[test]
fn the_commands_of_the_start_page_do_what_it_says() {
    let mut reader = Reader::new();
    let mut printed = String::new();
    for line in commands("A reply") {
        printed = reader.follow(&line);
    }
    assert_eq!(body(&printed)["data"][0]["embedding"].as_array().map(Vec::len), Some(384), "{printed}");
    let answers = fs::read_to_string(reader.path("vectors.jsonl")).expect("answers");
    assert!(answers.contains("\"embedding\""), "{answers}");

    let rows = fs::read_to_string(reader.path("requests.jsonl")).expect("requests");
    fs::write(reader.path("rows.jsonl"), rows.repeat(3)).expect("rows");
    for line in commands("A fleet") {
        reader.follow(&line);
    }
    let matrix = fs::read(reader.path("vectors.npy")).expect("a matrix");
    assert!(matrix.starts_with(b"\x93NUMPY") && matrix.len() >= 3 * 384 * 4, "{} bytes", matrix.len());
    reader.stop();

    let [settings] = blocks("A pool of your own", "toml").try_into().expect("one file of settings");
    fs::write(reader.path("pools.toml"), settings).expect("settings");
    let model = root().join("tests/fixtures/score-bert").display().to_string();
    reader.variables.push(("SCONCE_POOL__0__MODEL".into(), model));
    for line in commands("A pool of your own") {
        printed = reader.follow(&line);
    }
    assert_eq!(body(&printed)["results"].as_array().map(Vec::len), Some(2), "{printed}");
    reader.stop();
}
