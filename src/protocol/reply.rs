//! Writes a reply: properties echoed from the task, the status headers, the timings, the body. Decides the status
//! and the code of an error. Owns no state.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;

use super::stats::Generated;
use super::{Headers, JSON, Message, Properties, Task, TaskError, TaskErrorKind, Value};

/// The `type` of a part of a reply.
pub const PART: &str = "reply.part";
/// The delivery mode of a message that may be lost when the broker restarts.
const TRANSIENT: u8 = 1;

/// Longest trace header that is echoed, in bytes: twice the 512 that W3C requires for `tracestate`.
const TRACE_BYTES: usize = 1_024;

/// The worker that answers; part of the headers of every reply.
#[derive(Clone, Debug)]
pub struct WorkerInfo {
    /// launcher/pool/index.
    pub worker: String,
    /// `cpu`, or the GPU's UUID.
    pub device: String,
    /// The number format of the model's weights.
    pub dtype: &'static str,
    /// The model's name.
    pub model: String,
}

/// How long the stages of a task took, in whole microseconds: pika, the most used client, truncates doubles to
/// integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From its publication to its preprocessing; see [`Task::time_in_queue`].
    pub queue_us: i64,
    /// Decoding and tokenising.
    pub prepare_us: i64,
    /// From preprocessing to the first forward pass.
    pub wait_us: i64,
    /// Sum of the forward passes that computed its inputs.
    pub compute_us: i64,
    /// From acceptance by this worker to the first token, for generated text.
    pub first_token_us: Option<i64>,
    /// From the first token to the last, for generated text. It is in metrics, not in headers.
    pub answer_us: i64,
    /// Inputs in its last forward pass, including those of other tasks.
    pub batch_size: i64,
    /// Tokens in its last forward pass.
    pub batch_tokens: i64,
}

/// Whole microseconds of a duration.
pub fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// The body of a reply, with its media type and further headers.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    /// Its media type.
    pub content_type: Cow<'static, str>,
    /// The bytes.
    pub bytes: Bytes,
    /// Further headers of the reply: scalars only. They never replace a header that every reply has.
    pub headers: Headers,
    /// The user and the tokens, if it is generated text; for metrics.
    pub generated: Option<Generated>,
}

impl Body {
    /// A body of JSON.
    pub fn json(bytes: impl Into<Bytes>) -> Self {
        Self::new(JSON, bytes)
    }

    /// A body of another media type.
    pub fn new(content_type: impl Into<Cow<'static, str>>, bytes: impl Into<Bytes>) -> Self {
        Self {
            content_type: content_type.into(),
            bytes: bytes.into(),
            headers: Headers::new(),
            generated: None,
        }
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.headers.insert(name.to_owned(), value.into());
        self
    }
}

/// How a kind of error is named in replies and metrics.
#[derive(Clone, Copy, Debug)]
pub struct ErrorNames {
    /// The header `status`.
    pub status: &'static str,
    /// The header `status_code`.
    pub status_code: i64,
    /// OpenAI's `type`.
    pub openai_type: &'static str,
    /// OpenAI's `code`.
    pub code: &'static str,
}

impl TaskErrorKind {
    /// The names of this kind.
    pub fn names(self) -> ErrorNames {
        let (status, status_code) = match self {
            Self::Undecodable | Self::BadInput => ("rejected", 400),
            Self::UnknownModel | Self::UnknownUrl => ("rejected", 404),
            Self::TooLarge => ("rejected", 413),
            Self::Expired => ("expired", 408),
            Self::Internal | Self::Fault => ("failed", 500),
            Self::Unavailable => ("failed", 502),
            Self::OutOfMemory => ("failed", 507),
            Self::Cancelled => ("cancelled", 499),
        };
        let openai_type = if status == "failed" { "server_error" } else { "invalid_request_error" };
        ErrorNames { status, status_code, openai_type, code: self.code() }
    }
}

