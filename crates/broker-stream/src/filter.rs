//! What the filter replaces in the frames of a connection, in either direction. Does no I/O.
//!
//! Frames of methods and content headers are held until they are complete; everything else passes at once.
//! What cannot be understood passes unchanged, so that it is lapin or the broker that reports it.

use std::collections::HashMap;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

use bytes::BytesMut;

use crate::strings::{Property, RawStrings, Strings, replace_invalid};

/// Type, channel and size of the payload.
const PREFIX: usize = 7;
/// The prefix, and the byte at the end of a frame.
const OVERHEAD: usize = PREFIX + 1;
const END: u8 = 0xce;
/// Larger frames are not held. Lapin buffers 64 times the maximum that is negotiated, so that is smaller.
const MAX_HELD: usize = 16 << 20;

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;
/// The first byte of a protocol header, which is the only thing on a connection that is no frame.
const PROTOCOL_HEADER: u8 = b'A';

/// Class and method of `channel.open-ok`.
const CHANNEL_OPEN_OK: [u8; 4] = [0, 20, 0, 11];

/// Cuts one direction's bytes into frames.
#[derive(Default)]
struct Frames {
    /// The beginning of a frame.
    held: Vec<u8>,
    /// How many bytes pass before the next frame begins.
    passing: usize,
}

enum Next {
    /// The frame is to be held until it has this many bytes.
    Hold(usize),
    /// The frame passes, and has this many bytes.
    Pass(usize),
}

impl Frames {
    /// Appends `bytes` to `out`, after those that were held, up to the next frame that has to be held. `edit`
    /// gets each frame that was held.
    fn push(&mut self, mut bytes: &[u8], out: &mut BytesMut, mut edit: impl FnMut(&mut Vec<u8>)) {
        while !bytes.is_empty() {
            if self.passing > 0 {
                let (now, later) = bytes.split_at(self.passing.min(bytes.len()));
                out.extend_from_slice(now);
                self.passing -= now.len();
                bytes = later;
                continue;
            }
            match next(&self.held) {
                Next::Pass(length) => {
                    self.passing = length - self.held.len();
                    out.extend_from_slice(&self.held);
                    self.held.clear();
                }
                Next::Hold(length) => {
                    let (now, later) = bytes.split_at((length - self.held.len()).min(bytes.len()));
                    self.held.extend_from_slice(now);
                    bytes = later;
                    if length > PREFIX && self.held.len() == length {
                        match self.held.last() {
                            Some(&END) => edit(&mut self.held),
                            _ => self.passing = usize::MAX,
                        }
                        out.extend_from_slice(&self.held);
                        self.held.clear();
                    }
                }
            }
        }
    }
}

/// What happens to a frame that begins with `held`.
fn next(held: &[u8]) -> Next {
    let &[kind, _, _, a, b, c, d, ..] = held else { return Next::Hold(PREFIX) };
    let length = u32::from_be_bytes([a, b, c, d]) as usize + OVERHEAD;
    match kind {
        METHOD | HEADER if length <= MAX_HELD => Next::Hold(length),
        METHOD | HEADER | BODY | HEARTBEAT => Next::Pass(length),
        PROTOCOL_HEADER => Next::Pass(8),
        _ => Next::Pass(usize::MAX),
    }
}

/// The direction from the broker to lapin.
pub struct Inbound {
    frames: Frames,
    strings: Arc<Strings>,
    begun: Begun,
}

/// For each channel, tag and strings of a delivery whose content header has not come yet.
type Begun = HashMap<u16, (u64, RawStrings)>;

impl Inbound {
    /// A direction without any bytes yet.
    pub fn new(strings: Arc<Strings>) -> Self {
        Self { frames: Frames::default(), strings, begun: HashMap::new() }
    }

    /// Appends to `out` what lapin gets of the broker's `bytes` and of those that were held.
    pub fn push(&mut self, bytes: &[u8], out: &mut BytesMut) {
        self.frames.push(bytes, out, |frame| clean(frame, &mut self.begun, &self.strings));
    }
}

