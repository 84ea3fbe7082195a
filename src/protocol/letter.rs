//! Reads a dead letter, whoever made it: why and since when it is one, which task it was, where it
//! belongs, and what it was before. A worker's says so in headers of ours, the broker's in `x-death`.
//! Pure; owns no state.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;

use super::dead_letter::{DEAD_LETTERED_AT, OURS, REPLY_QUEUE, Reason};
use super::message::{ORIGINAL_EXPIRATION, ORIGINALS};
use super::task::{ATTEMPT, EXPIRES, is_control};
use super::{Headers, Message, Value};

/// Why RabbitMQ dead-letters.
const BROKERS: [&str; 4] = ["delivery_limit", "expired", "rejected", "maxlen"];
/// The reason of a letter that gives none.
const UNKNOWN: &str = "unknown";
/// How RabbitMQ's direct reply-to addresses begin.
const DIRECT_REPLY_TO: &str = "amq.rabbitmq.reply-to";

/// Every reason that [`Letter::reason`] knows: the workers', the broker's, and `unknown`.
pub fn reasons() -> impl Iterator<Item = &'static str> {
    Reason::ALL.into_iter().map(Reason::as_str).chain(BROKERS).chain([UNKNOWN])
}

/// A message of a dead-letter queue.
#[derive(Clone, Copy, Debug)]
pub struct Letter<'a> {
    message: &'a Message,
    /// The reason, where a worker of ours wrote it.
    ours: Option<Reason>,
}

impl<'a> Letter<'a> {
    /// Reads `message`.
    pub fn of(message: &'a Message) -> Self {
        Self { message, ours: our_reason(&message.properties.headers) }
    }

    /// Why it is here: one of [`reasons`], or what a broker that we do not know has written.
    pub fn reason(&self) -> &'a str {
        match (self.ours, self.death("reason").and_then(Value::as_str)) {
            (Some(reason), _) => reason.as_str(),
            (None, Some(reason)) => reason,
            (None, None) => UNKNOWN,
        }
    }

    /// When it became a dead letter; where nobody wrote that down, when it was published; none where
    /// it does not say that either.
    pub fn died_at(&self) -> Option<SystemTime> {
        let written = match self.ours {
            Some(_) => self.text(DEAD_LETTERED_AT).and_then(|text| text.parse::<Timestamp>().ok()),
            None => None,
        };
        let seconds = match (self.ours, self.death("time")) {
            (None, Some(Value::Timestamp(seconds))) => Some(*seconds),
            _ => self.message.properties.timestamp,
        };
        let counted = || SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds?));
        written.map(SystemTime::from).or_else(counted)
    }

    /// The task's id, as its worker had it.
    pub fn task_id(&self) -> Option<&'a str> {
        let properties = &self.message.properties;
        let given = [&properties.message_id, &properties.correlation_id];
        let given = || given.into_iter().filter_map(|id| id.as_deref()).find(|id| !id.is_empty());
        self.our_text("task_id").or_else(given)
    }

    /// Whether it answers to this id: the task's, or its own `message_id`.
    pub fn is_named(&self, id: &str) -> bool {
        self.task_id() == Some(id) || self.message.properties.message_id.as_deref() == Some(id)
    }

    /// What went wrong, in the worker's words.
    pub fn error(&self) -> Option<&'a str> {
        self.our_text("error")
    }

    /// Who wrote it: host/pool/slot.
    pub fn worker(&self) -> Option<&'a str> {
        self.our_text("worker")
    }

    /// The pool of the worker that wrote it.
    pub fn pool(&self) -> Option<&'a str> {
        let (_host, pool_and_slot) = self.worker()?.split_once('/')?;
        pool_and_slot.rsplit_once('/').map(|(pool, _slot)| pool)
    }

    /// The queue in which the broker gave it up.
    pub fn died_in(&self) -> Option<&'a str> {
        match self.ours {
            Some(_) => None,
            None => self.death("queue").and_then(Value::as_str),
        }
    }

    /// The queue that a reply was for which a worker of an earlier version has put here. Now they put the
    /// task here.
    fn parked_for(&self) -> Option<&'a str> {
        let is_reply = self.message.properties.kind.as_deref() == Some("reply");
        self.text(REPLY_QUEUE).filter(|_| is_reply && self.ours == Some(Reason::Unroutable))
    }

    /// The queue that it belongs into: a task its pool's, a parked reply the one it was for.
    ///
    /// # Errors
    /// Nobody knows, or it would act as no task does. `named`: somebody has asked for this very letter.
    pub fn destination(&self, task_queue: &'a str, named: bool) -> Result<&'a str, String> {
        // First: anybody can write the headers of a parked reply.
        if is_control(self.message) && !named {
            let kind = self.message.properties.kind.as_deref().unwrap_or("null");
            return Err(format!("it is a control message ({kind}): to put it back, give its id"));
        }
        if let Some(queue) = self.parked_for() {
            if queue.starts_with(DIRECT_REPLY_TO) {
                return Err("it is a reply by direct reply-to, and who asked is gone".into());
            }
            return Ok(queue);
        }
        Ok(task_queue)
    }

    /// From the latest death that the broker knows of.
    fn death(&self, key: &str) -> Option<&'a Value> {
        match self.message.properties.headers.get("x-death")? {
            Value::Array(deaths) => match deaths.first()? {
                Value::Table(death) => death.get(key),
                _ => None,
            },
            _ => None,
        }
    }

    fn text(&self, header: &str) -> Option<&'a str> {
        self.message.properties.headers.get(header)?.as_str()
    }

    fn our_text(&self, header: &str) -> Option<&'a str> {
        self.ours.and_then(|_| self.text(header))
    }
}

