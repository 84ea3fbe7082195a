//! English text to phonemes, in the alphabet of Kokoro and misaki, American or British.
//!
//! The tables, rules and weights are those of the Python package hibari-tts 0.2.1, a port of misaki (both Apache-2.0).
//! They are read from a folder; the crate decides how they apply. After loading it has no other state, and does no I/O.
//!
//! | file | decides |
//! |---|---|
//! | `sentences` | where a sentence ends, and where a long one is cut |
//! | `abbreviations` | after which abbreviations a sentence goes on, and words for those before numbers |
//! | `normalization` | how dates, units, abbreviations, symbols are written out |
//! | `tables` | the tables of these two |
//! | `tokens`, `pieces` | what a word is |
//! | `tagger` | a word's part of speech |
//! | `lexicon`, `numbers` | how known words and numbers are read |
//! | `network` | how unknown words are read |
//! | `reading` | in which order words are read, and how words without white space between them are read |
//! | `stress` | stress marks |
//! | `characters` | classes of characters |
//!
//! Texts come from strangers, so the work for each character is bounded. Two rules take quadratic time, and get short
//! texts only: text without white space is cut at 256 characters, pieces without white space between them at 64. The
//! network reads the first 24 letters of a word, and at most 8,192 letters of a sentence. Words are read from the last one
//! of a sentence to the first, so a sentence with more unknown letters loses unknown words at its beginning. A number of
//! more than 36 digits is read digit by digit. A character is skipped if no table, rule or network knows it: most
//! characters of scripts other than Latin, Greek and Cyrillic, control characters, emoji, and marks that are not part of a
//! letter.
//!
//! `[text](/phonemes/)` is read as these phonemes. They come from the text, and are not checked here.

mod abbreviations;
mod characters;
mod lexicon;
mod network;
mod normalization;
mod numbers;
mod pieces;
mod reading;
mod sentences;
mod stress;
mod tables;
mod tagger;
mod tokens;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use regex::Regex;
use serde::de::DeserializeOwned;

use abbreviations::Abbreviations;
use lexicon::Lexicon;
use network::Network;
use normalization::Normalization;
use reading::{Reading, Token};
use sentences::Sentences;
pub use sentences::parts;
use tagger::Tagger;
use tokens::Tokens;

/// Maximum number of words in a [`Memory`]. The network needs about half a millisecond for each.
const MAX_REMEMBERED: usize = 4096;

