//! Decides on which channel a message is published: the shared one, or one where it is alone. Owns the waiting
//! messages and those under way. Does no I/O; time is passed in.
//!
//! RabbitMQ processes a channel's messages in order, so one queue can block the channel: the first message
//! to a quorum queue without a majority blocks it for 65 s (`rabbit_fifo_client` registers itself and waits),
//! and more than 32 unconfirmed messages use up its credit, after which the broker soon stops reading the whole
//! connection. A refused message makes the broker close the channel, with all other messages on it. So a
//! message uses the shared channel only if none of this is expected: its queue has just confirmed a message, and the
//! broker has accepted one at least as large. Each other message goes alone on a channel, one at a time for each queue.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A queue that has not confirmed a message for this long is slow: its messages go alone.
pub(super) const SLOW_AFTER: Duration = Duration::from_secs(1);
/// How long after the confirm of a message that went alone its queue's next message may use the shared channel.
const FRESH_FOR: Duration = Duration::from_millis(250);
/// Maximum number of messages from the oldest unconfirmed one on the shared channel to the newest. RabbitMQ lets a
/// connection send 400 messages to a channel that returns no credit, and returns credit for 200 at a time. With fewer
/// than 200 the connection is never stopped, however long a message waits for its confirm.
const MAX_SPAN: u64 = 190;
/// Maximum bytes of bodies under way on the shared channel; a single message may be larger.
const MAX_SHARED_BYTES: usize = 4 << 20;
/// Maximum number of messages that are each alone on a channel, not counting those of slow queues.
const MAX_ALONE_FAST: usize = 16;
/// Maximum bytes of the bodies of those messages; a single message may be larger.
const MAX_ALONE_FAST_BYTES: usize = 64 << 20;
/// Maximum number of messages that are each alone on a channel, those of slow queues included. RabbitMQ allows 2,047
/// channels on a connection.
const MAX_ALONE: usize = 256;
/// How long a queue without messages is remembered.
const FORGET_AFTER: Duration = Duration::from_secs(60);

/// A message that waits to be published.
pub(super) trait Publishable {
    /// Bytes of its body.
    fn bytes(&self) -> usize;
    /// Whether the caller still waits for the broker's answer.
    fn is_wanted(&self) -> bool;
    /// Whether a connection has ended, perhaps because of this message. Such a message is sent with nothing else under
    /// way.
    fn is_suspect(&self) -> bool;
}

/// The kind of channel on which a message is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChannelKind {
    /// On the shared channel.
    Shared,
    /// On a channel where it is alone.
    Alone,
    /// On a formerly shared channel, which takes no more messages.
    Retired,
}

/// Whether a queue is expected to confirm messages at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Trust {
    /// The queue has confirmed nothing yet, or its last message failed.
    #[default]
    None,
    /// At this time the queue confirmed a message that went alone.
    Fresh(Instant),
    /// The queue confirmed a message on the current shared channel.
    Shared,
}

struct Queue<M> {
    waiting: VecDeque<M>,
    trust: Trust,
    /// Whether one of its messages is alone on a channel now.
    alone: bool,
    /// Number of its messages on the shared channel. It is 0 while `alone` is true, so that messages to one queue
    /// keep their order.
    shared: usize,
    /// Its messages are not sent before this time.
    not_before: Option<Instant>,
    /// When it last had a message.
    last_used: Instant,
}

struct UnderWay<M> {
    /// None: the caller no longer waits, and the message is not sent again.
    message: Option<M>,
    queue: Arc<str>,
    kind: ChannelKind,
    bytes: usize,
    sent: Instant,
}

impl<M: Publishable> UnderWay<M> {
    fn is_suspect(&self) -> bool {
        self.message.as_ref().is_some_and(M::is_suspect)
    }
}

/// The messages under way that a caller waits for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Wanted {
    /// Bytes of their bodies.
    pub(super) bytes: usize,
    pub(super) oldest_sent: Instant,
}

/// All messages of one connection.
pub(super) struct Messages<M> {
    queues: HashMap<Arc<str>, Queue<M>>,
    /// Queues with waiting messages, served in turn.
    turns: VecDeque<Arc<str>>,
    /// Messages that may have ended a connection, with their queues. They are sent one at a time, with nothing else
    /// under way.
    suspects: VecDeque<(Arc<str>, M)>,
    /// Messages under way, by number in the order of sending.
    under_way: BTreeMap<u64, UnderWay<M>>,
    next_id: u64,
    /// Bytes of bodies under way on the shared channel.
    shared_bytes: usize,
    has_shared_channel: bool,
    /// Bytes of the body of the largest confirmed message. Larger ones go alone, because the broker may refuse them.
    largest_confirmed: usize,
    /// Messages with bodies of more bytes always go alone; none: all messages do.
    max_shared_body: Option<usize>,
    /// Current limit of messages that go alone, at most [`MAX_ALONE`].
    max_alone: usize,
}

