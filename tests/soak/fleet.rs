//! The service under the storm: two launchers on the same queues. Follows their logs (which worker is
//! which process, which was stopped by a sentinel, which died and how), starts another launcher when
//! one has ended as it should, and says so when one ended as it should not. Owns the launchers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;

use crate::support::processes::lives;
use crate::support::sconce::{Sconce, Settings};

/// Workers of each launcher.
pub const WORKERS: usize = 3;
/// Messages that a worker holds.
pub const PREFETCH: usize = 16;

/// The launchers that run, and how those that have gone ended.
pub struct Fleet {
    pub launchers: Vec<Launcher>,
    /// How a launcher that has gone ended, and its log.
    gone: Vec<(String, String)>,
    /// Sentinels that were obeyed.
    pub stopped_on_request: usize,
}

/// One launcher and what its log says of its workers.
pub struct Launcher {
    settings: Settings,
    pub sconce: Sconce,
    read: usize,
    /// Living workers by slot.
    pub pids: BTreeMap<String, u32>,
    /// Slots whose worker obeyed a sentinel.
    pub stopped: BTreeSet<String>,
}

/// What a log tells that matters to the books.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sign {
    /// A worker crashed by itself: poison.
    Crashed,
    /// A worker noticed that the broker is gone.
    LostTheBroker,
    /// Something nobody did to it.
    Strange(String),
}

impl Launcher {
    fn start(settings: &Settings) -> Self {
        let sconce = Sconce::launch(settings);
        let (pids, stopped) = (BTreeMap::new(), BTreeSet::new());
        Self { settings: settings.clone(), sconce, read: 0, pids, stopped }
    }

    /// Its slots that are to be filled.
    pub fn slots(&self) -> Vec<String> {
        let all = (0..WORKERS).map(|index| format!("{}/{index}", self.settings.name));
        all.filter(|slot| !self.stopped.contains(slot)).collect()
    }

    /// Reads on in its log.
    fn follow(&mut self) -> Vec<Sign> {
        let lines = self.sconce.lines_from(self.read);
        self.read += lines.len();
        lines.iter().filter_map(|line| self.understand(line)).collect()
    }

    fn understand(&mut self, line: &str) -> Option<Sign> {
        let slot = field(line, "slot").unwrap_or_default();
        if line.contains("worker spawned") {
            self.pids.insert(slot, field(line, "pid")?.parse().ok()?);
        } else if line.contains("worker died ") && line.contains("status=") {
            self.pids.remove(&slot);
            // 9 is the storm's own doing, 6 the poison's.
            if line.contains("signal: 6") {
                return Some(Sign::Crashed);
            }
            if !line.contains("signal: 9") {
                return Some(Sign::Strange(line.to_owned()));
            }
        } else if line.contains("worker ended") {
            self.pids.remove(&slot);
        } else if line.contains("INFO stopped on request") {
            self.stopped.insert(slot);
        } else if line.contains("lost the broker") {
            return Some(Sign::LostTheBroker);
        } else if line.contains("panicked") || line.contains("slot given up") {
            return Some(Sign::Strange(line.to_owned()));
        }
        None
    }
}

impl Fleet {
    /// Two launchers on the queues of `settings`.
    pub fn start(settings: &Settings) -> Self {
        let launchers = ["east", "west"].map(|side| {
            let mut settings = settings.clone();
            // Names this process too, so that what is left over can be told from others' workers.
            settings.name = format!("{side}-{}", std::process::id());
            Launcher::start(&settings)
        });
        Self { launchers: launchers.into(), gone: Vec::new(), stopped_on_request: 0 }
    }

    /// Slots that are to be filled, of all launchers.
    pub fn slots(&self) -> Vec<String> {
        self.launchers.iter().flat_map(Launcher::slots).collect()
    }

    /// Living workers: launcher, slot, process.
    pub fn workers(&self) -> Vec<(usize, String, u32)> {
        let each = self.launchers.iter().enumerate();
        each.flat_map(|(index, it)| it.pids.iter().map(move |(slot, pid)| (index, slot.clone(), *pid)))
            .collect()
    }

    /// Reads the logs, and starts another launcher where all workers were stopped by sentinels.
    ///
    /// # Errors
    /// A launcher that ended otherwise.
    pub fn tend(&mut self) -> Result<Vec<Sign>, String> {
        let mut signs = Vec::new();
        for index in 0..self.launchers.len() {
            let launcher = &mut self.launchers[index];
            let (before, ended) = (launcher.stopped.len(), launcher.sconce.ended());
            signs.extend(launcher.follow());
            self.stopped_on_request += launcher.stopped.len() - before;
            match ended {
                None => {}
                Some(0) if launcher.stopped.len() == WORKERS => self.replace(index, "stopped by sentinels"),
                Some(code) => return Err(format!("{} ended with {code}", launcher.settings.name)),
            }
        }
        Ok(signs)
    }

    /// Starts another launcher in the place of one that has ended.
    pub fn replace(&mut self, index: usize, how: &str) {
        let launcher = &mut self.launchers[index];
        let before = launcher.stopped.len();
        launcher.follow();
        self.stopped_on_request += launcher.stopped.len() - before;
        let next = Launcher::start(&launcher.settings);
        let old = std::mem::replace(launcher, next);
        self.gone.push((format!("{} ({how})", old.settings.name), old.sconce.log()));
    }

    /// SIGTERM for all; their exit codes.
    pub async fn stop(&mut self) -> Vec<i32> {
        for launcher in &self.launchers {
            launcher.sconce.signal(Signal::SIGTERM);
        }
        let mut codes = Vec::new();
        for launcher in &mut self.launchers {
            codes.push(launcher.sconce.exit_code().await);
        }
        codes
    }

    /// Workers of this fleet that live, whoever is their parent.
    pub fn left_over(&self) -> Vec<u32> {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let ours = |pid: &u32| {
            let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let arguments = String::from_utf8_lossy(&arguments).into_owned();
            let named = |it: &Launcher| arguments.contains(&format!("\0{}/", it.settings.name));
            self.launchers.iter().any(named) && lives(*pid)
        };
        pids.filter(ours).collect()
    }

    /// Resident memory of the living workers, in KiB each.
    pub fn resident(&self) -> Vec<u64> {
        let of = |pid: u32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
            line.trim().trim_end_matches(" kB").parse().ok()
        };
        self.workers().into_iter().filter_map(|(_, _, pid)| of(pid)).collect()
    }

    /// Writes the log of every launcher that ever was into a folder.
    pub fn write_logs(&self, folder: &Path) {
        let living = self.launchers.iter().map(|it| (it.settings.name.clone(), it.sconce.log()));
        for (number, (name, log)) in self.gone.iter().cloned().chain(living).enumerate() {
            let _ = fs::write(folder.join(format!("{number:03} {name}.log")), log);
        }
    }
}

/// The value of a field in a log line.
pub fn field(line: &str, name: &str) -> Option<String> {
    let (_, rest) = line.split_once(&format!(" {name}="))?;
    let value = rest.split(' ').next()?;
    Some(value.trim_matches('"').to_owned())
}
