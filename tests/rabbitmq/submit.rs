//! `sconce submit`: one large job over a running pool, whatever happens to the client, the broker or the workers.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::client::{Client, Task};
use crate::support::rabbit::{Conf, Rabbit};
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

fn progress(job: &Sconce) -> Vec<Value> {
    job.lines_from(0).iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

async fn no_dead_letters(client: &Client, settings: &Settings) {
    assert_eq!(client.look(&settings.dead).await.map(|(ready, _)| ready), Some(0), "dead letters");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_answered_in_its_order_and_resumed_behind_any_byte() {
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].workers_per_device", 2);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let files = Files::new(&rows(1_500));
    let mut job = files.submit(&settings, &["--json"]);
    assert_eq!(job.exit_code().await, 0, "{}", job.log());
    assert_eq!(inputs(files.answers()), echoed(1_500));
    let report = progress(&job).pop().expect("a report");
    let count = |name: &str| report[name].as_u64().expect("a count");
    assert_eq!((count("published"), count("written"), count("lines")), (1_500, 1_500, 1_500), "{report}");
    assert_eq!((count("errors"), count("in_flight"), count("resent")), (0, 0, 0), "{report}");
    assert_eq!(report["workers"].as_array().map(Vec::len), Some(2), "{report}");
    let whole = fs::read(&files.output).expect("an output");
    for keep in [0, 1, whole.len() / 3, whole.len() - 1] {
        fs::write(&files.output, &whole[..keep]).expect("an output");
        files.done(&settings, &[]).await;
        assert_eq!(inputs(files.answers()), echoed(1_500), "cut at {keep}");
    }
    let mut again = files.submit(&settings, &[]);
    assert_eq!(again.exit_code().await, 0);
    again.wait_for_log("0 of 1500 rows answered now, 1500 before").await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    no_dead_letters(&client, &settings).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_share_a_task_are_answered_as_if_alone_beside_a_bad_one() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-bert-cls");
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].model", model.display())
        .set("pool[0].max_inputs", 8);
    let sconce = Sconce::launched(&settings).await;
    let texts = ["a cat", "rain", "the old river", "stone"];
    let mut asked: Vec<Value> =
        (0..40).map(|number| row(number, json!({"input": texts[number % texts.len()]}))).collect();
    // Too many inputs for this pool, also alone; and no request at all.
    asked[5] = row(5, json!({"input": vec!["a"; 9]}));
    asked[11] = json!({"custom_id": "row-11"});
    let (alone, shared) = (Files::new(&asked), Files::new(&asked));
    alone.ends_with(87, &settings, &[]).await;
    shared.ends_with(87, &settings, &["--rows-per-task", "7"]).await;
    let (alone, shared) = (alone.answers(), shared.answers());
    assert_eq!(alone.len(), 40);
    for ((id, one), (_, other)) in alone.iter().zip(&shared) {
        match id.as_str() {
            "row-5" => assert!(one["error"]["message"].is_string() && one == other, "{one} {other}"),
            "row-11" => assert_eq!((one.as_str(), one), (Some("invalid_line"), other)),
            _ => {
                let vector = |of: &Value| -> Vec<f64> {
                    let numbers = of["data"][0]["embedding"].as_array().expect("a vector");
                    numbers.iter().filter_map(Value::as_f64).collect()
                };
                let (one, other) = (vector(one), vector(other));
                assert!(one.len() == other.len() && !one.is_empty());
                assert!(one.iter().zip(&other).all(|(a, b)| (a - b).abs() < 1e-6), "{id}");
            }
        }
    }
    let tokens = |of: &[(String, Value)]| -> u64 {
        of.iter().filter_map(|(_, body)| body["usage"]["total_tokens"].as_u64()).sum()
    };
    assert_eq!(tokens(&alone), tokens(&shared), "usage adds up");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_end_with_87_are_told_and_counted_and_known_to_a_second_run() {
    let settings = Settings::echo(Rabbit::shared().url());
    let sconce = Sconce::launched(&settings).await;
    let mut asked = rows(50);
    asked.iter_mut().take(40).for_each(|row| row["body"]["reply"] = "no data URL".into());
    asked[45] = json!({"custom_id": "row-45"});
    let files = Files::new(&asked);
    let told = files.ends_with(87, &settings, &[]).await;
    assert!(told.contains("50 of 50 rows answered now, 0 before; 41 with an error"), "{told}");
    assert!(told.contains("40 × 400: ") && told.contains("1 × invalid_line: url is missing"), "{told}");
    let again = files.ends_with(87, &settings, &["--json"]).await;
    assert!(again.contains("0 of 50 rows answered now, 50 before; 41 with an error"), "{again}");
    assert!(again.contains("40 × 400: "), "{again}");

    let tasks = files.input.with_file_name("tasks.jsonl");
    fs::write(&tasks, format!("{}\n{}\n", asked[0], asked[49])).expect("tasks");
    let wait = ["publish", "--wait", "--input", tasks.to_str().expect("UTF-8")];
    let mut published = Sconce::run(&settings, &wait);
    assert_eq!(published.exit_code().await, 87, "{}", published.log());
    published.wait_for_log("1 of 2 tasks were answered with an error").await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_after_the_last_publish_exits_with_0_when_all_are_answered() {
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].batch.max_requests", 1)
        .set("pool[0].prefetch", 1);
    let sconce = Sconce::launched(&settings).await;
    let gate = sconce.gate();
    // As many as are under way at first: the end of the input is not seen before one of them is answered.
    let mut asked = rows(256);
    asked[0]["body"]["hold"] = gate.name.as_str().into();
    let files = Files::new(&asked);
    let mut job = files.submit(&settings, &[]);
    gate.held().await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    client.ready_becomes(&settings.tasks, 255).await;
    job.signal(Signal::SIGINT);
    job.wait_for_log("for the tasks under way").await;
    gate.open();
    assert_eq!(job.exit_code().await, 0, "{}", job.log());
    assert_eq!(inputs(files.answers()), echoed(256));
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_row_holds_up_no_other_and_the_order_stays() {
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].workers_per_device", 2)
        .set("pool[0].batch.max_requests", 1)
        .set("pool[0].prefetch", 1);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let gate = sconce.gate();
    let mut asked = rows(600);
    asked[0]["body"]["hold"] = gate.name.as_str().into();
    let files = Files::new(&asked);
    let mut job = files.submit(&settings, &["--json"]);
    gate.held().await;
    until("the others are answered", || async {
        progress(&job).pop().filter(|it| it["answered"] == 599 && it["written"] == 0)
    })
    .await;
    assert_eq!(files.written(), 0);
    gate.open();
    assert_eq!(job.exit_code().await, 0, "{}", job.log());
    assert_eq!(inputs(files.answers()), echoed(600));
    assert_eq!(sconce.stop().await, 0);
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
async fn a_withdrawn_job_ends_its_client_and_goes_on_with_the_next_run() {
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].batch.max_requests", 1)
        .set("pool[0].prefetch", 2)
        .controlled();
    let sconce = Sconce::launched(&settings).await;
    let gate = sconce.gate();
    let mut asked = rows(30);
    asked[10]["body"]["hold"] = gate.name.as_str().into();
    let files = Files::new(&asked);
    let mut job = files.submit(&settings, &[]);
    gate.held().await;
    let log = job.log();
    let id = log.lines().find_map(|line| line.strip_prefix("job ")?.split_once(',').map(|it| it.0));
    let mut cancel = Sconce::run(&settings, &["submit", "--cancel", id.expect("the job's id")]);
    assert_eq!(cancel.exit_code().await, 0, "{}", cancel.log());
    gate.open();
    assert_eq!(job.exit_code().await, 84, "{}", job.log());
    assert!(job.log().contains("was withdrawn"), "{}", job.log());
    files.done(&settings, &[]).await;
    assert_eq!(inputs(files.answers()), echoed(30));
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
async fn a_reply_that_never_comes_is_asked_for_again_and_then_an_error_line() {
    let settings = Settings::echo(Rabbit::shared().url());
    let client = Client::connect(&Rabbit::shared().url()).await;
    client.declare(&settings.tasks, &[]).await;
    // Takes tasks and never answers, as a worker whose host is gone for the broker but not for the network.
    let mut taken = client.inbox(&settings.tasks).await;
    let files = Files::new(&rows(2));
    let mut job = files.submit(&settings, &["--reply-timeout", "3s", "--attempts", "2", "--json"]);
    assert_eq!(taken.take(4).await.len(), 4, "each of the two twice");
    assert_eq!(job.exit_code().await, 87, "{}", job.log());
    let expected = [0, 1].map(|number| (format!("row-{number}"), json!("no_reply")));
    assert_eq!(files.answers(), expected);
    let report = progress(&job).pop().expect("a report");
    assert_eq!((&report["resent"], &report["errors"]), (&2.into(), &2.into()), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_workers_a_job_waits_and_no_attempt_is_spent() {
    let settings = Settings::echo(Rabbit::shared().url());
    let client = Client::connect(&Rabbit::shared().url()).await;
    let sconce = Sconce::launched(&settings).await;
    assert_eq!(sconce.stop().await, 0);
    client.consumers_become(&settings.tasks, 0).await;
    let files = Files::new(&rows(5));
    let mut job = files.submit(&settings, &["--reply-timeout", "2s", "--attempts", "1", "--json"]);
    until("it says that nobody consumes", || async {
        progress(&job).pop().filter(|it| it["consumed"] == false)
    })
    .await;
    client.ready_becomes(&settings.tasks, 5).await;
    job.wait_for_log(&format!("waiting for workers: nobody consumes from {}", settings.tasks)).await;
    let sconce = Sconce::launched(&settings).await;
    assert_eq!(job.exit_code().await, 0, "{}", job.log());
    assert_eq!(inputs(files.answers()), echoed(5));
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn stdin_and_more_files_are_read_and_what_cannot_be_continued_is_refused() {
    let settings = Settings::echo(Rabbit::shared().url());
    let files = Files::new(&rows(30));
    let mut early = files.submit(&settings, &[]);
    assert_ne!(early.exit_code().await, 0);
    assert!(early.log().contains(&settings.tasks), "the queue is named: {}", early.log());
    assert!(!files.output.exists(), "a refused command leaves no file");
    let sconce = Sconce::launched(&settings).await;
    let output = files.output.to_str().expect("UTF-8");
    let more = Files::new(&rows(40)[30..]);
    files.done(&settings, &["-i", more.input.to_str().expect("UTF-8")]).await;
    assert_eq!(inputs(files.answers()), echoed(40));
    // Its standard input is empty.
    let mut again = Sconce::run(&settings, &["submit", "-i", "-", "-o", output]);
    assert_eq!(again.exit_code().await, 64, "{}", again.log());
    assert!(again.log().contains("cannot be read again"), "{}", again.log());
    fs::remove_file(&files.output).expect("an output");
    let mut empty = Sconce::run(&settings, &["submit", "-i", "-", "-o", output]);
    assert_eq!(empty.exit_code().await, 0, "{}", empty.log());
    let mut pipe = Sconce::run(&settings, &["submit", "-i", output, "-o", "/dev/stdout"]);
    assert_eq!(pipe.exit_code().await, 64, "{}", pipe.log());
    let mut none = files.submit(&settings, &["--background"]);
    assert_eq!(none.exit_code().await, 64, "{}", none.log());
    assert!(none.log().contains("no background queue"), "{}", none.log());
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fifo_is_read_once_and_ctrl_c_before_its_end_is_no_success() {
    let settings = Settings::echo(Rabbit::shared().url());
    let sconce = Sconce::launched(&settings).await;
    let files = Files::new(&rows(30));
    let fifo = files.input.with_file_name("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    let flags = ["submit", "-i", fifo.to_str().expect("UTF-8"), "-o", files.output.to_str().expect("UTF-8")];
    let mut job = Sconce::run(&settings, &flags);
    let lines = fs::read(&files.input).expect("rows");
    // Opens when the job reads, and stays open.
    let to = fifo.clone();
    let mut writer =
        tokio::task::spawn_blocking(move || fs::File::create(to).expect("a writer")).await.expect("it");
    writer.write_all(&lines).expect("a reader");
    until("what was written is answered", || async { (files.written() == 30).then_some(()) }).await;
    job.signal(Signal::SIGINT);
    assert_eq!(job.exit_code().await, 84, "{}", job.log());
    drop(writer);
    fs::remove_file(&files.output).expect("an output");
    let mut job = Sconce::run(&settings, &flags);
    tokio::task::spawn_blocking(move || fs::write(fifo, lines).expect("a reader")).await.expect("it");
    assert_eq!(job.exit_code().await, 0, "{}", job.log());
    assert_eq!(inputs(files.answers()), echoed(30));
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_the_broker_never_takes_is_an_error_and_the_others_are_answered() {
    let rabbit = Rabbit::private_with(Conf::default().line("max_message_size", 100_000));
    let settings = Settings::echo(rabbit.url());
    let sconce = Sconce::launched(&settings).await;
    let mut asked = rows(20);
    asked[7]["body"]["input"] = "x".repeat(200_000).into();
    let files = Files::new(&asked);
    files.ends_with(87, &settings, &[]).await;
    let answers = files.answers();
    assert_eq!(answers[7], ("row-7".to_owned(), json!("refused")));
    let others =
        |all: Vec<(String, Value)>| -> Vec<_> { all.into_iter().filter(|(id, _)| id != "row-7").collect() };
    assert_eq!(inputs(others(answers)), others(echoed(20)));
    assert_eq!(sconce.stop().await, 0);
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
    let files = Files::new(&rows(400));
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
    files.done(&settings, &[]).await;
    assert_eq!(inputs(files.answers()), echoed(400));
    assert_eq!(sconce.stop().await, 0);
}

/// The results of a job are files, as `run-batch` writes them.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_writes_a_matrix_of_vectors_and_continues_it() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-bert-cls");
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].model", model.display());
    let sconce = Sconce::launched(&settings).await;
    let mut asked: Vec<Value> =
        (0..60).map(|number| row(number, json!({"input": format!("{number}")}))).collect();
    asked[7] = json!({"custom_id": "row-7"});
    let mut files = Files::new(&asked);
    files.output.set_extension("npy");
    files.ends_with(87, &settings, &["--rows-per-task", "7"]).await;
    let ids = files.output.with_extension("ids.jsonl");
    let (matrix, lines) = (fs::read(&files.output).expect("a matrix"), fs::read(&ids).expect("ids"));
    assert!(String::from_utf8_lossy(&matrix[..128]).contains("'shape': (60, "));
    let row_bytes = (matrix.len() - 128) / 60;
    let first = |row: usize| {
        let at = 128 + row * row_bytes;
        f32::from_le_bytes(matrix[at..at + 4].try_into().expect("4 bytes"))
    };
    assert!(first(7).is_nan() && first(6).is_finite() && first(59).is_finite());
    fs::write(&ids, &lines[..lines.len() / 2]).expect("ids");
    let said = files.ends_with(87, &settings, &[]).await;
    assert!(said.contains("of 60 rows answered now"), "{said}");
    let again = fs::read(&files.output).expect("a matrix");
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes[128..].chunks_exact(4).map(|it| f32::from_le_bytes(it.try_into().expect("4 bytes"))).collect()
    };
    assert_eq!(again.len(), matrix.len());
    for (one, other) in numbers(&matrix).iter().zip(numbers(&again)) {
        assert!((one - other).abs() < 1e-6 || one.is_nan() && other.is_nan(), "{one} {other}");
    }
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
async fn a_job_whose_first_reply_has_no_vector_ends_there_and_leaves_no_file() {
    let settings = Settings::echo(Rabbit::shared().url());
    let sconce = Sconce::launched(&settings).await;
    let mut files = Files::new(&rows(3));
    files.output.set_extension("npy");
    let said = files.ends_with(64, &settings, &[]).await;
    assert!(said.contains("it takes vectors, and the reply to \"row-0\" has none"), "{said}");
    let ids = files.output.with_extension("ids.jsonl");
    assert!(!files.output.exists() && !ids.exists());
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_its_queue_leaves_no_file() {
    let settings = Settings::echo(Rabbit::shared().url());
    let files = Files::new(&rows(3));
    let mut job = files.submit(&settings, &[]);
    assert_ne!(job.exit_code().await, 0, "{}", job.log());
    assert!(!files.output.exists(), "{}", job.log());
}
