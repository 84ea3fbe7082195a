//! Tests of jobs over a queue in memory: what becomes of rows and of the output, whatever the workers and the client do.
//! That a job survives its broker, and what the command says, is shown over RabbitMQ (`tests/rabbitmq/submit.rs`).

use std::fs;
use std::future::pending;
use std::io::Write as _;
use std::path::Path;

use serde_json::{Value, json};
use tokio::sync::Notify;

use super::state::Counts;
use super::*;
use crate::broker::memory::{Memory, in_time};
use crate::client::batch_file::{Batch, Source};

/// Longer than any test, in paused time too.
const NEVER: Duration = Duration::from_secs(1 << 32);

/// What workers make of a task.
enum Fate {
    /// It is answered at once, with this status and body.
    Answer(i64, Value),
    /// The broker never takes it.
    Refuse,
    /// It is not answered.
    Keep,
}

struct Rig {
    memory: Memory,
    folder: tempfile::TempDir,
    inputs: Vec<PathBuf>,
    output: PathBuf,
    options: JobOptions,
}

impl Rig {
    /// A job of these rows, whose output has this name. Workers consume, and echo each task.
    fn new(output: &str, rows: &[Value]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("in.jsonl"), folder.path().join(output));
        let options = JobOptions {
            queue: "tasks".to_owned(),
            once: input.clone(),
            rows_per_task: 1,
            max_inputs: 8,
            resend: Resend { after: NEVER, attempts: 1 },
        };
        let rig = Self { memory: Memory::default(), folder, inputs: Vec::new(), output, options };
        let rig = rig.with_input("in.jsonl", rows);
        rig.set_consumers(1);
        rig.set_workers(|body| Fate::Answer(200, body.clone()));
        rig
    }

    /// With another input of these rows.
    fn with_input(mut self, name: &str, rows: &[Value]) -> Self {
        let input = self.folder.path().join(name);
        fs::write(&input, lines(rows)).unwrap();
        self.inputs.push(input);
        self
    }

    fn set_consumers(&self, consumers: u32) {
        self.memory.set_queue_state("tasks", Some(QueueState::Exists { consumers, ready: 0 }));
    }

    /// Sets what workers make of each task from now on, by its body.
    fn set_workers(&self, fate: impl Fn(&Value) -> Fate + Send + Sync + 'static) {
        self.memory.set_workers(move |memory, task| match fate(&body(task)) {
            Fate::Answer(status, body) => {
                memory.deliver([reply(task, status, &body)]);
                Published::Confirmed
            }
            Fate::Refuse => Published::Refused("too large".to_owned()),
            Fate::Keep => Published::Confirmed,
        });
    }

    /// The same, but the row with the input `kept` is not answered.
    fn keep(&self, kept: &'static str) {
        self.set_workers(move |body| match &body["input"] {
            input if input == kept => Fate::Keep,
            _ => Fate::Answer(200, body.clone()),
        });
    }

    /// Echoes the row with the input `kept`.
    fn release(&self, kept: &str) {
        let task = self.memory.published("tasks").into_iter().find(|task| body(task)["input"] == kept);
        let task = task.unwrap();
        self.memory.deliver([reply(&task, 200, &body(&task))]);
    }

    /// Begins a job, or continues it.
    fn open(&self) -> RefCell<Job> {
        let batch = Batch::Rows { source: Source::Lines(self.inputs.clone()), output: self.output.clone() };
        open_job(&batch, "tasks", self.options.resend.attempts).unwrap()
    }

    /// Runs a job to its end. Once `stopped` is ready, no more rows are published.
    async fn drive(&self, job: &RefCell<Job>, stopped: impl Future<Output = ()>) -> Result<(), JobError> {
        let client = Client::over(self.memory.open(), "tasks", "replies");
        let mut run = JobRun::over(client, job, &self.options)?;
        in_time(run.drive(stopped)).await?;
        job.borrow_mut().sync()
    }

    /// Begins or continues the job, and runs it to its end.
    async fn done(&self) -> RefCell<Job> {
        let job = self.open();
        self.drive(&job, pending()).await.unwrap();
        assert!(job.borrow().is_complete());
        job
    }

    /// What the output says of each row: its id, and its body or the code of its error.
    fn answers(&self) -> Vec<(String, Value)> {
        let lines = fs::read_to_string(&self.output).unwrap();
        let answer = |line: &str| {
            let line: Value = serde_json::from_str(line).unwrap();
            let error = &line["error"]["code"];
            let answer = if error.is_null() { &line["response"]["body"] } else { error };
            (line["custom_id"].as_str().unwrap().to_owned(), answer.clone())
        };
        lines.lines().map(answer).collect()
    }

    /// Waits until so many rows are answered.
    async fn until_answered(&self, job: &RefCell<Job>, count: u64) {
        while job.borrow().progress().counts.answered < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

fn body(task: &Message) -> Value {
    serde_json::from_slice(&task.body).unwrap()
}

fn reply(task: &Message, status: i64, body: &Value) -> Message {
    let headers = [("status_code".to_owned(), status.into())].into();
    let correlation_id = task.properties.correlation_id.clone();
    Message {
        properties: Properties { correlation_id, headers, ..Properties::default() },
        body: body.to_string().into(),
    }
}

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

fn row(number: usize, body: &Value) -> Value {
    json!({"custom_id": format!("row-{number}"), "method": "POST", "url": "/v1/embeddings", "body": body})
}

fn rows(count: usize) -> Vec<Value> {
    (0..count).map(|number| row(number, &json!({"input": format!("text {number}")}))).collect()
}

/// The answers of workers that echo.
fn echoed(count: usize) -> Vec<(String, Value)> {
    let answer = |number| (format!("row-{number}"), json!({"input": format!("text {number}")}));
    (0..count).map(answer).collect()
}

/// Answers with a vector for each text, and refuses a task of more than eight.
fn embed(body: &Value) -> Fate {
    let texts = match &body["input"] {
        Value::Array(texts) => texts.clone(),
        text => vec![text.clone()],
    };
    if texts.len() > 8 {
        return Fate::Answer(400, json!({"error": {"message": "too many inputs"}}));
    }
    let vector = |(index, text): (usize, &Value)| json!({"object": "embedding", "index": index, "embedding": [text.as_str().unwrap().len(), 0.5]});
    let data: Vec<Value> = texts.iter().enumerate().map(vector).collect();
    let usage = json!({"prompt_tokens": texts.len(), "total_tokens": texts.len()});
    Fate::Answer(200, json!({"object": "list", "model": "m", "data": data, "usage": usage}))
}

#[tokio::test]
async fn an_output_cut_at_any_byte_is_continued_and_a_whole_one_is_complete() {
    let rig = Rig::new("out.jsonl", &rows(300));
    let job = rig.done().await;
    {
        let job = job.borrow();
        let Progress { written, counts, .. } = job.progress();
        let Counts { published, answered, errors, in_flight, resent, duplicates, .. } = *counts;
        assert_eq!((published, answered, written, job.total()), (300, 300, 300, Some(300)));
        assert_eq!((errors, in_flight, resent, duplicates), (0, 0, 0, 0));
    }
    // The output is locked.
    drop(job);
    let whole = fs::read(&rig.output).unwrap();
    for keep in [0, 1, whole.len() / 3, whole.len() - 1] {
        fs::write(&rig.output, &whole[..keep]).unwrap();
        drop(rig.done().await);
        assert_eq!(rig.answers(), echoed(300), "cut at {keep}");
    }
    let job = rig.open();
    assert!(job.borrow().is_complete() && job.borrow().answered_before() == 300);
}

#[tokio::test]
async fn rows_of_several_files_are_answered_as_those_of_one() {
    let all = rows(40);
    let rig = Rig::new("out.jsonl", &all[..30]).with_input("more.jsonl", &all[30..]);
    rig.done().await;
    assert_eq!(rig.answers(), echoed(40));
}

#[tokio::test]
async fn rows_that_share_a_task_are_answered_as_if_alone_beside_a_bad_one() {
    let mut asked = rows(40);
    // More inputs than the pool accepts, also alone; and no request at all.
    asked[5] = row(5, &json!({"input": vec!["a"; 9]}));
    asked[11] = json!({"custom_id": "row-11"});
    let mut found = Vec::new();
    for rows_per_task in [1, 7] {
        let mut rig = Rig::new("out.jsonl", &asked);
        rig.options.rows_per_task = rows_per_task;
        rig.set_workers(embed);
        let job = rig.done().await;
        assert_eq!(job.borrow().progress().counts.errors, 2);
        let answers = rig.answers();
        let tokens: u64 = answers.iter().filter_map(|(_, body)| body["usage"]["total_tokens"].as_u64()).sum();
        assert_eq!(tokens, 38, "usage adds up");
        // What belongs to a row alone.
        let own = |(id, mut body): (String, Value)| {
            body.as_object_mut().and_then(|body| body.remove("usage"));
            (id, body)
        };
        found.push(answers.into_iter().map(own).collect::<Vec<_>>());
        let tasks = rig.memory.published("tasks").len();
        assert!(if rows_per_task == 1 { tasks == 39 } else { tasks < 20 }, "{tasks}");
    }
    assert_eq!(found[0], found[1]);
    assert_eq!(found[0][5].1["error"]["message"], "too many inputs");
    assert_eq!(found[0][11].1, "invalid_line");
}

#[tokio::test]
async fn errors_are_counted_and_known_to_a_second_run() {
    let mut asked = rows(50);
    asked.iter_mut().take(40).for_each(|row| row["body"]["input"] = "bad".into());
    asked[45] = json!({"custom_id": "row-45"});
    let rig = Rig::new("out.jsonl", &asked);
    rig.set_workers(|body| match body["input"] == "bad" {
        true => Fate::Answer(400, json!({"error": {"message": "it is bad"}})),
        false => Fate::Answer(200, body.clone()),
    });
    let counts = |job: &Job| {
        let commonest = job.output_errors().commonest().into_iter();
        (job.output_errors().total(), commonest.map(|it| it.count).collect::<Vec<_>>())
    };
    let job = rig.done().await;
    assert_eq!((job.borrow().progress().counts.errors, counts(&job.borrow())), (41, (41, vec![40, 1])));
    drop(job);
    let again = rig.open();
    assert_eq!((again.borrow().progress().counts.errors, counts(&again.borrow())), (0, (41, vec![40, 1])));
    assert!(again.borrow().is_complete());
}

#[tokio::test]
async fn a_job_that_is_stopped_behind_its_last_row_is_complete_once_all_are_answered() {
    // As many as are under way at first, so that the end of the input is not seen.
    let rig = Rig::new("out.jsonl", &rows(256));
    rig.keep("text 0");
    let (job, stop) = (rig.open(), Notify::new());
    let others = async {
        rig.memory.until_published("tasks", 256).await;
        stop.notify_one();
        rig.until_answered(&job, 255).await;
        rig.release("text 0");
    };
    let (ended, ()) = tokio::join!(rig.drive(&job, stop.notified()), others);
    assert!(ended.is_ok() && job.borrow().is_complete(), "{ended:?}");
    assert_eq!(rig.answers(), echoed(256));
}

#[tokio::test]
async fn a_late_row_holds_up_no_other_and_the_order_stays() {
    let rig = Rig::new("out.jsonl", &rows(600));
    rig.keep("text 0");
    let job = rig.open();
    let others = async {
        rig.until_answered(&job, 599).await;
        assert_eq!((job.borrow().progress().written, fs::read(&rig.output).unwrap().len()), (0, 0));
        rig.release("text 0");
    };
    let (ended, ()) = tokio::join!(rig.drive(&job, pending()), others);
    assert!(ended.is_ok(), "{ended:?}");
    assert_eq!(rig.answers(), echoed(600));
}

#[tokio::test]
async fn a_withdrawn_job_or_task_ends_the_run_and_the_next_one_goes_on() {
    let rig = Rig::new("out.jsonl", &rows(30));
    rig.set_workers(|body| match body["input"] == "text 10" {
        true => Fate::Answer(499, json!({"error": {"message": "cancelled"}})),
        false => Fate::Answer(200, body.clone()),
    });
    let job = rig.open();
    let ended = rig.drive(&job, pending()).await;
    assert!(matches!(&ended, Err(JobError::Withdrawn(id)) if id == job.borrow().id()), "{ended:?}");
    drop(job);
    // Without workers, only this notice ends it.
    let properties = Properties { kind: Some(CANCEL.to_owned()), ..Properties::default() };
    rig.memory.set_workers(move |memory, _| {
        memory.deliver([Message { properties: properties.clone(), body: Bytes::new() }]);
        Published::Confirmed
    });
    let ended = rig.drive(&rig.open(), pending()).await;
    assert!(matches!(ended, Err(JobError::Withdrawn(_))), "{ended:?}");
    rig.set_workers(|body| Fate::Answer(200, body.clone()));
    rig.done().await;
    assert_eq!(rig.answers(), echoed(30));
}

#[tokio::test(start_paused = true)]
async fn a_reply_that_never_comes_is_asked_for_again_and_then_an_error_line() {
    let mut rig = Rig::new("out.jsonl", &rows(2));
    rig.options.resend = Resend { after: Duration::from_secs(3), attempts: 2 };
    rig.set_workers(|_| Fate::Keep);
    let job = rig.done().await;
    assert_eq!(rig.memory.published("tasks").len(), 4, "each of the two twice");
    assert_eq!(rig.answers(), [0, 1].map(|number| (format!("row-{number}"), json!("no_reply"))));
    let job = job.borrow();
    assert_eq!((job.progress().counts.resent, job.progress().counts.errors), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn without_workers_a_job_waits_and_no_attempt_is_spent() {
    let mut rig = Rig::new("out.jsonl", &rows(5));
    rig.options.resend = Resend { after: Duration::from_secs(10), attempts: 1 };
    rig.set_workers(|_| Fate::Keep);
    rig.set_consumers(0);
    let job = rig.open();
    let others = async {
        rig.memory.until_published("tasks", 5).await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        let seen = (job.borrow().progress().counts.consumed, job.borrow().progress().counts.answered);
        assert_eq!(seen, (false, 0));
        rig.set_consumers(1);
        (0..5).for_each(|number| rig.release(&format!("text {number}")));
    };
    let (ended, ()) = tokio::join!(rig.drive(&job, pending()), others);
    assert!(ended.is_ok() && job.borrow().progress().counts.resent == 0, "{ended:?}");
    assert_eq!(rig.answers(), echoed(5));
}

#[tokio::test]
async fn a_row_the_broker_never_takes_is_an_error_and_the_others_are_answered() {
    for rows_per_task in [1, 4] {
        let mut rig = Rig::new("out.jsonl", &rows(20));
        rig.options.rows_per_task = rows_per_task;
        rig.set_workers(|body| match body["input"].to_string().contains("text 7") {
            true => Fate::Refuse,
            false => embed(body),
        });
        let job = rig.done().await;
        assert_eq!(job.borrow().progress().counts.errors, 1);
        for (number, (id, answer)) in rig.answers().into_iter().enumerate() {
            assert_eq!(id, format!("row-{number}"));
            assert_eq!(answer == "refused", number == 7, "{id}: {answer}");
        }
    }
}

#[tokio::test]
async fn a_fifo_is_read_once_and_a_stop_before_its_end_is_no_success() {
    let mut rig = Rig::new("out.jsonl", &[]);
    let fifo = rig.folder.path().join("fifo");
    let make = || nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    make();
    (rig.inputs, rig.options.once) = (vec![fifo.clone()], fifo.clone());
    let (job, stop) = (rig.open(), Notify::new());
    let others = async {
        // Opens when the job reads, and stays open.
        let path = fifo.clone();
        let mut writer = tokio::task::spawn_blocking(|| fs::File::create(path).unwrap()).await.unwrap();
        writer.write_all(lines(&rows(30)).as_bytes()).unwrap();
        rig.until_answered(&job, 30).await;
        stop.notify_one();
        writer
    };
    let (ended, writer) = tokio::join!(rig.drive(&job, stop.notified()), others);
    assert!(ended.is_ok() && !job.borrow().is_complete(), "{ended:?}");
    drop((job, writer));
    fs::remove_file(&rig.output).unwrap();
    // The thread that has read the first pipe may still wait for its end.
    fs::remove_file(&fifo).unwrap();
    make();
    let writer = {
        let fifo = fifo.clone();
        tokio::task::spawn_blocking(move || fs::write(fifo, lines(&rows(30))).unwrap())
    };
    rig.done().await;
    writer.await.unwrap();
    assert_eq!(rig.answers(), echoed(30));
    fs::remove_file(&rig.output).unwrap();
    (rig.inputs, rig.options.once) = (vec!["/dev/null".into()], "/dev/null".into());
    assert_eq!(rig.done().await.borrow().progress().written, 0);
}

/// The numbers of a matrix, behind its header of 128 bytes.
fn numbers(path: &Path) -> Vec<f32> {
    let matrix = fs::read(path).unwrap();
    assert!(String::from_utf8_lossy(&matrix[..128]).contains("'shape': (60, 2)"));
    matrix[128..].chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[tokio::test]
async fn a_job_writes_a_matrix_of_vectors_and_continues_it() {
    let mut asked: Vec<Value> =
        (0..60).map(|number| row(number, &json!({"input": "x".repeat(number)}))).collect();
    asked[7] = json!({"custom_id": "row-7"});
    let mut rig = Rig::new("out.npy", &asked);
    rig.options.rows_per_task = 7;
    rig.set_workers(embed);
    drop(rig.done().await);
    let is_right = |numbers: &[f32]| {
        let is_row = |(row, pair): (usize, &[f32])| match row {
            7 => pair.iter().all(|number| number.is_nan()),
            row => pair == [row as f32, 0.5],
        };
        numbers.chunks_exact(2).enumerate().all(is_row)
    };
    assert!(is_right(&numbers(&rig.output)), "{:?}", numbers(&rig.output));
    let ids = rig.output.with_extension("ids.jsonl");
    let lines = fs::read(&ids).unwrap();
    fs::write(&ids, &lines[..lines.len() / 2]).unwrap();
    let again = rig.done().await;
    assert!((1..60).contains(&again.borrow().answered_before()));
    assert!(is_right(&numbers(&rig.output)), "{:?}", numbers(&rig.output));
}

#[tokio::test]
async fn a_job_whose_first_reply_has_no_vector_ends_there_and_leaves_no_file() {
    let rig = Rig::new("out.npy", &rows(3));
    let job = rig.open();
    let Err(JobError::Output(error)) = rig.drive(&job, pending()).await else { panic!("no vector") };
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    assert!(error.to_string().contains("it takes vectors, and the reply to \"row-0\" has none"), "{error}");
    drop(job);
    assert!(!rig.output.exists() && !rig.output.with_extension("ids.jsonl").exists());
}
