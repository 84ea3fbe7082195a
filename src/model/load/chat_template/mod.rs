//! Renders a conversation to a prompt by the model's own chat templates. A template is a program that comes with the
//! model, so it may read no files, and may execute only a limited number of instructions. Decides which roles and
//! which form of messages a template takes; refuses messages that it would drop.

mod jinja;
mod pair;

pub use pair::PairTemplate;

use std::collections::{BTreeMap, BTreeSet};

use jiff::Zoned;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, Error};
use serde::{Deserialize, Serialize};

use super::ModelFiles;
use crate::model::{LoadError, TaskError, TaskErrorKind};

/// The largest template in bytes. Those of published models have up to 40 KiB.
const MAX_TEMPLATE: usize = 96 << 10;

/// The name of the template that is used if the request names none.
const DEFAULT: &str = "default";
/// The folder of further templates, each in a file `NAME.jinja`.
const FOLDER: &str = "additional_chat_templates";
/// A text that no template has of its own. It shows whether a template keeps a message's text.
const MARK: &str = "sconce7d1f";

/// Special tokens by the names that templates use: `bos_token`, `eos_token`. Each is a text, or a list of texts.
pub type SpecialTokens = Vec<(&'static str, serde_json::Value)>;
/// The texts of templates by name, or why they cannot be read.
type Sources = BTreeMap<String, Result<String, String>>;

/// One message of a conversation, as chat templates read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    /// `system`, `developer`, `user` or `assistant`.
    pub role: String,
    /// The text; if it came in parts, they are joined by line breaks.
    pub content: String,
    /// A name that distinguishes participants with the same role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// `chat_template` in `tokenizer_config.json`: one template, or several with names.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum TemplateField {
    One(String),
    Named(Vec<NamedTemplate>),
    ByName(BTreeMap<String, String>),
    Other(serde::de::IgnoredAny),
}

#[derive(Deserialize)]
pub struct NamedTemplate {
    name: String,
    template: String,
}

impl TemplateField {
    fn into_sources(self) -> Sources {
        match self {
            Self::One(text) => one(text),
            Self::Named(templates) => {
                templates.into_iter().map(|named| (named.name, Ok(named.template))).collect()
            }
            Self::ByName(templates) => templates.into_iter().map(|(name, text)| (name, Ok(text))).collect(),
            Self::Other(_) => {
                let reason =
                    "chat_template in tokenizer_config.json is neither a text nor a list of named texts";
                BTreeMap::from([(DEFAULT.to_owned(), Err(reason.to_owned()))])
            }
        }
    }
}

fn one(text: String) -> Sources {
    BTreeMap::from([(DEFAULT.to_owned(), Ok(text))])
}

/// A model's chat templates. One that cannot be read refuses its chats, and nothing else.
pub struct ChatTemplates {
    by_name: BTreeMap<String, Result<ChatTemplate, String>>,
}

impl ChatTemplates {
    /// Requests the files that may hold templates.
    ///
    /// # Errors
    /// [`LoadError::Hub`] if the hub cannot be reached.
    pub fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
        files.optional("chat_template.jinja")?;
        for name in files.names_in(FOLDER)? {
            files.optional(&format!("{FOLDER}/{name}"))?;
        }
        Ok(())
    }

    /// Reads the templates of a model: its `.jinja` files, and only if there are none, `configured`. None if the model
    /// has no template.
    ///
    /// # Errors
    /// [`LoadError`] for a file that cannot be read.
    pub fn from_files(
        files: &ModelFiles,
        configured: Option<TemplateField>,
        special_tokens: &SpecialTokens,
    ) -> Result<Option<Self>, LoadError> {
        Ok(Self::new(sources(files, configured)?, special_tokens))
    }

    /// Whether [`from_files`](Self::from_files) finds a template.
    ///
    /// # Errors
    /// As [`from_files`](Self::from_files).
    pub fn are_in(files: &ModelFiles, configured: Option<TemplateField>) -> Result<bool, LoadError> {
        Ok(!sources(files, configured)?.is_empty())
    }

    /// The template of a GGUF file.
    pub fn from_text(text: &str, special_tokens: &SpecialTokens) -> Option<Self> {
        Self::new(one(text.to_owned()), special_tokens)
    }

    fn new(sources: Sources, special_tokens: &SpecialTokens) -> Option<Self> {
        let by_name: BTreeMap<_, _> = sources
            .into_iter()
            .map(|(name, text)| {
                let text = text.and_then(of_bounded_length);
                let template = text.and_then(|text| ChatTemplate::new(&text, special_tokens.clone()));
                match &template {
                    Err(reason) => tracing::warn!(name, reason, "chats with this chat template are refused"),
                    Ok(template) => template.log(&name),
                }
                (name, template)
            })
            .collect();
        (!by_name.is_empty()).then_some(Self { by_name })
    }

    /// The template with this name, or the default one.
    ///
    /// # Errors
    /// `BadInput` if there is none, or if it could not be read.
    pub fn find(&self, name: Option<&str>) -> Result<&ChatTemplate, TaskError> {
        match self.by_name.get(name.unwrap_or(DEFAULT)) {
            Some(Ok(template)) => Ok(template),
            Some(Err(reason)) => Err(TaskError::bad_input("messages", format!("messages: {reason}"))),
            None => {
                let known: Vec<&str> = self.by_name.keys().map(String::as_str).collect();
                let problem = match name {
                    Some(name) => format!("chat_template_name: the model has no chat template {name:?}"),
                    None => {
                        "chat_template_name is missing: the model has no default chat template".to_owned()
                    }
                };
                let message = format!("{problem}; it has {}", known.join(", "));
                Err(TaskError::bad_input("chat_template_name", message))
            }
        }
    }
}

