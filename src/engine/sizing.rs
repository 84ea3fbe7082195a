//! Decides, from the batches that failed, how large a batch may be so that it fits in the device's memory. Pure.

/// The number of batches of a reduced size that must fit before a larger one is tried.
const FITTING_BATCHES: u32 = 256;

/// What the size of a batch is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Tokens,
    /// Windows that are encoded together.
    Windows,
}

/// The bound on the size of a batch: half the size of a batch that did not fit. It doubles after every
/// [`FITTING_BATCHES`] batches that fit, because another process may have taken the memory only for a while.
pub(super) struct Sizing {
    unit: Unit,
    /// The bound that the policy sets. `bound` never exceeds it.
    policy_bound: usize,
    bound: usize,
    /// The number of batches that fitted since the bound last changed.
    fitted: u32,
}

impl Sizing {
    /// Starts with the bound that the policy sets.
    pub(super) fn new(policy_bound: usize, unit: Unit) -> Self {
        Self { unit, policy_bound, bound: policy_bound, fitted: 0 }
    }

    /// Called after each batch. `too_large`: the size of its smallest part that ran out of memory. Returns the
    /// new bound if it changed.
    pub(super) fn learn(&mut self, too_large: Option<usize>) -> Option<usize> {
        let (before, unit) = (self.bound, self.unit);
        if let Some(size) = too_large {
            (self.bound, self.fitted) = ((size / 2).clamp(1, before), 0);
            tracing::warn!(
                size,
                most = self.bound,
                ?unit,
                "out of device memory; smaller batches from now on"
            );
        } else if self.bound < self.policy_bound {
            self.fitted += 1;
            if self.fitted >= FITTING_BATCHES {
                (self.bound, self.fitted) = (self.policy_bound.min(2 * before), 0);
                tracing::info!(most = self.bound, ?unit, "trying larger batches again");
            }
        }
        (self.bound != before).then_some(self.bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_halves_on_failure_and_doubles_after_enough_batches_fit() {
        let mut sizing = Sizing::new(100, Unit::Tokens);
        assert_eq!(
            (sizing.learn(None), sizing.learn(Some(80)), sizing.learn(Some(4))),
            (None, Some(40), Some(2))
        );
        let mut limits = Vec::new();
        for _ in 0..6 * FITTING_BATCHES {
            limits.extend(sizing.learn(None));
        }
        assert_eq!(limits, [4, 8, 16, 32, 64, 100]);
        assert_eq!((sizing.learn(Some(1)), sizing.learn(Some(1))), (Some(1), None), "one input is the least");
    }
}
