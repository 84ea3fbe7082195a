//! What operators see of a running service and tell it: metrics, remote control. Health is in
//! `tests/offline/without_broker.rs`.

use std::collections::BTreeMap;

use lapin::BasicProperties;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::client::{Client, Task};
use crate::support::processes::lives;
use crate::support::rabbit::Rabbit;
use crate::support::raw_amqp::{LARGEST_TABLE, nested, publish_to};
use crate::support::sconce::{OnTerminal, Sconce, Settings, http_get};
use crate::support::wait::until;

/// The metrics of a service, by name and labels.
pub async fn metrics(admin: &str) -> BTreeMap<String, f64> {
    let (status, page) = http_get(format!("{admin}/metrics")).await;
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
    let workers = sconce.workers();
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
    assert_eq!((ids.len(), sconce.workers()), (60, workers), "the same worker");
    client.becomes(&settings.tasks, (0, 1)).await;
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
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("listening").await;
    rabbit.add_user("viewer", "pw", ["^$", "^amq\\.default$", ".*"]);
    let viewer = settings.clone().over(rabbit.url_for("viewer:pw", "/"));
    let (code, _, log) = ctl(&viewer, &["ping"]).await;
    assert!(code == 78 && log.contains("403"), "{code} {log}");
    rabbit.set_permissions("viewer", ["^$", ".*", ".*"]);
    let pool = format!("^pool\\.{}$", settings.name);
    rabbit.set_topic_permissions("viewer", settings.control(), [&pool, ".*"]);
    let (code, answers, log) = ctl(&viewer, &["ping", "--pool", &settings.name]).await;
    assert_eq!((code, answers.len()), (0, 1), "{log}");
    let (code, _, log) = ctl(&viewer, &["shutdown", "--all"]).await;
    assert!(code == 78 && log.contains("403"), "{code} {log}");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_outage_launchers_listen_again_and_the_metrics_have_shown_it() {
    let rabbit = Rabbit::private();
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
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let own = format!("{}(\\..*)?", settings.name);
    let configure = format!("^({own}|amq\\.gen.*)$");
    let (write, read) = (format!("^({own}|amq\\.gen.*|amq\\.default)$"), configure.clone());
    rabbit.add_user("launcher", "pw", [&configure, &write, &read]);
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
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).controlled();
    let configure = format!("^{}\\.(tasks|replies|dead|tasks\\..*)$", settings.name);
    rabbit.add_user("uncontrolled", "pw", [&configure, ".*", ".*"]);
    let settings = settings.over(rabbit.url_for("uncontrolled:pw", "/"));
    let sconce = Sconce::launched(&settings).await;
    sconce.wait_for_log("no remote control").await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 1}))).await;
    assert_eq!(replies.next().await.status_code(), 200);
    assert_eq!(sconce.stop().await, 0);
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
