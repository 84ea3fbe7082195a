//! Which code serves a pool's `model` setting: `echo`, what a user registered, else a sentence
//! encoder. Monomorphises the worker for each model type; from here on it is a plain function.

use std::collections::BTreeMap;

use futures_util::future::BoxFuture;

use super::{bench_device, link};
use crate::config::{Assignment, Settings};
use crate::launcher::{Host, LaunchError, Needs, fit, plan};
use crate::model::echo::Echo;
use crate::model::sentence::{self, SentenceEncoder};
use crate::model::{Footprint, LoadError, LoadSpec, Model};
use crate::shutdown::Stop;
use crate::worker::{self, Control, Ended, WorkerError, load_spec};

/// Runs a worker of one model type.
pub(super) type Runner =
    for<'a> fn(&'a Assignment, Stop, &'a Control) -> BoxFuture<'a, Result<Ended, WorkerError>>;

/// What a worker of one model type takes of its device.
type Estimate = fn(&LoadSpec, usize) -> Option<Footprint>;

/// The models that this program serves.
pub struct Registry {
    named: BTreeMap<String, Served>,
}

/// One model type.
#[derive(Clone, Copy)]
struct Served {
    run: Runner,
    footprint: Estimate,
    measure: bench_device::Measure,
}

impl Served {
    fn of<M: Model>() -> Self {
        Self { run: run::<M>, footprint: M::footprint, measure: bench_device::measure::<M> }
    }
}

impl Default for Registry {
    /// The built-in models.
    fn default() -> Self {
        Self { named: BTreeMap::new() }.with::<Echo>("echo")
    }
}

impl Registry {
    /// Adds a model of your own: it serves pools whose `model` is `name`, `name:…` or `name?…`; the
    /// whole setting reaches [`Model::load`] as `LoadSpec::source`.
    #[must_use]
    pub fn with<M: Model>(mut self, name: &str) -> Self {
        self.named.insert(name.to_owned(), Served::of::<M>());
        self
    }

    /// Who serves `model`.
    pub(super) fn runner(&self, model: &str) -> Runner {
        self.served(model).run
    }

    /// What measures `model` on a device, without a queue.
    pub(super) fn measure(&self, model: &str) -> bench_device::Measure {
        self.served(model).measure
    }

    /// The slots that settings mean on a host, if they fit it.
    pub(super) fn plan(&self, settings: &Settings, host: &Host) -> Result<Vec<Assignment>, LaunchError> {
        let slots = plan(settings, host)?;
        fit(&slots, &host.gpus, |slot| {
            let estimate = self.served(&slot.pool.model).footprint;
            let Footprint { weights, working } = estimate(&load_spec(slot), slot.max_tokens())?;
            Some(Needs { weights, working })
        })?;
        Ok(slots)
    }

    /// The same, while workers run that hold the memory they would need: who finds too little will say so.
    pub(super) fn slots(&self, settings: &Settings, host: &Host) -> Result<Vec<Assignment>, LaunchError> {
        plan(settings, host)
    }

    /// The digest of `model`'s files; none for one that goes by a registered name, which alone knows what
    /// it is loaded from.
    pub(super) fn weights(&self, model: &str) -> Result<Option<String>, LoadError> {
        if self.registered(model).is_some() { Ok(None) } else { sentence::digest(model).map(Some) }
    }

    fn served(&self, model: &str) -> Served {
        self.registered(model).unwrap_or_else(Served::of::<SentenceEncoder>)
    }

    fn registered(&self, model: &str) -> Option<Served> {
        let name = model.split([':', '?']).next().unwrap_or(model);
        self.named.get(name).copied()
    }
}

fn run<'a, M: Model>(
    assignment: &'a Assignment,
    stop: Stop,
    control: &'a Control,
) -> BoxFuture<'a, Result<Ended, WorkerError>> {
    Box::pin(worker::run::<M>(assignment, link::open, stop, control))
}
