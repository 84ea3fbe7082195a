//! A model's settings in the files of sentence-transformers: pooling and the modules after it, the longest text, and the
//! prompts. Decides which modules of that library are supported, and refuses the others by their names.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::model::family::{LIBRARY_CONFIG, MODULES, Module, POOLING};
use crate::model::load::ModelFiles;
use crate::model::load::long_text::Side;
use crate::model::load::tokenizer::{BertOverrides, Overrides, TextLimits};
use crate::model::nets::encoder::sentence_head::{ACTIVATIONS, SentenceHead, SentenceModule, activation};
use crate::model::ops::pooling::{MAX_MODES, Mode, Pooling};
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

/// The most modules after the pooling. Published models have at most three.
const MAX_MODULES: usize = 16;
/// The most numbers of a vector that a `Dense` module may give. Published models have at most 4,096.
const MAX_WIDTH: usize = 65_536;

/// The name under which modules read and write a text's vector.
const VECTOR: &str = "sentence_embedding";

/// How texts are prepared and vectors are computed.
pub struct SentenceSettings {
    /// How the vectors of tokens become one vector, and what is computed from it.
    pub head: SentenceHead,
    /// Whether the tokens of a prompt are pooled too.
    pub include_prompt: bool,
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

    /// The bytes of the longest prompt.
    pub fn longest(&self) -> usize {
        self.texts.values().map(String::len).max().unwrap_or(0)
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
    /// The class of the network, with or without a head. Newer files have it.
    transformer_task: Option<String>,
    /// For each kind of input, how the network is called, and which of its results is taken. Newer files have it.
    #[serde(default)]
    modality_config: Value,
    /// Further arguments of the library's loaders, by the names that versions have used.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// The fields with arguments of loaders. Those that change no result are in [`HARMLESS`].
const ARGUMENTS: [&str; 7] = [
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
    "model_args",
    "model_kwargs",
    "processing_kwargs",
];
/// Arguments for how the library computes, and not what.
const HARMLESS: [&str; 3] = ["attn_implementation", "torch_dtype", "dtype"];

impl TransformerConfig {
    /// The first argument that would change results and is not read.
    fn unread_argument(&self) -> Option<String> {
        let maps = ARGUMENTS.iter().filter_map(|name| Some((*name, self.others.get(*name)?.as_object()?)));
        let mut unread = maps.flat_map(|(name, map)| map.iter().map(move |(key, value)| (name, key, value)));
        let is_read = |key: &str, value: &Value| {
            HARMLESS.contains(&key) || value.is_null() || value.as_object().is_some_and(Map::is_empty)
        };
        unread.find(|(_, key, value)| !is_read(key, value)).map(|(name, key, _)| format!("{name} has {key}"))
    }
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
    truncation_side: Option<TruncationSide>,
    tokenizer_class: Option<String>,
    do_lower_case: Option<bool>,
    strip_accents: Option<bool>,
    tokenize_chinese_chars: Option<bool>,
    add_prefix_space: Option<bool>,
}

impl TokenizerConfig {
    /// What replaces the settings of `tokenizer.json`. The classes have defaults of their own.
    fn overrides(&self) -> Overrides {
        let class = self.tokenizer_class.as_deref().unwrap_or_default();
        match class.trim_end_matches("Fast").trim_end_matches("Tokenizer") {
            "Bert" | "DistilBert" | "Electra" | "MPNet" => Overrides {
                bert: Some(BertOverrides {
                    lower_case: self.do_lower_case.unwrap_or(true),
                    strips_accents: self.strip_accents,
                    splits_chinese: self.tokenize_chinese_chars.unwrap_or(true),
                }),
                ..Overrides::default()
            },
            "Roberta" => Overrides {
                adds_prefix_space: Some(self.add_prefix_space.unwrap_or(false)),
                ..Overrides::default()
            },
            _ => Overrides::default(),
        }
    }
}

/// The side of a text that is cut.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum TruncationSide {
    Left,
    Right,
}

#[derive(Deserialize)]
struct PoolingConfig {
    pooling_mode: Option<Modes>,
    include_prompt: Option<bool>,
    /// The flags of the older form, among other fields.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// The names under which a module after the pooling reads and writes.
#[derive(Default, Deserialize)]
struct NamesConfig {
    module_input_name: Option<String>,
    module_output_name: Option<String>,
}

#[derive(Deserialize)]
struct DenseConfig {
    in_features: usize,
    out_features: usize,
    #[serde(default = "yes")]
    bias: bool,
    #[serde(default = "tanh")]
    activation_function: String,
    #[serde(default)]
    use_residual: bool,
}

fn yes() -> bool {
    true
}

/// The default of sentence-transformers.
fn tanh() -> String {
    "torch.nn.Tanh".to_owned()
}

#[derive(Deserialize)]
struct LayerNormConfig {
    dimension: usize,
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

/// The names of the modes, for errors.
const MODES: &str = "cls, max, mean, mean_sqrt_len_tokens, weightedmean and lasttoken";

impl SentenceSettings {
    /// Reads the settings of the model `source`, and the weights of the modules after its pooling. `hidden` is the width of
    /// a token's vector.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] naming the module, mode or setting that is not supported, [`LoadError::File`] for an
    /// invalid file.
    pub fn read(files: &ModelFiles, source: &str, hidden: usize) -> Result<Self, LoadError> {
        let refused = |reason: String| LoadError::Unsupported { model: source.into(), reason };
        let prompts = Self::prompts(files, source)?;
        let mut settings = Self {
            head: Pooling { modes: vec![default_mode(files)?], normalize: false }.into(),
            include_prompt: true,
            prompts,
        };
        let modules: Vec<Module> = files.json(MODULES)?.unwrap_or_default();
        let Some((pooling, after)) = split(&modules).map_err(&refused)? else { return Ok(settings) };
        check_transformer(&transformer_config(files)?).map_err(&refused)?;
        let config: PoolingConfig = files.required_json(&file(pooling, CONFIG))?;
        settings.include_prompt = config.include_prompt.unwrap_or(true);
        settings.head.pooling.modes = modes(config).map_err(&refused)?;
        let mut width = settings.head.width(hidden);
        let mut loaded = Vec::new();
        for (index, module) in after.iter().enumerate() {
            let names = files.json(&file(module, CONFIG))?.unwrap_or_default();
            check_names(module, names).map_err(&refused)?;
            match module.kind() {
                "Normalize" if index == 0 => settings.head.pooling.normalize = true,
                "Normalize" => loaded.push(SentenceModule::Normalize),
                // It drops numbers only in training.
                "Dropout" => {}
                "LayerNorm" => {
                    let LayerNormConfig { dimension } = files.required_json(&file(module, CONFIG))?;
                    check_width(module, "dimension", dimension, width).map_err(&refused)?;
                    loaded.push(SentenceModule::layer_norm(files, &file(module, WEIGHTS), width)?);
                }
                _ => {
                    let config: DenseConfig = files.required_json(&file(module, CONFIG))?;
                    let activation = check_dense(module, &config, width).map_err(&refused)?;
                    let (shape, stem) = ([width, config.out_features], file(module, WEIGHTS));
                    loaded.push(SentenceModule::dense(files, &stem, shape, config.bias, activation)?);
                    width = config.out_features;
                }
            }
        }
        settings.head.modules = loaded.into();
        Ok(settings)
    }

