//! A model that computes nothing and answers each task with its own input. It serves to try out a deployment, and to
//! measure the queue alone. The `model` setting is `echo`.
//!
//! Each item of a body's `input` list is an input of one token; any other body is one input. The integer
//! `sleep_ms` in a body is the least duration of the forward pass with this task. `reply` is a data URL: the task is
//! answered with its bytes and media type instead of JSON. With `stream`, each input is a part of the reply.
//!
//! The following works only with the setting `echo?faults`, so that no message can stop the workers of a production
//! pool; a plain `echo` ignores these fields and options.
//!
//! - The field `fail` makes the forward pass fail: `error` ([`ForwardError::Failed`]), `once` (the same, but only at
//!   the task's first attempt), `oom`, `device`, `panic`, `exit` (the process aborts), or `prepare` (the process aborts
//!   during preprocessing).
//! - The integer `fits` is the largest number of inputs in a pass with this task; a larger pass runs out of memory.
//! - With `echo?faults=/a/file` the device counts as broken, and every pass fails, while that file exists. If the file
//!   contains `wrong_result` or `too_slow`, the device fails its check at the start.
//! - If `[pool.options]` names a folder as `gates`, the pass of a task with `hold = "NAME"` creates the file
//!   `NAME.held` in it, and continues once a file `NAME` exists.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::model::family::{Example, Family, OptionDefault, OptionSpec, Sample, Serves, Takes};
use crate::model::{
    Body, Device, Effort, Forward, ForwardError, Inputs, LoadError, LoadSpec, Message, Preprocessed,
    Processor, Route, SizedInput, Streaming, TaskError, TaskErrorKind, Unfit, clock,
};
use crate::protocol::task::ATTEMPT;
use crate::protocol::{JSON, data_url, shorten};

/// The `model` setting of an echo pool.
pub const ECHO: &str = "echo";
/// The `model` setting for tests. With it, a task's `fail`, `fits` and `hold` have an effect.
pub const ECHO_WITH_FAULTS: &str = "echo?faults";

/// Answers each task with its input.
pub static FAMILY: Family = Family {
    name: ECHO,
    routes: ANY_JSON,
    fields: &[],
    serves: Serves::ItsName,
    options: &[OptionSpec {
        name: "gates",
        takes: Takes::Text,
        default: OptionDefault::Derived("none"),
        help: "a folder of gates, where forward passes of tests wait",
    }],
    sample: |texts| Sample { url: None, ..Sample::of_texts(Route::ANY, "input", texts) },
    example: Example { model: ECHO_WITH_FAULTS, options: &[] },
};

/// The largest body that counts as brief, in bytes: it takes a few microseconds to read.
pub(super) const BRIEF_BODY: usize = 2 << 10;
/// The largest `sleep_ms`.
const MAX_SLEEP_MS: u64 = 600_000;
/// The time between two checks of a closed gate.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A model whose outputs are its inputs.
#[derive(Debug)]
pub struct Echo {
    /// While this file exists, the device is broken.
    broken: Option<PathBuf>,
}

/// Decodes and writes echo bodies.
#[derive(Debug)]
pub struct EchoProcessor {
    /// Whether the `model` setting is `echo?faults`.
    faults: bool,
    /// The folder with the gates of forward passes.
    gates: Option<PathBuf>,
    max_inputs: usize,
}

/// One input, with what its forward pass must do.
#[derive(Clone, Debug)]
pub struct EchoInput {
    value: Box<RawValue>,
    sleep: Duration,
    /// The gate at which its forward pass waits.
    hold: Option<PathBuf>,
    fault: Option<Fault>,
    fits: Option<usize>,
}

/// How a task is answered.
#[derive(Clone, Debug)]
pub struct EchoContext {
    /// Whether the input is a list.
    is_list: bool,
    stream: bool,
    /// The reply that the task requests instead of its input.
    reply: Option<Body>,
}

/// The values of the field `fail`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Fault {
    Error,
    Once,
    Panic,
    Device,
    Oom,
    Exit,
    Prepare,
}

#[derive(Deserialize)]
struct Fields {
    input: Option<Box<RawValue>>,
    sleep_ms: Option<u64>,
    reply: Option<String>,
    stream: Option<bool>,
    hold: Option<String>,
    fail: Option<Box<RawValue>>,
    fits: Option<usize>,
}

