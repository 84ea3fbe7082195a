//! Models that compute vectors of texts and images in one space (CLIP, SigLIP). Turns requests for embeddings and for
//! zero-shot classification into texts and images, and vectors into response bodies. Images are decoded as for `image`,
//! texts are tokenised as for `embed`. Only the network uses the device, not the processor.

mod request;

use std::sync::Arc;

use serde::Deserialize;

use self::request::{KEYS, ZeroShotRequest};
use super::embed::{self, EmbeddingContext, EmbeddingRequest, Input, Vectors};
use super::image::{
    Decoder, MANY_IMAGES, MAX_PIXELS, MAX_TASK_PIXELS, MEDIA_TYPES, PixelLimits, SLICE_PIXELS,
    UndecodedImage, probe_message, read_preprocessing,
};
use super::labels::{sigmoid, softmax, write_best_labels};
use super::names::ServedNames;
use super::{MayBeCut, OnError, ReportedInputs, SLICE_BYTES, SharedReport, TextInputs, text_input};
use crate::model::family::{Example, Family, FileRules, Sample, Serves};
use crate::model::load::tokenizer::{TextLimits, TextTokenizer, Tokens};
use crate::model::load::vocabulary::TokenField;
use crate::model::load::{ModelFiles, weights};
use crate::model::nets::text_image::config::{ARCHITECTURES, TextImageConfig};
use crate::model::nets::text_image::{Similarity, TextImageNetwork, TextOrImage, check_dtype};
use crate::model::{
    Body, Device, FileUrl, Files, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, SizedInput,
    TaskError,
};
use crate::protocol::Value;
use crate::protocol::endpoints::{CLASSIFY_URL, EMBEDDINGS_URL};
use crate::protocol::message;

/// The most products of numbers that the scores of a task take on the usual threads: about 5 ms.
const MAX_QUICK_PRODUCTS: usize = 4_000_000;

/// Models of texts and images.
pub static FAMILY: Family = Family {
    name: "text-image",
    routes: &[
        Route { url: EMBEDDINGS_URL, media_types: MEDIA_TYPES },
        Route { url: CLASSIFY_URL, media_types: MEDIA_TYPES },
    ],
    fields: &[(EMBEDDINGS_URL, &embed::KEYS), (CLASSIFY_URL, &KEYS)],
    serves: Serves::Files(FileRules {
        configs: &ARCHITECTURES,
        libraries: &["SentenceTransformer"],
        ..FileRules::new(request_files, check)
    }),
    options: &[MAX_PIXELS, MAX_TASK_PIXELS],
    sample: |texts| Sample::of_texts(EMBEDDINGS_URL, "input", texts),
    example: Example { model: "tiny-clip", options: &[("max_pixels", 1_000_000)] },
};

/// Requests every file that loading may read, the weights last.
fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
    files.required("config.json")?;
    files.optional("preprocessor_config.json")?;
    files.optional("tokenizer.json")?;
    files.optional("tokenizer_config.json")?;
    files.weights().map(drop)
}

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = TextImageConfig::read(&files, spec)?;
    PixelLimits::read(&FAMILY, spec)?;
    check_dtype(spec)?;
    decoder(&files, spec, &config)?;
    files.required("tokenizer.json")?;
    if config.pads_texts() {
        files.required("tokenizer_config.json")?;
    }
    weights::check(&files.weights()?)
}

/// The decoder of images, whose size must be the network's.
fn decoder(files: &ModelFiles, spec: &LoadSpec, config: &TextImageConfig) -> Result<Decoder, LoadError> {
    let preprocessing = read_preprocessing(files, spec)?.with_sides(config.sides, spec)?;
    let limits = PixelLimits::read(&FAMILY, spec)?;
    Ok(Decoder { preprocessing, limits, tokens: config.image_tokens })
}

