//! Fetches the files that tasks name by a URL instead of sending them (`pool.allowed_sources`). Decides what is
//! fetched, and bounds the size and the time of each fetch, and the memory of all fetched files. Owns the connections to
//! servers and the threads that read local files. Does not know what the files contain, nor who waits for them.
//!
//! | file | decides |
//! |---|---|
//! | `allowed` | whether the settings admit a URL, and where its file is |
//! | `file` | opens files below a folder |
//! | `web` | downloads files from servers |
//! | `budget` | how many bytes a requester may hold |

mod allowed;
mod budget;
mod file;
mod web;

use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use rusty_s3::{Bucket, Credentials, S3Action as _, UrlStyle};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};
use url::Url;

pub use self::allowed::Location;
use self::budget::{Budget, Share};
use self::web::RATE_WINDOW;
use crate::batching::{Owner, QueueBytes};
use crate::config::{AllowedSource, Fetch, Pool, S3};

/// The number of bytes of a local file between two checks of the deadline.
const READ_STEP: usize = 64 << 10;
/// How long a fetch waits while the worker holds too many bytes. It is short, because the fetch occupies its permit
/// meanwhile, and bytes may be held until a recording is transcribed.
const MEMORY_WAIT: Duration = Duration::from_secs(1);
/// How long the signature of a URL is valid. It can be short, because the request is made at once.
const SIGNATURE_LIFETIME: Duration = Duration::from_secs(60);

/// Why a file is not fetched. The text is put after the file's URL.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    /// A retry would end the same.
    Refused(String),
    /// The file is larger than this pool takes.
    TooLarge(String),
    /// The file may be available later.
    Unavailable(String),
    /// The worker holds too many bytes of files now. The file itself is acceptable.
    OverBudget,
}

/// Fetches files for the tasks of one worker.
pub struct Fetcher {
    allowed: Vec<AllowedSource>,
    limits: Fetch,
    s3: S3,
    budget: Budget,
    hasher: RandomState,
    /// Whether the settings admit several servers, so that each may have only half of the places for fetches.
    limits_servers: bool,
    /// Created by the first fetch over TLS.
    tls: OnceLock<Arc<rustls::ClientConfig>>,
}

/// Who fetches a file, how large it may be, and whether the fetch waits for memory.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// Whose task it is.
    pub owner: Owner,
    /// Whether the fetch waits while the worker holds too many bytes. If not, it may exceed the budget.
    pub waits_for_memory: bool,
    /// Maximum size of the file in bytes. The setting `fetch.max_size` also applies.
    pub max_size: u64,
    /// Bytes of the task's files that were fetched before, and are held until the task ends.
    pub task_bytes: u64,
}

/// A fetched file. The bytes count as held until this is dropped.
struct FetchedBytes {
    bytes: Vec<u8>,
    _share: Share,
}

impl AsRef<[u8]> for FetchedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Fetcher {
    /// Creates the fetcher of a pool; none if the pool has no `allowed_sources`.
    pub fn new(pool: &Pool) -> Option<Self> {
        let allowed = pool.allowed_sources.clone();
        let (limits, s3, tls) = (pool.fetch.clone(), pool.s3.clone(), OnceLock::new());
        let budget = Budget::new(QueueBytes::new(limits.memory, &pool.independent_queue_shares()));
        let (hasher, limits_servers) = (RandomState::new(), allowed::servers(&allowed) > 1);
        (!allowed.is_empty()).then_some(Self { allowed, limits, s3, budget, hasher, limits_servers, tls })
    }

    /// Finds out where the file of a URL is.
    ///
    /// # Errors
    /// The URL is not admitted.
    pub fn locate(&self, url: &str) -> Result<Location, Failure> {
        allowed::locate(url, &self.allowed).map_err(Failure::Refused)
    }

    /// The hash of the server's name, if the server may have only half of the places for fetches.
    pub fn limited_server(&self, location: &Location) -> Option<u64> {
        self.limits_servers.then(|| self.hasher.hash_one(location.server()))
    }

