//! The books of one phase: what was published, what came of it, and how long an innocent requester waited. Decides
//! what is lost, wrong or answered twice, and which verdicts are not those that are due. Pure: times are passed in,
//! from the beginning of the phase.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::plan::{Manners, Pool, Role, Trouble};

/// Two computations of a vector may differ by this in each number, since its batch may be another.
const VECTOR_TOLERANCE: f64 = 1e-4;
/// Tasks that a finding names.
const EXAMPLES: usize = 3;
/// The answers to innocent requests, by pool and number of the request.
pub type Answers = BTreeMap<(Pool, usize), Answer>;

/// What matters of an answer to an innocent request.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The same to the bit each time.
    Text(String),
    /// The best label.
    Label(String),
    Vector(Vec<f64>),
}

/// What was published and what came of it.
#[derive(Clone, Debug)]
struct Entry {
    role: Role,
    due: Duration,
    /// Final replies.
    replies: Vec<Reply>,
    /// The reasons of its dead letters.
    letters: Vec<String>,
}

#[derive(Clone, Debug)]
struct Reply {
    /// The status code.
    code: String,
    at: Duration,
    /// What is wrong with the body.
    mistake: Option<String>,
}

/// The books of one phase.
pub struct Books {
    manners: Manners,
    answers: Answers,
    entries: BTreeMap<String, Entry>,
    /// Entries without a verdict.
    open: usize,
    /// What belongs to no task.
    strange: Vec<String>,
}

/// The median and the 99th percentile of one kind of innocent tasks.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    pub count: usize,
    pub median: Duration,
    pub p99: Duration,
}

impl Answer {
    /// None: it is no answer of this kind.
    pub fn of(pool: Pool, body: &Value) -> Option<Self> {
        Some(match pool {
            Pool::Texts => Self::Text(body["choices"][0]["message"]["content"].as_str()?.to_owned()),
            Pool::Images => Self::Label(body[0]["label"].as_str()?.to_owned()),
            Pool::Embeddings => {
                let numbers = body["data"][0]["embedding"].as_array()?;
                Self::Vector(numbers.iter().filter_map(Value::as_f64).collect())
            }
        })
    }

    fn equals(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Vector(left), Self::Vector(right)) => {
                let near = |(a, b): (&f64, &f64)| (a - b).abs() < VECTOR_TOLERANCE;
                left.len() == right.len() && left.iter().zip(right).all(near)
            }
            _ => self == other,
        }
    }
}

impl Entry {
    fn has_verdict(&self) -> bool {
        !self.replies.is_empty() || !self.letters.is_empty()
    }
}

impl Books {
    pub fn new(manners: Manners, answers: Answers) -> Self {
        Self { manners, answers, entries: BTreeMap::new(), open: 0, strange: Vec::new() }
    }

    /// A task is about to be published.
    pub fn publishes(&mut self, id: &str, role: Role, due: Duration) {
        let entry = Entry { role, due, replies: Vec::new(), letters: Vec::new() };
        assert!(self.entries.insert(id.to_owned(), entry).is_none(), "{id} is published twice");
        self.open += 1;
    }

    /// A final reply came.
    pub fn reply(&mut self, id: &str, code: &str, body: &Value, at: Duration) {
        let role = self.entries.get(id).map(|entry| entry.role);
        let mistake = match role {
            Some(Role::Innocent { pool, request, .. }) if code == "200" => {
                mistake(&self.answers[&(pool, request)], pool, body)
            }
            _ => None,
        };
        self.note(id, |entry| entry.replies.push(Reply { code: code.to_owned(), at, mistake }));
    }

    /// A dead letter came.
    pub fn letter(&mut self, id: &str, reason: &str) {
        self.note(id, |entry| entry.letters.push(reason.to_owned()));
    }

    fn note(&mut self, id: &str, note: impl FnOnce(&mut Entry)) {
        let Some(entry) = self.entries.get_mut(id) else {
            self.strange.push(format!("something came for {id:?}, which nobody published"));
            return;
        };
        self.open -= usize::from(!entry.has_verdict());
        note(entry);
    }

    /// Tasks without a verdict.
    pub fn open(&self) -> usize {
        self.open
    }

    pub fn has_verdict(&self, id: &str) -> bool {
        self.entries.get(id).is_some_and(Entry::has_verdict)
    }

    /// All that must not be, one line for each thing that is wrong with tasks of a kind. `deaths`: of workers, which may
    /// repeat a reply.
    pub fn findings(&self, deaths: usize) -> Vec<String> {
        let mut found = BTreeMap::<String, Vec<&str>>::new();
        for (id, entry) in &self.entries {
            let kind = match entry.role {
                Role::Other { trouble, .. } => format!("{trouble:?}"),
                Role::Innocent { pool, .. } => format!("innocent {pool:?}"),
                Role::Cancel { .. } => "a cancellation".to_owned(),
            };
            let mut finds = |what: &str| {
                found.entry(format!("{:?}, {kind}: {what}", self.manners)).or_default().push(id);
            };
            if !entry.has_verdict() {
                finds("lost: no reply and no dead letter");
            }
            let innocent = matches!(entry.role, Role::Innocent { .. });
            let (codes, reasons) = self.due(entry.role);
            for reply in entry.replies.iter().filter(|reply| !codes.contains(&&*reply.code)) {
                finds(&format!("a reply with {}, due: {codes:?}", reply.code));
            }
            for letter in entry.letters.iter().filter(|letter| !reasons.contains(&&***letter)) {
                finds(&format!("a dead letter with the reason {letter:?}, due: {reasons:?}"));
            }
            for mistake in entry.replies.iter().filter_map(|reply| reply.mistake.as_ref()) {
                finds(mistake);
            }
            if innocent && entry.replies.len() > 1 && deaths == 0 {
                finds("answered twice, though no worker died");
            }
        }
        let line = |(what, ids): (String, Vec<&str>)| {
            let some = ids[..ids.len().min(EXAMPLES)].join(", ");
            format!("{what}: {} tasks, such as {some}", ids.len())
        };
        self.strange.iter().cloned().chain(found.into_iter().map(line)).collect()
    }

