//! Turns pixels into a model's input, as a `preprocessor_config.json` of the transformers library describes.
//!
//! The results equal those of transformers' processors on Pillow bit for bit, as far as `resize` equals Pillow. The
//! processors on torchvision ("Fast") round differently when they resize, and some samples differ by 1.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::decode::Rgb8;
use super::resize::{Filter, Window, resize};
use crate::model::nets::image::Sides;
#[cfg(feature = "candle-transformers")]
use crate::model::{LoadError, LoadSpec};

/// How images become a model's input, always of the same size.
#[derive(Clone, Debug)]
pub struct Preprocessing {
    resize: Resize,
    filter: Filter,
    /// Rows of the model's input.
    pub height: usize,
    /// Columns of the model's input.
    pub width: usize,
    /// The model's input value for each of the 256 sample values of each colour.
    table: [[f32; 256]; 3],
}

/// How an image is resized before the crop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resize {
    Unchanged,
    To { height: usize, width: usize },
    ShortestEdge(usize),
}

/// The contents of a `preprocessor_config.json`.
#[derive(Deserialize)]
struct Config {
    image_processor_type: Option<String>,
    feature_extractor_type: Option<String>,
    do_resize: Option<bool>,
    size: Option<Value>,
    default_to_square: Option<bool>,
    resample: Option<u64>,
    crop_pct: Option<f64>,
    do_center_crop: Option<bool>,
    crop_size: Option<Value>,
    do_rescale: Option<bool>,
    rescale_factor: Option<f64>,
    rescale_offset: Option<bool>,
    do_normalize: Option<bool>,
    image_mean: Option<Value>,
    image_std: Option<Value>,
    include_top: Option<bool>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Keys that do not affect the model's input. `do_convert_rgb` is one of them, because images are RGB by now.
const HARMLESS: [&str; 9] = [
    "_valid_processor_keys",
    "auto_map",
    "data_format",
    "device",
    "disable_grouping",
    "do_convert_rgb",
    "input_data_format",
    "processor_class",
    "return_tensors",
];

/// The maximum side of an input, in pixels. A longer one is taken for a mistake.
const MAX_SIDE: u64 = 8192;

/// The image processors of the transformers library. Classes that read a config in the same way are one here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Vit,
    Deit,
    Clip,
    Siglip,
    ConvNext,
    EfficientNet,
}

impl Class {
    /// The class of this name. The suffixes `Fast` and `Pil` denote the same class, written for another library.
    fn of(name: &str) -> Option<Self> {
        let name = name.strip_suffix("Fast").or(name.strip_suffix("Pil")).unwrap_or(name);
        match name.strip_suffix("ImageProcessor").or(name.strip_suffix("FeatureExtractor"))? {
            "ViT" => Some(Self::Vit),
            "DeiT" => Some(Self::Deit),
            "CLIP" | "Bit" => Some(Self::Clip),
            "Siglip" | "Blip" => Some(Self::Siglip),
            "ConvNext" => Some(Self::ConvNext),
            "EfficientNet" => Some(Self::EfficientNet),
            _ => None,
        }
    }

    /// Whether a bare number in `size` means both sides instead of the shorter one.
    fn has_square_size(self) -> bool {
        !matches!(self, Self::Clip | Self::ConvNext)
    }

    /// Whether images are cropped if the config does not say.
    fn crops(self) -> bool {
        matches!(self, Self::Deit | Self::Clip)
    }
}

impl Preprocessing {
    /// Reads the text of a `preprocessor_config.json`.
    ///
    /// # Errors
    /// The config has an unknown key that may affect the model's input and is neither null nor false, a value is not
    /// supported, or images would differ in size.
    pub fn read(text: &str) -> Result<Self, String> {
        let config: Config = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let class = class(&config)?;
        let is_off = |value: &Value| matches!(value, Value::Null | Value::Bool(false));
        for (key, value) in &config.others {
            if !is_off(value) && !HARMLESS.contains(&key.as_str()) {
                return refused(format!("`{key}` = {value} is not supported"));
            }
        }
        if class != Class::EfficientNet {
            for (key, value) in
                [("include_top", config.include_top), ("rescale_offset", config.rescale_offset)]
            {
                if value == Some(true) {
                    return refused(format!("`{key}` = true is only known of EfficientNetImageProcessor"));
                }
            }
        }
        let (resize, crop) = resize_and_crop(&config, class)?;
        let (height, width) = match (crop, resize) {
            (Some(crop), _) => crop,
            (None, Resize::To { height, width }) => (height, width),
            (None, _) => {
                return refused(
                    "without `do_center_crop` or both sides in `size`, images would differ in size",
                );
            }
        };
        let filter = match config.resample {
            Some(number) => Filter::from_pillow(number)
                .ok_or_else(|| format!("`resample` = {number} is not one of 0 to 5"))?,
            None if resize == Resize::Unchanged => Filter::Nearest,
            None => return refused("`resample` is missing"),
        };
        if filter == Filter::Nearest && matches!(resize, Resize::ShortestEdge(_)) {
            // The longer side of a thin image may be billions of pixels, which this filter visits one by one.
            return refused("`resample` = 0 is not supported with `shortest_edge`");
        }
        Ok(Self { resize, filter, height, width, table: table(&config, class)? })
    }

