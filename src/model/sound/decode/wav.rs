//! Reads the header of a WAV file, and writes a plain one in its place. Recorders that were stopped, streams and phones
//! leave sizes in it that are wrong, and describe the same samples in several ways. Refuses what would be heard wrongly.

use std::io::SeekFrom;

use super::source::{Source, read_up_to};
use super::{Format, check_rate_and_channels, refused, unreadable};
use crate::model::TaskError;

/// The maximum number of bytes of the chunk that describes the samples. Usually there are 16 to 40.
const MAX_FORMAT_BYTES: u32 = 1_024;
/// The maximum number of chunks before the sound. Usually there are two or three.
const MAX_CHUNKS: usize = 256;
/// From this number of bytes on, a header states no length: programs that write to a pipe put a very large number there
/// (ffmpeg 2^32 - 1, sox 2^31 - 4096).
const UNKNOWN_LENGTH: u32 = 0x7fff_0000;
/// The milliseconds that may be missing at the end. Some phones state a little more than they have written.
const MAX_MISSING_MS: u64 = 100;

/// A header that was read.
pub(super) struct Header {
    /// A plain header for the same samples.
    pub(super) head: Vec<u8>,
    /// The offset in the file at which the samples begin.
    pub(super) start: u64,
    /// The offset at which they end.
    pub(super) end: u64,
    /// Whether the header states where they end. If not, they end with the file.
    pub(super) states_end: bool,
}

/// How samples are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Integer,
    Float,
    ALaw,
    MuLaw,
}

impl Encoding {
    /// The encoding of this number in a header.
    fn from_tag(tag: u16) -> Result<Self, TaskError> {
        let name = match tag {
            1 => return Ok(Self::Integer),
            3 => return Ok(Self::Float),
            6 => return Ok(Self::ALaw),
            7 => return Ok(Self::MuLaw),
            0x02 => "Microsoft ADPCM",
            0x11 => "IMA ADPCM",
            0x31 => "GSM 6.10",
            0x50 => "MPEG audio",
            0x55 => "MP3",
            _ => "an unknown encoding",
        };
        let taken = "integer and floating-point samples, A-law and µ-law are taken";
        Err(refused(format!("the WAV file holds {name} (format {tag}); {taken}")))
    }

    fn tag(self) -> u16 {
        match self {
            Self::Integer => 1,
            Self::Float => 3,
            Self::ALaw => 6,
            Self::MuLaw => 7,
        }
    }
}

/// What the chunk `fmt ` says about the samples.
#[derive(Debug, PartialEq, Eq)]
struct SampleFormat {
    encoding: Encoding,
    channels: u16,
    rate: u32,
    /// Bytes of a sample of one channel.
    width: u16,
}

