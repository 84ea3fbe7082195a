//! Computes the vectors of whole texts' tokens in one pass of a decoder, without logits. The texts of a batch follow
//! each other without padding. Decides which texts are computed together, so that the memory of a batch is bounded.
//! Owns the weights, and memory for the keys and values of one layer, which each layer overwrites.
//!
//! On a CPU, a token's results do not depend on the other texts of a batch, to the last bit.

use std::io;
use std::ops::Range;

use candle_core::Device;

use super::config::DecoderConfig;
use super::host::{AttendRows, Buffers, Layers, Qkv, Rows, on_one_of_rayons_threads, put};
use super::{DecoderWeights, DeviceDecoder, KvSizes};
use crate::model::load::ModelFiles;
use crate::model::nets::number_formats;
use crate::model::ops::causal::{Scoring, Span, attend, attend_both_ways};
use crate::model::ops::kv::{BLOCK, KvBlocks, KvNumbers, KvShape};
use crate::model::ops::{Bf16Products, NumberFormat, RowFormat, bf16_products, in_parallel, may_use_int16};
use crate::model::{Dtype, LoadError, LoadSpec};

/// A group of texts is full when it has this many tokens. A thread computes one group at a time.
const GROUP_TOKENS: usize = 2_048;
/// A batch is divided among threads only if each gets at least this many tokens. A batch that is not divided is one
/// group, and the threads share each of its matrix products.
const MIN_SHARE_TOKENS: usize = 256;
/// The number of blocks of keys and values for which attention is computed at once. A single text may need more. A
/// block of 8 heads with 128 numbers in f32 has 256 KiB.
const BLOCKS_TOGETHER: usize = 128;
/// The number of blocks of keys and values on a device, enough for 8,192 tokens. A single text may need more.
const DEVICE_BLOCKS: usize = 256;

/// The number formats of matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductFormats {
    matrices: NumberFormat,
    rows: RowFormat,
}

impl ProductFormats {
    /// The reference formats, with which others are compared. Matrices that the files have in bf16 stay in bf16.
    pub const F32: Self = Self { matrices: NumberFormat::F32, rows: RowFormat::F32 };

    /// The formats for the pool's `dtype` on a CPU. Rows are converted to bf16, or to whole numbers of 16 bits, if that
    /// is faster on this CPU. On another device all numbers have the pool's type.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for a `dtype` in which the device does not compute.
    pub fn of(spec: &LoadSpec) -> Result<Self, LoadError> {
        if spec.device == "cpu" && spec.dtype == Dtype::F16 {
            let reason = "dtype is \"f16\"; on a CPU a decoder computes texts in f32, bf16 or int8";
            return Err(spec.unsupported(reason));
        }
        let matrices = number_formats(spec)?.matrices;
        let products = bf16_products(spec.cpu_features);
        let rows = match matrices {
            NumberFormat::F32 => RowFormat::F32,
            NumberFormat::Bf16 if products.use_unit() => RowFormat::Bf16,
            NumberFormat::Bf16 => RowFormat::F32,
            // The matrices are quantised. The fastest format of rows comes first.
            _ if products == Bf16Products::Amx => RowFormat::Bf16,
            // With 8 bits, the vectors of small models differed from those in f32 by up to 0.23 of their length.
            _ if may_use_int16() => RowFormat::Int16,
            _ => RowFormat::F32,
        };
        Ok(Self { matrices, rows })
    }
}

/// A decoder without its output projection.
pub enum OnePassDecoder {
    /// On the host.
    Host(HostTexts),
    /// On any device, by candle's operations.
    Device(DeviceTexts),
}

/// A decoder on the host.
pub struct HostTexts {
    layers: Layers,
    /// One for each thread.
    workspaces: Vec<Workspace>,
}

/// A group of texts for one thread.
struct Part<'a> {
    texts: &'a [&'a [u32]],
    workspace: &'a mut Workspace,
    /// The results, one for each text.
    vectors: &'a mut [Vec<f32>],
}

