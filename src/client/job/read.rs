//! Reads the rows on a thread of its own, because an input may block for any time between two lines, and gathers those
//! that share a task. Owns the read position.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::thread;
use std::time::Duration;

use tokio::sync::mpsc;

use super::JobError;
use super::rows::{PackedTask, Packer, TaskLimits};
use crate::client::batch_file::{InputLines, InputRow, RepeatedIds, Rows};
use crate::protocol::batch_line;

/// Bound of the rows read ahead of publishing, and of the tasks packed from them. Each line may have 64 MiB.
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

type Row = Result<InputRow, JobError>;

/// Reads the rows that are left, as tasks within `limits`; without `rows`, those of the input `once`. `first` is the
/// number of the first row in the output. The last item is an error if the input has changed meanwhile.
pub(super) fn read(
    rows: Option<Box<dyn Rows>>,
    once: &Path,
    first: u64,
    limits: TaskLimits,
) -> Result<mpsc::Receiver<Result<Unit, JobError>>, JobError> {
    // Written by the thread, read by `pack`.
    let (sender, received) = mpsc::channel(READ_AHEAD);
    let name = once.to_owned();
    let send = move || {
        let Some(rows) = rows else { return send_once(&name, &sender) };
        send_counted(rows, &sender);
    };
    thread::Builder::new().name("input".into()).spawn(send).map_err(input_error)?;
    // Written by `pack`, read by the client.
    let (unit_sender, units) = mpsc::channel(READ_AHEAD);
    tokio::spawn(pack(received, unit_sender, Packer::new(limits), first));
    Ok(units)
}

fn input_error(source: io::Error) -> JobError {
    JobError::Input { what: "the input".to_owned(), source }
}

/// Opens an input. Called on the reading thread, because opening a FIFO blocks until somebody writes to it.
fn open(name: &Path) -> io::Result<Box<dyn Read>> {
    Ok(if name == Path::new("-") { Box::new(io::stdin()) } else { Box::new(File::open(name)?) })
}

/// Sends the lines of an input that is read only once.
fn send_once(name: &Path, sender: &mpsc::Sender<Row>) {
    match open(name) {
        Ok(reader) => {
            let lines = InputLines::new(BufReader::new(reader));
            send_all(lines.map(|line| line.map(InputRow::from).map_err(input_error)), sender);
        }
        Err(source) => {
            let error = JobError::Input { what: name.display().to_string(), source };
            let _ = sender.blocking_send(Err(error));
        }
    }
}

/// Sends the rows that were counted when the run began, and then an error if the input has changed since.
fn send_counted(mut rows: Box<dyn Rows>, sender: &mpsc::Sender<Row>) {
    if send_all(rows.by_ref().map(|row| row.map_err(input_error)), sender) {
        let changed = match rows.changed() {
            Ok(changed) => changed.map(JobError::InputChanged),
            Err(error) => Some(input_error(error)),
        };
        if let Some(changed) = changed {
            let _ = sender.blocking_send(Err(changed));
        }
    }
}

/// Sends all rows. False: nobody receives them any more.
fn send_all(mut rows: impl Iterator<Item = Row>, sender: &mpsc::Sender<Row>) -> bool {
    rows.all(|row| sender.blocking_send(row).is_ok())
}

/// Makes units of work from the rows. `first` is the number of the first row in the output.
async fn pack(
    mut rows: mpsc::Receiver<Row>,
    unit_sender: mpsc::Sender<Result<Unit, JobError>>,
    mut packer: Packer,
    first: u64,
) {
    let (mut number, mut ids) = (first, RepeatedIds::default());
    loop {
        let row = tokio::time::timeout(GATHER_TIMEOUT, rows.recv()).await;
        let (units, is_over) = match row {
            Err(_elapsed) => (packer.flush().map(Unit::Task).map(Ok).into_iter().collect(), false),
            Ok(None) => (packer.flush().map(Unit::Task).map(Ok).into_iter().collect(), true),
            Ok(Some(row)) => {
                let units = row.map(|row| units_of(row, number, &mut packer, &mut ids));
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

/// The units of work that are complete once this row is read.
fn units_of(row: InputRow, number: u64, packer: &mut Packer, ids: &mut RepeatedIds) -> Vec<Unit> {
    match row.request {
        Ok(request) => {
            ids.add(&request.custom_id, row.number);
            packer.add(number, row.number, request).into_iter().map(Unit::Task).collect()
        }
        Err(invalid) => {
            // Completes the task of the rows before this one. Otherwise the output of a long run of invalid lines
            // would wait for it.
            let line = batch_line::error_line(row.number, &invalid);
            packer.flush().map(Unit::Task).into_iter().chain([Unit::Invalid { number, line }]).collect()
        }
    }
}
