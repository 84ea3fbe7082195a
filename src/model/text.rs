//! A text encoder for a head of one's own: what a crate whose model reads texts needs beside the traits. It loads a
//! model of BERT's family with its tokenizer, reads the head's tensors, and makes inputs as the built-in models of texts
//! do. The head itself belongs to the crate. Owns the mapping of the weights' files while a model is loaded.

use std::sync::Arc;

use super::load::ModelFiles;
use super::load::tokenizer::TextTokenizer;
use super::load::weights::{NumberFormats, Weights};
use super::nets::encoder::Output;
use super::nets::encoder::config::NetworkConfig;
use super::nets::encoder::text_config::TextConfig;
use super::tasks::sentence_settings::SentenceSettings;
use super::tasks::{load_text_model, tokenized};
use super::{Device, Inputs, LoadError, LoadSpec, TaskError};

pub use super::load::tokenizer::Tokens;
pub use super::nets::encoder::TextNetwork;
pub use super::ops::pooling::{Mode, Pooling};

/// An encoder of BERT's family, with its tokenizer and the tensors beside its own.
pub struct TextEncoder {
    /// For the [`Processor`](super::Processor): makes inputs from texts.
    pub tokenizer: Tokenizer,
    /// For the [`Forward`](super::Forward): computes vectors from the tokens of each text, all numbers finite. A batch
    /// is one matrix of all its tokens, without padding.
    pub network: TextNetwork,
    /// The width of a vector: that of a token, times the number of pooling modes.
    pub width: usize,
    weights: Weights,
}

impl TextEncoder {
    /// Loads the model that [`LoadSpec::source`] names: a folder, or an id of the Hugging Face hub. It has
    /// `config.json`, `tokenizer.json` and `model.safetensors` or `pytorch_model.bin`, or the files that the index of
    /// one of these lists.
    ///
    /// With `pooling`, the network gives a vector of [`width`](Self::width) numbers for each text. Choose the pooling
    /// with which the head was trained; the model's own (`modules.json`) is not read. Without it, the network gives the
    /// vectors `[tokens, width]` of a text's tokens, row by row, and a GPU finishes a batch before it gets the next.
    ///
    /// On a GPU, and in another `dtype` than f32, the results are compared with those of a CPU in f32.
    ///
    /// # Errors
    /// [`LoadError::File`] for a file that is missing or invalid, [`LoadError::Unsupported`] for an architecture or a
    /// property that is not served, [`LoadError::Hub`] if the hub cannot be reached, [`LoadError::Device`] and
    /// [`LoadError::Unfit`] for a device that fails or computes wrongly. Return any of them from your loader.
    pub fn load(spec: &LoadSpec, device: &Device, pooling: Option<Pooling>) -> Result<Self, LoadError> {
        let files = ModelFiles::locate(&spec.source)?;
        let config = NetworkConfig::read(&files, &spec.source)?;
        let limits = SentenceSettings::limits(&files)?;
        let width = pooling.as_ref().map_or(config.hidden, |pooling| pooling.width(config.hidden));
        let output = pooling.map_or(Output::Tokens, |pooling| Output::Pooled(pooling.into()));
        let (base, marker) = (config.family.base(), config.family.token_embeddings());
        let config = TextConfig::Encoder(config);
        let (tokenizer, network) = load_text_model(spec, device, &files, &config, limits, &output)?;
        let weights = Weights::read(&files.weights()?, base, marker, &Device::Cpu, NumberFormats::F32)?;
        let tokenizer = Tokenizer { tokenizer: Arc::new(tokenizer), max_inputs: spec.max_inputs };
        Ok(Self { tokenizer, network, width, weights })
    }

    /// The numbers of a tensor of the head, row by row, in f32. `name` is the full name in the weights' files, and
    /// `shape` the shape that the tensor must have: `[to, from]` for the matrix of a linear layer of PyTorch.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the tensor, if it is missing or has another shape.
    pub fn head_tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        self.weights.values(name, shape)
    }
}

/// The tokenizer of an encoder.
pub struct Tokenizer {
    tokenizer: Arc<TextTokenizer>,
    max_inputs: usize,
}

