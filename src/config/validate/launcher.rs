//! The rules of `[launcher]`.

use super::super::settings::Launcher;
use super::super::units::show_duration;
use super::WAIT;
use super::section::Section;
use super::values::{duration, whole};

/// Reads `[launcher]`.
pub(super) fn launcher(mut section: Section<'_>) -> Option<Launcher> {
    let shutdown_grace = section.read("shutdown_grace", duration(WAIT));
    let restart_delay = section.read("restart_delay", duration(WAIT));
    let restart_delay_max = section.read("restart_delay_max", duration(WAIT));
    let quick_failure = section.read("quick_failure", duration(WAIT));
    let max_quick_failures = section.read("max_quick_failures", whole(1..=u64::from(u32::MAX)));
    if let (Some(first), Some(ceiling)) = (restart_delay, restart_delay_max)
        && first > ceiling
    {
        let expected = format!(
            "at least {} = \"{}\" ({})",
            section.path_of("restart_delay"),
            show_duration(first),
            section.origin_of("restart_delay"),
        );
        section.refuse("restart_delay_max", show_duration(ceiling), expected);
    }
    section.finish();
    Some(Launcher {
        shutdown_grace: shutdown_grace?,
        restart_delay: restart_delay?,
        restart_delay_max: restart_delay_max?,
        quick_failure: quick_failure?,
        max_quick_failures: max_quick_failures?,
    })
}
