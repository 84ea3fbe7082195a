//! What operators see of a running service and tell it: metrics, health, remote control.

use std::collections::BTreeMap;
use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::messages::busy_with;
use crate::support::client::{Client, Task};
use crate::support::processes::lives;
use crate::support::rabbit::{Conf, Rabbit};
use crate::support::raw_amqp::{LARGEST_TABLE, nested, publish_to};
use crate::support::sconce::{OnTerminal, Sconce, Settings};
use crate::support::wait::{bounded, until};

/// The status and body that a path answers with.
async fn get(url: String) -> (u16, String) {
    let asked = tokio::task::spawn_blocking(move || {
        let answer = match ureq::get(&url).timeout(Duration::from_secs(20)).call() {
            Ok(answer) | Err(ureq::Error::Status(_, answer)) => answer,
            Err(error) => panic!("{url}: {error}"),
        };
        (answer.status(), answer.into_string().expect("text"))
    });
    asked.await.expect("an answer")
}

/// The metrics of a service, by name and labels.
pub async fn metrics(admin: &str) -> BTreeMap<String, f64> {
    let (status, page) = get(format!("{admin}/metrics")).await;
    assert_eq!(status, 200);
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(name, value)| (name.to_owned(), value.parse().expect("a number")))
        .collect()
}

/// Waits until a metric has this value.
pub async fn metric_becomes(admin: &str, name: &str, wanted: f64) {
    let what = format!("{name} is {wanted}");
    until(&what, || async { metrics(admin).await.get(name).is_some_and(|it| *it == wanted).then_some(()) })
        .await;
}

/// What `sconce ctl …` answers, with its exit code.
async fn ctl(settings: &Settings, arguments: &[&str]) -> (i32, Vec<Value>, String) {
    let arguments: Vec<_> = ["ctl", "--json"].iter().chain(arguments).copied().collect();
    let mut command = Sconce::run(settings, &arguments);
    let code = command.exit_code().await;
    let log = command.log();
    (code, log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect(), log)
}

/// The slots of the only launcher that answers.
async fn slots(settings: &Settings, arguments: &[&str]) -> Vec<Value> {
    let arguments: Vec<_> = arguments.iter().chain(&["--expect", "1", "--timeout", "20s"]).copied().collect();
    let (code, answers, log) = ctl(settings, &arguments).await;
    assert_eq!((code, answers.len()), (0, 1), "{log}");
    answers[0]["slots"].as_array().expect("slots").clone()
}

