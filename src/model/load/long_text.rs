//! Tokenises a text as far as a model can take it. The library takes up to 200 bytes of memory for a byte of text, and
//! as long for what is thrown away as for what stays. Decides how much of a long text is tokenised. Pure.

/// Bytes of text that are tokenised at first for each token that can be taken: four times those of a token of prose.
const FIRST_BYTES: usize = 16;

/// The side of a text that is too long from which its tokens are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first tokens.
    Beginning,
    /// The last ones.
    End,
}

impl Side {
    /// At least so many bytes of a text from this side, or all.
    fn part(self, text: &str, bytes: usize) -> &str {
        if bytes >= text.len() {
            return text;
        }
        let is_whole = |at: &usize| text.is_char_boundary(*at);
        match self {
            Self::Beginning => &text[..(bytes..text.len()).find(is_whole).unwrap_or(text.len())],
            Self::End => &text[(0..=text.len() - bytes).rev().find(is_whole).unwrap_or(0)..],
        }
    }
}

/// The ids of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextIds {
    /// All, or more than twice as many as were asked for, from one side.
    pub ids: Vec<u32>,
    /// Whether they are all.
    pub is_whole: bool,
}

/// The token ids of a text, by `encode`. If it has more than twice `most` tokens, only a part of it may have been tokenised,
/// from one side. The `most` ids nearest that side are still exactly those of the whole text: the cut is more than `most`
/// tokens away from them, and affects only the word or two beside it.
///
/// # Errors
/// Those of `encode`.
pub fn ids_of<E>(
    text: &str,
    most: usize,
    side: Side,
    encode: impl Fn(&str) -> Result<Vec<u32>, E>,
) -> Result<TextIds, E> {
    // Short texts are always taken whole.
    let mut bytes = most.max(64).saturating_mul(FIRST_BYTES);
    loop {
        let part = side.part(text, bytes);
        let ids = encode(part)?;
        let is_whole = part.len() == text.len();
        if is_whole || ids.len() > most.saturating_mul(2) {
            return Ok(TextIds { ids, is_whole });
        }
        bytes = bytes.saturating_mul(2);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::convert::Infallible;

    use super::*;

    /// A token for each word; the letters it has seen go to `seen`.
    fn words(text: &str, most: usize, side: Side) -> (TextIds, Vec<usize>) {
        let seen = RefCell::new(Vec::new());
        let encode = |part: &str| {
            seen.borrow_mut().push(part.len());
            Ok::<_, Infallible>(part.split_whitespace().map(|word| word.len() as u32).collect())
        };
        let Ok(ids) = ids_of(text, most, side, encode);
        (ids, seen.into_inner())
    }

    #[test]
    fn of_a_long_text_no_more_is_tokenised_than_can_be_taken() {
        let long = "é ".repeat(1 << 20);
        for side in [Side::Beginning, Side::End] {
            let (ids, seen) = words(&long, 100, side);
            assert!(!ids.is_whole && ids.ids.len() > 200, "{}", ids.ids.len());
            assert!(seen.iter().all(|bytes| *bytes < 1_700), "{seen:?}");
        }
        // Few tokens of many letters: more of the text is looked at, until there are enough.
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
    fn a_part_is_cut_between_characters() {
        let text = "añ€😀";
        for bytes in 0..12 {
            let (first, last) = (Side::Beginning.part(text, bytes), Side::End.part(text, bytes));
            assert!(text.starts_with(first) && text.ends_with(last));
            assert!(first.len() >= bytes.min(text.len()) && last.len() >= bytes.min(text.len()));
        }
    }
}
