//! Reads how a JPEG file is built, decides which decoder is right for it, and decodes it. `zune-jpeg` is the faster
//! decoder; for some files it returns other pixels, or panics. `jpeg-decoder` is right for nearly all of these. Files for
//! which neither is right are refused. `scripts/compare-jpegs` compares both with Pillow.

use image::{DynamicImage, GrayImage, RgbImage};
use jpeg_decoder::{ColorTransform, PixelFormat};
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// The pixels of a file count once more for every 20 scans, each of which covers the whole image.
const SCANS_PER_COUNT: u64 = 20;
/// The marker of the beginning of a file.
const SOI: [u8; 2] = [0xff, 0xd8];
/// The marker of the end.
const EOI: u8 = 0xd9;
/// The marker of a scan.
const SOS: u8 = 0xda;
/// The marker SOF of a progressive image.
const PROGRESSIVE: u8 = 0xc2;
/// The marker of Huffman tables.
const DHT: u8 = 0xc4;

/// The maximum number of scans, each of which takes time for the whole image. Encoders write about a dozen.
const MAX_SCANS: usize = 100;

/// How a file is built.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Structure {
    pub(super) width: u16,
    pub(super) height: u16,
    /// In the order of the file. At most one more than [`MAX_SCANS`], which suffices to refuse the file.
    pub(super) scans: Vec<Scan>,
    /// Whether an end marker follows the scans.
    pub(super) has_end: bool,
    /// Whether it has several descriptions of an image, or markers that decoders understand in different ways.
    is_ambiguous: bool,
    /// The marker SOF, whose number says how the image is coded.
    coding: u8,
    components: Vec<Component>,
    has_jfif: bool,
    /// The colour transform that Adobe's segment states, if there is one.
    adobe_transform: Option<u8>,
}

/// A component of the image: brightness, or a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Component {
    id: u8,
    /// The sampling factors, horizontal and vertical.
    factors: [usize; 2],
}

/// A scan of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scan {
    /// The ids of its components.
    components: Vec<u8>,
    /// The first and the last coefficient.
    coefficients: [u8; 2],
    /// Whether it is the first scan of these coefficients.
    is_first: bool,
    /// Whether they have their full precision after this scan.
    is_precise: bool,
    /// The blocks, or groups of blocks, from one restart marker to the next. 0: there are no such markers.
    restart_interval: usize,
    /// The number of restart markers that it has.
    restarts: usize,
    /// Whether these are numbered in their order.
    is_in_order: bool,
}

/// The library that decodes a file rightly.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Library {
    Zune,
    /// `jpeg-decoder`, told how colours are coded.
    JpegDecoder(ColorTransform),
}

/// A marker with its data.
pub(super) struct Segment<'a> {
    pub(super) marker: u8,
    pub(super) data: &'a [u8],
    /// Where it begins and ends in the file.
    range: std::ops::Range<usize>,
}

/// The segments of a file, restart markers and the end marker included. Other bytes between them, such as the data of
/// scans, are skipped, as libjpeg does.
pub(super) struct Segments<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Segments<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: SOI.len() }
    }
}

impl<'a> Iterator for Segments<'a> {
    type Item = Segment<'a>;

    fn next(&mut self) -> Option<Segment<'a>> {
        let rest = self.bytes.get(self.position..)?;
        // 0xff before 0 is data, and 0xff before 0xff fills.
        let is_marker = |pair: &[u8]| pair[0] == 0xff && !matches!(pair[1], 0 | 0xff);
        let start = self.position + rest.windows(2).position(is_marker)?;
        let (marker, after) = (self.bytes[start + 1], &self.bytes[start + 2..]);
        let length = match marker {
            // Markers that stand alone.
            0x01 | 0xd0..=EOI => 0,
            _ => usize::from(u16::from_be_bytes(*after.first_chunk()?)),
        };
        self.position = start + 2 + length;
        Some(Segment {
            marker,
            data: after.get(2..length).unwrap_or_default(),
            range: start..self.position.min(self.bytes.len()),
        })
    }
}

