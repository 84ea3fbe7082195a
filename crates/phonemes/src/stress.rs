//! Stress marks of phonemes: which of them a word keeps, loses or gets.

/// The mark of the main stress.
pub const PRIMARY: char = 'ˈ';
/// The mark of a lesser stress.
pub const SECONDARY: char = 'ˌ';

pub fn is_vowel(c: char) -> bool {
    "AIOQWYaiuæɑɒɔəɛɜɪʊʌᵻ".contains(c)
}

pub fn is_consonant(c: char) -> bool {
    "bdfhjklmnpstvwzðŋɡɹɾʃʒʤʧθ".contains(c)
}

/// How a word's stress is changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// All stress marks are removed.
    Remove,
    /// The main stress becomes a lesser one. A word without stress stays so.
    Weaken,
    /// As `Weaken`, but a word without stress gets a lesser one.
    Lessen,
    /// A word without stress gets a lesser one.
    Mark,
    /// Lesser stresses become main ones if there is none. A word without stress gets a main one.
    Strengthen,
}

/// The phonemes with their stress changed.
pub fn change(phonemes: &str, change: Change) -> String {
    let (primary, secondary) = (phonemes.contains(PRIMARY), phonemes.contains(SECONDARY));
    match change {
        Change::Remove => phonemes.replace([PRIMARY, SECONDARY], ""),
        Change::Weaken | Change::Lessen if primary => {
            phonemes.replace(SECONDARY, "").replace(PRIMARY, SECONDARY.encode_utf8(&mut [0; 4]))
        }
        Change::Lessen | Change::Mark if !secondary && !primary => marked(SECONDARY, phonemes),
        Change::Strengthen if primary => phonemes.to_owned(),
        Change::Strengthen if secondary => phonemes.replace(SECONDARY, PRIMARY.encode_utf8(&mut [0; 4])),
        Change::Strengthen => marked(PRIMARY, phonemes),
        _ => phonemes.to_owned(),
    }
}

/// The phonemes with a mark before the first vowel, if there is one.
fn marked(mark: char, phonemes: &str) -> String {
    let mut marked = phonemes.to_owned();
    if let Some(at) = phonemes.find(is_vowel) {
        marked.insert(at, mark);
    }
    marked
}

/// The length of phonemes: diphthongs and affricates count twice.
pub fn weight(phonemes: &str) -> usize {
    phonemes.chars().map(|c| if "AIOQWYʤʧ".contains(c) { 2 } else { 1 }).sum()
}
