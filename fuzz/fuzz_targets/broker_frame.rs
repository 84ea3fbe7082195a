//! A frame that the broker may send: a content header with these properties, or a method with these arguments. What lapin
//! reads passes unchanged, a filtered frame passes unchanged, and no length changes.
#![no_main]

use std::sync::Arc;

use amq_protocol::frame::parse_frame;
use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use sconce_broker_stream::{Inbound, Strings};

/// Class and method of connection.close, channel.close, basic.return, basic.deliver and basic.get-ok.
const METHODS: [[u8; 4]; 5] = [[0, 10, 0, 50], [0, 20, 0, 40], [0, 60, 0, 50], [0, 60, 0, 60], [0, 60, 0, 71]];

fn filtered(frame: &[u8]) -> BytesMut {
    let mut filtered = BytesMut::new();
    Inbound::new(Arc::new(Strings::new())).push(frame, &mut filtered);
    filtered
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, rest)) = data.split_first() else { return };
    let (kind, start) = match METHODS.get(usize::from(*kind)) {
        Some(method) => (1, method.to_vec()),
        None => (2, [&[0, 60, 0, 0][..], &[0; 8]].concat()),
    };
    let length = ((start.len() + rest.len()) as u32).to_be_bytes();
    let frame = [&[kind, 0, 1][..], &length, &start, rest, &[0xce]].concat();
    let filtered = filtered(&frame);
    assert_eq!(filtered.len(), frame.len());
    assert_eq!(self::filtered(&filtered), filtered);
    if parse_frame(&frame[..]).is_ok_and(|(rest, _)| rest.is_empty()) {
        assert!(filtered == frame[..], "{frame:02x?} became {filtered:02x?}");
    }
});
