//! Decides which tokens may come next if the text must be JSON or match a regular expression. llguidance computes this
//! in separate processes, because a grammar is untrusted input. This file is the worker's side: it starts the server
//! process, lets it build each grammar once, and requests the masks of each sequence.
//!
//! | file | decides |
//! |---|---|
//! | `server` | the work of the processes |
//! | `budget` | the limits of one of their operations |
//! | `defects` | what is refused because llguidance compiles it wrongly |
//! | `wire` | the messages between them and the worker |

mod budget;
mod defects;
mod server;
mod wire;

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use llguidance::api::TopLevelGrammar;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};
use parking_lot::Mutex;
use serde_json::json;
use sha2::{Digest, Sha256};

pub use self::budget::Allocator;
use self::budget::Budget;
pub use self::server::serve;
use self::wire::{FrameKind, read_frame, send_socket, write_frame};
use crate::model::load::vocabulary::TokenTexts;
use crate::model::{TaskError, TaskErrorKind};

/// The command with which this program runs as a grammar server.
pub const COMMAND: &str = "grammar-server";
/// The first byte of a token without text, for llguidance.
const SPECIAL: u8 = 0xff;
/// The number of grammars that are remembered. Their builders, or the refusals, are kept after the last sequence.
const MAX_KNOWN: usize = 16;
/// The longest regular expression, in bytes. The time to build it grows with the square of its length: an expression of
/// this length that consists of optional letters takes about 0.3 s.
const MAX_EXPRESSION_BYTES: usize = 8 << 10;
/// The largest number of optional properties of one object. llguidance keeps about four items for each. It refuses an
/// object with more than 2,000 items at its first token, after a time that grows with the square of the number of
/// properties: 4,000 properties take 2 s.
const MAX_OPTIONAL: usize = 490;
/// How long the worker waits for a builder. The limit of its processor time ends it far sooner, unless the machine is
/// overloaded; in that case the task is tried again.
const BUILD_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the worker waits for one mask. Meanwhile other sequences advance.
const MASK_TIMEOUT: Duration = Duration::from_secs(3);

/// The form that the generated text must have.
#[derive(Clone, Debug, PartialEq)]
pub enum Format {
    /// Any text.
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that fits this schema. The schema itself is a JSON object.
    JsonSchema(serde_json::Value),
    /// A text that this regular expression matches as a whole.
    Regex(String),
}

/// The program that serves grammars. Only tests set it, since a test program does not serve grammars itself.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the program that serves grammars, for test programs. By default it is the running program.
pub fn set_program(program: impl Into<PathBuf>) {
    let _ = PROGRAM.set(program.into());
}

/// Builds grammars for one model's tokens.
pub struct Grammars {
    vocabulary: Vec<u8>,
    /// Started for the first grammar. Locked while a grammar is built, so that one is built at a time.
    server: Mutex<Option<Server>>,
    /// Locked for a few instructions.
    known: Mutex<Known>,
}

/// The last grammars and the verdict on each; the latest is first.
#[derive(Default)]
struct Known(VecDeque<(Fingerprint, Verdict)>);

/// A grammar's builder, or why the grammar is refused.
type Verdict = Result<Arc<Builder>, String>;

/// The hash of a grammar's text.
type Fingerprint = [u8; 32];

impl Known {
    /// The verdict on a grammar, if it is known and the grammar's builder is running.
    fn find(&mut self, fingerprint: Fingerprint) -> Option<Verdict> {
        let (_, verdict) = self.0.remove(self.0.iter().position(|(known, _)| *known == fingerprint)?)?;
        if verdict.as_ref().is_ok_and(|builder| !builder.is_running()) {
            return None;
        }
        self.add(fingerprint, verdict.clone());
        Some(verdict)
    }

    fn add(&mut self, fingerprint: Fingerprint, verdict: Verdict) {
        self.0.push_front((fingerprint, verdict));
        self.0.truncate(MAX_KNOWN);
    }
}

/// A grammar that was not built yet.
pub struct Grammar {
    text: Vec<u8>,
    fingerprint: Fingerprint,
}

/// The result of looking up a format.
pub enum Found {
    /// The format allows any text.
    Any,
    /// Its grammar was built before.
    Known(Constraint),
    /// Its grammar must be built by [`Grammars::build`].
    Unknown(Grammar),
}

/// The server process. It ends when its socket is closed.
struct Server {
    process: Child,
    socket: UnixStream,
}

/// The process that holds a grammar. It ends when this is dropped.
struct Builder(UnixStream);

