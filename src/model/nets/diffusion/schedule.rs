//! The schedules of diffusion: at which timesteps the network is called, and how the latents of an image follow from its
//! results. DDIM without added noise, and UniPC of order 2. Both are those of diffusers. Pure arithmetic on the host.

use serde::Deserialize;

named_enum! {
    /// How the latents of the next step follow from the network's results.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum SchedulerKind as name {
        /// Computes each step from the result of one step.
        Ddim => "ddim",
        /// Computes each step from the results of two steps, and needs fewer steps.
        UniPc => "unipc",
    }
}

/// What the network computes of noisy latents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prediction {
    /// The noise.
    #[default]
    Epsilon,
    /// The velocity: a mixture of the noise and the image.
    VPrediction,
}

/// How the noise grows with the timesteps in training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BetaSchedule {
    /// β grows linearly.
    #[default]
    Linear,
    /// √β grows linearly.
    ScaledLinear,
}

/// Which of the training's timesteps are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spacing {
    /// 0, k, 2k and so on.
    Leading,
    /// From 0 to the last timestep, both included.
    Linspace,
    /// The last timestep, and back from it by k.
    Trailing,
}

/// `scheduler_config.json`. Fields that are absent have the defaults of diffusers. Fields of other schedulers are
/// ignored.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct ScheduleConfig {
    beta_start: f64,
    beta_end: f64,
    beta_schedule: BetaSchedule,
    /// The number of timesteps in training.
    pub num_train_timesteps: usize,
    prediction_type: Prediction,
    /// None: leading for DDIM, linspace for UniPC.
    timestep_spacing: Option<Spacing>,
    steps_offset: usize,
    /// For DDIM: whether the last step ends without any noise, instead of with that of the first timestep.
    set_alpha_to_one: bool,
    /// For DDIM: whether the predicted image is clipped to -1 … 1.
    clip_sample: bool,
    thresholding: bool,
    rescale_betas_zero_snr: bool,
    trained_betas: Option<Vec<f64>>,
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self {
            beta_start: 1e-4,
            beta_end: 0.02,
            beta_schedule: BetaSchedule::Linear,
            num_train_timesteps: 1_000,
            prediction_type: Prediction::Epsilon,
            timestep_spacing: None,
            steps_offset: 0,
            set_alpha_to_one: true,
            clip_sample: true,
            thresholding: false,
            rescale_betas_zero_snr: false,
            trained_betas: None,
        }
    }
}

/// The bounds of `num_train_timesteps`.
const MIN_TRAIN_TIMESTEPS: usize = 2;
const MAX_TRAIN_TIMESTEPS: usize = 100_000;

impl ScheduleConfig {
    /// The largest number of steps. More would need the same timestep twice.
    pub fn max_steps(&self, kind: SchedulerKind) -> usize {
        match kind {
            SchedulerKind::Ddim => self.num_train_timesteps,
            SchedulerKind::UniPc => self.num_train_timesteps - 1,
        }
    }

    /// Refuses settings that are not computed as published.
    ///
    /// # Errors
    /// The setting, with its value.
    pub fn check(&self) -> Result<(), String> {
        let in_order = 0.0 < self.beta_start && self.beta_start <= self.beta_end && self.beta_end < 1.0;
        if !in_order {
            let (start, end) = (self.beta_start, self.beta_end);
            return Err(format!(
                "beta_start is {start} and beta_end is {end}; 0 < start ≤ end < 1 is expected"
            ));
        }
        if !(MIN_TRAIN_TIMESTEPS..=MAX_TRAIN_TIMESTEPS).contains(&self.num_train_timesteps) {
            let count = self.num_train_timesteps;
            return Err(format!(
                "num_train_timesteps is {count}; it must be from {MIN_TRAIN_TIMESTEPS} to {MAX_TRAIN_TIMESTEPS}"
            ));
        }
        for (name, is_set) in [
            ("thresholding", self.thresholding),
            ("rescale_betas_zero_snr", self.rescale_betas_zero_snr),
            ("trained_betas", self.trained_betas.is_some()),
        ] {
            if is_set {
                return Err(format!("{name} is set; it is not supported"));
            }
        }
        Ok(())
    }
}

