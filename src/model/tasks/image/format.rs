//! The formats of image files, and the chunks of which a WebP file consists.

use std::fmt;

use image::ImageFormat;

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
    /// The format that the first bytes of a file indicate. What a request calls the file does not matter.
    ///
    /// # Errors
    /// The end of a sentence that begins with "the image is", if the format cannot be decoded.
    pub fn of_file(bytes: &[u8]) -> Result<Self, &'static str> {
        Err(match bytes {
            [0xff, 0xd8, 0xff, ..] => return Ok(Self::Jpeg),
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => return Ok(Self::Png),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => return Ok(Self::WebP),
            [] => "empty",
            [b'G', b'I', b'F', b'8', ..] => "a GIF",
            [b'B', b'M', ..] => "a BMP",
            [b'I', b'I', b'*', 0, ..] | [b'M', b'M', 0, b'*', ..] => "a TIFF",
            [_, _, _, _, b'f', b't', b'y', b'p', ..] => "an AVIF, a HEIC or a video",
            [b'<', ..] => "an SVG or another text",
            [b'{' | b'[', ..] => "JSON",
            _ => "of an unknown format",
        })
    }

    pub(super) fn image_crate_format(self) -> ImageFormat {
        match self {
            Self::Jpeg => ImageFormat::Jpeg,
            Self::Png => ImageFormat::Png,
            Self::WebP => ImageFormat::WebP,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.image_crate_format().to_mime_type())
    }
}

/// The chunks of a WebP file, up to the end that its container states.
pub(super) fn webp_chunks(bytes: &[u8]) -> &[u8] {
    let stated =
        bytes.get(4..8).and_then(|length| length.first_chunk()).map_or(0, |it| u32::from_le_bytes(*it));
    let end = (stated as usize).saturating_add(8).min(bytes.len());
    bytes.get(12..end).unwrap_or_default()
}

/// A chunk of a WebP file.
pub(super) struct Chunk<'a> {
    pub(super) name: &'a [u8; 4],
    /// The chunk's data, as far as the file has it.
    pub(super) data: &'a [u8],
    pub(super) is_whole: bool,
}

/// The first chunk of `bytes`, and the bytes after it. None if there is no chunk.
pub(super) fn split_chunk(bytes: &[u8]) -> Option<(Chunk<'_>, &[u8])> {
    let (name, rest) = bytes.split_first_chunk::<4>()?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let length = u32::from_le_bytes(*length) as usize;
    let chunk = Chunk { name, data: rest.get(..length).unwrap_or(rest), is_whole: length <= rest.len() };
    // Chunks are padded to an even length.
    Some((chunk, rest.get(length + length % 2..).unwrap_or_default()))
}