impl Structure {
    /// Reads the segments of a file. None if no segment describes an image.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let (mut has_jfif, mut adobe_transform, mut image) = (false, None, None);
        let (mut scans, mut has_end, mut restart_interval) = (Vec::<Scan>::new(), false, 0);
        let mut is_ambiguous = false;
        for Segment { marker, data, .. } in Segments::new(bytes) {
            match (marker, data) {
                (EOI, _) => {
                    has_end = !scans.is_empty();
                    break;
                }
                (0xd0..=0xd7, _) => {
                    if let Some(scan) = scans.last_mut() {
                        scan.is_in_order &= usize::from(marker - 0xd0) == scan.restarts % 8;
                        scan.restarts += 1;
                    }
                }
                (0xdd, [high, low, ..]) => restart_interval = u16::from_be_bytes([*high, *low]).into(),
                (0xe0, [b'J', b'F', b'I', b'F', 0, ..]) => has_jfif = true,
                (0xee, [b'A', b'd', b'o', b'b', b'e', _, _, _, _, _, _, transform, ..]) => {
                    adobe_transform = Some(*transform);
                }
                // Decoders take these for different things within scans.
                (0x01 | 0xd8, _) => is_ambiguous |= !scans.is_empty(),
                // SOF, but for the markers of Huffman tables, of arithmetic conditions, and a reserved one.
                (0xc0..=0xcf, [_, a, b, c, d, _, components @ ..])
                    if !matches!(marker, DHT | 0xc8 | 0xcc) =>
                {
                    is_ambiguous |= image.is_some();
                    let [height, width] = [[*a, *b], [*c, *d]].map(u16::from_be_bytes);
                    let component = |bytes: &[u8]| Component {
                        id: bytes[0],
                        factors: [bytes[1] >> 4, bytes[1] & 15].map(usize::from),
                    };
                    let components: Vec<Component> = components.chunks_exact(3).map(component).collect();
                    image = Some((marker, width, height, components));
                }
                (SOS, [count, components @ .., first, last, precision]) if scans.len() <= MAX_SCANS => {
                    let ids = components.chunks_exact(2).map(|component| component[0]);
                    scans.push(Scan {
                        components: ids.take(usize::from(*count)).collect(),
                        coefficients: [*first, *last],
                        is_first: precision >> 4 == 0,
                        is_precise: precision & 15 == 0,
                        restart_interval,
                        restarts: 0,
                        is_in_order: true,
                    });
                }
                _ => {}
            }
        }
        let (coding, width, height, components) = image?;
        Some(Self {
            width,
            height,
            scans,
            has_end,
            is_ambiguous,
            coding,
            components,
            has_jfif,
            adobe_transform,
        })
    }

    /// The pixels that are decoded: whole groups of blocks, and once more for every [`SCANS_PER_COUNT`] scans.
    pub(super) fn decoded_pixels(&self) -> u64 {
        let [horizontal, vertical] = self.max_factors().map(|factor| 8 * factor.max(1));
        let [width, height] = [self.width, self.height].map(usize::from);
        let pixels = width.next_multiple_of(horizontal) as u64 * height.next_multiple_of(vertical) as u64;
        pixels * (1 + self.scans.len() as u64 / SCANS_PER_COUNT)
    }

    /// The library that is right for the file.
    ///
    /// # Errors
    /// Why none is.
    pub(super) fn library(&self) -> Result<Library, String> {
        let coding = match self.coding {
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
            .color_transform()
            .ok_or_else(|| format!("it has {} components; 1, 3 or 4 are decoded", self.components.len()))?;
        if self.components.iter().any(|component| component.factors.contains(&0)) {
            return Err("it has sampling factors of 0".to_owned());
        }
        if self.is_ambiguous {
            return Err("it has markers that contradict each other".to_owned());
        }
        // Each scan takes time for the whole image, and needs no data to do so.
        let in_scans: usize = self.scans.iter().map(|scan| scan.components.len()).sum();
        if self.coding != PROGRESSIVE && in_scans != self.components.len() {
            return Err(format!(
                "its {} components occur {in_scans} times in its scans",
                self.components.len()
            ));
        }
        if self.coding == PROGRESSIVE && !self.components.iter().all(|it| self.has_all_coefficients(it.id)) {
            return Err("scans are missing, or occur twice".to_owned());
        }
        if self.width == 0 || self.height == 0 {
            return Err(format!("it states {}x{} pixels", self.width, self.height));
        }
        if !self.scans.iter().all(|scan| self.has_all_restarts(scan)) {
            return Err("restart markers are missing or in a wrong order".to_owned());
        }
        if self.suits_zune(colours) {
            Ok(Library::Zune)
        } else if self.suits_jpeg_decoder() {
            Ok(Library::JpegDecoder(colours))
        } else {
            let factors =
                |component: &Component| component.factors.map(|factor| factor.to_string()).join("x");
            let factors: Vec<String> = self.components.iter().map(factors).collect();
            Err(format!(
                "it has separate scans of components with the sampling factors {}, which are not decoded",
                factors.join(",")
            ))
        }
    }

    /// The colour transform that libjpeg chooses. None for a number of components that it has none for.
    fn color_transform(&self) -> Option<ColorTransform> {
        let ids: Vec<u8> = self.components.iter().map(|component| component.id).collect();
        Some(match (ids.len(), self.adobe_transform) {
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

    /// The largest sampling factors of all components, horizontal and vertical.
    fn max_factors(&self) -> [usize; 2] {
        [0, 1].map(|side| self.components.iter().map(|component| component.factors[side]).max().unwrap_or(1))
    }

    /// Whether one scan of a progressive image begins each coefficient of a component, and one gives it its full precision.
    /// A file that was cut lacks some, which libjpeg guesses. Further scans would take time and change nothing.
    fn has_all_coefficients(&self, id: u8) -> bool {
        let scans = || self.scans.iter().filter(|scan| scan.components.contains(&id));
        (0..64).all(|index| {
            let of_index =
                || scans().filter(|scan| (scan.coefficients[0]..=scan.coefficients[1]).contains(&index));
            of_index().filter(|scan| scan.is_first).count() == 1 && of_index().any(|scan| scan.is_precise)
        })
    }

    /// Whether a scan has the restart markers that its interval asks for. Where some are lost, decoders go on at a wrong
    /// place. One more at the end does no harm.
    fn has_all_restarts(&self, scan: &Scan) -> bool {
        let [horizontal, vertical] = self.max_factors();
        let sides = [self.width, self.height].map(usize::from);
        // The units of a scan of one component are its blocks.
        let component = self.components.iter().find(|component| scan.components == [component.id]);
        let units: usize = match component {
            Some(Component { factors, .. }) => {
                let blocks =
                    |side: usize, max: usize| (sides[side] * factors[side]).div_ceil(max).div_ceil(8);
                blocks(0, horizontal) * blocks(1, vertical)
            }
            None => sides[0].div_ceil(8 * horizontal) * sides[1].div_ceil(8 * vertical),
        };
        let expected = units.saturating_sub(1).checked_div(scan.restart_interval).unwrap_or(0);
        scan.is_in_order && (expected..=expected + 1).contains(&scan.restarts)
    }

    /// Whether `zune-jpeg` returns the right pixels, by comparison with Pillow over thousands of files.
    fn suits_zune(&self, colours: ColorTransform) -> bool {
        let is_progressive = self.coding == PROGRESSIVE;
        let has_one_scan =
            matches!(&self.scans[..], [scan] if scan.components.len() == self.components.len());
        let max_factors = self.max_factors();
        let has_plain_factors = self.components.first().is_some_and(|first| first.factors == max_factors)
            && self.components.iter().all(|component| !component.factors.contains(&3))
            && !(max_factors[1] == 4 && self.components.iter().any(|component| component.factors[1] == 2));
        // `zune-jpeg` prefers the ids and Adobe's segment to that of JFIF.
        let is_named_rgb = self.components.iter().map(|component| component.id).eq(*b"RGB");
        let has_other_colours = self.has_jfif && self.adobe_transform == Some(0)
            || is_named_rgb && colours == ColorTransform::YCbCr;
        (is_progressive || has_one_scan) && has_plain_factors && !has_other_colours
    }

    /// Whether `jpeg-decoder` returns the right pixels. In the separate scan of a component it may expect more blocks than
    /// there are, if the factor of the component lies between 1 and the largest.
    fn suits_jpeg_decoder(&self) -> bool {
        let max_factors = self.max_factors();
        let sides = [self.width, self.height].map(usize::from);
        let has_expected_blocks = |component: &Component| {
            [0, 1].into_iter().all(|side| {
                let (pixels, factor, largest) = (sides[side], component.factors[side], max_factors[side]);
                let expected = (pixels.div_ceil(8 * largest) * factor).min(pixels.div_ceil(8));
                expected == (pixels * factor).div_ceil(largest).div_ceil(8)
            })
        };
        self.scans.iter().filter(|scan| scan.components.len() == 1).all(|scan| {
            self.components.iter().find(|it| scan.components == [it.id]).is_some_and(has_expected_blocks)
        })
    }
}

/// Decodes a file with the library that is right for it.
///
/// # Errors
/// The library's message.
pub(super) fn decode(bytes: &[u8], library: Library) -> Result<DynamicImage, String> {
    let file = needed_segments(bytes, library);
    match library {
        Library::Zune => decode_with_zune(&file),
        Library::JpegDecoder(colours) => decode_with_jpeg_decoder(&file, colours),
    }
}

/// The file with only those segments that say how its image is decoded. Metadata takes time in the decoders: `zune-jpeg`
/// sorts all segments of extended XMP again at each marker, so that a file of 8 MiB with nothing else keeps it busy for
/// minutes. Other bytes between the segments before the first scan are left out. A file without Huffman tables, as webcams
/// write, gets a segment by which the decoders take those of the standard. `zune-jpeg` would fill the image if the data
/// ended at the end marker before the image does, so a baseline file gets a few zeros in the place of the marker, which is
/// as far as the decoder may read ahead.
fn needed_segments(bytes: &[u8], library: Library) -> Vec<u8> {
    const STANDARD_TABLES: &[u8] = b"\xff\xe0\0\x10AVI1\0\0\0\0\0\0\0\0\0\0";
    const READ_AHEAD: usize = 16;
    let mut file = Vec::with_capacity(bytes.len() + STANDARD_TABLES.len() + READ_AHEAD);
    file.extend(SOI);
    let (mut has_tables, mut has_scan, mut is_progressive) = (false, false, false);
    let mut copied = 0;
    for Segment { marker, data, range } in Segments::new(bytes) {
        let is_needed = match marker {
            0xe0 => data.starts_with(b"JFIF\0"),
            0xee => data.starts_with(b"Adobe"),
            // Other segments of applications, comments, and markers that stand alone, but for those of scans.
            0xe1..=0xef | 0xfe | 0x01 | 0xd8 => false,
            0xd0..=0xd7 => has_scan,
            _ => true,
        };
        has_tables |= marker == DHT;
        is_progressive |= marker == PROGRESSIVE;
        if marker == SOS && !has_scan {
            has_scan = true;
            if !has_tables {
                file.extend(STANDARD_TABLES);
            }
        } else if has_scan {
            // The data of the scan, and padding.
            file.extend(&bytes[copied..range.start]);
        }
        if marker == EOI && library == Library::Zune && !is_progressive {
            file.extend([0; READ_AHEAD]);
        } else if is_needed {
            file.extend(&bytes[range.clone()]);
        }
        if marker == EOI {
            break;
        }
        copied = range.end;
    }
    file
}

fn decode_with_zune(file: &[u8]) -> Result<DynamicImage, String> {
    // Otherwise a file whose data ends early would be filled with its last colour.
    let options = DecoderOptions::default().set_strict_mode(true);
    let options = options.set_max_width(usize::from(u16::MAX)).set_max_height(usize::from(u16::MAX));
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(file), options);
    decoder.decode_headers().map_err(|error| error.to_string())?;
    let is_gray = decoder.input_colorspace() == Some(ColorSpace::Luma);
    let colours = if is_gray { ColorSpace::Luma } else { ColorSpace::RGB };
    decoder.set_options(options.jpeg_set_out_colorspace(colours));
    let pixels = decoder.decode().map_err(|error| error.to_string())?;
    let info = decoder.info().ok_or("it has no image")?;
    let (width, height) = (u32::from(info.width), u32::from(info.height));
    let image = if is_gray {
        GrayImage::from_raw(width, height, pixels).map(DynamicImage::from)
    } else {
        RgbImage::from_raw(width, height, pixels).map(DynamicImage::from)
    };
    image.ok_or_else(|| "it has too few samples".to_owned())
}

fn decode_with_jpeg_decoder(file: &[u8], colours: ColorTransform) -> Result<DynamicImage, String> {
    let mut decoder = jpeg_decoder::Decoder::new(file);
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
            // Coefficients of all scans, and of full precision.
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

    fn library(
        frame: u8,
        components: &[(u8, u8)],
        scans: &[&[u8]],
        others: &[&[u8]],
    ) -> Result<Library, String> {
        Structure::read(&file(frame, components, scans, others)).unwrap().library()
    }

    #[test]
    fn the_structure_of_a_file_decides_its_library() {
        let plain = [(1, 0x22), (2, 0x11), (3, 0x11)];
        let separate: &[&[u8]] = &[&[1], &[2], &[3]];
        assert_eq!(library(0xc0, &plain, &[&[1, 2, 3]], &[JFIF]), Ok(Library::Zune));
        assert_eq!(library(0xc2, &plain, separate, &[JFIF]), Ok(Library::Zune));
        assert_eq!(library(0xc0, &[(1, 0x11)], &[&[1]], &[]), Ok(Library::Zune));
        let other = Ok(Library::JpegDecoder(ColorTransform::YCbCr));
        assert_eq!(library(0xc0, &plain, separate, &[JFIF]), other);
        assert_eq!(library(0xc0, &[(1, 0x11), (2, 0x22), (3, 0x22)], &[&[1, 2, 3]], &[]), other);
        assert_eq!(library(0xc1, &[(1, 0x31), (2, 0x11), (3, 0x11)], &[&[1, 2, 3]], &[]), other);
        assert_eq!(library(0xc2, &[(1, 0x24), (2, 0x12), (3, 0x11)], &[&[1, 2, 3]], &[]), other);
    }

    #[test]
    fn colours_are_those_of_libjpeg() {
        let [numbers, letters] = [[1, 2, 3], *b"RGB"].map(|ids| ids.map(|id| (id, 0x11)));
        let inks = [(1, 0x11), (2, 0x11), (3, 0x11), (4, 0x11)];
        let [zero, one, two] = [0, 1, 2].map(adobe);
        let colours = |components: &[(u8, u8)], others: &[&[u8]]| {
            let ids: Vec<u8> = components.iter().map(|(id, _)| *id).collect();
            Structure::read(&file(0xc0, components, &[&ids], others)).unwrap().color_transform().unwrap()
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
        let other = Ok(Library::JpegDecoder(ColorTransform::YCbCr));
        assert_eq!(library(0xc0, &letters, &[b"RGB"], &[JFIF]), other);
        assert_eq!(library(0xc0, &numbers, &[&[1, 2, 3]], &[JFIF, &zero]), other);
    }

    #[test]
    fn what_no_decoder_reads_rightly_is_refused_by_name() {
        let plain = [(1, 0x11), (2, 0x11), (3, 0x11)];
        let many: Vec<&[u8]> = vec![&[1, 2, 3]; 101];
        for (refused, named) in [
            (library(0xc9, &plain, &[&[1, 2, 3]], &[]), "arithmetic coding"),
            (library(0xca, &plain, &[&[1, 2, 3]], &[]), "arithmetic coding"),
            (library(0xc3, &plain, &[&[1, 2, 3]], &[]), "lossless"),
            (library(0xc5, &plain, &[&[1, 2, 3]], &[]), "hierarchical"),
            (library(0xc0, &plain[..2], &[&[1, 2]], &[]), "2 components; 1, 3 or 4"),
            (library(0xc0, &[(1, 0x01)], &[&[1]], &[]), "sampling factors of 0"),
            (library(0xc2, &plain, &many, &[]), "more than 100 scans"),
            (library(0xc2, &plain, &[&[1, 2]], &[]), "scans are missing"),
            (library(0xc2, &plain, &[&[1, 2, 3], &[1, 2, 3]], &[]), "or occur twice"),
            (library(0xc0, &plain, &[&[1, 2, 3], &[1]], &[]), "3 components occur 4 times"),
            (library(0xc0, &plain, &[&[1, 2, 3]], &[b"\xc0\x08\0\x4b\0\x64\x01\x01\x11\0"]), "contradict"),
            (
                library(0xc0, &[(1, 0x41), (2, 0x31), (3, 0x11)], &[&[1], &[2], &[3]], &[]),
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
    fn lost_restart_markers_are_noticed() {
        let components = [(1, 0x22), (2, 0x11), (3, 0x11)];
        // 7 × 5 groups of blocks, in intervals of 10.
        let interval: &[u8] = b"\xdd\0\x0a";
        let whole = file(0xc0, &components, &[&[1, 2, 3]], &[interval]);
        let library = |markers: &[u8]| {
            let data: Vec<u8> = markers.iter().flat_map(|marker| [0xff, *marker, 7, 0xff, 0, 9]).collect();
            let file = [&whole[..whole.len() - 2], &data, &[0xff, 0xd9]].concat();
            Structure::read(&file).unwrap().library()
        };
        for complete in [&[0xd0, 0xd1, 0xd2][..], &[0xd0, 0xd1, 0xd2, 0xd3]] {
            assert_eq!(library(complete), Ok(Library::Zune));
        }
        for lost in [&[][..], &[0xd0, 0xd1], &[0xd0, 0xd2, 0xd3], &[0xd1, 0xd2, 0xd3], &[0xd0; 3]] {
            assert!(library(lost).unwrap_err().contains("restart markers"), "{lost:x?}");
        }
    }

    #[test]
    fn decoders_get_the_segments_that_they_need() {
        let components = [(1, 0x11)];
        let [xmp, icc, comment]: [&[u8]; 3] =
            [b"\xe1http://ns.adobe.com/xmp/extension/\0", b"\xe2ICC", b"\xfe?"];
        let bare = file(0xc0, &components, &[&[1]], &[JFIF, b"\xc4tables"]);
        let full = file(0xc0, &components, &[&[1]], &[xmp, JFIF, icc, b"\xc4tables", comment]);
        let needed = |file: &[u8]| needed_segments(file, Library::JpegDecoder(ColorTransform::Grayscale));
        assert_eq!(needed(&full), bare);
        let first = [&full[..2], b"\0junk\xff\0\xff\x01\0\x06", &full[2..], b"\xff\xe1trailing"].concat();
        assert_eq!(needed(&first), bare);
        let without_tables = needed(&file(0xc0, &components, &[&[1]], &[]));
        assert!(without_tables.windows(5).any(|window| window == b"AVI1\0"));
    }

    #[test]
    fn inks_are_converted_as_by_pillow() {
        let inks = [0, 0, 0, 0, 255, 0, 0, 0, 0, 255, 128, 64, 10, 200, 30, 255];
        assert_eq!(rgb_of_cmyk(&inks), [255, 255, 255, 0, 255, 255, 191, 0, 95, 0, 0, 0]);
    }
}
