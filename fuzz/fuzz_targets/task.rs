//! A delivered message, through everything that looks at it before the device: what it is, its
//! deadline, its dead letter, its reply, the decoders of every model.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use libfuzzer_sys::fuzz_target;
use sconce::model::family::Family;
use sconce::model::registry::{Load, Register, register};
use sconce::model::tasks::embed::{EmbeddingRequest, Input};
use sconce::model::{Device, Forward, Generate, LoadSpec, Processor};
use sconce::protocol::dead_letter::{
    Cause, DeadLetter, Reason, dead_letter, restored, without_producer_headers,
};
use sconce::protocol::reply::{Body, reply};
use sconce::protocol::{
    Incoming, Message, Sentinels, Task, TaskErrorKind, Timings, Value, WorkerInfo, classify,
};
use sconce_fuzz::{check_error, message, written};

const MOST: usize = 4;

/// The processor of every built-in family, as what checks a message with it.
static PROCESSORS: LazyLock<Processors> = LazyLock::new(|| {
    let mut processors = Processors(Vec::new());
    register(&mut processors);
    processors
});

struct Processors(Vec<Box<dyn Fn(&Message) + Send + Sync>>);

impl Processors {
    fn add<P: Processor, N>(&mut self, family: &Family, load: Load<P, N>) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let spec = LoadSpec { max_inputs: MOST, ..family.example(&root) };
        let (processor, _) = load(&spec, &Device::Cpu).expect("a model of the tests");
        self.0.push(Box::new(move |message| check_processor(&processor, message)));
    }
}

