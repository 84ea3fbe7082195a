//! Which tokens may come next where the text must be JSON or match a regular expression. llguidance decides it, in
//! processes of its own, because a grammar is a program of a stranger. This file is the worker's side: it starts the
//! server process, has each grammar built once, and asks for the masks of each sequence.
//!
//! | file | decides |
//! |---|---|
//! | `server` | what the processes do |
//! | `budget` | what one operation of theirs may cost |
//! | `wire` | what is written between them and the worker |

mod budget;
mod server;
mod wire;

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use llguidance::api::TopLevelGrammar;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use serde_json::json;
use sha2::{Digest, Sha256};

pub use self::budget::Allocator;
use self::budget::Budget;
pub use self::server::serve;
use self::wire::{FrameKind, read_frame, send_socket, write_frame};
use crate::model::load::vocabulary::TokenTexts;
use crate::model::{TaskError, TaskErrorKind};
use crate::protocol::generate::Format;

/// The command with which this program runs as a grammar server.
pub const COMMAND: &str = "grammar-server";
/// Marks a token that is no text, for llguidance.
const SPECIAL: u8 = 0xff;
/// Grammars whose builders are kept after their last sequence, and whose refusals are remembered.
const REMEMBERED: usize = 16;
/// The longest regular expression, in bytes. The time to build one grows with the square of its length: optional letters
/// of this length take about 0.3 s.
const EXPRESSION: usize = 8 << 10;
/// The most optional properties of one object. llguidance keeps about four items for each, and refuses an object with more
/// than 2,000 of them at its first token, after a time that grows with the square of their number: 4,000 properties take
/// 2 s.
const OPTIONAL: usize = 490;
/// How long the worker waits for a builder. Its processor time ends it far sooner, unless the machine is overloaded; then
/// the task is tried again.
const BUILDING: Duration = Duration::from_secs(20);
/// The same for one mask. Meanwhile no other sequence advances.
const MASKING: Duration = Duration::from_secs(3);

/// The program that serves grammars. Set by tests, whose own program does not.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Names the program that serves grammars, for test programs; otherwise it is the running one.
pub fn set_program(program: impl Into<PathBuf>) {
    let _ = PROGRAM.set(program.into());
}

/// Builds grammars for one model's tokens.
pub struct Grammars {
    vocabulary: Vec<u8>,
    /// Started for the first grammar. Locked while a grammar is built: one is built at a time.
    server: Mutex<Option<Server>>,
    /// Locked for a few instructions.
    known: Mutex<Known>,
}

/// The grammars used last, and what became of each; the latest is first.
#[derive(Default)]
struct Known(VecDeque<(Fingerprint, Verdict)>);

/// A grammar's builder, or why the grammar is refused.
type Verdict = Result<Arc<Builder>, String>;

/// The hash of a grammar's text.
type Fingerprint = [u8; 32];

impl Known {
    /// What became of a grammar, if that is known and its builder lives.
    fn find(&mut self, fingerprint: Fingerprint) -> Option<Verdict> {
        let (_, verdict) = self.0.remove(self.0.iter().position(|(of, _)| *of == fingerprint)?)?;
        if verdict.as_ref().is_ok_and(|builder| !builder.lives()) {
            return None;
        }
        self.add(fingerprint, verdict.clone());
        Some(verdict)
    }

    fn add(&mut self, fingerprint: Fingerprint, verdict: Verdict) {
        self.0.push_front((fingerprint, verdict));
        self.0.truncate(REMEMBERED);
    }
}

/// A grammar that is not known.
pub struct Grammar {
    text: Vec<u8>,
    fingerprint: Fingerprint,
}

