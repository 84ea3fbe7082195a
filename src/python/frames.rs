//! Frames on a socket: the length of a header, the header as JSON, and raw buffers. Decides the bounds of a frame, and how long
//! the next one is waited for.
//! Owns no state.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// The longest header, in bytes.
const MAX_HEADER: usize = 16 << 20;
/// The most buffers of a frame.
const MAX_BUFFERS: usize = 1 << 16;
/// The most bytes of all buffers of a frame.
const MAX_BYTES: usize = 1 << 30;
/// Buffers of at most this many bytes together are copied behind the header, so that one system call writes the frame.
const MAX_COPIED: usize = 64 << 10;

/// A frame that was read.
pub(super) struct Frame {
    header: Vec<u8>,
    pub(super) buffers: Vec<Bytes>,
}

/// The field of a header that gives the lengths of the buffers.
#[derive(Deserialize)]
struct Lengths {
    #[serde(default)]
    buffers: Vec<usize>,
}

/// A header with the lengths of its buffers.
#[derive(Serialize)]
struct WithLengths<'a, H> {
    #[serde(flatten)]
    header: &'a H,
    #[serde(skip_serializing_if = "<[usize]>::is_empty")]
    buffers: &'a [usize],
}

impl Frame {
    /// The header.
    ///
    /// # Errors
    /// `InvalidData` for a header that is not an `H`.
    pub(super) fn header<'a, H: Deserialize<'a>>(&'a self) -> io::Result<H> {
        serde_json::from_slice(&self.header).map_err(|error| {
            let text = String::from_utf8_lossy(&self.header);
            let shown = crate::protocol::shorten(&text, 200);
            invalid(format!("the header of a frame is not understood: {error}: {shown}"))
        })
    }
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// Writes a frame. Blocks until the system has taken it.
///
/// # Errors
/// The socket is closed, its write timeout is over, or the frame is larger than a frame may be.
pub(super) fn write_frame(
    mut socket: &UnixStream,
    header: &impl Serialize,
    buffers: &[&[u8]],
) -> io::Result<()> {
    let lengths: Vec<usize> = buffers.iter().map(|buffer| buffer.len()).collect();
    let bytes: usize = lengths.iter().sum();
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, &WithLengths { header, buffers: &lengths })?;
    let length = frame.len() - 4;
    if length > MAX_HEADER || bytes > MAX_BYTES || lengths.len() > MAX_BUFFERS {
        let count = lengths.len();
        return Err(invalid(format!(
            "a frame with a header of {length} bytes and {count} buffers of {bytes} bytes"
        )));
    }
    frame.splice(..4, (length as u32).to_le_bytes());
    if bytes <= MAX_COPIED {
        buffers.iter().for_each(|buffer| frame.extend_from_slice(buffer));
        return socket.write_all(&frame);
    }
    socket.write_all(&frame)?;
    buffers.iter().try_for_each(|buffer| socket.write_all(buffer))
}

/// Reads the next frame. `time`: how long it may take; none: for ever.
///
/// # Errors
/// `TimedOut` after that time; `UnexpectedEof` if the socket was closed; `InvalidData` for a frame beyond its bounds.
pub(super) fn read_frame(socket: &UnixStream, time: Option<Duration>) -> io::Result<Frame> {
    let deadline = time.map(|time| Instant::now() + time);
    let mut length = [0; 4];
    read_exact(socket, &mut length, deadline)?;
    let length = u32::from_le_bytes(length) as usize;
    if !(1..=MAX_HEADER).contains(&length) {
        return Err(invalid(format!("a header of {length} bytes")));
    }
    let mut header = vec![0; length];
    read_exact(socket, &mut header, deadline)?;
    let mut frame = Frame { header, buffers: Vec::new() };
    let Lengths { buffers: lengths } = frame.header()?;
    let bytes = lengths.iter().try_fold(0_usize, |sum, length| sum.checked_add(*length));
    let bytes = bytes.filter(|bytes| *bytes <= MAX_BYTES && lengths.len() <= MAX_BUFFERS);
    let bytes = bytes.ok_or_else(|| invalid(format!("{} buffers that are too large", lengths.len())))?;
    let mut all = vec![0; bytes];
    read_exact(socket, &mut all, deadline)?;
    let mut all = Bytes::from(all);
    frame.buffers = lengths.iter().map(|length| all.split_to(*length)).collect();
    Ok(frame)
}

fn read_exact(mut socket: &UnixStream, mut into: &mut [u8], deadline: Option<Instant>) -> io::Result<()> {
    while !into.is_empty() {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(left)?;
        match socket.read(into) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = into.get_mut(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// What is read after these bytes were written and the socket was closed.
    fn read(bytes: &[u8]) -> io::Result<Frame> {
        let (one, other) = UnixStream::pair()?;
        (&one).write_all(bytes)?;
        drop(one);
        read_frame(&other, Some(Duration::from_secs(5)))
    }

    fn framed(header: &str, rest: &[u8]) -> Vec<u8> {
        [&(header.len() as u32).to_le_bytes(), header.as_bytes(), rest].concat()
    }

    #[test]
    fn a_frame_is_read_as_it_was_written() {
        let large = vec![7; 2 * MAX_COPIED];
        for buffers in [vec![], vec![&b""[..]], vec![b"ab", b"c"], vec![&large, b"x"]] {
            let (one, other) = UnixStream::pair().unwrap();
            let expected: Vec<Bytes> = buffers.iter().map(|buffer| Bytes::copy_from_slice(buffer)).collect();
            std::thread::scope(|scope| {
                scope.spawn(|| write_frame(&one, &json!({"type": "x", "task": u64::MAX}), &buffers).unwrap());
                let frame = read_frame(&other, None).unwrap();
                let header: Value = frame.header().unwrap();
                assert_eq!((&header["type"], &header["task"]), (&json!("x"), &json!(u64::MAX)));
                assert_eq!(frame.buffers, expected);
            });
        }
    }

    #[test]
    fn a_frame_beyond_its_bounds_is_refused_before_memory_is_taken() {
        let too_long = (MAX_HEADER as u32 + 1).to_le_bytes();
        let kind = |bytes: &[u8]| read(bytes).map(drop).unwrap_err().kind();
        for bytes in [
            &[0; 4][..],
            &too_long,
            &framed("{", b""),
            &framed(r#"{"buffers":[1073741825]}"#, b""),
            &framed(r#"{"buffers":[18446744073709551615,18446744073709551615]}"#, b""),
            &framed(r#"{"buffers":[-1]}"#, b""),
        ] {
            assert_eq!(kind(bytes), io::ErrorKind::InvalidData, "{:?}", String::from_utf8_lossy(bytes));
        }
        assert_eq!(kind(&framed(r#"{"buffers":[3]}"#, b"ab")), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_frame_that_does_not_come_in_time_is_an_error() {
        let (_one, other) = UnixStream::pair().unwrap();
        let error = read_frame(&other, Some(Duration::from_millis(20))).map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
