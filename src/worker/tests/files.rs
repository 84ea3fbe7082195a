//! Tests of tasks whose bodies are files of a server, in real time, because servers do not know of paused time. Which
//! answers of a server lead to which failure is shown in `src/fetch/tests.rs`.

use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;

use url::Url;

use super::*;
use crate::config::AllowedSource;

/// Starts a server. `answer` gets the number of each request, and writes the response.
fn serve(answer: impl Fn(usize, &mut TcpStream) + Send + 'static) -> Url {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/in/", listener.local_addr().unwrap());
    thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            lines.map_while(Result::ok).take_while(|line| !line.is_empty()).for_each(drop);
            answer(number, &mut stream);
        }
    });
    Url::parse(&url).unwrap()
}

fn ok(stream: &mut TcpStream) {
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{{\"input\": \"fetched\"}}").unwrap();
}

/// Starts a worker that fetches files from these servers, one at a time.
fn start(servers: &[&Url]) -> Rig {
    let sources = servers.iter().map(|url| AllowedSource { url: (*url).clone(), private: true }).collect();
    Rig::start("echo", |assignment| {
        let pool = &mut assignment.pool;
        pool.allowed_sources = sources;
        (pool.fetch.at_once, pool.fetch.timeout, pool.fetch.min_rate) = (1, Duration::from_secs(300), 0);
    })
}

/// A task whose body is a file of this server.
fn named(server: &Url) -> Message {
    let file = server.join("a.json").unwrap();
    with_headers(
        Message { body: "".into(), ..task("id", "mine", &Value::Null) },
        &[("dataref", file.as_str())],
    )
}

#[tokio::test(flavor = "local")]
async fn a_file_of_a_server_that_is_busy_is_fetched_at_a_later_attempt() {
    let server = serve(|number, stream| match number {
        0 => write!(stream, "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n").unwrap(),
        _ => ok(stream),
    });
    let rig = start(&[&server]);
    rig.memory.deliver([named(&server)]);
    let again = rig.memory.until_published("tasks, later", 1).await.remove(0);
    assert_eq!(rig.memory.published("mine"), []);
    rig.memory.deliver([again]);
    let reply = rig.memory.until_published("mine", 1).await.remove(0);
    assert_eq!((status(&reply), &body(&reply)["input"]), (200, &json!("fetched")));
    assert_eq!(reply.properties.headers["attempt"].as_i64(), Some(2));
}

#[tokio::test(flavor = "local")]
async fn a_task_that_expires_while_its_file_comes_leaves_its_place_and_its_connection() {
    let (closed_sender, closed) = mpsc::sync_channel(1);
    let silent = serve(move |_, stream| {
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nx").unwrap();
        // Returns once the connection is closed.
        let _ = stream.read_to_end(&mut Vec::new());
        closed_sender.send(()).unwrap();
    });
    let good = serve(|_, stream| ok(stream));
    let rig = start(&[&silent, &good]);
    let mut late = named(&silent);
    late.properties.expiration = Some("300".into());
    rig.memory.deliver([late]);
    assert_eq!(status(&rig.memory.until_published("mine", 1).await[0]), 408);
    rig.memory.deliver([named(&good)]);
    let reply = rig.memory.until_published("mine", 2).await.remove(1);
    assert_eq!(body(&reply)["input"], "fetched", "the only place is free");
    closed.recv_timeout(Duration::from_secs(60)).expect("the connection is closed");
}
