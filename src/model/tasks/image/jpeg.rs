//! Reads how a JPEG file is built, and decides which decoder is right for it. `zune-jpeg`, which `image` uses, is the
//! faster one; for some files it returns other pixels, or panics. `jpeg-decoder` is right for nearly all of these. Files for
//! which neither is right are refused. `scripts/compare-jpegs` compares both with Pillow.

use image::{DynamicImage, GrayImage, RgbImage};
use jpeg_decoder::{ColorTransform, PixelFormat};

/// The maximum number of scans. Encoders write about a dozen.
const MAX_SCANS: usize = 100;

/// How a file is built.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Structure {
    pub(super) width: u16,
    pub(super) height: u16,
    /// In their order; at most one more than are decoded.
    pub(super) scans: Vec<Scan>,
    /// Whether the file has an end marker behind its scans.
    pub(super) has_end: bool,
    /// The marker of the frame, which says how it is coded.
    frame: u8,
    components: Vec<Component>,
    has_jfif: bool,
    /// The colours that Adobe's segment states, if there is one.
    adobe: Option<u8>,
}

/// A component of the image: brightness, or a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Component {
    id: u8,
    /// Samples of this component in each direction, where the finest component has the largest number.
    factors: [usize; 2],
}

/// A scan of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scan {
    components: usize,
    /// The id of its first component.
    first: u8,
}

/// The decoder that is right for a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Decoder {
    /// The crate `image`, which decodes JPEG files with `zune-jpeg`.
    Image,
    /// `jpeg-decoder`, told how colours are coded.
    JpegDecoder(ColorTransform),
}

