//! The model thread: opens the device (`device-or-fail`), checks that it computes correctly and fast enough,
//! loads the model, computes the probe, and runs the loop. Owns the thread.

use std::io;
use std::sync::Arc;
use std::thread;

use tokio::sync::oneshot;

use super::batch::Network;
use super::continuous::{Continuous, Probe, SequenceQueue};
use super::job::Handle;
use super::one_pass::{OnePass, WaitingInputs};
use super::run_loop::{Loop, Waker, run};
use super::streams::{self, StreamLoop, Streams};
use super::{ForeignProcess, Loaded, Loading, Memory, Notices, Setup};
use crate::model::ops::use_features;
use crate::model::{Device, Dtype, Forward, Generate, LoadError, LoadSpec, Processor, Unfit, device};

/// Only the model's process has opened the device, so a failure of the device is a failure of that process.
fn as_process_failure(model: &str) -> impl Fn(LoadError) -> LoadError {
    move |error| match error {
        LoadError::Device { reason, .. } => LoadError::Process { model: model.to_owned(), reason },
        other => other,
    }
}

/// Starts engines of one type of model.
#[derive(Clone)]
pub struct Starter(Arc<Assemble>);

/// Loads a model and makes its loop.
type Assemble = dyn Fn(Setup, Waker) -> Result<(Loaded, Box<dyn Loop>), LoadError> + Send + Sync;

/// Makes a starter of engines for a one-pass model. `load` is called once for each engine, on its model thread, with
/// the opened device.
pub fn one_pass<P, F>(
    load: impl Fn(&LoadSpec, &Device) -> Result<(P, F), LoadError> + Send + Sync + 'static,
) -> Starter
where
    P: Processor,
    F: Forward<Input = P::Input, Output = P::Output>,
{
    Starter(Arc::new(move |setup, waker| {
        let Opened { model, dtype, name, _proven } = open(&setup.spec, setup.min_speed, &load)?;
        loop_of_batches(setup, waker, model, dtype, name)
    }))
}

/// Makes the loop of a one-pass model, which is loaded already, and computes the probe.
fn loop_of_batches<P, F>(
    setup: Setup,
    waker: Waker,
    (processor, network): (P, F),
    dtype: Dtype,
    device: String,
) -> Result<(Loaded, Box<dyn Loop>), LoadError>
where
    P: Processor,
    F: Forward<Input = P::Input, Output = P::Output>,
{
    let Setup { spec, policy, prepared_bytes, observer, .. } = setup;
    let spec = LoadSpec { dtype, ..spec };
    let (notices, receiver) = Notices::new();
    let mut network = Network::new(network, observer, notices);
    network.try_probe(&processor).map_err(|error| error.load_error(&spec, &device))?;
    let waiting = Arc::new(WaitingInputs::new(policy, network.is_asynchronous(), waker));
    let model_loop = OnePass::new(network, waiting.clone());
    let engine = Arc::new(Handle::new(processor, waiting, Memory::new(prepared_bytes)));
    Ok((Loaded::new(engine, receiver, device, dtype), Box::new(model_loop)))
}

/// A model in a process of its own.
pub struct Foreign<P, F, S> {
    /// Its CPU part.
    pub processor: P,
    /// What computes its tasks.
    pub work: ForeignWork<F, S>,
    /// The number format that it says it computes in.
    pub dtype: Dtype,
    /// The process.
    pub process: ForeignProcess,
}

/// How a model in a process of its own works.
pub enum ForeignWork<F, S> {
    /// It computes batches.
    Batches(F),
    /// It runs tasks side by side, each of which gives parts of its reply and ends when it likes.
    Streams(S),
}

