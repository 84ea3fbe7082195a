//! A storm of hostile requesters: two phases over the same plan, one with ordinary requesters and one with hostile
//! ones in their place, each over a launcher of its own with a pool of texts, one of images and one of embeddings.
//! Nothing may be lost, nothing wrong, no worker may die. Where the others publish to queues of their own and a phase is
//! long enough, innocent requesters may wait at most three times as long (99th percentile, median of three runs) beside
//! hostile ones as beside ordinary ones. Every latency counts from the moment at which the task was due by the plan.

mod books;
mod plan;
mod requesters;
mod requests;
mod workers;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinSet, block_in_place};
use tokio::time::timeout;

use books::{Answer, Answers, Books};
use plan::{Manners, Pool, REQUESTS, Scale, Trouble, Way};
use requesters::{Desk, Queues};
use requests::Requests;
use workers::Watch;

use crate::support::client::Client;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

/// How many times as long an innocent requester may wait, at the 99th percentile.
const MOST: f64 = 3.0;
/// After the last task is published: the longest time without a reply or a dead letter.
const PATIENCE: Duration = Duration::from_secs(120);
/// Findings that are printed; the evidence has all.
const SHOWN: usize = 40;
const POOLS: [Pool; 3] = [Pool::Texts, Pool::Images, Pool::Embeddings];

/// Runs of a storm whose latencies are judged.
const RUNS: usize = 3;

/// Where those who are not innocent publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// To a further queue of each pool.
    QueuesOfTheirOwn,
    /// To the queue of the innocent ones, who then share its order.
    OneQueue,
}

/// What the two phases have in common.
struct Storm {
    seed: u64,
    scale: Scale,
    only: Vec<Trouble>,
    layout: Layout,
    rabbit: Rabbit,
    requests: Arc<Requests>,
}

/// What came of one phase.
struct Phase {
    manners: Manners,
    /// The answers that innocent requests got before the phase.
    answers: Answers,
    desk: Arc<Desk>,
    watch: Watch,
    log: String,
    /// What is wrong with the launcher, and not in the books.
    findings: Vec<String>,
}