/// The steps of one image.
#[derive(Clone, Debug)]
pub struct Schedule {
    kind: SchedulerKind,
    prediction: Prediction,
    clip_sample: bool,
    steps: Vec<Step>,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    /// The timestep at which the network is called.
    timestep: usize,
    /// The levels of the latents before and after the step.
    from: Level,
    to: Level,
}

/// How much of the image and of the noise is in latents: `latents = image · alpha + noise · sigma`, and alpha² + sigma²
/// is 1.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Level {
    alpha: f64,
    sigma: f64,
}

impl Level {
    /// The level at which alpha² is this.
    fn of_alpha_squared(squared: f64) -> Self {
        Self { alpha: squared.sqrt(), sigma: (1.0 - squared).sqrt() }
    }

    /// λ of the paper, half the logarithm of the ratio of signal to noise.
    fn lambda(self) -> f64 {
        self.alpha.ln() - self.sigma.ln()
    }
}

/// What a schedule remembers of the earlier steps of an image.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The images that were predicted in the last two steps, the latest first.
    predicted: Vec<Vec<f32>>,
    /// The latents from which the last step went.
    latents: Option<Vec<f32>>,
    /// The order of the last step.
    order: usize,
}

impl Schedule {
    /// The schedule for this number of steps, from 1 to [`ScheduleConfig::max_steps`].
    pub fn new(config: &ScheduleConfig, kind: SchedulerKind, steps: usize) -> Self {
        let alphas_squared = alphas_squared(config);
        let level = |timestep: usize| Level::of_alpha_squared(alphas_squared[timestep]);
        let timesteps = timesteps(config, kind, steps);
        let last = match kind {
            SchedulerKind::Ddim if !config.set_alpha_to_one => level(0),
            _ => Level::of_alpha_squared(1.0),
        };
        let step = |(index, timestep): (usize, &usize)| {
            let next = match kind {
                // As in diffusers, a step of DDIM ends k timesteps before, even if the next one begins elsewhere.
                SchedulerKind::Ddim => timestep.checked_sub(config.num_train_timesteps / steps),
                SchedulerKind::UniPc => timesteps.get(index + 1).copied(),
            };
            Step { timestep: *timestep, from: level(*timestep), to: next.map_or(last, level) }
        };
        Self {
            kind,
            prediction: config.prediction_type,
            clip_sample: config.clip_sample,
            steps: timesteps.iter().enumerate().map(step).collect(),
        }
    }

    /// The timestep at which the network is called in a step.
    pub fn timestep(&self, step: usize) -> usize {
        self.steps[step].timestep
    }

    /// The number of steps.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// The latents after a step, from those before it and the network's `output`.
    pub fn next(&self, step: usize, history: &mut History, latents: &[f32], output: &[f32]) -> Vec<f32> {
        let Level { alpha, sigma } = self.steps[step].from;
        let (alpha, sigma) = (alpha as f32, sigma as f32);
        let image = |(latent, output): (&f32, &f32)| match self.prediction {
            Prediction::Epsilon => (latent - sigma * output) / alpha,
            Prediction::VPrediction => alpha * latent - sigma * output,
        };
        let image: Vec<f32> = latents.iter().zip(output).map(image).collect();
        match self.kind {
            SchedulerKind::Ddim => self.next_ddim(step, latents, output, &image),
            SchedulerKind::UniPc => self.next_unipc(step, history, latents, image),
        }
    }

    fn next_ddim(&self, step: usize, latents: &[f32], output: &[f32], image: &[f32]) -> Vec<f32> {
        let Step { from: Level { alpha, sigma }, to: after, .. } = self.steps[step];
        let (alpha, sigma) = (alpha as f32, sigma as f32);
        let mixed = |((latent, output), image): ((&f32, &f32), &f32)| {
            let noise = match self.prediction {
                Prediction::Epsilon => *output,
                Prediction::VPrediction => alpha * output + sigma * latent,
            };
            let image = if self.clip_sample { image.clamp(-1.0, 1.0) } else { *image };
            after.alpha as f32 * image + after.sigma as f32 * noise
        };
        latents.iter().zip(output).zip(image).map(mixed).collect()
    }

