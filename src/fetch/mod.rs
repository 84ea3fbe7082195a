//! Fetches the files that tasks name by a URL instead of sending them (`pool.allowed_sources`). Decides what is
//! fetched, and bounds its size, its time, and the memory of all that is fetched. Owns the threads that fetch. Does not
//! know what the files hold, nor who waits for them.
//!
//! | file | decides |
//! |---|---|
//! | `allowed` | whether the settings admit a URL, and where its file is |
//! | `address` | which addresses are public |
//! | `file` | opens files below a folder |
//! | `web` | opens files on servers |
//! | `budget` | how many bytes a requester may hold |

mod address;
mod allowed;
mod budget;
mod file;
mod web;

use std::io::{self, Read};
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
use crate::config::{AllowedSource, Fetch, Pool, S3};

/// The first size, in bytes, of the buffer for a file whose size is not known, and the step by which a file is read.
const STEP: usize = 64 << 10;
/// How long a fetch waits while the worker holds too many bytes. It is short, because the fetch has a turn meanwhile,
/// and bytes may be held until a recording is transcribed.
const MEMORY_WAIT: Duration = Duration::from_secs(1);
/// How long the signature of a URL is valid. The request is made at once.
const SIGNED_FOR: Duration = Duration::from_secs(60);

/// Why a file is not fetched. The text is to be put after its URL.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    /// Another try would end the same.
    Refused(String),
    /// It is larger than this pool takes.
    TooLarge(String),
    /// It may be there later.
    Unavailable(String),
    /// The worker holds too many bytes of files now. This is not the file's fault.
    Crowded,
}

/// Fetches files for the tasks of one worker.
pub struct Fetcher {
    allowed: Vec<AllowedSource>,
    limits: Fetch,
    s3: S3,
    budget: Budget,
    /// Made by the first fetch by TLS.
    tls: OnceLock<Arc<rustls::ClientConfig>>,
}

/// Whose fetch it is, and whether it waits while too much is held.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// The hash of the requester's name.
    pub requester: u64,
    /// Whether the fetch waits while the worker holds too many bytes. If not, it may exceed the limit.
    pub waits: bool,
    /// The most bytes of the file; `fetch.max_size` bounds it too.
    pub max_size: u64,
    /// Bytes of the task's files that were fetched before. They are held until the task ends.
    pub held: u64,
}

/// An open file, with its size if it is known.
struct Source {
    content: Box<dyn Read + Send>,
    size: Option<u64>,
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
    /// None if the pool admits no source.
    pub fn new(pool: &Pool) -> Option<Self> {
        let allowed = pool.allowed_sources.clone();
        let (limits, s3, tls) = (pool.fetch.clone(), pool.s3.clone(), OnceLock::new());
        let budget = Budget::new(limits.memory);
        (!allowed.is_empty()).then_some(Self { allowed, limits, s3, budget, tls })
    }

    /// Finds out where the file of a URL is.
    ///
    /// # Errors
    /// The URL is not admitted.
    pub fn locate(&self, url: &str) -> Result<Location, Failure> {
        allowed::locate(url, &self.allowed).map_err(Failure::Refused)
    }

