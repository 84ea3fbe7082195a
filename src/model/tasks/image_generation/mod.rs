//! Models that make images from texts (Stable Diffusion). The processor turns requests into prompts, and pixels into PNG
//! files. The network holds the running images, each a sequence with an encoder. For the scheduler of sequences, a step of
//! denoising counts as a token of an answer, and the decoding of the image counts as the last one. Noise is a function of
//! the seed, so that a task that is computed again gives the same image; on a GPU it may differ by rounding.

mod body;

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::Tensor;
use serde::Deserialize;

use self::body::{
    DEFAULT_STEPS, GeneratedImage, ImageRequest, ImageSize, KEYS, Progress, SeededFile, png, write_images,
};
use super::names::ServedNames;
use super::{SEED, unix_seconds};
use crate::model::family::{Example, Family, FileRules, OptionDefault, OptionSpec, Sample, Serves, Takes};
use crate::model::load::clip_tokenizer::{self, PaddedTokenizer};
use crate::model::load::{ModelFiles, PIPELINE_WEIGHTS, weights};
use crate::model::nets::diffusion::config::{DiffusionConfig, PIPELINE};
use crate::model::nets::diffusion::schedule::{History, Schedule, ScheduleConfig, SchedulerKind};
use crate::model::nets::diffusion::{Diffusion, LatentSides, Noisy, check_dtype};
use crate::model::random::seed_of_task;
use crate::model::sequences::out_of_turn;
use crate::model::{
    Advance, Advances, Body, Capacity, Device, Feed, ForwardError, Generate, Inputs, LoadError, LoadSpec,
    Message, Preprocessed, Processor, Route, Row, SizedInput, Slot, Streaming, TaskError, TaskErrorKind,
};
use crate::protocol::endpoints::IMAGE_GENERATION_URL as URL;

/// The sides of images are multiples of at least this many pixels, also if the decoder enlarges latents by less.
const MIN_SIDE_UNIT: usize = 8;
/// A seed that follows from the task's id has this many bits, so that JavaScript reads it exactly.
const SEED_BITS: u32 = 53;

static OPTIONS: [OptionSpec; 6] = [
    OptionSpec {
        name: "max_images",
        takes: Takes::Whole(1..=100),
        default: OptionDefault::Value("10"),
        help: "the most images of a task (`n`); `max_inputs` bounds them too",
    },
    OptionSpec {
        name: "max_pixels",
        takes: Takes::Whole(4_096..=16_777_216),
        default: OptionDefault::Derived("those of the training"),
        help: "the most pixels of an image, width × height. Twice the sides take up to 16 times the memory and the time of a \
               step",
    },
    OptionSpec {
        name: "max_steps",
        takes: Takes::Whole(1..=1_000),
        default: OptionDefault::Value("100"),
        help: "the most steps of an image",
    },
    OptionSpec {
        name: "scheduler",
        takes: Takes::Choice(&["ddim", "unipc"]),
        default: OptionDefault::Value("\"unipc\""),
        help: "how each step follows from the network's results. `unipc` needs fewer steps for the same quality",
    },
    SEED,
    OptionSpec {
        name: "sequences",
        takes: Takes::Whole(1..=64),
        default: OptionDefault::Derived("1 on a CPU, 4 on a GPU"),
        help: "the most images that are made at once, in turns by steps; `batch.max_requests` bounds them too. On a CPU a \
               step computes them one after the other, and `batch.timeout` is for all of them",
    },
];

/// Models that make images from texts.
pub static FAMILY: Family = Family {
    name: "image-generation",
    routes: &[Route::json(URL)],
    fields: &[(URL, &KEYS)],
    serves: Serves::Files(FileRules { pipelines: &[PIPELINE], ..FileRules::new(request_files, check) }),
    options: &OPTIONS,
    sample: |texts| {
        let prompt = texts.first().map_or("", String::as_str);
        Sample::json(URL, &serde_json::json!({ "prompt": prompt, "seed": 0 }), 1)
    },
    example: Example { model: "tiny-diffusion", options: &[("max_steps", 8)] },
};