async fn state_becomes(settings: &Settings, slot: usize, wanted: &str) {
    let is = || async { (slots(settings, &["ping"]).await[slot]["state"] == wanted).then_some(()) };
    until(&format!("slot {slot} is {wanted}"), is).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_task_is_counted_by_its_outcome_and_every_stage_is_timed() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let sconce = Sconce::launched(&settings).await;
    let admin = sconce.admin().await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish_all(&settings.tasks, (0..20).map(|n| Task::new(json!({"input": n})))).await;
    client.publish(&settings.tasks, Task::raw("no JSON")).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 1, "sleep_ms": "long"}))).await;
    client
        .publish(&settings.tasks, Task::new(json!({"input": 1})).header("expires", "2001-01-01T00:00:00Z"))
        .await;
    replies.take(23).await;
    let slot = format!(r#"pool="{0}",slot="{0}/0""#, settings.name);
    metric_becomes(&admin, &format!(r#"sconce_tasks_total{{{slot},status="succeeded",reason=""}}"#), 20.0)
        .await;
    let seen = metrics(&admin).await;
    let value = |name: &str, labels: &str| seen[&format!("{name}{{{slot}{labels}}}")];
    for (status, reason) in
        [("rejected", "undecodable"), ("rejected", "invalid_value"), ("expired", "expired")]
    {
        let labels = format!(r#",status="{status}",reason="{reason}""#);
        assert_eq!(value("sconce_tasks_total", &labels), 1.0, "{labels}");
    }
    assert_eq!(value("sconce_dead_lettered_total", r#",reason="undecodable""#), 1.0);
    assert_eq!((value("sconce_inputs_total", ""), value("sconce_batch_inputs_sum", "")), (20.0, 20.0));
    for (stage, tasks) in
        [("queue", 23.0), ("prepare", 23.0), ("publish", 23.0), ("wait", 20.0), ("compute", 20.0)]
    {
        assert_eq!(value("sconce_task_stage_duration_seconds_count", &format!(r#",stage="{stage}""#)), tasks);
    }
    assert_eq!((value("sconce_broker_connected", ""), value("sconce_worker_stuck", "")), (1.0, 0.0));
    assert_eq!(value("sconce_worker_state", r#",state="ready""#), 1.0);
    assert!(value("sconce_worker_resident_memory_bytes", "") > 1e5);
    assert!(value("sconce_worker_start_time_seconds", "") > 1.7e9);
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_and_what_computes_is_shown_while_it_does() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url())
        .set("pool[0].prefetch", 8)
        .set("pool[0].batch.max_requests", 1)
        .controlled();
    let sconce = Sconce::launched(&settings).await;
    let admin = sconce.admin().await;
    let client = Client::connect(&rabbit.url()).await;
    busy_with(&sconce, &client, &settings, Task::new(json!({"input": 0})).id("long")).await;
    client.publish_all(&settings.tasks, (0..4).map(|n| Task::new(json!({"input": n})))).await;
    let slot = format!(r#"pool="{0}",slot="{0}/0""#, settings.name);
    metric_becomes(&admin, &format!("sconce_prefetched_tasks{{{slot}}}"), 4.0).await;
    metric_becomes(&admin, &format!("sconce_in_flight_tasks{{{slot}}}"), 1.0).await;
    let active = &slots(&settings, &["active"]).await[0];
    assert_eq!((&active["state"], &active["active"]), (&json!("busy"), &json!(["long"])));
    assert!(active["active_ms"].as_u64().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn health_follows_what_the_workers_do() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    let admin = sconce.admin().await;
    for path in ["livez", "readyz", "startupz"] {
        until(path, || async { (get(format!("{admin}/{path}")).await.0 == 200).then_some(()) }).await;
    }
    slots(&settings, &["pause", "--all"]).await;
    state_becomes(&settings, 0, "paused").await;
    let (ready, words) = get(format!("{admin}/readyz")).await;
    assert!(
        ready == 503 && words.contains(&format!("pool {}: no worker takes tasks", settings.name)),
        "{words}"
    );
    assert_eq!((get(format!("{admin}/livez")).await.0, get(format!("{admin}/startupz")).await.0), (200, 200));
    for (arguments, code) in
        [(&["healthcheck"][..], 1), (&["healthcheck", "--live"], 0), (&["healthcheck", "--startup"], 0)]
    {
        let url = ["--url", admin.as_str()];
        let arguments: Vec<_> = arguments.iter().chain(&url).copied().collect();
        assert_eq!(Sconce::run(&settings, &arguments).exit_code().await, code, "{arguments:?}");
    }
    assert_eq!(sconce.stop().await, 0);
    let mut nobody = Sconce::run(&settings, &["healthcheck", "--url", &admin]);
    assert_eq!(nobody.exit_code().await, 1);
    assert!(nobody.log().contains("is a launcher running there?"), "{}", nobody.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_computes_past_its_bound_is_not_alive_and_is_replaced() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("pool[0].batch.timeout", "500ms");
    let sconce = Sconce::launched(&settings).await;
    let admin = sconce.admin().await;
    let client = Client::connect(&rabbit.url()).await;
    let task = Task::new(json!({"input": 0})).id("endless");
    busy_with(&sconce, &client, &settings, task).await;
    let stuck = sconce.workers()[0];
    let dead = || async { Some(get(format!("{admin}/livez")).await).filter(|(status, _)| *status == 503) };
    let (_, words) = until("it is not alive", dead).await;
    assert!(words.contains("a forward pass has lasted"), "{words}");
    until("it is killed", || async { (!lives(stuck)).then_some(()) }).await;
    until("it is alive again", || async { (get(format!("{admin}/livez")).await.0 == 200).then_some(()) })
        .await;
    let slot = format!(r#"pool="{0}",slot="{0}/0""#, settings.name);
    metric_becomes(&admin, &format!(r#"sconce_worker_restarts_total{{{slot},reason="stuck"}}"#), 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_worker_takes_nothing_and_a_resumed_one_takes_all() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let worker = sconce.workers();
    for round in 0..3 {
        assert_eq!(slots(&settings, &["pause", "--all"]).await[0]["done"], "pausing");
        state_becomes(&settings, 0, "paused").await;
        client.publish_all(&settings.tasks, (0..50).map(|n| Task::new(json!({"input": n})))).await;
        client.becomes(&settings.tasks, (50, 0)).await;
        slots(&settings, &["resume", "--all"]).await;
        replies.take(50).await;
        assert_eq!(sconce.workers(), worker, "the same worker, in round {round}");
    }
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_amid_work_answers_what_was_taken_once_and_leaves_the_rest() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url())
        .set("pool[0].prefetch", 8)
        .set("pool[0].batch.max_requests", 1)
        .controlled();
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let task = |n: usize| Task::new(json!({"input": n, "sleep_ms": 40})).id(format!("t{n}"));
    client.publish_all(&settings.tasks, (0..60).map(task)).await;
    let mut answered: Vec<_> = replies.take(5).await;
    slots(&settings, &["pause", "--pool", &settings.name]).await;
    state_becomes(&settings, 0, "paused").await;
    let (left, consumers) = client.look(&settings.tasks).await.expect("the queue");
    assert!(consumers == 0 && left > 30, "{left} left, {consumers} consumers");
    slots(&settings, &["resume", "--pool", &settings.name]).await;
    answered.extend(replies.take(55).await);
    let mut ids: Vec<_> = answered.iter().map(|reply| reply.correlation_id.clone()).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 60);
    client.becomes(&settings.tasks, (0, 1)).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_empties_a_slot_restart_fills_it_anew_shutdown_ends_the_launcher() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("pool[0].devices", r#"["cpu", "cpu"]"#).controlled();
    let mut sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let workers = sconce.wait_for_workers(2).await;
    let second = slots(&settings, &["ping"]).await[1]["worker"].as_str().expect("a name").to_owned();
    slots(&settings, &["drain", "--slot", &second]).await;
    state_becomes(&settings, 1, "stopped").await;
    let left = sconce.wait_for_workers(1).await;
    slots(&settings, &["restart", "--all"]).await;
    let restarted = until("two new workers", || async {
        let now = sconce.workers();
        (now.len() == 2 && !now.contains(&left[0])).then_some(now)
    });
    assert!(restarted.await.iter().all(|pid| !workers.contains(pid)));
    slots(&settings, &["shutdown", "--all"]).await;
    assert_eq!(sconce.exit_code().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_filter_changes_at_run_time() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let bad = || Task::new(json!({"input": 1, "sleep_ms": "long"}));
    client.publish(&settings.tasks, bad()).await;
    assert_eq!(replies.next().await.status_code(), 400);
    assert_eq!(sconce.logged(" answering "), 0);
    slots(&settings, &["log-level", "debug,lapin=off", "--all"]).await;
    sconce.wait_for_log("logging by another filter").await;
    client.publish(&settings.tasks, bad()).await;
    sconce.wait_for_log(" answering ").await;
    assert_eq!(sconce.stop().await, 0);
}

#[expect(clippy::disallowed_methods, reason = "any client publishes to an exchange as it likes")]
#[tokio::test(flavor = "multi_thread")]
async fn any_client_can_ask_and_what_is_no_request_is_refused_in_words() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    let client = Client::connect(&rabbit.url()).await;
    let mut answers = client.private_inbox().await;
    let channel = client.channel().await;
    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("an answer");
    let reply_to = answers.queue.clone();
    let ask = async |key: &str, body: &str| {
        let properties = BasicProperties::default()
            .with_reply_to(reply_to.as_str().into())
            .with_correlation_id("q".into());
        let options = BasicPublishOptions::default();
        let published = channel.basic_publish(
            settings.control().into(),
            key.into(),
            options,
            body.as_bytes(),
            properties,
        );
        published.await.expect("an answer").await.expect("an answer");
    };
    let pool = format!("pool.{}", settings.name);
    for (key, body, field, words) in [
        ("all", r#"{"command":"ping"}"#, "version", env!("CARGO_PKG_VERSION")),
        (pool.as_str(), r#"{"command":"ping"}"#, "version", env!("CARGO_PKG_VERSION")),
        ("all", r#"{"command":"explode"}"#, "error", "unknown variant `explode`"),
        ("all", "null", "error", "not a request"),
        ("all", r#"{"command":"cancel"}"#, "error", "cancel needs"),
    ] {
        ask(key, body).await;
        let answer = answers.next().await;
        assert_eq!((answer.correlation_id.as_str(), answer.kind.as_str()), ("q", "control.answer"));
        assert!(
            answer.body[field].as_str().is_some_and(|it| it.contains(words)),
            "{key} {body}: {:?}",
            answer.body
        );
    }
    // Nobody here is meant: no answer, so the next one is to the next question.
    ask("pool.other", r#"{"command":"shutdown"}"#).await;
    ask("slot.elsewhere/x/0", r#"{"command":"shutdown"}"#).await;
    ask("all", r#"{"command":"ping"}"#).await;
    assert_eq!(answers.next().await.body["slots"][0]["state"], "ready");
    assert_eq!(sconce.stop().await, 0);
}

#[expect(clippy::disallowed_methods, reason = "any client publishes to an exchange as it likes")]
#[tokio::test(flavor = "multi_thread")]
async fn requests_wait_in_a_bounded_queue_and_an_order_that_finds_it_full_is_told() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    sconce.signal(Signal::SIGSTOP);
    let client = Client::connect(&rabbit.url()).await;
    let channel = client.channel().await;
    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("an answer");
    let mut confirms = Vec::new();
    for _ in 0..1_200 {
        let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
        let ping = br#"{"command":"ping"}"#;
        let published =
            channel.basic_publish(settings.control().into(), "all".into(), options, ping, properties);
        confirms.push(published.await.expect("published"));
    }
    let mut refused = 0;
    for confirm in confirms {
        refused += usize::from(!confirm.await.expect("an answer").is_ack());
    }
    assert!((150..=200).contains(&refused), "{refused}");
    let (code, _, log) = ctl(&settings, &["ping", "--timeout", "2s"]).await;
    assert_eq!(code, 1, "{log}");
    assert!(log.contains("the queue of requests of a launcher is full"), "{log}");
    sconce.signal(Signal::SIGCONT);
    until("orders are taken again", async || {
        let (code, _, _) = ctl(&settings, &["ping", "--timeout", "5s"]).await;
        (code == 0).then_some(())
    })
    .await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nobody_answers_or_nothing_is_there_ctl_says_so() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let (code, _, log) = ctl(&settings, &["ping"]).await;
    assert!(code == 1 && log.contains("no launcher has made it"), "{code} {log}");
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    let (code, _, log) = ctl(&settings, &["drain", "--slot", "elsewhere/x/0", "--timeout", "100ms"]).await;
    assert!(code == 1 && log.contains("slot.elsewhere/x/0"), "{code} {log}");
    let (code, _, log) = ctl(&settings, &["drain"]).await;
    assert!(code == 64 && log.contains("--all, --host, --launcher, --pool or --slot"), "{code} {log}");
    let (code, _, log) = ctl(&settings, &["pause", "--host", "a", "--pool", "b"]).await;
    assert!(code == 64 && log.contains("only one of"), "{code} {log}");
    let (code, answers, log) = ctl(&settings, &["ping", "--expect", "2", "--timeout", "300ms"]).await;
    assert_eq!((code, answers.len()), (1, 1), "one of two");
    assert!(log.contains("1 of 2 launchers have answered"), "{log}");
    assert_eq!(sconce.stop().await, 0);
    let (code, _, log) = ctl(&settings, &["ping", "--timeout", "300ms"]).await;
    assert!(code == 1 && log.contains("nobody has answered"), "{code} {log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn control_needs_write_permission_and_topic_permissions_say_over_whom() {
    let rabbit = Rabbit::private();
    let settings = Settings::echo(rabbit.url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    rabbit.ctl(&["add_user", "viewer", "pw"]);
    rabbit.ctl(&["set_permissions", "-p", "/", "viewer", "^$", "^amq\\.default$", ".*"]);
    let viewer = settings.clone().over(rabbit.url_for("viewer:pw", "/"));
    let (code, _, log) = ctl(&viewer, &["ping"]).await;
    assert!(code == 78 && log.contains("403"), "{code} {log}");
    rabbit.ctl(&["set_permissions", "-p", "/", "viewer", "^$", ".*", ".*"]);
    let pool = format!("^pool\\.{}$", settings.name);
    rabbit.ctl(&["set_topic_permissions", "-p", "/", "viewer", settings.control(), &pool, ".*"]);
    let (code, answers, log) = ctl(&viewer, &["ping", "--pool", &settings.name]).await;
    assert_eq!((code, answers.len()), (0, 1), "{log}");
    let (code, _, log) = ctl(&viewer, &["shutdown", "--all"]).await;
    assert!(code == 78 && log.contains("403"), "{code} {log}");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_outage_launchers_listen_again_and_the_metrics_have_shown_it() {
    let rabbit = Rabbit::private_with(Conf::default());
    let settings = Settings::echo(rabbit.url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    let admin = sconce.admin().await;
    let connected = format!(r#"sconce_broker_connected{{pool="{0}",slot="{0}/0"}}"#, settings.name);
    metric_becomes(&admin, &connected, 1.0).await;
    rabbit.kill();
    metric_becomes(&admin, &connected, 0.0).await;
    rabbit.start();
    metric_becomes(&admin, &connected, 1.0).await;
    // It listens for requests and for cancellations, before the outage and after it.
    sconce.wait_for_log_times("listening", 4).await;
    assert_eq!(slots(&settings, &["ping"]).await[0]["state"], "ready");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_permissions_that_operating_md_names_are_enough_for_remote_control() {
    let rabbit = Rabbit::private();
    let settings = Settings::echo(rabbit.url()).controlled();
    rabbit.ctl(&["add_user", "launcher", "pw"]);
    let own = format!("{}(\\..*)?", settings.name);
    let configure = format!("^({own}|amq\\.gen.*)$");
    let (write, read) = (format!("^({own}|amq\\.gen.*|amq\\.default)$"), configure.clone());
    rabbit.ctl(&["set_permissions", "-p", "/", "launcher", &configure, &write, &read]);
    let sconce = Sconce::launched(&settings.clone().over(rabbit.url_for("launcher:pw", "/"))).await;
    sconce.wait_for_log("listening").await;
    assert_eq!(slots(&settings, &["ping"]).await.len(), 1);
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_headers_nest_deeply_kills_no_launcher() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    let launcher = sconce.pid();
    publish_to(rabbit.address(), (settings.control(), "all"), &nested(LARGEST_TABLE / 5 - 2), b"{}");
    assert_eq!(slots(&settings, &["ping"]).await[0]["state"], "ready");
    assert!(lives(launcher));
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_worked_on_without_the_permission_to_make_the_exchange() {
    let rabbit = Rabbit::private();
    let settings = Settings::echo(rabbit.url()).controlled();
    rabbit.ctl(&["add_user", "worker", "pw"]);
    rabbit.ctl(&[
        "set_permissions",
        "-p",
        "/",
        "worker",
        &format!("^{}\\.(tasks|replies|dead|tasks\\..*)$", settings.name),
        ".*",
        ".*",
    ]);
    let settings = settings.over(rabbit.url_for("worker:pw", "/"));
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("no remote control").await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 1}))).await;
    assert_eq!(replies.next().await.status_code(), 200);
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_address_is_done_without_and_one_of_no_host_is_refused() {
    let rabbit = Rabbit::shared();
    let first = Sconce::launched(&Settings::echo(rabbit.url())).await;
    let address = first.admin().await.replace("http://", "");
    let second = Sconce::launched(&Settings::echo(rabbit.url()).set("admin.listen", &address)).await;
    second.wait_for_log("another process listens there").await;
    let mut third = Sconce::launch(&Settings::echo(rabbit.url()).set("admin.listen", "192.0.2.1:1"));
    assert_eq!(third.exit_code().await, 78);
    assert!(third.log().contains("admin.listen = \"192.0.2.1:1\""), "{}", third.log());
    assert_eq!((first.stop().await, second.stop().await), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_are_loaded_again_under_load_and_every_task_is_answered_once() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("pool[0].workers_per_device", 2);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let admin = sconce.admin().await;
    let before = sconce.wait_for_workers(2).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let task = |n: usize| Task::new(json!({"input": n, "sleep_ms": 1})).id(format!("t{n}"));
    client.publish_all(&settings.tasks, (0..1_500).map(task)).await;
    let mut ids: Vec<_> = replies.take(20).await.into_iter().map(|it| it.correlation_id).collect();
    sconce.rewrite(&settings.clone().heartbeat("never"));
    sconce.signal(Signal::SIGHUP);
    sconce.wait_for_log("stay in force").await;
    assert_eq!(sconce.workers(), before, "bad settings change nothing");
    sconce.rewrite(&settings.clone().heartbeat("19s"));
    sconce.signal(Signal::SIGHUP);
    sconce.wait_for_log("workers replaced: 2").await;
    until("only new workers", || async {
        let now = sconce.workers();
        (now.len() == 2 && now.iter().all(|pid| !before.contains(pid))).then_some(())
    })
    .await;
    ids.extend(replies.take(1_480).await.into_iter().map(|it| it.correlation_id));
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 1_500);
    client.becomes(&settings.tasks, (0, 2)).await;
    let seen = metrics(&admin).await;
    let reloads =
        ["applied", "refused"].map(|result| seen[&format!(r#"sconce_reloads_total{{result="{result}"}}"#)]);
    assert_eq!(reloads, [1.0, 1.0]);
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_recycled_under_load_and_every_task_is_answered_once() {
    let rabbit = Rabbit::shared();
    let settings =
        Settings::echo(rabbit.url()).set("pool[0].workers_per_device", 2).set("launcher.recycle_tasks", 200);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let mut ids = Vec::new();
    for round in 0..4 {
        let task = |n: usize| Task::new(json!({"input": n, "sleep_ms": 1})).id(format!("{round} {n}"));
        client.publish_all(&settings.tasks, (0..500).map(task)).await;
        ids.extend(replies.take(500).await.into_iter().map(|it| it.correlation_id));
        bounded("a recycled worker", sconce.wait_for_log_times("a new worker takes over", round + 1)).await;
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 2_000);
    client.becomes(&settings.tasks, (0, 2)).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn top_shows_every_slot_and_its_keys_obey_only_after_a_yes() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    let control = [("admin.control_exchange", settings.control())];
    let mut top = OnTerminal::start("top --every 100ms", &rabbit.url(), &control);
    top.wait_for(&settings.tasks).await;
    top.wait_for("ready").await;
    top.press("p");
    top.wait_for("pause").await;
    top.press("n");
    top.press("d");
    top.wait_for("drain").await;
    top.press("y");
    top.wait_for("stopped").await;
    state_becomes(&settings, 0, "stopped").await;
    top.press("q");
    let (code, shown) = top.end().await;
    assert_eq!(code, 0, "{shown:?}");
    assert!(
        shown.contains("\u{1b}[?1049l") && shown.contains("\u{1b}[?25h"),
        "the terminal is given back: {shown:?}"
    );
    let mut piped = Sconce::run(&settings, &["top"]);
    assert_eq!(piped.exit_code().await, 64);
    assert!(piped.log().contains("needs a terminal"), "{}", piped.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn launchers_of_one_host_have_their_own_names_by_which_one_is_told() {
    let settings = Settings::echo(Rabbit::shared().url()).controlled();
    let services = [Sconce::launched(&settings).await, Sconce::launched(&settings).await];
    for sconce in &services {
        sconce.wait_for_log("listening").await;
    }
    let (_, answers, log) = ctl(&settings, &["ping", "--expect", "2", "--timeout", "20s"]).await;
    let name = |answer: &Value| answer["launcher"].as_str().map(str::to_owned).expect("a name");
    let [one, two] = &answers[..] else { panic!("{log}") };
    assert!(one["host"] == two["host"] && name(one) != name(two), "{log}");
    assert_eq!(two["slots"][0]["worker"], format!("{}/{}/0", name(two), settings.name));
    let pause = ["pause", "--launcher", &name(two), "--expect", "1", "--timeout", "20s", "--wait", "20s"];
    let (code, paused, log) = ctl(&settings, &pause).await;
    assert!(code == 0 && paused.len() == 1 && name(&paused[0]) == name(two), "{code} {log}");
    let (_, answers, _) = ctl(&settings, &["ping", "--expect", "2", "--timeout", "20s"]).await;
    let states: Vec<_> = answers.iter().map(|it| it["slots"][0]["state"].clone()).collect();
    assert_eq!(states, ["ready", "paused"]);
    // A name that is taken is refused.
    let mut third = Sconce::launch(&settings.clone().set("launcher.name", name(one)));
    assert_eq!(third.exit_code().await, 78, "{}", third.log());
    assert!(third.log().contains(&format!("launcher.name = {:?}", name(one))), "{}", third.log());
    for sconce in services {
        assert_eq!(sconce.stop().await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_goes_from_slot_to_slot_and_can_be_waited_for() {
    let devices = r#"["cpu", "cpu", "cpu"]"#;
    let settings = Settings::echo(Rabbit::shared().url()).controlled().set("pool[0].devices", devices);
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    let made = format!("queue made queue={:?}", settings.tasks);
    assert_eq!(sconce.logged(&made), 1, "three workers have made it together: {}", sconce.log());
    let before = sconce.workers();
    let restart = ["restart", "--all", "--expect", "1", "--timeout", "20s", "--wait", "60s"];
    let (code, answers, log) = ctl(&settings, &restart).await;
    assert_eq!(code, 0, "{log}");
    assert_eq!(answers[0]["slots"][2]["state"], "ready", "the state after the wait: {answers:?}");
    assert!(sconce.workers().iter().all(|pid| !before.contains(pid)), "{}", sconce.log());
    // Each is spawned only when the one before is ready.
    let lines = sconce.lines_from(0);
    let of = |what: &str| {
        let lines = lines.iter().enumerate();
        lines.filter(|(_, line)| line.contains(what)).map(|(at, _)| at).collect::<Vec<_>>()
    };
    let (spawned, ready) = (of("worker spawned"), of("worker ready"));
    assert_eq!((spawned.len(), ready.len()), (6, 6), "{}", sconce.log());
    assert!(ready[3] < spawned[4] && ready[4] < spawned[5], "{spawned:?} {ready:?}\n{}", sconce.log());
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_admin_port_is_tried_until_free_and_healthcheck_asks_its_own() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let settings = Settings::echo(Rabbit::shared().url()).set("admin.listen", &address);
    let name = format!("{}-launcher", settings.name);
    let settings = settings.set("launcher.name", &name);
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("another process listens there").await;
    drop(taken);
    sconce.wait_for_log("serving /metrics").await;
    let check = |settings: &Settings| Sconce::run(settings, &["healthcheck"]);
    let mut own = check(&settings);
    assert_eq!(own.exit_code().await, 0, "{}", own.log());
    let mut other = check(&settings.clone().set("launcher.name", "another"));
    assert_eq!(other.exit_code().await, 1, "{}", other.log());
    assert!(other.log().contains(&name) && other.log().contains("\"another\""), "{}", other.log());
    let unnamed = Settings::echo(Rabbit::shared().url()).set("admin.listen", &address);
    let mut own = check(&unnamed);
    assert_eq!(own.exit_code().await, 0, "{}", own.log());
    // Another launcher that has not got the port is not healthy because this one is.
    let second = Sconce::launched(&unnamed.clone().set("launcher.name", format!("{name}-2"))).await;
    second.wait_for_log("another process listens there").await;
    let mut either = check(&unnamed);
    assert_eq!(either.exit_code().await, 1, "{}", either.log());
    assert!(either.log().contains(&format!("{name}-2")), "{}", either.log());
    assert_eq!(second.stop().await, 0);
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address_of_nobody = nobody.local_addr().expect("an address").to_string();
    let mut none = check(&unnamed.set("admin.listen", &address_of_nobody));
    assert_eq!(none.exit_code().await, 1, "{}", none.log());
    assert!(none.log().contains("no launcher of this host"), "{}", none.log());
    let (_, plain) = get(format!("http://{address}/metrics")).await;
    assert!(plain.contains("# TYPE sconce_tasks_total counter") && !plain.contains("# EOF"), "{plain}");
    assert!(plain.contains(&format!("launcher={name:?}")), "{plain}");
    let waits = format!("sconce_queue_messages{{queue={:?},kind=\"dead_letter\"}}", settings.dead);
    until("the queues are counted", || async {
        get(format!("http://{address}/metrics")).await.1.contains(&waits).then_some(())
    })
    .await;
    assert_eq!(sconce.stop().await, 0);
}
