//! Finds a model's files: in a folder, or on the Hugging Face hub, whose local cache is searched first. Decides which
//! of the two a `model` setting means. Never waits without a timeout, and uses no network for a model in the cache. The
//! other modules of this folder read the files: weights, tokenizers.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::{Dtype, LoadError, LoadSpec};

pub mod chat_template;
#[cfg(feature = "candle-transformers")]
pub mod clip_tokenizer;
mod digest;
mod fast_word_piece;
pub mod gguf;
mod gguf_tokenizer;
mod hub;
pub mod long_text;
pub mod packed_cache;
pub mod tokenizer;
pub mod torch;
pub mod vocabulary;
pub mod weights;

use hub::Hub;

/// A lower bound of the bytes of a model's weights on a device. Files may hold f32, so half of their bytes count for
/// 16 bits, and a third for int8. None if the model's files are not on this host yet.
pub fn weights_size(spec: &LoadSpec) -> Option<u64> {
    let files = ModelFiles::on_this_host(&spec.source)?;
    let paths = match files.gguf() {
        Some(path) => vec![path],
        None if files.optional(PIPELINE).ok()?.is_some() => {
            PIPELINE_WEIGHTS.iter().filter_map(|part| files.weights_of(part).ok()).flatten().collect()
        }
        None => files.weights().ok()?,
    };
    let bytes: u64 = paths.iter().filter_map(|path| path.metadata().ok()).map(|file| file.len()).sum();
    // In 16 bits at best, on a GPU.
    if spec.is_dtype_auto {
        return Some(bytes / 2);
    }
    Some(match spec.dtype {
        Dtype::F32 => bytes,
        Dtype::Bf16 | Dtype::F16 => bytes / 2,
        Dtype::Int8 => bytes / 3,
    })
}

/// How a CPU keeps the number types of a GGUF file in which it does not compute, for the operator. None for other files
/// and devices, and if the file is not on this host or cannot be read.
pub fn widened_types(spec: &LoadSpec) -> Option<String> {
    if spec.device != "cpu" {
        return None;
    }
    gguf::Gguf::read(&ModelFiles::on_this_host(&spec.source)?.gguf()?).ok()?.widened_types()
}

/// The digest of one file: SHA-256 over its name, its size and its bytes, as of [`ModelFiles::digest`].
///
/// # Errors
/// [`LoadError::File`] if it cannot be read.
pub fn digest_of_file(file: &Path) -> Result<String, LoadError> {
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    digest::of(&BTreeMap::from([(name, file.to_owned())]))
}

/// Checks all numbers in the model's files, once its results are known not to be finite: then neither the device nor the
/// number format is at fault. Reads every file, and is therefore not called for a model that works. A model that is not
/// loaded from files of this host passes.
///
/// # Errors
/// [`LoadError::File`] with the first number that is not finite, its tensor and its file.
pub fn check_finite(spec: &LoadSpec) -> Result<(), LoadError> {
    let Some(files) = ModelFiles::on_this_host(&spec.source) else { return Ok(()) };
    match files.gguf() {
        Some(path) => gguf::Gguf::read(&path)?.check_finite(),
        None => weights::check_finite(&weight_files(&files)),
    }
}

/// The files of the weights: those with the usual names, else those of a pipeline, else all in the folder, as voices have.
fn weight_files(files: &ModelFiles) -> Vec<PathBuf> {
    if let Ok(paths) = files.weights() {
        return paths;
    }
    let parts = PIPELINE_WEIGHTS.iter().filter_map(|part| files.weights_of(part).ok()).flatten();
    let parts: Vec<PathBuf> = parts.collect();
    if !parts.is_empty() {
        return parts;
    }
    let names = files.names_in("").unwrap_or_default();
    let names = names.iter().filter(|name| name.ends_with(".safetensors"));
    names.filter_map(|name| files.optional(name).ok()?).collect()
}

/// The files of one model.
#[derive(Debug)]
pub struct ModelFiles {
    location: Location,
    /// The files that were requested and found, by name. [`digest`](Self::digest) covers these.
    found: RefCell<BTreeMap<String, PathBuf>>,
}

#[derive(Debug)]
enum Location {
    Folder(PathBuf),
    Hub(Hub),
}

impl ModelFiles {
    /// Interprets a `model` setting: as a GGUF file if it ends with `.gguf`; as a folder if it is one or begins with
    /// `.`, `/` or `~`; otherwise as a hub id: `org/name`, `org/name@revision`.
    ///
    /// # Errors
    /// [`LoadError::File`] for a folder or GGUF file that does not exist, [`LoadError::Unsupported`] for an invalid
    /// id.
    pub fn locate(source: &str) -> Result<Self, LoadError> {
        let folder = expand_home(source);
        if let (true, Some(name)) = (is_gguf(source), folder.file_name().and_then(|name| name.to_str())) {
            let files = Self::at(Location::Folder(folder.with_file_name("")));
            files.required(name)?;
            return Ok(files);
        }
        if folder.is_dir() {
            return Ok(Self::at(Location::Folder(folder)));
        }
        if Self::is_path(source) {
            let reason = if folder.exists() { "is not a folder" } else { "no such folder" };
            return Err(LoadError::File { path: folder, reason: reason.to_owned() });
        }
        Ok(Self::at(Location::Hub(Hub::open(source)?)))
    }

