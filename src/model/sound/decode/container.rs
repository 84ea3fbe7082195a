//! Recognizes the format of a recording by its first bytes, and finds where its sound begins and ends. Skips tags, and
//! pictures and seek tables before the sound: in the library they would take many times more memory than in the file,
//! and seek tables would be sorted in quadratic time. Decodes nothing.

use std::io::{self, SeekFrom};

use super::source::{End, Source, read_up_to};
use super::{Format, SUPPORTED, flac, mp3, pages, refused, unreadable, wav};
use crate::model::TaskError;

/// The first bytes of a file, by which its format is recognized.
const MAGIC_BYTES: usize = 64;
/// The maximum number of tags before the sound, and of those after it. Usually there is one.
const MAX_TAGS: usize = 16;
/// The last page of an Ogg file is looked for in this many bytes at the end: twice the maximum size of a page, 65,307.
const OGG_TAIL: u64 = 2 * 65_307;

/// A file whose format is known. `head`, followed by the next `bytes` bytes of its source, is a file of that format.
pub(super) struct Opened {
    pub(super) format: Format,
    /// The parts of the header that describe the sound, if others were skipped.
    pub(super) head: Vec<u8>,
    /// The bytes of the source up to the tags after the sound.
    pub(super) bytes: u64,
    /// What WAV and Ogg files say about their end. For other formats, [`End::Unmarked`].
    pub(super) end: End,
    /// For an Ogg file, the time at which its last page ends, in samples per channel.
    pub(super) ogg_end: Option<u64>,
}

/// Recognizes a file's format, and finds where its sound begins and ends.
///
/// # Errors
/// The format or codec is not supported, or the header of a WAV or FLAC file is refused.
pub(super) fn open(source: &mut dyn Source) -> Result<Opened, TaskError> {
    let length = source.seek(SeekFrom::End(0)).map_err(unreadable)?;
    let mut start = 0;
    let mut magic = first_bytes(source, start)?;
    for _ in 0..MAX_TAGS {
        let Some(tag) = tag_bytes(&magic) else { break };
        start += tag;
        magic = first_bytes(source, start)?;
    }
    let format = match format(&magic) {
        Some(format) => format,
        None => {
            start += first_mp3_frame(source, &magic, start, length)?;
            Format::Mp3
        }
    };
    let mut opened = Opened { format, head: Vec::new(), bytes: 0, end: End::Unmarked, ogg_end: None };
    let mut sound_end = length;
    match format {
        Format::Wav => {
            let header = wav::header(source, start, length)?;
            (opened.head, start, sound_end) = (header.head, header.start, header.end);
            opened.end = if header.states_end { End::Stated } else { End::Unmarked };
        }
        Format::Flac => {
            (opened.head, start) = flac::header(source, start)?;
            sound_end = end_without_tags(source, length).map_err(unreadable)?;
        }
        Format::Mp3 => sound_end = end_without_tags(source, length).map_err(unreadable)?,
        Format::Ogg => {
            check_ogg_codec(&magic)?;
            (opened.end, opened.ogg_end) = ogg_end(source, &magic, length).map_err(unreadable)?;
        }
    }
    opened.bytes = sound_end.saturating_sub(start);
    source.seek(SeekFrom::Start(start)).map_err(unreadable)?;
    Ok(opened)
}

/// The [`MAGIC_BYTES`] from `start` on; fewer at the file's end.
fn first_bytes(source: &mut dyn Source, start: u64) -> Result<Vec<u8>, TaskError> {
    source.seek(SeekFrom::Start(start)).map_err(unreadable)?;
    read_up_to(source, MAGIC_BYTES as u64).map_err(unreadable)
}

/// The length in bytes of the ID3v2 or APE tag that begins with these bytes; none if no tag does.
fn tag_bytes(magic: &[u8]) -> Option<u64> {
    if let [b'A', b'P', b'E', b'T', b'A', b'G', b'E', b'X', _, _, _, _, a, b, c, d, ..] = magic {
        return Some(32 + u64::from(u32::from_le_bytes([*a, *b, *c, *d])));
    }
    let [b'I', b'D', b'3', _, _, flags, size @ ..] = magic else { return None };
    let has_footer = flags & 0x10 != 0;
    Some(10 + synchsafe(*size.first_chunk()?) + if has_footer { 10 } else { 0 })
}

fn format(magic: &[u8]) -> Option<Format> {
    match magic {
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Some(Format::Wav),
        [b'f', b'L', b'a', b'C', ..] => Some(Format::Flac),
        [b'O', b'g', b'g', b'S', ..] => Some(Format::Ogg),
        // The frame sync of MPEG audio, a version other than the reserved one, and layer 3.
        [0xff, second, third, ..]
            if second & 0xe0 == 0xe0
                && second & 0x18 != 0x08
                && second & 0x06 == 0x02
                && !is_of_free_rate(*third) =>
        {
            Some(Format::Mp3)
        }
        _ => None,
    }
}

/// Whether the third byte of an MPEG audio frame states no bit rate.
fn is_of_free_rate(third: u8) -> bool {
    third & 0xf0 == 0
}

