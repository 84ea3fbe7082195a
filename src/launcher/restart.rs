//! Decides what follows a worker's end, from how it ended and how often it failed quickly. Pure.

use std::time::Duration;

use crate::backoff::Backoff;
use crate::config::Launcher;
use crate::protocol::control::Unfit;
use crate::shutdown::Exit;

/// How a worker process ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Death {
    /// The exit, if its status is a known exit code.
    pub exit: Option<Exit>,
    /// Whether it had reported `ready`.
    pub was_ready: bool,
    /// How long it lived after it became ready.
    pub lived: Duration,
    /// Whether it had done some work.
    pub worked: bool,
    /// Whether the broker has accepted a worker before. If so, a refusal may be temporary.
    pub broker_reached: bool,
    /// Whether another worker would end in the same way.
    pub is_lasting: bool,
    /// Whether a worker of the slot has loaded the model before. If so, its files may only be missing temporarily.
    pub has_loaded: bool,
}

impl Death {
    /// Whether it failed so early that restarting it at once would only burden the host. A device that fails at the
    /// first work of its worker counts as a quick failure, however long the worker had waited for that work.
    pub fn is_quick_failure(&self, policy: &Launcher) -> bool {
        let failed_at_first_work = self.exit == Some(Exit::DeviceFailed) && !self.worked;
        self.exit != Some(Exit::Done)
            && (!self.was_ready || self.lived < policy.quick_failure || failed_at_first_work)
    }
}

named_enum! {
    /// Why a worker is started in place of another: how the previous one ended, or why it was replaced.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RestartReason as as_str {
        /// A signal ended it.
        Killed => "killed",
        /// A forward pass took longer than `batch.timeout`.
        Stuck => "stuck",
        /// It sent no events for too long.
        Silent => "silent",
        /// A bug in sconce.
        InternalError => "internal_error",
        /// No broker could be reached.
        BrokerLost => "broker_lost",
        /// Its model could not be loaded.
        ModelFailed => "model_failed",
        /// The Python process of its model died, failed or took too long.
        ModelProcess => "model_process",
        /// Its device failed, or the driver does not answer.
        DeviceFailed => "device_failed",
        /// It reported another device than its own.
        WrongDevice => "wrong_device",
        /// Its device computes wrongly.
        WrongResult => "wrong_result",
        /// Its device is far slower than it should be.
        TooSlow => "too_slow",
        /// The driver wants a recovery action, such as a reset of its device.
        Xid => "xid",
        /// The driver cannot find its device any more.
        OffTheBus => "off_the_bus",
        /// Its settings or command line are wrong, or the broker refuses them.
        BadConfiguration => "bad_configuration",
        /// It was due for recycling (`launcher.recycle_…`).
        Recycled => "recycled",
        /// Its settings have changed.
        Reloaded => "reloaded",
        /// An operator ordered a restart.
        Requested => "requested",
        /// Any other end.
        Other => "other",
    }
}

impl From<Unfit> for RestartReason {
    fn from(unfit: Unfit) -> Self {
        match unfit {
            Unfit::WrongResult => Self::WrongResult,
            Unfit::TooSlow => Self::TooSlow,
        }
    }
}

/// What the launcher does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A sentinel message stopped the worker: the slot is done.
    StoppedOnRequest,
    /// Start it again after this delay.
    Restart(Duration),
    /// Do not start it again. This is the launcher's exit code.
    GiveUp(Exit),
}

/// How often a model that cannot be fetched is tried: about ten minutes with the default delays.
const MAX_FETCHES: u32 = 25;

