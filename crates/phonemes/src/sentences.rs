//! Where a sentence ends. A line break always ends one. Otherwise it ends after `.`, `!`, `?` or `…`, closing quotes
//! and brackets (which are dropped), and white space. It does not end before a lowercase letter, nor after the period
//! of an abbreviation that what follows belongs to. Each character is inspected a few times.
//!
//! This file also decides where the phonemes of a long sentence are cut: between clauses if possible.

use crate::abbreviations::Abbreviations;
use crate::characters::is_space;

/// The sentences of a text, found as they are asked for.
pub struct Sentences<'a> {
    abbreviations: &'a Abbreviations,
    /// The rest of the current line, and of the text.
    line: &'a str,
    rest: &'a str,
}

impl<'a> Sentences<'a> {
    pub fn new(abbreviations: &'a Abbreviations, text: &'a str) -> Self {
        Self { abbreviations, line: "", rest: text }
    }

    /// The length of the line's first sentence, and of that sentence with what separates it from the next.
    fn end(&self) -> (usize, usize) {
        // Where the current word begins, without opening brackets and quotes. A tab separates no words here.
        let mut word = None;
        let mut track_word = |at: usize, c: char| {
            if matches!(c, ' ' | '\u{a0}' | '\u{202f}') {
                word = None;
            } else if word.is_none() && !matches!(c, '(' | '[' | '"' | '“' | '\'' | '‘') {
                word = Some(at);
            }
            word
        };
        let mut chars = self.line.char_indices().peekable();
        while let Some((at, c)) = chars.next() {
            let word = track_word(at, c);
            if !matches!(c, '.' | '!' | '?' | '…') {
                continue;
            }
            let end = at + c.len_utf8();
            let after = self.line[end..].trim_start_matches(['"', '”', '’', ')', ']']);
            let next = after.trim_start_matches(is_space);
            if next.len() < after.len()
                && next.chars().next().is_some_and(|c| !c.is_lowercase())
                && (c != '.' || !self.goes_on(word.unwrap_or(at), at, next))
            {
                return (end, self.line.len() - next.len());
            }
            // The characters up to here end no sentence either. They are not inspected again.
            let inspected = self.line.len() - next.len();
            while let Some((at, c)) = chars.next_if(|(at, _)| *at < inspected) {
                track_word(at, c);
            }
        }
        (self.line.len(), self.line.len())
    }

    /// Whether the sentence goes on with `next` after the period at `at` of the word that begins at `word`.
    fn goes_on(&self, word: usize, at: usize, next: &str) -> bool {
        let word = &self.line[word..at];
        // The abbreviation of "mid-Jan." and "non-U.S.", but not an initial of "USB-C.".
        let last = word.rsplit(['-', '–', '—', '/']).next().filter(|last| last.chars().nth(1).is_some());
        let abbreviation = last.unwrap_or(word);
        let (before, text) = self.line.split_at(at - abbreviation.len());
        !abbreviation.contains(is_space) && self.abbreviations.goes_on(before, text, next)
    }
}

impl<'a> Iterator for Sentences<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        loop {
            while self.line.is_empty() {
                if self.rest.is_empty() {
                    return None;
                }
                let (line, rest) = self.rest.split_once('\n').unwrap_or((self.rest, ""));
                (self.line, self.rest) = (line.trim_matches(is_space), rest);
            }
            let (end, next) = self.end();
            let sentence = &self.line[..end];
            self.line = &self.line[next..];
            if !sentence.chars().all(is_space) {
                return Some(sentence);
            }
        }
    }
}

/// The phonemes of a sentence in parts of at most `max_chars` characters. A part ends before white space that follows
/// `,`, `;`, `:` or `—`; if there is none, before other white space; else anywhere.
pub fn parts(phonemes: &str, max_chars: usize) -> impl Iterator<Item = &str> {
    let mut rest = phonemes;
    std::iter::from_fn(move || {
        rest = rest.trim_start_matches(is_space);
        let (mut clause, mut word, mut end) = (None, None, rest.len());
        let mut before = ' ';
        for (count, (at, c)) in rest.char_indices().enumerate() {
            if is_space(c) && !is_space(before) {
                word = Some(at);
                clause = if matches!(before, ',' | ';' | ':' | '—') { word } else { clause };
            }
            if count >= max_chars.max(1) {
                end = clause.or(word).unwrap_or(at);
                break;
            }
            before = c;
        }
        let (part, after) = rest.split_at(end);
        rest = after;
        (!part.is_empty()).then_some(part)
    })
}
