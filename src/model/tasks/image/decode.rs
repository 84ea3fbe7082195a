//! Decodes an image file to upright 8-bit RGB pixels, as transformers' pipelines load it with Pillow. Pure functions.

use std::borrow::Cow;
use std::fmt;
use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader};

/// A file format that can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `image/jpeg`, baseline or progressive; gray, YCbCr, RGB, CMYK or YCCK.
    Jpeg,
    /// `image/png`; of an animation, the first picture.
    Png,
    /// `image/webp`; of an animation, the first picture.
    WebP,
}

impl Format {
    /// The format of a media type without parameters; none for any other.
    pub fn from_media_type(media_type: &str) -> Option<Self> {
        match media_type {
            "image/jpeg" => Some(Self::Jpeg),
            "image/png" => Some(Self::Png),
            "image/webp" => Some(Self::WebP),
            _ => None,
        }
    }

    /// The format that the first bytes of a file indicate.
    pub fn guess(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(Self::Png),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::WebP),
            _ => None,
        }
    }

    fn library_format(self) -> ImageFormat {
        match self {
            Self::Jpeg => ImageFormat::Jpeg,
            Self::Png => ImageFormat::Png,
            Self::WebP => ImageFormat::WebP,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.library_format().to_mime_type())
    }
}

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
    pub fn check(self, Header { width, height, pixels }: Header) -> Result<(), Error> {
        if pixels <= self.pixels {
            return Ok(());
        }
        if u64::from(width) * u64::from(height) == pixels {
            return Err(Error::TooManyPixels { width, height, limit: self.pixels });
        }
        Err(Error::TooLargePicture { width, height, pixels, limit: self.pixels })
    }
}

/// Bytes of metadata (a colour profile, comments) that may be unpacked beside the samples. The metadata is not used.
const METADATA_BYTES: u64 = 4 << 20;
/// The pixels of a JPEG count once more for every 20 scans. Encoders write about a dozen scans, and the decoder accepts
/// 100. For 40 million pixels each scan takes 80 ms, in addition to 650 ms for the image.
const SCANS_PER_COUNT: u64 = 20;
/// The maximum bytes of a pixel's samples: red, green, blue and alpha of 16 bits.
const MAX_BYTES_PER_PIXEL: u64 = 8;

/// What a file declares before its samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Pixels in a row of the image.
    pub width: u32,
    /// Rows of the image.
    pub height: u32,
    /// Pixels that are decoded: those of the image, or of the largest picture in the file if that is larger. The pixels
    /// of a JPEG with many scans count several times, since each scan covers the whole image.
    pub pixels: u64,
}

impl Header {
    fn new(width: u32, height: u32) -> Self {
        Self { width, height, pixels: u64::from(width) * u64::from(height) }
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
    #[error("the image is said to be {0}, but its first bytes are of no known format")]
    UnknownFormat(Format),
    /// The bytes are of another format than the media type says.
    #[error("the image is said to be {declared}, but it is {actual}")]
    OtherFormat {
        /// The format that the media type declares.
        declared: Format,
        /// The format of the bytes.
        actual: Format,
    },
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

/// Reads the header of the file `bytes`, whose media type says `format`. Decodes no samples: the work is proportional
/// to the file's length.
///
/// # Errors
/// The file is of another format, is cut off in its header, or its header does not keep to the format.
pub fn header(bytes: &[u8], format: Format) -> Result<Header, Error> {
    match Format::guess(bytes) {
        Some(actual) if actual == format => {}
        Some(actual) => return Err(Error::OtherFormat { declared: format, actual }),
        None => return Err(Error::UnknownFormat(format)),
    }
    let header = match format {
        Format::Png => png_header(bytes),
        Format::WebP => webp_header(bytes),
        Format::Jpeg => {
            let bytes = without_extended_xmp(bytes);
            let decoder = open(&bytes, format, METADATA_BYTES);
            let decoder = decoder.map_err(|error| decoding_error(error, &bytes, format))?;
            let (width, height) = decoder.dimensions();
            let mut header = Header::new(width, height);
            header.pixels = header.pixels.saturating_mul(1 + jpeg_scans(&bytes) / SCANS_PER_COUNT);
            Some(header)
        }
    };
    header.ok_or(Error::CutOff { format, bytes: bytes.len() })
}

/// Decodes the file `bytes`, whose media type says `format`.
///
/// The pixels are those of Pillow. They are turned upright by the EXIF orientation; alpha is dropped, not blended; gray
/// is repeated for each colour; of an animation the first picture is decoded. 16-bit samples lose their lower 8 bits,
/// gray ones too (Pillow clips those at 255).
///
/// # Errors
/// What is wrong with the file, or which limit it exceeds.
pub fn decode(bytes: &[u8], format: Format, limits: Limits) -> Result<Rgb8, Error> {
    let header = header(bytes, format)?;
    limits.check(header)?;
    let Header { width, height, pixels } = header;
    let limit = limits.bytes.min(pixels * MAX_BYTES_PER_PIXEL + METADATA_BYTES);
    let to_error = |error| match error {
        ImageError::Limits(_) => Error::TooMuchMemory { width, height, limit },
        error => decoding_error(error, bytes, format),
    };
    let safe_bytes = match format {
        Format::Jpeg => without_extended_xmp(bytes),
        Format::Png | Format::WebP => Cow::Borrowed(bytes),
    };
    let mut decoder = open(&safe_bytes, format, limit).map_err(to_error)?;
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
    // If the EXIF segment cannot be read, the orientation is unknown, but the image may be valid.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut image = DynamicImage::from_decoder(decoder).map_err(to_error)?;
    image.apply_orientation(orientation);
    let (width, height) = (image.width() as usize, image.height() as usize);
    Ok(Rgb8 { width, height, pixels: rgb(image) })
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
    Some(Header::new(side(16)?, side(20)?))
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
            Header::new(side(4)?, side(7)?)
        }
        _ => picture(&first).map(|(width, height)| Header::new(width, height))?,
    };
    header.pixels = header.pixels.max(largest_picture(&bytes[12..])?);
    Some(header)
}