/// Requests every file that loading may read, the decoder's weights last.
fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
    files.required("model_index.json")?;
    for part in ["text_encoder", "unet", "vae"] {
        files.required(&format!("{part}/config.json"))?;
    }
    files.required("scheduler/scheduler_config.json")?;
    clip_tokenizer::request_files(files)?;
    PIPELINE_WEIGHTS.iter().try_for_each(|part| files.weights_of(part).map(drop))
}

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    DiffusionConfig::read(&files, spec)?;
    Options::read(spec)?;
    check_dtype(spec)?;
    clip_tokenizer::request_files(&files)?;
    PIPELINE_WEIGHTS.iter().try_for_each(|part| weights::check(&files.weights_of(part)?))
}

#[derive(Clone, Copy, Deserialize)]
struct Options {
    max_images: usize,
    /// None: those of the training.
    max_pixels: Option<usize>,
    max_steps: usize,
    scheduler: SchedulerKind,
    seed: u64,
    /// None: by the device.
    sequences: Option<usize>,
}

impl Options {
    fn read(spec: &LoadSpec) -> Result<Self, LoadError> {
        FAMILY.read_options(spec)
    }
}

/// Loads a model that makes images.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, for a model or a number format that is not supported, and for a device
/// that computes wrongly.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(ImageProcessor, ImageGenerator), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = DiffusionConfig::read(&files, spec)?;
    let options = Options::read(spec)?;
    // The last step decodes the image.
    let context = options.max_steps + 1;
    let sequences = options.sequences.unwrap_or(if device.is_cpu() { 1 } else { 4 });
    // Tokens stand for no memory here. There are enough for all sequences and for the probe.
    let capacity = Capacity { sequences, tokens: (sequences + 1) * context, context };
    let generator = ImageGenerator {
        diffusion: Diffusion::load(spec, device, &files, &config)?,
        scheduler: options.scheduler,
        schedule: config.schedule.clone(),
        capacity,
        running: BTreeMap::new(),
    };
    let processor = ImageProcessor {
        tokenizer: clip_tokenizer::load(&files, config.prompt_tokens(), config.vocabulary())?,
        names: ServedNames::new(spec),
        model: spec.model_name().to_owned(),
        max_images: options.max_images.min(spec.max_inputs),
        max_steps: options.max_steps.min(config.schedule.max_steps(options.scheduler)),
        side_unit: config.scale.max(MIN_SIDE_UNIT),
        config,
        options,
    };
    Ok((processor, generator))
}

/// Turns requests into prompts, and pixels into files.
pub struct ImageProcessor {
    tokenizer: PaddedTokenizer,
    names: ServedNames,
    /// The model's name, which is written into the images.
    model: String,
    config: DiffusionConfig,
    options: Options,
    max_images: usize,
    max_steps: usize,
    /// The sides of images are multiples of this, in pixels.
    side_unit: usize,
}

/// An image to make.
#[derive(Clone)]
pub struct ImageInput {
    prompts: Arc<Prompts>,
    sides: LatentSides,
    steps: usize,
    guidance: f32,
    seed: u64,
}

/// The padded tokens of a task's prompts.
struct Prompts {
    wanted: Vec<u32>,
    /// None if there is no guidance.
    unwanted: Option<Vec<u32>>,
}

/// What the reply needs of its request.
pub struct ImageContext {
    request: ImageRequest,
    size: ImageSize,
    steps: usize,
    /// The seed of the first image.
    seed: u64,
    /// The tokens of both prompts, without padding.
    prompt_tokens: usize,
    /// The number of prompts that were cut.
    truncated: usize,
}