/// Loads a model of texts and images.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, for a model of another kind, and for a device that
/// computes wrongly.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(TextImageProcessor, TextImageNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = TextImageConfig::read(&files, spec)?;
    let decoder = decoder(&files, spec, &config)?;
    let path = files.required("tokenizer.json")?;
    let limits = TextLimits::default();
    let tokenizer = TextTokenizer::read(path, limits, config.max_tokens, config.vocabulary)?;
    let pad = if config.pads_texts() { pad_id(&files, spec, &tokenizer)? } else { 0 };
    if !config.pads_texts() {
        check_end_token(spec, &tokenizer)?;
    }
    let network = TextImageNetwork::load(spec, device, &files, &config, pad)?;
    let padded_len = config.pads_texts().then_some(config.max_tokens);
    let processor = TextImageProcessor {
        maker: Arc::new(InputMaker { tokenizer, decoder, padded_len }),
        names: ServedNames::new(spec),
        similarity: network.similarity(),
        vectors: Vectors { width: config.width, normalize: true },
        max_inputs: spec.max_inputs,
    };
    Ok((processor, network))
}

/// The id of the padding token.
fn pad_id(files: &ModelFiles, spec: &LoadSpec, tokenizer: &TextTokenizer) -> Result<u32, LoadError> {
    #[derive(Deserialize)]
    struct Config {
        pad_token: Option<TokenField>,
    }
    let Config { pad_token } = files.required_json("tokenizer_config.json")?;
    let token = pad_token.map(TokenField::text).unwrap_or_default();
    tokenizer.id_of_token(&token).ok_or_else(|| {
        let reason = format!("the pad_token {token:?} of tokenizer_config.json is not in tokenizer.json");
        spec.unsupported(reason)
    })
}

/// Refuses a tokenizer whose texts do not end with the largest id. candle-transformers takes a text's vector at the
/// largest id.
fn check_end_token(spec: &LoadSpec, tokenizer: &TextTokenizer) -> Result<(), LoadError> {
    let ends_with_largest = |tokens: Tokens| tokens.ids.last() == Some(&(tokenizer.vocabulary() - 1));
    if tokenizer.text("a").is_ok_and(ends_with_largest) {
        return Ok(());
    }
    let reason = format!(
        "tokenizer.json does not end texts with the token {}, the last of text_config.vocab_size, at which CLIP takes \
         the vector of a text",
        tokenizer.vocabulary() - 1
    );
    Err(spec.unsupported(reason))
}

impl MayBeCut for TextOrImage {
    fn is_cut(&self) -> bool {
        matches!(self, Self::Text(tokens) if tokens.truncated)
    }
}

/// Turns requests into texts and images, and vectors into responses.
pub struct TextImageProcessor {
    maker: Arc<InputMaker>,
    names: ServedNames,
    similarity: Similarity,
    vectors: Vectors,
    max_inputs: usize,
}

/// Makes the model's inputs. Shared by threads.
struct InputMaker {
    tokenizer: TextTokenizer,
    decoder: Decoder,
    /// The length to which every text is padded, which is also its size. None if a text's size is its own length.
    padded_len: Option<usize>,
}

/// An input of a task, before it is prepared.
enum Item {
    Text(String),
    Ids(Vec<u32>),
    Image(UndecodedImage),
}

impl Item {
    /// The cost of its preparation, in bytes of text. That of an image follows from its pixels.
    fn cost(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Ids(ids) => ids.len(),
            Self::Image(image) => (image.pixels() / (SLICE_PIXELS / SLICE_BYTES as u64)) as usize,
        }
    }
}

/// What the reply needs of its request.
pub struct TextImageContext(RequestContext);

enum RequestContext {
    /// A request for vectors.
    Embeddings(EmbeddingContext),
    /// A request to classify images.
    ZeroShot {
        /// The first inputs are sentences with these labels, the others are images.
        labels: Vec<String>,
        /// The number of labels to list for each image.
        top_k: usize,
        /// Whether the images came as a list.
        is_list: bool,
        /// Whether the reply has raw scores instead of probabilities.
        raw_scores: bool,
        /// Whether the scores take longer than some milliseconds.
        is_slow: bool,
        /// Counts the labels that were cut.
        report: Arc<SharedReport>,
    },
}

