//! The arguments of `sconce dead`: which dead letters, and what to do with them. Parses and bounds them;
//! decides nothing else.

use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{ArgGroup, Args, Subcommand};

use super::{SettingsArguments, duration};
use crate::protocol::dead_letter::reasons;

pub(super) const EXAMPLES: &str = "Examples:
  sconce dead list                                          the dead letters, oldest first, and why
  sconce dead list --reason poison --newer-than 2h --json
  sconce dead show 6f1c…                                    all of one dead letter
  sconce dead requeue --reason attempts --older-than 1d --dry-run
  sconce dead requeue 6f1c…
  sconce dead purge --older-than 30d                        shows what `--yes` would delete

While a command reads the queue, nobody else sees its messages. Afterwards a quorum queue has them in \
another order, and has counted one delivery of each. If sconce did not declare the queue, it assumes the \
delivery limit of RabbitMQ 4, which is 20. Do not set a lower one by x-delivery-limit or by a policy. \
A dead letter near the limit is published to the end of the queue again, because RabbitMQ would drop it.

Dead letters of other pools in the same queue are counted on stderr and left alone, unless given by id.";

const REQUEUE_NOTES: &str = "\
A task is published to the pool's task queue as its producer sent it, and is removed from the dead-letter \
queue once the broker has confirmed it in the task queue. A crash in between leaves it in both.

These are dropped: the expiration, because the task would expire at once; `expires`, if the task also had an \
expiration and a worker retried or dead-lettered it, because the worker may have derived it; user_id; CC. An \
`expires` without an expiration is kept; if it has passed, the task is answered with 408.

A control message is requeued only by its id. What cannot be requeued stays in the dead-letter queue, with the \
reason on stderr, and the exit code is 1.";

/// `sconce dead`.
#[derive(Debug, Subcommand)]
pub enum Dead {
    /// List dead letters, oldest first, and count them by reason
    List(DeadList),
    /// Show all properties, headers and the body of a dead letter
    Show(DeadShow),
    /// Publish dead letters to their queues, and remove them from the dead-letter queue
    #[command(after_help = REQUEUE_NOTES)]
    Requeue(DeadRequeue),
    /// Show which dead letters would be deleted; with --yes, delete them
    Purge(DeadPurge),
}

/// The pool of the dead letters.
#[derive(Debug, Args)]
pub struct DeadSource {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// The pool; may be left out when there is only one
    #[arg(long)]
    pub pool: Option<String>,
}

/// Filters of dead letters; all given ones must hold.
#[derive(Clone, Debug, Default, Args)]
pub struct DeadFilters {
    /// Only dead letters with this reason; may be repeated. RabbitMQ gives `delivery_limit`, `expired`,
    /// `rejected` and `maxlen`; `unknown` is for dead letters without a reason
    #[arg(long, value_name = "REASON", value_parser = PossibleValuesParser::new(reasons()))]
    pub reason: Vec<String>,
    /// Only dead letters older than this, such as 90m or 7d. Dead letters without a time never match
    #[arg(long, value_name = "DURATION", value_parser = age)]
    pub older_than: Option<Duration>,
    /// Only dead letters newer than this. Dead letters without a time never match
    #[arg(long, value_name = "DURATION", value_parser = age)]
    pub newer_than: Option<Duration>,
}

/// `sconce dead list`.
#[derive(Debug, Args)]
pub struct DeadList {
    /// The pool of the dead letters.
    #[command(flatten)]
    pub source: DeadSource,
    /// Filters by reason and age.
    #[command(flatten)]
    pub filters: DeadFilters,
    /// Print at most N dead letters, the oldest; all are counted
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub limit: usize,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// `sconce dead show`.
#[derive(Debug, Args)]
pub struct DeadShow {
    /// The pool of the dead letters.
    #[command(flatten)]
    pub source: DeadSource,
    /// The id of a task, or of a message
    pub id: String,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// `sconce dead requeue`.
#[derive(Debug, Args)]
pub struct DeadRequeue {
    /// The dead letters to change.
    #[command(flatten)]
    pub which: DeadWhich,
    /// Print what would be done, and do nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// `sconce dead purge`.
#[derive(Debug, Args)]
pub struct DeadPurge {
    /// The dead letters to change.
    #[command(flatten)]
    pub which: DeadWhich,
    /// Delete them
    #[arg(long)]
    pub yes: bool,
}

/// Which dead letters a command changes: it needs ids, filters or `--all`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").args(SELECTORS).arg("all").required(true).multiple(true))]
pub struct DeadWhich {
    /// The pool of the dead letters.
    #[command(flatten)]
    pub source: DeadSource,
    /// Ids of tasks, or of messages
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// Filters by reason and age.
    #[command(flatten)]
    pub filters: DeadFilters,
    /// All dead letters of the pool, and those that name no pool
    #[arg(long, conflicts_with_all = SELECTORS)]
    pub all: bool,
}

/// The arguments that select some of the dead letters, and exclude `--all`.
const SELECTORS: [&str; 4] = ["ids", "reason", "older_than", "newer_than"];

/// Parses a duration as [`duration`] does, and also one in days or weeks.
fn age(text: &str) -> Result<Duration, String> {
    for (unit, seconds) in [('d', 86_400), ('w', 7 * 86_400)] {
        if let Some(count) = text.strip_suffix(unit).and_then(|count| count.trim().parse::<u32>().ok()) {
            return Ok(Duration::from_secs(u64::from(count) * seconds));
        }
    }
    duration(text).map_err(|wanted| format!("{wanted}, or 7d"))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::{Cli, Command};
    use super::*;

    fn dead(arguments: &str) -> Result<Dead, String> {
        let words = ["sconce", "dead"].into_iter().chain(arguments.split_whitespace());
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Dead(dead) => Ok(dead),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn requeue_and_purge_need_ids_filters_or_all() {
        for command in ["requeue", "purge"] {
            let dead = |arguments: &str| dead(&format!("{command} {arguments}"));
            for too_little in ["", "--pool embed"] {
                assert!(dead(too_little).is_err_and(|it| it.contains("--all") && it.contains("ID")));
            }
            for enough in ["a b", "--older-than 1h", "--newer-than 1h", "--all", "a --reason expired"] {
                assert!(dead(enough).is_ok(), "{command} {enough}");
            }
            for both in ["--all a", "--all --reason poison", "--older-than 1h --all"] {
                assert!(dead(both).is_err_and(|it| it.contains("--all")), "{command} {both}");
            }
        }
        assert!(dead("list --reason poison").is_ok());
        let error = dead("list --reason poisson").unwrap_err();
        assert!(error.contains("poisson") && error.contains("delivery_limit"), "{error}");
        assert!(dead("show").is_err() && dead("show a").is_ok());
    }

    #[test]
    fn an_age_may_be_in_days_and_weeks() {
        let hours = |hours: u64| Ok(Duration::from_secs(hours * 3_600));
        assert_eq!(
            (age("1h"), age("90m"), age("7d"), age("2w")),
            (hours(1), Ok(Duration::from_secs(5_400)), hours(168), hours(336))
        );
        for wrong in ["5", "d", "-1d", "soon", "0s"] {
            assert!(age(wrong).unwrap_err().contains("7d"), "{wrong}");
        }
    }
}