impl Structure {
    /// Reads the segments of a file. None if it ends before its frame is described.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let (mut has_jfif, mut adobe, mut frame) = (false, None, None);
        let (mut scans, mut has_end) = (Vec::new(), false);
        let mut rest = bytes.get(2..)?;
        // Within a scan, each 0xff of the data is followed by 0 or begins a restart marker.
        let is_marker = |pair: &[u8]| pair[0] == 0xff && !matches!(pair[1], 0 | 1 | 0xd0..=0xd8 | 0xff);
        while let Some(start) = rest.windows(2).position(is_marker) {
            let (marker, segment) = (rest[start + 1], &rest[start + 2..]);
            if marker == 0xd9 {
                has_end = !scans.is_empty();
                break;
            }
            let Some(length) = segment.first_chunk().map(|length| usize::from(u16::from_be_bytes(*length)))
            else {
                break;
            };
            let data = segment.get(2..length).unwrap_or_default();
            match (marker, data) {
                (0xe0, [b'J', b'F', b'I', b'F', 0, ..]) => has_jfif = true,
                (0xee, [b'A', b'd', b'o', b'b', b'e', _, _, _, _, _, _, colours, ..]) => {
                    adobe = Some(*colours)
                }
                // Markers of frames, but for those of tables and of an arithmetic coder's conditions.
                (0xc0..=0xcf, [_, a, b, c, d, _, components @ ..])
                    if !matches!(marker, 0xc4 | 0xc8 | 0xcc) && frame.is_none() =>
                {
                    let sides = [[*a, *b], [*c, *d]].map(u16::from_be_bytes);
                    let component = |bytes: &[u8]| Component {
                        id: bytes[0],
                        factors: [bytes[1] >> 4, bytes[1] & 15].map(usize::from),
                    };
                    let components: Vec<Component> = components.chunks_exact(3).map(component).collect();
                    frame = Some((marker, sides, components));
                }
                // More scans are not decoded, so that they need not be kept.
                (0xda, [components, first, ..]) if scans.len() <= MAX_SCANS => {
                    scans.push(Scan { components: usize::from(*components), first: *first });
                }
                _ => {}
            }
            rest = segment.get(length..).unwrap_or_default();
        }
        let (frame, [height, width], components) = frame?;
        Some(Self { width, height, scans, has_end, frame, components, has_jfif, adobe })
    }

    /// The decoder that is right for the file.
    ///
    /// # Errors
    /// Why no decoder is.
    pub(super) fn decoder(&self) -> Result<Decoder, String> {
        let coding = match self.frame {
            0xc0..=0xc2 => None,
            0xc3 | 0xc7 | 0xcb | 0xcf => Some("is lossless"),
            0xc9..=0xce => Some("has arithmetic coding"),
            _ => Some("is hierarchical"),
        };
        if let Some(coding) = coding {
            return Err(format!("it {coding}, which is not decoded"));
        }
        if self.scans.len() > MAX_SCANS {
            return Err(format!("it has more than {MAX_SCANS} scans"));
        }
        let colours = self
            .colours()
            .ok_or_else(|| format!("it has {} components; 1, 3 or 4 are decoded", self.components.len()))?;
        if self.components.iter().any(|component| component.factors.contains(&0)) {
            return Err("it has sampling factors of 0".to_owned());
        }
        if self.suits_zune(colours) {
            Ok(Decoder::Image)
        } else if self.suits_jpeg_decoder() {
            Ok(Decoder::JpegDecoder(colours))
        } else {
            let factors =
                |component: &Component| component.factors.map(|factor| factor.to_string()).join("x");
            let factors: Vec<String> = self.components.iter().map(factors).collect();
            Err(format!(
                "it has scans of one component with the sampling factors {}, which are not decoded",
                factors.join(",")
            ))
        }
    }

    /// How libjpeg finds that colours are coded. None for a number of components that it has no colours for.
    fn colours(&self) -> Option<ColorTransform> {
        let ids: Vec<u8> = self.components.iter().map(|component| component.id).collect();
        Some(match (ids.len(), self.adobe) {
            (1, _) => ColorTransform::Grayscale,
            (3, _) if self.has_jfif => ColorTransform::YCbCr,
            (3, Some(0)) => ColorTransform::RGB,
            (3, None) if ids == *b"RGB" => ColorTransform::RGB,
            (3, _) => ColorTransform::YCbCr,
            (4, None | Some(0)) => ColorTransform::CMYK,
            (4, _) => ColorTransform::YCCK,
            _ => return None,
        })
    }

    /// The largest sampling factors of all components.
    fn finest(&self) -> [usize; 2] {
        [0, 1].map(|side| self.components.iter().map(|component| component.factors[side]).max().unwrap_or(1))
    }

    /// Whether `zune-jpeg` returns the right pixels.
    fn suits_zune(&self, colours: ColorTransform) -> bool {
        let is_progressive = self.frame == 0xc2;
        let has_one_scan = matches!(self.scans[..], [scan] if scan.components == self.components.len());
        let finest = self.finest();
        let has_plain_factors = self.components.first().is_some_and(|first| first.factors == finest)
            && self.components.iter().all(|component| !component.factors.contains(&3))
            && !(finest[1] == 4 && self.components.iter().any(|component| component.factors[1] == 2));
        // It looks at the ids and at Adobe's segment first.
        let is_named_rgb = self.components.iter().map(|component| component.id).eq(*b"RGB");
        let has_other_colours =
            self.has_jfif && self.adobe == Some(0) || is_named_rgb && colours == ColorTransform::YCbCr;
        (is_progressive || has_one_scan) && has_plain_factors && !has_other_colours
    }

    /// Whether `jpeg-decoder` returns the right pixels: it expects more blocks than there are in a scan of one component
    /// whose factor lies between 1 and the largest.
    fn suits_jpeg_decoder(&self) -> bool {
        let finest = self.finest();
        let sides = [self.width, self.height].map(usize::from);
        let has_expected_blocks = |component: &Component| {
            [0, 1].into_iter().all(|side| {
                let (pixels, factor, largest) = (sides[side], component.factors[side], finest[side]);
                let expected = (pixels.div_ceil(8 * largest) * factor).min(pixels.div_ceil(8));
                expected == (pixels * factor).div_ceil(largest).div_ceil(8)
            })
        };
        self.scans.iter().filter(|scan| scan.components == 1).all(|scan| {
            self.components.iter().find(|it| it.id == scan.first).is_some_and(has_expected_blocks)
        })
    }
}

