//! The books of a storm: every publish, every reply, every dead letter, and what each task must come
//! to. Decides what is lost, what is wrong, what came twice and whether a fault explains that. Pure:
//! times are passed in, in milliseconds since 1970.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::plan::{Fault, Kind};
use super::producers::FILLER;

/// Longest time by which a reply may lie before the fault that kept its ack from the broker.
const BEFORE: u64 = 10_000;
/// Longest time after the recovery from a fault in which the first of two replies may still come.
const AFTER: u64 = 30_000;

/// Longest time from a task's publish to its dead letter, for one that a deleted queue may have held.
const WITH_IT: u64 = 10_000;

/// What was published and what came of it.
#[derive(Default)]
pub struct Ledger {
    entries: BTreeMap<String, Entry>,
    pub incidents: Vec<Incident>,
    /// By worker: when it last began a task that was answered.
    begun: BTreeMap<String, u64>,
    /// Confirmed and not yet what they must come to.
    open: usize,
    /// Read again by us, because our own ack was lost.
    pub read_again: usize,
    /// What belongs to no task, and other oddities.
    pub strange: Vec<String>,
    /// Tasks whose letter may have been in a dead-letter queue when that was deleted, and when.
    may_have_gone: Vec<(u64, Vec<String>)>,
    /// Which of them it was.
    pub strange_but_explained: Vec<String>,
}

/// One publish.
#[derive(Clone, Debug)]
pub struct Entry {
    pub kind: Kind,
    answer: u64,
    pub published: u64,
    pub confirmed: bool,
    pub replies: Vec<Seen>,
    pub letters: Vec<Seen>,
}

/// One reply or dead letter.
#[derive(Clone, Debug)]
pub struct Seen {
    pub at: u64,
    /// Which of our connections read it.
    pub session: u64,
    pub redelivered: bool,
    pub message_id: String,
    /// `status_code` of a reply, `reason` of a dead letter.
    pub verdict: String,
    pub worker: String,
    pub attempt: String,
    /// When its worker began with it, where it says.
    pub begun: Option<u64>,
    pub body: u64,
}

/// Something that may have caused duplicates.
#[derive(Clone, Debug)]
pub struct Incident {
    pub cause: Cause,
    pub began: u64,
    /// When its cause was gone and all was well again; far away until it is known.
    pub over: u64,
    /// Tasks that can have been between their reply and their ack.
    pub in_flight: usize,
    /// Tasks whose second reply or dead letter is put down to it.
    pub repeated: usize,
    /// What these tasks got beyond the second: a reply that a stall held, the same published again,
    /// and that of the next worker make three.
    pub further: usize,
    /// Milliseconds from the end of the cause to the first answer, and to all workers being back.
    pub recovery: Option<(u64, u64)>,
}

/// What an incident was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    Struck(Fault),
    /// A worker died of a poison task.
    PoisonDeath,
    /// A worker lost the broker though nobody had touched it.
    LostAlone,
}

/// A second reply, or dead letter, to one task.
#[derive(Clone, Debug)]
pub struct Duplicate {
    pub id: String,
    pub first: u64,
    pub second: u64,
    /// The same reply published again, or the dead letter beside a reply: no further computation.
    copy: bool,
}

/// Names a body.
pub fn digest(body: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    hasher.finish()
}

impl Entry {
    /// It has come to what it must come to.
    fn is_complete(&self) -> bool {
        let answered = |code: &str| self.replies.iter().any(|seen| seen.verdict == code);
        let buried = |reason: &str| self.letters.iter().any(|seen| seen.verdict == reason);
        match self.kind {
            Kind::Good => answered("200"),
            Kind::StuckReplyQueue | Kind::FullReplyQueue => answered("200") || buried("unconfirmed"),
            Kind::Oversized => answered("413"),
            Kind::Undecodable => answered("400") && buried("undecodable"),
            Kind::Misshapen => answered("400"),
            Kind::UnknownControl => buried("unknown_control") && answered("400"),
            Kind::NoReplyQueue => buried("unroutable"),
            Kind::Expired => answered("408"),
            Kind::Failing => answered("500"),
            Kind::Poison => answered("500") && buried("poison"),
        }
    }

    fn is_open(&self) -> bool {
        self.confirmed && !self.is_complete()
    }