/// The reply to `task`, at this `attempt`. `body` is the model's answer, or the error.
pub fn reply(
    task: &Task,
    body: Result<Body, &TaskError>,
    timings: &Timings,
    worker_info: &WorkerInfo,
    attempt: i64,
) -> Message {
    let (status, status_code) = match &body {
        Ok(_) => ("succeeded", 200),
        Err(error) => {
            let names = error.kind.names();
            (names.status, names.status_code)
        }
    };
    let mut body = body.unwrap_or_else(|error| {
        Body::json(if task.message.is_celery_task() {
            celery_failure(task, error)
        } else {
            error_body(error)
        })
    });
    let mut headers = std::mem::take(&mut body.headers);
    headers.extend([
        ("status".into(), status.into()),
        ("status_code".into(), status_code.into()),
        ("task_id".into(), task.id.as_str().into()),
        ("worker".into(), worker_info.worker.as_str().into()),
        ("device".into(), worker_info.device.as_str().into()),
        ("dtype".into(), worker_info.dtype.into()),
        ("model".into(), worker_info.model.as_str().into()),
        ("attempt".into(), attempt.into()),
        ("queue_us".into(), timings.queue_us.into()),
        ("prepare_us".into(), timings.prepare_us.into()),
        ("wait_us".into(), timings.wait_us.into()),
        ("compute_us".into(), timings.compute_us.into()),
        ("batch_size".into(), timings.batch_size.into()),
        ("batch_tokens".into(), timings.batch_tokens.into()),
    ]);
    if let Some(first_token_us) = timings.first_token_us {
        headers.insert("first_token_us".into(), first_token_us.into());
    }
    let request = &task.message.properties;
    headers.extend(trace_context(request));
    let properties = Properties {
        content_type: Some(body.content_type.into_owned()),
        correlation_id: request.correlation_id.clone(),
        message_id: Some(uuid::Uuid::new_v4().to_string()),
        kind: Some("reply".into()),
        delivery_mode: request.delivery_mode,
        headers,
        ..Properties::default()
    };
    Message { properties, body: body.bytes }
}

/// The position of a [`part`] in a run, which is one computation of its task.
#[derive(Clone, Debug)]
pub struct PartPosition {
    /// Identifies the run: a redelivered task gets a new one.
    pub stream_id: String,
    /// The index of the part in its run, from 0.
    pub seq: i64,
}

/// Whether a message is a part of a reply; the reply itself follows it.
pub fn is_part(message: &Message) -> bool {
    message.properties.kind.as_deref() == Some(PART)
}

/// One part of the reply to `task`, before the reply itself. It is transient, because the reply repeats all parts.
pub fn part(task: &Task, body: Body, position: &PartPosition) -> Message {
    let request = &task.message.properties;
    let mut headers = body.headers;
    headers.extend([
        ("task_id".into(), task.id.as_str().into()),
        ("stream_id".into(), position.stream_id.as_str().into()),
        ("seq".into(), position.seq.into()),
    ]);
    headers.extend(trace_context(request));
    let properties = Properties {
        content_type: Some(body.content_type.into_owned()),
        correlation_id: request.correlation_id.clone(),
        kind: Some(PART.into()),
        delivery_mode: Some(TRANSIENT),
        headers,
        ..Properties::default()
    };
    Message { properties, body: body.bytes }
}

/// The trace headers of a task that its replies repeat.
fn trace_context(request: &Properties) -> Headers {
    let header = |name: &str| {
        let context = request.headers.get(name)?.as_str()?;
        // A longer header is dropped, because all headers must fit one AMQP frame.
        (context.len() <= TRACE_BYTES).then(|| (name.to_owned(), Value::from(context)))
    };
    ["traceparent", "tracestate"].into_iter().filter_map(header).collect()
}

/// OpenAI's error object.
pub fn error_body(error: &TaskError) -> Vec<u8> {
    json!({"error": error_object(error)}).to_string().into_bytes()
}

fn error_object(error: &TaskError) -> serde_json::Value {
    let ErrorNames { openai_type, code, .. } = error.kind.names();
    json!({"message": error.message, "type": openai_type, "param": error.param, "code": code})
}

