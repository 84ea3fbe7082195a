//! Splits a token into what may be words of their own: runs of letters with their apostrophes, parts of a word that is
//! written LikeThis, numbers, hyphens, and other characters one by one. Each character is inspected a few times.

use crate::characters::{is_capital, is_decimal, is_letter_or_sign, is_small, is_word};

pub fn is_apostrophe(c: char) -> bool {
    matches!(c, '\'' | '‘' | '’')
}

/// The pieces of a token. Apostrophes that belong to no piece are dropped.
pub fn pieces(token: &str) -> Vec<&str> {
    // A fast path, for most tokens.
    if !token.is_empty() && token.bytes().all(|c| c.is_ascii_lowercase()) {
        return vec![token];
    }
    let chars: Vec<(usize, char)> = token.char_indices().collect();
    let offset = |at: usize| chars.get(at).map_or(token.len(), |(offset, _)| *offset);
    let chars: Vec<char> = chars.iter().map(|(_, c)| *c).collect();
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let length = length(&chars, at);
        if length > 0 {
            pieces.push(&token[offset(at)..offset(at + length)]);
        }
        at += length.max(1);
    }
    pieces
}

/// The number of characters of the piece that begins at `at`; 0 if none begins there.
fn length(chars: &[char], at: usize) -> usize {
    let is = |at: usize, class: fn(char) -> bool| chars.get(at).copied().is_some_and(class);
    let run = |from: usize, class: fn(char) -> bool| chars[from..].iter().take_while(|c| class(**c)).count();
    let first = chars[at];
    if is_apostrophe(first) {
        let count = run(at, is_apostrophe);
        if at == 0 || count > 1 {
            return count;
        }
        let word = camel_case(chars, at);
        return if word > 0 { word } else { usize::from(at + 1 == chars.len()) };
    }
    // The first capital of "IPhone", but not that of "Phone".
    if is_capital(first) && is(at + 1, is_capital) && is(at + 2, is_small) {
        return 1;
    }
    let minus = usize::from(at == 0 && first == '-');
    let digits = number(&chars[at + minus..]);
    if digits > 0 {
        return minus + digits;
    }
    if matches!(first, '-' | '_') {
        return run(at, |c| matches!(c, '-' | '_'));
    }
    match camel_case(chars, at) {
        0 if is_letter_or_sign(first) => {
            let mut end = at + run(at, is_letter_or_sign);
            while is(end, is_apostrophe) && is(end + 1, is_letter_or_sign) {
                end += 2;
            }
            end - at
        }
        0 => usize::from(!is_word(first)),
        length => length,
    }
}

/// The number of characters of the number at the start: digits, and a comma or period before any of them.
fn number(chars: &[char]) -> usize {
    let mut end = 0;
    loop {
        let separator = usize::from(chars.get(end).is_some_and(|c| matches!(c, ',' | '.')));
        if !chars.get(end + separator).copied().is_some_and(is_decimal) {
            return end;
        }
        end += separator + 1;
    }
}

/// The number of characters from `at` up to the first small letter that a capital follows; 0 if the word has none.
fn camel_case(chars: &[char], at: usize) -> usize {
    let is = |at: usize, class: fn(char) -> bool| chars.get(at).copied().is_some_and(class);
    let mut end = at;
    while is(end, is_letter_or_sign) {
        if is_small(chars[end]) && is(end + 1, is_capital) {
            return end + 1 - at;
        }
        end += 1;
    }
    while is(end, is_apostrophe) && is(end + 1, is_letter_or_sign) {
        end += 2;
        if is(end, is_small) && is(end + 1, is_capital) {
            return end + 1 - at;
        }
    }
    0
}