    /// What it must not have come to, in words.
    fn mistakes(&self) -> Vec<String> {
        let (code, reasons): (&str, &[&str]) = match self.kind {
            Kind::Good => ("200", &[]),
            Kind::Undecodable => ("400", &["undecodable"]),
            Kind::Misshapen => ("400", &[]),
            Kind::UnknownControl => ("400", &["unknown_control"]),
            Kind::NoReplyQueue => ("none", &["unroutable"]),
            Kind::StuckReplyQueue | Kind::FullReplyQueue => ("200", &["unconfirmed"]),
            Kind::Oversized => ("413", &[]),
            Kind::Expired => ("408", &[]),
            Kind::Failing => ("500", &["attempts"]),
            Kind::Poison => ("500", &["poison"]),
        };
        let mut mistakes = Vec::new();
        for reply in &self.replies {
            if reply.verdict != code {
                let Seen { verdict, worker, attempt, .. } = reply;
                let words = format!("a reply with {verdict} where {code} is due, by {worker}");
                mistakes.push(format!("{words} at attempt {attempt}"));
            } else if code == "200" && reply.body != self.answer {
                mistakes.push("the answer is not its input".to_owned());
            }
        }
        for letter in &self.letters {
            if !reasons.contains(&letter.verdict.as_str()) {
                mistakes.push(format!("a dead letter with reason {:?}, due: {reasons:?}", letter.verdict));
            } else if self.kind == Kind::NoReplyQueue && letter.body != self.answer {
                mistakes.push("the dead letter is not the task".to_owned());
            }
        }
        mistakes
    }
}

impl Ledger {
    /// A task is about to be published.
    pub fn publishes(&mut self, id: &str, kind: Kind, answer: &[u8], now: u64) {
        let answer = digest(answer);
        let (replies, letters) = (Vec::new(), Vec::new());
        let entry = Entry { kind, answer, published: now, confirmed: false, replies, letters };
        assert!(self.entries.insert(id.to_owned(), entry).is_none(), "{id} is published twice");
    }

    /// The broker has it.
    pub fn confirmed(&mut self, id: &str) {
        self.change(id, |entry| entry.confirmed = true);
    }

    /// A reply came.
    pub fn reply(&mut self, id: &str, seen: Seen) {
        if let Some(begun) = seen.begun {
            let latest = self.begun.entry(seen.worker.clone()).or_default();
            *latest = begun.max(*latest);
        }
        self.note(id, seen, |entry| &mut entry.replies);
    }

    /// A dead letter came.
    pub fn letter(&mut self, id: &str, seen: Seen) {
        self.note(id, seen, |entry| &mut entry.letters);
    }

    fn note(&mut self, id: &str, seen: Seen, list: fn(&mut Entry) -> &mut Vec<Seen>) {
        if id == FILLER {
            return;
        }
        let Some(entry) = self.entries.get_mut(id) else {
            self.strange.push(format!("something came for {id:?}, which nobody published: {seen:?}"));
            return;
        };
        // Our own ack may be lost. What the service publishes again comes once more on one session.
        let again = |it: &Seen| {
            let same =
                (&it.message_id, &it.verdict, &it.worker) == (&seen.message_id, &seen.verdict, &seen.worker);
            same && (seen.redelivered || it.session != seen.session)
        };
        if list(entry).iter().any(again) {
            self.read_again += 1;
            return;
        }
        self.change(id, |entry| list(entry).push(seen));
    }

    fn change(&mut self, id: &str, change: impl FnOnce(&mut Entry)) {
        let entry = self.entries.get_mut(id).expect("a task of ours");
        let before = entry.is_open();
        change(entry);
        let after = entry.is_open();
        self.open = self.open + usize::from(after) - usize::from(before);
    }

    /// Tasks that are in and have not come to what they must come to.
    pub fn open(&self) -> usize {
        self.open
    }

    /// When a worker last began a task that it answered; 0: never.
    pub fn last_begun(&self, worker: &str) -> u64 {
        self.begun.get(worker).copied().unwrap_or(0)
    }

    /// When any did.
    pub fn last_begun_by_any(&self) -> u64 {
        self.begun.values().copied().max().unwrap_or(0)
    }

    /// When a task was published; none: never.
    pub fn published_at(&self, id: &str) -> Option<u64> {
        self.entries.get(id).map(|entry| entry.published)
    }

    /// Whether a task is in and unfinished.
    pub fn is_open(&self, id: &str) -> bool {
        self.entries.get(id).is_some_and(Entry::is_open)
    }