/// Makes a starter of engines for a model that is loaded in a process of its own. No device is opened here: the process
/// opens it. `load` is called once, on the model thread, with what wakes the loop.
pub fn foreign<P, F, S>(
    load: impl Fn(&LoadSpec, Waker) -> Result<Foreign<P, F, S>, LoadError> + Send + Sync + 'static,
) -> Starter
where
    P: Processor,
    F: Forward<Input = P::Input, Output = P::Output>,
    S: Streams<Input = P::Input, Piece = P::Piece, Output = P::Output>,
{
    Starter(Arc::new(move |setup, waker| {
        let waker: Arc<dyn Fn() + Send + Sync> = Arc::from(waker);
        let (for_loop, for_process) = (waker.clone(), waker);
        let Foreign { processor, work, dtype, process } = load(&setup.spec, Box::new(move || for_process()))?;
        let (device, waker): (_, Waker) = (setup.spec.device.clone(), Box::new(move || for_loop()));
        let model = setup.spec.source.clone();
        let (loaded, model_loop) = match work {
            ForeignWork::Batches(network) => {
                loop_of_batches(setup, waker, (processor, network), dtype, device)
                    .map_err(as_process_failure(&model))?
            }
            ForeignWork::Streams(mut streams) => {
                streams::try_probe(&processor, &mut streams)
                    .map_err(|error| error.load_error(&setup.spec, &device))
                    .map_err(as_process_failure(&model))?;
                let (notices, receiver) = Notices::new();
                let queue = Arc::new(streams::queue(streams.concurrency(), &setup.policy, waker));
                let model_loop = StreamLoop::new(streams, queue.clone(), setup.observer, notices);
                let engine = Arc::new(Handle::new(processor, queue, Memory::new(setup.prepared_bytes)));
                let model_loop: Box<dyn Loop> = Box::new(model_loop);
                (Loaded::new(engine, receiver, device, dtype), model_loop)
            }
        };
        Ok((Loaded { process: Some(process), ..loaded }, model_loop))
    }))
}

/// Makes a starter of engines for a model whose sequences join and leave. `load` is called as in [`one_pass`].
pub fn continuous<P, G>(
    load: impl Fn(&LoadSpec, &Device) -> Result<(P, G), LoadError> + Send + Sync + 'static,
) -> Starter
where
    P: Processor,
    G: Generate<Prompt = P::Input, Piece = P::Piece, Output = P::Output>,
{
    Starter(Arc::new(move |setup, waker| {
        let Setup { spec, min_speed, policy, prepared_bytes, observer } = setup;
        let Opened { model: (processor, network), dtype, name, _proven } = open(&spec, min_speed, &load)?;
        let spec = LoadSpec { dtype, ..spec };
        let (notices, receiver) = Notices::new();
        let probe = Probe::of(&processor).map_err(|error| error.load_error(&spec, &name))?;
        let capacity = network.capacity();
        let capacity = probe.as_ref().map_or(capacity, |probe| probe.subtract_from(capacity));
        let queue = Arc::new(SequenceQueue::new(capacity, waker));
        let mut model_loop = Continuous::new(network, queue.clone(), policy, observer, notices);
        if let Some(probe) = probe {
            model_loop.try_probe(&processor, probe).map_err(|error| error.load_error(&spec, &name))?;
        }
        let engine = Arc::new(Handle::new(processor, queue, Memory::new(prepared_bytes)));
        Ok((Loaded::new(engine, receiver, name, dtype), Box::new(model_loop)))
    }))
}

/// Makes a starter of engines whose type is known only once the model's files have been read. `choose` is called on the
/// model thread.
pub fn chosen(choose: impl Fn(&LoadSpec) -> Result<Starter, LoadError> + Send + Sync + 'static) -> Starter {
    Starter(Arc::new(move |setup, waker| choose(&setup.spec)?.0(setup, waker)))
}

/// Makes a starter that also finds out what the model assumes, before it is loaded. If the pool is strict, a model that
/// assumes something is refused.
pub fn assuming(
    starter: Starter,
    assumptions: impl Fn(&LoadSpec) -> Result<Vec<String>, LoadError> + Send + Sync + 'static,
) -> Starter {
    Starter(Arc::new(move |setup, waker| {
        let assumptions = assumptions(&setup.spec)?;
        if setup.spec.is_strict && !assumptions.is_empty() {
            return Err(strict_refusal(&setup.spec.source, &assumptions));
        }
        let (loaded, model_loop) = starter.0(setup, waker)?;
        Ok((Loaded { assumptions, ..loaded }, model_loop))
    }))
}

