//! Divides the prompt tokens of a step: first among queues by their shares, then among the requesters of a queue, then
//! among the prompts of each requester. Pure.
//!
//! - The requesters of a queue get equal shares. The part that a requester does not need is divided among the others (max-min
//!   fairness). So a short prompt does not wait for long ones of other requesters.
//! - Half of a requester's share goes to its oldest prompt (the one admitted first), so that every prompt is fed
//!   eventually. The other half goes to the prompts with the fewest tokens left, so that a short prompt does not wait
//!   for long ones of the same requester either. Equal parts would feed prompts with a common prefix side by side, and
//!   compute the prefix for each of them. When prompts are fed one after the other, later ones reuse the prefix that
//!   the first computed.

use std::collections::BTreeMap;

use crate::batching::shares::{QueueShare, divide_by_weight};

/// A prompt with tokens that are not fed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt<R> {
    /// The queue that it came from.
    pub queue: QueueShare,
    /// Whose it is.
    pub requester: R,
    /// Tokens that are not fed yet, at least 1.
    pub remaining: usize,
}

/// How many tokens of each prompt are fed in a step that has `budget` tokens for them. `prompts` is in the order of
/// admission.
pub fn divide<R: Ord + Copy>(prompts: &[Prompt<R>], budget: usize) -> Vec<usize> {
    let mut by_queue: BTreeMap<QueueShare, BTreeMap<R, Vec<usize>>> = BTreeMap::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let requesters = by_queue.entry(prompt.queue).or_default();
        requesters.entry(prompt.requester).or_default().push(index);
    }
    let need = |indices: &Vec<usize>| indices.iter().map(|index| prompts[*index].remaining).sum::<usize>();
    let queues: Vec<(u32, usize)> = by_queue
        .iter()
        .map(|(queue, requesters)| (queue.share, requesters.values().map(need).sum()))
        .collect();
    let mut chunks = vec![0; prompts.len()];
    for (requesters, tokens) in by_queue.values().zip(divide_by_weight(&queues, budget)) {
        let parts: Vec<(u32, usize)> = requesters.values().map(|indices| (1, need(indices))).collect();
        for (indices, share) in requesters.values().zip(divide_by_weight(&parts, tokens)) {
            divide_share(prompts, indices, share, &mut chunks);
        }
    }
    chunks
}

/// Divides a requester's share of the step among its prompts, which have these indices. Writes their `chunks`.
fn divide_share<R>(prompts: &[Prompt<R>], indices: &[usize], share: usize, chunks: &mut [usize]) {
    let Some(oldest) = indices.first() else { return };
    let half = share.div_ceil(2).min(prompts[*oldest].remaining);
    chunks[*oldest] = half;
    let mut share_left = share - half;
    let mut shortest_first: Vec<(usize, usize)> =
        indices.iter().map(|index| (prompts[*index].remaining - chunks[*index], *index)).collect();
    shortest_first.sort_unstable();
    for (needed, index) in shortest_first {
        let tokens = needed.min(share_left);
        chunks[index] += tokens;
        share_left -= tokens;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn divided(prompts: &[(u8, usize)], budget: usize) -> Vec<usize> {
        let prompts: Vec<_> =
            prompts.iter().map(|&(requester, remaining)| prompt(0, requester, remaining)).collect();
        divide(&prompts, budget)
    }

    fn prompt(queue: usize, requester: u8, remaining: usize) -> Prompt<u8> {
        let share = if queue == 0 { 1_000 } else { 3_000 };
        Prompt { queue: QueueShare { queue, share }, requester, remaining }
    }

    #[test]
    fn queues_share_by_weight_whatever_the_number_of_their_requesters() {
        let mut prompts: Vec<_> = (0..4).map(|requester| prompt(0, requester, 4_000)).collect();
        prompts.push(prompt(1, 0, 4_000));
        assert_eq!(divide(&prompts, 512), [32, 32, 32, 32, 384]);
    }

    #[test]
    fn requesters_share_equally_and_pass_on_what_they_do_not_need() {
        assert_eq!(divided(&[(1, 4_000), (2, 4_000)], 512), [256, 256]);
        assert_eq!(divided(&[(1, 4_000), (1, 4_000), (1, 4_000), (2, 1)], 512), [511, 0, 0, 1]);
        assert_eq!(divided(&[(1, 4_000), (2, 100), (3, 4_000)], 512), [206, 100, 206]);
        assert_eq!(divided(&[(1, 3), (2, 4)], 512), [3, 4]);
    }

    #[test]
    fn a_requesters_oldest_prompt_gets_half_and_the_shortest_the_rest() {
        assert_eq!(divided(&[(1, 4_000), (1, 4_000), (1, 600)], 512), [256, 0, 256]);
        assert_eq!(divided(&[(1, 4_000), (1, 4_000), (1, 1)], 512), [511, 0, 1]);
        assert_eq!(divided(&[(1, 100), (1, 4_000), (1, 200)], 512), [100, 212, 200]);
        assert_eq!(divided(&[(1, 4_000), (1, 1)], 1), [1, 0], "the oldest comes before the shortest");
    }

    #[test]
    fn prompts_of_equal_length_are_fed_one_after_the_other() {
        let mut remaining = [1_000_usize; 8];
        let mut max_unfinished = 0;
        for _ in 0..16 {
            let chunks = divided(&remaining.map(|tokens| (1, tokens)), 500);
            remaining.iter_mut().zip(&chunks).for_each(|(tokens, chunk)| *tokens -= chunk);
            let unfinished = remaining.iter().filter(|tokens| (1..1_000).contains(*tokens)).count();
            max_unfinished = max_unfinished.max(unfinished);
        }
        assert_eq!((remaining, max_unfinished), ([0; 8], 1));
    }

    proptest! {
        #[test]
        fn all_tokens_are_used_and_the_shares_are_max_min_fair(
            prompts in prop::collection::vec((0_u8..5, 1_usize..400), 1..20),
            budget in 0_usize..600,
        ) {
            let chunks = divided(&prompts, budget);
            let needed: usize = prompts.iter().map(|(_, tokens)| tokens).sum();
            prop_assert_eq!(chunks.iter().sum::<usize>(), budget.min(needed));
            let (mut shares, mut unmet) = (BTreeMap::new(), BTreeMap::new());
            for ((requester, tokens), chunk) in prompts.iter().zip(&chunks) {
                prop_assert!(chunk <= tokens);
                *shares.entry(*requester).or_insert(0) += chunk;
                *unmet.entry(*requester).or_insert(0) += tokens - chunk;
            }
            for (requester, share) in &shares {
                let is_short = unmet[requester] > 0;
                prop_assert!(!is_short || shares.values().all(|other| *other <= share + 1), "{:?}", shares);
                let oldest = prompts.iter().position(|(it, _)| it == requester).unwrap();
                prop_assert!(chunks[oldest] >= prompts[oldest].1.min(share.div_ceil(2)));
            }
        }
    }
}
