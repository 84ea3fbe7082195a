//! Streams of a worker of the program, over a queue in this process: what a cancelled and a late one are told, and that one
//! which gives nothing ends.

use std::fs;
use std::io::Write as _;
use std::num::NonZeroU16;
use std::process::{Command, Stdio};

use sconce::broker::embedded::{EmbeddedBroker, QueueSpec, connect};
use sconce::broker::{BrokerSession, ConsumerEvent, Published};
use sconce::config::{self, Assignment};
use sconce::protocol::control::{self, Cancellation, encode};
use sconce::protocol::{Message, Properties};
use serde_json::json;

use super::rig::{Rig, eventually};
use super::runs::{PACKAGE, start, statuses};

const COUNTING: &str = r#"
import asyncio
from pathlib import Path
import sconce_model

HERE = Path(__file__).parent

def write(name, text):
    (HERE / "new").write_text(text)
    (HERE / "new").rename(HERE / name)

class Counting(sconce_model.Model):
    urls = ["/v1/count"]

    async def stream(self, task):
        name = task.field("name")
        write(f"{name}-began", "")
        try:
            while not (HERE / f"{name}-may-end").exists():
                yield "a"
                await asyncio.sleep(0.01)
        except asyncio.CancelledError as error:
            write(f"{name}-told", str(error))
            raise
"#;

/// A task of this name, which expires after some milliseconds if they are given.
fn task(name: &str, expiration: Option<&str>) -> Message {
    let properties = Properties {
        correlation_id: Some(name.to_owned()),
        reply_to: Some("replies".to_owned()),
        expiration: expiration.map(str::to_owned),
        ..Properties::default()
    };
    Message { properties, body: json!({ "name": name }).to_string().into() }
}

/// The name of the next task that is answered, and the status.
async fn answer(session: &mut BrokerSession) -> (String, i64) {
    match session.consumer.next().await {
        Ok(ConsumerEvent::Delivery(delivery)) => {
            let Properties { correlation_id, headers, .. } = delivery.message.properties;
            (correlation_id.unwrap(), headers["status_code"].as_i64().unwrap())
        }
        other => panic!("no reply but {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_stream_and_a_late_one_are_told_and_the_others_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("counting_class.py"), COUNTING).unwrap();
    let queue = |name: &str| QueueSpec { name: name.to_owned(), kept: true };
    let broker =
        EmbeddedBroker::bind(path("queue/socket"), &["tasks", "replies", "dead"].map(queue)).unwrap();
    let mut session =
        connect(broker.path(), "replies".to_owned(), NonZeroU16::new(8).unwrap()).await.unwrap();
    let settings = [
        ("broker.url", format!("embedded:{}", broker.path().display())),
        ("pool[0].model", format!("python:{}:Counting", path("counting_class.py").display())),
        ("pool[0].python.path", PACKAGE.to_owned()),
        ("pool[0].task_queue", "tasks".to_owned()),
        ("pool[0].dead_letter_queue", "dead".to_owned()),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value));
    let mut settings = config::load(&[], [], &settings).unwrap().settings;
    let assignment = Assignment {
        slot: "count/0".to_owned(),
        worker: "host/count/0".to_owned(),
        device: "cpu".to_owned(),
        sharers: 1,
        threads: 1,
        pool: settings.pools.remove(0),
        broker: settings.broker,
        telemetry: settings.telemetry,
        reserved_queues: Vec::new(),
        broker_reached: false,
    };
    let mut worker = Command::new(env!("CARGO_BIN_EXE_sconce"))
        .args(["worker", "--launched-by", &std::process::id().to_string(), "--slot", "count/0"])
        .env_remove("AMQP_URL")
        .env("SCONCE_LOG", "warn")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut commands = worker.stdin.take().unwrap();
    let mut send = |command: &control::Command| commands.write_all(&encode(command)).unwrap();
    send(&control::Command::Start {
        assignment: serde_json::to_value(assignment).unwrap(),
        crashes: Vec::new(),
        paused: false,
        withdrawn: Some(Vec::new()),
    });
    for task in [task("kept", None), task("dropped", None), task("late", Some("3000"))] {
        let published = session.publisher.publish("tasks", task.into()).await.unwrap();
        assert_eq!(published, Published::Confirmed);
    }
    for name in ["kept", "dropped", "late"] {
        eventually(&format!("{name} has begun"), || path(&format!("{name}-began")).exists().then_some(()));
    }
    send(&control::Command::Cancel(Cancellation {
        correlation_id: Some("dropped".to_owned()),
        reply_to: Some("replies".to_owned()),
        ..Cancellation::default()
    }));
    for (name, reason, status) in [("dropped", "cancelled", 499), ("late", "deadline", 408)] {
        let told =
            eventually(&format!("{name} is told"), || fs::read_to_string(path(&format!("{name}-told"))).ok());
        assert_eq!((&*told, answer(&mut session).await), (reason, (name.to_owned(), status)));
    }
    fs::write(path("kept-may-end"), "").unwrap();
    assert_eq!(answer(&mut session).await, ("kept".to_owned(), 200));
    assert!(!path("kept-told").exists());
    send(&control::Command::Finish);
    assert_eq!(worker.wait().unwrap().code(), Some(0));
}

#[test]
fn a_stream_that_never_gives_way_is_ended_by_the_timeout_and_is_an_error_alone() {
    let code = r#"
import sconce_model

class Busy(sconce_model.Model):
    urls = ["/v1/busy"]

    async def stream(self, task):
        while task.field("text") == "busy":
            pass
        yield task.field("text")
"#;
    let texts = ["a", "busy", "c", "d"];
    let row = |text: &str| {
        json!({"custom_id": text, "method": "POST", "url": "/v1/busy", "body": {"text": text}}).to_string()
    };
    let rig = Rig::new(&texts.map(row));
    let ended = start(&rig, code, "Busy", &["--set", "pool[0].batch.timeout=1s"]).wait();
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    assert_eq!(statuses(&rig.answers()), [200, 500, 200, 200], "{}", ended.stderr);
}
