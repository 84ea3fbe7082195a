//! The frames between a worker and the launcher's queue: two big-endian `u32` (length of the head, length of
//! the body), then a JSON head, then the raw body. Decides the largest sizes, and when written frames are sent. Owns no
//! state.

use std::num::NonZeroU16;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::SinkExt as _;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::mpsc;
use tokio_util::codec::{Decoder, Encoder, FramedWrite};

use crate::protocol::{Message, Properties};

/// The largest frame, head and body together: 64 MiB. A longer one ends the connection.
const MAX_FRAME: usize = 64 << 20;

/// The largest message in bytes: its properties written as JSON and its body together. Smaller than
/// `MAX_FRAME`, so that an accepted message can always be delivered with the head of a delivery and the headers
/// of a dead letter.
pub const MAX_MESSAGE: usize = MAX_FRAME - (64 << 10);

/// Bytes of the two lengths.
const PREFACE: usize = 8;

/// The head of a frame from a worker.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(super) enum WorkerHead {
    /// Publish the body to a queue; answered with the same `id`. With a delay, the answer comes at once and the
    /// message reaches the queue later. Like all messages, a delayed one is lost when the launcher ends.
    Publish { id: u64, queue: String, properties: Box<Properties>, delay: Option<Duration> },
    /// Deliver from a queue. At most one consumer per connection.
    Consume { queue: String, prefetch: NonZeroU16 },
    /// Change the prefetch.
    Prefetch { prefetch: NonZeroU16 },
    /// Stop delivering.
    Cancel,
    /// Remove a message for good.
    Ack { tag: u64 },
    /// Return a message to its position in the queue.
    Nack { tag: u64 },
    /// End the consumer and return its unsettled messages to the queue. The connection stays open.
    Leave,
    /// End the connection.
    Close,
}

/// The head of a frame from the launcher.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub(super) enum LauncherHead {
    /// The message with this `id` is in its queue.
    Confirmed { id: u64 },
    /// The queue does not exist.
    Unroutable { id: u64 },
    /// The consumer exists; deliveries follow.
    Consuming,
    /// A delivery; its body is the message's body.
    Deliver { tag: u64, redelivered: bool, delivery_count: u64, properties: Box<Properties> },
    /// No more deliveries follow.
    Cancelled,
    /// The consumer has ended, and all settlements sent before `leave` are done.
    Left,
    /// The connection ends. There is a reason if the worker did not ask for it.
    Closed { reason: Option<String> },
}

