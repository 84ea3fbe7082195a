//! Tests of fetching from servers that the tests start, and from a folder.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use futures_util::FutureExt as _;

use super::*;
use crate::batching::QueueShare;
use crate::config::AllowedSource;

const MAX_SIZE: u64 = 1_000;

/// Starts a server. `answer` gets the first line of each request and writes the response.
fn serve(answer: impl Fn(&str, &mut TcpStream) -> io::Result<()> + Send + 'static) -> Url {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/in/", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let first = lines.next().unwrap().unwrap();
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            // An error means that the client has closed the connection, as some tests expect.
            let _ = answer(&first, &mut stream);
        }
    });
    Url::parse(&url).unwrap()
}

/// Starts a server that answers each request with these bytes.
fn answering(answer: &'static str) -> Url {
    serve(move |_, stream| stream.write_all(answer.as_bytes()))
}

fn fetcher(url: &Url, private: bool) -> Fetcher {
    let allowed = vec![AllowedSource { url: url.clone(), private }];
    let limits = Fetch {
        max_size: MAX_SIZE,
        timeout: Duration::from_secs(1),
        min_rate: 16 << 10,
        at_once: 4,
        memory: 10 * MAX_SIZE,
    };
    let s3 = S3 {
        endpoint: None,
        region: "eu-central-1".to_owned(),
        access_key_id: Some("AKIAEXAMPLE".to_owned()),
        secret_access_key: Some(crate::config::Secret::new("secret")),
    };
    let budget = Budget::new(QueueBytes::new(limits.memory, &[]));
    let (hasher, tls) = (RandomState::new(), OnceLock::new());
    Fetcher { allowed, budget, limits, s3, hasher, limits_servers: false, tls }
}

const OWNER: Owner = Owner { queue: QueueShare::LONE, requester: 1, background: false };
const CLAIM: Claim = Claim { owner: OWNER, waits_for_memory: true, max_size: u64::MAX, task_bytes: 0 };

async fn fetched(url: &Url) -> Result<Vec<u8>, Failure> {
    let fetcher = fetcher(url, true);
    let location = fetcher.locate(url.join("a.wav").unwrap().as_str())?;
    fetcher.fetch(location, CLAIM, Arc::new(())).await.map(|bytes| bytes.to_vec())
}

#[tokio::test]
async fn a_file_comes_with_or_without_a_declared_length() {
    let declared = answering("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfile");
    assert_eq!(fetched(&declared).await, Ok(b"file".to_vec()));
    let chunked =
        answering("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nfi\r\n2\r\nle\r\n0\r\n\r\n");
    assert_eq!(fetched(&chunked).await, Ok(b"file".to_vec()));
    let until_the_end = answering("HTTP/1.1 200 OK\r\n\r\nfile");
    assert_eq!(fetched(&until_the_end).await, Ok(b"file".to_vec()));
}

#[tokio::test]
async fn statuses_decide_whether_another_try_is_worth_it() {
    let statuses =
        [(404, false), (403, false), (301, false), (204, false), (408, true), (429, true), (503, true)];
    for (status, is_tried_again) in statuses {
        let url = serve(move |_, stream| {
            let location = "Location: http://127.0.0.1:9/in/b";
            write!(stream, "HTTP/1.1 {status} No\r\n{location}\r\nContent-Length: 0\r\n\r\n")
        });
        let failure = fetched(&url).await.unwrap_err();
        let (Failure::Refused(why) | Failure::Unavailable(why)) = &failure else { panic!("{failure:?}") };
        assert!(why.contains(&status.to_string()), "{why}");
        assert_eq!(matches!(failure, Failure::Unavailable(_)), is_tried_again, "{status}");
    }
}

