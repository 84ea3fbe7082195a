//! Files that tasks name by their URLs, from folders and servers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use super::tls::certificates;
use crate::support::client::{Client, Received, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

/// What a server answers with, given the first line of a request.
type Answer = dyn Fn(&str, &mut dyn Write) -> std::io::Result<()> + Send + Sync;

/// A server with a thread for each connection. Returns its port.
fn serve(answer: impl Fn(TcpStream) + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (answer, stream) = (answer.clone(), stream.expect("a connection"));
            thread::spawn(move || answer(stream));
        }
    });
    port
}

/// Reads a request, and answers it. A client may leave at any time.
fn exchange(stream: &mut (impl Read + Write), answer: &Answer) {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    let _ = reader.read_line(&mut first);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
            break;
        }
    }
    let _ = answer(&first, reader.into_inner());
}

fn plain(answer: impl Fn(&str, &mut dyn Write) -> std::io::Result<()> + Send + Sync + 'static) -> u16 {
    serve(move |mut stream| exchange(&mut stream, &answer))
}

fn ok(body: &str, stream: &mut dyn Write) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

const BODY: &str = r#"{"input": "fetched"}"#;

fn named(url: &str) -> Task {
    Task::raw("").header("dataref", url)
}

fn input(reply: &Received) -> &serde_json::Value {
    assert_eq!(reply.status_code(), 200, "{}", reply.body);
    &reply.body["input"]
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_fetched_from_folders_and_servers_that_the_settings_admit() {
    let rabbit = Rabbit::shared();
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("a.json"), BODY).expect("a file");
    certificates(folder.path(), &["server"]);
    let read = |name: &str| std::fs::read(folder.path().join(name)).expect("a file");
    let (certificate, key) = (read("server.pem"), read("server.key"));
    let secure = serve(move |stream| {
        use rustls::pki_types::pem::PemObject as _;
        let chain =
            vec![rustls::pki_types::CertificateDer::from_pem_slice(&certificate).expect("a certificate")];
        let key = rustls::pki_types::PrivateKeyDer::from_pem_slice(&key).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider);
        let config = config.with_safe_default_protocol_versions().expect("versions").with_no_client_auth();
        let config = Arc::new(config.with_single_cert(chain, key).expect("a certificate"));
        let session = rustls::ServerConnection::new(config).expect("a session");
        exchange(&mut rustls::StreamOwned::new(session, stream), &|_, stream| ok(BODY, stream));
    });
    let port = plain(|first, stream| match first.split(' ').nth(1) {
        Some("/in/a.json") => ok(BODY, stream),
        _ => write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
    });
    let settings = |sources: String| Settings::echo(rabbit.url()).set("pool[0].allowed_sources", sources);
    let trusting = settings(format!(
        r#"["file://{}/", {{url = "http://127.0.0.1:{port}/in/", private = true}}, {{url = "https://localhost:{secure}/", private = true}}]"#,
        folder.path().display()
    ));
    std::fs::write(folder.path().join("large.json"), format!("{BODY}{}", " ".repeat(1_024))).expect("a file");
    let trusting = trusting
        .set("pool[0].max_body", "1KiB")
        .environment("SSL_CERT_FILE", &folder.path().join("ca.pem").display().to_string());
    let sconce = Sconce::launched(&trusting).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&trusting.replies).await;
    let folder_url = format!("file://{}/a.json", folder.path().display());
    for url in
        [&folder_url, &format!("http://127.0.0.1:{port}/in/a.json"), &format!("https://localhost:{secure}/a")]
    {
        client.publish(&trusting.tasks, named(url)).await;
        assert_eq!(input(&replies.next().await), "fetched", "{url}");
    }
    client.publish(&trusting.tasks, Task::raw(BODY).header("dataref", &folder_url)).await;
    let reply = replies.next().await;
    assert_eq!((reply.status_code(), reply.body["error"]["param"].as_str()), (400, Some("dataref")));
    for (url, status, words) in [
        (format!("http://127.0.0.1:{port}/in/b.json"), 400, "404"),
        (format!("http://127.0.0.1:{port}/out/a.json"), 400, "allowed_sources"),
        (format!("file://{}/../etc/passwd", folder.path().display()), 400, ".."),
        (format!("file://{}/missing", folder.path().display()), 400, "does not exist"),
        (format!("file://{}/large.json", folder.path().display()), 413, "at most 1024"),
        ("http://169.254.169.254/latest/meta-data/".to_owned(), 400, "allowed_sources"),
        (format!("http://user:hunter2@127.0.0.1:{port}/in/a.json"), 400, "user:***@127.0.0.1"),
    ] {
        client.publish(&trusting.tasks, named(&url)).await;
        let reply = replies.next().await;
        let error = &reply.body["error"];
        assert_eq!((reply.status_code(), error["param"].as_str()), (status, Some("dataref")), "{url}");
        let message = error["message"].as_str().unwrap_or_default();
        assert!(message.contains(words) && !message.contains("hunter2"), "{error}");
    }
    assert_eq!(sconce.stop().await, 0);
    // Without the authority; a pool without sources fetches nothing.
    let wary = settings(format!(r#"[{{url = "https://localhost:{secure}/", private = true}}]"#))
        .set("pool[0].retry.max_attempts", 1);
    let none = Settings::echo(rabbit.url());
    for (settings, url, status) in
        [(&wary, format!("https://localhost:{secure}/a"), 400), (&none, folder_url.clone(), 400)]
    {
        let sconce = Sconce::launched(settings).await;
        let mut replies = client.inbox(&settings.replies).await;
        client.publish(&settings.tasks, named(&url)).await;
        let reply = replies.next().await;
        assert_eq!(reply.status_code(), status, "{url}: {}", reply.body);
        assert_eq!(sconce.stop().await, 0);
    }
}
