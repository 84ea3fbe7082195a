//! Runs launches on the GPU, on candle's tensors and its stream. Decides which operations have a kernel for their sizes
//! and types; for the others the caller uses candle's own operations.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice, WrapErr};
use candle_core::{DType, Device, Result, Storage, Tensor, bail};

use super::super::Activation;
use super::super::pooling::Mode;
use super::{Argument, ElementType, Heads, Launch, MAX_WIDTH, Matrix, Norm, Plan, Pointer, Source};

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
    // SAFETY: every kernel here writes every number of its result.
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
        Source::Pooling => ("pooling", include_str!(concat!(env!("OUT_DIR"), "/pooling.ptx"))),
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
