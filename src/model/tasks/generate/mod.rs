//! Text generation: turns `/v1/completions` and `/v1/chat/completions` bodies into prompts, and answers into response
//! bodies, whole and in parts. Only the network uses the device, not the processor.

mod network;
mod options;
mod reply;
mod request;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;

pub use self::network::{Answer, AnswerEnd, Piece, Prompt, TextGenerator};
use self::options::{Implementation, Options};
use self::reply::{Choice, PartContent, Reply, Usage, new_id};
use self::request::{Api, CHAT, COMPLETIONS, GenerateRequest, Prompts};
use super::names::ServedNames;
use super::{MANY_TEXTS, prepare_all};
use crate::model::family::{self, Description, Example, Family, FileRules, Sample, Serves};
use crate::model::load::gguf::Gguf;
use crate::model::load::long_text::{Side, TextIds};
use crate::model::load::packed_cache::{self, PackedCache};
use crate::model::load::vocabulary::{TokenLimit, Vocabulary};
use crate::model::load::{ModelFiles, weights};
use crate::model::nets::decoder::architectures::{CONFIG_ARCHITECTURES, GGUF_ARCHITECTURES, WITH_TEXT_PART};
use crate::model::nets::decoder::config::DecoderConfig;
use crate::model::nets::decoder::{
    CachedDecoder, Decoder, DecoderWeights, DeviceDecoder, GGUF_EMBEDDINGS, KvSizes, compare_with_f32,
};
use crate::model::nets::{check_widths, number_formats};
use crate::model::ops::NumberFormat;
use crate::model::ops::kv::KvBlocks;
use crate::model::random::{Seed, seed_of_task};
use crate::model::sequences::blocks::Owner;
use crate::model::sequences::grammar::{Format, Found, Grammars};
use crate::model::{
    Body, Capacity, Device, Dtype, Effort, Inputs, LoadError, LoadSpec, Message, Preprocessed, Processor,
    Route, SizedInput, Streaming, TaskError, TaskErrorKind,
};
use crate::protocol::endpoints::{CHAT_URL, COMPLETIONS_URL};
use crate::protocol::stats::{Generated, TokenCounts};
use crate::protocol::task::published;

/// The default of a completion's `max_tokens`. OpenAI has the same default.
const COMPLETION_TOKENS: usize = 16;
/// The default of a chat completion's `max_tokens`.
const CHAT_TOKENS: usize = 512;
/// The number of tokens of each answer to a generated request.
const SAMPLE_TOKENS: usize = 32;
/// The maximum number of bytes of prompts that are repeated before a task's answers. A token may have two bytes in a
/// request body and 128 bytes of text, which are repeated for each answer.
const MAX_ECHOED_BYTES: usize = 8 << 20;
/// The maximum number of tokens that are listed with their probabilities for a task's answers. Each takes about 100
/// bytes of memory, and about 100 bytes in the reply.
const MAX_LISTED_TOKENS: usize = 1 << 19;

/// The largest body, in bytes, that does not count as long to prepare. For each byte a tokenizer takes 0.03 µs in
/// prose, but 1.4 µs in a long run of one character: 12 ms for a body of this length.
const LONG_BODY: usize = 8 << 10;

/// Models that generate text.
pub static FAMILY: Family = Family {
    name: "generate",
    routes: &[Route::json(CHAT_URL), Route::json(COMPLETIONS_URL)],
    fields: &[(COMPLETIONS_URL, &COMPLETIONS), (CHAT_URL, &CHAT)],
    serves: Serves::Files(FileRules {
        configs: &CONFIG_ARCHITECTURES,
        ggufs: &GGUF_ARCHITECTURES,
        heads: &["ForCausalLM", "LMHeadModel", "ForConditionalGeneration"],
        fewer_routes: Some(routes_of),
        assumptions,
        ..FileRules::new(request_files, check)
    }),
    options: &options::OPTIONS,
    sample: |texts| {
        let body = json!({"prompt": texts, "max_tokens": SAMPLE_TOKENS, "ignore_eos": true});
        Sample::json(COMPLETIONS_URL, &body, texts.len())
    },
    example: Example { model: "generate-llama", options: &[] },
};