/// Why the tables cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("{0}: {1}")]
    File(PathBuf, #[source] io::Error),
    /// A table does not have the expected form.
    #[error("{0}: {1}")]
    Table(PathBuf, #[source] serde_json::Error),
    /// A table has words from which no pattern can be made.
    #[error("the tables give an invalid pattern: {0}")]
    Pattern(#[from] regex::Error),
    /// `normalize.json` lacks this entry.
    #[error("normalize.json has no entry {0}")]
    Lacks(&'static str),
    /// The network's weights do not fit.
    #[error("the network for unknown words: {0}")]
    Network(String),
}

/// The phonemes of unknown words that were read before, shared by the sentences of one text.
#[derive(Debug, Default)]
pub struct Memory(HashMap<String, String>);

/// An accent of English.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Accent {
    /// General American.
    American,
    /// British.
    British,
}

/// The tables and weights of one accent.
pub struct Phonemes {
    abbreviations: Abbreviations,
    normalization: Normalization,
    tokens: Tokens,
    tagger: Tagger,
    lexicon: Lexicon,
    network: Network,
    link: Regex,
}

impl std::fmt::Debug for Phonemes {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Phonemes").finish_non_exhaustive()
    }
}

impl Phonemes {
    /// Loads the tables and weights of an accent from a folder that `scripts/convert-hibari-oov.py` made.
    ///
    /// # Errors
    /// A file is missing or broken.
    pub fn load(folder: &Path, accent: Accent) -> Result<Self, Error> {
        let (suffix, alphabet) = match accent {
            Accent::American => ("us", "oov.json"),
            Accent::British => ("gb", "oov_gb.json"),
        };
        let dictionary = |rank| table(folder, &format!("lexicon_{suffix}_{rank}.json.gz"));
        let weights = folder.join(format!("oov_{suffix}.safetensors"));
        let file = fs::read(&weights).map_err(|error| Error::File(weights, error))?;
        let normalization = Normalization::new(table(folder, "normalize.json")?)?;
        Ok(Self {
            abbreviations: Abbreviations::new(&normalization.tables)?,
            normalization,
            tokens: Tokens::new(table(folder, "tokenizer_exceptions.json")?)?,
            tagger: Tagger::new(table(folder, "tagger.json.gz")?),
            lexicon: Lexicon::new(dictionary("gold")?, dictionary("silver")?, accent)?,
            network: Network::new(table(folder, alphabet)?, &file)?,
            link: Regex::new(r"\[([^\]]+)\]\(([^)]*)\)")?,
        })
    }

    /// The sentences of a text, found as they are asked for.
    pub fn sentences<'a>(&'a self, text: &'a str) -> impl Iterator<Item = &'a str> {
        Sentences::new(&self.abbreviations, text)
    }

    /// The phonemes of a sentence.
    pub fn of_sentence(&self, sentence: &str) -> String {
        self.of_sentence_with(sentence, &mut Memory::default())
    }

    /// As [`of_sentence`](Self::of_sentence), with a memory of unknown words. The phonemes are the same; they are only
    /// found faster.
    pub fn of_sentence_with(&self, sentence: &str, memory: &mut Memory) -> String {
        let text = self.normalization.normalize(sentence);
        let mut tokens = Vec::new();
        // The offset up to which the text is split into tokens.
        let mut split = 0;
        for link in self.link.captures_iter(&text) {
            let [all, name, target] = [0, 1, 2].map(|index| link.get(index));
            let (Some(all), Some(name), Some(target)) = (all, name, target) else { continue };
            self.add_tokens(&text[split..all.start()], &mut tokens);
            split = all.end();
            let phonemes = target.as_str().strip_prefix('/').filter(|phonemes| phonemes.ends_with('/'));
            let phonemes = phonemes.map(|phonemes| phonemes.trim_end_matches('/').to_owned());
            for text in tokens::pieces(name.as_str()) {
                tokens.push(Token { text, tag: "NN", spaced: false, phonemes: phonemes.clone() });
                // The phonemes are those of the whole name.
                if phonemes.is_some() {
                    break;
                }
            }
            if let Some(token) = tokens.last_mut() {
                token.spaced = text[split..].starts_with(characters::is_space);
            }
        }
        self.add_tokens(&text[split..], &mut tokens);
        Reading::new(&self.lexicon, &self.network, memory).read(tokens)
    }

    fn add_tokens<'a>(&'a self, text: &'a str, to: &mut Vec<Token<'a>>) {
        let tokens = self.tokens.of(text);
        let words: Vec<&str> = tokens.iter().map(|(text, _)| *text).collect();
        let tagged = tokens.iter().zip(self.tagger.tags(&words));
        to.extend(tagged.map(|((text, spaced), tag)| Token { text, tag, spaced: *spaced, phonemes: None }));
    }
}

/// A table of the folder, compressed if its name says so.
fn table<T: DeserializeOwned>(folder: &Path, name: &str) -> Result<T, Error> {
    let path = folder.join(name);
    let read = || {
        let mut text = Vec::new();
        let mut file = File::open(&path)?;
        if name.ends_with(".gz") {
            GzDecoder::new(file).read_to_end(&mut text)
        } else {
            file.read_to_end(&mut text)
        }?;
        Ok(text)
    };
    let text = read().map_err(|error| Error::File(path.clone(), error))?;
    serde_json::from_slice(&text).map_err(|error| Error::Table(path, error))
}
