//! A job of `sconce submit`: publishes a file's rows to a running pool, and writes the answers in the order of the
//! rows. Each run has a reply queue of its own, which outlives this process for a day, so that replies to a client that
//! died do not become dead letters. The output alone records what is done: a run continues after its last line. Knows
//! no command line and no terminal.

mod files;
mod ordered;
mod read;
mod record;
mod rows;
mod state;

use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::sync::mpsc;

use self::read::Unit;
use self::rows::TaskLimits;
use self::state::{Sink, tasks};
use crate::broker::amqp::{AmqpPublisher, Connector};
use crate::broker::{Published, Publisher as _, QueueState};
use crate::client::{Bounds, Client, ClientError, Resend, accepted};
use crate::config::Broker;
use crate::protocol::admin::CANCEL;
use crate::protocol::control::job_queue;
use crate::protocol::{Message, Properties};

pub(crate) use self::files::open_job;
pub(crate) use self::state::{Job, Progress};

/// Maximum number of tasks under way.
const MAX_UNDER_WAY: usize = 4_096;
/// Prefetch of replies that each answer one row. It is divided by the rows per task, down to [`MIN_PREFETCH`].
const PREFETCH: u16 = 512;
const MIN_PREFETCH: u16 = 8;
/// How long the broker keeps the replies of a job whose client is gone.
const KEEP_REPLIES: Duration = Duration::from_secs(24 * 60 * 60);

/// The options of a job.
#[derive(Clone, Debug)]
pub(crate) struct JobOptions {
    /// The queue that rows are published to. It must exist.
    pub(crate) queue: String,
    /// The input that is read if it can be read only once; `-` is standard input.
    pub(crate) once: PathBuf,
    /// Maximum number of rows that share a task.
    pub(crate) rows_per_task: u16,
    /// Maximum number of inputs that the pool accepts in a task.
    pub(crate) max_inputs: usize,
    /// When a task without a reply is published again, and how often it is published in all.
    pub(crate) resend: Resend,
}

/// Why a job ended before its rows were answered. The rows written by then stay, and another run continues after them.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JobError {
    /// The broker refuses a task, or is lost.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The input cannot be read.
    #[error("{what}")]
    Input {
        /// Which input.
        what: String,
        source: io::Error,
    },
    /// The input has changed since the run began, as this message says. The changed input needs another output.
    #[error("{0}")]
    InputChanged(String),
    /// The pool refuses a field that all rows have, as this message says.
    #[error("stopped, since it concerns all rows: {0}")]
    Refused(String),
    /// The output cannot be written.
    #[error("the output")]
    Output(#[source] io::Error),
    /// Somebody has withdrawn this job, or cancelled one of its tasks.
    #[error("job {0} was withdrawn, or one of its tasks cancelled; run the same command again to continue")]
    Withdrawn(String),
}

/// Tells the run of `sconce submit` with this id that its job is withdrawn, so that it ends even if there is no worker.
/// Its queue of replies outlives it by a day.
///
/// # Errors
/// The broker refuses, or is lost.
pub(crate) async fn end_run(broker: &Broker, job: &str) -> Result<RunEnd, ClientError> {
    let publisher = AmqpPublisher::new(Connector::new(broker.clone(), "sconce submit --cancel"));
    let queue = job_queue(job);
    let properties = Properties { kind: Some(CANCEL.to_owned()), ..Properties::default() };
    let notice = Message { properties, body: Bytes::new() };
    // Read before: the client may end as soon as it is told to.
    let is_gone =
        matches!(publisher.queue_state(&queue).await, Some(QueueState::Exists { consumers: 0, .. }));
    let told = match publisher.publish(&queue, notice.into()).await {
        Ok(Published::Confirmed) => Ok(if is_gone { RunEnd::Gone } else { RunEnd::Told }),
        Ok(Published::Unroutable) => Ok(RunEnd::Unknown),
        Ok(published) => accepted(published, &queue).map(|()| RunEnd::Told),
        Err(error) => Err(error.into()),
    };
    publisher.close().await;
    told
}

/// What became of a run whose job was withdrawn.
pub(crate) enum RunEnd {
    /// It is told to end.
    Told,
    /// Its client has left before.
    Gone,
    /// There is no such run, or it has ended long ago.
    Unknown,
}

/// A run of a job: its connection, and the rows as they are read.
pub(crate) struct JobRun<'a> {
    job: &'a RefCell<Job>,
    client: Client,
    units: mpsc::Receiver<Result<Unit, JobError>>,
    resend: Resend,
}

impl<'a> JobRun<'a> {
    /// Connects, and begins to read the rows that `job` has not answered. Call it inside a runtime.
    ///
    /// # Errors
    /// No broker could be reached, it refuses, the queue does not exist, or an input cannot be read.
    pub(crate) async fn begin(
        job: &'a RefCell<Job>,
        broker: &Broker,
        options: &JobOptions,
    ) -> Result<Self, JobError> {
        let (replies, name) = {
            let job = job.borrow();
            (job_queue(job.id()), format!("sconce submit {}", job.id()))
        };
        let prefetch = (PREFETCH / options.rows_per_task).max(MIN_PREFETCH);
        let client = Client::for_job(broker, &name, &options.queue, &replies, KEEP_REPLIES, prefetch).await?;
        Self::over(client, job, options)
    }

    /// The same over a client that is connected.
    ///
    /// # Errors
    /// An input cannot be read.
    fn over(client: Client, job: &'a RefCell<Job>, options: &JobOptions) -> Result<Self, JobError> {
        let limits = TaskLimits { rows: options.rows_per_task.into(), inputs: options.max_inputs };
        let rows = job.borrow_mut().take_rows();
        let first = job.borrow().answered_before();
        let units = read::read(rows, &options.once, first, limits)?;
        Ok(Self { job, client, units, resend: options.resend })
    }

    /// Publishes rows and writes their answers, until all are answered. Once `stopped` is ready, no more rows are
    /// published, and the tasks under way are waited for. Dropping this future gives up the tasks under way; the job's
    /// progress says how many there are.
    ///
    /// # Errors
    /// [`JobError`].
    pub(crate) async fn drive(&mut self, stopped: impl Future<Output = ()>) -> Result<(), JobError> {
        let bounds =
            Bounds { max_tasks: MAX_UNDER_WAY, timeout: None, in_order: false, resend: Some(self.resend) };
        let tasks = tasks(self.job, &mut self.units).take_until(stopped);
        self.client.run(0, tasks, &bounds, &mut Sink(self.job)).await
    }

    /// Closes the connection.
    pub(crate) async fn close(self) {
        self.client.close().await;
    }
}

#[cfg(test)]
mod tests;
