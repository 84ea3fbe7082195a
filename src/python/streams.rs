//! Runs tasks side by side, over the model channel. A thread reads the frames of all of them, and waits while too many are
//! unread. Decides which task has been silent for too long. Owns the channel and the running tasks.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::frames::{Frame, read_frame, write_frame};
use super::messages::{Answer, Request};
use super::process::{Lost, Process};
use super::processor::{Held, Input, Output};
use super::replies;
use crate::engine::{StreamEvent, StreamId, Streams};
use crate::model::{Body, ForwardError, TaskErrorKind};

/// The most frames that wait for the loop. Beyond that the process must wait.
const MAX_UNREAD: usize = 1_024;
/// The most bytes of frames that wait for the loop, beside the last one.
const MAX_UNREAD_BYTES: usize = 16 << 20;

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
    all: VecDeque<(Answer, Frame)>,
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

    fn send(&self, request: &Request<'_>) -> Result<(), ForwardError> {
        write_frame(&self.channel, request, &[]).map_err(|error| self.lost(&error))
    }

    /// The event of a frame. None: its task is not known any more.
    fn event(
        &mut self,
        answer: Answer,
        mut frame: Frame,
    ) -> io::Result<Option<(StreamId, StreamEvent<Body, Output>)>> {
        let task = match &answer {
            Answer::Part(reply) | Answer::Done(reply) => reply.task,
            Answer::Ended(failure) => failure.task,
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "an answer to something else")),
        };
        let Some(running) = self.running.get_mut(&task) else { return Ok(None) };
        running.active = Instant::now();
        let id = running.id;
        let event = match answer {
            Answer::Part(reply) => StreamEvent::Piece(Body::new(reply.content_type, frame.body())),
            Answer::Done(reply) => {
                StreamEvent::Ended(Ok(Output::Reply(Body::new(reply.content_type, frame.body()))))
            }
            Answer::Ended(failure) => {
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
        self.running.insert(task, Running { id, _held, active: Instant::now() });
        self.tasks.insert(id, task);
        self.send(&Request::Stream { task })
    }

    fn cancel(&mut self, id: StreamId, is_late: bool) -> Result<(), ForwardError> {
        let Some(task) = self.tasks.get(&id).copied() else { return Ok(()) };
        self.running.entry(task).and_modify(|running| running.active = Instant::now());
        let reason = if is_late { "deadline" } else { "cancelled" };
        self.send(&Request::Cancel { task, reason })
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
        let timeout = self.process.timeout();
        if self.running.values().any(|running| running.active.elapsed() >= timeout) {
            return Err(self.lost(&io::ErrorKind::TimedOut.into()));
        }
        Ok(events)
    }
}
