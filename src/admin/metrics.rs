//! Renders the status board as Prometheus metrics. Decides their names, units and labels, which `docs/monitoring.md`
//! lists. Counts belong to a slot: they start with the launcher, and continue when the slot's worker is replaced.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::launcher::RestartReason;
use crate::launcher::gpus::Gpus;
use crate::launcher::status_board::{Entry, SlotStatus, StatusBoard};
use crate::protocol::TaskErrorKind;
use crate::protocol::admin::State;
use crate::protocol::dead_letter::Reason;
use crate::protocol::stats::{Histogram, INPUTS, SECONDS, Stage, Stats, TOKENS, TokenCounts};

/// Renders the board and the devices as one page in the OpenMetrics format.
pub(super) fn render(launcher: &str, board: Arc<StatusBoard>, gpus: Gpus) -> String {
    let mut registry = Registry::with_prefix("sconce");
    registry.register_collector(Box::new(BoardCollector { launcher: launcher.to_owned(), board, gpus }));
    let mut page = String::new();
    // Writing to a string never fails.
    let _ = prometheus_client::encoding::text::encode(&mut page, &registry);
    page
}

/// Converts a page to the older text format. In it, the `# TYPE` and `# HELP` lines of a counter have the name of its
/// samples, with `_total`.
pub(super) fn plain(page: &str) -> String {
    let counter = |line: &str| line.strip_prefix("# TYPE ")?.strip_suffix(" counter").map(str::to_owned);
    let counters: BTreeSet<String> = page.lines().filter_map(counter).collect();
    let mut text = String::with_capacity(page.len());
    for line in page.lines().filter(|line| *line != "# EOF") {
        let mut fields = line.splitn(4, ' ');
        match (fields.next(), fields.next(), fields.next(), fields.next()) {
            (Some("#"), Some(kind), Some(name), Some(rest)) if counters.contains(name) => {
                text.push_str(&format!("# {kind} {name}_total {rest}\n"));
            }
            _ => text.push_str(&format!("{line}\n")),
        }
    }
    text
}

#[derive(Debug)]
struct BoardCollector {
    launcher: String,
    board: Arc<StatusBoard>,
    gpus: Gpus,
}

impl Collector for BoardCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        self.board.read(|status| {
            let mut out = MetricsWriter { encoder: &mut encoder };
            launcher_metrics(&mut out, &self.launcher, status)?;
            task_metrics(&mut out, status)?;
            batch_metrics(&mut out, status)?;
            generation_metrics(&mut out, status)?;
            worker_metrics(&mut out, status)?;
            device_metrics(&mut out, &self.gpus)
        })
    }
}

/// Names and values of labels.
type Labels<'a> = Vec<(&'static str, &'a str)>;

struct MetricsWriter<'a, 'b> {
    encoder: &'a mut DescriptorEncoder<'b>,
}

impl MetricsWriter<'_, '_> {
    fn family(
        &mut self,
        name: &'static str,
        help: &str,
        kind: MetricType,
    ) -> Result<MetricEncoder<'_>, fmt::Error> {
        self.encoder.encode_descriptor(name, help, None, kind)
    }

    /// A sum that only grows; the library appends `_total` to its name.
    fn counter<'v>(
        &mut self,
        name: &'static str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<'v>, f64)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Counter)?;
        for (labels, value) in values {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, f64, f64>(&value, None)?;
        }
        Ok(())
    }

    fn gauge<'v>(
        &mut self,
        name: &'static str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<'v>, f64)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Gauge)?;
        for (labels, value) in values {
            family.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    fn histogram<'v>(
        &mut self,
        name: &'static str,
        help: &str,
        bounds: &[f64],
        values: impl IntoIterator<Item = (Labels<'v>, &'v Histogram)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Histogram)?;
        for (labels, histogram) in values {
            let upper_bounds = bounds.iter().copied().chain([f64::INFINITY]);
            let buckets: Vec<_> = upper_bounds.zip(histogram.counts(bounds)).collect();
            let (sum, count) = (histogram.sum(), histogram.count());
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }
}

