//! Decides whose windows a step encodes. A window is what the encoder of a sequence computes whole: 30 s of sound, an
//! image. Pure.
//!
//! Requesters are served in turn: each one's next window is taken before a second one of any. Among those, the requester
//! goes first that has waited longest since its window came, or since it was last served. So another requester's
//! thousand windows delay a window by one of them at most, and newcomers cannot keep an old window waiting.

use std::collections::BTreeMap;
use std::time::Instant;

/// How an encoder's windows are spread among steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// While sequences decode, one window is encoded at most in so many steps.
    pub interval: usize,
    /// While none decodes, so many windows are encoded together at most.
    pub batch: usize,
}

impl Default for Encoding {
    fn default() -> Self {
        Self { interval: 8, batch: 4 }
    }
}

/// A window that waits to be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window<O> {
    /// Whose it is.
    pub requester: O,
    /// When it came, or when a window of its requester was last encoded, whichever was later.
    pub since: Instant,
}

/// The indices of the windows that are encoded together, `most` of them at most. The windows are in the order of their
/// admission.
pub fn choose<O: Ord + Copy>(windows: &[Window<O>], most: usize) -> Vec<usize> {
    let mut before: BTreeMap<O, usize> = BTreeMap::new();
    let mut turns: Vec<(usize, Instant, usize)> = Vec::with_capacity(windows.len());
    for (index, Window { requester, since }) in windows.iter().enumerate() {
        let before = before.entry(*requester).or_default();
        turns.push((*before, *since, index));
        *before += 1;
    }
    turns.sort_unstable();
    turns.into_iter().take(most).map(|(_, _, index)| index).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_requesters_next_window_goes_before_a_second_one_of_any() {
        let begun = Instant::now();
        let window =
            |(requester, since): (u8, u64)| Window { requester, since: begun + Duration::from_secs(since) };
        let chosen = |windows: &[(u8, u64)], most: usize| {
            choose(&windows.iter().copied().map(window).collect::<Vec<_>>(), most)
        };
        assert_eq!(chosen(&[(1, 0), (1, 0), (1, 0), (2, 5), (3, 4)], 4), [0, 4, 3, 1]);
        assert_eq!(chosen(&[(1, 6), (1, 6), (2, 5)], 1), [2], "1 was served when 2 waited already");
        assert_eq!(chosen(&[(1, 6), (1, 6), (2, 7)], 1), [0], "2 came later than that");
        assert!(chosen(&[(1, 0)], 0).is_empty());
    }
}
