//! The storm itself: strikes with one fault after another, waits after each until the service has
//! recovered from it, and enters both into the ledger. Owns the fleet, the proxy and the broker; never
//! strikes while it still waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::task::block_in_place;
use tokio::time::sleep;

use super::fleet::{Fleet, PREFETCH, Sign, WORKERS};
use super::ledger::Cause;
use super::plan::{self, Fault, Strike};
use super::producers::{Desk, Outgoing, Press, now};
use crate::support::proxy::Proxy;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::signal;

/// Longest time to recover from anything.
const BOUND: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(10);
/// Shorter than `broker.heartbeat`, and longer than the two that a peer waits for.
const SHORT_STALL: Duration = Duration::from_millis(900);
const LONG_STALL: Duration = Duration::from_secs(9);
const ALARM: Duration = Duration::from_secs(4);
/// After a fault that cuts the broker off, workers may notice as late as this.
const NOTICED: u64 = 30_000;

/// See the module.
pub struct Storm {
    pub desk: Arc<Desk>,
    pub fleet: Fleet,
    pub proxy: Proxy,
    pub rabbit: Rabbit,
    pub press: Press,
    /// Sentinels that are in.
    pub sentinels: usize,
    /// Poison tasks that are not buried yet, with the number of their incident.
    pub poison: Vec<(String, usize)>,
    /// When a fault was last over that can cost a worker its connection.
    cut_off: u64,
    /// Largest worker seen, in KiB.
    pub largest: u64,
}

/// What a recovery consists of.
struct Hit {
    incident: usize,
    /// When the fault struck: answers count that were begun after it.
    struck: u64,
    /// When its cause was gone.
    gone: u64,
    /// The slots that must answer again.
    slots: Vec<String>,
}

impl Storm {
    pub fn new(desk: Arc<Desk>, fleet: Fleet, proxy: Proxy, rabbit: Rabbit) -> Self {
        let (press, poison) = (Press::default(), Vec::new());
        Self { desk, fleet, proxy, rabbit, press, sentinels: 0, poison, cut_off: 0, largest: 0 }
    }

    /// One fault and the recovery from it.
    ///
    /// # Errors
    /// The service did not recover, or ended.
    pub async fn strike(&mut self, strike: Strike) -> Result<(), String> {
        self.largest = self.fleet.resident().into_iter().chain([self.largest]).max().unwrap_or(0);
        let Strike { fault, pick } = strike;
        match fault {
            Fault::KillWorker => self.worker(fault, pick, Signal::SIGKILL).await,
            Fault::StopWorker => self.worker(fault, pick, Signal::SIGTERM).await,
            Fault::KillLauncher => self.launcher(fault, pick, Signal::SIGKILL).await,
            Fault::StopLauncher => self.launcher(fault, pick, Signal::SIGTERM).await,
            Fault::Cut | Fault::ShortStall | Fault::LongStall | Fault::KillBroker | Fault::MemoryAlarm => {
                self.connections(fault).await
            }
            Fault::Sentinel => self.sentinel(pick).await,
            Fault::PoisonTask => self.poison_task(pick).await,
        }
        .map_err(|error| format!("{fault:?}: {error}"))
    }

