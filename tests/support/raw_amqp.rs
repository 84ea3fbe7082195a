//! A client that writes AMQP's bytes itself: for messages that a client library would not send, or
//! would not survive reading or writing.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const FRAME_MAX: usize = 131_072;

/// The largest header table that fits a frame beside what else stands in it, in bytes.
pub const LARGEST_TABLE: usize = FRAME_MAX - 64;

/// Publishes one message to a queue that exists, as `guest`; returns when the broker has it. `headers`
/// is the table as it stands on the wire, without its length.
pub fn publish(broker: SocketAddr, queue: &str, headers: &[u8], body: &[u8]) {
    publish_to(broker, ("", queue), headers, body);
}

/// The same, through an exchange with a routing key.
pub fn publish_to(broker: SocketAddr, (exchange, key): (&str, &str), headers: &[u8], body: &[u8]) {
    let properties = [&[0x20, 0][..], &(headers.len() as u32).to_be_bytes(), headers].concat();
    let message = Message { key: key.into(), properties, body: body.to_vec() };
    let mut raw = Raw::connect(broker);
    raw.publish(exchange.as_bytes(), &message);
    raw.finish();
}

/// A message, with flags and values of its properties as they stand in a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub key: Vec<u8>,
    pub properties: Vec<u8>,
    pub body: Vec<u8>,
}

/// A connection of `guest` with one channel.
pub struct Raw(TcpStream);

impl Raw {
    pub fn connect(broker: SocketAddr) -> Self {
        let socket = TcpStream::connect(broker).expect("a broker");
        socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
        let mut raw = Self(socket);
        raw.0.write_all(b"AMQP\x00\x00\x09\x01").expect("the header");
        raw.answer([10, 10]);
        let response = [&[0, 0, 0, 12][..], b"\0guest\0guest"].concat();
        raw.call(0, [10, 11], &[&[0; 4], b"\x05PLAIN", &response, b"\x05en_US"], [10, 30]);
        raw.method(0, [10, 31], &[&[7, 255], &(FRAME_MAX as u32).to_be_bytes(), &[0, 0]]);
        raw.call(0, [10, 40], &[b"\x01/", &[0, 0]], [10, 41]);
        raw.call(1, [20, 10], &[&[0]], [20, 11]);
        raw
    }

    pub fn declare(&mut self, queue: &[u8]) {
        self.call(1, [50, 10], &[&[0, 0], &short(queue), &[0], &[0; 4]], [50, 11]);
    }

    /// Declares a topic exchange, and binds a queue to it. RabbitMQ checks the names and keys of
    /// declarations.
    pub fn bind(&mut self, queue: &[u8], exchange: &[u8], key: &[u8]) {
        let arguments: [&[u8]; 5] = [&[0, 0], &short(exchange), b"\x05topic", &[0], &[0; 4]];
        self.call(1, [40, 10], &arguments, [40, 11]);
        let arguments: [&[u8]; 6] = [&[0, 0], &short(queue), &short(exchange), &short(key), &[0], &[0; 4]];
        self.call(1, [50, 20], &arguments, [50, 21]);
    }

    pub fn publish(&mut self, exchange: &[u8], message: &Message) {
        self.method(1, [60, 40], &[&[0, 0], &short(exchange), &short(&message.key), &[0]]);
        let size = (message.body.len() as u64).to_be_bytes();
        self.send(HEADER, 1, &[&[0, 60, 0, 0][..], &size, &message.properties].concat());
        for part in message.body.chunks(FRAME_MAX - 8) {
            self.send(BODY, 1, part);
        }
    }

    /// Closes the channel: the broker does what came before on it first.
    pub fn finish(mut self) {
        self.call(1, [20, 40], &[&[0; 7]], [20, 41]);
    }

    /// The next message of a queue.
    pub fn get(&mut self, queue: &[u8]) -> Option<Message> {
        self.method(1, [60, 70], &[&[0, 0], &short(queue), &[1]]);
        let (_, method) = self.receive();
        if method.starts_with(&[0, 60, 0, 72]) {
            return None;
        }
        assert!(method.starts_with(&[0, 60, 0, 71]), "{method:?}");
        let exchange = &method[13..];
        let key = &exchange[1 + usize::from(exchange[0])..];
        let key = key[1..=usize::from(key[0])].to_vec();
        let (_, header) = self.receive();
        let size = u64::from_be_bytes(header[4..12].try_into().expect("eight bytes"));
        let mut body = Vec::new();
        while (body.len() as u64) < size {
            body.extend(self.receive().1);
        }
        Some(Message { key, properties: header[12..].to_vec(), body })
    }

    fn call(&mut self, channel: u16, ids: [u16; 2], arguments: &[&[u8]], answer: [u16; 2]) {
        self.method(channel, ids, arguments);
        self.answer(answer);
    }

    fn answer(&mut self, ids: [u16; 2]) {
        let (_, payload) = self.receive();
        assert_eq!(payload[..4], ids.map(u16::to_be_bytes).concat(), "{payload:?}");
    }

    fn method(&mut self, channel: u16, ids: [u16; 2], arguments: &[&[u8]]) {
        self.send(METHOD, channel, &[&ids.map(u16::to_be_bytes).concat(), &arguments.concat()[..]].concat());
    }

    fn send(&mut self, kind: u8, channel: u16, payload: &[u8]) {
        let length = (payload.len() as u32).to_be_bytes();
        let frame = [&[kind][..], &channel.to_be_bytes(), &length, payload, &[0xce]].concat();
        self.0.write_all(&frame).expect("an open connection");
    }

    fn receive(&mut self) -> (u8, Vec<u8>) {
        let mut start = [0; 7];
        self.0.read_exact(&mut start).expect("a frame");
        let length = u32::from_be_bytes([start[3], start[4], start[5], start[6]]) as usize;
        let mut payload = vec![0; length + 1];
        self.0.read_exact(&mut payload).expect("a whole frame");
        payload.pop();
        (start[0], payload)
    }
}

pub fn short(bytes: &[u8]) -> Vec<u8> {
    [&[bytes.len() as u8], bytes].concat()
}

/// A table with one value: so many arrays, one inside the other.
pub fn nested(depth: usize) -> Vec<u8> {
    let levels = (0..depth).rev().flat_map(|below| {
        let length = (5 * below) as u32;
        [&b"A"[..], &length.to_be_bytes()].concat()
    });
    b"\x04deep".iter().copied().chain(levels).collect()
}
