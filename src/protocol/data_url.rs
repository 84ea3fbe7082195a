//! Reads data URLs: texts that contain bytes and their media type. Pure.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// Returns the media type of a data URL in base64, in lower case and without parameters, and its decoded bytes.
///
/// # Errors
/// A message that is put after the name of the field: what the value must be, or what is wrong with its base64.
pub fn parse(url: &str) -> Result<(String, Vec<u8>), String> {
    let wanted =
        "must be a data URL (data:<media type>;base64,…), because allowed_sources of this pool is empty";
    let (head, data) =
        url.strip_prefix("data:").and_then(|rest| rest.split_once(',')).ok_or_else(|| wanted.to_owned())?;
    let media_type = head.strip_suffix(";base64").ok_or("must be a data URL in base64")?;
    let media_type = media_type.split(';').next().unwrap_or_default().to_ascii_lowercase();
    let bytes = STANDARD.decode(data.trim_end()).map_err(|error| format!("is not base64: {error}"))?;
    Ok((media_type, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_url_is_bytes_with_a_media_type() {
        let parsed = parse("data:Image/PNG;name=a;base64,ZmlsZQ==\n");
        assert_eq!(parsed, Ok(("image/png".to_owned(), b"file".to_vec())));
        for (url, message) in [
            ("http://host/a.png", "allowed_sources of this pool is empty"),
            ("data:image/png,abc", "in base64"),
            ("data:image/png;base64,!", "is not base64"),
        ] {
            assert!(parse(url).unwrap_err().contains(message), "{url}");
        }
    }
}