    /// An incident begins; its number.
    pub fn begins(&mut self, cause: Cause, in_flight: usize, now: u64) -> usize {
        let (over, recovery, repeated, further) = (u64::MAX, None, 0, 0);
        self.incidents.push(Incident { cause, began: now, over, in_flight, repeated, further, recovery });
        self.incidents.len() - 1
    }

    /// All entries.
    pub fn entries(&self) -> impl Iterator<Item = (&String, &Entry)> {
        self.entries.iter()
    }

    /// Confirmed tasks that never came to what they must come to.
    pub fn lost(&self) -> Vec<&String> {
        self.entries.iter().filter(|(_, entry)| entry.is_open()).map(|(id, _)| id).collect()
    }

    /// The dead-letter queue was deleted just now: a letter that was in it at this moment went with it, and
    /// is no longer waited for. That is a letter to a task that came shortly before, one at most.
    pub fn letters_deleted(&mut self, now: u64) {
        let letterless = |entry: &Entry| {
            let wants = matches!(
                entry.kind,
                Kind::Undecodable | Kind::UnknownControl | Kind::NoReplyQueue | Kind::Failing | Kind::Poison
            );
            let answered = !entry.replies.is_empty() || entry.kind == Kind::NoReplyQueue;
            wants
                && answered
                && entry.letters.is_empty()
                && entry.is_open()
                && entry.published + WITH_IT > now
        };
        let gone: Vec<String> =
            self.entries.iter().filter(|(_, it)| letterless(it)).map(|(id, _)| id.clone()).collect();
        self.may_have_gone.push((now, gone));
    }

    /// Gives up the letters that went with a deleted queue: one for each deletion, and no more.
    pub fn give_up_deleted(&mut self) {
        for (_, ids) in std::mem::take(&mut self.may_have_gone) {
            let open = ids.into_iter().find(|id| self.is_open(id));
            if let Some(id) = open {
                self.strange_but_explained.push(format!("{id}: its letter went with the deleted queue"));
                self.change(&id, |entry| entry.confirmed = false);
            }
        }
    }

    /// Tasks that came to what they must not come to.
    pub fn wrong(&self) -> Vec<String> {
        let all = self.entries.iter().flat_map(|(id, entry)| {
            entry.mistakes().into_iter().map(move |mistake| format!("{id} ({:?}): {mistake}", entry.kind))
        });
        all.collect()
    }

    /// Everything that came a second time, by time.
    pub fn duplicates(&self) -> Vec<Duplicate> {
        let mut found = Vec::new();
        // What a queue has not confirmed in time may still be in it, and may be there again.
        let confirming = |entry: &Entry| !matches!(entry.kind, Kind::StuckReplyQueue | Kind::FullReplyQueue);
        for (id, entry) in self.entries.iter().filter(|(_, entry)| confirming(entry)) {
            for (list, letters) in [(&entry.replies, false), (&entry.letters, true)] {
                for (index, second) in list.iter().enumerate().skip(1) {
                    let again = list[..index].iter().any(|it| it.message_id == second.message_id);
                    found.push(Duplicate {
                        id: id.clone(),
                        first: list[index - 1].at,
                        second: second.at,
                        copy: letters || again,
                    });
                }
            }
        }
        found.sort_by_key(|duplicate| duplicate.second);
        found
    }

    /// Puts a mere copy down to the incident that already repeated its task, and any other duplicate to
    /// the latest that can have and had that many tasks in flight; gives those that none explains.
    pub fn explain(&mut self) -> Vec<Duplicate> {
        let mut unexplained = Vec::new();
        let mut repeated_by = BTreeMap::<String, usize>::new();
        for duplicate in self.duplicates() {
            let again = repeated_by.get(&duplicate.id).copied();
            if let Some(index) =
                again.filter(|at| duplicate.copy && self.incidents[*at].can_explain(&duplicate))
            {
                self.incidents[index].further += 1;
                continue;
            }
            let fits = |it: &Incident| it.can_explain(&duplicate) && it.repeated < it.in_flight;
            match self.incidents.iter().rposition(fits) {
                Some(index) => {
                    self.incidents[index].repeated += 1;
                    repeated_by.insert(duplicate.id, index);
                }
                None => unexplained.push(duplicate),
            }
        }
        unexplained
    }
}