impl Processor for TextImageProcessor {
    type Context = TextImageContext;
    type Input = TextOrImage;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        FAMILY.routes
    }

    /// A zero-shot request, which needs the networks of texts and of images.
    fn probe(&self) -> Option<Message> {
        let labels = ["a candle", "a sconce"].map(Value::from).into();
        let headers =
            [(message::URL.to_owned(), CLASSIFY_URL.into()), ("labels".to_owned(), Value::Array(labels))];
        Some(probe_message(headers.into()))
    }

    fn file_urls(&self, message: &Message) -> Vec<FileUrl> {
        if is_zero_shot(message) {
            ZeroShotRequest::file_urls(message, self.max_inputs)
        } else {
            EmbeddingRequest::file_urls(message, self.max_inputs)
        }
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        self.preprocess_with(message, &Files::default())
    }

    fn preprocess_with(&self, message: &Message, files: &Files) -> Result<Preprocessed<Self>, TaskError> {
        if is_zero_shot(message) {
            return self.zero_shot(ZeroShotRequest::parse(message, self.max_inputs, files)?);
        }
        let request = EmbeddingRequest::parse_with_images(message, self.max_inputs, files)?;
        self.names.check(request.model.as_deref())?;
        self.vectors.check_dimensions(&request)?;
        if let Some(name) = &request.prompt_name {
            let message = format!("prompt_name is {name:?}; this model has no prompts");
            return Err(TaskError::bad_input("prompt_name", message));
        }
        let (encoding, dimensions) = (request.encoding, request.dimensions);
        let (report, inputs) = self.embedding_inputs(request)?;
        let context = RequestContext::Embeddings(EmbeddingContext { encoding, dimensions, report });
        Ok((TextImageContext(context), inputs))
    }

    fn bytes(&self, input: &TextOrImage) -> usize {
        match input {
            TextOrImage::Text(tokens) => tokens.bytes(),
            TextOrImage::Image(pixels) => size_of_val(&*pixels.0),
        }
    }

    fn is_finish_slow(&self, context: &TextImageContext) -> bool {
        matches!(context.0, RequestContext::ZeroShot { is_slow: true, .. })
    }

    fn finish(&self, context: TextImageContext, outputs: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        match context.0 {
            RequestContext::Embeddings(context) => context.reply(&self.names, self.vectors, outputs),
            RequestContext::ZeroShot { labels, top_k, is_list, raw_scores, report, .. } => {
                let (of_labels, of_images) = outputs.split_at(labels.len());
                let scores: Vec<Vec<f32>> =
                    of_images.iter().map(|image| self.scores(image, of_labels, raw_scores)).collect();
                let body = write_best_labels(&scores, &labels, top_k, is_list)?;
                Ok(report.take().counts.body(body))
            }
        }
    }
}

/// Whether a message asks to classify images.
fn is_zero_shot(message: &Message) -> bool {
    let url = message.properties.headers.get(message::URL).and_then(Value::as_str);
    url == Some(CLASSIFY_URL)
}

impl TextImageProcessor {
    fn zero_shot(&self, mut request: ZeroShotRequest) -> Result<Preprocessed<Self>, TaskError> {
        self.names.check(request.model.as_deref())?;
        let images = self.maker.decoder.read_headers(std::mem::take(&mut request.images))?;
        let products = request.labels.names.len() * images.len() * self.vectors.width;
        let sentences = request.labels.sentences().map(Item::Text);
        let items: Vec<_> = sentences.chain(images.into_iter().map(Item::Image)).map(Ok).collect();
        let path = |index| format!("labels[{index}]");
        let (report, inputs) = self.inputs(items, OnError::FailTask, request.truncate, path)?;
        let ZeroShotRequest { labels, top_k, is_list, raw_scores, .. } = request;
        let is_slow = products > MAX_QUICK_PRODUCTS;
        let labels = labels.names;
        let context = RequestContext::ZeroShot { labels, top_k, is_list, raw_scores, is_slow, report };
        Ok((TextImageContext(context), inputs))
    }

