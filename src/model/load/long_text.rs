//! Tokenises only as much of a long text as a model can use. The tokenizers library takes up to 200 bytes of memory for
//! a byte of text, and as much time for tokens that are dropped as for those that are kept. Owns no state.

/// Bytes of text that are tokenised at first for each token that fits: four times the bytes of a token of prose.
const FIRST_BYTES: usize = 16;

/// The most bytes of a text that are tokenised, unless it may have so many tokens that more are allowed.
pub const MAX_BYTES: usize = 256 << 10;
/// The most bytes of a text that are tokenised for each token that fits.
const MAX_BYTES_PER_TOKEN: usize = 256;

/// The side from which the tokens of a text are taken if it is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first tokens.
    Beginning,
    /// The last tokens.
    End,
}

impl Side {
    /// Returns at least `bytes` bytes of a text from this side, cut between characters, or the whole text.
    fn part(self, text: &str, bytes: usize) -> &str {
        if bytes >= text.len() {
            return text;
        }
        let is_boundary = |index: &usize| text.is_char_boundary(*index);
        match self {
            Self::Beginning => &text[..(bytes..text.len()).find(is_boundary).unwrap_or(text.len())],
            Self::End => &text[(0..=text.len() - bytes).rev().find(is_boundary).unwrap_or(0)..],
        }
    }
}

/// The ids of a text, alone or with their places in it.
pub trait Ids {
    /// The number of ids.
    fn count(&self) -> usize;
}

impl Ids for Vec<u32> {
    fn count(&self) -> usize {
        self.len()
    }
}

impl Ids for tokenizers::Encoding {
    fn count(&self) -> usize {
        self.len()
    }
}

/// The ids of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextIds<I = Vec<u32>> {
    /// All ids, or the ids at one side, more than twice as many as requested.
    pub ids: I,
    /// Whether these are all ids of the text.
    pub is_whole: bool,
}

/// Why the ids of a text are not found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoIds<E> {
    /// The error of `encode`.
    Failed(E),
    /// Many bytes of the text have only a few tokens. Some tokenizers drop whole runs of characters, such as spaces. The
    /// rest of the text is not tokenised, since that could take seconds.
    TooFewTokens {
        /// The bytes that were tokenised.
        read: usize,
        /// Their tokens.
        tokens: usize,
    },
}

/// The token ids of a text, by `encode`. If the text has more than twice `max_ids` tokens, it may be tokenised only in
/// part, from one side. The `max_ids` ids at that side are still exactly those of the whole text: the cut is more than
/// `max_ids` tokens away from them, and affects only the one or two words next to it.
///
/// # Errors
/// [`NoIds`].
pub fn ids_of<I: Ids, E>(
    text: &str,
    max_ids: usize,
    side: Side,
    encode: impl Fn(&str) -> Result<I, E>,
) -> Result<TextIds<I>, NoIds<E>> {
    // Short texts are always tokenised whole.
    let mut bytes = max_ids.max(64).saturating_mul(FIRST_BYTES);
    let max_bytes = max_ids.saturating_mul(MAX_BYTES_PER_TOKEN).max(MAX_BYTES);
    loop {
        let part = side.part(text, bytes);
        let ids = encode(part).map_err(NoIds::Failed)?;
        let is_whole = part.len() == text.len();
        if is_whole || ids.count() > max_ids.saturating_mul(2) {
            return Ok(TextIds { ids, is_whole });
        }
        if bytes >= max_bytes {
            return Err(NoIds::TooFewTokens { read: part.len(), tokens: ids.count() });
        }
        bytes = bytes.saturating_mul(2).min(max_bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::convert::Infallible;

    use super::*;

    /// Makes a token of each word. The second result is the length of each part that was tokenised.
    fn words(text: &str, max_ids: usize, side: Side) -> (TextIds, Vec<usize>) {
        let seen = RefCell::new(Vec::new());
        let encode = |part: &str| {
            seen.borrow_mut().push(part.len());
            Ok::<_, Infallible>(part.split_whitespace().map(|word| word.len() as u32).collect())
        };
        let ids = ids_of(text, max_ids, side, encode).unwrap();
        (ids, seen.into_inner())
    }

    #[test]
    fn only_the_needed_part_of_a_long_text_is_tokenised() {
        let long = "é ".repeat(1 << 20);
        for side in [Side::Beginning, Side::End] {
            let (ids, seen) = words(&long, 100, side);
            assert!(!ids.is_whole && ids.ids.len() > 200, "{}", ids.ids.len());
            assert!(seen.iter().all(|bytes| *bytes < 1_700), "{seen:?}");
        }
        // If tokens have many letters, more of the text is tokenised, until there are enough tokens.
        let wide = ("a".repeat(99) + " ").repeat(10_000);
        let (ids, seen) = words(&wide, 100, Side::Beginning);
        assert!(!ids.is_whole && ids.ids.len() > 200 && seen.last() < Some(&51_300), "{seen:?}");
        let one = "a".repeat(100_000);
        let (ids, seen) = words(&one, 100, Side::End);
        assert_eq!((ids.is_whole, ids.ids, seen.last()), (true, vec![100_000], Some(&100_000)));
        let (ids, seen) = words("a bc", 1, Side::Beginning);
        assert_eq!((ids.is_whole, ids.ids, seen), (true, vec![1, 2], vec![4]));
    }

    #[test]
    fn a_text_without_tokens_is_read_only_to_a_bound() {
        let seen = RefCell::new(0);
        let encode = |part: &str| {
            *seen.borrow_mut() += part.len();
            Ok::<Vec<u32>, Infallible>(part.split_whitespace().map(|_| 1).collect())
        };
        let text = format!("a{}b", " ".repeat(8 << 20));
        for side in [Side::Beginning, Side::End] {
            let error = ids_of(&text, 77, side, encode).unwrap_err();
            assert_eq!(error, NoIds::TooFewTokens { read: MAX_BYTES, tokens: 1 });
        }
        // On each side every part is twice as long as the one before.
        assert!(*seen.borrow() < 5 * MAX_BYTES, "{seen:?}");
        // Many tokens may need many bytes.
        let ids = ids_of(&text[..1 << 20], 5_000, Side::Beginning, encode).unwrap();
        assert!(ids.is_whole);
    }

    #[test]
    fn a_part_is_cut_between_characters() {
        let text = "añ€😀";
        for bytes in 0..12 {
            let (first, last) = (Side::Beginning.part(text, bytes), Side::End.part(text, bytes));
            assert!(text.starts_with(first) && text.ends_with(last));
            assert!(first.len() >= bytes.min(text.len()) && last.len() >= bytes.min(text.len()));
        }
    }
}
