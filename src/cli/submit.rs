//! The arguments of `sconce submit`. Parses and bounds them; decides nothing else.

use std::time::Duration;

use clap::Args;

use super::{BatchFiles, SettingsArguments, duration, printed_id};

pub(super) const EXAMPLES: &str = "Examples:
  sconce submit -i rows.jsonl -o answers.jsonl             through the only pool's queue
  sconce submit -i a.jsonl -i b.jsonl -o answers.jsonl --pool embed --rows-per-task 32 --background
  produce-rows | sconce submit -i - -o answers.jsonl       not resumed: standard input cannot be read again
  sconce submit -i rows.jsonl -o vectors.npy               one matrix, and the ids in vectors.ids.jsonl
  sconce submit --output-dir subs --format srt --field language=en recordings/*.mp3
  sconce submit --cancel 3f6c1a2b9d04                       cancel what a job has published

Lines are OpenAI's batch format, as for `run-batch`; the workers are those of a running pool, on all \
hosts. Answers are written in the order of the rows; an error is a line of its own. After an \
interruption, the same command continues after the last finished line. Ctrl-C waits for the tasks in \
flight until --grace is over, or until Ctrl-C is pressed again; then it withdraws those that are left.";

/// `sconce submit`.
#[derive(Debug, Args)]
pub struct Submit {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// Inputs and output. The input `-` is stdin.
    #[command(flatten)]
    pub batch: BatchFiles,
    /// The pool that answers; may be left out when there is only one
    #[arg(long)]
    pub pool: Option<String>,
    /// The queue of the pool; by default its first one
    #[arg(long, value_name = "NAME", conflicts_with = "background")]
    pub queue: Option<String>,
    /// Publish to the pool's background queue, whose tasks only fill the room that other tasks leave in batches
    #[arg(long)]
    pub background: bool,
    /// Rows per task, for embeddings, sparse vectors, labels of tokens and text classification by the model's labels; only
    /// rows with the same parameters share a task
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=512))]
    pub rows_per_task: u16,
    /// Publish a task again if its reply has not come this long after the reply to a task that was published later, or
    /// after the last reply of all. Time without workers does not count
    #[arg(long, value_name = "DURATION", default_value = "15m", value_parser = duration)]
    pub reply_timeout: Duration,
    /// How many times to publish a task before its rows become error lines
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub attempts: u32,
    /// How long Ctrl-C waits for the tasks in flight
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub grace: Duration,
    /// Print progress as JSON lines, every 5 s, and at the end a report as `run-batch` does
    #[arg(long)]
    pub json: bool,
    /// Cancel a job: workers answer its tasks with 499, and those still in the queue are answered when they are delivered
    #[arg(long, value_name = "JOB", conflicts_with_all = ["input", "output", "files"], value_parser = printed_id)]
    pub cancel: Option<String>,
}
