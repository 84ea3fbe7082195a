//! Decides which code serves a pool's `model` setting: the code that is registered under this name, else the built-in
//! family that recognizes the model's files (`model::registry`). Other code knows a model only as a [`Starter`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::ptr;

use anyhow::Context as _;

use crate::cli;
use crate::commands::exits::ExitsWith as _;
use crate::config::{
    Assignment, ConfigError, Dtype, LoadedSettings, OptionProblem, Pool, PythonClass, PythonPlace, Settings,
    check_options,
};
use crate::engine::{Starter, assuming, chosen, continuous, foreign, one_pass, strict_refusal};
use crate::launcher::{Host, fit, plan};
use crate::model::family::{Description, Family, MakeSample, Sample};
use crate::model::load::{ModelFiles, digest_of_file, weights_size, widened_types};
use crate::model::registry::{self, Load, Register, Served, served, served_here};
use crate::model::tasks::embed;
use crate::model::{Device, Forward, Generate, LoadError, LoadSpec, Processor, Route};
use crate::protocol::requests::bodies_of_texts;
use crate::python;
use crate::shutdown::Exit;
use crate::worker::{load_spec, pool_spec};

/// The models that this program serves.
#[derive(Clone)]
pub struct Registry {
    /// Models that are served by their name: the part of `pool.model` before the first `:` or `?`.
    named: BTreeMap<String, Named>,
    /// The families that serve models by their files.
    by_files: Vec<(&'static Family, Starter)>,
    /// The routes of classes in Python that were imported, by the pool's `model`.
    classes: BTreeMap<String, &'static [Route]>,
}

/// The code that serves a name.
#[derive(Clone)]
struct Named {
    starter: Starter,
    /// None for a model that is not built in. Only its own code knows its options.
    family: Option<&'static Family>,
}

impl Default for Registry {
    /// The built-in models.
    fn default() -> Self {
        let mut built_in = Self { named: BTreeMap::new(), by_files: Vec::new(), classes: BTreeMap::new() };
        registry::register(&mut built_in);
        built_in
    }
}

impl Register for Registry {
    fn one_pass<P, F>(&mut self, family: &'static Family, load: Load<P, F>)
    where
        P: Processor,
        F: Forward<Input = P::Input, Output = P::Output>,
    {
        self.add(family, one_pass(with_option_check(family, load)));
    }

    fn sequences<P, G>(&mut self, family: &'static Family, load: Load<P, G>)
    where
        P: Processor,
        G: Generate<Prompt = P::Input, Piece = P::Piece, Output = P::Output>,
    {
        self.add(family, continuous(with_option_check(family, load)));
    }
}

/// Wraps `load`, so that the pool's options are checked before the model is loaded.
fn with_option_check<P: 'static, N: 'static>(
    family: &'static Family,
    load: Load<P, N>,
) -> impl Fn(&LoadSpec, &Device) -> Result<(P, N), LoadError> + Send + Sync + 'static {
    move |spec, device| {
        family.check_options(spec)?;
        load(spec, device)
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
        self.named.insert(name.to_owned(), Named { starter: one_pass(load), family: None });
        self
    }

    /// Adds a model of your own that generates sequences in many steps. `name` and `load` are as in
    /// [`with_forward`](Self::with_forward).
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
        self.named.insert(name.to_owned(), Named { starter: continuous(load), family: None });
        self
    }

    /// Adds a built-in family.
    fn add(&mut self, family: &'static Family, starter: Starter) {
        match family.files() {
            None => {
                let named = Named { starter, family: Some(family) };
                self.named.insert(family.name.to_owned(), named);
            }
            Some(rules) => {
                let assumptions = |spec: &LoadSpec| {
                    Ok((rules.assumptions)(&Description::read(&ModelFiles::locate(&spec.source)?)?))
                };
                self.by_files.push((family, assuming(starter, assumptions)));
            }
        }
    }

