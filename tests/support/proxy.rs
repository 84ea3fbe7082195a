//! A TCP proxy in front of the broker, to cut connections as a network does: all at once, with
//! nothing said to either side.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Runs until dropped.
pub struct Proxy {
    pub address: SocketAddr,
    /// Counts the cuts. Written by [`Proxy::cut`], watched by every connection.
    cuts: watch::Sender<u64>,
    open: Arc<AtomicUsize>,
}

impl Proxy {
    /// Listens on a port of its own, in front of `target`.
    pub async fn before(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (cuts, watched) = watch::channel(0);
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
                let (mut cut, counted) = (watched.clone(), counted.clone());
                cut.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(target).await else { return };
                    counted.fetch_add(1, Ordering::SeqCst);
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                        _ = cut.changed() => {}
                    }
                    counted.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, cuts, open }
    }

    /// The address for a broker's client.
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@{}/%2f", self.address)
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// How many connections are open.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}