/// The routes of a model with these files. Without a chat template it answers no chats. What is wrong with the files is
/// found when they are loaded.
fn routes_of(files: &ModelFiles) -> &'static [Route] {
    routes(Vocabulary::has_chat(files).unwrap_or(true))
}

fn routes(has_chat: bool) -> &'static [Route] {
    if has_chat { FAMILY.routes } else { &FAMILY.routes[1..] }
}

/// What a request cannot use although the model has it.
fn assumptions(model: &Description) -> Vec<String> {
    // A GGUF file has the text part alone, under the same name.
    let has_more =
        model.format == family::Format::Config && WITH_TEXT_PART.contains(&model.architecture.as_str());
    let what = "only the text part of this model is served, and images are refused";
    has_more.then(|| what.to_owned()).into_iter().collect()
}

fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
    files.required("config.json")?;
    Vocabulary::request_files(files)?;
    files.weights().map(drop)
}

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    check_dtype(spec, &files)?;
    let Some(path) = files.gguf() else {
        let config = read_config(&files, spec)?;
        Options::read(spec, config.context)?;
        let heads = config.heads * config.head_width;
        check_widths(spec, &[("hidden", config.hidden), ("inner", config.inner), ("heads'", heads)])?;
        files.required("tokenizer.json")?;
        return weights::check(&files.weights()?);
    };
    let (gguf, config) = read_gguf(&path)?;
    Options::read(spec, config.context)?;
    gguf.check_length()
}

/// Reads `config.json`, of a decoder that can generate.
fn read_config(files: &ModelFiles, spec: &LoadSpec) -> Result<DecoderConfig, LoadError> {
    let config = DecoderConfig::read(files, &spec.source)?;
    if config.is_causal {
        return Ok(config);
    }
    let reason = "by is_causal or use_bidirectional_attention of config.json a token attends to those after it, and a text \
                  is generated token by token; pool.task may be embed";
    Err(spec.unsupported(reason))
}

fn read_gguf(path: &Path) -> Result<(Gguf, DecoderConfig), LoadError> {
    let gguf = Gguf::read(path)?;
    let config = DecoderConfig::from_gguf(&gguf)?;
    gguf.check(GGUF_EMBEDDINGS, [config.hidden, config.vocabulary])?;
    Ok((gguf, config))
}

/// Checks that the device can compute in the pool's `dtype`, and returns the number format of matrices on a CPU.
fn check_dtype(spec: &LoadSpec, files: &ModelFiles) -> Result<NumberFormat, LoadError> {
    let formats = number_formats(spec)?;
    let refusal = match spec.dtype {
        _ if spec.device != "cpu" => None,
        Dtype::F32 => None,
        _ if files.gguf().is_some() => {
            Some("on a CPU the weights of a GGUF file are kept as in the file; set \"f32\" or \"auto\"")
        }
        Dtype::F16 => Some("on a CPU text is generated in f32, bf16 or int8"),
        Dtype::Bf16 | Dtype::Int8 => None,
    };
    match refusal {
        None => Ok(formats.matrices),
        Some(refusal) => {
            let reason = format!("dtype is {:?}; {refusal}", spec.dtype.name());
            Err(spec.unsupported(reason))
        }
    }
}

/// Loads a model that generates text. On a CPU, the weights of a GGUF file, and all weights in f32, are kept as in the file;
/// other matrices are converted to `dtype`, and compared with f32. For a GPU this calls [`load_onto`].
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, an unknown option, and a device or number format that is not
/// supported.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(GenerateProcessor, TextGenerator), LoadError> {
    let format = check_dtype(spec, &ModelFiles::locate(&spec.source)?)?;
    if !device.is_cpu() {
        return load_onto(spec, device);
    }
    let mut model = Model::read(spec, format)?;
    let options = Options::read(spec, model.config.context)?;
    let row_format = options.activation_type(spec, Implementation::Host)?;
    model.weights.multiply_rows_as(row_format);
    if spec.dtype != Dtype::F32 {
        let reference = Model::read(spec, NumberFormat::F32)?.weights;
        compare_with_f32(spec, &model.weights, &reference, &model.config)?;
    }
    let decoder = load_decoder(&model.files, model.weights, &model.config, spec.dtype, options.context)?;
    let shape = model.config.kv_shape(options.kv_numbers);
    let kv = KvBlocks::new(shape, TextGenerator::blocks(options.capacity()));
    let kv = kv.map_err(|error| spec.failed(format!("keys and values: {error}")))?;
    Ok(assemble(spec, options, &model.config, model.vocabulary, CachedDecoder::Host(Box::new(decoder), kv)))
}

