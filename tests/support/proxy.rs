//! A TCP proxy in front of the broker, to cut connections as a network does: all at once, with
//! nothing said to either side; and to stall them: nothing gets through for a while, and then all of
//! it does.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Bytes that one direction of a stalled connection holds, beside what the sockets do.
const HELD: usize = 64 * 1024;

/// Runs until dropped.
pub struct Proxy {
    pub address: SocketAddr,
    /// Counts the cuts. Written by [`Proxy::cut`], watched by every connection.
    cuts: watch::Sender<u64>,
    /// Whether nothing gets through. Written by [`Proxy::stall`] and [`Proxy::resume`], watched by
    /// every connection.
    stalled: watch::Sender<bool>,
    open: Arc<AtomicUsize>,
}

impl Proxy {
    /// Listens on a port of its own, in front of `target`.
    pub async fn before(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (cuts, watched) = watch::channel(0);
        let (stalled, stall) = watch::channel(false);
        let open = Arc::new(AtomicUsize::new(0));
        let counted = open.clone();
        tokio::spawn(async move {
            let mut gone = watched.clone();
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    _ = async { while gone.changed().await.is_ok() {} } => return,
                };
                let Ok((mut client, _)) = accepted else { return };
                let (mut cut, stall, counted) = (watched.clone(), stall.clone(), counted.clone());
                cut.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(target).await else { return };
                    counted.fetch_add(1, Ordering::SeqCst);
                    tokio::select! {
                        _ = carry(&mut client, &mut server, stall) => {}
                        _ = cut.changed() => {}
                    }
                    counted.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, cuts, stalled, open }
    }

    /// The address for a broker's client.
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@{}/%2f", self.address)
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Lets nothing through, in either direction, on connections open and to come: bytes wait.
    pub fn stall(&self) {
        self.stalled.send_replace(true);
    }

    /// Lets through what has waited, and all that follows.
    pub fn resume(&self) {
        self.stalled.send_replace(false);
    }

    /// How many connections are open.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

/// Both directions of one connection, to the end of both or the failure of one.
async fn carry(
    client: &mut TcpStream,
    server: &mut TcpStream,
    stalled: watch::Receiver<bool>,
) -> io::Result<()> {
    let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
    let there = pump(from_client, to_server, stalled.clone());
    let back = pump(from_server, to_client, stalled);
    tokio::try_join!(there, back).map(|_| ())
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut stalled: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut bytes = vec![0; HELD];
    loop {
        let count = from.read(&mut bytes).await?;
        if stalled.wait_for(|stalled| !stalled).await.is_err() {
            return Ok(());
        }
        if count == 0 {
            return to.shutdown().await;
        }
        to.write_all(&bytes[..count]).await?;
    }
}
