//! Decides how large a batch may be to fit in the device's memory, by which batches failed. Pure.

/// Batches of a reduced size before a larger one is tried.
const TRIED: u32 = 256;

/// What the size of a batch is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Tokens,
    /// Windows that are encoded together.
    Windows,
}

/// The bound is half of what did not fit. It doubles after every [`TRIED`] batches that fit, since the memory
/// may have been taken by another process for a while.
pub(super) struct Sizing {
    unit: Unit,
    /// The policy's bound.
    most: usize,
    now: usize,
    fitted: u32,
}

impl Sizing {
    /// Starts with batches of this size.
    pub(super) fn new(most: usize, unit: Unit) -> Self {
        Self { unit, most, now: most, fitted: 0 }
    }

    /// Called after each batch. `too_large`: the size of its smallest part that ran out of memory. Returns the
    /// new bound if it changed.
    pub(super) fn learn(&mut self, too_large: Option<usize>) -> Option<usize> {
        let (before, unit) = (self.now, self.unit);
        if let Some(size) = too_large {
            (self.now, self.fitted) = ((size / 2).clamp(1, before), 0);
            tracing::warn!(size, most = self.now, ?unit, "out of device memory; smaller batches from now on");
        } else if self.now < self.most {
            self.fitted += 1;
            if self.fitted >= TRIED {
                (self.now, self.fitted) = (self.most.min(2 * before), 0);
                tracing::info!(most = self.now, ?unit, "trying larger batches again");
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
        let mut sizing = Sizing::new(100, Unit::Tokens);
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
