//! Which tokens may come next where the text must be JSON or match a regular expression. Decided by llguidance;
//! owns the state of one sequence.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::json;

use crate::model::TaskError;
use crate::model::load::vocabulary::TokenTexts;
use crate::protocol::generate::Format;
use crate::protocol::shorten;

/// The most characters of the library's reason in an error.
const REASON: usize = 300;
/// Marks a token that is no text, for the library.
const SPECIAL: u8 = 0xff;

/// Makes constraints for one model's tokens.
pub struct Grammars(ParserFactory);

impl Grammars {
    /// For a vocabulary of so many `words`. `ends` are the tokens that end an answer; at least one.
    ///
    /// # Errors
    /// The library's reason.
    pub fn new(texts: &TokenTexts, words: usize, ends: &BTreeSet<u32>) -> Result<Self, String> {
        let end = ends.first().copied().ok_or("the model has no token that ends an answer")?;
        let word = |id: u32| match texts.get(id) {
            [] => [&[SPECIAL][..], format!("<|{id}|>").as_bytes()].concat(),
            text => text.to_vec(),
        };
        let count = u32::try_from(words).map_err(|error| error.to_string())?;
        let words: Vec<Vec<u8>> = (0..count).map(word).collect();
        let tokens: TokEnv =
            Arc::new(ApproximateTokEnv::new(TokTrie::from(&TokRxInfo::new(count, end), &words)));
        let mut factory = ParserFactory::new_simple(&tokens).map_err(|error| error.to_string())?;
        factory.quiet();
        Ok(Self(factory))
    }

    /// The constraint of a format; none for any text.
    ///
    /// # Errors
    /// `BadInput` for a schema or an expression that is not done.
    pub fn constraint(&self, format: &Format) -> Result<Option<Constraint>, TaskError> {
        let grammar = match format {
            Format::Text => return Ok(None),
            Format::JsonObject => json_grammar(json!({"type": "object"})),
            Format::JsonSchema(schema) => json_grammar(schema.clone()),
            Format::Regex(expression) => TopLevelGrammar::from_regex(expression),
        };
        let parser = self.0.create_parser(grammar).map_err(|error| {
            let reason = shorten(&format!("{error:#}"), REASON);
            TaskError::bad_input("response_format", format!("response_format cannot be done: {reason}"))
        })?;
        Ok(Some(Constraint(Matcher::new(Ok(parser)))))
    }
}

/// The grammar of a schema. Without free space: a small model would go on with it until `max_tokens`.
fn json_grammar(mut schema: serde_json::Value) -> TopLevelGrammar {
    if let Some(schema) = schema.as_object_mut() {
        let spaces = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        schema.insert("x-guidance".to_owned(), spaces);
    }
    TopLevelGrammar::from_json_schema(schema)
}

/// What may come next in one sequence.
pub struct Constraint(Matcher);

impl Clone for Constraint {
    /// Shares nothing with this one.
    fn clone(&self) -> Self {
        Self(self.0.deep_clone())
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Constraint")
    }
}

impl Constraint {
    /// Makes tokens that may not come next impossible.
    ///
    /// # Errors
    /// `Internal` with the library's reason.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), TaskError> {
        let allowed = self.0.compute_mask_or_eos().map_err(|error| failed(&error))?;
        for (id, x) in (0..).zip(logits) {
            if !allowed.is_allowed(id) {
                *x = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Records the token that was chosen.
    ///
    /// # Errors
    /// As [`Constraint::mask`].
    pub fn take(&mut self, id: u32) -> Result<(), TaskError> {
        if self.0.is_stopped() { Ok(()) } else { self.0.consume_token(id).map_err(|error| failed(&error)) }
    }
}

fn failed(error: &impl fmt::Display) -> TaskError {
    TaskError::internal(format!("response_format: {}", shorten(&error.to_string(), REASON)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: [&str; 8] = ["", "{", "}", "\"a\"", ": ", "12", "x", ", "];

    fn constraint(format: &Format) -> Result<Option<Constraint>, TaskError> {
        let texts = TokenTexts::of(&WORDS);
        Grammars::new(&texts, WORDS.len(), &BTreeSet::from([0])).unwrap().constraint(format)
    }

    fn allowed(constraint: &mut Constraint) -> Vec<&'static str> {
        let mut logits = [0.0; WORDS.len()];
        constraint.mask(&mut logits).unwrap();
        (0..WORDS.len()).filter(|id| logits[*id] == 0.0).map(|id| WORDS[id]).collect()
    }

    #[test]
    fn only_tokens_that_lead_to_the_format_may_come_next() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                            "additionalProperties": false});
        let mut json = constraint(&Format::JsonSchema(schema)).unwrap().unwrap();
        assert_eq!(allowed(&mut json), ["{"]);
        let other = json.clone();
        for id in [1, 3, 4, 5] {
            json.take(id).unwrap();
        }
        assert_eq!(allowed(&mut json), ["}", "12"]);
        json.take(2).unwrap();
        assert_eq!(allowed(&mut json), [""], "the end");
        json.take(0).unwrap();
        assert_eq!(allowed(&mut json), [""]);
        assert_eq!(allowed(&mut { other }), ["{"], "a copy is another sequence's");
        let mut regex = constraint(&Format::Regex("x(12)+".to_owned())).unwrap().unwrap();
        assert_eq!(allowed(&mut regex), ["x"]);
        assert!(constraint(&Format::Text).unwrap().is_none());
    }

    #[test]
    fn what_the_library_cannot_do_is_refused_by_the_field() {
        for format in [Format::Regex("(".to_owned()), Format::JsonSchema(json!({"type": "nothing"}))] {
            let error = constraint(&format).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("response_format"), "{}", error.message);
        }
    }
}
