//! Tests with a real interpreter, whose class needs Python's own library alone: streams, and what ends a process.

use std::fs;
use std::time::{Duration, Instant};

use super::batches::Batches;
use super::process::set_program;
use super::processor::{Output, PythonProcessor};
use super::streams::PythonStreams;
use super::{describe, load};
use crate::config::{self, Assignment};
use crate::engine::{ForeignWork, StreamEvent, Streams};
use crate::model::{
    Body, Forward, ForwardError, LoadError, LoadSpec, Message, Processor, TaskError, TaskErrorKind,
};

const CLASSES: &str = r#"
import asyncio, json, os, signal, time
import sconce_model

class Counting(sconce_model.Model):
    urls = ["/v1/count"]

    async def stream(self, task):
        to = task.field("to")
        try:
            for number in range(to):
                yield f"{number} "
                await asyncio.sleep(0.01)
        except asyncio.CancelledError as error:
            print("told to end:", error, flush=True)
            raise
        if to == 0:
            await asyncio.sleep(60)
        if to < 0:
            time.sleep(60)

class Stuck(sconce_model.Model):
    urls = ["/v1/embeddings"]

    def forward(self, batch):
        if batch[0].value == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return [[1.5, 2.5] for _ in batch]
"#;

/// Loads a class, one call of which may take `timeout`. The folder with the class comes last.
fn loaded(class: &str, timeout: Duration) -> (Loaded, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut assignment = assignment(&folder, class);
    assignment.pool.batch.timeout = timeout;
    let spec = LoadSpec::new(assignment.pool.model.clone());
    let (waker, woken) = std::sync::mpsc::sync_channel(1);
    let wake = Box::new(move || _ = waker.try_send(()));
    let loaded = load(&assignment, &spec, wake).unwrap_or_else(|error| panic!("{error}"));
    (Loaded { processor: loaded.processor, work: loaded.work, lost: loaded.process.lost, woken }, folder)
}

struct Loaded {
    processor: PythonProcessor,
    work: ForeignWork<Batches, PythonStreams>,
    lost: tokio::sync::oneshot::Receiver<String>,
    woken: std::sync::mpsc::Receiver<()>,
}