/// The texts of a model's templates: those of its `.jinja` files, and only if there are none, the `configured` ones.
fn sources(files: &ModelFiles, configured: Option<TemplateField>) -> Result<Sources, LoadError> {
    let mut sources = Sources::new();
    let mut add = |name: &str, file: &str| -> Result<(), LoadError> {
        if let Some(path) = files.optional(file)? {
            let text = String::from_utf8(super::read(&path)?);
            sources.insert(name.to_owned(), text.map_err(|error| format!("{file}: {error}")));
        }
        Ok(())
    };
    add(DEFAULT, "chat_template.jinja")?;
    for file in files.names_in(FOLDER)? {
        if let Some(name) = file.strip_suffix(".jinja") {
            add(name, &format!("{FOLDER}/{file}"))?;
        }
    }
    if sources.is_empty() {
        sources = configured.map(TemplateField::into_sources).unwrap_or_default();
    }
    Ok(sources)
}

/// Refuses a long template: the library's parser calls itself for nested expressions, and would exceed the thread's stack.
fn of_bounded_length(text: String) -> Result<String, String> {
    match text.len() {
        0..=MAX_TEMPLATE => Ok(text),
        length => Err(format!("the template has {length} bytes; at most {MAX_TEMPLATE} are read")),
    }
}

/// A message as templates see it.
#[derive(Serialize)]
struct Shown<'a> {
    role: &'a str,
    content: Content<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Content<'a> {
    Text(&'a str),
    Parts([Part<'a>; 1]),
}

#[derive(Serialize)]
struct Part<'a> {
    r#type: &'static str,
    text: &'a str,
}

/// What a template does with a message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Its text is in the prompt.
    Kept,
    /// Its text is not in the prompt.
    Dropped,
    /// The template fails.
    Refused,
}

/// A chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: SpecialTokens,
    /// Whether the template takes contents as lists of parts, and not as texts.
    takes_parts: bool,
    /// Whether `developer` messages are shown as `system` messages, because the template does not know them.
    renames_developer: bool,
    /// The roles whose messages the template drops, each with whether the message is the first.
    dropped: BTreeSet<(&'static str, bool)>,
}

impl ChatTemplate {
    /// Reads a template, and finds out what it does with each role.
    ///
    /// # Errors
    /// The line that is not valid.
    fn new(text: &str, special_tokens: SpecialTokens) -> Result<Self, String> {
        let cannot_be_read = |error: Error| format!("the model's chat template cannot be read: {error:#}");
        let mut environment = jinja::environment().map_err(cannot_be_read)?;
        environment.add_template_owned("", jinja::adapted(text)).map_err(cannot_be_read)?;
        let mut template = Self {
            environment,
            special_tokens,
            takes_parts: false,
            renames_developer: false,
            dropped: BTreeSet::new(),
        };
        if template.fate("user", true) != Fate::Kept {
            template.takes_parts = true;
            template.takes_parts = template.fate("user", true) == Fate::Kept;
        }
        template.renames_developer = template.fate("developer", true) != Fate::Kept;
        let roles = ["system", "developer", "user", "assistant"];
        template.dropped = roles
            .into_iter()
            .flat_map(|role| [(role, true), (role, false)])
            .filter(|(role, is_first)| template.fate(template.shown_role(role), *is_first) == Fate::Dropped)
            .collect();
        Ok(template)
    }