/// Loads a model that generates text onto any device, to be computed by candle's operations with weights in the pool's
/// `dtype`. On a CPU this is for tests.
///
/// # Errors
/// Those of [`load`], [`LoadError::Device`] if the device has not enough memory for the weights or for the keys and
/// values, and [`LoadError::Unfit`] if it computes wrongly.
pub fn load_onto(spec: &LoadSpec, device: &Device) -> Result<(GenerateProcessor, TextGenerator), LoadError> {
    let Model { config, vocabulary, weights, .. } = Model::read(spec, NumberFormat::F32)?;
    let options = Options::read(spec, config.context)?;
    options.activation_type(spec, Implementation::Candle)?;
    let kv_sizes = KvSizes {
        context: options.context,
        blocks: TextGenerator::blocks(options.capacity()),
        numbers: options.kv_numbers,
    };
    let decoder = DeviceDecoder::load(spec, device, &weights, &config, kv_sizes)?;
    decoder.compare_with_cpu(spec, &weights, kv_sizes)?;
    Ok(assemble(spec, options, &config, vocabulary, CachedDecoder::Device(Box::new(decoder))))
}

/// The contents of a model's files.
struct Model {
    files: ModelFiles,
    config: DecoderConfig,
    vocabulary: Vocabulary,
    weights: DecoderWeights,
}

impl Model {
    /// Reads the files. `format` is the number format of the matrices of safetensors files.
    fn read(spec: &LoadSpec, format: NumberFormat) -> Result<Self, LoadError> {
        let files = ModelFiles::locate(&spec.source)?;
        if let Some(path) = files.gguf() {
            let (gguf, config) = read_gguf(&path)?;
            if let (true, Some(note)) = (spec.device == "cpu", gguf.widened_types()) {
                tracing::info!("{note}");
            }
            let vocabulary = Vocabulary::from_gguf(&gguf, config.vocabulary)?;
            let weights = DecoderWeights::from_gguf(gguf, &config);
            return Ok(Self { files, config, vocabulary, weights });
        }
        let config = read_config(&files, spec)?;
        let vocabulary = Vocabulary::from_files(&files, config.vocabulary)?;
        let weights = DecoderWeights::from_safetensors(&files, &config, format)?;
        Ok(Self { files, config, vocabulary, weights })
    }
}

/// Makes the two parts of a model from what was loaded.
fn assemble(
    spec: &LoadSpec,
    options: Options,
    config: &DecoderConfig,
    vocabulary: Vocabulary,
    decoder: CachedDecoder,
) -> (GenerateProcessor, TextGenerator) {
    let (token_texts, end_tokens) = (vocabulary.texts(), vocabulary.ends.clone());
    let grammars = Grammars::new(&token_texts, config.vocabulary, &end_tokens).map(Arc::new);
    let generator = TextGenerator::new(decoder, options.capacity(), config.window(), token_texts, end_tokens);
    let processor = GenerateProcessor {
        vocabulary,
        names: ServedNames::new(spec),
        max_inputs: spec.max_inputs,
        vocab_size: config.vocabulary,
        options,
        grammars,
    };
    (processor, generator)
}

/// Loads a decoder. It shares its matrices with the other workers of this host if the cache can be used.
fn load_decoder(
    files: &ModelFiles,
    mut weights: DecoderWeights,
    config: &DecoderConfig,
    dtype: Dtype,
    context: usize,
) -> Result<Decoder, LoadError> {
    let path = packed_cache::path(&files.digest()?, dtype);
    let open_cache = |path: &Option<PathBuf>| path.as_deref().and_then(PackedCache::open);
    if let Some(cache) = open_cache(&path) {
        weights.use_cache(cache);
        return Decoder::load(&weights, config, context);
    }
    let unshared = Decoder::load(&weights, config, context)?;
    let Some(cache_path) = &path else { return Ok(unshared) };
    if let Err(error) = packed_cache::write(cache_path, unshared.matrices()) {
        let file = cache_path.display();
        tracing::warn!(%file, %error, "workers cannot share this model's memory: its matrices cannot be cached");
        return Ok(unshared);
    }
    match open_cache(&path) {
        Some(cache) => weights.use_cache(cache),
        None => return Ok(unshared),
    }
    drop(unshared);
    Decoder::load(&weights, config, context)
}