    /// Fetches a file. If this call is cancelled, a connection to a server is closed at once. A thread that reads a
    /// local file holds `permit` until it ends, at the deadline or when the file system answers, so that the caller's
    /// permits bound the number of threads.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn fetch(
        &self,
        location: Location,
        claim: Claim,
        permit: Arc<impl Send + Sync + 'static>,
    ) -> Result<Bytes, Failure> {
        let deadline = Instant::now() + self.limits.timeout;
        let fetching = async {
            let (url, allows_private) = match location {
                Location::File { folder, path } => {
                    return self.read_file(folder, path, claim, deadline, &permit).await;
                }
                Location::Web { url, allows_private } => (url, allows_private),
                Location::Bucket { bucket, key, allows_private } => {
                    (self.signed_url(&bucket, &key)?, allows_private)
                }
            };
            self.download(&url, allows_private, claim).await
        };
        let timed_out = |_| Failure::Unavailable(format!("is not there within {:?}", self.limits.timeout));
        timeout_at(deadline, fetching).await.map_err(timed_out)?
    }

    async fn read_file(
        &self,
        folder: PathBuf,
        path: PathBuf,
        claim: Claim,
        deadline: Instant,
        permit: &Arc<impl Send + Sync + 'static>,
    ) -> Result<Bytes, Failure> {
        let (mut file, size) = on_thread(permit, move || file::open_below(&folder, &path)).await?;
        let mut buffer = self.buffer(Some(size), claim).await?;
        let read = move || {
            // One byte more is read, to detect a file that is longer than it was.
            let mut content = (&mut file).take(size.saturating_add(1));
            loop {
                let read = io::copy(&mut (&mut content).take(READ_STEP as u64), &mut buffer.bytes);
                let read = read.map_err(|error| {
                    Failure::Unavailable(format!("is not read to its end: {}", error.kind()))
                })?;
                if read == 0 {
                    return buffer.finish();
                }
                if Instant::now() >= deadline {
                    return Err(Failure::Unavailable("is not read to its end in time".to_owned()));
                }
            }
        };
        on_thread(permit, read).await
    }

    async fn download(&self, url: &Url, allows_private: bool, claim: Claim) -> Result<Bytes, Failure> {
        let addresses = web::resolve(url, allows_private).await?;
        let tls = match self.tls.get() {
            Some(tls) => tls.clone(),
            None => {
                let error = |error| Failure::Unavailable(format!("no certificates can be verified: {error}"));
                let created = web::tls().map_err(error)?;
                self.tls.get_or_init(|| created).clone()
            }
        };
        let server = web::connect(url, &addresses, tls).await?;
        let progress = server.progress();
        let downloading = async {
            let mut response = server.request(url).await?;
            let mut buffer = self.buffer(response.size(), claim).await?;
            while let Some(bytes) = response.next().await? {
                buffer.add(&bytes)?;
            }
            buffer.finish()
        };
        tokio::select! {
            downloaded = downloading => downloaded,
            () = progress.wait_until_slow(self.limits.min_rate) => {
                let least = self.limits.min_rate;
                let reason = format!("comes too slowly: fewer than {least} bytes a second for {RATE_WINDOW:?}");
                Err(Failure::Unavailable(reason))
            }
        }
    }

    /// Reserves memory for a file of `size` bytes, or of unknown size.
    async fn buffer(&self, size: Option<u64>, claim: Claim) -> Result<Buffer, Failure> {
        let of_pool = (self.limits.max_size, "fetch.max_size");
        let (max_bytes, limit) = of_pool.min((claim.max_size, "max_body"));
        if let Some(size) = size.filter(|size| *size > max_bytes) {
            return Err(Failure::TooLarge(format!(
                "has {size} bytes; this pool takes at most {max_bytes} ({limit})"
            )));
        }
        let expected = size.unwrap_or(max_bytes);
        let requester_limit = self.budget.most_of_task(claim.owner);
        if claim.task_bytes > 0 && claim.task_bytes.saturating_add(expected) > requester_limit {
            let fetched = claim.task_bytes;
            return Err(Failure::TooLarge(format!(
                "has up to {expected} bytes, and the task's files before it have {fetched}; \
                 together they may have {requester_limit}"
            )));
        }
        let share = if claim.waits_for_memory {
            // Less than the fetch may take: a file that waits for memory is put off, and does not count as one that is slow.
            let wait = MEMORY_WAIT.min(self.limits.timeout / 2);
            let share = timeout(wait, self.budget.take(claim.owner, expected)).await;
            share.map_err(|_| Failure::OverBudget)?
        } else {
            self.budget.exceed(claim.owner, expected)
        };
        // Memory that is not written to costs nothing. A vector that grows would for a moment take three times its
        // size.
        let mut bytes = Vec::new();
        let no_memory = |_| Failure::Unavailable("does not fit into the worker's memory now".to_owned());
        bytes.try_reserve_exact(expected.saturating_add(1) as usize).map_err(no_memory)?;
        Ok(Buffer { bytes, size, max_bytes, limit, share })
    }

    /// The URL of an S3 object, signed with the credentials of the settings.
    fn signed_url(&self, bucket: &str, key: &str) -> Result<Url, Failure> {
        let refused = |error: &dyn std::fmt::Display| Failure::Refused(format!("is no object: {error}"));
        let endpoint = match &self.s3.endpoint {
            Some(endpoint) => endpoint.clone(),
            None => Url::parse(&format!("https://s3.{}.amazonaws.com", self.s3.region))
                .map_err(|error| refused(&error))?,
        };
        let bucket = Bucket::new(endpoint, UrlStyle::Path, bucket.to_owned(), self.s3.region.clone());
        let bucket = bucket.map_err(|error| refused(&error))?;
        let credentials = match (&self.s3.access_key_id, &self.s3.secret_access_key) {
            (Some(id), Some(secret)) => Some(Credentials::new(id.clone(), secret.expose())),
            _ => None,
        };
        Ok(bucket.get_object(credentials.as_ref(), key).sign(SIGNATURE_LIFETIME))
    }
}

