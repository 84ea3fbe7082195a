//! Splits a text into tokens as spaCy does for English: at white space; then the exceptions of
//! `tokenizer_exceptions.json` (contractions, abbreviations, emoticons); then punctuation, quotes, currencies and units
//! before and after a chunk, from the outside in; then hyphens, slashes and the like inside it.
//!
//! A chunk of more than [`MAX_CHARS`] characters is first cut into pieces of that length, because later steps are
//! quadratic in the length of a chunk.

use std::collections::HashMap;

use regex::Regex;

use crate::Error;
use crate::characters::{WORD, is_capital, is_letter_or_sign, is_small, is_space, is_word};

/// Maximum number of characters of a chunk: of text without white space.
pub const MAX_CHARS: usize = 256;

const QUOTES: &str = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉";
const PUNCTUATION: &str = "…,:;!?¿¡()[]{}<>_#*&。？！，、；：～·";
const ICONS: &str = "™®©°§¶†‡•";
const CURRENCIES: &str = "$£€¥฿₽₹₩₪₺₴₦₫₱₲₵₸₼₾₿";
const DOLLARS: [&str; 3] = ["US$", "C$", "A$"];
const UNITS: [&str; 48] = [
    "km", "km²", "km³", "m", "m²", "m³", "dm", "dm²", "dm³", "cm", "cm²", "cm³", "mm", "mm²", "mm³", "ha",
    "µm", "nm", "yd", "in", "ft", "kg", "g", "mg", "µg", "t", "lb", "oz", "m/s", "km/h", "kmh", "mph", "hPa",
    "Pa", "mbar", "mb", "MB", "kb", "KB", "gb", "GB", "tb", "TB", "T", "G", "M", "K", "%",
];

/// A part of the text, and whether white space follows.
pub type Spaced<'a> = (&'a str, bool);

pub struct Tokens {
    exceptions: HashMap<String, Vec<String>>,
    /// The length of the longest exception in bytes.
    longest: usize,
    address: Regex,
}

impl Tokens {
    pub fn new(exceptions: HashMap<String, Vec<String>>) -> Result<Self, Error> {
        let longest = exceptions.keys().map(String::len).max().unwrap_or(0);
        let address = format!(
            r"(?i)^(?:(?:(?:https?|ftp)://|www\.)\S+|[{WORD}.+\-]+@[{WORD}\-]+(?:\.[{WORD}\-]+)+|(?:[{WORD}\-]+\.)+(?:com|org|net|edu|gov|io|co|uk|de|fr|info|biz|us|ca|au|tv|me|ly|ai)(?:/\S*)?)$"
        );
        Ok(Self { exceptions, longest, address: Regex::new(&address)? })
    }

    /// The tokens of a text.
    pub fn of<'a>(&'a self, text: &'a str) -> Vec<Spaced<'a>> {
        let mut tokens: Vec<Spaced> = Vec::new();
        let mut rest = text.trim_start_matches(is_space);
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(rest.find(is_space).unwrap_or(rest.len()));
            for piece in pieces(chunk) {
                self.split(piece, &mut tokens);
            }
            if let Some((_, spaced)) = tokens.last_mut() {
                *spaced = !after.is_empty();
            }
            rest = after.trim_start_matches(is_space);
        }
        tokens
    }

    fn exception(&self, text: &str) -> Option<&[String]> {
        let parts = if text.len() <= self.longest { self.exceptions.get(text) } else { None };
        parts.map(Vec::as_slice)
    }

    fn split<'a>(&'a self, chunk: &'a str, tokens: &mut Vec<Spaced<'a>>) {
        if let Some(parts) = self.exception(chunk) {
            tokens.extend(parts.iter().map(|part| (part.as_str(), false)));
            return;
        }
        let (mut parts, mut behind) = (Vec::new(), Vec::new());
        let mut rest = chunk;
        while !rest.is_empty() && self.exception(rest).is_none() {
            let (front, inner) = rest.split_at(prefix_length(rest));
            if !front.is_empty() && self.exception(inner).is_some() {
                parts.push(front);
                rest = inner;
                break;
            }
            let (outer, back) = rest.split_at(rest.len() - suffix_length(inner));
            if !back.is_empty() && self.exception(outer).is_some() {
                behind.push(back);
                rest = outer;
                break;
            }
            if front.is_empty() && back.is_empty() {
                break;
            }
            parts.extend(Some(front).filter(|front| !front.is_empty()));
            behind.extend(Some(back).filter(|back| !back.is_empty()));
            rest = &rest[front.len()..rest.len() - back.len()];
        }
        if let Some(known) = self.exception(rest) {
            parts.extend(known.iter().map(String::as_str));
        } else if self.address.is_match(rest) {
            parts.push(rest);
        } else {
            split_inside(rest, &mut parts);
        }
        parts.extend(behind.into_iter().rev());
        self.join(&parts, tokens);
    }

    /// Adds the parts of a chunk to the tokens. Two or three of them that together are an exception become it, such as
    /// "Sept" and ".".
    fn join<'a>(&'a self, parts: &[&'a str], tokens: &mut Vec<Spaced<'a>>) {
        let mut at = 0;
        while at < parts.len() {
            let together = [3, 2].into_iter().find_map(|count| {
                let some = parts.get(at..at + count)?;
                let short = some.iter().map(|part| part.len()).sum::<usize>() <= self.longest;
                Some((count, self.exception(&short.then(|| some.concat())?)?))
            });
            if let Some((count, known)) = together {
                tokens.extend(known.iter().map(|part| (part.as_str(), false)));
                at += count;
            } else {
                tokens.push((parts[at], false));
                at += 1;
            }
        }
    }
}