/// Decodes a file with `jpeg-decoder`.
///
/// # Errors
/// The library's message.
pub(super) fn decode(bytes: &[u8], colours: ColorTransform) -> Result<DynamicImage, String> {
    let mut decoder = jpeg_decoder::Decoder::new(bytes);
    decoder.set_color_transform(colours);
    let pixels = decoder.decode().map_err(|error| error.to_string())?;
    let info = decoder.info().ok_or("it has no frame")?;
    let (width, height) = (u32::from(info.width), u32::from(info.height));
    let image = match info.pixel_format {
        PixelFormat::L8 => GrayImage::from_raw(width, height, pixels).map(DynamicImage::from),
        PixelFormat::RGB24 => RgbImage::from_raw(width, height, pixels).map(DynamicImage::from),
        PixelFormat::CMYK32 => {
            RgbImage::from_raw(width, height, rgb_of_cmyk(&pixels)).map(DynamicImage::from)
        }
        PixelFormat::L16 => return Err("it has samples of 16 bits".to_owned()),
    };
    image.ok_or_else(|| "it has too few samples".to_owned())
}

/// Red, green and blue of cyan, magenta, yellow and black, as Pillow converts them.
fn rgb_of_cmyk(pixels: &[u8]) -> Vec<u8> {
    let mut rgb = Vec::with_capacity(pixels.len() / 4 * 3);
    for [inks @ .., black] in pixels.as_chunks::<4>().0 {
        let light = 255 - u32::from(*black);
        let colour = |ink: u8| {
            // Rounded ink × light ÷ 255.
            let product = u32::from(ink) * light + 128;
            light.saturating_sub((product + (product >> 8)) >> 8) as u8
        };
        rgb.extend(inks.map(colour));
    }
    rgb
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of 100 × 75 pixels with segments alone. `scans` are the ids of the components in each.
    fn file(frame: u8, components: &[(u8, u8)], scans: &[&[u8]], others: &[&[u8]]) -> Vec<u8> {
        let mut file = vec![0xff, 0xd8];
        let mut add = |marker: u8, data: &[u8]| {
            file.extend([0xff, marker]);
            file.extend((data.len() as u16 + 2).to_be_bytes());
            file.extend(data);
        };
        for segment in others {
            add(segment[0], &segment[1..]);
        }
        let mut described = vec![8, 0, 75, 0, 100, components.len() as u8];
        components.iter().for_each(|(id, factors)| described.extend([*id, *factors, 0]));
        add(frame, &described);
        for ids in scans {
            let mut scan = vec![ids.len() as u8];
            ids.iter().for_each(|id| scan.extend([*id, 0]));
            scan.extend([0, 63, 0]);
            add(0xda, &scan);
        }
        file.extend([0xff, 0xd9]);
        file
    }

    const JFIF: &[u8] = b"\xe0JFIF\0\x01\x01\0\0\x01\0\x01\0\0";

    fn adobe(colours: u8) -> Vec<u8> {
        [b"\xeeAdobe\0\x64\0\0\0\0", &[colours][..]].concat()
    }

    fn decoder(
        frame: u8,
        components: &[(u8, u8)],
        scans: &[&[u8]],
        others: &[&[u8]],
    ) -> Result<Decoder, String> {
        Structure::read(&file(frame, components, scans, others)).unwrap().decoder()
    }

    #[test]
    fn files_as_cameras_write_them_are_decoded_by_image() {
        let plain = [(1, 0x22), (2, 0x11), (3, 0x11)];
        let separate: &[&[u8]] = &[&[1], &[2], &[3]];
        assert_eq!(decoder(0xc0, &plain, &[&[1, 2, 3]], &[JFIF]), Ok(Decoder::Image));
        assert_eq!(decoder(0xc2, &plain, separate, &[JFIF]), Ok(Decoder::Image));
        assert_eq!(decoder(0xc0, &[(1, 0x11)], &[&[1]], &[]), Ok(Decoder::Image));
        let other = Ok(Decoder::JpegDecoder(ColorTransform::YCbCr));
        assert_eq!(decoder(0xc0, &plain, separate, &[JFIF]), other);
        assert_eq!(decoder(0xc0, &[(1, 0x11), (2, 0x22), (3, 0x22)], &[&[1, 2, 3]], &[]), other);
        assert_eq!(decoder(0xc1, &[(1, 0x31), (2, 0x11), (3, 0x11)], &[&[1, 2, 3]], &[]), other);
        assert_eq!(decoder(0xc2, &[(1, 0x24), (2, 0x12), (3, 0x11)], &[&[1, 2, 3]], &[]), other);
    }

    #[test]
    fn colours_are_those_of_libjpeg() {
        let [numbers, letters] = [[1, 2, 3], *b"RGB"].map(|ids| ids.map(|id| (id, 0x11)));
        let inks = [(1, 0x11), (2, 0x11), (3, 0x11), (4, 0x11)];
        let [zero, one, two] = [0, 1, 2].map(adobe);
        let colours = |components: &[(u8, u8)], others: &[&[u8]]| {
            let ids: Vec<u8> = components.iter().map(|(id, _)| *id).collect();
            Structure::read(&file(0xc0, components, &[&ids], others)).unwrap().colours().unwrap()
        };
        assert_eq!(colours(&numbers, &[]), ColorTransform::YCbCr);
        assert_eq!(colours(&letters, &[]), ColorTransform::RGB);
        assert_eq!(colours(&letters, &[JFIF]), ColorTransform::YCbCr);
        assert_eq!(colours(&numbers, &[&zero]), ColorTransform::RGB);
        assert_eq!(colours(&numbers, &[JFIF, &zero]), ColorTransform::YCbCr);
        assert_eq!(colours(&letters, &[&one]), ColorTransform::YCbCr);
        assert_eq!([colours(&inks, &[]), colours(&inks, &[&zero])], [ColorTransform::CMYK; 2]);
        assert_eq!(colours(&inks, &[&two]), ColorTransform::YCCK);
        // The decoder of `image` finds other colours in these.
        let other = Ok(Decoder::JpegDecoder(ColorTransform::YCbCr));
        assert_eq!(decoder(0xc0, &letters, &[b"RGB"], &[JFIF]), other);
        assert_eq!(decoder(0xc0, &numbers, &[&[1, 2, 3]], &[JFIF, &zero]), other);
    }

    #[test]
    fn what_no_decoder_reads_rightly_is_refused_by_name() {
        let plain = [(1, 0x11), (2, 0x11), (3, 0x11)];
        let many: Vec<&[u8]> = vec![&[1, 2, 3]; 101];
        for (refused, named) in [
            (decoder(0xc9, &plain, &[&[1, 2, 3]], &[]), "arithmetic coding"),
            (decoder(0xca, &plain, &[&[1, 2, 3]], &[]), "arithmetic coding"),
            (decoder(0xc3, &plain, &[&[1, 2, 3]], &[]), "lossless"),
            (decoder(0xc5, &plain, &[&[1, 2, 3]], &[]), "hierarchical"),
            (decoder(0xc0, &plain[..2], &[&[1, 2]], &[]), "2 components; 1, 3 or 4"),
            (decoder(0xc0, &[(1, 0x01)], &[&[1]], &[]), "sampling factors of 0"),
            (decoder(0xc2, &plain, &many, &[]), "more than 100 scans"),
            (
                decoder(0xc0, &[(1, 0x41), (2, 0x31), (3, 0x11)], &[&[1], &[2], &[3]], &[]),
                "factors 4x1,3x1,1x1",
            ),
        ] {
            assert!(refused.as_ref().unwrap_err().contains(named), "{refused:?}");
        }
        let whole = file(0xc0, &plain, &[&[1, 2, 3]], &[]);
        assert!(!Structure::read(&whole[..whole.len() - 1]).unwrap().has_end);
        assert_eq!(Structure::read(&whole[..10]), None);
    }

    #[test]
    fn inks_are_converted_as_by_pillow() {
        let inks = [0, 0, 0, 0, 255, 0, 0, 0, 0, 255, 128, 64, 10, 200, 30, 255];
        assert_eq!(rgb_of_cmyk(&inks), [255, 255, 255, 0, 255, 255, 191, 0, 95, 0, 0, 0]);
    }
}
