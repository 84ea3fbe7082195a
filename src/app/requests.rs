//! Tasks as users write them: one JSON value a line, or a text. Decides what such a line means; reads
//! only when asked for the next.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, bail};
use bytes::Bytes;
use serde_json::{Value as Json, json};

use crate::protocol::shorten;

/// A task to publish.
pub(super) struct Request {
    /// The user's name for it, in a batch line.
    pub(super) custom_id: Option<String>,
    pub(super) body: Bytes,
}

/// Tasks, or why one cannot be read.
pub(super) type Requests = Box<dyn Iterator<Item = anyhow::Result<Request>> + Send>;

/// A text to embed.
pub(super) fn embed(text: &str) -> Request {
    Request { custom_id: None, body: json!({"input": text}).to_string().into() }
}

/// The tasks of a file; of stdin when its name is `-`. Errors name the line.
pub(super) fn requests_in(path: &Path) -> anyhow::Result<Requests> {
    let read: Box<dyn BufRead + Send> = if path == Path::new("-") {
        Box::new(BufReader::new(io::stdin()))
    } else {
        Box::new(BufReader::new(File::open(path).with_context(|| path.display().to_string())?))
    };
    let numbered = read.split(b'\n').enumerate();
    Ok(Box::new(numbered.filter_map(|(index, line)| {
        let parsed = line.map_err(anyhow::Error::from).and_then(|line| request(&line));
        parsed.with_context(|| format!("line {}", index + 1)).transpose()
    })))
}

/// One line of a file; none for a blank one.
fn request(line: &[u8]) -> anyhow::Result<Option<Request>> {
    let line = line.trim_ascii();
    if line.is_empty() {
        return Ok(None);
    }
    let wanted = || {
        let shown = shorten(&String::from_utf8_lossy(line), 80);
        format!("expected a JSON object or a JSON string, got {shown:?}")
    };
    Ok(Some(match serde_json::from_slice::<Json>(line).with_context(wanted)? {
        Json::String(text) => embed(&text),
        Json::Object(object) => match (object.get("custom_id"), object.get("body")) {
            (Some(Json::String(id)), Some(body @ Json::Object(_))) => {
                Request { custom_id: Some(id.clone()), body: body.to_string().into() }
            }
            (Some(Json::String(id)), Some(_)) => bail!("the body of {id:?} is no JSON object"),
            _ => Request { custom_id: None, body: Bytes::copy_from_slice(line) },
        },
        _ => bail!(wanted()),
    }))
}