/// The labels of every value of a slot.
fn slot_labels(entry: &Entry) -> Labels<'_> {
    vec![("pool", &entry.report.pool), ("slot", &entry.report.slot)]
}

fn slot_labels_and<'a>(entry: &'a Entry, name: &'static str, value: &'a str) -> Labels<'a> {
    let mut labels = slot_labels(entry);
    labels.push((name, value));
    labels
}

/// The slots that have statistics, each with its statistics.
fn slots_with_stats(status: &SlotStatus) -> impl Iterator<Item = (&Entry, &Stats)> {
    status.slots.values().filter_map(|entry| Some((entry, &**entry.report.stats.as_ref()?)))
}

/// One labelled value for each slot that has statistics.
fn slot_values<'a>(
    status: &'a SlotStatus,
    value: impl Fn(&Stats) -> f64 + 'a,
) -> impl Iterator<Item = (Labels<'a>, f64)> {
    slots_with_stats(status).map(move |(entry, stats)| (slot_labels(entry), value(stats)))
}

/// One labelled value for each slot that has one.
fn entry_values<'a>(
    status: &'a SlotStatus,
    value: impl Fn(&Entry) -> Option<f64> + 'a,
) -> impl Iterator<Item = (Labels<'a>, f64)> {
    status.slots.values().filter_map(move |entry| Some((slot_labels(entry), value(entry)?)))
}

fn launcher_metrics(out: &mut MetricsWriter<'_, '_>, launcher: &str, status: &SlotStatus) -> fmt::Result {
    let version = vec![("version", env!("CARGO_PKG_VERSION")), ("launcher", launcher)];
    out.gauge("build_info", "What is running", [(version, 1.0)])?;
    let pools = status.slots.values().map(|entry| (entry.report.pool.as_str(), &entry.assignment.pool));
    let info = pools.collect::<BTreeMap<_, _>>().into_iter().map(|(name, pool)| {
        let labels: Labels<'_> = vec![("pool", name), ("model", &pool.model), ("queue", &pool.task_queue)];
        (labels, 1.0)
    });
    let waiting = status
        .queues
        .iter()
        .map(|((queue, kind), ready)| (vec![("queue", queue.as_str()), ("kind", *kind)], f64::from(*ready)));
    let help = "Messages that wait in a queue: kind is task, background, retry or dead_letter";
    out.gauge("queue_messages", help, waiting)?;
    let help = "A pool's model, as the settings name it, with its revision if they do, and its task queue";
    out.gauge("pool_info", help, info)?;
    let results = [("applied", status.reloads_applied), ("refused", status.reloads_refused)];
    let values = results.map(|(result, count)| (vec![("result", result)], count as f64));
    out.counter("reloads", "Reloads of the settings", values)
}