    /// The corrector improves the latents of this step by what the network has just found, then the predictor makes those
    /// of the next one. In the notation of the paper (UniPC, 2023), this is the variant B₂ that predicts the image, so -h
    /// stands for h.
    fn next_unipc(&self, step: usize, history: &mut History, latents: &[f32], image: Vec<f32>) -> Vec<f32> {
        let latents = match &history.latents {
            Some(earlier) => self.correct(step, history, earlier, &image),
            None => latents.to_vec(),
        };
        history.predicted.insert(0, image);
        history.predicted.truncate(2);
        let order = history.predicted.len().min(self.steps() - step);
        let next = self.predict(step, &history.predicted, &latents, order);
        history.latents = Some(latents);
        history.order = order;
        next
    }

    /// The latents at `step + 1`, from those at `step` and the images predicted at `step` and before it.
    fn predict(&self, step: usize, predicted: &[Vec<f32>], latents: &[f32], order: usize) -> Vec<f32> {
        let Transition { from, to, phi, .. } = self.transition(step);
        let (ratio, last) = (to.sigma / from.sigma, &predicted[0]);
        let (before, weight) = match (order, predicted) {
            (2, [_, before, ..]) => (Some(before), 0.5 / self.earlier(step)),
            _ => (None, 0.0),
        };
        let predicted = |(index, latent): (usize, &f32)| {
            let image = f64::from(last[index]);
            let slope = before.map_or(0.0, |before| weight * (f64::from(before[index]) - image));
            (ratio * f64::from(*latent) - to.alpha * phi * (image + slope)) as f32
        };
        latents.iter().enumerate().map(predicted).collect()
    }

    /// The latents at `step` again, from those at the step before it and the image that is predicted now.
    fn correct(&self, step: usize, history: &History, earlier: &[f32], image: &[f32]) -> Vec<f32> {
        let Transition { from, to, phi, h } = self.transition(step - 1);
        let ratio = to.sigma / from.sigma;
        let last = &history.predicted[0];
        // The weights of the slopes to the image before the last one, and to the new one: the solution of the paper's
        // 2 × 2 equations. With one earlier image they are 0 and ½.
        let (before, weight_before, weight_new) = match (history.order, history.predicted.as_slice()) {
            (2, [_, before, ..]) => {
                let first = phi / -h - 1.0;
                let (b_1, b_2) = (first / phi, 2.0 * (first / -h - 0.5) / phi);
                let distance = self.earlier(step - 1);
                let weight = (b_1 - b_2) / (1.0 - distance);
                (Some(before), weight / distance, b_1 - weight)
            }
            _ => (None, 0.0, 0.5),
        };
        let slope = |index: usize| {
            let last = f64::from(last[index]);
            let to_before = before.map_or(0.0, |before| weight_before * (f64::from(before[index]) - last));
            to_before + weight_new * (f64::from(image[index]) - last)
        };
        let corrected = |(index, latent): (usize, &f32)| {
            let image = f64::from(last[index]);
            (ratio * f64::from(*latent) - to.alpha * phi * (image + slope(index))) as f32
        };
        earlier.iter().enumerate().map(corrected).collect()
    }

    fn transition(&self, step: usize) -> Transition {
        let Step { from, to, .. } = self.steps[step];
        let h = to.lambda() - from.lambda();
        Transition { from, to, h, phi: (-h).exp_m1() }
    }

    /// The distance from a step to the one before it, in units of the distance to the next one. It is negative.
    fn earlier(&self, step: usize) -> f64 {
        (self.steps[step - 1].from.lambda() - self.steps[step].from.lambda()) / self.transition(step).h
    }
}

/// The way from a step to the next one.
struct Transition {
    from: Level,
    to: Level,
    /// By how much λ grows.
    h: f64,
    /// e^-h - 1, which is negative.
    phi: f64,
}

/// The square of alpha at each of the training's timesteps.
fn alphas_squared(config: &ScheduleConfig) -> Vec<f64> {
    let (start, end, count) = (config.beta_start, config.beta_end, config.num_train_timesteps);
    let between = |from: f64, to: f64, index: usize| from + (to - from) * index as f64 / (count - 1) as f64;
    let beta = |index: usize| match config.beta_schedule {
        BetaSchedule::Linear => between(start, end, index),
        BetaSchedule::ScaledLinear => between(start.sqrt(), end.sqrt(), index).powi(2),
    };
    let mut product = 1.0;
    let product_until = |index: usize| {
        product *= 1.0 - beta(index);
        product
    };
    (0..count).map(product_until).collect()
}