impl ImageProcessor {
    /// The size of the images, which must suit the network and the pool.
    fn size(&self, requested: Option<ImageSize>) -> Result<ImageSize, TaskError> {
        let native = self.config.native_side;
        let size = requested.unwrap_or(ImageSize { width: native, height: native });
        let ImageSize { width, height } = size;
        let message = |reason: String| format!("size is {width}x{height}; {reason}");
        let refused = |reason: String| Err(TaskError::bad_input("size", message(reason)));
        let unit = self.side_unit;
        if [width, height].iter().any(|side| *side == 0 || !side.is_multiple_of(unit)) {
            return refused(format!("width and height must be multiples of {unit}"));
        }
        let max = self.options.max_pixels.unwrap_or(native * native);
        if width.checked_mul(height).is_none_or(|pixels| pixels > max) {
            let message = message(format!("this pool makes at most {max} pixels (max_pixels)"));
            return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("size"));
        }
        // Each level of the denoising network but the last halves the sides of the latents.
        let coarsest = 1 << (self.config.levels() - 1);
        if [width, height].iter().any(|side| side / self.config.scale < coarsest) {
            let min = coarsest * self.config.scale;
            return refused(format!("width and height must be at least {min} for this model"));
        }
        Ok(size)
    }

    /// The padded tokens of a prompt, their number without padding, and whether the prompt was cut.
    fn tokens(&self, prompt: &str, param: &str, truncate: bool) -> Result<PaddedTokens, TaskError> {
        let PaddedTokenizer { tokenizer, pad } = &self.tokenizer;
        let tokens = tokenizer.text(prompt).map_err(|error| error.with_param(param))?;
        if tokens.truncated && !truncate {
            let max = self.config.prompt_tokens();
            let message = format!(
                "{param} is too long: this model takes at most {max} tokens, special ones included, and truncate is false"
            );
            return Err(TaskError::bad_input(param, message));
        }
        let count = tokens.ids.len();
        let mut ids = tokens.ids;
        ids.resize(self.config.prompt_tokens(), *pad);
        Ok(PaddedTokens { ids, count, is_cut: tokens.truncated })
    }

    /// How an image was made, in the form in which many programs for Stable Diffusion write and read it.
    fn parameters(&self, request: &ImageRequest, steps: usize, image: &GeneratedImage) -> String {
        let ImageRequest { prompt, negative_prompt, guidance, .. } = request;
        let negative = match negative_prompt.as_str() {
            "" => String::new(),
            text => format!("Negative prompt: {text}\n"),
        };
        let (scheduler, GeneratedImage { size, seed, .. }) = (self.options.scheduler.name(), image);
        let (width, height, model) = (size.width, size.height, &self.model);
        let text = format!(
            "{prompt}\n{negative}Steps: {steps}, Sampler: {scheduler}, CFG scale: {guidance}, Seed: {seed}, Size: \
             {width}x{height}, Model: {model}"
        );
        // A text chunk of PNG must not contain NUL.
        text.replace('\0', " ")
    }
}

struct PaddedTokens {
    ids: Vec<u32>,
    count: usize,
    is_cut: bool,
}

impl Processor for ImageProcessor {
    type Context = ImageContext;
    type Input = ImageInput;
    /// The number of steps that are done.
    type Piece = usize;
    /// Red, green and blue of each pixel.
    type Output = Vec<u8>;

    fn routes(&self) -> &[Route] {
        FAMILY.routes
    }

