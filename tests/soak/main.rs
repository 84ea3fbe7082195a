//! A storm of faults over the real binary and a real RabbitMQ: every task in and every reply out is
//! counted, and nothing may be lost. As a test it strikes once with each kind of fault, as fast as the service recovers;
//! `make soak` goes on for an hour.
//!
//! `SOAK_SECONDS`, `SOAK_SEED` and `SOAK_RATE` (tasks a second) change it. What it found is printed
//! as Markdown; the logs of all launchers, of the broker, the faults and every odd entry of the ledger
//! are left in `target/tmp/soak-<seed>`.
//!
//! Beside it are storms of faults over generated texts and over one large job, and a storm of hostile requesters
//! without faults, of which `SOAK_TROUBLES` (`Grammar,Stops`) chooses some kinds of trouble.

#![allow(clippy::print_stderr, reason = "progress and the report")]

#[path = "../support/mod.rs"]
mod support;

mod faults;
mod fleet;
mod hostile;
mod job;
mod ledger;
mod plan;
mod producers;
mod readers;
mod report;
mod texts;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use faults::Storm;
use faults::{PASSWORD, USER};
use fleet::Fleet;
use lapin::types::AMQPValue;
use producers::{Desk, FULL, REQUESTER, STUCK};
use readers::List;
use report::Frame;
use support::client::{Client, Task};
use support::proxy::Proxy;
use support::rabbit::{Conf, Rabbit};
use support::sconce::Settings;
use tokio::task::{JoinHandle, block_in_place};

const PRODUCERS: u64 = 4;
/// From one fault to the next, where the recovery takes no longer. In a storm that is too short to come to each kind of
/// fault at this pace, they come faster.
const FAULT_EVERY: Duration = Duration::from_secs(6);
/// The storms over texts and over a job last a part of the whole, and at least so long.
const SHORTEST: Duration = Duration::from_secs(12);
const PROGRESS_EVERY: Duration = Duration::from_secs(15);
/// Largest worker that is no leak: echo holds its prefetch and little else.
const LARGEST_KIB: u64 = 512 * 1024;

/// What was asked for.
struct Order {
    seconds: u64,
    seed: u64,
    rate: f64,
}

