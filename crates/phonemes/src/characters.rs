//! Classes of characters, as Python's `str` and `re` define them, on which the tables and rules were made. They differ
//! from those of Rust and of the crate `regex` in marks (no letters here) and in numbers such as ² and ½ (part of words
//! here).

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;
use unicode_normalization::UnicodeNormalization as _;

/// A class of the crate `regex`: what words consist of. For use between brackets.
pub const WORD: &str = r"\p{L}\p{N}_";

#[expect(clippy::unwrap_used, reason = "the pattern is constant")]
static LETTER: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^\p{L}").unwrap());
#[expect(clippy::unwrap_used, reason = "the pattern is constant")]
static DECIMAL: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^\p{Nd}").unwrap());

fn is(class: &Regex, c: char) -> bool {
    class.is_match(c.encode_utf8(&mut [0; 4]))
}

/// A letter of any script.
pub fn is_letter(c: char) -> bool {
    // Up to U+0300 each alphabetic character is a letter.
    c.is_alphabetic() && (c < '\u{300}' || is(&LETTER, c))
}

/// What a word consists of: letters, numbers, and the underscore.
pub fn is_word(c: char) -> bool {
    c == '_' || c.is_numeric() || is_letter(c)
}

/// A digit of any script that has a decimal system.
pub fn is_decimal(c: char) -> bool {
    c.is_ascii_digit() || !c.is_ascii() && c.is_numeric() && is(&DECIMAL, c)
}

/// A digit, also raised, lowered, or in a circle.
pub fn is_digit(c: char) -> bool {
    is_decimal(c)
        || matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉' | '①'..='⑨' | '⑴'..='⑼' | '⒈'..='⒐' | '❶'..='❾' | '➀'..='➈' | '➊'..='➒')
}

/// What runs of letters consist of in a word: all but decimal digits and the underscore.
pub fn is_letter_or_sign(c: char) -> bool {
    c != '_' && is_word(c) && !is_decimal(c)
}

/// White space, with the four separators of ASCII.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// A lowercase letter of Latin-1.
pub fn is_small(c: char) -> bool {
    matches!(c, 'a'..='z' | 'ß'..='ö' | 'ø'..='ÿ')
}

/// An uppercase letter of Latin-1.
pub fn is_capital(c: char) -> bool {
    matches!(c, 'A'..='Z' | 'À'..='Ö' | 'Ø'..='Þ')
}

/// The ASCII digit of the same value, for a decimal digit of another script; other characters as they are.
pub fn to_ascii_digit(c: char) -> char {
    if c.is_ascii() || !is_decimal(c) {
        return c;
    }
    // Decimal digits come in runs from 0 to 9. At most five runs follow each other.
    let before = |n: u32| char::from_u32(u32::from(c).wrapping_sub(n)).is_some_and(is_decimal);
    let place = (1..50).take_while(|n| before(*n)).count() as u32 % 10;
    char::from_digit(place, 10).unwrap_or(c)
}

/// The text with ASCII digits: for decimal digits of other scripts and lowered digits, and for numbers in circles, in
/// brackets and with a period, which become words of their own. The characters of Roman numerals become letters. Raised
/// digits, and the fractions that the tables have, stay.
pub fn with_ascii_digits(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return Cow::Borrowed(text);
    }
    let mut result = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '٫' => result.push('.'),
            '٬' => result.push(','),
            '⁄' => result.push('/'),
            '٪' | '％' => result.push('%'),
            '₀'..='₉' | 'Ⅰ'..='ⅿ' => result.extend(c.nfkc()),
            _ if c.is_ascii() || !c.is_numeric() => result.push(c),
            _ if is_decimal(c) => result.push(to_ascii_digit(c)),
            _ => match enclosed(c) {
                Some(number) => result.extend([" ", &number, " "]),
                None => result.push(c),
            },
        }
    }
    Cow::Owned(result)
}

/// The number of a character that encloses it, or a fraction.
fn enclosed(c: char) -> Option<String> {
    if "½¼¾⁰¹²³⁴⁵⁶⁷⁸⁹".contains(c) {
        return None;
    }
    let number: String = c.nfkc().map(|c| if c == '⁄' { '/' } else { c }).collect();
    let number = number.trim_matches(['(', ')', '.', ',']);
    number.bytes().all(|c| c.is_ascii_digit() || c == b'/').then(|| number.to_owned())
}

/// The last `count` characters of a text, or all of a shorter one.
pub fn last_chars(text: &str, count: usize) -> &str {
    match text.char_indices().rev().nth(count.saturating_sub(1)) {
        Some((at, _)) if count > 0 => &text[at..],
        _ => text,
    }
}
