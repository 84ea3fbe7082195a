//! Converts between what a class in Python gives or takes and what the worker has: numbers to replies, headers to JSON, and
//! failures to errors of tasks. Decides which error of the protocol a status means. Owns no state.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Map, Value as Json};

use super::messages::{Failure, FailureKind, Form};
use crate::model::{Body, Message, TaskError, TaskErrorKind};
use crate::protocol::{Headers, Value};

/// How many arrays and tables may be nested in a header that a class is given.
const MAX_DEPTH: usize = 32;

/// A reply in JSON without its numbers: each output stands between two of the texts.
pub(super) struct Template {
    pub(super) form: Form,
    pub(super) texts: Vec<Bytes>,
}

impl Template {
    /// Writes the reply.
    ///
    /// # Errors
    /// An output is not finite, or is no number where one is expected.
    pub(super) fn fill(&self, outputs: &[Vec<f32>]) -> Result<Body, TaskError> {
        let mut body = Vec::new();
        let mut texts = self.texts.iter();
        body.extend_from_slice(texts.next().map_or(&b""[..], |text| text));
        for (index, (output, text)) in outputs.iter().zip(texts).enumerate() {
            if let Some(bad) = output.iter().find(|number| !number.is_finite()) {
                return Err(TaskError::internal(format!("the model gave {bad} for input {index}")));
            }
            self.write(&mut body, output, index)?;
            body.extend_from_slice(text);
        }
        Ok(Body::json(body))
    }

    fn write(&self, body: &mut Vec<u8>, output: &[f32], index: usize) -> Result<(), TaskError> {
        let written = match (self.form, output) {
            (Form::Json, _) => serde_json::to_writer(&mut *body, output),
            (Form::Number, [number]) => serde_json::to_writer(&mut *body, number),
            (Form::Number, _) => {
                let count = output.len();
                let message = format!(
                    "the model gave {count} numbers for input {index}, and the reply has one for each"
                );
                return Err(TaskError::internal(message));
            }
            (Form::Base64, _) => {
                let bytes: Vec<u8> = output.iter().flat_map(|number| number.to_le_bytes()).collect();
                serde_json::to_writer(&mut *body, &STANDARD.encode(bytes))
            }
        };
        written.map_err(|error| TaskError::internal(format!("the reply cannot be written: {error}")))
    }
}

/// The headers of a message, as far as JSON has their values. One that is nested deeper than [`MAX_DEPTH`] is left out:
/// readers of JSON take more of the stack for each level.
pub(super) fn headers(message: &Message) -> Map<String, Json> {
    fn of_all(headers: &Headers, depth: usize) -> Map<String, Json> {
        headers.iter().filter_map(|(name, value)| Some((name.clone(), json(value, depth)?))).collect()
    }
    fn json(value: &Value, depth: usize) -> Option<Json> {
        let depth = depth.checked_sub(1)?;
        Some(match value {
            Value::Void => Json::Null,
            Value::Bool(switch) => (*switch).into(),
            Value::I8(number) => (*number).into(),
            Value::U8(number) => (*number).into(),
            Value::I16(number) => (*number).into(),
            Value::U16(number) => (*number).into(),
            Value::I32(number) => (*number).into(),
            Value::U32(number) => (*number).into(),
            Value::I64(number) => (*number).into(),
            Value::Timestamp(seconds) => (*seconds).into(),
            Value::F32(number) => (*number).into(),
            Value::F64(number) => (*number).into(),
            Value::Text(text) => String::from_utf8(text.clone()).ok()?.into(),
            Value::Array(items) => {
                items.iter().map(|item| json(item, depth)).collect::<Option<Vec<_>>>()?.into()
            }
            Value::Table(table) => of_all(table, depth).into(),
            Value::Decimal { .. } | Value::Bytes(_) => return None,
        })
    }
    of_all(&message.properties.headers, MAX_DEPTH)
}