fn assignment(folder: &tempfile::TempDir, class: &str) -> Assignment {
    set_program(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/python-process").into());
    let file = folder.path().join("own_classes.py");
    fs::write(&file, CLASSES).unwrap();
    let model = format!("python:{}:{class}", file.display());
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/python/src");
    let flags = [("pool[0].model", model.as_str()), ("pool[0].python.path", path)];
    let flags: Vec<_> = flags.map(|(path, value)| (path.to_owned(), value.to_owned())).to_vec();
    let settings = config::load(&[], [], &flags).unwrap().settings;
    Assignment {
        slot: "count/3".to_owned(),
        worker: "host/count/3".to_owned(),
        device: "cpu".to_owned(),
        sharers: 1,
        threads: 1,
        pool: settings.pools[0].clone(),
        broker: settings.broker,
        telemetry: settings.telemetry,
        reserved_queues: Vec::new(),
        broker_reached: false,
    }
}

fn message(body: &str) -> Message {
    Message { body: body.to_owned().into(), ..Message::default() }
}

fn prepared(processor: &PythonProcessor, body: &str) -> Vec<super::processor::Input> {
    let (_, inputs) = processor.preprocess(&message(body)).unwrap_or_else(|error| panic!("{error}"));
    inputs.all().unwrap().into_iter().map(|sized| sized.input).collect()
}

/// The events of one task, until its end; its first piece is handled by `on_piece`.
fn until_ended(
    streams: &mut PythonStreams,
    woken: &std::sync::mpsc::Receiver<()>,
    mut on_piece: impl FnMut(&mut PythonStreams, usize),
) -> (usize, Result<String, TaskError>) {
    let mut pieces = 0;
    loop {
        for (_, event) in streams.take_events().unwrap_or_else(|error| panic!("{error}")) {
            match event {
                StreamEvent::Piece(_) => {
                    pieces += 1;
                    on_piece(streams, pieces);
                }
                StreamEvent::Ended(output) => {
                    let text = output.map(|output| match output {
                        Output::Reply(body) => String::from_utf8(body.bytes.to_vec()).unwrap(),
                        Output::Numbers(_) | Output::InProcess => panic!("a stream gives a reply"),
                    });
                    return (pieces, text);
                }
            }
        }
        woken.recv_timeout(Duration::from_secs(30)).unwrap();
    }
}

#[test]
fn a_stream_gives_its_parts_and_ends_when_it_is_told() {
    let (Loaded { processor, work, woken, .. }, _folder) = loaded("Counting", Duration::from_secs(30));
    let ForeignWork::Streams(mut streams) = work else { panic!("it has streams") };
    let input = prepared(&processor, r#"{"to": 3}"#).pop().unwrap();
    streams.start(1, &input).unwrap();
    let (pieces, text) = until_ended(&mut streams, &woken, |_, _| {});
    assert_eq!((pieces, text.unwrap().contains("0 1 2")), (3, true));
    let input = prepared(&processor, r#"{"to": 1000000}"#).pop().unwrap();
    streams.start(2, &input).unwrap();
    let (pieces, text) = until_ended(&mut streams, &woken, |streams, pieces| {
        if pieces == 2 {
            streams.cancel(2, true).unwrap();
        }
    });
    assert_eq!(text.unwrap_err().kind, TaskErrorKind::Cancelled);
    assert!(pieces < 1_000, "{pieces}");
}

#[test]
fn texts_that_wait_together_become_one_part_of_the_reply() {
    let (Loaded { processor, .. }, _folder) = loaded("Counting", Duration::from_secs(30));
    let (mut context, _) = processor.preprocess(&message(r#"{"to": 1}"#)).unwrap();
    let text = |text: &'static str| Body::new("text/plain; charset=utf-8", text);
    let pieces = vec![text("a"), text("b"), Body::json("{}"), Body::json("{}"), text("c")];
    let parts = processor.parts(&mut context, 0, pieces);
    let parts: Vec<_> = parts.iter().map(|part| std::str::from_utf8(&part.bytes).unwrap()).collect();
    assert_eq!(parts, ["ab", "{}", "{}", "c"]);
}

#[test]
fn a_stream_that_is_silent_for_too_long_ends_alone() {
    let (Loaded { processor, work, mut lost, woken }, _folder) = loaded("Counting", Duration::from_secs(1));
    let ForeignWork::Streams(mut streams) = work else { panic!("it has streams") };
    let inputs = [r#"{"to": 1000000}"#, r#"{"to": 0}"#].map(|body| prepared(&processor, body).pop().unwrap());
    for (id, input) in (1..).zip(&inputs) {
        streams.start(id, input).unwrap();
    }
    let mut ended = None;
    // The other one goes on for a while.
    let mut pieces_afterwards = 0;
    while pieces_afterwards < 10 {
        for (id, event) in streams.take_events().unwrap_or_else(|error| panic!("{error}")) {
            match event {
                StreamEvent::Piece(_) if ended.is_some() => pieces_afterwards += 1,
                StreamEvent::Piece(_) => {}
                StreamEvent::Ended(output) => ended = Some((id, output.map(drop).unwrap_err())),
            }
        }
        woken.recv_timeout(Duration::from_secs(30)).unwrap();
    }
    let (id, error) = ended.unwrap();
    assert_eq!((id, error.kind), (2, TaskErrorKind::Fault));
    assert!(error.message.contains("batch.timeout (1 s)"), "{error}");
    assert!(lost.try_recv().is_err(), "the process lives");
}

#[test]
fn a_stream_that_is_silent_and_does_not_end_when_it_is_told_loses_the_process() {
    let (Loaded { processor, work, mut lost, .. }, _folder) = loaded("Counting", Duration::from_secs(1));
    let ForeignWork::Streams(mut streams) = work else { panic!("it has streams") };
    let input = prepared(&processor, r#"{"to": -1}"#).pop().unwrap();
    streams.start(1, &input).unwrap();
    let since = Instant::now();
    let error = loop {
        match streams.take_events() {
            Ok(events) => assert!(events.is_empty()),
            Err(error) => break error,
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    // The time-out, and the time to end.
    assert!(since.elapsed() >= Duration::from_secs(2), "{:?}", since.elapsed());
    let ForwardError::Device(reason) = error else { panic!("{error}") };
    assert!(reason.contains("batch.timeout (1 s)"), "{reason}");
    assert_eq!(lost.try_recv().unwrap(), reason);
}

#[test]
fn a_process_that_is_stopped_is_given_up_after_the_timeout() {
    let (Loaded { processor, work, mut lost, .. }, _folder) = loaded("Stuck", Duration::from_secs(2));
    let ForeignWork::Batches(mut batches) = work else { panic!("it has batches") };
    let inputs = prepared(&processor, r#"{"input": ["a", "b"]}"#);
    let results = batches.forward(&inputs.iter().collect::<Vec<_>>()).unwrap();
    let vectors = results.into_iter().map(|result| match result {
        Ok(Output::Numbers(vector)) => vector,
        _ => panic!("it gives numbers"),
    });
    assert_eq!(vectors.collect::<Vec<_>>(), [[1.5, 2.5], [1.5, 2.5]]);
    let inputs = prepared(&processor, r#"{"input": "stop"}"#);
    let error = batches.forward(&inputs.iter().collect::<Vec<_>>()).map(drop).unwrap_err();
    assert!(
        matches!(&error, ForwardError::Device(reason) if reason.contains("a batch of 1 inputs")),
        "{error}"
    );
    assert!(lost.try_recv().unwrap().contains("batch.timeout"));
}

#[test]
fn describing_a_class_whose_module_never_ends_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let assignment = assignment(&folder, "Counting");
    let spec = LoadSpec::new(assignment.pool.model.clone());
    let endless = Assignment {
        pool: config::Pool {
            model: assignment.pool.model.replace("own_classes", "own_classes_endless"),
            ..assignment.pool.clone()
        },
        ..assignment.clone()
    };
    fs::write(folder.path().join("own_classes_endless.py"), "import time\nwhile True: time.sleep(1)\n")
        .unwrap();
    let error =
        super::load::describe_within(&endless.pool, &spec, Duration::from_millis(500)).map(drop).unwrap_err();
    assert!(
        matches!(&error, LoadError::Unsupported { reason, .. } if reason.contains("took longer than")),
        "{error}"
    );
    let described = describe(&assignment.pool, &spec).unwrap_or_else(|error| panic!("{error}"));
    let said = described.to_string();
    assert!(said.contains("/v1/count (application/json)") && said.contains("streams"), "{said}");
    assert_eq!(described.options().collect::<Vec<_>>(), ["option concurrency (int) = 16"]);
}
