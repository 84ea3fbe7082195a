//! Decides how many tokens a batch may have to fit in the device's memory, by which batches failed. Pure.

/// Batches of a reduced size before a larger one is tried.
const TRIED: u32 = 256;

/// The bound is half of what did not fit. It doubles after every [`TRIED`] batches that fit, since the memory
/// may have been taken by another process for a while.
pub(super) struct Sizing {
    /// The policy's bound.
    most: usize,
    now: usize,
    fitted: u32,
}

impl Sizing {
    /// Starts with batches of `most` tokens.
    pub(super) fn new(most: usize) -> Self {
        Self { most, now: most, fitted: 0 }
    }

    /// Called after each batch. `too_large`: tokens of its smallest part that ran out of memory. Returns the
    /// new bound if it changed.
    pub(super) fn learn(&mut self, too_large: Option<usize>) -> Option<usize> {
        let before = self.now;
        if let Some(tokens) = too_large {
            (self.now, self.fitted) = ((tokens / 2).clamp(1, before), 0);
            let max_tokens = self.now;
            tracing::warn!(tokens, max_tokens, "out of device memory; smaller batches from now on");
        } else if self.now < self.most {
            self.fitted += 1;
            if self.fitted >= TRIED {
                (self.now, self.fitted) = (self.most.min(2 * before), 0);
                tracing::info!(max_tokens = self.now, "trying larger batches again");
            }
        }
        (self.now != before).then_some(self.now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_that_fits_is_remembered_and_a_larger_one_tried_now_and_then() {
        let mut sizing = Sizing::new(100);
        assert_eq!(
            (sizing.learn(None), sizing.learn(Some(80)), sizing.learn(Some(4))),
            (None, Some(40), Some(2))
        );
        let mut limits = Vec::new();
        for _ in 0..6 * TRIED {
            limits.extend(sizing.learn(None));
        }
        assert_eq!(limits, [4, 8, 16, 32, 64, 100]);
        assert_eq!((sizing.learn(Some(1)), sizing.learn(Some(1))), (Some(1), None), "one input is the least");
    }
}
