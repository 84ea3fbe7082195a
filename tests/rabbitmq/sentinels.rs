//! Sentinels: each stops one worker, behind the work before it, and nothing else ever happens to it.

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::serve;
use super::plumbing::answers;
use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings, signal};

fn settings(workers: usize) -> Settings {
    let devices = vec!["\"cpu\""; workers].join(", ");
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].devices", format!("[{devices}]"));
    settings.set("pool[0].prefetch", 10).set("pool[0].batch.max_requests", 10)
}

fn slow(id: usize, sleep_ms: u64) -> Task {
    Task::new(json!({"input": id, "sleep_ms": sleep_ms})).id(id.to_string())
}

/// Makes the task queue as sconce does, before any worker runs.
async fn make_queue(client: &Client, settings: &Settings) {
    use lapin::types::AMQPValue;
    let quorum = ("x-queue-type", AMQPValue::LongString("quorum".into()));
    client.declare(&settings.tasks, &[quorum, ("x-delivery-limit", AMQPValue::LongLongInt(20))]).await;
}

async fn consumers(client: &Client, settings: &Settings, count: u32) {
    client.consumers_become(&settings.tasks, count).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_sentinel_stops_a_busy_worker_the_launcher_exits_0_with_the_last() {
    let settings = settings(3);
    let (mut sconce, client, mut inbox) = serve(&settings).await;
    consumers(&client, &settings, 3).await;
    client.publish_all(&settings.tasks, (0..3).map(|n| slow(n, 1500))).await;
    client.ready_becomes(&settings.tasks, 0).await;
    client.publish_all(&settings.tasks, [Task::sentinel(), Task::sentinel()]).await;
    sconce.wait_for_workers(1).await;
    consumers(&client, &settings, 1).await;
    let mut answered: Vec<_> = inbox.take(3).await.into_iter().map(|reply| reply.correlation_id).collect();
    answered.sort();
    assert_eq!(answered, ["0", "1", "2"], "the tasks before the sentinels");
    client.publish(&settings.tasks, slow(9, 0)).await;
    assert_eq!(inbox.next().await.correlation_id, "9", "the third goes on");
    assert_eq!(sconce.workers().len(), 1, "and no stopped worker was started again");
    client.publish(&settings.tasks, Task::sentinel()).await;
    assert_eq!(sconce.exit_code().await, 0);
    client.becomes(&settings.tasks, (0, 0)).await;
    assert_eq!(client.look(&settings.dead).await, Some((0, 0)));
    assert_eq!(client.look(&settings.replies).await, Some((0, 1)), "a sentinel is not answered");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sentinel_of_a_killed_worker_stops_one_worker_all_the_same() {
    let settings = settings(2);
    let (sconce, client, mut inbox) = serve(&settings).await;
    consumers(&client, &settings, 2).await;
    client.publish_all(&settings.tasks, (0..2).map(|n| slow(n, 6000))).await;
    client.ready_becomes(&settings.tasks, 0).await;
    client.publish(&settings.tasks, Task::sentinel()).await;
    sconce.wait_for_log("sentinel received").await;
    signal(pid_of_slot(&sconce, &slot_that_logged(&sconce, "sentinel received")), Signal::SIGKILL);
    // One of the two, or the killed one's successor, takes the sentinel again.
    sconce.wait_for_log_times("sentinel received", 2).await;
    sconce.wait_for_log(" stopped on request").await;
    sconce.wait_for_workers(1).await;
    consumers(&client, &settings, 1).await;
    let mut answered: Vec<_> = inbox.take(2).await.into_iter().map(|reply| reply.correlation_id).collect();
    answered.sort();
    assert_eq!(answered, ["0", "1"]);
    client.publish(&settings.tasks, slow(7, 0)).await;
    assert_eq!(inbox.next().await.correlation_id, "7");
    sconce.wait_for_workers(1).await;
}

/// The slot in the first line that contains `words`.
fn slot_that_logged(sconce: &Sconce, words: &str) -> String {
    let log = sconce.log();
    let line = log.lines().find(|line| line.contains(words)).expect("logged");
    line.split("slot=\"").nth(1).and_then(|rest| rest.split('"').next()).expect("a slot").to_owned()
}

fn pid_of_slot(sconce: &Sconce, slot: &str) -> u32 {
    let log = sconce.log();
    let is_spawn =
        |line: &&str| line.contains("worker spawned") && line.contains(&format!("slot=\"{slot}\""));
    let line = log.lines().rfind(is_spawn).expect("a spawn");
    let pid = line.split("pid=").nth(1).and_then(|rest| rest.split_whitespace().next());
    pid.and_then(|pid| pid.parse().ok()).expect("a process id")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stop_command_stops_so_many_or_all() {
    let settings = settings(4);
    let (mut sconce, client, _inbox) = serve(&settings).await;
    consumers(&client, &settings, 4).await;
    let stop = |arguments: &[&str]| Sconce::run(&settings, &[&["stop"], arguments].concat());
    let mut two = stop(&["--workers", "2", "--pool", &settings.name]);
    assert_eq!(two.exit_code().await, 0, "{}", two.log());
    sconce.wait_for_workers(2).await;
    consumers(&client, &settings, 2).await;
    let mut unknown = stop(&["--pool", "nobody"]);
    assert_eq!(unknown.exit_code().await, 64);
    assert!(unknown.log().contains("nobody") && unknown.log().contains(&settings.name), "{}", unknown.log());
    let mut all = stop(&["--all"]);
    assert_eq!(all.exit_code().await, 0, "{}", all.log());
    assert_eq!(sconce.exit_code().await, 0);
    // No sentinel too many.
    client.becomes(&settings.tasks, (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sentinel_of_the_stop_command_does_not_outlive_its_time() {
    let settings = settings(1);
    let client = Client::connect(&Rabbit::shared().url()).await;
    make_queue(&client, &settings).await;
    let mut stop = Sconce::run(&settings, &["stop", "--expires", "5m"]);
    assert_eq!(stop.exit_code().await, 0, "{}", stop.log());
    let sentinel = client.get(&settings.tasks).await;
    assert_eq!(sentinel.kind, "control.shutdown");
    assert_eq!(sentinel.properties.expiration().as_ref().map(|it| it.as_str()), Some("300000"));
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinels_that_wait_for_nobody_are_told_and_can_be_taken_back() {
    let settings = settings(1).controlled();
    let (sconce, client, mut inbox) = serve(&settings).await;
    sconce.wait_for_log("listening").await;
    let mut pause = Sconce::run(
        &settings,
        &["ctl", "pause", "--all", "--expect", "1", "--timeout", "20s", "--wait", "20s"],
    );
    assert_eq!(pause.exit_code().await, 0, "{}", pause.log());
    consumers(&client, &settings, 0).await;
    let mut stop = Sconce::run(&settings, &["stop", "--workers", "2"]);
    assert_eq!(stop.exit_code().await, 0, "{}", stop.log());
    assert!(stop.log().contains("consumers there: 0. Sentinels left: 2."), "{}", stop.log());
    let log = stop.log();
    let id = log.lines().find_map(|line| line.split_once(": stop ")).expect("an id").1.to_owned();
    let mut withdraw = Sconce::run(&settings, &["stop", "--withdraw", &id]);
    assert_eq!(withdraw.exit_code().await, 0, "{}", withdraw.log());
    let mut resume = Sconce::run(&settings, &["ctl", "resume", "--all", "--expect", "1", "--timeout", "20s"]);
    assert_eq!(resume.exit_code().await, 0, "{}", resume.log());
    client.publish(&settings.tasks, slow(1, 0)).await;
    assert_eq!(inbox.next().await.correlation_id, "1");
    sconce.wait_for_log_times("ignoring a sentinel", 2).await;
    client.becomes(&settings.tasks, (0, 1)).await;
    // Another one is obeyed, and told with its age.
    let mut stop = Sconce::run(&settings, &["stop"]);
    assert_eq!(stop.exit_code().await, 0, "{}", stop.log());
    let mut sconce = sconce;
    assert_eq!(sconce.exit_code().await, 0);
    let log = sconce.log();
    let told = log.lines().find(|line| line.contains("stopped on request")).expect("a line");
    assert!(told.contains("cause=\"sentinel ") && told.contains(" s ago"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_that_starts_after_a_withdrawal_obeys_no_sentinel_of_it() {
    let settings = settings(1).controlled();
    let client = Client::connect(&Rabbit::shared().url()).await;
    make_queue(&client, &settings).await;
    let stop = async |count: &str| {
        let mut stop = Sconce::run(&settings, &["stop", "--workers", count]);
        assert_eq!(stop.exit_code().await, 0, "{}", stop.log());
        let log = stop.log();
        log.lines().find_map(|line| line.split_once(": stop ")).expect("an id").1.to_owned()
    };
    let (withdrawn, in_force) = (stop("2").await, stop("1").await);
    let mut withdraw = Sconce::run(&settings, &["stop", "--withdraw", &withdrawn]);
    assert_eq!(withdraw.exit_code().await, 0, "{}", withdraw.log());
    assert!(
        withdraw.log().contains("no launcher has answered, and those that start later"),
        "{}",
        withdraw.log()
    );
    // Anybody may write to a queue through the default exchange, but not withdraw anything by that.
    let forged = Task::new(serde_json::json!({ "stop": in_force }));
    client.publish(&format!("{}.withdrawals", settings.control()), forged).await;
    let mut sconce = Sconce::launch(&settings);
    sconce.wait_for_log_times("ignoring a sentinel", 2).await;
    assert_eq!(sconce.exit_code().await, 0, "{}", sconce.log());
    assert!(sconce.log().contains(&format!("sentinel {in_force}")), "{}", sconce.log());
    client.becomes(&settings.tasks, (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_that_starts_before_its_broker_obeys_no_withdrawn_sentinel() {
    let rabbit = Rabbit::private();
    let settings = Settings::echo(rabbit.url()).controlled();
    make_queue(&Client::connect(&rabbit.url()).await, &settings).await;
    let mut stop = Sconce::run(&settings, &["stop"]);
    assert_eq!(stop.exit_code().await, 0, "{}", stop.log());
    let log = stop.log();
    let (_, id) = log.lines().find_map(|line| line.split_once(": stop ")).expect("an id");
    let mut withdraw = Sconce::run(&settings, &["stop", "--withdraw", id]);
    assert_eq!(withdraw.exit_code().await, 0, "{}", withdraw.log());
    // As in `outage`: a queue that is not yet on disk is forgotten by a kill.
    rabbit.eval("[dets:sync(Table) || Table <- dets:all()].");
    rabbit.kill();
    let sconce = Sconce::launch(&settings);
    sconce.wait_for_log("no broker; trying again").await;
    tokio::task::block_in_place(|| rabbit.start());
    sconce.wait_for_log("ignoring a sentinel").await;
    answers(sconce, &rabbit, &settings).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_starts_after_a_withdrawal_knows_it_from_its_launcher() {
    let settings = settings(1).controlled();
    let (sconce, client, mut inbox) = serve(&settings).await;
    sconce.wait_for_log("listening").await;
    let ctl = async |order: &str| {
        let arguments = ["ctl", order, "--all", "--expect", "1", "--timeout", "20s", "--wait", "20s"];
        let mut ctl = Sconce::run(&settings, &arguments);
        assert_eq!(ctl.exit_code().await, 0, "{}", ctl.log());
    };
    ctl("drain").await;
    let mut stop = Sconce::run(&settings, &["stop"]);
    assert_eq!(stop.exit_code().await, 0, "{}", stop.log());
    let log = stop.log();
    let id = log.lines().find_map(|line| line.split_once(": stop ")).expect("an id").1.to_owned();
    let mut withdraw = Sconce::run(&settings, &["stop", "--withdraw", &id]);
    assert_eq!(withdraw.exit_code().await, 0, "{}", withdraw.log());
    ctl("restart").await;
    sconce.wait_for_log("ignoring a sentinel").await;
    client.publish(&settings.tasks, slow(1, 0)).await;
    assert_eq!(inbox.next().await.correlation_id, "1");
    assert_eq!(sconce.stop().await, 0);
}