/// The content of a file while it arrives.
struct Buffer {
    bytes: Vec<u8>,
    /// The file's size, if it was declared.
    size: Option<u64>,
    max_bytes: u64,
    /// The setting that `max_bytes` is.
    limit: &'static str,
    share: Share,
}

impl Buffer {
    /// Adds the next bytes of the file.
    ///
    /// # Errors
    /// The file is longer than it should be.
    fn add(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let room = self.size.unwrap_or(self.max_bytes).saturating_add(1) - self.bytes.len() as u64;
        self.bytes.extend_from_slice(&bytes[..bytes.len().min(room as usize)]);
        if bytes.len() as u64 >= room { self.check() } else { Ok(()) }
    }

    /// Returns the file.
    ///
    /// # Errors
    /// The file does not have its declared size, or more than `max_bytes` bytes.
    fn finish(mut self) -> Result<Bytes, Failure> {
        self.check()?;
        self.share.shrink(self.bytes.len() as u64);
        Ok(Bytes::from_owner(FetchedBytes { bytes: self.bytes, _share: self.share }))
    }

    fn check(&self) -> Result<(), Failure> {
        let (read, max_bytes, limit) = (self.bytes.len() as u64, self.max_bytes, self.limit);
        match self.size {
            Some(size) if read != size => Err(Failure::Unavailable(format!(
                "should have {size} bytes, and {} came",
                received(read, size)
            ))),
            None if read > max_bytes => Err(Failure::TooLarge(format!(
                "has more than the {max_bytes} bytes that this pool takes ({limit})"
            ))),
            _ => Ok(()),
        }
    }
}

/// The number of bytes that came, for an error message. It is unknown if there were more than the declared size,
/// because reading stops one byte after it.
fn received(read: u64, size: u64) -> String {
    if read > size { "more".to_owned() } else { read.to_string() }
}

/// Does blocking work on a separate thread. The worker does not wait for this thread when it ends.
async fn on_thread<T: Send + 'static>(
    permit: &Arc<impl Send + Sync + 'static>,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let (done, result) = oneshot::channel();
    let permit = permit.clone();
    let work = move || {
        let _ = done.send(work());
        drop(permit);
    };
    let failed =
        |error: &dyn std::fmt::Display| Failure::Unavailable(format!("cannot be fetched now: {error}"));
    thread::Builder::new().name("fetch".to_owned()).spawn(work).map_err(|error| failed(&error))?;
    result.await.map_err(|error| failed(&error))?
}

#[cfg(test)]
mod tests;
