//! Runs launches on the GPU, on candle's tensors and its stream. Decides which operations have a kernel for their sizes
//! and types; for the others the caller uses candle's own operations.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice, WrapErr};
use candle_core::{DType, Device, Result, Storage, Tensor, bail};

use super::super::Activation;
use super::super::causal::Scoring;
use super::super::pooling::Mode;
use super::{
    Addition, Argument, Draw, Drawn, Draws, ElementType, HeadSteps, Heads, Launch, MAX_WIDTH, Matrix, Norm,
    Normed, PagedHeads, PagedKv, PagedTiles, Plan, Pointer, Source,
};

/// The plan of a batch, which is also on the device.
pub struct Planned {
    /// On the host.
    pub plan: Plan,
    /// The number of tokens of each text.
    pub lengths: Vec<usize>,
    /// [`Plan::words`] on the device.
    pub words: Tensor,
}

impl Planned {
    /// The tokens' ids `[tokens]`.
    pub fn ids(&self) -> Result<Tensor> {
        self.words.narrow(0, 0, self.plan.tokens)
    }

    /// The rows of the tokens in the table of positions, `[tokens]`.
    pub fn positions(&self) -> Result<Tensor> {
        self.words.narrow(0, self.plan.tokens, self.plan.tokens)
    }
}

/// A norm's constants `[3, width]` in f32, and the number that is added to the variance.
pub type Constants<'a> = (&'a Tensor, f32);

/// LayerNorm(x + bias + residual) in `x`'s memory. Returns false, and does nothing, if no kernel fits.
///
/// # Errors
/// The driver's error.
pub fn add_norm(x: &Tensor, residual: &Tensor, constants: Constants<'_>) -> Result<bool> {
    let Some(rows) = rows(x, MAX_WIDTH)? else { return Ok(false) };
    run(x, &super::add_norm(rows, pointer(residual)?, norm(constants)?))?;
    Ok(true)
}

/// The normed sums `[tokens, width]` of the token and position embeddings from the two tables. None if no kernel fits.
///
/// # Errors
/// The driver's error.
pub fn embed(tables: [&Tensor; 2], planned: &Planned, constants: Constants<'_>) -> Result<Option<Tensor>> {
    let [tokens, positions] = tables;
    let x = uninitialised((planned.plan.tokens, tokens.dim(1)?), tokens.dtype(), tokens.device())?;
    let Some(rows) = rows(&x, MAX_WIDTH)? else { return Ok(None) };
    let tables = [pointer(tokens)?, pointer(positions)?];
    run(&x, &super::embed(rows, tables, pointer(&planned.words)?, norm(constants)?))?;
    Ok(Some(x))
}

/// activation(x + bias) in `x`'s memory. Returns false, and does nothing, if no kernel fits.
///
/// # Errors
/// The driver's error.
pub fn activate(x: &Tensor, bias: &Tensor, activation: Activation) -> Result<bool> {
    let Some(rows) = rows(x, u32::MAX)? else { return Ok(false) };
    run(x, &super::activate(rows, pointer(bias)?, activation))?;
    Ok(true)
}

/// The heads, if a kernel fits them.
pub fn heads_with_kernel(dtype: DType, heads: usize, size: usize) -> Option<Heads> {
    let heads = Heads { element_type: ElementType::of(dtype)?, count: heads as u32, size: size as u32 };
    heads.have_kernel().then_some(heads)
}

/// Attention over `qkv` `[tokens, 3·heads·size]`; returns `[tokens, heads·size]`. `q_bias` is f32.
///
/// # Errors
/// The driver's error.
pub fn attend(qkv: &Tensor, q_bias: &Tensor, heads: Heads, planned: &Planned) -> Result<Tensor> {
    let hidden = (heads.count * heads.size) as usize;
    let (tokens, width) = qkv.dims2()?;
    if width != 3 * hidden || tokens != planned.plan.tokens {
        bail!("attention over {} tokens of {hidden} numbers got {:?}", planned.plan.tokens, qkv.dims());
    }
    let out = uninitialised((tokens, hidden), qkv.dtype(), qkv.device())?;
    let pointers = [pointer(&out)?, pointer(qkv)?, pointer(q_bias)?];
    for launch in super::attend(pointers, heads, &planned.plan, pointer(&planned.words)?) {
        run(&out, &launch)?;
    }
    Ok(out)
}