fn task_metrics(out: &mut MetricsWriter<'_, '_>, status: &SlotStatus) -> fmt::Result {
    let outcomes = known_outcomes();
    let answers = slots_with_stats(status).flat_map(|(entry, stats)| {
        outcomes.iter().map(move |(status, reason)| {
            let answer = stats.answers.iter().find(|it| it.status == *status && it.reason == *reason);
            let mut labels = slot_labels_and(entry, "status", status);
            labels.push(("reason", reason));
            (labels, answer.map_or(0.0, |answer| answer.count as f64))
        })
    });
    out.counter("tasks", "Tasks answered, by the reply's status and the error's code", answers)?;
    // All series exist from the start, as those of the answers do.
    let with_queues: Vec<_> = slots_with_stats(status)
        .map(|(entry, stats)| (entry, stats, entry.assignment.pool.queues()))
        .collect();
    let by_queue = with_queues.iter().flat_map(|(entry, stats, queues)| {
        queues.iter().map(move |queue| {
            let count = stats.queues.get(&queue.name).copied().unwrap_or(0);
            (slot_labels_and(entry, "queue", &queue.name), count as f64)
        })
    });
    out.counter("queue_tasks", "Tasks answered, by the queue that they came from", by_queue)?;
    type Count = fn(&Stats) -> u64;
    let counters: [(&'static str, &str, Count); 7] = [
        ("inputs", "Inputs computed", |stats| stats.inputs),
        ("tokens", "Tokens computed", |stats| stats.tokens),
        ("redelivered", "Deliveries that are not the first of their message", |stats| stats.redelivered),
        ("retried", "Tasks tried again", |stats| stats.retried),
        ("put_off", "Tasks put off uncomputed", |stats| stats.put_off),
        ("requeued", "Deliveries handed back", |stats| stats.requeued),
        ("sentinels", "Sentinels that stopped a worker", |stats| stats.sentinels),
    ];
    for (name, help, count) in counters {
        out.counter(name, help, slot_values(status, move |stats| count(stats) as f64))?;
    }
    let dead_letters = slots_with_stats(status).flat_map(|(entry, stats)| {
        Reason::ALL.iter().map(move |(_, reason)| {
            let count = stats.dead_lettered.get(*reason).copied().unwrap_or(0);
            (slot_labels_and(entry, "reason", reason), count as f64)
        })
    });
    out.counter("dead_lettered", "Messages dead-lettered", dead_letters)?;
    let stages = slots_with_stats(status).flat_map(|(entry, stats)| {
        Stage::ALL
            .iter()
            .map(move |(stage, name)| (slot_labels_and(entry, "stage", name), &stats.stages[*stage as usize]))
    });
    let help = "How long a stage of a task took: queue, prepare, wait, compute, publish";
    out.histogram("task_stage_duration_seconds", help, &SECONDS, stages)
}

/// Every pair of a status and a reason that an answer can have. All series exist from the start, because `increase()`
/// misses the first event of a series that begins with that event.
fn known_outcomes() -> BTreeSet<(&'static str, &'static str)> {
    let errors = TaskErrorKind::ALL.map(|(kind, code)| (kind.names().status, code));
    errors.into_iter().chain([("succeeded", "")]).collect()
}

fn batch_metrics(out: &mut MetricsWriter<'_, '_>, status: &SlotStatus) -> fmt::Result {
    let durations = slots_with_stats(status).map(|(entry, stats)| (slot_labels(entry), &stats.batch_seconds));
    out.histogram("batch_duration_seconds", "How long a forward pass took", &SECONDS, durations)?;
    let inputs = slots_with_stats(status).map(|(entry, stats)| (slot_labels(entry), &stats.batch_inputs));
    out.histogram("batch_inputs", "Inputs of a forward pass", &INPUTS, inputs)?;
    let tokens = slots_with_stats(status).map(|(entry, stats)| (slot_labels(entry), &stats.batch_tokens));
    out.histogram("batch_tokens", "Tokens of a forward pass", &TOKENS, tokens)?;
    let busy = slot_values(status, |stats| stats.busy_us as f64 / 1e6);
    out.counter("device_busy_seconds", "Time that the device computed", busy)
}

fn generation_metrics(out: &mut MetricsWriter<'_, '_>, status: &SlotStatus) -> fmt::Result {
    let by_user = |count: fn(&TokenCounts) -> u64| {
        slots_with_stats(status).flat_map(move |(entry, stats)| {
            stats
                .users
                .iter()
                .map(move |(user, tokens)| (slot_labels_and(entry, "user", user), count(tokens) as f64))
        })
    };
    let help = "Tokens of prompts, by the request's user";
    out.counter("prompt_tokens", help, by_user(|tokens| tokens.prompt))?;
    let help = "Tokens of prompts that were cached and not computed again";
    out.counter("cached_prompt_tokens", help, by_user(|tokens| tokens.cached))?;
    out.counter("generated_tokens", "Tokens of answers", by_user(|tokens| tokens.answer))?;
    let generates = || slots_with_stats(status).filter(|(_, stats)| stats.now.kv_tokens > 0);
    let first = generates().map(|(entry, stats)| (slot_labels(entry), &stats.first_token));
    let help = "Time from a task's acceptance by its worker to its first token";
    out.histogram("first_token_duration_seconds", help, &SECONDS, first)?;
    let output = generates().map(|(entry, stats)| (slot_labels(entry), &stats.output_token));
    let help = "Time for each token of an answer after its first, averaged over the answer";
    out.histogram("output_token_duration_seconds", help, &SECONDS, output)?;
    let reserved = generates().map(|(entry, stats)| (slot_labels(entry), stats.now.kv_reserved as f64));
    out.gauge("kv_reserved_tokens", "Tokens reserved for running sequences", reserved)?;
    let capacity = generates().map(|(entry, stats)| (slot_labels(entry), stats.now.kv_tokens as f64));
    out.gauge("kv_tokens", "Tokens that can be reserved in all", capacity)
}

fn worker_metrics(out: &mut MetricsWriter<'_, '_>, status: &SlotStatus) -> fmt::Result {
    let states = status.slots.values().flat_map(|entry| {
        let is_in = move |state| f64::from(u8::from(entry.report.state == state));
        State::ALL.iter().map(move |(state, name)| (slot_labels_and(entry, "state", name), is_in(*state)))
    });
    out.gauge("worker_state", "1 for the state that a slot is in", states)?;
    let restarts = status.slots.values().flat_map(|entry| {
        RestartReason::ALL.iter().map(move |(_, reason)| {
            let count = entry.report.restarts.get(*reason).copied().unwrap_or(0);
            (slot_labels_and(entry, "reason", reason), count as f64)
        })
    });
    out.counter("worker_restarts", "Workers started to replace another", restarts)?;
    let stuck = entry_values(status, |entry| Some(f64::from(u8::from(entry.stuck_since.is_some()))));
    out.gauge("worker_stuck", "1 while the worker is past its time limit, and /livez fails", stuck)?;
    let resident = slot_values(status, |stats| stats.now.resident as f64);
    out.gauge("worker_resident_memory_bytes", "Resident memory that only the worker uses", resident)?;
    let started = entry_values(status, |entry| Some(entry.report.ready_at_ms? as f64 / 1e3));
    out.gauge("worker_start_time_seconds", "When the worker became ready, in seconds since 1970", started)?;
    let loaded = status
        .slots
        .values()
        .filter_map(|entry| Some((slot_labels_and(entry, "dtype", entry.report.dtype.as_deref()?), 1.0)));
    out.gauge("worker_info", "The number format of the weights that the worker has loaded", loaded)?;
    let connected = slot_values(status, |stats| f64::from(u8::from(stats.now.connected)));
    out.gauge("broker_connected", "1 while the worker has a session with the broker", connected)?;
    let lost = slot_values(status, |stats| stats.lost_sessions as f64);
    out.counter("broker_reconnects", "Sessions with the broker that were lost", lost)?;
    let prefetched = slots_with_stats(status).map(|(entry, stats)| {
        (slot_labels(entry), stats.now.held.saturating_sub(entry.report.in_flight) as f64)
    });
    out.gauge("prefetched_tasks", "Tasks that the worker holds and that are not on the device", prefetched)?;
    let in_flight = entry_values(status, |entry| Some(entry.report.in_flight as f64));
    out.gauge("in_flight_tasks", "Tasks on the device", in_flight)
}

fn device_metrics(out: &mut MetricsWriter<'_, '_>, gpus: &Gpus) -> fmt::Result {
    let parts = gpus.gpus.iter().flat_map(|gpu| {
        let parts = gpu.parts.iter().flatten().map(|part| (part.uuid.as_str(), part.memory));
        parts.chain([(gpu.uuid.as_str(), gpu.memory)])
    });
    let memory: Vec<_> = parts.filter_map(|(uuid, memory)| Some((uuid, memory?))).collect();
    let used =
        memory.iter().map(|(uuid, it)| (vec![("device", *uuid)], it.total.saturating_sub(it.free) as f64));
    out.gauge("device_memory_used_bytes", "The device's memory in use by any process", used)?;
    let total = memory.iter().map(|(uuid, it)| (vec![("device", *uuid)], it.total as f64));
    out.gauge("device_memory_total_bytes", "The device's memory", total)?;
    let utilization = gpus.gpus.iter().filter_map(|gpu| {
        Some((vec![("device", gpu.uuid.as_str())], f64::from(gpu.utilization_percent?) / 100.0))
    });
    out.gauge(
        "device_utilization_ratio",
        "Share of the driver's last sample period in which the device computed",
        utilization,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::launcher::gpus::{Gpu, Memory};
    use crate::launcher::{Host, LaunchSpec, PreparedLauncher, plan};
    use crate::shutdown::Stop;

    fn page(gpus: Gpus) -> String {
        let flags = [("pool[0].devices", "cpu,cpu"), ("pool[0].name", "a \"quoted\" name")];
        let flags = flags.map(|(path, value)| (path.to_owned(), value.to_owned()));
        let settings = config::load(&[], [], &flags).unwrap().settings;
        let host = Host {
            name: "h".into(),
            launcher: "h".into(),
            cores: 2,
            gpus: Gpus::default(),
            visible: None,
            cuda: None,
        };
        let launching = PreparedLauncher::new(LaunchSpec {
            worker_program: "none".as_ref(),
            guard_program: None,
            policy: &settings.launcher,
            stop: &Stop::default(),
            raw_lines: None,
        });
        let board = launching.board();
        for assignment in plan(&settings, &host).unwrap() {
            board.assign(&assignment);
        }
        board.change("a \"quoted\" name/0", |entry| {
            let stats = entry.report.stats.as_mut().unwrap();
            stats.count_answers("succeeded", "", 2);
            stats.observe_batch(3, 100, 0.02);
            stats.observe_stage(Stage::Compute, 0.02);
            entry.report.dtype = Some("int8".into());
            entry.set_state(State::Busy);
        });
        render("here", board, gpus)
    }

    fn assert_lines<const N: usize>(page: &str, lines: [String; N]) {
        for line in lines {
            assert!(page.lines().any(|it| it == line), "{line}\n{page}");
        }
    }

    #[test]
    fn slot_metrics_are_labelled_and_known_reasons_start_at_zero() {
        let page = page(Gpus::default());
        let slot = r#"pool="a \"quoted\" name",slot="a \"quoted\" name/0""#;
        assert_lines(
            &page,
            [
                format!(r#"sconce_tasks_total{{{slot},status="succeeded",reason=""}} 2.0"#),
                format!(r#"sconce_tasks_total{{{slot},status="expired",reason="expired"}} 0.0"#),
                format!(r#"sconce_dead_lettered_total{{{slot},reason="poison"}} 0.0"#),
                format!(r#"sconce_worker_restarts_total{{{slot},reason="stuck"}} 0.0"#),
                format!(r#"sconce_worker_state{{{slot},state="busy"}} 1.0"#),
                format!(r#"sconce_worker_info{{{slot},dtype="int8"}} 1.0"#),
                format!(r#"sconce_batch_tokens_bucket{{le="128.0",{slot}}} 1"#),
                format!(r#"sconce_batch_tokens_bucket{{le="+Inf",{slot}}} 1"#),
                format!("sconce_device_busy_seconds_total{{{slot}}} 0.02"),
                format!(r#"sconce_task_stage_duration_seconds_sum{{{slot},stage="compute"}} 0.02"#),
            ],
        );
        assert!(page.ends_with("# EOF\n"));
    }

    #[test]
    fn plain_text_names_counters_with_total_and_has_no_eof_line() {
        let page = plain(&page(Gpus::default()));
        for line in ["# TYPE sconce_tasks_total counter", "# TYPE sconce_worker_state gauge"] {
            assert!(page.lines().any(|it| it == line), "{line}");
        }
        assert!(!page.contains("# EOF") && !page.contains("# TYPE sconce_tasks counter"), "{page}");
        assert!(page.contains("sconce_pool_info{pool="), "{page}");
    }

    #[test]
    fn devices_are_labelled_by_their_uuids() {
        let memory = Some(Memory { total: 100, free: 40 });
        let gpu = Gpu { uuid: "GPU-a".into(), memory, utilization_percent: Some(50), ..Gpu::default() };
        let page = page(Gpus { gpus: vec![gpu], ..Gpus::default() });
        assert_lines(
            &page,
            [
                r#"sconce_device_memory_used_bytes{device="GPU-a"} 60.0"#.to_owned(),
                r#"sconce_device_utilization_ratio{device="GPU-a"} 0.5"#.to_owned(),
            ],
        );
    }
}