/// Makes all short strings of a frame UTF-8. The originals are recorded if they are those of a delivery.
fn clean(frame: &mut [u8], begun: &mut Begun, strings: &Strings) {
    let channel = u16::from_be_bytes([frame[1], frame[2]]);
    if frame[0] == METHOD && frame[PREFIX..].starts_with(&CHANNEL_OPEN_OK) {
        begun.remove(&channel);
        strings.forget(channel);
    }
    let Some(fields) = fields(frame) else { return };
    // The content header of a returned message follows no tag.
    let (mut tag, mut raw) = match begun.remove(&channel) {
        Some((tag, raw)) if frame[0] == HEADER => (Some(tag), raw),
        _ => (None, RawStrings::default()),
    };
    for (field, range) in fields {
        let bytes = &mut frame[range];
        if let Field::DeliveryTag = field {
            tag = (&*bytes).try_into().ok().map(u64::from_be_bytes);
        } else if str::from_utf8(bytes).is_err() {
            match field {
                Field::Property(property) => raw.properties.push((property, bytes.to_vec())),
                Field::HeaderName => raw.header_names.push(bytes.to_vec()),
                Field::DeliveryTag | Field::Other => {}
            }
            replace_invalid(bytes);
        }
    }
    match tag {
        Some(tag) if frame[0] == METHOD => drop(begun.insert(channel, (tag, raw))),
        Some(tag) if !raw.is_empty() => strings.record(channel, tag, raw),
        _ => {}
    }
}

/// The direction from lapin to the broker.
pub(crate) struct Outbound {
    frames: Frames,
    strings: Arc<Strings>,
}

impl Outbound {
    pub(crate) fn new(strings: Arc<Strings>) -> Self {
        Self { frames: Frames::default(), strings }
    }

    /// Appends to `out` what the broker gets of lapin's `bytes` and of those that were held.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut BytesMut) {
        self.frames.push(bytes, out, |frame| resolve(frame, &self.strings));
    }
}

/// Replaces the tokens in a frame.
fn resolve(frame: &mut Vec<u8>, strings: &Strings) {
    // From the last field on, so that the ranges before it stay true.
    for (field, range) in fields(frame).into_iter().flatten().rev() {
        if let Field::Property(_) = field
            && let Some(raw) = strings.resolve(&frame[range.clone()])
        {
            // A token stands for at most 255 bytes.
            frame[range.start - 1] = raw.len() as u8;
            frame.splice(range, raw);
        }
    }
    let size = (frame.len() - OVERHEAD) as u32;
    frame[3..PREFIX].copy_from_slice(&size.to_be_bytes());
}

/// What a part of a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Property(Property),
    HeaderName,
    DeliveryTag,
    /// A short string of which no record is kept.
    Other,
}

/// The form of a method's argument or of a property.
enum Form {
    Short(Field),
    Table,
    DeliveryTag,
    /// So many bytes of no interest.
    Skip(usize),
}

const fn short(property: Property) -> Form {
    Form::Short(Field::Property(property))
}

/// The properties of a message. The first one's flag is the highest bit.
const PROPERTIES: [Form; 14] = [
    short(Property::ContentType),
    short(Property::ContentEncoding),
    Form::Table,
    Form::Skip(1),
    Form::Skip(1),
    short(Property::CorrelationId),
    short(Property::ReplyTo),
    short(Property::Expiration),
    short(Property::MessageId),
    Form::Skip(8),
    short(Property::Type),
    short(Property::UserId),
    short(Property::AppId),
    short(Property::ClusterId),
];

/// The arguments of a method, if it has short strings that may be any bytes.
fn arguments(class: usize, method: usize) -> Option<&'static [Form]> {
    const TEXT: Form = Form::Short(Field::Other);
    const EXCHANGE: Form = short(Property::Exchange);
    const ROUTING_KEY: Form = short(Property::RoutingKey);
    Some(match (class, method) {
        // connection.close and channel.close. RabbitMQ cuts their texts, maybe inside a character.
        (10, 50) | (20, 40) => &[Form::Skip(2), TEXT, Form::Skip(4)],
        // basic.publish
        (60, 40) => &[Form::Skip(2), EXCHANGE, ROUTING_KEY, Form::Skip(1)],
        // basic.return
        (60, 50) => &[Form::Skip(2), TEXT, EXCHANGE, ROUTING_KEY],
        // basic.deliver
        (60, 60) => &[TEXT, Form::DeliveryTag, Form::Skip(1), EXCHANGE, ROUTING_KEY],
        // basic.get-ok
        (60, 71) => &[Form::DeliveryTag, Form::Skip(1), EXCHANGE, ROUTING_KEY, Form::Skip(4)],
        _ => return None,
    })
}

