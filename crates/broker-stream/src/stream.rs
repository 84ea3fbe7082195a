//! Gives lapin the filtered stream. Lapin takes only streams of the type that its runtime names, so it gets a
//! runtime that names [`Filtered`]. TLS is below the filter.

use std::future::{self, Future};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use bytes::{Buf, BytesMut};
use futures_util::Stream;
use futures_util::io::{AsyncRead, AsyncWrite};
use lapin::tcp::OwnedTLSConfig;
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{AsyncTcpStream, Connection, ConnectionProperties, Error};
use parking_lot::Mutex;

use crate::filter::{Inbound, Outbound};
use crate::strings::Strings;

/// Bytes that are filtered at once. The buffers are larger only by the frames that are held.
const CHUNK: usize = 64 << 10;

/// Connects like `Connection::connect_uri_with_config`, but through the filter, and a dropped attempt leaves
/// no thread behind. Lapin connects on a thread of its own, which waits without limit for the broker's first
/// answer and cannot be ended. So lapin gets a socket that is already connected (and encrypted), and a handle
/// remains to shut it down. Must be called on a Tokio runtime.
pub async fn connect(
    uri: AMQPUri,
    tls: OwnedTLSConfig,
    properties: ConnectionProperties,
) -> Result<(Connection, Socket, Arc<Strings>), Error> {
    let runtime = Runtime::new(Tokio::current());
    let host = uri.authority.host.clone();
    let addresses = runtime.to_socket_addrs((host.clone(), uri.authority.port));
    let stream = AsyncTcpStream::connect(&runtime, addresses).await?;
    let AsyncTcpStream::Plain(socket) = &stream else {
        return Err(io::Error::from(io::ErrorKind::Unsupported).into());
    };
    let socket = Socket(socket.get_ref().as_fd().try_clone_to_owned()?.into());
    let stream = match uri.scheme {
        AMQPScheme::AMQP => stream,
        AMQPScheme::AMQPS => stream.into_tls(&host, tls.as_ref()).await?,
    };
    let strings = Arc::new(Strings::new());
    let stream = AsyncTcpStream::Plain(Filtered::new(stream, &strings));
    // Lapin may take the stream only once. Taking it again would be a reconnection, which is the caller's.
    let once = Mutex::new(Some(stream));
    let runtime = Runtime::new(RuntimeParts::new(Tokio::current(), FilteredReactor(Tokio::current())));
    let connection = Connection::connector(
        uri,
        runtime,
        async move |_, _| {
            let stream = once.lock().take();
            stream.ok_or_else(|| Error::from(io::Error::from(io::ErrorKind::NotConnected)))
        },
        properties,
    )
    .await?;
    Ok((connection, socket, strings))
}

/// A handle to a connection's socket. Dropping it shuts the socket down: lapin's thread then reads the end of
/// the stream and exits.
#[derive(Debug)]
pub struct Socket(TcpStream);

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Tokio's reactor, with another type of streams.
#[derive(Clone, Debug)]
struct FilteredReactor(Tokio);

impl Reactor for FilteredReactor {
    type TcpStream = Filtered<AsyncTcpStream<<Tokio as Reactor>::TcpStream>>;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: Read + Write + AsFd + AsRawFd + Send + 'static>(
        &self,
        socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        self.0.register(socket)
    }

    fn sleep(&self, duration: Duration) -> Self::Sleep {
        self.0.sleep(duration)
    }

    fn interval(&self, duration: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(duration)
    }

    /// Fails: lapin is given its stream, and does not connect.
    fn tcp_connect_addr(
        &self,
        _address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        future::ready(Err(io::ErrorKind::Unsupported.into()))
    }
}

/// A stream to the broker, filtered. What is written is sent by a flush, or when the next bytes are written.
struct Filtered<S> {
    stream: S,
    inbound: Inbound,
    outbound: Outbound,
    /// Filtered bytes that lapin has not read yet.
    received: BytesMut,
    /// Filtered bytes that the stream below has not taken yet.
    sending: BytesMut,
}

