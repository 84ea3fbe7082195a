//! The queues that a pool consumes: the source of a delivery, and the acker of all.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};

use super::{Acker, DeliveryTag};

/// The queue that a message was delivered from: its index among the pool's queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source(pub usize);

impl Source {
    /// The pool's first queue, or the only queue of a consumer.
    pub const FIRST: Self = Self(0);
}

/// Settles the deliveries of a pool's queues, each with its own acker. `is_connected` and `trouble` report on the first
/// queue's session.
impl Acker for Vec<Arc<dyn Acker>> {
    fn ack(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self[delivery_tag.source.0].ack(delivery_tag)
    }

    fn requeue(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self[delivery_tag.source.0].requeue(delivery_tag)
    }

    fn flush(&self) -> BoxFuture<'_, ()> {
        join_all(self.iter().map(|acker| acker.flush())).map(|_| ()).boxed()
    }

    fn is_connected(&self) -> bool {
        self[Source::FIRST.0].is_connected()
    }

    fn trouble(&self) -> Option<String> {
        self[Source::FIRST.0].trouble()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_session_ends_its_own_and_earlier_deliveries_of_its_source() {
        let tag = |source, session| DeliveryTag { source: Source(source), session, tag: 1 };
        assert!(tag(1, 2).is_over_with(Source(1), 2));
        assert!(tag(1, 1).is_over_with(Source(1), 2));
        assert!(!tag(1, 3).is_over_with(Source(1), 2));
        assert!(!tag(0, 1).is_over_with(Source(1), 2));
        assert!(tag(0, 9) < tag(1, 1), "deliveries of the first queue sort first");
    }
}