/// Why bytes are not a frame, or not the expected one.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    /// Longer than [`MAX_FRAME`].
    #[error("{length} bytes are more than a frame holds ({MAX_FRAME})")]
    TooLong { length: u64 },
    /// The head is not the expected JSON, or cannot be written as JSON.
    #[error("bad head: {0}")]
    Head(#[from] serde_json::Error),
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// One frame, whose head is serialized and whose length is checked.
#[derive(Debug)]
pub(super) struct Frame {
    head: Bytes,
    /// The raw body; empty unless the frame carries a message.
    pub body: Bytes,
}

impl Frame {
    /// Serializes the head.
    pub fn new(head: &impl Serialize, body: Bytes) -> Result<Self, WireError> {
        let head = Bytes::from(serde_json::to_vec(head)?);
        check_length(head.len() as u64 + body.len() as u64)?;
        Ok(Self { head, body })
    }

    /// Deserializes the head.
    pub fn head<T: DeserializeOwned>(&self) -> Result<T, WireError> {
        Ok(serde_json::from_slice(&self.head)?)
    }
}

fn check_length(length: u64) -> Result<(), WireError> {
    if length > MAX_FRAME as u64 { Err(WireError::TooLong { length }) } else { Ok(()) }
}

/// An error message for the sender of a message that is too long or cannot be serialized; none if the message is valid.
pub(super) fn too_long(message: &Message) -> Option<String> {
    let properties = match serde_json::to_vec(&message.properties) {
        Ok(properties) => properties.len(),
        Err(error) => return Some(format!("properties cannot be written: {error}")),
    };
    let length = properties + message.body.len();
    (length > MAX_MESSAGE).then(|| {
        format!("{length} bytes are more than the embedded queue takes in one message ({MAX_MESSAGE})")
    })
}

/// Splits a byte stream into frames, and writes frames to one.
#[derive(Debug, Default)]
pub(super) struct FrameCodec;

impl Decoder for FrameCodec {
    type Item = Frame;
    type Error = WireError;

    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, WireError> {
        let Some(mut preface) = input.get(..PREFACE) else {
            return Ok(None);
        };
        let (head, body) = (preface.get_u32(), preface.get_u32());
        check_length(u64::from(head) + u64::from(body))?;
        let (head, body) = (head as usize, body as usize);
        let length = PREFACE + head + body;
        if input.len() < length {
            input.reserve(length - input.len());
            return Ok(None);
        }
        input.advance(PREFACE);
        let head = input.split_to(head).freeze();
        Ok(Some(Frame { head, body: input.split_to(body).freeze() }))
    }
}

impl Encoder<Frame> for FrameCodec {
    type Error = WireError;

    fn encode(&mut self, frame: Frame, output: &mut BytesMut) -> Result<(), WireError> {
        output.reserve(PREFACE + frame.head.len() + frame.body.len());
        // Each fits into `u32`: `Frame::new` and `decode` checked the sum.
        output.put_u32(frame.head.len() as u32);
        output.put_u32(frame.body.len() as u32);
        output.put_slice(&frame.head);
        output.put_slice(&frame.body);
        Ok(())
    }
}

/// A writer sends its buffer at this size in bytes, or when no more frames wait.
const FLUSH_AT: usize = 64 << 10;

/// Writes what comes from `queued`, as frames, until all of its senders are dropped. Small frames are collected into one
/// write.
///
/// # Errors
/// The socket has failed, or something cannot be made a frame.
pub(super) async fn write_all<T>(
    socket: OwnedWriteHalf,
    mut queued: mpsc::Receiver<T>,
    to_frame: impl Fn(T) -> Result<Frame, WireError>,
) -> Result<(), WireError> {
    let mut frames = FramedWrite::new(socket, FrameCodec);
    frames.set_backpressure_boundary(FLUSH_AT);
    while let Some(next) = queued.recv().await {
        frames.feed(to_frame(next)?).await?;
        if queued.is_empty() {
            frames.flush().await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads frames from these chunks, and writes them again.
    fn reread<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<u8>, String> {
        let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
        for chunk in chunks {
            input.extend_from_slice(chunk);
            while let Some(frame) = FrameCodec.decode(&mut input).map_err(|error| error.to_string())? {
                let head: WorkerHead = frame.head().map_err(|error| error.to_string())?;
                let frame = Frame::new(&head, frame.body).map_err(|error| error.to_string())?;
                FrameCodec.encode(frame, &mut output).map_err(|error| error.to_string())?;
            }
        }
        Ok(output.to_vec())
    }

    fn written(head: &impl Serialize, body: &'static [u8]) -> BytesMut {
        let mut bytes = BytesMut::new();
        let frame = Frame::new(head, Bytes::from_static(body)).unwrap();
        FrameCodec.encode(frame, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_frame_is_read_back_however_the_stream_is_cut() {
        let head = WorkerHead::Publish {
            id: 7,
            queue: "replies".to_owned(),
            properties: Box::new(Properties { kind: Some("reply".to_owned()), ..Properties::default() }),
            delay: Some(Duration::from_millis(1500)),
        };
        let bytes = written(&head, b"a\0\nbody");
        for cut in 0..bytes.len() {
            let mut input = BytesMut::from(&bytes[..cut]);
            assert!(FrameCodec.decode(&mut input).unwrap().is_none(), "cut at {cut}");
            input.extend_from_slice(&bytes[cut..]);
            let frame = FrameCodec.decode(&mut input).unwrap().unwrap();
            assert_eq!(frame.head::<WorkerHead>().unwrap(), head);
            assert_eq!(frame.body.as_ref(), b"a\0\nbody");
            assert!(input.is_empty());
        }
    }

    #[test]
    fn two_frames_in_one_read_are_two_frames() {
        let mut bytes = written(&WorkerHead::Ack { tag: 1 }, b"");
        bytes.unsplit(written(&WorkerHead::Nack { tag: 2 }, b""));
        let first = FrameCodec.decode(&mut bytes).unwrap().unwrap();
        let second = FrameCodec.decode(&mut bytes).unwrap().unwrap();
        assert_eq!(first.head::<WorkerHead>().unwrap(), WorkerHead::Ack { tag: 1 });
        assert_eq!(second.head::<WorkerHead>().unwrap(), WorkerHead::Nack { tag: 2 });
    }

    #[test]
    fn a_frame_with_too_large_a_length_is_refused_before_its_bytes_arrive() {
        let mut bytes = BytesMut::new();
        bytes.put_u32(8);
        bytes.put_u32(u32::MAX);
        assert!(matches!(FrameCodec.decode(&mut bytes), Err(WireError::TooLong { .. })));
    }

    #[test]
    fn a_body_over_the_limit_is_refused() {
        let body = Bytes::from(vec![0; MAX_FRAME]);
        assert!(matches!(Frame::new(&WorkerHead::Close, body), Err(WireError::TooLong { .. })));
    }

    #[test]
    fn a_frame_from_the_launcher_is_not_accepted_as_one_from_a_worker() {
        let mut bytes = written(&LauncherHead::Cancelled, b"");
        let frame = FrameCodec.decode(&mut bytes).unwrap().unwrap();
        assert!(frame.head::<WorkerHead>().is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_alike_however_they_are_cut(
            garbage in any::<Vec<u8>>(),
            whole in any::<bool>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut stream = written(&WorkerHead::Ack { tag: 1 }, b"body").to_vec();
            if !whole {
                stream.extend(garbage);
            }
            let (left, right) = stream.split_at(cut.index(stream.len()));
            prop_assert_eq!(reread([left, right]), reread([&stream[..]]));
            prop_assert!(!whole || reread([left, right]) == Ok(stream.clone()));
        }
    }
}