    /// Follows the logs for this long.
    ///
    /// # Errors
    /// The service ended.
    pub async fn watch(&mut self, time: Duration) -> Result<(), String> {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.tend()?;
            sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Waits until the ledger, the logs or anything else says so.
    ///
    /// # Errors
    /// It does not within the bound; or the service ended.
    pub async fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            self.tend()?;
            if holds(self) {
                return Ok(());
            }
            if begun.elapsed() > BOUND {
                return Err(format!("not within {BOUND:?}: {what}"));
            }
            sleep(PAUSE).await;
        }
    }

    fn tend(&mut self) -> Result<(), String> {
        let signs = self.fleet.tend()?;
        let mut ledger = self.desk.ledger();
        let now = now();
        for sign in signs {
            let cause = match sign {
                Sign::Crashed => Cause::PoisonDeath,
                Sign::LostTheBroker if now > self.cut_off.saturating_add(NOTICED) => Cause::LostAlone,
                Sign::LostTheBroker => continue,
                Sign::Strange(line) => {
                    ledger.strange.push(line);
                    continue;
                }
            };
            // The log is read a little later than it is written.
            let incident = ledger.begins(cause, PREFETCH, now.saturating_sub(1_000));
            ledger.incidents[incident].over = now;
        }
        let buried = |(id, _): &&(String, usize)| !ledger.is_open(id);
        let done: Vec<(String, usize)> = self.poison.iter().filter(buried).cloned().collect();
        for (_, incident) in &done {
            let it = &mut ledger.incidents[*incident];
            let took = now - it.began;
            (it.over, it.recovery) = (now, Some((took, took)));
        }
        drop(ledger);
        self.poison.retain(|it| !done.contains(it));
        Ok(())
    }

    async fn worker(&mut self, fault: Fault, pick: u64, with: Signal) -> Result<(), String> {
        self.until("a worker lives", |it| !it.fleet.workers().is_empty()).await?;
        let workers = self.fleet.workers();
        let (index, slot, pid) = workers[pick as usize % workers.len()].clone();
        // A drain leaves nothing between a reply and its ack.
        let in_flight = if with == Signal::SIGKILL { PREFETCH } else { 0 };
        let (incident, struck) = self.begins(fault, in_flight);
        signal(pid, with);
        let is_another = |it: &Self| it.fleet.launchers[index].pids.get(&slot).is_some_and(|it| *it != pid);
        let is_done = |it: &Self| it.fleet.launchers[index].stopped.contains(&slot);
        self.until("another worker in its slot", |it| is_another(it) || is_done(it)).await?;
        self.recovers(Hit { incident, struck, gone: struck, slots: vec![slot] }).await
    }

    async fn launcher(&mut self, fault: Fault, pick: u64, with: Signal) -> Result<(), String> {
        let index = pick as usize % self.fleet.launchers.len();
        let killed = with == Signal::SIGKILL;
        let in_flight = if killed { PREFETCH * self.fleet.launchers[index].slots().len() } else { 0 };
        let (incident, struck) = self.begins(fault, in_flight);
        let poisoned = !self.poison.is_empty();
        let launcher = &mut self.fleet.launchers[index];
        launcher.sconce.signal(with);
        let code = launcher.sconce.exit_code().await;
        // A worker that poison kills while its launcher stops counts as aborted.
        let expected = if killed { code == -9 } else { code == 0 || (poisoned && code == 84) };
        if !expected {
            return Err(format!("the launcher ended with {code}"));
        }
        let gone = now();
        self.fleet.replace(index, &format!("{fault:?}"));
        let slots = self.fleet.launchers[index].slots();
        self.recovers(Hit { incident, struck, gone, slots }).await
    }

    async fn connections(&mut self, fault: Fault) -> Result<(), String> {
        let in_flight = match fault {
            Fault::MemoryAlarm => 0,
            _ => PREFETCH * self.fleet.slots().len(),
        };
        let (incident, struck) = self.begins(fault, in_flight);
        self.cut_off = u64::MAX;
        match fault {
            Fault::Cut => self.proxy.cut(),
            Fault::ShortStall => self.stall(SHORT_STALL).await?,
            Fault::LongStall => self.stall(LONG_STALL).await?,
            Fault::MemoryAlarm => {
                block_in_place(|| self.rabbit.ctl(&["set_vm_memory_high_watermark", "0.0000001"]));
                self.watch(ALARM).await?;
                block_in_place(|| self.rabbit.ctl(&["set_vm_memory_high_watermark", "0.4"]));
            }
            _ => block_in_place(|| {
                self.rabbit.kill();
                self.rabbit.start();
            }),
        }
        let gone = now();
        self.cut_off = gone;
        let slots = self.fleet.slots();
        self.recovers(Hit { incident, struck, gone, slots }).await
    }

    async fn stall(&mut self, time: Duration) -> Result<(), String> {
        self.proxy.stall();
        let watched = self.watch(time).await;
        self.proxy.resume();
        watched
    }

    /// Recovered when one worker has stopped.
    async fn sentinel(&mut self, pick: u64) -> Result<(), String> {
        let (incident, struck) = self.begins(Fault::Sentinel, 0);
        let typed = pick.is_multiple_of(2);
        let sentinel = Outgoing { name: format!("sentinel {struck}"), task: None, typed };
        self.press.publish(&self.desk.clone(), vec![sentinel]).await;
        self.sentinels += 1;
        let wanted = self.sentinels;
        self.until("one worker has stopped", |it| it.fleet.stopped_on_request >= wanted).await?;
        let now = now();
        let incident = &mut self.desk.ledger().incidents[incident];
        (incident.over, incident.recovery) = (now, Some((now - struck, now - struck)));
        Ok(())
    }

    /// Recovered when it is buried, which the storm does not wait for.
    async fn poison_task(&mut self, pick: u64) -> Result<(), String> {
        let (incident, struck) = self.begins(Fault::PoisonTask, 0);
        let id = format!("poison {struck}");
        let poison = Outgoing { name: id.clone(), task: Some(plan::poison(pick)), typed: false };
        let mut press = Press::default();
        press.publish(&self.desk.clone(), vec![poison]).await;
        self.poison.push((id, incident));
        Ok(())
    }

    fn begins(&self, fault: Fault, in_flight: usize) -> (usize, u64) {
        let struck = now();
        (self.desk.ledger().begins(Cause::Struck(fault), in_flight, struck), struck)
    }

    /// Waits for the first answer begun after the fault, and for one of each slot that was hit.
    async fn recovers(&mut self, hit: Hit) -> Result<(), String> {
        let Hit { incident, struck, gone, slots } = hit;
        let answered = |it: &Self, slot: &String| {
            let stopped = it.fleet.launchers.iter().any(|launcher| launcher.stopped.contains(slot));
            stopped || it.desk.ledger().last_begun(slot) > struck
        };
        let any = |it: &Self| it.desk.ledger().last_begun_by_any() > struck;
        self.until("an answer begun after the fault", any).await?;
        let first = now().saturating_sub(gone);
        let all = self.until("each worker answers", |it| slots.iter().all(|slot| answered(it, slot))).await;
        if let Err(error) = all {
            let silent: Vec<_> = slots.iter().filter(|slot| !answered(self, slot)).collect();
            return Err(format!("{error}; silent: {silent:?}"));
        }
        let now = now();
        let incident = &mut self.desk.ledger().incidents[incident];
        (incident.over, incident.recovery) = (now, Some((first, now.saturating_sub(gone))));
        Ok(())
    }
}

/// Workers of the whole fleet.
pub const FLEET: usize = 2 * WORKERS;
