//! Tests of a requester whose slow tasks would hold all messages that the broker grants.

use std::collections::VecDeque;

use tokio::time::{Instant, timeout};

use super::on_demand::{start, windows};
use super::*;
use crate::broker::Published;
use crate::broker::memory::Reaction;
use crate::protocol::control::Cancellation;

/// The unsettled messages that the broker grants.
const GRANTED: usize = 8;
/// The name under which [`Memory`] records what is published to a retry queue.
const LATER: &str = "tasks, later";

/// A broker that keeps [`GRANTED`] messages delivered. A message that is put off returns to its queue after a second.
struct Broker {
    rig: Rig,
    ready: VecDeque<Message>,
    delivered: usize,
    returning: VecDeque<(Instant, Message)>,
    put_off: usize,
}

impl Broker {
    fn new(rig: Rig) -> Self {
        rig.memory.set_granted(GRANTED as u16);
        Self { rig, ready: VecDeque::new(), delivered: 0, returning: VecDeque::new(), put_off: 0 }
    }

    fn publish(&mut self, messages: impl IntoIterator<Item = Message>) {
        self.ready.extend(messages);
    }

    /// Delivers messages until this queue has `count` replies. Returns how long that took.
    async fn time_until_replies(&mut self, queue: &str, count: usize) -> Duration {
        let begun = Instant::now();
        while self.rig.memory.published(queue).len() < count {
            self.step().await;
        }
        begun.elapsed()
    }

    /// Delivers what can be delivered, and waits until something is settled or published.
    async fn step(&mut self) {
        let now = Instant::now();
        for message in self.rig.memory.published(LATER).into_iter().skip(self.put_off) {
            self.put_off += 1;
            self.returning.push_back((now + Duration::from_secs(1), message));
        }
        while self.returning.front().is_some_and(|(at, _)| *at <= now) {
            self.ready.extend(self.returning.pop_front().map(|(_, message)| message));
        }
        while self.delivered - self.rig.memory.settled().len() < GRANTED
            && let Some(message) = self.ready.pop_front()
        {
            self.delivered += 1;
            self.rig.memory.deliver([message]);
        }
        // The limit is needed because messages that were put off return by time alone.
        let _ = timeout(Duration::from_millis(100), self.rig.memory.wait_for_change()).await;
    }

    /// Publishes 40 slow tasks, and then a quick one. Returns the times until they were answered.
    async fn crowd(&mut self, slow: impl Fn(&str) -> Message, quick: Message) -> Answered {
        self.publish((0..40).map(|number| slow(&format!("slow {number}"))));
        self.publish([quick]);
        let quick = self.time_until_replies("quick", 1).await;
        let all = quick + self.time_until_replies("slow", 40).await;
        let replies = self.rig.memory.published("slow");
        let ids: std::collections::BTreeSet<_> =
            replies.iter().map(|reply| reply.properties.correlation_id.clone()).collect();
        assert_eq!((replies.len(), ids.len()), (40, 40), "each is answered once");
        assert!(replies.iter().all(|reply| status(reply) == 200));
        Answered { quick, all }
    }
}

/// The times until the quick task was answered, and until all tasks were.
struct Answered {
    quick: Duration,
    all: Duration,
}

