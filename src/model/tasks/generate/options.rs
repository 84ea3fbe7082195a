//! The settings of a pool that generates text: `[pool.options]`.

use serde::Deserialize;

use crate::model::ops::kv::KvNumbers;
use crate::model::ops::{RowNumbers, multiplies_bytes};
use crate::model::{LoadError, LoadSpec, Value};

/// Tokens of a sequence where the settings do not say; less if the model has less.
const CONTEXT: usize = 4_096;
/// Sequences that run at once where the settings do not say.
const SEQUENCES: usize = 16;
/// How many times the context all sequences hold together where the settings do not say.
const CONTEXTS: usize = 4;
/// Bounds that keep tables and reservations within any host's memory.
const MOST_TOKENS: usize = 1 << 24;

/// The settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The most tokens of a sequence, its answer included.
    pub context: usize,
    /// The most sequences at once.
    pub sequences: usize,
    /// Tokens whose keys and values are held at once.
    pub kv_tokens: usize,
    /// How these are kept.
    pub kv_numbers: KvNumbers,
    /// Keys the random numbers of tasks without a seed of their own, with the task's id.
    pub seed: u64,
    /// What the numbers between layers become before they are multiplied with weights of whole numbers.
    pub activations: RowNumbers,
    /// Whether a prompt that is too long loses its beginning; else it is refused.
    pub truncate_prompts: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    context: Option<usize>,
    sequences: Option<usize>,
    kv_tokens: Option<usize>,
    #[serde(default)]
    kv_numbers: KvName,
    #[serde(default)]
    activations: Activations,
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    truncate_prompts: bool,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum KvName {
    #[default]
    F32,
    Bf16,
}

/// What the numbers between layers are when they are multiplied with weights of whole numbers.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Activations {
    /// 16 bits where the CPU multiplies whole numbers, else 32.
    #[default]
    Auto,
    F32,
    Int16,
    Int8,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computes {
    /// This program's own products, on a CPU.
    Host,
    /// Candle's operations, on any device.
    Candle,
}

impl Options {
    /// Reads the pool's options for a model of this context.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] naming an option that is not known, out of its bounds, or not for what computes.
    pub fn read(spec: &LoadSpec, model_context: usize, computes: Computes) -> Result<Self, LoadError> {
        let refused = |reason: String| LoadError::Unsupported {
            model: spec.source.clone(),
            reason: format!("[pool.options]: {reason}"),
        };
        let written = Value::Object(spec.options.clone().into_iter().collect());
        let written: Written = serde_json::from_value(written).map_err(|error| refused(error.to_string()))?;
        let context = written.context.unwrap_or(CONTEXT.min(model_context));
        let (activations, name) = match written.activations {
            Activations::Auto if computes == Computes::Candle => (RowNumbers::F32, "auto"),
            Activations::Auto if multiplies_bytes() => (RowNumbers::Int16, "auto"),
            Activations::Auto => (RowNumbers::F32, "auto"),
            Activations::F32 => (RowNumbers::F32, "f32"),
            Activations::Int16 => (RowNumbers::Int16, "int16"),
            Activations::Int8 => (RowNumbers::Int8, "int8"),
        };
        if activations != RowNumbers::F32 && computes == Computes::Candle {
            return Err(refused(format!(
                "activations = {name:?} is for CPUs; a GPU computes with the weights' dtype"
            )));
        }
        if activations != RowNumbers::F32 && !multiplies_bytes() {
            return Err(refused(format!(
                "activations = {name:?}: this CPU lacks AVX512-VNNI, or pool.cpu_features forbids it"
            )));
        }
        let options = Self {
            activations,
            context,
            sequences: written.sequences.unwrap_or(SEQUENCES),
            kv_tokens: written.kv_tokens.unwrap_or(CONTEXTS.saturating_mul(context)),
            kv_numbers: match written.kv_numbers {
                KvName::F32 => KvNumbers::F32,
                KvName::Bf16 => KvNumbers::Bf16,
            },
            seed: written.seed,
            truncate_prompts: written.truncate_prompts,
        };
        let bounds = [
            ("context", options.context, 2..=model_context),
            ("sequences", options.sequences, 1..=4_096),
            ("kv_tokens", options.kv_tokens, 2..=MOST_TOKENS),
        ];
        for (name, value, bounds) in bounds {
            if !bounds.contains(&value) {
                let (low, high) = (bounds.start(), bounds.end());
                return Err(refused(format!("{name} is {value}; it must be {low} to {high}")));
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(options: Value) -> Result<Options, String> {
        let options = options.as_object().unwrap().clone().into_iter().collect();
        let spec = LoadSpec { options, ..LoadSpec::new("org/name") };
        Options::read(&spec, 8_192, Computes::Host).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_set_fits_a_small_host() {
        let options = read(json!({})).unwrap();
        assert_eq!((options.context, options.sequences, options.kv_tokens), (4_096, 16, 16_384));
        let options = read(json!({"context": 100, "kv_numbers": "bf16", "seed": 7})).unwrap();
        assert_eq!((options.kv_tokens, options.kv_numbers, options.seed), (400, KvNumbers::Bf16, 7));
    }

    #[test]
    fn an_option_that_is_unknown_or_out_of_bounds_is_named() {
        assert!(read(json!({"contxt": 1})).unwrap_err().contains("contxt"));
        assert!(
            read(json!({"context": 9_000})).unwrap_err().contains("context is 9000; it must be 2 to 8192")
        );
        assert!(read(json!({"sequences": 0})).unwrap_err().contains("sequences is 0"));
        assert!(read(json!({"kv_numbers": "f8"})).unwrap_err().contains("f8"));
    }
}
