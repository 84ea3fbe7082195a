//! The model thread: opens the device (`device-or-fail`), checks that it computes correctly and fast enough,
//! loads the model, computes the probe, and runs the loop. Owns the thread.

use std::io;
use std::sync::Arc;
use std::thread;

use tokio::sync::oneshot as oneshot_channel;

use super::batch::Network;
use super::continuous::{Continuous, Probe, SequenceQueue};
use super::job::Handle;
use super::oneshot::{OneShot, WaitingInputs};
use super::run_loop::{Loop, Waker, run};
use super::{Loaded, Loading, Memory, Notices, Setup};
use crate::model::ops::use_features;
use crate::model::{Device, Dtype, Forward, Generate, LoadError, LoadSpec, Processor, device};

/// Starts engines of one type of model.
#[derive(Clone)]
pub struct Starter(Arc<Assemble>);

/// Loads a model and makes its loop.
type Assemble = dyn Fn(Setup, Waker) -> Result<(Loaded, Box<dyn Loop>), LoadError> + Send + Sync;

/// Makes a starter of engines for a one-pass model. `load` is called once for each engine, on its model thread, with
/// the opened device.
pub fn oneshot<P, F>(
    load: impl Fn(&LoadSpec, &Device) -> Result<(P, F), LoadError> + Send + Sync + 'static,
) -> Starter
where
    P: Processor,
    F: Forward<Input = P::Input, Output = P::Output>,
{
    Starter(Arc::new(move |setup, waker| {
        let Setup { spec, min_speed, policy, prepared_bytes, observer } = setup;
        let Opened { model: (processor, network), dtype, name, _proven } = open(&spec, min_speed, &load)?;
        let spec = LoadSpec { dtype, ..spec };
        let (notices, receiver) = Notices::new();
        let mut network = Network::new(network, observer, notices);
        network.try_probe(&processor).map_err(|error| error.load_error(&spec, &name))?;
        let waiting = Arc::new(WaitingInputs::new(policy, network.is_asynchronous(), waker));
        let model_loop = OneShot::new(network, waiting.clone());
        let engine = Arc::new(Handle::new(processor, waiting, Memory::new(prepared_bytes)));
        let assumptions = Vec::new();
        Ok((Loaded { engine, notices: receiver, device: name, dtype, assumptions }, Box::new(model_loop)))
    }))
}

/// Makes a starter of engines for a model whose sequences join and leave. `load` is called as in [`oneshot`].
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
        let queue = Arc::new(SequenceQueue::new(capacity, policy, waker));
        let mut model_loop = Continuous::new(network, queue.clone(), observer, notices);
        if let Some(probe) = probe {
            model_loop.try_probe(&processor, probe).map_err(|error| error.load_error(&spec, &name))?;
        }
        let engine = Arc::new(Handle::new(processor, queue, Memory::new(prepared_bytes)));
        let assumptions = Vec::new();
        Ok((Loaded { engine, notices: receiver, device: name, dtype, assumptions }, Box::new(model_loop)))
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

/// The refusal of a strict pool's model of which something must be assumed.
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

/// Checks the device, opens it, and loads a model onto it. If the number format is chosen, it is the first candidate that
/// the model takes and that passes the checks.
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
        Ok((load(spec, &device)?, name, proven))
    });
    let ((model, name, proven), dtype) = loaded?;
    Ok(Opened { model, dtype, name, _proven: proven })
}

impl Starter {
    /// Starts the model thread, which loads the model and computes until the process ends.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(&self, setup: Setup) -> io::Result<Loading> {
        let (loaded, loading) = oneshot_channel::channel();
        let assemble = self.0.clone();
        thread::Builder::new().name("model".into()).spawn(move || {
            run_model(&*assemble, setup, loaded);
        })?;
        Ok(loading)
    }
}

fn run_model(assemble: &Assemble, setup: Setup, sender: oneshot_channel::Sender<Result<Loaded, LoadError>>) {
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
            let (loaded, loading) = oneshot_channel::channel();
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
