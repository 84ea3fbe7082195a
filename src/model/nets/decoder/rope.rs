//! Rotary embeddings: the angles by which the heads of queries and keys are rotated, and the ways in which models scale
//! them for longer contexts. Decides which ways are read.

use std::f64::consts::PI;

use serde::Deserialize;

use crate::model::ops::Rotary;

/// Why a description of a decoder is refused: a property is not supported or impossible.
pub(super) type Refusal = String;

/// How heads are rotated.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// The angle of each pair of a head's numbers, in radians per position. A head's numbers after these pairs are not
    /// rotated.
    pub frequencies: Vec<f32>,
    /// The factor of rotated numbers.
    pub magnitude: f32,
    /// The angles of pools with a longer context.
    pub long: Option<LongAngles>,
}

/// Angles for a longer context. A pool has one context for all its sequences, so that a sequence's keys do not change as it
/// grows.
#[derive(Clone, Debug, PartialEq)]
pub struct LongAngles {
    /// The longest context in tokens for which these angles are not used.
    pub original: usize,
    /// As [`Rotation::frequencies`].
    pub frequencies: Vec<f32>,
}

impl Rotation {
    /// The table of rotations for heads of `width` numbers and sequences of up to `context` tokens.
    pub fn table(&self, width: usize, context: usize) -> Rotary {
        let long = self.long.as_ref().filter(|long| context > long.original);
        let frequencies = long.map_or(&self.frequencies, |long| &long.frequencies);
        Rotary::partial(frequencies, self.magnitude, width, context)
    }
}

/// `rope_parameters` or `rope_scaling` of `config.json`.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Rope {
    rope_type: Option<String>,
    /// The older name of `rope_type`.
    #[serde(rename = "type")]
    kind: Option<String>,
    rope_theta: Option<f64>,
    pub partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    pub original_max_position_embeddings: Option<usize>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
    pub llama_4_scaling_beta: Option<f32>,
}

/// What a rotation depends on beside its [`Rope`].
#[derive(Clone, Copy)]
pub(super) struct RopeBase {
    /// The base of the angles, where the rope has none.
    pub theta: f64,
    /// The number of a head's numbers that are rotated.
    pub width: usize,
    /// `max_position_embeddings`.
    pub context: usize,
}

impl Rope {
    /// The unscaled rope with this base.
    pub fn of_base(theta: f64) -> Self {
        Self { rope_theta: Some(theta), ..Self::default() }
    }

    /// The rotation that these properties describe.
    ///
    /// # Errors
    /// The property that is not supported or missing.
    pub fn rotation(&self, base: RopeBase) -> Result<Rotation, Refusal> {
        let RopeBase { width, context, .. } = base;
        let theta = self.rope_theta.unwrap_or(base.theta);
        if !theta.is_finite() || theta <= 1.0 {
            return Err(format!("rope_theta is {theta}, and must be above 1"));
        }
        let angles: Vec<f64> =
            (0..width / 2).map(|pair| 1.0 / theta.powf(2.0 * pair as f64 / width as f64)).collect();
        let original = self.original_max_position_embeddings.unwrap_or(context);
        let kind = self.rope_type.as_deref().or(self.kind.as_deref()).unwrap_or("default");
        let number = |name: &str, value: Option<f64>| match value {
            Some(value) if value.is_finite() && value > 0.0 => Ok(value),
            Some(value) => Err(format!("rope scaling {kind}: {name} is {value}, and must be above 0")),
            None => Err(format!("rope scaling {kind} lacks {name}")),
        };
        let plain = |angles: Vec<f64>| Rotation {
            frequencies: angles.into_iter().map(|angle| angle as f32).collect(),
            magnitude: 1.0,
            long: None,
        };
        match kind {
            "default" => Ok(plain(angles)),
            "linear" => {
                let factor = number("factor", self.factor)?;
                Ok(plain(angles.into_iter().map(|angle| angle / factor).collect()))
            }
            "llama3" => {
                let (factor, low, high) = (
                    number("factor", self.factor)?,
                    number("low_freq_factor", self.low_freq_factor)?,
                    number("high_freq_factor", self.high_freq_factor)?,
                );
                let original = original as f64;
                let scaled = |angle: f64| {
                    let wavelength = 2.0 * PI / angle;
                    let share = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - share) * angle / factor + share * angle
                };
                Ok(plain(angles.into_iter().map(scaled).collect()))
            }
            "yarn" => {
                let factor = match self.factor {
                    None => context as f64 / original as f64,
                    factor => number("factor", factor)?,
                };
                let share = self.yarn_shares(theta, width, original as f64);
                let scaled = angles.iter().zip(share).map(|(angle, share)| {
                    // `share` 1 keeps the angle, and 0 divides it.
                    angle / factor * (1.0 - share) + angle * share
                });
                let growth = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
                let magnitude = match (self.attention_factor, self.mscale, self.mscale_all_dim) {
                    (Some(factor), ..) => factor,
                    (None, Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
                        growth(scale) / growth(all)
                    }
                    _ => growth(1.0),
                };
                Ok(Rotation { magnitude: magnitude as f32, ..plain(scaled.collect()) })
            }
            "longrope" | "su" => {
                let divided = |name: &str, factors: &Option<Vec<f64>>| match factors {
                    Some(factors) if factors.len() == angles.len() => {
                        Ok(plain(angles.iter().zip(factors).map(|(angle, factor)| angle / factor).collect()))
                    }
                    Some(factors) => {
                        let (found, expected) = (factors.len(), angles.len());
                        Err(format!("rope scaling {kind}: {name} has {found} numbers, not {expected}"))
                    }
                    None => Err(format!("rope scaling {kind} lacks {name}")),
                };
                let factor = self.factor.unwrap_or(context as f64 / original as f64);
                let grown = (1.0 + factor.max(1.0).ln() / (original as f64).ln()).sqrt();
                let frequencies = divided("long_factor", &self.long_factor)?.frequencies;
                Ok(Rotation {
                    magnitude: self.attention_factor.unwrap_or(grown) as f32,
                    long: Some(LongAngles { original, frequencies }),
                    ..divided("short_factor", &self.short_factor)?
                })
            }
            other => Err(format!(
                "rope scaling {other:?} is not supported; default, linear, llama3, yarn and longrope are"
            )),
        }
    }

    /// For each pair, how much of its angle is kept: 1 for pairs that rotate often within the original context, 0 for
    /// those that rotate rarely, and a ramp between them.
    fn yarn_shares(&self, theta: f64, width: usize, original: f64) -> impl Iterator<Item = f64> {
        let pair_of =
            |rotations: f64| width as f64 * (original / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) =
            (pair_of(self.beta_fast.unwrap_or(32.0)), pair_of(self.beta_slow.unwrap_or(1.0)));
        if self.truncate.unwrap_or(true) {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(width as f64 - 1.0));
        // As in the reference library, so that the ramp has a width.
        if low == high {
            high += 0.001;
        }
        (0..width / 2).map(move |pair| 1.0 - ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0))
    }
}
