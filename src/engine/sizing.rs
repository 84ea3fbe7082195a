//! How many tokens a batch may have so that the device's memory takes it, as batches show. Pure.

/// Batches of a reduced size until a larger one is tried.
const TRIED: u32 = 256;

/// Half of what did not fit; and twice as much again after every [`TRIED`] batches that did, since others may
/// use the device too.
pub(super) struct Sizing {
    /// The policy's bound.
    most: usize,
    now: usize,
    fitted: u32,
}

impl Sizing {
    /// Without experience, batches of `most` tokens.
    pub(super) fn new(most: usize) -> Self {
        Self { most, now: most, fitted: 0 }
    }

    /// After a batch. `too_large`: tokens of the smallest part of it that found no memory. Returns the new
    /// bound, if there is one.
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
