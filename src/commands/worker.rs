//! `sconce worker`: runs under a launcher, with the assignment from stdin, or by hand.

use std::io::{self, BufRead, Read};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};
use tokio::sync::broadcast::error::SendError;

use super::registry::Registry;
use super::{broker_session, pool_named, start_logging, with_environment};
use crate::cli::Worker;
use crate::commands::exits::ExitsWith as _;
use crate::config::Assignment;
use crate::launcher::Host;
use crate::protocol::control::{Command, Event, MAX_LINE, decode, job_queue};
use crate::shutdown::{Exit, Patience, Phase, Stop, listen};
use crate::telemetry::traces::{self, Traces};
use crate::telemetry::{self, Format};
use crate::worker::{self, Control, CrashRecords, Ended, LiveSettings, Reporter, WorkerError, load_spec};

/// The variable that lists the GPUs visible to a process.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// How long the last control line may take.
const FAREWELL: Duration = Duration::from_secs(1);
/// How long a worker whose launcher is gone may take to drain.
const ORPHANED: Duration = Duration::from_secs(3);

/// Runs one worker.
pub(super) fn run(arguments: &Worker, registry: &Registry) -> anyhow::Result<Exit> {
    let stop = Stop::default();
    let (crashes, settings) = (CrashRecords::default(), LiveSettings::default());
    let (assignment, patience) = match arguments.launched_by {
        Some(launcher) => {
            let filter = std::env::var("SCONCE_LOG").ok();
            let started = telemetry::start(filter.as_deref(), Format::Json);
            started.map_err(|problem| anyhow!("SCONCE_LOG: {problem}").exits_with(Exit::Config))?;
            tie_to(launcher)?;
            (assigned(&crashes, &settings)?, Patience::Drain)
        }
        None => {
            start_logging(None)?;
            (by_hand(arguments, registry)?, Patience::SecondAborts)
        }
    };
    // One thread: its tasks hand messages to each other, and waking another thread costs more than handling
    // them. Long computations have their own threads. Tasks woken together run in turn, so a batch's replies
    // are sent together.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let reporter = Reporter::start(io::stdout())?;
    let traces = tracer(&assignment);
    let cancellations = worker::cancellations();
    let withdrawn = worker::Withdrawn::default();
    let control = Control { reporter: reporter.clone(), crashes, settings, cancellations, withdrawn, traces };
    let starter = registry.starter(&assignment.pool);
    let patience_of = patience;
    let work = async move {
        listen(stop.clone(), patience)?;
        if patience == Patience::Drain {
            follow_commands(stop.clone(), control.clone())?;
        }
        let ended = worker::run(&assignment, &starter, &broker_session::open, stop.clone(), &control).await;
        let cause = match &ended {
            Ok(_) => stop.cause().unwrap_or_default(),
            Err(error) => error.to_string(),
        };
        // The launcher may no longer read.
        let farewell = async {
            reporter.send(&Event::Stopped { cause, exit: Some(exit_of(&ended).code().into()) }).await;
            reporter.flush().await;
        };
        let _ = tokio::time::timeout(FAREWELL, farewell).await;
        send_last(control.traces, &stop, &ended).await;
        anyhow::Ok(ended)
    };
    let ended = runtime.block_on(work);
    // Threads that still run (a forward pass after an abort) end with the process.
    runtime.shutdown_background();
    let ended = ended?;
    if let Err(error) = &ended {
        let exit = error.exit().code();
        match patience_of {
            // Its launcher has read why, and says what follows.
            Patience::Drain => tracing::debug!(%error, exit, "the worker cannot go on"),
            Patience::SecondAborts => tracing::error!(%error, exit, "the worker cannot go on"),
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

/// Asks the kernel for a signal when the launcher dies, in case another process holds our stdin open.
fn tie_to(launcher: u32) -> anyhow::Result<()> {
    set_pdeathsig(Signal::SIGTERM).context("prctl(PR_SET_PDEATHSIG)")?;
    // The launcher may have died before the request.
    if getppid().as_raw() != launcher as i32 {
        bail!("the launcher (process {launcher}) is gone");
    }
    Ok(())
}

/// Reads the first control line.
fn assigned(crashes: &CrashRecords, settings: &LiveSettings) -> anyhow::Result<Assignment> {
    let mut line = String::new();
    io::stdin().lock().take(MAX_LINE as u64).read_line(&mut line).context("no assignment on stdin")?;
    if line.len() == MAX_LINE {
        bail!("the assignment is longer than a control line may be ({MAX_LINE} bytes)");
    }
    match decode(line.trim_end())? {
        Command::Start { assignment, crashes: records, paused } => {
            crashes.learn(records);
            settings.pause(paused);
            // The error's text would repeat the value, which holds a password.
            serde_json::from_value(assignment)
                .map_err(|_| anyhow!("the assignment is not as this version writes it"))
        }
        _ => bail!("the first command must be `start`"),
    }
}

fn by_hand(arguments: &Worker, registry: &Registry) -> anyhow::Result<Assignment> {
    let settings = registry.load(&arguments.settings, &[])?.settings;
    let (_, pool) = pool_named(&settings.pools, arguments.pool.as_deref())?;
    let host = Host::here();
    let device = own_device(&arguments.device, &pool.name, &host)?;
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

/// The device of a worker started by hand. For a GPU, the process is started again with only that GPU visible,
/// as a launcher does.
fn own_device(asked: &str, pool: &str, host: &Host) -> anyhow::Result<String> {
    if asked == "cpu" {
        return Ok(asked.to_owned());
    }
    let uuid = host.device(asked, pool).map_err(|error| WorkerError::Device(error.to_string()))?;
    with_environment(&[(VISIBLE, uuid.clone()), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned())])?;
    Ok(uuid)
}

/// Follows the launcher's commands on a separate thread: stdin blocks, and when the launcher is gone this
/// thread ends the process even if all others hang.
fn follow_commands(stop: Stop, control: Control) -> io::Result<()> {
    thread::Builder::new().name("commands".into()).spawn(move || {
        let mut lines = io::stdin().lock();
        loop {
            let mut line = String::new();
            match lines.by_ref().take(MAX_LINE as u64).read_line(&mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => match decode(line.trim_end()) {
                    Ok(command) => obey(command, &stop, &control),
                    Err(error) => tracing::warn!(%error, "unreadable command"),
                },
            }
        }
        stop.advance(Phase::Returning, "the launcher is gone");
        thread::sleep(ORPHANED);
        // Killed, not exited: exit handlers of libraries would wait for a driver that hangs.
        let _ = kill(Pid::this(), Signal::SIGKILL);
    })?;
    Ok(())
}

fn obey(command: Command, stop: &Stop, control: &Control) {
    match command {
        Command::Finish => drop(stop.advance(Phase::Finishing, "launcher")),
        Command::Drain => drop(stop.advance(Phase::Returning, "launcher")),
        Command::Abort => drop(stop.advance(Phase::Aborting, "launcher")),
        Command::CrashRecords { tasks } => control.crashes.learn(tasks),
        Command::Pause => control.settings.pause(true),
        Command::Resume => control.settings.pause(false),
        Command::SetBatch(change) => control.settings.set_batch(change),
        Command::LogLevel { filter } => match telemetry::set_filter(&filter) {
            Ok(()) => tracing::info!(filter, "logging by another filter"),
            Err(problem) => tracing::warn!(filter, problem, "not a log filter"),
        },
        // Nobody receives it where there is no session, and so no task.
        Command::Cancel(cancellation) => {
            if let Some(job) = &cancellation.job {
                control.withdrawn.add(job_queue(job), Instant::now());
            }
            if let Some(stop) = &cancellation.stop {
                control.withdrawn.add_stop(stop.clone(), Instant::now());
            }
            if let Err(SendError(cancellation)) = control.cancellations.send(cancellation)
                && cancellation.task.is_some()
            {
                control.reporter.mention(&Event::Cancelled { cancellation, tasks: 0 });
            }
        }
        Command::Start { .. } => tracing::warn!("already started"),
    }
}

/// Longest wait for sending the last spans.
const LAST: Duration = Duration::from_secs(1);

/// The tracer of a worker, off where the settings say so. If it cannot be made, the worker runs without it.
fn tracer(assignment: &Assignment) -> Traces {
    let Some(endpoint) = &assignment.telemetry.otlp_endpoint else { return Traces::default() };
    let is_embedded = assignment.broker.delivery_timeout().is_none();
    let spec = load_spec(assignment);
    let place = traces::Place {
        worker: &assignment.worker,
        slot: &assignment.slot,
        device: &assignment.device,
        model: spec.model_name(),
        queue: &assignment.pool.task_queue,
        system: if is_embedded { "sconce" } else { "rabbitmq" },
    };
    let started = Traces::start(endpoint, assignment.telemetry.trace_sample, place);
    started.unwrap_or_else(|error| {
        tracing::warn!(endpoint, error, "no spans will be exported");
        Traces::default()
    })
}

/// Sends the last spans of a worker that has ended, unless it is aborting.
async fn send_last(traces: Traces, stop: &Stop, ended: &Result<Ended, WorkerError>) {
    if matches!(ended, Ok(Ended::Aborted)) {
        return;
    }
    tokio::select! {
        () = stop.reached(Phase::Aborting) => {}
        _ = tokio::task::spawn_blocking(move || traces.finish(LAST)) => {}
    }
}
