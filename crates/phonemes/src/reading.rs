//! Reads the tokens of a sentence from the last to the first, because what follows a word may change how it is read.
//! Pieces without white space between them are a group: the longest ending of the group that the lexicon knows is read
//! as one word, then the rest in the same way. If a piece is unknown, the group is read by the network for unknown
//! words, the reader of numbers and a table of symbols; characters that none of them knows are skipped. At the end the
//! pieces of a group are separated, or some of their stresses are weakened.
//!
//! The work on a group is quadratic in its pieces. It has at most [`MAX_PIECES`] pieces and [`MAX_CHARS`] characters;
//! further pieces form another group.

use std::borrow::Cow;

use unicode_normalization::UnicodeNormalization as _;

use crate::characters::{
    is_decimal, is_digit, is_letter, is_letter_or_sign, is_space, is_word, to_ascii_digit,
};
use crate::lexicon::{self, Ahead, Lexicon, Word};
use crate::network::Network;
use crate::pieces::{self, is_apostrophe};
use crate::stress::{self, Change, PRIMARY, is_consonant, is_vowel};
use crate::tokens::MAX_CHARS;
use crate::{MAX_REMEMBERED, Memory};

/// Maximum number of pieces of a group.
const MAX_PIECES: usize = 64;
/// Maximum number of letters of a sentence's unknown words that the network reads. A letter costs about 650,000
/// multiplications. Words in [`Memory`] cost nothing.
const MAX_NETWORK_LETTERS: usize = 8192;
/// The letters of a word are counted up to the next multiple of this. A short word costs as much as one of 8 letters.
const LETTER_BLOCK: usize = 8;
/// Number of pieces of "what-you-see-is-what-you-get". No word of the lexicon has more.
const MAX_PIECES_OF_WORD: usize = 13;
/// Number of letters of the longest suffix of a number, "ing".
const MAX_LETTERS_OF_NUMBER: usize = 3;

/// A word, number or mark of a sentence.
pub struct Token<'a> {
    pub text: &'a str,
    pub tag: &'a str,
    /// Whether white space follows.
    pub spaced: bool,
    /// The phonemes that the text itself gives, if any.
    pub phonemes: Option<String>,
}

/// A part of a token.
struct Piece<'a> {
    text: &'a str,
    tag: &'a str,
    spaced: bool,
    /// What is read in place of the text.
    alias: Option<&'static str>,
    currency: Option<&'a str>,
    phonemes: Option<String>,
    /// Whether a space separates its phonemes from those before it in its group.
    apart: bool,
}

/// Pieces that are read together.
struct Group<'a> {
    pieces: Vec<Piece<'a>>,
    chars: usize,
    /// Whether further pieces may follow.
    open: bool,
}

fn is_pause(c: char) -> bool {
    ";:,.!?—…".contains(c)
}

/// Whether text consists of marks that are not read inside a group.
fn is_silent(text: &str) -> bool {
    text.chars().all(|c| "',-._‘’/".contains(c))
}

/// The phonemes of a token that its tag makes punctuation or a currency.
fn mark(text: &str, tag: &str) -> Option<String> {
    let phonemes = match tag {
        "$" if lexicon::currency(text).is_some() => String::new(),
        ":" if matches!(text, "-" | "–") => "—".to_owned(),
        // The tagger takes some words for punctuation. They are read, also with digits such as those of "wan22".
        _ if text.chars().all(is_word) || text.chars().any(is_decimal) => return None,
        "-LRB-" => "(".to_owned(),
        "-RRB-" => ")".to_owned(),
        "``" => "“".to_owned(),
        "\"\"" | "''" => "”".to_owned(),
        "." | "," | ":" | "$" | "#" | "NFP" => {
            text.chars().filter(|c| is_pause(*c) || "\"“”".contains(*c)).collect()
        }
        _ => return None,
    };
    Some(phonemes)
}

fn symbol(c: char) -> &'static str {
    match c {
        '/' => "slˈæʃ",
        '=' => "ˈikwᵊlz",
        '+' => "plˈʌs",
        '&' => "ænd",
        '@' => "æt",
        '%' => "pəɹsˈɛnt",
        '#' => "hˈæʃ",
        '*' => "ˈæstəɹˌɪsk",
        '~' => "tˈɪldə",
        '^' => "kˈɛɹət",
        '<' => "lˈɛs ðən",
        '>' => "ɡɹˈATəɹ ðən",
        '—' => "—",
        _ => "",
    }
}