/// The routes of a model that answers every URL in JSON.
pub(super) const ANY_JSON: &[Route] = &[Route { url: Route::ANY, media_types: &[JSON] }];

/// Loads the model `echo` or `echo?faults`.
///
/// # Errors
/// [`LoadError::Unsupported`] for another source, [`LoadError::Unfit`] if the file of faults says so.
pub fn load(spec: &LoadSpec, _: &Device) -> Result<(EchoProcessor, Echo), LoadError> {
    let suffix = spec.source.strip_prefix(ECHO_WITH_FAULTS);
    let broken = suffix.and_then(|suffix| suffix.strip_prefix('=')).map(PathBuf::from);
    let faults = suffix == Some("") || broken.is_some();
    if !faults && spec.source != ECHO {
        let reason = format!("the echo model is {ECHO:?}, or {ECHO_WITH_FAULTS:?} in tests");
        return Err(spec.unsupported(reason));
    }
    let content = broken.as_ref().and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
    if let Some(why) = [Unfit::WrongResult, Unfit::TooSlow].into_iter().find(|it| it.name() == content) {
        let device = spec.device.clone();
        return Err(LoadError::Unfit { device, why, reason: "as a file says".to_owned() });
    }
    let gates = spec.options.get("gates").and_then(|gates| gates.as_str()).filter(|_| faults);
    let gates = gates.map(PathBuf::from);
    Ok((EchoProcessor { faults, gates, max_inputs: spec.max_inputs }, Echo { broken }))
}

impl Forward for Echo {
    type Input = EchoInput;
    type Output = Box<RawValue>;
    type Pending = Vec<Box<RawValue>>;

    /// Sleeps for the longest `sleep_ms` of `inputs`, then fails if one of them requests it.
    fn submit(&mut self, inputs: &[&EchoInput]) -> Result<Vec<Box<RawValue>>, ForwardError> {
        if let Some(sleep) = inputs.iter().map(|input| input.sleep).max().filter(|sleep| !sleep.is_zero()) {
            tracing::debug!(inputs = inputs.len(), sleep_ms = sleep.as_millis() as u64, "forward pass begun");
            clock::pass(sleep);
        }
        inputs.iter().filter_map(|input| input.hold.as_deref()).for_each(wait_at);
        let message = "as the task asked for".to_owned();
        if self.broken.as_ref().is_some_and(|file| file.exists()) {
            return Err(ForwardError::Failed("the device is broken".into()));
        }
        if inputs.iter().any(|input| input.fits.is_some_and(|max| inputs.len() > max)) {
            return Err(ForwardError::OutOfMemory(message));
        }
        match inputs.iter().find_map(|input| input.fault) {
            None => Ok(inputs.iter().map(|input| input.value.clone()).collect()),
            Some(Fault::Error | Fault::Once) => Err(ForwardError::Failed(message)),
            Some(Fault::Device) => Err(ForwardError::Device(message)),
            Some(Fault::Oom) => Err(ForwardError::OutOfMemory(message)),
            Some(Fault::Panic) => panic!("{message}"),
            Some(Fault::Exit | Fault::Prepare) => std::process::abort(),
        }
    }

    fn wait(
        &mut self,
        outputs: Self::Pending,
    ) -> Result<Vec<Result<Box<RawValue>, TaskError>>, ForwardError> {
        Ok(outputs.into_iter().map(Ok).collect())
    }
}

impl Processor for EchoProcessor {
    type Context = EchoContext;
    type Input = EchoInput;
    type Piece = ();
    type Output = Box<RawValue>;

    fn routes(&self) -> &[Route] {
        ANY_JSON
    }

