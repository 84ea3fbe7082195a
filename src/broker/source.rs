//! The two queues that a pool may consume: the source of a delivery, a pair of values for them, and the acker of both.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use super::{Acker, DeliveryTag};

/// The queue that a message was delivered from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The pool's task queue.
    Main,
    /// The pool's background queue.
    Background,
}

/// One value for the task queue and one for the background queue.
#[derive(Clone, Debug, Default)]
pub struct PerSource<T> {
    /// For the task queue.
    pub main: T,
    /// For the background queue.
    pub background: T,
}

impl<T> PerSource<T> {
    /// Both values.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        [&self.main, &self.background].into_iter()
    }

    /// Both values, mutably.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        [&mut self.main, &mut self.background].into_iter()
    }
}

impl<T> Index<Source> for PerSource<T> {
    type Output = T;

    fn index(&self, source: Source) -> &T {
        match source {
            Source::Main => &self.main,
            Source::Background => &self.background,
        }
    }
}

impl<T> IndexMut<Source> for PerSource<T> {
    fn index_mut(&mut self, source: Source) -> &mut T {
        match source {
            Source::Main => &mut self.main,
            Source::Background => &mut self.background,
        }
    }
}

/// Settles the deliveries of two consumers, each with its own acker. `is_connected` and `trouble` report on the task
/// queue's session.
impl Acker for PerSource<Arc<dyn Acker>> {
    fn ack(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self[delivery_tag.source].ack(delivery_tag)
    }

    fn requeue(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self[delivery_tag.source].requeue(delivery_tag)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_session_ends_its_own_and_earlier_deliveries_of_its_source() {
        let tag = |source, session| DeliveryTag { source, session, tag: 1 };
        assert!(tag(Source::Background, 2).is_over_with(Source::Background, 2));
        assert!(tag(Source::Background, 1).is_over_with(Source::Background, 2));
        assert!(!tag(Source::Background, 3).is_over_with(Source::Background, 2));
        assert!(!tag(Source::Main, 1).is_over_with(Source::Background, 2));
        assert!(tag(Source::Main, 9) < tag(Source::Background, 1), "deliveries of the task queue sort first");
    }
}
