//! Tests of the worker in process, over a queue in memory, with models that compute nothing, in paused time. There is
//! no broker and no thread, and each wait is for an event.

mod on_demand;
mod one_pass;
mod parts;
mod places;
mod sequences;

use std::io::Write;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::*;
use crate::broker::memory::{Memory, Settled, in_time};
use crate::config;
use crate::engine::{continuous, oneshot};
use crate::model::testing::{echo, script};
use crate::protocol::control::decode;
use crate::protocol::{Headers, Message, Properties};

/// The pool's queues.
const TASKS: &str = "tasks";
const REPLIES: &str = "replies";
const DEAD: &str = "dead";

/// What a worker writes to its stdout.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>, Arc<Notify>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.0.lock().write(bytes);
        self.1.notify_waiters();
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    fn events(&self) -> Vec<Event> {
        let text = String::from_utf8(self.0.lock().clone()).unwrap();
        text.lines().map(|line| decode(line).unwrap()).collect()
    }
}

struct Rig {
    memory: Memory,
    stop: Stop,
    control: Control,
    lines: Lines,
    worker: JoinHandle<Result<Ended, WorkerError>>,
}

impl Rig {
    /// Starts a worker of `model`, and waits for its session.
    fn start(model: &str, change: impl FnOnce(&mut Assignment)) -> Self {
        let starter =
            if model.starts_with(script::SCRIPT) { continuous(script::load) } else { oneshot(echo::load) };
        Self::start_model(&starter, model, change)
    }

    /// The same with a model that `starter` loads.
    fn start_model(starter: &Starter, model: &str, change: impl FnOnce(&mut Assignment)) -> Self {
        let mut assignment = assignment(model);
        change(&mut assignment);
        let lines = Lines::default();
        let control = Control {
            withdrawn: Withdrawn::default(),
            reporter: Reporter::start_here(lines.clone()),
            crashes: CrashRecords::default(),
            settings: LiveSettings::default(),
            cancellations: cancellations(),
            traces: Traces::default(),
        };
        let (memory, stop, counters) = (Memory::default(), Stop::default(), Arc::new(Counters::default()));
        let setup = Setup {
            spec: load_spec(&assignment),
            min_speed: 0.0,
            policy: policy(&assignment),
            prepared_bytes: assignment.pool.prepared_bytes,
            observer: Box::new(DeviceReport::new(&control, counters.clone())),
        };
        let loaded = starter.start_here(setup).unwrap_or_else(|error| panic!("{error}"));
        let (broker, own, stopped) = (memory.clone(), control.clone(), stop.clone());
        let worker = tokio::task::spawn_local(async move {
            let open = opening(move |_| {
                let session = broker.open();
                Box::pin(async move { Ok(session) })
            });
            let own = Own { control: &own, counters, pools: Pools::start_here() };
            serve(&assignment, loaded, &open, stopped, own).await
        });
        Self { memory, stop, control, lines, worker }
    }

    /// Waits until the worker has reported such an event to the launcher.
    async fn hears(&self, what: impl Fn(&Event) -> bool) {
        loop {
            let more = self.lines.1.notified();
            if self.lines.events().iter().any(&what) {
                return;
            }
            in_time(more).await;
        }
    }

    /// Waits until the task is on the device.
    async fn computes(&self, id: &str) {
        let is_there = |event: &Event| match event {
            Event::Forward { tasks } => tasks.iter().any(|task| task.id == id),
            _ => false,
        };
        self.hears(is_there).await;
    }

    async fn end(self) -> (Result<Ended, WorkerError>, Vec<Event>) {
        let ended = in_time(self.worker).await.unwrap();
        self.control.reporter.flush().await;
        (ended, self.lines.events())
    }

    /// Asks the worker to finish, and waits for its end.
    async fn finish(self) -> (Ended, Vec<Event>) {
        self.stop.advance(Phase::Finishing, "test");
        let (ended, events) = self.end().await;
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

/// A task called `id`, whose reply goes to the queue `to`.
fn task(id: &str, to: &str, body: &Value) -> Message {
    let properties = Properties {
        correlation_id: Some(id.to_owned()),
        reply_to: Some(to.to_owned()),
        ..Properties::default()
    };
    Message { properties, body: body.to_string().into() }
}

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