/// A decoder on a device.
pub struct DeviceTexts {
    decoder: DeviceDecoder,
    hidden: usize,
    /// The indices of all blocks, 0 to their count.
    blocks: Vec<u32>,
}

/// The memory of a thread.
struct Workspace {
    buffers: Buffers,
    /// The keys and values of one layer.
    kv: KvBlocks,
    /// The indices of all blocks, 0 to their count.
    blocks: Vec<u32>,
}

impl OnePassDecoder {
    /// Reads the weights, for texts of up to `max_tokens` tokens.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape, [`LoadError::Device`] if there is no
    /// memory for the weights, or for keys and values, [`LoadError::Unsupported`] if the rotations depend on each text's
    /// length.
    pub fn load(
        spec: &LoadSpec,
        device: &Device,
        files: &ModelFiles,
        config: &DecoderConfig,
        formats: ProductFormats,
        max_tokens: usize,
    ) -> Result<Self, LoadError> {
        let mut scaled = config.rotations.iter().filter_map(|rotation| rotation.long.as_ref());
        if let Some(long) = scaled.find(|long| max_tokens > long.original) {
            let original = long.original;
            let reason = format!(
                "rope scaling \"longrope\" uses other frequencies for texts of more than {original} tokens, which is \
                 not supported for texts that are computed in one pass; set max_seq_length in \
                 sentence_bert_config.json to {original}"
            );
            return Err(spec.unsupported(reason));
        }
        if !device.is_cpu() {
            return DeviceTexts::load(spec, device, files, config, max_tokens).map(Self::Device);
        }
        let mut weights = DecoderWeights::from_safetensors(files, config, formats.matrices)?;
        weights.multiply_rows_as(formats.rows);
        // The shapes of tensors confirm the sizes from which the memory for keys and values follows.
        let layers = Layers::load(&weights, config, max_tokens)?;
        let count = max_tokens.div_ceil(BLOCK).max(BLOCKS_TOGETHER);
        let workspace = |_| Workspace::new(config, count);
        let workspaces = (0..rayon::current_num_threads()).map(workspace).collect::<io::Result<_>>();
        let workspaces = workspaces.map_err(|error| spec.failed(format!("keys and values: {error}")))?;
        Ok(Self::Host(HostTexts { layers, workspaces }))
    }

    /// The width of a token's vector.
    pub fn width(&self) -> usize {
        match self {
            Self::Host(host) => host.layers.config().hidden,
            Self::Device(device) => device.hidden,
        }
    }

    /// For each text, the vectors of some of its tokens, one after the other. `wanted` returns the range of a text's
    /// tokens whose vectors are wanted. Ids must be in the vocabulary, and texts must not be longer than
    /// [`OnePassDecoder::load`] was told.
    ///
    /// # Errors
    /// The device has no memory for the batch, or fails. On the host there are no errors.
    pub fn forward(
        &mut self,
        texts: &[&[u32]],
        wanted: impl Fn(&[u32]) -> Range<usize> + Sync,
    ) -> candle_core::Result<Vec<Vec<f32>>> {
        match self {
            Self::Host(host) => Ok(host.forward(texts, wanted)),
            Self::Device(device) => device.forward(texts, wanted),
        }
    }
}

impl HostTexts {
    fn forward(&mut self, texts: &[&[u32]], wanted: impl Fn(&[u32]) -> Range<usize> + Sync) -> Vec<Vec<f32>> {
        let tokens: usize = texts.iter().map(|text| text.len()).sum();
        let shares = (tokens / MIN_SHARE_TOKENS).clamp(1, self.workspaces.len());
        // Each has the fewest texts that have this many tokens together; the last one may have fewer.
        let least = tokens.div_ceil(shares).min(GROUP_TOKENS);
        let groups = groups(texts, |text| text.len(), |before, _| before < least);
        let mut vectors = vec![Vec::new(); texts.len()];
        let mut results = &mut *vectors;
        for groups in groups.chunks(self.workspaces.len()) {
            let mut parts = Vec::with_capacity(groups.len());
            for (group, workspace) in groups.iter().zip(&mut self.workspaces) {
                let (own, others) = results.split_at_mut(group.len());
                results = others;
                parts.push(Part { texts: group, workspace, vectors: own });
            }
            let layers = &self.layers;
            let compute = |Part { texts, workspace, vectors }: Part<'_>| {
                workspace.compute(layers, texts, &wanted, vectors);
            };
            // The threads share the products of a single part; of several parts each thread computes one.
            match <[_; 1]>::try_from(parts) {
                Ok([part]) => on_one_of_rayons_threads(|| compute(part)),
                Err(parts) => in_parallel(parts.into_iter(), compute),
            }
        }
        vectors
    }
}

