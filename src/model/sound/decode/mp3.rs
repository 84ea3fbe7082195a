//! Finds the first frame of an MP3 file that does not begin with one: a recording that was cut out of a stream, or has
//! zeros or remains of tags before it. Tells whether frames have the same form. Decodes nothing.

/// The bytes among which the first frame is looked for. Remains of tags with pictures may stand before it.
pub(super) const SEARCHED_BYTES: u64 = 1 << 20;
/// The number of consecutive frame headers of one form that are taken for sound, and for no accident.
const CHAIN: usize = 4;

/// What all frames of a recording have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// The two bits of the MPEG version.
    version: u8,
    /// The two bits of the sample rate, whose meaning depends on the version.
    rate: u8,
    is_mono: bool,
}

/// The form of the frame that begins with these bytes, and its length in bytes. None if no frame of layer 3 does.
pub(super) fn frame(bytes: &[u8]) -> Option<(Form, usize)> {
    // Numbers in the header's bits.
    const MPEG_1: u8 = 3;
    const MPEG_2: u8 = 2;
    const RESERVED_VERSION: u8 = 1;
    const LAYER_3: u8 = 1;
    const RESERVED_RATE: u8 = 3;
    /// Kilobits per second by the four bits of the header.
    const KILOBITS: [[usize; 14]; 2] = [
        [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160],
        [32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320],
    ];
    let [0xff, second, third, fourth, ..] = *bytes else { return None };
    let (version, layer) = (second >> 3 & 3, second >> 1 & 3);
    let (kilobits, rate, padding) = (third >> 4, third >> 2 & 3, third >> 1 & 1);
    if second >> 5 != 7 || layer != LAYER_3 || version == RESERVED_VERSION || rate == RESERVED_RATE {
        return None;
    }
    let is_mpeg_1 = version == MPEG_1;
    let kilobits = KILOBITS[usize::from(is_mpeg_1)].get(usize::from(kilobits).checked_sub(1)?)?;
    let halvings = match version {
        MPEG_1 => 0,
        MPEG_2 => 1,
        // MPEG 2.5.
        _ => 2,
    };
    let hertz = [44_100, 48_000, 32_000][usize::from(rate)] >> halvings;
    // A frame has 1,152 or 576 samples; a byte has 8 bits.
    let samples = if is_mpeg_1 { 1_152 } else { 576 };
    let length = samples / 8 * kilobits * 1_000 / hertz + usize::from(padding);
    Some((Form { version, rate, is_mono: fourth >> 6 == 3 }, length))
}

/// The offset of the first of several frames in a row. None if there are none.
pub(super) fn first_frame(bytes: &[u8]) -> Option<usize> {
    (0..bytes.len()).find(|start| begins_chain(&bytes[*start..]))
}

/// Whether frames of one form follow each other from the first of these bytes on.
fn begins_chain(mut bytes: &[u8]) -> bool {
    let Some((form, mut length)) = frame(bytes) else { return false };
    for _ in 1..CHAIN {
        let Some(rest) = bytes.get(length..) else { return false };
        match frame(rest) {
            Some((next, next_length)) if next == form => (bytes, length) = (rest, next_length),
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_the_length_of_its_bit_rate() {
        // MPEG 1, 128 kbit/s at 44.1 kHz, joint stereo, with and without padding; MPEG 2, 64 kbit/s at 24 kHz, mono;
        // MPEG 2.5, 8 kbit/s at 8 kHz.
        for (header, length) in [
            ([0xff, 0xfb, 0x90, 0x40], 417),
            ([0xff, 0xfb, 0x92, 0x40], 418),
            ([0xff, 0xf3, 0x84, 0xc0], 192),
            ([0xff, 0xe3, 0x18, 0xc0], 72),
        ] {
            assert_eq!(frame(&header).map(|(_, length)| length), Some(length), "{header:x?}");
        }
        // Layer 2, the reserved version, sample rate and bit rate, and the free bit rate.
        for header in
            [[0xff, 0xfd, 0x90, 0], [0xff, 0xeb, 0x90, 0], [0xff, 0xfb, 0x9c, 0], [0xff, 0xfb, 0xf0, 0]]
        {
            assert_eq!(frame(&header), None, "{header:x?}");
        }
    }

    #[test]
    fn the_first_frame_is_followed_by_others_of_its_form() {
        let frame = [&[0xff, 0xfb, 0x90, 0x40][..], &[0; 413]].concat();
        let alone = [&frame[..], &[0; 2_000]].concat();
        assert_eq!(first_frame(&alone), None);
        let mut file = [&[0; 300][..], &alone, &frame.repeat(5)].concat();
        assert_eq!(first_frame(&file), Some(300 + alone.len()));
        // The third of the frames is of another form.
        file[300 + alone.len() + 2 * 417 + 2] = 0x94;
        assert_eq!(first_frame(&file), None);
    }
}
