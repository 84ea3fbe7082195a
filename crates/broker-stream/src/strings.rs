//! What one connection knows of short strings that are not UTF-8: the originals of those that it received,
//! and the tokens of those that are to be sent.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use parking_lot::Mutex;

/// Bytes that all records together may take. A delivery has a record until somebody reads it.
const MAX_RECORDED: usize = 16 << 20;
/// What a recorded string takes beside its own bytes, roughly.
const STRING_OVERHEAD: usize = 64;
/// Tokens that live at once. A message that waits to be sent has at most one for each of its strings.
const MAX_TOKENS: usize = 16_384;
/// Where a token's number stands: after 128 random bits in hexadecimal digits. The number has 16 digits.
const NUMBER: Range<usize> = 32..48;
/// The longest short string of AMQP.
const MAX_SHORT_STRING: usize = 255;

/// A short string that a message carries beside its headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "AMQP's own names")]
pub enum Property {
    ContentType,
    ContentEncoding,
    CorrelationId,
    ReplyTo,
    Expiration,
    MessageId,
    Type,
    UserId,
    AppId,
    ClusterId,
    Exchange,
    RoutingKey,
}

/// The short strings of one delivery that are not UTF-8. Lapin sees `?` in the place of each invalid byte.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawStrings {
    /// Properties, and where the message was published to.
    pub properties: Vec<(Property, Vec<u8>)>,
    /// Names of headers, also of those in nested tables, in the order of the message.
    pub header_names: Vec<Vec<u8>>,
}

impl RawStrings {
    /// The original of a property; none if lapin has it unchanged.
    pub fn property(&self, property: Property) -> Option<&[u8]> {
        self.properties.iter().find(|(known, _)| *known == property).map(|(_, raw)| &raw[..])
    }

    /// The originals of headers' names, by the names that lapin has. Of several such names in one table, lapin keeps
    /// the last one's value, so this is the last one too.
    pub fn header_names(&self) -> HashMap<String, &[u8]> {
        self.header_names.iter().map(|raw| (replaced(raw), &raw[..])).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.properties.is_empty() && self.header_names.is_empty()
    }

    fn size(&self) -> usize {
        let properties = self.properties.iter().map(|(_, raw)| raw);
        properties.chain(&self.header_names).map(|raw| raw.len() + STRING_OVERHEAD).sum()
    }
}

/// The text that lapin has in the place of these bytes.
pub fn replaced(raw: &[u8]) -> String {
    let mut bytes = raw.to_vec();
    replace_invalid(&mut bytes);
    String::from_utf8(bytes).unwrap_or_default()
}

/// Makes `bytes` UTF-8 of the same length.
pub(crate) fn replace_invalid(bytes: &mut [u8]) {
    let raw = bytes.to_vec();
    let mut rest = bytes;
    for chunk in raw.utf8_chunks() {
        let (_, after) = rest.split_at_mut(chunk.valid().len());
        let (invalid, after) = after.split_at_mut(chunk.invalid().len());
        invalid.fill(b'?');
        rest = after;
    }
}

/// The strings of one connection, shared by its stream and those who send and receive on it. Not `Debug`,
/// because the secret belongs in no log.
pub struct Strings {
    received: Mutex<Received>,
    tokens: Mutex<Tokens>,
    /// How the tokens of this connection begin. Nobody else can know it, because no token leaves the process.
    secret: String,
}

#[derive(Default)]
struct Received {
    /// Channel, delivery tag and strings, oldest first. Deliveries are read about in this order, so a record
    /// is found near the front.
    records: VecDeque<(u16, u64, RawStrings)>,
    size: usize,
}

#[derive(Default)]
struct Tokens {
    /// What the newest tokens stand for. The first one's number is `first`.
    raw: VecDeque<Vec<u8>>,
    first: u64,
}

impl Strings {
    /// The strings of a new connection.
    #[expect(clippy::new_without_default, reason = "each has a secret of its own")]
    pub fn new() -> Self {
        let secret = format!("{:032x}", rand::random::<u128>());
        Self { received: Mutex::default(), tokens: Mutex::default(), secret }
    }

