//! `sconce worker`: runs one worker. Under a launcher it reads its assignment and further commands from stdin; started
//! by hand, it takes the assignment from the settings.

use std::io::{self, BufRead, Read};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};

use super::{Registry, broker_session, pool_named, reexec_with_environment, start_logging};
use crate::cli::Worker;
use crate::commands::exits::ExitsWith as _;
use crate::config::Assignment;
use crate::launcher::Host;
use crate::protocol::control::{Command, Event, MAX_LINE, decode};
use crate::shutdown::{Exit, Phase, SecondSignal, Stop, listen_for_signals};
use crate::telemetry::traces::{self, Traces};
use crate::telemetry::{self, Format};
use crate::worker::{
    self, Cancellations, Control, CrashRecords, Ended, Pause, Reporter, Withdrawn, WorkerError, load_spec,
};

/// The variable that lists the GPUs visible to a process.
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// How long sending the last control line may take.
const FINAL_EVENT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a worker whose launcher has died may take to drain.
const ORPHAN_DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// How long sending the last spans may take.
const TRACES_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs one worker.
pub(super) fn run(arguments: &Worker, registry: &Registry) -> anyhow::Result<Exit> {
    let stop = Stop::default();
    let (crashes, pause) = (CrashRecords::default(), Pause::default());
    let withdrawn = Withdrawn::default();
    let has_launcher = arguments.launched_by.is_some();
    let (assignment, second_signal) = match arguments.launched_by {
        Some(launcher) => {
            let filter = std::env::var("SCONCE_LOG").ok();
            let started = telemetry::start(filter.as_deref(), Format::Json);
            started.map_err(|problem| anyhow!("SCONCE_LOG: {problem}").exits_with(Exit::Config))?;
            bind_to_launcher(launcher)?;
            (read_assignment(&crashes, &withdrawn, &pause)?, SecondSignal::Ignored)
        }
        None => {
            start_logging(None)?;
            (manual_assignment(arguments, registry)?, SecondSignal::Aborts)
        }
    };
    // One thread: its futures pass messages to each other, and waking another thread costs more than handling a
    // message. Long computations have their own threads. Futures that are woken together run one after the other, so
    // the replies of a batch are sent together.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let reporter = Reporter::start(io::stdout())?;
    let traces = start_traces(&assignment);
    let cancellations = Cancellations::default();
    let control = Control { reporter: reporter.clone(), crashes, pause, cancellations, withdrawn, traces };
    let starter = registry.starter(&assignment);
    let work = async move {
        listen_for_signals(stop.clone(), second_signal)?;
        if has_launcher {
            follow_commands(stop.clone(), control.clone())?;
        }
        let ended = worker::run(&assignment, &starter, &broker_session::open, stop.clone(), &control).await;
        let cause = match &ended {
            Ok(_) => stop.cause().unwrap_or_default(),
            Err(error) => error.to_string(),
        };
        // The launcher may have stopped reading, so the wait is bounded.
        let final_event = async {
            let is_lasting = ended.as_ref().is_err_and(WorkerError::is_lasting);
            let exit = Some(exit_of(&ended).code().into());
            reporter.send(&Event::Stopped { cause, exit, is_lasting }).await;
            reporter.flush().await;
        };
        let _ = tokio::time::timeout(FINAL_EVENT_TIMEOUT, final_event).await;
        flush_traces(control.traces, &stop, &ended).await;
        anyhow::Ok(ended)
    };
    let ended = runtime.block_on(work);
    // Threads that still run, such as a forward pass after an abort, end with the process.
    runtime.shutdown_background();
    let ended = ended?;
    if let Err(error) = &ended {
        let exit = error.exit().code();
        if has_launcher {
            // The launcher has received the cause, and logs it together with what it does next.
            tracing::debug!(%error, exit, "the worker cannot continue");
        } else {
            tracing::error!(%error, exit, "the worker cannot continue");
        }
    }
    Ok(exit_of(&ended))
}

fn exit_of(ended: &Result<Ended, WorkerError>) -> Exit {
    match ended {
        Ok(Ended::Drained) => Exit::Done,
        Ok(Ended::OnRequest) => Exit::StoppedOnRequest,
        Ok(Ended::Aborted) => Exit::Aborted,
        Err(error) => error.exit(),
    }
}

/// Asks the kernel to signal this process when the launcher dies. The end of stdin shows that too, unless another
/// process holds it open.
fn bind_to_launcher(launcher: u32) -> anyhow::Result<()> {
    set_pdeathsig(Signal::SIGTERM).context("prctl(PR_SET_PDEATHSIG)")?;
    // The launcher may have died before `prctl` was called.
    if getppid().as_raw() != launcher as i32 {
        bail!("the launcher (process {launcher}) is gone");
    }
    Ok(())
}

/// Reads the assignment from the first control line. Applies the crash records, the withdrawals and the pause that come
/// with it.
fn read_assignment(
    crashes: &CrashRecords,
    withdrawn: &Withdrawn,
    pause: &Pause,
) -> anyhow::Result<Assignment> {
    let mut line = String::new();
    io::stdin().lock().take(MAX_LINE as u64).read_line(&mut line).context("no assignment on stdin")?;
    if line.len() == MAX_LINE {
        bail!("the assignment is longer than a control line may be ({MAX_LINE} bytes)");
    }
    match decode(line.trim_end())? {
        Command::Start { assignment, crashes: records, paused, withdrawn: earlier } => {
            crashes.replace(records);
            match earlier {
                Some(earlier) => withdrawn.add_earlier(&earlier, Instant::now()),
                // The launcher has not read them all yet, and sends `Withdrawals` when it has.
                None => withdrawn.mark_incomplete(),
            }
            pause.set(paused);
            // The error's text is dropped: it would quote the value, which holds a password.
            serde_json::from_value(assignment)
                .map_err(|_| anyhow!("the assignment is not in the format of this version"))
        }
        _ => bail!("the first command must be `start`"),
    }
}