impl<M: Publishable> Messages<M> {
    /// Messages with bodies of more than `max_shared_body` bytes always go alone; none: all messages do.
    pub(super) fn new(max_shared_body: Option<usize>) -> Self {
        Self {
            queues: HashMap::new(),
            turns: VecDeque::new(),
            suspects: VecDeque::new(),
            under_way: BTreeMap::new(),
            next_id: 0,
            shared_bytes: 0,
            has_shared_channel: false,
            largest_confirmed: 0,
            max_shared_body,
            max_alone: MAX_ALONE,
        }
    }

    pub(super) fn push(&mut self, queue: Arc<str>, message: M, now: Instant) {
        let waiting = &mut self.queue(&queue, now).waiting;
        waiting.push_back(message);
        if waiting.len() == 1 {
            self.turns.push_back(queue);
        }
    }

    /// The next message that may be sent now, and the kind of its channel. It counts as under way from now on. Before
    /// [`Messages::share`] no message goes to the shared channel.
    pub(super) fn next(&mut self, now: Instant) -> Option<(u64, ChannelKind)> {
        while self.suspects.front().is_some_and(|(_, message)| !message.is_wanted()) {
            self.suspects.pop_front();
        }
        if !self.suspects.is_empty() {
            let is_too_early = |(name, _): &(Arc<str>, M)| {
                self.queues.get(name).and_then(|queue| queue.not_before).is_some_and(|at| now < at)
            };
            if !self.under_way.is_empty() || self.suspects.front().is_some_and(is_too_early) {
                return None;
            }
            let (queue, message) = self.suspects.pop_front()?;
            return Some((self.send(queue, message, ChannelKind::Alone, now), ChannelKind::Alone));
        }
        if self.under_way.values().next().is_some_and(|it| it.is_suspect()) {
            return None;
        }
        for _ in 0..self.turns.len() {
            let name = self.turns.pop_front()?;
            let Some(queue) = self.queues.get_mut(&name) else { continue };
            while queue.waiting.front().is_some_and(|message| !message.is_wanted()) {
                queue.waiting.pop_front();
            }
            let kind = self.channel_for(&name, now);
            let queue = self.queue(&name, now);
            let message = if kind.is_some() { queue.waiting.pop_front() } else { None };
            if !queue.waiting.is_empty() {
                self.turns.push_back(name.clone());
            }
            if let (Some(kind), Some(message)) = (kind, message) {
                return Some((self.send(name, message, kind, now), kind));
            }
        }
        None
    }

    /// Counts a message as under way, and returns its number.
    fn send(&mut self, queue: Arc<str>, message: M, kind: ChannelKind, now: Instant) -> u64 {
        let (id, bytes) = (self.next_id, message.bytes());
        self.next_id += 1;
        match kind {
            ChannelKind::Alone => self.queue(&queue, now).alone = true,
            _ => {
                self.queue(&queue, now).shared += 1;
                self.shared_bytes += bytes;
            }
        }
        self.under_way.insert(id, UnderWay { message: Some(message), queue, kind, bytes, sent: now });
        id
    }

    /// The channel on which the first message of this queue may be sent now; none: it has to wait.
    fn channel_for(&self, name: &str, now: Instant) -> Option<ChannelKind> {
        let queue = self.queues.get(name)?;
        let bytes = queue.waiting.front()?.bytes();
        if queue.alone || queue.not_before.is_some_and(|at| now < at) {
            return None;
        }
        let is_trusted = match queue.trust {
            Trust::Shared => true,
            Trust::Fresh(at) => now < at + FRESH_FOR,
            Trust::None => false,
        };
        let is_small = self.max_shared_body.is_some_and(|max| bytes <= max.min(self.largest_confirmed));
        if is_trusted && self.has_shared_channel && is_small {
            let oldest = self.under_way_on(ChannelKind::Shared).next().map_or(self.next_id, |(id, _)| *id);
            let has_room = self.shared_bytes == 0 || self.shared_bytes + bytes <= MAX_SHARED_BYTES;
            return (has_room && self.next_id - oldest < MAX_SPAN).then_some(ChannelKind::Shared);
        }
        if queue.shared > 0 {
            return None;
        }
        let (mut alone, mut fast, mut fast_bytes) = (0, 0, 0);
        for (_, it) in self.under_way_on(ChannelKind::Alone) {
            alone += 1;
            if now < it.sent + SLOW_AFTER {
                fast += 1;
                fast_bytes += it.bytes;
            }
        }
        let has_room = fast_bytes == 0 || fast_bytes + bytes <= MAX_ALONE_FAST_BYTES;
        (has_room && fast < MAX_ALONE_FAST && alone < self.max_alone).then_some(ChannelKind::Alone)
    }

