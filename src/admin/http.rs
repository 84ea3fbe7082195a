//! Serves metrics for Prometheus and health for probes over HTTP. There is no password, so the default address is
//! loopback. Every connection is accepted at once, so that a probe never waits for other clients; beyond the limit, a
//! connection that has not sent its request yet is closed. Owns the listening socket and the connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::devices::Devices;
use super::health::{Check, LAUNCHER_HEADER, evaluate};
use super::metrics;
use crate::launcher::status_board::{SlotStatus, StatusBoard};
use crate::shutdown::{Phase, Stop};

/// The content type of the metrics for clients that accept OpenMetrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The content type of the metrics for all other clients.
const PLAIN_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The maximum number of open connections. It limits both the sockets and the requests that are being answered.
const MAX_CONNECTIONS: usize = 64;

/// How long a connection may last, counted from its acceptance.
#[derive(Clone, Copy)]
struct Limits {
    /// The time until the whole request head has arrived.
    head: Duration,
    /// The time until the response has been sent.
    total: Duration,
}

/// A probe sends its head in one packet; 2 s leave time for a lost packet.
const LIMITS: Limits = Limits { head: Duration::from_secs(2), total: Duration::from_secs(10) };

/// The time between two attempts to listen on an address that is in use.
const BIND_RETRY_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Clone)]
struct ServerState {
    launcher: Arc<str>,
    board: Arc<StatusBoard>,
    stop: Stop,
    devices: Devices,
}

/// Starts a server that runs until the runtime ends. While another process listens on the address, the server tries
/// again to listen.
///
/// # Errors
/// The address is not of this host, or may not be used by this process.
pub async fn serve(
    address: SocketAddr,
    launcher: &str,
    board: Arc<StatusBoard>,
    stop: Stop,
) -> std::io::Result<()> {
    let router = router(launcher, board, stop);
    match TcpListener::bind(address).await {
        Ok(listener) => start_accepting(listener, router),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            tracing::warn!(
                %address,
                "another process listens there: this launcher serves no metrics and no health until the address is free; \
                 set admin.listen to another address"
            );
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(BIND_RETRY_INTERVAL).await;
                    if let Ok(listener) = TcpListener::bind(address).await {
                        return start_accepting(listener, router);
                    }
                }
            });
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

fn start_accepting(listener: TcpListener, router: Router) {
    // The settings may say port 0, so the actual address is logged.
    if let Ok(address) = listener.local_addr() {
        tracing::info!(%address, "serving /metrics, /livez, /readyz and /startupz");
    }
    tokio::spawn(accept(listener, router, LIMITS));
}

fn router(launcher: &str, board: Arc<StatusBoard>, stop: Stop) -> Router {
    let state = ServerState { launcher: launcher.into(), board, stop, devices: Devices::default() };
    let mut router = Router::new().route("/metrics", get(scrape));
    for check in [Check::Live, Check::Ready, Check::Startup] {
        router = router.route(check.path(), get(move |state| health(check, state)));
    }
    router.with_state(state)
}

/// Accepts each connection at once. If there are too many, closes the oldest one that has not sent its whole
/// request head, or the oldest of all if every one has sent it.
async fn accept(listener: TcpListener, router: Router, limits: Limits) {
    // In order of acceptance.
    let mut open: Vec<Connection> = Vec::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Most likely out of file descriptors.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        open.retain(|connection| !connection.task.is_finished());
        if open.len() == MAX_CONNECTIONS {
            let idle = open.iter().position(|connection| !connection.head_arrived.load(Ordering::Relaxed));
            open.remove(idle.unwrap_or(0)).close().await;
        }
        open.push(Connection::start(stream, router.clone(), limits));
    }
}

