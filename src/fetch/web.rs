//! Opens files on servers: connects only to the addresses that were checked, follows no redirects, uses no proxy, and
//! ends at a deadline. Credentials are part of the URL or absent. Requests files without compression. If a server sends
//! gzip nevertheless, `ureq` decompresses it, because `hf-hub` enables that feature of the shared crate.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio::time::{Instant, timeout_at};
use ureq::{AgentBuilder, Error, ErrorKind};
use url::Url;

use super::address::is_public;
use super::{Failure, Source};

/// The TLS settings of all fetches. Servers are verified with the certificates of the system, as for the broker.
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
/// The host is not found before `deadline`, or has a private address and `private`, which permits these, is false.
pub(super) async fn resolve(url: &Url, private: bool, deadline: Instant) -> Result<Vec<SocketAddr>, Failure> {
    let host = url.host_str().unwrap_or_default();
    let port = url.port_or_known_default().unwrap_or_default();
    let lookup = timeout_at(deadline, tokio::net::lookup_host((host.trim_matches(['[', ']']), port))).await;
    let addresses: Vec<SocketAddr> = match lookup {
        Ok(Ok(addresses)) => addresses.collect(),
        Ok(Err(error)) => {
            return Err(Failure::Unavailable(format!("cannot be fetched: its host is not found: {error}")));
        }
        Err(_) => {
            return Err(Failure::Unavailable("cannot be fetched: its host is not found in time".to_owned()));
        }
    };
    match addresses.iter().find(|address| !private && !is_public(address.ip())) {
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

/// Requests the file. Blocks the thread until the headers of the response have arrived.
///
/// # Errors
/// The server does not have the file, is not trusted, sends it compressed, or cannot be reached before `deadline`.
pub(super) fn open(
    url: &Url,
    addresses: Vec<SocketAddr>,
    tls: Arc<rustls::ClientConfig>,
    deadline: Instant,
) -> Result<Source, Failure> {
    let time_left = deadline.saturating_duration_since(Instant::now());
    let agent = AgentBuilder::new()
        .resolver(move |_: &str| Ok(addresses.clone()))
        .tls_config(tls)
        .redirects(0)
        .try_proxy_from_env(false)
        .timeout_connect(time_left)
        .timeout(time_left)
        .user_agent(concat!("sconce/", env!("CARGO_PKG_VERSION")))
        .build();
    let response = match agent.request_url("GET", url).set("Accept-Encoding", "identity").call() {
        Ok(response) if response.status() == 200 => response,
        Ok(response) | Err(Error::Status(_, response)) => return Err(status_failure(response.status())),
        // The error's own text would show the URL, which may be signed.
        Err(Error::Transport(error)) => {
            return Err(match (error.kind(), tls_error(&error)) {
                (_, Some(error @ rustls::Error::InvalidCertificate(_))) => {
                    Failure::Refused(format!("cannot be fetched, because its server is not trusted: {error}"))
                }
                (_, Some(error)) => Failure::Unavailable(format!("cannot be fetched by TLS: {error}")),
                (ErrorKind::ConnectionFailed, None) => Failure::Unavailable(
                    "cannot be fetched: its server does not accept a connection".to_owned(),
                ),
                _ if Instant::now() >= deadline => {
                    Failure::Unavailable("cannot be fetched: its server has not answered in time".to_owned())
                }
                (kind, None) => {
                    Failure::Unavailable(format!("cannot be fetched: its server has not answered: {kind}"))
                }
            });
        }
    };
    if let Some(encoding) =
        response.header("content-encoding").filter(|it| !it.eq_ignore_ascii_case("identity"))
    {
        let reason =
            format!("is not taken: its server sends it in the content-encoding {:?}", shortened(encoding));
        return Err(Failure::Refused(reason));
    }
    let size = response.header("content-length").and_then(|size| size.parse().ok());
    Ok(Source { content: response.into_reader(), size })
}

/// The TLS error that caused this error; none if another kind of error did.
fn tls_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a rustls::Error> {
    let io = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    let direct = error.downcast_ref().or_else(|| io?.downcast_ref());
    direct.or_else(|| tls_error(error.source()?))
}

fn status_failure(status: u16) -> Failure {
    let reason = format!("cannot be fetched: its server answers with the status {status}");
    match status {
        300..=399 => Failure::Refused(format!("{reason}; redirects are not followed")),
        408 | 429 | 500.. => Failure::Unavailable(reason),
        _ => Failure::Refused(reason),
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}
