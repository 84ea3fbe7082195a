//! Files that a task names by URL instead of containing them. Pure: nothing is fetched here.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::value::RawValue;

use super::data_url;
use super::fields::string;

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
        let url = string(raw.get(), path).ok()?;
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

    /// The file of a fetched URL, or the file in a data URL together with its media type.
    ///
    /// # Errors
    /// As [`data_url::parse`].
    pub fn read(&self, url: &str) -> Result<(Option<String>, Bytes), String> {
        match self.0.get(url) {
            Some(bytes) => Ok((None, bytes.clone())),
            None => data_url::parse(url).map(|(media_type, bytes)| (Some(media_type), bytes.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_read_from_the_fetched_files_or_holds_its_file() {
        let mut files = Files::default();
        files.add("https://host/a.png".to_owned(), Bytes::from_static(b"fetched"));
        assert_eq!(files.read("https://host/a.png"), Ok((None, Bytes::from_static(b"fetched"))));
        let embedded = files.read("data:image/png;base64,ZmlsZQ==");
        assert_eq!(embedded, Ok((Some("image/png".to_owned()), Bytes::from_static(b"file"))));
        assert!(files.read("https://host/b.png").unwrap_err().contains("must be a data URL"));
        let url_in = |json: &str| {
            FileUrl::from_field(&RawValue::from_string(json.to_owned()).unwrap(), "file_url").map(|it| it.url)
        };
        assert_eq!(url_in(r#""file:\/\/\/a""#).as_deref(), Some("file:///a"));
        for other in [r#""data:,""#, r#""\u0064ata:,""#, "7"] {
            assert_eq!(url_in(other), None, "{other}");
        }
    }
}
