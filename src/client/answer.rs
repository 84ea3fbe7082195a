//! Reads a reply's headers, and the usage from its body. Does no I/O.

use crate::protocol::requests::{ReplyUsage, usage_of};
use crate::protocol::{Headers, Message, Value};

/// Headers with the durations of a task's stages, in this order everywhere.
pub(crate) const STAGES: [&str; 4] = ["queue_us", "prepare_us", "wait_us", "compute_us"];
/// The status code of a reply that was computed.
const SUCCEEDED: i64 = 200;

/// What a reply says about its task.
pub(crate) struct Answer<'a> {
    /// 200 if the task succeeded; none: the reply is not from sconce.
    pub(crate) status_code: Option<i64>,
    pub(crate) worker: Option<&'a str>,
    pub(crate) device: &'a str,
    /// The number format of the weights.
    pub(crate) dtype: &'a str,
    pub(crate) model: &'a str,
    /// Durations in the order of [`STAGES`], in milliseconds; none if one is missing.
    pub(crate) stages_ms: Option<[f64; 4]>,
    /// The task's last forward pass; none if it needed none.
    pub(crate) batch: Option<ForwardPass>,
    /// All tokens of the task; none if the body does not state them.
    pub(crate) tokens: Option<u64>,
    /// Tokens of generated text, which are part of `tokens`.
    pub(crate) generated: Option<u64>,
    /// Milliseconds of the sound that was transcribed or spoken; none if there was none.
    pub(crate) audio_ms: Option<u64>,
    /// Texts of the task that were cut.
    pub(crate) truncated: u64,
}

/// The number of texts that were cut for a reply, because they are longer than the model takes.
pub(crate) fn truncated_in(reply: &Message) -> u64 {
    let count = reply.properties.headers.get("truncated").and_then(Value::as_i64);
    // Whoever answers writes it.
    count.and_then(|count| count.try_into().ok()).unwrap_or(0)
}

/// A forward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ForwardPass {
    pub(crate) inputs: f64,
    pub(crate) tokens: f64,
}

impl ForwardPass {
    /// The share of the batch that belongs to a task with this many inputs, at most 1.
    pub(crate) fn share(self, inputs: usize) -> f64 {
        (inputs as f64 / self.inputs).min(1.0)
    }
}

impl<'a> Answer<'a> {
    pub(crate) fn of(reply: &'a Message) -> Self {
        let headers = &reply.properties.headers;
        let text = |name| headers.get(name).and_then(Value::as_str);
        let stages_ms = STAGES.map(|name| Some(number(headers, name)? / 1e3));
        let is_complete = stages_ms.iter().all(Option::is_some);
        let stages_ms = is_complete.then(|| stages_ms.map(Option::unwrap_or_default));
        let inputs = number(headers, "batch_size").filter(|inputs| *inputs > 0.0);
        let tokens = number(headers, "batch_tokens");
        let status_code = headers.get("status_code").and_then(Value::as_i64);
        let is_result = status_code == Some(SUCCEEDED);
        let usage = if is_result { usage_of(reply) } else { ReplyUsage::default() };
        Self {
            status_code,
            worker: text("worker"),
            device: text("device").unwrap_or_default(),
            dtype: text("dtype").unwrap_or_default(),
            model: text("model").unwrap_or_default(),
            stages_ms,
            batch: inputs.zip(tokens).map(|(inputs, tokens)| ForwardPass { inputs, tokens }),
            tokens: usage.total_tokens,
            generated: usage.completion_tokens,
            audio_ms: number(headers, "audio_ms").filter(|_| is_result).map(|ms| ms as u64),
            truncated: truncated_in(reply),
        }
    }

    /// Whether it is a result, not an error.
    pub(crate) fn succeeded(&self) -> bool {
        self.status_code == Some(SUCCEEDED)
    }

    /// Milliseconds of device time for this task.
    pub(crate) fn device_ms(&self, inputs: usize) -> f64 {
        match (self.stages_ms, self.batch) {
            (Some([.., compute_ms]), Some(batch)) => compute_ms * batch.share(inputs),
            _ => 0.0,
        }
    }
}

fn number(headers: &Headers, name: &str) -> Option<f64> {
    match headers.get(name)? {
        Value::F64(number) => Some(*number),
        Value::F32(number) => Some((*number).into()),
        other => other.as_i64().map(|number| number as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Properties;

    fn reply(headers: &[(&str, Value)], body: &'static str) -> Message {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        Message { properties: Properties { headers, ..Properties::default() }, body: body.into() }
    }

    #[test]
    fn a_reply_states_its_durations_its_batch_and_its_tokens() {
        let headers = [
            ("status_code", 200.into()),
            ("worker", "h/p/0".into()),
            ("queue_us", 7_000.into()),
            ("prepare_us", 500.into()),
            ("wait_us", 250.into()),
            ("compute_us", 40_000.into()),
            ("batch_size", 8.into()),
            ("batch_tokens", 80.into()),
        ];
        let body = r#"{"object":"list","data":[{"embedding":[0.5,1e-3]}],"usage":{"total_tokens":12}}"#;
        let reply = reply(&headers, body);
        let answer = Answer::of(&reply);
        assert!(answer.succeeded());
        assert_eq!((answer.worker, answer.tokens), (Some("h/p/0"), Some(12)));
        assert_eq!(answer.stages_ms, Some([7.0, 0.5, 0.25, 40.0]));
        assert_eq!(answer.batch, Some(ForwardPass { inputs: 8.0, tokens: 80.0 }));
        assert_eq!(answer.device_ms(2), 10.0);
        assert_eq!(answer.device_ms(20), 40.0, "it spans batches, and takes no more than their time");
    }

    #[test]
    fn a_reply_that_is_not_json_succeeds_and_states_no_tokens() {
        for (content_type, body) in
            [("text/plain", r#"{"usage":{"total_tokens":12}}"#), ("audio/wav", "RIFF")]
        {
            let mut reply = reply(&[("status_code", 200.into())], body);
            reply.properties.content_type = Some(content_type.into());
            let answer = Answer::of(&reply);
            assert!(answer.succeeded(), "{content_type}");
            assert_eq!(answer.tokens, None, "{content_type}");
        }
    }

    #[test]
    fn the_sound_of_a_result_is_counted_and_none_of_an_error() {
        for (status, expected) in [(200, Some(2_500)), (500, None)] {
            let headers = [("status_code", status.into()), ("audio_ms", 2_500.into())];
            assert_eq!(Answer::of(&reply(&headers, "")).audio_ms, expected);
        }
    }

    #[test]
    fn what_a_reply_does_not_state_is_none_and_not_zero() {
        let reply = reply(&[("status_code", 400.into()), ("batch_size", 0.into())], "");
        let answer = Answer::of(&reply);
        assert!(!answer.succeeded());
        assert_eq!((answer.stages_ms, answer.batch, answer.tokens), (None, None, None));
        assert_eq!(answer.device_ms(1), 0.0);
    }
}
