//! The size of a Vorbis stream's codebooks, from its setup header. A header of a few hundred bytes can ask for
//! gigabytes: the decoder unpacks up to 256 codebooks of up to 16 MiB each. So they are measured here before the
//! decoder sees them. Unpacks nothing.

/// Numbers in all codebooks together: 32 MiB as the decoder unpacks them. Encoders write some 100,000.
const MOST_NUMBERS: u64 = 8 << 20;
/// What an entry costs beside its vector, in numbers: its code word and its places in the decoder's tables.
const ENTRY_NUMBERS: u64 = 8;

/// The length of the identification header, which the setup header follows in the codec's data.
const IDENTIFICATION_BYTES: usize = 30;
/// How a setup header begins.
const SETUP: &[u8] = b"\x05vorbis";
/// How a codebook begins, in its bit order.
const CODEBOOK: u32 = 0x56_4342;

/// Why a stream's codebooks are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    #[error("broken or cut off")]
    Broken,
    #[error("too large: more than {MOST_NUMBERS} numbers")]
    TooLarge,
}

/// Measures the codebooks in a codec's data.
///
/// # Errors
/// The codebooks are too large or broken.
pub(super) fn check(data: &[u8]) -> Result<(), Fault> {
    measured(data).unwrap_or(Err(Fault::Broken))
}

/// None: the header ends too early.
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
        if numbers > MOST_NUMBERS {
            return Some(Err(Fault::TooLarge));
        }
    }
    Some(Ok(()))
}

/// Reads past a codebook (section 3.2.1 of the Vorbis I specification), and says how many numbers it unpacks to.
fn codebook(bits: &mut Bits<'_>) -> Option<Result<u64, Fault>> {
    if bits.read(24)? != CODEBOOK {
        return Some(Err(Fault::Broken));
    }
    let (dimensions, entries) = (bits.read(16)?, bits.read(24)?);
    let numbers = u64::from(entries) * (u64::from(dimensions) + ENTRY_NUMBERS);
    if numbers > MOST_NUMBERS {
        return Some(Err(Fault::TooLarge));
    }
    let is_ordered = bits.read(1)? == 1;
    if is_ordered {
        bits.skip(5)?;
        let mut entry = 0;
        while entry < entries {
            // As many bits as the number of remaining entries has.
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

/// The largest number whose power of `dimensions` is at most `entries`.
fn lookup_values(entries: u32, dimensions: u32) -> u64 {
    let entries = u64::from(entries);
    let fits = |value: u64| value.checked_pow(dimensions).is_some_and(|power| power <= entries);
    // Entries have 24 bits, so that with two dimensions or more the value is small.
    if dimensions == 0 {
        0
    } else if dimensions == 1 {
        entries
    } else {
        (1..).take_while(|value| fits(*value)).last().unwrap_or(0)
    }
}

/// Bits of bytes, from each byte's lowest on.
struct Bits<'a> {
    bytes: &'a [u8],
    /// The next bit.
    at: u64,
}

impl Bits<'_> {
    /// The next `count` bits, 32 at most. None: the bytes end before.
    fn read(&mut self, count: u32) -> Option<u32> {
        let mut value = 0;
        for bit in 0..count {
            let byte = self.bytes.get(usize::try_from(self.at / 8).ok()?)?;
            value |= u32::from(byte >> (self.at % 8) & 1) << bit;
            self.at += 1;
        }
        Some(value)
    }

    /// Leaves out `count` bits. None: the bytes end before.
    fn skip(&mut self, count: u64) -> Option<()> {
        self.at += count;
        (self.at <= 8 * self.bytes.len() as u64).then_some(())
    }
}
