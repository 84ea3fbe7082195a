//! The command line and its help. Parses arguments; decides nothing else.

mod batch;
mod bench;
mod ctl;
mod dead;
mod submit;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use serde_json::Value as Json;

use crate::protocol::control::RUN_ID_DIGITS;
use crate::shutdown::Exit;

pub use batch::BatchFiles;
pub use bench::{Bench, BenchDevice, Texts};
#[cfg(feature = "top")]
pub use ctl::Top;
pub use ctl::{Ctl, CtlCommand, Healthcheck};
pub use dead::{Dead, DeadFilters, DeadList, DeadPurge, DeadRequeue, DeadShow, DeadSource, DeadWhich};
pub use submit::Submit;

/// The text of `sconce --version`: version, commit, target and features, as `build.rs` found them. It is one line, so
/// that a bug report can quote it as a whole.
const LONG_VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (commit ",
    env!("BUILD_COMMIT"),
    ", ",
    env!("BUILD_TARGET"),
    "; features: ",
    env!("BUILD_FEATURES"),
    ")",
);

/// Model inference behind a message queue: one process per device, fed by RabbitMQ.
///
/// It has run on one kind of GPU, an NVIDIA H200. docs/gpu.md says what was tried there.
#[derive(Debug, Parser)]
#[command(name = "sconce", version, long_version = LONG_VERSION, about, after_help = exit_codes())]
#[command(max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the service: one worker process per slot (pools × devices × workers_per_device)
    #[command(after_help = "Examples:
  sconce launch                                  RabbitMQ on this host, built-in settings
  sconce launch --config production.toml
  SCONCE_BROKER__URL=amqps://user:pw@rabbit/%2f sconce launch
  sconce launch --set 'pool[0].devices=[\"cpu\", \"cpu\"]'

SIGTERM or Ctrl-C drains: batches on devices are finished; all other tasks, sequences included, are \
requeued. A second signal aborts. `sconce stop` stops workers after the work queued before it.")]
    Launch(Launch),
    /// Run one worker. `launch` starts workers itself; start one by hand only to debug
    #[command(after_help = "Example:
  SCONCE_LOG=debug sconce worker --pool embed --device cpu

Events go to stdout as JSON lines, logs to stderr.")]
    Worker(Worker),
    /// Kill workers that outlive their launcher. The launcher starts this command and names the workers on its stdin
    #[command(hide = true)]
    Guard,
    /// Build grammars of `response_format` for the worker that starts this command
    #[command(hide = true)]
    GrammarServer,
    /// Supervise the interpreter of a model in Python, for the worker that starts this command
    #[command(hide = true)]
    PythonProcess {
        /// The interpreter
        executable: String,
    },
    /// Publish tasks; with --wait, print their replies as JSON lines
    #[command(after_help = "Examples:
  sconce publish --wait \"what is a sconce?\" \"a holder for candles\"
  sconce publish --pool text --stream \"What is a sconce?\"      a chat, printed as it is generated
  sconce publish --pool images --wait cat.jpg      the file's content
  sconce publish --pool rerank --wait \"a query\" \"a document\" \"another\"
  sconce publish --input requests.jsonl            replies go to the pool's reply queue
  cat requests.jsonl | sconce publish --input - --wait > replies.jsonl

A text becomes a request that the pool answers, if its model's files are on this host. Otherwise it \
becomes a request of --url, or a text to embed. Each line of a file is a request body ({\"input\": …}), a \
batch line ({\"custom_id\", \"body\"}), or a JSON string: a text to embed. Replies are printed in the \
order of the tasks.")]
    Publish(Publish),
    /// Measure a running pool: publish a load, report rates, latencies and how busy the devices are
    #[command(after_help = bench::EXAMPLES)]
    Bench(Bench),
    /// Measure a model on one device alone, without queue and broker
    #[command(after_help = bench::DEVICE_EXAMPLES)]
    BenchDevice(BenchDevice),
    /// Stop workers, each after the work that was queued before this command
    #[command(after_help = "Examples:
  sconce stop                   one worker of the only pool, whichever takes the sentinel
  sconce stop --workers 2 --pool embed
  sconce stop --all             as many workers as consume now, on all hosts")]
    Stop(StopWorkers),
    /// Query or control running launchers: ping, stats, active, pause, resume, drain, restart, …
    #[command(after_help = ctl::CTL_EXAMPLES)]
    Ctl(Ctl),
    #[cfg(feature = "top")]
    /// Watch running launchers live: slots, rates, batches, queues, errors; pause and restart them
    #[command(
        after_help = "Keys: ↑ ↓ choose a slot, p pause or resume, d drain, r restart (each asks first), q quit.

