//! From an image file to upright 8-bit RGB pixels, as transformers' pipelines load an image with Pillow. Pure.

use std::fmt;
use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader};

/// A file format that can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `image/jpeg`, baseline or progressive; gray, YCbCr, RGB, CMYK or YCCK.
    Jpeg,
    /// `image/png`; of an animated one the first picture.
    Png,
    /// `image/webp`; of an animated one the first picture.
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

    /// The format that the first bytes of a file tell.
    pub fn guess(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(Self::Png),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::WebP),
            _ => None,
        }
    }

    fn decoder(self) -> ImageFormat {
        match self {
            Self::Jpeg => ImageFormat::Jpeg,
            Self::Png => ImageFormat::Png,
            Self::WebP => ImageFormat::WebP,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.decoder().to_mime_type())
    }
}

/// What an image may cost. A small file can ask for much: each is checked against the header, before decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Width times height.
    pub pixels: u64,
    /// Bytes of the decoded samples, before they become RGB.
    pub bytes: u64,
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

/// Why an image cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes are of no format that can be decoded.
    #[error("the image is said to be {0}, but its first bytes are of no known format")]
    Unknown(Format),
    /// The bytes are of another format than was said.
    #[error("the image is said to be {said}, but it is {found}")]
    Other {
        /// The media type that came with the bytes.
        said: Format,
        /// What the bytes are.
        found: Format,
    },
    /// The header tells more pixels than are allowed.
    #[error("the image has {width}x{height} pixels, and {limit} pixels are allowed")]
    TooManyPixels {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
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
        /// What the decoder says.
        reason: String,
    },
}

/// Decodes the file `bytes`, said to be of `format`.
///
/// The pixels are Pillow's: turned upright by the EXIF orientation; alpha dropped, not blended; gray repeated; of
/// an animation the first picture. 16-bit samples lose their lower half, gray ones too (Pillow clips those at 255).
///
/// # Errors
/// What is wrong with the file, or which limit it is over.
pub fn decode(bytes: &[u8], format: Format, limits: Limits) -> Result<Rgb8, Error> {
    match Format::guess(bytes) {
        Some(found) if found == format => {}
        Some(found) => return Err(Error::Other { said: format, found }),
        None => return Err(Error::Unknown(format)),
    }
    let mut size = (0, 0);
    let failed = |error, (width, height)| match error {
        ImageError::Limits(_) => Error::TooMuchMemory { width, height, limit: limits.bytes },
        ImageError::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            Error::CutOff { format, bytes: bytes.len() }
        }
        error => Error::Broken { format, reason: error.to_string() },
    };
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format.decoder());
    let mut allowed = image::Limits::no_limits();
    allowed.max_alloc = Some(limits.bytes);
    reader.limits(allowed);
    let mut decoder = reader.into_decoder().map_err(|error| failed(error, size))?;
    size = decoder.dimensions();
    let (width, height) = size;
    if u64::from(width) * u64::from(height) > limits.pixels {
        return Err(Error::TooManyPixels { width, height, limit: limits.pixels });
    }
    if decoder.total_bytes() > limits.bytes {
        return Err(Error::TooMuchMemory { width, height, limit: limits.bytes });
    }
    if !whole(bytes, format) {
        return Err(Error::CutOff { format, bytes: bytes.len() });
    }
    // An EXIF segment that cannot be read tells no orientation; the image may be good all the same.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut image = DynamicImage::from_decoder(decoder).map_err(|error| failed(error, size))?;
    image.apply_orientation(orientation);
    let (width, height) = (image.width() as usize, image.height() as usize);
    Ok(Rgb8 { width, height, pixels: rgb(image) })
}

/// False when the file is cut off and its decoder may not tell: that of JPEG fills what is missing with gray.
fn whole(bytes: &[u8], format: Format) -> bool {
    match format {
        Format::Jpeg => jpeg_ends(bytes),
        // The container tells the length of what follows its first eight bytes.
        Format::WebP => match bytes {
            [_, _, _, _, a, b, c, d, rest @ ..] => {
                rest.len() as u64 >= u32::from_le_bytes([*a, *b, *c, *d]).into()
            }
            _ => false,
        },
        Format::Png => true,
    }
}

/// True when an end marker follows the first scan. A thumbnail's own end comes before: it is in a segment.
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
            // Within a scan every 0xff of the data is followed by 0.
            return rest.windows(2).rev().any(|pair| pair == [0xff, 0xd9]);
        }
    }
    false
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

/// Red, green and blue of pixels of 1 to 4 samples; with 1 or 2, the first is gray.
fn colours<T: Copy>(samples: &[T], each: usize, to_8_bits: fn(T) -> u8) -> Vec<u8> {
    let (green, blue) = if each < 3 { (0, 0) } else { (1, 2) };
    samples
        .chunks_exact(each)
        .flat_map(|pixel| [pixel[0], pixel[green], pixel[blue]].map(to_8_bits))
        .collect()
}

fn upper_half(sample: u16) -> u8 {
    (sample >> 8) as u8
}

#[cfg(test)]
mod tests {
    use super::super::test_files::{expected, read};
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
            let most = differences.clone().max().unwrap();
            let mean = differences.map(f64::from).sum::<f64>() / image.pixels.len() as f64;
            let exact = row["exact"].as_bool().unwrap();
            assert!(if exact { most == 0 } else { mean < 1.0 }, "{file}: {most}, {mean}");
        }
    }

    #[test]
    fn a_file_that_is_cut_off_is_refused_wherever_it_is_cut() {
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
                // A PNG's pixels are whole without its last chunk and the checksum before it.
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
    fn what_is_too_large_is_refused_by_its_header() {
        let error = decode(&read("huge.png"), Format::Png, LIMITS).unwrap_err();
        assert_eq!(error.to_string(), "the image has 50000x50000 pixels, and 10000000 pixels are allowed");
        let few = Limits { pixels: 10_000_000, bytes: 1000 };
        for file in ["rgb.jpg", "rgb.png", "rgb.webp"] {
            let error = decode(&read(file), format(file), few).unwrap_err();
            assert!(matches!(error, Error::TooMuchMemory { limit: 1000, .. }), "{file}: {error}");
        }
    }

    #[test]
    fn a_wrong_media_type_is_named() {
        let error = decode(&read("rgb.png"), Format::Jpeg, LIMITS).unwrap_err();
        assert_eq!(error.to_string(), "the image is said to be image/jpeg, but it is image/png");
        assert_eq!(decode(b"hello", Format::Png, LIMITS).unwrap_err(), Error::Unknown(Format::Png));
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