    /// The smallest image, in one step.
    fn probe(&self) -> Option<Message> {
        let side = (self.config.scale << (self.config.levels() - 1)).max(self.side_unit);
        let body = serde_json::json!({"prompt": "a candle", "size": format!("{side}x{side}"), "steps": 1, "seed": 0});
        Some(Message { body: body.to_string().into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let request = ImageRequest::parse(message, self.max_images)?;
        self.names.check(request.model.as_deref())?;
        let max = self.max_steps;
        let steps = request.steps.unwrap_or(DEFAULT_STEPS.min(max));
        if steps > max {
            let message = format!("steps is {steps}; this pool takes at most {max} (max_steps)");
            return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("steps"));
        }
        let size = self.size(request.size)?;
        let wanted = self.tokens(&request.prompt, "prompt", request.truncate)?;
        let unwanted = match request.guidance > 1.0 {
            true => Some(self.tokens(&request.negative_prompt, "negative_prompt", request.truncate)?),
            false => None,
        };
        let prompts = [Some(&wanted), unwanted.as_ref()].into_iter().flatten();
        let prompt_tokens = prompts.clone().map(|tokens| tokens.count).sum();
        let truncated = prompts.clone().filter(|tokens| tokens.is_cut).count();
        let encode_tokens = prompts.map(|tokens| tokens.ids.len()).sum();
        let seed = request.seed.unwrap_or_else(|| {
            seed_of_task(self.options.seed, &message.properties) >> (u64::BITS - SEED_BITS)
        });
        let prompts = Arc::new(Prompts { wanted: wanted.ids, unwanted: unwanted.map(|tokens| tokens.ids) });
        let scale = self.config.scale;
        let sides = LatentSides { height: size.height / scale, width: size.width / scale };
        let image = |index: usize| SizedInput {
            encode_tokens,
            tokens: 0,
            answer_tokens: steps + 1,
            input: ImageInput {
                prompts: prompts.clone(),
                sides,
                steps,
                guidance: request.guidance,
                seed: seed.wrapping_add(index as u64),
            },
        };
        let inputs: Vec<_> = (0..request.count).map(image).collect();
        Ok((ImageContext { request, size, steps, seed, prompt_tokens, truncated }, Inputs::All(inputs)))
    }

    fn streaming(&self, context: &ImageContext) -> Streaming {
        Streaming::Pieces.if_requested(context.request.stream)
    }

    fn are_parts_brief(&self, _: &ImageContext) -> bool {
        true
    }

    fn parts(&self, context: &mut ImageContext, index: usize, pieces: Vec<usize>) -> Vec<Body> {
        let Some(step) = pieces.last().copied() else { return Vec::new() };
        // A part that cannot be written is left out; the reply does not need it.
        Progress { index, step, steps: context.steps }.part().into_iter().collect()
    }

    fn is_finish_slow(&self, _: &ImageContext) -> bool {
        // A PNG file of 512 × 512 pixels takes about 20 ms.
        true
    }

    fn finish(&self, context: ImageContext, outputs: Vec<Vec<u8>>) -> Result<Body, TaskError> {
        let ImageContext { request, size, steps, seed, prompt_tokens, truncated } = context;
        let mut files = Vec::with_capacity(outputs.len());
        for (index, pixels) in outputs.into_iter().enumerate() {
            let image = GeneratedImage { size, pixels, seed: seed.wrapping_add(index as u64) };
            let png = png(&image, &self.parameters(&request, steps, &image))?;
            files.push(SeededFile { png, seed: image.seed });
        }
        let body = write_images(files, request.format, prompt_tokens, unix_seconds())?;
        Ok(if truncated == 0 { body } else { body.header("truncated", truncated as i64) })
    }
}

/// A network with the images that it makes.
pub struct ImageGenerator {
    diffusion: Diffusion,
    scheduler: SchedulerKind,
    schedule: ScheduleConfig,
    capacity: Capacity,
    running: BTreeMap<Slot, Image>,
}

/// An image that is being made.
struct Image {
    input: ImageInput,
    schedule: Schedule,
    /// The vectors of its prompts. None before they are encoded.
    prompt: Option<Tensor>,
    latents: Vec<f32>,
    history: History,
    /// The number of steps that are done.
    step: usize,
}

/// What a step makes of an image.
enum Computed {
    Latents(Vec<f32>, History),
    Pixels(Vec<u8>),
}

impl ImageGenerator {
    /// Encodes the prompts of these rows, each by itself, so that its numbers do not depend on the others.
    fn encode(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        let mut encoded = Vec::with_capacity(rows.len());
        for row in rows {
            let waiting = self.running.get(&row.slot).filter(|image| image.prompt.is_none());
            encoded.push(match waiting {
                None => None,
                Some(image) => {
                    let Prompts { wanted, unwanted } = &*image.input.prompts;
                    let ids: Vec<&[u32]> = unwanted.iter().chain([wanted]).map(Vec::as_slice).collect();
                    Some(self.diffusion.encode(&ids)?)
                }
            });
        }
        let advance = |(row, prompt): (&Row, Option<Tensor>)| {
            let image = self.running.get_mut(&row.slot).filter(|_| prompt.is_some());
            image.ok_or_else(out_of_turn)?.prompt = prompt;
            Ok(Advance::Fed)
        };
        Ok(rows.iter().zip(encoded).map(advance).collect())
    }

