//! Control lines: one JSON value per line between launcher (commands, on the worker's stdin) and worker
//! (events, on its stdout). The two processes share nothing else.

use std::time::Duration;

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::error::Category;

use super::stats::Stats;
use super::{Task, printable, shorten};

/// Longest line that is read, in bytes. The longest line that is written is `start`, which holds the settings.
pub const MAX_LINE: usize = 1 << 20;

/// The launcher's commands to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// The first line: what to run. It holds the broker's password, and is therefore not passed in argv.
    Start {
        /// The worker's assignment, as `config` writes it.
        assignment: serde_json::Value,
        /// Tasks that were on a device when their worker died.
        #[serde(default)]
        crashes: Vec<CrashRecord>,
        /// Whether the worker loads the model, but consumes only after `Resume`.
        #[serde(default)]
        paused: bool,
        /// Jobs and runs of `sconce stop` that were withdrawn before the start. If the field is absent, they follow as
        /// `Withdrawals`, and the worker takes no tasks until then.
        withdrawn: Option<Vec<Cancellation>>,
    },
    /// The launcher has learned which jobs and stops were withdrawn before it started.
    Withdrawals {
        /// All that were withdrawn within the last hour.
        withdrawn: Vec<Cancellation>,
    },
    /// The crash records have changed since `start`, because more workers died.
    CrashRecords {
        /// All current records. They replace those that the worker has.
        tasks: Vec<CrashRecord>,
    },
    /// Take no more tasks, finish the accepted ones, and wait.
    Pause,
    /// Consume again.
    Resume,
    /// Change the log filter.
    LogLevel {
        /// As in `SCONCE_LOG`.
        filter: String,
    },
    /// End these tasks, if the worker holds them.
    Cancel(Cancellation),
    /// End the tasks of these cancellations, if the worker holds them.
    CancelAll {
        /// At most [`MAX_CANCELLATIONS`].
        cancellations: Vec<Cancellation>,
    },
    /// Take no more tasks, finish the accepted ones, exit.
    Finish,
    /// Finish the tasks on the device, requeue the rest, exit.
    Drain,
    /// Exit now.
    Abort,
}

/// The log message of a worker that has declared a queue. Workers that start together may all write it; their launcher
/// logs it once.
pub const QUEUE_MADE: &str = "queue made";

/// The reply queue of a job; each run of `sconce submit` is a job.
pub fn job_queue(job: &str) -> String {
    format!("sconce.job.{job}")
}

/// Number of hexadecimal digits in the id of a run of `sconce stop` or `sconce submit`. A user withdraws the run by
/// this id.
pub const RUN_ID_DIGITS: usize = 12;

/// Returns a new id for such a run. The id cannot be guessed.
pub fn new_run_id() -> String {
    uuid::Uuid::new_v4().simple().to_string()[..RUN_ID_DIGITS].to_owned()
}

/// How long withdrawals of jobs and stops are remembered.
pub const WITHDRAWN_FOR: Duration = Duration::from_secs(60 * 60);
/// Maximum number of withdrawals that are remembered; the oldest are forgotten first.
pub const MAX_WITHDRAWN: usize = 1_000;

/// Maximum number of cancellations in a line. Their ids are short strings of AMQP, so that the line has less than
/// [`MAX_LINE`] bytes even if each character is escaped.
pub const MAX_CANCELLATIONS: usize = 256;

/// What is cancelled: the task with an id, the tasks with a `correlation_id` and a `reply_to`, the tasks of a job, or
/// the sentinels of a run of `sconce stop`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cancellation {
    /// The task's id.
    pub task: Option<String>,
    /// The task's `correlation_id`.
    pub correlation_id: Option<String>,
    /// The task's `reply_to`. It is needed together with `correlation_id`, which others may guess or enumerate.
    pub reply_to: Option<String>,
    /// When the requester published the cancellation, in milliseconds since 1970. It then also cancels such a task that
    /// was published before and waits in its queue.
    pub published_ms: Option<u64>,
    /// The id of a job. This also cancels tasks of the job that are still in the queue.
    pub job: Option<String>,
    /// The id of a run of `sconce stop`. This cancels no tasks, but the sentinels of that run: they no longer stop a
    /// worker.
    pub stop: Option<String>,
}

impl Cancellation {
    /// Why this is not a valid cancellation; none if it is.
    pub fn problem(&self) -> Option<&'static str> {
        let named = [&self.task, &self.job, &self.stop].into_iter().flatten().count();
        match (named, &self.correlation_id, &self.reply_to) {
            (1, None, None) | (0, Some(_), Some(_)) => None,
            _ => Some(
                "cancel needs \"task\", \"job\", \"stop\", or \"correlation_id\" with the task's \"reply_to\"",
            ),
        }
    }

    /// The `correlation_id` and the `reply_to` of the tasks, if it names them by these.
    pub fn requester_ids(&self) -> Option<(&str, &str)> {
        let is_named_otherwise = self.task.is_some() || self.job.is_some() || self.stop.is_some();
        self.correlation_id.as_deref().zip(self.reply_to.as_deref()).filter(|_| !is_named_otherwise)
    }

    /// Whether it cancels this task.
    pub fn matches(&self, task: &Task) -> bool {
        match (&self.task, &self.job) {
            _ if self.stop.is_some() => false,
            (Some(id), _) => task.id == *id,
            (None, Some(job)) => task.reply_to() == Some(&job_queue(job)),
            (None, None) => self.requester_ids().is_some_and(|ids| task.requester_ids() == Some(ids)),
        }
    }
}