    fn due(&self, role: Role) -> (&'static [&'static str], &'static [&'static str]) {
        match (role, self.manners) {
            (Role::Other { trouble, .. }, Manners::Hostile) => trouble.verdicts(),
            _ => (&["200"], &[]),
        }
    }

    /// From the moment at which a task was to be published to its reply, so that a publisher who is held up makes no
    /// latency smaller. One without a reply has waited until `now`.
    pub fn latency(&self, pool: Pool, now: Duration) -> Option<Latency> {
        let is_of = |entry: &&Entry| matches!(entry.role, Role::Innocent { pool: it, .. } if it == pool);
        let of =
            |entry: &Entry| entry.replies.first().map_or(now, |reply| reply.at).saturating_sub(entry.due);
        let mut times: Vec<Duration> = self.entries.values().filter(is_of).map(of).collect();
        times.sort_unstable();
        let rank = |percent: usize| times.get((times.len() * percent).div_ceil(100).max(1) - 1).copied();
        Some(Latency { count: times.len(), median: rank(50)?, p99: rank(99)? })
    }

    /// How many tasks of one kind came to which verdict.
    pub fn verdicts(&self, trouble: Trouble) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        let of = |entry: &&Entry| matches!(entry.role, Role::Other { trouble: it, .. } if it == trouble);
        for entry in self.entries.values().filter(of) {
            let verdict = match (entry.replies.first(), entry.letters.first()) {
                (Some(reply), _) => reply.code.clone(),
                (None, Some(letter)) => letter.clone(),
                (None, None) => "lost".to_owned(),
            };
            *counts.entry(verdict).or_default() += 1;
        }
        counts
    }
}

fn mistake(due: &Answer, pool: Pool, body: &Value) -> Option<String> {
    match Answer::of(pool, body) {
        Some(answer) if answer.equals(due) => None,
        Some(Answer::Vector(_)) => Some("another vector".to_owned()),
        answer => Some(format!("{answer:?}, due: {due:?}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::plan::Way;
    use super::*;

    const INNOCENT: Role = Role::Innocent { pool: Pool::Images, request: 0, way: Way::OwnQueue };
    const GRAMMAR: Role = Role::Other { trouble: Trouble::Grammar, number: 0 };

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn books(roles: &[(&str, Role)]) -> Books {
        let answers = [((Pool::Images, 0), Answer::Label("cat".to_owned()))].into();
        let mut books = Books::new(Manners::Hostile, answers);
        for (id, role) in roles {
            books.publishes(id, *role, ms(100));
        }
        books
    }

    #[test]
    fn a_task_without_a_verdict_is_lost_and_one_with_another_verdict_is_found() {
        let mut books = books(&[("a", INNOCENT), ("b", INNOCENT), ("c", GRAMMAR), ("d", GRAMMAR)]);
        books.reply("b", "200", &json!([{"label": "cat"}]), ms(300));
        books.reply("c", "400", &json!({}), ms(300));
        assert_eq!(books.open(), 2);
        books.letter("d", "poison");
        assert_eq!(books.open(), 1);
        let findings = books.findings(0);
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(findings[0].contains("Grammar: a dead letter with the reason \"poison\""), "{findings:?}");
        assert!(findings[1].ends_with("1 tasks, such as a"), "{findings:?}");
        assert_eq!(
            books.verdicts(Trouble::Grammar),
            [("400".to_owned(), 1), ("poison".to_owned(), 1)].into()
        );
    }

    #[test]
    fn an_innocent_task_has_one_right_answer_and_no_dead_letter() {
        let mut books = books(&[("a", INNOCENT), ("b", INNOCENT)]);
        let (cat, dog) = (json!([{"label": "cat"}]), json!([{"label": "dog"}]));
        books.reply("a", "200", &cat, ms(300));
        books.reply("a", "200", &cat, ms(400));
        books.reply("b", "200", &dog, ms(300));
        books.letter("b", "unroutable");
        assert_eq!(books.findings(1).len(), 2, "a worker died, so a reply may come twice");
        assert_eq!(books.findings(0).len(), 3);
    }

    #[test]
    fn latency_counts_from_when_a_task_was_due_and_goes_on_without_a_reply() {
        let ids: Vec<String> = (0..200).map(|number| number.to_string()).collect();
        let roles: Vec<(&str, Role)> = ids.iter().map(|id| (id.as_str(), INNOCENT)).collect();
        let mut books = books(&roles);
        for (number, id) in (1..).zip(&ids).take(197) {
            books.reply(id, "200", &json!([{"label": "cat"}]), ms(100 + number));
        }
        let latency = books.latency(Pool::Images, ms(9_100)).expect("some");
        assert_eq!((latency.count, latency.median, latency.p99), (200, ms(100), ms(9_000)));
        assert!(books.latency(Pool::Texts, ms(9_100)).is_none());
    }
}
