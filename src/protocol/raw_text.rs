//! Text for short strings of AMQP that are not UTF-8, such as the 16 bytes of a UUID. Each byte that is not UTF-8
//! becomes one character of U+F700..=U+F7FF, a part of Unicode's private use area, so that different bytes give
//! different texts. Pure.

const FIRST: u32 = 0xF700;
const LAST: u32 = 0xF7FF;

/// The text for `bytes`. UTF-8 stays as it is, except that the characters with which bytes are escaped are
/// escaped themselves.
pub fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    let escaped = |byte: &u8| char::from_u32(FIRST + u32::from(*byte)).unwrap_or_default();
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match byte_of(character) {
                Some(_) => text.extend(character.encode_utf8(&mut [0; 4]).as_bytes().iter().map(escaped)),
                None => text.push(character),
            }
        }
        text.extend(chunk.invalid().iter().map(escaped));
    }
    text
}

/// The bytes for which [`escape`] gives `text`.
pub fn unescape(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for character in text.chars() {
        match byte_of(character) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

/// An escaped text for people: each escaped byte, and each byte of a control character, as `\xNN`.
pub fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let hex = |byte: u8| format!("\\x{byte:02x}");
    for character in text.chars() {
        match byte_of(character) {
            Some(byte) => shown.push_str(&hex(byte)),
            None if character.is_control() => {
                shown.extend(character.encode_utf8(&mut [0; 4]).bytes().map(hex));
            }
            None => shown.push(character),
        }
    }
    shown
}

/// Whether a text stands for bytes that are not UTF-8.
pub fn is_raw(text: &str) -> bool {
    is_escaped(text) && str::from_utf8(&unescape(text)).is_err()
}

/// Whether a text has an escape. Its bytes may be UTF-8 nevertheless, since characters that look like escapes are
/// escaped too.
pub fn is_escaped(text: &str) -> bool {
    text.chars().any(|character| byte_of(character).is_some())
}

/// The byte that `character` stands for, if it stands for one.
fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    (FIRST..=LAST).contains(&code).then(|| (code - FIRST) as u8)
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn text_without_private_characters_is_its_own_escape() {
        for text in ["", "plain", "Grüße, 世界 🎉", "\0\u{7f}\u{f6ff}\u{f800}"] {
            assert_eq!(escape(text.as_bytes()), text);
            assert_eq!(visible(text), text.replace('\0', "\\x00").replace('\u{7f}', "\\x7f"));
        }
    }

    #[test]
    fn each_byte_that_is_not_utf_8_is_one_character() {
        assert_eq!(escape(b"a\xff\xfeb"), "a\u{f7ff}\u{f7fe}b");
        assert_eq!(escape("é".as_bytes().split_at(1).0), "\u{f7c3}");
        assert_eq!(visible(&escape(b"a\xff\x80b")), "a\\xff\\x80b");
    }

    #[test]
    fn characters_that_look_escaped_are_escaped_themselves() {
        let text = "\u{f700}\u{f7ff}";
        assert_eq!(escape(text.as_bytes()).chars().count(), 6);
        assert_eq!(unescape(&escape(text.as_bytes())), text.as_bytes());
        assert!(is_escaped(text) && is_escaped(&escape(b"\xff")) && !is_escaped("é"));
        assert!(is_raw(&escape(b"a\xff")) && !is_raw(&escape(text.as_bytes())) && !is_raw("é"));
    }

    #[test]
    fn unescape_is_the_inverse_of_escape_for_any_bytes() {
        let mut random = StdRng::seed_from_u64(1);
        for _ in 0..20_000 {
            let length = random.random_range(0..24);
            // About half of the bytes are those that occur in the UTF-8 of private characters.
            let mut byte = || match random.random::<bool>() {
                true => random.random::<u8>(),
                false => [0xef, 0x9c, 0x9d, 0x9e, 0x9f, 0x80, 0xbf][random.random_range(0..7)],
            };
            let bytes: Vec<u8> = (0..length).map(|_| byte()).collect();
            assert_eq!(unescape(&escape(&bytes)), bytes);
        }
    }
}