impl Builder {
    /// Whether the process is running. It writes nothing after its verdict, so its socket is either silent or closed.
    fn is_running(&self) -> bool {
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        recv(self.0.as_raw_fd(), &mut [0], flags) == Err(Errno::EAGAIN)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let _ = self.process.wait();
    }
}

impl Server {
    fn start(vocabulary: &[u8]) -> io::Result<Self> {
        let (socket, remote) = UnixStream::pair()?;
        // Not the program's path, since the file may have been replaced by a new version.
        let program = PROGRAM.get().cloned().unwrap_or_else(|| "/proc/self/exe".into());
        let process = Command::new(program)
            .arg(COMMAND)
            .stdin(Stdio::from(OwnedFd::from(remote)))
            // Control lines and logs belong to the worker, and their pipes must close when it ends.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Memory that a builder has freed is returned to the system at once.
            .env("MIMALLOC_PURGE_DELAY", "0")
            .spawn()?;
        let server = Self { process, socket };
        server.socket.set_write_timeout(Some(BUILD_TIMEOUT))?;
        write_frame(&server.socket, FrameKind::Data, vocabulary)?;
        Ok(server)
    }
}

/// A socket to a new child of the process at the other end of `parent`.
fn child_of(parent: &UnixStream, timeout: Duration) -> io::Result<UnixStream> {
    let (socket, remote) = UnixStream::pair()?;
    socket.set_read_timeout(Some(timeout))?;
    socket.set_write_timeout(Some(timeout))?;
    send_socket(parent, &remote)?;
    Ok(socket)
}

impl Grammars {
    /// Prepares the vocabulary of `vocab_size` tokens. `ends` are the tokens that end an answer; there must be one.
    ///
    /// # Errors
    /// The reason why answers of this model cannot be constrained.
    pub fn new(texts: &TokenTexts, vocab_size: usize, ends: &BTreeSet<u32>) -> Result<Self, String> {
        let end = ends.first().copied().ok_or("the model has no token that ends an answer")?;
        let token = |id: u32| match texts.get(id) {
            [] => [&[SPECIAL][..], format!("<|{id}|>").as_bytes()].concat(),
            text => text.to_vec(),
        };
        let count = u32::try_from(vocab_size).map_err(|error| error.to_string())?;
        let vocabulary = server::vocabulary_frame(end, (0..count).map(token));
        Ok(Self { vocabulary, server: Mutex::default(), known: Mutex::default() })
    }

    /// Looks up a format. Takes no longer than [`Effort::Usual`](crate::model::Effort::Usual).
    ///
    /// # Errors
    /// `BadInput` for a schema or an expression that is known to be refused, or that is too long.
    pub fn find(&self, format: &Format) -> Result<Found, TaskError> {
        let grammar = match format {
            Format::Text => return Ok(Found::Any),
            Format::JsonObject => json_grammar(json!({"type": "object"})),
            Format::JsonSchema(schema) => json_grammar(schema.clone()),
            Format::Regex(expression) => TopLevelGrammar::from_regex(expression),
        };
        let sizes = match format {
            Format::JsonSchema(schema) => Sizes::of(schema),
            Format::Regex(expression) => Sizes { expression: expression.len(), optional: 0 },
            Format::Text | Format::JsonObject => Sizes::default(),
        };
        sizes.check()?;
        let text = serde_json::to_vec(&grammar).map_err(|error| TaskError::internal(error.to_string()))?;
        let fingerprint: Fingerprint = Sha256::digest(&text).into();
        match self.known.lock().find(fingerprint) {
            Some(verdict) => Ok(Found::Known(Constraint(verdict.map_err(refused)?))),
            None => Ok(Found::Unknown(Grammar { text, fingerprint })),
        }
    }

    /// Builds a grammar. Blocks until that is done.
    ///
    /// # Errors
    /// `BadInput` for a schema or an expression that cannot be used or costs too much. `Fault` if its process ended for
    /// another reason; the task is then tried again.
    pub fn build(&self, grammar: &Grammar) -> Result<Constraint, TaskError> {
        let Grammar { text, fingerprint } = grammar;
        let mut server = self.server.lock();
        // It may have been built for another task meanwhile.
        let known = self.known.lock().find(*fingerprint);
        let verdict = match known {
            Some(verdict) => verdict,
            None => {
                let verdict = self.request_build(&mut server, text)?;
                self.known.lock().add(*fingerprint, verdict.clone());
                verdict
            }
        };
        Ok(Constraint(verdict.map_err(refused)?))
    }