/// The texts' vectors `[texts, modes·width]` in f32, from the tokens' vectors `x` `[tokens, width]`. From the word
/// `skips` on, the plan has the number of tokens at the beginning of each text that are not pooled.
///
/// # Errors
/// The driver's error.
pub fn pool(x: &Tensor, planned: &Planned, skips: usize, modes: &[Mode]) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let texts = planned.plan.texts;
    let out = uninitialised((texts, modes.len() * width), DType::F32, x.device())?;
    let Some(element_type) = ElementType::of(x.dtype()) else { bail!("no kernel pools {:?}", x.dtype()) };
    let x = Matrix { address: pointer(x)?, element_type, rows: rows as u32, width: width as u32 };
    let words = pointer(&planned.words)?;
    let lists = [planned.plan.starts(), skips].map(|first| words + (first * size_of::<u32>()) as Pointer);
    run(&out, &super::pool(pointer(&out)?, x, lists, texts as u32, modes))?;
    Ok(out)
}

/// A step of a network whose keys and values lie in blocks: arrays of words on the device ([`Words`](super::Words)), and
/// the memory for partial results of attention.
pub struct PagedStep {
    /// All arrays, one after the other.
    words: Tensor,
    /// The index of the list of the rows' slots.
    slots: usize,
    /// The index of the tables of blocks.
    tables: usize,
    /// In f32.
    partials: Tensor,
}

impl PagedStep {
    /// Copies `words` to a device, and allocates memory for this many partial results.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(
        words: Vec<u32>,
        slots: usize,
        tables: usize,
        partials: usize,
        device: &Device,
    ) -> Result<Self> {
        let count = words.len();
        let words = Tensor::from_vec(words, count, device)?;
        // A tensor has at least one number.
        let partials = uninitialised((1, partials.max(1)), DType::F32, device)?;
        Ok(Self { words, slots, tables, partials })
    }

    fn address(&self, word: usize) -> Result<Pointer> {
        Ok(pointer(&self.words)? + (word * size_of::<u32>()) as Pointer)
    }
}

/// What is done to heads before attention.
pub struct HeadTensors<'a> {
    /// The biases of queries, keys and values, side by side, in f32.
    pub bias: Option<&'a Tensor>,
    /// The norms of queries and keys, each for one head or for all heads side by side, and what is added to the mean
    /// square.
    pub norms: Option<(&'a [Tensor; 2], f32)>,
    /// The index of the rows' angles in the words of the step, and the number of pairs of a head that are rotated.
    pub angles: Option<(usize, usize)>,
    /// The index of the rows' factors of queries in the words of the step.
    pub growth: Option<usize>,
}

/// The queries `[rows, heads·width]` in f32 of `qkv` `[rows, (heads + 2·kv_heads)·width]`. Keys and values are written to
/// `kv`.
///
/// # Errors
/// The driver's error.
pub fn rotate(
    qkv: &Tensor,
    kv: &[Tensor; 2],
    step: &PagedStep,
    heads: PagedHeads,
    tensors: &HeadTensors<'_>,
) -> Result<Tensor> {
    let Some(matrix) = rows(qkv, u32::MAX)? else { bail!("no kernel rotates {:?}", qkv.shape()) };
    let queries =
        uninitialised((qkv.dim(0)?, (heads.count * heads.width) as usize), DType::F32, qkv.device())?;
    let of_word = |word: Option<usize>| word.map_or(Ok(0), |word| step.address(word));
    let norms_all = tensors.norms.is_some_and(|([norm, _], _)| norm.elem_count() > heads.width as usize);
    let steps = HeadSteps {
        bias: optional(tensors.bias)?,
        norms: match tensors.norms {
            Some(([of_queries, of_keys], _)) => [pointer(of_queries)?, pointer(of_keys)?],
            None => [0; 2],
        },
        norms_all,
        eps: tensors.norms.map_or(0.0, |(_, eps)| eps),
        angles: of_word(tensors.angles.map(|(word, _)| word))?,
        pairs: tensors.angles.map_or(0, |(_, pairs)| pairs as u32),
        growth: of_word(tensors.growth)?,
    };
    let slots = step.address(step.slots)?;
    run(qkv, &super::rotate(pointer(&queries)?, paged(kv)?, matrix, slots, heads, steps))?;
    Ok(queries)
}

