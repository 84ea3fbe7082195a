//! Decodes an image file to upright 8-bit RGB pixels, as transformers' pipelines load it with Pillow. Pure functions.

use std::borrow::Cow;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::{DynamicImage, ImageDecoder, ImageError, ImageReader};

use super::format::{Chunk, Format, split_chunk, webp_chunks};
use super::jpeg::{self, Library, Structure};
use super::orientation::orientation;

/// The limits of an image. A small file can declare a large image, so both limits are checked by the header, before
/// anything is decoded: the pixels by [`Limits::check`], the bytes by [`decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Width times height.
    pub pixels: u64,
    /// Bytes of the decoded samples.
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
        if u64::from(width) * u64::from(height) > self.pixels {
            return Err(Error::TooManyPixels { width, height, limit: self.pixels });
        }
        Err(Error::TooLargePicture { width, height, pixels, limit: self.pixels })
    }
}

/// Bytes of metadata (a colour profile, comments) that may be unpacked beside the samples.
const METADATA_BYTES: u64 = 4 << 20;
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
    /// Pixels that are decoded: those of the image, or of the largest picture in the file if that is larger. A JPEG is
    /// decoded in groups of blocks, and with many scans its pixels count several times.
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

/// The header of a file, and for a JPEG the library that decodes it.
fn inspect(bytes: &[u8]) -> Result<(Header, Option<Library>), Error> {
    let format = Format::of_file(bytes).map_err(Error::UnknownFormat)?;
    let cut_off = || Error::CutOff { format, bytes: bytes.len() };
    let broken = |reason| Error::Broken { format, reason };
    let header = match format {
        Format::Png => match bytes.get(12..16) {
            Some(b"IHDR") => png_header(bytes),
            Some(b"CgBI") => return Err(broken("it is in the form of iPhone programs (CgBI)".to_owned())),
            Some(_) => return Err(broken("its first chunk is not IHDR".to_owned())),
            None => None,
        },
        Format::WebP => webp_header(bytes),
        Format::Jpeg => {
            let structure =
                Structure::read(bytes).filter(|structure| structure.has_end).ok_or_else(cut_off)?;
            let mut header = Header::new(format, structure.width.into(), structure.height.into());
            header.pixels = structure.decoded_pixels();
            return Ok((header, Some(structure.library().map_err(broken)?)));
        }
    };
    Ok((header.ok_or_else(cut_off)?, None))
}

/// Decodes the file `bytes`.
///
/// The pixels are those of Pillow; of JPEG and lossy WebP files they differ by less than 1 of 255 on average. They are
/// turned upright as [`orientation`] finds; alpha is dropped, not blended; gray is repeated for each colour; of an animation
/// the first picture is decoded. 16-bit samples lose their lower 8 bits, gray ones too (Pillow clips those at 255).
///
/// # Errors
/// What is wrong with the file, or which limit it exceeds.
pub fn decode(bytes: &[u8], limits: Limits) -> Result<Rgb8, Error> {
    let (header, library) = inspect(bytes)?;
    limits.check(header)?;
    let Header { format, width, height, pixels } = header;
    let limit = limits.bytes.min(pixels * MAX_BYTES_PER_PIXEL + METADATA_BYTES);
    if header.bytes() > limit {
        return Err(Error::TooMuchMemory { width, height, limit });
    }
    let decode = || match library {
        Some(library) => jpeg::decode(bytes, library).map_err(|reason| Error::Broken { format, reason }),
        None => decode_with_image(bytes, header, limit),
    };
    // The libraries panic on some files.
    let image = catch_unwind(AssertUnwindSafe(decode))
        .unwrap_or_else(|_| Err(Error::Broken { format, reason: "its decoder fails on it".to_owned() }));
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
    let prepared = if format == Format::WebP { prepared_webp(bytes) } else { Cow::Borrowed(bytes) };
    let decoder = open(&prepared, format, limit).map_err(to_error)?;
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
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format.image_crate_format());
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

/// The header of a PNG file, which is its first chunk. None if the file ends within it.
fn png_header(bytes: &[u8]) -> Option<Header> {
    let side = |offset: usize| Some(u32::from_be_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?));
    Some(Header::new(Format::Png, side(16)?, side(20)?))
}

/// The header of a WebP file: the size in its first chunk, and the pixels of the largest picture in any chunk. The
/// decoder compares the two sizes only after it has decoded the picture. None if the file is cut off.
fn webp_header(bytes: &[u8]) -> Option<Header> {
    let chunks = webp_chunks(bytes);
    let (first, _) = split_chunk(chunks)?;
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
    header.pixels = header.pixels.max(largest_picture(chunks, false)?);
    Some(header)
}

