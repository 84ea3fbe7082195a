//! Remote control over the broker: requests to launchers, addressed by routing key, and their answers. Any AMQP
//! client can send them. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::Properties;
use super::control::Cancellation;
use super::stats::Stats;
use super::task::published_in;

/// A request to launchers: the body of the message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum ControlRequest {
    /// Report which slots exist, and their states.
    Ping,
    /// Report the counts since the launcher started.
    Stats,
    /// Report which tasks are on the devices now.
    Active,
    /// Take no more tasks, finish the accepted ones, keep the model loaded.
    Pause,
    /// Consume again; a drained slot gets a new worker.
    Resume,
    /// Finish accepted tasks and end the worker; the slot stays empty.
    Drain,
    /// Finish accepted tasks and end the worker for good. A launcher ends with its last slot.
    Shutdown,
    /// Finish accepted tasks, end the worker, start a new one. This also starts a worker in a quarantined slot.
    Restart,
    /// Change the log filter, until the launcher ends.
    LogLevel {
        /// As in `SCONCE_LOG`.
        filter: String,
    },
    /// End these tasks, if workers hold them; each is answered with status 499.
    Cancel(Cancellation),
    /// End the tasks of these cancellations by requesters. A launcher puts the requests of many into one.
    #[serde(skip)]
    CancelAll(Arc<[Cancellation]>),
}

/// The `type` of a message with which a requester cancels its own task. It has the `correlation_id` and the `reply_to`
/// of the task. Without `reply_to` it is refused, because anybody may guess a `correlation_id`. The task is answered,
/// the message is not.
pub const CANCEL: &str = "control.cancel";

impl ControlRequest {
    /// Whether the request changes nothing.
    pub fn is_query(&self) -> bool {
        matches!(self, Self::Ping | Self::Stats | Self::Active)
    }

    /// Returns the cancellation in a message of the type [`CANCEL`], with which a requester cancels its own task. None
    /// for any other message.
    pub fn cancellation_in(properties: &Properties) -> Option<Cancellation> {
        let Properties { kind, correlation_id, reply_to, .. } = properties;
        let (correlation_id, reply_to) = (correlation_id.clone(), reply_to.clone());
        let published = published_in(properties).and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let published_ms = published.and_then(|since| u64::try_from(since.as_millis()).ok());
        let cancellation =
            || Cancellation { correlation_id, reply_to, published_ms, ..Cancellation::default() };
        (kind.as_deref() == Some(CANCEL)).then(cancellation)
    }
}

/// The slots that a request is for. Its routing key names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Every slot of every launcher.
    All,
    /// Every slot of every launcher, but only for messages of the type [`CANCEL`]. The broker can permit only this
    /// routing key to requesters that must not control workers.
    Cancel,
    /// The slots of all launchers of a host.
    Host(String),
    /// The slots of a launcher.
    Launcher(String),
    /// The slots of a pool, on all hosts.
    Pool(String),
    /// One slot, named as replies name its worker: launcher/pool/index.
    Slot(String),
}

impl Target {
    /// The routing key for the control exchange.
    pub fn routing_key(&self) -> String {
        match self {
            Self::All => "all".to_owned(),
            Self::Cancel => "cancel".to_owned(),
            Self::Host(host) => format!("host.{host}"),
            Self::Launcher(name) => format!("launcher.{name}"),
            Self::Pool(pool) => format!("pool.{pool}"),
            Self::Slot(worker) => format!("slot.{worker}"),
        }
    }

    /// The target of a routing key, if the key is valid.
    pub fn from_routing_key(key: &str) -> Option<Self> {
        let (kind, name) = key.split_once('.').unwrap_or((key, ""));
        match (kind, name) {
            ("all", "") => Some(Self::All),
            ("cancel", "") => Some(Self::Cancel),
            (_, "") => None,
            ("host", name) => Some(Self::Host(name.to_owned())),
            ("launcher", name) => Some(Self::Launcher(name.to_owned())),
            ("pool", name) => Some(Self::Pool(name.to_owned())),
            ("slot", name) => Some(Self::Slot(name.to_owned())),
            _ => None,
        }
    }

    /// This target as the launcher `launcher` on `host` resolves it: that host and that launcher become
    /// [`Target::All`]. None if the target is another host or launcher.
    pub fn narrowed_to(self, host: &str, launcher: &str) -> Option<Self> {
        match self {
            Self::Host(name) => (name == host).then_some(Self::All),
            Self::Launcher(name) => (name == launcher).then_some(Self::All),
            other => Some(other),
        }
    }

    /// Whether a target that [`Target::narrowed_to`] has resolved includes the slot of this pool and worker.
    pub fn matches(&self, pool: &str, worker: &str) -> bool {
        match self {
            Self::All | Self::Cancel => true,
            Self::Host(_) | Self::Launcher(_) => false,
            Self::Pool(name) => name == pool,
            Self::Slot(name) => name == worker,
        }
    }
}

