//! `sconce submit`: one large job over a running pool, whatever happens to the client, the broker or the workers. What
//! becomes of single rows and of the output is in `src/client/job/tests.rs`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::until;

/// The files of a job.
struct Files {
    _folder: tempfile::TempDir,
    input: PathBuf,
    output: PathBuf,
}

impl Files {
    fn new(rows: &[Value]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
        let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
        fs::write(&input, lines).expect("an input");
        Self { _folder: folder, input, output }
    }

    fn submit(&self, settings: &Settings, flags: &[&str]) -> Sconce {
        let (input, output) = (self.input.to_str().expect("UTF-8"), self.output.to_str().expect("UTF-8"));
        Sconce::run(settings, &[&["submit", "-i", input, "-o", output], flags].concat())
    }

    /// Runs a job to its end.
    async fn done(&self, settings: &Settings, flags: &[&str]) {
        self.ends_with(0, settings, flags).await;
    }

    /// The same for a job with this exit code; returns what it printed.
    async fn ends_with(&self, exit: i32, settings: &Settings, flags: &[&str]) -> String {
        let mut job = self.submit(settings, flags);
        assert_eq!(job.exit_code().await, exit, "{}", job.log());
        job.log()
    }

    /// What the output says of each row: its id and what it answers.
    fn answers(&self) -> Vec<(String, Value)> {
        let lines = fs::read_to_string(&self.output).expect("an output");
        lines.lines().map(|line| answer(&serde_json::from_str(line).expect("JSON"))).collect()
    }

    fn written(&self) -> usize {
        fs::read(&self.output).map_or(0, |bytes| bytes.iter().filter(|byte| **byte == b'\n').count())
    }
}

fn answer(line: &Value) -> (String, Value) {
    let id = line["custom_id"].as_str().unwrap_or_default().to_owned();
    let answer = if line["error"].is_null() { &line["response"]["body"] } else { &line["error"]["code"] };
    (id, answer.clone())
}

fn row(number: usize, body: Value) -> Value {
    json!({"custom_id": format!("row-{number}"), "method": "POST", "url": "/v1/embeddings", "body": body})
}

fn rows(count: usize) -> Vec<Value> {
    (0..count).map(|number| row(number, json!({"input": format!("text {number}")}))).collect()
}

fn echoed(count: usize) -> Vec<(String, Value)> {
    (0..count).map(|number| (format!("row-{number}"), json!(format!("text {number}")))).collect()
}

/// The answers of an echo pool, by what was said.
fn inputs(answers: Vec<(String, Value)>) -> Vec<(String, Value)> {
    answers.into_iter().map(|(id, body)| (id, body["input"].clone())).collect()
}

