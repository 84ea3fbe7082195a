//! Alarms: a broker short of memory or disk reads nothing from who publishes, and says so. What is sent
//! into the alarm is read only after it, so nothing is held against queues that confirm nothing then.

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
