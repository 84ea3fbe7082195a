//! Lists the built-in families of models, one line each. Decides which of them serves a model, by the architecture that
//! its files name and by the pool's `task`. A model that no family serves is refused, with a list of what is served.

use std::collections::BTreeSet;
use std::fmt;

use super::family::{Description, Family, FileRules, Format};
use super::fields::Keys;
use super::load::ModelFiles;
#[cfg(feature = "candle-transformers")]
use super::tasks::{caption, image_generation, text_image};
use super::tasks::{embed, generate, image, labels, pairs, sparse, speak, token_labels, transcribe};
use super::testing::{echo, script};
use super::{Device, Forward, Generate, LoadError, LoadSpec, Processor, Route};

/// The function that loads a model of a family.
pub type Load<P, N> = fn(&LoadSpec, &Device) -> Result<(P, N), LoadError>;

/// Receives the built-in families, each with its types.
pub trait Register {
    /// A family whose models answer in one pass.
    fn one_pass<P, F>(&mut self, family: &'static Family, load: Load<P, F>)
    where
        P: Processor,
        F: Forward<Input = P::Input, Output = P::Output>;

    /// A family whose sequences take many steps.
    fn sequences<P, G>(&mut self, family: &'static Family, load: Load<P, G>)
    where
        P: Processor,
        G: Generate<Prompt = P::Input, Piece = P::Piece, Output = P::Output>;
}

/// Names every built-in family. Where several serve a model, the first is the default.
pub fn register(families: &mut impl Register) {
    families.one_pass(&pairs::FAMILY, pairs::load);
    families.one_pass(&labels::FAMILY, labels::load);
    families.one_pass(&embed::FAMILY, embed::load);
    families.one_pass(&sparse::FAMILY, sparse::load);
    families.one_pass(&token_labels::FAMILY, token_labels::load);
    families.one_pass(&image::FAMILY, image::load);
    #[cfg(feature = "candle-transformers")]
    families.one_pass(&text_image::FAMILY, text_image::load);
    families.one_pass(&speak::FAMILY, speak::load);
    families.sequences(&generate::FAMILY, generate::load);
    families.sequences(&transcribe::FAMILY, transcribe::load);
    #[cfg(feature = "candle-transformers")]
    families.sequences(&caption::FAMILY, caption::load);
    #[cfg(feature = "candle-transformers")]
    families.sequences(&image_generation::FAMILY, image_generation::load);
    families.one_pass(&echo::FAMILY, echo::load);
    families.sequences(&script::FAMILY, script::load);
}

/// All built-in families.
pub fn families() -> Vec<&'static Family> {
    struct All(Vec<&'static Family>);
    impl Register for All {
        fn one_pass<P, F>(&mut self, family: &'static Family, _: Load<P, F>) {
            self.0.push(family);
        }

        fn sequences<P, G>(&mut self, family: &'static Family, _: Load<P, G>) {
            self.0.push(family);
        }
    }
    let mut all = All(Vec::new());
    register(&mut all);
    all.0
}

/// Checks that requests to `url` may have this field. A pool ignores most unknown fields, because clients send some; a field
/// that a user gives by hand should have an effect. Of a URL that is not built in, nothing is known.
///
/// # Errors
/// A message with the fields that there are.
pub fn check_field(url: &str, name: &str) -> Result<(), String> {
    let fields = families().into_iter().flat_map(|family| family.fields);
    let kinds: Vec<&Keys> = fields.filter(|(known, _)| *known == url).map(|(_, keys)| *keys).collect();
    if kinds.is_empty() || kinds.iter().any(|keys| keys.has(name)) {
        return Ok(());
    }
    let names: BTreeSet<&str> = kinds.iter().flat_map(|keys| keys.supported).copied().collect();
    let names = names.into_iter().collect::<Vec<_>>().join(", ");
    Err(format!("{url} has no such field; it takes {names}"))
}

/// The families whose models are loaded from files, with their rules.
fn families_of_files() -> impl Iterator<Item = (&'static Family, &'static FileRules)> {
    families().into_iter().filter_map(|family| Some((family, family.files()?)))
}

/// What serves a model that is loaded from files.
#[derive(Clone)]
pub struct Served {
    /// The architecture that the files name.
    pub architecture: String,
    /// The family.
    pub family: &'static Family,
    /// The routes that the model answers.
    pub routes: &'static [Route],
}

impl Served {
    /// The family's rules for the model's files.
    pub fn rules(&self) -> Option<&'static FileRules> {
        self.family.files()
    }
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let urls: Vec<&str> = self.routes.iter().map(|route| route.url).collect();
        write!(f, "{} for {} ({})", self.architecture, self.family.name, urls.join(", "))
    }
}

/// Finds the family that serves the model `source`, for `task` if the pool sets it.
///
/// # Errors
/// [`LoadError::Unsupported`] with the unknown architecture or task and those that are served;
/// [`LoadError::File`] or [`LoadError::Hub`] if the model's files cannot be read.
pub fn served(source: &str, task: Option<&str>) -> Result<Served, LoadError> {
    let files = ModelFiles::locate(source)?;
    find_family(source, &files, &Description::read(&files)?, task)
}

/// Finds the family as [`served`] does, but without network access. None if some of the files are not on this host.
///
/// # Errors
/// As [`served`].
pub fn served_here(source: &str, task: Option<&str>) -> Result<Option<Served>, LoadError> {
    let files = ModelFiles::on_this_host(source);
    files.map(|files| find_family(source, &files, &Description::read(&files)?, task)).transpose()
}

