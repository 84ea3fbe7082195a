//! The queues that a pool consumes: the source of a delivery, a value for each queue, and the acker of all.

use std::ops::{Index, IndexMut};
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

/// One value for each of the pool's queues, at least one.
#[derive(Clone, Debug, Default)]
pub struct PerSource<T>(Vec<T>);

impl<T> PerSource<T> {
    /// All values, in the order of the queues.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter()
    }

    /// All values, mutably.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut()
    }

    /// The number of queues.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl<T> FromIterator<T> for PerSource<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl<T> Index<Source> for PerSource<T> {
    type Output = T;

    fn index(&self, source: Source) -> &T {
        &self.0[source.0]
    }
}

impl<T> IndexMut<Source> for PerSource<T> {
    fn index_mut(&mut self, source: Source) -> &mut T {
        &mut self.0[source.0]
    }
}

/// Settles the deliveries of several consumers, each with its own acker. `is_connected` and `trouble` report on the first
/// queue's session.
impl Acker for PerSource<Arc<dyn Acker>> {
    fn ack(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self[delivery_tag.source].ack(delivery_tag)
    }

    fn requeue(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self[delivery_tag.source].requeue(delivery_tag)
    }

    fn flush(&self) -> BoxFuture<'_, ()> {
        join_all(self.iter().map(|acker| acker.flush())).map(|_| ()).boxed()
    }

    fn is_connected(&self) -> bool {
        self[Source::FIRST].is_connected()
    }

    fn trouble(&self) -> Option<String> {
        self[Source::FIRST].trouble()
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
