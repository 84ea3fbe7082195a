//! The storm itself: strikes with one fault after another, waits after each until the service has
//! recovered from it, and enters both into the ledger. Owns the fleet, the proxy and the broker; never
//! strikes while it still waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::task::block_in_place;
use tokio::time::sleep;

use super::fleet::{Fleet, PREFETCH, Sign, WORKERS};
use super::ledger::Cause;
use super::plan::{self, Fault, Strike};
use super::producers::{Desk, Outgoing, Press, STUCK, now};
use crate::support::client::Client;
use crate::support::processes::lives;
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
/// Shorter than a new service bears a refused password.
const REFUSED: Duration = Duration::from_secs(5);
/// The service's own user, so that nobody else is refused.
pub const USER: &str = "storm";
pub const PASSWORD: &str = "calm";

/// Stops the queue that is to confirm nothing; a broker that has been restarted has forgotten it.
pub fn suspend(rabbit: &Rabbit) {
    rabbit.eval(&format!("sys:suspend({{'%2F_{STUCK}', node()}})."));
}

/// Lets it confirm again what it has.
pub fn revive(rabbit: &Rabbit) {
    rabbit.eval(&format!("sys:resume({{'%2F_{STUCK}', node()}})."));
}
/// After a fault that cuts the broker off, workers may notice as late as this.
const NOTICED: u64 = 30_000;

/// The service under the storm, and what strikes it.
pub struct Storm {
    pub desk: Arc<Desk>,
    pub fleet: Fleet,
    pub proxy: Proxy,
    pub rabbit: Rabbit,
    pub press: Press,
    /// The dead-letter queue.
    dead: String,
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
    pub fn new(desk: Arc<Desk>, fleet: Fleet, (proxy, rabbit): (Proxy, Rabbit), dead: String) -> Self {
        let (press, poison) = (Press::default(), Vec::new());
        Self { desk, fleet, proxy, rabbit, press, dead, sentinels: 0, poison, cut_off: 0, largest: 0 }
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
            Fault::FreezeAndKill => self.freeze_and_kill(pick).await,
            Fault::RefuseLogin | Fault::RefuseConnections => self.connections(fault).await,
            Fault::DeleteDeadLetters => self.delete_dead_letters().await,
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
                block_in_place(|| self.rabbit.set_memory_watermark(0.000_000_1));
                self.watch(ALARM).await?;
                block_in_place(|| self.rabbit.set_memory_watermark(0.4));
            }
            Fault::RefuseLogin => {
                block_in_place(|| self.rabbit.change_password(USER, "another"));
                self.cut_for(REFUSED).await?;
                block_in_place(|| self.rabbit.change_password(USER, PASSWORD));
            }
            Fault::RefuseConnections => {
                block_in_place(|| self.rabbit.limit_connections(USER, Some(0)));
                self.cut_for(REFUSED).await?;
                block_in_place(|| self.rabbit.limit_connections(USER, None));
            }
            _ => block_in_place(|| {
                self.rabbit.kill();
                self.rabbit.start();
                suspend(&self.rabbit);
            }),
        }
        let gone = now();
        self.cut_off = gone;
        let slots = self.fleet.slots();
        self.recovers(Hit { incident, struck, gone, slots }).await
    }

    /// Cuts all connections, and a worker's life with them, so that a new process too is refused.
    async fn cut_for(&mut self, time: Duration) -> Result<(), String> {
        if let Some((_, _, pid)) = self.fleet.workers().first() {
            signal(*pid, Signal::SIGKILL);
        }
        self.proxy.cut();
        self.watch(time).await
    }

    /// A launcher is killed and one of its workers stopped right behind: that one must not stay.
    async fn freeze_and_kill(&mut self, pick: u64) -> Result<(), String> {
        let index = pick as usize % self.fleet.launchers.len();
        let in_flight = PREFETCH * self.fleet.launchers[index].slots().len();
        let (incident, struck) = self.begins(Fault::FreezeAndKill, in_flight);
        let frozen = self.fleet.launchers[index].pids.values().next().copied();
        self.fleet.launchers[index].sconce.signal(Signal::SIGKILL);
        if let Some(pid) = frozen {
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGSTOP);
        }
        let code = self.fleet.launchers[index].sconce.exit_code().await;
        if code != -9 {
            return Err(format!("the launcher ended with {code}"));
        }
        self.fleet.replace(index, "FreezeAndKill");
        self.until("the frozen worker is gone", |_| frozen.is_none_or(|pid| !lives(pid))).await?;
        let (gone, slots) = (now(), self.fleet.launchers[index].slots());
        self.recovers(Hit { incident, struck, gone, slots }).await
    }

    /// Recovered when it is there again, which needs a dead letter.
    async fn delete_dead_letters(&mut self) -> Result<(), String> {
        let (incident, struck) = self.begins(Fault::DeleteDeadLetters, 0);
        block_in_place(|| self.rabbit.ctl(&["delete_queue", &self.dead]));
        self.desk.ledger().letters_deleted(now());
        let client = Client::connect(&self.rabbit.url()).await;
        let begun = Instant::now();
        while client.look(&self.dead).await.is_none() {
            self.watch(Duration::from_millis(100)).await?;
            if begun.elapsed() > BOUND {
                return Err("the dead-letter queue is not made again".to_owned());
            }
        }
        let took = now() - struck;
        let incident = &mut self.desk.ledger().incidents[incident];
        (incident.over, incident.recovery) = (now(), Some((took, took)));
        Ok(())
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
