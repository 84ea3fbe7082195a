//! Reads and writes the bodies of OpenAI's `/v1/completions` and `/v1/chat/completions`, and the chunks of a
//! streamed answer: [`GenerateRequest::read`] decides what a well-formed request is, [`Reply`] the form of the
//! answer. Pure; owns no state; does not know the tokenizer or the model.

mod reply;
mod request;

pub(super) use reply::first_text;
pub use reply::{Choice, Chunk, Finish, Reply, TokenScore, TopScore, Usage, new_id};
pub use request::{Api, ChatMessage, Format, GenerateRequest, Prompts, Sampling};
pub use request::{CHAT, COMPLETIONS};
