//! Reads tasks as users write them: one JSON value per line, or texts and files as arguments. A line is read only when
//! the iterator is advanced. Decides which URL a file of a batch is sent to.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use serde_json::{Map, Value as Json, json};

use super::Registry;
use crate::cli::BatchFiles;
#[cfg(feature = "tables")]
use crate::client::batch_file::Table;
use crate::client::batch_file::{Batch, InputFile, Source, is_of_vectors, is_table};
use crate::config::Pool;
use crate::model::Route;
use crate::model::registry::check_field;
use crate::protocol::batch_line::RequestBody;
use crate::protocol::endpoints::EMBEDDINGS_URL;
#[cfg(feature = "tables")]
use crate::protocol::endpoints::{RERANK_URL, SCORE_URL};
use crate::protocol::requests::body_of_text;
use crate::protocol::{BYTES, JSON, KOMBU_BYTES, shorten};

/// A task to publish.
pub(super) struct Request {
    /// The user's id, if this is a batch line.
    pub(super) custom_id: Option<String>,
    /// The URL, if this is a batch line that has one.
    pub(super) url: Option<String>,
    pub(super) body: RequestBody,
}

/// The tasks of a file, or an error in the place of a task that cannot be read.
pub(super) type Requests = Box<dyn Iterator<Item = anyhow::Result<Request>> + Send>;

/// A task that embeds a text.
pub(super) fn embed(text: &str) -> Request {
    Request { custom_id: None, url: None, body: body_of_text(EMBEDDINGS_URL, text).into() }
}

/// Makes a task from a file, a data URL, or another URL, from which the worker fetches the file. The extension of the
/// file's name decides its media type, which must be one of `media_types`.
pub(super) fn of_file(file: &str, media_types: &[&str], stream: bool) -> anyhow::Result<Request> {
    let body = if file.contains("://") {
        let is_sound = media_types.iter().any(|media_type| media_type.starts_with("audio/"));
        let field = if is_sound { "file_url" } else { "image_url" };
        let mut body = json!({ field: file });
        if stream && is_sound {
            body["stream"] = true.into();
        }
        body.to_string().into()
    } else if file.starts_with("data:") {
        RequestBody::from_data_url(file).map_err(|problem| anyhow!("the argument {problem}"))?
    } else {
        let path = Path::new(file);
        let extension = path.extension().and_then(|it| it.to_str()).unwrap_or_default().to_ascii_lowercase();
        let ending = if extension == "jpg" { "jpeg" } else { &*extension };
        let known = file_types(media_types);
        let is_plain = |taken: &&str| *taken == Route::ANY_TYPE || (*taken == BYTES && known.is_empty());
        let found = known.iter().find(|(known, _)| *known == ending).map(|(_, media_type)| *media_type);
        let found = found.or_else(|| media_types.iter().any(is_plain).then_some(BYTES));
        let media_type = found.with_context(|| {
            // The names with a prefix are other names of the same types, and several types may have one ending.
            let endings = known.iter().filter(|(ending, _)| !ending.contains(['-', '.']));
            let endings: BTreeSet<String> = endings.map(|(ending, _)| format!(".{ending}")).collect();
            let endings = endings.into_iter().collect::<Vec<_>>().join(", ");
            format!("this pool takes files whose names end with {endings}, and {file:?} does not")
        })?;
        let bytes = std::fs::read(path).with_context(|| file.to_owned())?;
        let media_type = Some(media_type.to_owned());
        RequestBody { media_type, ..bytes.into() }
    };
    Ok(Request { custom_id: None, url: None, body })
}