/// What is known of a format.
pub enum Found {
    /// Any text has it.
    Any,
    /// Its grammar was built before.
    Known(Constraint),
    /// Its grammar is to be built by [`Grammars::build`].
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
    /// A builder writes nothing after its verdict, so that its socket can only be silent or at its end.
    fn lives(&self) -> bool {
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
        let (socket, theirs) = UnixStream::pair()?;
        // Not by its path: the file may have been replaced by a new version.
        let program = PROGRAM.get().cloned().unwrap_or_else(|| "/proc/self/exe".into());
        let process = Command::new(program)
            .arg(COMMAND)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // Control lines and logs are the worker's, and their pipes must close when it ends.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Memory that a builder has freed goes back at once.
            .env("MIMALLOC_PURGE_DELAY", "0")
            .spawn()?;
        let server = Self { process, socket };
        server.socket.set_write_timeout(Some(BUILDING))?;
        write_frame(&server.socket, FrameKind::Data, vocabulary)?;
        Ok(server)
    }
}

/// A socket to a new child of the process at the other end of `parent`.
fn child_of(parent: &UnixStream, patience: Duration) -> io::Result<UnixStream> {
    let (socket, theirs) = UnixStream::pair()?;
    socket.set_read_timeout(Some(patience))?;
    socket.set_write_timeout(Some(patience))?;
    send_socket(parent, &theirs)?;
    Ok(socket)
}

impl Grammars {
    /// For a vocabulary of `vocab_size` tokens. `ends` are the tokens that end an answer; at least one.
    ///
    /// # Errors
    /// The reason why answers of this model cannot be constrained.
    pub fn new(texts: &TokenTexts, vocab_size: usize, ends: &BTreeSet<u32>) -> Result<Self, String> {
        let end = ends.first().copied().ok_or("the model has no token that ends an answer")?;
        let word = |id: u32| match texts.get(id) {
            [] => [&[SPECIAL][..], format!("<|{id}|>").as_bytes()].concat(),
            text => text.to_vec(),
        };
        let count = u32::try_from(vocab_size).map_err(|error| error.to_string())?;
        let vocabulary = server::vocabulary_frame(end, (0..count).map(word));
        Ok(Self { vocabulary, server: Mutex::default(), known: Mutex::default() })
    }

