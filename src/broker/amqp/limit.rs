//! After how many deliveries a queue that exists drops a message. AMQP tells nobody a queue's arguments,
//! but a declaration succeeds where they are the same, and else the refusal names one that differs: so
//! the queue is declared until the refusals have named all. What a policy says cannot be seen. Owns no
//! state.

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, Error, ErrorKind};

use super::convert::short;
use super::topology::{PATIENCE, patient};

/// What RabbitMQ 4 takes where the queue says nothing; RabbitMQ 3 then drops none.
pub(super) const USUAL_LIMIT: u64 = 20;
/// A queue has fewer arguments.
const QUESTIONS: usize = 16;

/// What a refusal says.
#[derive(Debug, PartialEq)]
enum Answer {
    Limit(u64),
    /// Another argument, which the queue has.
    Also(String, AMQPValue),
    Unclear,
}

/// The limit, where that can be known.
pub(super) async fn delivery_limit(connection: &Connection, queue: &str) -> Result<Option<u64>, Error> {
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let mut arguments = patient();
    for _ in 0..QUESTIONS {
        // The broker closes a channel to say no.
        let channel = connection.create_channel().await?;
        let refusal = match channel.queue_declare(short(queue), durable, arguments.clone()).await {
            Ok(_) => return channel.close(200, "done".into()).await.map(|()| Some(PATIENCE)),
            Err(error) => error,
        };
        let words = match refusal.kind() {
            ErrorKind::ProtocolError(amqp) => amqp.get_message().to_string(),
            _ => return Err(refusal),
        };
        match answer(&words, &arguments) {
            Answer::Limit(limit) => return Ok(Some(limit)),
            Answer::Unclear => break,
            Answer::Also(name, value) => {
                arguments.insert(name.into(), value);
            }
        }
    }
    Ok(None)
}

fn answer(refusal: &str, asked: &FieldTable) -> Answer {
    let named = || {
        let (name, rest) = refusal.split_once("inequivalent arg '")?.1.split_once('\'')?;
        Some((name, rest.rsplit_once(" but current is ")?.1))
    };
    let Some((name, current)) = named() else { return Answer::Unclear };
    match (name, written(current)) {
        ("x-delivery-limit", None) if current == "none" => Answer::Limit(USUAL_LIMIT),
        // Negative: none.
        ("x-delivery-limit", Some((limit, _))) => limit
            .parse::<i64>()
            .map_or(Answer::Unclear, |limit| Answer::Limit(u64::try_from(limit).unwrap_or(u64::MAX))),
        // A classic queue counts no deliveries, and a quorum queue is nothing of the rest.
        ("x-queue-type", None) if current == "none" => Answer::Limit(u64::MAX),
        ("x-queue-type", Some(("classic", _))) => Answer::Limit(u64::MAX),
        ("durable" | "auto_delete" | "exclusive", _) => Answer::Limit(u64::MAX),
        (name, Some((value, kind))) if !asked.contains_key(name) => match value_of(value, kind) {
            Some(value) => Answer::Also(name.to_owned(), value),
            None => Answer::Unclear,
        },
        _ => Answer::Unclear,
    }
}

/// `'5'`, or where it is of another type than ours `the value '5' of type 'longstr'`: value and type.
fn written(current: &str) -> Option<(&str, &str)> {
    let quoted = current.strip_prefix("the value ").unwrap_or(current);
    let inside = quoted.strip_prefix('\'')?.strip_suffix('\'')?;
    Some(inside.rsplit_once("' of type '").unwrap_or((inside, "")))
}

/// RabbitMQ holds integers of all widths for the same.
fn value_of(value: &str, kind: &str) -> Option<AMQPValue> {
    match kind {
        "longstr" => Some(AMQPValue::LongString(value.into())),
        "bool" => value.parse().ok().map(AMQPValue::Boolean),
        _ => value.parse().ok().map(AMQPValue::LongLongInt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(name: &str, current: &str) -> Answer {
        let refusal = format!(
            "PRECONDITION_FAILED - inequivalent arg '{name}' for queue 'dead' in vhost '/': \
             received '1000000' but current is {current}"
        );
        answer(&refusal, &patient())
    }

    #[test]
    fn a_refusal_names_the_limit_that_a_queue_has() {
        let limit = |current| refused("x-delivery-limit", current);
        assert_eq!(limit("'5'"), Answer::Limit(5));
        assert_eq!(limit("the value '5' of type 'longstr'"), Answer::Limit(5));
        assert_eq!(limit("'-1'"), Answer::Limit(u64::MAX));
        assert_eq!(limit("none"), Answer::Limit(USUAL_LIMIT));
        assert_eq!(limit("'many'"), Answer::Unclear);
    }

    #[test]
    fn a_queue_that_is_no_quorum_queue_counts_no_deliveries() {
        for (name, current) in
            [("x-queue-type", "none"), ("x-queue-type", "'classic'"), ("durable", "'false'")]
        {
            assert_eq!(refused(name, current), Answer::Limit(u64::MAX), "{name}");
        }
        assert_eq!(refused("x-queue-type", "'stream'"), Answer::Unclear);
    }

    #[test]
    fn another_argument_is_asked_for_too_with_the_value_that_the_queue_has() {
        let also = |name: &str, value| Answer::Also(name.to_owned(), value);
        assert_eq!(
            refused("x-message-ttl", "the value '5000' of type 'signedint'"),
            also("x-message-ttl", AMQPValue::LongLongInt(5000))
        );
        assert_eq!(
            refused("x-overflow", "the value 'it's' of type 'longstr'"),
            also("x-overflow", AMQPValue::LongString("it's".into()))
        );
        assert_eq!(
            refused("x-single-active-consumer", "the value 'true' of type 'bool'"),
            also("x-single-active-consumer", AMQPValue::Boolean(true))
        );
    }

    #[test]
    fn what_cannot_be_read_is_unclear() {
        assert_eq!(refused("x-message-ttl", "none"), Answer::Unclear);
        assert_eq!(refused("x-message-ttl", "the value '50"), Answer::Unclear, "cut off");
        for words in ["ACCESS_REFUSED - access to queue 'x-delivery-limit' refused", ""] {
            assert_eq!(answer(words, &patient()), Answer::Unclear);
        }
    }
}
