//! Reads hibari's configuration from `config.json`, as `scripts/convert-hibari.py` writes it. Decides which properties
//! are refused.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::model::load::ModelFiles;
use crate::model::{LoadError, LoadSpec};

/// The `model_type` of `config.json`.
pub const MODEL_TYPE: &str = "hibari";

/// The largest sizes that are accepted. They are far above those of any model, and small enough that their products do
/// not overflow.
const MAX_WIDTH: usize = 1 << 14;
const MAX_COUNT: usize = 1 << 8;
const MAX_HOP: usize = 1 << 12;
/// Maximum number of voices of a model. Each takes 25 MB of memory.
const MAX_VOICES: usize = 64;

/// The sizes of the network, its voices and its symbols.
#[derive(Clone, Debug, Deserialize)]
pub struct HibariConfig {
    /// Samples per second.
    pub sample_rate: u32,
    /// Samples from one frame to the next. A frame's window is four hops long.
    pub hop: usize,
    /// The number of symbols that have an embedding.
    pub symbols: usize,
    /// The encoder of symbols whose output the decoder gets.
    pub text: TextSizes,
    /// The network that finds durations and pitch.
    pub prosody: ProsodySizes,
    /// The network that computes the spectra.
    pub decoder: DecoderSizes,
    /// Each voice has weights of its own, in the file `{id}.safetensors`.
    pub voices: Vec<Voice>,
    /// The id of each symbol. Id 0 precedes and follows each sentence.
    pub vocabulary: BTreeMap<char, u32>,
}

/// The sizes of an encoder of symbols.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct TextSizes {
    /// The width of a symbol's vector.
    pub width: usize,
    /// The inner width of the feed-forward sublayers.
    pub inner: usize,
    /// Convolution blocks before the transformer.
    pub convolutions: usize,
    /// How often the transformer's only layer is applied.
    pub layers: usize,
    /// Heads of attention; they divide the width.
    pub heads: usize,
}

/// The sizes of the network for durations and pitch.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ProsodySizes {
    /// Its encoder of symbols.
    #[serde(flatten)]
    pub text: TextSizes,
    /// The dilation of each of its convolution blocks.
    pub dilations: Vec<usize>,
}

/// The sizes of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct DecoderSizes {
    /// The width of a frame's vector.
    pub width: usize,
    /// The inner width of its blocks.
    pub inner: usize,
    /// Its convolution blocks.
    pub blocks: usize,
}

/// A voice as requests name it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Voice {
    /// The name in requests.
    pub id: String,
    /// The name for people.
    pub name: String,
    /// The language, such as `en-US`.
    pub language: String,
}

impl HibariConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// [`LoadError::File`] for an invalid file, [`LoadError::Unsupported`] naming a property that is not supported.
    pub fn read(files: &ModelFiles, spec: &LoadSpec) -> Result<Self, LoadError> {
        let config: Self = files.required_json("config.json")?;
        config.check().map_err(|reason| spec.unsupported(reason))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let Self { text, prosody, decoder, .. } = self;
        for (name, size, max) in [
            ("sample_rate", self.sample_rate as usize, 1 << 18),
            ("hop", self.hop, MAX_HOP),
            ("symbols", self.symbols, MAX_WIDTH),
            ("text.width", text.width, MAX_WIDTH),
            ("text.inner", text.inner, MAX_WIDTH),
            ("text.layers", text.layers, MAX_COUNT),
            ("prosody.width", prosody.text.width, MAX_WIDTH),
            ("prosody.inner", prosody.text.inner, MAX_WIDTH),
            ("prosody.layers", prosody.text.layers, MAX_COUNT),
            ("decoder.width", decoder.width, MAX_WIDTH),
            ("decoder.inner", decoder.inner, MAX_WIDTH),
        ] {
            if !(1..=max).contains(&size) {
                return Err(format!("{name} is {size}; it must be from 1 to {max}"));
            }
        }
        for (name, count) in [
            ("text.convolutions", text.convolutions),
            ("prosody.convolutions", prosody.text.convolutions),
            ("decoder.blocks", decoder.blocks),
            ("the number of prosody.dilations", prosody.dilations.len()),
        ] {
            if count > MAX_COUNT {
                return Err(format!("{name} is {count}; at most {MAX_COUNT} is supported"));
            }
        }
        if let Some(dilation) = prosody.dilations.iter().find(|dilation| !(1..=MAX_COUNT).contains(*dilation))
        {
            return Err(format!("prosody.dilations has {dilation}; each must be from 1 to {MAX_COUNT}"));
        }
        for (name, TextSizes { width, heads, .. }) in [("text", text), ("prosody", &prosody.text)] {
            if *heads == 0 || width % heads != 0 {
                return Err(format!("{name}.heads is {heads}, which does not divide {name}.width {width}"));
            }
        }
        if !(1..=MAX_VOICES).contains(&self.voices.len()) {
            return Err(format!(
                "there are {} voices; from 1 to {MAX_VOICES} are supported",
                self.voices.len()
            ));
        }
        // The id is a file name.
        let is_name =
            |id: &str| !id.is_empty() && id.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
        if let Some(voice) = self.voices.iter().find(|voice| !is_name(&voice.id)) {
            return Err(format!("the voice {:?} must be a name of letters, digits, - and _", voice.id));
        }
        if let Some((symbol, id)) = self.vocabulary.iter().find(|(_, id)| **id as usize >= self.symbols) {
            return Err(format!(
                "the symbol {symbol:?} has the id {id}, and there are {} symbols",
                self.symbols
            ));
        }
        Ok(())
    }

    /// The number of values in each spectrum of a frame.
    pub fn bins(&self) -> usize {
        2 * self.hop + 1
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(pointer: &str, value: Value) -> Result<(), String> {
        let mut config = json!({
            "sample_rate": 24_000, "hop": 30, "symbols": 40,
            "text": {"width": 16, "inner": 32, "convolutions": 1, "layers": 2, "heads": 2},
            "prosody": {"width": 16, "inner": 24, "convolutions": 2, "layers": 3, "heads": 2, "dilations": [1, 4]},
            "decoder": {"width": 24, "inner": 40, "blocks": 2},
            "voices": [{"id": "one", "name": "One", "language": "en-US"}],
            "vocabulary": {"a": 39},
        });
        if let Some(place) = config.pointer_mut(pointer) {
            *place = value;
        }
        serde_json::from_value::<HibariConfig>(config).unwrap().check()
    }

    #[test]
    fn a_property_that_is_not_supported_is_named_with_its_value() {
        assert_eq!(check("/hop", json!(30)), Ok(()));
        for (pointer, value, message) in [
            ("/hop", json!(0), "hop is 0; it must be from 1 to 4096"),
            ("/text/width", json!(u64::MAX), "text.width is 18446744073709551615"),
            ("/prosody/heads", json!(3), "prosody.heads is 3, which does not divide prosody.width 16"),
            ("/prosody/dilations", json!([1, 0]), "prosody.dilations has 0"),
            ("/decoder/blocks", json!(10_000), "decoder.blocks is 10000; at most 256 is supported"),
            ("/voices", json!([]), "there are 0 voices"),
            ("/voices/0/id", json!("../x"), "the voice \"../x\" must be a name"),
            ("/vocabulary/a", json!(40), "the symbol 'a' has the id 40, and there are 40 symbols"),
        ] {
            let error = check(pointer, value).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
