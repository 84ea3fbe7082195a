//! The arguments of `sconce bench` and `sconce bench-device`, which describe a load. Parses and bounds them;
//! decides nothing else.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::{SettingsArguments, duration};

/// Maximum number of words of a generated text.
const MAX_WORDS: usize = 100_000;

pub(super) const EXAMPLES: &str = "Examples:
  sconce bench                                   how many tasks a second does the pool answer?
  sconce bench --rate 200 --tasks 10000          how long does a task take at 200 a second?
  sconce bench --input requests.jsonl --json > report.json

Workers must be running: `sconce launch`. The load goes through the pool's task queue, behind and among \
the tasks of others; mind which other producers and consumers use that queue.

The load. In a closed loop (--in-flight F), a task is published for each reply, so that F tasks are \
always in flight: this measures the most that the pool can do. Another F-1 tasks follow the measured ones \
and are not counted, so that the loop stays full to the end. In an open loop (--rate), tasks are \
published at random times (a Poisson process), whether the pool keeps up or not. The latency of a task \
counts from the moment at which it was due, even if it was published late.

Tasks that are not from a file are generated for the kind of the pool's model, if its files are on this \
host; otherwise they are texts to embed.

The report, for N tasks after W warm-up tasks. Rates and busy shares cover N replies in the order of \
arrival, after the first W. All else covers the N tasks after the first W, so that no straggler is left \
out; latencies, stages and batches cover only those that succeeded. A batch counts once, however many \
tasks it held. A device's busy share covers only this load: a task of k inputs in a batch of n counts for \
k/n of its compute_us. With several inputs per task it is an upper bound: a task that spans batches \
reports the time of all of them, and the size of the last. If no reply arrives for --timeout, the report \
has what was measured until then, and how many replies are missing; the exit code is 84. Tasks expire in \
their queue after ten times --timeout, so that a run that ends early leaves none there for ever.";

/// `sconce bench`.
#[derive(Debug, Args)]
pub struct Bench {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// The pool whose task queue to use; may be left out when there is only one
    #[arg(long)]
    pub pool: Option<String>,
    /// The queue of the pool; by default its first one
    #[arg(long, value_name = "NAME")]
    pub queue: Option<String>,
    /// Tasks to measure
    #[arg(long, value_name = "N", default_value = "2000", value_parser = count)]
    pub tasks: usize,
    /// Warm-up tasks, published before the measured ones [default: 200, but at least --in-flight in a closed loop]
    #[arg(long, value_name = "N")]
    pub warmup: Option<usize>,
    /// Closed loop: tasks under way at once
    #[arg(long, value_name = "N", default_value = "512", value_parser = count, conflicts_with = "rate")]
    pub in_flight: usize,
    /// Open loop: tasks per second, independent of replies
    #[arg(long, value_name = "R", value_parser = rate)]
    pub rate: Option<f64>,
    /// The texts of tasks.
    #[command(flatten)]
    pub texts: Texts,
    /// Longest wait for the next reply
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
}

/// The texts of tasks: generated from a seed, or read from a file.
#[derive(Debug, Args)]
pub struct Texts {
    /// Texts per task
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, conflicts_with = "input")]
    pub inputs: usize,
    /// Tasks from a file in the format of `publish`, in random order, repeatedly; `-` is stdin
    #[arg(long, short, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// The URL of tasks from generated texts; by default the first one that the pool answers
    #[arg(long, conflicts_with = "input")]
    pub url: Option<String>,
    /// Words in a generated text; most texts are short. The default gives 4 to 256 tokens, 35 on average
    #[arg(
        long,
        value_name = "MIN-MAX",
        default_value = "2-254",
        value_parser = words,
        conflicts_with = "input"
    )]
    pub words: RangeInclusive<usize>,
    /// The same seed makes the same load
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,
}

pub(super) const DEVICE_EXAMPLES: &str = "Examples:
  sconce bench-device --model ./all-MiniLM-L6-v2 --device cuda:0
  sconce bench-device --device cuda:0 --set pool[0].dtype=bf16 --set pool[0].batch.max_tokens=65536
  sconce bench-device --device cpu --input requests.jsonl --json