impl Register for Processors {
    fn one_pass<P, F>(&mut self, family: &'static Family, load: Load<P, F>)
    where
        P: Processor,
        F: Forward<Input = P::Input, Output = P::Output>,
    {
        self.add(family, load);
    }

    fn sequences<P, G>(&mut self, family: &'static Family, load: Load<P, G>)
    where
        P: Processor,
        G: Generate<Prompt = P::Input, Piece = P::Piece, Output = P::Output>,
    {
        self.add(family, load);
    }
}

fuzz_target!(|data: &[u8]| {
    let message = message(data);
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let task = match classify(message.clone(), now, Sentinels::default(), || "made".into()) {
        Incoming::Task(task) | Incoming::UnknownControl(task, _) => task,
        Incoming::Sentinel(_) => return,
    };
    check_properties(&task, now);
    check_dead_letter(&task);
    check_reply(&task);
    check_embeddings(&message.body);
    PROCESSORS.0.iter().for_each(|check| check(&message));
});

fn check_properties(task: &Task, now: SystemTime) {
    if let Err(error) = task.deadline() {
        check_error(&error);
        assert!(["expires", "expiration"].contains(&error.param.as_deref().unwrap_or_default()));
    }
    if let Some(kind) = task.message.media_type() {
        assert_eq!(kind, kind.to_ascii_lowercase());
        assert!(!kind.is_empty() && !kind.contains(';'));
    }
    assert!(task.time_in_queue(now) >= Duration::ZERO);
    assert_eq!(task.fingerprint().len(), 16);
    assert_eq!(task.fingerprint(), task.clone().fingerprint());
}

fn check_dead_letter(task: &Task) {
    let sent = &task.message.properties;
    let error = "é".repeat(3_000);
    let cause = Cause { reason: Reason::Undecodable, error: &error, worker: "worker", queue: "task", at: task.received };
    let message = dead_letter(task, &cause);
    check_restored(message.clone(), task);
    assert_eq!(message.body, task.message.body);
    let kept = &message.properties;
    for (ours, theirs) in [
        (&kept.content_type, &sent.content_type),
        (&kept.content_encoding, &sent.content_encoding),
        (&kept.correlation_id, &sent.correlation_id),
        (&kept.reply_to, &sent.reply_to),
        (&kept.message_id, &sent.message_id),
        (&kept.kind, &sent.kind),
        (&kept.app_id, &sent.app_id),
        (&kept.cluster_id, &sent.cluster_id),
    ] {
        assert_eq!(ours, theirs);
    }
    assert_eq!((kept.delivery_mode, kept.priority), (sent.delivery_mode, sent.priority));
    assert_eq!(kept.timestamp, sent.timestamp);
    assert!(kept.expiration.is_none() && kept.user_id.is_none() && !kept.headers.contains_key("CC"));
    let ours = ["reason", "error", "task_id", "worker", "dead_lettered_at", "CC"];
    let originals = ["original_expiration", "original_user_id", "original_cc"];
    for (name, value) in &sent.headers {
        if !ours.contains(&name.as_str()) && !originals.contains(&name.as_str()) {
            assert_eq!(format!("{:?}", kept.headers[name]), format!("{value:?}"), "{name}");
        }
    }
    let smaller = without_producer_headers(message);
    // And those of ours that it came with.
    assert!((6..=10).contains(&smaller.properties.headers.len()));
    let bytes = written(&smaller.properties);
    assert_eq!(written(&serde_json::from_slice(&bytes).expect("properties")), bytes);
}

/// What is put back is what came, but for the headers that say how it died and those of ours that it
/// came with.
fn check_restored(message: Message, task: &Task) {
    let read = DeadLetter::new(&message);
    assert_eq!((read.reason(), read.task_id()), ("undecodable", Some(task.id.as_str())));
    assert!(read.dead_lettered_at().is_some() && read.has_id(&task.id));
    let back = restored(message);
    assert_eq!(back.body, task.message.body);
    for (name, value) in &back.properties.headers {
        assert_eq!(format!("{:?}", task.message.properties.headers[name]), format!("{value:?}"), "{name}");
    }
}

fn check_reply(task: &Task) {
    let worker_info = WorkerInfo { worker: "w".into(), device: "cpu".into(), model: "m".into(), dtype: "f32" };
    let reply = reply(task, Ok(Body::json("{}")), &Timings::default(), &worker_info, 1);
    assert_eq!(reply.properties.correlation_id, task.message.properties.correlation_id);
    assert_eq!(reply.properties.kind.as_deref(), Some("reply"));
    assert!(reply.properties.headers.len() <= 15);
    for (name, value) in &reply.properties.headers {
        assert!(!name.starts_with("x-") && !matches!(value, Value::Array(_) | Value::Table(_)));
        let echoed = ["traceparent", "tracestate"].contains(&name.as_str());
        assert!(!echoed || value.as_str().is_some_and(|text| text.len() <= 1_024));
    }
}

fn check_embeddings(body: &[u8]) {
    let whole = serde_json::from_slice::<serde_json::Value>(body);
    match EmbeddingRequest::parse(body, MOST) {
        Err(error) => {
            check_error(&error);
            // What a general decoder reads is not called undecodable.
            assert!(whole.is_err() || error.kind != TaskErrorKind::Undecodable, "{error}");
        }
        Ok(request) => {
            assert!((1..=MOST).contains(&request.inputs.len()));
            // Deeply nested keys that we ignore are too deep for it.
            let Ok(whole) = whole else { return };
            for (index, text) in request.inputs.iter().enumerate() {
                let path = request.path(index);
                let written = match path.as_str() {
                    "input" => &whole["input"],
                    _ => &whole["input"][index],
                };
                match text {
                    Ok(Input::Text(text)) => assert_eq!(written.as_str(), Some(text.as_str()), "{path}"),
                    Ok(Input::Ids(ids)) => assert_eq!(written, &serde_json::json!(ids), "{path}"),
                    Ok(Input::Image(_)) => unreachable!("no image is read without files"),
                    Err(error) => check_error(error),
                }
            }
        }
    }
}

fn check_processor<P: Processor>(processor: &P, message: &Message) {
    match processor.preprocess(message).and_then(|(_, inputs)| inputs.all()) {
        Ok(inputs) => {
            assert!(inputs.len() <= MOST);
            assert!(inputs.iter().all(|input| (1..=1_000_000).contains(&input.tokens)));
        }
        Err(error) => {
            check_error(&error);
            assert_ne!(error.kind, TaskErrorKind::Internal, "a producer's mistake, not ours: {error}");
        }
    }
}
