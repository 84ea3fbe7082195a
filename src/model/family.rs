//! What a built-in family of models registers: its name, URLs, the models that it serves, its options, and how tools
//! make a task for it. Each family defines one [`Family`] beside its code in `tasks`; `registry` lists them. Decides
//! whether a family serves a model, and reads options. Reads no weights.

use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::fields::Keys;
use super::load::ModelFiles;
use super::load::gguf::Gguf;
use super::{LoadError, LoadSpec, Route};
pub use crate::config::{OptionDefault, OptionProblem, OptionSpec, Takes};
use crate::config::{check_options, with_defaults};
use crate::protocol::batch_line::RequestBody;

/// The file in which sentence-transformers lists a model's modules.
pub const MODULES: &str = "modules.json";

/// A built-in family of models.
pub struct Family {
    /// Its name. `pool.task` chooses it by this name where a model's weights serve several.
    pub name: &'static str,
    /// The routes that it answers, the usual one first. A model of the family may answer fewer.
    pub routes: &'static [Route],
    /// The fields of its requests, by their URLs.
    pub fields: &'static [(&'static str, &'static Keys)],
    /// Which models it serves.
    pub serves: Serves,
    /// The settings that it takes in `[pool.options]`.
    pub options: &'static [OptionSpec],
    /// Makes a task from one or more texts, for `sconce bench`.
    pub sample: fn(&[String]) -> Sample,
    /// A small model of the family, with which tests and the fuzz target load it.
    pub example: Example,
}

/// Which `pool.model` a family serves.
pub enum Serves {
    /// The family's name, alone or followed by `:…` or `?…`.
    ItsName,
    /// Models that are loaded from files.
    Files(FileRules),
}

/// The models that a family serves, if they are loaded from files, and what it needs of these files.
pub struct FileRules {
    /// The `model_type` of their `config.json`.
    pub configs: &'static [&'static str],
    /// The `general.architecture` of their GGUF file.
    pub ggufs: &'static [&'static str],
    /// The `_class_name` of their `model_index.json`, for models of several networks.
    pub pipelines: &'static [&'static str],
    /// The `model_type` in `config_sentence_transformers.json` of models that the family serves, such as `SparseEncoder`.
    pub libraries: &'static [&'static str],
    /// The kinds of modules in `modules.json` that make a model one of the family's, such as `Pooling`.
    pub modules: &'static [&'static str],
    /// A further condition on a model's description.
    pub accepts: fn(&Description) -> bool,
    /// The ends of the names in `architectures` that the family serves unless `pool.task` names it: it would ignore the
    /// weights of other heads, or lacks some. Empty: its loading finds out.
    pub heads: &'static [&'static str],
    /// The routes that a model with these files answers, for a family of which some models answer fewer than others.
    pub fewer_routes: Option<fn(&ModelFiles) -> &'static [Route]>,
    /// One sentence for each property that the family assumes because the model's files do not tell it.
    pub assumptions: fn(&Description) -> Vec<String>,
    /// Requests every file that loading may read, the weights last. The digest of a model covers these files.
    pub request_files: fn(&ModelFiles) -> Result<(), LoadError>,
    /// Checks all that can be checked of a model without loading it: its configuration, the pool's options, the headers
    /// of its weights, and that their files are complete. Does not check devices and tokenizers.
    pub check: fn(&LoadSpec) -> Result<(), LoadError>,
}

/// Makes a task from texts.
pub type MakeSample = dyn Fn(&[String]) -> Sample;

/// A task that a tool makes for a family.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Its URL. None for a family that answers every URL.
    pub url: Option<&'static str>,
    /// Its body.
    pub body: RequestBody,
    /// The number of its inputs.
    pub inputs: usize,
}

impl Sample {
    /// A task whose body is JSON.
    pub fn json(url: &'static str, body: &Value, inputs: usize) -> Self {
        Self { url: Some(url), body: body.to_string().into(), inputs }
    }

    /// A task whose body is JSON with the texts in `field`: one text as a string, several as a list.
    pub fn of_texts(url: &'static str, field: &str, texts: &[String]) -> Self {
        let input = if let [alone] = texts { Value::from(alone.as_str()) } else { Value::from(texts) };
        Self::json(url, &json!({ field: input }), texts.len())
    }
}

/// A small model of a family.
pub struct Example {
    /// A folder of `tests/fixtures`, or the whole `model` setting of a family that serves its name.
    pub model: &'static str,
    /// Options, each a whole number.
    pub options: &'static [(&'static str, u64)],
}

/// The format in which a model's files describe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `config.json`: one network.
    Config,
    /// A GGUF file.
    Gguf,
    /// `model_index.json`: several networks, each in a folder.
    Pipeline,
}

