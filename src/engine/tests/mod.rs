//! Tests of both loops with models that compute nothing, run turn by turn or in paused time.

mod continuous;
mod encoding;
mod oneshot;
mod probe;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;

use super::*;
use crate::model::LoadSpec;

pub(super) fn policy(max_tokens: usize) -> Policy {
    Policy::new(max_tokens, 64, Duration::from_millis(2))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    OnDevice(Vec<String>),
    Idle,
    ToldIdle,
    Passed { inputs: usize, tokens: usize, fault: bool },
}

#[derive(Clone, Default)]
pub(super) struct Log(Arc<Mutex<Vec<Said>>>, Arc<watch::Sender<usize>>);

impl Log {
    fn push(&self, said: Said) {
        self.0.lock().unwrap().push(said);
    }

    pub(super) async fn passes(&self, count: usize) {
        self.1.subscribe().wait_for(|passes| *passes >= count).await.unwrap();
    }

    pub(super) fn take(&self) -> Vec<Said> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    /// The tasks on the device, one list for each announcement.
    pub(super) fn on_device(&self) -> Vec<Vec<String>> {
        let said = self.take().into_iter();
        said.filter_map(|said| if let Said::OnDevice(tasks) = said { Some(tasks) } else { None }).collect()
    }
}

impl Observer for Log {
    fn on_device(&self, tasks: Vec<TaskName>) {
        self.push(Said::OnDevice(tasks.into_iter().map(|task| task.id).collect()));
    }

    fn mark_idle(&self) {
        self.push(Said::Idle);
    }

    fn tell_idle(&self) {
        self.push(Said::ToldIdle);
    }

    fn passed(&self, passed: &Passed<'_>) {
        let Pass { size, tokens, .. } = passed.pass;
        self.push(Said::Passed { inputs: size, tokens, fault: passed.fault.is_some() });
        self.1.send_modify(|passes| *passes += 1);
    }
}

pub(super) fn setup(source: &str, max_tokens: usize, log: &Log) -> Setup {
    let observer = Box::new(log.clone());
    let (spec, policy) = (LoadSpec::new(source), policy(max_tokens));
    Setup { spec, min_speed: 0.0, policy, prepared_bytes: u64::MAX, observer }
}

pub(super) fn state(id: &str, deadline: Option<Duration>) -> Arc<TaskState> {
    let name = TaskName { id: id.into(), fingerprint: id.into() };
    Arc::new(TaskState::new(name, deadline.map(|deadline| now() + deadline)))
}