    /// What the template does with a message of this role. `is_first`: it is the first message.
    fn fate(&self, role: &str, is_first: bool) -> Fate {
        let message = |role, content| self.shown(role, content, None);
        let marked = message(role, MARK);
        let messages = match (is_first, role) {
            (true, "user") => vec![marked],
            (true, _) => vec![marked, message("user", "a")],
            (false, "user") => vec![message("user", "a"), message("assistant", "b"), marked],
            (false, "assistant") => vec![message("user", "a"), marked, message("user", "c")],
            (false, _) => {
                vec![message("user", "a"), message("assistant", "b"), marked, message("user", "c")]
            }
        };
        match self.render_for_answer(&messages, &Zoned::default()) {
            Ok(text) if text.to_lowercase().contains(MARK) => Fate::Kept,
            Ok(_) => Fate::Dropped,
            Err(_) => Fate::Refused,
        }
    }

    fn shown_role<'a>(&self, role: &'a str) -> &'a str {
        if self.renames_developer && role == "developer" { "system" } else { role }
    }

    fn shown<'a>(&self, role: &'a str, content: &'a str, name: Option<&'a str>) -> Shown<'a> {
        let content = match self.takes_parts {
            true => Content::Parts([Part { r#type: "text", text: content }]),
            false => Content::Text(content),
        };
        Shown { role, content, name }
    }

    fn log(&self, name: &str) {
        if !self.dropped.is_empty() {
            let name_role = |(role, is_first): &(&str, bool)| {
                format!("{role}{}", if *is_first { " (first)" } else { "" })
            };
            let roles: Vec<String> = self.dropped.iter().map(name_role).collect();
            let roles = roles.join(", ");
            tracing::info!(name, roles, "the chat template drops messages of these roles; they are refused");
        }
    }

    /// The prompt for the next answer in a conversation. `now` is the time that a template sees if it asks for it.
    ///
    /// # Errors
    /// `BadInput` for a message that the template drops, and with the template's reason if it refuses the
    /// conversation.
    pub fn render(&self, messages: &[ChatMessage], now: &Zoned) -> Result<String, TaskError> {
        for (index, message) in messages.iter().enumerate() {
            if self.dropped.contains(&(message.role.as_str(), index == 0)) {
                let path = format!("messages[{index}].role");
                let place = if index == 0 { "that come first" } else { "behind the first message" };
                let message =
                    format!("{path}: the model's chat template drops {:?} messages {place}", message.role);
                return Err(TaskError::bad_input(path, message));
            }
        }
        let shown: Vec<Shown<'_>> = messages
            .iter()
            .map(|message| {
                self.shown(self.shown_role(&message.role), &message.content, message.name.as_deref())
            })
            .collect();
        self.render_for_answer(&shown, now).map_err(|error| {
            let reason = reason_of(&error);
            let message = format!("the model's chat template refuses these messages: {reason}");
            TaskError::new(TaskErrorKind::BadInput, message).with_param("messages")
        })
    }

    fn render_for_answer(&self, messages: &[Shown<'_>], now: &Zoned) -> Result<String, Error> {
        self.render_shown(messages, now, [("add_generation_prompt", Value::from(true))])
    }

    /// Renders messages with further variables.
    fn render_shown<'a>(
        &self,
        messages: &[Shown<'_>],
        now: &Zoned,
        further: impl IntoIterator<Item = (&'a str, Value)>,
    ) -> Result<String, Error> {
        let special_tokens =
            self.special_tokens.iter().map(|(name, token)| (*name, Value::from(Serde(token))));
        // These are the variables that the transformers library defines.
        let variables = [
            ("messages", Value::from(Serde(messages))),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("strftime_now", jinja::strftime(now)),
        ];
        let context = Value::from_pairs(variables.into_iter().chain(special_tokens).chain(further));
        self.environment.get_template("")?.render(context)
    }
}

/// Why a template fails: the reason that it gives itself, if it gives one.
fn reason_of(error: &Error) -> String {
    error.detail().map_or_else(|| error.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests;