    /// Whether a `model` setting can only be a folder or a GGUF file, and not an id of the hub.
    pub fn is_path(source: &str) -> bool {
        source.starts_with(['.', '/', '~']) || is_gguf(source)
    }

    /// As [`locate`](Self::locate), for a model whose files are on this host. None for a model of the hub that must be
    /// downloaded first, and if `locate` fails.
    pub fn on_this_host(source: &str) -> Option<Self> {
        let files = Self::locate(source).ok()?;
        let is_complete = match &files.location {
            Location::Folder(_) => true,
            Location::Hub(hub) => hub.is_cached(),
        };
        is_complete.then_some(files)
    }

    /// The GGUF file, if the model is one.
    pub fn gguf(&self) -> Option<PathBuf> {
        self.found.borrow().values().find(|path| path.extension().is_some_and(|it| it == "gguf")).cloned()
    }

    /// The path of a required file.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the file if the model does not have it, [`LoadError::Hub`] if the hub cannot
    /// be reached.
    pub fn required(&self, name: &str) -> Result<PathBuf, LoadError> {
        if let Some(path) = self.optional(name)? {
            return Ok(path);
        }
        let mut reason = "the model has no such file".to_owned();
        let path = match &self.location {
            Location::Folder(folder) => {
                if let Some(gguf) = gguf_in(folder) {
                    reason += &format!("; to serve {}, name that file as the model", gguf.display());
                }
                folder.join(name)
            }
            Location::Hub(hub) => Path::new(hub.id()).join(name),
        };
        Err(LoadError::File { path, reason })
    }

    /// The path of a file; none if the model does not have it.
    ///
    /// # Errors
    /// [`LoadError::Hub`] if the hub cannot be reached, [`LoadError::File`] for a pointer of Git LFS in its place.
    pub fn optional(&self, name: &str) -> Result<Option<PathBuf>, LoadError> {
        let found = match &self.location {
            Location::Folder(folder) => Some(folder.join(name)).filter(|path| path.is_file()),
            Location::Hub(hub) => hub.file(name)?,
        };
        if let Some(path) = &found {
            refuse_pointer(path)?;
            self.found.borrow_mut().insert(name.to_owned(), path.clone());
        }
        Ok(found)
    }

    /// The names of the files in a folder of the model, in order. For a model of the hub, only the cached
    /// files.
    ///
    /// # Errors
    /// As [`optional`](Self::optional).
    pub fn names_in(&self, folder: &str) -> Result<Vec<String>, LoadError> {
        let config = self.optional("config.json")?;
        let folder = config.map(|config| config.with_file_name(folder));
        let entries =
            folder.and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        Ok(names)
    }

    /// Returns the files with the weights: one, or shards in the order of their names. They must be requested last,
    /// since a cache that has the weights counts as complete.
    ///
    /// # Errors
    /// As [`required`](Self::required).
    pub fn weights(&self) -> Result<Vec<PathBuf>, LoadError> {
        self.weights_of(WEIGHTS)
    }

    /// As [`weights`](Self::weights), for files whose names begin with `stem`, which may contain a folder. Files of
    /// PyTorch are requested only if there are none of safetensors.
    ///
    /// # Errors
    /// As [`required`](Self::required).
    pub fn weights_of(&self, stem: &str) -> Result<Vec<PathBuf>, LoadError> {
        let whole_files = whole_files(stem);
        for whole in &whole_files {
            if let Some(path) = self.optional(whole)? {
                return Ok(vec![path]);
            }
            if let Some(index) = self.optional(&format!("{whole}.index.json"))? {
                let folder = Path::new(stem).parent().unwrap_or(Path::new(""));
                let shard = |name: &String| self.required(&folder.join(name).to_string_lossy());
                return shards(&index)?.iter().map(shard).collect();
            }
        }
        self.required(&whole_files[0]).map(|path| vec![path])
    }

    /// A digest of the files that were requested and found so far: SHA-256 over their names, sizes and bytes, 64 hex
    /// digits. For a file over 32 MiB it covers the size, the first and last 64 KiB, and 64 evenly spread blocks of 16
    /// KiB. Another model has another digest, but a change of a few numbers may not change the digest. Paths and
    /// times of the files have no influence.
    ///
    /// # Errors
    /// [`LoadError::File`] for a file that cannot be read.
    pub fn digest(&self) -> Result<String, LoadError> {
        digest::of(&self.found.borrow())
    }

