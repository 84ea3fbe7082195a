//! What a Python process prints: logged line by line at a bounded rate, never mixed with frames. Decides which lines are
//! cut or left out, and says so. Owns the last line.

use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The longest part of a line that is logged, in bytes.
const MAX_LINE: usize = 4 << 10;
/// How many lines may be logged at once, and how many a second on average.
const BURST: f64 = 200.0;
const PER_SECOND: f64 = 50.0;
/// How long to wait for the rest of the output of an ended process. The wait is bounded, since another process that the class has
/// given the pipe to may keep it open.
const REST_TIMEOUT: Duration = Duration::from_secs(1);

/// The output of a process.
pub(super) struct PrintedOutput {
    last_line: Arc<Mutex<String>>,
    /// Disconnected at the end of the output.
    end: Receiver<()>,
}

impl PrintedOutput {
    /// Logs what comes out of `pipe`, on a thread of its own, until its end.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(super) fn log(pipe: impl Read + Send + 'static) -> io::Result<Self> {
        let last_line = Arc::<Mutex<String>>::default();
        let (sender, end) = mpsc::sync_channel::<()>(1);
        let last = last_line.clone();
        thread::Builder::new().name("python-output".into()).spawn(move || {
            let _sender = sender;
            let mut lines = BufReader::with_capacity(64 << 10, pipe);
            let mut rate = LogRate::new();
            while let Ok(Some(line)) = next_line(&mut lines) {
                if line.is_empty() {
                    continue;
                }
                if rate.may_log(Instant::now()) {
                    tracing::info!(target: "sconce::python", "{line}");
                }
                *last.lock() = line;
            }
            rate.log_left_out();
        })?;
        Ok(Self { last_line, end })
    }

    /// The last line that is not blank. Waits for the end of the output, but not for long.
    pub(super) fn last_line(&self) -> String {
        let _ = self.end.recv_timeout(REST_TIMEOUT);
        self.last_line.lock().clone()
    }
}

/// The next line as text, cut if it is long, and without blanks at its end; none at the end of the output.
fn next_line(output: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    output.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&line).trim_end().to_owned();
    if line.len() <= MAX_LINE || line.ends_with(b"\n") {
        return Ok(Some(text));
    }
    output.skip_until(b'\n')?;
    Ok(Some(if text.is_empty() { text } else { format!("{text}… (cut)") }))
}

/// Decides which lines are logged.
struct LogRate {
    /// How many lines might be logged at the time `counted`.
    allowed: f64,
    counted: Instant,
    /// How many lines were not logged since the last one that was.
    left_out: u64,
}

impl LogRate {
    fn new() -> Self {
        Self { allowed: BURST, counted: Instant::now(), left_out: 0 }
    }

    /// Whether one more line may be logged; if not, it is counted as left out.
    fn may_log(&mut self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.counted).as_secs_f64();
        (self.allowed, self.counted) = ((self.allowed + since * PER_SECOND).min(BURST), now);
        if self.allowed < 1.0 {
            self.left_out += 1;
            return false;
        }
        self.allowed -= 1.0;
        self.log_left_out();
        true
    }

    fn log_left_out(&mut self) {
        let lines = std::mem::take(&mut self.left_out);
        if lines > 0 {
            tracing::warn!(lines, "lines of the Python process are left out: it prints too many");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_kept_also_if_it_is_not_logged() {
        let text = format!("{}\nValueError: no\n\n", "x\n".repeat(10_000));
        let output = PrintedOutput::log(io::Cursor::new(text)).unwrap();
        assert_eq!(output.last_line(), "ValueError: no");
    }

    #[test]
    fn a_long_line_takes_little_memory_and_is_cut() {
        let text = format!("{}\n{}\nthe end", "x".repeat(1_000_000), "y".repeat(MAX_LINE));
        let mut lines = io::Cursor::new(text);
        let mut next = || next_line(&mut lines).unwrap();
        let cut = next().unwrap();
        assert!(cut.len() < 2 * MAX_LINE && cut.ends_with("x… (cut)"), "{cut}");
        assert_eq!(next().unwrap(), "y".repeat(MAX_LINE));
        assert_eq!((next().as_deref(), next()), (Some("the end"), None));
    }

    #[test]
    fn lines_beyond_the_rate_are_counted_and_some_are_logged_again_later() {
        let mut lines = LogRate::new();
        let begin = Instant::now();
        let logged = |lines: &mut LogRate, at| (0..1_000).filter(|_| lines.may_log(at)).count();
        assert_eq!(logged(&mut lines, begin), BURST as usize);
        assert_eq!(lines.left_out, 800);
        assert_eq!(logged(&mut lines, begin + Duration::from_secs(1)), PER_SECOND as usize);
    }
}
