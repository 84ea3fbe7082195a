//! `sconce bench` over a real broker: it counts what it published, and its numbers can be believed.

use std::fs;
use std::time::Instant;

use serde_json::Value;

use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

async fn bench(settings: &Settings, arguments: &str) -> (i32, Sconce) {
    let arguments: Vec<&str> = ["bench"].into_iter().chain(arguments.split_whitespace()).collect();
    let mut bench = Sconce::run(settings, &arguments);
    (bench.exit_code().await, bench)
}

/// The report of a run that ends well.
async fn report(settings: &Settings, arguments: &str) -> Value {
    let (code, bench) = bench(settings, &format!("{arguments} --json")).await;
    assert_eq!(code, 0, "{}", bench.log());
    printed(&bench)
}

fn printed(bench: &Sconce) -> Value {
    let lines = bench.lines_from(0);
    let report = lines.iter().find_map(|line| serde_json::from_str(line).ok());
    report.unwrap_or_else(|| panic!("no report: {lines:?}"))
}

fn number(report: &Value, path: &str) -> f64 {
    let value = report.pointer(path).and_then(Value::as_f64);
    value.unwrap_or_else(|| panic!("no number {path} in {report:#}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_loop_reports_every_task_and_each_worker() {
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].workers_per_device", 2);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let report = report(&settings, "--tasks 600 --warmup 50 --in-flight 64 --inputs 2").await;
    assert_eq!((number(&report, "/tasks"), number(&report, "/succeeded")), (600.0, 600.0), "{report:#}");
    assert_eq!((number(&report, "/warmup"), number(&report, "/duplicates")), (50.0, 0.0));
    assert_eq!(report["errors"], serde_json::json!({}));
    assert_eq!(report["load"], serde_json::json!({"kind": "closed", "in_flight": 64}));
    assert_eq!((&report["pool"], &report["queue"]), (&Value::from(settings.name), &settings.tasks.into()));
    assert_eq!(report["device"], serde_json::json!(["cpu"]));
    assert!(report["tokens_per_second"].is_null(), "echo tells none");
    let (tasks, inputs) = (number(&report, "/tasks_per_second"), number(&report, "/inputs_per_second"));
    assert!(tasks > 0.0 && (inputs / tasks - 2.0).abs() < 0.01, "{tasks} tasks/s, {inputs} inputs/s");
    assert!((600.0 / tasks - number(&report, "/seconds")).abs() < 0.01);
    for times in ["latency_ms", "queue_ms", "prepare_ms", "wait_ms", "compute_ms"] {
        let at = |name: &str| number(&report, &format!("/{times}/{name}"));
        let ordered = ["p50", "p90", "p99", "p99_9", "max"].map(at);
        assert!(ordered.is_sorted() && ordered[0] >= 0.0, "{times}: {ordered:?}");
    }
    assert!(number(&report, "/latency_ms/p50") > 0.0);
    let most = number(&report, "/batch/inputs/max");
    assert!((1.0..=512.0).contains(&most) && number(&report, "/batch/inputs/mean") <= most);
    let workers = report["workers"].as_array().expect("workers");
    assert_eq!(workers.len(), 2, "{report:#}");
    assert_eq!(workers.iter().map(|it| number(it, "/tasks")).sum::<f64>(), 600.0);
    let busy = workers.iter().map(|it| number(it, "/busy_percent")).collect::<Vec<_>>();
    assert!(busy.iter().all(|busy| (0.0..=100.0).contains(busy)), "{busy:?}");
    let mean = number(&report, "/device_busy_percent");
    assert!((mean - busy.iter().sum::<f64>() / 2.0).abs() < 0.01, "{mean} of {busy:?}");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_busy_share_is_that_of_the_passes_in_the_time_they_took() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tasks.jsonl");
    fs::write(&file, "{\"input\": \"a\", \"sleep_ms\": 20}\n").expect("a file");
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].batch.max_requests", 4);
    let sconce = Sconce::launched(&settings).await;
    let arguments = format!("--input {} --tasks 200 --warmup 20 --in-flight 32", file.display());
    let report = report(&settings, &arguments).await;
    // Four tasks each 20 ms and a little.
    let rate = number(&report, "/tasks_per_second");
    // At most: a busy machine is slower, never faster.
    assert!(rate <= 205.0, "{report:#}");
    let passes = rate / 4.0 * number(&report, "/compute_ms/mean") / 10.0;
    let busy = number(&report, "/device_busy_percent");
    assert!((busy - passes).abs() < 15.0, "busy {busy} %, passes {passes} %: {report:#}");
    assert!(number(&report, "/compute_ms/p50") >= 20.0);
    assert!(number(&report, "/batch/inputs/max") <= 4.0);
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_loop_keeps_its_rate_and_a_slow_pool_shows_in_the_latency() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tasks.jsonl");
    fs::write(&file, "{\"input\": \"a\", \"sleep_ms\": 20}\n").expect("a file");
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].batch.max_requests", 1);
    let sconce = Sconce::launched(&settings).await;
    let slow = report(&settings, "--rate 100 --tasks 100 --warmup 20").await;
    let achieved = number(&slow, "/load/achieved_rate");
    assert!((50.0..200.0).contains(&achieved), "{slow:#}");
    assert_eq!((slow["load"]["kind"].as_str(), number(&slow, "/load/rate")), (Some("open"), 100.0));
    // Twice as many as the worker can do: the last of them waits for about half the time they took.
    let arguments = format!("--input {} --rate 100 --tasks 150 --warmup 0", file.display());
    let report = report(&settings, &arguments).await;
    assert!(number(&report, "/load/achieved_rate") > 50.0, "{report:#}");
    assert!(number(&report, "/latency_ms/max") > 600.0, "{report:#}");
    assert!(number(&report, "/tasks_per_second") < 51.0, "{report:#}");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_counted_by_their_status_code_and_shown_in_the_table() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tasks.jsonl");
    let lines =
        ["\"a text\"", "{\"input\": 1, \"sleep_ms\": \"long\"}", "", "{\"input\": 2, \"fail\": \"error\"}"];
    fs::write(&file, lines.join("\n")).expect("a file");
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].retry.max_attempts", 1);
    let sconce = Sconce::launched(&settings).await;
    // Three lines, ten times over.
    let arguments = format!("--input {} --tasks 30 --warmup 0 --in-flight 1", file.display());
    let report = report(&settings, &arguments).await;
    assert_eq!(report["errors"], serde_json::json!({"400": 10, "500": 10}), "{report:#}");
    assert_eq!(number(&report, "/succeeded"), 10.0);
    let (code, shown) = bench(&settings, &arguments).await;
    assert_eq!(code, 0);
    let table = shown.log();
    for part in ["10 of 30 succeeded, 20 failed", "status 400: 10", "status 500: 10", "latency", "busy"] {
        assert!(table.contains(part), "no {part:?} in\n{table}");
    }
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_does_not_come_is_waited_for_no_longer_than_asked() {
    let settings = Settings::echo(Rabbit::shared().url());
    let begun = Instant::now();
    let (code, bench) = bench(&settings, "--tasks 5 --warmup 0 --in-flight 2 --timeout 1s --json").await;
    assert_eq!(code, 84, "{}", bench.log());
    let report = printed(&bench);
    assert_eq!((number(&report, "/unanswered"), number(&report, "/succeeded")), (2.0, 0.0), "{report:#}");
    assert!(
        bench.log().contains("no reply for 1s; 2 of 2 published tasks are not answered"),
        "{}",
        bench.log()
    );
    assert!(begun.elapsed().as_secs() < 20);
}
