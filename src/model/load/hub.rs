//! Finds the files of one model of the Hugging Face hub: in the cache, else over the network. A download that stalls
//! for too long fails. Honours `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE`.

use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};

use super::{PIPELINE_WEIGHTS, WEIGHTS, shards, whole_files};
use crate::model::LoadError;

/// The longest time without a byte from the hub, after which a download fails.
const STALL_TIMEOUT: Duration = Duration::from_secs(45);

/// A model of the hub at one revision.
#[derive(Debug)]
pub struct Hub {
    id: String,
    name: String,
    revision: String,
    cache: Cache,
    offline: bool,
}

/// Messages from the downloading thread.
enum Event {
    Bytes,
    Finished(Result<Option<PathBuf>, String>),
}

/// Reports that bytes arrive. The channel holds one event; if it is full, an arrival is already reported.
struct Reporter(SyncSender<Event>);

impl Progress for Reporter {
    fn init(&mut self, size: usize, filename: &str) {
        tracing::info!(file = filename, bytes = size, "fetching from the Hugging Face hub");
    }

    fn update(&mut self, _size: usize) {
        let _ = self.0.try_send(Event::Bytes);
    }

    fn finish(&mut self) {}
}

/// The value of an environment variable, unless it is empty.
fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Hub {
    /// Parses an id and reads the environment; uses no network.
    pub fn open(id: &str) -> Result<Self, LoadError> {
        let (name, revision) = id.split_once('@').unwrap_or((id, "main"));
        let is_valid_part = |part: &str| {
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !part.is_empty() && part.chars().all(is_allowed)
        };
        let is_valid_name = name.split('/').count() <= 2 && name.split('/').all(is_valid_part);
        if !is_valid_name || revision.is_empty() {
            let reason = "is neither an existing folder nor an id like org/name or org/name@revision";
            return Err(LoadError::Unsupported { model: id.into(), reason: reason.into() });
        }
        let cache = match environment("HF_HUB_CACHE") {
            Some(folder) => Cache::new(folder.into()),
            None => Cache::from_env(),
        };
        let true_values = ["1", "true", "yes", "on"];
        let offline =
            environment("HF_HUB_OFFLINE").is_some_and(|v| true_values.contains(&&*v.to_lowercase()));
        let (id, name, revision) = (id.to_owned(), name.to_owned(), revision.to_owned());
        Ok(Self { id, name, revision, cache, offline })
    }

    /// The id as in the settings.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the local path of a file, and downloads it if it is not in the cache. None if the model does not have
    /// it.
    pub fn file(&self, name: &str) -> Result<Option<PathBuf>, LoadError> {
        if let Some(path) = self.cached(name) {
            return Ok(Some(path));
        }
        if self.is_cached() {
            return Ok(None);
        }
        if self.offline {
            return Err(self.failed("is not in the cache, and HF_HUB_OFFLINE is set"));
        }
        self.fetch(name)
    }

    /// Whether the cache holds all files of the model: it does if it has the weights, which are downloaded last.
    pub fn is_cached(&self) -> bool {
        let has_shards =
            |index: PathBuf| shards(&index).is_ok_and(|it| it.iter().all(|it| self.cached(it).is_some()));
        let [.., last_of_pipeline] = PIPELINE_WEIGHTS;
        whole_files(WEIGHTS).iter().any(|whole| {
            self.cached(whole).is_some()
                || self.cached(&format!("{whole}.index.json")).is_some_and(has_shards)
        }) || whole_files(last_of_pipeline).iter().any(|whole| self.cached(whole).is_some())
    }

    fn cached(&self, name: &str) -> Option<PathBuf> {
        // A revision may be a commit. hf-hub finds revisions through `refs` only, which has branches and tags.
        let snapshots = self.cache.path().join(self.repo().folder_name()).join("snapshots");
        let path = snapshots.join(&self.revision).join(name);
        if path.is_file() { Some(path) } else { self.cache.repo(self.repo()).get(name) }
    }

    fn repo(&self) -> Repo {
        Repo::with_revision(self.name.clone(), RepoType::Model, self.revision.clone())
    }

    /// Downloads a file. hf-hub's requests have no timeout, so they run on a separate thread. After a stall the thread
    /// keeps running, because the process ends soon.
    fn fetch(&self, file: &str) -> Result<Option<PathBuf>, LoadError> {
        let (sender, events) = mpsc::sync_channel(1);
        let (repo, cache, name) = (self.repo(), self.cache.clone(), file.to_owned());
        let spawned = thread::Builder::new().name("hub".into()).spawn(move || {
            let result = download(repo, cache, &name, Reporter(sender.clone()));
            let _ = sender.send(Event::Finished(result));
        });
        spawned.map_err(|error| self.failed(&error.to_string()))?;
        loop {
            match events.recv_timeout(STALL_TIMEOUT) {
                Ok(Event::Bytes) => {}
                Ok(Event::Finished(Ok(path))) => return Ok(path),
                Ok(Event::Finished(Err(reason))) => return Err(self.failed(&reason)),
                Err(RecvTimeoutError::Timeout) => {
                    let reason = format!("no byte of {file} arrived for {} s", STALL_TIMEOUT.as_secs());
                    return Err(self.failed(&reason));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.failed("the download stopped unexpectedly"));
                }
            }
        }
    }

    fn failed(&self, reason: &str) -> LoadError {
        let (model, folder) = (self.id.clone(), PathBuf::from(&self.id));
        // hf-hub does not export the type of its error, but its text has the status.
        let is_refused = ["status code 401", "status code 403"].iter().any(|status| reason.contains(status));
        let is_lasting = self.offline || is_refused;
        LoadError::Hub { model, folder, reason: reason.to_owned(), is_lasting }
    }
}

