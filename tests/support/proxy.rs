//! A TCP proxy in front of the broker, to do what a network does: cut connections, all at once and
//! with nothing said to either side, or swallow what a client sends.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Runs until dropped.
pub struct Proxy {
    pub address: SocketAddr,
    /// Written by the tests' calls, watched by every connection.
    state: watch::Sender<State>,
    open: Arc<AtomicUsize>,
}

#[derive(Clone, Default)]
struct State {
    cuts: u64,
    /// What these connections send is held; they are numbered from 0 as they are made.
    held: Range<usize>,
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
                    pass(client, server, number, state).await;
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
        self.state.send_modify(|state| state.held = 0..0);
    }

    /// How many connections are open.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

/// Passes bytes both ways until either side ends, or the test cuts.
async fn pass(client: TcpStream, server: TcpStream, number: usize, mut state: watch::Receiver<State>) {
    let cuts = state.borrow().cuts;
    let ((mut client_in, mut client_out), (mut server_in, server_out)) =
        (client.into_split(), server.into_split());
    tokio::select! {
        () = upstream(&mut client_in, server_out, number, state.clone()) => {}
        _ = copy(&mut server_in, &mut client_out) => {}
        _ = state.wait_for(|state| state.cuts > cuts) => {}
    }
}

async fn upstream(
    from: &mut OwnedReadHalf,
    mut to: OwnedWriteHalf,
    number: usize,
    mut state: watch::Receiver<State>,
) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        let free = |state: &State| !state.held.contains(&number);
        if state.wait_for(free).await.is_err() || to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}
