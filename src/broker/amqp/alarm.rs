//! Alarms: a broker short of memory or disk reads nothing from who publishes, and says so. Waits for
//! it are not cut short, and those that follow begin anew: what was sent into the alarm is read only
//! after it.

use std::future::{Future, pending};
use std::time::Duration;

use futures_util::StreamExt;
use lapin::Connection;
use tokio::sync::watch;

/// Whether the broker takes no messages from this connection for now; tells for as long as it stands.
pub fn watch_alarms(connection: &Connection) -> watch::Receiver<bool> {
    let (sender, blocked) = watch::channel(false);
    let events = connection.events_listener();
    tokio::spawn(async move {
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            match event {
                lapin::Event::ConnectionBlocked(reason) => {
                    tracing::warn!(reason = reason.as_str(), "the broker takes no messages for now");
                    sender.send_replace(true);
                }
                lapin::Event::ConnectionUnblocked => {
                    tracing::info!("the broker takes messages again");
                    sender.send_replace(false);
                }
                _ => {}
            }
        }
        // The connection is gone, and with it who would have told of the end.
        sender.send_replace(false);
    });
    blocked
}

/// `work`, or nothing when it takes longer than `limit` while the broker takes messages: an alarm
/// stops this clock, and its end sets it back.
pub async fn unless_stuck<T>(
    work: impl Future<Output = T>,
    limit: Duration,
    mut blocked: watch::Receiver<bool>,
) -> Option<T> {
    let mut work = std::pin::pin!(work);
    loop {
        let waits = *blocked.borrow_and_update();
        let patience = async {
            match waits {
                true => pending().await,
                false => tokio::time::sleep(limit).await,
            }
        };
        tokio::select! {
            biased;
            done = &mut work => return Some(done),
            Ok(()) = blocked.changed() => {}
            () = patience => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);
    const MOMENT: Duration = Duration::from_millis(1);

    /// What becomes of work that takes `work`, where the broker takes nothing from `alarm.0` to `alarm.1`.
    async fn outcome(work: Duration, alarm: (Duration, Duration)) -> Option<()> {
        let (sender, blocked) = watch::channel(false);
        let alarm = async move {
            tokio::time::sleep(alarm.0).await;
            sender.send_replace(true);
            tokio::time::sleep(alarm.1 - alarm.0).await;
            sender.send_replace(false);
            pending::<()>().await;
        };
        tokio::select! {
            done = unless_stuck(tokio::time::sleep(work), LIMIT, blocked) => done,
            () = alarm => None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn without_an_alarm_the_limit_is_the_limit() {
        let never = (LIMIT * 100, LIMIT * 101);
        assert_eq!(outcome(LIMIT - MOMENT, never).await, Some(()));
        assert_eq!(outcome(LIMIT + MOMENT, never).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_alarm_of_any_length_is_waited_for_and_after_it_the_limit_counts_anew() {
        for lasts in [MOMENT, LIMIT - MOMENT * 5, LIMIT, LIMIT * 10 - MOMENT * 7] {
            let alarm = (MOMENT * 3, MOMENT * 3 + lasts);
            assert_eq!(outcome(alarm.1 + LIMIT - MOMENT, alarm).await, Some(()), "alarm of {lasts:?}");
            assert_eq!(outcome(alarm.1 + LIMIT + MOMENT, alarm).await, None, "alarm of {lasts:?}");
        }
    }
}
