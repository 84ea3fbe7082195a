//! Which code serves a pool's `model` setting: `echo`, what a user registered, else a sentence
//! encoder. Monomorphises the worker for each model type; from here on it is a plain function.

use std::collections::BTreeMap;

use futures_util::future::BoxFuture;

use super::link;
use crate::config::Assignment;
use crate::model::Model;
use crate::model::echo::Echo;
use crate::model::sentence::SentenceEncoder;
use crate::shutdown::Stop;
use crate::worker::{self, Control, Ended, WorkerError};

/// Runs a worker of one model type.
pub(super) type Runner =
    for<'a> fn(&'a Assignment, Stop, &'a Control) -> BoxFuture<'a, Result<Ended, WorkerError>>;

/// The models that this program serves.
pub struct Registry {
    named: BTreeMap<String, Runner>,
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
        self.named.insert(name.to_owned(), run::<M>);
        self
    }

    /// Who serves `model`.
    pub(super) fn runner(&self, model: &str) -> Runner {
        let name = model.split([':', '?']).next().unwrap_or(model);
        self.named.get(name).copied().unwrap_or(run::<SentenceEncoder>)
    }
}

fn run<'a, M: Model>(
    assignment: &'a Assignment,
    stop: Stop,
    control: &'a Control,
) -> BoxFuture<'a, Result<Ended, WorkerError>> {
    Box::pin(worker::run::<M>(assignment, link::open, stop, control))
}
