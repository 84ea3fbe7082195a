//! Runs streams side by side, over the model channel. A thread reads the answers of all of them, and stops reading while too many
//! wait. Decides which stream has been silent for too long: it is cancelled, and the process is given up only if the stream then
//! does not end. Owns the channel and the running streams.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::frames::write_frame;
use super::messages::{Answer, FromProcess, ToProcess};
use super::process::{Lost, Process};
use super::processor::{Held, Input, Output};
use super::replies;
use crate::engine::{StreamEvent, StreamId, Streams};
use crate::model::{Body, ForwardError, TaskError, TaskErrorKind};

/// The most answers that wait for the loop. Beyond that the process must wait.
const MAX_WAITING: usize = 1_024;
/// The most bytes of answers that wait for the loop. The last answer may exceed them.
const MAX_WAITING_BYTES: usize = 16 << 20;
/// How long a stream that was cancelled for its silence may take to end. If Python's event loop is blocked, no stream goes on
/// until then.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);

/// What runs the streams of a class in Python.
pub struct PythonStreams {
    process: Arc<Process>,
    channel: UnixStream,
    concurrency: usize,
    inbox: Arc<Inbox>,
    /// The running streams, by the ids that tasks have in the process.
    running: HashMap<u64, Running>,
    /// The ids that tasks have in the process, by the loop's ids.
    tasks: HashMap<StreamId, u64>,
}

struct Running {
    id: StreamId,
    /// Kept because the process must not forget a task whose stream runs.
    _held: Arc<Held>,
    /// When the process last sent an answer of this stream, or was asked to cancel it.
    active: Instant,
    /// Why it was cancelled; none if it was not.
    cancelled: Option<Cancelled>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Cancelled {
    /// The loop has asked for it.
    Asked,
    /// It was silent for too long.
    Silent,
}

/// Answers that wait for the loop. The reading thread adds them, and the loop takes them.
#[derive(Default)]
struct Inbox {
    waiting: Mutex<Waiting>,
    /// Notified when the loop has taken the answers.
    taken: Condvar,
}

#[derive(Default)]
struct Waiting {
    answers: VecDeque<Answer>,
    bytes: usize,
    /// Why no further answer comes.
    error: Option<io::Error>,
}

impl Inbox {
    /// Reads answers until the channel fails.
    fn fill(&self, channel: &UnixStream, wake: &(dyn Fn() + Send + Sync)) {
        loop {
            let next = Answer::read(channel, None);
            let mut waiting = self.waiting.lock();
            match next {
                Ok(answer) => {
                    waiting.bytes += answer.buffers.iter().map(bytes::Bytes::len).sum::<usize>();
                    waiting.answers.push_back(answer);
                }
                Err(error) => waiting.error = Some(error),
            }
            let has_failed = waiting.error.is_some();
            drop(waiting);
            wake();
            if has_failed {
                return;
            }
            let mut waiting = self.waiting.lock();
            while waiting.answers.len() >= MAX_WAITING || waiting.bytes > MAX_WAITING_BYTES {
                self.taken.wait(&mut waiting);
            }
        }
    }
}

impl PythonStreams {
    /// Starts the thread that reads answers. `wake` wakes the loop.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(super) fn start(
        process: Arc<Process>,
        channel: UnixStream,
        concurrency: usize,
        wake: Box<dyn Fn() + Send + Sync>,
    ) -> io::Result<Self> {
        let inbox = Arc::<Inbox>::default();
        let (reader, filled) = (channel.try_clone()?, inbox.clone());
        thread::Builder::new().name("python-streams".into()).spawn(move || filled.fill(&reader, &*wake))?;
        Ok(Self { process, channel, concurrency, inbox, running: HashMap::new(), tasks: HashMap::new() })
    }

    /// The error for the loop, after an error on the channel.
    fn lost(&self, error: &io::Error) -> ForwardError {
        let Lost { reason, .. } = self.process.why_lost("a stream", error);
        ForwardError::Device(reason)
    }

    fn send(&self, request: &ToProcess<'_>) -> Result<(), ForwardError> {
        write_frame(&self.channel, request, &[]).map_err(|error| self.lost(&error))
    }