/// A task of `count` inputs made on demand, which are windows. Two windows take 10 ms.
fn window_task(id: &str, to: &str, count: usize) -> Message {
    let mut task = windows(id, count);
    task.properties.reply_to = Some(to.to_owned());
    task
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn tasks_of_a_thousand_inputs_let_the_tasks_behind_them_be_delivered() {
    let mut broker = Broker::new(start(|_| ()).0);
    let quick = window_task("quick", "quick", 1);
    let Answered { quick, all } = broker.crowd(|id| window_task(id, "slow", 1_000), quick).await;
    assert!(quick < Duration::from_secs(3), "{quick:?}: the quick task is delivered after the slow ones");
    // Two windows take 10 ms, so that the tasks take 200 s in all.
    assert!(all < Duration::from_secs(215), "{all:?}: too much is computed twice");
    // A put-off costs a token: the full bucket, 100 per second for a minute after the newcomer, and 5 per second.
    assert!(broker.put_off < 1_024 + 100 * 62 + 5 * 215, "{}", broker.put_off);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_that_is_cancelled_while_it_is_put_off_is_answered_when_it_returns_and_not_computed() {
    let mut broker = Broker::new(start(|_| ()).0);
    broker.publish((0..20).map(|number| window_task(&format!("slow {number}"), "slow", 1_000)));
    while broker.put_off == 0 {
        broker.step().await;
    }
    let cancelled = broker.returning[0].1.properties.correlation_id.clone();
    let cancellation = Cancellation {
        correlation_id: cancelled.clone(),
        reply_to: Some("slow".into()),
        ..Cancellation::default()
    };
    assert!(broker.rig.control.cancellations.add(vec![cancellation]));
    broker.time_until_replies("slow", 20).await;
    for reply in broker.rig.memory.published("slow") {
        let is_cancelled = reply.properties.correlation_id == cancelled;
        assert_eq!(status(&reply), if is_cancelled { 499 } else { 200 }, "{reply:?}");
        let batch_size = reply.properties.headers["batch_size"].as_i64();
        assert_eq!(batch_size == Some(0), is_cancelled, "{reply:?}");
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn tasks_with_many_sequences_let_the_tasks_behind_them_be_delivered() {
    let mut broker = Broker::new(Rig::start("script", |_| ()));
    let sequences = vec![100; 8];
    let slow = |id: &str| task(id, "slow", &json!({"prompt": 1, "sequences": sequences, "step_ms": 10}));
    let quick = task("quick", "quick", &json!({"prompt": 1, "max_tokens": 1, "step_ms": 10}));
    let Answered { quick, all } = broker.crowd(slow, quick).await;
    assert!(quick < Duration::from_secs(3), "{quick:?}");
    // 320 sequences of 100 steps of 10 ms, 16 at once, take 20 s.
    assert!(all < Duration::from_secs(25), "{all:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn slow_tasks_of_many_requesters_let_the_tasks_behind_them_be_delivered() {
    let mut broker = Broker::new(start(|_| ()).0);
    let slow = |number: usize| window_task(&number.to_string(), &format!("slow {}", number % 4), 1_000);
    broker.publish((0..60).map(slow));
    broker.publish([window_task("quick", "quick", 1)]);
    let quick = broker.time_until_replies("quick", 1).await;
    assert!(quick < Duration::from_secs(4), "{quick:?}");
    let answered = |broker: &Broker| -> usize {
        (0..4).map(|queue| broker.rig.memory.published(&format!("slow {queue}")).len()).sum()
    };
    while answered(&broker) < 60 {
        broker.step().await;
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn streams_let_the_tasks_behind_them_be_delivered() {
    let mut broker = Broker::new(Rig::start("script", |_| ()));
    let stream = json!({"prompt": 1, "max_tokens": 800, "step_ms": 10, "stream": true});
    broker.publish((0..40).map(|number| task(&number.to_string(), "streams", &stream)));
    broker.publish([task("quick", "quick", &json!({"prompt": 1, "max_tokens": 1, "step_ms": 10}))]);
    let quick = broker.time_until_replies("quick", 1).await;
    assert!(quick < Duration::from_secs(3), "{quick:?}");
    let is_reply = |message: &&Message| message.properties.kind.as_deref() == Some("reply");
    while broker.rig.memory.published("streams").iter().filter(is_reply).count() < 40 {
        broker.step().await;
    }
    // Each stream is answered once, with parts that are its text.
    let mut texts = std::collections::BTreeMap::<String, String>::new();
    for message in broker.rig.memory.published("streams") {
        let id = message.properties.correlation_id.clone().unwrap();
        let text = body(&message)["text"].as_str().unwrap_or_else(|| panic!("{message:?}")).to_owned();
        if is_reply(&&message) {
            assert_eq!(texts.remove(&id).as_ref(), Some(&text));
        } else {
            texts.entry(id).or_default().push_str(&text);
        }
    }
    assert!(texts.is_empty());
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_behind_hundreds_of_slow_ones_waits_some_seconds() {
    let mut broker = Broker::new(start(|_| ()).0);
    broker.publish((0..250).map(|number| window_task(&number.to_string(), "slow", 2_000)));
    broker.publish([window_task("quick", "quick", 1)]);
    let first = broker.time_until_replies("quick", 1).await;
    // All 250 take 2,500 s.
    assert!(first < Duration::from_secs(3), "{first:?}");
    broker.publish([window_task("quick", "quick", 1)]);
    let second = broker.time_until_replies("quick", 2).await;
    assert!(second < Duration::from_secs(15), "{second:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_worker_stops_at_a_sentinel_only_after_tasks_that_were_put_off() {
    let mut broker = Broker::new(start(|_| ()).0);
    broker.publish((0..60).map(|number| window_task(&number.to_string(), "slow", 500)));
    let mut last = sentinel();
    last.properties.expiration = Some("3600000".to_owned());
    broker.publish([last]);
    broker.time_until_replies("slow", 60).await;
    while !broker.rig.worker.is_finished() {
        broker.step().await;
    }
    let again = broker.rig.memory.published(LATER).into_iter().rfind(|it| it.body.as_ref() == b"null");
    let again = again.expect("the sentinel was put off, too");
    assert!(again.properties.headers.contains_key("expires"), "{again:?}");
    let (ended, _) = broker.rig.join().await;
    assert_eq!(ended.unwrap(), Ended::OnRequest);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn cancellations_that_match_no_task_do_not_postpone_the_review_of_places() {
    let mut broker = Broker::new(Rig::start("script", |_| ()));
    let slow = json!({"prompt": 1, "max_tokens": 800, "step_ms": 50});
    broker.publish((0..24).map(|number| task(&number.to_string(), "slow", &slow)));
    broker.publish([task("quick", "quick", &json!({"prompt": 1, "max_tokens": 1, "step_ms": 10}))]);
    let begun = Instant::now();
    while broker.rig.memory.published("quick").is_empty() {
        let nobody = Cancellation { task: Some("nobody".into()), ..Cancellation::default() };
        broker.rig.control.cancellations.add(vec![nobody]);
        broker.step().await;
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn without_a_retry_queue_the_tasks_of_a_crowd_are_all_computed() {
    let mut broker = Broker::new(start(|_| ()).0);
    broker.rig.memory.set_reaction(LATER, Reaction::Answer(Published::Unroutable));
    broker.crowd(|id| window_task(id, "slow", 1_000), window_task("quick", "quick", 1)).await;
    let mut broker = Broker::new(Rig::start("script", |_| ()));
    broker.rig.memory.set_reaction(LATER, Reaction::Answer(Published::Unroutable));
    let slow = |id: &str| task(id, "slow", &json!({"prompt": 1, "max_tokens": 300, "step_ms": 10}));
    let quick = task("quick", "quick", &json!({"prompt": 1, "max_tokens": 1, "step_ms": 10}));
    broker.crowd(slow, quick).await;
}
