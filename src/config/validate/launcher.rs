//! The rules of `[launcher]`.

use std::time::Duration;

use ::config::Value;

use super::super::settings::{Launcher, Replace};
use super::super::units::show_duration;
use super::WAIT;
use super::section::{Expected, Section};
use super::values::{duration, never, size, text, whole};

/// Reads `[launcher]`.
pub(super) fn launcher(mut section: Section<'_>) -> Option<Launcher> {
    let shutdown_grace = section.read("shutdown_grace", duration(WAIT));
    let restart_delay = section.read("restart_delay", duration(WAIT));
    let restart_delay_max = section.read("restart_delay_max", duration(WAIT));
    let quick_failure = section.read("quick_failure", duration(WAIT));
    let max_quick_failures = section.read("max_quick_failures", whole(1..=u64::from(u32::MAX)));
    let poison_deaths = section.read("poison_deaths", whole(1..=u64::from(u32::MAX)));
    let recycle_tasks = section.read("recycle_tasks", never(whole(1..=i64::MAX as u64)));
    let recycle_age = section.read("recycle_age", never(duration(WAIT)));
    let recycle_memory = section.read("recycle_memory", never(size(1..=u64::MAX)));
    let replace = section.read("replace", replace);
    refuse_low_ceiling(
        &mut section,
        ("restart_delay", restart_delay),
        ("restart_delay_max", restart_delay_max),
    );
    section.finish();
    Some(Launcher {
        shutdown_grace: shutdown_grace?,
        restart_delay: restart_delay?,
        restart_delay_max: restart_delay_max?,
        quick_failure: quick_failure?,
        max_quick_failures: max_quick_failures?,
        poison_deaths: poison_deaths?,
        recycle_tasks: recycle_tasks?,
        recycle_age: recycle_age?,
        recycle_memory: recycle_memory?,
        replace: replace?,
    })
}

fn replace(value: &Value) -> Result<Replace, Expected> {
    let written = text(value).ok();
    let found = Replace::ALL.iter().find(|(_, name)| written.as_deref() == Some(*name));
    found.map(|(replace, _)| *replace).ok_or_else(|| "\"overlap\" or \"in_turn\"".to_owned())
}

/// A delay that grows needs a ceiling above its beginning.
pub(super) fn refuse_low_ceiling(
    section: &mut Section<'_>,
    (first_key, first): (&str, Option<Duration>),
    (key, ceiling): (&str, Option<Duration>),
) {
    let (Some(first), Some(ceiling)) = (first, ceiling) else { return };
    if first > ceiling {
        let (path, origin) = (section.path_of(first_key), section.origin_of(first_key));
        let expected = format!("at least {path} = \"{}\" ({origin})", show_duration(first));
        section.refuse(key, show_duration(ceiling), expected);
    }
}
