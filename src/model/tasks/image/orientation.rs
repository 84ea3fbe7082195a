//! Finds how an image is to be turned, by the rule of Pillow: the EXIF data says it, or else the XMP data. Cameras, phones
//! and editors write both in several ways.

use std::io::Read as _;

use flate2::read::ZlibDecoder;
use image::metadata::Orientation;

use super::format::{Format, split_chunk, webp_chunks};
use super::jpeg::{Segment, Segments};

/// The prefix of EXIF data in a JPEG file. Some programs write it in other files too, where it does not belong.
const EXIF_PREFIX: &[u8] = b"Exif\0\0";

/// The metadata of a file that may say how it is turned.
#[derive(Debug, Default, PartialEq, Eq)]
struct Metadata {
    exif: Option<Vec<u8>>,
    xmp: Option<Vec<u8>>,
}

/// How the image in a complete file is to be turned. At most `max_unpacked` bytes of texts are unpacked.
pub(super) fn orientation(bytes: &[u8], format: Format, max_unpacked: u64) -> Orientation {
    let Metadata { exif, xmp } = match format {
        Format::Jpeg => jpeg(bytes),
        Format::Png => png(bytes, max_unpacked),
        Format::WebP => webp(bytes),
    };
    let of_exif = exif.and_then(|exif| exif_orientation(&exif));
    let number = of_exif.or_else(|| xmp.and_then(|xmp| xmp_orientation(&xmp)));
    number
        .and_then(|number| Orientation::from_exif(u8::try_from(number).ok()?))
        .unwrap_or(Orientation::NoTransforms)
}

/// The metadata in the segments before the first scan. As in Pillow, segments of EXIF data continue each other, and the
/// last segment of XMP data counts.
fn jpeg(bytes: &[u8]) -> Metadata {
    let mut metadata = Metadata::default();
    let before_scan = |segment: &Segment<'_>| !matches!(segment.marker, 0xd9 | 0xda);
    let applications = Segments::new(bytes).take_while(before_scan).filter(|segment| segment.marker == 0xe1);
    for Segment { data, .. } in applications {
        if let Some(exif) = data.strip_prefix(EXIF_PREFIX) {
            metadata.exif.get_or_insert_default().extend(exif);
        } else if let Some(xmp) = data.strip_prefix(b"http://ns.adobe.com/xap/1.0/\0") {
            metadata.xmp = Some(xmp.to_vec());
        }
    }
    metadata
}

/// The metadata in the chunks before and after the pixels. All compressed texts together are unpacked up to `room` bytes.
fn png(bytes: &[u8], mut room: u64) -> Metadata {
    let mut metadata = Metadata::default();
    let mut profile = None;
    let mut rest = bytes.get(8..).unwrap_or_default();
    while let [a, b, c, d, after @ ..] = rest {
        let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        let Some((name, after)) = after.split_first_chunk::<4>() else { break };
        let data = after.get(..length).unwrap_or_default();
        match name {
            b"eXIf" => metadata.exif = Some(data.to_vec()),
            b"tEXt" | b"zTXt" | b"iTXt" => match text(*name, data, &mut room) {
                Some((b"Raw profile type exif", text)) => profile = Some(text),
                Some((b"XML:com.adobe.xmp", text)) => metadata.xmp = Some(text),
                _ => {}
            },
            b"IEND" => break,
            _ => {}
        }
        // The checksum follows.
        rest = length.checked_add(4).and_then(|length| after.get(length..)).unwrap_or_default();
    }
    metadata.exif = metadata.exif.or_else(|| raw_profile(&profile?));
    metadata
}

/// The keyword and the text of a chunk, if the keyword is one of those that are looked for. Takes from `room` the bytes that
/// it unpacks.
fn text<'a>(name: [u8; 4], data: &'a [u8], room: &mut u64) -> Option<(&'a [u8], Vec<u8>)> {
    let part = |data: &'a [u8]| {
        let end = data.iter().position(|byte| *byte == 0)?;
        Some((&data[..end], &data[end + 1..]))
    };
    let (keyword, rest) = part(data)?;
    if !matches!(keyword, b"Raw profile type exif" | b"XML:com.adobe.xmp") {
        return None;
    }
    let (is_compressed, rest) = match &name {
        b"tEXt" => (false, rest),
        // The method, of which there is one.
        b"zTXt" => (true, rest.strip_prefix(&[0])?),
        _ => {
            let [is_compressed, _, rest @ ..] = rest else { return None };
            let (_language, rest) = part(rest)?;
            let (_translated_keyword, rest) = part(rest)?;
            (*is_compressed != 0, rest)
        }
    };
    let mut text = Vec::new();
    if is_compressed {
        // The beginning of a text is used even if the rest is broken.
        let _ = ZlibDecoder::new(rest).take(*room).read_to_end(&mut text);
        *room -= text.len() as u64;
    } else {
        text.extend_from_slice(rest);
    }
    Some((keyword, text))
}