/// An open connection, for one request and one answer. Owned by [`accept`].
struct Connection {
    /// Whether the whole request head has arrived. Set by the connection's task, read by [`accept`].
    head_arrived: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Connection {
    fn start(stream: TcpStream, router: Router, limits: Limits) -> Self {
        let head_arrived = Arc::new(AtomicBool::new(false));
        let (arrived, routes) = (Arc::clone(&head_arrived), TowerToHyperService::new(router));
        // hyper calls the service once it has read the whole head.
        let service = service_fn(move |request: Request<Incoming>| {
            arrived.store(true, Ordering::Relaxed);
            routes.call(request)
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(limits.head).keep_alive(false);
        let connection = http.serve_connection(TokioIo::new(stream), service);
        let task = tokio::spawn(async move {
            let _ = tokio::time::timeout(limits.total, connection).await;
        });
        Self { head_arrived, task }
    }

    /// Closes the connection. Its socket is closed when this returns, so that the limit on open sockets holds.
    async fn close(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// The metrics, in the format that the client reads: Prometheus asks for OpenMetrics, `promtool` reads plain text.
async fn scrape(State(state): State<ServerState>, headers: HeaderMap) -> impl IntoResponse {
    // The driver is queried only if a slot is on a GPU.
    let is_on_gpu = |status: &SlotStatus| status.slots.values().any(|entry| entry.report.device != "cpu");
    let gpus = if state.board.read(is_on_gpu) { state.devices.query().await } else { Default::default() };
    state.board.mark_read();
    let page = metrics::render(&state.launcher, state.board, gpus);
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if accepts.contains("application/openmetrics-text") {
        ([(header::CONTENT_TYPE, OPEN_METRICS)], page)
    } else {
        ([(header::CONTENT_TYPE, PLAIN_TEXT)], metrics::plain(&page))
    }
}

async fn health(check: Check, State(state): State<ServerState>) -> impl IntoResponse {
    let stopping = state.stop.phase() > Phase::Running;
    let (passes, lines) = state.board.read(|status| evaluate(check, status, stopping));
    let status = if passes { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, [(LAUNCHER_HEADER, state.launcher.to_string())], lines.join("\n") + "\n")
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use futures_util::future::join_all;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::Semaphore;
    use tokio::time::timeout;

    use super::*;

    const PROBE: &str = "GET /livez HTTP/1.1\r\nhost: x\r\n\r\n";
    const SLOW: &str = "GET /slow HTTP/1.1\r\nhost: x\r\n\r\n";
    /// Longer than any step of a test takes, even on a busy machine.
    const TEST_TIMEOUT: Duration = Duration::from_secs(40);
    /// Longer than any test, so that no connection is closed for its age.
    const NEVER: Limits = Limits { head: Duration::from_secs(3_600), total: Duration::from_secs(3_600) };

    /// Starts a server with these limits; returns its address.
    async fn start_server(router: Router, limits: Limits) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(accept(listener, router, limits));
        address
    }

    /// The routes of a launcher without slots.
    fn router_without_slots() -> Router {
        router("here", Arc::new(StatusBoard::default()), Stop::default())
    }

    /// Routes `/livez` and `/slow`. `/slow` adds a permit to `requested` for each request, and answers once `go` has
    /// permits.
    fn slow_router(requested: &Arc<Semaphore>, go: &Arc<Semaphore>) -> Router {
        let (requested, go) = (Arc::clone(requested), Arc::clone(go));
        let answer = move || async move {
            requested.add_permits(1);
            let _ = go.acquire().await;
            "slow"
        };
        Router::new().route("/slow", get(answer)).route("/livez", get(|| async { "lives" }))
    }

    /// Opens a connection and sends `sent`.
    async fn connect_and_send(address: SocketAddr, sent: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        stream
    }

    /// Reads what the server sends until it closes the connection.
    async fn answer(mut stream: TcpStream) -> String {
        let mut text = Vec::new();
        // The server resets a connection that it has not read completely; that counts as closed too.
        let _ = timeout(TEST_TIMEOUT, stream.read_to_end(&mut text)).await.expect("the server closes it");
        String::from_utf8(text).unwrap()
    }

    async fn probe(address: SocketAddr) {
        let answer = answer(connect_and_send(address, PROBE).await).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    /// How long the server keeps a connection open on which `sent` is sent once, and then `more` ten times a second.
    async fn time_until_closed(address: SocketAddr, sent: &str, more: &str) -> Duration {
        let begun = Instant::now();
        let mut stream = connect_and_send(address, sent).await;
        while timeout(Duration::from_millis(100), stream.read(&mut [0])).await.is_err() {
            assert!(begun.elapsed() < TEST_TIMEOUT, "the server does not close it");
            // If the connection is closed meanwhile, the next read shows that.
            let _ = stream.write_all(more.as_bytes()).await;
        }
        begun.elapsed()
    }

    #[tokio::test]
    async fn a_probe_is_answered_although_idle_clients_hold_all_connections() {
        let address = start_server(router_without_slots(), NEVER).await;
        let mut idle_clients = Vec::new();
        for number in 0..200 {
            // Every other one sends a part of a head.
            let (sent, left) = PROBE.split_at(if number % 2 == 0 { 0 } else { 25 });
            idle_clients.push((connect_and_send(address, sent).await, left));
        }
        probe(address).await;
        // With the probe there were 201 connections; all but the youngest `MAX_CONNECTIONS` were closed.
        let youngest = idle_clients.split_off(200 + 1 - MAX_CONNECTIONS);
        for (stream, _) in idle_clients {
            assert_eq!(answer(stream).await, "");
        }
        for (mut stream, left) in youngest {
            stream.write_all(left.as_bytes()).await.unwrap();
            let answer = answer(stream).await;
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
    }

    #[tokio::test]
    async fn a_request_being_answered_is_closed_only_if_no_connection_is_idle() {
        for idle in [1, 0] {
            let (requested, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
            let address = start_server(slow_router(&requested, &go), NEVER).await;
            let mut streams = Vec::new();
            for _ in idle..MAX_CONNECTIONS {
                streams.push(connect_and_send(address, SLOW).await);
            }
            let all = requested.acquire_many((MAX_CONNECTIONS - idle) as u32);
            drop(timeout(TEST_TIMEOUT, all).await.expect("all have asked").unwrap());
            let closed = if idle == 1 { connect_and_send(address, "").await } else { streams.remove(0) };
            probe(address).await;
            assert_eq!(answer(closed).await, "", "with {idle} idle");
            go.add_permits(MAX_CONNECTIONS);
            for stream in streams {
                let answer = answer(stream).await;
                assert!(answer.ends_with("slow"), "with {idle} idle: {answer}");
            }
        }
    }

    #[tokio::test]
    async fn a_client_that_sends_no_whole_head_in_time_is_disconnected() {
        let address = start_server(router_without_slots(), LIMITS).await;
        let clients = [("", ""), ("GET /livez HTTP/1.1\r\nhost", ""), ("GET /livez HTTP/1.1\r\nx: ", "x")];
        let lasted = join_all(clients.map(|(sent, more)| time_until_closed(address, sent, more))).await;
        for (lasted, client) in lasted.iter().zip(clients) {
            assert!((LIMITS.head..LIMITS.total).contains(lasted), "{client:?}: {lasted:?}");
        }
    }

    #[tokio::test]
    async fn a_connection_is_closed_at_its_time_limit_without_a_response() {
        let (requested, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let limits = Limits { total: Duration::from_millis(200), ..NEVER };
        let address = start_server(slow_router(&requested, &go), limits).await;
        assert_eq!(answer(connect_and_send(address, SLOW).await).await, "");
        assert_eq!(requested.available_permits(), 1);
    }
}