/// Turns requests for text into prompts, and answers into responses.
pub struct GenerateProcessor {
    vocabulary: Vocabulary,
    names: ServedNames,
    max_inputs: usize,
    /// The number of token ids; ids are below it.
    vocab_size: usize,
    options: Options,
    /// The error is the reason why this model's answers cannot be constrained.
    grammars: Result<Arc<Grammars>, String>,
}

/// The parts of a request that its response needs, and the state of the response's parts.
pub struct GenerateContext {
    api: Api,
    id: String,
    created: u64,
    seed: u64,
    stream: bool,
    include_usage: bool,
    /// Whether each token is listed with probabilities. A part is then far longer than its text.
    lists_tokens: bool,
    user: String,
    /// The tokens of the prompts, and of the parts that were written.
    usage: Usage,
    /// The number of answers whose end no part has reported yet.
    unfinished: usize,
    /// The prompt with which each answer's text begins; answers to one prompt share it. Empty if prompts are not
    /// repeated.
    echoed: Vec<Arc<str>>,
    /// The progress of each answer's parts.
    progress: Vec<PartsProgress>,
}

/// What the parts of one answer have reported so far.
#[derive(Clone, Copy, Default)]
struct PartsProgress {
    is_begun: bool,
    /// The number of characters of the tokens that were listed with probabilities.
    characters: usize,
}

impl Processor for GenerateProcessor {
    type Context = GenerateContext;
    type Input = Prompt;
    type Piece = Piece;
    type Output = Answer;

    fn routes(&self) -> &[Route] {
        routes(self.vocabulary.chat.is_some())
    }

    fn probe(&self) -> Option<Message> {
        let body = r#"{"prompt":"a","max_tokens":2,"ignore_eos":true,"temperature":0,"seed":0}"#;
        let mut message = Message { body: body.into(), ..Message::default() };
        message.properties.headers.insert("url".to_owned(), COMPLETIONS_URL.into());
        Some(message)
    }

    fn effort(&self, message: &Message) -> Effort {
        if message.body.len() > LONG_BODY { Effort::Long } else { Effort::Usual }
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let is_chat = match message.url() {
            Some(url) => url == CHAT_URL,
            None => self.vocabulary.chat.is_some(),
        };
        let api = if is_chat { Api::Chat } else { Api::Completions };
        let request = GenerateRequest::read(api, &message.body, self.max_inputs)?;
        self.names.check(request.model.as_deref())?;
        let grammar = self.find_grammar(&request.format)?;
        let constraint = match &grammar {
            Found::Known(constraint) => Some(constraint.clone()),
            Found::Any | Found::Unknown(_) => None,
        };
        let prompts = self.prompts(&request, message)?;
        let seed = request.seed.unwrap_or_else(|| seed_of_task(self.options.seed, &message.properties));
        let stop: Arc<[String]> = request.stop.as_slice().into();
        let owner = Owner::of(request.owner.as_deref().unwrap_or_default());
        let mut inputs = Vec::with_capacity(prompts.len() * request.n);
        let mut prompt_tokens = 0;
        for (index, ids) in prompts.into_iter().enumerate() {
            let (ids, max_tokens) = self.fit_prompt(&request, index, ids)?;
            let ids: Arc<[u32]> = ids.into();
            prompt_tokens += ids.len();
            for choice in 0..request.n {
                let sequence = (index * request.n + choice) as u64;
                let prompt = Prompt {
                    ids: ids.clone(),
                    max_tokens,
                    sampling: request.sampling,
                    seed: Seed { task: seed, sequence },
                    stop: stop.clone(),
                    ignore_eos: request.ignore_eos,
                    logprobs: request.logprobs,
                    constraint: constraint.clone(),
                    owner,
                };
                inputs.push(SizedInput {
                    input: prompt,
                    encode_tokens: 0,
                    tokens: ids.len(),
                    answer_tokens: max_tokens,
                });
            }
        }
        check_listed(&request, &inputs)?;
        let echoed = self.echoed(&request, &inputs)?;
        let context = GenerateContext {
            api,
            id: new_id(api),
            created: super::unix_seconds(),
            seed,
            stream: request.stream,
            include_usage: request.include_usage,
            lists_tokens: request.logprobs.is_some(),
            user: request.user.clone().unwrap_or_default(),
            usage: Usage { prompt_tokens, ..Usage::default() },
            unfinished: inputs.len(),
            echoed,
            progress: vec![PartsProgress::default(); inputs.len()],
        };
        Ok((context, self.inputs(grammar, inputs)))
    }

