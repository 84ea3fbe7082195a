//! Reads the header of a FLAC file, and the numbers of its frames. Decodes nothing.

use std::io::SeekFrom;

use super::source::{Source, read_up_to};
use super::{refused, unreadable};
use crate::model::TaskError;

/// The maximum number of metadata blocks before the sound. Usually there are fewer than ten.
const MAX_BLOCKS: usize = 128;
/// The bytes of a STREAMINFO block, which describes the sound.
const STREAM_INFO_BYTES: usize = 34;

/// The header of a FLAC file without all metadata blocks but the first, and where its frames begin. The block sizes in it
/// fit what the first frame says, because the library reads no frame that contradicts them.
///
/// # Errors
/// The first block is not STREAMINFO, or there are too many blocks.
pub(super) fn header(source: &mut dyn Source, start: u64) -> Result<(Vec<u8>, u64), TaskError> {
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
            source.seek(SeekFrom::Start(position)).map_err(unreadable)?;
            let first_frame = read_up_to(source, 2).map_err(unreadable)?;
            fit_block_sizes(&mut head, &first_frame);
            return Ok((head, position));
        }
    }
    Err(refused(format!("the FLAC file has more than {MAX_BLOCKS} metadata blocks")))
}

/// Sets the least and the largest block size in the header of a FLAC file, whose first frame is given. The library wants
/// them to be equal if the frames begin with 0xfff8 (all of one size), and to differ if they begin with 0xfff9. Old
/// encoders write 0xfff8 although sizes vary; some headers have 0 in the place of a size.
fn fit_block_sizes(head: &mut [u8], first_frame: &[u8]) {
    let Some([a, b, c, d]) = head.get_mut(8..12) else { return };
    let [least, largest] = [[*a, *b], [*c, *d]].map(u16::from_be_bytes);
    let largest = if largest == 0 { u16::MAX } else { largest };
    let least = match first_frame {
        [0xff, 0xf8, ..] => largest,
        [0xff, 0xf9, ..] if least == largest => largest - 1,
        _ => least,
    };
    ([*a, *b], [*c, *d]) = (least.to_be_bytes(), largest.to_be_bytes());
}

/// The number in a frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    /// The index of the frame, if all frames have the same size.
    Frame(u64),
    /// The index of its first sample.
    Sample(u64),
}

impl Number {
    /// The number of the frame that begins with these bytes.
    pub(super) fn read(frame: &[u8]) -> Option<Self> {
        // Coded like a character of UTF-8, of up to seven bytes.
        let (first, rest) = frame.get(4..)?.split_first()?;
        let further = (first.leading_ones() as usize).saturating_sub(1);
        let top = u64::from(first & (0x7f_u8 >> first.leading_ones().min(7)));
        let number =
            rest.get(..further)?.iter().fold(top, |number, byte| number << 6 | u64::from(byte & 0x3f));
        Some(if frame[1] & 1 == 0 { Self::Frame(number) } else { Self::Sample(number) })
    }

    /// The number of the next frame, if this one has `samples` samples.
    pub(super) fn next(self, samples: u64) -> Self {
        match self {
            Self::Frame(number) => Self::Frame(number + 1),
            Self::Sample(number) => Self::Sample(number + samples),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_frames_have_one_to_seven_bytes() {
        for (bytes, number) in [
            (&[0x05][..], 5),
            (&[0xc2, 0x80], 128),
            (&[0xef, 0xbf, 0xbf], 0xffff),
            (&[0xfe, 0xbf, 0xbf, 0xbf, 0xbf, 0xbf, 0xbf], (1 << 36) - 1),
        ] {
            let frame = |second| [&[0xff, second, 0xc9, 0x18], bytes].concat();
            assert_eq!(Number::read(&frame(0xf8)), Some(Number::Frame(number)));
            assert_eq!(Number::read(&frame(0xf9)), Some(Number::Sample(number)));
            assert_eq!(Number::read(&frame(0xf8)[..3 + bytes.len()]), None);
        }
    }
}
