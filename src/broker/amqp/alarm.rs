//! Watches for alarms: a broker short of memory or disk stops reading from connections that publish, and
//! notifies them. Messages sent during the alarm are read only after it, so queues are not judged slow
//! meanwhile.

use futures_util::StreamExt;
use lapin::Connection;
use tokio::sync::watch;

/// True while the broker takes no messages from this connection; updated as long as the connection lasts.
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
        // The connection is closed: no notice of the alarm's end can come.
        sender.send_replace(false);
    });
    blocked
}
