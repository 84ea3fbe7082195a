//! Divides the tokens that a step has for prompts: first among requesters, then among the prompts of each. Pure.
//!
//! - Each requester gets an equal share. What a requester does not need is divided among the others (max-min
//!   fairness). So a short prompt does not wait for long ones of other requesters.
//! - Half of a requester's share goes to its prompt that was admitted first, so that every prompt is fed eventually.
//!   The other half goes to the prompts with the fewest tokens left, so that a short prompt does not wait for long ones
//!   of the same requester either. Equal parts would feed prompts with a common prefix side by side, and compute the
//!   prefix for each of them. When prompts are fed one after the other, later ones reuse the prefix that the first
//!   computed.

use std::collections::BTreeMap;

/// A prompt with tokens that are not fed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt<O> {
    /// Whose it is.
    pub requester: O,
    /// Tokens that are not fed yet, at least 1.
    pub left: usize,
}

/// How many tokens of each prompt are fed in a step that has `budget` tokens for them. `prompts` is in the order of
/// admission.
pub fn divide<O: Ord + Copy>(prompts: &[Prompt<O>], budget: usize) -> Vec<usize> {
    let mut of_each: BTreeMap<O, Vec<usize>> = BTreeMap::new();
    for (index, prompt) in prompts.iter().enumerate() {
        of_each.entry(prompt.requester).or_default().push(index);
    }
    let need = |indices: &Vec<usize>| indices.iter().map(|index| prompts[*index].left).sum::<usize>();
    let mut requesters: Vec<(usize, Vec<usize>)> =
        of_each.into_values().map(|indices| (need(&indices), indices)).collect();
    // The requester that needs least comes first; what it does not need goes to those after it.
    requesters.sort_by_key(|(need, _)| *need);
    let mut takes = vec![0; prompts.len()];
    let (mut left, count) = (budget, requesters.len());
    for (place, (need, indices)) in requesters.into_iter().enumerate() {
        let share = left.div_ceil(count - place).min(need);
        left -= share;
        feed(prompts, &indices, share, &mut takes);
    }
    takes
}

/// Divides a requester's share of the step among its prompts, which have these indices.
fn feed<O>(prompts: &[Prompt<O>], indices: &[usize], share: usize, takes: &mut [usize]) {
    let Some(oldest) = indices.first() else { return };
    let half = share.div_ceil(2).min(prompts[*oldest].left);
    takes[*oldest] = half;
    let mut left = share - half;
    let mut shortest: Vec<(usize, usize)> =
        indices.iter().map(|index| (prompts[*index].left - takes[*index], *index)).collect();
    shortest.sort_unstable();
    for (needed, index) in shortest {
        let take = needed.min(left);
        takes[index] += take;
        left -= take;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn divided(prompts: &[(u8, usize)], budget: usize) -> Vec<usize> {
        let prompts: Vec<_> =
            prompts.iter().map(|(of, left)| Prompt { requester: *of, left: *left }).collect();
        divide(&prompts, budget)
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
        let mut left = [1_000_usize; 8];
        let mut most_begun = 0;
        for _ in 0..16 {
            let takes = divided(&left.map(|left| (1, left)), 500);
            left.iter_mut().zip(&takes).for_each(|(left, take)| *left -= take);
            most_begun = most_begun.max(left.iter().filter(|left| (1..1_000).contains(*left)).count());
        }
        assert_eq!((left, most_begun), ([0; 8], 1));
    }

    proptest! {
        #[test]
        fn all_tokens_are_used_and_the_shares_are_max_min_fair(
            prompts in prop::collection::vec((0_u8..5, 1_usize..400), 1..20),
            budget in 0_usize..600,
        ) {
            let takes = divided(&prompts, budget);
            let needed: usize = prompts.iter().map(|(_, left)| left).sum();
            prop_assert_eq!(takes.iter().sum::<usize>(), budget.min(needed));
            let (mut got, mut short) = (BTreeMap::new(), BTreeMap::new());
            for ((of, left), take) in prompts.iter().zip(&takes) {
                prop_assert!(take <= left);
                *got.entry(*of).or_insert(0) += take;
                *short.entry(*of).or_insert(0) += left - take;
            }
            for (of, got_by_it) in &got {
                let is_short = short[of] > 0;
                prop_assert!(!is_short || got.values().all(|other| *other <= got_by_it + 1), "{:?}", got);
                let oldest = prompts.iter().position(|(it, _)| it == of).unwrap();
                prop_assert!(takes[oldest] >= prompts[oldest].1.min(got_by_it.div_ceil(2)));
            }
        }
    }
}