/// The reason, where all is there that a worker writes: a producer may have a `reason` of its own.
fn our_reason(headers: &Headers) -> Option<Reason> {
    let written = headers.get("reason")?.as_str()?;
    let complete = OURS[..4].iter().all(|name| headers.contains_key(*name));
    Reason::ALL.into_iter().find(|reason| reason.as_str() == written).filter(|_| complete)
}

/// The message as it was before it became a dead letter, to be published again in its producer's name.
/// What would act at the broker stays off (see [`super::message::without_acting_properties`]), and so
/// does a deadline that may have been reckoned from an expiration. An attempt begins anew.
pub fn restored(mut letter: Message) -> Message {
    let ours = our_reason(&letter.properties.headers);
    let is_reply = Letter::of(&letter).parked_for().is_some();
    (letter.properties.expiration, letter.properties.user_id) = (None, None);
    let headers = &mut letter.properties.headers;
    headers.retain(|name, _| name != "CC" && !is_the_brokers(name));
    let tried = headers.remove(ATTEMPT).is_some();
    match ours {
        // The reply's own say which task it answers, and who did.
        Some(_) if is_reply => {
            headers.retain(|name, _| matches!(name.as_str(), "task_id" | "worker") || !is_ours(name));
        }
        Some(_) => headers.retain(|name, _| name == REPLY_QUEUE || !is_ours(name)),
        None => {}
    }
    if ours.is_some() || tried {
        if headers.contains_key(ORIGINAL_EXPIRATION) {
            headers.remove(EXPIRES);
        }
        headers.retain(|name, _| !ORIGINALS.contains(&name.as_str()));
    }
    letter
}

fn is_ours(header: &str) -> bool {
    OURS.contains(&header)
}

/// What RabbitMQ writes into a message that it dead-letters or delivers again.
fn is_the_brokers(header: &str) -> bool {
    matches!(header, "x-death" | "x-delivery-count" | "x-acquired-count")
        || header.starts_with("x-first-death-")
        || header.starts_with("x-last-death-")
}

#[cfg(test)]
#[path = "letter_tests.rs"]
mod tests;
