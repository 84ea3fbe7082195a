//! Reads and writes the bodies of OpenAI's `/v1/completions` and `/v1/chat/completions`, and the chunks of a
//! streamed answer: [`GenerateRequest::read`] decides what a well-formed request is, [`Reply`] the form of the
//! answer. Pure; owns no state; does not know the tokenizer or the model.

mod reply;
mod request;

pub(super) use reply::first_text;
pub use reply::{Choice, Finish, PartContent, Reply, TokenScore, TopScore, Usage, new_id};
pub use request::{Api, ChatMessage, Format, GenerateRequest, Prompts, Sampling};
pub(super) use request::{CHAT, COMPLETIONS};

/// The URL of requests to continue texts.
pub const COMPLETIONS_URL: &str = "/v1/completions";
/// The URL of requests to continue a conversation.
pub const CHAT_URL: &str = "/v1/chat/completions";
/// The fields that may hold the inputs.
pub(super) const INPUTS: &[&str] = &["prompt"];