    /// Fetches a file. If this call is cancelled, the thread that reads the file ends at the deadline. `turn` is
    /// the caller's permit: each thread of this fetch holds it, so that permits bound the number of threads.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn fetch(
        &self,
        location: Location,
        claim: Claim,
        turn: Arc<impl Send + Sync + 'static>,
    ) -> Result<Bytes, Failure> {
        let until = Instant::now() + self.limits.timeout;
        let late = |_| Failure::Unavailable(format!("is not there within {:?}", self.limits.timeout));
        let source = timeout_at(until, self.open(location, until, &turn)).await.map_err(late)??;
        let most = self.limits.max_size.min(claim.max_size);
        if let Some(size) = source.size.filter(|size| *size > most) {
            return Err(Failure::TooLarge(format!("has {size} bytes; this pool takes at most {most}")));
        }
        let expected = source.size.unwrap_or(most);
        let for_requester = self.limits.memory / 2;
        if claim.held > 0 && claim.held.saturating_add(expected) > for_requester {
            let held = claim.held;
            return Err(Failure::TooLarge(format!(
                "has up to {expected} bytes, and the task's files before it have {held}; \
                 together they may have {for_requester}"
            )));
        }
        let share = if claim.waits {
            let share = timeout(MEMORY_WAIT, self.budget.take(claim.requester, expected)).await;
            share.map_err(|_| Failure::Crowded)?
        } else {
            self.budget.exceed(claim.requester, expected)
        };
        let reading = on_thread(&turn, move || read(source, most, until, share));
        timeout_at(until, reading).await.map_err(late)?
    }

    async fn open(
        &self,
        location: Location,
        until: Instant,
        turn: &Arc<impl Send + Sync + 'static>,
    ) -> Result<Source, Failure> {
        match location {
            Location::File { folder, path } => {
                on_thread(turn, move || {
                    let (file, size) = file::open_below(&folder, &path)?;
                    Ok(Source { content: Box::new(file), size: Some(size) })
                })
                .await
            }
            Location::Web { url, private } => self.open_url(url, private, until, turn).await,
            Location::Bucket { bucket, key, private } => {
                self.open_url(self.signed(&bucket, &key)?, private, until, turn).await
            }
        }
    }

    async fn open_url(
        &self,
        url: Url,
        private: bool,
        until: Instant,
        turn: &Arc<impl Send + Sync + 'static>,
    ) -> Result<Source, Failure> {
        let addresses = web::resolve(&url, private, until).await?;
        let tls = match self.tls.get() {
            Some(tls) => tls.clone(),
            None => {
                let error = |error| Failure::Unavailable(format!("no certificates can be verified: {error}"));
                let made = web::tls().map_err(error)?;
                self.tls.get_or_init(|| made).clone()
            }
        };
        on_thread(turn, move || web::open(&url, addresses, tls, until)).await
    }

    /// The URL of an object, signed with the credentials of the settings.
    fn signed(&self, bucket: &str, key: &str) -> Result<Url, Failure> {
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
        Ok(bucket.get_object(credentials.as_ref(), key).sign(SIGNED_FOR))
    }
}

/// Reads a whole file.
fn read(source: Source, most: u64, until: Instant, mut share: Share) -> Result<Bytes, Failure> {
    let Source { content, size } = source;
    let mut bytes = Vec::new();
    let room = size.unwrap_or(STEP as u64).min(most) as usize;
    let no_memory = |_| Failure::Unavailable("does not fit into the worker's memory now".to_owned());
    bytes.try_reserve_exact(room).map_err(no_memory)?;
    // One byte more shows a file that is longer than it should be.
    let mut content = content.take(size.unwrap_or(most).saturating_add(1));
    loop {
        let read = io::copy(&mut (&mut content).take(STEP as u64), &mut bytes);
        let read =
            read.map_err(|error| Failure::Unavailable(format!("is not read to its end: {}", error.kind())))?;
        if read == 0 {
            break;
        }
        if Instant::now() >= until {
            return Err(Failure::Unavailable("is not read to its end in time".to_owned()));
        }
    }
    let read = bytes.len() as u64;
    match size {
        Some(size) if read != size => {
            Err(Failure::Unavailable(format!("should have {size} bytes, and {} came", shown(read, size))))
        }
        None if read > most => {
            Err(Failure::TooLarge(format!("has more than the {most} bytes that this pool takes")))
        }
        _ => {
            share.shrink(read);
            Ok(Bytes::from_owner(FetchedBytes { bytes, _share: share }))
        }
    }
}

/// The number of bytes that came, for a message. Reading stops one byte after the declared size, so that the number
/// of more bytes is not known.
fn shown(read: u64, size: u64) -> String {
    if read > size { "more".to_owned() } else { read.to_string() }
}

/// Does blocking work on a thread of its own, which is not waited for when the worker ends.
async fn on_thread<T: Send + 'static>(
    turn: &Arc<impl Send + Sync + 'static>,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let (done, result) = oneshot::channel();
    let turn = turn.clone();
    let work = move || {
        let _ = done.send(work());
        drop(turn);
    };
    let failed =
        |error: &dyn std::fmt::Display| Failure::Unavailable(format!("cannot be fetched now: {error}"));
    thread::Builder::new().name("fetch".to_owned()).spawn(work).map_err(|error| failed(&error))?;
    result.await.map_err(|error| failed(&error))?
}

#[cfg(test)]
mod tests;
