//! Runs tasks side by side, over the model channel. A thread reads the frames of all of them, and waits while too many are
//! unread. Decides which task has been silent for too long: it is cancelled, and the process is given up only if the task
//! then does not end. Owns the channel and the running tasks.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::frames::{Frame, read_frame, write_frame};
use super::messages::{FromProcess, ToProcess};
use super::process::{Lost, Process};
use super::processor::{Held, Input, Output};
use super::replies;
use crate::engine::{StreamEvent, StreamId, Streams};
use crate::model::{Body, ForwardError, TaskError, TaskErrorKind};

/// The most frames that wait for the loop. Beyond that the process must wait.
const MAX_UNREAD: usize = 1_024;
/// The most bytes of frames that wait for the loop, beside the last one.
const MAX_UNREAD_BYTES: usize = 16 << 20;
/// How long a task that was cancelled for its silence may take to end. An event loop that is blocked cancels none, and holds up
/// all other tasks until then.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);

/// What runs the tasks of a class in Python.
pub struct PythonStreams {
    process: Arc<Process>,
    channel: UnixStream,
    concurrency: usize,
    unread: Arc<Unread>,
    /// The running tasks, by the ids of the process.
    running: HashMap<u64, Running>,
    /// The ids of the process, by the loop's.
    tasks: HashMap<StreamId, u64>,
}

struct Running {
    id: StreamId,
    /// The process must not forget a task before it has ended.
    _held: Arc<Held>,
    /// When the process has last said something of it, or was told to end it.
    active: Instant,
    /// Why it was told to end; none if it was not.
    ending: Option<Ending>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// The loop has cancelled it.
    Cancelled,
    /// It was silent for too long.
    TimedOut,
}

/// Frames that are read and not taken. Written by the reading thread, read by the loop.
#[derive(Default)]
struct Unread {
    frames: Mutex<Frames>,
    /// Notified when frames were taken.
    taken: Condvar,
}

#[derive(Default)]
struct Frames {
    all: VecDeque<(FromProcess, Frame)>,
    bytes: usize,
    error: Option<io::Error>,
}

impl Unread {
    /// Reads frames until the channel fails.
    fn read(&self, channel: &UnixStream, wake: &(dyn Fn() + Send + Sync)) {
        loop {
            let next = read_frame(channel, None).and_then(|frame| Ok((frame.header()?, frame)));
            let mut frames = self.frames.lock();
            match next {
                Ok((answer, frame)) => {
                    frames.bytes += frame.buffers.iter().map(bytes::Bytes::len).sum::<usize>();
                    frames.all.push_back((answer, frame));
                }
                Err(error) => frames.error = Some(error),
            }
            let has_ended = frames.error.is_some();
            drop(frames);
            wake();
            if has_ended {
                return;
            }
            let mut frames = self.frames.lock();
            while frames.all.len() >= MAX_UNREAD || frames.bytes > MAX_UNREAD_BYTES {
                self.taken.wait(&mut frames);
            }
        }
    }
}

