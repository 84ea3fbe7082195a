//! Recognizes the format of a recording by its first bytes, and checks the length that its header states. Skips tags,
//! pictures and seek tables before the sound: in the library they would take many times more memory than in the file,
//! and seek tables would be sorted in quadratic time. Decodes nothing.

use std::fmt;
use std::io::{self, Read, SeekFrom};

use super::source::Source;
use super::{refused, unreadable};
use crate::model::TaskError;

/// The supported formats, as errors and documents list them.
pub const SUPPORTED: &str = "WAV, FLAC, MP3 and Ogg Vorbis";

/// The first bytes of a file, by which its format is recognized.
const MAGIC_BYTES: usize = 64;
/// The maximum number of ID3v2 tags before the sound of an MP3 file. Usually there is one.
const MAX_TAGS: usize = 16;
/// The maximum number of metadata blocks before the sound of a FLAC file. Usually there are fewer than ten.
const MAX_BLOCKS: usize = 128;
/// The bytes of a STREAMINFO block, which describes the sound of a FLAC file.
const STREAM_INFO_BYTES: usize = 34;
/// The maximum number of bytes of a chunk that describes the sound of a WAV file. Usually there are 16 to 40.
const MAX_CHUNK_BYTES: u32 = 1_024;
/// The maximum number of chunks before the sound of a WAV file. Usually there are two or three.
const MAX_CHUNKS: usize = 256;
/// From this number of bytes on, a WAV header states no length: programs that write to a pipe put a very large number
/// there (ffmpeg 2^32 - 1, sox 2^31 - 4096).
const UNKNOWN_LENGTH: u32 = 0x7fff_0000;
/// The last page of an Ogg file is looked for in this many bytes at the end: twice the maximum size of a page, 65,307.
const OGG_TAIL: u64 = 2 * 65_307;

/// A file format that can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Uncompressed samples: 8, 16, 24 or 32 bits, floating point, A-law, µ-law.
    Wav,
    /// FLAC.
    Flac,
    /// MPEG audio, layer 3.
    Mp3,
    /// Vorbis or FLAC in Ogg.
    Ogg,
}

impl fmt::Display for Format {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Wav => "WAV",
            Self::Flac => "FLAC",
            Self::Mp3 => "MP3",
            Self::Ogg => "Ogg",
        })
    }
}

/// A file whose format is known. `head` followed by the rest of its source is a file of that format.
pub(super) struct Opened {
    pub(super) format: Format,
    /// The parts of the header that describe the sound, if others were skipped.
    pub(super) head: Vec<u8>,
    /// Whether the header states the recording's length. False for a WAV file that was written to a pipe.
    pub(super) states_length: bool,
    /// For an Ogg file, the time at which its last page ends, in samples per channel.
    pub(super) ogg_end: Option<u64>,
}

/// Recognizes a file's format.
///
/// # Errors
/// The format cannot be decoded, or a WAV header states more bytes than the file has.
pub(super) fn open(source: &mut dyn Source) -> Result<Opened, TaskError> {
    let length = source.seek(SeekFrom::End(0)).map_err(unreadable)?;
    let mut start = 0;
    let mut magic = first_bytes(source, start)?;
    for _ in 0..MAX_TAGS {
        let Some(tag) = tag_bytes(&magic) else { break };
        start += tag;
        magic = first_bytes(source, start)?;
    }
    let format = format(&magic).ok_or_else(|| unknown(&magic, length))?;
    let mut opened = Opened { format, head: Vec::new(), states_length: true, ogg_end: None };
    match format {
        Format::Wav => {
            let header = wav_header(source, start, length)?;
            (opened.head, opened.states_length, start) = (header.head, header.states_length, header.samples);
        }
        Format::Flac => (opened.head, start) = flac_header(source, start)?,
        Format::Ogg => {
            check_ogg_codec(&magic)?;
            opened.ogg_end = ogg_end(source, &magic, length).map_err(unreadable)?;
        }
        Format::Mp3 => {}
    }
    source.seek(SeekFrom::Start(start)).map_err(unreadable)?;
    Ok(opened)
}