/// A worker's events for its launcher.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The model is being loaded.
    Loading,
    /// The model is loaded and has computed a known input. The worker starts to consume next.
    Ready {
        /// The opened device: `cpu`, or a UUID.
        device: String,
        /// The number format of the weights, as the `dtype` setting names it.
        #[serde(default)]
        dtype: String,
        /// Milliseconds from the process's start.
        load_ms: u64,
        /// The URLs that the model answers.
        #[serde(default)]
        serves: Vec<String>,
        /// What the model assumes because its files do not tell it, one sentence each.
        #[serde(default)]
        assumptions: Vec<String>,
    },
    /// From now on the worker processes only these suspect tasks (tasks that may have killed a worker). If it
    /// dies, the launcher knows which tasks were involved.
    Isolated {
        /// The tasks; empty: isolation has ended.
        tasks: Vec<TaskName>,
        /// Tasks of the previous group that were processed to the end.
        #[serde(default)]
        through: Vec<TaskName>,
    },
    /// A forward pass begins. If the worker dies, the launcher knows which tasks were on the device.
    Forward {
        /// The tasks on the device; empty: it is idle.
        tasks: Vec<TaskName>,
    },
    /// The list of tasks that are being preprocessed outside the worker's main thread has changed. If the worker dies,
    /// these tasks are suspect, like those on the device.
    Preprocessing {
        /// All tasks that are being preprocessed now; may be empty.
        tasks: Vec<TaskName>,
    },
    /// The counts since the previous event of this kind, and the worker's state.
    Stats(Box<Stats>),
    /// The worker takes tasks, for the first time or after a pause.
    Serving,
    /// The worker has paused: it takes no more tasks, and has settled all accepted ones.
    Paused,
    /// The worker has handled the cancellation of a task by its id.
    Cancelled {
        /// The cancellation.
        cancellation: Cancellation,
        /// How many tasks of this worker matched, and are cancelled now.
        tasks: u64,
    },
    /// The worker takes no more tasks, and settles the accepted ones.
    Draining {
        /// The cause of the drain.
        cause: String,
    },
    /// The device must not be given work; the worker takes no tasks and exits.
    Unfit {
        /// What is wrong with the device.
        why: Unfit,
        /// A sentence for people, with numbers and what to do.
        #[serde(rename = "words")]
        message: String,
    },
    /// The last line before the exit.
    Stopped {
        /// What ended the worker, as a text.
        cause: String,
        /// The exit code that follows.
        #[serde(default)]
        exit: Option<i32>,
        /// Whether another worker would end in the same way.
        #[serde(default)]
        is_lasting: bool,
    },
}

named_enum! {
    /// A defect of the device, found before the worker takes work.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Unfit as name {
        /// It computes a result that differs from the known one.
        WrongResult => "wrong_result",
        /// It computes correctly, but far slower than it should.
        TooSlow => "too_slow",
    }
}

/// The name of a task, for control lines and logs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskName {
    /// Its id, for people.
    pub id: String,
    /// [`Task::fingerprint`](super::Task::fingerprint): the same for each of its deliveries.
    pub fingerprint: String,
}

impl TaskName {
    /// The name of `task`. The id is shortened for log lines, and control characters are replaced.
    pub fn new(task: &Task) -> Self {
        let id = printable(&task.id);
        Self { id: shorten(&id, 80), fingerprint: task.fingerprint() }
    }
}

/// The crash record of a task that was on the device of dying workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrashRecord {
    /// The task's fingerprint.
    pub task: String,
    /// How many workers died with it, not counting those that died with an isolated group of tasks.
    pub count: u32,
    /// How many of them died while the task was isolated alone.
    #[serde(default)]
    pub alone: u32,
    /// The smallest number of suspect tasks, including this one, at the death of a worker. Deaths with isolated groups
    /// count too.
    #[serde(default)]
    pub among: u32,
    /// How the last worker died. It is set once the task counts as poison and is not tried again.
    pub poison: Option<CrashTail>,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrashTail {
    /// Its signal or exit code.
    pub exit: String,
    /// The last lines of its log.
    pub log: String,
}

/// Why a line is not a control line. It gives the position but never the content: `start` holds a password, and
/// errors of serde repeat the value.
#[derive(Debug, thiserror::Error)]
#[error("not a control line ({length} bytes): {problem} at column {column}")]
pub struct BadLine {
    length: usize,
    problem: &'static str,
    column: usize,
}