/// Decides what follows a death. `quick_failures` is the number of quick failures in a row; `jitter` is passed to
/// `Backoff::delay`.
pub fn judge(death: &Death, quick_failures: u32, policy: &Launcher, jitter: f64) -> Verdict {
    let backoff = Backoff { first: policy.restart_delay, max: policy.restart_delay_max };
    match death.exit {
        Some(Exit::StoppedOnRequest) => Verdict::StoppedOnRequest,
        Some(exit) if death.is_lasting => Verdict::GiveUp(exit),
        // A worker that was ready and then reports wrong settings was refused by the broker.
        Some(Exit::Config) if death.was_ready && death.broker_reached => {
            Verdict::Restart(backoff.delay(quick_failures, jitter))
        }
        // A model that no worker of the slot could load will not load the next time either.
        Some(exit @ Exit::ModelFailed) if !death.has_loaded => Verdict::GiveUp(exit),
        // Wrong settings or a wrong command line stay wrong.
        Some(exit @ (Exit::Config | Exit::Usage)) => Verdict::GiveUp(exit),
        // The network or the hub may come back.
        Some(Exit::ModelUnavailable) if quick_failures < MAX_FETCHES => {
            Verdict::Restart(backoff.delay(quick_failures, jitter))
        }
        exit if quick_failures >= policy.max_quick_failures => {
            Verdict::GiveUp(exit.filter(|exit| *exit != Exit::Done).unwrap_or(Exit::SlotGivenUp))
        }
        _ => Verdict::Restart(backoff.delay(quick_failures, jitter)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    /// The default.
    fn policy() -> Launcher {
        config::load(&[], [], &[]).unwrap().settings.launcher
    }

    fn death(exit: Option<Exit>, was_ready: bool, seconds: u64) -> Death {
        let lived = Duration::from_secs(seconds);
        let (worked, broker_reached, is_lasting) = (false, false, false);
        Death { exit, was_ready, lived, worked, broker_reached, is_lasting, has_loaded: was_ready }
    }

    #[test]
    fn reasons_have_the_names_that_dashboards_use() {
        let names = [
            "killed",
            "stuck",
            "silent",
            "internal_error",
            "broker_lost",
            "model_failed",
            "model_process",
            "device_failed",
            "wrong_device",
            "wrong_result",
            "too_slow",
            "xid",
            "off_the_bus",
            "bad_configuration",
            "recycled",
            "reloaded",
            "requested",
            "other",
        ];
        assert_eq!(RestartReason::ALL.map(|(reason, _)| reason.as_str()), names);
        for unfit in [Unfit::WrongResult, Unfit::TooSlow] {
            assert_eq!(RestartReason::from(unfit).as_str(), unfit.name());
        }
    }

    #[test]
    fn a_worker_stopped_on_request_is_not_started_again() {
        let stopped = death(Some(Exit::StoppedOnRequest), true, 1);
        assert_eq!(judge(&stopped, 9, &policy(), 1.0), Verdict::StoppedOnRequest);
    }

    #[test]
    fn a_killed_worker_is_started_again_with_growing_delays() {
        let killed = death(None, true, 60);
        assert_eq!(judge(&killed, 0, &policy(), 1.0), Verdict::Restart(Duration::from_millis(500)));
        assert_eq!(judge(&killed, 3, &policy(), 1.0), Verdict::Restart(Duration::from_secs(2)));
    }

    #[test]
    fn a_slot_that_fails_quickly_is_given_up_with_its_own_code() {
        let policy = policy();
        let failed = death(Some(Exit::DeviceFailed), false, 1);
        assert!(failed.is_quick_failure(&policy));
        assert!(matches!(judge(&failed, 4, &policy, 1.0), Verdict::Restart(_)));
        assert_eq!(judge(&failed, 5, &policy, 1.0), Verdict::GiveUp(Exit::DeviceFailed));
        assert_eq!(judge(&death(None, true, 1), 5, &policy, 1.0), Verdict::GiveUp(Exit::SlotGivenUp));
    }

    #[test]
    fn a_model_that_cannot_be_fetched_is_tried_for_ten_minutes() {
        let (policy, failed) = (policy(), death(Some(Exit::ModelUnavailable), false, 1));
        let mut waited = Duration::ZERO;
        let verdict = (1..).map(|failures| judge(&failed, failures, &policy, 0.5)).find(|verdict| {
            if let Verdict::Restart(delay) = verdict {
                waited += *delay;
            }
            matches!(verdict, Verdict::GiveUp(_))
        });
        assert_eq!(verdict, Some(Verdict::GiveUp(Exit::ModelUnavailable)));
        assert!((300..=900).contains(&waited.as_secs()), "{waited:?}");
    }

    #[test]
    fn wrong_settings_are_not_tried_twice() {
        let refused = death(Some(Exit::Config), true, 100);
        assert_eq!(judge(&refused, 0, &policy(), 1.0), Verdict::GiveUp(Exit::Config));
    }

    #[test]
    fn a_failed_load_is_tried_again_only_if_the_model_was_loaded_before() {
        let failed = death(Some(Exit::ModelFailed), false, 1);
        assert_eq!(judge(&failed, 0, &policy(), 1.0), Verdict::GiveUp(Exit::ModelFailed));
        let known = Death { has_loaded: true, ..failed };
        assert!(matches!(judge(&known, 0, &policy(), 1.0), Verdict::Restart(_)));
    }

    #[test]
    fn a_refusal_by_a_broker_that_accepted_a_worker_before_is_an_outage() {
        let refused = Death { broker_reached: true, ..death(Some(Exit::Config), true, 100) };
        assert!(matches!(judge(&refused, 9, &policy(), 1.0), Verdict::Restart(_)));
        let lasting = Death { is_lasting: true, ..refused };
        assert_eq!(judge(&lasting, 0, &policy(), 1.0), Verdict::GiveUp(Exit::Config));
        let wrong = Death { was_ready: false, ..refused };
        assert_eq!(judge(&wrong, 0, &policy(), 1.0), Verdict::GiveUp(Exit::Config));
    }

    #[test]
    fn a_worker_that_was_never_ready_failed_quickly_however_long_it_took() {
        assert!(death(Some(Exit::ModelFailed), false, 600).is_quick_failure(&policy()));
        assert!(!death(None, true, 600).is_quick_failure(&policy()));
        let failed = death(Some(Exit::DeviceFailed), true, 600);
        assert!(failed.is_quick_failure(&policy()), "at its first work");
        assert!(!Death { worked: true, ..failed }.is_quick_failure(&policy()));
        assert!(
            !death(Some(Exit::Done), true, 1).is_quick_failure(&policy()),
            "a drained worker has not failed"
        );
    }
}