#[tokio::test]
async fn a_file_that_is_too_large_or_lies_about_its_length_is_not_taken() {
    let declared = answering("HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n");
    let failure = fetched(&declared).await.unwrap_err();
    assert_eq!(
        failure,
        Failure::TooLarge("has 1001 bytes; this pool takes at most 1000 (fetch.max_size)".to_owned())
    );
    let endless = serve(|_, stream| {
        write!(stream, "HTTP/1.1 200 OK\r\n\r\n")?;
        loop {
            stream.write_all(&[7; 4_096])?;
        }
    });
    assert!(matches!(fetched(&endless).await, Err(Failure::TooLarge(_))));
    let short = answering("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nfile");
    assert!(matches!(fetched(&short).await, Err(Failure::Unavailable(_))));
    let compressed = answering("HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 4\r\n\r\nfile");
    assert!(matches!(fetched(&compressed).await, Err(Failure::Refused(why)) if why.contains("br")));
    for headers in
        ["Content-Encoding: identity\r\nContent-Encoding: gzip", "Transfer-Encoding: gzip, chunked"]
    {
        let encoded = serve(move |_, stream| {
            write!(stream, "HTTP/1.1 200 OK\r\n{headers}\r\n\r\n4\r\nfile\r\n0\r\n\r\n")
        });
        let failure = fetched(&encoded).await.unwrap_err();
        assert!(matches!(&failure, Failure::Refused(why) if why.contains("gzip")), "{headers}: {failure:?}");
    }
    let plain = answering(
        "HTTP/1.1 200 OK\r\nContent-Encoding: aws-chunked\r\nX: a\r\n b\r\nContent-Length: 4\r\n\r\nfile",
    );
    assert_eq!(fetched(&plain).await, Ok(b"file".to_vec()));
    let nonsense = answering("220 smtp.example.org\r\n");
    assert!(matches!(fetched(&nonsense).await, Err(Failure::Unavailable(_))));
}

#[tokio::test]
async fn a_slow_server_is_left_at_the_deadline() {
    let slow = serve(|_, stream| {
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n")?;
        loop {
            stream.write_all(b"x")?;
            thread::sleep(Duration::from_millis(50));
        }
    });
    let began = Instant::now();
    assert!(matches!(fetched(&slow).await, Err(Failure::Unavailable(_))));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let silent = serve(|_, stream| {
        let mut ignored = Vec::new();
        stream.read_to_end(&mut ignored).map(drop)
    });
    assert!(matches!(fetched(&silent).await, Err(Failure::Unavailable(_))));
}

#[tokio::test]
async fn private_addresses_need_the_settings_consent() {
    let url = answering("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfile");
    for host in ["127.0.0.1", "localhost", "[::1]", "0x7f.1", "2130706433"] {
        let url = Url::parse(&format!("http://{host}:{}/in/", url.port().unwrap())).unwrap();
        let fetcher = fetcher(&url, false);
        let location = fetcher.locate(url.join("a.wav").unwrap().as_str()).unwrap();
        let failure = fetcher.fetch(location, CLAIM, Arc::new(())).await.unwrap_err();
        assert!(
            matches!(&failure, Failure::Refused(why) if why.contains("private address")),
            "{host}: {failure:?}"
        );
    }
}

#[tokio::test]
async fn a_server_or_host_that_is_not_there_may_be_there_later() {
    let nobody = Url::parse("http://127.0.0.1:9/in/").unwrap();
    assert!(matches!(fetched(&nobody).await, Err(Failure::Unavailable(why)) if why.contains("connection")));
    let unknown = Url::parse("http://nobody.invalid/in/").unwrap();
    assert!(matches!(fetched(&unknown).await, Err(Failure::Unavailable(why)) if why.contains("host")));
}