    /// Removes and returns the record of a delivery. None if all its short strings are UTF-8, or its record
    /// has left: the oldest records leave when all take more than 16 MiB.
    pub fn take(&self, channel: u16, delivery_tag: u64) -> Option<RawStrings> {
        let mut received = self.received.lock();
        let is_wanted = |record: &(u16, u64, _)| (record.0, record.1) == (channel, delivery_tag);
        let index = received.records.iter().position(is_wanted)?;
        let (_, _, strings) = received.records.remove(index)?;
        received.size -= strings.size();
        Some(strings)
    }

    /// Text to give lapin in the place of `bytes`, of which 255 are taken. Where the text is a property, an
    /// exchange or a routing key of a message that is sent on this connection, the broker gets the bytes. The
    /// newest 16,384 tokens are known; in the place of an older one the broker gets an empty string, so that
    /// no token leaves the process.
    pub fn token(&self, bytes: &[u8]) -> String {
        let raw = &bytes[..bytes.len().min(MAX_SHORT_STRING)];
        let mut tokens = self.tokens.lock();
        let number = tokens.first + tokens.raw.len() as u64;
        tokens.raw.push_back(raw.to_vec());
        if tokens.raw.len() > MAX_TOKENS {
            tokens.raw.pop_front();
            tokens.first += 1;
        }
        self.format(number, raw.len())
    }

    /// Lapin may count on a frame that does not grow, so a token is at least as long as its bytes.
    fn format(&self, number: u64, length: usize) -> String {
        let token = format!("{}{number:016x}", self.secret);
        format!("{token:-<length$}")
    }

    /// What the broker gets in the place of `text`; none if `text` is not a token.
    pub(crate) fn resolve(&self, text: &[u8]) -> Option<Vec<u8>> {
        if !text.starts_with(self.secret.as_bytes()) {
            return None;
        }
        let number = text.get(NUMBER).and_then(|digits| str::from_utf8(digits).ok());
        let number = number.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        let raw = number.and_then(|number| {
            let tokens = self.tokens.lock();
            let index = usize::try_from(number.checked_sub(tokens.first)?).ok()?;
            let raw = tokens.raw.get(index)?;
            (self.format(number, raw.len()).as_bytes() == text).then(|| raw.clone())
        });
        Some(raw.unwrap_or_default())
    }

    pub(crate) fn record(&self, channel: u16, delivery_tag: u64, strings: RawStrings) {
        let mut received = self.received.lock();
        received.size += strings.size();
        received.records.push_back((channel, delivery_tag, strings));
        while received.size > MAX_RECORDED
            && let Some((_, _, oldest)) = received.records.pop_front()
        {
            received.size -= oldest.size();
        }
    }

