//! The arguments of `sconce dead`: which letters, in words. Parses and bounds them; decides nothing
//! else.

use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};

use super::{Settings, duration};

pub(super) const EXAMPLES: &str = "Examples:
  sconce dead list                                          what is there, oldest first, and why
  sconce dead list --reason poison --newer-than 2h --json
  sconce dead show 6f1c…                                    all of one letter
  sconce dead requeue --reason attempts --older-than 1d --dry-run
  sconce dead requeue 6f1c…
  sconce dead purge --older-than 30d

A command takes all dead letters out of everybody's sight for as long as it lasts and hands them back in
their order. On quorum queues it counts as a delivery of each. A letter that is three deliveries off
the queue's x-delivery-limit (20 where sconce cannot know it) is put into the queue anew, at its end,
because RabbitMQ would drop it. A limit that a policy sets cannot be seen.

Letters of other pools in the same queue are counted on stderr and stay, unless asked for by id.

Reasons: undecodable, poison, attempts, unroutable, unconfirmed, unknown_control; RabbitMQ's own
delivery_limit, expired, rejected, maxlen; unknown where a letter gives none.";

const REQUEUED: &str =
    "A task goes to the pool's task queue as its producer sent it, a parked reply to the queue it
was for; each is confirmed there before it is taken out here. A crash in between leaves it in both.

Not put back: the task's expiration, because it would expire at once, with an `expires` that may
come of it (an `expires` of the producer's alone stays: a task past it is answered with 408);
user_id; CC. A control message is put back only by its id. What cannot be put back stays, with
the reason on stderr, and the exit code is 1.";

const PURGED: &str =
    "Letters are held while you are asked, so that what you were told of is what is deleted.";

/// `sconce dead`.
#[derive(Debug, Subcommand)]
pub enum Dead {
    /// List letters, oldest first, and count them by reason
    List(DeadList),
    /// Show all properties, headers and the body of a letter
    Show(DeadShow),
    /// Publish letters to where they belong, and take them out of the dead-letter queue
    #[command(after_help = REQUEUED)]
    Requeue(DeadRequeue),
    /// Delete letters
    #[command(after_help = PURGED)]
    Purge(DeadPurge),
}

/// Whose letters.
#[derive(Debug, Args)]
pub struct DeadSource {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: Settings,
    /// The pool; may be left out when there is only one
    #[arg(long)]
    pub pool: Option<String>,
}

/// Which of them. All that is given must hold.
#[derive(Clone, Debug, Default, Args)]
pub struct DeadFilters {
    /// Only letters with this reason; may be repeated, any of them
    #[arg(long, value_name = "REASON")]
    pub reason: Vec<String>,
    /// Only letters that died longer ago, such as 90m or 7d. What has no time is of no age
    #[arg(long, value_name = "DURATION", value_parser = age)]
    pub older_than: Option<Duration>,
    /// Only letters that died since
    #[arg(long, value_name = "DURATION", value_parser = age)]
    pub newer_than: Option<Duration>,
}

/// `sconce dead list`.
#[derive(Debug, Args)]
pub struct DeadList {
    /// Whose letters.
    #[command(flatten)]
    pub source: DeadSource,
    /// Which of them.
    #[command(flatten)]
    pub filters: DeadFilters,
    /// Only the oldest N of them; without it all are counted, and the first 10,000 shown
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// `sconce dead show`.
#[derive(Debug, Args)]
pub struct DeadShow {
    /// Whose letters.
    #[command(flatten)]
    pub source: DeadSource,
    /// The id of a task, or of a message
    pub id: String,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// `sconce dead requeue`.
#[derive(Debug, Args)]
#[command(group = which())]
pub struct DeadRequeue {
    /// Whose letters.
    #[command(flatten)]
    pub source: DeadSource,
    /// Ids of tasks, or of messages
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// Which of them.
    #[command(flatten)]
    pub filters: DeadFilters,
    /// All letters of the pool, and of nobody
    #[arg(long, conflicts_with_all = NARROWER)]
    pub all: bool,
    /// Say what would be done, and do nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// `sconce dead purge`.
#[derive(Debug, Args)]
#[command(group = which())]
pub struct DeadPurge {
    /// Whose letters.
    #[command(flatten)]
    pub source: DeadSource,
    /// Ids of tasks, or of messages
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// Which of them.
    #[command(flatten)]
    pub filters: DeadFilters,
    /// All letters of the pool, and of nobody
    #[arg(long, conflicts_with_all = NARROWER)]
    pub all: bool,
    /// Say what would be done, and do nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
}

const NARROWER: [&str; 4] = ["ids", "reason", "older_than", "newer_than"];

/// What changes the queue is told which letters are meant.
fn which() -> ArgGroup {
    ArgGroup::new("which").args(NARROWER).arg("all").required(true).multiple(true)
}

/// As [`duration`], and in days and weeks.
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
    fn what_changes_the_queue_wants_to_be_told_which_letters() {
        for command in ["requeue", "purge"] {
            for too_little in ["", "--dry-run", "--pool embed"] {
                let error = dead(&format!("{command} {too_little}")).unwrap_err();
                assert!(error.contains("--all") && error.contains("ID"), "{error}");
            }
            for enough in
                ["a b", "--reason poison", "--older-than 1h", "--newer-than 1h", "--all", "a --reason x"]
            {
                assert!(dead(&format!("{command} {enough}")).is_ok(), "{command} {enough}");
            }
            for both in ["--all a", "--all --reason poison", "--older-than 1h --all"] {
                assert!(dead(&format!("{command} {both}")).unwrap_err().contains("--all"), "{both}");
            }
        }
        assert!(dead("list").is_ok());
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