/// The groups of a sentence.
fn groups<'a>(tokens: Vec<Token<'a>>) -> Vec<Group<'a>> {
    let mut groups: Vec<Group> = Vec::new();
    let mut currency = None;
    let tags: Vec<&str> = tokens.iter().map(|token| token.tag).collect();
    for (index, token) in tokens.into_iter().enumerate() {
        let followed_by_number = tags.get(index + 1) == Some(&"CD");
        let texts = if token.phonemes.is_some() { vec![token.text] } else { pieces::pieces(token.text) };
        for (place, text) in texts.iter().copied().enumerate() {
            let is_last = place + 1 == texts.len();
            let phonemes = token.phonemes.clone().or_else(|| mark(text, token.tag));
            let mut piece = Piece {
                text,
                tag: token.tag,
                spaced: is_last && token.spaced,
                alias: None,
                currency: None,
                phonemes,
                apart: false,
            };
            let is_currency = token.tag == "$" && lexicon::currency(text).is_some();
            if is_currency && token.phonemes.is_none() {
                currency = Some(text);
            } else if piece.phonemes.is_none() && currency.is_some() {
                currency = currency.filter(|_| token.tag == "CD");
                piece.currency = currency.filter(|_| is_last && !followed_by_number);
            } else if piece.phonemes.is_none() && text == "2" && place > 0 && !is_last {
                let letter = |c: Option<char>| c.is_some_and(is_letter);
                let between =
                    letter(texts[place - 1].chars().next_back()) && letter(texts[place + 1].chars().next());
                piece.alias = between.then_some("to");
            }
            add_to_groups(piece, &mut groups);
        }
    }
    groups
}

/// Adds a piece to the last group if it belongs there, else to a new group.
fn add_to_groups<'a>(piece: Piece<'a>, groups: &mut Vec<Group<'a>>) {
    let chars = piece.text.chars().count();
    let is_alone = piece.alias.is_some() || piece.phonemes.is_some();
    let open = !is_alone && !piece.spaced;
    match groups.last_mut() {
        Some(group)
            if group.open
                && !is_alone
                && group.pieces.len() < MAX_PIECES
                && group.chars + chars <= MAX_CHARS =>
        {
            group.pieces.push(piece);
            group.chars += chars;
            group.open = open;
        }
        _ => groups.push(Group { pieces: vec![piece], chars, open }),
    }
}

/// A text in the form that the lexicon expects: in NFKC, with ASCII digits and apostrophes.
fn lexicon_form(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.replace(is_apostrophe, "'").nfkc().map(to_ascii_digit).collect())
}

/// How many characters of some kinds a text has.
#[derive(Clone, Copy, Default)]
struct Counts {
    digits: usize,
    letters: usize,
    periods: usize,
    hyphens: usize,
    /// Apostrophes and commas.
    marks: usize,
    others: usize,
}

impl Counts {
    fn add(&mut self, c: char) {
        let count = match c {
            '0'..='9' => &mut self.digits,
            'a'..='z' | 'A'..='Z' => &mut self.letters,
            '.' => &mut self.periods,
            '-' => &mut self.hyphens,
            '\'' | ',' => &mut self.marks,
            _ => &mut self.others,
        };
        *count += 1;
    }
}

/// A group's text in the form that the lexicon expects, with the bounds of its pieces.
struct Merged {
    text: String,
    /// For the start of each piece, and for the end: its offset in `text`, and the counts of the characters before it.
    bounds: Vec<(usize, Counts)>,
    /// The weight of each piece when the tag of several pieces is chosen.
    weights: Vec<usize>,
}

impl Merged {
    fn new(pieces: &[Piece]) -> Self {
        let mut counts = Counts::default();
        let mut merged = Self { text: String::new(), bounds: vec![(0, counts)], weights: Vec::new() };
        for piece in pieces {
            let text = lexicon_form(piece.text);
            text.chars().for_each(|c| counts.add(c));
            merged.text.push_str(&text);
            merged.bounds.push((merged.text.len(), counts));
            let weight = |c: char| if c.to_lowercase().eq([c]) { 1 } else { 2 };
            merged.weights.push(piece.text.chars().map(weight).sum());
        }
        merged
    }

