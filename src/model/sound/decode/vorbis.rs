//! Measures a Vorbis stream's codebooks by its setup header, before the decoder sees them. A header of a few hundred
//! bytes can make the decoder allocate gigabytes: it unpacks up to 256 codebooks of up to 16 MiB each. Unpacks nothing.

/// The most numbers in all codebooks together: 32 MiB once the decoder has unpacked them. Encoders write about 100,000.
const MAX_NUMBERS: u64 = 8 << 20;
/// The cost of an entry beside its vector, in numbers: its code word and its slots in the decoder's tables.
const ENTRY_NUMBERS: u64 = 8;

/// The length of the identification header. In the codec's data the setup header follows it.
const IDENTIFICATION_BYTES: usize = 30;
/// The first bytes of a setup header.
const SETUP: &[u8] = b"\x05vorbis";
/// The sync pattern of a codebook, in its bit order.
const CODEBOOK: u32 = 0x56_4342;

/// Why a stream's codebooks are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    #[error("broken or cut off")]
    Broken,
    #[error("too large: more than {MAX_NUMBERS} numbers")]
    TooLarge,
}

/// Measures the codebooks in a codec's data.
///
/// # Errors
/// The codebooks are too large or broken.
pub(super) fn check(data: &[u8]) -> Result<(), Fault> {
    measured(data).unwrap_or(Err(Fault::Broken))
}

/// The result of [`check`]; none if the header ends too early.
fn measured(data: &[u8]) -> Option<Result<(), Fault>> {
    let setup = data.get(IDENTIFICATION_BYTES..)?.strip_prefix(SETUP)?;
    let mut bits = Bits { bytes: setup, at: 0 };
    let codebooks = bits.read(8)? + 1;
    let mut numbers = 0;
    for _ in 0..codebooks {
        match codebook(&mut bits)? {
            Err(fault) => return Some(Err(fault)),
            Ok(more) => numbers += more,
        }
        if numbers > MAX_NUMBERS {
            return Some(Err(Fault::TooLarge));
        }
    }
    Some(Ok(()))
}

/// Skips a codebook (section 3.2.1 of the Vorbis I specification), and returns how many numbers it unpacks to.
fn codebook(bits: &mut Bits<'_>) -> Option<Result<u64, Fault>> {
    if bits.read(24)? != CODEBOOK {
        return Some(Err(Fault::Broken));
    }
    let (dimensions, entries) = (bits.read(16)?, bits.read(24)?);
    let numbers = u64::from(entries) * (u64::from(dimensions) + ENTRY_NUMBERS);
    if numbers > MAX_NUMBERS {
        return Some(Err(Fault::TooLarge));
    }
    let is_ordered = bits.read(1)? == 1;
    if is_ordered {
        bits.skip(5)?;
        let mut entry = 0;
        while entry < entries {
            // The field has as many bits as the number of remaining entries.
            entry += bits.read(32 - (entries - entry).leading_zeros())?;
        }
        if entry > entries {
            return Some(Err(Fault::Broken));
        }
    } else if bits.read(1)? == 1 {
        for _ in 0..entries {
            if bits.read(1)? == 1 {
                bits.skip(5)?;
            }
        }
    } else {
        bits.skip(5 * u64::from(entries))?;
    }
    let lookup = bits.read(4)?;
    if lookup == 0 {
        return Some(Ok(numbers));
    }
    bits.skip(64)?;
    let width = bits.read(4)? + 1;
    bits.skip(1)?;
    let values = match lookup {
        1 => lookup_values(entries, dimensions),
        2 => u64::from(entries) * u64::from(dimensions),
        _ => return Some(Err(Fault::Broken)),
    };
    bits.skip(values * u64::from(width))?;
    Some(Ok(numbers))
}

/// The largest integer whose `dimensions`-th power is at most `entries`.
fn lookup_values(entries: u32, dimensions: u32) -> u64 {
    let entries = u64::from(entries);
    let fits = |value: u64| value.checked_pow(dimensions).is_some_and(|power| power <= entries);
    // `entries` has 24 bits, so the loop is short for two dimensions or more.
    if dimensions == 0 {
        0
    } else if dimensions == 1 {
        entries
    } else {
        (1..).take_while(|value| fits(*value)).last().unwrap_or(0)
    }
}

/// Reads the bits of bytes, from the lowest bit of each byte.
struct Bits<'a> {
    bytes: &'a [u8],
    /// The next bit.
    at: u64,
}

impl Bits<'_> {
    /// The next `count` bits, 32 at most. None if the bytes end before.
    fn read(&mut self, count: u32) -> Option<u32> {
        let mut value = 0;
        for bit in 0..count {
            let byte = self.bytes.get(usize::try_from(self.at / 8).ok()?)?;
            value |= u32::from(byte >> (self.at % 8) & 1) << bit;
            self.at += 1;
        }
        Some(value)
    }

    /// Skips `count` bits. None if the bytes end before.
    fn skip(&mut self, count: u64) -> Option<()> {
        self.at += count;
        (self.at <= 8 * self.bytes.len() as u64).then_some(())
    }
}