/// Attention of the queries `[rows, heads·width]` over keys and values in blocks. The result has the same shape, in `dtype`.
///
/// # Errors
/// The driver's error.
pub fn attend_blocks(
    queries: &Tensor,
    kv: &[Tensor; 2],
    step: &PagedStep,
    tiles: &PagedTiles,
    heads: PagedHeads,
    scoring: Scoring,
    dtype: DType,
) -> Result<Tensor> {
    let Some(out_type) = ElementType::of(dtype) else { bail!("no kernel makes {dtype:?}") };
    let out = uninitialised(queries.dims2()?, dtype, queries.device())?;
    let launches = super::attend_blocks(
        (pointer(&out)?, out_type),
        [pointer(&step.partials)?, pointer(queries)?],
        paged(kv)?,
        heads,
        scoring,
        tiles,
        [step.address(0)?, step.address(step.tables)?],
    );
    launches.iter().try_for_each(|launch| run(&out, launch))?;
    Ok(out)
}

/// factor·the embeddings `[tokens, width]` in f32 of the tokens whose ids are the step's first words.
///
/// # Errors
/// The driver's error.
pub fn embed_rows(table: &Tensor, step: &PagedStep, tokens: usize, factor: f32) -> Result<Tensor> {
    let Some(matrix) = rows(table, u32::MAX)? else { bail!("no kernel reads {:?}", table.shape()) };
    let x = uninitialised((tokens, table.dim(1)?), DType::F32, table.device())?;
    run(&x, &super::embed_rows(pointer(&x)?, matrix, step.address(0)?, factor, tokens as u32))?;
    Ok(x)
}

/// What is added to x: a result, its bias and the norm of their sum, in f32 but the result.
pub struct Added<'a> {
    /// `[rows, width]`.
    pub result: &'a Tensor,
    /// `[width]`.
    pub bias: Option<&'a Tensor>,
    /// `[width]`.
    pub norm: Option<&'a Tensor>,
    /// The factor of the result.
    pub factor: f32,
}

/// x ← x + factor·RMSNorm(result + bias) in `x`'s memory, which is f32.
///
/// # Errors
/// The driver's error.
pub fn add(x: &Tensor, added: &Added<'_>, eps: f32) -> Result<()> {
    run(x, &super::add_rms_norm(pointer(x)?, Some(addition(added)?), None, eps, shape(x)?))
}

/// As [`add`] if something is added. Returns RMSNorm(x) in `dtype`, or x if there is no norm.
///
/// # Errors
/// The driver's error.
pub fn add_rms_norm(
    x: &Tensor,
    added: Option<&Added<'_>>,
    norm: Option<&Tensor>,
    dtype: DType,
    eps: f32,
) -> Result<Tensor> {
    let y = uninitialised(x.dims2()?, dtype, x.device())?;
    let normed = normed(&y, norm, 0)?;
    run(
        x,
        &super::add_rms_norm(pointer(x)?, added.map(addition).transpose()?, Some(normed), eps, shape(x)?),
    )?;
    Ok(y)
}

/// RMSNorm of some rows of x in `dtype`. `list` is the index of the list of these rows in the words of the step.
///
/// # Errors
/// The driver's error.
pub fn rms_norm_of(
    x: &Tensor,
    (list, count): (usize, usize),
    step: &PagedStep,
    norm: &Tensor,
    dtype: DType,
    eps: f32,
) -> Result<Tensor> {
    let y = uninitialised((count, x.dim(1)?), dtype, x.device())?;
    let normed = normed(&y, Some(norm), step.address(list)?)?;
    run(x, &super::add_rms_norm(pointer(x)?, None, Some(normed), eps, shape(&y)?))?;
    Ok(y)
}