/// Writes the error in two forms in one object: as OpenAI's, and as Celery's `rpc://` backend reads it, so that
/// `AsyncResult.get` raises it. Celery makes an exception class for a type that it does not know.
fn celery_failure(task: &Task, error: &TaskError) -> Vec<u8> {
    let request = &task.message.properties;
    let id = request.headers.get("id").and_then(Value::as_str).or(request.correlation_id.as_deref());
    let body = json!({
        "task_id": id,
        "status": "FAILURE",
        "result": {"exc_type": "RefusedBySconce", "exc_message": [error.message], "exc_module": "sconce"},
        "traceback": null,
        "children": [],
        "error": error_object(error),
    });
    body.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::protocol::{Incoming, Sentinels, Value, classify};

    fn task(properties: Properties) -> Task {
        let message = Message { properties, body: "{}".into() };
        match classify(message, SystemTime::now(), Sentinels::default(), || "made".into()) {
            Incoming::Task(task) => task,
            other => panic!("{other:?}"),
        }
    }

    fn worker_info() -> WorkerInfo {
        WorkerInfo { worker: "host/embed/0".into(), device: "cpu".into(), dtype: "f32", model: "m".into() }
    }

    #[test]
    fn a_reply_echoes_correlation_trace_and_delivery_mode_and_nothing_else() {
        let task = task(Properties {
            correlation_id: Some("c".into()),
            delivery_mode: Some(2),
            reply_to: Some("r".into()),
            expiration: Some("1".into()),
            headers: Headers::from([
                ("traceparent".into(), "00-1-2-01".into()),
                ("CC".into(), Value::Array(vec!["elsewhere".into()])),
            ]),
            ..Properties::default()
        });
        let reply = reply(&task, Ok(Body::json("{}")), &Timings::default(), &worker_info(), 1);
        let properties = reply.properties;
        assert_eq!(properties.correlation_id.as_deref(), Some("c"));
        assert_eq!(properties.delivery_mode, Some(2));
        assert_eq!(properties.kind.as_deref(), Some("reply"));
        assert_eq!((properties.reply_to, properties.expiration), (None, None));
        assert_eq!(properties.headers["traceparent"].as_str(), Some("00-1-2-01"));
        assert!(!properties.headers.contains_key("CC"), "a reply must not be copied to other queues");
    }

    #[test]
    fn every_header_is_a_flat_scalar_without_an_x_prefix() {
        let task = task(Properties::default());
        let error = TaskError::bad_input("input", "no");
        let reply = reply(&task, Err(&error), &Timings::default(), &worker_info(), 3);
        for (name, value) in &reply.properties.headers {
            assert!(!name.starts_with("x-"), "{name}");
            assert!(!matches!(value, Value::Array(_) | Value::Table(_)), "{name}");
        }
        assert_eq!(reply.properties.headers["status"].as_str(), Some("rejected"));
        assert_eq!(reply.properties.headers["status_code"].as_i64(), Some(400));
        let body: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
        assert_eq!(body["error"]["param"], "input");
    }

    #[test]
    fn an_error_for_a_task_of_celery_is_a_result_that_celery_reads_too() {
        let celery = |body: &'static str| {
            let headers = Headers::from([("task".into(), "shop.embed".into()), ("id".into(), "1-2".into())]);
            let message = task(Properties { headers, ..Properties::default() }).message;
            let task =
                Task { message: Message { body: body.into(), ..message }, ..task(Properties::default()) };
            let error = TaskError::bad_input("input", "no");
            let reply = reply(&task, Err(&error), &Timings::default(), &worker_info(), 1);
            serde_json::from_slice::<serde_json::Value>(&reply.body).unwrap()
        };
        let body = celery("[[], {}, {}]");
        assert_eq!((body["status"].as_str(), body["task_id"].as_str()), (Some("FAILURE"), Some("1-2")));
        assert_eq!(body["result"]["exc_message"][0], "no");
        assert_eq!(body["error"]["message"], "no");
    }
}