impl Tokenizer {
    /// Makes an input of each text. The size of an input ([`SizedInput::tokens`](super::SizedInput)) is the number of
    /// its tokens, special ones included. Long lists are tokenised slice by slice, some ten milliseconds at a time.
    /// Texts are never cut. `field` is the field of the request that holds the texts, for errors.
    ///
    /// # Errors
    /// `TooLarge` for more texts than the pool's `max_inputs`, at once. `BadInput` naming `field[index]` for a text of
    /// more tokens than the model takes, and `Internal` if the tokenizer fails, at once or in a later slice.
    pub fn inputs(&self, field: &'static str, texts: Vec<String>) -> Result<Inputs<Tokens>, TaskError> {
        tokenized(&self.tokenizer, field, texts, self.max_inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Forward as _, TaskErrorKind};

    fn encoder(pooling: Option<Pooling>) -> TextEncoder {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-bert-max");
        let spec = LoadSpec { max_inputs: 500, ..LoadSpec::new(folder) };
        TextEncoder::load(&spec, &Device::Cpu, pooling).unwrap()
    }

    #[test]
    fn texts_are_computed_without_padding_to_the_same_bits_alone_and_together() {
        let pooling = Pooling { modes: vec![Mode::Cls, Mode::Mean], normalize: true };
        let (mut of_tokens, mut encoder) = (encoder(None), encoder(Some(pooling.clone())));
        let texts = (0..40).map(|n| "a tide ".repeat(n % 11)).collect();
        let inputs = encoder.tokenizer.inputs("input", texts).unwrap().all().unwrap();
        assert!(inputs.iter().all(|sized| sized.tokens == sized.input.ids.len()));
        let batch: Vec<&Tokens> = inputs.iter().map(|sized| &sized.input).collect();
        let together = encoder.network.forward(&batch).unwrap();
        for (input, vector) in batch.iter().zip(together) {
            let vector = vector.unwrap();
            assert_eq!(vector.len(), encoder.width);
            let alone = encoder.network.forward(&[*input]).unwrap().remove(0).unwrap();
            assert_eq!(alone, vector, "{} tokens", input.ids.len());
            let tokens = of_tokens.network.forward(&[*input]).unwrap().remove(0).unwrap();
            assert_eq!(tokens.len(), input.ids.len() * of_tokens.width);
            assert_eq!(pooling.pool(&tokens, of_tokens.width, 0), vector);
        }
    }

    #[test]
    fn a_tensor_of_the_head_is_found_by_its_name_and_shape() {
        let encoder = encoder(None);
        let width = encoder.width;
        let name = "embeddings.LayerNorm.bias";
        assert_eq!(encoder.head_tensor(name, &[width]).unwrap().len(), width);
        let message = |name: &str, shape: &[usize]| encoder.head_tensor(name, shape).unwrap_err().to_string();
        assert!(
            message(name, &[3])
                .ends_with(&format!("has the shape [{width}]; by the model's settings it should have [3]"))
        );
        assert!(message("head.out.weight", &[1, width]).ends_with("tensor head.out.weight is missing"));
    }

    #[test]
    fn a_bad_text_is_named_and_no_text_is_cut() {
        let tokenizer = encoder(None).tokenizer;
        let refused = |texts: Vec<String>| {
            let error = tokenizer.inputs("lines", texts).and_then(Inputs::all).unwrap_err();
            (error.kind, error.param.unwrap(), error.message)
        };
        let (kind, field, message) = refused(vec!["a".to_owned(); 501]);
        assert_eq!((kind, &*field), (TaskErrorKind::TooLarge, "lines"));
        assert_eq!(message, "lines holds 501 items; this pool takes at most 500");
        let (kind, field, message) = refused(vec!["a".to_owned(), "a ".repeat(1_000)]);
        assert_eq!((kind, &*field), (TaskErrorKind::BadInput, "lines[1]"));
        assert!(message.starts_with("lines[1] is too long: this model takes at most"), "{message}");
        // Long lists come in slices.
        let long = vec!["a ".repeat(20); 500];
        assert!(matches!(tokenizer.inputs("lines", long), Ok(Inputs::Slices(_))));
    }
}