    /// Computes the step of each row, without changing its image. The outer error concerns the device, an inner one only its
    /// row.
    fn compute(&self, rows: &[Row]) -> Result<Vec<Result<Computed, TaskError>>, ForwardError> {
        let images: Vec<Option<(&Image, &Tensor)>> = rows
            .iter()
            .map(|row| self.running.get(&row.slot).and_then(|image| Some((image, image.prompt.as_ref()?))))
            .collect();
        let is_noisy = |image: &Image| image.step < image.schedule.steps();
        let to_denoise = images.iter().copied().flatten().filter(|(image, _)| is_noisy(image));
        let noisy = to_denoise.map(|(image, prompt)| Noisy {
            latents: &image.latents,
            sides: image.input.sides,
            timestep: image.schedule.timestep(image.step),
            prompt,
            guidance: image.input.guidance,
        });
        let batch: Vec<Noisy<'_>> = noisy.collect();
        let mut outputs = self.diffusion.denoise(&batch)?.into_iter();
        let mut computed = Vec::with_capacity(rows.len());
        for image in &images {
            computed.push(match image {
                None => Err(out_of_turn()),
                Some((image, _)) if is_noisy(image) => {
                    let output = outputs.next().unwrap_or_default();
                    let mut history = image.history.clone();
                    let latents = image.schedule.next(image.step, &mut history, &image.latents, &output);
                    if latents.iter().all(|number| number.is_finite()) {
                        Ok(Computed::Latents(latents, history))
                    } else {
                        Err(TaskError::internal("the model computed latents that are not finite"))
                    }
                }
                Some((image, _)) => {
                    Ok(Computed::Pixels(self.diffusion.decode(&image.latents, image.input.sides)?))
                }
            });
        }
        Ok(computed)
    }

    fn advance(&mut self, slot: Slot, computed: Computed) -> Result<Advance<usize, Vec<u8>>, TaskError> {
        let Some(image) = self.running.get_mut(&slot) else { return Err(out_of_turn()) };
        Ok(match computed {
            Computed::Pixels(pixels) => Advance::Done(None, pixels),
            Computed::Latents(latents, history) => {
                image.latents = latents;
                image.history = history;
                image.step += 1;
                Advance::More(image.step)
            }
        })
    }

    /// The latents of a running image, for tests.
    #[doc(hidden)]
    pub fn latents(&self, slot: Slot) -> Option<&[f32]> {
        self.running.get(&slot).map(|image| image.latents.as_slice())
    }
}

impl Generate for ImageGenerator {
    type Prompt = ImageInput;
    type Piece = usize;
    type Output = Vec<u8>;

    fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// A step of a large image takes a thousand times as long as one of a small image.
    fn has_even_steps(&self) -> bool {
        false
    }

    fn open(&mut self, slot: Slot, input: &ImageInput) -> Result<(), TaskError> {
        let image = Image {
            schedule: Schedule::new(&self.schedule, self.scheduler, input.steps),
            prompt: None,
            latents: self.diffusion.noise(input.seed, input.sides),
            history: History::default(),
            step: 0,
            input: input.clone(),
        };
        self.running.insert(slot, image);
        Ok(())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        if rows.iter().any(|row| row.feed == Feed::Encode) {
            return self.encode(rows);
        }
        // All rows are computed before any image changes, so that a step that fails can be computed again.
        let computed = self.compute(rows)?;
        let rows = rows.iter().zip(computed);
        Ok(rows.map(|(row, computed)| self.advance(row.slot, computed?)).collect())
    }

    fn close(&mut self, slot: Slot) {
        self.running.remove(&slot);
    }
}