/// A chunk of a WebP file.
struct Chunk<'a> {
    name: &'a [u8; 4],
    /// The chunk's data, as far as the file has it.
    data: &'a [u8],
    is_whole: bool,
}

/// The first chunk of `bytes`, and the bytes after it. None if there is no chunk.
fn split_chunk(bytes: &[u8]) -> Option<(Chunk<'_>, &[u8])> {
    let (name, rest) = bytes.split_first_chunk::<4>()?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let length = u32::from_le_bytes(*length) as usize;
    let chunk = Chunk { name, data: rest.get(..length).unwrap_or(rest), is_whole: length <= rest.len() };
    // Chunks are padded to an even length.
    Some((chunk, rest.get(length + length % 2..).unwrap_or_default()))
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

/// Whether the file is complete. Checks only the formats whose decoders do not check it. The JPEG decoder, for example,
/// fills the missing part with gray.
fn is_complete(bytes: &[u8], format: Format) -> bool {
    match format {
        Format::Jpeg => jpeg_ends(bytes),
        // The container declares how many bytes follow its first eight.
        Format::WebP => match bytes {
            [_, _, _, _, a, b, c, d, rest @ ..] => {
                rest.len() as u64 >= u32::from_le_bytes([*a, *b, *c, *d]).into()
            }
            _ => false,
        },
        Format::Png => true,
    }
}

/// Whether an end marker follows the first scan. The end marker of a thumbnail comes before it, in a segment.
fn jpeg_ends(bytes: &[u8]) -> bool {
    let mut rest = bytes.get(2..).unwrap_or_default();
    while let [0xff, marker, high, low, ..] = rest {
        let length = match marker {
            0xff => 1,
            0x01 | 0xd0..=0xd8 => 2,
            _ => 2 + usize::from(u16::from_be_bytes([*high, *low])),
        };
        rest = rest.get(length..).unwrap_or_default();
        if *marker == 0xda {
            // Within a scan, each 0xff of the data is followed by 0 or begins a restart marker.
            return rest.windows(2).rev().any(|pair| pair == [0xff, 0xd9]);
        }
    }
    false
}

/// The number of scans in a JPEG file, as far as its segments can be followed.
fn jpeg_scans(bytes: &[u8]) -> u64 {
    let mut rest = bytes.get(2..).unwrap_or_default();
    let mut scans = 0;
    // Within a scan, each 0xff of the data is followed by 0 or begins a restart marker.
    let is_marker = |pair: &[u8]| pair[0] == 0xff && !matches!(pair[1], 0 | 1 | 0xd0..=0xd8 | 0xff);
    while let Some(start) = rest.windows(2).position(is_marker) {
        let [_, marker, high, low, ..] = rest[start..] else { break };
        match marker {
            0xd9 => break,
            0xda => scans += 1,
            _ => {}
        }
        let length = usize::from(u16::from_be_bytes([high, low]));
        rest = rest.get(start + 2 + length..).unwrap_or_default();
    }
    scans
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

    fn format(file: &str) -> Format {
        match file.rsplit('.').next() {
            Some("jpg") => Format::Jpeg,
            Some("webp") => Format::WebP,
            _ => Format::Png,
        }
    }

    fn decoded(file: &str) -> Rgb8 {
        decode(&read(file), format(file), LIMITS).unwrap_or_else(|error| panic!("{file}: {error}"))
    }

    #[test]
    fn pixels_are_those_of_pillow() {
        for row in expected()["decoded"].as_array().unwrap() {
            let file = row["file"].as_str().unwrap();
            let (image, pillow) = (decoded(file), decoded(row["expected"].as_str().unwrap()));
            assert_eq!((image.width, image.height), (pillow.width, pillow.height), "{file}");
            let differences = image.pixels.iter().zip(&pillow.pixels).map(|(a, b)| a.abs_diff(*b));
            let largest = differences.clone().max().unwrap();
            let mean = differences.map(f64::from).sum::<f64>() / image.pixels.len() as f64;
            let exact = row["exact"].as_bool().unwrap();
            assert!(if exact { largest == 0 } else { mean < 1.0 }, "{file}: {largest}, {mean}");
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
                let result = decode(&bytes[..end], format(file), LIMITS);
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
        let error = decode(&read("huge.png"), Format::Png, LIMITS).unwrap_err();
        assert_eq!(error.to_string(), "the image has 50000x50000 pixels, and 10000000 pixels are allowed");
        let few = Limits { pixels: 10_000_000, bytes: 1000 };
        for file in ["rgb.jpg", "rgb.png", "rgb.webp"] {
            let error = decode(&read(file), format(file), few).unwrap_err();
            assert!(matches!(error, Error::TooMuchMemory { limit: 1000, .. }), "{file}: {error}");
        }
    }

    #[test]
    fn headers_declare_the_size_that_is_decoded() {
        for row in expected()["decoded"].as_array().unwrap() {
            let file = row["file"].as_str().unwrap();
            let (declared, image) = (header(&read(file), format(file)).unwrap(), decoded(file));
            assert_eq!(declared.pixels as usize, image.width * image.height, "{file}");
        }
        let one_colour = one_colour_webp(6_300, 6_300);
        assert!(one_colour.len() < 40);
        assert_eq!(header(&one_colour, Format::WebP), Ok(Header::new(6_300, 6_300)));
    }

    #[test]
    fn a_webp_of_one_colour_is_decoded() {
        let image = decode(&one_colour_webp(3, 2), Format::WebP, LIMITS).unwrap();
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
            let error = decode(&file, Format::WebP, LIMITS).unwrap_err();
            let message = "the image has 1x1 pixels, but its file holds as much as 268402689 to decode, and 10000000 \
                           pixels are allowed";
            assert_eq!(error.to_string(), message);
        }
        let mut cut = extended(&[(b"EXIF", b"")]);
        let length = cut.len() - 4;
        cut[length..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(header(&cut, Format::WebP), Err(Error::CutOff { format: Format::WebP, bytes: cut.len() }));
    }

    #[test]
    fn a_jpeg_with_very_many_scans_counts_as_more_pixels() {
        assert_eq!(["rgb.jpg", "progressive.jpg"].map(|file| jpeg_scans(&read(file))), [1, 10]);
        let plain = read("progressive.jpg");
        let last = plain.windows(2).rposition(|pair| pair == [0xff, 0xda]).unwrap();
        let [before, scan] = [&plain[..last], &plain[last..plain.len() - 2]];
        let size = |scans: usize| {
            let file = [before, &scan.repeat(scans - 9), &[0xff, 0xd9]].concat();
            header(&file, Format::Jpeg).unwrap().pixels
        };
        let one = header(&plain, Format::Jpeg).unwrap().pixels;
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
        assert_eq!(decode(&file, Format::Jpeg, LIMITS), decode(&plain, Format::Jpeg, LIMITS));
    }

    #[test]
    fn a_wrong_media_type_is_named() {
        let error = decode(&read("rgb.png"), Format::Jpeg, LIMITS).unwrap_err();
        assert_eq!(error.to_string(), "the image is said to be image/jpeg, but it is image/png");
        assert_eq!(decode(b"hello", Format::Png, LIMITS).unwrap_err(), Error::UnknownFormat(Format::Png));
        assert_eq!(Format::from_media_type("image/gif"), None);
        for format in [Format::Jpeg, Format::Png, Format::WebP] {
            assert_eq!(Format::from_media_type(&format.to_string()), Some(format));
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
                let _ = decode(&bytes, format(file), LIMITS);
            }
        }
    }
}