    /// The code that serves the pool of an assignment. If there is none, loading the model fails.
    pub(super) fn starter(&self, assignment: &Assignment) -> Starter {
        let pool = &assignment.pool;
        if pool.python_class().is_some() {
            let assignment = assignment.clone();
            return foreign(move |spec, wake| python::load(&assignment, spec, wake));
        }
        if let Some(named) = self.named(&pool.model) {
            return named.starter.clone();
        }
        let (task, by_files) = (pool.task.clone(), self.by_files.clone());
        chosen(move |spec| {
            let Served { architecture, family, .. } = served(&spec.source, task.as_deref())?;
            let registered = by_files.iter().find(|(known, _)| ptr::eq(*known, family));
            registered
                .map(|(_, starter)| starter.clone())
                .ok_or_else(|| spec.unsupported(format!("no code is registered for {architecture}")))
        })
    }

    /// The same registry, which also knows the routes of these pools' classes in Python. It imports them, in processes
    /// without a GPU.
    ///
    /// # Errors
    /// A class cannot be imported on this host.
    pub(super) fn with_classes<'a>(&self, pools: impl IntoIterator<Item = &'a Pool>) -> anyhow::Result<Self> {
        let mut known = self.clone();
        for pool in pools.into_iter().filter(|pool| pool.python_class().is_some()) {
            let described = python::describe(pool, &pool_spec(pool, "cpu"))
                .with_context(|| format!("pool {:?}", pool.name))
                .exits_with(Exit::ModelFailed)?;
            known.classes.insert(pool.model.clone(), described.routes());
        }
        Ok(known)
    }

    /// As [`with_classes`](Self::with_classes), for a command that makes tasks for a pool unless it is given a `--url`.
    ///
    /// # Errors
    /// The pool's class in Python is needed, and cannot be imported on this host.
    pub(super) fn for_tasks(&self, pool: &Pool, url: Option<&str>) -> anyhow::Result<Self> {
        let known = match url {
            Some(_) => return Ok(self.clone()),
            None => self.with_classes([pool]),
        };
        known.context("give --url, since no class tells the pool's URLs on this host").exits_with(Exit::Usage)
    }

    /// Loads the settings, and checks the options of each pool's model if its files are on this host.
    ///
    /// # Errors
    /// The operator must change the settings.
    pub(super) fn load(
        &self,
        settings: &cli::SettingsArguments,
        flags: &[(String, String)],
    ) -> Result<LoadedSettings, ConfigError> {
        let mut loaded = super::load(settings, flags)?;
        self.resolve_folders(&mut loaded);
        let pools = loaded.settings.pools.iter().enumerate();
        let problems = pools.flat_map(|(index, pool)| {
            self.option_problems(pool).into_iter().map(move |problem| (index, problem))
        });
        loaded.check_option_problems(problems)?;
        Ok(loaded)
    }

    /// Replaces each pool's `model` by the full path of the folder or file that it names. Leaves the names of
    /// registered models and the ids of the hub unchanged. Sets `missing_folder` for each id of the hub.
    pub(super) fn resolve_folders(&self, loaded: &mut LoadedSettings) {
        for index in 0..loaded.settings.pools.len() {
            let Some(folder) = loaded.model_folder(index) else { continue };
            let pool = &mut loaded.settings.pools[index];
            // `~` is expanded where the model is loaded.
            if self.is_opaque(pool) || pool.model.starts_with('~') {
                continue;
            }
            if ModelFiles::is_path(&pool.model) || folder.is_dir() {
                pool.model = folder.display().to_string();
            } else {
                pool.missing_folder = Some(folder);
            }
        }
    }

    /// The problems of a pool's options, as far as they can be found on this host.
    fn option_problems(&self, pool: &Pool) -> Vec<OptionProblem> {
        let Some(family) = self.family(pool) else { return Vec::new() };
        let problems = check_options(family.options, &pool.options);
        match family.files() {
            // Which values are allowed may depend on the model's files.
            Some(rules) if problems.is_empty() => match (rules.check)(&pool_spec(pool, "")) {
                Err(LoadError::Option { problem, .. }) => vec![*problem],
                _ => problems,
            },
            _ => problems,
        }
    }