/// A text in pieces of at most [`MAX_CHARS`] characters.
pub fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = rest.char_indices().nth(MAX_CHARS).map_or(rest.len(), |(at, _)| at);
        let (piece, after) = rest.split_at(end);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The length of two or more periods at the start of a text, else 0.
fn periods(text: &str) -> usize {
    let count = text.len() - text.trim_start_matches('.').len();
    if count > 1 { count } else { 0 }
}

/// The length of what is split off the start of a chunk.
fn prefix_length(text: &str) -> usize {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return 0 };
    let plus = first == '+' && !chars.next().is_some_and(|c| c.is_ascii_digit());
    let splits = |c| [PUNCTUATION, QUOTES, ICONS, CURRENCIES, "%=—–"].iter().any(|class| class.contains(c));
    if plus || splits(first) {
        return first.len_utf8();
    }
    let dollar = DOLLARS.iter().find(|dollar| text.starts_with(**dollar)).map_or(0, |dollar| dollar.len());
    periods(text).max(dollar)
}

/// The length of what is split off the end of a chunk: the longest possible.
fn suffix_length(text: &str) -> usize {
    let mut chars = text.chars().rev();
    let Some(last) = chars.next() else { return 0 };
    let (before, second) = (chars.next(), chars.next());
    let after_digit =
        |end: &str| text.strip_suffix(end).is_some_and(|front| front.ends_with(|c: char| c.is_ascii_digit()));
    let longest = |ends: &[&str]| ends.iter().filter(|end| after_digit(end)).map(|end| end.len()).max();
    let splits_period = |c: char| {
        c.is_ascii_digit()
            || is_small(c)
            || "%²-+".contains(c)
            || PUNCTUATION.contains(c)
            || QUOTES.contains(c)
    };
    let one = match last {
        '—' | '–' => true,
        '+' => before.is_some_and(|c| c.is_ascii_digit()),
        '.' => {
            let degrees = matches!(before, Some('F' | 'f' | 'C' | 'c' | 'K' | 'k')) && second == Some('°');
            let capitals = before.is_some_and(is_capital) && second.is_some_and(is_capital);
            degrees || capitals || before.is_some_and(splits_period)
        }
        _ => {
            [PUNCTUATION, QUOTES, ICONS].iter().any(|class| class.contains(last))
                || CURRENCIES.contains(last) && before.is_some_and(|c| c.is_ascii_digit())
        }
    };
    let run = text.len() - text.trim_end_matches('.').len();
    let two = ["……", "'s", "'S", "’s", "’S"].iter().find(|end| text.ends_with(**end)).map(|end| end.len());
    [one.then(|| last.len_utf8()), (run > 1).then_some(run), two, longest(&DOLLARS), longest(&UNITS)]
        .into_iter()
        .flatten()
        .max()
        .unwrap_or(0)
}

/// The length of what separates tokens at the start of `rest`, which `before` precedes; else 0.
fn infix_length(before: char, rest: &str) -> usize {
    let mut chars = rest.chars();
    let Some(first) = chars.next() else { return 0 };
    let next = chars.next().unwrap_or(' ');
    let letter_follows =
        |mark: &str| rest.strip_prefix(mark).is_some_and(|after| after.starts_with(is_letter_or_sign));
    let in_word = before != '_' && is_word(before);
    let splits = match first {
        '.' if next == '.' => return periods(rest),
        '.' => (is_small(before) || QUOTES.contains(before)) && (is_capital(next) || QUOTES.contains(next)),
        ',' => is_letter_or_sign(before) && is_letter_or_sign(next),
        ':' | '<' | '>' | '=' | '/' => in_word && is_letter_or_sign(next),
        '+' | '*' | '^' => before.is_ascii_digit() && (next.is_ascii_digit() || next == '-'),
        '-' if before.is_ascii_digit() && (next.is_ascii_digit() || next == '-') => true,
        '-' | '–' | '—' | '~' if in_word => {
            let mark = ["-", "–", "—", "--", "---", "——", "~"].into_iter().find(|mark| letter_follows(mark));
            return mark.map_or(0, str::len);
        }
        _ => first == '…' || ICONS.contains(first),
    };
    if splits { first.len_utf8() } else { 0 }
}

fn split_inside<'a>(text: &'a str, parts: &mut Vec<&'a str>) {
    let (mut start, mut at) = (0, 0);
    let mut before = None;
    while let Some(c) = text[at..].chars().next() {
        let length = infix_length(before.unwrap_or(' '), &text[at..]);
        if length == 0 {
            before = Some(c);
            at += c.len_utf8();
            continue;
        }
        if at > 0 {
            parts.extend(Some(&text[start..at]).filter(|part| !part.is_empty()));
            parts.push(&text[at..at + length]);
            start = at + length;
        }
        before = text[at..at + length].chars().next_back();
        at += length;
    }
    parts.extend(Some(&text[start..]).filter(|part| !part.is_empty()));
}
