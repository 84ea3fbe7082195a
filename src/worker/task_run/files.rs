//! Fetches the files that a task names by their URLs: those in its body, or the one that is its body (`dataref`).

use std::sync::Arc;

use super::Run;
use super::preparation::Fetched;
use crate::config::redact_url;
use crate::fetch::{Claim, Failure, Fetcher};
use crate::model::{Effort, FileUrl, Files};
use crate::protocol::files::DATAREF;
use crate::protocol::{TaskError, TaskErrorKind, shorten};
use crate::worker::settle::{Outcome, WaitsFor};

/// The most files that are fetched for a task.
const MAX_URLS: usize = 16;

impl Run<'_> {
    /// Fetches the task's files.
    pub(super) async fn fetch_files(&self) -> Result<Fetched, Outcome> {
        let urls = self.file_urls().await?;
        let fetcher = self.shared.fetcher.as_ref().filter(|_| !urls.is_empty());
        let Some(fetcher) = fetcher else {
            return Ok(Fetched { task: self.accepted.task.clone(), files: Files::default() });
        };
        if urls.len() > MAX_URLS {
            let message =
                format!("the task has {} URLs of files; at most {MAX_URLS} are fetched", urls.len());
            return Err(TaskError::new(TaskErrorKind::TooLarge, message).into());
        }
        self.expected.paused_for(self.fetch_all(fetcher, urls)).await
    }

    /// The URLs of the task's files.
    async fn file_urls(&self) -> Result<Vec<FileUrl>, TaskError> {
        let (shared, task) = (self.shared, &self.accepted.task);
        let message = &task.message;
        let dataref = message.properties.headers.get(DATAREF);
        if dataref.is_some() && shared.fetcher.is_some() && !message.body.is_empty() {
            let message = format!(
                "{DATAREF} names a file in the place of the body, but the body has {} bytes; send an empty one",
                message.body.len()
            );
            return Err(TaskError::bad_input(DATAREF, message));
        }
        let dataref = dataref.filter(|_| message.body.is_empty());
        match (dataref.and_then(|url| url.as_str()), &shared.fetcher) {
            (Some(_), None) => {
                let message =
                    format!("{DATAREF}: this pool fetches nothing, because its allowed_sources is empty");
                Err(TaskError::bad_input(DATAREF, message))
            }
            (Some(url), Some(_)) => Ok(vec![FileUrl { url: url.to_owned(), path: DATAREF.to_owned() }]),
            (None, Some(_)) if message.is_json() => {
                let (engine, task) = (shared.engine.clone(), task.clone());
                self.prepare(Effort::Usual, move || Ok(engine.file_urls(&task.message))).await
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Fetches the files of these URLs, one after the other.
    async fn fetch_all(&self, fetcher: &Fetcher, urls: Vec<FileUrl>) -> Result<Fetched, Outcome> {
        let task = &self.accepted.task;
        let mut fetched = Fetched { task: task.clone(), files: Files::default() };
        let mut fetched_bytes = 0;
        for FileUrl { url, path } in urls {
            if fetched.files.has(&url) {
                continue;
            }
            let to_outcome = |failure: Failure| outcome_of(failure, &url, &path);
            let location = fetcher.locate(&url).map_err(to_outcome)?;
            let server = fetcher.limited_server(&location);
            let turn = Arc::new(self.wait_for_turn(&self.shared.fetch_turns, server).await?);
            // A JSON body is decoded as a whole, on a thread that other tasks need, so its size is limited.
            let is_json_body = path == DATAREF && task.message.is_json();
            let claim = Claim {
                owner: self.state.owner,
                waits_for_memory: !self.is_isolated(),
                max_size: if is_json_body { self.shared.max_body } else { u64::MAX },
                task_bytes: fetched_bytes,
            };
            let bytes = tokio::select! {
                biased;
                bytes = fetcher.fetch(location, claim, turn) => bytes.map_err(to_outcome)?,
                error = self.wait_until_unwanted() => return Err(error.into()),
            };
            fetched_bytes += bytes.len() as u64;
            if path == DATAREF {
                fetched.task = Arc::new(task.with_body(bytes));
            } else {
                fetched.files.add(url, bytes);
            }
        }
        Ok(fetched)
    }
}

/// What becomes of a task because the file of `url`, which its field `path` names, is not fetched.
fn outcome_of(failure: Failure, url: &str, path: &str) -> Outcome {
    let (kind, why) = match failure {
        Failure::OverBudget => return Outcome::PutOff(WaitsFor::Memory),
        Failure::Refused(why) => (TaskErrorKind::BadInput, why),
        Failure::TooLarge(why) => (TaskErrorKind::TooLarge, why),
        Failure::Unavailable(why) => (TaskErrorKind::Unavailable, why),
    };
    // A query may be a signature, a URL may hold a password, and errors are logged.
    let shown = redact_url(url);
    let shown = shown.split_once('?').map_or_else(|| shown.clone(), |(start, _)| format!("{start}?…"));
    TaskError::new(kind, format!("{path}: {:?} {why}", shorten(&shown, 200))).with_param(path).into()
}