/// The error of a task. `otherwise`: the kind of error that an exception is if it is no `TaskError`.
pub(super) fn task_error(failure: Failure, otherwise: TaskErrorKind) -> TaskError {
    let Failure { kind, status, message, param, .. } = failure;
    let kind = match kind {
        FailureKind::OutOfMemory => TaskErrorKind::OutOfMemory,
        FailureKind::Error | FailureKind::Operator | FailureKind::Model => otherwise,
        FailureKind::Task => match status {
            404 => TaskErrorKind::UnknownModel,
            408 => TaskErrorKind::Expired,
            413 => TaskErrorKind::TooLarge,
            415 => TaskErrorKind::Undecodable,
            499 => TaskErrorKind::Cancelled,
            502 | 503 => TaskErrorKind::Unavailable,
            507 => TaskErrorKind::OutOfMemory,
            400..=498 => TaskErrorKind::BadInput,
            _ => TaskErrorKind::Internal,
        },
    };
    let error = TaskError::new(kind, message);
    match param {
        Some(param) => error.with_param(param),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(form: Form) -> Template {
        let texts = ["[", ";", "]"].map(|text| Bytes::from_static(text.as_bytes())).to_vec();
        Template { form, texts }
    }

    #[test]
    fn outputs_stand_between_the_texts_of_a_template() {
        let filled = |form, outputs: &[Vec<f32>]| {
            let body = template(form).fill(outputs)?;
            Ok::<_, TaskError>(String::from_utf8(body.bytes.to_vec()).unwrap())
        };
        assert_eq!(filled(Form::Json, &[vec![0.1, -2.0], vec![]]).unwrap(), "[[0.1,-2.0];[]]");
        assert_eq!(filled(Form::Number, &[vec![0.5], vec![1.0]]).unwrap(), "[0.5;1.0]");
        assert_eq!(filled(Form::Base64, &[vec![1.0], vec![]]).unwrap(), "[\"AACAPw==\";\"\"]");
        let error = filled(Form::Json, &[vec![1.0], vec![f32::NAN]]).unwrap_err();
        assert_eq!(
            (error.kind, &*error.message),
            (TaskErrorKind::Internal, "the model gave NaN for input 1")
        );
        let error = filled(Form::Number, &[vec![1.0, 2.0], vec![]]).unwrap_err();
        assert!(error.message.contains("2 numbers for input 0"), "{error}");
    }

    #[test]
    fn a_header_that_is_nested_deeply_does_not_reach_the_class() {
        let nested = |depth: usize| (0..depth).fold(Value::Void, |inner, _| Value::Array(vec![inner]));
        let mut message = Message::default();
        for depth in [1, MAX_DEPTH - 1, MAX_DEPTH, 1_100] {
            message.properties.headers.insert(format!("x{depth}"), nested(depth));
        }
        assert_eq!(headers(&message).keys().collect::<Vec<_>>(), ["x1", "x31"]);
    }

    #[test]
    fn a_status_decides_whether_a_task_is_tried_again() {
        let kind = |kind, status| {
            let failure = Failure { task: 1, kind, status, message: "m".into(), param: None };
            task_error(failure, TaskErrorKind::Fault).kind
        };
        for (status, expected) in [
            (400, TaskErrorKind::BadInput),
            (422, TaskErrorKind::BadInput),
            (404, TaskErrorKind::UnknownModel),
            (413, TaskErrorKind::TooLarge),
            (415, TaskErrorKind::Undecodable),
            (503, TaskErrorKind::Unavailable),
            (507, TaskErrorKind::OutOfMemory),
            (500, TaskErrorKind::Internal),
            (0, TaskErrorKind::Internal),
        ] {
            assert_eq!(kind(FailureKind::Task, status), expected, "{status}");
        }
        assert_eq!(kind(FailureKind::Error, 0), TaskErrorKind::Fault);
        assert_eq!(kind(FailureKind::OutOfMemory, 0), TaskErrorKind::OutOfMemory);
    }
}
