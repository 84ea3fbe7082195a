//! Tests of both loops with models that compute nothing. They run turn by turn, or in paused time.

mod continuous;
mod encoding;
mod generated;
mod job;
mod one_pass;
mod probe;
mod streams;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::*;
use crate::batching::QueueBytes;
use crate::model::LoadSpec;

pub(super) fn policy(max_tokens: usize) -> Policy {
    Policy::new(max_tokens, 64, Duration::from_millis(2))
}

/// A call that the model thread made to its observer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Report {
    OnDevice(Vec<String>),
    Idle,
    IdleReported,
    PassEnded { inputs: usize, tokens: usize, fault: bool },
}

/// An observer that records its calls, and the number of passes that have ended.
#[derive(Clone, Default)]
pub(super) struct Log(Arc<Mutex<Vec<Report>>>, Arc<watch::Sender<usize>>);

impl Log {
    fn push(&self, report: Report) {
        self.0.lock().push(report);
    }

    /// Waits until `count` passes have ended.
    pub(super) async fn passes(&self, count: usize) {
        self.1.subscribe().wait_for(|passes| *passes >= count).await.unwrap();
    }

    /// The number of passes that have ended.
    pub(super) fn ended_passes(&self) -> usize {
        *self.1.borrow()
    }

    pub(super) fn take(&self) -> Vec<Report> {
        std::mem::take(&mut self.0.lock())
    }

    /// The tasks on the device, one list for each announcement.
    pub(super) fn on_device(&self) -> Vec<Vec<String>> {
        let reports = self.take().into_iter();
        reports
            .filter_map(|report| if let Report::OnDevice(tasks) = report { Some(tasks) } else { None })
            .collect()
    }
}

impl Observer for Log {
    fn on_device(&self, tasks: Vec<TaskName>) {
        self.push(Report::OnDevice(tasks.into_iter().map(|task| task.id).collect()));
    }

    fn mark_idle(&self) {
        self.push(Report::Idle);
    }

    fn report_idle(&self) {
        self.push(Report::IdleReported);
    }

    fn pass_ended(&self, ended: &EndedPass) {
        let Pass { size, tokens, .. } = ended.pass;
        self.push(Report::PassEnded { inputs: size, tokens, fault: ended.has_failed });
        self.1.send_modify(|passes| *passes += 1);
    }
}

pub(super) fn setup(source: &str, max_tokens: usize, log: &Log) -> Setup {
    let observer = Box::new(log.clone());
    let (spec, policy) = (LoadSpec::new(source), policy(max_tokens));
    Setup { spec, min_speed: 0.0, policy, prepared_bytes: QueueBytes::new(u64::MAX, &[]), observer }
}

pub(super) fn state(id: &str, deadline: Option<Duration>) -> Arc<TaskState> {
    let name = TaskName { id: id.into(), fingerprint: id.into() };
    Arc::new(TaskState::new(name, deadline.map(|deadline| now() + deadline)))
}
