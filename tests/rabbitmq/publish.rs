//! `sconce publish` for pools of each kind, and how long `sconce ctl` waits.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::client::Client;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).display().to_string()
}

/// The output of a command, which must succeed.
async fn printed(settings: &Settings, arguments: &[&str]) -> String {
    let mut command = Sconce::run(settings, arguments);
    assert_eq!(command.exit_code().await, 0, "{arguments:?}: {}", command.log());
    command.log()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_for_a_pool_that_generates_is_a_chat_and_can_be_streamed() {
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].model", fixture("generate-llama"));
    let sconce = Sconce::launched(&settings).await;
    let object = async |flags: &[&str]| {
        let said = printed(&settings, &[&["publish", "--wait", "What is a sconce?"], flags].concat()).await;
        let reply = said.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()).expect("a reply");
        (reply["body"]["object"].clone(), reply["body"].to_string())
    };
    let (chat, body) = object(&[]).await;
    assert_eq!(chat, "chat.completion", "{body}");
    let (text, body) = object(&["--url", "/v1/completions"]).await;
    assert_eq!(text, "text_completion", "{body}");
    let streamed = printed(&settings, &["publish", "--stream", "What is a sconce?"]).await;
    assert!(!streamed.contains("\"choices\"") && !streamed.trim().is_empty(), "{streamed}");
    // An error is printed as a whole reply, and decides the exit code.
    let mut refused = Sconce::run(&settings, &["publish", "--stream", "--url", "/v1/embeddings", "a"]);
    assert_eq!(refused.exit_code().await, 87, "{}", refused.log());
    assert!(refused.log().contains("\"status_code\":404"), "{}", refused.log());
    refused.wait_for_log("1 of 1 tasks were answered with an error").await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ending_of_a_file_decides_the_format_of_its_result() {
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].model", fixture("whisper-random"));
    let sconce = Sconce::launched(&settings).await;
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let recording = fixture("sound/short.mp3");
    printed(&settings, &["publish", "--output", &path("episode 1.vtt"), &recording]).await;
    let written = std::fs::read_to_string(path("episode 1.vtt")).expect("subtitles");
    assert!(written.starts_with("WEBVTT"), "{written}");
    let output = path("german.json");
    let german = ["--field", "language=de", "--field", "response_format=verbose_json"];
    let arguments = [&["publish", "--output", &output, &recording], &german[..]].concat();
    printed(&settings, &arguments).await;
    let reply = std::fs::read_to_string(path("german.json")).expect("a transcript");
    assert!(reply.contains("\"language\":\"de\""), "{reply}");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_read_from_a_pipe() {
    let settings = Settings::echo(Rabbit::shared().url());
    let sconce = Sconce::launched(&settings).await;
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let writer = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::write(pipe, "{\"input\": \"one\"}\n{\"input\": \"two\"}\n")
    });
    let said = printed(&settings, &["publish", "--wait", "-i", pipe.to_str().expect("UTF-8")]).await;
    writer.join().expect("a writer").expect("the pipe is read");
    assert!(said.contains("\"one\"") && said.contains("\"two\""), "{said}");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ctl_ends_soon_after_the_answers_or_gathers_for_its_timeout() {
    let settings = Settings::echo(Rabbit::shared().url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    let took = async |flags: &[&str]| {
        let begun = Instant::now();
        printed(&settings, &[&["ctl", "ping"], flags].concat()).await;
        begun.elapsed()
    };
    let mut times = Vec::new();
    // The shortest time counts, because the machine may be busy with other tests.
    while times.len() < 5 && times.last().is_none_or(|time| *time >= Duration::from_secs(1)) {
        times.push(took(&[]).await);
    }
    assert!(times.last() < Some(&Duration::from_secs(1)), "{times:?}");
    assert!(took(&["--timeout", "2s"]).await >= Duration::from_secs(2));
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_that_a_client_leaves_are_cancelled_on_the_device_and_in_the_queue() {
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].batch.max_requests", 1)
        .set("pool[0].prefetch", 1)
        .controlled();
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    let broker = Client::connect(&Rabbit::shared().url()).await;
    let folder = tempfile::tempdir().expect("a folder");
    let input = folder.path().join("in.jsonl");
    for is_interrupted in [true, false] {
        let gate = sconce.gate();
        let held = json!({"input": "held", "hold": gate.name.as_str()});
        std::fs::write(&input, format!("{held}\n\"b\"\n\"c\"\n")).expect("an input");
        let timeout = if is_interrupted { "1h" } else { "1s" };
        let flags = ["publish", "--wait", "--timeout", timeout, "-i", input.to_str().expect("UTF-8")];
        let mut client = Sconce::run(&settings, &flags);
        gate.held().await;
        broker.ready_becomes(&settings.tasks, 2).await;
        if is_interrupted {
            client.signal(Signal::SIGINT);
        }
        assert_eq!(client.exit_code().await, 84, "{}", client.log());
        let words =
            if is_interrupted { "interrupted: 0 tasks were answered" } else { "no reply for 1s; 3 of 3" };
        let log = client.log();
        assert!(
            log.contains(words) && log.contains("asked to cancel the tasks that are not answered: 3"),
            "{log}"
        );
        gate.open();
        broker.ready_becomes(&settings.tasks, 0).await;
    }
    assert_eq!(sconce.stop().await, 0);
    // What is computed for a client that has left becomes a dead letter.
    assert_eq!(broker.look(&settings.dead).await, Some((0, 0)));
}
