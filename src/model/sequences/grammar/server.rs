//! The processes that run requesters' grammars. Grammars are untrusted: building one or computing one mask may take any
//! amount of time and memory, and llguidance's work limit ("fuel") does not cover `multipleOf` or intersections of
//! patterns. So grammars run in processes that hold nothing else and may end at any time:
//!
//! - The *server* holds the vocabulary. A worker has one. It forks a builder for each grammar.
//! - A *builder* builds its grammar within [`BUILD`], and reports whether it can be used. It forks a matcher for each
//!   sequence.
//! - A *matcher* computes the masks of its sequence, each within [`MASK`].
//!
//! Each process has one socket to the worker. It receives the sockets of its children over it, and ends when the worker
//! closes it. Forking is safe here, since these processes have one running thread and never touch a device.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use nix::libc;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::unistd::{ForkResult, fork};

use super::budget::{Budget, allocator_is_installed, run_within};
use super::defects;
use super::wire::{FrameKind, read_frame, receive_socket, write_frame};
use crate::protocol::shorten;

/// The budget for building a grammar and computing its first mask. On a 2.6 GHz Xeon, 192 MiB of allocations take 250
/// ms (`multipleOf`), and up to 750 ms for the longest expressions and schemas that are accepted. An object of 150
/// strings takes 5 MiB, an enumeration of 2,000 names 6 MiB, a choice of 300 objects with ranges of numbers 113 MiB.
pub(super) const BUILD: Budget =
    Budget { allocated: 192 << 20, held: 64 << 20, time: Duration::from_secs(4) };
/// The budget for one mask. A mask of a usual schema allocates less than 100 KiB.
pub(super) const MASK: Budget = Budget { allocated: 12 << 20, held: 96 << 20, time: Duration::from_secs(1) };
/// The limit of address space, in bytes, for a process whose allocator does not count.
const UNCOUNTED_ADDRESS_SPACE: u64 = 1 << 30;
/// The largest number of characters of llguidance's reason in an error.
const MAX_REASON: usize = 300;

/// Serves grammars to the worker at the other end of this socket, until the worker closes it.
///
/// # Errors
/// The socket fails, or the vocabulary cannot be used.
pub fn serve(worker: UnixStream) -> io::Result<()> {
    ignore_signals()?;
    let mut frame = Vec::new();
    read_frame(&worker, &mut frame)?;
    let factory = factory(&frame).map_err(io::Error::other)?;
    drop(frame);
    fork_for_each(worker, |worker| run_builder(&factory, worker))
}

/// Ignores the signals that end a process. The worker ends these processes by closing their sockets; a signal to its
/// whole process group, as by Ctrl-C, must not end them while it drains. Ignoring SIGCHLD makes the kernel reap
/// children.
#[expect(unsafe_code, reason = "sigaction(2) is unsafe for the handlers that it could install")]
fn ignore_signals() -> nix::Result<()> {
    for ignored in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD] {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { signal(ignored, SigHandler::SigIgn) }?;
    }
    Ok(())
}

/// Forks a process for each socket that arrives. The child runs `run` on that socket and ends. Returns at the end of
/// the stream.
#[expect(
    unsafe_code,
    reason = "fork(2) is unsafe in a process with other running threads, and _exit(2) is C"
)]
fn fork_for_each(sockets: UnixStream, mut run: impl FnMut(UnixStream) -> io::Result<()>) -> io::Result<()> {
    while let Some(socket) = receive_socket(&sockets)? {
        // SAFETY: the only other thread, the main thread, waits for this one and holds no lock.
        if let ForkResult::Child = unsafe { fork() }? {
            // While this copy is open, the worker would not notice the end of the parent.
            drop(sockets);
            let _ = run(socket);
            // SAFETY: the child must not drop the copies of the parent's values, so it ends without destructors.
            unsafe { libc::_exit(0) };
        }
    }
    Ok(())
}

/// A vocabulary in the form that the server reads: the id of the end token, then each token after its length.
pub(super) fn vocabulary_frame(end: u32, tokens: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut frame = end.to_le_bytes().to_vec();
    for token in tokens {
        frame.extend_from_slice(&(token.len() as u32).to_le_bytes());
        frame.extend_from_slice(&token);
    }
    frame
}