    /// The sides of the model's input.
    pub fn sides(&self) -> Sides {
        Sides { height: self.height, width: self.width }
    }

    /// Checks that the model's input has the sides of `config.json`, which gives them as `vision_config.image_size`.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] with both.
    #[cfg(feature = "candle-transformers")]
    pub fn with_sides(self, sides: Sides, spec: &LoadSpec) -> Result<Self, LoadError> {
        let made = self.sides();
        if made == sides {
            return Ok(self);
        }
        let reason = format!(
            "preprocessor_config.json makes images of {}x{} pixels, and vision_config.image_size is {}",
            made.width, made.height, sides.width
        );
        Err(spec.unsupported(reason))
    }

    /// The model's input `[height, width, 3]` of one image.
    pub fn apply(&self, image: &Rgb8) -> Vec<f32> {
        let (height, width) = match self.resize {
            Resize::Unchanged => (image.height, image.width),
            Resize::To { height, width } => (height, width),
            Resize::ShortestEdge(edge) if image.width <= image.height => {
                (longer_side(edge, image.height, image.width), edge)
            }
            Resize::ShortestEdge(edge) => (edge, longer_side(edge, image.width, image.height)),
        };
        let (rows, top) = middle(height, self.height);
        let (columns, left) = middle(width, self.width);
        let pixels = resize(image, width, height, self.filter, &Window { columns, rows });
        // If the crop is larger than the image, the image is surrounded by black: samples of 0, scaled like all others.
        let mut input: Vec<f32> = self.table.map(|values| values[0]).repeat(self.height * self.width);
        let lines = input.chunks_exact_mut(self.width * 3).skip(top);
        for (line, samples) in lines.zip(pixels.pixels.chunks_exact(pixels.width * 3)) {
            for (values, pixel) in line[left * 3..].chunks_exact_mut(3).zip(samples.chunks_exact(3)) {
                for ((value, sample), table) in values.iter_mut().zip(pixel).zip(&self.table) {
                    *value = table[usize::from(*sample)];
                }
            }
        }
        input
    }
}

/// The longer side when the shorter one becomes `edge`, rounded down.
fn longer_side(edge: usize, long: usize, short: usize) -> usize {
    edge * long / short
}

/// The middle `wanted` of `length` pixels, and how many empty pixels come before them. If the difference is odd, a crop
/// leaves the extra pixel after it, and padding adds the extra pixel before the image.
fn middle(length: usize, wanted: usize) -> (std::ops::Range<usize>, usize) {
    if wanted <= length {
        let first = (length - wanted) / 2;
        (first..first + wanted, 0)
    } else {
        (0..length, (wanted - length).div_ceil(2))
    }
}

fn refused<T>(reason: impl Into<String>) -> Result<T, String> {
    Err(reason.into())
}

fn class(config: &Config) -> Result<Class, String> {
    let name = config.image_processor_type.as_ref().or(config.feature_extractor_type.as_ref());
    let name = name.ok_or("`image_processor_type` is missing")?;
    Class::of(name).ok_or_else(|| format!("`image_processor_type` = {name:?} is not supported"))
}

/// The height and the width of the crop, if there is one.
type Crop = Option<(usize, usize)>;

