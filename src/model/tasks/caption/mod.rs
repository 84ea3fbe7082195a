//! Models that describe images (BLIP). The processor turns requests into images and prompts, and token ids into response
//! bodies. The network holds the running texts, each a sequence with an encoder; decoding is greedy. Images are decoded as
//! for `image`.

mod body;

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::Tensor;
use serde::Deserialize;

use self::body::{CaptionRequest, KEYS, write_captions};
use super::image::{
    Decoder, MAX_PIXELS, MAX_TASK_PIXELS, MEDIA_TYPES, PixelLimits, probe_message, read_preprocessing,
    sample_of_images, slices,
};
use super::names::ServedNames;
use crate::batching::Encoding;
use crate::model::family::{Example, Family, FileRules, OptionDefault, OptionSpec, Serves, Takes};
use crate::model::load::tokenizer::{TextLimits, TextTokenizer};
use crate::model::load::{ModelFiles, weights};
use crate::model::nets::blip::{ARCHITECTURE, Blip, BlipConfig, TextDecoder, check_dtype};
use crate::model::nets::image::Pixels;
use crate::model::sequences::out_of_turn;
use crate::model::{
    Advance, Advances, Body, Capacity, Device, Feed, FileUrl, Files, ForwardError, Generate, Inputs,
    LoadError, LoadSpec, Message, Preprocessed, Processor, Route, Row, SizedInput, Slot, TaskError,
};
use crate::protocol::Value;
use crate::protocol::endpoints::CAPTIONS_URL as URL;

/// The largest `sequences`.
const MAX_SEQUENCES: u64 = 256;

/// The number of texts that are written at once.
const SEQUENCES: OptionSpec = OptionSpec {
    name: "sequences",
    takes: Takes::Whole(1..=MAX_SEQUENCES),
    default: OptionDefault::Value("4"),
    help: "the most captions that are written at once; `batch.max_requests` bounds them too. Each step computes them one \
           after the other",
};

/// Models that describe images.
pub static FAMILY: Family = Family {
    name: "caption",
    routes: &[Route { url: URL, media_types: MEDIA_TYPES }],
    fields: &[(URL, &KEYS)],
    serves: Serves::Files(FileRules { configs: &[ARCHITECTURE], ..FileRules::new(request_files, check) }),
    options: &[MAX_PIXELS, MAX_TASK_PIXELS, SEQUENCES],
    sample: |texts| sample_of_images(URL, texts),
    example: Example { model: "tiny-blip", options: &[("max_pixels", 1_000_000)] },
};

/// Requests every file that loading may read, the weights last.
fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
    files.required("config.json")?;
    files.optional("preprocessor_config.json")?;
    files.optional("tokenizer.json")?;
    files.weights().map(drop)
}

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = BlipConfig::read(&files, spec)?;
    Options::read(spec)?;
    check_dtype(spec)?;
    decoder(&files, spec, &config)?;
    files.required("tokenizer.json")?;
    weights::check(&files.weights()?)
}

/// The decoder of images, whose size must be the network's.
fn decoder(files: &ModelFiles, spec: &LoadSpec, config: &BlipConfig) -> Result<Decoder, LoadError> {
    let preprocessing = read_preprocessing(files, spec)?.with_sides(config.sides, spec)?;
    let limits = PixelLimits::read(&FAMILY, spec)?;
    Ok(Decoder { preprocessing, limits, tokens: config.image_tokens })
}

#[derive(Deserialize)]
struct Options {
    sequences: usize,
}

impl Options {
    fn read(spec: &LoadSpec) -> Result<Self, LoadError> {
        FAMILY.read_options(spec)
    }
}

/// Loads a model that describes images.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, for a model of another kind, and for a device that
/// computes wrongly.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(CaptionProcessor, CaptionNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = BlipConfig::read(&files, spec)?;
    let Options { sequences } = Options::read(spec)?;
    let decoder = Arc::new(decoder(&files, spec, &config)?);
    let path = files.required("tokenizer.json")?;
    let tokenizer = TextTokenizer::read(path, TextLimits::default(), config.context, config.vocabulary)?;
    let processor = CaptionProcessor {
        decoder,
        tokenizer,
        names: ServedNames::new(spec),
        start: config.start,
        context: config.context,
        max_inputs: spec.max_inputs,
    };
    let network = CaptionNetwork {
        blip: Blip::load(spec, device, &files, &config)?,
        end: config.end,
        // Tokens stand for no memory here. There are enough for all sequences and for the probe.
        capacity: Capacity { sequences, tokens: (sequences + 1) * config.context, context: config.context },
        running: BTreeMap::new(),
    };
    Ok((processor, network))
}