    /// Reads only the prompts.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for a default prompt that does not exist, [`LoadError::File`] for an invalid file.
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

    /// Requests the settings files that the model has, and the weights of its modules, without reading their contents.
    ///
    /// # Errors
    /// [`LoadError::File`] for a `modules.json` that is invalid, [`LoadError::Hub`] if the hub cannot be reached.
    pub fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
        for name in TRANSFORMER_CONFIGS.iter().chain(&[LIBRARY_CONFIG, "tokenizer_config.json"]) {
            files.optional(name)?;
        }
        let modules: Vec<Module> = files.json(MODULES)?.unwrap_or_default();
        for module in modules.iter().filter(|module| !module.path.is_empty() && is_inside(module)) {
            files.optional(&file(module, CONFIG))?;
            if has_weights(module) {
                files.weights_of(&file(module, WEIGHTS))?;
            }
        }
        Ok(())
    }

    /// Reads only the limits of texts. The model need not have files of sentence-transformers.
    ///
    /// # Errors
    /// [`LoadError::File`] for an invalid file.
    pub fn limits(files: &ModelFiles) -> Result<TextLimits, LoadError> {
        let transformer = transformer_config(files)?;
        let tokenizer: TokenizerConfig = files.json("tokenizer_config.json")?.unwrap_or_default();
        let tokenizer_limit = tokenizer.model_max_length.filter(|n| *n >= 1.0).map(|n| n as usize);
        let max_tokens = transformer.max_seq_length.or(tokenizer_limit);
        let overrides = tokenizer.overrides();
        let kept = tokenizer.truncation_side.map(|side| match side {
            TruncationSide::Left => Side::End,
            TruncationSide::Right => Side::Beginning,
        });
        Ok(TextLimits { max_tokens, lower_case: transformer.do_lower_case, kept, overrides })
    }
}

#[derive(Deserialize)]
struct NetworkKind {
    architectures: Option<Vec<String>>,
    is_causal: Option<bool>,
}

/// The pooling of a model without a Pooling module, as sentence-transformers assumes it: the last token of a causal model,
/// and for others the mean.
fn default_mode(files: &ModelFiles) -> Result<Mode, LoadError> {
    let NetworkKind { architectures, is_causal } = files.required_json("config.json")?;
    let class = architectures.unwrap_or_default().into_iter().next().unwrap_or_default();
    let is_causal = class.ends_with("ForCausalLM") && is_causal != Some(false);
    Ok(if is_causal { Mode::LastToken } else { Mode::Mean })
}

/// The settings of the Transformer module.
fn transformer_config(files: &ModelFiles) -> Result<TransformerConfig, LoadError> {
    for name in TRANSFORMER_CONFIGS {
        if let Some(config) = files.json(name)? {
            return Ok(config);
        }
    }
    Ok(TransformerConfig::default())
}

/// Checks that the pooling gets the vectors of the network's last layer.
fn check_transformer(config: &TransformerConfig) -> Result<(), String> {
    if let Some(task) = config.transformer_task.as_deref().filter(|task| *task != "feature-extraction") {
        return Err(format!("transformer_task is {task:?}; for embeddings, feature-extraction is supported"));
    }
    if let Some(argument) = config.unread_argument() {
        return Err(format!("{argument} in the settings of the Transformer module, which is not supported"));
    }
    let text = &config.modality_config["text"];
    if text.is_null() {
        return Ok(());
    }
    for (name, supported) in [("method", "forward"), ("method_output_name", "last_hidden_state")] {
        if text[name] != supported {
            return Err(format!("{name} of modality_config is {}; {supported} is supported", text[name]));
        }
    }
    Ok(())
}

/// The Pooling module, and those after it. None if the list is empty or has only a Transformer, for which a pooling is
/// assumed.
fn split(modules: &[Module]) -> Result<Option<(&Module, &[Module])>, String> {
    let [transformer, others @ ..] = modules else { return Ok(None) };
    let kinds: Vec<&str> = modules.iter().map(Module::kind).collect();
    let expected =
        "Transformer, Pooling, and then any of Dense, LayerNorm, Normalize and Dropout are supported";
    if let Some(module) = modules.iter().find(|module| !module.is_of_library()) {
        return Err(format!(
            "{MODULES} has the module {}, which is not sentence-transformers'",
            module.class()
        ));
    }
    let known = ["Transformer", POOLING, "Dense", "LayerNorm", "Normalize", "Dropout"];
    if let Some(kind) = kinds.iter().find(|kind| !known.contains(kind)) {
        return Err(format!("{MODULES} has a {kind} module; {expected}"));
    }
    if let Some(module) = modules.iter().find(|module| !is_inside(module)) {
        return Err(format!("the {} module is in {:?}, outside of the model", module.kind(), module.path));
    }
    if !transformer.path.is_empty() {
        return Err(transformer.in_folder());
    }
    let is_in_order = kinds[0] == "Transformer"
        && kinds.get(1).is_none_or(|kind| *kind == POOLING)
        && kinds.iter().skip(2).all(|kind| !["Transformer", POOLING].contains(kind));
    if !is_in_order {
        return Err(format!("{MODULES} lists {kinds:?}; {expected}"));
    }
    let Some((pooling, after)) = others.split_first() else { return Ok(None) };
    if after.len() > MAX_MODULES {
        return Err(format!("{MODULES} has {} modules after Pooling; at most {MAX_MODULES}", after.len()));
    }
    Ok(Some((pooling, after)))
}

/// Whether a module's folder is one of the model's.
fn is_inside(module: &Module) -> bool {
    Path::new(&module.path).components().all(|part| matches!(part, Component::Normal(_)))
}

/// Whether a module has files of weights.
fn has_weights(module: &Module) -> bool {
    ["Dense", "LayerNorm"].contains(&module.kind()) && module.is_of_library()
}

/// The settings of a module.
const CONFIG: &str = "config.json";
/// The beginning of the names of a module's weights' files.
const WEIGHTS: &str = "model";

/// The name of a file in a module's folder.
fn file(module: &Module, name: &str) -> String {
    Path::new(&module.path).join(name).to_string_lossy().into_owned()
}

/// Checks that a module computes vectors from vectors, in place.
fn check_names(module: &Module, names: NamesConfig) -> Result<(), String> {
    for (setting, name) in
        [("module_input_name", names.module_input_name), ("module_output_name", names.module_output_name)]
    {
        if let Some(name) = name.filter(|name| name != VECTOR) {
            let kind = module.kind();
            return Err(format!("{setting} of the {kind} module is {name:?}; {VECTOR} is supported"));
        }
    }
    Ok(())
}

/// Checks that a module takes vectors of the width of those before it.
fn check_width(module: &Module, name: &str, found: usize, width: usize) -> Result<(), String> {
    if found == width {
        return Ok(());
    }
    let (kind, path) = (module.kind(), &module.path);
    Err(format!(
        "{name} of the {kind} module in {path:?} is {found}, and the vectors before it have {width} numbers"
    ))
}

/// Checks the settings of a Dense module for vectors of `width` numbers. Returns its activation.
fn check_dense(module: &Module, config: &DenseConfig, width: usize) -> Result<fn(f32) -> f32, String> {
    check_width(module, "in_features", config.in_features, width)?;
    let out = config.out_features;
    if !(1..=MAX_WIDTH).contains(&out) {
        return Err(format!("out_features of the Dense module is {out}; 1 to {MAX_WIDTH} are supported"));
    }
    if config.use_residual {
        return Err("use_residual of the Dense module is true, which is not supported".to_owned());
    }
    let class = &*config.activation_function;
    let name = class.strip_prefix("torch.nn.").and_then(|path| path.rsplit('.').next());
    name.and_then(activation).ok_or_else(|| {
        format!("activation_function of the Dense module is {class:?}; PyTorch's {ACTIVATIONS} are supported")
    })
}

/// The pooling modes, whose results are concatenated.
fn modes(config: PoolingConfig) -> Result<Vec<Mode>, String> {
    let flag = |name: &str| config.others.get(name).and_then(Value::as_bool) == Some(true);
    let is_unknown =
        |name: &str| name.starts_with("pooling_mode_") && FLAGS.iter().all(|(key, _)| name != *key);
    if let Some(name) = config.others.keys().find(|name| flag(name) && is_unknown(name)) {
        return Err(format!("{name} is true; {MODES} are supported"));
    }
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
    if names.len() > MAX_MODES {
        return Err(format!("pooling_mode has {} modes; at most {MAX_MODES}", names.len()));
    }
    let mode = |name: &String| match &**name {
        "cls" => Ok(Mode::Cls),
        "max" => Ok(Mode::Max),
        "mean" => Ok(Mode::Mean),
        "mean_sqrt_len_tokens" => Ok(Mode::MeanSqrtLen),
        "weightedmean" => Ok(Mode::WeightedMean),
        "lasttoken" => Ok(Mode::LastToken),
        other => Err(format!("pooling_mode is {other:?}; {MODES} are supported")),
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
