//! What the launcher knows of tasks that were on a device when their worker died, as this worker has
//! heard it. Owns the latest account; decides nothing.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use crate::protocol::control::CrashRecord;

/// The deaths, by the task's fingerprint. Written by who reads the launcher's commands, read when a
/// task is taken. Clones share them. Bound: the launcher's.
#[derive(Clone, Debug, Default)]
pub struct CrashRecords(Arc<RwLock<HashMap<String, CrashRecord>>>);

impl CrashRecords {
    /// Takes the launcher's account, in place of the one before.
    pub fn learn(&self, tasks: Vec<CrashRecord>) {
        let tasks = tasks.into_iter().map(|deaths| (deaths.task.clone(), deaths)).collect();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = tasks;
    }

    /// Those of one task.
    pub(super) fn of(&self, fingerprint: &str) -> Option<CrashRecord> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(fingerprint).cloned()
    }
}