    fn under_way_on(&self, kind: ChannelKind) -> impl Iterator<Item = (&u64, &UnderWay<M>)> {
        self.under_way.iter().filter(move |(_, it)| it.kind == kind)
    }

    /// A message under way and the kind of its channel; none if its caller no longer waits.
    pub(super) fn get(&self, id: u64) -> Option<(&M, ChannelKind)> {
        let it = self.under_way.get(&id)?;
        Some((it.message.as_ref()?, it.kind))
    }

    pub(super) fn kind_of(&self, id: u64) -> Option<ChannelKind> {
        self.under_way.get(&id).map(|it| it.kind)
    }

    /// Records the broker's answer. `confirmed`: the queue has the message. Returns the message, if its caller
    /// still waits.
    pub(super) fn answered(&mut self, id: u64, confirmed: bool, now: Instant) -> Option<M> {
        let UnderWay { message, queue, kind, bytes, .. } = self.remove(id)?;
        if confirmed {
            self.largest_confirmed = self.largest_confirmed.max(bytes);
        }
        let queue = self.queue(&queue, now);
        queue.alone &= kind != ChannelKind::Alone;
        queue.trust = match (confirmed, kind) {
            (false, _) => Trust::None,
            (true, ChannelKind::Shared) => Trust::Shared,
            (true, _) if queue.trust == Trust::Shared => Trust::Shared,
            (true, _) => Trust::Fresh(now),
        };
        message
    }

    /// Puts back a message that was not sent, or may not have been sent. It is sent again after `wait`, before the
    /// other messages of its queue.
    pub(super) fn retry(&mut self, id: u64, now: Instant, wait: Duration) {
        let Some(UnderWay { message, queue: name, kind, .. }) = self.remove(id) else { return };
        let queue = self.queue(&name, now);
        queue.alone &= kind != ChannelKind::Alone;
        (queue.trust, queue.not_before) = (Trust::None, Some(now + wait));
        let Some(message) = message else { return };
        if message.is_suspect() {
            self.suspects.push_back((name, message));
            return;
        }
        queue.waiting.push_front(message);
        if queue.waiting.len() == 1 {
            self.turns.push_back(name);
        }
    }

    fn remove(&mut self, id: u64) -> Option<UnderWay<M>> {
        let it = self.under_way.remove(&id)?;
        if it.kind == ChannelKind::Shared {
            self.shared_bytes -= it.bytes;
            if let Some(queue) = self.queues.get_mut(&it.queue) {
                queue.shared -= 1;
            }
        }
        Some(it)
    }

    /// Records that the channel on which this message was alone is now the shared one. Its queue may use it.
    pub(super) fn share(&mut self, id: u64) {
        self.has_shared_channel = true;
        if let Some(it) = self.under_way.get_mut(&id)
            && let Some(queue) = self.queues.get_mut(&it.queue)
        {
            queue.trust = Trust::Shared;
        }
    }

    /// Stops using the shared channel for new messages. The messages under way on it stay under way.
    pub(super) fn retire(&mut self) {
        self.has_shared_channel = false;
        for it in self.under_way.values_mut().filter(|it| it.kind == ChannelKind::Shared) {
            it.kind = ChannelKind::Retired;
        }
        self.shared_bytes = 0;
        self.queues.values_mut().for_each(|queue| (queue.trust, queue.shared) = (Trust::None, 0));
    }

    /// Puts back all messages under way, because the connection is lost. Each is sent again after its `wait`. Returns
    /// their number.
    pub(super) fn connection_lost(&mut self, now: Instant, wait: impl Fn(&M) -> Duration) -> usize {
        self.retire();
        self.largest_confirmed = 0;
        let ids: Vec<u64> = self.under_way.keys().rev().copied().collect();
        for id in &ids {
            let wait = self.get(*id).map(|(message, _)| wait(message)).unwrap_or_default();
            self.retry(*id, now, wait);
        }
        ids.len()
    }

