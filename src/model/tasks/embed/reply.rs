//! Writes the response body of `/v1/embeddings` into one buffer. A number that is not finite is an error: JSON
//! cannot express it, and `null` would look like an answer.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::protocol::reply::error_body;
use crate::protocol::{TaskError, TaskErrorKind};

/// How the vectors of a reply are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// JSON numbers, with the fewest digits that give the same f32 back.
    #[default]
    Float,
    /// Little-endian f32, base64 with padding.
    Base64,
}

/// Bytes reserved for one number and its comma: a sign, `0.0` and nine digits. The buffer grows if numbers are longer.
const NUMBER_BYTES: usize = 14;

/// The contents of a response.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingResponse<'a> {
    /// The model's name.
    pub model: &'a str,
    /// One vector for each input that has no error, in order.
    pub vectors: &'a [Vec<f32>],
    /// The errors, each with the index of its input, in ascending order.
    pub errors: &'a [(usize, TaskError)],
    /// How the vectors are written.
    pub encoding: Encoding,
    /// Tokens computed, special ones included.
    pub prompt_tokens: usize,
}

/// Writes the JSON body.
///
/// # Errors
/// `Internal`, naming the vector, when a number is not finite.
pub fn write_response(response: &EmbeddingResponse<'_>) -> Result<Vec<u8>, TaskError> {
    let numbers: usize = response.vectors.iter().map(Vec::len).sum();
    // An estimate: 200 bytes around the list, and 60 around each vector.
    let mut body = Vec::with_capacity(200 + 60 * response.vectors.len() + NUMBER_BYTES * numbers);
    body.extend_from_slice(b"{\"object\":\"list\",\"data\":[");
    let (mut vectors, mut errors) = (response.vectors.iter(), response.errors.iter().peekable());
    for index in 0..response.vectors.len() + response.errors.len() {
        if let Some((_, error)) = errors.next_if(|(error_index, _)| *error_index == index) {
            write_error(&mut body, index, error);
            continue;
        }
        let Some(vector) = vectors.next() else { break };
        if let Some(bad) = vector.iter().find(|number| !number.is_finite()) {
            let message = format!("the model gave {bad} in the embedding of input {index}");
            return Err(TaskError::new(TaskErrorKind::Internal, message));
        }
        let comma = if index > 0 { "," } else { "" };
        let head = format!(r#"{comma}{{"object":"embedding","index":{index},"embedding":"#);
        body.extend_from_slice(head.as_bytes());
        match response.encoding {
            Encoding::Float => serde_json::to_writer(&mut body, vector).map_err(|error| {
                TaskError::new(TaskErrorKind::Internal, format!("the reply cannot be written: {error}"))
            })?,
            Encoding::Base64 => base64(&mut body, vector),
        }
        body.push(b'}');
    }
    let (model, tokens) = (serde_json::Value::from(response.model), response.prompt_tokens);
    let end = format!(r#"],"model":{model},"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}}}"#);
    body.extend_from_slice(end.as_bytes());
    Ok(body)
}

/// Writes an item that takes the place of an embedding: the error as in the body of an error reply.
fn write_error(body: &mut Vec<u8>, index: usize, error: &TaskError) {
    let comma = if index > 0 { "," } else { "" };
    body.extend_from_slice(format!(r#"{comma}{{"object":"error","index":{index},"#).as_bytes());
    // `{"error":{…}}` without its first brace.
    body.extend_from_slice(error_body(error).get(1..).unwrap_or_default());
}

fn base64(body: &mut Vec<u8>, vector: &[f32]) {
    let bytes: Vec<u8> = vector.iter().flat_map(|number| number.to_le_bytes()).collect();
    body.push(b'"');
    body.extend_from_slice(STANDARD.encode(bytes).as_bytes());
    body.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn written(vectors: &[Vec<f32>], encoding: Encoding) -> Result<Vec<u8>, TaskError> {
        let model = "org/\"m\"";
        write_response(&EmbeddingResponse { model, vectors, errors: &[], encoding, prompt_tokens: 9 })
    }

    #[test]
    fn the_response_has_openais_form() {
        let body = written(&[vec![0.5, -1.0], vec![2.0, 3.0]], Encoding::Float).unwrap();
        let value: Value = serde_json::from_slice(&body).unwrap();
        let expected = json!({
            "object": "list",
            "data": [
                {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]},
                {"object": "embedding", "index": 1, "embedding": [2.0, 3.0]},
            ],
            "model": "org/\"m\"",
            "usage": {"prompt_tokens": 9, "total_tokens": 9},
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn an_error_stands_in_the_place_of_its_embedding() {
        let errors =
            [(0, TaskError::bad_input("input[0]", "no")), (2, TaskError::bad_input("input[2]", "no"))];
        let vectors = [vec![0.5]];
        let response = EmbeddingResponse {
            model: "m",
            vectors: &vectors,
            errors: &errors,
            encoding: Encoding::Float,
            prompt_tokens: 1,
        };
        let value: Value = serde_json::from_slice(&write_response(&response).unwrap()).unwrap();
        let error = |index: usize| {
            json!({"object": "error", "index": index, "error": {
                "message": "no", "type": "invalid_request_error", "param": format!("input[{index}]"), "code": "invalid_value",
            }})
        };
        let embedding = json!({"object": "embedding", "index": 1, "embedding": [0.5]});
        assert_eq!(value["data"], json!([error(0), embedding, error(2)]));
    }

    #[test]
    fn digits_give_the_same_f32_back() {
        let vector = vec![0.1, -3.402_823_5e38, 1.0e-45, 0.0, -0.0, 1.0 / 3.0, 16_777_216.0];
        let body = written(std::slice::from_ref(&vector), Encoding::Float).unwrap();
        assert!(String::from_utf8(body.clone()).unwrap().contains("[0.1,"));
        let value: Value = serde_json::from_slice(&body).unwrap();
        let back: Vec<f32> = serde_json::from_value(value["data"][0]["embedding"].clone()).unwrap();
        assert_eq!(back, vector);
    }

    #[test]
    fn base64_is_little_endian_f32() {
        let body = written(&[vec![1.0, -2.0]], Encoding::Base64).unwrap();
        let value: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(value["data"][0]["embedding"], "AACAPwAAAMA=");
    }

    #[test]
    fn a_number_that_is_not_finite_is_an_error_in_either_encoding() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for encoding in [Encoding::Float, Encoding::Base64] {
                let error = written(&[vec![0.0], vec![1.0, bad]], encoding).unwrap_err();
                assert_eq!(error.kind, TaskErrorKind::Internal);
                assert!(error.message.contains("input 1"), "{error}");
            }
        }
    }
}
