//! Files that a task names by URL instead of containing them, and data URLs: texts that contain bytes and their media
//! type. Pure: nothing is fetched here.

use std::borrow::Cow;
use std::collections::BTreeMap;

use base64::Engine as _;
use base64::alphabet::{Alphabet, STANDARD, URL_SAFE};
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;
use percent_encoding::percent_decode_str;
use serde_json::value::RawValue;

/// The header with the URL of a file. If the body of the task is empty, the worker fetches this file as the body.
pub const DATAREF: &str = "dataref";

/// A URL in a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUrl {
    /// The URL.
    pub url: String,
    /// The path of its field in the request, for errors.
    pub path: String,
}

impl FileUrl {
    /// The URL in this field; none if the field is not a string, or is a data URL, which contains its file.
    pub fn from_field(raw: &RawValue, path: &str) -> Option<Self> {
        // A data URL may have megabytes, so it is not copied.
        if raw.get().starts_with("\"data:") {
            return None;
        }
        let url = serde_json::from_str::<String>(raw.get()).ok()?;
        // `data:` may also be written with escapes.
        (!url.starts_with("data:")).then(|| Self { url, path: path.to_owned() })
    }
}

/// The fetched files of a task, by their URLs.
#[derive(Clone, Debug, Default)]
pub struct Files(BTreeMap<String, Bytes>);

impl Files {
    /// Adds a file.
    pub fn add(&mut self, url: String, bytes: Bytes) {
        self.0.insert(url, bytes);
    }

    /// Whether the file of this URL was fetched.
    pub fn has(&self, url: &str) -> bool {
        self.0.contains_key(url)
    }

    /// The file of a fetched URL, or the file in a data URL. What it is, its bytes tell, and not its media type.
    ///
    /// # Errors
    /// As [`data_url`].
    pub fn read(&self, url: &str) -> Result<Bytes, String> {
        match self.0.get(url) {
            Some(bytes) => Ok(bytes.clone()),
            None => data_url(url).map(|(_, bytes)| bytes.into()),
        }
    }
}

/// Returns the media type of a data URL in base64, in lower case and without parameters, and its decoded bytes.
///
/// # Errors
/// A message that is put after the name of the field: what the value must be, or what is wrong with its base64.
pub fn data_url(url: &str) -> Result<(String, Vec<u8>), String> {
    let rest = url.strip_prefix("data:").ok_or(
        "must be a data URL (data:<media type>;base64,…), because allowed_sources of this pool is empty",
    )?;
    let (head, data) = rest.split_once(',').ok_or("must have a comma after data:<media type>;base64")?;
    let media_type = head.strip_suffix(";base64").ok_or("must be a data URL in base64")?;
    let media_type = media_type.split(';').next().unwrap_or_default().to_ascii_lowercase();
    let bytes = if data.contains('%') {
        let data = percent_decode_str(data).decode_utf8().map_err(|error| format!("is no text: {error}"))?;
        from_base64(&data)?
    } else {
        from_base64(data)?
    };
    Ok((media_type, bytes))
}

/// Decodes base64 in the standard or the URL-safe alphabet, with or without padding and line breaks.
///
/// # Errors
/// A message that is put after the name of the field.
pub fn from_base64(text: &str) -> Result<Vec<u8>, String> {
    const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true);
    const fn engine(alphabet: &Alphabet) -> GeneralPurpose {
        GeneralPurpose::new(alphabet, LENIENT)
    }
    let is_url_safe = text.contains(['-', '_']);
    let engine = engine(if is_url_safe { &URL_SAFE } else { &STANDARD });
    let text = if text.contains(|c: char| c.is_ascii_whitespace()) {
        Cow::Owned(text.replace(|c: char| c.is_ascii_whitespace(), ""))
    } else {
        Cow::Borrowed(text)
    };
    engine.decode(&*text).map_err(|error| format!("is not base64: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_read_from_the_fetched_files_or_holds_its_file() {
        let mut files = Files::default();
        files.add("https://host/a.png".to_owned(), Bytes::from_static(b"fetched"));
        assert_eq!(files.read("https://host/a.png"), Ok(Bytes::from_static(b"fetched")));
        let embedded = files.read("data:image/png;base64,ZmlsZQ==");
        assert_eq!(embedded, Ok(Bytes::from_static(b"file")));
        assert!(files.read("https://host/b.png").unwrap_err().contains("must be a data URL"));
        let url_in = |json: &str| {
            FileUrl::from_field(&RawValue::from_string(json.to_owned()).unwrap(), "file_url").map(|it| it.url)
        };
        assert_eq!(url_in(r#""file:\/\/\/a""#).as_deref(), Some("file:///a"));
        for other in [r#""data:,""#, r#""\u0064ata:,""#, "7"] {
            assert_eq!(url_in(other), None, "{other}");
        }
    }

    #[test]
    fn a_data_url_is_bytes_with_a_media_type() {
        let parsed = data_url("data:Image/PNG;name=a;base64,ZmlsZQ==\n");
        assert_eq!(parsed, Ok(("image/png".to_owned(), b"file".to_vec())));
        for (url, message) in [
            ("http://host/a.png", "allowed_sources of this pool is empty"),
            ("data:image/png,abc", "in base64"),
            ("data:image/png;base64;abc", "a comma after"),
            ("data:image/png;base64,!", "is not base64"),
            ("data:image/png;base64,a-b+", "is not base64"),
            ("data:image/png;base64,%ff", "is no text"),
        ] {
            assert!(data_url(url).unwrap_err().contains(message), "{url}");
        }
    }

    #[test]
    fn base64_is_read_in_the_forms_that_encoders_write() {
        let bytes = (251..=255).collect::<Vec<u8>>();
        for text in ["+/z9/v8=", "+/z9/v8", "-_z9_v8=", "-_z9_v8", "+/z9\r\n/v8=\n", "+ / z 9 / v 8"] {
            assert_eq!(from_base64(text), Ok(bytes.clone()), "{text:?}");
        }
        let percent = data_url("data:;base64,%2B%2Fz9%0A/v8%3D").unwrap();
        assert_eq!(percent, (String::new(), bytes));
    }
}
