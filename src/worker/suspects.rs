//! Tasks that were delivered before, each to be computed without batch-mates: one of them may have
//! killed the worker that held it, and the others must not die with it again. Owns those that wait,
//! in order.

use std::collections::VecDeque;
use std::time::Instant;

use super::batches::Submission;
use super::engine::Item;
use crate::batching::{Batch, Batcher, Device, Policy};
use crate::model::Codec;

/// See the module.
pub(super) struct Suspects<C: Codec> {
    /// Bound: the prefetch, as each task submits once.
    waiting: VecDeque<Submission<C>>,
    /// The inputs of the one whose turn it is: in several batches where they do not fit one.
    current: Batcher<Item<C>>,
}

impl<C: Codec> Suspects<C> {
    pub(super) fn new(policy: Policy) -> Self {
        Self { waiting: VecDeque::new(), current: Batcher::new(policy) }
    }

    pub(super) fn push(&mut self, submission: Submission<C>) {
        self.waiting.push_back(submission);
    }

    /// Some wait.
    pub(super) fn any(&self) -> bool {
        !self.waiting.is_empty() || !self.current.is_empty()
    }

    /// From now on, batches of at most so many tokens.
    pub(super) fn limit_tokens(&mut self, most: usize) {
        self.current.limit_tokens(most);
    }

    /// From now on, batches within these bounds.
    pub(super) fn set_policy(&mut self, policy: Policy) {
        self.current.set_policy(policy);
    }

    /// The next batch of a suspect. Call it only while the device is idle.
    pub(super) fn next(&mut self) -> Option<Batch<Item<C>>> {
        if self.current.is_empty() {
            for item in self.waiting.pop_front()?.items {
                let tokens = item.tokens;
                self.current.push(item, tokens, Instant::now());
            }
        }
        self.current.take(Instant::now(), Device::Idle, false)
    }
}