/// Turns requests into images and prompts, and token ids into responses.
pub struct CaptionProcessor {
    decoder: Arc<Decoder>,
    tokenizer: TextTokenizer,
    names: ServedNames,
    /// The token that begins every text.
    start: u32,
    /// Maximum number of tokens of a text.
    context: usize,
    max_inputs: usize,
}

/// An image to describe.
#[derive(Clone)]
pub struct CaptionInput {
    pixels: Arc<Pixels>,
    /// The tokens of the prompt, which begin the text; at least one.
    prompt: Arc<[u32]>,
    /// Maximum number of tokens that follow them.
    max_tokens: usize,
}

/// What the reply needs of its request.
pub struct CaptionContext {
    is_list: bool,
}

impl Processor for CaptionProcessor {
    type Context = CaptionContext;
    type Input = CaptionInput;
    type Piece = ();
    type Output = Vec<u32>;

    fn routes(&self) -> &[Route] {
        FAMILY.routes
    }

    fn probe(&self) -> Option<Message> {
        Some(probe_message([("max_new_tokens".to_owned(), Value::I32(1))].into()))
    }

    fn file_urls(&self, message: &Message) -> Vec<FileUrl> {
        CaptionRequest::file_urls(message, self.max_inputs)
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        self.preprocess_with(message, &Files::default())
    }

    fn preprocess_with(&self, message: &Message, files: &Files) -> Result<Preprocessed<Self>, TaskError> {
        let CaptionRequest { images, is_list, model, prompt, max_tokens } =
            CaptionRequest::parse(message, self.max_inputs, files)?;
        self.names.check(model.as_deref())?;
        let prompt = self.prompt(&prompt, max_tokens)?;
        let images = self.decoder.read_headers(images)?;
        let make_input =
            move |SizedInput { input, tokens: encode_tokens, .. }: SizedInput<Pixels>| SizedInput {
                encode_tokens,
                tokens: prompt.len(),
                answer_tokens: max_tokens,
                input: CaptionInput { pixels: Arc::new(input), prompt: prompt.clone(), max_tokens },
            };
        let slices = slices(self.decoder.clone(), images);
        let slices = slices.map(move |slice| Ok(slice?.into_iter().map(&make_input).collect()));
        Ok((CaptionContext { is_list }, Inputs::Slices(Box::new(slices))))
    }

    fn bytes(&self, input: &CaptionInput) -> usize {
        size_of_val(&*input.pixels.0)
    }

    fn finish(&self, context: CaptionContext, outputs: Vec<Vec<u32>>) -> Result<Body, TaskError> {
        let texts = outputs.iter().map(|ids| Ok(self.tokenizer.decode(ids)?.trim().to_owned()));
        write_captions(&texts.collect::<Result<Vec<String>, TaskError>>()?, context.is_list).map(Body::json)
    }
}

impl CaptionProcessor {
    /// The tokens of a prompt, with the start token.
    fn prompt(&self, prompt: &str, max_tokens: usize) -> Result<Arc<[u32]>, TaskError> {
        let mut ids = vec![self.start];
        ids.extend(self.tokenizer.pieces(prompt).map_err(|error| error.with_param("prompt"))?);
        if ids.len().saturating_add(max_tokens) > self.context {
            let (length, context) = (ids.len(), self.context);
            let message = format!(
                "the prompt has at least {length} tokens with the start token, and max_new_tokens is {max_tokens}; \
                 together at most {context} are allowed"
            );
            return Err(TaskError::bad_input("max_new_tokens", message));
        }
        Ok(ids.into())
    }
}

/// A network with the texts that it writes.
pub struct CaptionNetwork {
    blip: Blip,
    /// The token that ends a text.
    end: u32,
    capacity: Capacity,
    running: BTreeMap<Slot, Sequence>,
}

/// A text that is being written.
struct Sequence {
    input: CaptionInput,
    /// `[1, image_tokens, hidden]`. None before the image is encoded.
    image: Option<Tensor>,
    decoder: TextDecoder,
    /// The number of tokens of the prompt that were read.
    fed: usize,
    /// The tokens that follow the prompt.
    answer: Vec<u32>,
}

/// The state of a sequence after a step.
struct Computed {
    decoder: TextDecoder,
    /// The number of tokens of the prompt that were read in this step.
    fed: usize,
    /// The next token, if the prompt has been read.
    next: Option<u32>,
}

