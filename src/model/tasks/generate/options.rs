//! The settings of a pool that generates text: `[pool.options]`. Decides their defaults, and which values the model or
//! its device cannot have.

use std::time::SystemTime;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use serde::Deserialize;

use super::FAMILY;
use crate::model::family::{OptionDefault, OptionSpec, Takes};
use crate::model::ops::kv::KvNumbers;
use crate::model::ops::{RowFormat, may_use_int16, may_use_vnni};
use crate::model::tasks::SEED;
use crate::model::{LoadError, LoadSpec, OptionProblem};

/// The default of `context`, in tokens. If the model's context is shorter, the default is the model's context.
const DEFAULT_CONTEXT: usize = 4_096;
/// The default of `kv_tokens`, as a multiple of `context`.
const DEFAULT_KV_CONTEXTS: usize = 4;
/// The largest `context` and `kv_tokens`. It keeps reservations within any host's memory.
const MAX_TOKENS: usize = 1 << 24;
/// The largest `sequences`. It keeps tables within any host's memory.
const MAX_SEQUENCES: u64 = 4_096;

/// What each option takes, its default and its help.
pub static OPTIONS: [OptionSpec; 8] = [
    OptionSpec {
        name: "context",
        takes: Takes::Whole(2..=MAX_TOKENS as u64),
        default: OptionDefault::Derived("4,096, or the model's"),
        help: "the most tokens of a prompt with its answer; at most the model's",
    },
    OptionSpec {
        name: "sequences",
        takes: Takes::Whole(1..=MAX_SEQUENCES),
        default: OptionDefault::Value("16"),
        help: "the most sequences at once; `batch.max_requests` bounds them too",
    },
    OptionSpec {
        name: "kv_tokens",
        takes: Takes::Whole(2..=MAX_TOKENS as u64),
        default: OptionDefault::Derived("4 × `context`"),
        help: "tokens whose keys and values are held at once. A sequence begins when its prompt and its longest answer \
               fit; while others wait, each requester has [its share](scaling.md#shares-of-requesters). For \
               SmolLM2-135M a token takes 46 KB in f32. A CPU allocates the memory as it is used; a GPU at the start",
    },
    OptionSpec {
        name: "kv_numbers",
        takes: Takes::Choice(&["f32", "bf16"]),
        default: OptionDefault::Value("\"f32\""),
        help: "the type of these keys and values. `bf16` halves their memory. The perplexity of a real text changes by \
               less than 0.5 %",
    },
    OptionSpec {
        name: "activations",
        takes: Takes::Choice(&["auto", "f32", "int16", "int8"]),
        default: OptionDefault::Value("\"auto\""),
        help: "the type of the numbers that are multiplied with quantised weights: `f32`; `int16` (15 bits used with \
               AVX512-VNNI and 16 with AVX2); `int8` (the fastest; only with AVX512-VNNI). Perplexity of a real text \
               against f32: `int16` within 0.01 %, `int8` within 0.5 %. `auto` is `int16` on CPUs with AVX512-VNNI, and \
               on those with AVX2 and without AVX-512. Elsewhere it is `f32`, and `int16` and `int8` are refused",
    },
    SEED,
    OptionSpec {
        name: "template_date",
        takes: Takes::Text,
        default: OptionDefault::Derived("that of the task"),
        help: "the day, as in `2026-11-28`, that a chat template gets if it asks for the date. Without it that is the \
               day of the task's `timestamp`, and without both the day on which the prompt is made (UTC)",
    },
    OptionSpec {
        name: "truncate_prompts",
        takes: Takes::Switch,
        default: OptionDefault::Value("false"),
        help: "whether the beginning of a prompt that is too long is dropped. Otherwise the prompt is refused",
    },
];

/// The values of the options of one pool.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The maximum number of tokens of a sequence, its answer included.
    pub context: usize,
    /// The maximum number of sequences at once.
    pub sequences: usize,
    /// The number of tokens whose keys and values are stored at once.
    pub kv_tokens: usize,
    /// The type of these keys and values.
    pub kv_numbers: KvNumbers,
    /// Together with a task's id, the seed of tasks that set none.
    pub seed: u64,
    /// Whether the beginning of a prompt that is too long is dropped. Otherwise the prompt is refused.
    pub truncate_prompts: bool,
    /// The day that chat templates get for tasks without a time of publishing; none for the current day.
    template_date: Option<Date>,
    activations: Activations,
}

/// The options as the pool's file has them, each checked by itself.
#[derive(Deserialize)]
struct WrittenOptions {
    context: Option<usize>,
    sequences: usize,
    kv_tokens: Option<usize>,
    kv_numbers: KvNumbersName,
    activations: Activations,
    seed: u64,
    template_date: Option<String>,
    truncate_prompts: bool,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum KvNumbersName {
    F32,
    Bf16,
}

/// The type of the numbers between layers when they are multiplied with quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Activations {
    /// `Int16` on a CPU that [`may_use_int16`], else `F32`.
    Auto,
    F32,
    Int16,
    Int8,
}

/// The implementation that computes the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Implementation {
    /// This program's own matrix multiplication, on a CPU.
    Host,
    /// Candle's operations: on a GPU, and in tests also on a CPU.
    Candle,
}