    /// Requests a grammar from the server. A server that has ended is started again.
    fn request_build(&self, server: &mut Option<Server>, grammar: &[u8]) -> Result<Verdict, TaskError> {
        let mut frame = Vec::new();
        let mut attempt = |server: &Server| {
            let socket = child_of(&server.socket, BUILD_TIMEOUT)?;
            write_frame(&socket, FrameKind::Data, grammar)?;
            Ok((read_frame(&socket, &mut frame)?, socket))
        };
        let running = server.take().map(|server| (attempt(&server), server));
        let (reply, running) = match running {
            Some((Ok(reply), running)) => (reply, running),
            // Either the server or the builder has ended. If the builder fails with a new server too, the task fails.
            _ => {
                let server = Server::start(&self.vocabulary).map_err(|error| fault(&error))?;
                (attempt(&server).map_err(|error| fault(&error))?, server)
            }
        };
        *server = Some(running);
        let (kind, socket) = reply;
        Ok(match kind {
            FrameKind::Data => Ok(Arc::new(Builder(socket))),
            FrameKind::Refused | FrameKind::DeadEnd => Err(String::from_utf8_lossy(&frame).into_owned()),
            FrameKind::TooCostly => Err(too_costly("building it", server::BUILD)),
        })
    }
}

/// The grammar of a schema. Optional whitespace is forbidden: a small model may emit nothing else until `max_tokens`.
fn json_grammar(mut schema: serde_json::Value) -> TopLevelGrammar {
    if let Some(schema) = schema.as_object_mut() {
        let spaces = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        schema.insert("x-guidance".to_owned(), spaces);
    }
    TopLevelGrammar::from_json_schema(schema)
}

/// The sizes of a format. The time to build its grammar grows with the square of each.
#[derive(Clone, Copy, Default)]
struct Sizes {
    /// The bytes of the longest expression: values of `pattern`, and names in `patternProperties`.
    expression: usize,
    /// The largest number of optional properties of one object.
    optional: usize,
}

impl Sizes {
    fn of(schema: &serde_json::Value) -> Self {
        use serde_json::Value;
        let mut largest = Self::default();
        let mut include = |Self { expression, optional }| {
            largest.expression = largest.expression.max(expression);
            largest.optional = largest.optional.max(optional);
        };
        match schema {
            Value::Object(fields) => {
                let object = |field: &str| fields.get(field).and_then(Value::as_object);
                let pattern = fields.get("pattern").and_then(Value::as_str).map(str::len);
                let patterns = object("patternProperties").and_then(|all| all.keys().map(String::len).max());
                let required = fields.get("required").and_then(Value::as_array);
                let required: BTreeSet<&str> =
                    required.into_iter().flatten().filter_map(Value::as_str).collect();
                let properties = object("properties").into_iter().flat_map(|all| all.keys());
                include(Self {
                    expression: pattern.max(patterns).unwrap_or_default(),
                    optional: properties.filter(|name| !required.contains(name.as_str())).count(),
                });
                fields.values().map(Self::of).for_each(include);
            }
            Value::Array(items) => items.iter().map(Self::of).for_each(include),
            _ => {}
        }
        largest
    }

    fn check(self) -> Result<(), TaskError> {
        let Self { expression, optional } = self;
        if expression > MAX_EXPRESSION_BYTES {
            return Err(refused(format!(
                "an expression has {expression} bytes; at most {MAX_EXPRESSION_BYTES} are taken"
            )));
        }
        if optional > MAX_OPTIONAL {
            return Err(refused(format!(
                "an object has {optional} optional properties; at most {MAX_OPTIONAL} are taken"
            )));
        }
        Ok(())
    }
}

fn too_costly(what: &str, Budget { allocated, held, .. }: Budget) -> String {
    let (allocated, held) = (allocated >> 20, held >> 20);
    format!(
        "{what} takes more than {allocated} MiB of allocations, or {held} MiB at once; write a simpler schema or expression"
    )
}

fn refused(reason: String) -> TaskError {
    TaskError::bad_input("response_format", format!("response_format cannot be used: {reason}"))
}

/// The error for a grammar whose process ended without a verdict.
fn fault(error: &io::Error) -> TaskError {
    TaskError::new(TaskErrorKind::Fault, format!("the process that serves response_format: {error}"))
}

/// The grammar that the text of an answer must match. Clones share the grammar's process.
#[derive(Clone)]
pub struct Constraint(Arc<Builder>);

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Constraint")
    }
}

