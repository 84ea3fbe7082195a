//! A model's settings in the files of sentence-transformers: pooling, normalising, the longest text, and the prompts.
//! Decides which modules of that library are supported, and refuses the others.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::model::family::{LIBRARY_CONFIG, MODULES, Module};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::TextLimits;
use crate::model::ops::pooling::{Mode, Pooling};
use crate::model::{LoadError, OptionProblem, TaskError};
use crate::protocol::shorten;

/// The file names that versions of sentence-transformers have used for the Transformer module's settings.
const TRANSFORMER_CONFIGS: [&str; 5] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_xlm-roberta_config.json",
];

/// How texts are prepared and vectors are computed.
#[derive(Debug)]
pub struct SentenceSettings {
    /// How the vectors of tokens become one vector.
    pub pooling: Pooling,
    /// The maximum number of tokens of a text, and whether texts are lower-cased before they are tokenised.
    pub limits: TextLimits,
    /// The prompts that may be put before each text.
    pub prompts: Prompts,
}

/// Texts that are put before the texts of a request, by name.
#[derive(Debug, Default)]
pub struct Prompts {
    texts: BTreeMap<String, String>,
    /// The prompt of a request that names none; empty if there is none.
    default: String,
}

impl Prompts {
    /// Makes the prompt with this name the default. The name is the pool's `prompt_name`. Without a name, nothing
    /// changes.
    ///
    /// # Errors
    /// The model has no such prompt.
    pub fn with_default(mut self, name: Option<&str>) -> Result<Self, OptionProblem> {
        if let Some(name) = name {
            let text = self.texts.get(name).ok_or_else(|| {
                OptionProblem::expected(
                    "prompt_name",
                    name,
                    format!("a prompt of the model; {}", self.available()),
                )
            });
            self.default = text?.clone();
        }
        Ok(self)
    }

    /// The prompt of a request that names `name`; without a name, the default.
    ///
    /// # Errors
    /// `BadInput` if the model has no such prompt.
    pub fn named(&self, name: Option<&str>) -> Result<&str, TaskError> {
        let Some(name) = name else { return Ok(&self.default) };
        let text = self.texts.get(name).ok_or_else(|| {
            let message = format!("prompt_name is {:?}; {}", shorten(name, 80), self.available());
            TaskError::bad_input("prompt_name", message)
        });
        text.map(String::as_str)
    }

    /// The prompt of a request that names none; empty if there is none.
    pub fn default(&self) -> &str {
        &self.default
    }

    /// Says which prompts the model has, for errors.
    fn available(&self) -> String {
        if self.texts.is_empty() {
            return "this model has no prompts".to_owned();
        }
        let names: Vec<&str> = self.texts.keys().map(String::as_str).collect();
        format!("this model has {}", names.join(", "))
    }
}

#[derive(Default, Deserialize)]
struct TransformerConfig {
    max_seq_length: Option<usize>,
    #[serde(default)]
    do_lower_case: bool,
}

/// What the Transformer module's settings say about chat templates.
#[derive(Default, Deserialize)]
pub(super) struct TemplateConfig {
    /// How each kind of input is computed, by its name. Pairs are rendered by the chat template if `message` is one.
    #[serde(default)]
    pub modality_config: Map<String, Value>,
    /// Settings of the tokenizer, `text`, and variables of the chat template, `chat_template`.
    #[serde(default)]
    pub processing_kwargs: BTreeMap<String, Map<String, Value>>,
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    /// A float, since it is 1e30 for a tokenizer without a limit.
    model_max_length: Option<f64>,
}

#[derive(Deserialize)]
struct PoolingConfig {
    pooling_mode: Option<Modes>,
    include_prompt: Option<bool>,
    /// The flags of the older form, among other fields.
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Modes {
    One(String),
    Several(Vec<String>),
}

#[derive(Default, Deserialize)]
struct PromptsConfig {
    #[serde(default)]
    prompts: BTreeMap<String, Option<String>>,
    default_prompt_name: Option<String>,
}

/// The older form of `pooling_mode`: one flag for each mode. The results of several modes are concatenated in this
/// order.
const FLAGS: [(&str, &str); 6] = [
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("pooling_mode_weightedmean_tokens", "weightedmean"),
    ("pooling_mode_lasttoken", "lasttoken"),
];

impl SentenceSettings {
    /// Reads the settings of the model `source`.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] naming the module or mode that is not supported, [`LoadError::File`] for an
    /// invalid file.
    pub fn read(files: &ModelFiles, source: &str) -> Result<Self, LoadError> {
        let refused = |reason: String| LoadError::Unsupported { model: source.into(), reason };
        let prompts = files.json("config_sentence_transformers.json")?.unwrap_or_default();
        let mut prompts = read_prompts(prompts).map_err(&refused)?;
        let pooling = match files.json::<Vec<Module>>(MODULES)? {
            None => Pooling { modes: vec![default_mode(files)?], normalize: false },
            Some(modules) => {
                let normalize = check_modules(&modules).map_err(&refused)?;
                let folder = modules.get(1).map_or("1_Pooling", |module| &module.path);
                let config: PoolingConfig = files.required_json(&format!("{folder}/config.json"))?;
                // The prompt's tokens would have to be left out of the pooling, which is not supported. The model's
                // prompts are dropped, and a default prompt is refused.
                if config.include_prompt == Some(false) {
                    let Prompts { default, .. } = std::mem::take(&mut prompts);
                    if !default.is_empty() {
                        return Err(refused(format!("include_prompt is false with the prompt {default:?}")));
                    }
                }
                Pooling { modes: modes(config).map_err(&refused)?, normalize }
            }
        };
        Ok(Self { pooling, limits: Self::limits(files)?, prompts })
    }

