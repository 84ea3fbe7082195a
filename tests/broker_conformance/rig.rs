//! What a broker has to offer to be put through the cases, and the list of the cases.

use std::sync::Arc;
use std::time::Duration;

use sconce::broker::{Acker, Consumer, ConsumerEvent, Delivery, Publisher};
use sconce::protocol::Message;

use crate::wait::{bounded, until};

/// The ceiling of delays that a rig's queues know.
pub const CEILING: Duration = Duration::from_millis(1000);

/// How long "nothing comes" is watched.
const SILENCE: Duration = Duration::from_millis(200);

/// After so long without a delivery, all that were under way have come: longer than a busy disk holds up
/// a broker.
const STILLNESS: Duration = Duration::from_secs(2);

/// One worker's connection to a broker.
pub struct Link {
    pub consumer: Box<dyn Consumer>,
    pub acker: Arc<dyn Acker>,
    pub publisher: Arc<dyn Publisher>,
}

impl Link {
    /// The next delivery; panics on anything else.
    pub async fn take(&mut self) -> Delivery {
        match bounded("a delivery", self.consumer.next()).await {
            Ok(ConsumerEvent::Delivery(delivery)) => *delivery,
            other => panic!("no delivery but {other:?}"),
        }
    }

    /// The next `count` deliveries.
    pub async fn take_many(&mut self, count: usize) -> Vec<Delivery> {
        let mut taken = Vec::new();
        for _ in 0..count {
            taken.push(self.take().await);
        }
        taken
    }

    /// Deliveries until none has come for a while.
    pub async fn take_all(&mut self) -> Vec<Delivery> {
        let mut taken = Vec::new();
        while let Ok(event) = tokio::time::timeout(STILLNESS, self.consumer.next()).await {
            match event {
                Ok(ConsumerEvent::Delivery(delivery)) => taken.push(*delivery),
                other => panic!("no delivery but {other:?}"),
            }
        }
        taken
    }

    /// Panics when an event comes.
    pub async fn takes_nothing(&mut self) {
        if let Ok(event) = tokio::time::timeout(SILENCE, self.consumer.next()).await {
            panic!("nothing was to come, but {event:?} did");
        }
    }
}

/// A broker under test. Each case starts its own.
pub trait Rig: Sized {
    /// Whether infinite numbers in headers survive.
    const INFINITE_HEADERS: bool = true;

    /// Starts or reaches the broker; panics with how to get one where there is none.
    async fn start() -> Self;

    /// A new, empty queue.
    async fn fresh_queue(&self) -> String;

    /// Connects a worker that consumes `queue`.
    async fn open(&self, queue: &str, prefetch: u16) -> Link;

    /// Ends a link as the death of its process would: nothing is said to the broker.
    async fn crash(&self, link: Link);

    /// Puts a message into a queue and returns when it is there.
    async fn publish(&self, queue: &str, message: Message);

    /// Messages that wait for a consumer.
    async fn ready(&self, queue: &str) -> usize;

    /// Waits until `count` messages are ready.
    async fn ready_becomes(&self, queue: &str, count: usize) {
        let what = format!("{count} messages ready in {queue}");
        until(&what, || async { (self.ready(queue).await == count).then_some(()) }).await;
    }
}

/// Makes a module of tests, one for each case, for one rig.
#[macro_export]
macro_rules! conformance {
    ($module:ident, $rig:ty) => {
        $crate::conformance!($module, $rig:
            prefetch_bounds_what_is_unsettled,
            an_ack_removes_a_message,
            acks_in_any_order_leave_only_what_is_unfinished,
            a_requeued_message_is_back_at_its_old_place,
            a_lost_links_messages_come_back_redelivered_and_counted,
            after_a_cancel_the_prefetched_come_and_then_the_end,
            a_changed_prefetch_takes_effect_in_order,
            after_many_changes_each_message_has_come_once_in_order,
            a_cancel_behind_a_changed_prefetch_is_the_end,
            acks_written_before_a_close_count_and_later_ones_do_not,
            a_publisher_outlives_its_closed_consumer,
            exactly_the_publishes_to_missing_queues_are_unroutable,
            a_message_put_off_comes_after_its_delay_and_holds_up_nobody,
            properties_of_every_type_survive_unchanged,
            empty_and_large_bodies_survive,
        );
    };
    ($module:ident, $rig:ty: $($case:ident,)*) => {
        mod $module {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    let rig = <$rig as $crate::rig::Rig>::start().await;
                    $crate::cases::$case(&rig).await;
                }
            )*
        }
    };
}
