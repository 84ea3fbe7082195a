//! Decides which of a pool's queues is served next, so that queues with waiting work are served in proportion to their
//! shares. Owns what each queue has been served. Pure.
//!
//! This is start-time fair queueing (Goyal, Vin and Cheng, 1996). Serving a queue moves its next start ahead by the
//! amount of work, divided by the share. The queue with the earliest start is served next. A queue that had no work for
//! a while starts where the others are now: it goes first, but has not saved up anything. A queue that is alone is
//! always served.

/// The factor from work per share to virtual time, so that small amounts of work with large shares count too.
const SCALE: u64 = 1_000_000;

/// One of a pool's queues, and how much it is served while others wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueShare {
    /// The queue's index in the pool.
    pub queue: usize,
    /// Its share in thousandths, at least 1.
    pub share: u32,
}

impl QueueShare {
    /// The only queue of a pool.
    pub const LONE: Self = Self { queue: 0, share: 1_000 };

    /// The virtual time that this amount of work takes.
    pub fn virtual_time(self, work: u64) -> u64 {
        let time = u128::from(work) * u128::from(SCALE) / u128::from(self.share.max(1));
        u64::try_from(time).unwrap_or(u64::MAX)
    }
}

impl Default for QueueShare {
    fn default() -> Self {
        Self::LONE
    }
}

/// Whose work it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// The queue that the task came from.
    pub queue: QueueShare,
    /// A hash of the requester.
    pub requester: u64,
    /// Whether the task only fills what others leave.
    pub background: bool,
}

/// What the queues of a pool have been served.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    /// The start of the work that was served last, in virtual time.
    clock: u64,
    /// The end of each queue's work that was served so far, in virtual time. By the queue's index.
    ends: Vec<u64>,
}

impl Shares {
    /// When the queue's next work starts, in virtual time. Of the queues with work, the one with the earliest start is
    /// next.
    pub fn start(&self, queue: QueueShare) -> u64 {
        self.ends.get(queue.queue).copied().unwrap_or_default().max(self.clock)
    }

    /// Records that this amount of the queue's work is served.
    pub fn serve(&mut self, queue: QueueShare, work: u64) {
        let start = self.start(queue);
        if self.ends.len() <= queue.queue {
            self.ends.resize(queue.queue + 1, 0);
        }
        if let Some(end) = self.ends.get_mut(queue.queue) {
            *end = start.saturating_add(queue.virtual_time(work.max(1)));
        }
        self.clock = start;
    }
}

/// Divides `budget` among parts by their weights. What a part does not need goes to the others (max-min fairness). Each
/// part is its weight and what it needs; the result has the same order.
pub fn divide_by_weight(parts: &[(u32, usize)], budget: usize) -> Vec<usize> {
    let mut by_need: Vec<usize> = (0..parts.len()).collect();
    // The part that needs least for its weight comes first; what it does not need goes to the later ones.
    by_need.sort_by(|one, other| {
        let ((weight, need), (other_weight, other_need)) = (parts[*one], parts[*other]);
        (need as u128 * u128::from(other_weight)).cmp(&(other_need as u128 * u128::from(weight)))
    });
    let mut weights: u128 = parts.iter().map(|(weight, _)| u128::from(*weight)).sum();
    let (mut budget_left, mut given) = (budget, vec![0; parts.len()]);
    for index in by_need {
        let (weight, need) = parts[index];
        let part = (budget_left as u128 * u128::from(weight)).div_ceil(weights.max(1));
        given[index] = usize::try_from(part).unwrap_or(usize::MAX).min(need);
        budget_left -= given[index];
        weights -= u128::from(weight);
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: QueueShare = QueueShare { queue: 0, share: 500 };
    const TRIPLE: QueueShare = QueueShare { queue: 1, share: 1_500 };

    /// Serves the queue that is next, `count` times; each time this amount of work. Returns how often each was served.
    fn served(shares: &mut Shares, waiting: &[QueueShare], count: usize, work: u64) -> Vec<usize> {
        let mut times = vec![0; waiting.len()];
        for _ in 0..count {
            let next = (0..waiting.len()).min_by_key(|index| shares.start(waiting[*index])).expect("a queue");
            shares.serve(waiting[next], work);
            times[next] += 1;
        }
        times
    }

    #[test]
    fn queues_that_wait_are_served_in_proportion_to_their_shares() {
        assert_eq!(served(&mut Shares::default(), &[HALF, TRIPLE], 400, 17), [100, 300]);
    }

    #[test]
    fn a_queue_that_had_no_work_goes_first_and_has_saved_up_nothing() {
        let mut shares = Shares::default();
        served(&mut shares, &[HALF], 1_000, 10);
        assert!(shares.start(TRIPLE) < shares.start(HALF), "it goes first");
        // Three of four, but for the first, which goes ahead.
        assert_eq!(served(&mut shares, &[HALF, TRIPLE], 40, 10), [9, 31]);
    }

    #[test]
    fn a_queue_that_sends_one_large_task_at_a_time_gets_its_share_and_no_more() {
        let mut shares = Shares::default();
        let [large, small] = [0, 1].map(|queue| QueueShare { queue, share: 1_000 });
        let mut work = [0, 0];
        for _ in 0..2_000 {
            let is_large = shares.start(large) <= shares.start(small);
            let (queue, amount) = if is_large { (large, 1_000) } else { (small, 10) };
            shares.serve(queue, amount);
            work[queue.queue] += amount;
        }
        assert!(work[0].abs_diff(work[1]) <= 1_000, "{work:?}");
    }

    #[test]
    fn what_one_part_does_not_need_goes_to_the_others_by_weight() {
        assert_eq!(divide_by_weight(&[(1, 1_000), (1, 1_000)], 512), [256, 256]);
        assert_eq!(divide_by_weight(&[(1, 1_000), (3, 1_000)], 512), [128, 384]);
        assert_eq!(divide_by_weight(&[(3, 10), (1, 1_000)], 512), [10, 502]);
        assert_eq!(divide_by_weight(&[(1, 3), (9, 4)], 512), [3, 4]);
        assert_eq!(divide_by_weight(&[], 512), Vec::<usize>::new());
    }
}