/// Where the fields of a frame stand, in order. None if the frame is malformed, or has none of interest.
fn fields(frame: &[u8]) -> Option<Vec<(Field, Range<usize>)>> {
    let mut parts = Parts { frame, at: PREFIX, end: frame.len() - 1, found: Vec::new() };
    if frame[0] == METHOD {
        for form in arguments(parts.number(2)?, parts.number(2)?)? {
            parts.pass(form)?;
        }
    } else {
        // Class, weight and the size of the body.
        parts.skip(2 + 2 + 8)?;
        let flags = parts.number(2)?;
        for (index, form) in PROPERTIES.iter().enumerate() {
            if flags & (0x8000 >> index) != 0 {
                parts.pass(form)?;
            }
        }
    }
    (parts.at == parts.end).then_some(parts.found)
}

/// Walks a frame. Its functions give none where the frame, or the table that is walked, ends too early.
struct Parts<'a> {
    frame: &'a [u8],
    at: usize,
    end: usize,
    found: Vec<(Field, Range<usize>)>,
}

impl Parts<'_> {
    fn skip(&mut self, length: usize) -> Option<Range<usize>> {
        let end = self.at.checked_add(length).filter(|end| *end <= self.end)?;
        Some(mem::replace(&mut self.at, end)..end)
    }

    /// A number of up to four bytes.
    fn number(&mut self, length: usize) -> Option<usize> {
        let range = self.skip(length)?;
        Some(self.frame[range].iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    fn pass(&mut self, form: &Form) -> Option<()> {
        match *form {
            Form::Short(field) => self.short(field),
            Form::Table => self.table(),
            Form::DeliveryTag => {
                let range = self.skip(8)?;
                self.found.push((Field::DeliveryTag, range));
                Some(())
            }
            Form::Skip(length) => self.skip(length).map(drop),
        }
    }

    fn short(&mut self, field: Field) -> Option<()> {
        let length = self.number(1)?;
        let range = self.skip(length)?;
        // A large table has tens of thousands of names. Only the invalid ones are replaced, and only inbound.
        if field != Field::HeaderName || str::from_utf8(&self.frame[range.clone()]).is_err() {
            self.found.push((field, range));
        }
        Some(())
    }

    /// Keeps a stack of its own, because tables nest as deeply as a frame has room.
    fn table(&mut self) -> Option<()> {
        let outer_end = self.end;
        let mut open = vec![(b'F', self.end_of_table()?)];
        while let Some(&(kind, end)) = open.last() {
            self.end = end;
            if self.at == end {
                open.pop();
                continue;
            }
            if kind == b'F' {
                self.short(Field::HeaderName)?;
            }
            let length = match self.number(1)? as u8 {
                nested @ (b'F' | b'A') => {
                    open.push((nested, self.end_of_table()?));
                    0
                }
                b'S' | b'x' => self.number(4)?,
                b'V' => 0,
                b't' | b'b' | b'B' => 1,
                b's' | b'u' | b'U' => 2,
                b'I' | b'i' | b'f' => 4,
                b'D' => 5,
                b'L' | b'l' | b'd' | b'T' => 8,
                _ => return None,
            };
            self.skip(length)?;
        }
        self.end = outer_end;
        Some(())
    }

    /// Passes the length of a table or an array, and returns where it ends.
    fn end_of_table(&mut self) -> Option<usize> {
        let length = self.number(4)?;
        self.at.checked_add(length).filter(|end| *end <= self.end)
    }
}

#[cfg(test)]
mod tests {
    use amq_protocol::frame::{AMQPFrame, parse_frame};
    use rand::rngs::StdRng;
    use rand::{Rng, RngExt, SeedableRng};

    use super::*;

    const RAW: &[u8] = b"\xde\xad\xbe\xef\x00raw\xff";
    const CLEAN: &[u8] = b"\xde\xad??\0raw?";

    fn filters() -> (Inbound, Outbound, Arc<Strings>) {
        let strings = Arc::new(Strings::new());
        (Inbound::new(strings.clone()), Outbound::new(strings.clone()), strings)
    }

    fn frame(kind: u8, channel: u16, payload: &[u8]) -> Vec<u8> {
        let size = (payload.len() as u32).to_be_bytes();
        [&[kind][..], &channel.to_be_bytes(), &size, payload, &[END]].concat()
    }

    fn text(bytes: &[u8]) -> Vec<u8> {
        [&[bytes.len() as u8], bytes].concat()
    }

    fn method(channel: u16, ids: [u8; 4], arguments: &[&[u8]]) -> Vec<u8> {
        frame(METHOD, channel, &[&ids[..], &arguments.concat()].concat())
    }

    fn deliver(channel: u16, tag: u64, exchange: &[u8], key: &[u8]) -> Vec<u8> {
        let [tag, exchange, key] = [tag.to_be_bytes().to_vec(), text(exchange), text(key)];
        method(channel, [0, 60, 0, 60], &[b"\x03tag", &tag, &[0], &exchange, &key])
    }

    fn get_ok(channel: u16, tag: u64, key: &[u8]) -> Vec<u8> {
        let ids = [0, 60, 0, 71];
        method(channel, ids, &[&tag.to_be_bytes(), &[1], &text(b""), &text(key), &[0, 0, 0, 9]])
    }

    fn publish(exchange: &[u8], key: &[u8]) -> Vec<u8> {
        method(1, [0, 60, 0, 40], &[&[0, 0], &text(exchange), &text(key), &[1]])
    }

    fn long(kind: u8, content: &[u8]) -> Vec<u8> {
        let kind: &[u8] = if kind == 0 { &[] } else { &[kind] };
        [kind, &(content.len() as u32).to_be_bytes(), content].concat()
    }

    /// A content header with all properties: `value` gives that of each short string, by its place.
    fn header(channel: u16, table: &[u8], value: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
        let mut payload = [&[0, 60, 0, 0][..], &5_u64.to_be_bytes(), &[0xff, 0xfc]].concat();
        for (index, form) in PROPERTIES.iter().enumerate() {
            payload.extend(match form {
                Form::Short(_) => text(&value(index)),
                Form::Table => long(0, table),
                Form::Skip(length) => vec![2; *length],
                Form::DeliveryTag => Vec::new(),
            });
        }
        frame(HEADER, channel, &payload)
    }

    fn body(channel: u16, content: &[u8]) -> Vec<u8> {
        frame(BODY, channel, content)
    }

    /// Every type of value, and names that are not UTF-8 at three levels.
    fn table(name: &[u8]) -> Vec<u8> {
        let inner = [text(name), b"V".to_vec()].concat();
        let array = [long(b'F', &inner), b"t\x01".to_vec(), long(b'A', b"V")].concat();
        let mut table = Vec::new();
        for value in [
            &b"t\x01"[..],
            b"b\xff",
            b"B\xff",
            b"s\xff\xff",
            b"u\xff\xff",
            b"U\xff\xff",
            b"I\xff\xff\xff\xff",
            b"i\xff\xff\xff\xff",
            b"f\0\0\0\0",
            b"D\x01\xff\xff\xff\xff",
            b"L\xff\xff\xff\xff\xff\xff\xff\xff",
            b"l\xff\xff\xff\xff\xff\xff\xff\xff",
            b"d\0\0\0\0\0\0\0\0",
            b"T\xff\xff\xff\xff\xff\xff\xff\xff",
            b"V",
            &long(b'S', b"\xff text"),
            &long(b'x', b"\xff bytes"),
            &long(b'F', &inner),
            &long(b'A', &array),
            &long(b'F', b""),
        ] {
            table.extend([text(name), value.to_vec()].concat());
        }
        table
    }

    fn received(inbound: &mut Inbound, bytes: &[u8]) -> Vec<u8> {
        let mut out = BytesMut::new();
        inbound.push(bytes, &mut out);
        out.to_vec()
    }

    fn sent(outbound: &mut Outbound, bytes: &[u8]) -> Vec<u8> {
        let mut out = BytesMut::new();
        outbound.push(bytes, &mut out);
        out.to_vec()
    }

    /// The frames that lapin's parser reads in `bytes`.
    fn parsed(mut bytes: &[u8]) -> Vec<AMQPFrame> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let (rest, frame) = parse_frame(bytes).expect("frames that lapin takes");
            frames.push(frame);
            bytes = rest;
        }
        frames
    }

    /// A stream with every frame that matters, for each direction.
    fn conversation(strings: &Strings) -> [Vec<u8>; 2] {
        let inbound = [
            method(0, [0, 10, 0, 30], &[&[7, 255, 0, 2, 0, 0, 0, 60]]),
            method(1, CHANNEL_OPEN_OK, &[&[0; 4]]),
            deliver(1, 1, RAW, RAW),
            header(1, &table(RAW), |_| RAW.to_vec()),
            body(1, &[END; 300]),
            frame(HEARTBEAT, 0, b""),
            get_ok(2, 1, RAW),
            header(2, b"", |_| Vec::new()),
            body(2, b""),
            method(1, [0, 60, 0, 50], &[&[0, 0], &text(RAW), &text(RAW), &text(RAW)]),
            header(1, &table(RAW), |_| RAW.to_vec()),
            method(1, [0, 20, 0, 40], &[&[1, 148], &text(RAW), &[0; 4]]),
            method(0, [0, 10, 0, 50], &[&[1, 148], &text(RAW), &[0; 4]]),
        ];
        let token = strings.token(RAW).into_bytes();
        let outbound = [
            b"AMQP\0\0\x09\x01".to_vec(),
            method(0, [0, 10, 0, 31], &[&[7, 255, 0, 2, 0, 0, 0, 60]]),
            publish(&token, &token),
            header(1, &table(b"name"), |_| token.clone()),
            body(1, &token),
            method(1, [0, 60, 0, 80], &[&[0, 0, 0, 0, 0, 0, 0, 9, 0]]),
        ];
        [inbound.concat(), outbound.concat()]
    }

    #[test]
    fn each_property_arrives_as_utf_8_and_is_recorded() {
        for (index, form) in PROPERTIES.iter().enumerate() {
            let Form::Short(Field::Property(property)) = form else { continue };
            let (mut inbound, _, strings) = filters();
            let value = |raw: &[u8]| {
                let raw = raw.to_vec();
                move |at| if at == index { raw.clone() } else { "é".into() }
            };
            let bytes = [deliver(1, 3, b"", b"key"), header(1, b"", value(RAW)), body(1, b"12345")].concat();
            let out = received(&mut inbound, &bytes);
            let wanted = [deliver(1, 3, b"", b"key"), header(1, b"", value(CLEAN)), body(1, b"12345")];
            assert_eq!(out, wanted.concat(), "{property:?}");
            assert_eq!(parsed(&out).len(), 3);
            let raw = strings.take(1, 3).expect("a record");
            assert_eq!(raw, RawStrings { properties: vec![(*property, RAW.to_vec())], ..Default::default() });
            assert_eq!(raw.property(*property), Some(RAW));
        }
    }

    #[test]
    fn header_names_arrive_as_utf_8_also_in_nested_tables_and_values_stay() {
        let (mut inbound, _, strings) = filters();
        let bytes = [deliver(1, 1, b"", b""), header(1, &table(RAW), |_| Vec::new())].concat();
        let wanted = [deliver(1, 1, b"", b""), header(1, &table(CLEAN), |_| Vec::new())].concat();
        let out = received(&mut inbound, &bytes);
        assert_eq!(out, wanted);
        assert_eq!(parsed(&out).len(), 2);
        let raw = strings.take(1, 1).expect("a record");
        assert_eq!((raw.header_names, raw.properties), (vec![RAW.to_vec(); 22], Vec::new()));
    }

    #[test]
    fn names_are_found_however_deeply_tables_nest() {
        let mut nested = [text(RAW), b"V".to_vec()].concat();
        for _ in 0..1_000 {
            nested = [text(b"a"), long(b'A', &long(b'F', &nested))].concat();
        }
        let (mut inbound, _, strings) = filters();
        received(&mut inbound, &[deliver(1, 1, b"", b""), header(1, &nested, |_| Vec::new())].concat());
        assert_eq!(strings.take(1, 1).expect("a record").header_names, [RAW]);
    }

    #[test]
    fn exchange_and_routing_key_are_recorded_with_the_properties_of_their_delivery() {
        let (mut inbound, _, strings) = filters();
        // Frames of two channels are mixed.
        let bytes = [
            deliver(1, 5, RAW, RAW),
            get_ok(2, 5, RAW),
            header(2, b"", |_| b"plain".to_vec()),
            header(1, b"", |index| if index == 5 { RAW.to_vec() } else { Vec::new() }),
        ];
        assert_eq!(parsed(&received(&mut inbound, &bytes.concat())).len(), 4);
        let all = [Property::Exchange, Property::RoutingKey, Property::CorrelationId];
        let properties = |result: Option<RawStrings>| result.expect("a record").properties;
        assert_eq!(properties(strings.take(1, 5)), all.map(|property| (property, RAW.to_vec())));
        assert_eq!(properties(strings.take(2, 5)), [(Property::RoutingKey, RAW.to_vec())]);
    }

    #[test]
    fn returned_messages_and_close_reasons_arrive_as_utf_8_without_a_record() {
        let (mut inbound, _, strings) = filters();
        let out = received(&mut inbound, &conversation(&strings)[0]);
        assert_eq!(parsed(&out).len(), 13);
        assert!(strings.take(1, 1).is_some() && strings.take(2, 1).is_some());
        for channel in 0..3 {
            for tag in 0..3 {
                assert_eq!(strings.take(channel, tag), None);
            }
        }
    }

    #[test]
    fn messages_without_raw_strings_pass_unchanged_and_leave_no_record() {
        let (mut inbound, _, strings) = filters();
        let bytes = [
            deliver(1, 1, "é".as_bytes(), b"key"),
            header(1, &table("ü".as_bytes()), |_| "ß".into()),
            body(1, RAW),
        ];
        assert_eq!(received(&mut inbound, &bytes.concat()), bytes.concat());
        assert_eq!(strings.take(1, 1), None);
    }

    #[test]
    fn a_channel_that_is_opened_again_has_no_records() {
        let (mut inbound, _, strings) = filters();
        let bytes = [deliver(1, 1, RAW, b""), header(1, b"", |_| Vec::new()), deliver(1, 2, RAW, b"")];
        received(&mut inbound, &bytes.concat());
        received(&mut inbound, &method(1, CHANNEL_OPEN_OK, &[&[0; 4]]));
        received(&mut inbound, &header(1, b"", |_| RAW.to_vec()));
        assert_eq!((strings.take(1, 1), strings.take(1, 2)), (None, None));
        assert!(inbound.begun.is_empty());
    }

    #[test]
    fn tokens_are_replaced_in_each_property_and_in_the_destination() {
        let (_, mut outbound, strings) = filters();
        for raw in [&b""[..], RAW, &[0xfe; 47], &[0xfe; 48], &[0xfe; 255]] {
            let token = strings.token(raw).into_bytes();
            for (index, form) in PROPERTIES.iter().enumerate() {
                let Form::Short(_) = form else { continue };
                let message = |value: &[u8]| {
                    let value = value.to_vec();
                    let table = table(b"name");
                    [
                        publish(b"exchange", b"key"),
                        header(1, &table, |at| if at == index { value.clone() } else { b"text".to_vec() }),
                    ]
                };
                assert_eq!(sent(&mut outbound, &message(&token).concat()), message(raw).concat());
            }
            assert_eq!(sent(&mut outbound, &publish(&token, b"key")), publish(raw, b"key"));
            assert_eq!(sent(&mut outbound, &publish(b"exchange", &token)), publish(b"exchange", raw));
            let all = |value: &[u8]| header(1, &table(b"name"), |_| value.to_vec());
            assert_eq!(sent(&mut outbound, &all(&token)), all(raw));
        }
    }

    #[test]
    fn what_is_no_token_of_this_connection_is_sent_as_it_is() {
        let (_, mut outbound, strings) = filters();
        let (_, _, other) = filters();
        let token = strings.token(RAW);
        let foreign = other.token(RAW);
        for text in [&foreign, &token[1..], &format!(" {token}"), "", "0".repeat(48).as_str()] {
            let bytes = [publish(text.as_bytes(), b""), header(1, b"", |_| text.into())].concat();
            assert_eq!(sent(&mut outbound, &bytes), bytes);
        }
        let elsewhere = [
            header(1, &[text(b"a"), long(b'S', token.as_bytes())].concat(), |_| Vec::new()),
            body(1, token.as_bytes()),
            method(1, [0, 50, 0, 10], &[&[0, 0], &text(token.as_bytes()), &[0; 5]]),
        ];
        assert_eq!(sent(&mut outbound, &elsewhere.concat()), elsewhere.concat());
    }

    #[test]
    fn an_unknown_token_of_this_connection_is_sent_as_an_empty_string() {
        let (_, mut outbound, strings) = filters();
        let token = strings.token(RAW).into_bytes();
        let forged = [&token[..], b"0"].concat();
        assert_eq!(sent(&mut outbound, &publish(&forged, &token)), publish(b"", RAW));
    }

    #[test]
    fn the_output_does_not_depend_on_how_the_bytes_are_split() {
        let (mut inbound, mut outbound, strings) = filters();
        let [from_broker, from_lapin] = conversation(&strings);
        let whole = [received(&mut inbound, &from_broker), sent(&mut outbound, &from_lapin)];
        let record = strings.take(1, 1);
        assert!(record.is_some());
        let check = |sizes: &mut dyn FnMut() -> usize| {
            // The tokens are those of this connection.
            let mut inbound = Inbound::new(strings.clone());
            let mut outbound = Outbound::new(strings.clone());
            let mut halves = [BytesMut::new(), BytesMut::new()];
            for (bytes, into_lapin) in [(&from_broker, true), (&from_lapin, false)] {
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let (now, later) = rest.split_at(sizes().clamp(1, rest.len()));
                    match into_lapin {
                        true => inbound.push(now, &mut halves[0]),
                        false => outbound.push(now, &mut halves[1]),
                    }
                    rest = later;
                }
            }
            assert_eq!(halves, whole);
            assert_eq!(strings.take(1, 1), record);
        };
        for first in 1..from_broker.len().max(from_lapin.len()) {
            let mut sizes = [first, usize::MAX].into_iter().cycle();
            check(&mut || sizes.next().unwrap_or(1));
        }
        check(&mut || 1);
        let mut random = StdRng::seed_from_u64(2);
        for _ in 0..500 {
            let most = random.random_range(2..400);
            check(&mut || random.random_range(1..most));
        }
    }

    #[test]
    fn a_large_header_is_held_and_a_larger_one_passes_unchanged() {
        let (mut inbound, _, strings) = filters();
        let value = |length: usize| [text(RAW), long(b'S', &vec![0xff; length])].concat();
        let large = header(1, &value(131_072), |_| RAW.to_vec());
        let out = received(&mut inbound, &[deliver(1, 1, b"", b""), large.clone()].concat());
        assert_eq!(parsed(&out).len(), 2);
        assert!(strings.take(1, 1).is_some());
        let larger = header(1, &value(MAX_HELD), |_| RAW.to_vec());
        let out = received(&mut inbound, &[&larger[..], &large].concat());
        assert_eq!(out[..larger.len()], larger[..]);
        assert_eq!(parsed(&out[larger.len()..]).len(), 1);
    }

    #[test]
    fn a_frame_full_of_invalid_names_is_cleaned() {
        let (mut inbound, _, strings) = filters();
        let table = [text(b"\xff"), b"V".to_vec()].concat().repeat(43_000);
        let out =
            received(&mut inbound, &[deliver(1, 1, b"", b""), header(1, &table, |_| Vec::new())].concat());
        assert_eq!(parsed(&out).len(), 2);
        assert_eq!(strings.take(1, 1).expect("a record").header_names.len(), 43_000);
    }

    #[test]
    fn what_is_no_frame_passes_unchanged_from_there_on() {
        let mut broken = deliver(1, 1, b"", b"key");
        broken.pop();
        broken.push(0);
        for start in [b"HTTP/1.1 400 Bad".to_vec(), broken] {
            let (mut inbound, _, _) = filters();
            let bytes = [start, deliver(1, 1, b"", RAW)].concat();
            assert_eq!(received(&mut inbound, &bytes), bytes);
        }
    }

    #[test]
    fn a_frame_that_does_not_follow_the_protocol_passes_unchanged() {
        let whole = header(1, &table(RAW), |_| RAW.to_vec());
        let payload = &whole[PREFIX..whole.len() - 1];
        for length in 0..payload.len() {
            let (mut inbound, _, _) = filters();
            let short = frame(HEADER, 1, &payload[..length]);
            assert_eq!(received(&mut inbound, &short), short);
            let out = received(&mut inbound, &deliver(1, 1, b"", RAW));
            assert_eq!(out, deliver(1, 1, b"", CLEAN));
        }
        let (mut inbound, _, _) = filters();
        let long = frame(HEADER, 1, &[payload, &[0]].concat());
        assert_eq!(received(&mut inbound, &long), long);
    }

    #[test]
    fn random_and_mutated_bytes_neither_panic_nor_get_lost() {
        let mut random = StdRng::seed_from_u64(3);
        let strings = Arc::new(Strings::new());
        let [from_broker, _] = conversation(&strings);
        for round in 0..20_000 {
            let mut bytes = from_broker.clone();
            if round % 4 == 0 {
                random.fill_bytes(&mut bytes);
                bytes[0] = random.random_range(0..10);
                bytes[3] = 0;
                bytes[4] = 0;
            }
            for _ in 0..random.random_range(0..6) {
                let index = random.random_range(0..bytes.len());
                bytes[index] = random.random();
            }
            let mut inbound = Inbound::new(strings.clone());
            let mut outbound = Outbound::new(strings.clone());
            let mut out = [BytesMut::new(), BytesMut::new()];
            for chunk in bytes.chunks(random.random_range(1..bytes.len())) {
                inbound.push(chunk, &mut out[0]);
                outbound.push(chunk, &mut out[1]);
            }
            let frames = &inbound.frames;
            assert_eq!(out[0].len() + frames.held.len(), bytes.len());
            assert!(frames.held.capacity() <= 2 * bytes.len() && inbound.begun.len() < 20);
            // Outbound, nothing in these bytes is a token.
            assert_eq!([&out[1][..], &outbound.frames.held].concat(), bytes);
        }
    }

    #[test]
    fn a_frame_of_valid_form_and_random_strings_is_one_that_lapin_takes() {
        let mut random = StdRng::seed_from_u64(4);
        for _ in 0..2_000 {
            let (mut inbound, _, strings) = filters();
            let mut value = |most: usize| {
                let mut bytes = vec![0; random.random_range(0..=most)];
                random.fill_bytes(&mut bytes);
                bytes
            };
            let (exchange, key, name) = (value(255), value(255), value(255));
            let properties: Vec<Vec<u8>> = (0..PROPERTIES.len()).map(|_| value(12)).collect();
            let bytes = [
                deliver(1, 1, &exchange, &key),
                header(1, &table(&name), |index| properties[index].clone()),
                body(1, &value(50)),
            ];
            let out = received(&mut inbound, &bytes.concat());
            assert_eq!((parsed(&out).len(), out.len()), (3, bytes.concat().len()));
            let raw = strings.take(1, 1).unwrap_or_default();
            let invalid = |bytes: &Vec<u8>| str::from_utf8(bytes).is_err();
            assert_eq!(raw.header_names.len(), if invalid(&name) { 22 } else { 0 });
            assert_eq!(raw.property(Property::RoutingKey), invalid(&key).then_some(&key[..]));
            assert_eq!(
                raw.property(Property::MessageId),
                Some(&properties[8]).filter(|it| invalid(it)).map(|it| &it[..])
            );
        }
    }
}