fn order() -> Order {
    fn ask<T: std::str::FromStr>(name: &str, otherwise: T) -> T {
        match std::env::var(name) {
            Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text:?}")),
            Err(_) => otherwise,
        }
    }
    Order {
        seconds: ask("SOAK_SECONDS", 20),
        seed: ask("SOAK_SEED", 20_261_121),
        rate: ask("SOAK_RATE", 40.0),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_faults_loses_no_task_and_repeats_only_those_in_flight() {
    let order = order();
    eprintln!("soak: seed {}, {} s, {} tasks a second", order.seed, order.seconds, order.rate);
    let limits = Conf::default().line("max_message_size", plan::MOST_BYTES);
    let rabbit = block_in_place(|| Rabbit::private_with(limits));
    let proxy = Proxy::before(rabbit.address()).await;
    block_in_place(|| {
        rabbit.add_user(USER, PASSWORD, [".*", ".*", ".*"]);
    });
    let client = Client::connect(&rabbit.url()).await;
    unhappy_queues(&client).await;
    block_in_place(|| faults::suspend(&rabbit));
    let settings = settings(&proxy);
    let fleet = Fleet::start(&settings);
    let desk = Arc::new(Desk::new(rabbit.url(), settings.tasks.clone(), order.seed, order.rate));
    client.wait_for_queue(&settings.tasks).await;
    client.consumers_become(&settings.tasks, faults::FLEET as u32).await;
    drop(client);
    // RabbitMQ 3.10 writes the names of its quorum queues to disk within three minutes, and forgets a
    // queue with all it holds when it is killed before. These queues are to be older ones.
    block_in_place(|| rabbit.eval("[dets:sync(Table) || Table <- dets:all()]."));
    let requester = REQUESTER.to_owned();
    let readers =
        [(&settings.replies, List::Replies), (&requester, List::Replies), (&settings.dead, List::Letters)]
            .map(|(queue, list)| tokio::spawn(readers::read(desk.clone(), queue.clone(), list)));
    let producers: Vec<_> =
        (0..PRODUCERS).map(|number| tokio::spawn(producers::produce(desk.clone(), number))).collect();
    let mut storm = Storm::new(desk.clone(), fleet, (proxy, rabbit), settings.dead.clone());
    let mut outcome = blow(&mut storm, &order).await;
    // What these queues have taken after all counts too.
    block_in_place(|| faults::revive(&storm.rabbit));
    let late =
        [STUCK, FULL].map(|queue| tokio::spawn(readers::read(desk.clone(), queue.to_owned(), List::Replies)));
    if outcome.is_ok() {
        outcome = settle(&mut storm, producers, &settings).await;
    }
    for reader in readers.into_iter().chain(late) {
        reader.abort();
    }
    judge(&storm, outcome, &order);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_faults_over_a_pool_that_generates_changes_no_word() {
    let Order { seconds, seed, .. } = order();
    let time = Duration::from_secs(seconds / 4).max(SHORTEST);
    let texts = texts::storm(seed, time, texts::Work::generation()).await;
    eprintln!("soak of texts: seed {seed}, {} s: {texts:?}", time.as_secs());
    assert!(texts.answered > texts.faults && texts.faults >= texts::KINDS_OF_FAULTS, "{texts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_faults_over_a_pool_that_transcribes_changes_no_word() {
    let Order { seconds, seed, .. } = order();
    let time = Duration::from_secs(seconds / 4).max(SHORTEST);
    let texts = texts::storm(seed, time, texts::Work::transcription()).await;
    eprintln!("soak of recordings: seed {seed}, {} s: {texts:?}", time.as_secs());
    assert!(texts.answered > texts.faults && texts.faults >= texts::KINDS_OF_FAULTS, "{texts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_faults_over_a_large_job_leaves_every_row_answered_in_place() {
    let Order { seconds, seed, .. } = order();
    let time = Duration::from_secs(seconds / 3).max(SHORTEST);
    let done = job::storm(seed, time).await;
    eprintln!("soak of a job: seed {seed}, {} s: {done:?}", time.as_secs());
    assert!(done.faults >= job::KINDS_OF_FAULTS && done.runs > 1, "{done:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_requesters_in_queues_of_their_own_lose_no_task_and_at_most_triple_the_wait_of_others() {
    let Order { seconds, seed, .. } = order();
    let only = std::env::var("SOAK_TROUBLES").ok();
    let layout = hostile::Layout::QueuesOfTheirOwn;
    hostile::storm(seed, seconds, hostile::chosen(only.as_deref()), layout).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_requesters_in_the_queue_of_others_lose_no_task_and_spoil_no_answer() {
    let Order { seconds, seed, .. } = order();
    let only = std::env::var("SOAK_TROUBLES").ok();
    hostile::storm(seed, seconds, hostile::chosen(only.as_deref()), hostile::Layout::OneQueue).await;
}

/// A reply queue that confirms nothing, once it is suspended, and one that is full.
async fn unhappy_queues(client: &Client) {
    let text = |text: &str| AMQPValue::LongString(text.into());
    client.declare(STUCK, &[("x-queue-type", text("quorum"))]).await;
    let full = [("x-max-length", AMQPValue::LongInt(1)), ("x-overflow", text("reject-publish"))];
    client.declare(FULL, &full).await;
    client.declare(REQUESTER, &[]).await;
    client.publish(FULL, Task::raw("full").id(producers::FILLER)).await;
}

fn settings(proxy: &Proxy) -> Settings {
    Settings::echo(proxy.url().replace("guest:guest", &format!("{USER}:{PASSWORD}")))
        .set("pool[0].reply_timeout", "5s")
        .set("pool[0].devices", format!("[{}]", ["\"cpu\""; fleet::WORKERS].join(", ")))
        .set("pool[0].prefetch", fleet::PREFETCH)
        .set("broker.heartbeat", "2s")
        .set("broker.confirm_timeout", "4s")
        .set("broker.connect_timeout", "4s")
        .set("launcher.restart_delay", "100ms")
        .set("launcher.restart_delay_max", "2s")
        .set("launcher.max_quick_failures", 1000)
}

/// Strikes until the time is over, and at least once with each fault.
async fn blow(storm: &mut Storm, order: &Order) -> Result<(), String> {
    let begun = Instant::now();
    let all = Duration::from_secs(order.seconds);
    let pace = FAULT_EVERY.min(all / u32::try_from(plan::kinds_of_faults()).expect("a few kinds"));
    let (mut next, mut told) = (begun + pace, begun);
    for (number, strike) in plan::faults(order.seed).enumerate() {
        let over = begun.elapsed().as_secs() >= order.seconds;
        if over && number >= plan::kinds_of_faults() {
            break;
        }
        storm.watch(next.saturating_duration_since(Instant::now())).await?;
        next += pace;
        if told.elapsed() > PROGRESS_EVERY {
            told = Instant::now();
            let (drawn, open) = (storm.desk.drawn(), storm.desk.ledger().open());
            let seconds = begun.elapsed().as_secs();
            eprintln!("soak: {seconds} s, {number} faults, {drawn} tasks, {open} open");
        }
        storm.strike(strike).await?;
    }
    Ok(())
}

/// No more tasks, no more faults: all must be answered, and nothing left behind.
async fn settle(
    storm: &mut Storm,
    producers: Vec<JoinHandle<()>>,
    settings: &Settings,
) -> Result<(), String> {
    storm.desk.close();
    for producer in producers {
        producer.await.map_err(|error| format!("a producer: {error}"))?;
    }
    let (mut open, mut given_up) = (usize::MAX, false);
    while storm.desk.ledger().open() > 0 {
        let before = std::mem::replace(&mut open, storm.desk.ledger().open());
        if before <= open {
            return Err(format!("{open} tasks stay unanswered"));
        }
        let fewer = storm.until("fewer open tasks", |it| it.desk.ledger().open() < open).await;
        if fewer.is_err() && !given_up {
            given_up = true;
            open = usize::MAX;
            storm.desk.ledger().give_up_deleted();
        } else {
            fewer?;
        }
    }
    storm.until("the poison is buried", |it| it.poison.is_empty()).await?;
    let client = Client::connect(&storm.rabbit.url()).await;
    let none_unacked = || storm.rabbit.stats(&settings.tasks).is_some_and(|it| it.ready + it.unacked == 0);
    let limit = Instant::now() + Duration::from_secs(60);
    while !block_in_place(none_unacked) {
        if Instant::now() > limit {
            return Err(format!("{:?} in the task queue", storm.rabbit.stats(&settings.tasks)));
        }
    }
    let codes = storm.fleet.stop().await;
    if codes.iter().any(|code| *code != 0) {
        return Err(format!("the launchers ended with {codes:?}"));
    }
    for queue in [&settings.tasks, &settings.replies, &settings.dead] {
        client.ready_becomes(queue, 0).await;
    }
    let left_over = storm.fleet.left_over();
    if !left_over.is_empty() {
        return Err(format!("workers outlive their launchers: {left_over:?}"));
    }
    Ok(())
}

/// The report; and where something is wrong, all that is known of it.
fn judge(storm: &Storm, outcome: Result<(), String>, order: &Order) {
    let mut ledger = storm.desk.ledger();
    let unexplained = ledger.explain();
    let frame = Frame {
        seed: order.seed,
        seconds: order.seconds,
        sentinels: storm.sentinels,
        largest_worker_kib: storm.largest,
    };
    eprintln!("\n{}", report::report(&ledger, &frame));
    let mut faults: Vec<String> = outcome.err().into_iter().collect();
    for id in ledger.lost() {
        faults.push(format!("lost: {id}"));
    }
    faults.extend(ledger.wrong().into_iter().map(|wrong| format!("wrong: {wrong}")));
    for it in &unexplained {
        let (first, second) = (it.first, it.second);
        faults.push(format!("twice, and no fault explains it: {} at {first} and {second}", it.id));
    }
    faults.extend(ledger.strange.iter().map(|strange| format!("strange: {strange}")));
    if storm.fleet.stopped_on_request != storm.sentinels {
        let stopped = storm.fleet.stopped_on_request;
        faults.push(format!("{} sentinels stopped {stopped} workers", storm.sentinels));
    }
    if storm.largest > LARGEST_KIB {
        faults.push(format!("a worker of {} KiB", storm.largest));
    }
    let folder = evidence(storm, &ledger, order.seed);
    if faults.is_empty() {
        return;
    }
    let shown: Vec<_> = faults.iter().take(40).cloned().collect();
    let (count, shown) = (faults.len(), shown.join("\n"));
    panic!("seed {}: {count} findings; logs and books in {}\n{shown}", order.seed, folder.display());
}

/// Leaves the launchers' logs, the broker's, the incidents and what is odd of the ledger in a folder.
fn evidence(storm: &Storm, ledger: &ledger::Ledger, seed: u64) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("soak-{seed}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    storm.fleet.write_logs(&folder);
    let write = |name: &str, text: String| std::fs::write(folder.join(name), text).expect("a file");
    write("broker.log", storm.rabbit.log());
    let incidents: Vec<_> = ledger.incidents.iter().map(|it| format!("{it:?}")).collect();
    write("incidents.txt", incidents.join("\n"));
    let odd = |(id, entry): (&String, &ledger::Entry)| {
        let once = entry.replies.len() <= 1 && entry.letters.len() <= 1;
        let plain = once && entry.confirmed && !ledger.is_open(id);
        (!plain).then(|| format!("{id}: {entry:?}"))
    };
    write("entries.txt", ledger.entries().filter_map(odd).collect::<Vec<_>>().join("\n"));
    folder
}