/// How a model's files describe it.
#[derive(Debug)]
pub struct Description {
    /// The format of the description.
    pub format: Format,
    /// The architecture that it names. Empty if it names none.
    pub architecture: String,
    /// The fields of `config.json` or `model_index.json`. Except for the architecture's name, they may mean something
    /// else in an architecture that is not served.
    pub fields: Map<String, Value>,
    /// The kinds of the modules that the sentence-transformers library would load, such as `Pooling`; empty if the model
    /// is not one of that library's.
    pub modules: Vec<String>,
    /// The kind of model that `config_sentence_transformers.json` names, such as `SparseEncoder`. Older files name none.
    pub library: Option<String>,
}

/// The file in which sentence-transformers names the kind of a model, and its prompts.
pub const LIBRARY_CONFIG: &str = "config_sentence_transformers.json";

#[derive(Default, Deserialize)]
struct Library {
    model_type: Option<String>,
}

/// A module in `modules.json`.
#[derive(Deserialize)]
pub struct Module {
    /// The module's class, with its path.
    #[serde(rename = "type")]
    class: String,
    /// The folder with its files; empty for that of the model.
    #[serde(default)]
    pub path: String,
}

impl Module {
    /// The name of its class.
    pub fn kind(&self) -> &str {
        self.class.rsplit('.').next().unwrap_or_default()
    }

    /// The name of its class with its path.
    pub fn class(&self) -> &str {
        &self.class
    }

    /// Whether its code is sentence-transformers' own. Otherwise the code is in the model's files, or in another library.
    pub fn is_of_library(&self) -> bool {
        self.class.starts_with("sentence_transformers.")
    }

    /// Says that the network's files are not where they are read.
    pub fn in_folder(&self) -> String {
        let (kind, path) = (self.kind(), &self.path);
        format!(
            "the {kind} module is in {path:?}, and its files are read from the top of the model: move them there, and set \
             this module's path in {MODULES} to \"\""
        )
    }
}

/// The module that makes a model one for embeddings.
pub const POOLING: &str = "Pooling";

/// The modules that only one kind of model has.
const DECIDING_MODULES: [&str; 4] = [POOLING, "LogitScore", "SpladePooling", "MultiVectorMask"];

/// What the files of sentence-transformers say that a model is.
#[derive(Clone, Copy, Debug)]
pub enum Named<'a> {
    /// The kind of model in `config_sentence_transformers.json`.
    Library(&'a str),
    /// A module in `modules.json`.
    Module(&'a str),
}

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(kind) => write!(f, "{LIBRARY_CONFIG} says that it is a {kind}"),
            Self::Module(kind) => write!(f, "{MODULES} has a {kind} module"),
        }
    }
}

impl Description {
    /// Reads the description of the model from its `files`.
    ///
    /// # Errors
    /// [`LoadError::File`] if it is missing or invalid, [`LoadError::Hub`] if the hub cannot be reached.
    pub fn read(files: &ModelFiles) -> Result<Self, LoadError> {
        if let Some(path) = files.gguf() {
            let architecture = Gguf::architecture(&path)?;
            return Ok(Self {
                format: Format::Gguf,
                architecture,
                fields: Map::new(),
                modules: Vec::new(),
                library: None,
            });
        }
        let describe = |format, name: &str, fields: Map<String, Value>| {
            let architecture = fields.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
            Self { format, architecture, fields, modules: Vec::new(), library: None }
        };
        // A folder that has `config.json` and `model_index.json` counts as one network, described by `config.json`.
        if let Some(fields) = files.json("config.json")? {
            let modules: Vec<Module> = files.json(MODULES)?.unwrap_or_default();
            let modules = modules.iter().map(|module| module.kind().to_owned()).collect();
            let library: Library = files.json(LIBRARY_CONFIG)?.unwrap_or_default();
            return Ok(Self {
                modules,
                library: library.model_type,
                ..describe(Format::Config, "model_type", fields)
            });
        }
        if let Some(fields) = files.json("model_index.json")? {
            return Ok(describe(Format::Pipeline, "_class_name", fields));
        }
        if let Some(path) = files.optional(MODULES)? {
            let modules: Vec<Module> = files.json(MODULES)?.unwrap_or_default();
            if let Some(module) = modules.first().filter(|module| !module.path.is_empty()) {
                return Err(LoadError::File { path, reason: module.in_folder() });
            }
        }
        Ok(describe(Format::Config, "model_type", files.required_json("config.json")?))
    }
}

impl Description {
    /// The classes in `architectures`, of which the first describes the weights.
    pub fn classes(&self) -> impl Iterator<Item = &str> {
        let classes = self.fields.get("architectures").and_then(Value::as_array);
        classes.into_iter().flatten().filter_map(Value::as_str)
    }

