//! The tables of `normalize.json`, and patterns of words from tables.

use std::collections::HashMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The tables of `normalize.json`.
#[derive(Deserialize)]
pub struct Tables {
    pub titles: HashMap<String, String>,
    pub abbreviations: HashMap<String, String>,
    pub units: HashMap<String, [String; 2]>,
    pub symbols: Ordered,
    pub currency: HashMap<String, [String; 2]>,
    pub roman_cardinal: Vec<String>,
    pub roman_ordinal: Vec<String>,
}

/// Symbols with their words, in the order of the file: it is the order in which they are replaced.
pub struct Ordered(pub Vec<(String, String)>);

impl<'de> Deserialize<'de> for Ordered {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Ordered;

            fn expecting(&self, to: &mut fmt::Formatter) -> fmt::Result {
                to.write_str("symbols with words")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ordered, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Ordered(pairs))
            }
        }
        from.deserialize_map(Pairs)
    }
}

/// A pattern that matches one of these words. Longer words are tried first.
pub fn one_of<'a>(words: impl IntoIterator<Item = &'a (impl AsRef<str> + ?Sized + 'a)>) -> String {
    let mut words: Vec<&str> = words.into_iter().map(AsRef::as_ref).collect();
    words.sort_by_key(|word| std::cmp::Reverse(word.chars().count()));
    words.into_iter().map(regex::escape).collect::<Vec<_>>().join("|")
}

pub const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
