//! Bounded waits: a condition is asked for again and again until it holds or the time is over.

use std::future::Future;
use std::time::{Duration, Instant};

/// Long enough for anything that happens at all, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(40);

const PAUSE: Duration = Duration::from_millis(25);

/// Waits until `probe` gives a value; panics with `what` after [`PATIENCE`].
pub async fn until<T, F>(what: &str, probe: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    until_within(PATIENCE, what, probe).await
}

/// As [`until`], with a limit of its own.
pub async fn until_within<T, F>(limit: Duration, what: &str, mut probe: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let begun = Instant::now();
    loop {
        if let Some(value) = probe().await {
            return value;
        }
        assert!(begun.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(PAUSE).await;
    }
}

/// The value of `work`; panics with `what` after [`PATIENCE`].
pub async fn bounded<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(value) => value,
        Err(_) => panic!("not within {PATIENCE:?}: {what}"),
    }
}