The data comes over the broker, as for `sconce ctl stats`."
    )]
    Top(Top),
    /// Ask the launcher of this host whether it is ready, alive or started
    #[command(after_help = ctl::HEALTH_EXAMPLES)]
    Healthcheck(Healthcheck),
    /// Show the pool's dead letters, requeue or delete them
    #[command(subcommand, after_help = dead::EXAMPLES)]
    Dead(Dead),
    /// Run a file of tasks, or recordings, images or texts, a file each, through the same workers without a broker
    #[command(after_help = "Examples:
  sconce run-batch -i requests.jsonl -o responses.jsonl --model ./all-MiniLM-L6-v2
  sconce run-batch -i requests.jsonl -o vectors.npy --model ./all-MiniLM-L6-v2
  sconce run-batch --output-dir subs --format srt --model ./whisper-tiny.en recordings/*.mp3

Lines are OpenAI's batch format: {\"custom_id\", \"method\": \"POST\", \"url\": \"/v1/embeddings\", \
\"body\"}. Responses are written in the order of the requests; an error is a line of its own. After an \
interruption, the same command continues after the last finished line.")]
    RunBatch(RunBatch),
    /// Have files of tasks answered by a running pool, on all hosts
    #[command(after_help = submit::EXAMPLES)]
    Submit(Submit),
    /// Validate the settings and print the effective ones, each with its origin
    #[command(after_help = "Examples:
  sconce check-config
  sconce check-config production.toml --set pool[0].model=echo

Secrets are masked. All problems are reported together; the exit code is then 78.")]
    CheckConfig(CheckConfig),
    /// Show this host's devices, the processes on them, and which workers would run where
    #[command(after_help = "Examples:
  sconce devices
  sconce devices --config production.toml --json

GPUs are shown as the setting `devices` of a pool names them: by number (cuda:0, in the order of their \
PCI bus ids) or by UUID. The command queries the driver through NVML and opens no device. The exit code \
is 78 if the settings name a device that is not present or that this build cannot compute on.")]
    Devices(Devices),
}

/// Where settings come from.
#[derive(Debug, Args)]
pub struct SettingsArguments {
    /// A settings file (TOML); may be repeated, later ones override. Without it, SCONCE_CONFIG
    /// (colon-separated) is read
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Vec<PathBuf>,
    /// One setting, which overrides files and environment; may be repeated
    #[arg(long, global = true, value_name = "PATH=VALUE", value_parser = setting)]
    pub set: Vec<(String, String)>,
}

/// `sconce launch`.
#[derive(Debug, Args)]
pub struct Launch {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// Refuse pools whose model is a class in Python (`model = "python:…"`), which runs with the worker's rights
    #[arg(long)]
    pub no_python: bool,
}

/// `sconce worker`.
#[derive(Debug, Args)]
pub struct Worker {
    /// Where settings come from, for a worker started by hand.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// The pool to work for; may be left out when there is only one
    #[arg(long)]
    pub pool: Option<String>,
    /// The device to open
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// The slot's name
    #[arg(long, hide = true)]
    pub slot: Option<String>,
    /// The launcher's process id; the settings come from it on stdin
    #[arg(long, hide = true, value_name = "PID")]
    pub launched_by: Option<u32>,
}

/// `sconce publish`.
#[derive(Debug, Args)]
pub struct Publish {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// Texts, one task each: to embed, to classify, to speak, a chat, whatever the pool answers. For a pool that reads
    /// images or recordings: files, or URLs of files. For a pool that reranks: a query, then its documents
    #[arg(value_name = "TEXT", required_unless_present = "input", conflicts_with = "input")]
    pub texts: Vec<String>,
    /// A file of tasks, one JSON value per line; `-` is stdin
    #[arg(long, short, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// The URL of the tasks, such as /v1/completions; by default the first one that the pool answers
    #[arg(long)]
    pub url: Option<String>,
    /// Wait for the replies and print them
    #[arg(long)]
    pub wait: bool,
    /// Wait for the replies, and print their texts while they are generated, in the order of the tasks
    #[arg(long)]
    pub stream: bool,
    /// Wait for the reply to the only task, and write its result to FILE instead of printing it. The ending of the name
    /// decides the format
    #[arg(long, short, value_name = "FILE", conflicts_with_all = ["stream", "input"])]
    pub output: Option<PathBuf>,
    /// A field of each task that is given as TEXT, such as language=en; may be repeated. VALUE is JSON, or else a text
    #[arg(long, value_name = "NAME=VALUE", value_parser = batch::field, conflicts_with = "input")]
    pub field: Vec<(String, Json)>,
    /// Longest wait for the next reply
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration)]
    pub timeout: Duration,
    /// Declare the pool's queues if they are missing; without this flag a missing queue is an error
    #[arg(long)]
    pub declare: bool,
    /// The pool whose task queue to use; may be left out when there is only one
    #[arg(long)]
    pub pool: Option<String>,
    /// The queue of the pool; by default its first one
    #[arg(long, value_name = "NAME")]
    pub queue: Option<String>,
}

/// `sconce stop`.
#[derive(Debug, Args)]
pub struct StopWorkers {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// How many workers to stop
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "all",
        value_parser = clap::value_parser!(u32).range(1..))]
    pub workers: u32,
    /// Stop every worker that consumes now. If the pool has several queues (`[[pool.queue]]`), refused while messages wait
    /// in another one, because a sentinel follows only the messages of its own queue
    #[arg(long)]
    pub all: bool,
    /// With --all: stop the workers although messages wait in other queues
    #[arg(long, requires = "all")]
    pub now: bool,
    /// The pool; may be left out when there is only one
    #[arg(long)]
    pub pool: Option<String>,
    /// The queue of the pool to which the sentinels are published; by default its first one
    #[arg(long, value_name = "NAME")]
    pub queue: Option<String>,
    /// A sentinel that no worker takes within this time expires and stops no worker
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = duration)]
    pub expires: Duration,
    /// Withdraw those sentinels of an earlier `stop` that no worker has taken; STOP is the id that it printed
    #[arg(long, value_name = "STOP", conflicts_with_all = ["workers", "all", "queue"], value_parser = printed_id)]
    pub withdraw: Option<String>,
}

/// `sconce run-batch`.
#[derive(Debug, Args)]
pub struct RunBatch {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// Inputs and output.
    #[command(flatten)]
    pub batch: BatchFiles,
    /// A pool that answers lines; may be repeated. By default each pool of the settings answers the lines of its URLs
    #[arg(long)]
    pub pool: Vec<String>,
    /// The model: a folder, a Hugging Face id, `echo` or `script`
    #[arg(long)]
    pub model: Option<String>,
    /// The devices: `auto`, or a list such as `cpu,cpu`
    #[arg(long)]
    pub devices: Option<String>,
    /// Print the answers' texts in the order of the lines; while they are generated, if the line has "stream": true
    #[arg(long, conflicts_with_all = ["json", "files"])]
    pub show: bool,
    /// Print a report of the run as JSON: rates, batches, lines per device, how busy devices were
    #[arg(long)]
    pub json: bool,
}

/// `sconce devices`.
#[derive(Debug, Args)]
pub struct Devices {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// Print the devices as JSON
    #[arg(long)]
    pub json: bool,
}

/// `sconce check-config`.
#[derive(Debug, Args)]
pub struct CheckConfig {
    /// A settings file to check
    pub file: Option<PathBuf>,
    /// Where other settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (path, value) = text.split_once('=').ok_or("expected PATH=VALUE, such as pool[0].model=echo")?;
    Ok((path.trim().to_owned(), value.to_owned()))
}

fn duration(text: &str) -> Result<Duration, String> {
    let wanted = "expected a duration with its unit, such as 30s or 10m";
    let span: jiff::SignedDuration = text.parse().map_err(|_| wanted.to_owned())?;
    Duration::try_from(span).ok().filter(|it| !it.is_zero()).ok_or_else(|| wanted.to_owned())
}

/// Parses the id of a run of `stop` or `submit`, as that command printed it.
fn printed_id(text: &str) -> Result<String, String> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f');
    if text.len() == RUN_ID_DIGITS && text.bytes().all(is_digit) {
        return Ok(text.to_owned());
    }
    Err(format!("expected the id that the command printed: {RUN_ID_DIGITS} hexadecimal digits"))
}

fn exit_codes() -> String {
    let mut text = String::from("Exit codes:\n");
    for (exit, meaning) in Exit::ALL {
        text.push_str(&format!("  {:3}  {meaning}\n", exit.code()));
    }
    text + "\nSCONCE_LOG sets what is logged (info, debug, sconce::worker=trace); SCONCE_LOG_FORMAT its form (human, json)."
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_valid_and_its_help_lists_every_exit_code() {
        Cli::command().debug_assert();
        let help = Cli::command().render_help().to_string();
        for (exit, meaning) in Exit::ALL {
            assert!(help.contains(&exit.code().to_string()) && help.contains(meaning), "{meaning}");
        }
    }

    #[test]
    fn the_long_version_says_what_was_built_and_the_short_one_does_not() {
        let command = Cli::command();
        assert_eq!(command.render_version().trim(), concat!("sconce ", env!("CARGO_PKG_VERSION")));
        let long = command.render_long_version();
        let (_, built) = long.split_once(" (commit ").expect("the commit");
        assert!(long.starts_with(command.render_version().trim()) && !built.starts_with(','), "{long}");
        let (_, features) = built.trim().trim_end_matches(')').split_once("features: ").expect("features");
        let named: Vec<&str> = features.split(", ").collect();
        for (name, is_built_in) in [
            ("candle-transformers", cfg!(feature = "candle-transformers")),
            ("cuda", cfg!(feature = "cuda")),
            ("http", cfg!(feature = "http")),
            ("otlp", cfg!(feature = "otlp")),
            ("tables", cfg!(feature = "tables")),
            ("top", cfg!(feature = "top")),
        ] {
            assert_eq!(named.contains(&name), is_built_in, "{name}: {long}");
        }
    }

    #[test]
    fn the_id_of_a_stop_or_a_job_has_12_hexadecimal_digits() {
        assert_eq!(printed_id("3f6c1a2b9d04"), Ok("3f6c1a2b9d04".to_owned()));
        for wrong in ["", "nope", "3F6C1A2B9D04", "3f6c1a2b9d045", "3f6c1a2b-d04"] {
            assert!(printed_id(wrong).is_err_and(|error| error.contains("12 hexadecimal")), "{wrong}");
        }
    }

    #[test]
    fn the_help_and_the_readme_agree_on_what_has_run_on_gpus() {
        let help = Cli::command().render_long_help().to_string();
        let claim = "It has run on one kind of GPU, an NVIDIA H200.";
        assert!(help.contains(claim), "{help}");
        assert!(include_str!("../../README.md").contains(claim));
    }

    /// The words of each command in a line of shell, without comments and redirections. Knows quotation marks and pipes.
    #[cfg(feature = "top")]
    fn commands_of(line: &str) -> Vec<Vec<String>> {
        let mut commands = vec![vec![String::new()]];
        let (mut quote, mut before) = (None, ' ');
        for letter in line.chars() {
            let words = commands.last_mut().unwrap();
            match (letter, quote) {
                ('\'' | '"', None) => quote = Some(letter),
                (_, Some(mark)) if letter == mark => quote = None,
                ('#', None) if before == ' ' => break,
                ('|' | ';' | '&', None) => commands.push(vec![String::new()]),
                (' ', None) => words.push(String::new()),
                _ => words.last_mut().unwrap().push(letter),
            }
            before = letter;
        }
        let is_word = |word: &String| !word.is_empty() && !word.starts_with(['<', '>']);
        commands.into_iter().map(|words| words.into_iter().filter(is_word).collect()).collect()
    }

    #[cfg(feature = "top")]
    #[test]
    fn the_commands_on_the_pages_are_those_of_the_program() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
        let pages = docs.filter(|path| path.extension().is_some_and(|ending| ending == "md"));
        let mut seen = 0;
        for page in pages.chain(["README.md", "python/README.md"].map(|name| root.join(name))) {
            let text = std::fs::read_to_string(&page).unwrap().replace("\\\n", " ");
            for block in text.split("```sh\n").skip(1).filter_map(|behind| behind.split("```").next()) {
                for words in block.lines().flat_map(commands_of) {
                    let is_assignment = |word: &&String| word.starts_with("SCONCE_") && word.contains('=');
                    let words: Vec<_> = words.iter().skip_while(is_assignment).collect();
                    // Within a container: docker compose exec sconce sconce …
                    let container = words.windows(2).position(|pair| pair == ["sconce", "sconce"]);
                    let words = &words[container.map_or(0, |at| at + 1)..];
                    if words
                        .first()
                        .is_some_and(|word| ["sconce", "target/release/sconce"].contains(&word.as_str()))
                    {
                        seen += 1;
                        let parsed = Cli::try_parse_from(words);
                        assert!(parsed.is_ok(), "{}: {words:?}: {}", page.display(), parsed.unwrap_err());
                    }
                }
            }
        }
        assert!(seen > 30, "{seen} commands were found");
    }

    #[test]
    fn a_setting_may_hold_an_equals_sign_in_its_value() {
        assert_eq!(setting("a.b=c=d"), Ok(("a.b".into(), "c=d".into())));
        assert!(setting("a.b").is_err());
    }
}