impl DeviceTexts {
    fn load(
        spec: &LoadSpec,
        device: &Device,
        files: &ModelFiles,
        config: &DecoderConfig,
        max_tokens: usize,
    ) -> Result<Self, LoadError> {
        let weights = DecoderWeights::from_safetensors(files, config, NumberFormat::F32)?;
        let blocks = max_tokens.div_ceil(BLOCK).max(DEVICE_BLOCKS);
        let kv_sizes = KvSizes { context: max_tokens, blocks, numbers: KvNumbers::F32 };
        Ok(Self {
            decoder: DeviceDecoder::load_for_texts(spec, device, &weights, config, kv_sizes)?,
            hidden: config.hidden,
            blocks: (0..blocks as u32).collect(),
        })
    }

    fn forward(
        &mut self,
        texts: &[&[u32]],
        wanted: impl Fn(&[u32]) -> Range<usize>,
    ) -> candle_core::Result<Vec<Vec<f32>>> {
        let mut vectors = Vec::with_capacity(texts.len());
        let mut rows = Vec::new();
        let blocks = self.blocks.len();
        for texts in groups(texts, |text| text.len().div_ceil(BLOCK), |_, total| total <= blocks) {
            let lengths: Vec<usize> = texts.iter().map(|text| text.len()).collect();
            let spans = spans(&lengths, &self.blocks);
            let Wanted { rows: wanted, counts } = Wanted::of(texts, &wanted);
            self.decoder.forward(&texts.concat(), &spans, &wanted, &mut rows)?;
            let mut rows = &*rows;
            vectors.extend(counts.iter().map(|count| {
                let (own, others) = rows.split_at(count * self.hidden);
                rows = others;
                own.to_vec()
            }));
        }
        Ok(vectors)
    }
}

/// The rows of texts whose results are wanted.
struct Wanted {
    rows: Vec<usize>,
    /// The number of them for each text.
    counts: Vec<usize>,
}

impl Wanted {
    fn of(texts: &[&[u32]], wanted: impl Fn(&[u32]) -> Range<usize>) -> Self {
        let (mut rows, mut counts, mut first) = (Vec::new(), Vec::new(), 0);
        for text in texts {
            let wanted = wanted(text);
            counts.push(wanted.len());
            rows.extend(wanted.map(|row| first + row));
            first += text.len();
        }
        Self { rows, counts }
    }
}

/// The spans of whole texts of these lengths. Each gets the next blocks.
fn spans<'a>(lengths: &[usize], mut free: &'a [u32]) -> Vec<Span<'a>> {
    let span = |length: &usize| {
        let (blocks, others) = free.split_at(length.div_ceil(BLOCK));
        free = others;
        Span { blocks, first: 0, count: *length }
    };
    lengths.iter().map(span).collect()
}

/// Cuts items into groups, each of at least one. `joins` decides whether a further one joins a group, given the sum of the
/// group's sizes before and after it.
fn groups<T>(mut items: &[T], size: impl Fn(&T) -> usize, joins: impl Fn(usize, usize) -> bool) -> Vec<&[T]> {
    let mut groups = Vec::new();
    while !items.is_empty() {
        let mut total = 0;
        let is_in = |item: &&T| {
            let before = total;
            total += size(item);
            joins(before, total)
        };
        let (group, others) = items.split_at(items.iter().take_while(is_in).count().max(1));
        groups.push(group);
        items = others;
    }
    groups
}

