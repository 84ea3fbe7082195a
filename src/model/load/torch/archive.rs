//! The directory of a zip archive, as PyTorch writes it. Decides which archives are read: each entry is stored without
//! compression, has a name of its own, and shares no byte with another. Owns nothing, copies nothing out of the file,
//! and does not know what the entries mean.
//!
//! The offsets of fields are those of the zip specification, section 4.3 of APPNOTE.TXT.

use std::collections::BTreeMap;
use std::ops::Range;

use super::shown::shown;

/// The most entries of an archive. One storage of numbers takes one entry.
const MAX_ENTRIES: usize = 1 << 15;
/// Bytes of the record at the end of an archive.
const END_BYTES: usize = 22;
/// Bytes of the record that says where the zip64 record is.
const LOCATOR_BYTES: usize = 20;
/// Bytes of the zip64 record.
const END64_BYTES: usize = 56;
/// Bytes before the name in an entry of the directory.
const ENTRY_BYTES: usize = 46;
/// Bytes before the name in the header in front of an entry's data.
const HEADER_BYTES: usize = 30;
/// The flags that change nothing for entries without compression: bit 3 (the sizes follow the data) and bit 11 (the
/// name is UTF-8).
const KNOWN_FLAGS: usize = SIZES_FOLLOW | 1 << 11;
/// The flag of an entry whose sizes follow its data.
const SIZES_FOLLOW: usize = 1 << 3;
/// The value of a field of 32 bits whose number is in the zip64 record of the extra field.
const IN_ZIP64: usize = u32::MAX as usize;
/// The kind of the zip64 record in an extra field.
const ZIP64_KIND: usize = 1;

/// Where the data of each entry is in the file, by the entry's name.
pub(super) type Entries<'a> = BTreeMap<&'a str, Range<usize>>;

/// The bytes of an entry, from its header to the end of its data. Spans are ordered by their starts.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct EntrySpan<'a> {
    start: usize,
    end: usize,
    name: &'a str,
}

/// Reads the directory of an archive.
///
/// # Errors
/// What is wrong with the archive, if it is cut off, contradicts itself, or has an entry that is not read.
pub(super) fn read(file: &[u8]) -> Result<Entries<'_>, String> {
    let (count, directory) =
        find_directory(file).ok_or("it has no zip directory at its end, so it is cut off or was changed")?;
    if count > MAX_ENTRIES {
        return Err(format!("its zip directory has {count} entries, and at most {MAX_ENTRIES} are read"));
    }
    let mut rest = &file[directory.clone()];
    let mut entries = Entries::new();
    let mut spans = Vec::new();
    for index in 0..count {
        let entry = Entry::split(rest);
        let (entry, after) = entry.ok_or_else(|| format!("entry {index} of its zip directory is cut off"))?;
        rest = after;
        let (start, data) = entry.locate(file, directory.start)?;
        spans.push(EntrySpan { start, end: data.end, name: entry.name });
        if entries.insert(entry.name, data).is_some() {
            return Err(format!("its zip directory has the entry {} twice", shown(entry.name)));
        }
    }
    if !rest.is_empty() {
        return Err(format!("its zip directory has {} bytes after its last entry", rest.len()));
    }
    spans.sort_unstable();
    match spans.windows(2).find(|pair| pair[1].start < pair[0].end) {
        Some(pair) => {
            Err(format!("its zip entries {} and {} overlap", shown(pair[0].name), shown(pair[1].name)))
        }
        None => Ok(entries),
    }
}

/// The number of entries, and the bytes of the directory, which end where the records at the end of the file begin.
fn find_directory(file: &[u8]) -> Option<(usize, Range<usize>)> {
    let end = file.len().checked_sub(END_BYTES)?;
    check_signature(file, end, *b"PK\x05\x06")?;
    let locator = end.checked_sub(LOCATOR_BYTES);
    let locator = locator.filter(|at| check_signature(file, *at, *b"PK\x06\x07").is_some());
    let (limit, count, bytes, start) = match locator {
        Some(locator) => {
            let record = field::<8>(file, locator + 8)?;
            check_signature(file, record, *b"PK\x06\x06")?;
            (record.checked_add(END64_BYTES)? == locator).then_some(())?;
            let number = |offset| field::<8>(file, record + offset);
            (record, number(32)?, number(40)?, number(48)?)
        }
        None => (end, field::<2>(file, end + 10)?, field::<4>(file, end + 12)?, field::<4>(file, end + 16)?),
    };
    (start.checked_add(bytes)? == limit).then_some((count, start..limit))
}

