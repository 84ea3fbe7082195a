//! How a known word, an abbreviation or a number is read, given its part of speech and what follows. There are two
//! dictionaries: gold, and silver, which is less reliable. The endings -s, -ed and -ing are added by rule.
//!
//! Words of the dictionaries consist of ASCII letters, hyphens, apostrophes and periods. A word with another character
//! is therefore unknown at once.

use std::collections::HashMap;

use regex::Regex;
use serde::Deserialize;

use crate::numbers;
use crate::stress::{self, Change, PRIMARY, SECONDARY};
use crate::{Accent, Error};

/// A word's phonemes.
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    One(Box<str>),
    /// By part of speech. A null value says that the word is spelled. The key `None`, a text, is for words before a pause.
    ByTag(HashMap<Box<str>, Option<Box<str>>>),
}

/// A dictionary. A word in lower case also stands for its capitalized form and the other way round, unless that has its
/// own entry.
#[derive(Deserialize)]
#[serde(transparent)]
pub struct Dictionary(HashMap<Box<str>, Entry>);

/// Longer words are not looked up. The longest word of the dictionaries has 45 letters.
const MAX_CHARS: usize = 64;

impl Dictionary {
    fn get(&self, word: &str) -> Option<&Entry> {
        if word.len() > MAX_CHARS {
            return None;
        }
        if let Some(entry) = self.0.get(word) {
            return Some(entry);
        }
        let first = word.get(..1)?;
        let rest = &word[1..];
        if rest.is_empty() || has_upper(rest) {
            return None;
        }
        let other = if has_upper(first) { first.to_ascii_lowercase() } else { first.to_ascii_uppercase() };
        if other == first { None } else { self.0.get((other + rest).as_str()) }
    }

    fn has(&self, word: &str) -> bool {
        self.get(word).is_some()
    }
}

/// What follows a word.
#[derive(Clone, Copy, Default)]
pub struct Ahead {
    /// Whether it begins with a vowel; none at the end and before a pause.
    pub vowel: Option<bool>,
    /// Whether it is the word "to".
    pub to: bool,
}

/// A word whose phonemes are wanted.
#[derive(Clone, Copy)]
pub struct Word<'a> {
    /// In ASCII.
    pub text: &'a str,
    pub tag: &'a str,
    /// The currency that precedes a number.
    pub currency: Option<&'a str>,
    /// Whether it begins a chunk of text.
    pub is_head: bool,
}

/// What decides how an entry of a dictionary is read.
#[derive(Clone, Copy)]
struct Context<'a> {
    /// The part of speech; empty if it is not known.
    tag: &'a str,
    /// How the stress is changed.
    change: Option<Change>,
    /// What follows. None inside a number.
    ahead: Option<Ahead>,
}

impl Context<'_> {
    /// That of a word of which nothing is known.
    const NONE: Self = Self { tag: "", change: None, ahead: None };
}

pub struct Lexicon {
    gold: Dictionary,
    silver: Dictionary,
    accent: Accent,
    /// Matches words in -ing whose stem ends with a doubled letter, such as "running".
    doubled: Regex,
}

/// The names of a currency and of its hundredth.
pub fn currency(symbol: &str) -> Option<[&'static str; 2]> {
    match symbol {
        "$" => Some(["dollar", "cent"]),
        "£" => Some(["pound", "pence"]),
        "€" => Some(["euro", "cent"]),
        _ => None,
    }
}

fn symbol(text: &str) -> Option<&'static str> {
    match text {
        "%" => Some("percent"),
        "&" => Some("and"),
        "+" => Some("plus"),
        "@" => Some("at"),
        _ => None,
    }
}

fn has_upper(word: &str) -> bool {
    word.bytes().any(|c| c.is_ascii_uppercase())
}

fn has_lower(word: &str) -> bool {
    word.bytes().any(|c| c.is_ascii_lowercase())
}

fn is_alphabetic(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|c| c.is_ascii_alphabetic())
}

fn all_digits(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|c| c.is_ascii_digit())
}

/// The class of a tag under which entries may have phonemes.
fn class(tag: &str) -> &str {
    match tag {
        _ if tag.starts_with("VB") => "VERB",
        _ if tag.starts_with("NN") => "NOUN",
        _ if tag.starts_with("ADV") || tag.starts_with("RB") => "ADV",
        _ if tag.starts_with("ADJ") || tag.starts_with("JJ") => "ADJ",
        _ => tag,
    }
}

