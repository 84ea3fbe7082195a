//! Reads the rows on a thread of its own, because an input may block for any time between two lines, and gathers those
//! that share a task. Owns the read position.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tokio::sync::mpsc;

use super::JobError;
use super::rows::{PackedTask, Packer, TaskLimits};
use crate::client::batch_file::{CountedInput, InputLine, InputLines, MAX_LINE, RepeatedIds, ResumePoint};
use crate::protocol::batch_line::{self, InvalidLine};

/// Bound of the lines read ahead of publishing, and of the tasks packed from them. Each line may have 64 MiB.
const READ_AHEAD: usize = 8;
/// How long the input may be silent before the rows gathered so far become a task.
const GATHER_TIMEOUT: Duration = Duration::from_millis(100);

/// A unit of work: a task, or an input line that is answered without one.
#[derive(Debug)]
pub(super) enum Unit {
    Task(PackedTask),
    /// An input line that is not a request, with its output line.
    Invalid {
        number: u64,
        line: Vec<u8>,
    },
}

type Line = Result<InputLine, JobError>;

/// Reads all lines and sends them. Runs on a thread of its own.
type LineSource = Box<dyn FnOnce(&mpsc::Sender<Line>) + Send>;

/// Reads the rows of the input after those that are done, as tasks within `limits`. With a point to continue at, the
/// last item is an error if the input has changed meanwhile.
pub(super) fn read(
    inputs: &[PathBuf],
    point: Option<ResumePoint>,
    limits: TaskLimits,
) -> Result<mpsc::Receiver<Result<Unit, JobError>>, JobError> {
    // Written by the thread, read by `pack`.
    let (line_sender, lines) = mpsc::channel(READ_AHEAD);
    let first = point.as_ref().map_or(0, |point| point.done as u64);
    let source: LineSource = match point {
        Some(point) => {
            let input = point.open_input(inputs).map_err(input_error)?;
            Box::new(move |line_sender| send_counted(input, line_sender))
        }
        None => {
            let name = inputs.first().cloned().unwrap_or_else(|| PathBuf::from("-"));
            Box::new(move |line_sender| match open(&name) {
                Ok(reader) => {
                    let lines = InputLines::new(BufReader::new(reader));
                    send_all(lines.map(|line| line.map_err(input_error)), line_sender);
                }
                Err(error) => {
                    let error = JobError::Input { what: name.display().to_string(), source: error };
                    let _ = line_sender.blocking_send(Err(error));
                }
            })
        }
    };
    thread::Builder::new().name("input".into()).spawn(move || source(&line_sender)).map_err(input_error)?;
    // Written by `pack`, read by the client.
    let (unit_sender, units) = mpsc::channel(READ_AHEAD);
    tokio::spawn(pack(lines, unit_sender, Packer::new(limits), first));
    Ok(units)
}

fn input_error(source: io::Error) -> JobError {
    JobError::Input { what: "the input".to_owned(), source }
}

/// Opens an input. Called on the reading thread, because opening a FIFO blocks until somebody writes to it.
fn open(name: &Path) -> io::Result<Box<dyn Read>> {
    Ok(if name == Path::new("-") { Box::new(io::stdin()) } else { Box::new(File::open(name)?) })
}

/// Sends the lines that were counted when the run began, and then an error if the input has changed since.
fn send_counted(mut input: CountedInput, line_sender: &mpsc::Sender<Line>) {
    if send_all(input.by_ref().map(|line| line.map_err(input_error)), line_sender) {
        let changed = match input.changed() {
            Ok(changed) => changed.map(JobError::InputChanged),
            Err(error) => Some(input_error(error)),
        };
        if let Some(changed) = changed {
            let _ = line_sender.blocking_send(Err(changed));
        }
    }
}

/// Sends all lines. False: nobody receives them any more.
fn send_all(mut lines: impl Iterator<Item = Line>, line_sender: &mpsc::Sender<Line>) -> bool {
    lines.all(|line| line_sender.blocking_send(line).is_ok())
}

/// Makes units of work from the lines. `first` is the number of the first line in the output.
async fn pack(
    mut lines: mpsc::Receiver<Line>,
    unit_sender: mpsc::Sender<Result<Unit, JobError>>,
    mut packer: Packer,
    first: u64,
) {
    let (mut number, mut ids) = (first, RepeatedIds::default());
    loop {
        let line = tokio::time::timeout(GATHER_TIMEOUT, lines.recv()).await;
        let (units, is_over) = match line {
            Err(_elapsed) => (packer.flush().map(Unit::Task).map(Ok).into_iter().collect(), false),
            Ok(None) => (packer.flush().map(Unit::Task).map(Ok).into_iter().collect(), true),
            Ok(Some(line)) => {
                let units = line.map(|line| units_of(line, number, &mut packer, &mut ids));
                number += 1;
                match units {
                    Ok(units) => (units.into_iter().map(Ok).collect::<Vec<_>>(), false),
                    Err(error) => (vec![Err(error)], true),
                }
            }
        };
        for unit in units {
            if unit_sender.send(unit).await.is_err() {
                return;
            }
        }
        if is_over {
            if let Some(warning) = ids.warning() {
                tracing::warn!("{warning}");
            }
            return;
        }
    }
}

/// The units of work that are complete once this line is read.
fn units_of(line: InputLine, number: u64, packer: &mut Packer, ids: &mut RepeatedIds) -> Vec<Unit> {
    let request = match &line.bytes {
        Some(bytes) => batch_line::parse(bytes),
        None => Err(InvalidLine { custom_id: None, problem: format!("longer than {MAX_LINE} bytes") }),
    };
    match request {
        Ok(request) => {
            ids.add(&request.custom_id, line.number);
            packer.add(number, line.number, request).into_iter().map(Unit::Task).collect()
        }
        Err(invalid) => {
            // Completes the task of the rows before this line. Otherwise the output of a long run of invalid lines
            // would wait for it.
            let line = batch_line::error_line(line.number, &invalid);
            packer.flush().map(Unit::Task).into_iter().chain([Unit::Invalid { number, line }]).collect()
        }
    }
}