Runs one process with the device, threads, dtype and batch bounds of a worker of the pool; no queue, no \
broker, no launcher. First all tasks are preprocessed on one thread, which is measured separately. Then \
batches go through a worker's engine, over and over, for --time, after a warm-up of a quarter of it. Only \
the batches are timed, not the preprocessing and the replies between the rounds.

So this is the most that a worker can reach; `sconce bench` measures what one does reach. The default of \
--device is the first of the pool's devices.";

/// `sconce bench-device`.
#[derive(Debug, Args)]
pub struct BenchDevice {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// The pool whose model, dtype and batch settings to use; may be left out when there is only one
    #[arg(long)]
    pub pool: Option<String>,
    /// The model: a folder, a Hugging Face id, `echo` or `script`
    #[arg(long)]
    pub model: Option<String>,
    /// The device: `cpu`, `cuda:0`, or a UUID
    #[arg(long)]
    pub device: Option<String>,
    /// Tasks to compute, repeatedly
    #[arg(long, value_name = "N", default_value = "2000", value_parser = count)]
    pub tasks: usize,
    /// The texts of tasks.
    #[command(flatten)]
    pub texts: Texts,
    /// How long to compute
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub time: Duration,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
}

fn count(text: &str) -> Result<usize, String> {
    let wanted = || "expected a whole number from 1 on".to_owned();
    text.parse().ok().filter(|count| *count > 0).ok_or_else(wanted)
}

fn rate(text: &str) -> Result<f64, String> {
    let wanted = || "expected tasks a second, more than 0, such as 200 or 0.5".to_owned();
    text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0).ok_or_else(wanted)
}

fn words(text: &str) -> Result<RangeInclusive<usize>, String> {
    let range = text.split_once('-').and_then(|(min, max)| {
        let (min, max): (usize, usize) = (min.trim().parse().ok()?, max.trim().parse().ok()?);
        (1 <= min && min <= max && max <= MAX_WORDS).then_some(min..=max)
    });
    range.ok_or_else(|| format!("expected MIN-MAX, such as 5-20, from 1 to {MAX_WORDS}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::{Cli, Command};
    use super::*;

    fn bench(arguments: &str) -> Result<Bench, String> {
        let words = ["sconce", "bench"].into_iter().chain(arguments.split_whitespace());
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Bench(bench) => Ok(bench),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn without_arguments_the_loop_is_closed_and_texts_are_generated() {
        let bench = bench("").unwrap();
        assert_eq!((bench.tasks, bench.in_flight, bench.rate), (2_000, 512, None));
        assert_eq!((bench.texts.inputs, bench.texts.words, bench.texts.seed), (1, 2..=254, 1));
    }

    #[test]
    fn flags_that_exclude_each_other_are_refused_by_name() {
        for (arguments, names) in [
            ("--in-flight 4 --rate 2", ["--in-flight", "--rate"]),
            ("--input f --inputs 2", ["--input", "--inputs"]),
            ("--input f --words 1-2", ["--input", "--words"]),
        ] {
            let error = bench(arguments).unwrap_err();
            assert!(names.iter().all(|name| error.contains(name)), "{arguments}: {error}");
        }
        assert!(bench("--rate 2").is_ok(), "the default of --in-flight excludes nothing");
    }

    #[test]
    fn a_bad_number_is_shown_with_what_was_expected() {
        for (argument, value, wanted) in [
            ("--rate", "0", "more than 0"),
            ("--rate", "NaN", "more than 0"),
            ("--rate", "inf", "more than 0"),
            ("--tasks", "0", "from 1 on"),
            ("--in-flight", "many", "from 1 on"),
            ("--inputs", "0", "from 1 on"),
            ("--words", "7", "MIN-MAX"),
            ("--words", "9-3", "MIN-MAX"),
            ("--words", "0-3", "MIN-MAX"),
            ("--timeout", "5", "30s"),
        ] {
            let error = bench(&format!("{argument} {value}")).unwrap_err();
            for part in [argument, &format!("'{value}'"), wanted] {
                assert!(error.contains(part), "{argument} {value}: no {part} in {error}");
            }
        }
    }
}