    /// Asks the process to cancel the stream of a task. `reason`: what the class is told.
    fn cancel_stream(&mut self, task: u64, cancelled: Cancelled, reason: &str) -> Result<(), ForwardError> {
        let now = Instant::now();
        self.running.entry(task).and_modify(|it| (it.active, it.cancelled) = (now, Some(cancelled)));
        self.send(&ToProcess::Cancel { task, reason })
    }

    /// Cancels the streams that have been silent for too long. Gives the process up if one of them was cancelled before.
    fn cancel_silent(&mut self) -> Result<(), ForwardError> {
        let timeout = self.process.timeout();
        let is_silent = |running: &Running| {
            let is_second_time = running.cancelled == Some(Cancelled::Silent);
            running.active.elapsed() >= if is_second_time { timeout.min(CANCEL_TIMEOUT) } else { timeout }
        };
        let silent = self.running.iter().filter(|(_, running)| is_silent(running));
        let silent: Vec<_> = silent.map(|(task, running)| (*task, running.cancelled)).collect();
        if silent.iter().any(|(_, cancelled)| cancelled.is_some()) {
            return Err(self.lost(&io::ErrorKind::TimedOut.into()));
        }
        silent.into_iter().try_for_each(|(task, _)| self.cancel_stream(task, Cancelled::Silent, "time-out"))
    }

    /// The event that an answer is for the loop. None if its stream has ended already.
    fn event(&mut self, mut answer: Answer) -> io::Result<Option<(StreamId, StreamEvent<Body, Output>)>> {
        let body = answer.body();
        let (task, event) = match answer.message {
            FromProcess::Part(reply) => (reply.task, StreamEvent::Piece(Body::new(reply.content_type, body))),
            FromProcess::Done(reply) => {
                (reply.task, StreamEvent::Ended(Ok(Output::Reply(Body::new(reply.content_type, body)))))
            }
            FromProcess::Ended(failure) => {
                (failure.task, StreamEvent::Ended(Err(replies::task_error(failure, TaskErrorKind::Fault))))
            }
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "an answer to something else")),
        };
        let Some(running) = self.running.get_mut(&task) else { return Ok(None) };
        running.active = Instant::now();
        let (id, cancelled) = (running.id, running.cancelled);
        let StreamEvent::Ended(result) = event else { return Ok(Some((id, event))) };
        self.running.remove(&task);
        self.tasks.remove(&id);
        let result = match (result, cancelled) {
            (Err(_), Some(Cancelled::Silent)) => {
                let seconds = self.process.timeout().as_secs_f64();
                let message = format!("the model gave no part of the reply for batch.timeout ({seconds} s)");
                Err(TaskError::new(TaskErrorKind::Fault, message))
            }
            (result, _) => result,
        };
        Ok(Some((id, StreamEvent::Ended(result))))
    }
}

impl Streams for PythonStreams {
    type Input = Input;
    type Piece = Body;
    type Output = Output;

    fn concurrency(&self) -> usize {
        self.concurrency
    }

    fn start(&mut self, id: StreamId, input: &Input) -> Result<(), ForwardError> {
        let task = input.held.id;
        let _held = input.held.clone();
        self.running.insert(task, Running { id, _held, active: Instant::now(), cancelled: None });
        self.tasks.insert(id, task);
        self.send(&ToProcess::Stream { task })
    }

    fn cancel(&mut self, id: StreamId, is_late: bool) -> Result<(), ForwardError> {
        let Some(task) = self.tasks.get(&id).copied() else { return Ok(()) };
        self.cancel_stream(task, Cancelled::Asked, if is_late { "deadline" } else { "cancelled" })
    }

    fn take_events(&mut self) -> Result<Vec<(StreamId, StreamEvent<Body, Output>)>, ForwardError> {
        let mut waiting = self.inbox.waiting.lock();
        let answers = std::mem::take(&mut waiting.answers);
        // The answers that came before the error are handled first.
        let error = if answers.is_empty() { waiting.error.take() } else { None };
        waiting.bytes = 0;
        drop(waiting);
        self.inbox.taken.notify_one();
        if let Some(error) = error {
            return Err(self.lost(&error));
        }
        let mut events = Vec::with_capacity(answers.len());
        for answer in answers {
            events.extend(self.event(answer).map_err(|error| self.lost(&error))?);
        }
        self.cancel_silent()?;
        Ok(events)
    }
}