/// The files that a pool with these media types takes: the endings of their names, and their media types.
fn file_types<'a>(media_types: &[&'a str]) -> Vec<(&'a str, &'a str)> {
    // The types that say nothing of the file have no ending.
    let subtypes = media_types.iter().filter(|it| !matches!(**it, BYTES | KOMBU_BYTES));
    let subtypes = subtypes.filter_map(|it| Some((it.split_once('/')?.1, *it)));
    let (patterns, mut found): (Vec<_>, Vec<_>) = subtypes.partition(|(subtype, _)| *subtype == "*");
    for (_, pattern) in patterns {
        if !found.iter().any(|(_, media_type)| Route::stands_for(pattern, media_type)) {
            let known = FILE_TYPES.iter().filter(|(_, media_type)| Route::stands_for(pattern, media_type));
            found.extend(known);
        }
    }
    found
}

/// The tasks of a file, or of stdin if its name is `-`. Errors name the line.
pub(super) fn requests_in(path: &Path) -> anyhow::Result<Requests> {
    let reader: Box<dyn BufRead + Send> = if path == Path::new("-") {
        Box::new(BufReader::new(io::stdin()))
    } else {
        Box::new(BufReader::new(File::open(path).with_context(|| path.display().to_string())?))
    };
    let numbered = reader.split(b'\n').enumerate();
    Ok(Box::new(numbered.filter_map(|(index, line)| {
        let parsed = line.map_err(anyhow::Error::from).and_then(|line| parse_line(&line));
        parsed.with_context(|| format!("line {}", index + 1)).transpose()
    })))
}

/// Parses a line of a file; none for a blank line.
fn parse_line(line: &[u8]) -> anyhow::Result<Option<Request>> {
    let line = line.trim_ascii();
    if line.is_empty() {
        return Ok(None);
    }
    let unexpected = || {
        let shown = shorten(&String::from_utf8_lossy(line), 80);
        format!("expected a JSON object or a JSON string, got {shown:?}")
    };
    Ok(Some(match serde_json::from_slice::<Json>(line).with_context(unexpected)? {
        Json::String(text) if text.starts_with("data:") => {
            let body = RequestBody::from_data_url(&text).map_err(|problem| anyhow!("the line {problem}"))?;
            Request { custom_id: None, url: None, body }
        }
        Json::String(text) => embed(&text),
        Json::Object(object) => match (object.get("custom_id"), object.get("body")) {
            (Some(Json::String(id)), Some(body)) => {
                let url = object.get("url").and_then(Json::as_str).map(str::to_owned);
                let body = match body {
                    Json::Object(_) => body.to_string().into(),
                    Json::String(data) => RequestBody::from_data_url(data)
                        .map_err(|problem| anyhow!("the body of {id:?} {problem}"))?,
                    _ => bail!("the body of {id:?} is neither a JSON object nor a data URL"),
                };
                Request { custom_id: Some(id.clone()), url, body }
            }
            (Some(id), Some(_)) => bail!("custom_id must be a string, is {}", shorten(&id.to_string(), 80)),
            _ => {
                let body = Bytes::copy_from_slice(line).into();
                Request { custom_id: None, url: None, body }
            }
        },
        _ => bail!(unexpected()),
    }))
}

/// The fields of requests that flags give, by their names.
///
/// # Errors
/// One is given twice.
pub(super) fn fields_of(flags: &[(String, Json)]) -> anyhow::Result<Map<String, Json>> {
    let mut fields = Map::new();
    for (name, value) in flags {
        if fields.insert(name.clone(), value.clone()).is_some() {
            bail!("--field {name} is given twice");
        }
    }
    Ok(fields)
}

/// Checks that requests to `url` may have these fields, if that is known.
///
/// # Errors
/// One of them is none of their fields.
pub(super) fn check_fields(url: Option<&str>, fields: &Map<String, Json>) -> anyhow::Result<()> {
    let Some(url) = url else { return Ok(()) };
    let check =
        |name: &String| check_field(url, name).map_err(|problem| anyhow!("--field {name}: {problem}"));
    fields.keys().try_for_each(check)
}