    fn streaming(&self, context: &GenerateContext) -> Streaming {
        Streaming::Pieces.if_requested(context.stream)
    }

    fn are_parts_brief(&self, context: &GenerateContext) -> bool {
        !context.lists_tokens && context.echoed.is_empty()
    }

    fn parts(&self, context: &mut GenerateContext, input: usize, pieces: Vec<Piece>) -> Vec<Body> {
        let GenerateContext { api, id, created, echoed, progress, usage, unfinished, .. } = context;
        let Some(progress) = progress.get_mut(input) else { return Vec::new() };
        usage.completion_tokens += pieces.len();
        let mut text = match echoed.get(input) {
            Some(prompt) if !progress.is_begun => (**prompt).to_owned(),
            _ => String::new(),
        };
        pieces.iter().for_each(|piece| text.push_str(&piece.text));
        let scores: Vec<_> = pieces.iter().filter_map(|piece| piece.score.clone()).collect();
        let end = pieces.iter().find_map(|piece| piece.end);
        if text.is_empty() && scores.is_empty() && end.is_none() {
            return Vec::new();
        }
        let finish = end.map(|AnswerEnd { finish, cached }| {
            usage.cached_tokens += cached;
            *unfinished -= 1;
            finish
        });
        let logprobs = (!scores.is_empty()).then_some(&*scores);
        let (is_first, offset) = (!progress.is_begun, progress.characters);
        progress.is_begun = true;
        progress.characters += scores.iter().map(|score| score.characters()).sum::<usize>();
        let reply = Reply { api: *api, id, created: *created, model: self.names.reply_name() };
        let part =
            reply.part(&PartContent { choice: input, text: &text, is_first, logprobs, offset, finish });
        let is_last = context.include_usage && finish.is_some() && *unfinished == 0;
        let usage = is_last.then(|| reply.usage_chunk(*usage));
        // Both can be serialized whenever the reply can, so an error is left to `finish`.
        [Some(part), usage].into_iter().flatten().flatten().map(Body::json).collect()
    }

    fn finish(&self, context: GenerateContext, answers: Vec<Answer>) -> Result<Body, TaskError> {
        let GenerateContext { api, id, created, echoed, seed, user, usage, .. } = context;
        let usage = Usage {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: answers.iter().map(|answer| answer.tokens).sum(),
            cached_tokens: answers.iter().map(|answer| answer.cached).sum(),
        };
        let choices = answers.into_iter().enumerate().map(|(index, answer)| {
            let Answer { text, finish, scores, .. } = answer;
            let text = echoed.get(index).map_or_else(String::new, |text| (**text).to_owned()) + &text;
            Choice { index, text, finish, logprobs: scores }
        });
        let choices: Vec<Choice> = choices.collect();
        let body = Reply { api, id: &id, created, model: self.names.reply_name() }.whole(&choices, usage)?;
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = usage;
        let [prompt, cached, answer] = [prompt_tokens, cached_tokens, completion_tokens].map(|it| it as u64);
        let tokens = TokenCounts { prompt, cached, answer };
        let generated = Some(Generated { user, answers: choices.len() as u64, tokens });
        // A header holds an i64: a seed from 2^63 on is written as a negative number, which a request may have too.
        Ok(Body { generated, ..Body::json(body).header("seed", seed.cast_signed()) })
    }
}

impl GenerateProcessor {
    /// Looks up the grammar that the text must match.
    fn find_grammar(&self, format: &Format) -> Result<Found, TaskError> {
        match &self.grammars {
            _ if *format == Format::Text => Ok(Found::Any),
            Ok(grammars) => grammars.find(format),
            Err(reason) => Err(TaskError::internal(format!("response_format: {reason}"))),
        }
    }