    /// The built-in family of a pool's model; none if the model is not built in, or its files are not on this host.
    fn family(&self, pool: &Pool) -> Option<&'static Family> {
        match self.named(&pool.model) {
            Some(named) => named.family,
            None if pool.python_class().is_some() => None,
            None => Some(served_here(&pool.model, pool.task.as_deref()).ok()??.family),
        }
    }

    /// Whether only the model's own code knows what it is: it is registered under its name, or is a class in Python.
    fn is_opaque(&self, pool: &Pool) -> bool {
        self.named(&pool.model).is_some() || pool.python_class().is_some()
    }

    /// Returns the function that makes tasks for a pool from texts, for this URL if there is one, else for the first URL of
    /// the pool. If that is not known either, it makes requests of `/v1/embeddings`.
    pub(super) fn sample(&self, pool: &Pool, url: Option<&str>) -> Box<MakeSample> {
        let class_url = || Some(self.classes.get(&pool.model)?.first()?.url);
        let Some(url) = url.or_else(class_url) else {
            return Box::new(self.family(pool).unwrap_or(&embed::FAMILY).sample);
        };
        let named = self.named.values().filter_map(|named| named.family);
        let mut families = self.by_files.iter().map(|(family, _)| *family).chain(named);
        if let Some(family) = families.find(|family| (family.sample)(&[String::new()]).url == Some(url)) {
            return Box::new(family.sample);
        }
        // A command makes one such function.
        let url: &'static str = Box::leak(url.to_owned().into_boxed_str());
        Box::new(move |texts| {
            // A request that compares texts is one body, in which the first text is compared with all.
            let compared = [texts.get(..1).unwrap_or_default(), texts].concat();
            let mut bodies = bodies_of_texts(url, &compared, false);
            match bodies.pop() {
                Some(body) if bodies.is_empty() || texts.len() == 1 => {
                    Sample { url: Some(url), body: body.into(), inputs: texts.len() }
                }
                _ => Sample::of_texts(url, "input", texts),
            }
        })
    }

    /// The first route of a pool; none if it is not known, as of [`routes`](Self::routes).
    pub(super) fn route(&self, pool: &Pool) -> Option<&'static Route> {
        self.routes(pool)?.first()
    }

    /// The routes that a pool's model answers; none if it is not built in, its files are not on this host, or it is a class
    /// in Python that was not imported.
    fn routes(&self, pool: &Pool) -> Option<&'static [Route]> {
        match self.named(&pool.model) {
            Some(named) => named.family.map(|family| family.routes),
            None if pool.python_class().is_some() => self.classes.get(&pool.model).copied(),
            None => Some(served_here(&pool.model, pool.task.as_deref()).ok()??.routes),
        }
    }

    /// The name of the code that serves a pool's model; none if the model's files are not on this host.
    ///
    /// # Errors
    /// No code serves it.
    pub(super) fn describe(&self, pool: &Pool) -> Result<Option<String>, LoadError> {
        if self.named(&pool.model).is_some() {
            return Ok(Some("registered".to_owned()));
        }
        if pool.python_class().is_some() {
            return Ok(Some("a class in Python".to_owned()));
        }
        Ok(served_here(&pool.model, pool.task.as_deref())?.map(|served| served.to_string()))
    }

    /// As [`describe`](Self::describe), but also checks the model's files, as far as that is possible without loading
    /// them. `slots` are those of this host; the first of the pool decides for which device is checked.
    ///
    /// # Errors
    /// No code serves the model, or a file is missing, invalid or truncated.
    pub(super) fn check(&self, pool: &Pool, slots: &[Assignment]) -> Result<Option<String>, LoadError> {
        if !self.is_opaque(pool) {
            // Also refuses what is neither a folder nor can be an id of the hub.
            ModelFiles::locate(&pool.model)?;
        }
        let mut chosen = None;
        if let Some(rules) = self.family(pool).and_then(Family::files) {
            let spec = spec_here(pool, slots);
            let ((), dtype) = spec.first_that(rules.check)?;
            chosen = spec.is_dtype_auto.then_some(dtype);
        }
        let assumptions = self.assumptions(pool)?;
        if pool.strict_model && !assumptions.is_empty() {
            return Err(strict_refusal(&pool.model, &assumptions));
        }
        let description = self.describe(pool)?;
        Ok(description.map(|description| match chosen {
            None => description,
            Some(Dtype::F32) => format!("{description}, in f32 (dtype = \"auto\")"),
            Some(dtype) => format!(
                "{description}, in {} (dtype = \"auto\") if its results are close to those in f32",
                dtype.name()
            ),
        }))
    }

    /// How this host's CPU multiplies bf16, and how it keeps the types of a GGUF file, where that matters to a pool.
    /// Empty for a model that is not built in, and if its files are not on this host.
    pub(super) fn notes(&self, pool: &Pool, slots: &[Assignment]) -> Vec<String> {
        if self.family(pool).and_then(Family::files).is_none() {
            return Vec::new();
        }
        let spec = spec_here(pool, slots);
        spec.bf16_note().into_iter().chain(widened_types(&spec)).collect()
    }

    /// What a pool's model assumes because its files do not tell it. Empty for a model that is not built in, and if its
    /// files are not on this host.
    ///
    /// # Errors
    /// As [`describe`](Self::describe).
    pub(super) fn assumptions(&self, pool: &Pool) -> Result<Vec<String>, LoadError> {
        match self.is_opaque(pool) {
            true => Ok(Vec::new()),
            false => registry::assumptions(&pool.model, pool.task.as_deref()),
        }
    }

    /// The URLs that a pool answers; none for a registered model and for a class in Python that was not imported, because
    /// only their code knows their URLs. Empty if the model's files are not on this host.
    pub(super) fn urls(&self, pool: &Pool) -> Option<Vec<&'static str>> {
        match self.routes(pool) {
            Some(routes) if self.named(&pool.model).is_none() => {
                Some(routes.iter().map(|route| route.url).collect())
            }
            _ if self.is_opaque(pool) => None,
            _ => Some(Vec::new()),
        }
    }

    /// Whether a pool answers `url`, as far as is known.
    pub(super) fn answers(&self, pool: &Pool, url: &str) -> bool {
        self.urls(pool).is_none_or(|urls| urls.contains(&url))
    }

    /// Plans the slots on a host. Checks that its devices have enough memory, and that each model is served.
    ///
    /// # Errors
    /// The operator must change the settings.
    pub(super) fn plan(&self, settings: &Settings, host: &Host) -> anyhow::Result<Vec<Assignment>> {
        let slots = plan(settings, host)?;
        for pool in &settings.pools {
            // Other problems of the model's files may be temporary; the worker reports them.
            if let Err(error @ LoadError::Unsupported { .. }) = self.check(pool, &slots) {
                return Err(error)
                    .with_context(|| format!("pool {:?}", pool.name))
                    .exits_with(Exit::ModelFailed);
            }
        }
        fit(&slots, &host.gpus, |slot| match self.is_opaque(&slot.pool) {
            true => None,
            false => weights_size(&load_spec(slot)),
        })?;
        Ok(slots)
    }

    /// The digest of the files of a pool's model, or of the file of its class in Python. None for a registered model, because
    /// only its code knows what it loads, and for a module of which only the interpreter knows where it is.
    pub(super) fn weights_digest(&self, pool: &Pool) -> Result<Option<String>, LoadError> {
        if let Some(PythonClass { place, .. }) = pool.python_class() {
            return python_file(place, &pool.python.path).map(|file| digest_of_file(&file)).transpose();
        }
        match self.is_opaque(pool) {
            true => Ok(None),
            false => {
                let digest = registry::digest(&pool.model, pool.task.as_deref());
                digest.map(Some).map_err(|error| error.without_folder(pool.missing_folder.as_deref()))
            }
        }
    }

    /// The code that is registered under the name in `model`.
    fn named(&self, model: &str) -> Option<&Named> {
        let name = model.split([':', '?']).next().unwrap_or(model);
        self.named.get(name)
    }
}

/// The file of a class in Python; of a module only if it is in one of these folders.
fn python_file(place: PythonPlace<'_>, folders: &[String]) -> Option<PathBuf> {
    match place {
        PythonPlace::File(file) => Some(file.into()),
        PythonPlace::Module(module) => {
            let path = module.replace('.', "/");
            let mut files = folders.iter().flat_map(|folder| {
                ["", "/__init__"].map(|ending| PathBuf::from(format!("{folder}/{path}{ending}.py")))
            });
            files.find(|file| file.is_file())
        }
    }
}

/// What a pool's model is loaded from here. The first of the pool's slots tells the device.
fn spec_here(pool: &Pool, slots: &[Assignment]) -> LoadSpec {
    let device = slots.iter().find(|slot| slot.pool.name == pool.name).map(|slot| &*slot.device);
    pool_spec(pool, device.unwrap_or_default())
}