/// Why a strict pool refuses a model whose files do not tell everything.
pub fn strict_refusal(model: &str, assumptions: &[String]) -> LoadError {
    let reason =
        format!("strict_model is true, and the model's files do not tell all: {}", assumptions.join("; "));
    LoadError::Unsupported { model: model.to_owned(), reason }
}

/// A model on its device.
struct Opened<M> {
    model: M,
    /// The number format that the model was loaded in.
    dtype: Dtype,
    /// The device's name.
    name: String,
    /// While it exists, opening the device again is cheap.
    _proven: device::Proven,
}

/// Checks the device, opens it, and loads a model onto it. If the settings name no number format, it is the first
/// candidate that the model takes and that passes the checks.
fn open<M>(
    spec: &LoadSpec,
    min_speed: f64,
    load: impl Fn(&LoadSpec, &Device) -> Result<M, LoadError>,
) -> Result<Opened<M>, LoadError> {
    if spec.device == "cpu" {
        use_features(spec.cpu_features)
            .map_err(|reason| LoadError::Device { device: spec.device.clone(), reason })?;
        if let Some(note) = spec.bf16_note() {
            tracing::info!("{note}");
        }
    }
    let loaded = spec.first_that(|spec| {
        let proven = device::prove(&spec.device, spec.dtype, min_speed)?;
        let (device, name) = device::open(&spec.device)?;
        let model = load(spec, &device)
            .map_err(|error| judge_results(error, spec, |in_f32| load(in_f32, &device).map(drop)))?;
        Ok((model, name, proven))
    });
    let ((model, name, proven), dtype) = loaded?;
    Ok(Opened { model, dtype, name, _proven: proven })
}

/// If the results of a model differ from those of a CPU in f32, decides whether the number format or the device is at
/// fault. Before, the device has multiplied known matrices correctly in that format. `load` loads the model in f32 onto
/// the same device, and compares the results of that, too.
fn judge_results(
    error: LoadError,
    spec: &LoadSpec,
    load: impl FnOnce(&LoadSpec) -> Result<(), LoadError>,
) -> LoadError {
    let LoadError::Unfit { device, why: Unfit::WrongResult, reason } = error else { return error };
    let dtype = spec.dtype;
    // If the settings name no format, the next candidate is tried instead. The last candidate is f32.
    let in_f32 = if dtype == Dtype::F32 || spec.is_dtype_auto {
        None
    } else if spec.device == "cpu" {
        Some(Ok(()))
    } else {
        Some(load(&LoadSpec { dtype: Dtype::F32, ..spec.clone() }))
    };
    let unfit = |reason| LoadError::Unfit { device: device.clone(), why: Unfit::WrongResult, reason };
    let card = "look at the card (dcgmi diag -r 3, nvidia-smi -q -d ECC) and take it out of `devices`";
    match in_f32 {
        Some(Ok(())) => LoadError::Unsupported {
            model: spec.source.clone(),
            reason: format!(
                "dtype is {:?}, which is unfit for this model on {device}, although f32 is fit: {reason}; set \"f32\" or \
                 \"auto\"",
                dtype.name()
            ),
        },
        Some(Err(error)) => unfit(format!("{reason}; in f32 it does not load either ({error}): {card}")),
        None if dtype == Dtype::F32 && spec.device != "cpu" => unfit(format!("{reason}; {card}")),
        None => unfit(reason),
    }
}

impl Starter {
    /// Starts the model thread, which loads the model and computes until the process ends.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(&self, setup: Setup) -> io::Result<Loading> {
        let (loaded, loading) = oneshot::channel();
        let assemble = self.0.clone();
        thread::Builder::new().name("model".into()).spawn(move || {
            run_model(&*assemble, setup, loaded);
        })?;
        Ok(loading)
    }
}

