//! `sconce top`: a live view of all launchers that answer over the control exchange. One task asks and sends
//! orders, the other draws and reads keys. Owns the terminal, and restores it at the end.

mod rates;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::widgets::TableState;
use ratatui::{DefaultTerminal, crossterm};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::ctl::{gather, open};
use super::load;
use crate::broker::amqp::ControlClient;
use crate::cli::Top;
use crate::config::{Settings, redact_url};
use crate::protocol::admin::{Request, SlotReport, State, Target};
use crate::shutdown::Exit;
use rates::{Look, Row, rows};
use view::{Words, draw};

/// How long to wait for answers while the number of launchers is unknown.
const PATIENCE: Duration = Duration::from_millis(800);
/// Every this many rounds, it waits for new launchers too.
const NEWCOMERS: u64 = 5;
/// Wait before a lost broker is tried again.
const AGAIN: Duration = Duration::from_secs(2);

/// Shown at the foot until a launcher answers.
const NOBODY: &str = "no launcher answers yet";

/// A message of the asking task.
enum News {
    Look(Box<Look>),
    /// The result of an order.
    Done(String),
    /// Why no data could be read.
    Trouble(String),
}

pub(super) fn run(arguments: &Top) -> anyhow::Result<Exit> {
    let settings = load(&arguments.settings, &[])?.settings;
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(anyhow!("this needs a terminal; `sconce ctl stats --json` does not").context(Exit::Usage));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let broker = settings.broker.url.first().map(|url| redact_url(url.expose())).unwrap_or_default();
    let (news_in, news) = mpsc::channel(8);
    let (orders, ordered) = mpsc::channel(8);
    let every = arguments.every;
    // Connects before taking over the screen, so that a failure is printed as an error.
    let first = runtime.block_on(open(&settings))?;
    runtime.spawn(async move { watch(first, settings, every, (news_in, ordered)).await });
    let terminal = ratatui::try_init().context("the terminal cannot be used")?;
    let shown = runtime.block_on(show(terminal, news, orders, &broker));
    ratatui::restore();
    runtime.shutdown_background();
    shown.map(|()| Exit::Done)
}

/// Asks repeatedly, and sends orders in between.
async fn watch(
    first: ControlClient,
    settings: Settings,
    every: Duration,
    (news, mut ordered): (mpsc::Sender<News>, mpsc::Receiver<(Target, Request)>),
) {
    let mut lines = Some(first);
    let (mut looks, mut known) = (0_u64, 0);
    loop {
        let began = Instant::now();
        let expected = Some(known).filter(|known| *known > 0 && !looks.is_multiple_of(NEWCOMERS));
        let looked = look(&mut lines, &settings, expected).await;
        looks += 1;
        let told = match looked {
            Ok(look) => {
                known = look.answers.len();
                News::Look(Box::new(look))
            }
            Err(error) => {
                (lines, known) = (None, 0);
                News::Trouble(format!("{error:#}"))
            }
        };
        let pause = if matches!(told, News::Trouble(_)) { AGAIN } else { every };
        if news.send(told).await.is_err() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep_until(began + pause) => {}
            Some((target, request)) = ordered.recv() => {
                let done = order(&mut lines, &target, &request).await.unwrap_or_else(|error| format!("{error:#}"));
                let _ = news.send(News::Done(done)).await;
            }
        }
    }
}

async fn look(
    lines: &mut Option<ControlClient>,
    settings: &Settings,
    expected: Option<usize>,
) -> anyhow::Result<Look> {
    let lines = match lines {
        Some(lines) => lines,
        None => lines.insert(open(settings).await?),
    };
    let until = Instant::now() + PATIENCE;
    let answers = gather(lines, (&Target::All, &Request::Stats), until, expected).await?;
    let names: BTreeSet<_> = answers.iter().flat_map(|it| &it.slots).map(|slot| slot.queue.clone()).collect();
    let mut queues = BTreeMap::new();
    for name in names {
        let depth = lines.depth(&name).await?;
        queues.insert(name, depth);
    }
    Ok(Look { answers, queues })
}

async fn order(
    lines: &mut Option<ControlClient>,
    target: &Target,
    request: &Request,
) -> anyhow::Result<String> {
    let lines = lines.as_mut().context("there is no broker now")?;
    let answers = gather(lines, (target, request), Instant::now() + 2 * PATIENCE, Some(1)).await?;
    let key = target.routing_key();
    let answer = answers.into_iter().next().with_context(|| format!("nobody has answered for {key:?}"))?;
    let slot = answer.slots.into_iter().next();
    let said = answer.error.or_else(|| slot.and_then(|slot| slot.refused.or(slot.done)));
    Ok(format!("{key}: {}", said.unwrap_or_default()))
}

