//! Writes a reply: properties echoed from the task, the status headers, the receipt, the body.
//! Decides which status and code an error carries. Owns no state.

use serde_json::json;

use super::{Headers, JSON, Message, Properties, Task, TaskError, TaskErrorKind};

/// Longest trace header that is echoed: twice what W3C asks implementations to carry.
const TRACE_BYTES: usize = 1_024;

/// Who answers: goes into the headers of every reply.
#[derive(Clone, Debug)]
pub struct Signature {
    /// host/pool/slot.
    pub worker: String,
    /// `cpu`, or the GPU's UUID.
    pub device: String,
    /// The model's name.
    pub model: String,
}

/// Where a task's time went. Milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Receipt {
    /// Before its preparation began; see [`Task::queued_ms`].
    pub queue_ms: i64,
    /// Decoding and tokenising.
    pub prepare_ms: f64,
    /// Between preparation and its first forward pass.
    pub wait_ms: f64,
    /// In forward passes, summed when its inputs took several.
    pub compute_ms: f64,
    /// Inputs in its last forward pass, its own and its batch-mates'.
    pub batch_size: i64,
    /// Tokens in its last forward pass.
    pub batch_tokens: i64,
}

impl TaskErrorKind {
    /// `status`, `status_code`, OpenAI's `type` and `code`.
    pub fn wire(self) -> (&'static str, i64, &'static str, &'static str) {
        const REQUEST: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        match self {
            Self::Undecodable => ("rejected", 400, REQUEST, "undecodable"),
            Self::BadInput => ("rejected", 400, REQUEST, "invalid_value"),
            Self::UnknownModel => ("rejected", 404, REQUEST, "model_not_found"),
            Self::TooLarge => ("rejected", 413, REQUEST, "too_large"),
            Self::Expired => ("expired", 408, REQUEST, "expired"),
            Self::Internal | Self::Fault => ("failed", 500, SERVER, "internal_error"),
            Self::OutOfMemory => ("failed", 507, SERVER, "out_of_device_memory"),
        }
    }
}

/// The reply to `task`, at its `attempt`th attempt. `body` is the model's answer, or
/// why there is none.
pub fn reply(
    task: &Task,
    body: Result<Vec<u8>, &TaskError>,
    receipt: &Receipt,
    signature: &Signature,
    attempt: i64,
) -> Message {
    let (status, status_code) = match &body {
        Ok(_) => ("succeeded", 200),
        Err(error) => {
            let (status, code, _, _) = error.kind.wire();
            (status, code)
        }
    };
    let mut headers = Headers::from([
        ("status".into(), status.into()),
        ("status_code".into(), status_code.into()),
        ("task_id".into(), task.id.as_str().into()),
        ("worker".into(), signature.worker.as_str().into()),
        ("device".into(), signature.device.as_str().into()),
        ("model".into(), signature.model.as_str().into()),
        ("attempt".into(), attempt.into()),
        ("queue_ms".into(), receipt.queue_ms.into()),
        ("prepare_ms".into(), receipt.prepare_ms.into()),
        ("wait_ms".into(), receipt.wait_ms.into()),
        ("compute_ms".into(), receipt.compute_ms.into()),
        ("batch_size".into(), receipt.batch_size.into()),
        ("batch_tokens".into(), receipt.batch_tokens.into()),
    ]);
    let asked = &task.message.properties;
    for trace in ["traceparent", "tracestate"] {
        let context = asked.headers.get(trace).and_then(|context| context.as_str());
        // A longer one is none, and all headers must fit a frame.
        if let Some(context) = context.filter(|context| context.len() <= TRACE_BYTES) {
            headers.insert(trace.into(), context.into());
        }
    }
    let properties = Properties {
        content_type: Some(JSON.into()),
        correlation_id: asked.correlation_id.clone(),
        message_id: Some(uuid::Uuid::new_v4().to_string()),
        kind: Some("reply".into()),
        delivery_mode: asked.delivery_mode,
        headers,
        ..Properties::default()
    };
    let body = body.unwrap_or_else(error_body);
    Message { properties, body: body.into() }
}

/// OpenAI's error object.
pub fn error_body(error: &TaskError) -> Vec<u8> {
    let (_, _, kind, code) = error.kind.wire();
    let body = json!({
        "error": {"message": error.message, "type": kind, "param": error.param, "code": code}
    });
    body.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::protocol::{Incoming, Value, classify};

    fn task(properties: Properties) -> Task {
        let message = Message { properties, body: "{}".into() };
        match classify(message, SystemTime::now(), || "made".into()) {
            Incoming::Task(task) => task,
            other => panic!("{other:?}"),
        }
    }

    fn signature() -> Signature {
        Signature { worker: "host/embed/0".into(), device: "cpu".into(), model: "m".into() }
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
        let reply = reply(&task, Ok(b"{}".to_vec()), &Receipt::default(), &signature(), 1);
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
        let reply = reply(&task, Err(&error), &Receipt::default(), &signature(), 3);
        for (name, value) in &reply.properties.headers {
            assert!(!name.starts_with("x-"), "{name}");
            assert!(!matches!(value, Value::Array(_) | Value::Table(_)), "{name}");
        }
        assert_eq!(reply.properties.headers["status"].as_str(), Some("rejected"));
        assert_eq!(reply.properties.headers["status_code"].as_i64(), Some(400));
        let body: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
        assert_eq!(body["error"]["param"], "input");
    }
}
