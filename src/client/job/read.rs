//! Reads the rows on a thread of its own, because an input may block for any time between two lines, and gathers those
//! that share a task. Owns the read position.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tokio::sync::mpsc;

use super::JobError;
use super::rows::{Packed, Packer, TaskLimits};
use crate::client::batch_file::{CountedInput, InputLine, InputLines, MAX_LINE, RepeatedIds, ResumePoint};
use crate::protocol::batch_line::{self, InvalidLine};

/// Bound of the lines read ahead of publishing, and of the tasks made of them. Each may have 64 MiB.
const READ_AHEAD: usize = 8;
/// How long the input may be silent before the rows gathered so far become a task.
const GATHERING: Duration = Duration::from_millis(100);

/// A unit of work: a task, or an input line that is answered without one.
#[derive(Debug)]
pub(super) enum Unit {
    Task(Packed),
    /// An input line that is not a request, with its output line.
    Invalid {
        number: u64,
        line: Vec<u8>,
    },
}

type Line = Result<InputLine, JobError>;

/// Reads all lines, on a thread of its own.
type Source = Box<dyn FnOnce(&mpsc::Sender<Line>) + Send>;

/// Reads the rows of the input after those that are done, as tasks within `limits`. With a point to continue at, the
/// last item is an error if the input has changed meanwhile.
pub(super) fn read(
    inputs: &[PathBuf],
    point: Option<ResumePoint>,
    limits: TaskLimits,
) -> Result<mpsc::Receiver<Result<Unit, JobError>>, JobError> {
    // Written by the thread, read by `pack`.
    let (read, lines) = mpsc::channel(READ_AHEAD);
    let first = point.as_ref().map_or(0, |point| point.done as u64);
    let source: Source = match point {
        Some(point) => {
            let input = point.open_input(inputs).map_err(of_input)?;
            Box::new(move |read| send_counted(input, read))
        }
        None => {
            let name = inputs.first().cloned().unwrap_or_else(|| PathBuf::from("-"));
            Box::new(move |read| match opened(&name) {
                Ok(reader) => {
                    let lines = InputLines::new(BufReader::new(reader));
                    send_all(lines.map(|line| line.map_err(of_input)), read);
                }
                Err(error) => {
                    let error = JobError::Input { what: name.display().to_string(), source: error };
                    let _ = read.blocking_send(Err(error));
                }
            })
        }
    };
    thread::Builder::new().name("input".into()).spawn(move || source(&read)).map_err(of_input)?;
    // Written by `pack`, read by the client.
    let (packed, units) = mpsc::channel(READ_AHEAD);
    tokio::spawn(pack(lines, packed, Packer::new(limits), first));
    Ok(units)
}

fn of_input(source: io::Error) -> JobError {
    JobError::Input { what: "the input".to_owned(), source }
}

/// Opens an input. Called on the reading thread, because opening a FIFO blocks until somebody writes to it.
fn opened(name: &Path) -> io::Result<Box<dyn Read>> {
    Ok(if name == Path::new("-") { Box::new(io::stdin()) } else { Box::new(File::open(name)?) })
}

fn send_counted(mut input: CountedInput, read: &mpsc::Sender<Line>) {
    if send_all(input.by_ref().map(|line| line.map_err(of_input)), read) {
        let changed = match input.changed() {
            Ok(changed) => changed.map(JobError::InputChanged),
            Err(error) => Some(of_input(error)),
        };
        if let Some(changed) = changed {
            let _ = read.blocking_send(Err(changed));
        }
    }
}

/// Sends all lines. False: nobody reads them any more.
fn send_all(mut lines: impl Iterator<Item = Line>, read: &mpsc::Sender<Line>) -> bool {
    lines.all(|line| read.blocking_send(line).is_ok())
}

async fn pack(
    mut lines: mpsc::Receiver<Line>,
    packed: mpsc::Sender<Result<Unit, JobError>>,
    mut packer: Packer,
    first: u64,
) {
    let (mut number, mut ids) = (first, RepeatedIds::default());
    loop {
        let line = tokio::time::timeout(GATHERING, lines.recv()).await;
        let (units, is_over) = match line {
            Err(_) => (packer.flush().map(Unit::Task).map(Ok).into_iter().collect(), false),
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
            if packed.send(unit).await.is_err() {
                return;
            }
        }
        if is_over {
            if let Some(warning) = ids.words() {
                tracing::warn!("{warning}");
            }
            return;
        }
    }
}

fn units_of(line: InputLine, number: u64, packer: &mut Packer, ids: &mut RepeatedIds) -> Vec<Unit> {
    let request = match &line.bytes {
        Some(bytes) => batch_line::parse(bytes),
        None => Err(InvalidLine { custom_id: None, problem: format!("longer than {MAX_LINE} bytes") }),
    };
    match request {
        Ok(request) => {
            ids.take(&request.custom_id, line.number);
            packer.take(number, line.number, request).into_iter().map(Unit::Task).collect()
        }
        Err(invalid) => {
            // Completes the task of the rows before this line. Otherwise the output of a long run of invalid lines
            // would wait for it.
            let line = batch_line::error_line(line.number, &invalid);
            packer.flush().map(Unit::Task).into_iter().chain([Unit::Invalid { number, line }]).collect()
        }
    }
}
