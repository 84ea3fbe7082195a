//! The tokenizer of a pipeline of diffusers: `tokenizer.json` if there is one, otherwise CLIP's, from `vocab.json` and
//! `merges.txt`. For those two, how texts are normalised and divided is fixed here.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::tokenizer::{TextLimits, TextTokenizer};
use super::vocabulary::TokenField;
use super::{ModelFiles, read};
use crate::model::LoadError;

/// The parts of a text that are divided into tokens by themselves.
const PARTS: &str = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";
/// The tokens before and after a text.
const START: &str = "<|startoftext|>";
const END: &str = "<|endoftext|>";

/// A tokenizer with the id that pads its texts.
pub struct PaddedTokenizer {
    /// The tokenizer.
    pub tokenizer: TextTokenizer,
    /// The id of the padding token.
    pub pad: u32,
}

/// Requests the files of the tokenizer in the folder `tokenizer`.
///
/// # Errors
/// As [`ModelFiles::required`].
pub fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
    if files.optional("tokenizer/tokenizer.json")?.is_none() {
        files.required("tokenizer/vocab.json")?;
        files.required("tokenizer/merges.txt")?;
    }
    files.optional("tokenizer/special_tokens_map.json")?;
    files.optional("tokenizer/tokenizer_config.json").map(drop)
}

/// Reads the tokenizer in the folder `tokenizer`. `max_tokens` and `vocabulary` are the network's.
///
/// # Errors
/// [`LoadError::File`] for a file that is missing or invalid.
pub fn load(files: &ModelFiles, max_tokens: usize, vocabulary: usize) -> Result<PaddedTokenizer, LoadError> {
    let limits = TextLimits::default();
    let tokenizer = match files.optional("tokenizer/tokenizer.json")? {
        Some(path) => TextTokenizer::read(path, limits, max_tokens, vocabulary)?,
        None => {
            let path = files.required("tokenizer/vocab.json")?;
            let ids: Map<String, Value> = files.required_json("tokenizer/vocab.json")?;
            let merges_path = files.required("tokenizer/merges.txt")?;
            let merges = String::from_utf8_lossy(&read(&merges_path)?).into_owned();
            let json = tokenizer_json(&ids, &merges).ok_or_else(|| {
                let reason = format!("it lacks {START} or {END}");
                LoadError::File { path: path.clone(), reason }
            })?;
            TextTokenizer::of_json(&path, json.to_string().as_bytes(), limits, max_tokens, vocabulary)?
        }
    };
    let pad = pad_token(files)?;
    let pad = tokenizer.id_of_token(&pad).ok_or_else(|| LoadError::File {
        path: "tokenizer".into(),
        reason: format!("the padding token {pad:?} is not in the vocabulary"),
    })?;
    Ok(PaddedTokenizer { tokenizer, pad })
}

/// The padding token. `special_tokens_map.json` overrides `tokenizer_config.json`, as in transformers.
fn pad_token(files: &ModelFiles) -> Result<String, LoadError> {
    #[derive(Default, Deserialize)]
    struct Special {
        pad_token: Option<TokenField>,
    }
    for name in ["tokenizer/special_tokens_map.json", "tokenizer/tokenizer_config.json"] {
        let special: Special = files.json(name)?.unwrap_or_default();
        if let Some(token) = special.pad_token {
            return Ok(token.text());
        }
    }
    Ok(END.to_owned())
}

/// The content of a `tokenizer.json`. None without the tokens for start and end.
fn tokenizer_json(ids: &Map<String, Value>, merges: &str) -> Option<Value> {
    let (start, end) = (ids.get(START)?, ids.get(END)?);
    let merges: Vec<[&str; 2]> = merges
        .lines()
        .filter(|line| !line.starts_with("#version"))
        .filter_map(|line| line.split_once(' '))
        .map(|(first, second)| [first, second])
        .collect();
    let special = |text: &str, id: &Value| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
               "special": true})
    };
    Some(json!({
        "version": "1.0",
        "added_tokens": [special(START, start), special(END, end)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFC"},
            {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
            {"type": "Lowercase"},
        ]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PARTS}, "behavior": "Removed", "invert": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "post_processor": {"type": "RobertaProcessing", "sep": [END, end], "cls": [START, start], "trim_offsets": false,
                           "add_prefix_space": false},
        "model": {"type": "BPE", "unk_token": END, "continuing_subword_prefix": "", "end_of_word_suffix": "</w>",
                  "fuse_unk": false, "vocab": ids, "merges": merges},
    }))
}