/// The digest of all files that the model `source` is loaded from, by [`ModelFiles::digest`]. It does not change
/// when a folder is copied or other files are added. A hub model that is not in the cache is downloaded.
///
/// # Errors
/// As [`served`].
pub fn digest(source: &str, task: Option<&str>) -> Result<String, LoadError> {
    let files = ModelFiles::locate(source)?;
    let served = find_family(source, &files, &Description::read(&files)?, task)?;
    // The digest covers the files that were requested. A GGUF file is the whole model, and `locate` has already
    // requested it.
    if let (None, Some(rules)) = (files.gguf(), served.rules()) {
        (rules.request_files)(&files)?;
    }
    files.digest()
}

/// What the family that serves the model `source` assumes because the model's files do not tell it, one sentence each.
/// Empty if some of the files are not on this host.
///
/// # Errors
/// As [`served`].
pub fn assumptions(source: &str, task: Option<&str>) -> Result<Vec<String>, LoadError> {
    let Some(files) = ModelFiles::on_this_host(source) else { return Ok(Vec::new()) };
    let model = Description::read(&files)?;
    let served = find_family(source, &files, &model, task)?;
    let mut all = served.rules().map_or_else(Vec::new, |rules| (rules.assumptions)(&model));
    if let Some(class) = model.own_class() {
        let architecture = &model.architecture;
        all.push(format!(
            "the network is the {architecture} of the transformers library: {class} is code in the model's repository \
             (auto_map), which is not run"
        ));
    }
    Ok(all)
}

/// Decides which family serves a model: the one that `task` names, else the first one of the kind that the files of
/// sentence-transformers name, else the first that uses the head of the model's weights. A kind that no family serves is
/// not guessed from the weights.
fn find_family(
    source: &str,
    files: &ModelFiles,
    model: &Description,
    task: Option<&str>,
) -> Result<Served, LoadError> {
    let refused = |reason: String| LoadError::Unsupported { model: source.to_owned(), reason };
    let serving: Vec<(&Family, &FileRules)> =
        families_of_files().filter(|(_, rules)| rules.serves(model)).collect();
    let architecture = &model.architecture;
    if serving.is_empty() {
        return Err(refused(unserved(model)));
    }
    if let (None, Some(class)) = (task, model.own_class()) {
        let names: Vec<&str> = serving.iter().map(|(family, _)| family.name).collect();
        let names = names.join(", ");
        return Err(refused(format!(
            "{class} is code in the model's repository (auto_map), which is not run; if it computes what the {architecture} of \
             the transformers library does, pool.task may be {names}"
        )));
    }
    let named = model.named();
    let is_wanted = |(family, rules): &(&'static Family, &FileRules)| match (task, named) {
        (Some(task), _) => family.name == task,
        (None, Some(named)) => rules.is_named(named),
        (None, None) => rules.uses_head(model),
    };
    let (family, rules) = serving.iter().copied().find(is_wanted).ok_or_else(|| {
        let names: Vec<&str> = serving.iter().map(|(family, _)| family.name).collect();
        let (names, class) = (names.join(", "), model.classes().next().unwrap_or_default());
        refused(match (task, named) {
            (Some(task), _) => format!(
                "{architecture:?} with these weights is not served for the task {task:?}, but for {names}"
            ),
            (None, Some(named)) => format!(
                "{named}, and {architecture:?} with these weights is not served for that; pool.task may be {names}"
            ),
            (None, None) => format!(
                "the head of {class} is not served, and its weights would be ignored; without it pool.task may be {names}"
            ),
        })
    })?;
    let routes = rules.fewer_routes.map_or(family.routes, |routes_of| routes_of(files));
    Ok(Served { architecture: architecture.clone(), family, routes })
}

/// Why no family serves a model.
fn unserved(model: &Description) -> String {
    let (architecture, format) = (&*model.architecture, model.format);
    // Families with the same architectures are named together.
    let known = |format| {
        let mut known: Vec<(Vec<&str>, &[&str])> = Vec::new();
        for (family, rules) in families_of_files() {
            let architectures = rules.architectures(format);
            match known.iter_mut().find(|(_, others)| *others == architectures) {
                _ if architectures.is_empty() => {}
                Some((names, _)) => names.push(family.name),
                None => known.push((vec![family.name], architectures)),
            }
        }
        let kinds = known.iter().map(|(names, all)| format!("for {}: {}", names.join(", "), all.join(", ")));
        kinds.collect::<Vec<_>>().join("; ")
    };
    let name = if architecture.is_empty() { "(none)" } else { architecture };
    // Some architectures are served with the weights of some classes only.
    let is_known = families_of_files().any(|(_, rules)| rules.architectures(format).contains(&architecture));
    let class = model.classes().next().filter(|_| is_known);
    let class = class.map(|class| format!(" with the weights of {class}")).unwrap_or_default();
    let served = match format {
        Format::Config => format!("the architecture {name:?}{class}; served are {}", known(Format::Config)),
        Format::Gguf => format!("the architecture {name:?} in GGUF; served are {}", known(Format::Gguf)),
        Format::Pipeline => format!(
            "the pipeline {name:?} of model_index.json; served are pipelines {}, and networks {}",
            known(Format::Pipeline),
            known(Format::Config)
        ),
    };
    format!(
        "nothing serves {served}. docs/models.md says more, and docs/own-models.md how to serve another one"
    )
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
