//! `sconce top`: a live view of all launchers that answer over the control exchange. One task polls the launchers and
//! sends orders (`client/fleet`); another task draws and handles keys. Owns the terminal, and restores it at the end.

mod columns;
mod detail;
mod figures;
mod list;
mod screen;
#[cfg(test)]
mod tests;
mod view;

use std::io::IsTerminal;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use ratatui::crossterm::event::Event;
use ratatui::{DefaultTerminal, crossterm};
use tokio::sync::mpsc;

use super::load;
use crate::cli::Top;
use crate::client::fleet::{Control, Order, PoolQueues, Update, Watch};
use crate::commands::ctl::with_exit;
use crate::commands::exits::ExitsWith as _;
use crate::config::redact_url;
use crate::shutdown::Exit;
use screen::{Action, Screen};
use view::draw;

/// How often the screen is redrawn if nothing happens, to update the age of stale data.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);
/// Data are stale if they are older than two polling intervals plus this margin.
const STALE_MARGIN: Duration = Duration::from_secs(3);

pub(super) fn run(arguments: &Top) -> anyhow::Result<Exit> {
    let settings = load(&arguments.settings, &[])?.settings;
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(anyhow!("`sconce top` needs a terminal; `sconce ctl stats --json` does not")
            .exits_with(Exit::Usage));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let poll_interval = arguments.every;
    let broker = settings.broker.url.first().map(|url| redact_url(url.expose())).unwrap_or_default();
    let pools = settings.pools.iter().map(PoolQueues::of).collect();
    let screen = Screen::new(broker, pools, poll_interval * 2 + STALE_MARGIN);
    // The polling task writes `updates` and reads `orders`; the drawing task does the reverse. If `updates` is full,
    // the polling task waits. If `orders` is full, the order is refused.
    let (updates_sender, updates) = mpsc::channel(8);
    let (orders, orders_receiver) = mpsc::channel(8);
    // Connects before taking over the screen, so that a failure is printed as an error.
    let control = runtime.block_on(Control::open(&settings)).map_err(with_exit)?;
    runtime.spawn(Watch::new(control, settings).run(poll_interval, updates_sender, orders_receiver));
    let terminal = ratatui::try_init().context("the terminal cannot be used")?;
    let result = runtime.block_on(show(terminal, screen, updates, orders));
    ratatui::restore();
    runtime.shutdown_background();
    result.map(|()| Exit::Done)
}

/// Draws new data and handles keys, until the user quits.
async fn show(
    mut terminal: DefaultTerminal,
    mut screen: Screen,
    mut updates: mpsc::Receiver<Update>,
    orders: mpsc::Sender<Order>,
) -> anyhow::Result<()> {
    let (mut events, mut offset) = (read_events(), 0);
    let mut ticks = tokio::time::interval(REDRAW_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        terminal.draw(|frame| draw(frame, &screen, &mut offset, Instant::now()))?;
        tokio::select! {
            received = updates.recv() => {
                screen.update(received.context("the task that polls the launchers has ended")?, Instant::now());
            }
            event = events.recv() => {
                let Some(event) = event else { return Ok(()) };
                let is_full = match screen.press(&event, Instant::now()) {
                    Some(Action::Quit) => return Ok(()),
                    Some(Action::Order(order)) => orders.try_send(order).is_err(),
                    None => false,
                };
                if is_full {
                    screen.show_notice("not sent: earlier orders are still under way".to_owned(), Instant::now());
                }
            }
            _ = ticks.tick() => {}
        }
    }
}

/// Reads the terminal's events on a separate thread, because reading blocks. The thread ends with the process.
fn read_events() -> mpsc::Receiver<Event> {
    let (sender, events) = mpsc::channel(16);
    thread::spawn(move || {
        while let Ok(event) = crossterm::event::read() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    });
    events
}
