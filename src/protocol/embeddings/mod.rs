//! Reads and writes the bodies of OpenAI's `/v1/embeddings`: [`EmbeddingRequest::parse`] decides what a
//! well-formed request is, [`write_response`] how vectors are written. Pure; owns no state; knows no tokens,
//! vocabulary or model.

mod request;
mod response;

use super::fields::SharingEndpoint;

pub(super) use request::KEYS;
pub use request::{EmbeddingRequest, Input};
pub use response::{EmbeddingResponse, write_response};

/// The URL of these requests.
pub const URL: &str = "/v1/embeddings";
/// The fields that may hold the inputs.
pub(super) const INPUTS: &[&str] = &["input"];
/// Requests that can share a task.
pub(super) const SHARING: SharingEndpoint =
    SharingEndpoint { url: URL, input_fields: &["input"], unless: &[], unwraps: false };

/// The body of a request to embed a text.
pub fn body_of_text(text: &str) -> String {
    serde_json::json!({ "input": text }).to_string()
}

/// How the vectors of a reply are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// JSON numbers, with the fewest digits that give the same f32 back.
    #[default]
    Float,
    /// Little-endian f32, base64 with padding.
    Base64,
}