    /// The class of the weights, if it is code of the model's own repository (`auto_map`) and not the library's class for
    /// the architecture.
    pub fn own_class(&self) -> Option<&str> {
        self.fields.get("auto_map").and_then(Value::as_object).filter(|map| !map.is_empty())?;
        let class = self.classes().next()?;
        let plain =
            |name: &str| name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase();
        let suffixes = [
            "ForCausalLM",
            "ForMaskedLM",
            "ForPreTraining",
            "ForSequenceClassification",
            "ForTokenClassification",
            "ForQuestionAnswering",
            "ForConditionalGeneration",
            "LMHeadModel",
            "EncoderModel",
            "Model",
        ];
        let stem = suffixes.iter().find_map(|suffix| class.strip_suffix(suffix)).unwrap_or(class);
        // The class of `gemma3_text` may be `Gemma3ForCausalLM`.
        (stem.is_empty() || !plain(&self.architecture).starts_with(&plain(stem))).then_some(class)
    }

    /// Whether the model has this module of sentence-transformers.
    pub fn has_module(&self, kind: &str) -> bool {
        self.modules.iter().any(|module| module == kind)
    }

    /// Whether the model's own files say how its embeddings are made.
    pub fn has_pooling(&self) -> bool {
        self.modules.iter().any(|kind| kind == POOLING)
    }

    /// What the files of sentence-transformers say that the model is: the kind of model that they name, else the last
    /// module that only one kind of model has.
    pub fn named(&self) -> Option<Named<'_>> {
        let last = || self.modules.iter().rev().find(|kind| DECIDING_MODULES.contains(&&***kind));
        match &self.library {
            Some(library) => Some(Named::Library(library)),
            None => last().map(|kind| Named::Module(kind)),
        }
    }
}

impl FileRules {
    /// Rules that name no model yet. A family adds what its models are recognized by.
    pub const fn new(
        request_files: fn(&ModelFiles) -> Result<(), LoadError>,
        check: fn(&LoadSpec) -> Result<(), LoadError>,
    ) -> Self {
        Self {
            configs: &[],
            ggufs: &[],
            pipelines: &[],
            libraries: &[],
            modules: &[],
            accepts: |_| true,
            heads: &[],
            fewer_routes: None,
            assumptions: |_| Vec::new(),
            request_files,
            check,
        }
    }

    /// The architectures that are served in a format.
    pub fn architectures(&self, format: Format) -> &'static [&'static str] {
        match format {
            Format::Config => self.configs,
            Format::Gguf => self.ggufs,
            Format::Pipeline => self.pipelines,
        }
    }

    /// Whether the family serves a model.
    pub fn serves(&self, model: &Description) -> bool {
        self.architectures(model.format).contains(&&*model.architecture) && (self.accepts)(model)
    }

    /// Whether the family serves what the files of sentence-transformers say that a model is.
    pub fn is_named(&self, named: Named<'_>) -> bool {
        match named {
            Named::Library(kind) => self.libraries.contains(&kind),
            Named::Module(kind) => self.modules.contains(&kind),
        }
    }

    /// Whether the family uses the head that the model's weights have.
    pub fn uses_head(&self, model: &Description) -> bool {
        let is_used = |class: &str| self.heads.iter().any(|head| class.ends_with(head));
        self.heads.is_empty() || model.classes().next().is_none_or(is_used)
    }
}

impl Family {
    /// The rules for a model's files; none if it serves only its own name.
    pub fn files(&self) -> Option<&FileRules> {
        match &self.serves {
            Serves::ItsName => None,
            Serves::Files(rules) => Some(rules),
        }
    }

    /// Checks the pool's options, by their names, types and ranges alone.
    ///
    /// # Errors
    /// [`LoadError::Option`] with the first that is wrong.
    pub fn check_options(&self, spec: &LoadSpec) -> Result<(), LoadError> {
        let problems = check_options(self.options, &spec.options);
        problems.into_iter().next().map_or(Ok(()), |problem| Err(spec.refused_option(problem)))
    }

    /// The pool's options, with their defaults. An option without a value is left out if its default is derived.
    ///
    /// # Errors
    /// As [`Family::check_options`].
    pub fn read_options<T: DeserializeOwned>(&self, spec: &LoadSpec) -> Result<T, LoadError> {
        self.check_options(spec)?;
        let all = with_defaults(self.options, &spec.options);
        serde_json::from_value(Value::Object(all))
            .map_err(|error| spec.unsupported(format!("[pool.options]: {error}")))
    }

    /// The specification with which the family's example is loaded. `root` is the folder of this repository.
    pub fn example(&self, root: &Path) -> LoadSpec {
        let Example { model, options } = self.example;
        let source = match self.serves {
            Serves::ItsName => model.to_owned(),
            Serves::Files(_) => root.join("tests/fixtures").join(model).display().to_string(),
        };
        let options = options.iter().map(|(name, number)| ((*name).to_owned(), (*number).into())).collect();
        LoadSpec { options, ..LoadSpec::new(source) }
    }
}
