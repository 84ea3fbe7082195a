//! Classifies errors of lapin. Only this file reads the broker's reply codes and texts. Does no I/O.

use std::io;

use lapin::{Error, ErrorKind};

use crate::broker::BrokerError;

/// Why the broker, or the connection to it, failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The queue or exchange does not exist.
    Missing,
    /// The queue exists, and cannot be reached now: the node of a classic queue is down, or the queue has crashed.
    Unavailable,
    /// The queue is exclusive to another connection.
    Exclusive,
    /// The user lacks a permission; or the password is wrong, or the broker's authentication service is down.
    AccessRefused,
    /// The limit of connections (of a user, a virtual host or a node) is reached, or the virtual host is down, for
    /// example while it starts. Both may pass.
    LimitReached,
    /// The virtual host does not exist, the user may not use it, or the connection has opened too many channels.
    NotAllowed,
    /// The virtual host's name cannot be read.
    InvalidPath,
    /// The arguments differ from those of the existing queue, or the message breaks a limit of the broker.
    PreconditionFailed,
    /// The message is too large for the broker.
    ContentTooLarge,
    /// A frame, syntax or internal error, for example because a header holds an infinite number. The broker then closes
    /// the connection.
    BadFrame,
    /// The queue is of a type that does not know the command.
    NotImplemented,
    /// The broker gave another reason.
    Other,
    /// A certificate is wrong, or the answer is not TLS.
    Tls,
    /// The broker gave no reason: the connection failed.
    Connection,
}

impl Cause {
    pub(super) fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::ProtocolError(amqp) => Self::of_reply(amqp.get_id(), amqp.get_message().as_str()),
            // rustls reports a wrong certificate and an answer that is not TLS as invalid data.
            ErrorKind::IOError(error) if error.kind() == io::ErrorKind::InvalidData => Self::Tls,
            _ => Self::Connection,
        }
    }

    /// Classifies a reply of the broker. RabbitMQ also answers 404 for a queue that it cannot reach, and only the text
    /// differs. Only the beginning of a text is compared, because the queue's name follows, which anybody may choose.
    fn of_reply(code: u16, message: &str) -> Self {
        const UNAVAILABLE: [&str; 3] = ["home node '", "queue '", "failed to perform operation on "];
        let reason = message.strip_prefix("NOT_FOUND - ").unwrap_or(message);
        match code {
            311 => Self::ContentTooLarge,
            402 => Self::InvalidPath,
            403 => Self::AccessRefused,
            404 if UNAVAILABLE.iter().any(|beginning| reason.starts_with(beginning)) => Self::Unavailable,
            404 => Self::Missing,
            405 => Self::Exclusive,
            406 => Self::PreconditionFailed,
            501..=505 | 541 => Self::BadFrame,
            540 => Self::NotImplemented,
            530 if message.contains("is reached") || message.contains("is down") => Self::LimitReached,
            530 => Self::NotAllowed,
            _ => Self::Other,
        }
    }

    /// What the operator should check.
    fn hint(self) -> &'static str {
        match self {
            Self::AccessRefused => "; check user, password and permissions",
            Self::NotAllowed => "; check the virtual host (`/` is written %2f) and the user's access to it",
            Self::Tls => "; check broker.tls (ca_file, cert_file, key_file), and amqp:// or amqps://",
            _ => "",
        }
    }
}

/// The text of an error, with a hint.
pub(super) fn message(error: &Error) -> String {
    let hint = Cause::of(error).hint();
    match error.kind() {
        // RabbitMQ ends some of its texts with a full stop, after which the hint would begin.
        ErrorKind::ProtocolError(amqp) => {
            format!("{} {}{hint}", amqp.get_id(), amqp.get_message().as_str().trim_end_matches('.'))
        }
        _ => format!("{error}{hint}"),
    }
}

/// Whether a refused declaration shows that the existing queue is a stream.
pub(super) fn names_stream(error: &Error) -> bool {
    let ErrorKind::ProtocolError(amqp) = error.kind() else { return false };
    let message = amqp.get_message().as_str();
    let argument = message.split_once("inequivalent arg '").and_then(|(_, rest)| rest.split_once('\''));
    match argument {
        Some(("x-queue-type", rest)) => rest.ends_with("but current is 'stream'"),
        Some((argument, _)) => argument == "x-max-age" || argument.starts_with("x-stream-"),
        None => false,
    }
}

/// Returns the error of an operation that was refused. `broker` is the broker's address, or the name of the exchange
/// that was used.
pub(super) fn refused(broker: &str, error: &Error) -> BrokerError {
    let broker = broker.to_owned();
    let reason = message(error);
    match Cause::of(error) {
        Cause::Missing => BrokerError::Missing { broker, reason },
        _ => BrokerError::Refused { broker, reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_whose_node_is_down_is_unavailable_whatever_its_name() {
        let cause_of = |message: &str| Cause::of_reply(404, message);
        assert_eq!(cause_of("NOT_FOUND - no queue 'q' in vhost '/'"), Cause::Missing);
        assert_eq!(
            cause_of("NOT_FOUND - no queue 'home node 'q' is down or inaccessible' in vhost '/'"),
            Cause::Missing
        );
        let down =
            "NOT_FOUND - home node 'rabbit@b' of durable queue 'q' in vhost '/' is down or inaccessible";
        assert_eq!(cause_of(down), Cause::Unavailable);
        assert_eq!(
            cause_of("NOT_FOUND - queue 'q' in vhost '/' has crashed and failed to restart"),
            Cause::Unavailable
        );
        assert_eq!(cause_of("another broker's text"), Cause::Missing);
    }

    #[test]
    fn a_connection_limit_is_distinguished_from_a_forbidden_virtual_host() {
        let cause_of = |message: &str| Cause::of_reply(530, message);
        assert_eq!(cause_of("NOT_ALLOWED - connection limit (2) is reached"), Cause::LimitReached);
        assert_eq!(cause_of("NOT_ALLOWED - vhost 'b' is down"), Cause::LimitReached);
        assert_eq!(cause_of("NOT_ALLOWED - vhost b not found"), Cause::NotAllowed);
    }
}
