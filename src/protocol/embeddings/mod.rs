//! Reads and writes the bodies of OpenAI's `/v1/embeddings`: [`EmbeddingRequest::parse`] decides what a
//! well-formed request is, [`write_response`] how vectors are written. Pure; owns no state; knows no tokens,
//! vocabulary or model.

mod request;
mod response;

pub use request::KEYS;
pub use request::{EmbeddingRequest, Input};
pub use response::{EmbeddingResponse, write_response};

/// How the vectors of a reply are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// JSON numbers, with the fewest digits that give the same f32 back.
    #[default]
    Float,
    /// Little-endian f32, base64 with padding.
    Base64,
}