    /// The text of some pieces; none if it is certain that the lexicon does not know it, as with most of the many
    /// possible texts of a group.
    fn text(&self, from: usize, to: usize) -> Option<&str> {
        let ((start, before), (end, counts)) = (self.bounds[from], self.bounds[to]);
        let hyphens = counts.hyphens - before.hyphens;
        let letters = counts.letters - before.letters;
        let text = &self.text[start..end];
        let possible = if to - from == 1 {
            true
        } else if counts.others > before.others {
            false
        } else if counts.digits > before.digits {
            letters <= MAX_LETTERS_OF_NUMBER && hyphens <= usize::from(text.starts_with('-'))
        } else {
            let periods = counts.periods - before.periods;
            to - from <= MAX_PIECES_OF_WORD || periods > 0 && letters + periods == text.len()
        };
        possible.then_some(text)
    }
}

/// Reads one sentence.
pub struct Reading<'a> {
    pub lexicon: &'a Lexicon,
    pub network: &'a Network,
    pub memory: &'a mut Memory,
    letters_left: usize,
}

impl<'a> Reading<'a> {
    pub fn new(lexicon: &'a Lexicon, network: &'a Network, memory: &'a mut Memory) -> Self {
        Self { lexicon, network, memory, letters_left: MAX_NETWORK_LETTERS }
    }

    /// The phonemes of a sentence.
    pub fn read(&mut self, tokens: Vec<Token>) -> String {
        let mut groups = groups(tokens);
        let mut ahead = Ahead::default();
        for group in groups.iter_mut().rev() {
            if let [piece] = &mut group.pieces[..] {
                self.read_single(piece, &mut ahead);
            } else if self.read_group(group, &mut ahead) {
                balance(&mut group.pieces);
            } else {
                let text: String = group.pieces.iter().map(|piece| piece.text).collect();
                let mut phonemes = self.read_unknown(&text);
                for piece in &mut group.pieces {
                    piece.phonemes = Some(std::mem::take(&mut phonemes));
                }
            }
        }
        let mut sentence = String::new();
        for group in &groups {
            let start = sentence.len();
            for piece in &group.pieces {
                let phonemes = piece.phonemes.as_deref().unwrap_or_default();
                let joined = sentence.len() == start || sentence.ends_with(is_space);
                if piece.apart && !joined && !phonemes.is_empty() {
                    sentence.push(' ');
                }
                sentence.extend(phonemes.chars().map(|c| match c {
                    'ɾ' => 'T',
                    'ʔ' => 't',
                    c => c,
                }));
                if piece.spaced {
                    sentence.push(' ');
                }
            }
        }
        sentence.trim_matches(is_space).to_owned()
    }

    /// Reads the only piece of a group.
    fn read_single(&mut self, piece: &mut Piece, ahead: &mut Ahead) {
        if piece.phonemes.is_none() {
            let text = lexicon_form(piece.alias.unwrap_or(piece.text));
            let word = Word { text: &text, tag: piece.tag, currency: piece.currency, is_head: true };
            let known = self.lexicon.read(word, *ahead);
            piece.phonemes = Some(known.unwrap_or_else(|| self.read_unknown(piece.text)));
        }
        *ahead =
            ahead_of_previous(*ahead, piece.phonemes.as_deref().unwrap_or_default(), piece.text, piece.tag);
    }

    /// Reads the pieces of a group; false if one of them is unknown.
    fn read_group(&self, group: &mut Group, ahead: &mut Ahead) -> bool {
        let merged = Merged::new(&group.pieces);
        let pieces = &mut group.pieces;
        let mut end = pieces.len();
        while end > 0 {
            let read = (0..end).find_map(|start| {
                let text = merged.text(start, end)?;
                // The heaviest piece has the tag of all; of equal ones the first.
                let heavier = |a: usize, b: usize| if merged.weights[b] > merged.weights[a] { b } else { a };
                let tag = pieces[(start..end).reduce(heavier)?].tag;
                let currency = pieces[start..end].iter().filter_map(|piece| piece.currency).max();
                let word = Word { text, tag, currency, is_head: start == 0 };
                Some((start, tag, self.lexicon.read(word, *ahead)?))
            });
            if let Some((start, tag, phonemes)) = read {
                let text =
                    if end - start == 1 { pieces[start].text } else { merged.text(start, end).unwrap_or("") };
                *ahead = ahead_of_previous(*ahead, &phonemes, text, tag);
                pieces[start..end].iter_mut().for_each(|piece| piece.phonemes = Some(String::new()));
                pieces[start].phonemes = Some(phonemes);
                end = start;
            } else {
                end -= 1;
                if !is_silent(pieces[end].text) {
                    return false;
                }
                pieces[end].phonemes = Some(String::new());
            }
        }
        true
    }

