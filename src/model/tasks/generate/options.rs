//! The settings of a pool that generates text: `[pool.options]`. Decides what holds where one is not set, and which the
//! model or what computes it cannot have.

use serde::Deserialize;

use super::FAMILY;
use crate::model::family::{OptionDefault, OptionSpec, Takes};
use crate::model::ops::kv::KvNumbers;
use crate::model::ops::{RowNumbers, multiplies_bytes};
use crate::model::{LoadError, LoadSpec, OptionProblem};

/// Tokens of a sequence where the settings do not say; less if the model has less.
const CONTEXT: usize = 4_096;
/// How many times the context all sequences hold together where the settings do not say.
const CONTEXTS: usize = 4;
/// Bounds that keep tables and reservations within any host's memory.
const MOST_TOKENS: usize = 1 << 24;
const MOST_SEQUENCES: u64 = 4_096;

/// The options.
pub static OPTIONS: [OptionSpec; 7] = [
    OptionSpec {
        name: "context",
        takes: Takes::Whole(2..=MOST_TOKENS as u64),
        default: OptionDefault::Derived("4,096, or the model's"),
        help: "the most tokens of a prompt with its answer; at most the model's",
    },
    OptionSpec {
        name: "sequences",
        takes: Takes::Whole(1..=MOST_SEQUENCES),
        default: OptionDefault::Value("16"),
        help: "the most sequences at once; `batch.max_requests` bounds them too",
    },
    OptionSpec {
        name: "kv_tokens",
        takes: Takes::Whole(2..=MOST_TOKENS as u64),
        default: OptionDefault::Derived("4 × `context`"),
        help: "tokens whose keys and values are held at once. A sequence begins when its prompt and its longest answer \
               fit, so that none runs out of room half way; while others wait, each requester has \
               [its share](scaling.md#shares-of-requesters). For SmolLM2-135M a token takes 46 KB in f32; memory is \
               taken when it is used, on a GPU when the model is loaded",
    },
    OptionSpec {
        name: "kv_numbers",
        takes: Takes::Choice(&["f32", "bf16"]),
        default: OptionDefault::Value("\"f32\""),
        help: "`bf16` halves that. The perplexity of a real text changes by less than 0.5 %",
    },
    OptionSpec {
        name: "activations",
        takes: Takes::Choice(&["auto", "f32", "int16", "int8"]),
        default: OptionDefault::Value("\"auto\""),
        help: "what the numbers between layers become before they are multiplied with quantised weights: `f32`; `int16` \
               (15 bits and a scale for each 32); `int8` (8 bits, the fastest). Perplexity of a real text against f32: \
               `int16` within 0.01 %, `int8` within 0.5 %. `auto` is `int16` on CPUs with AVX512-VNNI and `f32` on \
               others and on GPUs, where the whole numbers are refused",
    },
    OptionSpec {
        name: "seed",
        takes: Takes::Whole(0..=u64::MAX),
        default: OptionDefault::Value("0"),
        help: "keys the random numbers of tasks that bring no seed. Nothing else is drawn at random in a worker but \
               delays between retries, which change no result",
    },
    OptionSpec {
        name: "truncate_prompts",
        takes: Takes::Switch,
        default: OptionDefault::Value("false"),
        help: "a prompt that is too long loses its beginning, and is not refused",
    },
];

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
    /// Whether a prompt that is too long loses its beginning; else it is refused.
    pub truncate_prompts: bool,
    activations: Activations,
}