    /// Reads and decodes a JSON file; none if the model does not have it.
    ///
    /// # Errors
    /// [`LoadError::File`] with the line of the error.
    pub fn json<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<Option<T>, LoadError> {
        let Some(path) = self.optional(name)? else {
            return Ok(None);
        };
        let bytes = read(&path)?;
        let value = serde_json::from_slice(&bytes);
        value.map(Some).map_err(|error| LoadError::File { path, reason: error.to_string() })
    }

    /// As [`json`](Self::json), for a required file.
    ///
    /// # Errors
    /// [`LoadError::File`] if the file is missing or invalid.
    pub fn required_json<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T, LoadError> {
        self.required(name)?;
        self.json(name)?.ok_or_else(|| LoadError::File {
            path: name.into(),
            reason: "disappeared while it was read".into(),
        })
    }

    fn at(location: Location) -> Self {
        Self { location, found: RefCell::default() }
    }
}

/// What is in the place of a large file if a repository was cloned without Git LFS.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1";

fn refuse_pointer(path: &Path) -> Result<(), LoadError> {
    let mut beginning = Vec::new();
    // Whoever reads the file reports that it cannot be read.
    let _ = File::open(path).and_then(|file| file.take(POINTER.len() as u64).read_to_end(&mut beginning));
    if beginning != POINTER {
        return Ok(());
    }
    let reason =
        "this is a Git LFS pointer; fetch the file itself (`git lfs pull` in the repository)".to_owned();
    Err(LoadError::File { path: path.to_owned(), reason })
}

/// A GGUF file in a folder, if there is one.
fn gguf_in(folder: &Path) -> Option<PathBuf> {
    let mut files = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    files.find(|path| path.to_str().is_some_and(is_gguf))
}

/// Whether a `model` setting is a GGUF file.
pub fn is_gguf(source: &str) -> bool {
    Path::new(source).extension().is_some_and(|extension| extension == "gguf")
}

/// The beginning of the names of most models' weights.
const WEIGHTS: &str = "model";

/// The names that a file with all weights may have: that of safetensors, then that of PyTorch. Where the weights are in
/// several files, the name with `.index.json` after it lists them.
fn whole_files(stem: &str) -> [String; 2] {
    let folder_end = stem.rfind('/').map_or(0, |slash| slash + 1);
    let (folder, name) = stem.split_at(folder_end);
    let prefix = if name == WEIGHTS { "pytorch_" } else { "" };
    [format!("{stem}.safetensors"), format!("{folder}{prefix}{name}.bin")]
}

/// The description of a model of several networks.
const PIPELINE: &str = "model_index.json";
/// The weights of its parts, without the endings of their files, in the order in which they are requested.
pub const PIPELINE_WEIGHTS: [&str; 3] =
    ["text_encoder/model", "unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model"];

#[derive(serde::Deserialize)]
struct Index {
    /// The file of each tensor, by the tensor's name.
    weight_map: BTreeMap<String, String>,
}

/// The files that an index names, each once.
fn shards(index: &Path) -> Result<BTreeSet<String>, LoadError> {
    let fault = |reason: String| LoadError::File { path: index.into(), reason };
    let parsed: Index = serde_json::from_slice(&read(index)?).map_err(|error| fault(error.to_string()))?;
    let names: BTreeSet<String> = parsed.weight_map.into_values().collect();
    match names.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
        Some(other) => Err(fault(format!("{other:?} is not the name of a file in the same folder"))),
        None if names.is_empty() => Err(fault("it names no files".to_owned())),
        None => Ok(names),
    }
}

/// Reads a whole file.
///
/// # Errors
/// [`LoadError::File`] with the system's message.
pub fn read(path: &Path) -> Result<Vec<u8>, LoadError> {
    std::fs::read(path).map_err(|error| LoadError::File { path: path.into(), reason: error.to_string() })
}

