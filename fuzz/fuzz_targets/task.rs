//! A delivered message, through everything that looks at it before the device: what it is, its
//! deadline, its dead letter, its reply, the decoders of every model.
#![no_main]

use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use libfuzzer_sys::fuzz_target;
use sconce::model::echo::{self, ECHO_WITH_FAULTS, EchoProcessor};
use sconce::model::script::{self, SCRIPT, ScriptProcessor};
use sconce::model::tasks::embed::{self, EmbeddingProcessor};
use sconce::model::tasks::generate::{self, GenerateProcessor};
use sconce::model::tasks::image::{self, ImageProcessor};
use sconce::model::tasks::labels::{self, LabelProcessor};
use sconce::model::tasks::pairs::{self, PairProcessor};
use sconce::model::{Device, LoadSpec, Processor};
use sconce::protocol::dead_letter::{
    Cause, DeadLetter, Reason, dead_letter, restored, without_producer_headers,
};
use sconce::protocol::embeddings::{EmbeddingRequest, Text};
use sconce::protocol::reply::{Body, reply};
use sconce::protocol::{
    Incoming, Message, WorkerInfo, Task, TaskErrorKind, Timings, Value, classify,
};
use sconce_fuzz::{check_error, message, written};

const MOST: usize = 4;

static ECHOES: LazyLock<EchoProcessor> =
    LazyLock::new(|| echo::load(&spec(ECHO_WITH_FAULTS), &Device::Cpu).expect("echoes").0);
static SCRIPTS: LazyLock<ScriptProcessor> =
    LazyLock::new(|| script::load(&spec(SCRIPT), &Device::Cpu).expect("scripts").0);
static EMBEDDINGS: LazyLock<EmbeddingProcessor> =
    LazyLock::new(|| embed::load(&fixture("tiny-bert-cls"), &Device::Cpu).expect("a model of the tests").0);
static TEXTS: LazyLock<GenerateProcessor> =
    LazyLock::new(|| generate::load(&fixture("generate-llama"), &Device::Cpu).expect("a model of the tests").0);
static PAIRS: LazyLock<PairProcessor> =
    LazyLock::new(|| pairs::load(&fixture("score-bert"), &Device::Cpu).expect("a model of the tests").0);
static LABELS: LazyLock<LabelProcessor> =
    LazyLock::new(|| labels::load(&fixture("score-roberta"), &Device::Cpu).expect("a model of the tests").0);
static IMAGES: LazyLock<ImageProcessor> = LazyLock::new(|| {
    let options = [("max_pixels".to_owned(), 1_000_000.into())].into();
    let spec = LoadSpec { options, ..fixture("tiny-vit") };
    image::load(&spec, &Device::Cpu).expect("a model of the tests").0
});

fn fixture(name: &str) -> LoadSpec {
    spec(&format!("{}/../tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR")))
}

fn spec(source: &str) -> LoadSpec {
    LoadSpec { max_inputs: MOST, ..LoadSpec::new(source) }
}

fuzz_target!(|data: &[u8]| {
    let message = message(data);
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let task = match classify(message.clone(), now, || "made".into()) {
        Incoming::Task(task) | Incoming::UnknownControl(task, _) => task,
        Incoming::Sentinel(_) => return,
    };
    check_properties(&task, now);
    check_dead_letter(&task);
    check_reply(&task);
    check_embeddings(&message.body);
    check_processor(&*ECHOES, &message);
    check_processor(&*SCRIPTS, &message);
    check_processor(&*EMBEDDINGS, &message);
    check_processor(&*TEXTS, &message);
    check_processor(&*PAIRS, &message);
    check_processor(&*LABELS, &message);
    check_processor(&*IMAGES, &message);
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
    assert!(task.queued(now) >= Duration::ZERO);
    assert_eq!(task.fingerprint().len(), 16);
    assert_eq!(task.fingerprint(), task.clone().fingerprint());
}

fn check_dead_letter(task: &Task) {
    let sent = &task.message.properties;
    let error = "é".repeat(3_000);
    let cause = Cause { reason: Reason::Undecodable, error: &error, worker: "worker", at: task.received };
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
    let read = DeadLetter::of(&message);
    assert_eq!((read.reason(), read.task_id()), ("undecodable", Some(task.id.as_str())));
    assert!(read.dead_lettered_at().is_some() && read.has_id(&task.id));
    let back = restored(message);
    assert_eq!(back.body, task.message.body);
    for (name, value) in &back.properties.headers {
        assert_eq!(format!("{:?}", task.message.properties.headers[name]), format!("{value:?}"), "{name}");
    }
}

fn check_reply(task: &Task) {
    let worker_info = WorkerInfo { worker: "w".into(), device: "cpu".into(), model: "m".into() };
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
            assert!((1..=MOST).contains(&request.texts.len()));
            // Deeply nested keys that we ignore are too deep for it.
            let Ok(whole) = whole else { return };
            for (index, text) in request.texts.iter().enumerate() {
                let path = request.path(index);
                let written = match path.as_str() {
                    "input" => &whole["input"],
                    _ => &whole["input"][index],
                };
                match text {
                    Text::Plain(text) => assert_eq!(written.as_str(), Some(text.as_str()), "{path}"),
                    Text::Ids(ids) => assert_eq!(written, &serde_json::json!(ids), "{path}"),
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