impl Options {
    /// Reads the pool's options, for a model with this context.
    ///
    /// # Errors
    /// [`LoadError::Option`] for an option that is not known or out of its bounds.
    pub fn read(spec: &LoadSpec, model_context: usize) -> Result<Self, LoadError> {
        let written: WrittenOptions = FAMILY.read_options(spec)?;
        let context = written.context.unwrap_or(DEFAULT_CONTEXT.min(model_context));
        if context > model_context {
            let expected = format!("at most {model_context}, which is the model's");
            return Err(spec.refused_option(OptionProblem::expected("context", context, expected)));
        }
        let template_date = written.template_date.map(|text| {
            let expected = |_| OptionProblem::expected("template_date", &*text, "a day, as in 2026-11-28");
            text.parse().map_err(|error: jiff::Error| spec.refused_option(expected(error)))
        });
        let default_kv_tokens = DEFAULT_KV_CONTEXTS.saturating_mul(context).min(MAX_TOKENS);
        Ok(Self {
            context,
            sequences: written.sequences,
            kv_tokens: written.kv_tokens.unwrap_or(default_kv_tokens),
            kv_numbers: match written.kv_numbers {
                KvNumbersName::F32 => KvNumbers::F32,
                KvNumbersName::Bf16 => KvNumbers::Bf16,
            },
            seed: written.seed,
            truncate_prompts: written.truncate_prompts,
            template_date: template_date.transpose()?,
            activations: written.activations,
        })
    }

    /// The time (UTC) that a chat template gets for a task that was published at this time: the beginning of
    /// `template_date`, else that time, else the current time.
    pub fn template_time(&self, published: Option<SystemTime>) -> Zoned {
        let published = published.and_then(|time| Timestamp::try_from(time).ok());
        match self.template_date {
            Some(date) => date.to_zoned(TimeZone::UTC).unwrap_or_default(),
            None => published.unwrap_or_else(Timestamp::now).to_zoned(TimeZone::UTC),
        }
    }

    /// The type to which the numbers between layers are converted before they are multiplied with quantised weights.
    ///
    /// # Errors
    /// [`LoadError::Option`] if the implementation cannot use the type that the options set.
    pub fn activation_type(
        &self,
        spec: &LoadSpec,
        implementation: Implementation,
    ) -> Result<RowFormat, LoadError> {
        let on_host = implementation == Implementation::Host;
        let (numbers, name) = match self.activations {
            Activations::Auto if on_host && may_use_int16() => (RowFormat::Int16, "auto"),
            Activations::Auto => (RowFormat::F32, "auto"),
            Activations::F32 => (RowFormat::F32, "f32"),
            Activations::Int16 => (RowFormat::Int16, "int16"),
            Activations::Int8 => (RowFormat::Int8, "int8"),
        };
        let expected = match numbers {
            RowFormat::F32 => return Ok(numbers),
            _ if !on_host => "\"auto\" or \"f32\": a GPU computes with the weights' dtype",
            RowFormat::Int16 if may_use_int16() => return Ok(numbers),
            _ if may_use_vnni() => return Ok(numbers),
            RowFormat::Int8 if may_use_int16() => {
                "\"auto\", \"int16\" or \"f32\": this CPU lacks AVX512-VNNI, or pool.cpu_features forbids it"
            }
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
    fn the_default_context_is_4096_tokens_and_kv_tokens_are_four_contexts() {
        let options = read(json!({})).unwrap();
        assert_eq!((options.context, options.sequences, options.kv_tokens), (4_096, 16, 16_384));
        assert_eq!((options.activations, options.seed), (Activations::Auto, 0));
        let options = read(json!({"context": 100, "kv_numbers": "bf16", "seed": 7})).unwrap();
        assert_eq!((options.kv_tokens, options.kv_numbers, options.seed), (400, KvNumbers::Bf16, 7));
    }

    #[test]
    fn an_option_that_is_unknown_or_out_of_bounds_is_named() {
        for (options, message) in [
            (json!({"contxt": 1}), "pool.options.contxt: unknown key; did you mean `context`?"),
            (json!({"context": 9_000}), "context = 9000: expected at most 8192, which is the model's"),
            (json!({"sequences": 0}), "sequences = 0: expected a whole number from 1 to 4096"),
            (
                json!({"template_date": "today"}),
                "template_date = \"today\": expected a day, as in 2026-11-28",
            ),
            (json!({"kv_numbers": "f8"}), "kv_numbers = \"f8\": expected \"f32\" or \"bf16\""),
        ] {
            let error = read(options).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn a_template_sees_the_day_that_is_set_or_else_the_time_of_publishing() {
        let set = read(json!({"template_date": "2026-11-28"})).unwrap();
        let published = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
        let unset = read(json!({})).unwrap().template_time(Some(published));
        assert_eq!(unset.to_string(), "2023-11-14T22:13:20+00:00[UTC]");
        assert_eq!(set.template_time(Some(published)).to_string(), "2026-11-28T00:00:00+00:00[UTC]");
        let now = read(json!({})).unwrap().template_time(None);
        assert!(now > "2026-01-01T00:00[UTC]".parse::<Zoned>().unwrap(), "{now}");
    }

    #[test]
    fn integer_activations_are_refused_on_gpus() {
        let spec = LoadSpec::new("org/name");
        for activations in ["int16", "int8"] {
            let options = read(json!({ "activations": activations })).unwrap();
            let error = options.activation_type(&spec, Implementation::Candle).unwrap_err().to_string();
            assert!(error.contains(&format!("activations = \"{activations}\"")), "{error}");
        }
        let options = read(json!({})).unwrap();
        assert_eq!(options.activation_type(&spec, Implementation::Candle).unwrap(), RowFormat::F32);
    }
}
