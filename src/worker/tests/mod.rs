//! Tests of the worker in process, over a queue in memory, with models that compute nothing, in paused time. There is
//! no broker and no thread, and each wait is for an event; only tests of files are in real time, with servers.

mod files;
mod kinds;
mod messages;
mod on_demand;
mod one_pass;
mod parts;
mod queues;
mod retries;
mod sequences;
mod slow_replies;
#[cfg(feature = "otlp")]
mod tracing;

use std::io::Write;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::*;
use crate::broker::memory::{Memory, Settled, in_time};
use crate::config;
use crate::engine::{continuous, one_pass};
use crate::model::testing::{echo, script};
use crate::protocol::control::decode;
use crate::protocol::{Headers, Message, Properties};

/// The pool's queues.
const TASKS: &str = "tasks";
const REPLIES: &str = "replies";
const DEAD: &str = "dead";

/// A worker's stdout.
#[derive(Clone, Default)]
struct Stdout {
    text: Arc<Mutex<Vec<u8>>>,
    /// Notified of each write.
    written: Arc<Notify>,
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.text.lock().write(bytes);
        self.written.notify_waiters();
        count
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stdout {
    fn events(&self) -> Vec<Event> {
        let text = String::from_utf8(self.text.lock().clone()).unwrap();
        text.lines().map(|line| decode(line).unwrap()).collect()
    }
}

struct Rig {
    memory: Memory,
    stop: Stop,
    control: Control,
    stdout: Stdout,
    worker: JoinHandle<Result<Ended, WorkerError>>,
}

impl Rig {
    /// Starts a worker of `model` over a queue in memory.
    fn start(model: &str, change: impl FnOnce(&mut Assignment)) -> Self {
        let starter =
            if model.starts_with(script::SCRIPT) { continuous(script::load) } else { one_pass(echo::load) };
        Self::start_model(&starter, model, change)
    }

    /// The same with a model that `starter` loads.
    fn start_model(starter: &Starter, model: &str, change: impl FnOnce(&mut Assignment)) -> Self {
        Self::start_traced(starter, model, Traces::default(), change)
    }

    /// The same, with spans.
    fn start_traced(
        starter: &Starter,
        model: &str,
        traces: Traces,
        change: impl FnOnce(&mut Assignment),
    ) -> Self {
        let mut assignment = assignment(model);
        change(&mut assignment);
        let stdout = Stdout::default();
        let control = Control {
            withdrawn: Withdrawn::default(),
            reporter: Reporter::start_here(stdout.clone()),
            crashes: CrashRecords::default(),
            pause: Pause::default(),
            cancellations: Cancellations::default(),
            traces,
        };
        let (memory, stop, counters) = (Memory::default(), Stop::default(), Arc::new(Counters::default()));
        let setup = Setup {
            spec: load_spec(&assignment),
            min_speed: 0.0,
            policy: policy(&assignment),
            prepared_bytes: prepared_bytes(&assignment),
            observer: Box::new(DeviceReport::new(&control, counters.clone())),
        };
        let loaded = starter.start_here(setup).unwrap_or_else(|error| panic!("{error}"));
        let (broker, worker_control, worker_stop) = (memory.clone(), control.clone(), stop.clone());
        let worker = tokio::task::spawn_local(async move {
            let queues = assignment.pool.queues().len();
            let open = opening(move |_| {
                let session = broker.open_queues(queues);
                Box::pin(async move { Ok(session) })
            });
            let context = WorkerContext { control: &worker_control, counters, pools: Pools::start_here() };
            serve(&assignment, loaded, &open, worker_stop, context).await
        });
        Self { memory, stop, control, stdout, worker }
    }

    /// Waits until the worker has written a matching event to its stdout.
    async fn wait_for_event(&self, matches: impl Fn(&Event) -> bool) {
        loop {
            let written = self.stdout.written.notified();
            if self.stdout.events().iter().any(&matches) {
                return;
            }
            in_time(written).await;
        }
    }

    /// Waits until the task is on the device.
    async fn until_computing(&self, id: &str) {
        let names_task = |event: &Event| match event {
            Event::Forward { tasks } => tasks.iter().any(|task| task.id == id),
            _ => false,
        };
        self.wait_for_event(names_task).await;
    }

    /// Waits for the worker to end, without causing that. Returns the result and the reported events.
    async fn join(self) -> (Result<Ended, WorkerError>, Vec<Event>) {
        let ended = in_time(self.worker).await.unwrap();
        self.control.reporter.flush().await;
        (ended, self.stdout.events())
    }

    /// Stops the worker once its accepted tasks are finished, and waits for its end.
    async fn finish(self) -> (Ended, Vec<Event>) {
        self.stop.advance(Phase::Finishing, "test");
        let (ended, events) = self.join().await;
        (ended.unwrap_or_else(|error| panic!("{error}")), events)
    }
}

/// Returns `open`, with the lifetimes of [`Open`], which a closure alone would not infer.
fn opening<F: for<'a> Fn(&'a Assignment) -> BoxFuture<'a, Result<BrokerSession, BrokerError>>>(open: F) -> F {
    open
}

fn assignment(model: &str) -> Assignment {
    let mut settings = config::load(&[], [], &[]).unwrap().settings;
    let mut pool = settings.pools.remove(0);
    pool.model = model.to_owned();
    pool.task_queue = TASKS.to_owned();
    pool.reply_queue = Some(REPLIES.to_owned());
    pool.dead_letter_queue = DEAD.to_owned();
    Assignment {
        slot: "test/0".into(),
        worker: "host/test/0".into(),
        device: "cpu".into(),
        sharers: 1,
        threads: 1,
        pool,
        broker: settings.broker,
        telemetry: settings.telemetry,
        reserved_queues: Vec::new(),
        broker_reached: false,
    }
}

/// A task with the id `id`, whose reply goes to the queue `to`.
fn task(id: &str, to: &str, body: &Value) -> Message {
    let properties = Properties {
        correlation_id: Some(id.to_owned()),
        reply_to: Some(to.to_owned()),
        ..Properties::default()
    };
    Message { properties, body: body.to_string().into() }
}

/// A sentinel: the message that stops one worker.
fn sentinel() -> Message {
    Message { body: "null".into(), ..Message::default() }
}

fn with_headers(mut message: Message, headers: &[(&str, &str)]) -> Message {
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).into()));
    message.properties.headers = headers.collect::<Headers>();
    message
}

fn status(reply: &Message) -> i64 {
    reply.properties.headers["status_code"].as_i64().unwrap()
}

fn body(message: &Message) -> Value {
    serde_json::from_slice(&message.body).unwrap()
}
