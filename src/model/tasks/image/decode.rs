//! Decodes an image file to upright 8-bit RGB pixels, as transformers' pipelines load it with Pillow. Pure functions.

use std::borrow::Cow;
use std::io::Cursor;

use image::{DynamicImage, ImageDecoder, ImageError, ImageReader};

use super::format::{Chunk, Format, split_chunk};
use super::jpeg::{self, Decoder, Structure};
use super::orientation::orientation;

/// The limits of an image. A small file can declare a large image, so each limit is checked against the header, before
/// decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Width times height.
    pub pixels: u64,
    /// Bytes of the decoded samples, before they become RGB.
    pub bytes: u64,
}

impl Limits {
    /// Checks an image's size, before it is decoded.
    ///
    /// # Errors
    /// The image has too many pixels.
    pub fn check(self, Header { width, height, pixels, .. }: Header) -> Result<(), Error> {
        if pixels <= self.pixels {
            return Ok(());
        }
        if u64::from(width) * u64::from(height) == pixels {
            return Err(Error::TooManyPixels { width, height, limit: self.pixels });
        }
        Err(Error::TooLargePicture { width, height, pixels, limit: self.pixels })
    }
}

/// Bytes of metadata (a colour profile, comments) that may be unpacked beside the samples.
const METADATA_BYTES: u64 = 4 << 20;
/// The pixels of a JPEG count once more for every 20 scans. Encoders write about a dozen scans. For 40 million pixels each
/// scan takes 80 to 150 ms, in addition to 650 ms for the image.
const SCANS_PER_COUNT: u64 = 20;
/// The maximum bytes of a pixel's samples: red, green, blue and alpha of 16 bits.
const MAX_BYTES_PER_PIXEL: u64 = 8;

/// What a file declares before its samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The file's format.
    pub format: Format,
    /// Pixels in a row of the image.
    pub width: u32,
    /// Rows of the image.
    pub height: u32,
    /// Pixels that are decoded: those of the image, or of the largest picture in the file if that is larger. The pixels
    /// of a JPEG with many scans count several times, since each scan covers the whole image.
    pub pixels: u64,
}

impl Header {
    fn new(format: Format, width: u32, height: u32) -> Self {
        Self { format, width, height, pixels: u64::from(width) * u64::from(height) }
    }

    /// Bytes of red, green and blue samples.
    fn bytes(self) -> u64 {
        3 * u64::from(self.width) * u64::from(self.height)
    }
}

/// An image as rows of red, green and blue, from the top left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb8 {
    /// Pixels in a row; at least 1.
    pub width: usize,
    /// Rows; at least 1.
    pub height: usize,
    /// `width * height * 3` samples.
    pub pixels: Vec<u8>,
}

/// The reason why an image cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes are of no format that can be decoded.
    #[error("the image is {0}; JPEG, PNG and WebP are decoded")]
    UnknownFormat(&'static str),
    /// The header declares more pixels than are allowed.
    #[error("the image has {width}x{height} pixels, and {limit} pixels are allowed")]
    TooManyPixels {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Pixels that are allowed.
        limit: u64,
    },
    /// The file has more to decode than its header declares: a larger picture, or very many scans.
    #[error(
        "the image has {width}x{height} pixels, but its file holds as much as {pixels} to decode, and {limit} pixels \
         are allowed"
    )]
    TooLargePicture {
        /// Pixels in a row of the image.
        width: u32,
        /// Rows of the image.
        height: u32,
        /// Pixels of the picture, or of all scans.
        pixels: u64,
        /// Pixels that are allowed.
        limit: u64,
    },
    /// Decoding would take more memory than is allowed.
    #[error(
        "the image of {width}x{height} pixels takes more than the {limit} bytes that are allowed for decoding"
    )]
    TooMuchMemory {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Bytes that are allowed.
        limit: u64,
    },
    /// The file ends before the image does.
    #[error("the {format} image is cut off after {bytes} bytes")]
    CutOff {
        /// The file's format.
        format: Format,
        /// The file's length.
        bytes: usize,
    },
    /// The file does not keep to its format.
    #[error("the {format} image cannot be decoded: {reason}")]
    Broken {
        /// The file's format.
        format: Format,
        /// The decoder's message.
        reason: String,
    },
}

