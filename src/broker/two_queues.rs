//! Settles the deliveries of two consumers, each by its own acker. Decides nothing else, owns nothing else.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use super::{Acker, DeliveryTag};

/// The ackers of a task queue and of its background queue.
pub struct TwoQueues {
    /// Of the task queue.
    pub main: Arc<dyn Acker>,
    /// Of the background queue.
    pub background: Arc<dyn Acker>,
}

impl TwoQueues {
    fn of(&self, delivery_tag: DeliveryTag) -> &dyn Acker {
        if delivery_tag.is_background() { &*self.background } else { &*self.main }
    }
}

impl Acker for TwoQueues {
    fn ack(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self.of(delivery_tag).ack(delivery_tag)
    }

    fn requeue(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self.of(delivery_tag).requeue(delivery_tag)
    }

    fn flush(&self) -> BoxFuture<'_, ()> {
        futures_util::future::join(self.main.flush(), self.background.flush()).map(|_| ()).boxed()
    }

    fn is_connected(&self) -> bool {
        self.main.is_connected()
    }

    fn trouble(&self) -> Option<String> {
        self.main.trouble()
    }
}