/// The options as they are written, each checked by itself.
#[derive(Deserialize)]
struct Written {
    context: Option<usize>,
    sequences: usize,
    kv_tokens: Option<usize>,
    kv_numbers: KvName,
    activations: Activations,
    seed: u64,
    truncate_prompts: bool,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum KvName {
    F32,
    Bf16,
}

/// What the numbers between layers are when they are multiplied with weights of whole numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Activations {
    /// 16 bits where the CPU multiplies whole numbers, else 32.
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
    /// [`LoadError::Option`] for an option that is not known or out of its bounds.
    pub fn read(spec: &LoadSpec, model_context: usize) -> Result<Self, LoadError> {
        let written: Written = FAMILY.read_options(spec)?;
        let context = written.context.unwrap_or(CONTEXT.min(model_context));
        if context > model_context {
            let expected = format!("at most {model_context}, which is the model's");
            return Err(spec.refused_option(OptionProblem::expected("context", context, expected)));
        }
        let all = CONTEXTS.saturating_mul(context).min(MOST_TOKENS);
        Ok(Self {
            context,
            sequences: written.sequences,
            kv_tokens: written.kv_tokens.unwrap_or(all),
            kv_numbers: match written.kv_numbers {
                KvName::F32 => KvNumbers::F32,
                KvName::Bf16 => KvNumbers::Bf16,
            },
            seed: written.seed,
            truncate_prompts: written.truncate_prompts,
            activations: written.activations,
        })
    }

    /// What the numbers between layers become before they are multiplied with weights of whole numbers.
    ///
    /// # Errors
    /// [`LoadError::Option`] if what computes cannot do so.
    pub fn rows(&self, spec: &LoadSpec, computes: Computes) -> Result<RowNumbers, LoadError> {
        let on_host = computes == Computes::Host;
        let (rows, name) = match self.activations {
            Activations::Auto if on_host && multiplies_bytes() => (RowNumbers::Int16, "auto"),
            Activations::Auto => (RowNumbers::F32, "auto"),
            Activations::F32 => (RowNumbers::F32, "f32"),
            Activations::Int16 => (RowNumbers::Int16, "int16"),
            Activations::Int8 => (RowNumbers::Int8, "int8"),
        };
        let expected = match rows {
            RowNumbers::F32 => return Ok(rows),
            _ if !on_host => "\"auto\" or \"f32\": a GPU computes with the weights' dtype",
            _ if multiplies_bytes() => return Ok(rows),
            _ => "\"auto\" or \"f32\": this CPU lacks AVX512-VNNI, or pool.cpu_features forbids it",
        };
        Err(spec.refused_option(OptionProblem::expected("activations", name, expected)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(options: Value) -> Result<Options, String> {
        let options = options.as_object().unwrap().clone().into_iter().collect();
        let spec = LoadSpec { options, ..LoadSpec::new("org/name") };
        Options::read(&spec, 8_192).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_set_fits_a_small_host() {
        let options = read(json!({})).unwrap();
        assert_eq!((options.context, options.sequences, options.kv_tokens), (4_096, 16, 16_384));
        assert_eq!((options.activations, options.seed), (Activations::Auto, 0));
        let options = read(json!({"context": 100, "kv_numbers": "bf16", "seed": 7})).unwrap();
        assert_eq!((options.kv_tokens, options.kv_numbers, options.seed), (400, KvNumbers::Bf16, 7));
    }

    #[test]
    fn an_option_that_is_unknown_or_out_of_bounds_is_named() {
        for (options, words) in [
            (json!({"contxt": 1}), "pool.options.contxt: unknown key; did you mean `context`?"),
            (json!({"context": 9_000}), "context = 9000: expected at most 8192, which is the model's"),
            (json!({"sequences": 0}), "sequences = 0: expected a whole number from 1 to 4096"),
            (json!({"kv_numbers": "f8"}), "kv_numbers = \"f8\": expected \"f32\" or \"bf16\""),
        ] {
            let error = read(options).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn whole_numbers_between_layers_are_for_cpus() {
        let spec = LoadSpec::new("org/name");
        for activations in ["int16", "int8"] {
            let options = read(json!({ "activations": activations })).unwrap();
            let error = options.rows(&spec, Computes::Candle).unwrap_err().to_string();
            assert!(error.contains(&format!("activations = \"{activations}\"")), "{error}");
        }
        let options = read(json!({})).unwrap();
        assert_eq!(options.rows(&spec, Computes::Candle).unwrap(), RowNumbers::F32);
    }
}
