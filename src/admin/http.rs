//! What is served over HTTP: metrics for Prometheus, health for probes. Without a password, hence on
//! the loopback address unless the settings say otherwise. Owns the listening socket.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::devices::Devices;
use super::health::{Check, answer};
use super::metrics;
use crate::launcher::board::{Board, Sheet};
use crate::shutdown::{Phase, Stop};

/// OpenMetrics, as the metrics are written.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Connections at once.
const CONNECTIONS: usize = 64;
/// How long one may last.
const LONGEST: Duration = Duration::from_secs(10);

#[derive(Clone)]
struct Served {
    board: Arc<Board>,
    stop: Stop,
    devices: Devices,
}

/// Serves until it is dropped. Where another process listens already, it says so and serves nothing.
///
/// # Errors
/// The address is none of this host's, or not ours to use.
pub async fn serve(address: SocketAddr, board: Arc<Board>, stop: Stop) -> std::io::Result<()> {
    let listener = match TcpListener::bind(address).await {
        Ok(listener) => listener,
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            tracing::warn!(
                %address,
                "another process listens there: no metrics and no health of this launcher; set admin.listen"
            );
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    // The real one, where the settings say port 0.
    let address = listener.local_addr()?;
    tracing::info!(%address, "serving /metrics, /livez, /readyz and /startupz");
    let served = Served { board, stop, devices: Devices::default() };
    let mut router = Router::new().route("/metrics", get(scrape));
    for check in [Check::Live, Check::Ready, Check::Startup] {
        router = router.route(check.path(), get(move |state| health(check, state)));
    }
    tokio::spawn(accept(listener, router.with_state(served)));
    Ok(())
}

/// Takes connections, one request each: as many at once as there may be, each for as long as it may last.
async fn accept(listener: TcpListener, router: Router) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors, most likely.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).keep_alive(false);
        let connection = http.serve_connection(TokioIo::new(stream), service);
        tokio::spawn(async move {
            let _ = tokio::time::timeout(LONGEST, connection).await;
            drop(place);
        });
    }
}

async fn scrape(State(served): State<Served>) -> impl IntoResponse {
    // The driver is asked only where a slot is on a GPU.
    let is_on_gpu = |sheet: &Sheet| sheet.slots.values().any(|entry| entry.report.device != "cpu");
    let gpus = if served.board.read(is_on_gpu) { served.devices.look().await } else { Default::default() };
    ([(header::CONTENT_TYPE, OPEN_METRICS)], metrics::render(served.board, gpus))
}

async fn health(check: Check, State(served): State<Served>) -> impl IntoResponse {
    let stopping = served.stop.phase() > Phase::Running;
    let (is_so, lines) = served.board.read(|sheet| answer(check, sheet, stopping));
    let status = if is_so { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, lines.join("\n") + "\n")
}