/// Whether a "t" between this and a vowel is flapped in American English.
fn flaps(before: char) -> bool {
    "AIOWYiuæɑəɛɪɹʊʌ".contains(before)
}

/// Whether the text is an abbreviation with periods inside: at most two letters between periods.
fn is_dotted(word: &str) -> bool {
    let inner = word.trim_matches('.');
    inner.contains('.')
        && word.split('.').all(|part| part.is_empty() || part.len() < 3 && is_alphabetic(part))
}

impl Lexicon {
    pub fn new(gold: Dictionary, silver: Dictionary, accent: Accent) -> Result<Self, Error> {
        let letters = "bcdgklmnprstvxz";
        let doubled: String = letters.chars().map(|c| format!("{c}{c}ing|")).collect();
        Ok(Self { gold, silver, accent, doubled: Regex::new(&format!("(?:{doubled}cking)$"))? })
    }

    /// The phonemes of a word; none if it is unknown.
    pub fn read(&self, word: Word, ahead: Ahead) -> Option<String> {
        let text = word.text;
        if !text.is_ascii() {
            return None;
        }
        let change = match (has_upper(text), has_lower(text)) {
            (false, _) => None,
            (true, true) => Some(Change::Mark),
            (true, false) => Some(Change::Strengthen),
        };
        match self.word(text, Context { tag: word.tag, change, ahead: Some(ahead) }) {
            Some(phonemes) => {
                let unit = word.currency.and_then(currency).and_then(|[unit, _]| self.plural(unit));
                Some(unit.map_or(phonemes.clone(), |unit| format!("{phonemes} {unit}")))
            }
            None if is_number(text, word.is_head) => self.number(text, word.currency, word.is_head),
            None => None,
        }
    }

    fn word(&self, word: &str, context: Context) -> Option<String> {
        if word.bytes().any(|c| c.is_ascii_digit()) {
            return None;
        }
        if let Some(phonemes) = self.special(word, context) {
            return Some(phonemes);
        }
        let lower = self.readable_in_lower_case(word, context);
        let word = lower.as_deref().unwrap_or(word);
        let known = |word: &str| self.is_known(word).then(|| self.look_up(word, context));
        if let Some(phonemes) = known(word) {
            return phonemes;
        }
        if let Some(stem) = word.strip_suffix('\'') {
            let possessive = stem.strip_suffix('s').and_then(|stem| known(&format!("{stem}'s")));
            if let Some(phonemes) = possessive.or_else(|| known(stem)) {
                return phonemes;
            }
        }
        let for_ing = Context { change: context.change.or(Some(Change::Mark)), ..context };
        self.with_s(word, context)
            .or_else(|| self.with_ed(word, context))
            .or_else(|| self.with_ing(word, for_ing))
    }

    /// The word in lower case if it is in capitals or capitalized, and only known so.
    fn readable_in_lower_case(&self, word: &str, context: Context) -> Option<String> {
        let letters = |word: &str| {
            word.bytes().all(|c| c.is_ascii_alphabetic() || c == b'\'') && word.bytes().any(|c| c != b'\'')
        };
        if word.len() < 2 || !has_upper(word) || !letters(word) || context.tag == "NNP" && word.len() <= 7 {
            return None;
        }
        if has_lower(word) && has_upper(&word[1..]) || self.gold.has(word) || self.silver.has(word) {
            return None;
        }
        let lower = word.to_ascii_lowercase();
        let readable = self.gold.has(&lower)
            || self.silver.has(&lower)
            || self.with_s(&lower, context).is_some_and(|p| !p.is_empty())
            || self.with_ed(&lower, context).is_some_and(|p| !p.is_empty())
            || self.with_ing(&lower, context).is_some_and(|p| !p.is_empty());
        readable.then_some(lower)
    }