/// Reads the header of the file `bytes`. Decodes no samples: the work is proportional to the file's length.
///
/// # Errors
/// The file is of an unknown format, is cut off in its header, or its header does not keep to the format.
pub fn header(bytes: &[u8]) -> Result<Header, Error> {
    inspect(bytes).map(|(header, _)| header)
}

/// The header of a file, and its decoder.
fn inspect(bytes: &[u8]) -> Result<(Header, Decoder), Error> {
    let format = Format::of_file(bytes).map_err(Error::UnknownFormat)?;
    let cut_off = || Error::CutOff { format, bytes: bytes.len() };
    let header = match format {
        Format::Png => png_header(bytes),
        Format::WebP => webp_header(bytes),
        Format::Jpeg => {
            let structure =
                Structure::read(bytes).filter(|structure| structure.has_end).ok_or_else(cut_off)?;
            let mut header = Header::new(format, structure.width.into(), structure.height.into());
            header.pixels *= 1 + structure.scans.len() as u64 / SCANS_PER_COUNT;
            let decoder = structure.decoder().map_err(|reason| Error::Broken { format, reason })?;
            return Ok((header, decoder));
        }
    };
    Ok((header.ok_or_else(cut_off)?, Decoder::Image))
}

/// Decodes the file `bytes`.
///
/// The pixels are those of Pillow. They are turned upright as [`orientation`] finds; alpha is dropped, not blended; gray
/// is repeated for each colour; of an animation the first picture is decoded. 16-bit samples lose their lower 8 bits,
/// gray ones too (Pillow clips those at 255).
///
/// # Errors
/// What is wrong with the file, or which limit it exceeds.
pub fn decode(bytes: &[u8], limits: Limits) -> Result<Rgb8, Error> {
    let (header, decoder) = inspect(bytes)?;
    limits.check(header)?;
    let format = header.format;
    let limit = limits.bytes.min(header.pixels * MAX_BYTES_PER_PIXEL + METADATA_BYTES);
    let image = match decoder {
        Decoder::Image => decode_with_image(bytes, header, limit),
        Decoder::JpegDecoder(_) if header.bytes() > limit => {
            let Header { width, height, .. } = header;
            Err(Error::TooMuchMemory { width, height, limit })
        }
        Decoder::JpegDecoder(colours) => {
            jpeg::decode(bytes, colours).map_err(|reason| Error::Broken { format, reason })
        }
    };
    let mut image = image?;
    image.apply_orientation(orientation(bytes, format, METADATA_BYTES));
    let (width, height) = (image.width() as usize, image.height() as usize);
    Ok(Rgb8 { width, height, pixels: rgb(image) })
}

/// Decodes a file that has this header, with at most `limit` bytes of samples.
fn decode_with_image(bytes: &[u8], header: Header, limit: u64) -> Result<DynamicImage, Error> {
    let Header { format, width, height, .. } = header;
    let to_error = |error| match error {
        ImageError::Limits(_) => Error::TooMuchMemory { width, height, limit },
        error => decoding_error(error, bytes, format),
    };
    let safe_bytes = match format {
        Format::Jpeg => without_extended_xmp(bytes),
        Format::WebP => without_blending(bytes),
        Format::Png => Cow::Borrowed(bytes),
    };
    let decoder = open(&safe_bytes, format, limit).map_err(to_error)?;
    if decoder.dimensions() != (width, height) {
        let (found_width, found_height) = decoder.dimensions();
        let reason = format!("its header says {width}x{height}, its samples {found_width}x{found_height}");
        return Err(Error::Broken { format, reason });
    }
    if decoder.total_bytes() > limit {
        return Err(Error::TooMuchMemory { width, height, limit });
    }
    if !is_complete(bytes, format) {
        return Err(Error::CutOff { format, bytes: bytes.len() });
    }
    DynamicImage::from_decoder(decoder).map_err(to_error)
}