/// Both phases, several times if latencies are judged; panics with all that is wrong.
pub async fn storm(seed: u64, seconds: u64, only: Vec<Trouble>, layout: Layout) {
    let scale = Scale::of(seconds);
    let judges_latency = scale.judged && layout == Layout::QueuesOfTheirOwn;
    let requests = Arc::new(block_in_place(|| Requests::new(scale.prompt)));
    let storm = Storm { seed, scale, only, layout, rabbit: block_in_place(Rabbit::private), requests };
    let (mut findings, mut ratios) = (Vec::new(), BTreeMap::<Pool, Vec<f64>>::new());
    for _ in 0..if judges_latency { RUNS } else { 1 } {
        let ordinary = storm.phase(Manners::Ordinary, None).await;
        let hostile = storm.phase(Manners::Hostile, Some(ordinary.answers.clone())).await;
        findings.extend(storm.judge(&ordinary, &hostile, &mut ratios));
    }
    if judges_latency {
        findings.extend(ratios.into_iter().filter_map(|(pool, ratios)| too_slow(pool, ratios)));
    }
    // Before the panic, at which it would print its log.
    drop(storm);
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

/// The troubles that `SOAK_TROUBLES` names (`Grammar,Stops`), or all.
pub fn chosen(names: Option<&str>) -> Vec<Trouble> {
    let Some(names) = names else { return Trouble::ALL.into() };
    let of = |name: &str| {
        let found = Trouble::ALL.into_iter().find(|trouble| format!("{trouble:?}") == name);
        found.unwrap_or_else(|| panic!("no trouble is called {name:?}, but these: {:?}", Trouble::ALL))
    };
    names.split(',').filter(|name| !name.is_empty()).map(of).collect()
}

impl Storm {
    async fn phase(&self, manners: Manners, answers: Option<Answers>) -> Phase {
        let url = self.rabbit.url();
        let (settings, queues) = service(&url, self.layout);
        let mut sconce = Sconce::launch(&settings);
        let client = Client::connect(&url).await;
        for queue in queues.tasks.values().chain(queues.others.values()) {
            client.wait_for_queue(queue).await;
            client.consumers_become(queue, 1).await;
        }
        // Asked in both phases, so that both begin warm.
        let asked = ask(&client, &queues, &self.requests).await;
        let answers = answers.unwrap_or(asked);
        let books = Books::new(manners, answers.clone());
        let desk = Desk::open(&url, manners, queues, self.requests.clone(), books).await;
        let desk = Arc::new(desk);
        let mut watch = Watch::new(&sconce);
        let mut findings = Vec::new();
        tokio::select! {
            problem = self.run(&desk) => findings.extend(problem),
            never = watch.sample(&sconce) => match never {},
        }
        watch.ends(&sconce);
        sconce.signal(nix::sys::signal::Signal::SIGTERM);
        let code = sconce.exit_code().await;
        if code != 0 {
            findings.push(format!("{manners:?}: the launcher ended with {code}"));
        }
        Phase { manners, answers, desk, watch, log: sconce.log(), findings }
    }

    /// Publishes everything, and waits until every task has its verdict or no more come.
    async fn run(&self, desk: &Arc<Desk>) -> Option<String> {
        let (mut readers, mut under_way) = (JoinSet::new(), JoinSet::new());
        desk.read(&mut readers).await;
        desk.publish(plan::phase(self.seed, &self.scale, &self.only), &mut under_way).await;
        eprintln!("soak: {:?}: all is published, {} tasks are open", desk.manners, desk.books().open());
        desk.read_full(&mut readers).await;
        while desk.books().open() > 0 && timeout(PATIENCE, desk.entered()).await.is_ok() {}
        let ended = async {
            while let Some(ended) = under_way.join_next().await {
                if let Err(error) = ended {
                    return Some(format!("{:?}: a requester: {error}", desk.manners));
                }
            }
            None
        };
        // A requester that waits for its reply waits for ever where that is lost, which the books say.
        timeout(Duration::from_secs(10), ended).await.ok().flatten()
    }

    /// Prints the report, and gives what is wrong, below a line that says where the logs are.
    fn judge(&self, ordinary: &Phase, hostile: &Phase, ratios: &mut BTreeMap<Pool, Vec<f64>>) -> Vec<String> {
        let report = report(self, ordinary, hostile, ratios);
        eprintln!("\n{report}");
        let mut findings = Vec::new();
        for phase in [ordinary, hostile] {
            let deaths = phase.watch.deaths;
            findings.extend(phase.findings.iter().cloned());
            if deaths > 0 {
                findings.push(format!("{:?}: {deaths} workers died", phase.manners));
            }
            findings.extend(phase.desk.books().findings(deaths));
        }
        let folder = evidence((self.seed, self.layout), [ordinary, hostile], &report, &findings);
        if !findings.is_empty() {
            let (count, seed) = (findings.len(), self.seed);
            findings.truncate(SHOWN);
            findings.insert(0, format!("seed {seed}: {count} findings; logs in {}", folder.display()));
        }
        findings
    }
}

/// Tokens in a step of the pool of texts in a debug build, which are about 0.3 s of its time. A release build, in which
/// latencies are judged, has the default.
const DEBUG_STEP: usize = 32;

/// The end of the names of the queues of those who are not innocent.
const OTHERS: &str = "others";

/// The settings of three pools with a worker each, and their queues.
fn service(url: &str, layout: Layout) -> (Settings, Queues) {
    let mut settings = Settings::echo(url)
        .controlled()
        .set("pool[0].model", requests::model(Pool::Texts).display())
        .set("pool[0].options.context", plan::CONTEXT)
        .set("pool[2].reply_timeout", "5s");
    if cfg!(debug_assertions) {
        settings = settings.set("pool[0].batch.max_tokens", DEBUG_STEP);
    }
    if layout == Layout::QueuesOfTheirOwn {
        settings = settings.with_queue(OTHERS, "");
    }
    let texts = settings.tasks.clone();
    let images = settings.beside("images", requests::model(Pool::Images).display());
    let embeddings = settings.beside("embeddings", requests::model(Pool::Embeddings).display());
    let tasks =
        BTreeMap::from([(Pool::Texts, texts), (Pool::Images, images), (Pool::Embeddings, embeddings)]);
    let of_others = |(pool, queue): (&Pool, &String)| match layout {
        Layout::QueuesOfTheirOwn => (*pool, format!("{queue}.{OTHERS}")),
        Layout::OneQueue => (*pool, queue.clone()),
    };
    let queues = Queues {
        name: settings.name.clone(),
        others: tasks.iter().map(of_others).collect(),
        tasks,
        replies: settings.replies.clone(),
        dead: settings.dead.clone(),
        control: settings.control().to_owned(),
    };
    (settings, queues)
}

/// Asks each innocent request alone: its answer is the right one.
async fn ask(client: &Client, queues: &Queues, requests: &Requests) -> Answers {
    let mut inbox = client.private_inbox().await;
    let mut answers = BTreeMap::new();
    for pool in POOLS {
        for request in 0..REQUESTS {
            let task = requests.innocent(pool, request, Way::OwnQueue).reply_to(&inbox.queue);
            client.publish(&queues.tasks[&pool], task).await;
            let reply = inbox.next().await;
            let answer = Answer::of(pool, &reply.body);
            answers.insert((pool, request), answer.unwrap_or_else(|| panic!("no answer: {reply:?}")));
        }
    }
    answers
}

/// What is wrong if the median of the ratios is too large.
fn too_slow(pool: Pool, mut ratios: Vec<f64>) -> Option<String> {
    ratios.sort_by(f64::total_cmp);
    let median = *ratios.get(ratios.len() / 2)?;
    (median > MOST)
        .then(|| format!("{pool:?}: p99 beside hostile requesters is {median:.2} times the usual one"))
}

/// The report as Markdown. Adds the ratios of latencies to `ratios`.
fn report(storm: &Storm, ordinary: &Phase, hostile: &Phase, ratios: &mut BTreeMap<Pool, Vec<f64>>) -> String {
    let mut text = String::new();
    let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
    let _ = writeln!(
        text,
        "hostile requesters, {:?}: seed {}, two phases of {} s\n\n\
         | innocent tasks | count | p50 beside ordinary | beside hostile | p99 beside ordinary | beside hostile \
         | ratio |\n|---|---:|---:|---:|---:|---:|---:|",
        storm.layout,
        storm.seed,
        storm.scale.phase.as_secs()
    );
    for pool in POOLS {
        let latency = |phase: &Phase| phase.desk.books().latency(pool, phase.watch.took);
        let (Some(usual), Some(beside)) = (latency(ordinary), latency(hostile)) else { continue };
        let ratio = beside.p99.as_secs_f64() / usual.p99.as_secs_f64();
        let medians = format!("{} | {}", seconds(usual.median), seconds(beside.median));
        let p99s = format!("{} | {}", seconds(usual.p99), seconds(beside.p99));
        let count = usual.count.min(beside.count);
        let _ = writeln!(text, "| {pool:?} | {count} | {medians} | {p99s} | {ratio:.2} |");
        ratios.entry(pool).or_default().push(ratio);
    }
    text.push_str("\n| others | ordinary: verdicts | hostile: verdicts |\n|---|---|---|\n");
    let verdicts = |books: &Books, trouble: Trouble| {
        let counts = books.verdicts(trouble).into_iter();
        counts.map(|(verdict, count)| format!("{verdict}: {count}")).collect::<Vec<_>>().join(", ")
    };
    for trouble in &storm.only {
        let [usual, beside] = [ordinary, hostile].map(|phase| verdicts(&phase.desk.books(), *trouble));
        let _ = writeln!(text, "| {trouble:?} | {usual} | {beside} |");
    }
    text.push('\n');
    for phase in [ordinary, hostile] {
        let _ = writeln!(text, "{:?}: {}", phase.manners, phase.watch.summary());
    }
    text
}

/// Leaves the logs, the report and the findings in a folder.
fn evidence(
    (seed, layout): (u64, Layout),
    phases: [&Phase; 2],
    report: &str,
    findings: &[String],
) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("soak-hostile-{layout:?}-{seed}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("a file");
    for phase in phases {
        write(&format!("{:?}.log", phase.manners), &phase.log);
    }
    write("report.md", report);
    write("findings.txt", &findings.join("\n"));
    folder
}