    /// Makes the inputs, and the report of their counts and errors. The headers of all images are read before anything is
    /// decoded.
    fn embedding_inputs(
        &self,
        mut request: EmbeddingRequest,
    ) -> Result<ReportedInputs<TextOrImage>, TaskError> {
        let (mut places, mut files) = (Vec::new(), Vec::new());
        let mut items: Vec<Result<Item, TaskError>> = Vec::with_capacity(request.inputs.len());
        for (index, input) in std::mem::take(&mut request.inputs).into_iter().enumerate() {
            items.push(match input {
                Ok(Input::Text(text)) => Ok(Item::Text(text)),
                Ok(Input::Ids(ids)) => Ok(Item::Ids(ids)),
                Ok(Input::Image(file)) => {
                    places.push(index);
                    files.push(file);
                    // A placeholder, which the image replaces below.
                    Ok(Item::Ids(Vec::new()))
                }
                Err(error) => Err(error),
            });
        }
        for (place, image) in places.into_iter().zip(self.maker.decoder.read_each_header(files)?) {
            items[place] = image.map(Item::Image);
        }
        let on_error = if request.errors_per_input { OnError::ReplaceOutput } else { OnError::FailTask };
        let truncate = request.truncate;
        self.inputs(items, on_error, truncate, move |index| request.path(index))
    }

    /// Prepares items. `path` is the path of an item in the request, for errors.
    fn inputs(
        &self,
        items: Vec<Result<Item, TaskError>>,
        on_error: OnError,
        truncate: bool,
        path: impl Fn(usize) -> String + Send + Sync + 'static,
    ) -> Result<ReportedInputs<TextOrImage>, TaskError> {
        let maker = self.maker.clone();
        let cost = |item: &Result<Item, TaskError>| item.as_ref().map_or(0, Item::cost);
        let inputs = TextInputs::new(items, cost, on_error, move |index, item| {
            maker.input(item?, truncate, || path(index))
        });
        inputs.shared_from(MANY_IMAGES).into_inputs()
    }

    /// The scores of an image's labels: probabilities, or raw scores.
    fn scores(&self, image: &[f32], labels: &[Vec<f32>], raw_scores: bool) -> Vec<f32> {
        let Similarity { scale, bias } = self.similarity;
        let score = |label: &Vec<f32>| {
            let cosine: f64 = label.iter().zip(image).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            (cosine * f64::from(scale)) as f32 + bias.unwrap_or(0.0)
        };
        let mut scores: Vec<f32> = labels.iter().map(score).collect();
        if raw_scores {
            return scores;
        }
        match bias {
            Some(_) => scores.iter_mut().for_each(|score| *score = sigmoid(*score)),
            None => softmax(&mut scores),
        }
        scores
    }
}

impl InputMaker {
    /// Prepares an item: tokenises a text, or decodes an image.
    fn input(
        &self,
        item: Item,
        truncate: bool,
        path: impl Fn() -> String,
    ) -> Result<SizedInput<TextOrImage>, TaskError> {
        let tokens = match item {
            // Its vector would be that of the letters, and nobody would notice.
            Item::Text(text) if text.starts_with("data:image/") => {
                let message = "it is the data URL of an image, in the place of a text; an image is sent as \
                               {\"image_url\": {\"url\": \"data:…\"}}";
                return Err(TaskError::bad_input(path(), message));
            }
            Item::Text(text) => self.tokenizer.text(&text),
            Item::Ids(ids) => self.tokenizer.ids(ids, &path()),
            Item::Image(image) => {
                let SizedInput { input, tokens, .. } = self.decoder.pixels(&image)?;
                return Ok(SizedInput::new(TextOrImage::Image(input), tokens));
            }
        };
        let tokens =
            tokens.map_err(|error| if error.param.is_some() { error } else { error.with_param(path()) })?;
        let SizedInput { input, tokens, .. } =
            text_input(tokens, truncate, path, self.tokenizer.max_tokens())?;
        Ok(SizedInput::new(TextOrImage::Text(input), self.padded_len.unwrap_or(tokens)))
    }
}
