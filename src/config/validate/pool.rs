//! The rules of `[[pool]]` and `[pool.batch]`, and what no two pools may share.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::Duration;

use ::config::{Value, ValueKind};

use super::super::files::BUILT_IN;
use super::super::problem::Problem;
use super::super::settings::{Batch, Devices, Dtype, Pool, Retry};
use super::super::text::quoted;
use super::WAIT;
use super::launcher::refuse_low_ceiling;
use super::section::{Expected, Report, Section, origin};
use super::values::{auto, duration, list, name, optional_name, parse_value, share, size, text, whole};

/// RabbitMQ caps the prefetch of a consumer of a quorum queue here.
const PREFETCH: RangeInclusive<u64> = 1..=2000;
/// RabbitMQ takes no message above 512 MiB, however it is configured.
const BODY: RangeInclusive<u64> = 1..=512 << 20;
const COUNT: RangeInclusive<u64> = 1..=1_000_000;
const TOKENS: RangeInclusive<u64> = 1..=1_000_000_000;
const PROCESSES: RangeInclusive<u64> = 1..=1024;
/// "0ms" is a policy: never wait.
const BATCH_DELAY: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(60);
/// Each ceiling of the delay between them is a queue.
const ATTEMPTS: RangeInclusive<u64> = 1..=100;
/// AMQP carries a name's length in one byte.
const LONGEST_QUEUE_NAME: usize = 255;
/// How the origins of values begin that can only be text.
const OF_TEXT: [&str; 2] = ["flag ", "environment variable "];
/// What is put behind a task queue's name: `.retry-2592000000ms`.
const LONGEST_SUFFIX: usize = 19;

/// Reads all pools.
pub(super) fn pools(root: &mut Section<'_>) -> Option<Vec<Pool>> {
    let list = root.take("pool")?;
    let problem =
        Problem::new("pool", "expected at least one [[pool]]").with_value(&list).with_origin(origin(&list));
    let ValueKind::Array(list) = list.kind else {
        root.report().problems.push(problem);
        return None;
    };
    if list.is_empty() {
        root.report().problems.push(problem);
    }
    let report = root.report();
    let mut read = Vec::new();
    let mut claims = Vec::new();
    for (index, value) in list.into_iter().enumerate() {
        let Some(section) = Section::open(format!("pool[{index}]"), value, report) else {
            claims.push(Claim::default());
            continue;
        };
        let (pool, claim) = pool(section);
        read.extend(pool);
        claims.push(claim);
    }
    refuse_repeats(report, &claims, "name", |claim| claim.name.as_deref());
    refuse_repeats(report, &claims, "task_queue", |claim| claim.task_queue.as_deref());
    (read.len() == claims.len()).then_some(read)
}

/// What a pool wants for itself alone; known even where the rest of the pool is wrong.
#[derive(Clone, Default)]
struct Claim {
    name: Option<String>,
    task_queue: Option<String>,
}

fn refuse_repeats(report: &mut Report, claims: &[Claim], key: &str, of: impl Fn(&Claim) -> Option<&str>) {
    for (index, claim) in claims.iter().enumerate() {
        let Some(value) = of(claim) else { continue };
        let Some(first) = claims[..index].iter().position(|c| of(c) == Some(value)) else {
            continue;
        };
        let other = format!("pool[{first}].{key}");
        let origin = report.origin_of(&other);
        let expected = format!("a {key} of its own: {other} is the same ({origin})");
        report.refuse(format!("pool[{index}].{key}"), value, expected);
    }
}

fn pool(mut section: Section<'_>) -> (Option<Pool>, Claim) {
    let name = section.read("name", name);
    let queues = queues(&mut section);
    let claim = Claim { name: name.clone(), task_queue: queues.task.clone() };
    (finish_pool(section, name, queues), claim)
}