impl CaptionNetwork {
    /// Encodes the images of these rows as one batch.
    fn encode(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        let waiting: Vec<Slot> = rows
            .iter()
            .map(|row| row.slot)
            .filter(|slot| self.running.get(slot).is_some_and(|it| it.image.is_none()))
            .collect();
        let pixels: Vec<&Pixels> =
            waiting.iter().filter_map(|slot| Some(&*self.running.get(slot)?.input.pixels)).collect();
        let encoded = match pixels.as_slice() {
            [] => None,
            pixels => Some(self.blip.encode(pixels)?),
        };
        let mut images = BTreeMap::new();
        for (index, slot) in waiting.into_iter().enumerate() {
            if let Some(encoded) = &encoded {
                images.insert(slot, encoded.narrow(0, index, 1)?.contiguous()?);
            }
        }
        let advance = |row: &Row| match (images.remove(&row.slot), self.running.get_mut(&row.slot)) {
            (Some(image), Some(sequence)) => {
                sequence.image = Some(image);
                Ok(Advance::Fed)
            }
            _ => Err(out_of_turn()),
        };
        Ok(rows.iter().map(advance).collect())
    }

    /// Computes a row of tokens, without changing its sequence. The outer error concerns the device, the inner one only
    /// this row.
    fn compute(&self, row: Row) -> Result<Result<Computed, TaskError>, ForwardError> {
        let Some((sequence, image)) =
            self.running.get(&row.slot).and_then(|it| Some((it, it.image.as_ref()?)))
        else {
            return Ok(Err(out_of_turn()));
        };
        let prompt = &sequence.input.prompt[sequence.fed..];
        // The rest of the prompt is read first, then the last token that was written.
        let ids = match (prompt, sequence.answer.last()) {
            ([], Some(last)) => std::slice::from_ref(last),
            ([], None) => return Ok(Err(out_of_turn())),
            (prompt, _) => &prompt[..row.feed.tokens().min(prompt.len())],
        };
        let fed = if prompt.is_empty() { 0 } else { ids.len() };
        let mut decoder = sequence.decoder.clone();
        let logits = decoder.read(ids, image)?;
        if logits.iter().any(|logit| logit.is_nan()) {
            return Ok(Err(TaskError::internal("the model computed a logit that is not a number")));
        }
        let next = (fed == prompt.len()).then(|| argmax(&logits));
        Ok(Ok(Computed { decoder, fed, next }))
    }

    fn advance(&mut self, slot: Slot, computed: Computed) -> Result<Advance<(), Vec<u32>>, TaskError> {
        let Some(sequence) = self.running.get_mut(&slot) else { return Err(out_of_turn()) };
        let Computed { decoder, fed, next } = computed;
        sequence.decoder = decoder;
        sequence.fed += fed;
        let Some(next) = next else { return Ok(Advance::Fed) };
        if next != self.end {
            sequence.answer.push(next);
        }
        if next == self.end || sequence.answer.len() == sequence.input.max_tokens {
            return Ok(Advance::Done(None, [&*sequence.input.prompt, &*sequence.answer].concat()));
        }
        Ok(Advance::More(()))
    }
}

/// The index of the highest logit, the first one if several are equal.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = index;
        }
    }
    best as u32
}

impl Generate for CaptionNetwork {
    type Prompt = CaptionInput;
    type Piece = ();
    type Output = Vec<u32>;

    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn encoding(&self) -> Encoding {
        // A step computes its sequences one after the other, so it takes long, and an image need not wait for eight.
        Encoding { interval: 4, ..Encoding::default() }
    }

    fn open(&mut self, slot: Slot, input: &CaptionInput) -> Result<(), TaskError> {
        let sequence = Sequence {
            input: input.clone(),
            image: None,
            decoder: self.blip.decoder(),
            fed: 0,
            answer: Vec::new(),
        };
        self.running.insert(slot, sequence);
        Ok(())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        if rows.iter().any(|row| row.feed == Feed::Encode) {
            return self.encode(rows);
        }
        // All rows are computed before any sequence changes, so that a step that fails can be computed again.
        let computed = rows.iter().map(|row| self.compute(*row)).collect::<Result<Vec<_>, _>>()?;
        let rows = rows.iter().zip(computed);
        Ok(rows.map(|(row, computed)| self.advance(row.slot, computed?)).collect())
    }

    fn close(&mut self, slot: Slot) {
        self.running.remove(&slot);
    }
}