/// How images are resized, and the crop after that.
fn resize_and_crop(config: &Config, class: Class) -> Result<(Resize, Crop), String> {
    let crops = config.do_center_crop.unwrap_or(class.crops());
    let mut crop = match &config.crop_size {
        Some(value) if crops => match size("crop_size", value, true)? {
            Resize::To { height, width } => Some((height, width)),
            _ => return refused(format!("`crop_size` = {value} has not both sides")),
        },
        None if crops => return refused("`crop_size` is missing"),
        _ => None,
    };
    if !config.do_resize.unwrap_or(true) {
        return Ok((Resize::Unchanged, crop));
    }
    let value = config.size.as_ref().ok_or("`size` is missing")?;
    let mut resize = size("size", value, config.default_to_square.unwrap_or(class.has_square_size()))?;
    if class == Class::ConvNext {
        // If `shortest_edge` is below 384, images are resized to more than that and then cropped. From 384 on they are
        // resized to a square.
        let Resize::ShortestEdge(edge) = resize else {
            return refused(format!(
                "`size` = {value} has no `shortest_edge`, which ConvNextImageProcessor needs"
            ));
        };
        if crop.is_some() {
            return refused("`do_center_crop` = true is not supported of ConvNextImageProcessor");
        }
        let share = config.crop_pct.unwrap_or(224.0 / 256.0);
        if !(share > 0.0 && share <= 1.0) {
            return refused(format!("`crop_pct` = {share} is not above 0 and at most 1"));
        }
        resize = Resize::To { height: edge, width: edge };
        if edge < 384 {
            resize = Resize::ShortestEdge((edge as f64 / share) as usize);
            crop = Some((edge, edge));
        }
    } else if let Some(share) = config.crop_pct {
        return refused(format!("`crop_pct` = {share} is only known of ConvNextImageProcessor"));
    }
    Ok((resize, crop))
}

/// Reads a size as transformers writes it: a number, `shortest_edge`, or `height` and `width`. With `is_square`, a
/// number means both sides; otherwise it means the shorter one.
fn size(key: &str, value: &Value, is_square: bool) -> Result<Resize, String> {
    let side = |value: &Value| match value.as_u64() {
        Some(side @ 1..=MAX_SIDE) => Ok(side as usize),
        _ => refused(format!("`{key}` has a side of {value}, not of 1 to {MAX_SIDE}")),
    };
    let Some(sides) = value.as_object() else {
        let side = side(value)?;
        return Ok(if is_square {
            Resize::To { height: side, width: side }
        } else {
            Resize::ShortestEdge(side)
        });
    };
    let sides: Vec<_> = sides.iter().filter(|(_, value)| !value.is_null()).collect();
    let mut names: Vec<_> = sides.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    names.sort_by_key(|(name, _)| *name);
    match names[..] {
        [("shortest_edge", edge)] => Ok(Resize::ShortestEdge(side(edge)?)),
        [("height", height), ("width", width)] => {
            Ok(Resize::To { height: side(height)?, width: side(width)? })
        }
        _ => refused(format!("`{key}` = {value} is neither `shortest_edge` nor `height` and `width`")),
    }
}

/// Computes the model's input value for each sample value. Rounds as transformers does: scales in f64, and does the
/// rest in f32.
fn table(config: &Config, class: Class) -> Result<[[f32; 256]; 3], String> {
    let normalizes = config.do_normalize.unwrap_or(true);
    let divides_again = class == Class::EfficientNet && config.include_top.unwrap_or(true);
    let mean = if normalizes { colours("image_mean", &config.image_mean)? } else { [0.0; 3] };
    let std = if normalizes || divides_again { colours("image_std", &config.image_std)? } else { [1.0; 3] };
    if std.contains(&0.0) {
        return refused("`image_std` has a 0");
    }
    let rescales = config.do_rescale.unwrap_or(true);
    let factor = config.rescale_factor.unwrap_or(1.0 / 255.0);
    let value = |sample: usize, colour: usize| {
        let mut value = sample as f32;
        if rescales {
            value = (sample as f64 * factor) as f32;
            if config.rescale_offset == Some(true) {
                value -= 1.0;
            }
        }
        if normalizes {
            value = (value - mean[colour]) / std[colour];
        }
        if divides_again { value / std[colour] } else { value }
    };
    Ok(std::array::from_fn(|colour| std::array::from_fn(|sample| value(sample, colour))))
}