    /// The inputs, with their constraint. An unknown grammar is built later.
    fn inputs(&self, grammar: Found, mut inputs: Vec<SizedInput<Prompt>>) -> Inputs<Prompt> {
        let (Found::Unknown(grammar), Ok(grammars)) = (grammar, &self.grammars) else { return inputs.into() };
        let grammars = grammars.clone();
        Inputs::Later(Box::new(move || {
            let constraint = grammars.build(&grammar)?;
            for sized in &mut inputs {
                sized.input.constraint = Some(constraint.clone());
            }
            Ok(inputs.into())
        }))
    }

    /// The tokens of each prompt.
    fn prompts(&self, request: &GenerateRequest, message: &Message) -> Result<Vec<Vec<u32>>, TaskError> {
        let with_path = |index: usize| move |error: TaskError| error.with_param(request.path(index));
        let prompts = match &request.prompts {
            Prompts::Messages(messages) => {
                let chat = self.vocabulary.chat.as_ref();
                let chat =
                    chat.ok_or_else(|| TaskError::bad_input("messages", "this model has no chat template"))?;
                let template = chat.find(request.chat_template_name.as_deref())?;
                let text = template.render(messages, &self.options.template_time(published(message)))?;
                let prompt = self.vocabulary.conversation(&text, self.token_limit())?;
                vec![self.checked_ids(prompt, request, 0)?]
            }
            Prompts::Texts { texts } => prepare_all(texts.iter().collect(), MANY_TEXTS, |index, text| {
                let prompt = self.vocabulary.prompt(text, self.token_limit()).map_err(with_path(index))?;
                self.checked_ids(prompt, request, index)
            })?,
            Prompts::Tokens(lists) => {
                for (index, list) in lists.iter().enumerate() {
                    if let Some(id) = list.iter().find(|id| **id as usize >= self.vocab_size) {
                        let vocab_size = self.vocab_size;
                        let message =
                            format!("{id} is no token id of this model, whose ids are below {vocab_size}");
                        return Err(TaskError::bad_input(request.path(index), message));
                    }
                }
                lists.clone()
            }
        };
        match prompts.iter().position(Vec::is_empty) {
            Some(index) => {
                let path = request.path(index);
                let message = format!("{path} has no tokens, and there is nothing to continue");
                Err(TaskError::bad_input(path, message))
            }
            None => Ok(prompts),
        }
    }

    /// The tokens of a prompt that are needed if it is too long.
    fn token_limit(&self) -> TokenLimit {
        let side = if self.options.truncate_prompts { Side::End } else { Side::Beginning };
        TokenLimit { max_tokens: self.max_sequence_tokens(), side }
    }

    /// The tokens of a prompt. Refuses a prompt that is too long, unless prompts may be truncated. It is refused here,
    /// before further prompts are tokenised, which may take long.
    fn checked_ids(
        &self,
        prompt: TextIds,
        request: &GenerateRequest,
        index: usize,
    ) -> Result<Vec<u32>, TaskError> {
        let TextIds { ids, is_whole } = prompt;
        if self.options.truncate_prompts {
            return Ok(ids);
        }
        if is_whole {
            return self.max_answer(request, index, ids.len()).map(|_| ids);
        }
        let (path, read, pool_tokens) = (request.path(index), ids.len(), self.max_sequence_tokens());
        let message = format!(
            "{path} has more than {read} tokens; this pool holds {pool_tokens} of a prompt and its answer together"
        );
        Err(TaskError::bad_input(path, message))
    }

    /// The maximum number of tokens of the answer to a prompt of `tokens` tokens. Refuses a prompt that leaves fewer
    /// than the request's `max_tokens`, or none.
    fn max_answer(&self, request: &GenerateRequest, index: usize, tokens: usize) -> Result<usize, TaskError> {
        // Both in tokens: what the pool holds of a prompt and its answer, and the shortest answer that there must be room for.
        let (pool_tokens, answer_tokens) = (self.max_sequence_tokens(), request.max_tokens.unwrap_or(1));
        let room = pool_tokens.saturating_sub(tokens);
        if room >= answer_tokens {
            return Ok(room);
        }
        let path = request.path(index);
        let message = format!(
            "{path} has {tokens} tokens and the answer may have {answer_tokens}; this pool holds {pool_tokens} of both together"
        );
        Err(TaskError::bad_input(path, message))
    }