impl SampleFormat {
    /// Reads the chunk.
    ///
    /// # Errors
    /// The chunk is too short, or describes samples that are not decoded.
    fn read(chunk: &[u8]) -> Result<Self, TaskError> {
        /// Microsoft's tag for a chunk that names the encoding in a further field.
        const EXTENSIBLE: u16 = 0xfffe;
        let number = |at: usize| chunk.get(at..at + 2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
        let short = || refused(format!("the WAV file's fmt chunk is too short: {} bytes", chunk.len()));
        let [tag, channels, low, high, align, bits] =
            [0, 2, 4, 6, 12, 14].map(|at| number(at).ok_or_else(short));
        let (channels, align, bits) = (channels?, align?, bits?);
        let rate = u32::from(low?) | u32::from(high?) << 16;
        let tag = match tag? {
            EXTENSIBLE => number(24).ok_or_else(short)?,
            tag => tag,
        };
        check_rate_and_channels(Format::Wav, rate, channels.into())?;
        let encoding = Encoding::from_tag(tag)?;
        // As ffmpeg and libsndfile read it: the bytes of a sample follow from its bits. The block alignment is often wrong,
        // and decides only where 24 bits are left-aligned in 4 bytes.
        let width = match bits {
            24 if align == 4 * channels => 4,
            bits => bits.div_ceil(8),
        };
        let widths: &[u16] = match encoding {
            Encoding::Integer => &[1, 2, 3, 4],
            Encoding::Float => &[4, 8],
            Encoding::ALaw | Encoding::MuLaw => &[1],
        };
        if !widths.contains(&width) {
            return Err(refused(format!("the WAV file states samples of {bits} bits, which are not taken")));
        }
        Ok(Self { encoding, channels, rate, width })
    }

    /// Bytes of a sample of all channels.
    fn bytes(&self) -> u64 {
        u64::from(self.width) * u64::from(self.channels)
    }

    /// A plain header for `bytes` of these samples.
    fn head(&self, bytes: u64) -> Vec<u8> {
        let Self { encoding, channels, rate, width } = *self;
        let mut head = b"RIFF\xff\xff\xff\xffWAVEfmt \x12\0\0\0".to_vec();
        head.extend(encoding.tag().to_le_bytes());
        head.extend(channels.to_le_bytes());
        head.extend(rate.to_le_bytes());
        head.extend((u64::from(rate) * self.bytes()).to_le_bytes()[..4].iter());
        head.extend((width * channels).to_le_bytes());
        head.extend((8 * width).to_le_bytes());
        head.extend([0, 0]);
        head.extend(b"data");
        head.extend(u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes());
        head
    }
}

/// Reads the header of the WAV file that begins at `start` in a source of `length` bytes.
///
/// # Errors
/// It states clearly more sound than follows, describes samples that are not decoded, or there is no sound.
pub(super) fn header(source: &mut dyn Source, start: u64, length: u64) -> Result<Header, TaskError> {
    // After "RIFF", its length, which is often wrong, and "WAVE".
    let mut position = start + 12;
    let mut samples = None;
    for _ in 0..MAX_CHUNKS {
        source.seek(SeekFrom::Start(position)).map_err(unreadable)?;
        let header = read_up_to(source, 8).map_err(unreadable)?;
        let [name @ .., a, b, c, d] = &*header else { break };
        let stated = u32::from_le_bytes([*a, *b, *c, *d]);
        position += 8;
        match name {
            b"data" => {
                let samples: SampleFormat =
                    samples.ok_or_else(|| refused("the WAV file has no fmt chunk before its sound"))?;
                return sound(&samples, stated, position, length);
            }
            b"fmt " if stated > MAX_FORMAT_BYTES => {
                return Err(refused(format!(
                    "the WAV file has {stated} bytes in its fmt chunk; at most {MAX_FORMAT_BYTES} are taken"
                )));
            }
            b"fmt " => {
                samples = Some(SampleFormat::read(&read_up_to(source, stated.into()).map_err(unreadable)?)?);
            }
            _ => {}
        }
        // Chunks begin at even offsets.
        position += u64::from(stated) + u64::from(stated % 2);
    }
    Err(refused("the WAV file has no sound in it (no chunk named data)"))
}

/// The header of a file whose samples begin at `start`, and whose header states this many bytes of them.
fn sound(samples: &SampleFormat, stated: u32, start: u64, length: u64) -> Result<Header, TaskError> {
    let present = length.saturating_sub(start);
    let states_end = stated < UNKNOWN_LENGTH && (stated > 0 || present == 0);
    let missing = u64::from(samples.rate) * samples.bytes() * MAX_MISSING_MS / 1_000;
    if states_end && u64::from(stated) > present + missing {
        return Err(refused(format!(
            "the WAV header declares {stated} bytes of sound, and {present} bytes follow"
        )));
    }
    let bytes = if states_end { present.min(stated.into()) } else { present };
    let bytes = bytes - bytes % samples.bytes();
    Ok(Header { head: samples.head(bytes), start, end: start + bytes, states_end })
}