    /// Words with rules of their own.
    fn special(&self, word: &str, context: Context) -> Option<String> {
        let Context { tag, change, ahead } = context;
        let ahead = ahead.unwrap_or_default();
        let plain = Context { tag: "", change: None, ..context };
        let weak = Context { change: Some(Change::Weaken), ..plain };
        let entry = |word: &str, tag: &str| match self.gold.get(word)? {
            Entry::One(phonemes) => Some(phonemes.to_string()),
            Entry::ByTag(tags) => tags.get(tag).cloned().flatten().map(String::from),
        };
        let noun = tag.starts_with("NN");
        let phonemes = match word {
            "." if tag == "ADD" => return self.look_up("dot", weak),
            "/" if tag == "ADD" => return self.look_up("slash", weak),
            "%" | "&" | "+" | "@" => return self.look_up(symbol(word)?, plain),
            _ if is_dotted(word) => return self.spelled(word),
            "a" | "A" => {
                if tag == "DT" {
                    "ɐ"
                } else {
                    "ˈA"
                }
            }
            "am" | "Am" | "AM" => match () {
                () if noun => return self.spelled(word),
                () if ahead.vowel.is_none() || word != "am" || change.is_some() => return entry("am", ""),
                () => "ɐm",
            },
            "AN" if noun => return self.spelled(word),
            "an" | "An" | "AN" => "ɐn",
            "I" if tag == "PRP" => "ˌI",
            "by" | "By" | "BY" if class(tag) == "ADV" => "bˈI",
            "to" | "To" => return self.word_to(ahead),
            "TO" if matches!(tag, "TO" | "IN") => return self.word_to(ahead),
            "IN" if tag == "NNP" => return None,
            "in" | "In" | "IN" => {
                if ahead.vowel.is_none() || tag != "IN" {
                    "ˈɪn"
                } else {
                    "ɪn"
                }
            }
            "THE" if tag != "DT" => return None,
            "the" | "The" | "THE" => {
                if ahead.vowel == Some(true) {
                    "ði"
                } else {
                    "ðə"
                }
            }
            _ if tag == "IN" && (word.eq_ignore_ascii_case("vs") || word.eq_ignore_ascii_case("vs.")) => {
                return self.look_up("versus", plain);
            }
            "used" | "Used" | "USED" => {
                let past = matches!(tag, "VBD" | "JJ") && ahead.to;
                return entry("used", if past { "VBD" } else { "DEFAULT" });
            }
            _ => return None,
        };
        Some(phonemes.to_owned())
    }

    /// The phonemes of the word "to".
    fn word_to(&self, ahead: Ahead) -> Option<String> {
        match (ahead.vowel, self.gold.get("to")) {
            (Some(true), _) => Some("tʊ".to_owned()),
            (Some(false), _) => Some("tə".to_owned()),
            (None, Some(Entry::One(phonemes))) => Some(phonemes.to_string()),
            (None, _) => None,
        }
    }

    /// Whether a word is read by `look_up`: it is in a dictionary, or spelled.
    fn is_known(&self, word: &str) -> bool {
        if self.gold.has(word) || symbol(word).is_some() || self.silver.has(word) {
            return true;
        }
        is_alphabetic(word) && !has_lower(&word[1..])
    }

    /// The phonemes of a word in a dictionary; those of its letters if it is in none.
    fn look_up(&self, word: &str, Context { tag, change, ahead }: Context) -> Option<String> {
        let in_capitals = !has_lower(word) && !self.gold.has(word);
        let lower = in_capitals.then(|| word.to_ascii_lowercase());
        let word = lower.as_deref().unwrap_or(word);
        let is_name = in_capitals && tag == "NNP";
        let entry = self.gold.get(word).or_else(|| if is_name { None } else { self.silver.get(word) });
        let phonemes = entry.and_then(|entry| match entry {
            Entry::One(phonemes) => Some(phonemes),
            Entry::ByTag(tags) => {
                let at_a_pause = ahead.is_some_and(|ahead| ahead.vowel.is_none());
                let by_pause = if at_a_pause { tags.get("None") } else { None };
                let by_tag = || tags.get(tag).or_else(|| tags.get(class(tag)));
                by_pause.or_else(by_tag).or_else(|| tags.get("DEFAULT"))?.as_ref()
            }
        });
        let unstressed_name = |phonemes: &str| is_name && !phonemes.contains(PRIMARY);
        match phonemes {
            Some(phonemes) if !unstressed_name(phonemes) => Some(changed(phonemes, change)),
            phonemes => self.spelled(word).or_else(|| phonemes.map(|phonemes| changed(phonemes, change))),
        }
    }

    /// The names of a word's letters, of which the last has the main stress.
    fn spelled(&self, word: &str) -> Option<String> {
        let mut names = String::new();
        for letter in word.chars().filter(char::is_ascii_alphabetic) {
            match self.gold.get(letter.to_ascii_uppercase().encode_utf8(&mut [0; 4]))? {
                Entry::One(name) => names.push_str(name),
                Entry::ByTag(_) => return None,
            }
        }
        let mut names = stress::change(&names, Change::Lessen);
        if let Some(at) = names.rfind(SECONDARY) {
            names.replace_range(at..at + SECONDARY.len_utf8(), PRIMARY.encode_utf8(&mut [0; 4]));
        }
        Some(names)
    }

