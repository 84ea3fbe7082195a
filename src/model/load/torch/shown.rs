//! How a name from a file is written in an error. Decides how much of it. Pure.

/// The most characters of a name.
const MAX_CHARACTERS: usize = 100;

/// A name without control characters, cut if it is long.
pub(super) fn shown(name: &str) -> String {
    let mut characters = name.chars();
    let text: String = characters.by_ref().take(MAX_CHARACTERS).flat_map(char::escape_debug).collect();
    if characters.next().is_some() { text + "…" } else { text }
}