/// activation(gates)·others of `x` `[rows, 2·inner]`, to which a bias in f32 is added before.
///
/// # Errors
/// The driver's error.
pub fn gate(x: &Tensor, bias: Option<&Tensor>, activation: Activation) -> Result<Tensor> {
    let Some(matrix) = rows(x, u32::MAX)? else { bail!("no kernel gates {:?}", x.shape()) };
    let out = uninitialised((x.dim(0)?, x.dim(1)? / 2), x.dtype(), x.device())?;
    run(x, &super::gate(pointer(&out)?, matrix, optional(bias)?, activation))?;
    Ok(out)
}

/// The results of `draws`, from the logits `[_, vocabulary]` before they are divided and bounded by a cap. `masks` are
/// those of the draws that have one: a bit for each token in bytes, the lowest bit first; missing bits are 0.
///
/// # Errors
/// The driver's error.
pub fn choose(
    logits: &Tensor,
    finish: (f32, Option<f32>),
    planned: Draws,
    draws: &[(usize, Draw)],
    masks: &[&[u8]],
    step: &PagedStep,
) -> Result<Vec<Drawn>> {
    let Some(element_type) = ElementType::of(logits.dtype()) else {
        bail!("no kernel reads {:?}", logits.dtype())
    };
    let [rows, width] = shape(logits)?;
    let device = logits.device();
    let results = uninitialised((1, planned.words_of_results()), DType::U32, device)?;
    let scratch = uninitialised((planned.count, width as usize), DType::F32, device)?;
    let masks = match masks.is_empty() {
        true => None,
        false => Some(Tensor::new(mask_words(masks, width), device)?),
    };
    let pointers = [pointer(&results)?, pointer(&scratch)?, step.address(0)?, optional(masks.as_ref())?];
    let matrix = Matrix { address: pointer(logits)?, element_type, rows, width };
    run(logits, &super::choose(pointers, matrix, finish, planned))?;
    let written: Vec<u32> = results.flatten_all()?.to_vec1()?;
    Ok(planned.results(&written, draws))
}

/// The masks of a vocabulary of `width` tokens in whole words.
fn mask_words(masks: &[&[u8]], width: u32) -> Vec<u32> {
    let word = |mask: &[u8], at: usize| {
        u32::from_le_bytes(std::array::from_fn(|byte| mask.get(4 * at + byte).copied().unwrap_or_default()))
    };
    let words = width.div_ceil(u32::BITS) as usize;
    masks.iter().flat_map(|mask| (0..words).map(|at| word(mask, at))).collect()
}

fn addition(added: &Added<'_>) -> Result<Addition> {
    let Some(element_type) = ElementType::of(added.result.dtype()) else {
        bail!("no kernel adds {:?}", added.result.dtype())
    };
    let [bias, norm] = [optional(added.bias)?, optional(added.norm)?];
    Ok(Addition { result: pointer(added.result)?, element_type, bias, norm, factor: added.factor })
}

fn normed(y: &Tensor, norm: Option<&Tensor>, rows: Pointer) -> Result<Normed> {
    let Some(element_type) = ElementType::of(y.dtype()) else { bail!("no kernel makes {:?}", y.dtype()) };
    Ok(Normed { y: pointer(y)?, element_type, norm: optional(norm)?, rows })
}

fn shape(x: &Tensor) -> Result<[u32; 2]> {
    let (rows, width) = x.dims2()?;
    Ok([rows as u32, width as u32])
}

fn paged([keys, values]: &[Tensor; 2]) -> Result<PagedKv> {
    Ok(PagedKv { keys: pointer(keys)?, values: pointer(values)? })
}

/// The address of a tensor that there may be.
fn optional(tensor: Option<&Tensor>) -> Result<Pointer> {
    tensor.map_or(Ok(0), pointer)
}