/// The state of the screen.
#[derive(Default)]
struct Screen {
    before: Look,
    now: Look,
    selected: TableState,
    /// An order that waits for its confirmation.
    asked: Option<(SlotReport, Request)>,
    foot: Option<String>,
    trouble: Option<String>,
}

/// Draws new data and handles keys, until the user quits.
async fn show(
    mut terminal: DefaultTerminal,
    mut news: mpsc::Receiver<News>,
    orders: mpsc::Sender<(Target, Request)>,
    broker: &str,
) -> anyhow::Result<()> {
    let mut keys = keys();
    let mut screen = Screen::default();
    loop {
        let rows = rows(&screen.before, &screen.now);
        let last = rows.len().checked_sub(1);
        screen
            .selected
            .select(screen.selected.selected().map_or(last.map(|_| 0), |row| last.map(|last| row.min(last))));
        let question = screen.question();
        let nobody = screen.now.answers.is_empty().then_some(NOBODY);
        let foot = question.as_deref().or(screen.foot.as_deref()).or(nobody);
        let words = Words { broker, foot, trouble: screen.trouble.as_deref() };
        terminal.draw(|frame| draw(frame, &screen.now, &rows, &mut screen.selected, &words))?;
        tokio::select! {
            told = news.recv() => screen.learn(told.context("nobody looks any more")?),
            key = keys.recv() => {
                let Some(event) = key else { return Ok(()) };
                let Some(order) = screen.press(&event, &rows) else { continue };
                match order {
                    Press::Leave => return Ok(()),
                    Press::Order(target, request) => drop(orders.try_send((target, request))),
                }
            }
        }
    }
}

/// An action of a key beyond the screen.
enum Press {
    Leave,
    Order(Target, Request),
}

impl Screen {
    fn learn(&mut self, news: News) {
        match news {
            News::Look(look) => {
                self.before = std::mem::replace(&mut self.now, *look);
                self.trouble = None;
                let nobody = self.now.answers.is_empty();
                self.foot =
                    if nobody { Some("no launcher answers yet".to_owned()) } else { self.foot.take() };
            }
            News::Done(words) => self.foot = Some(words),
            News::Trouble(words) => self.trouble = Some(words),
        }
    }

    fn question(&self) -> Option<String> {
        let (slot, request) = self.asked.as_ref()?;
        let what = match request {
            Request::Pause => "pause",
            Request::Resume => "resume",
            Request::Drain => "drain",
            _ => "restart",
        };
        Some(format!("{what} {}? y/n", slot.worker))
    }

    fn press(&mut self, event: &Event, rows: &[Row]) -> Option<Press> {
        let Event::Key(key) = event else { return None };
        if key.kind == KeyEventKind::Release {
            return None;
        }
        if let Some((slot, request)) = self.asked.take() {
            self.foot = None;
            return (key.code == KeyCode::Char('y'))
                .then_some(Press::Order(Target::Slot(slot.worker), request));
        }
        self.foot = None;
        let chosen = || self.selected.selected().and_then(|row| rows.get(row)).map(|row| row.report.clone());
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Some(Press::Leave),
            KeyCode::Char('q') | KeyCode::Esc => return Some(Press::Leave),
            KeyCode::Up | KeyCode::Char('k') => self.selected.select_previous(),
            KeyCode::Down | KeyCode::Char('j') => self.selected.select_next(),
            KeyCode::Char('p') => {
                self.asked = chosen().map(|slot| {
                    let resumes = matches!(slot.state, State::Paused | State::Stopped);
                    (slot, if resumes { Request::Resume } else { Request::Pause })
                });
            }
            KeyCode::Char('d') => self.asked = chosen().map(|slot| (slot, Request::Drain)),
            KeyCode::Char('r') => self.asked = chosen().map(|slot| (slot, Request::Restart)),
            _ => {}
        }
        None
    }
}

/// Reads keys. Reading blocks, so it has a separate thread, which ends with the process.
fn keys() -> mpsc::Receiver<Event> {
    let (pressed, keys) = mpsc::channel(16);
    thread::spawn(move || {
        while let Ok(event) = crossterm::event::read() {
            if pressed.blocking_send(event).is_err() {
                return;
            }
        }
    });
    keys
}