fn finish_pool(mut section: Section<'_>, name: Option<String>, queues: Queues) -> Option<Pool> {
    let reply_timeout = section.read("reply_timeout", duration(WAIT));
    let large_reply = section.read("large_reply", size(BODY));
    let model = section.read("model", self::name);
    let served_names = section.read("served_names", served_names);
    let devices = section.read("devices", devices);
    let workers_per_device = section.read("workers_per_device", whole(PROCESSES));
    let threads = section.read("threads", auto(whole(PROCESSES)));
    let dtype = section.read("dtype", dtype);
    let min_speed = section.read("min_speed", share);
    let prefetch = section.read("prefetch", auto(whole::<u16>(PREFETCH)));
    let prefetch_bytes = section.read("prefetch_bytes", size(BODY));
    let max_body = section.read("max_body", size(BODY));
    let max_inputs = section.read("max_inputs", whole(COUNT));
    let batch = section.section("batch").and_then(batch);
    let retry = section.section("retry").and_then(retry);
    let task = section.read("task", auto(self::name));
    let options = section.read("options", options).map(|options| {
        let path = section.path_of("options");
        let origins = &mut section.report().origins;
        let keep = |(name, (value, origin)): (String, (serde_json::Value, String))| {
            origins.insert(format!("{path}.{}", quoted(&name)), origin);
            (name, value)
        };
        options.into_iter().map(keep).collect()
    });
    if let (Some(Some(prefetch)), Some(batch)) = (prefetch, &batch) {
        refuse_short_prefetch(&mut section, prefetch, batch.max_requests);
    }
    section.finish();
    Some(Pool {
        name: name?,
        task_queue: queues.task?,
        reply_queue: queues.reply?,
        dead_letter_queue: queues.dead?,
        reply_timeout: reply_timeout?,
        large_reply: large_reply?,
        model: model?,
        served_names: served_names?,
        devices: devices?,
        workers_per_device: workers_per_device?,
        threads: threads?,
        dtype: dtype?,
        min_speed: min_speed?,
        prefetch: prefetch?,
        prefetch_bytes: prefetch_bytes?,
        max_body: max_body?,
        max_inputs: max_inputs?,
        batch: batch?,
        retry: retry?,
        task: task?,
        options: options?,
    })
}

/// A model's own settings, whose names only the model knows.
fn options(value: &Value) -> Result<BTreeMap<String, (serde_json::Value, String)>, Expected> {
    let ValueKind::Table(table) = &value.kind else { return Err("a section with keys".to_owned()) };
    Ok(table.iter().map(|(name, value)| (name.clone(), (plain(&typed(value)), origin(value)))).collect())
}

/// What a flag or a variable says is text; as TOML writes it, it may be a number or a list.
fn typed(value: &Value) -> Value {
    let is_text = value.origin().is_some_and(|origin| OF_TEXT.iter().any(|it| origin.starts_with(it)));
    match &value.kind {
        ValueKind::String(text) if is_text => parse_value(text).unwrap_or_else(|| value.clone()),
        _ => value.clone(),
    }
}

fn plain(value: &Value) -> serde_json::Value {
    match &value.kind {
        ValueKind::Nil => serde_json::Value::Null,
        ValueKind::Boolean(switch) => (*switch).into(),
        ValueKind::I64(number) => (*number).into(),
        ValueKind::U64(number) => (*number).into(),
        ValueKind::Float(number) => (*number).into(),
        ValueKind::Array(items) => items.iter().map(plain).collect(),
        ValueKind::Table(table) => table.iter().map(|(name, value)| (name.clone(), plain(value))).collect(),
        other => other.to_string().into(),
    }
}

fn dtype(value: &Value) -> Result<Dtype, Expected> {
    let written = text(value).ok();
    let found = Dtype::ALL.iter().find(|(_, name)| written.as_deref() == Some(*name));
    found.map(|(dtype, _)| *dtype).ok_or_else(|| "\"f32\", \"bf16\" or \"f16\"".to_owned())
}

fn retry(mut section: Section<'_>) -> Option<Retry> {
    let max_attempts = section.read("max_attempts", whole(ATTEMPTS));
    let delay = section.read("delay", duration(WAIT));
    let delay_max = section.read("delay_max", duration(WAIT));
    refuse_low_ceiling(&mut section, ("delay", delay), ("delay_max", delay_max));
    section.finish();
    Some(Retry { max_attempts: max_attempts?, delay: delay?, delay_max: delay_max? })
}

