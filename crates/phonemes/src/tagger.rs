//! Parts of speech, as tags of the Penn Treebank. A word with one usual tag has it in every sentence. Any other word
//! gets the tag with the largest sum of weights (an averaged perceptron), over features of the word, of two words on
//! either side, and of the two tags before it. The weights are in `tagger.json.gz`.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use serde::Deserialize;

use crate::characters::{is_decimal, is_digit, is_letter, last_chars};

/// The file of the tagger.
#[derive(Deserialize)]
pub struct Model {
    tagdict: HashMap<String, String>,
    tags: Vec<String>,
    vocab: HashSet<String>,
    weights: HashMap<String, HashMap<String, f64>>,
}

/// The kinds of features with a value, in the order in which their weights are added.
const KINDS: [&str; 13] =
    ["s3", "p1", "w", "sh", "t-1", "t-2", "t-12", "w-1", "s3-1", "w-2", "w+1", "s3+1", "w+2"];

/// The weight of a feature for some tags.
type Weights = Box<[(u8, f64)]>;

pub struct Tagger {
    /// The tags of words that have one usual tag.
    usual: HashMap<String, String>,
    /// Sorted.
    tags: Vec<String>,
    vocabulary: HashSet<String>,
    /// The weights for every word, for the first one, and for later ones.
    always: Weights,
    first: Weights,
    later: Weights,
    of_kind: [HashMap<String, Weights>; KINDS.len()],
}

impl Tagger {
    /// Features and tags that this tagger does not have are dropped.
    pub fn new(model: Model) -> Self {
        let Model { tagdict: usual, mut tags, vocab: vocabulary, mut weights } = model;
        tags.sort();
        tags.truncate(usize::from(u8::MAX));
        let packed = |weights: HashMap<String, f64>| -> Weights {
            let index =
                |tag: &String| tags.binary_search(tag).ok().and_then(|index| u8::try_from(index).ok());
            weights.iter().filter_map(|(tag, weight)| Some((index(tag)?, *weight))).collect()
        };
        let mut without_value = |name| packed(weights.remove(name).unwrap_or_default());
        let (always, first, later) = (without_value("b"), without_value("i0"), without_value("i+"));
        let mut of_kind: [HashMap<String, Weights>; KINDS.len()] = Default::default();
        for (feature, weights) in weights {
            let found = feature.split_once('=');
            let found = found.and_then(|(kind, value)| Some((KINDS.iter().position(|k| *k == kind)?, value)));
            if let Some((kind, value)) = found {
                of_kind[kind].insert(value.to_owned(), packed(weights));
            }
        }
        Self { usual, tags, vocabulary, always, first, later, of_kind }
    }

    /// The tags of words, none of which is empty.
    pub fn tags<'a>(&'a self, words: &[&str]) -> Vec<&'a str> {
        // The two places before the first word and after the last one have names.
        let mut known: Vec<Cow<str>> = vec!["-START2-".into(), "-START-".into()];
        known.extend(words.iter().map(|word| self.known(word)));
        known.extend(["-END-".into(), "-END2-".into()]);
        let mut tags = Vec::with_capacity(words.len());
        let (mut two_before, mut before) = ("-START2-", "-START-");
        let mut both = String::new();
        for (index, (word, around)) in words.iter().zip(known.windows(5)).enumerate() {
            let tag = self.usual.get(*word).map_or_else(
                || {
                    both.clear();
                    both.extend([before, ",", two_before]);
                    self.likeliest(index == 0, word, around, [before, two_before, &both])
                },
                String::as_str,
            );
            tags.push(tag);
            (two_before, before) = (before, tag);
        }
        tags
    }

    /// The word in lower case if its weights are known; otherwise what kind of word it is.
    fn known(&self, word: &str) -> Cow<'_, str> {
        let all_digits = || word.chars().all(is_digit) && word.chars().count() == 4;
        let known = match word.chars().next() {
            Some(first) if first != '-' && word.contains('-') => "!HYPHEN",
            Some(_) if all_digits() => "!YEAR",
            Some(first) if is_digit(first) => "!DIGITS",
            _ => &word.to_lowercase(),
        };
        let known = self.vocabulary.get(known).map(|known| Cow::Borrowed(known.as_str()));
        known.unwrap_or_else(|| Cow::Owned(format!("<{}>", shape(word))))
    }

    fn likeliest(&self, is_first: bool, word: &str, around: &[Cow<str>], tags: [&str; 3]) -> &str {
        let end = |word| last_chars(word, 3);
        let shape = shape(word);
        let initial = &word[..word.chars().next().map_or(0, char::len_utf8)];
        let values: [&str; KINDS.len()] = [
            end(word),
            initial,
            &around[2],
            &shape,
            tags[0],
            tags[1],
            tags[2],
            &around[1],
            end(&around[1]),
            &around[0],
            &around[3],
            end(&around[3]),
            &around[4],
        ];
        let mut sums = vec![0.0; self.tags.len()];
        let mut add = |weights: &Weights| {
            for (tag, weight) in weights {
                sums[usize::from(*tag)] += weight;
            }
        };
        // The order of the sum decides ties that rounding makes.
        add(&self.always);
        for (kind, value) in values.iter().enumerate() {
            // The features of the position come before "t-1".
            if kind == 4 {
                add(if is_first { &self.first } else { &self.later });
            }
            if let Some(weights) = self.of_kind[kind].get(*value) {
                add(weights);
            }
        }
        let best = (0..sums.len()).reduce(|best, tag| if sums[tag] >= sums[best] { tag } else { best });
        best.map_or("NN", |best| &self.tags[best])
    }
}

/// How a word looks: its case if it consists of letters.
fn shape(word: &str) -> String {
    let mut chars = word.chars();
    let first_is_upper = chars.next().is_some_and(char::is_uppercase);
    let is_lower = |word: &str| word.chars().any(char::is_lowercase) && !word.chars().any(char::is_uppercase);
    let is_upper = word.chars().any(char::is_uppercase) && !word.chars().any(char::is_lowercase);
    if word.chars().all(is_letter) {
        return match () {
            () if is_lower(word) => "x",
            () if is_upper && chars.as_str().is_empty() => "X1",
            () if is_upper => "XX",
            () if first_is_upper && is_lower(chars.as_str()) => "Xx",
            () => "xX",
        }
        .to_owned();
    }
    if word.chars().all(is_digit) {
        return "d".to_owned();
    }
    let class = |c| match c {
        c if is_decimal(c) || is_digit(c) => 'd',
        c if is_letter(c) => 'x',
        c => c,
    };
    word.chars().take(4).map(class).collect()
}
