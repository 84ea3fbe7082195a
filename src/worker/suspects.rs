//! Tasks that were delivered before, each to be computed without batch-mates: one of them may have
//! killed the worker that held it, and the others must not die with it again. Tells the launcher
//! which one is on the device, before it is. Owns those that wait, in order.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use super::batches::Submission;
use super::engine::Item;
use super::report::Reporter;
use crate::batching::{Batch, Batcher, Device, Policy};
use crate::model::Codec;
use crate::protocol::control::Event;

/// Fingerprints of the tasks that killed workers, as the launcher knows them. Written by who reads
/// its commands, read when a task comes again. Clones share the set. Bound: the launcher's.
#[derive(Clone, Debug, Default)]
pub struct KnownPoison(Arc<RwLock<HashSet<String>>>);

impl KnownPoison {
    /// Adds one.
    pub fn add(&self, fingerprint: String) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(fingerprint);
    }

    /// Whether it is one of them.
    pub(super) fn holds(&self, fingerprint: &str) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).contains(fingerprint)
    }
}

/// See the module.
pub(super) struct Suspects<C: Codec> {
    /// Bound: the prefetch, as each task submits once.
    waiting: VecDeque<Submission<C>>,
    /// The inputs of the one whose turn it is: in several batches where they do not fit one.
    current: Batcher<Item<C>>,
    announced: bool,
    reporter: Reporter,
}

impl<C: Codec> Suspects<C> {
    pub(super) fn new(policy: Policy, reporter: Reporter) -> Self {
        Self { waiting: VecDeque::new(), current: Batcher::new(policy), announced: false, reporter }
    }

    pub(super) fn push(&mut self, submission: Submission<C>) {
        self.waiting.push_back(submission);
    }

    /// Some wait, or the last one has not been said to be through.
    pub(super) fn any(&self) -> bool {
        self.announced || !self.waiting.is_empty()
    }

    /// The next batch of a suspect. Call it only while the device is idle.
    pub(super) async fn next(&mut self) -> Option<Batch<Item<C>>> {
        loop {
            if let Some(batch) = self.current.take(Instant::now(), Device::Idle, false) {
                return Some(batch);
            }
            if std::mem::take(&mut self.announced) {
                self.reporter.send(&Event::Alone { task: None }).await;
            }
            let next = self.waiting.pop_front()?;
            for item in next.items {
                let tokens = item.tokens;
                self.current.push(item, tokens, Instant::now());
            }
            self.reporter.send(&Event::Alone { task: next.suspect }).await;
            // The process may not live to write it later.
            self.reporter.flush().await;
            self.announced = true;
        }
    }
}