#[tokio::test]
async fn a_signed_request_has_the_settings_key_and_errors_do_not_show_it() {
    let (request_sender, request_line) = std::sync::mpsc::sync_channel(1);
    let url = serve(move |first, stream| {
        request_sender.send(first.to_owned()).unwrap();
        write!(stream, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
    });
    let mut fetcher = fetcher(&Url::parse("s3://bucket/in/").unwrap(), true);
    fetcher.s3.endpoint = Some(url.join("/").unwrap());
    let location = fetcher.locate("s3://bucket/in/a%20b.flac").unwrap();
    let failure = fetcher.fetch(location, CLAIM, Arc::new(())).await.unwrap_err();
    assert_eq!(
        failure,
        Failure::Refused("cannot be fetched: its server answers with the status 403".to_owned())
    );
    let request_line = request_line.recv().unwrap();
    assert!(request_line.starts_with("GET /bucket/in/a%20b.flac?"), "{request_line}");
    for part in ["X-Amz-Signature=", "X-Amz-Credential=AKIAEXAMPLE%2F", "%2Feu-central-1%2Fs3%2Faws4_request"]
    {
        assert!(request_line.contains(part), "{part} in {request_line}");
    }
    fetcher.s3.access_key_id = None;
    let location = fetcher.locate("s3://bucket/in/a").unwrap();
    let Location::Bucket { bucket, key, .. } = location else { panic!("{location:?}") };
    assert_eq!(fetcher.signed_url(&bucket, &key).unwrap().query().unwrap_or_default(), "", "a public bucket");
}

#[tokio::test]
async fn files_are_read_from_a_folder_and_their_bytes_count_until_dropped() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.wav"), [7; 600]).unwrap();
    std::fs::write(folder.path().join("large"), [7; 1_001]).unwrap();
    let url = Url::from_directory_path(folder.path()).unwrap();
    let fetcher = fetcher(&url, false);
    let location = |name: &str| fetcher.locate(url.join(name).unwrap().as_str()).unwrap();
    let fetch = |name: &str| fetcher.fetch(location(name), CLAIM, Arc::new(()));
    let first = fetch("a.wav").await.unwrap();
    let clone = first.clone();
    drop(first);
    let large = fetch("large").await.unwrap_err();
    assert_eq!(
        large,
        Failure::TooLarge("has 1001 bytes; this pool takes at most 1000 (fetch.max_size)".to_owned())
    );
    // A requester may hold half of the 10,000 bytes.
    let mut more = Vec::new();
    for _ in 0..7 {
        more.push(fetch("a.wav").await.unwrap());
    }
    assert_eq!(fetch("a.wav").await, Err(Failure::OverBudget), "4,800 are held");
    let same_task = Claim { task_bytes: 4_800, ..CLAIM };
    let too_large = fetcher.fetch(location("a.wav"), same_task, Arc::new(())).await.unwrap_err();
    assert!(
        matches!(&too_large, Failure::TooLarge(why) if why.ends_with("they may have 5000")),
        "{too_large:?}"
    );
    let other_requester = Claim { owner: Owner { requester: 2, ..OWNER }, ..CLAIM };
    assert!(fetcher.fetch(location("a.wav"), other_requester, Arc::new(())).await.is_ok());
    let isolated = Claim { waits_for_memory: false, ..CLAIM };
    assert!(fetcher.fetch(location("a.wav"), isolated, Arc::new(())).await.is_ok());
    drop((clone, more));
    assert!(fetch("a.wav").await.is_ok());
}

#[tokio::test]
async fn a_fetch_that_nobody_waits_for_closes_its_connection() {
    let (closed_sender, closed) = std::sync::mpsc::sync_channel(2);
    let closed = Arc::new(std::sync::Mutex::new(closed));
    let slow = serve(move |first, stream| {
        if first.contains("/in/body") {
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\nx")?;
        }
        let mut ignored = Vec::new();
        // Returns once the connection is closed.
        stream.read_to_end(&mut ignored)?;
        closed_sender.send(()).map_err(io::Error::other)
    });
    let mut fetcher = fetcher(&slow, true);
    fetcher.limits.timeout = Duration::from_secs(600);
    for path in ["head", "body"] {
        let location = fetcher.locate(slow.join(path).unwrap().as_str()).unwrap();
        let permit = Arc::new(());
        let wait = Duration::from_millis(200);
        let left = timeout(wait, fetcher.fetch(location, CLAIM, permit.clone())).await;
        assert!(left.is_err(), "{path}: the server sends no more");
        assert_eq!(Arc::strong_count(&permit), 1, "{path}: the place is free");
        let closed = closed.clone();
        let seen =
            tokio::task::spawn_blocking(move || closed.lock().unwrap().recv_timeout(Duration::from_secs(60)));
        assert_eq!(seen.await.unwrap(), Ok(()), "{path}");
    }
}