/// The offset of the first frame of an MP3 file that begins with something else.
///
/// # Errors
/// There is none: the format is not supported. The error names it if it is a common one.
fn first_mp3_frame(source: &mut dyn Source, magic: &[u8], start: u64, length: u64) -> Result<u64, TaskError> {
    let name = match magic {
        [] => return Err(refused("the recording is empty")),
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => "MP4 (M4A, AAC or ALAC)",
        [0x1a, 0x45, 0xdf, 0xa3, ..] => "WebM or Matroska (often Opus)",
        [b'F', b'O', b'R', b'M', ..] => "AIFF",
        [b'c', b'a', b'f', b'f', ..] => "CAF",
        [b'#', b'!', b'A', b'M', b'R', ..] => "AMR",
        [b'R', b'F', b'6', b'4', ..] | [b'B', b'W', b'6', b'4', ..] => "RF64 (a WAV file of more than 4 GiB)",
        [0x30, 0x26, 0xb2, 0x75, ..] => "WMA",
        [0xff, second, ..] if second & 0xf6 == 0xf0 => "AAC",
        [0xff, second, ..] if second & 0xe0 == 0xe0 && second & 0x06 == 0x04 => "MPEG audio, layer 2",
        [0xff, second, third, ..]
            if second & 0xe0 == 0xe0 && second & 0x06 == 0x02 && is_of_free_rate(*third) =>
        {
            "MP3 with a free bit rate"
        }
        [b'{', ..] => "JSON",
        _ => {
            source.seek(SeekFrom::Start(start)).map_err(unreadable)?;
            let searched = read_up_to(source, mp3::SEARCHED_BYTES).map_err(unreadable)?;
            return mp3::first_frame(&searched).map(|offset| offset as u64).ok_or_else(|| {
                refused(format!("the {length} bytes are of no known sound format; supported are {SUPPORTED}"))
            });
        }
    };
    Err(refused(format!("the recording is {name}, which is not supported; supported are {SUPPORTED}")))
}

/// The offset at which the tags after the sound begin: ID3v1 with its extension, APE, Lyrics3, and ID3v2 at the end. It
/// is the file's length if there are none.
fn end_without_tags(source: &mut dyn Source, length: u64) -> io::Result<u64> {
    /// The largest tag without a size: ID3v1 with its extension.
    const TAIL: u64 = 128 + 227;
    let mut end = length;
    for _ in 0..MAX_TAGS {
        let start = end.saturating_sub(TAIL);
        source.seek(SeekFrom::Start(start))?;
        let tail = read_up_to(source, end - start)?;
        match tail_tag_bytes(&tail) {
            Some(bytes) if bytes <= end => end -= bytes,
            _ => break,
        }
    }
    Ok(end)
}

/// The length in bytes of the tag that ends with these bytes; none if no tag does.
fn tail_tag_bytes(tail: &[u8]) -> Option<u64> {
    let last = |count: usize| tail.len().checked_sub(count).map(|start| &tail[start..]);
    if last(128).is_some_and(|tag| tag.starts_with(b"TAG")) {
        let is_extended = last(128 + 227).is_some_and(|tag| tag.starts_with(b"TAG+"));
        return Some(if is_extended { 128 + 227 } else { 128 });
    }
    if let Some(footer) = last(32).filter(|footer| footer.starts_with(b"APETAGEX")) {
        let number = |at: usize| footer[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        let (size, flags) = (number(12), number(20));
        let has_header = flags >> 31 == 1;
        return Some(u64::from(size).max(32) + if has_header { 32 } else { 0 });
    }
    if let Some(footer) = last(15).filter(|footer| footer.ends_with(b"LYRICS200")) {
        let size: u64 = std::str::from_utf8(&footer[..6]).ok()?.parse().ok()?;
        return Some(size + 15);
    }
    let [b'3', b'D', b'I', _, _, _, a, b, c, d] = last(10)? else { return None };
    Some(20 + synchsafe([*a, *b, *c, *d]))
}

/// The number in four bytes of seven bits, with which ID3v2 writes sizes.
fn synchsafe(bytes: [u8; 4]) -> u64 {
    bytes.iter().fold(0, |size, byte| size << 7 | u64::from(byte & 0x7f))
}

/// Refuses an Ogg file with an unsupported codec, which the error names.
fn check_ogg_codec(magic: &[u8]) -> Result<(), TaskError> {
    // The header of a page has 27 bytes and one more for each segment. The first page holds one short packet.
    let packet = magic.get(26).and_then(|segments| magic.get(27 + usize::from(*segments)..)).unwrap_or(&[]);
    let name = match packet {
        [b'O', b'p', b'u', b's', b'H', ..] => "Opus",
        [b'S', b'p', b'e', b'e', b'x', ..] => "Speex",
        [0x80, b't', b'h', b'e', b'o', ..] => "Theora",
        _ => return Ok(()),
    };
    Err(refused(format!("the Ogg file holds {name}, which is not supported; supported are {SUPPORTED}")))
}

/// What an Ogg file says about its end, and the time in samples that its last page states, if that page belongs to the
/// same stream as the first.
fn ogg_end(source: &mut dyn Source, magic: &[u8], length: u64) -> io::Result<(End, Option<u64>)> {
    source.seek(SeekFrom::Start(length.saturating_sub(OGG_TAIL)))?;
    let tail = read_up_to(source, OGG_TAIL)?;
    let Some(start) = tail.windows(4).rposition(|bytes| bytes == b"OggS") else {
        return Ok((End::CutOff, None));
    };
    let page = &tail[start..];
    let end = pages::end(page);
    if page.get(14..18).is_none_or(|serial| magic.get(14..18) != Some(serial)) {
        return Ok((end, None));
    }
    let granule =
        page.get(6..14).and_then(|bytes| bytes.first_chunk()).map(|bytes| i64::from_le_bytes(*bytes));
    // -1 means that no packet ends on the page.
    Ok((end, granule.and_then(|granule| u64::try_from(granule).ok())))
}
