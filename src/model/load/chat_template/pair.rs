//! Renders a query and a document into the prompt of a reranker by the model's own chat template. The template gets one
//! message of the role `query` and one of the role `document`, as in sentence-transformers. An instruction is the
//! system message before them. Refuses a template that would drop one of the texts.

use jiff::Zoned;
use minijinja::value::{Serde, Value};
use serde_json::{Map, Value as Json};

use super::{ChatTemplate, DEFAULT, SpecialTokens, TemplateField, of_bounded_length, reason_of, sources};
use crate::model::load::ModelFiles;
use crate::model::{LoadError, TaskError, TaskErrorKind};

/// Texts that no template contains. A prompt that contains one shows that the template keeps the text of that message.
const MARKS: [&str; 3] = ["sconce7d1f", "sconce3b2a", "sconce9c4e"];

/// A chat template for pairs.
pub struct PairTemplate {
    template: ChatTemplate,
    /// Further variables of the template, from the model's files.
    variables: Map<String, Json>,
    /// Whether the template puts the instruction into the prompt.
    takes_instruction: bool,
}

impl PairTemplate {
    /// Reads the model's default template: its `.jinja` file, or else `configured`. `variables` are further variables that
    /// the template gets.
    ///
    /// # Errors
    /// [`LoadError`] for a file that cannot be read. The inner error says why the template cannot be used for pairs.
    pub fn from_files(
        files: &ModelFiles,
        configured: Option<TemplateField>,
        special_tokens: SpecialTokens,
        variables: Map<String, Json>,
    ) -> Result<Result<Self, String>, LoadError> {
        let source = sources(files, configured)?.remove(DEFAULT);
        let source = source.unwrap_or_else(|| Err("it has no chat template".to_owned()));
        let template =
            source.and_then(of_bounded_length).and_then(|text| ChatTemplate::new(&text, special_tokens));
        Ok(template.and_then(|template| Self::new(template, variables)))
    }

    fn new(template: ChatTemplate, variables: Map<String, Json>) -> Result<Self, String> {
        let mut pairs = Self { template, variables, takes_instruction: false };
        let [instruction, query, document] = MARKS;
        let mut reason = "it drops the query or the document".to_owned();
        // Templates take the content of a message as a text or as a list of parts. The first form that keeps both texts
        // is used.
        for takes_parts in [false, true] {
            pairs.template.takes_parts = takes_parts;
            match pairs.try_render(None, query, document) {
                Ok(text) if text.contains(query) && text.contains(document) => {
                    let instructed = pairs.try_render(Some(instruction), query, document);
                    pairs.takes_instruction = instructed.is_ok_and(|text| text.contains(instruction));
                    return Ok(pairs);
                }
                Ok(_) => {}
                Err(error) => reason = reason_of(&error),
            }
        }
        Err(format!("its chat template cannot render messages of the roles query and document: {reason}"))
    }

    /// Whether the template puts the instruction into the prompt.
    pub fn takes_instruction(&self) -> bool {
        self.takes_instruction
    }

    /// Renders a pair into a prompt.
    ///
    /// # Errors
    /// `BadInput` with the template's reason if it refuses the texts.
    pub fn render(
        &self,
        instruction: Option<&str>,
        query: &str,
        document: &str,
    ) -> Result<String, TaskError> {
        self.try_render(instruction, query, document).map_err(|error| {
            let message = format!("the model's chat template refuses this pair: {}", reason_of(&error));
            TaskError::new(TaskErrorKind::BadInput, message)
        })
    }

    fn try_render(
        &self,
        instruction: Option<&str>,
        query: &str,
        document: &str,
    ) -> Result<String, minijinja::Error> {
        let shown = |role, text| self.template.shown(role, text, None);
        let messages: Vec<_> = instruction
            .map(|text| shown("system", text))
            .into_iter()
            .chain([shown("query", query), shown("document", document)])
            .collect();
        let further = self.variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let default = [("add_generation_prompt", Value::from(false))];
        self.template.render_shown(&messages, &Zoned::now(), default.into_iter().chain(further))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str) -> Result<PairTemplate, String> {
        PairTemplate::new(ChatTemplate::new(text, Vec::new())?, Map::new())
    }

    #[test]
    fn a_template_gets_the_instruction_the_query_and_the_document_in_the_form_that_it_takes() {
        let flat = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}";
        let parts =
            "{% for message in messages %}<{{ message.role }}>{{ message.content[0].text }}{% endfor %}";
        for text in [flat, parts] {
            let pairs = pairs(text).unwrap();
            assert!(pairs.takes_instruction());
            assert_eq!(pairs.render(None, "q", "d").unwrap(), "<query>q<document>d");
            assert_eq!(pairs.render(Some("i"), "q", "d").unwrap(), "<system>i<query>q<document>d");
        }
        let only = r#"{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}"#;
        assert!(pairs(only).err().unwrap().contains("it drops the query or the document"));
        let both = format!("{only}{}", only.replace("query", "document"));
        assert!(!pairs(&both).unwrap().takes_instruction());
        let chat = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}";
        assert!(pairs(chat).err().unwrap().ends_with("users first"));
    }
}