/// Writes `value` as one line of JSON, with its line feed.
pub fn encode(value: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Reads one line.
///
/// # Errors
/// [`BadLine`] if the line is not a `T`; the caller logs it and reads on.
pub fn decode<T: DeserializeOwned>(line: &str) -> Result<T, BadLine> {
    serde_json::from_str(line).map_err(|error| BadLine {
        length: line.len(),
        problem: match error.classify() {
            Category::Eof => "it ends too early",
            Category::Syntax => "not JSON, or nested more than 127 deep,",
            Category::Data | Category::Io => "unknown, or with a field missing or of another type,",
        },
        column: error.column(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::protocol::{Message, Properties};

    #[test]
    fn events_survive_encoding_and_decoding() {
        let events = [
            Event::Loading,
            Event::Ready {
                device: "cpu".into(),
                dtype: "f32".into(),
                load_ms: 3,
                serves: vec!["/v1/embeddings".into()],
                assumptions: Vec::new(),
            },
            Event::Stats(Box::new(Stats { tokens: 7, ..Stats::default() })),
            Event::Paused,
            Event::Forward { tasks: vec![TaskName { id: "a\nb".into(), fingerprint: "0".into() }] },
            Event::Preprocessing { tasks: vec![TaskName { id: "a\nb".into(), fingerprint: "0".into() }] },
            Event::Draining { cause: "a\nb".into() },
            Event::Unfit { why: Unfit::TooSlow, message: "a\nb".into() },
            Event::Stopped { cause: "x".into(), exit: Some(80), is_lasting: false },
        ];
        for event in events {
            let line = encode(&event);
            assert_eq!(line.iter().filter(|&&byte| byte == b'\n').count(), 1);
            assert_eq!(decode::<Event>(std::str::from_utf8(&line).unwrap()).unwrap(), event);
        }
    }

    #[test]
    fn only_a_requester_that_knows_the_reply_queue_cancels_a_task() {
        let task = |correlation_id: Option<&str>, reply_to: Option<&str>| Task {
            id: "t".into(),
            received: std::time::SystemTime::UNIX_EPOCH,
            message: Message {
                properties: Properties {
                    correlation_id: correlation_id.map(Into::into),
                    reply_to: reply_to.map(Into::into),
                    ..Properties::default()
                },
                ..Message::default()
            },
        };
        let cancel = |correlation_id: Option<&str>, reply_to: Option<&str>| Cancellation {
            correlation_id: correlation_id.map(Into::into),
            reply_to: reply_to.map(Into::into),
            ..Cancellation::default()
        };
        let own = cancel(Some("1"), Some("mine"));
        assert_eq!(own.problem(), None);
        assert!(own.matches(&task(Some("1"), Some("mine"))));
        assert!(!own.matches(&task(Some("1"), Some("other"))) && !own.matches(&task(Some("1"), None)));
        for guessed in [cancel(Some("1"), None), cancel(None, Some("mine")), cancel(None, None)] {
            assert!(guessed.problem().is_some(), "{guessed:?}");
            assert!(!guessed.matches(&task(Some("1"), None)) && !guessed.matches(&task(None, Some("mine"))));
            assert!(!guessed.matches(&task(None, None)), "{guessed:?}");
        }
        let empty = cancel(Some("1"), Some(""));
        assert!(!empty.matches(&task(Some("1"), None)) && !empty.matches(&task(Some("1"), Some(""))));
    }

    #[test]
    fn an_invalid_line_gives_an_error_with_its_position_and_no_content() {
        let start = r#"{"command":"start","assignment":{"urls":["amqp://me:hunter2@h"]}"#;
        for (line, message) in [
            (start.to_owned(), "(64 bytes): it ends too early at column 64"),
            (format!("{start} hunter2"), "not JSON"),
            (r#"{"command":"hunter2"}"#.to_owned(), "unknown"),
            (r#"{"command":"crash_records","tasks":"hunter2"}"#.to_owned(), "of another type"),
            (format!("{{\"x\":{}", "[".repeat(1 << 20)), "127 deep"),
        ] {
            let error = decode::<Command>(&line).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    proptest! {
        #[test]
        fn an_error_never_repeats_its_line(before in ".{0,40}", behind in ".{0,40}") {
            let line = format!("{{\"command\":\"{before}S3CRET{behind}\"}}");
            let error = decode::<Command>(&line).unwrap_err();
            let shown = format!("{error} {error:?}");
            prop_assert!(!shown.contains("S3CRET") && shown.len() < 300, "{}", shown);
        }

        #[test]
        fn any_cause_survives_encoding_on_one_line(cause in any::<String>()) {
            let event = Event::Stopped { cause, exit: None, is_lasting: false };
            let line = encode(&event);
            prop_assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
            let text = std::str::from_utf8(&line).unwrap();
            prop_assert_eq!(decode::<Event>(text).unwrap(), event);
        }
    }
}