    /// Reads only the prompts.
    ///
    /// # Errors
    /// As [`SentenceSettings::read`].
    pub fn prompts(files: &ModelFiles, source: &str) -> Result<Prompts, LoadError> {
        let prompts = files.json(LIBRARY_CONFIG)?.unwrap_or_default();
        read_prompts(prompts).map_err(|reason| LoadError::Unsupported { model: source.into(), reason })
    }

    /// Reads the settings of the Transformer module for rerankers whose prompts are made by a chat template.
    ///
    /// # Errors
    /// [`LoadError::File`] for an invalid file.
    pub(super) fn template_config(files: &ModelFiles) -> Result<TemplateConfig, LoadError> {
        Ok(files.json(TRANSFORMER_CONFIGS[0])?.unwrap_or_default())
    }

    /// Requests the settings files that the model has, without reading their contents.
    ///
    /// # Errors
    /// [`LoadError::File`] for a `modules.json` that is invalid, [`LoadError::Hub`] if the hub cannot be reached.
    pub fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
        for name in
            TRANSFORMER_CONFIGS.iter().chain(&["config_sentence_transformers.json", "tokenizer_config.json"])
        {
            files.optional(name)?;
        }
        let modules: Vec<Module> = files.json(MODULES)?.unwrap_or_default();
        for module in modules.iter().filter(|module| !module.path.is_empty()) {
            files.optional(&format!("{}/config.json", module.path))?;
        }
        Ok(())
    }

    /// Reads only the limits of texts. The model need not have files of sentence-transformers.
    ///
    /// # Errors
    /// [`LoadError::File`] for an invalid file.
    pub fn limits(files: &ModelFiles) -> Result<TextLimits, LoadError> {
        let mut transformer = TransformerConfig::default();
        for name in TRANSFORMER_CONFIGS {
            if let Some(config) = files.json(name)? {
                transformer = config;
                break;
            }
        }
        let tokenizer: TokenizerConfig = files.json("tokenizer_config.json")?.unwrap_or_default();
        let tokenizer_limit = tokenizer.model_max_length.filter(|n| *n >= 1.0).map(|n| n as usize);
        let max_tokens = transformer.max_seq_length.or(tokenizer_limit);
        Ok(TextLimits { max_tokens, lower_case: transformer.do_lower_case })
    }
}

#[derive(Deserialize)]
struct NetworkKind {
    architectures: Option<Vec<String>>,
    is_causal: Option<bool>,
}

/// The pooling of a model that has no `modules.json`, as sentence-transformers assumes it: the last token of a causal
/// model, and for others the mean.
fn default_mode(files: &ModelFiles) -> Result<Mode, LoadError> {
    let NetworkKind { architectures, is_causal } = files.required_json("config.json")?;
    let class = architectures.unwrap_or_default().into_iter().next().unwrap_or_default();
    let is_causal = class.ends_with("ForCausalLM") && is_causal != Some(false);
    Ok(if is_causal { Mode::LastToken } else { Mode::Mean })
}

/// Accepts Transformer, Pooling and optionally Normalize, in this order. Returns whether Normalize is present.
fn check_modules(modules: &[Module]) -> Result<bool, String> {
    let kinds: Vec<&str> = modules.iter().map(Module::kind).collect();
    if let Some(kind) = kinds.iter().find(|k| !["Transformer", "Pooling", "Normalize"].contains(k)) {
        return Err(format!(
            "modules.json has a {kind} module; Transformer, Pooling and Normalize are supported"
        ));
    }
    if modules.first().is_some_and(|module| !module.path.is_empty()) {
        return Err(format!("the Transformer module is in {:?}; the top is supported", modules[0].path));
    }
    match *kinds {
        ["Transformer", "Pooling"] => Ok(false),
        ["Transformer", "Pooling", "Normalize"] => Ok(true),
        _ => Err(format!("modules.json lists {kinds:?}; Transformer, Pooling, Normalize is supported")),
    }
}

/// The pooling modes, whose results are concatenated.
fn modes(config: PoolingConfig) -> Result<Vec<Mode>, String> {
    let flag = |name: &str| config.others.get(name).and_then(serde_json::Value::as_bool) == Some(true);
    let names = match config.pooling_mode {
        Some(Modes::One(name)) => vec![name],
        Some(Modes::Several(names)) => names,
        None => {
            let set_flags = FLAGS.iter().filter(|(key, _)| flag(key));
            set_flags.map(|(_, name)| (*name).to_owned()).collect()
        }
    };
    if names.is_empty() {
        return Ok(vec![Mode::Mean]);
    }
    let mode = |name: &String| match &**name {
        "cls" => Ok(Mode::Cls),
        "max" => Ok(Mode::Max),
        "mean" => Ok(Mode::Mean),
        "mean_sqrt_len_tokens" => Ok(Mode::MeanSqrtLen),
        "lasttoken" => Ok(Mode::LastToken),
        other => Err(format!(
            "pooling_mode is {other:?}; cls, max, mean, mean_sqrt_len_tokens and lasttoken are supported"
        )),
    };
    names.iter().map(mode).collect()
}

fn read_prompts(config: PromptsConfig) -> Result<Prompts, String> {
    let text = |(name, text): (String, Option<String>)| (name, text.unwrap_or_default());
    let texts: BTreeMap<_, _> = config.prompts.into_iter().map(text).collect();
    let default = match config.default_prompt_name {
        None => String::new(),
        Some(name) => match texts.get(&name) {
            Some(text) => text.clone(),
            None => return Err(format!("default_prompt_name is {name:?}, and prompts has no such entry")),
        },
    };
    Ok(Prompts { texts, default })
}
