//! Measures a Vorbis stream's codebooks by its setup header, before the decoder unpacks them: a header of a few hundred
//! bytes can make the decoder allocate gigabytes, for up to 256 codebooks of up to 16 MiB each.

/// The maximum cost of all codebooks, in numbers of 4 bytes: 32 MiB when unpacked. Encoders write about 100,000.
const MAX_NUMBERS: u64 = 8 << 20;
/// The cost of an entry besides its vector, in units of one f32: its code word and its slots in the decoder's tables.
const ENTRY_NUMBERS: u64 = 8;

/// The length of the identification header. The setup header follows it: in the container's codec data, the comment
/// header is left out.
const IDENTIFICATION_BYTES: usize = 30;
/// The first bytes of a setup header.
const SETUP: &[u8] = b"\x05vorbis";
/// The sync pattern of a codebook, in its bit order.
const CODEBOOK: u32 = 0x56_4342;
/// The bits of the length of a code word.
const CODE_LENGTH_BITS: u64 = 5;
/// The bits of the lookup table's smallest value and of the step between values, two packed floats.
const LOOKUP_BOUNDS_BITS: u64 = 64;
/// The bits of the flag that says whether each value of a vector is added to the next one.
const SEQUENCE_FLAG_BITS: u64 = 1;

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
    let setup = data.get(IDENTIFICATION_BYTES..).and_then(|rest| rest.strip_prefix(SETUP));
    let mut bits = Bits { bytes: setup.ok_or(Fault::Broken)?, position: 0 };
    let codebooks = bits.read(8)? + 1;
    let mut numbers = 0;
    for _ in 0..codebooks {
        numbers += skip_codebook(&mut bits)?;
        if numbers > MAX_NUMBERS {
            return Err(Fault::TooLarge);
        }
    }
    Ok(())
}

/// Skips a codebook (section 3.2.1 of the Vorbis I specification), and returns its cost, in numbers.
fn skip_codebook(bits: &mut Bits<'_>) -> Result<u64, Fault> {
    if bits.read(24)? != CODEBOOK {
        return Err(Fault::Broken);
    }
    let (dimensions, entries) = (bits.read(16)?, bits.read(24)?);
    let numbers = u64::from(entries) * (u64::from(dimensions) + ENTRY_NUMBERS);
    if numbers > MAX_NUMBERS {
        return Err(Fault::TooLarge);
    }
    let is_ordered = bits.read(1)? == 1;
    if is_ordered {
        bits.skip(CODE_LENGTH_BITS)?;
        let mut entry = 0;
        while entry < entries {
            // The number of entries that have the next code length. The field is just wide enough for the number of
            // remaining entries.
            entry += bits.read(32 - (entries - entry).leading_zeros())?;
        }
        if entry > entries {
            return Err(Fault::Broken);
        }
    } else {
        let is_sparse = bits.read(1)? == 1;
        if is_sparse {
            for _ in 0..entries {
                let is_used = bits.read(1)? == 1;
                if is_used {
                    bits.skip(CODE_LENGTH_BITS)?;
                }
            }
        } else {
            bits.skip(CODE_LENGTH_BITS * u64::from(entries))?;
        }
    }
    let lookup_type = bits.read(4)?;
    if lookup_type == 0 {
        return Ok(numbers);
    }
    bits.skip(LOOKUP_BOUNDS_BITS)?;
    let value_bits = bits.read(4)? + 1;
    bits.skip(SEQUENCE_FLAG_BITS)?;
    let values = match lookup_type {
        1 => lookup_values(entries, dimensions),
        2 => u64::from(entries) * u64::from(dimensions),
        _ => return Err(Fault::Broken),
    };
    bits.skip(values * u64::from(value_bits))?;
    Ok(numbers)
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

/// Reads bits, from the lowest to the highest bit of each byte.
struct Bits<'a> {
    bytes: &'a [u8],
    /// The index of the next bit.
    position: u64,
}

impl Bits<'_> {
    /// The next `count` bits, 32 at most.
    ///
    /// # Errors
    /// [`Fault::Broken`] if there are fewer.
    fn read(&mut self, count: u32) -> Result<u32, Fault> {
        let mut value = 0;
        for bit in 0..count {
            let index = usize::try_from(self.position / 8).map_err(|_| Fault::Broken)?;
            let byte = self.bytes.get(index).ok_or(Fault::Broken)?;
            value |= u32::from(byte >> (self.position % 8) & 1) << bit;
            self.position += 1;
        }
        Ok(value)
    }

    /// Skips `count` bits.
    ///
    /// # Errors
    /// [`Fault::Broken`] if there are fewer.
    fn skip(&mut self, count: u64) -> Result<(), Fault> {
        self.position += count;
        if self.position <= 8 * self.bytes.len() as u64 { Ok(()) } else { Err(Fault::Broken) }
    }
}
