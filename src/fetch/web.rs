//! Downloads files from servers: connects only to the addresses that were checked, follows no redirects, uses no proxy,
//! and asks for no compression. Credentials are part of the URL or absent. What a server can make the worker hold or read
//! is bounded: heads and trailers by [`HEAD_BYTES`], all that is no part of the file by [`OTHER_BYTES`], and the file by
//! the caller. Measures the rate of a download, which its caller ends if it is slow or late. Dropping a download closes
//! its connection.

use std::error::Error as StdError;
use std::future::{pending, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use url::Url;

use super::Failure;
use crate::config::is_public;

/// The most bytes that the head of a response may have.
const HEAD_BYTES: usize = 64 << 10;
/// The most bytes that a server may send beyond eight for each byte of the file: its heads, chunk sizes and trailers, and
/// what was not read yet.
const OTHER_BYTES: u64 = 256 << 10;
/// The time over which the rate of a download is measured.
pub(super) const RATE_WINDOW: Duration = Duration::from_secs(10);

/// The TLS settings of all downloads. Servers are verified with the certificates of the system, as for the broker.
///
/// # Errors
/// The system's store cannot be read.
pub(super) fn tls() -> Result<Arc<rustls::ClientConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(Arc::new(builder.with_platform_verifier()?.with_no_client_auth()))
}

/// Resolves the URL's host to its addresses.
///
/// # Errors
/// The host is not found, or has a private address and `allows_private`, which permits these, is false.
pub(super) async fn resolve(url: &Url, allows_private: bool) -> Result<Vec<SocketAddr>, Failure> {
    let port = url.port_or_known_default().unwrap_or_default();
    let lookup = tokio::net::lookup_host((host(url), port)).await;
    let not_found =
        |error| Failure::Unavailable(format!("cannot be fetched: its host is not found: {error}"));
    let addresses: Vec<SocketAddr> = lookup.map_err(not_found)?.collect();
    match addresses.iter().find(|address| !allows_private && !is_public(address.ip())) {
        Some(address) => {
            let reason = format!(
                "is not fetched: its host has the private address {}, which its entry in allowed_sources does not admit",
                address.ip()
            );
            Err(Failure::Refused(reason))
        }
        None => Ok(addresses),
    }
}

/// The URL's host name or address, without the brackets of IPv6.
fn host(url: &Url) -> &str {
    url.host_str().unwrap_or_default().trim_matches(['[', ']'])
}

/// A connection to a server. Dropping it closes the connection.
pub(super) struct Server {
    sender: SendRequest<String>,
    /// The task that reads and writes the connection.
    connection: JoinSet<hyper::Result<()>>,
    progress: Arc<Progress>,
}

/// Connects to the server of the URL at one of its addresses.
///
/// # Errors
/// No address accepts a connection, or the server is not trusted.
pub(super) async fn connect(
    url: &Url,
    addresses: &[SocketAddr],
    tls: Arc<rustls::ClientConfig>,
) -> Result<Server, Failure> {
    let tcp = TcpStream::connect(addresses).await.map_err(|_| {
        Failure::Unavailable("cannot be fetched: its server does not accept a connection".to_owned())
    })?;
    if url.scheme() != "https" {
        return start(tcp).await;
    }
    let name = ServerName::try_from(host(url).to_owned())
        .map_err(|error| Failure::Refused(format!("cannot be fetched by TLS: {error}")))?;
    match TlsConnector::from(tls).connect(name, tcp).await {
        Ok(stream) => start(stream).await,
        Err(error) => Err(match tls_error(&error) {
            Some(error @ rustls::Error::InvalidCertificate(_)) => {
                Failure::Refused(format!("cannot be fetched, because its server is not trusted: {error}"))
            }
            _ => Failure::Unavailable(format!("cannot be fetched by TLS: {error}")),
        }),
    }
}

async fn start(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Result<Server, Failure> {
    let progress = Arc::<Progress>::default();
    let stream = Metered { stream, progress: progress.clone() };
    let mut builder = http1::Builder::new();
    builder.max_buf_size(HEAD_BYTES).max_headers(1_000).allow_obsolete_multiline_headers_in_responses(true);
    let (sender, connecting) = builder.handshake(TokioIo::new(stream)).await.map_err(no_answer)?;
    let mut connection = JoinSet::new();
    connection.spawn(connecting);
    Ok(Server { sender, connection, progress })
}

impl Server {
    /// What the server has sent so far.
    pub(super) fn progress(&self) -> Arc<Progress> {
        self.progress.clone()
    }

    /// Requests the file, and waits for the head of the response.
    ///
    /// # Errors
    /// The server does not answer, does not have the file, or sends it compressed.
    pub(super) async fn request(mut self, url: &Url) -> Result<Download, Failure> {
        let refused = |error| Failure::Refused(format!("cannot be requested: {error}"));
        let authority = &url[url::Position::BeforeHost..url::Position::AfterPort];
        let target = &url[url::Position::BeforePath..url::Position::AfterQuery];
        let request = Request::get(target)
            .header(header::HOST, authority)
            .header(header::USER_AGENT, concat!("sconce/", env!("CARGO_PKG_VERSION")))
            .header(header::ACCEPT, "*/*")
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::CONNECTION, "close")
            .body(String::new())
            .map_err(refused)?;
        let response = self.sender.send_request(request).await.map_err(no_answer)?;
        if response.status() != StatusCode::OK {
            return Err(status_failure(response.status()));
        }
        let of_transfer = encodings(&response, header::TRANSFER_ENCODING);
        let mut all = encodings(&response, header::CONTENT_ENCODING).chain(of_transfer);
        let other = all.find(|it| !PLAIN.contains(&&**it));
        drop(all);
        if let Some(encoding) = other {
            let encoding: String = encoding.chars().take(40).collect();
            let reason = format!("is not taken: its server sends it in the encoding {encoding:?}");
            return Err(Failure::Refused(reason));
        }
        Ok(Download { response, progress: self.progress, _connection: self.connection })
    }
}