fn expand_home(source: &str) -> PathBuf {
    match (source.strip_prefix('~'), std::env::home_dir()) {
        (Some(""), Some(home)) => home,
        (Some(rest), Some(home)) if rest.starts_with('/') => home.join(&rest[1..]),
        _ => PathBuf::from(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gguf_file_is_the_whole_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("it.gguf");
        let source = path.to_str().unwrap();
        assert!(ModelFiles::locate(source).unwrap_err().to_string().contains("it.gguf"));
        std::fs::write(&path, "GGUF").unwrap();
        assert_eq!(ModelFiles::locate(source).unwrap().gguf(), Some(path.clone()));
        assert_eq!(weights_size(&LoadSpec::new(source)), Some(4));
        assert_eq!(ModelFiles::locate(folder.path().to_str().unwrap()).unwrap().gguf(), None);
    }

    #[test]
    fn a_path_is_never_looked_up_on_the_hub() {
        for source in ["./no/such", "/no/such", "~/no/such/sconce/model", "../no/such"] {
            let error = ModelFiles::locate(source).expect_err(source);
            assert!(matches!(error, LoadError::File { .. }), "{error}");
        }
    }

    #[test]
    fn weights_are_one_file_or_the_shards_that_an_index_names_and_safetensors_come_first() {
        let folder = tempfile::tempdir().unwrap();
        let files = ModelFiles::locate(folder.path().to_str().unwrap()).unwrap();
        let write = |name: &str, text: &str| {
            std::fs::write(folder.path().join(name), text).unwrap();
            folder.path().join(name)
        };
        let index = |ending: &str| {
            let map = format!(r#"{{"weight_map":{{"a":"2.{ending}","b":"1.{ending}","c":"2.{ending}"}}}}"#);
            let prefix = if ending == "bin" { "pytorch_" } else { "" };
            write(&format!("{prefix}model.{ending}.index.json"), &map)
        };
        assert!(files.weights().unwrap_err().to_string().contains("model.safetensors: "));
        for ending in ["bin", "safetensors"] {
            index(ending);
            assert!(files.weights().unwrap_err().to_string().contains(&format!("1.{ending}: ")));
            let shards = ["1", "2"].map(|name| write(&format!("{name}.{ending}"), ""));
            assert_eq!(files.weights().unwrap(), shards);
            let prefix = if ending == "bin" { "pytorch_" } else { "" };
            let whole = write(&format!("{prefix}model.{ending}"), "");
            assert_eq!(files.weights().unwrap(), [whole]);
        }
        let index = index("bin");
        for bad in [r#"{"weight_map":{"a":"../x"}}"#, r#"{"weight_map":{}}"#, "{}"] {
            std::fs::write(&index, bad).unwrap();
            assert!(shards(&index).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_digest_covers_the_weights_that_are_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let digest = || {
            let files = ModelFiles::locate(folder.path().to_str().unwrap()).unwrap();
            files.weights().unwrap();
            files.digest().unwrap()
        };
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("pytorch_model.bin", "one");
        let first = digest();
        write("pytorch_model.bin", "two");
        let second = digest();
        assert_ne!(first, second);
        write("model.safetensors", "two");
        let third = digest();
        assert_ne!(second, third);
        write("pytorch_model.bin", "one");
        assert_eq!(digest(), third);
    }

    #[test]
    fn the_parts_of_a_pipeline_may_be_files_of_pytorch() {
        let folder = tempfile::tempdir().unwrap();
        let files = ModelFiles::locate(folder.path().to_str().unwrap()).unwrap();
        let names =
            ["text_encoder/pytorch_model", "unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model"];
        for (stem, name) in PIPELINE_WEIGHTS.iter().zip(names) {
            let path = folder.path().join(format!("{name}.bin"));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            assert_eq!(files.weights_of(stem).unwrap(), [path]);
        }
    }

    #[test]
    fn a_pointer_of_git_lfs_in_the_place_of_a_file_is_refused_by_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 90868376\n";
        let names = ["tokenizer.json", "model.gguf", "model.safetensors", "pytorch_model.bin"];
        for name in names {
            let path = folder.path().join(name);
            std::fs::write(&path, pointer).unwrap();
            let source = if name.ends_with("gguf") { path.as_path() } else { folder.path() };
            let error = ModelFiles::locate(source.to_str().unwrap()).and_then(|files| {
                if name == "tokenizer.json" {
                    files.required(name).map(drop)
                } else {
                    files.weights().map(drop)
                }
            });
            let error = error.unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()) && error.contains("a Git LFS pointer"), "{error}");
            std::fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn a_missing_file_is_named_with_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let files = ModelFiles::locate(folder.path().to_str().unwrap()).unwrap();
        assert!(files.optional("config.json").unwrap().is_none());
        let error = files.required("config.json").unwrap_err().to_string();
        assert!(error.starts_with(folder.path().join("config.json").to_str().unwrap()), "{error}");
    }

    #[test]
    fn broken_json_is_named_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.json"), "{\n\"b\": }").unwrap();
        let files = ModelFiles::locate(folder.path().to_str().unwrap()).unwrap();
        let error = files.json::<serde_json::Value>("a.json").unwrap_err().to_string();
        assert!(error.contains("a.json") && error.contains("line 2"), "{error}");
    }

    #[test]
    fn a_source_that_is_neither_folder_nor_id_is_refused_at_once() {
        for source in ["", "a b", "a/b/c", "org/name@", "https://host/org/name"] {
            let error = ModelFiles::locate(source).expect_err(source);
            assert!(matches!(error, LoadError::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains("folder"), "{error}");
        }
    }
}