/// The [`MAGIC_BYTES`] from `start` on; fewer at the file's end.
fn first_bytes(source: &mut dyn Source, start: u64) -> Result<Vec<u8>, TaskError> {
    source.seek(SeekFrom::Start(start)).map_err(unreadable)?;
    read_up_to(source, MAGIC_BYTES as u64).map_err(unreadable)
}

fn read_up_to(source: &mut dyn Source, bytes: u64) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    source.take(bytes).read_to_end(&mut read)?;
    Ok(read)
}

/// The length in bytes of the ID3v2 tag that begins with these bytes; none if no tag does.
fn tag_bytes(magic: &[u8]) -> Option<u64> {
    let [b'I', b'D', b'3', _, _, flags, size @ ..] = magic else { return None };
    let size = size.first_chunk::<4>()?;
    let size = size.iter().fold(0, |size, byte| size << 7 | u64::from(byte & 0x7f));
    let has_footer = flags & 0x10 != 0;
    Some(10 + size + if has_footer { 10 } else { 0 })
}

fn format(magic: &[u8]) -> Option<Format> {
    match magic {
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Some(Format::Wav),
        [b'f', b'L', b'a', b'C', ..] => Some(Format::Flac),
        [b'O', b'g', b'g', b'S', ..] => Some(Format::Ogg),
        // The frame sync of MPEG audio, a version other than the reserved one, and layer 3.
        [0xff, second, ..] if second & 0xe0 == 0xe0 && second & 0x18 != 0x08 && second & 0x06 == 0x02 => {
            Some(Format::Mp3)
        }
        _ => None,
    }
}