/// The EXIF data in the text that ImageMagick writes: a line break, a name, a length, and the data in hexadecimal digits.
fn raw_profile(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.splitn(4, |byte| *byte == b'\n').nth(3)?;
    let digits: Vec<u8> = digits
        .iter()
        .filter(|byte| !byte.is_ascii_whitespace())
        .map_while(|byte| char::from(*byte).to_digit(16))
        .map(|digit| digit as u8)
        .collect();
    Some(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// The metadata that the header of an extended WebP file announces.
fn webp(bytes: &[u8]) -> Metadata {
    const EXIF: u8 = 0x08;
    const XMP: u8 = 0x04;
    let mut metadata = Metadata::default();
    let mut rest = webp_chunks(bytes);
    let mut flags = 0;
    while let Some((chunk, after)) = split_chunk(rest) {
        match chunk.name {
            b"VP8X" => flags = chunk.data.first().copied().unwrap_or(0),
            b"EXIF" if flags & EXIF != 0 => {
                metadata.exif.get_or_insert_with(|| chunk.data.to_vec());
            }
            b"XMP " if flags & XMP != 0 => {
                metadata.xmp.get_or_insert_with(|| chunk.data.to_vec());
            }
            _ => {}
        }
        rest = after;
    }
    metadata
}

/// The orientation in the first directory of EXIF data; none if it has no such tag, and 0 if the tag is no orientation.
fn exif_orientation(mut data: &[u8]) -> Option<u32> {
    const TAG: u16 = 0x112;
    while let Some(rest) = data.strip_prefix(EXIF_PREFIX) {
        data = rest;
    }
    // Pillow also takes the wrong order of the number after the letters.
    let is_little = match data.first_chunk()? {
        b"II*\0" | b"II\0*" => true,
        b"MM\0*" | b"MM*\0" => false,
        _ => return None,
    };
    let two = |at: usize| {
        let bytes = *data.get(at..)?.first_chunk()?;
        Some(if is_little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let four = |at: usize| {
        let bytes = *data.get(at..)?.first_chunk()?;
        Some(if is_little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) })
    };
    let directory = four(4)? as usize;
    let mut entries = (0..usize::from(two(directory)?)).map(|index| directory + 2 + 12 * index);
    let entry = entries.find(|entry| two(*entry) == Some(TAG))?;
    let kind = two(entry + 2)?;
    // A value of more than four bytes stands elsewhere.
    let place = if matches!(kind, 5 | 10 | 12 | 16) { four(entry + 8)? as usize } else { entry + 8 };
    let number = match kind {
        6 => f64::from(*data.get(place)?),
        3 | 8 => f64::from(two(place)?),
        4 | 9 | 13 => f64::from(four(place)?),
        // Fractions.
        5 | 10 => f64::from(four(place)?) / f64::from(four(place + 4)?),
        11 => f64::from(f32::from_bits(four(place)?)),
        12 | 16 => {
            let (first, second) = (u64::from(four(place)?), u64::from(four(place + 4)?));
            let bits = if is_little { second << 32 | first } else { first << 32 | second };
            if kind == 12 { f64::from_bits(bits) } else { bits as f64 }
        }
        // Bytes and texts are an orientation that Pillow does not take.
        1 | 2 | 7 => 0.0,
        _ => return None,
    };
    Some(if (1.0..=8.0).contains(&number) && number.fract() == 0.0 { number as u32 } else { 0 })
}

/// The orientation in XMP data, as an attribute or an element; none if it has none.
fn xmp_orientation(data: &[u8]) -> Option<u32> {
    const NAME: &[u8] = b"tiff:Orientation";
    let mut rest = data;
    while let Some(start) = rest.windows(NAME.len()).position(|window| window == NAME) {
        rest = &rest[start + NAME.len()..];
        let value = rest.strip_prefix(b"=\"").or_else(|| rest.strip_prefix(b">")).and_then(<[u8]>::first);
        if let Some(digit) = value.and_then(|value| char::from(*value).to_digit(10)) {
            return Some(digit);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::super::test_files::read;
    use super::*;

    const ROOM: u64 = 1 << 20;

    #[test]
    fn the_orientation_is_that_of_pillow() {
        let cases: Vec<serde_json::Value> = serde_json::from_slice(&read("orientations.json")).unwrap();
        for case in &cases {
            let file = STANDARD.decode(case["file"].as_str().unwrap()).unwrap();
            let format = Format::of_file(&file).unwrap();
            let found = orientation(&file, format, ROOM).to_exif();
            assert_eq!(u64::from(found), case["orientation"].as_u64().unwrap(), "{}", case["case"]);
            for end in 0..file.len() {
                orientation(&file[..end], format, ROOM);
            }
        }
        assert!(cases.len() > 60, "{}", cases.len());
    }

    #[test]
    fn compressed_texts_share_their_room() {
        let mut packed = Vec::new();
        flate2::bufread::ZlibEncoder::new(&[b' '; 100_000][..], flate2::Compression::best())
            .read_to_end(&mut packed)
            .unwrap();
        let data = [b"XML:com.adobe.xmp\0\0", &packed[..]].concat();
        let mut room = 150_000;
        let lengths = [(); 3].map(|()| text(*b"zTXt", &data, &mut room).map(|(_, text)| text.len()));
        assert_eq!(lengths, [Some(100_000), Some(50_000), Some(0)]);
    }
}
