//! Builds the text of an answer from its tokens' bytes. Decides which text may be sent: no incomplete character, and
//! nothing that may be the beginning of a stop string. Owns the text so far.

use std::sync::Arc;

/// The text of one answer.
#[derive(Clone, Debug, Default)]
pub struct Text {
    /// The stop strings, shared by all answers of a task.
    stops: Arc<[String]>,
    text: String,
    /// Bytes of a character that is not complete yet.
    incomplete: Vec<u8>,
    /// How many bytes of the text were sent.
    sent: usize,
}

impl Text {
    /// An empty text, which ends before any of these strings.
    pub fn new(stops: Arc<[String]>) -> Self {
        Self { stops, ..Self::default() }
    }

    /// Appends a token. Returns true if a stop string is complete; the text then ends before it.
    #[must_use]
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let old_len = self.text.len();
        self.incomplete.extend_from_slice(bytes);
        let mut bytes = std::mem::take(&mut self.incomplete);
        self.take_complete(&mut bytes);
        self.incomplete = bytes;
        let mut from = old_len.saturating_sub(longest);
        while !self.text.is_char_boundary(from) {
            from -= 1;
        }
        let new = &self.text[from..];
        let stop = self.stops.iter().filter_map(|stop| new.find(stop.as_str())).min();
        if let Some(offset) = stop {
            self.text.truncate(from + offset);
            self.incomplete.clear();
        }
        stop.is_some()
    }

    /// Moves the complete characters of `bytes` to the text.
    fn take_complete(&mut self, bytes: &mut Vec<u8>) {
        let mut done = 0;
        while let Some(chunk) = bytes[done..].utf8_chunks().next() {
            self.text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            // Invalid bytes at the end may be the beginning of a character.
            if invalid.is_empty() || done + invalid.len() == bytes.len() && may_become_valid(invalid) {
                break;
            }
            self.text.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
        bytes.drain(..done);
    }

    /// The text that may be sent and was not sent before.
    pub fn new_part(&mut self) -> String {
        let held_back = self.stops.iter().map(|stop| held_back_bytes(&self.text, stop)).max().unwrap_or(0);
        let end = (self.text.len() - held_back).max(self.sent);
        let part = self.text[self.sent..end].to_owned();
        self.sent = end;
        part
    }

    /// Ends the text, which then includes what was held back. Returns the part that was not sent before.
    pub fn end(&mut self) -> String {
        if !std::mem::take(&mut self.incomplete).is_empty() {
            self.text.push(char::REPLACEMENT_CHARACTER);
        }
        let part = self.text[self.sent..].to_owned();
        self.sent = self.text.len();
        part
    }

    /// The text so far.
    pub fn text(&self) -> &str {
        &self.text
    }
}

fn may_become_valid(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

/// The length in bytes of the longest end of `text` that is a beginning of `stop`.
fn held_back_bytes(text: &str, stop: &str) -> usize {
    let longest = stop.len().saturating_sub(1).min(text.len());
    let begins_stop = |length: &usize| stop.as_bytes().starts_with(&text.as_bytes()[text.len() - length..]);
    (1..=longest).rev().find(begins_stop).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_incomplete_character_is_held_back_and_an_invalid_one_is_replaced() {
        let mut text = Text::new(Arc::default());
        let bytes = "añ€😀".as_bytes();
        let mut parts = String::new();
        for byte in bytes {
            assert!(!text.push(&[*byte]));
            parts.push_str(&text.new_part());
        }
        assert_eq!((parts.as_str(), text.text()), ("añ€😀", "añ€😀"));
        assert!(!text.push(&[0xf0, 0x9f, b'x', 0xff, b'y', 0xe2, 0x82]));
        assert_eq!(text.new_part(), "\u{fffd}x\u{fffd}y");
        assert_eq!((text.end().as_str(), text.text()), ("\u{fffd}", "añ€😀\u{fffd}x\u{fffd}y\u{fffd}"));
    }

    #[test]
    fn the_beginning_of_a_stop_string_is_held_back_until_it_cannot_be_one() {
        let mut text = Text::new(["\n\nQ", "END"].map(str::to_owned).into());
        assert!(!text.push(b"one\n"));
        assert_eq!(text.new_part(), "one");
        assert!(!text.push(b"\n"));
        assert_eq!(text.new_part(), "");
        assert!(!text.push(b"two E"));
        assert_eq!(text.new_part(), "\n\ntwo ");
        assert!(text.push(b"ND of it"));
        assert_eq!((text.end().as_str(), text.text()), ("", "one\n\ntwo "));
    }

    #[test]
    fn the_end_includes_what_was_held_back() {
        let mut text = Text::new(["stop".to_owned()].into());
        assert!(!text.push(b"it is st"));
        assert_eq!((text.new_part().as_str(), text.end().as_str()), ("it is ", "st"));
    }

    proptest! {
        #[test]
        fn parts_join_to_the_text_which_ends_before_the_first_stop(
            pieces in prop::collection::vec("[ab€]{0,3}", 0..20),
            stops in prop::collection::vec("[ab€]{1,4}", 0..3),
        ) {
            let mut text = Text::new(stops.clone().into());
            let (mut parts, mut given, mut stopped) = (String::new(), String::new(), false);
            for piece in &pieces {
                given.push_str(piece);
                stopped = text.push(piece.as_bytes());
                parts.push_str(&text.new_part());
                if stopped { break; }
            }
            parts.push_str(&text.end());
            prop_assert_eq!(&parts, text.text());
            let first = stops.iter().filter_map(|stop| given.find(stop.as_str())).min();
            prop_assert_eq!(stopped, first.is_some());
            prop_assert_eq!(text.text(), &given[..first.unwrap_or(given.len())]);
        }
    }
}