async fn no_dead_letters(client: &Client, settings: &Settings) {
    assert_eq!(client.look(&settings.dead).await.map(|(ready, _)| ready), Some(0), "dead letters");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_client_leaves_no_dead_letters_and_goes_on() {
    let settings = Settings::echo(Rabbit::shared().url());
    let sconce = Sconce::launched(&settings).await;
    let asked: Vec<Value> = (0..900)
        .map(|number| row(number, json!({"input": format!("text {number}"), "sleep_ms": 1})))
        .collect();
    let files = Files::new(&asked);
    for quarter in 1..4 {
        let mut job = files.submit(&settings, &[]);
        until("a part is written", || async { (files.written() >= quarter * 200).then_some(()) }).await;
        job.signal(Signal::SIGKILL);
        job.exit_code().await;
    }
    files.done(&settings, &[]).await;
    assert_eq!(inputs(files.answers()), echoed(900));
    let client = Client::connect(&Rabbit::shared().url()).await;
    client.ready_becomes(&settings.tasks, 0).await;
    no_dead_letters(&client, &settings).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_outlives_its_broker_its_workers_and_its_connections() {
    let rabbit = Rabbit::private();
    let settings = Settings::echo(rabbit.url())
        .set("pool[0].workers_per_device", 2)
        .set("pool[0].batch.max_requests", 2);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let asked: Vec<Value> = (0..3_000)
        .map(|number| row(number, json!({"input": format!("text {number}"), "sleep_ms": 10})))
        .collect();
    let files = Files::new(&asked);
    let mut job = files.submit(&settings, &["--reply-timeout", "20s"]);
    let reaches = async |count: usize| {
        until(&format!("{count} rows are written"), || async { (files.written() >= count).then_some(()) })
            .await;
    };
    reaches(100).await;
    for worker in sconce.workers() {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker as i32), Signal::SIGKILL);
    }
    reaches(300).await;
    // The broker may list a connection a moment late.
    until("a connection is cut", || async { (rabbit.cut("sconce submit") > 0).then_some(()) }).await;
    reaches(600).await;
    rabbit.kill();
    rabbit.start();
    assert_eq!(job.exit_code().await, 0, "{}", job.log());
    assert_eq!(inputs(files.answers()), echoed(3_000));
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_leaves_after_its_grace_and_withdraws_what_it_leaves() {
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].batch.max_requests", 1)
        .set("pool[0].prefetch", 4)
        .controlled();
    let sconce = Sconce::launched(&settings).await;
    let gate = sconce.gate();
    let mut asked = rows(50);
    asked[20]["body"]["hold"] = gate.name.as_str().into();
    let files = Files::new(&asked);
    let mut job = files.submit(&settings, &["--grace", "1s"]);
    gate.held().await;
    until("the rows before it are written", || async { (files.written() == 20).then_some(()) }).await;
    job.signal(Signal::SIGINT);
    assert_eq!(job.exit_code().await, 84, "{}", job.log());
    job.wait_for_log("stopped after row 20").await;
    let log = job.log();
    assert!(log.contains("withdrew the 30 tasks left in"), "{log}");
    let id = log.lines().find_map(|line| line.strip_prefix("job ")?.split_once(',').map(|it| it.0));
    let id = id.expect("the job's id").to_owned();
    let client = Client::connect(&Rabbit::shared().url()).await;
    let mut replies = client.inbox(&format!("sconce.job.{id}")).await;
    gate.open();
    let statuses: Vec<i64> = replies.take(30).await.iter().map(|reply| reply.status_code()).collect();
    // The one on the device was cancelled too late, or in time.
    assert!(statuses.iter().filter(|status| **status == 499).count() >= 29, "{statuses:?}");
    // The next run is another job.
    files.done(&settings, &[]).await;
    assert_eq!(inputs(files.answers()), echoed(50));
    no_dead_letters(&client, &settings).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawn_job_ends_its_client_although_there_is_no_worker() {
    let settings = Settings::echo(Rabbit::shared().url()).controlled();
    let client = Client::connect(&Rabbit::shared().url()).await;
    client.declare(&settings.tasks, &[]).await;
    let files = Files::new(&rows(3));
    let mut job = files.submit(&settings, &[]);
    client.ready_becomes(&settings.tasks, 3).await;
    let log = job.log();
    let id = log.lines().find_map(|line| line.strip_prefix("job ")?.split_once(',').map(|it| it.0));
    let id = id.expect("the job's id");
    let mut cancel = Sconce::run(&settings, &["submit", "--cancel", id]);
    cancel.exit_code().await;
    assert!(cancel.log().contains(&format!("of job {id} is told to end")), "{}", cancel.log());
    assert_eq!(job.exit_code().await, 84, "{}", job.log());
    assert!(job.log().contains("was withdrawn"), "{}", job.log());
    let mut again = Sconce::run(&settings, &["submit", "--cancel", id]);
    again.exit_code().await;
    assert!(again.log().contains(&format!("runs job {id} any more")), "{}", again.log());
    let mut unknown = Sconce::run(&settings, &["submit", "--cancel", "0123456789ab"]);
    assert_eq!(unknown.exit_code().await, 1, "{}", unknown.log());
    assert!(unknown.log().contains("no job 0123456789ab is known"), "{}", unknown.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_background_job_lets_others_pass_and_a_sentinel_stops_its_worker_too() {
    let name = "background.of.a.job";
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].background_queue", name)
        .set("pool[0].batch.max_requests", 1)
        .set("pool[0].prefetch", 8);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    let mut inbox = client.inbox(&settings.replies).await;
    let gate = sconce.gate();
    client.publish(&settings.tasks, Task::new(json!({"input": "first"})).held_at(&gate)).await;
    gate.held().await;
    let asked: Vec<Value> = (0..6)
        .map(|number| row(number, json!({"input": format!("text {number}"), "sleep_ms": 300})))
        .collect();
    let files = Files::new(&asked);
    let mut job = files.submit(&settings, &["--background"]);
    client.ready_becomes(name, 0).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "second"}))).await;
    client.ready_becomes(&settings.tasks, 0).await;
    gate.open();
    for expected in ["first", "second"] {
        assert_eq!(inbox.next().await.body["input"], expected);
    }
    assert!(files.written() <= 2, "it came behind what had begun");
    assert_eq!(job.exit_code().await, 0, "{}", job.log());
    assert_eq!(inputs(files.answers()), echoed(6));
    client.publish(&settings.tasks, Task::sentinel()).await;
    let mut sconce = sconce;
    assert_eq!(sconce.exit_code().await, 0, "{}", sconce.log());
    client.consumers_become(name, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_ends_the_job_with_its_name_and_the_same_command_goes_on() {
    let settings = Settings::echo(Rabbit::shared().url());
    let sconce = Sconce::launched(&settings).await;
    let mut asked = rows(400);
    asked[399] = json!({"custom_id": "row-399"});
    let files = Files::new(&asked);
    // 60 blocks of 512 bytes.
    let limited = files.input.with_file_name("limited");
    let program = env!("CARGO_BIN_EXE_sconce");
    let script = format!("#!/bin/sh\ntrap '' XFSZ\nulimit -f 60\nexec {program} \"$@\"\n");
    fs::write(&limited, script).expect("a script");
    fs::set_permissions(&limited, fs::Permissions::from_mode(0o755)).expect("a script");
    let mut job = files.submit(&settings.clone().by_script(limited), &[]);
    assert_ne!(job.exit_code().await, 0, "{}", job.log());
    assert!(job.log().contains("the output"), "{}", job.log());
    assert!(files.written() < 400);
    let told = files.ends_with(87, &settings, &[]).await;
    assert!(
        told.contains("; 1 with an error") && told.contains("1 × invalid_line: url is missing"),
        "{told}"
    );
    let mut answers = files.answers();
    assert_eq!(answers.pop(), Some(("row-399".to_owned(), json!("invalid_line"))));
    assert_eq!(inputs(answers), echoed(399));
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_writes_a_file_for_each_recording() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].model", fixtures.join("whisper-random").display());
    let sconce = Sconce::launched(&settings).await;
    let folder = tempfile::tempdir().expect("a folder");
    let subs = folder.path().join("subs");
    let recordings =
        ["short.mp3", "reading.flac"].map(|name| fixtures.join("sound").join(name).display().to_string());
    let submit = async |recordings: &[String]| {
        let flags = ["submit", "--output-dir", subs.to_str().expect("UTF-8"), "--format", "vtt"];
        let flags = [&flags[..], &["--field", "language=de"]].concat();
        let files = recordings.iter().map(String::as_str);
        let mut job = Sconce::run(&settings, &flags.into_iter().chain(files).collect::<Vec<_>>());
        assert_eq!(job.exit_code().await, 0, "{}", job.log());
        job.log()
    };
    assert!(submit(&recordings[..1]).await.contains("1 of 1 rows answered now"));
    assert!(submit(&recordings).await.contains("1 of 2 rows answered now, 1 before"));
    for name in ["short.vtt", "reading.vtt"] {
        let subtitles = fs::read_to_string(subs.join(name)).expect("subtitles");
        assert!(subtitles.starts_with("WEBVTT"), "{subtitles}");
    }
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_its_queue_leaves_no_file() {
    let settings = Settings::echo(Rabbit::shared().url());
    let files = Files::new(&rows(3));
    let mut job = files.submit(&settings, &[]);
    assert_ne!(job.exit_code().await, 0, "{}", job.log());
    assert!(!files.output.exists() && job.log().contains(&settings.tasks), "{}", job.log());
}