fn run_model(assemble: &Assemble, setup: Setup, sender: oneshot::Sender<Result<Loaded, LoadError>>) {
    let model_thread = thread::current();
    match assemble(setup, Box::new(move || model_thread.unpark())) {
        Ok((loaded, mut model_loop)) => {
            drop(sender.send(Ok(loaded)));
            run(&mut *model_loop);
            // Not dropped: the process is about to end, and the driver frees everything then. Freeing it here
            // could race with the driver's own shutdown and crash.
            std::mem::forget(model_loop);
        }
        Err(error) => drop(sender.send(Err(error))),
    }
}

/// Other ways to run the loop, for tests: as a task of the caller's runtime, whose time may be paused, or on a thread
/// that can be joined.
#[cfg(test)]
pub(crate) mod paused {
    use tokio::sync::Notify;

    use super::*;
    use crate::engine::run_loop::Next;
    use crate::model::clock;

    impl Starter {
        /// Loads the model and runs its loop on a thread that can be joined.
        pub(crate) fn start_joined(&self, setup: Setup) -> (thread::JoinHandle<()>, Loading) {
            let (loaded, loading) = oneshot::channel();
            let assemble = self.0.clone();
            (thread::spawn(move || run_model(&*assemble, setup, loaded)), loading)
        }

        /// Loads the model here, and runs its loop as a local task of the current runtime.
        pub(crate) fn start_here(&self, setup: Setup) -> Result<Loaded, LoadError> {
            let notify = Arc::new(Notify::new());
            let woken = notify.clone();
            let (loaded, model_loop) = (self.0)(setup, Box::new(move || woken.notify_one()))?;
            tokio::task::spawn_local(drive(model_loop, notify));
            Ok(loaded)
        }
    }

    async fn drive(mut model_loop: Box<dyn Loop>, woken: Arc<Notify>) {
        loop {
            clock::pause();
            let next = model_loop.turn();
            let slept = clock::resume();
            match next {
                Next::Again if slept.is_zero() => tokio::task::yield_now().await,
                Next::Again => tokio::time::sleep(slept).await,
                Next::Sleep(None) => woken.notified().await,
                Next::Sleep(Some(until)) => {
                    let _ = tokio::time::timeout_at(until.into(), woken.notified()).await;
                }
                Next::End => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_number_format_is_at_fault_if_the_model_is_right_in_f32() {
        let unfit = |reason: &str| {
            let (device, reason) = ("GPU-5a".to_owned(), reason.to_owned());
            LoadError::Unfit { device, why: Unfit::WrongResult, reason }
        };
        let spec = |device: &str, dtype| LoadSpec { device: device.into(), dtype, ..LoadSpec::new("m") };
        let on_gpu = spec("GPU-5a", Dtype::F16);
        let is_right = |in_f32: &LoadSpec| {
            assert_eq!(in_f32.dtype, Dtype::F32);
            Ok(())
        };
        let not_tried = |_: &LoadSpec| -> Result<(), LoadError> { panic!("it is not loaded again") };
        for error in [
            judge_results(unfit("off by 7"), &on_gpu, is_right),
            judge_results(unfit("off by 7"), &spec("cpu", Dtype::F16), not_tried),
        ] {
            let LoadError::Unsupported { model, reason } = error else { panic!("{error}") };
            assert_eq!(model, "m");
            assert!(reason.contains("dtype is \"f16\"") && reason.contains("off by 7"), "{reason}");
        }
        let error = judge_results(unfit("off by 7"), &on_gpu, |_| Err(unfit("off by 8")));
        let LoadError::Unfit { reason, .. } = error else { panic!("{error}") };
        assert!(["off by 7", "off by 8", "dcgmi"].iter().all(|it| reason.contains(it)), "{reason}");
        let chosen = LoadSpec { is_dtype_auto: true, ..on_gpu };
        for (spec, advice) in
            [(chosen, false), (spec("GPU-5a", Dtype::F32), true), (spec("cpu", Dtype::F32), false)]
        {
            let error = judge_results(unfit("off by 7"), &spec, not_tried);
            let LoadError::Unfit { reason, .. } = error else { panic!("{error}") };
            assert_eq!(reason.contains("dcgmi"), advice, "{reason}");
        }
    }
}
