//! `sconce bench` over a real broker: it counts what it published, and its numbers can be believed. Paces, delays and
//! missing replies are in `src/commands/bench/drive_tests.rs`.

use serde_json::Value;

use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

fn number(report: &Value, path: &str) -> f64 {
    let value = report.pointer(path).and_then(Value::as_f64);
    value.unwrap_or_else(|| panic!("no number {path} in {report:#}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_loop_reports_every_task_and_each_worker() {
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].workers_per_device", 2);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let arguments = "bench --json --tasks 600 --warmup 50 --in-flight 64 --inputs 2";
    let mut bench = Sconce::run(&settings, &arguments.split(' ').collect::<Vec<_>>());
    assert_eq!(bench.exit_code().await, 0, "{}", bench.log());
    let report = bench.lines_from(0).iter().find_map(|line| serde_json::from_str::<Value>(line).ok());
    let report = report.expect("a report");
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