/// The largest file that is sent, in bytes, if no pool's max_body is larger: the most that RabbitMQ 3 takes.
const MAX_FILE: u64 = 128 << 20;
/// Media types of files by the endings of their names.
const FILE_TYPES: [(&str, &str); 8] = [
    ("flac", "audio/flac"),
    ("jpeg", "image/jpeg"),
    ("jpg", "image/jpeg"),
    ("mp3", "audio/mpeg"),
    ("ogg", "audio/ogg"),
    ("png", "image/png"),
    ("wav", "audio/wav"),
    ("webp", "image/webp"),
];

/// What a batch reads and writes. A file is sent to the pool that takes it.
///
/// # Errors
/// Arguments are missing, or no pool or several ones take a file.
pub(super) fn batch_of(arguments: &BatchFiles, pools: &[Pool], registry: &Registry) -> anyhow::Result<Batch> {
    let BatchFiles { input, output, files, output_dir, format, column, id_column, field, url } = arguments;
    let fields = fields_of(field)?;
    if let (Some(folder), Some(format)) = (output_dir, *format) {
        // A worker refuses a body over its pool's max_body; these settings may not be those of the worker.
        let max_bytes = pools.iter().map(|pool| pool.max_body).max().unwrap_or(0).max(MAX_FILE);
        let input_file = |(index, path): (usize, &PathBuf)| {
            let shown = path.display();
            if path.is_dir() {
                bail!("{shown} is a folder: name the files in it, such as {shown}/*.mp3");
            }
            let media_type = media_type_of(path)?;
            let url =
                url_for(media_type, url.as_deref(), pools, registry).with_context(|| shown.to_string())?;
            check_fields(Some(&url), &fields)?;
            let stem = path.file_stem().and_then(|it| it.to_str());
            let stem = stem.with_context(|| format!("the name of {shown} is not UTF-8"))?;
            let result = format!("{stem}.{}", format.ending());
            let (path, number, fields) = (path.clone(), index + 1, fields.clone());
            let input = InputFile { path, number, result, url, media_type, format, fields, max_bytes };
            input.body(Vec::new()).map_err(|problem| anyhow!("{}: {problem}", input.path.display()))?;
            Ok(input)
        };
        let inputs = files.iter().enumerate().map(input_file).collect::<anyhow::Result<_>>()?;
        return Ok(Batch::Files { inputs, folder: folder.clone() });
    }
    let Some(output) = output.clone().filter(|_| !input.is_empty()) else {
        bail!("give --input and --output, or files with --output-dir and --format");
    };
    // Also refuses an ending that no output has.
    if is_of_vectors(&output)? {
        let gives_none = |pool: &&Pool| {
            let is_known = registry.route(pool).is_some_and(|route| route.url != Route::ANY);
            is_known && !registry.answers(pool, EMBEDDINGS_URL)
        };
        if let Some(pool) = pools.first().filter(|_| pools.iter().all(|pool| gives_none(&pool))) {
            let (name, shown) = (&pool.name, output.display());
            bail!(
                "--output {shown} takes vectors, and the model of pool {name:?} gives none: name it .jsonl"
            );
        }
    }
    if let Some(table) = input.iter().find(|input| is_table(input)) {
        if input.len() > 1 {
            bail!("--input {} is a table, which must be the only input", table.display());
        }
        #[cfg(feature = "tables")]
        return batch_of_table(arguments, table, fields, output, pools, registry);
        #[cfg(not(feature = "tables"))]
        bail!("--input {}: this program is built without `tables`", table.display());
    }
    if column.is_some() || id_column.is_some() || url.is_some() || !fields.is_empty() {
        bail!(
            "--column, --id-column, --url and --field apply to .csv and .parquet files, and the last two to files with --output-dir; \
             a line of JSON has its own URL and fields"
        );
    }
    Ok(Batch::Rows { source: Source::Lines(input.clone()), output })
}