    /// The vowel of an ending that is a syllable.
    fn ending_vowel(&self) -> &'static str {
        if self.accent == Accent::British { "ɪ" } else { "ᵻ" }
    }

    /// The phonemes of a stem with the ending -s.
    fn add_s(&self, stem: &str) -> Option<String> {
        let ending = match stem.chars().next_back()? {
            'p' | 't' | 'k' | 'f' | 'θ' => "s",
            's' | 'z' | 'ʃ' | 'ʒ' | 'ʧ' | 'ʤ' => return Some(format!("{stem}{}z", self.ending_vowel())),
            _ => "z",
        };
        Some(format!("{stem}{ending}"))
    }

    fn add_ed(&self, stem: &str) -> Option<String> {
        let mut chars = stem.chars().rev();
        let (last, before) = (chars.next()?, chars.next());
        Some(match last {
            'p' | 'k' | 'f' | 'θ' | 'ʃ' | 's' | 'ʧ' => format!("{stem}t"),
            'd' => format!("{stem}{}d", self.ending_vowel()),
            't' if self.accent == Accent::British || before.is_none() => format!("{stem}ɪd"),
            't' if before.is_some_and(flaps) => format!("{}ɾᵻd", &stem[..stem.len() - 1]),
            't' => format!("{stem}ᵻd"),
            _ => format!("{stem}d"),
        })
    }

    fn add_ing(&self, stem: &str) -> Option<String> {
        let mut chars = stem.chars().rev();
        match (chars.next()?, chars.next()) {
            ('ə' | 'ː', _) if self.accent == Accent::British => None,
            ('t', Some(before)) if self.accent == Accent::American && flaps(before) => {
                Some(format!("{}ɾɪŋ", &stem[..stem.len() - 1]))
            }
            _ => Some(format!("{stem}ɪŋ")),
        }
    }

    fn plural(&self, word: &str) -> Option<String> {
        self.with_s(&format!("{word}s"), Context::NONE)
    }

    /// The phonemes of a word that consists of a known stem and the ending -s.
    fn with_s(&self, word: &str, context: Context) -> Option<String> {
        let stem = word.strip_suffix('s').filter(|stem| stem.len() > 1)?;
        let without = |ending: usize| word.get(..word.len() - ending).unwrap_or_default();
        let ies = word.len() > 4 && word.ends_with("ies");
        let es = word.ends_with("'s") || word.len() > 4 && word.ends_with("es") && !ies;
        let stem = if !stem.ends_with('s') && self.is_known(stem) {
            stem.to_owned()
        } else if es && self.is_known(without(2)) {
            without(2).to_owned()
        } else {
            Some(format!("{}y", without(3))).filter(|stem| ies && self.is_known(stem))?
        };
        self.add_s(&self.look_up(&stem, context)?)
    }

    fn with_ed(&self, word: &str, context: Context) -> Option<String> {
        let stem = word.strip_suffix('d').filter(|stem| stem.len() > 2)?;
        let short = || {
            let stem = stem.strip_suffix('e').filter(|stem| stem.len() > 2 && !stem.ends_with('e'));
            stem.filter(|stem| self.is_known(stem))
        };
        let stem = if !stem.ends_with('d') && self.is_known(stem) { stem } else { short()? };
        self.add_ed(&self.look_up(stem, context)?)
    }

    fn with_ing(&self, word: &str, context: Context) -> Option<String> {
        let stem = word.strip_suffix("ing").filter(|stem| stem.len() > 1)?;
        let stem = if stem.len() > 2 && self.is_known(stem) {
            stem.to_owned()
        } else if self.is_known(&format!("{stem}e")) {
            format!("{stem}e")
        } else {
            let single = &stem[..stem.len() - 1];
            let doubled = stem.len() > 2 && self.doubled.is_match(word) && self.is_known(single);
            Some(single.to_owned()).filter(|_| doubled)?
        };
        self.add_ing(&self.look_up(&stem, context)?)
    }

    /// The phonemes of a number, perhaps with a suffix such as "th" or "s". A number inside a chunk of text is read
    /// digit by digit or in pairs of digits, as in names of models and versions.
    pub fn number(&self, word: &str, symbol: Option<&str>, is_head: bool) -> Option<String> {
        let number = word.trim_end_matches(|c: char| c.is_ascii_lowercase() || c == '\'');
        let suffix = &word[number.len()..];
        let (is_negative, number) = match number.strip_prefix('-') {
            Some(number) => (true, number),
            None => (false, number),
        };
        let mut result = Vec::new();
        let mut say = |words: &str| {
            for word in spoken(words) {
                let change = (word == "point").then_some(Change::Remove);
                result.extend(self.look_up(word, Context { change, ..Context::NONE }));
            }
        };
        if is_negative {
            say("minus");
        }
        let plain = number.replace(',', "");
        let is_ordinal = matches!(suffix, "st" | "nd" | "rd" | "th");
        let unit = symbol.and_then(currency);
        let periods = number.bytes().filter(|c| *c == b'.').count();
        if is_ordinal && (all_digits(number) || is_head && periods == 0 && unit.is_none()) {
            say(&numbers::ordinal(&plain));
        } else if !is_negative && number.len() == 4 && unit.is_none() && all_digits(number) {
            say(&numbers::year(number));
        } else if !is_head && periods == 0 {
            match plain.as_bytes() {
                [b'0', ..] | [_, _, _, _, ..] => say(&numbers::digit_by_digit(&plain)),
                [_, b'0', b'0'] => say(&numbers::cardinal(&plain)),
                [_, b'0', _] => {
                    say(&numbers::cardinal(&plain[..1]));
                    let unstressed = Context { change: Some(Change::Remove), ..Context::NONE };
                    result.extend(self.look_up("O", unstressed));
                    result.extend(self.look_up(&numbers::cardinal(&plain[2..]), Context::NONE));
                }
                [_, _, _] => {
                    say(&numbers::cardinal(&plain[..1]));
                    say(&numbers::cardinal(&plain[1..]));
                }
                _ => say(&numbers::cardinal(&plain)),
            }
        } else if periods > 1 || !is_head {
            for part in plain.split('.').filter(|part| !part.is_empty()) {
                let is_short_or_round = part.len() == 2 || part.bytes().skip(1).all(|c| c == b'0');
                let by_digit = part.starts_with('0') || !is_short_or_round;
                say(&if by_digit { numbers::digit_by_digit(part) } else { numbers::cardinal(part) });
            }
        } else if let Some(unit) =
            unit.filter(|_| number.split('.').nth(1).is_none_or(|cents| cents.len() < 3))
        {
            result.extend(self.amount(&plain, unit));
        } else if let Some(digits) = plain.strip_prefix('.') {
            say("point");
            say(&numbers::digit_by_digit(digits));
        } else {
            say(&numbers::decimal(&plain));
        }
        let result = Some(result.join(" ")).filter(|result| !result.is_empty())?;
        match suffix {
            "s" | "'s" => self.add_s(&result),
            "ed" | "'d" => self.add_ed(&result),
            "ing" => self.add_ing(&result),
            _ => Some(result),
        }
    }

    /// The phonemes of an amount of money. The digits after a period are hundredths of the unit.
    fn amount(&self, number: &str, units: [&str; 2]) -> Vec<String> {
        let parts = number.split('.').zip(units).map(|(part, unit)| (part.trim_start_matches('0'), unit));
        let parts: Vec<_> = parts.collect();
        let parts = match parts[..] {
            [_, ("", _)] => &parts[..1],
            [("", _), _] => &parts[1..],
            _ => &parts[..],
        };
        let mut result = Vec::new();
        for (index, (part, unit)) in parts.iter().enumerate() {
            let mut say = |word: &str| result.extend(self.look_up(word, Context::NONE));
            if index > 0 {
                say("and");
            }
            spoken(&numbers::cardinal(part)).for_each(&mut say);
            if *part == "1" || *unit == "pence" {
                say(unit);
            } else {
                result.extend(self.plural(unit));
            }
        }
        result
    }
}

/// The words of a number that are read: all but "and".
fn spoken(words: &str) -> impl Iterator<Item = &str> {
    words.split(|c: char| !c.is_ascii_lowercase()).filter(|word| !word.is_empty() && *word != "and")
}

fn changed(phonemes: &str, change: Option<Change>) -> String {
    change.map_or_else(|| phonemes.to_owned(), |change| stress::change(phonemes, change))
}

/// Whether a word is a number, perhaps with a suffix.
pub fn is_number(word: &str, is_head: bool) -> bool {
    let suffixes = ["ing", "'d", "ed", "'s", "st", "nd", "rd", "th", "s"];
    let number = suffixes.iter().find_map(|suffix| word.strip_suffix(suffix)).unwrap_or(word);
    let number = if is_head { number.strip_prefix('-').unwrap_or(number) } else { number };
    number.bytes().any(|c| c.is_ascii_digit())
        && number.bytes().all(|c| matches!(c, b'0'..=b'9' | b',' | b'.'))
}
