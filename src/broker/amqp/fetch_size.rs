//! How many messages a dead-letter browser fetches at once: few while nobody knows how large they are, then twice as
//! many each time, as long as they are small. Pure.

/// Messages of the first turn, before anybody knows how large they are.
const FIRST: u16 = 16;
/// Most messages of a turn.
const MOST: u16 = 512;
/// Bytes of bodies that a turn should hold. No bound: nobody knows a size before it comes, and of what
/// is larger than all before it a turn holds as many as it was meant to hold of the small.
const BYTES: usize = 64 << 20;

/// How many messages the next turn takes.
#[derive(Debug)]
pub(super) struct FetchSize {
    most: u16,
    /// The largest body, less by half with each turn that brings none of its size.
    largest: usize,
}

impl Default for FetchSize {
    fn default() -> Self {
        Self { most: FIRST, largest: 0 }
    }
}

impl FetchSize {
    /// Messages to take with the next turn, at most.
    pub(super) fn most(&self) -> u16 {
        self.most
    }

    /// A turn is over, whose largest body has so many bytes.
    pub(super) fn took(&mut self, largest: usize) {
        self.largest = largest.max(self.largest / 2);
        let affordable = u16::try_from(BYTES / self.largest.max(1)).unwrap_or(u16::MAX);
        self.most = self.most.saturating_mul(2).min(MOST).min(affordable).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(sizes: &[usize]) -> Vec<u16> {
        let mut fetch_size = FetchSize::default();
        let turn = |size: &usize| {
            fetch_size.took(*size);
            fetch_size.most()
        };
        sizes.iter().map(turn).collect()
    }

    #[test]
    fn turns_grow_by_doubling_however_small_the_first_messages_are() {
        assert_eq!(FetchSize::default().most(), 16);
        assert_eq!(turns(&[1; 7]), [32, 64, 128, 256, 512, 512, 512]);
    }

    #[test]
    fn large_messages_make_short_turns_and_one_of_them_not_for_ever() {
        assert_eq!(turns(&[8 << 20, 8 << 20, 8 << 20]), [8, 8, 8]);
        assert_eq!(turns(&[64 << 20, 1, 1, 1]), [1, 2, 4, 8]);
        assert_eq!(turns(&[1 << 40, 1 << 40]), [1, 1], "one at least");
    }
}