named_enum! {
    /// What a slot is doing.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum State as name {
        /// Its process is being started.
        #[default]
        Starting => "starting",
        /// Its model is being loaded.
        Loading => "loading",
        /// It waits for tasks.
        Ready => "ready",
        /// It computes.
        Busy => "busy",
        /// It takes no tasks until it is resumed.
        Paused => "paused",
        /// It finishes what it has taken, and then ends.
        Draining => "draining",
        /// It has ended as requested.
        Stopped => "stopped",
        /// It ended unexpectedly, and is started again after a delay.
        Failed => "failed",
        /// It failed too often, and is started again only on request.
        Quarantined => "quarantined",
    }
}

impl State {
    /// Whether it takes tasks.
    pub fn is_serving(self) -> bool {
        matches!(self, Self::Ready | Self::Busy)
    }
}

/// The bounds of a pool's batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BatchBounds {
    /// Maximum number of tokens of a batch.
    pub max_tokens: Option<usize>,
    /// Maximum number of inputs of a batch.
    pub max_requests: Option<usize>,
    /// Longest time that an idle device waits for a batch to fill, in milliseconds.
    pub max_delay_ms: Option<f64>,
}

/// One slot, as its launcher sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SlotReport {
    /// pool/index.
    pub slot: String,
    /// launcher/pool/index, as in replies.
    pub worker: String,
    /// The pool.
    pub pool: String,
    /// Its task queue.
    pub queue: String,
    /// `cpu`, or the GPU's UUID.
    pub device: String,
    /// The number format of the model's weights, as the `dtype` setting names it; none until the worker is ready.
    pub dtype: Option<String>,
    /// The model, as the settings name it.
    pub model: String,
    /// What the model assumes because its files do not tell it, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub assumptions: Vec<String>,
    /// What it is doing.
    pub state: State,
    /// Milliseconds since this state began.
    pub state_ms: u64,
    /// The process id of its worker; in the answer to a restart, that of the worker that is replaced.
    pub pid: Option<u32>,
    /// When its worker became ready, in milliseconds since 1970.
    pub ready_at_ms: Option<u64>,
    /// Bounds of its batches.
    pub batch: BatchBounds,
    /// Ids of the tasks on its device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub active: Vec<String>,
    /// Milliseconds since these tasks were put on the device.
    pub active_ms: Option<u64>,
    /// How many tasks are on its device.
    pub in_flight: u64,
    /// How many times its worker was started again, by reason.
    pub restarts: BTreeMap<String, u64>,
    /// Why its last worker ended unexpectedly.
    pub last_failure: Option<String>,
    /// The counts of its workers; only in answers to [`ControlRequest::Stats`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stats: Option<Box<Stats>>,
    /// The result of the request for this slot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub done: Option<String>,
    /// How many tasks of its worker were cancelled; only after the cancellation of a task by its id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cancelled: Option<u64>,
    /// Why the request was refused for this slot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

impl SlotReport {
    /// The model, and the number format that it is loaded in.
    pub fn loaded_model(&self) -> String {
        match &self.dtype {
            Some(dtype) => format!("{} in {dtype}", self.model),
            None => self.model.clone(),
        }
    }
}

/// A launcher's answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LauncherAnswer {
    /// The launcher's name.
    pub launcher: String,
    /// Its host.
    pub host: String,
    /// Its process id.
    pub pid: u32,
    /// Its version of sconce.
    pub version: String,
    /// Milliseconds since it started.
    pub uptime_ms: u64,
    /// The slots that the request was for.
    pub slots: Vec<SlotReport>,
    /// Why the request was refused as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_read_back_from_its_routing_key_and_selects_its_slots() {
        let worker = "gpu1.example.com/embed/0";
        for (target, is_selected) in [
            (Target::All, true),
            (Target::Host("gpu1.example.com".into()), true),
            (Target::Host("gpu1".into()), false),
            (Target::Launcher("gpu1-2".into()), true),
            (Target::Launcher("gpu1".into()), false),
            (Target::Pool("embed".into()), true),
            (Target::Slot(worker.into()), true),
            (Target::Slot("gpu1.example.com/embed/1".into()), false),
        ] {
            assert_eq!(Target::from_routing_key(&target.routing_key()), Some(target.clone()));
            let narrowed = target.clone().narrowed_to("gpu1.example.com", "gpu1-2");
            assert_eq!(narrowed.is_some_and(|it| it.matches("embed", worker)), is_selected, "{target:?}");
        }
        for none in ["", "host.", "host", "everything", "all.of.it"] {
            assert_eq!(Target::from_routing_key(none), None, "{none}");
        }
    }

    #[test]
    fn requests_are_plain_json() {
        for (json, request) in [
            (r#"{"command":"ping"}"#, ControlRequest::Ping),
            (
                r#"{"command":"log-level","filter":"debug"}"#,
                ControlRequest::LogLevel { filter: "debug".into() },
            ),
        ] {
            assert_eq!(serde_json::from_str::<ControlRequest>(json).unwrap(), request);
        }
    }

    #[test]
    fn every_state_has_the_name_that_json_gives_it() {
        for (state, name) in State::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), name);
        }
    }
}