/// Prepares llguidance for a vocabulary.
///
/// # Errors
/// llguidance's reason.
fn factory(vocabulary: &[u8]) -> Result<ParserFactory, String> {
    let number = |bytes: &mut &[u8]| {
        let (number, rest) = bytes.split_first_chunk::<4>()?;
        *bytes = rest;
        Some(u32::from_le_bytes(*number))
    };
    let mut rest = vocabulary;
    let end = number(&mut rest).ok_or("a vocabulary without an end token")?;
    let mut tokens = Vec::new();
    while let Some(length) = number(&mut rest) {
        let (token, after) = rest.split_at_checked(length as usize).ok_or("a vocabulary that is cut off")?;
        tokens.push(token.to_vec());
        rest = after;
    }
    let count = u32::try_from(tokens.len()).map_err(|error| error.to_string())?;
    let trie = TokTrie::from(&TokRxInfo::new(count, end), &tokens);
    let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
    factory.quiet();
    // The state of a parser is of no use to a requester.
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// Runs a builder: reads a grammar, builds it, answers, and forks a matcher for each sequence.
fn run_builder(factory: &ParserFactory, worker: UnixStream) -> io::Result<()> {
    let mut grammar = Vec::new();
    read_frame(&worker, &mut grammar)?;
    if !allocator_is_installed() {
        setrlimit(Resource::RLIMIT_AS, UNCOUNTED_ADDRESS_SPACE, UNCOUNTED_ADDRESS_SPACE)?;
    }
    let built = run_within(BUILD, &worker, || {
        let grammar: TopLevelGrammar = serde_json::from_slice(&grammar).map_err(|error| reason(&error))?;
        let mut schemas = grammar.grammars.iter().filter_map(|part| part.json_schema.as_ref());
        schemas.try_for_each(defects::check)?;
        let mut matcher = Matcher::new(factory.create_parser(grammar));
        let mask = mask(&mut matcher)?.ok_or("no text fits it")?;
        Ok((matcher, mask))
    });
    let (mut matcher, first) = match built {
        Ok(built) => built,
        Err(reason) => return refuse(&worker, reason),
    };
    write_frame(&worker, FrameKind::Data, &[])?;
    fork_for_each(worker, |worker| run_matcher(&mut matcher, &first, &worker))
}

/// Runs a matcher: writes the first mask; then reads each chosen token and writes the mask for the next one.
fn run_matcher(matcher: &mut Matcher, first: &[u8], worker: &UnixStream) -> io::Result<()> {
    write_frame(worker, FrameKind::Data, first)?;
    let mut token = Vec::new();
    while let Ok(FrameKind::Data) = read_frame(worker, &mut token) {
        let next = run_within(MASK, worker, || {
            let id: [u8; 4] = token.as_slice().try_into().map_err(|_| "a token has four bytes")?;
            if !matcher.is_stopped() {
                matcher.consume_token(u32::from_le_bytes(id)).map_err(|error| reason(&error))?;
            }
            mask(matcher)
        });
        match next {
            Ok(Some(next)) => write_frame(worker, FrameKind::Data, &next)?,
            Ok(None) => return write_frame(worker, FrameKind::DeadEnd, &[]),
            Err(reason) => return refuse(worker, reason),
        }
    }
    Ok(())
}

/// The tokens that may come next: a bit for each, in little-endian words of 32 bits. None if no token may come.
fn mask(matcher: &mut Matcher) -> Result<Option<Vec<u8>>, String> {
    // llguidance reports a dead end only by the text of its error.
    let dead_end = format!("{:?}", StopReason::NoExtensionBias);
    let allowed = match matcher.compute_mask_or_eos().map_err(|error| reason(&error)) {
        Ok(allowed) if !allowed.is_zero() => allowed,
        Err(reason) if reason != dead_end => return Err(reason),
        _ => return Ok(None),
    };
    Ok(Some(allowed.as_slice().iter().flat_map(|word| word.to_le_bytes()).collect()))
}

/// llguidance's reason, without the position in the grammar, which the requester did not write.
fn reason(error: &impl std::fmt::Display) -> String {
    let reason = format!("{error:#}");
    let has_no_position = |line: &&str| !line.contains("| start:") && !line.contains("<non-verbose");
    let lines: Vec<&str> = reason.lines().take_while(has_no_position).collect();
    shorten(lines.join("\n").trim_end(), MAX_REASON)
}

fn refuse(worker: &UnixStream, reason: String) -> io::Result<()> {
    write_frame(worker, FrameKind::Refused, reason.as_bytes())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::json_grammar;
    use super::*;

    const TOKENS: [&str; 8] = ["\u{0}", "{", "}", "\"a\"", ": ", "12", "x", ", "];

    fn matcher(grammar: TopLevelGrammar) -> Matcher {
        let tokens = TOKENS.iter().map(|token| token.as_bytes().to_vec());
        Matcher::new(factory(&vocabulary_frame(0, tokens)).unwrap().create_parser(grammar))
    }

    fn allowed(matcher: &mut Matcher) -> Vec<&'static str> {
        let mask = mask(matcher).unwrap().unwrap();
        (0..TOKENS.len()).filter(|id| mask[id / 8] >> (id % 8) & 1 == 1).map(|id| TOKENS[id]).collect()
    }

    #[test]
    fn only_tokens_that_lead_to_the_format_may_come_next() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                            "additionalProperties": false});
        let mut json = matcher(json_grammar(schema));
        assert_eq!(allowed(&mut json), ["{"]);
        json.consume_tokens(&[1, 3, 4, 5]).unwrap();
        assert_eq!(allowed(&mut json), ["}", "12"]);
        json.consume_token(2).unwrap();
        assert_eq!(allowed(&mut json), ["\u{0}"], "the end");
        assert_eq!(allowed(&mut matcher(TopLevelGrammar::from_regex("x(12)+"))), ["x"]);
    }

    #[test]
    fn a_grammar_that_is_invalid_or_allows_no_text_has_no_mask() {
        for grammar in [
            TopLevelGrammar::from_regex("("),
            TopLevelGrammar::from_regex(r"[^\s\S]"),
            json_grammar(json!({"type": "nothing"})),
        ] {
            assert!(!matches!(mask(&mut matcher(grammar)), Ok(Some(_))));
        }
    }
}