/// A decoder that has read the file's header. It is told to allocate at most `max_bytes`, which not every decoder
/// obeys.
fn open(bytes: &[u8], format: Format, max_bytes: u64) -> Result<impl ImageDecoder + '_, ImageError> {
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format.library_format());
    let mut limits = image::Limits::no_limits();
    limits.max_alloc = Some(max_bytes);
    reader.limits(limits);
    reader.into_decoder()
}

fn decoding_error(error: ImageError, bytes: &[u8], format: Format) -> Error {
    match error {
        ImageError::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            Error::CutOff { format, bytes: bytes.len() }
        }
        error => Error::Broken { format, reason: error.to_string() },
    }
}

/// The JPEG file with the names of its extended XMP segments blanked. The decoder sorts and compares all such segments
/// again at each marker, so that a file of 8 MiB with nothing else keeps it busy for minutes. Nothing else reads them.
fn without_extended_xmp(bytes: &[u8]) -> Cow<'_, [u8]> {
    const EXTENDED_XMP: &[u8] = b"http://ns.adobe.com/xmp/extension/\0";
    let next = |bytes: &[u8]| bytes.windows(EXTENDED_XMP.len()).position(|window| window == EXTENDED_XMP);
    let mut found = next(bytes);
    if found.is_none() {
        return Cow::Borrowed(bytes);
    }
    let mut blanked = bytes.to_vec();
    let mut position = 0;
    while let Some(offset) = found {
        position += offset;
        blanked[position..position + EXTENDED_XMP.len()].fill(0);
        position += EXTENDED_XMP.len();
        found = next(&blanked[position..]);
    }
    Cow::Owned(blanked)
}

/// The header of a PNG file, which is its first chunk. None if the file ends within it.
fn png_header(bytes: &[u8]) -> Option<Header> {
    let side = |offset: usize| Some(u32::from_be_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?));
    Some(Header::new(Format::Png, side(16)?, side(20)?))
}

/// The header of a WebP file: the size in its first chunk, and the pixels of the largest picture in any chunk. The
/// decoder compares the two sizes only after it has decoded the picture. None if the file is cut off.
fn webp_header(bytes: &[u8]) -> Option<Header> {
    let (first, _) = split_chunk(bytes.get(12..)?)?;
    let mut header = match first.name {
        b"VP8X" => {
            let side = |offset: usize| {
                let [a, b, c] = *first.data.get(offset..offset + 3)?.first_chunk::<3>()?;
                Some(u32::from_le_bytes([a, b, c, 0]) + 1)
            };
            Header::new(Format::WebP, side(4)?, side(7)?)
        }
        _ => picture(&first).map(|(width, height)| Header::new(Format::WebP, width, height))?,
    };
    header.pixels = header.pixels.max(largest_picture(&bytes[12..])?);
    Some(header)
}

/// The WebP file with its first picture marked as not to be blended. The decoder would blend the first picture of an
/// animation onto black, and its transparent colours would be lost. There is nothing below it.
fn without_blending(bytes: &[u8]) -> Cow<'_, [u8]> {
    const NO_BLENDING: u8 = 0x02;
    let mut rest = bytes.get(12..).unwrap_or_default();
    while let Some((chunk, after)) = split_chunk(rest) {
        if chunk.name == b"ANMF" {
            // After the name, the length, and 15 bytes of position, size and duration.
            let flags = bytes.len() - rest.len() + 8 + 15;
            let mut changed = bytes.to_vec();
            if let Some(flags) = changed.get_mut(flags) {
                *flags |= NO_BLENDING;
            }
            return Cow::Owned(changed);
        }
        rest = after;
    }
    Cow::Borrowed(bytes)
}