    /// What is known of a format. Takes no longer than usual.
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
        match self.known().find(fingerprint) {
            Some(verdict) => Ok(Found::Known(Constraint(verdict.map_err(refused)?))),
            None => Ok(Found::Unknown(Grammar { text, fingerprint })),
        }
    }

    /// Builds a grammar. Blocks until that is done.
    ///
    /// # Errors
    /// `BadInput` for a schema or an expression that cannot be used or costs too much; `Fault` where its process ended
    /// for another reason: the task is tried again.
    pub fn build(&self, grammar: &Grammar) -> Result<Constraint, TaskError> {
        let Grammar { text, fingerprint } = grammar;
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        // Another task may have had it built meanwhile.
        let known = self.known().find(*fingerprint);
        let verdict = match known {
            Some(verdict) => verdict,
            None => {
                let verdict = self.built(&mut server, text)?;
                self.known().add(*fingerprint, verdict.clone());
                verdict
            }
        };
        Ok(Constraint(verdict.map_err(refused)?))
    }

    /// Has a grammar built by the server. One that has ended is started again.
    fn built(&self, server: &mut Option<Server>, grammar: &[u8]) -> Result<Verdict, TaskError> {
        let mut frame = Vec::new();
        let mut attempt = |server: &Server| {
            let socket = child_of(&server.socket, BUILDING)?;
            write_frame(&socket, FrameKind::Data, grammar)?;
            Ok((read_frame(&socket, &mut frame)?, socket))
        };
        let running = server.take().map(|server| (attempt(&server), server));
        let (answer, running) = match running {
            Some((Ok(answer), running)) => (answer, running),
            // Either the server or the builder has ended. A new server tells which: if its builder fails too, the task fails.
            _ => {
                let server = Server::start(&self.vocabulary).map_err(|error| fault(&error))?;
                (attempt(&server).map_err(|error| fault(&error))?, server)
            }
        };
        *server = Some(running);
        let (status, socket) = answer;
        Ok(match status {
            FrameKind::Data => Ok(Arc::new(Builder(socket))),
            FrameKind::Refused => Err(String::from_utf8_lossy(&frame).into_owned()),
            FrameKind::TooCostly => Err(too_costly("building it", server::BUILD)),
        })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
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

/// What the time to build a grammar grows with the square of.
#[derive(Clone, Copy, Default)]
struct Sizes {
    /// The bytes of the longest expression: values of `pattern`, and names in `patternProperties`.
    expression: usize,
    /// The most optional properties of one object.
    optional: usize,
}

impl Sizes {
    fn of(schema: &serde_json::Value) -> Self {
        use serde_json::Value;
        let mut most = Self::default();
        let mut include = |Self { expression, optional }| {
            most.expression = most.expression.max(expression);
            most.optional = most.optional.max(optional);
        };
        match schema {
            Value::Object(fields) => {
                let names = |of: &str| fields.get(of).and_then(Value::as_object);
                let pattern = fields.get("pattern").and_then(Value::as_str).map(str::len);
                let patterns = names("patternProperties").and_then(|all| all.keys().map(String::len).max());
                let required = fields.get("required").and_then(Value::as_array);
                let required: BTreeSet<&str> =
                    required.into_iter().flatten().filter_map(Value::as_str).collect();
                let properties = names("properties").into_iter().flat_map(|all| all.keys());
                include(Self {
                    expression: pattern.max(patterns).unwrap_or_default(),
                    optional: properties.filter(|name| !required.contains(name.as_str())).count(),
                });
                fields.values().map(Self::of).for_each(include);
            }
            Value::Array(items) => items.iter().map(Self::of).for_each(include),
            _ => {}
        }
        most
    }

    fn check(self) -> Result<(), TaskError> {
        let Self { expression, optional } = self;
        if expression > EXPRESSION {
            return Err(refused(format!(
                "an expression has {expression} bytes; at most {EXPRESSION} are taken"
            )));
        }
        if optional > OPTIONAL {
            return Err(refused(format!(
                "an object has {optional} optional properties; at most {OPTIONAL} are taken"
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

/// The processes of the grammar ended without a verdict.
fn fault(error: &io::Error) -> TaskError {
    TaskError::new(TaskErrorKind::Fault, format!("the process that serves response_format: {error}"))
}

/// What the text of an answer must be. Clones share the grammar.
#[derive(Clone)]
pub struct Constraint(Arc<Builder>);

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Constraint")
    }
}

impl Constraint {
    /// Begins a sequence: has its matcher forked, which sends the first mask at once (the builder computed it with the
    /// grammar).
    ///
    /// # Errors
    /// `Fault` if the grammar's process has ended.
    pub fn begin(&self) -> Result<Masks, TaskError> {
        let Builder(socket) = &*self.0;
        let socket = child_of(socket, MASKING).map_err(|error| fault(&error))?;
        Ok(Masks { socket, allowed: Vec::new(), is_read: false })
    }
}

/// What may come next in one sequence.
pub struct Masks {
    socket: UnixStream,
    /// A bit for each token that may come next, in little-endian words.
    allowed: Vec<u8>,
    /// Whether `allowed` is the mask of the next token. A step that fails is computed again, with the same mask.
    is_read: bool,
}

impl Masks {
    /// Makes tokens that may not come next impossible.
    ///
    /// # Errors
    /// `BadInput` if nothing may come next or the mask costs too much, `Fault` if its process has ended.
    pub fn apply(&mut self, logits: &mut [f32]) -> Result<(), TaskError> {
        if !self.is_read {
            match read_frame(&self.socket, &mut self.allowed).map_err(|error| fault(&error))? {
                FrameKind::Data => self.is_read = true,
                FrameKind::Refused => {
                    return Err(refused(String::from_utf8_lossy(&self.allowed).into_owned()));
                }
                FrameKind::TooCostly => {
                    return Err(refused(too_costly("finding the next token", server::MASK)));
                }
            }
        }
        for (id, x) in logits.iter_mut().enumerate() {
            let bits = self.allowed.get(id / 8).copied().unwrap_or_default();
            if bits >> (id % 8) & 1 == 0 {
                *x = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Records the token that was chosen. The next mask is computed meanwhile. If the sequence's process has ended,
    /// [`Masks::apply`] says so.
    pub fn take(&mut self, id: u32) {
        self.is_read = false;
        let _ = write_frame(&self.socket, FrameKind::Data, &id.to_le_bytes());
    }
}