/// A file that is being downloaded.
pub(super) struct Download {
    response: Response<Incoming>,
    progress: Arc<Progress>,
    _connection: JoinSet<hyper::Result<()>>,
}

impl Download {
    /// The file's size in bytes, if the server declares it.
    pub(super) fn size(&self) -> Option<u64> {
        self.response.body().size_hint().exact()
    }

    /// Waits for the next bytes of the file. Returns none after the last.
    ///
    /// # Errors
    /// The connection ends before the file does.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        let body = self.response.body_mut();
        loop {
            match poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
                // A frame without data has trailers.
                Some(Ok(frame)) => {
                    if let Ok(bytes) = frame.into_data() {
                        self.progress.add_body(bytes.len());
                        return Ok(Some(bytes));
                    }
                }
                Some(Err(error)) => {
                    let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
                    return Err(Failure::Unavailable(format!("is not read to its end: {error}{cause}")));
                }
                None => return Ok(None),
            }
        }
    }
}

/// Counts what a server sends. Written by the connection and the download, read by whoever waits for the file.
#[derive(Default)]
pub(super) struct Progress {
    /// All bytes.
    received: AtomicU64,
    /// The bytes of the file.
    body: AtomicU64,
    /// Notified with each byte that comes; only the first is waited for.
    began: Notify,
}

impl Progress {
    /// Counts bytes of the file.
    pub(super) fn add_body(&self, bytes: usize) {
        self.body.fetch_add(bytes as u64, Relaxed);
        self.began.notify_one();
    }

    /// Counts bytes that have come.
    ///
    /// # Errors
    /// The server sends too much that is no part of the file.
    fn add(&self, bytes: usize) -> io::Result<()> {
        let received = self.received.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        self.began.notify_one();
        if received > OTHER_BYTES + self.body.load(Relaxed).saturating_mul(8) {
            return Err(io::Error::other("the server sends too much that is no part of the file"));
        }
        Ok(())
    }

    /// Returns once fewer than `min_rate` bytes a second of the file have come over [`RATE_WINDOW`], after the first byte
    /// of the response.
    pub(super) async fn wait_until_slow(&self, min_rate: u64) {
        if min_rate == 0 {
            return pending().await;
        }
        self.began.notified().await;
        let mut before = 0;
        loop {
            tokio::time::sleep(RATE_WINDOW).await;
            let received = self.body.load(Relaxed);
            if received - before < min_rate.saturating_mul(RATE_WINDOW.as_secs()) {
                return;
            }
            before = received;
        }
    }
}

/// A stream whose received bytes are counted.
struct Metered<S> {
    stream: S,
    progress: Arc<Progress>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        Poll::Ready(self.progress.add(buffer.filled().len() - before))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The encodings that leave a file as it is. `aws-chunked` is one of uploads, which some stores keep.
const PLAIN: [&str; 7] = ["", "identity", "none", "utf-8", "binary", "aws-chunked", "chunked"];

/// The encodings that a header of the response names, in lower case.
fn encodings(response: &Response<Incoming>, name: header::HeaderName) -> impl Iterator<Item = String> {
    let values = response.headers().get_all(name);
    let values = values.iter().flat_map(|value| value.to_str().unwrap_or("?").split(','));
    values.map(|encoding| encoding.trim().to_ascii_lowercase())
}

/// The failure of a server that sends no response. The error's text does not show the URL, which may be signed.
fn no_answer(error: hyper::Error) -> Failure {
    let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
    Failure::Unavailable(format!("cannot be fetched: its server has not answered: {error}{cause}"))
}

/// The TLS error that caused this error; none if another kind of error did.
fn tls_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a rustls::Error> {
    let io = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    let direct = error.downcast_ref().or_else(|| io?.downcast_ref());
    direct.or_else(|| tls_error(error.source()?))
}

fn status_failure(status: StatusCode) -> Failure {
    let status = status.as_u16();
    let reason = format!("cannot be fetched: its server answers with the status {status}");
    match status {
        300..=399 => Failure::Refused(format!("{reason}; redirects are not followed")),
        408 | 429 | 500.. => Failure::Unavailable(reason),
        _ => Failure::Refused(reason),
    }
}