/// `x` as a matrix for kernels. None if its type has no kernel, or if the length of its rows is above `max_width` or
/// not a multiple of four.
fn rows(x: &Tensor, max_width: u32) -> Result<Option<Matrix>> {
    let (rows, width) = x.dims2()?;
    let (rows, width) = (rows as u32, width as u32);
    let Some(element_type) = ElementType::of(x.dtype()).filter(|_| width % 4 == 0 && width <= max_width)
    else {
        return Ok(None);
    };
    Ok(Some(Matrix { address: pointer(x)?, element_type, rows, width }))
}

fn norm((params, eps): Constants<'_>) -> Result<Norm> {
    Ok(Norm { params: pointer(params)?, eps })
}

/// The address of a tensor's first number.
fn pointer(tensor: &Tensor) -> Result<Pointer> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!("a GPU's kernel got a tensor of {:?}", tensor.device())
    };
    let Some((first, _)) = layout.contiguous_offsets() else {
        bail!("a GPU's kernel needs contiguous numbers")
    };
    let stream = storage.device().cuda_stream();
    // This program orders streams itself (`configure` in `device/cuda.rs`), so the returned guard is not needed.
    let (address, size) = match &storage.slice {
        CudaStorageSlice::F32(numbers) => (numbers.device_ptr(&stream).0, size_of::<f32>()),
        CudaStorageSlice::F16(numbers) => (numbers.device_ptr(&stream).0, size_of::<u16>()),
        CudaStorageSlice::BF16(numbers) => (numbers.device_ptr(&stream).0, size_of::<u16>()),
        CudaStorageSlice::U32(numbers) => (numbers.device_ptr(&stream).0, size_of::<u32>()),
        _ => bail!("no kernel takes {:?}", tensor.dtype()),
    };
    Ok(address + (first * size) as Pointer)
}

#[expect(unsafe_code, reason = "no time is spent on zeros that are overwritten")]
fn uninitialised(shape: (usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
    // SAFETY: every kernel here writes every number of its result that is read.
    unsafe { Tensor::empty(shape, dtype, device) }
}

/// Runs a launch on the device of `tensor`, after all work submitted before.
#[expect(unsafe_code, reason = "a kernel takes what it is given for pointers")]
fn run(tensor: &Tensor, launch: &Launch) -> Result<()> {
    let device: &CudaDevice = tensor.device().as_cuda_device()?;
    let (file, ptx) = match launch.source {
        Source::Activation => ("activation", include_str!(concat!(env!("OUT_DIR"), "/activation.ptx"))),
        Source::AddNorm => ("add_norm", include_str!(concat!(env!("OUT_DIR"), "/add_norm.ptx"))),
        Source::Attention => ("attention", include_str!(concat!(env!("OUT_DIR"), "/attention.ptx"))),
        Source::Choice => ("choice", include_str!(concat!(env!("OUT_DIR"), "/choice.ptx"))),
        Source::PagedAttention => {
            ("paged_attention", include_str!(concat!(env!("OUT_DIR"), "/paged_attention.ptx")))
        }
        Source::Pooling => ("pooling", include_str!(concat!(env!("OUT_DIR"), "/pooling.ptx"))),
        Source::RmsNorm => ("rms_norm", include_str!(concat!(env!("OUT_DIR"), "/rms_norm.ptx"))),
        Source::Rotation => ("rotation", include_str!(concat!(env!("OUT_DIR"), "/rotation.ptx"))),
    };
    let function = device.get_or_load_custom_func(&launch.kernel, file, ptx)?;
    let mut call = function.builder();
    for argument in &launch.arguments {
        match argument {
            Argument::Pointer(address) => call.arg(address),
            Argument::U32(count) => call.arg(count),
            Argument::F32(factor) => call.arg(factor),
        };
    }
    let config = LaunchConfig {
        grid_dim: launch.grid.into(),
        block_dim: (launch.threads, 1, 1),
        shared_mem_bytes: launch.shared_bytes,
    };
    // SAFETY: tests run the same launches on an emulated device. The pointers are of tensors that exist until the
    // kernel has run, since memory is freed on the same stream.
    unsafe { call.launch(config) }.w()?;
    Ok(())
}