/// The WebP file for the decoder, which refuses one that lacks a chunk that its header announces, and would blend the first
/// picture of an animation onto black, so that the colours of transparent pixels were lost. Metadata is not announced, and
/// alpha only if there is some; the first picture is marked as not to be blended.
fn prepared_webp(bytes: &[u8]) -> Cow<'_, [u8]> {
    const ANIMATION: u8 = 0x02;
    const ALPHA: u8 = 0x10;
    const NO_BLENDING: u8 = 0x02;
    let chunks = webp_chunks(bytes);
    if !chunks.starts_with(b"VP8X") {
        return Cow::Borrowed(bytes);
    }
    let start = 12;
    let (mut first_frame, mut has_opaque_picture, mut has_alpha) = (None, false, false);
    let mut rest = chunks;
    while let Some((chunk, after)) = split_chunk(rest) {
        match chunk.name {
            b"ANMF" => {
                // After the name, the length, and 15 bytes of position, size and duration.
                first_frame.get_or_insert(start + chunks.len() - rest.len() + 8 + 15);
            }
            b"VP8 " => has_opaque_picture = true,
            b"ALPH" => has_alpha = true,
            _ => {}
        }
        rest = after;
    }
    let mut prepared = bytes.to_vec();
    if let Some(flags) = prepared.get_mut(start + 8) {
        let kept = if has_opaque_picture && !has_alpha { ANIMATION } else { ANIMATION | ALPHA };
        *flags &= kept;
    }
    if let Some(flags) = first_frame.and_then(|place| prepared.get_mut(place)) {
        *flags |= NO_BLENDING;
    }
    Cow::Owned(prepared)
}

/// The pixels of the largest picture in these chunks, which may be those of a frame of an animation. A frame holds no other
/// frame, whatever its chunks say. None if an EXIF chunk is cut off.
fn largest_picture(mut bytes: &[u8], is_frame: bool) -> Option<u64> {
    let mut largest = 0;
    while let Some((chunk, rest)) = split_chunk(bytes) {
        largest = largest.max(match chunk.name {
            // The decoder would allocate the length that the chunk's header declares.
            b"EXIF" if !chunk.is_whole => return None,
            // Pictures of an animation: their chunks follow 16 bytes of position and duration.
            b"ANMF" if is_frame => 0,
            b"ANMF" => largest_picture(chunk.data.get(16..).unwrap_or_default(), true)?,
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
            let pixels = image.width * image.height;
            let groups = (image.width + 31) * (image.height + 31);
            let most = if declared.format == Format::Jpeg { groups } else { pixels };
            assert!((pixels..=most).contains(&(declared.pixels as usize)), "{file}: {}", declared.pixels);
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
        // Frames within frames would exhaust the stack of a reader that follows them.
        let mut nested = Vec::new();
        for depth in 0..300_000_u32 {
            nested.extend(b"ANMF");
            nested.extend((24 * (300_000 - depth)).to_le_bytes());
            nested.extend([0; 16]);
        }
        let nested = extended(&[(b"ANMF", &nested)]);
        assert_eq!(header(&nested), Ok(Header::new(Format::WebP, 1, 1)));
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
    fn a_thin_jpeg_counts_the_groups_of_blocks_that_are_decoded() {
        let file = read("thirds.jpg");
        let place = file.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap() + 5;
        let mut thin = file.clone();
        thin[place..place + 4].copy_from_slice(&[0xff, 0xff, 0, 1]);
        let Header { width, height, pixels, .. } = header(&thin).unwrap();
        assert_eq!((width, height, pixels), (1, 65_535, 24 * 65_536));
    }

    #[test]
    fn a_panic_of_a_decoder_is_an_error_of_the_file() {
        // The palette has four bytes.
        let file = [
            &b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\x05\0\0\0\x05\x08\x03\0\0\0\xba\xb1\xd6\xd7\0\0\0\x04PLTE"[..],
            b"\x01\x02\x03\x04\x23\xdb\x8a\xab\0\0\0\x0bIDAT\x78\x9c\x63\x60\xc0\x07\0\0\x1e\0\x01\xf6\xfd\xe9\x96",
            b"\0\0\0\0IEND\xae\x42\x60\x82",
        ]
        .concat();
        let error = decode(&file, LIMITS).unwrap_err().to_string();
        assert_eq!(error, "the image/png image cannot be decoded: its decoder fails on it");
    }

    #[test]
    fn a_jpeg_that_ends_early_is_refused_although_it_has_an_end_marker() {
        for file in ["rgb.jpg", "rgb-444.jpg", "gray.jpg", "progressive.jpg"] {
            let bytes = read(file);
            let scan = bytes.windows(2).position(|pair| pair == [0xff, 0xda]).unwrap() + 14;
            let cut = scan + (bytes.len() - scan) / 2;
            // Not within a pair that begins with 0xff.
            let cut = (cut..).find(|at| bytes[at - 1] != 0xff && bytes[*at] != 0xff).unwrap();
            let early = [&bytes[..cut], &[0xff, 0xd9]].concat();
            let result = decode(&early, LIMITS);
            assert!(result.is_err(), "{file}");
        }
    }

    #[test]
    fn a_webp_may_announce_chunks_that_it_lacks() {
        for file in ["rgb.webp", "alpha.webp", "animated.webp"] {
            let bytes = read(file);
            let expected = decode(&bytes, LIMITS);
            let mut announced = bytes.clone();
            match announced.windows(4).position(|name| name == b"VP8X") {
                Some(place) => announced[place + 8] |= 0x2c,
                None => {
                    let header = [&b"VP8X\x0a\0\0\0\x3c\0\0\0\x3f\0\0\x2a\0\0"[..], &bytes[12..]].concat();
                    announced =
                        [&b"RIFF"[..], &(header.len() as u32 + 4).to_le_bytes(), b"WEBP", &header].concat();
                }
            }
            assert_eq!(decode(&announced, LIMITS), expected, "{file}");
        }
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
            (b"\0\0\0\x20ftypheic", "an AVIF, a HEIC or a video"),
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