    /// Applies `change` to all messages under way.
    pub(super) fn change_all(&mut self, change: impl FnMut(&mut M)) {
        self.under_way.values_mut().filter_map(|it| it.message.as_mut()).for_each(change);
    }

    /// Removes and returns the messages under way for which `predicate` is true.
    pub(super) fn take_if(&mut self, predicate: impl Fn(&M) -> bool) -> Vec<M> {
        let under_way = self.under_way.values_mut();
        under_way.filter_map(|it| it.message.take_if(|message| predicate(message))).collect()
    }

    /// Whether the oldest message on the shared channel has been unconfirmed for [`SLOW_AFTER`], counted from `since`
    /// at the earliest.
    pub(super) fn is_held_up_since(&self, since: Instant, now: Instant) -> bool {
        self.under_way_on(ChannelKind::Shared)
            .next()
            .is_some_and(|(_, it)| now >= it.sent.max(since) + SLOW_AFTER)
    }

    /// Lowers the limit of messages that go alone, because the broker allows fewer channels: to half of those that are
    /// alone now, but not below 1.
    pub(super) fn allow_fewer(&mut self) {
        self.max_alone = (self.under_way_on(ChannelKind::Alone).count().min(self.max_alone) / 2).max(1);
    }

    /// Whether messages wait only for abandoned ones, which no caller waits for any more and which have been under way
    /// for `timeout`. These occupy all channels, or a suspect waits until nothing is under way. Only a new connection
    /// ends this.
    pub(super) fn is_choked(&self, now: Instant, timeout: Duration) -> bool {
        let is_abandoned = |it: &UnderWay<M>| it.message.is_none() && now >= it.sent + timeout;
        let is_full = self.under_way_on(ChannelKind::Alone).count() >= self.max_alone;
        let holds_channels = is_full && self.under_way_on(ChannelKind::Alone).all(|(_, it)| is_abandoned(it));
        let holds_suspect = !self.under_way.is_empty() && self.under_way.values().all(is_abandoned);
        self.has_waiting() && holds_channels || !self.suspects.is_empty() && holds_suspect
    }

    /// The messages under way that a caller waits for; none if there are none.
    pub(super) fn wanted(&self) -> Option<Wanted> {
        let wanted = || self.under_way.values().filter(|it| it.message.as_ref().is_some_and(M::is_wanted));
        let oldest_sent = wanted().map(|it| it.sent).min()?;
        Some(Wanted { bytes: wanted().map(|it| it.bytes).sum(), oldest_sent })
    }

    pub(super) fn is_idle(&self) -> bool {
        !self.has_waiting() && self.under_way.is_empty()
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.turns.is_empty() || !self.suspects.is_empty()
    }

    /// Forgets messages that no caller waits for, and queues that have had no message for [`FORGET_AFTER`].
    pub(super) fn clean(&mut self, now: Instant) {
        for it in self.under_way.values_mut() {
            it.message.take_if(|message| !message.is_wanted());
        }
        self.queues.retain(|_, queue| {
            queue.waiting.retain(M::is_wanted);
            let is_used = !queue.waiting.is_empty() || queue.alone || queue.shared > 0;
            is_used || now < queue.last_used + FORGET_AFTER
        });
        let queues = &self.queues;
        self.turns.retain(|name| queues.get(name).is_some_and(|queue| !queue.waiting.is_empty()));
    }

    /// Removes and returns all messages, waiting and under way.
    pub(super) fn take_all(&mut self) -> Vec<M> {
        self.turns.clear();
        let waiting = self.queues.drain().flat_map(|(_, queue)| queue.waiting);
        let under_way = std::mem::take(&mut self.under_way).into_values().filter_map(|it| it.message);
        waiting.chain(under_way).chain(self.suspects.drain(..).map(|(_, message)| message)).collect()
    }