    /// Drops the records of a channel, whose delivery tags begin again.
    pub(crate) fn forget(&self, channel: u16) {
        let mut received = self.received.lock();
        received.records.retain(|(of, _, _)| *of != channel);
        received.size = received.records.iter().map(|(_, _, strings)| strings.size()).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(length: usize) -> RawStrings {
        RawStrings { header_names: vec![vec![0xff; length]], ..RawStrings::default() }
    }

    #[test]
    fn a_record_is_taken_once_and_by_its_channel_and_tag_only() {
        let strings = Strings::new();
        strings.record(1, 7, named(1));
        strings.record(2, 7, named(2));
        strings.record(1, 8, named(3));
        assert_eq!(strings.take(3, 7), None);
        assert_eq!(strings.take(2, 7), Some(named(2)));
        assert_eq!(strings.take(2, 7), None);
        assert_eq!(strings.take(1, 8), Some(named(3)));
        assert_eq!(strings.take(1, 7), Some(named(1)));
        assert_eq!(strings.received.lock().size, 0);
    }

    #[test]
    fn the_oldest_records_leave_when_all_are_too_large() {
        let strings = Strings::new();
        let length = 1 << 20;
        for tag in 1..=20 {
            strings.record(1, tag, named(length));
        }
        let taken: Vec<u64> = (1..=20).filter(|tag| strings.take(1, *tag).is_some()).collect();
        assert_eq!(taken, (6..=20).collect::<Vec<_>>());
        strings.record(1, 21, named(MAX_RECORDED));
        assert_eq!(strings.take(1, 21), None);
        assert_eq!(strings.received.lock().size, 0);
    }

    #[test]
    fn a_channel_is_forgotten_without_the_others() {
        let strings = Strings::new();
        for channel in 1..=3 {
            strings.record(channel, 1, named(1));
        }
        strings.forget(2);
        assert_eq!((1..=3).filter(|channel| strings.take(*channel, 1).is_some()).count(), 2);
        assert_eq!(strings.received.lock().size, 0);
    }

    #[test]
    fn a_token_is_ascii_and_neither_shorter_than_its_bytes_nor_longer_than_a_short_string() {
        let strings = Strings::new();
        for length in [0, 1, 16, 47, 48, 49, 254, 255] {
            let raw = vec![0xfe; length];
            let token = strings.token(&raw);
            assert!(token.is_ascii() && token.len() >= length && token.len() <= 255, "{token}");
            assert_eq!(strings.resolve(token.as_bytes()), Some(raw));
        }
        assert_eq!(strings.resolve(strings.token(&[0xfe; 300]).as_bytes()), Some(vec![0xfe; 255]));
    }

    #[test]
    fn tokens_of_other_connections_and_texts_that_look_like_tokens_are_no_tokens() {
        let (strings, other) = (Strings::new(), Strings::new());
        let token = strings.token(b"\xff");
        assert_eq!(other.resolve(token.as_bytes()), None);
        assert_eq!(strings.resolve(other.token(b"\xff").as_bytes()), None);
        assert_eq!(strings.resolve(&token.as_bytes()[1..]), None);
        assert_eq!(strings.resolve(format!("x{token}").as_bytes()), None);
        assert_eq!(strings.resolve(token.to_uppercase().as_bytes()).filter(|raw| !raw.is_empty()), None);
        assert_eq!(strings.resolve(&[b'0'; 48]), None);
        assert_eq!(strings.resolve(b""), None);
    }

    #[test]
    fn nothing_that_begins_with_the_secret_is_sent() {
        let strings = Strings::new();
        let token = strings.token(b"\xff");
        let unknown = strings.format(1, 0);
        let signed = format!("{}{:+016x}", strings.secret, 0);
        for text in [strings.secret.clone(), token.clone() + "-", token[..47].to_owned(), unknown, signed] {
            assert!(strings.resolve(text.as_bytes()).is_some_and(|sent| sent.is_empty()), "{text}");
        }
    }

    #[test]
    fn the_oldest_token_is_replaced_by_an_empty_string() {
        let strings = Strings::new();
        let tokens: Vec<String> = (0..=MAX_TOKENS).map(|n| strings.token(n.to_string().as_bytes())).collect();
        assert_eq!(strings.resolve(tokens[0].as_bytes()), Some(Vec::new()));
        assert_eq!(strings.resolve(tokens[1].as_bytes()), Some(b"1".to_vec()));
        let last = MAX_TOKENS.to_string().into_bytes();
        assert_eq!(strings.resolve(tokens[MAX_TOKENS].as_bytes()), Some(last));
        assert_eq!(strings.tokens.lock().raw.len(), MAX_TOKENS);
    }

    #[test]
    fn a_header_s_name_is_found_by_what_lapin_has_of_it() {
        let header_names = vec![b"a\xff".to_vec(), b"b\xffc".to_vec(), b"a\xfe".to_vec()];
        let raw = RawStrings { header_names, ..RawStrings::default() };
        assert_eq!(raw.header_names().get("b?c"), Some(&&b"b\xffc"[..]));
        assert_eq!(raw.header_names().get("a?"), Some(&&b"a\xfe"[..]));
        assert_eq!(raw.header_names().get("a"), None);
    }

    #[test]
    fn each_invalid_byte_is_replaced_and_nothing_else() {
        for (raw, replaced) in [
            (&b"\xff"[..], "?"),
            (b"a\xc3\xa9\xc3", "aé?"),
            (b"\xf0\x9f\x8e\x89\xf0\x9f\x8e", "🎉???"),
            (b"\xed\xa0\x80", "???"),
            (b"", ""),
        ] {
            let mut bytes = raw.to_vec();
            replace_invalid(&mut bytes);
            assert_eq!(String::from_utf8(bytes).as_deref(), Ok(replaced));
        }
    }
}
