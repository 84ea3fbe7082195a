//! Decides which code serves a pool's `model` setting: the code registered under its name, else the built-in
//! code for the model's files (`model::registry`). Other code knows a model only as a [`Starter`].

use std::collections::BTreeMap;

use anyhow::Context as _;

use crate::commands::exits::ExitsWith as _;
use crate::config::{Assignment, Pool, Settings};
use crate::engine::{Starter, chosen, continuous, oneshot};
use crate::launcher::{Host, fit, plan};
use crate::model::load::weights_size;
use crate::model::registry::{Task, served, served_here};
use crate::model::tasks::{self, embed, generate, image, labels, pairs};
use crate::model::{Device, Forward, Generate, LoadError, LoadSpec, Processor, echo, script};
use crate::shutdown::Exit;
use crate::worker::load_spec;

/// The models that this program serves.
#[derive(Clone)]
pub struct Registry {
    named: BTreeMap<String, Starter>,
}

impl Default for Registry {
    /// The built-in models.
    fn default() -> Self {
        Self { named: BTreeMap::new() }
            .with_forward(echo::ECHO, echo::load)
            .with_generate(script::SCRIPT, script::load)
    }
}

impl Registry {
    /// Adds a model of your own that answers in one pass: it serves pools whose `model` is `name`, `name:…`
    /// or `name?…`. `load` is called in each worker, on the thread that will run the model, with the device
    /// that was opened for it; the whole setting is in [`LoadSpec::source`].
    #[must_use]
    pub fn with_forward<R, F>(
        mut self,
        name: &str,
        load: impl Fn(&LoadSpec, &Device) -> Result<(R, F), LoadError> + Send + Sync + 'static,
    ) -> Self
    where
        R: Processor,
        F: Forward<Input = R::Input, Output = R::Output>,
    {
        self.named.insert(name.to_owned(), oneshot(load));
        self
    }

    /// Adds a model of your own whose sequences take many steps, in the same way.
    #[must_use]
    pub fn with_generate<R, G>(
        mut self,
        name: &str,
        load: impl Fn(&LoadSpec, &Device) -> Result<(R, G), LoadError> + Send + Sync + 'static,
    ) -> Self
    where
        R: Processor,
        G: Generate<Prompt = R::Input, Piece = R::Piece, Output = R::Output>,
    {
        self.named.insert(name.to_owned(), continuous(load));
        self
    }

    /// The code that serves a pool's model. A model that nothing serves is refused when it is loaded.
    pub(super) fn starter(&self, pool: &Pool) -> Starter {
        let task = pool.task.clone();
        self.registered(&pool.model).cloned().unwrap_or_else(|| {
            chosen(move |spec| {
                Ok(match served(&spec.source, task.as_deref())?.task {
                    Task::Embed => oneshot(embed::load),
                    Task::Rerank => oneshot(pairs::load),
                    Task::Classify => oneshot(labels::load),
                    Task::ClassifyImages => oneshot(image::load),
                    Task::Generate => continuous(generate::load),
                })
            })
        })
    }

    /// The name of what serves a pool's model; none where its files are not on this host.
    ///
    /// # Errors
    /// Nothing serves it.
    pub(super) fn describe(&self, pool: &Pool) -> Result<Option<String>, LoadError> {
        if self.registered(&pool.model).is_some() {
            return Ok(Some("registered".to_owned()));
        }
        Ok(served_here(&pool.model, pool.task.as_deref())?.map(|served| served.to_string()))
    }

    /// Whether a pool answers `url`; true if only its code knows.
    pub(super) fn answers(&self, pool: &Pool, url: &str) -> bool {
        if self.registered(&pool.model).is_some() {
            return true;
        }
        let served = served_here(&pool.model, pool.task.as_deref());
        served.ok().flatten().is_some_and(|served| served.task.urls().contains(&url))
    }

    /// The slots of the settings on a host, if they fit it and their models are served.
    ///
    /// # Errors
    /// The operator must change the settings.
    pub(super) fn plan(&self, settings: &Settings, host: &Host) -> anyhow::Result<Vec<Assignment>> {
        let slots = plan(settings, host)?;
        for pool in &settings.pools {
            // Other problems of the model's files may pass; the worker reports them.
            if let Err(error @ LoadError::Unsupported { .. }) = self.describe(pool) {
                return Err(error)
                    .with_context(|| format!("pool {:?}", pool.name))
                    .exits_with(Exit::ModelFailed);
            }
        }
        fit(&slots, &host.gpus, |slot| match self.registered(&slot.pool.model) {
            Some(_) => None,
            None => weights_size(&load_spec(slot)),
        })?;
        Ok(slots)
    }

    /// The digest of `model`'s files; none for a registered model, because only its code knows what it loads.
    pub(super) fn weights(&self, model: &str) -> Result<Option<String>, LoadError> {
        if self.registered(model).is_some() { Ok(None) } else { tasks::digest(model).map(Some) }
    }

    fn registered(&self, model: &str) -> Option<&Starter> {
        let name = model.split([':', '?']).next().unwrap_or(model);
        self.named.get(name)
    }
}