#[tokio::test]
async fn heads_chunks_and_trailers_without_end_are_not_collected() {
    let parts = [
        ("", "X-Header: 0123456789\r\n"),
        ("HTTP/1.1 200 OK\r\nX: ", "0123456789"),
        ("HTTP/1.1 103 Early Hints\r\n\r\n", "HTTP/1.1 103 Early Hints\r\n\r\n"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "0"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "0123456789abcdef"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;", "extension"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", "X-Trailer: 0123456789\r\n"),
    ];
    for (start, repeated) in parts {
        let url = serve(move |_, stream| {
            stream.write_all(if start.is_empty() { b"HTTP/1.1 200 OK\r\n" } else { start.as_bytes() })?;
            loop {
                stream.write_all(repeated.repeat(100).as_bytes())?;
            }
        });
        let mut fetcher = fetcher(&url, true);
        fetcher.limits.timeout = Duration::from_secs(600);
        let location = fetcher.locate(url.join("a").unwrap().as_str()).unwrap();
        let failure = fetcher.fetch(location, CLAIM, Arc::new(())).await.unwrap_err();
        assert!(matches!(failure, Failure::Unavailable(_)), "{repeated}: {failure:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_download_is_slow_if_too_few_bytes_come_in_ten_seconds() {
    let progress = Arc::<web::Progress>::default();
    let slow = tokio::spawn({
        let progress = progress.clone();
        async move {
            let began = Instant::now();
            progress.wait_until_slow(100).await;
            began.elapsed()
        }
    });
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(!slow.is_finished(), "the first byte has not come");
    // After the first byte, the rate is looked at after 10, 20 and 30 seconds.
    for (bytes, pause) in [(1_000, 15), (5_000, 10), (999, 10)] {
        progress.add_body(bytes);
        tokio::time::sleep(Duration::from_secs(pause)).await;
    }
    assert_eq!(slow.await.unwrap(), Duration::from_secs(60));
    assert!(progress.wait_until_slow(0).now_or_never().is_none(), "0 stands for no least rate");
}

#[test]
fn a_server_is_limited_only_where_the_settings_admit_several() {
    let entry = |url: &str| AllowedSource { url: Url::parse(url).unwrap(), private: true };
    let one = [entry("http://one.org/in/"), entry("https://one.org/other/")];
    let more = [entry("https://two.org/"), entry("file:///srv/"), entry("s3://bucket/")];
    assert_eq!((allowed::servers(&one), allowed::servers(&more)), (1, 3));
    let mut fetcher = fetcher(&one[0].url, true);
    let limited = |fetcher: &Fetcher, url: &str| fetcher.limited_server(&fetcher.locate(url).unwrap());
    assert_eq!(limited(&fetcher, "http://one.org/in/a"), None);
    fetcher.allowed = one.into_iter().chain(more).collect();
    fetcher.limits_servers = true;
    let one = limited(&fetcher, "http://one.org/in/a");
    assert_eq!(one, limited(&fetcher, "https://one.org/other/b"));
    let others = ["https://two.org/a", "file:///srv/a", "s3://bucket/a"].map(|url| limited(&fetcher, url));
    assert!(one.is_some() && others.iter().all(|other| other.is_some() && *other != one));
}
