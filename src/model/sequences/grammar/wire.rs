//! The messages between a worker and its grammar processes: frames over Unix sockets, and sockets over sockets.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::cmsg_space;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// The payload is a request or its result.
    Data = 0,
    /// The grammar cannot be used. The payload says why.
    Refused = 1,
    /// The grammar needs more work or memory than its budget.
    TooCostly = 2,
    /// The text so far has no continuation.
    DeadEnd = 3,
}

/// The bytes before a payload: the frame's kind, and the payload's length as a little-endian u32.
const HEADER: usize = 5;
/// The largest payload, in bytes. A vocabulary of a million tokens has about 10 MiB.
const MAX_PAYLOAD: usize = 64 << 20;

/// The header of a frame.
pub(super) fn header(kind: FrameKind, length: u32) -> [u8; HEADER] {
    let [a, b, c, d] = length.to_le_bytes();
    [kind as u8, a, b, c, d]
}

/// Writes a frame in one call, so that the reader wakes only once.
pub(super) fn write_frame(mut stream: &UnixStream, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).map_err(io::Error::other)?;
    stream.write_all(&[&header(kind, length)[..], payload].concat())
}

/// Reads a frame's payload into `payload`.
pub(super) fn read_frame(mut stream: &UnixStream, payload: &mut Vec<u8>) -> io::Result<FrameKind> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let [kind, length @ ..] = header;
    let kind = match kind {
        0 => FrameKind::Data,
        1 => FrameKind::Refused,
        2 => FrameKind::TooCostly,
        3 => FrameKind::DeadEnd,
        other => return Err(io::Error::other(format!("{other} is no kind of a frame"))),
    };
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_PAYLOAD {
        return Err(io::Error::other(format!("a frame of {length} bytes; at most {MAX_PAYLOAD} are read")));
    }
    payload.resize(length, 0);
    stream.read_exact(payload)?;
    Ok(kind)
}

/// Sends a socket to the process at the other end of `channel`.
pub(super) fn send_socket(channel: &UnixStream, socket: &UnixStream) -> io::Result<()> {
    let files = [socket.as_raw_fd()];
    let (data, rights) = ([IoSlice::new(&[0])], [ControlMessage::ScmRights(&files)]);
    sendmsg::<()>(channel.as_raw_fd(), &data, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Waits for a socket. None at the end of the stream.
pub(super) fn receive_socket(channel: &UnixStream) -> io::Result<Option<UnixStream>> {
    let (mut byte, mut space) = ([0], cmsg_space!(i32));
    let mut data = [IoSliceMut::new(&mut byte)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(channel.as_raw_fd(), &mut data, Some(&mut space), flags)?;
    if message.bytes == 0 {
        return Ok(None);
    }
    let files = message.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::ScmRights(files) => files.first().copied(),
        _ => None,
    });
    let file = files.ok_or_else(|| io::Error::other("a byte arrived without a socket"))?;
    #[expect(unsafe_code, reason = "nix returns received descriptors as numbers")]
    // SAFETY: the kernel made this descriptor for this message, and nothing else owns it.
    Ok(Some(UnixStream::from(unsafe { OwnedFd::from_raw_fd(file) })))
}
