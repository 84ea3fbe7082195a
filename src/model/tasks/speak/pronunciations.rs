//! Loads the pronunciation of English texts, in the accents of a model's voices. Decides which files are needed; they
//! are in the folder `g2p` of the model. A model without that folder speaks phonemes only.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use sconce_phonemes::{Accent, Phonemes};

use crate::model::LoadError;
use crate::model::load::ModelFiles;
use crate::model::nets::hibari::config::{HibariConfig, Voice};

/// A model that has this file has pronunciations.
const MARKER: &str = "g2p/normalize.json";
/// The other files, of both accents.
const FILES: [&str; 10] = [
    "g2p/lexicon_gb_gold.json.gz",
    "g2p/lexicon_gb_silver.json.gz",
    "g2p/lexicon_us_gold.json.gz",
    "g2p/lexicon_us_silver.json.gz",
    "g2p/oov.json",
    "g2p/oov_gb.json",
    "g2p/oov_gb.safetensors",
    "g2p/oov_us.safetensors",
    "g2p/tagger.json.gz",
    "g2p/tokenizer_exceptions.json",
];

/// The pronunciation of each accent that a voice has. Empty for a model without files for it.
pub struct Pronunciations(BTreeMap<Accent, Phonemes>);

impl Pronunciations {
    /// Requests every file that loading may read.
    ///
    /// # Errors
    /// [`LoadError::File`] if `g2p/normalize.json` is there and another file is missing.
    pub fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
        if files.optional(MARKER)?.is_none() {
            return Ok(());
        }
        FILES.iter().try_for_each(|name| files.required(name).map(drop))
    }

    /// Loads the accents of the model's voices.
    ///
    /// # Errors
    /// [`LoadError::File`] for a file that is missing or invalid.
    pub fn load(files: &ModelFiles, config: &HibariConfig) -> Result<Self, LoadError> {
        let Some(marker) = files.optional(MARKER)? else { return Ok(Self(BTreeMap::new())) };
        Self::request_files(files)?;
        let folder = marker.with_file_name("");
        let mut accents = BTreeMap::new();
        for accent in config.voices.iter().map(accent_of) {
            if let Entry::Vacant(place) = accents.entry(accent) {
                let phonemes = Phonemes::load(&folder, accent)
                    .map_err(|error| LoadError::File { path: folder.clone(), reason: error.to_string() })?;
                place.insert(phonemes);
            }
        }
        Ok(Self(accents))
    }

    /// The pronunciation for a voice.
    pub fn for_voice(&self, voice: &Voice) -> Option<&Phonemes> {
        self.0.get(&accent_of(voice))
    }
}

fn accent_of(voice: &Voice) -> Accent {
    if voice.language.eq_ignore_ascii_case("en-GB") { Accent::British } else { Accent::American }
}