    fn queue(&mut self, name: &Arc<str>, now: Instant) -> &mut Queue<M> {
        let new = || Queue {
            waiting: VecDeque::new(),
            trust: Trust::None,
            alone: false,
            shared: 0,
            not_before: None,
            last_used: now,
        };
        let queue = self.queues.entry(name.clone()).or_insert_with(new);
        queue.last_used = now;
        queue
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[derive(Clone)]
    struct TestMessage {
        name: &'static str,
        bytes: usize,
        wanted: Rc<Cell<bool>>,
        suspect: bool,
    }

    impl Publishable for TestMessage {
        fn bytes(&self) -> usize {
            self.bytes
        }

        fn is_wanted(&self) -> bool {
            self.wanted.get()
        }

        fn is_suspect(&self) -> bool {
            self.suspect
        }
    }

    struct Rig {
        messages: Messages<TestMessage>,
        now: Instant,
    }

    impl Rig {
        fn new() -> Self {
            Self { messages: Messages::new(Some(1_000)), now: Instant::now() }
        }

        /// Makes a rig with a shared channel for messages of up to 1,000 bytes, which the queue `healthy` may use.
        fn sharing() -> Self {
            let mut rig = Self::new();
            rig.push("healthy", "first", 1_000);
            let [(id, ChannelKind::Alone)] = rig.sent()[..] else { panic!("the first goes alone") };
            rig.messages.share(id);
            rig.messages.answered(id, true, rig.now);
            rig
        }

        fn push(&mut self, queue: &str, name: &'static str, bytes: usize) -> TestMessage {
            let message = TestMessage { name, bytes, wanted: Rc::new(Cell::new(true)), suspect: false };
            self.messages.push(queue.into(), message.clone(), self.now);
            message
        }

        fn sent(&mut self) -> Vec<(u64, ChannelKind)> {
            std::iter::from_fn(|| self.messages.next(self.now)).collect()
        }

        fn names(&mut self) -> Vec<(&'static str, ChannelKind)> {
            let sent = self.sent();
            sent.iter().map(|(id, kind)| (self.messages.get(*id).expect("sent").0.name, *kind)).collect()
        }
    }

    #[test]
    fn a_new_queue_gets_messages_alone_until_it_confirms_one() {
        let mut rig = Rig::sharing();
        for name in ["a", "b", "c"] {
            rig.push("new", name, 10);
        }
        rig.push("healthy", "h", 10);
        assert_eq!(rig.names(), [("a", ChannelKind::Alone), ("h", ChannelKind::Shared)]);
        rig.messages.answered(1, true, rig.now);
        assert_eq!(rig.names(), [("b", ChannelKind::Shared), ("c", ChannelKind::Shared)]);
    }

    #[test]
    fn a_queue_that_confirms_nothing_delays_only_its_own_messages() {
        let mut rig = Rig::sharing();
        for _ in 0..500 {
            rig.push("stuck", "s", 10);
        }
        assert_eq!(rig.names(), [("s", ChannelKind::Alone)]);
        for round in 0..50 {
            rig.now += SLOW_AFTER;
            let name = ["x", "y"][round % 2];
            rig.push(name, "n", 10);
            rig.push("healthy", "h", 10);
            let sent = rig.sent();
            assert_eq!(sent.len(), 2, "round {round}");
            sent.iter().for_each(|(id, _)| drop(rig.messages.answered(*id, true, rig.now)));
        }
    }

    #[test]
    fn many_stuck_queues_delay_a_new_queue_for_a_few_seconds_only() {
        const QUEUES: [&str; 40] = {
            let mut names = [""; 40];
            let all = "aAbBcCdDeEfFgGhHiIjJkKlLmMnNoOpPqQrRsStT";
            let mut index = 0;
            while index < 40 {
                names[index] = all.split_at(index).1.split_at(1).0;
                index += 1;
            }
            names
        };
        let mut rig = Rig::sharing();
        QUEUES.iter().for_each(|queue| drop(rig.push(queue, queue, 10)));
        assert_eq!(rig.sent().len(), MAX_ALONE_FAST);
        rig.push("new", "new", 10);
        let mut rounds = 0;
        while !rig.names().iter().any(|(name, _)| *name == "new") {
            rig.now += SLOW_AFTER;
            rounds += 1;
        }
        assert!(rounds <= 40 / MAX_ALONE_FAST + 1, "{rounds}");
    }

    #[test]
    fn a_message_larger_than_any_confirmed_one_goes_alone() {
        let mut rig = Rig::sharing();
        rig.push("healthy", "larger", 1_001);
        rig.push("healthy", "as large", 1_000);
        assert_eq!(rig.names(), [("larger", ChannelKind::Alone)], "in their order");
        rig.messages.answered(1, true, rig.now);
        assert_eq!(rig.names(), [("as large", ChannelKind::Shared)]);
        rig.messages.answered(2, true, rig.now);
        rig.push("healthy", "above the setting", 1_001);
        assert_eq!(rig.names(), [("above the setting", ChannelKind::Alone)]);
    }

    #[test]
    fn the_shared_channel_never_exceeds_the_connection_credit() {
        let mut rig = Rig::sharing();
        (0..1_000).for_each(|_| drop(rig.push("healthy", "h", 10)));
        let sent = rig.sent();
        assert_eq!(sent.len(), MAX_SPAN as usize);
        // All but the oldest are confirmed. While the oldest is not confirmed, no more are sent.
        sent[1..].iter().for_each(|(id, _)| drop(rig.messages.answered(*id, true, rig.now)));
        assert_eq!(rig.sent(), []);
        assert!(!rig.messages.is_held_up_since(rig.now, rig.now));
        rig.now += SLOW_AFTER;
        assert!(rig.messages.is_held_up_since(rig.now - SLOW_AFTER, rig.now));
        rig.messages.retire();
        assert_eq!(rig.names(), [("h", ChannelKind::Alone)], "on a channel of its own");
        rig.messages.answered(sent[0].0, true, rig.now);
        assert!(rig.messages.get(sent[0].0).is_none());
    }

    #[test]
    fn after_a_lost_connection_all_messages_are_sent_again_in_order() {
        let mut rig = Rig::sharing();
        for name in ["a", "b", "c"] {
            rig.push("healthy", name, 10);
        }
        assert_eq!(rig.sent().len(), 3);
        assert_eq!(rig.messages.connection_lost(rig.now, |_| Duration::ZERO), 3);
        let mut order = Vec::new();
        for _ in 0..3 {
            let (id, kind) = rig.messages.next(rig.now).expect("one");
            assert_eq!(kind, ChannelKind::Alone, "nothing is shared on a new connection yet");
            order.push(rig.messages.answered(id, true, rig.now).expect("wanted").name);
        }
        assert_eq!(order, ["a", "b", "c"]);
    }

    #[test]
    fn a_suspect_message_is_sent_with_nothing_else_under_way() {
        let mut rig = Rig::new();
        let suspect = TestMessage { name: "s", bytes: 1, wanted: Rc::new(Cell::new(true)), suspect: true };
        rig.push("q", "before", 1);
        rig.messages.push("q".into(), suspect, rig.now);
        let [(before, _)] = rig.sent()[..] else { panic!("one at a time of a queue") };
        rig.messages.answered(before, true, rig.now);
        let [(id, _)] = rig.sent()[..] else { panic!("the suspect") };
        rig.messages.connection_lost(rig.now, |_| Duration::ZERO);
        rig.push("other", "innocent", 1);
        let [(again, ChannelKind::Alone)] = rig.sent()[..] else { panic!("the suspect alone") };
        assert!(again > id && rig.messages.get(again).expect("under way").0.suspect);
        assert_eq!(rig.sent(), []);
        rig.messages.answered(again, false, rig.now);
        assert_eq!(rig.names(), [("innocent", ChannelKind::Alone)]);
    }

    #[test]
    fn channels_of_abandoned_messages_are_freed_by_a_new_connection() {
        let mut rig = Rig::new();
        rig.messages.max_alone = 2;
        let messages = ["a", "b"].map(|queue| rig.push(queue, queue, 10));
        assert_eq!(rig.sent().len(), 2);
        rig.push("c", "c", 10);
        assert_eq!(rig.sent(), []);
        messages.iter().for_each(|message| message.wanted.set(false));
        rig.messages.clean(rig.now);
        let long = Duration::from_secs(30);
        assert!(!rig.messages.is_choked(rig.now, long), "they may yet be answered");
        rig.now += long;
        assert!(rig.messages.is_choked(rig.now, long));
        rig.messages.connection_lost(rig.now, |_| Duration::ZERO);
        assert_eq!(rig.names(), [("c", ChannelKind::Alone)]);
        assert!(!rig.messages.is_choked(rig.now, long));
    }

    #[test]
    fn an_abandoned_message_is_not_sent_and_does_not_free_its_queue() {
        let mut rig = Rig::sharing();
        let messages = ["a", "b", "c"].map(|name| rig.push("stuck", name, 10));
        assert_eq!(rig.names(), [("a", ChannelKind::Alone)]);
        messages[0].wanted.set(false);
        messages[1].wanted.set(false);
        rig.messages.clean(rig.now);
        assert_eq!(
            (rig.sent(), rig.messages.wanted()),
            (vec![], None),
            "the broker may still take the first"
        );
        assert!(rig.messages.answered(1, false, rig.now).is_none());
        assert_eq!(rig.names(), [("c", ChannelKind::Alone)]);
    }
}