/// Reads the numbers of `key` for red, green and blue: a list of three, or one number for all.
fn colours(key: &str, value: &Option<Value>) -> Result<[f32; 3], String> {
    let value = value.as_ref().ok_or_else(|| format!("`{key}` is missing"))?;
    let numbers = match value {
        Value::Array(numbers) => numbers.iter().map(Value::as_f64).collect(),
        one => Some(vec![one.as_f64().unwrap_or(f64::NAN); 3]),
    };
    match numbers.as_deref() {
        Some(&[red, green, blue]) if !red.is_nan() => Ok([red as f32, green as f32, blue as f32]),
        _ => refused(format!("`{key}` = {value} is not three numbers")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_files::{expected, png, read};
    use super::*;

    #[test]
    fn inputs_equal_those_of_transformers_bit_for_bit() {
        let (expected, file) = (expected(), read("preprocessed.safetensors"));
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        for row in expected["preprocessed"].as_array().unwrap() {
            let name = row["tensor"].as_str().unwrap();
            let config = expected["processors"][row["processor"].as_str().unwrap()].to_string();
            let preprocessing = Preprocessing::read(&config).unwrap();
            let tensor = tensors.tensor(name).unwrap();
            assert_eq!(tensor.shape(), [preprocessing.height, preprocessing.width, 3], "{name}");
            let theirs: Vec<f32> =
                tensor.data().chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
            let ours = preprocessing.apply(&png(row["image"].as_str().unwrap()));
            assert_eq!(ours.len(), theirs.len(), "{name}");
            let differs = ours.iter().zip(&theirs).position(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(differs.map(|i| (ours[i], theirs[i])), None, "{name}");
        }
    }

    fn with(changes: &[(&str, Value)]) -> Result<Preprocessing, String> {
        let mut config = expected()["processors"]["bit"].clone();
        for (key, value) in changes {
            config[*key] = value.clone();
        }
        Preprocessing::read(&config.to_string())
    }

    #[test]
    fn unsupported_keys_are_refused_by_name() {
        let cases = [
            ("do_pad", Value::from(true), "`do_pad` = true is not supported"),
            ("reducing_gap", Value::from(2), "`reducing_gap` = 2 is not supported"),
            (
                "include_top",
                Value::from(true),
                "`include_top` = true is only known of EfficientNetImageProcessor",
            ),
            ("crop_pct", Value::from(0.9), "`crop_pct` = 0.9 is only known of ConvNextImageProcessor"),
            ("resample", Value::from(9), "`resample` = 9 is not one of 0 to 5"),
            ("resample", Value::Null, "`resample` is missing"),
            ("size", Value::from(0), "`size` has a side of 0, not of 1 to 8192"),
            ("image_mean", serde_json::json!([0.5]), "`image_mean` = [0.5] is not three numbers"),
            ("image_std", Value::from(0), "`image_std` has a 0"),
            (
                "image_processor_type",
                Value::from("SamImageProcessor"),
                "`image_processor_type` = \"SamImageProcessor\" is not supported",
            ),
            (
                "size",
                serde_json::json!({"longest_edge": 9}),
                "`size` = {\"longest_edge\":9} is neither `shortest_edge` nor `height` and `width`",
            ),
            (
                "do_center_crop",
                Value::from(false),
                "without `do_center_crop` or both sides in `size`, images would differ in size",
            ),
        ];
        for (key, value, reason) in cases {
            assert_eq!(with(&[(key, value)]).err().as_deref(), Some(reason));
        }
    }

    #[test]
    fn keys_without_effect_are_accepted() {
        for (key, value) in [
            ("do_pad", Value::from(false)),
            ("pad_size", Value::Null),
            ("processor_class", Value::from("CLIPProcessor")),
            ("data_format", Value::from("channels_first")),
            ("image_processor_type", Value::from("CLIPImageProcessorFast")),
        ] {
            assert!(with(&[(key, value)]).is_ok(), "{key}");
        }
    }

    #[test]
    fn the_shorter_edge_decides_and_the_crop_is_the_middle() {
        let preprocessing = with(&[("size", Value::from(256)), ("crop_size", Value::from(224))]).unwrap();
        assert_eq!(preprocessing.resize, Resize::ShortestEdge(256));
        assert_eq!((preprocessing.height, preprocessing.width), (224, 224));
        assert_eq!(longer_side(256, 451, 300), 384);
        assert_eq!(middle(384, 224), (80..304, 0));
        assert_eq!(middle(5, 2), (1..3, 0));
        assert_eq!(middle(2, 5), (0..2, 2));
    }
}
