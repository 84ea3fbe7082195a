//! Reads the pages of an Ogg file, and checks each by its checksum before it is passed on. At each false page the
//! library would read up to 64 KiB and then search for the next page right behind its start: a file of false pages
//! would take seconds per megabyte.

use std::io::{self, Read};

use symphonia::core::checksum::Crc32;
use symphonia::core::io::Monitor as _;

use super::source::End;

/// The bytes of a page's header before the lengths of its segments.
const HEADER: usize = 27;
/// Where the checksum of a page is.
const CHECKSUM: std::ops::Range<usize> = 22..26;
/// The flag of the last page of a stream.
const LAST: u8 = 4;

/// The pages of an Ogg file, as a stream of bytes.
pub(super) struct Pages<R> {
    source: R,
    /// A valid page, of at most 65,307 bytes.
    page: Vec<u8>,
    /// The number of bytes of `page` that were passed on.
    passed: usize,
    /// The streams that have begun and not ended.
    streams: Vec<Stream>,
    /// Whether all streams have ended. The bytes after them need not be a page.
    may_end: bool,
}

/// A stream of an Ogg file: usually there is one.
struct Stream {
    serial: u32,
    /// The number of its last page.
    number: u32,
    /// Whether that page is one of sound: those of the header have the time 0.
    is_sound: bool,
}

/// The maximum number of streams at the same time.
const MAX_STREAMS: usize = 16;

impl<R: Read> Pages<R> {
    /// `source` is positioned at the first page.
    pub(super) fn new(source: R) -> Self {
        Self { source, page: Vec::new(), passed: 0, streams: Vec::new(), may_end: false }
    }

    /// Reads and checks the next page. `page` is empty at the end of the file, and after an error.
    ///
    /// # Errors
    /// `UnexpectedEof` if the page is cut off, and `InvalidData` if it is none, or has a wrong checksum.
    fn next_page(&mut self) -> io::Result<()> {
        self.passed = 0;
        self.page.clear();
        let result = self.read_page();
        if result.is_err() {
            self.page.clear();
        }
        if self.may_end { Ok(()) } else { result }
    }

    fn read_page(&mut self) -> io::Result<()> {
        if !self.append(HEADER)? {
            return if self.page.is_empty() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        if !self.page.starts_with(b"OggS") {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "there are bytes between its pages"));
        }
        let segments = usize::from(self.page[HEADER - 1]);
        let has_lengths = self.append(segments)?;
        let body = self.page[HEADER..].iter().map(|length| usize::from(*length)).sum();
        if !has_lengths || !self.append(body)? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let stated = self.page[CHECKSUM].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        // The checksum is computed with zeros in its own place.
        let mut sum = Crc32::new(0);
        for bytes in [&self.page[..CHECKSUM.start], &[0; 4], &self.page[CHECKSUM.end..]] {
            sum.process_buf_bytes(bytes);
        }
        if stated != Some(sum.crc()) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a page has a wrong checksum"));
        }
        self.follow_stream()
    }

    /// Checks that no page is missing before the current one, and notes where streams end. Pages may be missing between a
    /// header and the sound: whoever begins to record a stream gets the header first.
    fn follow_stream(&mut self) -> io::Result<()> {
        let four = |at: usize| self.page[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        let (serial, number) = (four(14), four(18));
        let is_sound = self.page[6..14] != [0; 8];
        let index = self.streams.iter().position(|stream| stream.serial == serial);
        if let Some(stream) = index.map(|index| &mut self.streams[index]) {
            if stream.is_sound && number != stream.number.wrapping_add(1) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a page is missing"));
            }
            (stream.number, stream.is_sound) = (number, is_sound || stream.is_sound);
        } else if self.streams.len() < MAX_STREAMS {
            self.streams.push(Stream { serial, number, is_sound });
        } else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it has too many streams"));
        }
        if self.page[5] & LAST != 0 {
            self.streams.retain(|stream| stream.serial != serial);
        }
        self.may_end = self.streams.is_empty();
        Ok(())
    }

    /// Appends this many bytes of the file to the page. False if there are fewer.
    fn append(&mut self, bytes: usize) -> io::Result<bool> {
        let read = (&mut self.source).take(bytes as u64).read_to_end(&mut self.page)?;
        Ok(read == bytes)
    }
}

impl<R: Read> Read for Pages<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.passed == self.page.len() {
            self.next_page()?;
        }
        let read = (&self.page[self.passed..]).read(buffer)?;
        self.passed += read;
        Ok(read)
    }
}

/// What the last page of a file says about its end.
pub(super) fn end(page: &[u8]) -> End {
    let lengths = page.get(HEADER - 1).map_or(0, |segments| usize::from(*segments));
    let lengths = page.get(HEADER..HEADER + lengths).unwrap_or_default();
    let bytes = HEADER + lengths.len() + lengths.iter().map(|length| usize::from(*length)).sum::<usize>();
    match lengths.last() {
        Some(_) if page.len() < bytes => End::CutOff,
        _ if page.get(5).is_some_and(|flags| flags & LAST != 0) => End::Stated,
        // A packet goes on in the next page if its last segment has 255 bytes.
        Some(length) if *length < 255 && page.len() == bytes => End::Unmarked,
        _ => End::CutOff,
    }
}
