//! Renders a conversation to a prompt by the model's own chat template. A template is a program that comes with the
//! model, so it may read no files, and may execute only a limited number of instructions.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;

use crate::model::{TaskError, TaskErrorKind};

/// The largest number of instructions that a template may execute for one conversation.
const FUEL: u64 = 2_000_000;
/// The template's name in its errors.
const NAME: &str = "chat_template";

/// A model's chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The special tokens that templates use: `bos_token`, `eos_token`.
    special_tokens: Vec<(&'static str, String)>,
}

impl ChatTemplate {
    /// Reads a template. `special_tokens` are the special tokens that it may use.
    ///
    /// # Errors
    /// The line that is not valid.
    pub fn new(text: String, special_tokens: Vec<(&'static str, String)>) -> Result<Self, String> {
        let mut environment = Environment::new();
        // The same settings as in the transformers library.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        // With the date, the same task would have another prompt tomorrow.
        environment.add_function("strftime_now", |_: String| "");
        let added = environment.add_template_owned(NAME, text);
        added.map_err(|error| format!("the chat template cannot be read: {error:#}"))?;
        Ok(Self { environment, special_tokens })
    }

    /// The prompt for the next answer in a conversation.
    ///
    /// # Errors
    /// `BadInput` with the template's reason if it refuses the conversation.
    pub fn render(&self, messages: &impl Serialize) -> Result<String, TaskError> {
        let refused = |error: Error| {
            let reason = match error.detail() {
                Some(reason) => reason.to_owned(),
                None => error.to_string(),
            };
            let message = format!("the model's chat template refuses these messages: {reason}");
            TaskError::new(TaskErrorKind::BadInput, message).with_param("messages")
        };
        let special_tokens =
            self.special_tokens.iter().map(|(name, text)| (*name, Value::from(text.as_str())));
        let variables =
            [("messages", Value::from(Serde(messages))), ("add_generation_prompt", Value::from(true))];
        let context = Value::from_pairs(variables.into_iter().chain(special_tokens));
        self.environment.get_template(NAME).and_then(|template| template.render(context)).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rendered(template: &str) -> Result<String, TaskError> {
        let special_tokens = vec![("bos_token", "<s>".to_owned())];
        let messages = json!([{"role": "user", "content": " hello "}]);
        ChatTemplate::new(template.to_owned(), special_tokens).unwrap().render(&messages)
    }

    #[test]
    fn a_template_sees_messages_special_tokens_and_python_methods() {
        let template = "{{ bos_token }}{% for m in messages %}\n[{{ m['role'] | upper }}] {{ m.content.strip() }}\
                        {% endfor %}{% if add_generation_prompt %}\n[A]{% endif %}";
        assert_eq!(rendered(template).unwrap(), "<s>[USER] hello[A]");
    }

    #[test]
    fn a_template_may_refuse_messages_and_cannot_loop_forever() {
        let error = rendered("{{ raise_exception('roles must alternate') }}").unwrap_err();
        assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("messages")));
        assert!(error.message.ends_with("roles must alternate"), "{}", error.message);
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
        assert!(rendered(endless).is_err());
        assert!(rendered("{% include 'file' %}").is_err());
        assert!(ChatTemplate::new("{% if %}".to_owned(), Vec::new()).is_err());
    }
}