fn download(repo: Repo, cache: Cache, file: &str, reporter: Reporter) -> Result<Option<PathBuf>, String> {
    let token = environment("HF_TOKEN").or_else(|| cache.token());
    let mut builder = ApiBuilder::from_cache(cache).with_token(token);
    if let Some(endpoint) = environment("HF_ENDPOINT") {
        builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
    }
    let api = builder.build().map_err(|error| error.to_string())?;
    match api.repo(repo).download_with_progress(file, reporter) {
        Ok(path) => Ok(Some(path)),
        // hf-hub does not export the type of this error, but its text has the status.
        Err(ApiError::RequestError(error)) if error.to_string().contains("status code 404") => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn an_id_may_have_a_revision() {
        let hub = Hub::open("org/name@refs/pr/1").unwrap();
        assert_eq!((&*hub.name, &*hub.revision), ("org/name", "refs/pr/1"));
        let hub = Hub::open("gpt2").unwrap();
        assert_eq!((&*hub.name, &*hub.revision), ("gpt2", "main"));
    }

    #[test]
    fn a_cached_model_is_complete_and_needs_no_network() {
        let home = tempfile::tempdir().unwrap();
        let hub = Hub {
            cache: Cache::new(home.path().into()),
            offline: true,
            ..Hub::open("org/name@abc123").unwrap()
        };
        let cause = "from the Hugging Face hub: is not in the cache, and HF_HUB_OFFLINE is set";
        for (folder, named) in
            [(None, "org/name@abc123"), (Some(Path::new("/srv/org/name")), "/srv/org/name")]
        {
            let error = hub.file("config.json").unwrap_err().without_folder(folder).to_string();
            assert_eq!(error, format!("model \"org/name@abc123\": there is no folder {named}; {cause}"));
        }
        let snapshot = home.path().join("models--org--name/snapshots/abc123");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::write(snapshot.join("config.json"), "{}").unwrap();
        let index = r#"{"weight_map":{"a":"1.bin"}}"#;
        std::fs::write(snapshot.join("pytorch_model.bin.index.json"), index).unwrap();
        assert!(!hub.is_cached());
        std::fs::write(snapshot.join("1.bin"), "").unwrap();
        assert!(hub.is_cached());
        std::fs::remove_file(snapshot.join("1.bin")).unwrap();
        for weights in whole_files(WEIGHTS) {
            std::fs::write(snapshot.join(&weights), "").unwrap();
            assert!(hub.is_cached(), "{weights}");
            std::fs::remove_file(snapshot.join(&weights)).unwrap();
        }
        std::fs::write(snapshot.join("pytorch_model.bin"), "").unwrap();
        assert_eq!(hub.file("config.json").unwrap(), Some(snapshot.join("config.json")));
        assert_eq!(hub.file("modules.json").unwrap(), None);
    }
}
