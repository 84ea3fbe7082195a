//! Decides whose windows a step encodes. A window is input that the encoder of a sequence processes as a whole: 30 s of
//! sound, or an image. Pure.
//!
//! Queues are served by their shares. Within a queue, requesters take turns: the next window of every requester is
//! encoded before a second one of any. The requester that has waited longest since its window arrived, or since one of
//! its windows was last encoded, comes first. So a requester with a thousand windows delays a window of another requester
//! by at most one window, and new requesters cannot keep an old window waiting.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::batching::shares::QueueShare;

/// How an encoder's windows are spread among steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// While sequences decode, at least this many token steps lie between two encoded windows.
    pub interval: usize,
    /// While no sequence decodes, at most this many windows are encoded together.
    pub batch: usize,
}

impl Default for Encoding {
    fn default() -> Self {
        Self { interval: 8, batch: 4 }
    }
}

/// A window that waits to be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window<R> {
    /// The queue that it came from.
    pub queue: QueueShare,
    /// When the next window of that queue starts, as [`Shares::start`](crate::batching::Shares::start) says.
    pub queue_start: u64,
    /// Whose it is.
    pub requester: R,
    /// When it arrived, or when a window of its requester was last encoded, whichever is later.
    pub since: Instant,
}

/// The indices of the windows to encode together, at most `max` of them. `windows` is in the order of admission.
pub fn choose<R: Ord + Copy>(windows: &[Window<R>], max: usize) -> Vec<usize> {
    let mut counts: BTreeMap<R, usize> = BTreeMap::new();
    let mut turns: Vec<(usize, Instant, usize)> = Vec::with_capacity(windows.len());
    for (index, Window { requester, since, .. }) in windows.iter().enumerate() {
        // In round n, each requester has its n-th window encoded.
        let round = counts.entry(*requester).or_default();
        turns.push((*round, *since, index));
        *round += 1;
    }
    turns.sort_unstable();
    let mut starts: BTreeMap<usize, u64> = BTreeMap::new();
    let mut by_queue: Vec<(u64, usize)> = Vec::with_capacity(windows.len());
    for (_, _, index) in turns {
        let Window { queue, queue_start, .. } = windows[index];
        let start = starts.entry(queue.queue).or_insert(queue_start);
        by_queue.push((*start, index));
        *start = start.saturating_add(queue.virtual_time(1));
    }
    // Windows of one queue keep their order, because the sort is stable.
    by_queue.sort_by_key(|(start, _)| *start);
    by_queue.into_iter().take(max).map(|(_, index)| index).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_requesters_next_window_precedes_a_second_one_of_any() {
        let begun = Instant::now();
        let window = |(requester, since): (u8, u64)| Window {
            queue: QueueShare::LONE,
            queue_start: 0,
            requester,
            since: begun + Duration::from_secs(since),
        };
        let chosen = |windows: &[(u8, u64)], max: usize| {
            choose(&windows.iter().copied().map(window).collect::<Vec<_>>(), max)
        };
        assert_eq!(chosen(&[(1, 0), (1, 0), (1, 0), (2, 5), (3, 4)], 4), [0, 4, 3, 1]);
        assert_eq!(chosen(&[(1, 6), (1, 6), (2, 5)], 1), [2], "requester 1 was served while 2 was waiting");
        assert_eq!(chosen(&[(1, 6), (1, 6), (2, 7)], 1), [0], "requester 2 arrived after 1 was served");
        assert!(chosen(&[(1, 0)], 0).is_empty());
    }
}