/// The pixels of the largest picture in these chunks. None if an EXIF chunk is cut off.
fn largest_picture(mut bytes: &[u8]) -> Option<u64> {
    let mut largest = 0;
    while let Some((chunk, rest)) = split_chunk(bytes) {
        largest = largest.max(match chunk.name {
            // The decoder would allocate the length that the chunk's header declares.
            b"EXIF" if !chunk.is_whole => return None,
            // Pictures of an animation: their chunks follow 16 bytes of position and duration.
            b"ANMF" => largest_picture(chunk.data.get(16..).unwrap_or_default())?,
            _ => picture(&chunk).map_or(0, |(width, height)| u64::from(width) * u64::from(height)),
        });
        bytes = rest;
    }
    Some(largest)
}

/// The sides of the picture in a chunk, if it has one.
fn picture(chunk: &Chunk<'_>) -> Option<(u32, u32)> {
    match (chunk.name, chunk.data) {
        (b"VP8 ", [_, _, _, _, _, _, a, b, c, d, ..]) => {
            let side = |low: &u8, high: &u8| u32::from(u16::from_le_bytes([*low, *high]) & 0x3fff);
            Some((side(a, b), side(c, d)))
        }
        (b"VP8L", [_, a, b, c, d, ..]) => {
            let sides = u32::from_le_bytes([*a, *b, *c, *d]);
            Some(((sides & 0x3fff) + 1, (sides >> 14 & 0x3fff) + 1))
        }
        _ => None,
    }
}

/// Whether the file is complete, as far as its decoder does not check it. The container of a WebP file declares how many
/// bytes follow its first eight.
fn is_complete(bytes: &[u8], format: Format) -> bool {
    match (format, bytes) {
        (Format::WebP, [_, _, _, _, a, b, c, d, rest @ ..]) => {
            rest.len() as u64 >= u32::from_le_bytes([*a, *b, *c, *d]).into()
        }
        _ => true,
    }
}

fn rgb(image: DynamicImage) -> Vec<u8> {
    match image {
        DynamicImage::ImageRgb8(image) => image.into_raw(),
        DynamicImage::ImageRgba8(image) => colours(image.as_raw(), 4, |x| x),
        DynamicImage::ImageLuma8(image) => colours(image.as_raw(), 1, |x| x),
        DynamicImage::ImageLumaA8(image) => colours(image.as_raw(), 2, |x| x),
        DynamicImage::ImageRgb16(image) => colours(image.as_raw(), 3, upper_half),
        DynamicImage::ImageRgba16(image) => colours(image.as_raw(), 4, upper_half),
        DynamicImage::ImageLuma16(image) => colours(image.as_raw(), 1, upper_half),
        DynamicImage::ImageLumaA16(image) => colours(image.as_raw(), 2, upper_half),
        other => other.into_rgb8().into_raw(),
    }
}

/// Red, green and blue of pixels with 1 to 4 samples. With 1 or 2 samples, the first is gray.
fn colours<T: Copy>(samples: &[T], samples_per_pixel: usize, to_8_bits: fn(T) -> u8) -> Vec<u8> {
    let (green, blue) = if samples_per_pixel < 3 { (0, 0) } else { (1, 2) };
    samples
        .chunks_exact(samples_per_pixel)
        .flat_map(|pixel| [pixel[0], pixel[green], pixel[blue]].map(to_8_bits))
        .collect()
}

fn upper_half(sample: u16) -> u8 {
    (sample >> 8) as u8
}

#[cfg(test)]
mod tests {
    use super::super::test_files::{expected, one_colour_webp, read};
    use super::*;

    const LIMITS: Limits = Limits { pixels: 10_000_000, bytes: 64 << 20 };

    fn decoded(file: &str) -> Rgb8 {
        decode(&read(file), LIMITS).unwrap_or_else(|error| panic!("{file}: {error}"))
    }