impl Constraint {
    /// Begins a sequence: the grammar's process forks a matcher for it. The matcher sends the first mask at once, which
    /// the builder computed together with the grammar.
    ///
    /// # Errors
    /// `Fault` if the grammar's process has ended.
    pub fn begin(&self) -> Result<Masks, TaskError> {
        let Builder(socket) = &*self.0;
        Ok(Masks::from(child_of(socket, MASK_TIMEOUT).map_err(|error| fault(&error))?))
    }
}

/// The tokens that may come next in one sequence.
pub struct Masks {
    socket: UnixStream,
    /// A bit for each token that may come next, in little-endian words.
    allowed: Vec<u8>,
    /// The mask of the next token. A step that fails is computed again, with the same mask.
    next: NextMask,
}

/// The mask of the next token.
enum NextMask {
    /// It is awaited since this time.
    Awaited(Instant),
    /// It is in [`Masks::allowed`].
    Here,
    /// There is none, for this reason.
    Failed(TaskError),
}

impl From<UnixStream> for Masks {
    /// The masks that come from this socket.
    fn from(socket: UnixStream) -> Self {
        Self { socket, allowed: Vec::new(), next: NextMask::Awaited(Instant::now()) }
    }
}

impl Masks {
    /// Whether the mask of the next token has not arrived yet, so far as [`Masks::receive`] knows.
    pub fn is_awaited(&self) -> bool {
        matches!(self.next, NextMask::Awaited(_))
    }

    /// Reads the mask of the next token if it has arrived. Does not wait.
    pub fn receive(&mut self) {
        let NextMask::Awaited(since) = self.next else { return };
        if is_any_readable(&[self], Duration::ZERO) {
            self.next = match self.read() {
                Ok(()) => NextMask::Here,
                Err(error) => NextMask::Failed(error),
            };
        } else if since.elapsed() > MASK_TIMEOUT {
            self.next = NextMask::Failed(fault(&io::ErrorKind::TimedOut.into()));
        }
    }

    fn read(&mut self) -> Result<(), TaskError> {
        match read_frame(&self.socket, &mut self.allowed).map_err(|error| fault(&error))? {
            FrameKind::Data => Ok(()),
            FrameKind::Refused => Err(refused(String::from_utf8_lossy(&self.allowed).into_owned())),
            // The first tokens were found when the format was built. So a dead end comes from a part of the format
            // that allows no text, or from a mistake of llguidance; nobody here can tell which.
            FrameKind::DeadEnd => {
                Err(TaskError::internal("response_format: the text so far has no continuation"))
            }
            FrameKind::TooCostly => Err(refused(too_costly("finding the next token", server::MASK))),
        }
    }

    /// A bit for each token that may come next. Bits that are missing at the end are 0.
    ///
    /// # Errors
    /// `Internal` if no token may come next, `BadInput` if the mask cannot be computed within its limits, `Fault` if the
    /// matcher has ended or has not answered in time.
    pub fn allowed(&self) -> Result<&[u8], TaskError> {
        match &self.next {
            NextMask::Here => Ok(&self.allowed),
            NextMask::Failed(error) => Err(error.clone()),
            NextMask::Awaited(_) => Err(TaskError::internal("the mask of the next token was not received")),
        }
    }

    /// Sets the logits of all tokens that may not come next to -∞.
    ///
    /// # Errors
    /// As [`Masks::allowed`].
    pub fn apply(&self, logits: &mut [f32]) -> Result<(), TaskError> {
        let allowed = self.allowed()?;
        for (id, x) in logits.iter_mut().enumerate() {
            let bits = allowed.get(id / 8).copied().unwrap_or_default();
            if bits >> (id % 8) & 1 == 0 {
                *x = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Records the chosen token. The matcher then computes the next mask in the background. If the matcher has ended,
    /// [`Masks::allowed`] returns the error.
    pub fn take(&mut self, id: u32) {
        self.next = NextMask::Awaited(Instant::now());
        let _ = write_frame(&self.socket, FrameKind::Data, &id.to_le_bytes());
    }
}

/// Whether a mask can be read from one of these sockets. Waits for the first one for at most `patience`.
pub fn is_any_readable(masks: &[&Masks], patience: Duration) -> bool {
    let mut sockets: Vec<PollFd<'_>> =
        masks.iter().map(|masks| PollFd::new(masks.socket.as_fd(), PollFlags::POLLIN)).collect();
    let patience = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
    // After an error the next call says the same.
    poll(&mut sockets, patience).is_ok_and(|readable| readable > 0)
}
