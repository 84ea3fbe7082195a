//! Cuts long sentences of phonemes where a speaker would pause. Pure.

/// The most symbols that the network gets at once: about 34 s of sound.
const MAX_SYMBOLS: usize = 400;

/// The parts of a sentence, each of [`MAX_SYMBOLS`] at most. A part ends after a clause if one ends there, or else
/// between words, or else inside a word. Parts without symbols are left out.
pub fn cut(phonemes: &str) -> impl Iterator<Item = &str> {
    let mut rest = phonemes;
    std::iter::from_fn(move || {
        rest = rest.trim_matches(' ');
        if rest.is_empty() {
            return None;
        }
        let (part, others) = rest.split_at(length_of_part(rest));
        rest = others;
        Some(part)
    })
}

/// The bytes of the first part.
fn length_of_part(phonemes: &str) -> usize {
    let Some((limit, _)) = phonemes.char_indices().nth(MAX_SYMBOLS) else { return phonemes.len() };
    let window = &phonemes[..limit];
    let after_clause = window.rmatch_indices([',', ';', ':', '—']).find_map(|(at, mark)| {
        let end = at + mark.len();
        window[end..].starts_with(' ').then_some(end)
    });
    after_clause.or_else(|| window.rfind(' ').filter(|at| *at > 0)).unwrap_or(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(phonemes: &str) -> Vec<usize> {
        cut(phonemes).map(|part| part.chars().count()).collect()
    }

    #[test]
    fn a_long_sentence_is_cut_after_a_clause_else_between_words_else_anywhere() {
        assert_eq!(cut("").count() + cut("   ").count(), 0);
        assert_eq!(lengths("həlˈO ðˈɛɹ."), [11]);
        let clause = format!("{}, {}", "ə".repeat(300), "ə ".repeat(100).trim_end());
        assert_eq!(lengths(&clause), [301, 199]);
        let words = "əə ".repeat(200);
        assert_eq!(lengths(&words), [398, 200]);
        assert_eq!(lengths(&"ə".repeat(1_000)), [400, 400, 200]);
    }
}