    fn probe(&self) -> Option<Message> {
        Some(Message { body: "{}".into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let (body, whole) = decode(&message.body)?;
        let sleep = body.sleep_ms.unwrap_or(0);
        if sleep > MAX_SLEEP_MS {
            let message = format!("sleep_ms must be at most {MAX_SLEEP_MS}, got {sleep}");
            return Err(TaskError::bad_input("sleep_ms", message));
        }
        let fits = body.fits.filter(|_| self.faults);
        let fault = body.fail.filter(|_| self.faults).map(|fail| fault(&fail)).transpose()?;
        let is_first = !message.properties.headers.contains_key(ATTEMPT);
        let fault = fault.filter(|fault| *fault != Fault::Once || is_first);
        if fault == Some(Fault::Prepare) {
            std::process::abort();
        }
        let reply = body.reply.as_deref().map(reply).transpose()?;
        let input = body.input.unwrap_or(whole);
        let items = if input.get().starts_with('[') { items(&input)? } else { None };
        let is_list = items.is_some();
        let values = items.unwrap_or_else(|| vec![input]);
        if values.len() > self.max_inputs {
            let (count, max) = (values.len(), self.max_inputs);
            let message = format!("input holds {count} items; this pool takes at most {max}");
            return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("input"));
        }
        let sleep = Duration::from_millis(sleep);
        let hold = self.gates.as_ref().zip(body.hold).map(|(gates, name)| gates.join(name));
        let inputs = values.into_iter();
        let inputs = inputs
            .map(|value| SizedInput::new(EchoInput { value, sleep, hold: hold.clone(), fault, fits }, 1));
        let stream = body.stream == Some(true);
        Ok((EchoContext { is_list, stream, reply }, Inputs::All(inputs.collect())))
    }

    fn effort(&self, message: &Message) -> Effort {
        Effort::brief_if(message.body.len() <= BRIEF_BODY)
    }

    fn streaming(&self, context: &EchoContext) -> Streaming {
        Streaming::Outputs.if_requested(context.stream)
    }

    fn output_parts(&self, _: &mut EchoContext, index: usize, input: &Box<RawValue>) -> Vec<Body> {
        vec![Body::json(format!("{{\"object\":\"echo.part\",\"index\":{index},\"input\":{input}}}"))]
    }

    fn finish(&self, context: EchoContext, outputs: Vec<Box<RawValue>>) -> Result<Body, TaskError> {
        let EchoContext { is_list, reply, .. } = context;
        if let Some(reply) = reply {
            return Ok(reply);
        }
        let outputs = outputs.iter().map(|value| value.get()).collect::<Vec<_>>().join(",");
        let input = if is_list { format!("[{outputs}]") } else { outputs };
        Ok(Body::json(format!("{{\"object\":\"echo\",\"input\":{input},\"model\":\"echo\"}}")))
    }
}

/// Creates the gate's `.held` file and waits until the gate exists. Returns at once if the file cannot be created.
fn wait_at(gate: &Path) {
    let written = fs::write(gate.with_extension("held"), "");
    while written.is_ok() && !gate.exists() {
        thread::sleep(POLL_INTERVAL);
    }
}

/// The fields of a body, and its text.
fn decode(bytes: &[u8]) -> Result<(Fields, Box<RawValue>), TaskError> {
    let whole: Box<RawValue> = serde_json::from_slice(bytes).map_err(|error| {
        TaskError::new(TaskErrorKind::Undecodable, format!("the body is not JSON: {error}"))
    })?;
    let refused = |reason: String| TaskError::new(TaskErrorKind::BadInput, reason);
    if !whole.get().starts_with('{') {
        return Err(refused("the body must be a JSON object".into()));
    }
    let body = serde_json::from_str(whole.get());
    Ok((body.map_err(|error| refused(format!("the body is refused: {error}")))?, whole))
}

/// The reply in a data URL.
fn reply(url: &str) -> Result<Body, TaskError> {
    let refused = |reason: &str| TaskError::bad_input("reply", format!("reply {reason}"));
    let (media_type, bytes) = data_url(url).map_err(|reason| refused(&reason))?;
    if media_type.is_empty() {
        return Err(refused("must name a media type"));
    }
    Ok(Body::new(media_type, bytes))
}

/// The items of a list; none if it is empty, since an empty list is one input.
fn items(list: &RawValue) -> Result<Option<Vec<Box<RawValue>>>, TaskError> {
    match serde_json::from_str::<Vec<Box<RawValue>>>(list.get()) {
        Ok(items) => Ok((!items.is_empty()).then_some(items)),
        Err(error) => Err(TaskError::bad_input("input", format!("input cannot be read: {error}"))),
    }
}

fn fault(raw: &RawValue) -> Result<Fault, TaskError> {
    serde_json::from_str(raw.get()).map_err(|_| {
        let kinds = "\"error\", \"once\", \"panic\", \"device\", \"oom\", \"exit\" or \"prepare\"";
        TaskError::bad_input("fail", format!("fail must be {kinds}, got {}", shorten(raw.get(), 80)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(source: &str) -> (EchoProcessor, Echo) {
        load(&LoadSpec { max_inputs: 3, ..LoadSpec::new(source) }, &Device::Cpu).unwrap()
    }

    fn answer(source: &str, body: &str) -> Result<String, String> {
        let (processor, mut model) = loaded(source);
        let message = Message { body: body.to_owned().into(), ..Message::default() };
        let (context, inputs) = processor.preprocess(&message).map_err(|error| error.message)?;
        let inputs = inputs.all().unwrap();
        let inputs: Vec<&EchoInput> = inputs.iter().map(|sized| &sized.input).collect();
        let outputs = model.submit(&inputs).map_err(|error| error.to_string())?;
        let body = processor.finish(context, outputs).unwrap();
        Ok(String::from_utf8(body.bytes.to_vec()).unwrap())
    }

    #[test]
    fn the_answer_is_the_input_or_else_the_whole_body() {
        let cases = [
            (r#"{"input": "a" , "x":1}"#, r#""a""#),
            (r#" {"x":1.0} "#, r#"{"x":1.0}"#),
            (r#"{"input":["a", [2], null]}"#, r#"["a",[2],null]"#),
            (r#"{"input":[]}"#, "[]"),
        ];
        for (body, input) in cases {
            let expected = format!(r#"{{"object":"echo","input":{input},"model":"echo"}}"#);
            assert_eq!(answer(ECHO, body), Ok(expected), "{body}");
        }
    }

    #[test]
    fn a_task_may_be_answered_with_any_bytes_of_any_media_type() {
        let (processor, _) = loaded(ECHO);
        let preprocessed = |reply: &str| {
            let body = serde_json::json!({"input": ["a", "b"], "reply": reply}).to_string();
            processor.preprocess(&Message { body: body.into(), ..Message::default() })
        };
        let (context, inputs) = preprocessed("data:audio/wav;base64,/wA=").unwrap();
        let outputs = inputs.all().unwrap().into_iter().map(|sized| sized.input.value).collect();
        let body = processor.finish(context, outputs).unwrap();
        assert_eq!((&*body.content_type, &body.bytes[..]), ("audio/wav", &b"\xff\0"[..]));
        for bad in ["sound", "data:;base64,/wA=", "data:audio/wav;base64,!"] {
            let error = preprocessed(bad).map(drop).unwrap_err();
            assert_eq!(
                (error.kind, error.param.as_deref()),
                (TaskErrorKind::BadInput, Some("reply")),
                "{bad}"
            );
        }
    }

    #[test]
    fn bad_bodies_are_refused() {
        let (processor, _) = loaded(ECHO);
        let kind = |body: &str| {
            let message = Message { body: body.to_owned().into(), ..Message::default() };
            processor.preprocess(&message).map(drop).expect_err(body).kind
        };
        assert_eq!(kind("STOP"), TaskErrorKind::Undecodable);
        assert_eq!(kind("[1]"), TaskErrorKind::BadInput);
        assert_eq!(kind(r#"{"sleep_ms":600001}"#), TaskErrorKind::BadInput);
        assert_eq!(kind(r#"{"sleep_ms":"long"}"#), TaskErrorKind::BadInput);
        assert_eq!(kind(r#"{"input":[1,2,3,4]}"#), TaskErrorKind::TooLarge);
    }

    #[test]
    fn a_production_pool_ignores_faults() {
        assert!(answer(ECHO, r#"{"input":"a","fail":"exit"}"#).is_ok());
        assert!(answer(ECHO_WITH_FAULTS, r#"{"input":"a","fail":"sometimes"}"#).is_err());
        for (fault, message) in [("error", "as the task"), ("oom", "memory"), ("device", "fault")] {
            let body = format!(r#"{{"input":"a","fail":"{fault}"}}"#);
            assert!(answer(ECHO_WITH_FAULTS, &body).is_err_and(|error| error.contains(message)));
        }
    }

    #[test]
    fn a_pass_lasts_for_its_sleep_ms() {
        let start = std::time::Instant::now();
        assert!(answer(ECHO, r#"{"sleep_ms":30}"#).is_ok());
        assert!(start.elapsed() >= Duration::from_millis(30));
    }
}
