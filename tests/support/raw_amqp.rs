//! A producer that writes AMQP's bytes itself: for messages that a client library would not send, or
//! would not survive writing.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const FRAME_MAX: u32 = 131_072;

/// The largest header table that fits a frame beside what else stands in it, in bytes.
pub const LARGEST_TABLE: usize = FRAME_MAX as usize - 64;

/// Publishes one message to a queue that exists, as `guest`; returns when the broker has it. `headers`
/// is the table as it stands on the wire, without its length.
pub fn publish(broker: SocketAddr, queue: &str, headers: &[u8], body: &[u8]) {
    publish_to(broker, ("", queue), headers, body);
}

/// The same, through an exchange with a routing key.
pub fn publish_to(broker: SocketAddr, (exchange, key): (&str, &str), headers: &[u8], body: &[u8]) {
    let mut socket = TcpStream::connect(broker).expect("a broker");
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    socket.write_all(b"AMQP\x00\x00\x09\x01").expect("the header");
    wait_for(&mut socket, [10, 10]);
    let response = [&[0, 0, 0, 12][..], b"\0guest\0guest"].concat();
    send(&mut socket, 0, method([10, 11], &[&[0; 4], b"\x05PLAIN", &response, b"\x05en_US"]));
    wait_for(&mut socket, [10, 30]);
    send(&mut socket, 0, method([10, 31], &[&[7, 255], &FRAME_MAX.to_be_bytes(), &[0, 0]]));
    send(&mut socket, 0, method([10, 40], &[b"\x01/", &[0, 0]]));
    wait_for(&mut socket, [10, 41]);
    send(&mut socket, 1, method([20, 10], &[&[0]]));
    wait_for(&mut socket, [20, 11]);
    send(&mut socket, 1, method([60, 40], &[&[0, 0], &short(exchange), &short(key), &[0]]));
    let sizes = [&[0, 60, 0, 0][..], &(body.len() as u64).to_be_bytes(), &[0x20, 0]].concat();
    let table = [&(headers.len() as u32).to_be_bytes()[..], headers].concat();
    send(&mut socket, 1, (HEADER, [sizes, table].concat()));
    send(&mut socket, 1, (BODY, body.to_vec()));
    // What came before on the channel is done when the broker has closed it.
    send(&mut socket, 1, method([20, 40], &[&[0; 7]]));
    wait_for(&mut socket, [20, 41]);
}

/// A table with one value: so many arrays, one inside the other.
pub fn nested(depth: usize) -> Vec<u8> {
    let levels = (0..depth).rev().flat_map(|below| {
        let length = (5 * below) as u32;
        [&b"A"[..], &length.to_be_bytes()].concat()
    });
    b"\x04deep".iter().copied().chain(levels).collect()
}

fn short(text: &str) -> Vec<u8> {
    [&[text.len() as u8], text.as_bytes()].concat()
}

fn method(id: [u16; 2], arguments: &[&[u8]]) -> (u8, Vec<u8>) {
    (METHOD, [&id.map(u16::to_be_bytes).concat(), &arguments.concat()[..]].concat())
}

fn send(socket: &mut TcpStream, channel: u16, (kind, payload): (u8, Vec<u8>)) {
    let length = (payload.len() as u32).to_be_bytes();
    let frame = [&[kind][..], &channel.to_be_bytes(), &length, &payload, &[0xce]].concat();
    socket.write_all(&frame).expect("an open connection");
}

fn wait_for(socket: &mut TcpStream, id: [u16; 2]) {
    let mut start = [0; 7];
    socket.read_exact(&mut start).expect("a frame");
    let length = u32::from_be_bytes([start[3], start[4], start[5], start[6]]) as usize;
    let mut payload = vec![0; length + 1];
    socket.read_exact(&mut payload).expect("a whole frame");
    let came = [payload[0], payload[1], payload[2], payload[3]];
    assert_eq!(came, id.map(u16::to_be_bytes).concat()[..], "{payload:?}");
}
