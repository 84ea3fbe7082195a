//! A broker that takes connections and says nothing: what the attempts at it leave behind.

use std::fs;

use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::{bounded, until};

/// Attempts that are waited for.
const ATTEMPTS: usize = 5;

/// Threads of a process that have this name.
fn threads(pid: u32, name: &str) -> usize {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("a process").flatten();
    let comm = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm")).ok();
    threads.filter_map(comm).filter(|comm| comm.trim_end() == name).count()
}

/// Sockets that a process has open.
fn sockets(pid: u32) -> usize {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).expect("a process").flatten();
    let targets = files.filter_map(|file| fs::read_link(file.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

/// One attempt comes after the other: what each of them leaves, all of them together would show.
async fn leaves_nothing_behind(listener: &TcpListener, settings: &Settings) {
    let worker = Sconce::run(settings, &["worker"]);
    let mut at_first = None;
    for _ in 0..ATTEMPTS {
        let accepted = bounded("an attempt", listener.accept()).await;
        let (mut attempted, _) = accepted.expect("a connection");
        at_first.get_or_insert_with(|| sockets(worker.pid()));
        let _ = bounded("its end", attempted.read_to_end(&mut Vec::new())).await;
    }
    // None of them was refused, or failed otherwise.
    worker.wait_for_log_times("no answer within", ATTEMPTS).await;
    let pid = worker.pid();
    until("one thread of lapin's is left at most", || async {
        (threads(pid, "lapin-io-loop") <= 1).then_some(())
    })
    .await;
    // An attempt holds its socket twice, and the first leaves lapin's own runtime, which has one.
    let most = at_first.unwrap_or_default() + 2;
    until(&format!("at most {most} sockets are left"), || async { (sockets(pid) <= most).then_some(()) })
        .await;
}

/// The broker at `scheme://HOST` that a listener stands for.
async fn silent(scheme: &str, host: &str) -> (TcpListener, Settings) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let settings = Settings::echo(format!("{scheme}://guest:guest@{host}:{port}/%2f"));
    (listener, settings.set("broker.connect_timeout", "200ms"))
}

#[tokio::test(flavor = "multi_thread")]
async fn attempts_at_a_silent_broker_leave_no_threads_and_no_sockets_behind() {
    let (listener, settings) = silent("amqp", "127.0.0.1").await;
    leaves_nothing_behind(&listener, &settings).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_do_those_that_wait_for_its_part_of_the_tls_handshake() {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ca.pem");
    fs::write(&file, certified.cert.pem()).expect("a file");
    let (listener, settings) = silent("amqps", "localhost").await;
    leaves_nothing_behind(&listener, &settings.set("broker.tls.ca_file", file.display())).await;
}