impl Workspace {
    /// With `count` blocks for keys and values, whose memory is not used yet.
    fn new(config: &DecoderConfig, count: usize) -> io::Result<Self> {
        let shape = KvShape { layers: 1, ..config.kv_shape(KvNumbers::F32) };
        let kv = KvBlocks::new(shape, count)?;
        Ok(Self { buffers: Buffers::default(), kv, blocks: (0..count as u32).collect() })
    }

    /// Writes the wanted vectors of each text to `vectors`.
    fn compute(
        &mut self,
        layers: &Layers,
        texts: &[&[u32]],
        wanted: impl Fn(&[u32]) -> Range<usize>,
        vectors: &mut [Vec<f32>],
    ) {
        let Self { buffers, kv, blocks } = self;
        let positions: Vec<usize> = texts.iter().flat_map(|text| 0..text.len()).collect();
        let Wanted { rows, counts } = Wanted::of(texts, wanted);
        let lengths: Vec<usize> = texts.iter().map(|text| text.len()).collect();
        let is_causal = layers.config().is_causal;
        let mut attention = TextsAttention { kv: &mut *kv, blocks, lengths: &lengths, is_causal };
        let step = Rows { ids: &texts.concat(), positions: &positions, wanted: &rows };
        let all = layers.vectors(step, &mut attention, buffers);
        let mut all = &*all;
        for (vectors, count) in vectors.iter_mut().zip(counts) {
            let (own, others) = all.split_at(count * layers.config().hidden);
            *vectors = own.to_vec();
            all = others;
        }
        // The memory that only long texts need is returned to the system.
        let longest = lengths.iter().copied().max().unwrap_or_default();
        (BLOCKS_TOGETHER..longest.div_ceil(BLOCK)).for_each(|block| kv.release(block));
        if longest > 2 * GROUP_TOKENS {
            *buffers = Buffers::default();
        }
    }
}

/// The attention of whole texts, each to itself.
struct TextsAttention<'a> {
    kv: &'a mut KvBlocks,
    /// The indices of all blocks.
    blocks: &'a [u32],
    /// The numbers of tokens of the texts.
    lengths: &'a [usize],
    is_causal: bool,
}