impl PythonStreams {
    /// Starts the thread that reads. `wake` wakes the loop.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(super) fn start(
        process: Arc<Process>,
        channel: UnixStream,
        concurrency: usize,
        wake: Box<dyn Fn() + Send + Sync>,
    ) -> io::Result<Self> {
        let unread = Arc::<Unread>::default();
        let (reader, reading) = (channel.try_clone()?, unread.clone());
        thread::Builder::new().name("python-streams".into()).spawn(move || reading.read(&reader, &*wake))?;
        Ok(Self { process, channel, concurrency, unread, running: HashMap::new(), tasks: HashMap::new() })
    }

    fn lost(&self, error: &io::Error) -> ForwardError {
        let Lost { reason, .. } = self.process.why_lost("a task that runs beside others", error);
        ForwardError::Device(reason)
    }

    fn send(&self, request: &ToProcess<'_>) -> Result<(), ForwardError> {
        write_frame(&self.channel, request, &[]).map_err(|error| self.lost(&error))
    }

    fn tell_to_end(&mut self, task: u64, ending: Ending, reason: &str) -> Result<(), ForwardError> {
        let now = Instant::now();
        self.running.entry(task).and_modify(|it| (it.active, it.ending) = (now, Some(ending)));
        self.send(&ToProcess::Cancel { task, reason })
    }

    /// Cancels the tasks that have been silent for too long. Gives the process up if one of them was told to end before.
    fn end_silent(&mut self) -> Result<(), ForwardError> {
        let timeout = self.process.timeout();
        let is_silent = |running: &Running| {
            let has_timed_out = running.ending == Some(Ending::TimedOut);
            running.active.elapsed() >= if has_timed_out { timeout.min(CANCEL_TIMEOUT) } else { timeout }
        };
        let silent = self.running.iter().filter(|(_, running)| is_silent(running));
        let silent: Vec<_> = silent.map(|(task, running)| (*task, running.ending)).collect();
        if silent.iter().any(|(_, ending)| ending.is_some()) {
            return Err(self.lost(&io::ErrorKind::TimedOut.into()));
        }
        silent.into_iter().try_for_each(|(task, _)| self.tell_to_end(task, Ending::TimedOut, "time-out"))
    }

    /// The event of a frame. None: its task is not known any more.
    fn event(
        &mut self,
        answer: FromProcess,
        mut frame: Frame,
    ) -> io::Result<Option<(StreamId, StreamEvent<Body, Output>)>> {
        let task = match &answer {
            FromProcess::Part(reply) | FromProcess::Done(reply) => reply.task,
            FromProcess::Ended(failure) => failure.task,
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "an answer to something else")),
        };
        let timeout = self.process.timeout();
        let Some(running) = self.running.get_mut(&task) else { return Ok(None) };
        running.active = Instant::now();
        let (id, ending) = (running.id, running.ending);
        let event = match answer {
            FromProcess::Part(reply) => StreamEvent::Piece(Body::new(reply.content_type, frame.body())),
            FromProcess::Done(reply) => {
                StreamEvent::Ended(Ok(Output::Reply(Body::new(reply.content_type, frame.body()))))
            }
            FromProcess::Ended(_) if ending == Some(Ending::TimedOut) => {
                let seconds = timeout.as_secs_f64();
                let message = format!("the model gave no part of the reply for batch.timeout ({seconds} s)");
                StreamEvent::Ended(Err(TaskError::new(TaskErrorKind::Fault, message)))
            }
            FromProcess::Ended(failure) => {
                StreamEvent::Ended(Err(replies::task_error(failure, TaskErrorKind::Fault)))
            }
            _ => return Ok(None),
        };
        if matches!(event, StreamEvent::Ended(_)) {
            self.running.remove(&task);
            self.tasks.remove(&id);
        }
        Ok(Some((id, event)))
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
        self.running.insert(task, Running { id, _held, active: Instant::now(), ending: None });
        self.tasks.insert(id, task);
        self.send(&ToProcess::Stream { task })
    }

    fn cancel(&mut self, id: StreamId, is_late: bool) -> Result<(), ForwardError> {
        let Some(task) = self.tasks.get(&id).copied() else { return Ok(()) };
        self.tell_to_end(task, Ending::Cancelled, if is_late { "deadline" } else { "cancelled" })
    }

    fn take_events(&mut self) -> Result<Vec<(StreamId, StreamEvent<Body, Output>)>, ForwardError> {
        let mut frames = self.unread.frames.lock();
        let all = std::mem::take(&mut frames.all);
        // What the process has still said comes first.
        let error = if all.is_empty() { frames.error.take() } else { None };
        frames.bytes = 0;
        drop(frames);
        self.unread.taken.notify_one();
        let mut events = Vec::with_capacity(all.len());
        for (answer, frame) in all {
            events.extend(self.event(answer, frame).map_err(|error| self.lost(&error))?);
        }
        if let Some(error) = error {
            return Err(self.lost(&error));
        }
        self.end_silent()?;
        Ok(events)
    }
}