impl Incident {
    /// The first came when the fault can still have kept its ack, or its reply, from the broker.
    fn can_explain(&self, duplicate: &Duplicate) -> bool {
        let possible = self.began.saturating_sub(BEFORE)..=self.over.saturating_add(AFTER);
        self.began <= duplicate.second && possible.contains(&duplicate.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(at: u64, verdict: &str, body: &[u8]) -> Seen {
        Seen {
            at,
            session: 1,
            redelivered: false,
            message_id: at.to_string(),
            verdict: verdict.to_owned(),
            worker: "east/0".to_owned(),
            attempt: "1".to_owned(),
            begun: Some(at),
            body: digest(body),
        }
    }

    fn with(kind: Kind, ids: &[&str]) -> Ledger {
        let mut ledger = Ledger::default();
        for id in ids {
            ledger.publishes(id, kind, b"answer", 1);
            ledger.confirmed(id);
        }
        ledger
    }

    #[test]
    fn a_confirmed_task_without_reply_is_lost_and_an_unconfirmed_one_is_not() {
        let mut ledger = with(Kind::Good, &["a", "b"]);
        ledger.publishes("never arrived", Kind::Good, b"", 1);
        ledger.reply("a", seen(5, "200", b"answer"));
        assert_eq!((ledger.open(), ledger.lost()), (1, vec![&"b".to_owned()]));
        assert!(ledger.wrong().is_empty());
    }

    #[test]
    fn a_bad_task_needs_both_its_reply_and_its_dead_letter() {
        let mut ledger = with(Kind::Poison, &["p"]);
        ledger.reply("p", seen(5, "500", b""));
        assert_eq!(ledger.open(), 1);
        ledger.letter("p", seen(6, "poison", b""));
        assert_eq!((ledger.open(), ledger.wrong().len()), (0, 0));
        ledger.letter("p", seen(7, "attempts", b""));
        assert_eq!(ledger.wrong().len(), 1);
    }

    #[test]
    fn a_wrong_answer_and_a_dead_letter_of_a_good_task_are_found() {
        let mut ledger = with(Kind::Good, &["a", "b"]);
        ledger.reply("a", seen(5, "200", b"another answer"));
        ledger.letter("b", seen(5, "poison", b""));
        assert_eq!(ledger.wrong().len(), 2);
        ledger.reply("c", seen(5, "200", b""));
        assert_eq!(ledger.strange.len(), 1);
    }

    #[test]
    fn what_our_own_lost_ack_brings_again_is_no_duplicate() {
        let mut ledger = with(Kind::Good, &["a"]);
        ledger.reply("a", seen(5, "200", b"answer"));
        ledger.reply("a", Seen { redelivered: true, ..seen(5, "200", b"answer") });
        ledger.reply("a", Seen { session: 2, ..seen(5, "200", b"answer") });
        assert_eq!((ledger.read_again, ledger.duplicates().len()), (2, 0));
        ledger.reply("a", seen(5, "200", b"answer"));
        assert_eq!(ledger.duplicates().len(), 1, "published twice on one session");
    }

    #[test]
    fn a_fault_explains_as_many_repeated_tasks_as_were_in_flight_and_no_more() {
        let mut ledger = with(Kind::Good, &["a", "b", "c"]);
        let fault = ledger.begins(Cause::Struck(Fault::Cut), 2, 100_000);
        ledger.incidents[fault].over = 101_000;
        for (id, at) in [("a", 100_100), ("b", 100_200), ("c", 100_300)] {
            ledger.reply(id, seen(99_990, "200", b"answer"));
            ledger.reply(id, seen(at, "200", b"answer"));
        }
        let copy = Seen { message_id: "100100".to_owned(), ..seen(100_400, "200", b"answer") };
        ledger.reply("a", copy);
        let unexplained = ledger.explain();
        assert_eq!(unexplained.iter().map(|it| it.id.as_str()).collect::<Vec<_>>(), ["c"]);
        assert_eq!((ledger.incidents[fault].repeated, ledger.incidents[fault].further), (2, 1));
    }

    #[test]
    fn a_fault_explains_nothing_that_was_over_before_it_or_began_after_it() {
        let mut ledger = with(Kind::Good, &["before", "after"]);
        let fault = ledger.begins(Cause::Struck(Fault::Cut), 9, 100_000);
        ledger.incidents[fault].over = 101_000;
        ledger.reply("before", seen(99_000, "200", b"answer"));
        ledger.reply("before", seen(99_500, "200", b"answer"));
        ledger.reply("after", seen(200_000, "200", b"answer"));
        ledger.reply("after", seen(200_500, "200", b"answer"));
        assert_eq!(ledger.explain().len(), 2);
    }
}