#[cfg(feature = "tables")]
fn batch_of_table(
    arguments: &BatchFiles,
    path: &Path,
    fields: Map<String, Json>,
    output: PathBuf,
    pools: &[Pool],
    registry: &Registry,
) -> anyhow::Result<Batch> {
    let shown = path.display();
    let column = arguments.column.clone();
    let column =
        column.with_context(|| format!("--column must name the column of {shown} with the texts"))?;
    let url = url_for(None, arguments.url.as_deref(), pools, registry).with_context(|| shown.to_string())?;
    if [RERANK_URL, SCORE_URL].contains(&&*url) {
        bail!("{url} compares several texts, and a row of {shown} is one text");
    }
    check_fields(Some(&url), &fields)?;
    let (id_column, asks_base64) = (arguments.id_column.clone(), is_of_vectors(&output)?);
    let table = Table { path: path.to_owned(), column, id_column, url, fields, asks_base64 };
    table.body("").map_err(|problem| anyhow!("{shown}: {problem}"))?;
    Ok(Batch::Rows { source: Source::Table(table), output })
}

/// The media type of a file by the ending of its name; none for a text.
fn media_type_of(path: &Path) -> anyhow::Result<Option<&'static str>> {
    let ending = path.extension().and_then(|it| it.to_str()).unwrap_or_default().to_ascii_lowercase();
    if ending == "txt" {
        return Ok(None);
    }
    let found = FILE_TYPES.iter().find(|(known, _)| *known == ending).map(|(_, media_type)| *media_type);
    found.map(Some).with_context(|| {
        let known: Vec<String> = FILE_TYPES.iter().map(|(known, _)| format!(".{known}")).collect();
        format!("the name of {} ends with none of .txt, {}", path.display(), known.join(", "))
    })
}

