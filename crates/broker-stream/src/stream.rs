//! Gives lapin the filtered stream. Lapin takes only streams of the type that its runtime names, so it gets a runtime
//! that names [`Filtered`]. TLS is below the filter.

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

/// Connects like `Connection::connect_uri_with_config`, but through the filter, and a dropped attempt leaves no thread
/// behind. Lapin connects on a thread of its own, which waits without limit for the broker's first answer and cannot
/// be ended. So lapin gets a socket that is already connected (and encrypted), and a handle remains to shut it down.
/// Must be called on a Tokio runtime.
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
    // Lapin may take the stream only once. Taking it again would be a reconnection, which only the caller does.
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
    received: Buffer,
    /// Filtered bytes that the stream below has not taken yet.
    sending: Buffer,
}

/// Bytes, of which those before `start` are done with.
#[derive(Default)]
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn remaining(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn advance(&mut self, count: usize) {
        self.start += count;
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        }
    }
}

impl<S: AsyncWrite + Unpin> Filtered<S> {
    fn new(stream: S, strings: &Arc<Strings>) -> Self {
        Self {
            stream,
            inbound: Inbound::new(strings.clone()),
            outbound: Outbound::new(strings.clone()),
            received: Buffer::default(),
            sending: Buffer::default(),
        }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.sending.remaining().is_empty() {
            match ready!(Pin::new(&mut self.stream).poll_write(context, self.sending.remaining()))? {
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
        while this.received.remaining().is_empty() {
            let count = ready!(Pin::new(&mut this.stream).poll_read(context, &mut buffer[..length]))?;
            if count == 0 {
                return Poll::Ready(Ok(0));
            }
            this.inbound.push(&buffer[..count], &mut this.received.bytes);
        }
        let remaining = this.received.remaining();
        let count = remaining.len().min(buffer.len());
        buffer[..count].copy_from_slice(&remaining[..count]);
        this.received.advance(count);
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
        this.outbound.push(&bytes[..count], &mut this.sending.bytes);
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