/// The timestep of each step, the noisiest first.
fn timesteps(config: &ScheduleConfig, kind: SchedulerKind, steps: usize) -> Vec<usize> {
    let count = config.num_train_timesteps;
    let (default, points) = match kind {
        SchedulerKind::Ddim => (Spacing::Leading, steps),
        // With leading and linspace spacing, UniPC spreads one timestep more, and drops the least noisy one.
        SchedulerKind::UniPc => (Spacing::Linspace, steps + 1),
    };
    let timestep = |step: usize| match config.timestep_spacing.unwrap_or(default) {
        Spacing::Leading => (points - 1 - step) * (count / points) + config.steps_offset,
        Spacing::Linspace => {
            let last = (count - 1) as f64;
            let share = (points - 1 - step) as f64 / (points - 1).max(1) as f64;
            (last * share).round_ties_even() as usize
        }
        Spacing::Trailing => {
            let passed = step as f64 * count as f64 / steps as f64;
            (count as f64 - passed).round_ties_even() as usize - 1
        }
    };
    (0..steps).map(|step| timestep(step).min(count - 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Latents of a known image and noise, at a level.
    fn mixed(level: Level, image: f32, noise: f32) -> f32 {
        level.alpha as f32 * image + level.sigma as f32 * noise
    }

    #[test]
    fn a_network_that_knows_the_noise_finds_the_image() {
        let cases = [
            (SchedulerKind::Ddim, Spacing::Leading, 7),
            (SchedulerKind::Ddim, Spacing::Trailing, 20),
            (SchedulerKind::UniPc, Spacing::Leading, 1),
            (SchedulerKind::UniPc, Spacing::Linspace, 7),
            (SchedulerKind::UniPc, Spacing::Trailing, 1_000),
        ];
        let predictions = [Prediction::Epsilon, Prediction::VPrediction];
        for ((kind, spacing, steps), prediction) in
            cases.into_iter().flat_map(|case| predictions.map(|prediction| (case, prediction)))
        {
            let config = ScheduleConfig {
                prediction_type: prediction,
                timestep_spacing: Some(spacing),
                ..ScheduleConfig::default()
            };
            let schedule = Schedule::new(&config, kind, steps);
            assert!(schedule.steps.is_sorted_by(|a, b| a.timestep > b.timestep), "{kind:?} {spacing:?}");
            let (image, noise) = (0.7, -1.3);
            let mut latents = vec![mixed(schedule.steps[0].from, image, noise)];
            let mut history = History::default();
            for (index, Step { from, to, .. }) in schedule.steps.iter().enumerate() {
                let output = match prediction {
                    Prediction::Epsilon => noise,
                    Prediction::VPrediction => from.alpha as f32 * noise - from.sigma as f32 * image,
                };
                latents = schedule.next(index, &mut history, &latents, &[output]);
                let expected = mixed(*to, image, noise);
                assert!((latents[0] - expected).abs() < 2e-3, "{kind:?} {index}: {latents:?} {expected}");
            }
            assert!((latents[0] - image).abs() < 2e-3, "{kind:?} {spacing:?} {steps}: {latents:?}");
        }
    }

    #[test]
    fn settings_that_are_not_computed_are_refused_by_name() {
        let read = |json: &str| serde_json::from_str::<ScheduleConfig>(json).expect("a schedule").check();
        assert_eq!(read("{}"), Ok(()));
        for (json, named) in [
            (r#"{"thresholding":true}"#, "thresholding"),
            (r#"{"rescale_betas_zero_snr":true}"#, "rescale_betas_zero_snr"),
            (r#"{"trained_betas":[0.1]}"#, "trained_betas"),
            (r#"{"beta_end":1.5}"#, "beta_end is 1.5"),
            (r#"{"num_train_timesteps":0}"#, "num_train_timesteps is 0"),
        ] {
            let error = read(json).unwrap_err();
            assert!(error.contains(named), "{json}: {error}");
        }
        assert!(serde_json::from_str::<ScheduleConfig>(r#"{"prediction_type":"sample"}"#).is_err());
    }
}