    /// The phonemes of text that the lexicon does not know.
    fn read_unknown(&mut self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let length = part_length(rest).max(first.len_utf8());
            let (part, after) = rest.split_at(length);
            let phonemes = match first {
                c if is_decimal(c) => {
                    let digits: String = part.chars().map(to_ascii_digit).collect();
                    self.lexicon.number(&digits, None, false).unwrap_or_default()
                }
                c if is_letter(c) => self.guess(part),
                c if is_digit(c) || is_word(c) => String::new(),
                _ => part.chars().map(symbol).collect(),
            };
            parts.extend(Some(phonemes).filter(|phonemes| !phonemes.is_empty()));
            rest = after;
        }
        parts.join(" ")
    }

    /// The phonemes that the network guesses, or that were guessed before. Empty once the network has read
    /// [`MAX_NETWORK_LETTERS`] letters of the sentence.
    fn guess(&mut self, word: &str) -> String {
        if let Some(phonemes) = self.memory.0.get(word) {
            return phonemes.clone();
        }
        let letters = self.network.count_letters(word).next_multiple_of(LETTER_BLOCK);
        let Some(left) = self.letters_left.checked_sub(letters) else {
            return String::new();
        };
        self.letters_left = left;
        let phonemes = self.network.read(word);
        if self.memory.0.len() < MAX_REMEMBERED {
            self.memory.0.insert(word.to_owned(), phonemes.clone());
        }
        phonemes
    }
}

/// The length of the word, number or run of marks at the start of a text; 0 if there is none.
fn part_length(text: &str) -> usize {
    let first = text.chars().next().unwrap_or(' ');
    let run = |text: &str, class: fn(char) -> bool| text.find(|c| !class(c)).unwrap_or(text.len());
    let joined = |class: fn(char) -> bool, joint: &[char]| {
        let mut end = run(text, class);
        while let Some(after) = text[end..].strip_prefix(joint) {
            let more = run(after, class);
            if more == 0 {
                break;
            }
            end = text.len() - after.len() + more;
        }
        end
    };
    match first {
        c if is_letter_or_sign(c) => joined(is_letter_or_sign, &['\'', '’']),
        c if is_decimal(c) => joined(is_decimal, &[',', '.']),
        _ => run(text, |c| !is_word(c) && !is_space(c)),
    }
}

/// What the previous word has ahead of it, if these phonemes follow it.
fn ahead_of_previous(ahead: Ahead, phonemes: &str, text: &str, tag: &str) -> Ahead {
    let first = phonemes.chars().find(|c| is_vowel(*c) || is_consonant(*c) || is_pause(*c));
    let vowel = first.map_or(ahead.vowel, |c| if is_pause(c) { None } else { Some(is_vowel(c)) });
    Ahead { vowel, to: matches!(text, "to" | "To") || text == "TO" && matches!(tag, "TO" | "IN") }
}

/// Separates the pieces of a group by spaces, or weakens stresses so that about half of the pieces keep theirs.
fn balance(pieces: &mut [Piece]) {
    let chars = || pieces.iter().flat_map(|piece| piece.text.chars());
    let class = |c: char| match c {
        c if is_letter(c) => 0,
        c if c.is_ascii_digit() => 1,
        _ => 2,
    };
    let mut classes = chars().filter(|c| !is_silent(c.encode_utf8(&mut [0; 4]))).map(class);
    let first = classes.next();
    let mixed = classes.any(|class| Some(class) != first);
    let apart = mixed || chars().any(|c| matches!(c, ' ' | '/'));
    if apart {
        pieces[1..].iter_mut().for_each(|piece| piece.apart = true);
        return;
    }
    let read = pieces.iter().enumerate().filter_map(|(index, piece)| {
        let phonemes = piece.phonemes.as_deref().filter(|phonemes| !phonemes.is_empty())?;
        Some((phonemes.contains(PRIMARY), stress::weight(phonemes), index))
    });
    let mut read: Vec<_> = read.collect();
    let stressed = read.iter().filter(|(stressed, ..)| *stressed).count();
    let weakened = match read[..] {
        [(_, _, first), second] if pieces[first].text.chars().count() == 1 => vec![second],
        _ if read.len() < 2 || stressed <= read.len().div_ceil(2) => return,
        _ => {
            read.sort_unstable();
            read.truncate(read.len() / 2);
            read
        }
    };
    for (_, _, index) in weakened {
        if let Some(phonemes) = &mut pieces[index].phonemes {
            *phonemes = stress::change(phonemes, Change::Weaken);
        }
    }
}
