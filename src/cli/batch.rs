//! The arguments with the inputs and the output of `sconce run-batch` and `sconce submit`, and of formats.

use std::path::PathBuf;

use clap::Args;
use serde_json::Value as Json;

use crate::protocol::results::FileFormat;

/// What a batch reads and writes.
#[derive(Debug, Args)]
pub struct BatchFiles {
    /// Requests, one JSON object per line; may be repeated. A .csv or .parquet file is a table, and needs --column
    #[arg(long, short, value_name = "FILE")]
    pub input: Vec<PathBuf>,
    /// Responses: JSON lines; with the ending .npy a matrix of vectors; with .parquet a table of them. An existing file is
    /// resumed
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// In place of --input: files that are a request each, such as recordings, images, or .txt files with a text or a prompt
    #[arg(value_name = "FILE", conflicts_with_all = ["input", "output"], requires_all = ["output_dir", "format"])]
    pub files: Vec<PathBuf>,
    /// In place of --output: a folder for the results of the files, a file each, named after its input. Results that are
    /// there from an earlier run are kept
    #[arg(long, value_name = "DIR", requires = "files")]
    pub output_dir: Option<PathBuf>,
    /// The format of these results: txt, srt, vtt, json, wav, flac, pcm or png
    #[arg(long, value_parser = format, requires = "files")]
    pub format: Option<FileFormat>,
    /// The column of a table with the texts; each row is a request
    #[arg(long, value_name = "NAME", conflicts_with = "files")]
    pub column: Option<String>,
    /// The column of a table with the ids of its rows, which the output repeats; by default they are numbered from 0
    #[arg(long, value_name = "NAME", conflicts_with = "files")]
    pub id_column: Option<String>,
    /// A field of each request for a file or a row of a table, such as language=en, voice=heart or top_k=3; may be repeated. VALUE
    /// is JSON, or else a text
    #[arg(long, value_name = "NAME=VALUE", value_parser = field)]
    pub field: Vec<(String, Json)>,
    /// The URL that files and tables are sent to; by default the first one of the pool that takes such files or texts
    #[arg(long)]
    pub url: Option<String>,
}

/// Parses a field of a request.
pub(super) fn field(text: &str) -> Result<(String, Json), String> {
    let (name, value) =
        text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or("expected NAME=VALUE")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok((name.to_owned(), value))
}

/// Parses the name of a format.
fn format(text: &str) -> Result<FileFormat, String> {
    let found = FileFormat::of_name(&format!("result.{}", text.trim_start_matches('.')));
    let formats = FileFormat::ALL.map(|(format, _)| format);
    found.ok_or_else(|| format!("expected one of {}", FileFormat::endings(&formats)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_value_of_a_field_is_json_or_else_a_text() {
        for (text, name, value) in [
            ("language=en", "language", json!("en")),
            ("top_k=3", "top_k", json!(3)),
            ("keywords=[\"a=b\"]", "keywords", json!(["a=b"])),
            ("prompt=\"5\"", "prompt", json!("5")),
        ] {
            assert_eq!(field(text), Ok((name.to_owned(), value)));
        }
        assert!(field("language").is_err() && field("=en").is_err());
    }
}