/// An entry as the directory describes it.
struct Entry<'a> {
    name: &'a str,
    flags: usize,
    method: usize,
    /// Bytes in the archive.
    packed_size: usize,
    /// Bytes of the data.
    size: usize,
    /// The offset of the header in front of the data.
    header: usize,
}

impl<'a> Entry<'a> {
    /// Splits the first entry from the rest of the directory.
    fn split(directory: &'a [u8]) -> Option<(Self, &'a [u8])> {
        check_signature(directory, 0, *b"PK\x01\x02")?;
        let [name, extra, comment] =
            [field::<2>(directory, 28)?, field::<2>(directory, 30)?, field::<2>(directory, 32)?];
        let (_, rest) = directory.split_at_checked(ENTRY_BYTES)?;
        let (name, rest) = rest.split_at_checked(name)?;
        let (extra, rest) = rest.split_at_checked(extra)?;
        let (_, rest) = rest.split_at_checked(comment)?;
        let mut wide = zip64_numbers(extra);
        let mut at = |offset| match field::<4>(directory, offset)? {
            IN_ZIP64 => {
                let (number, rest) = wide.split_at_checked(8)?;
                wide = rest;
                field::<8>(number, 0)
            }
            number => Some(number),
        };
        // The zip64 record has the numbers in this order.
        let (size, packed_size, header) = (at(24)?, at(20)?, at(42)?);
        let (flags, method) = (field::<2>(directory, 8)?, field::<2>(directory, 10)?);
        let name = str::from_utf8(name).ok()?;
        Some((Self { name, flags, method, packed_size, size, header }, rest))
    }

    /// The offset of the entry's header, and the range of its data, which ends before the directory.
    fn locate(&self, file: &[u8], directory: usize) -> Result<(usize, Range<usize>), String> {
        let name = shown(self.name);
        let (packed_size, size) = (self.packed_size, self.size);
        if self.method != 0 {
            let method = self.method;
            return Err(format!(
                "its entry {name} is compressed (zip method {method}); only stored entries are read"
            ));
        }
        if self.flags & !KNOWN_FLAGS != 0 {
            return Err(format!("its entry {name} is encrypted or has unknown flags ({:#06x})", self.flags));
        }
        if packed_size != size {
            return Err(format!("its entry {name} is stored, but takes {packed_size} bytes for {size}"));
        }
        let data = self.data(file).filter(|data| data.end <= directory);
        let data =
            data.ok_or_else(|| format!("its entry {name} of {size} bytes is not where the directory says"))?;
        Ok((self.header, data))
    }

    /// The range of the data, if the header in front of it describes the same entry.
    fn data(&self, file: &[u8]) -> Option<Range<usize>> {
        let header = file.get(self.header..)?;
        check_signature(header, 0, *b"PK\x03\x04")?;
        let [name, extra] = [field::<2>(header, 26)?, field::<2>(header, 28)?];
        let is_same_name = header.get(HEADER_BYTES..HEADER_BYTES + name)? == self.name.as_bytes();
        let is_same_kind = [field::<2>(header, 6)?, field::<2>(header, 8)?] == [self.flags, self.method];
        // In the header, both sizes are 0 if they follow the data, and `IN_ZIP64` if they are wider than 32 bits.
        let size = self.packed_size;
        let known = [size, if self.flags & SIZES_FOLLOW == 0 { size } else { 0 }, IN_ZIP64];
        let are_same_sizes =
            [field::<4>(header, 18)?, field::<4>(header, 22)?].iter().all(|it| known.contains(it));
        (is_same_name && is_same_kind && are_same_sizes).then_some(())?;
        let start = self.header + HEADER_BYTES + name + extra;
        Some(start..start.checked_add(size)?)
    }
}

/// The numbers of 64 bits in the zip64 record of an extra field; empty if it has no such record.
fn zip64_numbers(mut extra: &[u8]) -> &[u8] {
    while let (Some(kind), Some(bytes)) = (field::<2>(extra, 0), field::<2>(extra, 2)) {
        let Some((data, rest)) = extra[4..].split_at_checked(bytes) else { break };
        if kind == ZIP64_KIND {
            return data;
        }
        extra = rest;
    }
    &[]
}

/// None if the bytes at `offset` are not the signature.
fn check_signature(bytes: &[u8], offset: usize, signature: [u8; 4]) -> Option<()> {
    bytes.get(offset..)?.starts_with(&signature).then_some(())
}

/// A little-endian number of `N` bytes.
fn field<const N: usize>(bytes: &[u8], offset: usize) -> Option<usize> {
    let mut number = [0; 8];
    number[..N].copy_from_slice(bytes.get(offset..offset.checked_add(N)?)?);
    usize::try_from(u64::from_le_bytes(number)).ok()
}