/// The error for a file whose format is not supported. It names the format if it is a common one.
fn unknown(magic: &[u8], length: u64) -> TaskError {
    let name = match magic {
        [] => return refused("the recording is empty"),
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => "MP4 (M4A, AAC or ALAC)",
        [0x1a, 0x45, 0xdf, 0xa3, ..] => "WebM or Matroska (often Opus)",
        [b'F', b'O', b'R', b'M', ..] => "AIFF",
        [b'c', b'a', b'f', b'f', ..] => "CAF",
        [b'#', b'!', b'A', b'M', b'R', ..] => "AMR",
        [b'R', b'F', b'6', b'4', ..] | [b'B', b'W', b'6', b'4', ..] => "RF64 (a WAV file of more than 4 GiB)",
        [0x30, 0x26, 0xb2, 0x75, ..] => "WMA",
        [0xff, second, ..] if second & 0xf6 == 0xf0 => "AAC",
        [0xff, second, ..] if second & 0xe0 == 0xe0 && second & 0x06 == 0x04 => "MPEG audio, layer 2",
        [b'{', ..] => "JSON",
        _ => {
            let text = format!("the {length} bytes are of no known sound format; supported are {SUPPORTED}");
            return refused(text);
        }
    };
    refused(format!("the recording is {name}, which is not supported; supported are {SUPPORTED}"))
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

/// The header of a FLAC file without all metadata blocks but the first, and where its frames begin.
///
/// # Errors
/// The first block is not STREAMINFO, or there are too many blocks.
fn flac_header(source: &mut dyn Source, start: u64) -> Result<(Vec<u8>, u64), TaskError> {
    const LAST: u8 = 0x80;
    let mut position = start + 4;
    let mut head = Vec::new();
    for _ in 0..MAX_BLOCKS {
        source.seek(SeekFrom::Start(position)).map_err(unreadable)?;
        let header = read_up_to(source, 4).map_err(unreadable)?;
        let [kind, a, b, c] = *header else {
            return Err(refused("the FLAC file cannot be read: it is cut off"));
        };
        let bytes = u32::from_be_bytes([0, a, b, c]);
        if head.is_empty() {
            let info = read_up_to(source, STREAM_INFO_BYTES as u64).map_err(unreadable)?;
            if kind & !LAST != 0 || bytes as usize != STREAM_INFO_BYTES || info.len() != STREAM_INFO_BYTES {
                return Err(refused(
                    "the FLAC file cannot be read: it does not begin with a STREAMINFO block",
                ));
            }
            head = [b"fLaC", &[LAST, 0, 0, STREAM_INFO_BYTES as u8][..], &info].concat();
        }
        position += 4 + u64::from(bytes);
        if kind & LAST != 0 {
            return Ok((head, position));
        }
    }
    Err(refused(format!("the FLAC file has more than {MAX_BLOCKS} metadata blocks")))
}

struct WavHeader {
    /// The chunks that describe the sound, and the header of its chunk.
    head: Vec<u8>,
    /// Whether it states how many bytes of samples follow.
    states_length: bool,
    /// The offset in the file at which the samples begin.
    samples: u64,
}

/// Reads the header of a WAV file.
///
/// # Errors
/// It states more bytes than follow, or there are no samples.
fn wav_header(source: &mut dyn Source, start: u64, length: u64) -> Result<WavHeader, TaskError> {
    source.seek(SeekFrom::Start(start)).map_err(unreadable)?;
    // "RIFF", its length and "WAVE".
    let mut head = read_up_to(source, 12).map_err(unreadable)?;
    let mut position = start + 12;
    for _ in 0..MAX_CHUNKS {
        source.seek(SeekFrom::Start(position)).map_err(unreadable)?;
        let header = read_up_to(source, 8).map_err(unreadable)?;
        let [name @ .., a, b, c, d] = &*header else { break };
        let stated = u32::from_le_bytes([*a, *b, *c, *d]);
        position += 8;
        if name == b"data" {
            let present = length.saturating_sub(position);
            let is_false = if stated == 0 { present > 0 } else { u64::from(stated) > present };
            if is_false && stated < UNKNOWN_LENGTH {
                return Err(refused(format!(
                    "the WAV header declares {stated} bytes of sound, and {present} bytes follow"
                )));
            }
            head.extend(header);
            return Ok(WavHeader { head, states_length: stated < UNKNOWN_LENGTH, samples: position });
        }
        // Chunks begin at even offsets.
        let bytes = u64::from(stated) + u64::from(stated % 2);
        if matches!(name, b"fmt " | b"fact") {
            if stated > MAX_CHUNK_BYTES {
                let name = String::from_utf8_lossy(name).trim().to_owned();
                let text = format!(
                    "the WAV file has {stated} bytes in its chunk {name}; at most {MAX_CHUNK_BYTES} are taken"
                );
                return Err(refused(text));
            }
            head.extend(&header);
            head.extend(read_up_to(source, bytes).map_err(unreadable)?);
        }
        position += bytes;
        if position >= length {
            break;
        }
    }
    Err(refused("the WAV file has no sound in it (no chunk named data)"))
}

/// The time in samples that the last page states, if that page belongs to the same stream as the first.
fn ogg_end(source: &mut dyn Source, magic: &[u8], length: u64) -> io::Result<Option<u64>> {
    source.seek(SeekFrom::Start(length.saturating_sub(OGG_TAIL)))?;
    let tail = read_up_to(source, OGG_TAIL)?;
    let Some(start) = tail.windows(4).rposition(|bytes| bytes == b"OggS") else { return Ok(None) };
    let page = &tail[start..];
    if page.get(14..18).is_none_or(|serial| magic.get(14..18) != Some(serial)) {
        return Ok(None);
    }
    let granule =
        page.get(6..14).and_then(|bytes| bytes.first_chunk()).map(|bytes| i64::from_le_bytes(*bytes));
    // -1 means that no packet ends on the page.
    Ok(granule.and_then(|granule| u64::try_from(granule).ok()))
}
