//! What a Python process prints: logged line by line at a bounded rate, never mixed with frames. Decides which lines are
//! cut or left out, and says so. Owns the last line.

use std::io::{self, Read};
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
    pub(super) fn log(mut pipe: impl Read + Send + 'static) -> io::Result<Self> {
        let last_line = Arc::<Mutex<String>>::default();
        let (sender, end) = mpsc::sync_channel::<()>(1);
        let mut lines = Lines::new(last_line.clone());
        thread::Builder::new().name("python-output".into()).spawn(move || {
            let _sender = sender;
            let mut buffer = vec![0; 64 << 10];
            loop {
                match pipe.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(count) => lines.add(buffer.get(..count).unwrap_or_default(), Instant::now()),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            lines.end();
        })?;
        Ok(Self { last_line, end })
    }

    /// The last line that is not blank. Waits for the end of the output, but not for long.
    pub(super) fn last_line(&self) -> String {
        let _ = self.end.recv_timeout(REST_TIMEOUT);
        self.last_line.lock().clone()
    }
}

/// Divides output into lines, and decides which are logged.
struct Lines {
    /// The line that is being read, up to [`MAX_LINE`] and one byte that shows that it is longer.
    line: Vec<u8>,
    /// The last whole line that is not blank.
    last: Vec<u8>,
    /// The same as text, for [`PrintedOutput::last_line`].
    last_line: Arc<Mutex<String>>,
    /// How many lines might be logged at the time `counted`.
    allowed: f64,
    counted: Instant,
    /// How many lines were not logged since the last one that was.
    left_out: u64,
}

impl Lines {
    fn new(last_line: Arc<Mutex<String>>) -> Self {
        Self {
            line: Vec::new(),
            last: Vec::new(),
            last_line,
            allowed: BURST,
            counted: Instant::now(),
            left_out: 0,
        }
    }

    fn add(&mut self, mut bytes: &[u8], now: Instant) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = bytes.split_at(end);
            self.extend_line(line);
            self.end_line(now);
            bytes = rest.get(1..).unwrap_or_default();
        }
        self.extend_line(bytes);
        if !self.last.is_empty() {
            *self.last_line.lock() = shown(&self.last);
        }
    }

    /// Adds to the line that is being read.
    fn extend_line(&mut self, bytes: &[u8]) {
        let room = (MAX_LINE + 1).saturating_sub(self.line.len());
        self.line.extend_from_slice(bytes.get(..room.min(bytes.len())).unwrap_or_default());
    }

    fn end_line(&mut self, now: Instant) {
        if !self.line.trim_ascii().is_empty() {
            if self.may_log(now) {
                tracing::info!(target: "sconce::python", "{}", shown(&self.line));
            }
            std::mem::swap(&mut self.line, &mut self.last);
        }
        self.line.clear();
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

    fn end(&mut self) {
        self.add(b"\n", Instant::now());
        self.log_left_out();
    }
}

/// A line as text, cut if it is long.
fn shown(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let text = text.trim_end();
    if line.len() > MAX_LINE { format!("{text}… (cut)") } else { text.to_owned() }
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
        let last_line = Arc::default();
        let mut lines = Lines::new(Arc::clone(&last_line));
        for _ in 0..1_000 {
            lines.add(&[b'x'; 1_000], Instant::now());
        }
        assert!(lines.line.capacity() < 4 * MAX_LINE);
        lines.add(b"\n", Instant::now());
        assert!(last_line.lock().ends_with("… (cut)"), "{}", last_line.lock());
    }

    #[test]
    fn lines_beyond_the_rate_are_counted_and_some_are_logged_again_later() {
        let mut lines = Lines::new(Arc::default());
        let begin = Instant::now();
        let logged = |lines: &mut Lines, at| (0..1_000).filter(|_| lines.may_log(at)).count();
        assert_eq!(logged(&mut lines, begin), BURST as usize);
        assert_eq!(lines.left_out, 800);
        assert_eq!(logged(&mut lines, begin + Duration::from_secs(1)), PER_SECOND as usize);
    }
}
