//! The documented exit codes, shared by the processes that set them and the launcher that reads them. 64, 70 and 78
//! are from `sysexits.h`.

use std::fmt;

named_enum! {
    /// Why a sconce process ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Exit as meaning {
        /// The process did what was requested; a drain counts as that.
        Done = 0 => "done",
        /// Refused: unhealthy, nobody answered, or an order or dead letter could not be handled. Workers never exit
        /// with it.
        Refused = 1 => "refused: unhealthy, nobody answered, or an order or dead letter not handled",
        /// The command line is wrong.
        Usage = 64 => "wrong command line",
        /// A bug: a panic or a broken invariant.
        Internal = 70 => "a bug in sconce",
        /// The settings are wrong, or the broker refuses them.
        Config = 78 => "bad configuration, or the broker refuses it (password, vhost, permission)",
        /// A sentinel stopped this worker: the slot is done.
        StoppedOnRequest = 80 => "worker: stopped on request, by a sentinel",
        /// No broker could be reached for longer than `broker.give_up_after`.
        BrokerLost = 81 => "no broker reached for longer than broker.give_up_after",
        /// The model could not be loaded.
        ModelFailed = 82 => "the model cannot be served: its files or its `dtype` are wrong, or nothing serves it",
        /// The device failed and only a new process can use it.
        DeviceFailed = 83 => "the device failed",
        /// Stopped by a second signal or the deadline; the broker redelivers unfinished tasks.
        Aborted = 84 => "aborted: second signal, deadline, --timeout; unfinished tasks are requeued",
        /// A slot was given up after too many quick failures.
        SlotGivenUp = 85 => "a worker died too often and was given up",
        /// The model could not be fetched from the hub. A retry may succeed, unlike after [`Exit::ModelFailed`].
        ModelUnavailable = 86 => "the model could not be fetched",
        /// A client command has done all of its work, and some of the answers are errors. Workers never exit with it.
        DoneWithErrors = 87 => "finished, with errors: some rows or tasks were answered with an error",
        /// The process of a model in Python has ended, has failed to load it, or has taken too long.
        ModelProcessFailed = 88 => "worker: the Python process of its model died, failed to load it, or took too long",
    }
}

impl Exit {
    /// The process's exit status.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// Whether the worker could not load its model.
    pub fn is_load_failure(self) -> bool {
        matches!(self, Exit::ModelFailed | Exit::ModelUnavailable)
    }

    /// The meaning of a worker's exit status. None for an unknown status, and for 1, because any library may exit
    /// with 1.
    pub fn from_code(code: i32) -> Option<Self> {
        let mut exits = Self::ALL.into_iter().map(|(exit, _)| exit).filter(|exit| *exit != Exit::Refused);
        exits.find(|exit| i32::from(exit.code()) == code)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.meaning())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_distinct_and_read_back() {
        for (exit, _) in Exit::ALL.into_iter().filter(|(exit, _)| *exit != Exit::Refused) {
            assert_eq!(Exit::from_code(exit.code().into()), Some(exit));
        }
        assert_eq!(Exit::from_code(1), None);
    }
}