/// The URL for files of this media type; none: for texts.
fn url_for(
    media_type: Option<&str>,
    url: Option<&str>,
    pools: &[Pool],
    registry: &Registry,
) -> anyhow::Result<String> {
    let quoted =
        |pools: &[&Pool]| pools.iter().map(|pool| format!("{:?}", pool.name)).collect::<Vec<_>>().join(", ");
    let only = |takers: &[&Pool]| match takers.len() {
        0 | 1 => Ok(()),
        _ => Err(anyhow!("the pools {} take it: choose one with --pool", quoted(takers))),
    };
    if let Some(url) = url {
        only(&pools.iter().filter(|pool| registry.answers(pool, url)).collect::<Vec<_>>())?;
        return Ok(url.to_owned());
    }
    let routes: Vec<_> = pools.iter().filter_map(|pool| Some((pool, registry.route(pool)?))).collect();
    let takes = |route: &Route| match media_type {
        Some(media_type) => route.takes(media_type),
        // A model that embeds images takes texts too.
        None => route.media_types == [JSON] || route.url == EMBEDDINGS_URL,
    };
    let takers: Vec<_> = routes.iter().filter(|(_, route)| takes(route)).collect();
    if let Some((_, route)) = takers.first().filter(|(_, route)| route.url != Route::ANY) {
        only(&takers.iter().map(|(pool, _)| *pool).collect::<Vec<_>>())?;
        return Ok(route.url.to_owned());
    }
    let what = media_type.unwrap_or("text");
    let names = quoted(&pools.iter().collect::<Vec<_>>());
    if routes.len() < pools.len() || routes.iter().any(|(_, route)| route.url == Route::ANY) {
        bail!("the model of pool {names} is not on this host, or is not built in: give --url");
    }
    bail!("no pool takes such a file ({what}): {names}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Option<(Option<String>, String)>, String> {
        let text =
            |request: Request| (request.custom_id, String::from_utf8_lossy(&request.body.bytes).into_owned());
        parse_line(line.as_bytes()).map(|found| found.map(text)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_line_is_a_text_a_body_or_a_batch_line() {
        let task = |id: Option<&str>, body: &str| Ok(Some((id.map(str::to_owned), body.to_owned())));
        assert_eq!(read(r#" "a" "#), task(None, r#"{"input":"a"}"#));
        assert_eq!(read(r#"{"input": ["a"] }"#), task(None, r#"{"input": ["a"] }"#));
        assert_eq!(read(r#"{"custom_id":"1","body":{"input":"a"}}"#), task(Some("1"), r#"{"input":"a"}"#));
        assert_eq!(read(" \r"), Ok(None));
        let line = br#"{"custom_id":"1","url":"/v1/rerank","body":{"query":"a"}}"#;
        assert_eq!(parse_line(line).unwrap().unwrap().url.as_deref(), Some("/v1/rerank"));
    }

    #[test]
    fn an_invalid_line_is_quoted_in_the_error() {
        assert!(read("[1]").unwrap_err().contains("got \"[1]\""));
        assert!(read("{").unwrap_err().contains("expected a JSON object or a JSON string"));
        assert!(read(r#"{"custom_id":"x","body":1}"#).unwrap_err().contains("\"x\""));
        let numbered = read(r#"{"custom_id":7,"body":{"input":"a"}}"#);
        assert_eq!(numbered.unwrap_err(), "custom_id must be a string, is 7");
        let error = read(r#"{"custom_id":"x","body":"data:image/png,abc"}"#).unwrap_err();
        assert!(error.contains("\"x\"") && error.contains("in base64"), "{error}");
    }

    #[test]
    fn the_extension_of_a_file_decides_its_media_type() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, "file").unwrap();
            path.to_str().unwrap().to_owned()
        };
        let taken = ["image/jpeg", "image/png", "image/*", BYTES, KOMBU_BYTES];
        for (name, media_type) in
            [("cat.JPG", "image/jpeg"), ("cat.jpeg", "image/jpeg"), ("cat.png", "image/png")]
        {
            let body = of_file(&write(name), &taken, false).unwrap().body;
            assert_eq!((body.media_type.as_deref(), &body.bytes[..]), (Some(media_type), &b"file"[..]));
        }
        let refused = of_file("what is a sconce?", &taken, false).err().unwrap().to_string();
        assert!(refused.contains("names end with .jpeg, .png, and \"what is"), "{refused}");
        let by_url = of_file("https://host/cat.png", &taken, false).unwrap().body;
        assert_eq!(&by_url.bytes[..], br#"{"image_url":"https://host/cat.png"}"#);
        let missing = of_file("/no/such/cat.png", &taken, false).err().unwrap().to_string();
        assert!(missing.contains("/no/such/cat.png"), "{missing}");
        // A class in Python may name no subtype.
        for (name, taken, media_type) in [
            ("cat.JPG", "image/*", "image/jpeg"),
            ("cat.webp", "image/*", "image/webp"),
            ("one.mp3", "audio/*", "audio/mpeg"),
            ("cat.png", Route::ANY_TYPE, "image/png"),
            ("page.pdf", Route::ANY_TYPE, BYTES),
            ("page.pdf", BYTES, BYTES),
        ] {
            let body = of_file(&write(name), &[taken], false).unwrap().body;
            assert_eq!(body.media_type.as_deref(), Some(media_type), "{name} {taken}");
        }
        let refused = of_file(&write("page.pdf"), &["image/*"], false).err().unwrap().to_string();
        assert!(refused.contains("names end with .jpeg, .jpg, .png, .webp, and"), "{refused}");
    }

    #[test]
    fn a_data_url_is_a_body_of_its_own_media_type() {
        for line in [
            r#""data:image/png;base64,ZmlsZQ==""#,
            r#"{"custom_id":"x","body":"data:image/png;base64,ZmlsZQ=="}"#,
        ] {
            let body = parse_line(line.as_bytes()).unwrap().unwrap().body;
            assert_eq!((body.media_type.as_deref(), &body.bytes[..]), (Some("image/png"), &b"file"[..]));
        }
    }
}