impl<S: AsyncWrite + Unpin> Filtered<S> {
    fn new(stream: S, strings: &Arc<Strings>) -> Self {
        Self {
            stream,
            inbound: Inbound::new(strings.clone()),
            outbound: Outbound::new(strings.clone()),
            received: BytesMut::new(),
            sending: BytesMut::new(),
        }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.sending.is_empty() {
            match ready!(Pin::new(&mut self.stream).poll_write(context, &self.sending))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.sending.advance(count),
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Filtered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let length = buffer.len().min(CHUNK);
        while this.received.is_empty() {
            let count = ready!(Pin::new(&mut this.stream).poll_read(context, &mut buffer[..length]))?;
            if count == 0 {
                return Poll::Ready(Ok(0));
            }
            this.inbound.push(&buffer[..count], &mut this.received);
        }
        let count = this.received.len().min(buffer.len());
        this.received.copy_to_slice(&mut buffer[..count]);
        Poll::Ready(Ok(count))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Filtered<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        ready!(this.poll_send(context))?;
        let count = bytes.len().min(CHUNK);
        this.outbound.push(&bytes[..count], &mut this.sending);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(context))?;
        Pin::new(&mut self.stream).poll_close(context)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::io::{AsyncReadExt, AsyncWriteExt};
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    /// A broker that gives and takes a few bytes at a time, and is not ready at every second call or so.
    struct Fitful {
        random: StdRng,
        to_read: Vec<u8>,
        written: Vec<u8>,
        flushed: usize,
        closed: bool,
    }

    impl Fitful {
        fn new(seed: u64, to_read: &[u8]) -> Self {
            let random = StdRng::seed_from_u64(seed);
            Self { random, to_read: to_read.to_vec(), written: Vec::new(), flushed: 0, closed: false }
        }

        /// How many of `most` bytes are ready.
        fn ready(&mut self, context: &Context<'_>, most: usize) -> Poll<usize> {
            if self.random.random() {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            let limit = if self.random.random() { 10 } else { usize::MAX };
            Poll::Ready(self.random.random_range(1..=most.clamp(1, limit)).min(most))
        }
    }

    impl AsyncRead for Fitful {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut [u8],
        ) -> Poll<io::Result<usize>> {
            let most = buffer.len().min(self.to_read.len());
            let count = ready!(self.ready(context, most));
            buffer[..count].copy_from_slice(&self.to_read[..count]);
            self.to_read.drain(..count);
            Poll::Ready(Ok(count))
        }
    }

    impl AsyncWrite for Fitful {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            let count = ready!(self.ready(context, bytes.len()));
            self.written.extend_from_slice(&bytes[..count]);
            Poll::Ready(Ok(count))
        }

        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            let _ = ready!(self.ready(context, 1));
            self.flushed = self.written.len();
            Poll::Ready(Ok(()))
        }

        fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            let _ = ready!(self.ready(context, 1));
            self.closed = true;
            Poll::Ready(Ok(()))
        }
    }

    /// A publish command to a routing key, and the body of a message.
    fn message(key: &[u8], body: &[u8]) -> Vec<u8> {
        let frame = |kind: u8, payload: &[u8]| {
            [&[kind, 0, 1][..], &(payload.len() as u32).to_be_bytes(), payload, &[0xce]].concat()
        };
        let publish = [&[0, 60, 0, 40, 0, 0, 0, key.len() as u8][..], key, &[0]].concat();
        [frame(1, &publish), frame(3, body)].concat()
    }

    #[tokio::test]
    async fn what_is_written_in_any_pieces_is_sent_in_order_by_the_flush() {
        let body: Vec<u8> = (0..200_000).map(|n: u32| n as u8).collect();
        for seed in 0..50 {
            let strings = Arc::new(Strings::new());
            let token = strings.token(b"\xff\xfe");
            let mut stream = Filtered::new(Fitful::new(seed, b""), &strings);
            let [bytes, wanted] =
                [token.as_bytes(), b"\xff\xfe"].map(|key| [message(key, &body), message(key, b"")].concat());
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let most = stream.stream.random.random_range(1..=rest.len());
                let count = stream.write(&rest[..most]).await.expect("a write");
                assert!(count > 0 && stream.sending.len() <= 2 * CHUNK);
                rest = &rest[count..];
                if stream.stream.random.random() {
                    stream.flush().await.expect("a flush");
                    assert_eq!(stream.stream.flushed, stream.stream.written.len());
                    assert!(stream.sending.is_empty());
                }
            }
            stream.close().await.expect("a close");
            assert!(stream.stream.closed);
            assert!(stream.stream.written == wanted, "seed {seed}");
        }
    }

    #[tokio::test]
    async fn what_is_received_in_any_pieces_is_read_in_order_up_to_the_end() {
        let body: Vec<u8> = (0..200_000).map(|n: u32| n as u8).collect();
        let [bytes, wanted] =
            [b"\xff\xfe", b"??"].map(|key| [message(key, &body), message(key, b"")].concat());
        for seed in 0..50 {
            let mut stream = Filtered::new(Fitful::new(seed, &bytes), &Arc::new(Strings::new()));
            let mut read = Vec::new();
            let mut buffer = vec![0; 100_000];
            loop {
                let most = stream.stream.random.random_range(1..=buffer.len());
                match stream.read(&mut buffer[..most]).await.expect("a read") {
                    0 => break,
                    count => read.extend_from_slice(&buffer[..count]),
                }
            }
            assert!(read == wanted, "seed {seed}");
        }
    }

    #[tokio::test]
    async fn a_stream_that_takes_no_more_bytes_is_an_error() {
        let mut room = [0; 4];
        let stream = futures_util::io::Cursor::new(&mut room[..]);
        let mut stream = Filtered::new(stream, &Arc::new(Strings::new()));
        assert!(stream.write(&message(b"", b"")).await.is_ok());
        let error = stream.flush().await.expect_err("no room");
        assert_eq!(error.kind(), io::ErrorKind::WriteZero);
    }
}
