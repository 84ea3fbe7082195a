//! A TCP proxy in front of the broker, to do what a network does: cut connections, all at once and
//! with nothing said to either side; hold what some clients send; or stall them all, so that nothing
//! gets through for a while, and then all of it does.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Bytes that one direction of a stalled connection holds, beside what the sockets do.
const HELD: usize = 64 * 1024;

/// Runs until dropped.
pub struct Proxy {
    pub address: SocketAddr,
    /// Written by the tests' calls, watched by every connection.
    state: watch::Sender<State>,
    open: Arc<AtomicUsize>,
}

#[derive(Clone)]
struct State {
    cuts: u64,
    /// What these connections send is held; they are numbered from 0 as they are made.
    held: Range<usize>,
    /// Nothing gets through, either way.
    stalled: bool,
    /// What a client may send, in bytes a second and connection.
    rate: usize,
}

impl Default for State {
    fn default() -> Self {
        Self { cuts: 0, held: 0..0, stalled: false, rate: usize::MAX }
    }
}

impl Proxy {
    /// Listens on a port of its own, in front of `target`.
    pub async fn before(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (state, watched) = watch::channel(State::default());
        let open = Arc::new(AtomicUsize::new(0));
        let counted = open.clone();
        tokio::spawn(async move {
            let mut gone = watched.clone();
            for number in 0.. {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    _ = async { while gone.changed().await.is_ok() {} } => return,
                };
                let Ok((client, _)) = accepted else { return };
                let (state, counted) = (watched.clone(), counted.clone());
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(target).await else { return };
                    counted.fetch_add(1, Ordering::SeqCst);
                    carry(client, server, number, state).await;
                    counted.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, state, open }
    }

    /// The address for a broker's client.
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@{}/%2f", self.address)
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        self.state.send_modify(|state| state.cuts += 1);
    }

    /// From now on nothing that a client sends on these connections reaches the broker: 0 is the
    /// first that was made. What the broker sends passes.
    pub fn hold(&self, connections: Range<usize>) {
        self.state.send_modify(|state| state.held = connections);
    }

    /// What was held goes on its way.
    pub fn release(&self) {
        self.hold(0..0);
    }

    /// Lets nothing through, in either direction, on connections open and to come: bytes wait.
    pub fn stall(&self) {
        self.state.send_modify(|state| state.stalled = true);
    }

    /// Lets through what has waited, and all that follows.
    pub fn resume(&self) {
        self.state.send_modify(|state| state.stalled = false);
    }

    /// From now on so many bytes a second of each client get through.
    pub fn slow_down(&self, rate: usize) {
        self.state.send_modify(|state| state.rate = rate);
    }

    /// How many connections are open.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

/// Both directions of one connection, to the end of both, the failure of one, or a cut.
async fn carry(
    mut client: TcpStream,
    mut server: TcpStream,
    number: usize,
    mut state: watch::Receiver<State>,
) {
    let cuts = state.borrow().cuts;
    let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
    let held = move |state: &State| state.stalled || state.held.contains(&number);
    let there = pump(from_client, to_server, state.clone(), (held, |state| state.rate));
    let back = pump(from_server, to_client, state.clone(), (|state| state.stalled, |_| usize::MAX));
    tokio::select! {
        _ = async { tokio::try_join!(there, back) } => {}
        _ = state.wait_for(|state| state.cuts > cuts) => {}
    }
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut state: watch::Receiver<State>,
    (waits, rate): (impl Fn(&State) -> bool, impl Fn(&State) -> usize),
) -> io::Result<()> {
    let mut bytes = vec![0; HELD];
    loop {
        let count = from.read(&mut bytes).await?;
        if state.wait_for(|state| !waits(state)).await.is_err() {
            return Ok(());
        }
        if count == 0 {
            return to.shutdown().await;
        }
        let rate = rate(&state.borrow());
        if rate < usize::MAX {
            tokio::time::sleep(Duration::from_secs_f64(count as f64 / rate as f64)).await;
        }
        to.write_all(&bytes[..count]).await?;
    }
}