fn batch(mut section: Section<'_>) -> Option<Batch> {
    let max_tokens = section.read("max_tokens", auto(whole(TOKENS)));
    let max_requests = section.read("max_requests", whole(COUNT));
    let max_delay = section.read("max_delay", duration(BATCH_DELAY));
    let timeout = section.read("timeout", duration(WAIT));
    section.finish();
    Some(Batch {
        max_tokens: max_tokens?,
        max_requests: max_requests?,
        max_delay: max_delay?,
        timeout: timeout?,
    })
}

fn refuse_short_prefetch(section: &mut Section<'_>, prefetch: u16, max_requests: usize) {
    let batch = "batch.max_requests";
    // The default is a ceiling that nobody asked for; the worker's batches then end at the prefetch.
    if usize::from(prefetch) >= max_requests || section.origin_of(batch) == BUILT_IN {
        return;
    }
    let expected = format!(
        "\"auto\" or at least {} = {max_requests} ({}): with fewer messages in hand, a batch of \
         tasks with one input each could never fill",
        section.path_of(batch),
        section.origin_of(batch),
    );
    section.refuse("prefetch", i64::from(prefetch), expected);
}

struct Queues {
    task: Option<String>,
    reply: Option<Option<String>>,
    dead: Option<String>,
}

fn queues(section: &mut Section<'_>) -> Queues {
    let task = section.read("task_queue", |value| short_queue(value, LONGEST_QUEUE_NAME - LONGEST_SUFFIX));
    let reply = section.read("reply_queue", |value| match optional_name(value)? {
        Some(_) => queue(value).map(Some),
        None => Ok(None),
    });
    let dead = section.read("dead_letter_queue", queue);
    let others =
        [("reply_queue", reply.as_ref().and_then(Option::as_ref)), ("dead_letter_queue", dead.as_ref())];
    for (key, other) in others {
        let Some(task) = task.as_ref().filter(|task| Some(*task) == other) else {
            continue;
        };
        let expected = format!(
            "a queue other than {} ({}): its messages would come back as tasks",
            section.path_of("task_queue"),
            section.origin_of("task_queue"),
        );
        section.refuse(key, task.as_str(), expected);
    }
    Queues { task, reply, dead }
}

fn queue(value: &Value) -> Result<String, Expected> {
    short_queue(value, LONGEST_QUEUE_NAME)
}

fn short_queue(value: &Value, longest: usize) -> Result<String, Expected> {
    let queue = name(value).map_err(|_| "the name of a queue".to_owned())?;
    if queue.len() > longest {
        return Err(format!("a queue name of at most {longest} bytes"));
    }
    if queue.starts_with("amq.") {
        return Err("a queue name that does not start with `amq.`, the broker's own".to_owned());
    }
    Ok(queue)
}

fn served_names(value: &Value) -> Result<Vec<String>, Expected> {
    let names = list(value)?;
    match names.iter().any(String::is_empty) {
        true => Err("a list without empty names".to_owned()),
        false => Ok(names),
    }
}

fn devices(value: &Value) -> Result<Devices, Expected> {
    const EXPECTED: &str =
        "\"auto\", or a list of devices such as [\"cpu\", \"cpu\"] or [\"GPU-5a…\", \"cuda:1\"]";
    let devices = list(value).map_err(|_| EXPECTED.to_owned())?;
    if matches!(&value.kind, ValueKind::String(text) if text == "auto") {
        return Ok(Devices::Auto);
    }
    let strange = |device: &String| device.is_empty() || device == "auto";
    if devices.is_empty() || devices.iter().any(strange) {
        return Err(EXPECTED.to_owned());
    }
    let mut seen = BTreeSet::new();
    let mut gpus = devices.iter().filter(|device| *device != "cpu");
    match gpus.find(|device| !seen.insert(device.as_str())) {
        Some(device) => {
            Err(format!("each device once, not {device} twice; workers_per_device runs several on one"))
        }
        None => Ok(Devices::List(devices)),
    }
}