    /// Also compares the files of the folder that `scripts/compare-jpegs` names.
    #[test]
    #[expect(clippy::print_stdout, reason = "the script's user reads it")]
    fn pixels_are_those_of_pillow() {
        let fixtures = format!("{}/tests/fixtures/images", env!("CARGO_MANIFEST_DIR"));
        for folder in [Some(fixtures), std::env::var("SCONCE_TEST_IMAGES").ok()].into_iter().flatten() {
            let read = |file: &str| std::fs::read(format!("{folder}/{file}")).unwrap();
            let expected: serde_json::Value = serde_json::from_slice(&read("expected.json")).unwrap();
            let (mut worst, mut refused) = (0.0_f64, 0);
            let rows = expected["decoded"].as_array().unwrap();
            for row in rows {
                let file = row["file"].as_str().unwrap();
                let image = match decode(&read(file), LIMITS) {
                    Ok(image) => image,
                    Err(error) if row["may_be_refused"] == true => {
                        let message = error.to_string();
                        let is_named =
                            ["arithmetic coding", "sampling factors"].iter().any(|it| message.contains(it));
                        assert!(is_named, "{message}: {row}");
                        refused += 1;
                        continue;
                    }
                    Err(error) => panic!("{error}: {row}"),
                };
                let pillow = decode(&read(row["expected"].as_str().unwrap()), LIMITS).unwrap();
                assert_eq!((image.width, image.height), (pillow.width, pillow.height), "{row}");
                let differences = image.pixels.iter().zip(&pillow.pixels).map(|(a, b)| a.abs_diff(*b));
                let largest = differences.clone().max().unwrap();
                let mean = differences.map(f64::from).sum::<f64>() / image.pixels.len() as f64;
                worst = worst.max(mean);
                let exact = row["exact"].as_bool().unwrap();
                assert!(if exact { largest == 0 } else { mean < 1.0 }, "{largest}, {mean}: {row}");
            }
            println!("{folder}: {} files, {refused} refused, largest mean difference {worst:.2}", rows.len());
        }
    }

    #[test]
    fn a_truncated_file_is_refused_wherever_it_is_cut() {
        for file in [
            "rgb.jpg",
            "progressive.jpg",
            "exif-6.jpg",
            "rgb.png",
            "palette.png",
            "rgb.webp",
            "lossless.webp",
        ] {
            let bytes = read(file);
            for end in 0..bytes.len() {
                // A PNG's pixels are complete without its last chunk and the checksum before it.
                let spare = if file.ends_with("png") { 16 } else { 0 };
                let result = decode(&bytes[..end], LIMITS);
                assert!(
                    result.is_err() || end >= bytes.len() - spare,
                    "{file} cut after {end} of {}",
                    bytes.len()
                );
            }
        }
    }

    #[test]
    fn an_image_over_the_limits_is_refused_by_its_header() {
        let error = decode(&read("huge.png"), LIMITS).unwrap_err();
        assert_eq!(error.to_string(), "the image has 50000x50000 pixels, and 10000000 pixels are allowed");
        let few = Limits { pixels: 10_000_000, bytes: 1000 };
        for file in ["rgb.jpg", "rgb.png", "rgb.webp"] {
            let error = decode(&read(file), few).unwrap_err();
            assert!(matches!(error, Error::TooMuchMemory { limit: 1000, .. }), "{file}: {error}");
        }
    }

    #[test]
    fn headers_declare_the_size_that_is_decoded() {
        for row in expected()["decoded"].as_array().unwrap() {
            let file = row["file"].as_str().unwrap();
            let (declared, image) = (header(&read(file)).unwrap(), decoded(file));
            assert_eq!(declared.pixels as usize, image.width * image.height, "{file}");
        }
        let one_colour = one_colour_webp(6_300, 6_300);
        assert!(one_colour.len() < 40);
        assert_eq!(header(&one_colour), Ok(Header::new(Format::WebP, 6_300, 6_300)));
    }

    #[test]
    fn a_webp_of_one_colour_is_decoded() {
        let image = decode(&one_colour_webp(3, 2), LIMITS).unwrap();
        assert_eq!((image.width, image.height), (3, 2));
        assert!(image.pixels.chunks_exact(3).all(|pixel| pixel == &image.pixels[..3]));
    }