impl AttendRows for TextsAttention<'_> {
    fn attend(
        &mut self,
        _layer: usize,
        scoring: Scoring,
        Qkv { mut queries, mut keys, mut values }: Qkv<'_>,
        mut out: &mut [f32],
    ) {
        // The memory has one layer, 0, which every layer of the network overwrites.
        let tokens: usize = self.lengths.iter().sum();
        let (query_width, key_width) = (queries.len() / tokens.max(1), keys.len() / tokens.max(1));
        for lengths in
            groups(self.lengths, |length| length.div_ceil(BLOCK), |_, total| total <= BLOCKS_TOGETHER)
        {
            let spans = spans(lengths, self.blocks);
            let tokens: usize = lengths.iter().sum();
            let first_queries = queries.split_off(..tokens * query_width).unwrap_or_default();
            let first_keys = keys.split_off(..tokens * key_width).unwrap_or_default();
            let first_values = values.split_off(..tokens * key_width).unwrap_or_default();
            let first_out = out.split_off_mut(..tokens * query_width).unwrap_or_default();
            put(self.kv, 0, &spans, first_keys, first_values);
            let attend = if self.is_causal { attend } else { attend_both_ways };
            attend(self.kv, 0, scoring, &spans, first_queries, first_out);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a fixture that cannot be read fails its test")]
mod tests {
    use super::*;

    fn fixture(name: &str) -> (LoadSpec, ModelFiles, DecoderConfig) {
        let spec = LoadSpec::new(format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR")));
        let files = ModelFiles::locate(&spec.source).unwrap();
        let config = DecoderConfig::read(&files, &spec.source).unwrap();
        (spec, files, config)
    }

    #[test]
    fn a_text_gives_the_same_bits_alone_and_among_others_by_any_number_of_threads() {
        for name in ["tiny-qwen3", "tiny-qwen2-both-ways", "tiny-gemma3-both-ways", "generate-gemma2"] {
            let (_, _, config) = fixture(name);
            let lengths = [1, 2, 100, 33, 5, 64, 31, 120, 32, 7].into_iter().cycle().take(170);
            let text = |(index, length): (usize, usize)| {
                let ids = 0..length;
                ids.map(|at| ((index * 31 + at + 1) * 7_919 % config.vocabulary) as u32).collect()
            };
            let texts: Vec<Vec<u32>> = lengths.enumerate().map(text).collect();
            let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
            assert!(texts.iter().map(|text| text.len()).sum::<usize>() > 3 * GROUP_TOKENS);
            let with_threads = |threads, compute: &(dyn Fn(&mut OnePassDecoder) -> Vec<Vec<f32>> + Sync)| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    let (spec, files, config) = fixture(name);
                    let decoder =
                        OnePassDecoder::load(&spec, &Device::Cpu, &files, &config, ProductFormats::F32, 128);
                    compute(&mut decoder.unwrap())
                })
            };
            let all = |text: &[u32]| 0..text.len();
            let alone = with_threads(1, &|decoder| {
                texts.iter().flat_map(|text| decoder.forward(&[*text], all).unwrap()).collect()
            });
            for threads in [1, 4] {
                let together = with_threads(threads, &|decoder| decoder.forward(&texts, all).unwrap());
                assert!(together == alone, "{name}, {threads} threads");
            }
            let last = with_threads(2, &|decoder| {
                decoder.forward(&texts, |text| text.len() - 1..text.len()).unwrap()
            });
            for (last, all) in last.iter().zip(&alone) {
                assert_eq!(last[..], all[all.len() - config.hidden..], "{name}");
            }
        }
    }

    #[test]
    fn candles_operations_give_the_same_vectors() {
        for name in ["tiny-qwen3", "tiny-qwen2-both-ways", "tiny-gemma3-both-ways"] {
            let (spec, files, config) = fixture(name);
            let lengths = [1, 60, 5, 100, 1, 33].into_iter().cycle().take(200);
            let text = |length| (0..length).map(|at| ((at + 1) * 7_919 % config.vocabulary) as u32).collect();
            let texts: Vec<Vec<u32>> = lengths.map(text).collect();
            let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
            let all = |text: &[u32]| 0..text.len();
            let mut host =
                OnePassDecoder::load(&spec, &Device::Cpu, &files, &config, ProductFormats::F32, 128).unwrap();
            let expected = host.forward(&texts, all).unwrap();
            let found = DeviceTexts::load(&spec, &Device::Cpu, &files, &config, 128).unwrap();
            let found = OnePassDecoder::Device(found).forward(&texts, all).unwrap();
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.len(), expected.len());
                let pairs = found.iter().zip(expected);
                let error = pairs
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0_f32, |most, error| if error > most || error.is_nan() { error } else { most });
                assert!(error < 1e-4, "{name}: {error}");
            }
        }
    }

    #[test]
    fn another_number_format_is_refused_by_name() {
        let in_f16 = LoadSpec { dtype: Dtype::F16, ..LoadSpec::new("m") };
        assert!(ProductFormats::of(&in_f16).unwrap_err().to_string().contains("dtype is \"f16\""));
        let on_gpu = LoadSpec { device: "cuda:0".into(), dtype: Dtype::Int8, ..LoadSpec::new("m") };
        assert!(ProductFormats::of(&on_gpu).unwrap_err().to_string().contains("dtype is \"int8\""));
        assert_eq!(ProductFormats::of(&LoadSpec::new("m")).unwrap(), ProductFormats::F32);
    }

    #[test]
    fn rotations_that_depend_on_a_texts_length_are_refused() {
        let (spec, files, config) = fixture("generate-phi3");
        let load = |max_tokens| {
            OnePassDecoder::load(&spec, &Device::Cpu, &files, &config, ProductFormats::F32, max_tokens)
        };
        assert!(load(128).is_ok());
        assert!(load(129).err().unwrap().to_string().contains("longrope"));
    }
}