    /// The maximum number of tokens of a prompt and its answer together.
    fn max_sequence_tokens(&self) -> usize {
        self.options.context.min(self.options.kv_tokens)
    }

    /// The tokens of a prompt, truncated if that is allowed and needed, and the maximum number of tokens of its answer.
    /// Refuses a prompt if both together do not fit.
    fn fit_prompt(
        &self,
        request: &GenerateRequest,
        index: usize,
        mut ids: Vec<u32>,
    ) -> Result<(Vec<u32>, usize), TaskError> {
        let pool_tokens = self.max_sequence_tokens();
        let default = match request.api {
            Api::Completions => COMPLETION_TOKENS,
            Api::Chat => CHAT_TOKENS,
        };
        let answer_tokens = request.max_tokens.unwrap_or(1);
        let is_too_long = ids.len().saturating_add(answer_tokens) > pool_tokens;
        if is_too_long && self.options.truncate_prompts && answer_tokens < pool_tokens {
            // The end of the prompt is kept, since the answer continues it.
            ids.drain(..ids.len() + answer_tokens - pool_tokens);
        }
        let room = self.max_answer(request, index, ids.len())?;
        Ok((ids, request.max_tokens.unwrap_or(default).min(room)))
    }

    /// The prompts with which the answers' texts begin, one for each answer; empty unless prompts are repeated.
    fn echoed(
        &self,
        request: &GenerateRequest,
        inputs: &[SizedInput<Prompt>],
    ) -> Result<Vec<Arc<str>>, TaskError> {
        if !request.echo {
            return Ok(Vec::new());
        }
        let token_texts = self.vocabulary.texts();
        // The first input of each prompt.
        let prompts = || inputs.iter().step_by(request.n);
        let length = |sized: &SizedInput<Prompt>| -> usize {
            sized.input.ids.iter().map(|id| token_texts.get(*id).len()).sum()
        };
        let bytes: usize = match &request.prompts {
            Prompts::Texts { texts } => texts.iter().map(String::len).sum(),
            _ => prompts().map(length).sum(),
        };
        check_echoed(bytes.saturating_mul(request.n))?;
        let text = |sized: &SizedInput<Prompt>| -> Arc<str> { token_texts.whole(&sized.input.ids).into() };
        let echoed: Vec<Arc<str>> = match &request.prompts {
            Prompts::Texts { texts } => texts.iter().map(|text| text.as_str().into()).collect(),
            _ => prompts().map(text).collect(),
        };
        Ok(echoed.into_iter().flat_map(|text| std::iter::repeat_n(text, request.n)).collect())
    }
}

/// Refuses to repeat more bytes of prompts than a worker and a reply should hold.
fn check_echoed(bytes: usize) -> Result<(), TaskError> {
    if bytes <= MAX_ECHOED_BYTES {
        return Ok(());
    }
    let message = format!(
        "echo repeats {bytes} bytes of prompts before the answers; at most {MAX_ECHOED_BYTES} are repeated"
    );
    Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("echo"))
}

/// Refuses answers with more listed tokens than a worker and a reply should hold.
fn check_listed(request: &GenerateRequest, inputs: &[SizedInput<Prompt>]) -> Result<(), TaskError> {
    let Some(count) = request.logprobs else { return Ok(()) };
    let tokens: usize = inputs.iter().map(|sized| sized.answer_tokens).sum();
    let listed = tokens.saturating_mul(count + 1);
    if listed <= MAX_LISTED_TOKENS {
        return Ok(());
    }
    let message = format!(
        "logprobs lists {} tokens for each of the {tokens} that the answers may have, {listed} together; at most \
         {MAX_LISTED_TOKENS} are listed: set max_tokens, or ask for fewer",
        count + 1
    );
    Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("logprobs"))
}

impl Options {
    /// The capacity of a network with these options.
    fn capacity(&self) -> Capacity {
        Capacity { sequences: self.sequences, tokens: self.kv_tokens, context: self.context }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_repeated_up_to_a_limit() {
        assert!(check_echoed(MAX_ECHOED_BYTES).is_ok());
        let error = check_echoed(MAX_ECHOED_BYTES + 1).unwrap_err();
        assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::TooLarge, Some("echo")));
    }
}