    /// An extended WebP file of 1 × 1 pixels with these chunks.
    fn extended(chunks: &[(&[u8; 4], &[u8])]) -> Vec<u8> {
        let mut file = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec();
        for (name, data) in chunks {
            file.extend(*name);
            file.extend((data.len() as u32).to_le_bytes());
            file.extend(*data);
        }
        let length = file.len() as u32 - 8;
        file[4..8].copy_from_slice(&length.to_le_bytes());
        file
    }

    #[test]
    fn a_picture_larger_than_its_header_declares_is_refused_undecoded() {
        // A key frame of 16,383 × 16,383 pixels.
        let frame = [0, 0, 0, 0x9d, 0x01, 0x2a, 0xff, 0x3f, 0xff, 0x3f];
        let animated = [&[0; 16][..], b"VP8 \x0a\0\0\0", &frame].concat();
        for file in [extended(&[(b"VP8 ", &frame)]), extended(&[(b"ANMF", &animated)])] {
            let error = decode(&file, LIMITS).unwrap_err();
            let message = "the image has 1x1 pixels, but its file holds as much as 268402689 to decode, and 10000000 \
                           pixels are allowed";
            assert_eq!(error.to_string(), message);
        }
        let mut cut = extended(&[(b"EXIF", b"")]);
        let length = cut.len() - 4;
        cut[length..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(header(&cut), Err(Error::CutOff { format: Format::WebP, bytes: cut.len() }));
    }

    #[test]
    fn a_jpeg_with_very_many_scans_counts_as_more_pixels() {
        let scans = |file: &[u8]| Structure::read(file).unwrap().scans.len();
        assert_eq!(["rgb.jpg", "progressive.jpg"].map(|file| scans(&read(file))), [1, 10]);
        let plain = read("progressive.jpg");
        let last = plain.windows(2).rposition(|pair| pair == [0xff, 0xda]).unwrap();
        let [before, scan] = [&plain[..last], &plain[last..plain.len() - 2]];
        let size = |scans: usize| {
            let file = [before, &scan.repeat(scans - 9), &[0xff, 0xd9]].concat();
            header(&file).unwrap().pixels
        };
        let one = header(&plain).unwrap().pixels;
        assert_eq!([size(19), size(20), size(99)], [one, 2 * one, 5 * one]);
    }

    #[test]
    fn extended_xmp_is_not_read_and_changes_nothing() {
        let plain = read("rgb.jpg");
        let segment = {
            let mut data = b"\xff\xe1\0\x4dhttp://ns.adobe.com/xmp/extension/\0".to_vec();
            data.extend([b'0'; 32]);
            data.extend(5_u32.to_be_bytes());
            data.extend(0_u32.to_be_bytes());
            data
        };
        // Two megabytes of such segments. The decoder would take longer over them than a test may.
        let file = [&plain[..2], &segment.repeat(30_000), &plain[2..]].concat();
        assert_eq!(decode(&file, LIMITS), decode(&plain, LIMITS));
    }

    #[test]
    fn a_file_of_another_format_is_named() {
        for (bytes, is) in [
            (&b"hello"[..], "of an unknown format"),
            (b"", "empty"),
            (b"GIF89a", "a GIF"),
            (b"\0\0\0\x20ftypheic", "an AVIF, a HEIC or a film"),
        ] {
            let message = format!("the image is {is}; JPEG, PNG and WebP are decoded");
            assert_eq!(decode(bytes, LIMITS).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn garbled_files_neither_panic_nor_hang() {
        let mut state = 1_u64;
        for file in ["rgb-444.jpg", "progressive.jpg", "cmyk.jpg", "palette.png", "rgb.webp", "lossless.webp"]
        {
            let good = read(file);
            for _ in 0..300 {
                let mut bytes = good.clone();
                for _ in 0..4 {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let place = 12 + (state >> 33) as usize % (bytes.len() - 12);
                    bytes[place] = (state >> 20) as u8;
                }
                let _ = decode(&bytes, LIMITS);
            }
        }
    }
}