/// The assignment of a worker that is started by hand, on the device of `--device`. Uses all cores if the pool sets no
/// threads.
fn manual_assignment(arguments: &Worker, registry: &Registry) -> anyhow::Result<Assignment> {
    let settings = registry.load(&arguments.settings, &[])?.settings;
    let (_, pool) = pool_named(&settings.pools, arguments.pool.as_deref())?;
    let host = Host::here();
    let device = manual_device(&arguments.device, &pool.name, &host.for_pool(pool))?;
    let slot = arguments.slot.clone().unwrap_or_else(|| format!("{}/by-hand", pool.name));
    Ok(Assignment {
        worker: format!("{}/{slot}", host.name),
        slot,
        device,
        sharers: 1,
        threads: pool.threads.unwrap_or(host.cores),
        pool: pool.clone(),
        reserved_queues: settings.reserved_queues(),
        broker_reached: false,
        broker: settings.broker,
        telemetry: settings.telemetry,
    })
}

/// The device of a worker that is started by hand. For a GPU, the process is started again with only that GPU visible,
/// as a launcher starts it, unless it was started so already.
fn manual_device(requested: &str, pool: &str, host: &Host) -> anyhow::Result<String> {
    if requested == "cpu" {
        return Ok(requested.to_owned());
    }
    let uuid = host.device(requested, pool).map_err(|error| WorkerError::Device(error.to_string()))?;
    reexec_with_environment(&[
        (VISIBLE_DEVICES, uuid.clone()),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
    ])?;
    Ok(uuid)
}

/// Executes the launcher's commands on a separate thread, because reading stdin blocks. After the launcher has died,
/// this thread ends the process even if all other threads hang.
fn follow_commands(stop: Stop, control: Control) -> io::Result<()> {
    thread::Builder::new().name("commands".into()).spawn(move || {
        let mut lines = io::stdin().lock();
        loop {
            let mut line = String::new();
            match lines.by_ref().take(MAX_LINE as u64).read_line(&mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => match decode(line.trim_end()) {
                    Ok(command) => execute(command, &stop, &control),
                    Err(error) => tracing::warn!(%error, "unreadable command"),
                },
            }
        }
        stop.advance(Phase::Returning, "the launcher is gone");
        thread::sleep(ORPHAN_DRAIN_TIMEOUT);
        // A kill, not an exit: exit handlers of libraries would wait for a driver that hangs.
        let _ = kill(Pid::this(), Signal::SIGKILL);
    })?;
    Ok(())
}

fn execute(command: Command, stop: &Stop, control: &Control) {
    match command {
        Command::Finish => drop(stop.advance(Phase::Finishing, "launcher")),
        Command::Drain => drop(stop.advance(Phase::Returning, "launcher")),
        Command::Abort => drop(stop.advance(Phase::Aborting, "launcher")),
        Command::CrashRecords { tasks } => control.crashes.replace(tasks),
        Command::Pause => control.pause.set(true),
        Command::Resume => control.pause.set(false),
        Command::LogLevel { filter } => match telemetry::set_filter(&filter) {
            Ok(()) => tracing::info!(filter, "logging by another filter"),
            Err(problem) => tracing::warn!(filter, problem, "not a log filter"),
        },
        // Sending fails only while there is no session, and so no task to cancel. The intake reports the number of
        // cancelled tasks if the cancellation names a task by its id; here the number is 0.
        Command::Cancel(cancellation) => {
            control.withdrawn.add_cancelled(&cancellation, Instant::now());
            if !control.cancellations.add(vec![cancellation.clone()]) && cancellation.task.is_some() {
                control.reporter.try_send(&Event::Cancelled { cancellation, tasks: 0 });
            }
        }
        Command::CancelAll { cancellations } => _ = control.cancellations.add(cancellations),
        Command::Withdrawals { withdrawn } => control.withdrawn.add_earlier(&withdrawn, Instant::now()),
        Command::Start { .. } => tracing::warn!("a second `start` is ignored"),
    }
}

/// Starts the export of spans, if the settings name a collector. If that fails, the worker runs without it.
fn start_traces(assignment: &Assignment) -> Traces {
    let Some(endpoint) = &assignment.telemetry.otlp_endpoint else { return Traces::default() };
    let is_embedded = assignment.broker.is_embedded();
    let spec = load_spec(assignment);
    let origin = traces::SpanOrigin {
        worker: &assignment.worker,
        slot: &assignment.slot,
        device: &assignment.device,
        model: spec.model_name(),
        queue: &assignment.pool.task_queue,
        system: if is_embedded { "sconce" } else { "rabbitmq" },
    };
    let started = Traces::start(endpoint, assignment.telemetry.trace_sample, origin);
    started.unwrap_or_else(|error| {
        tracing::warn!(endpoint, error, "no spans will be exported");
        Traces::default()
    })
}

/// Exports the last spans of a worker that has ended, unless it was aborted. An abort also ends the export.
async fn flush_traces(traces: Traces, stop: &Stop, ended: &Result<Ended, WorkerError>) {
    if matches!(ended, Ok(Ended::Aborted)) {
        return;
    }
    tokio::select! {
        () = stop.reached(Phase::Aborting) => {}
        _ = tokio::task::spawn_blocking(move || traces.finish(TRACES_FLUSH_TIMEOUT)) => {}
    }
}
