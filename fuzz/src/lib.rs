//! What several targets share: how fuzzed bytes become a message, and what every error must be.

use sconce::protocol::{Message, Properties, TaskError};

/// Longest message of any error, in bytes: a few lines, whatever was sent.
pub const LONGEST_ERROR: usize = 2_100;

/// The first line is the properties as JSON, where it can be read as such; the rest is the body.
pub fn message(data: &[u8]) -> Message {
    let split = data.iter().position(|byte| *byte == b'\n');
    if let Some(end) = split
        && let Ok(properties) = serde_json::from_slice::<Properties>(&data[..end])
    {
        return Message { properties, body: data[end + 1..].to_vec().into() };
    }
    Message { properties: Properties::default(), body: data.to_vec().into() }
}

/// Properties as bytes, to compare them: a NaN in a header is not equal to itself.
pub fn written(properties: &Properties) -> Vec<u8> {
    serde_json::to_vec(properties).expect("properties are JSON")
}

/// An error says one thing, in a bounded number of words, and names the field it blames.
pub fn check_error(error: &TaskError) {
    assert!(!error.message.is_empty());
    assert!(error.message.len() <= LONGEST_ERROR, "{} bytes: {error}", error.message.len());
    if let Some(param) = &error.param {
        assert!(error.message.contains(param.as_str()), "{param:?} is not in {:?}", error.message);
    }
}
