//! A step of a decoder on a GPU by the kernels of `ops::gpu`. Keys and values are read where they lie, in blocks. One copy
//! to the device describes the step. The numbers between products are in the format of the weights; the sum of the
//! sublayers' results, to which each is added, is f32. Experts are computed by candle's operations, in f32 between
//! products.

use candle_core::{DType, Result, Tensor};

use super::super::Choice;
use super::super::config::DecoderConfig;
use super::super::host::RouterFaults;
use super::{DeviceDecoder, Layer};
use crate::model::nets::cached_attention::token_slot;
use crate::model::ops::causal::Span;
use crate::model::ops::gpu::cuda::{
    Added, HeadTensors, PagedStep, add, add_rms_norm, attend_blocks, choose, embed_rows, gate, rms_norm_of,
    rotate,
};
use crate::model::ops::gpu::{Draw, Draws, Keys, PagedHeads, PagedTiles, Words};
use crate::model::ops::kv::BLOCK;

/// The parts of a step that all layers share.
struct Step {
    shared: PagedStep,
    /// The index of the rows' angles in the words, and the number of pairs, for each of the configuration's rotations.
    angles: Vec<(usize, usize)>,
    /// The index of the rows' factors of queries.
    growth: Option<usize>,
    /// The tiles of attention for each of the decoder's windows.
    tiles: Vec<PagedTiles>,
    /// The index of the list of the rows whose results are wanted, and its length.
    wanted: (usize, usize),
    /// The tokens that are chosen.
    draws: Draws,
    heads: PagedHeads,
    rows: usize,
}

impl DeviceDecoder {
    /// As [`DeviceDecoder::logits_of`].
    pub(super) fn logits_by_kernels(
        &self,
        heads: PagedHeads,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        layers: &[Layer],
        faults: &mut RouterFaults,
    ) -> Result<Vec<f32>> {
        let step = self.kernel_step(heads, ids, spans, wanted, &[])?;
        let Some(last) = self.rows_by_kernels(&step, layers, faults)? else { return Ok(Vec::new()) };
        let Some(head) = &self.head else { return last.flatten_all()?.to_vec1() };
        let logits = last.matmul(&head.t()?)?.to_dtype(DType::F32)?;
        let mut logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
        self.config.finish_logits(&mut logits);
        Ok(logits)
    }

    /// As [`DeviceDecoder::forward_and_choose`].
    pub(super) fn choice_by_kernels(
        &self,
        heads: PagedHeads,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        draws: &[Draw],
        faults: &mut RouterFaults,
    ) -> Result<Choice> {
        let draws: Vec<(usize, Draw)> = draws.iter().cloned().enumerate().collect();
        let step = self.kernel_step(heads, ids, spans, wanted, &draws)?;
        let last = self.rows_by_kernels(&step, &self.layers, faults)?;
        let Some((last, head)) = last.zip(self.head.as_ref()) else {
            return Ok(Box::new(|_| Ok(Vec::new())));
        };
        let logits = last.matmul(&head.t()?)?;
        let finish = (self.config.logit_divisor, self.config.logit_cap);
        Ok(Box::new(move |masks| choose(&logits, finish, step.draws, &draws, masks, &step.shared)))
    }

    /// Computes a step with these layers. Returns the rows whose results are wanted, normalised; none if there are none.
    fn rows_by_kernels(
        &self,
        step: &Step,
        layers: &[Layer],
        faults: &mut RouterFaults,
    ) -> Result<Option<Tensor>> {
        let heads = step.heads;
        let DecoderConfig { eps, embedding_scale, residual_scale: factor, activation, .. } = self.config;
        let dtype = self.token_embeddings.dtype();
        let x = embed_rows(&self.token_embeddings, &step.shared, step.rows, embedding_scale)?;
        let first_norm = layers.first().and_then(|layer| layer.norms[0].as_ref());
        let mut y = add_rms_norm(&x, None, first_norm, dtype, eps)?;
        for (index, layer) in layers.iter().enumerate() {
            let result = self.attention_by_kernels(layer, &y, step, heads)?;
            let [before, after] = layer.inner_norms.each_ref().map(Option::as_ref);
            let added = Added {
                result: &result,
                bias: layer.out.bias.as_ref(),
                norm: layer.norms[1].as_ref(),
                factor,
            };
            let inner_dtype = if layer.router.is_some() { DType::F32 } else { dtype };
            y = add_rms_norm(&x, Some(&added), before, inner_dtype, eps)?;
            let (result, bias) = match (&layer.router, &*layer.networks) {
                (None, [network, ..]) => {
                    let both = y.matmul(&network.gate_up.matrix.t()?)?;
                    let inner = gate(&both, network.gate_up.bias.as_ref(), activation)?;
                    (inner.matmul(&network.down.matrix.t()?)?, network.down.bias.as_ref())
                }
                _ => (self.feed_forward(layer, index, &y, faults)?, None),
            };
            let added = Added { result: &result, bias, norm: after, factor };
            match layers.get(index + 1) {
                Some(next) => y = add_rms_norm(&x, Some(&added), next.norms[0].as_ref(), dtype, eps)?,
                None => add(&x, &added, eps)?,
            }
        }
        let (_, count) = step.wanted;
        if count == 0 {
            return Ok(None);
        }
        let last_dtype = if self.head.is_some() { dtype } else { DType::F32 };
        rms_norm_of(&x, step.wanted, &step.shared, &self.norm, last_dtype, eps).map(Some)
    }

    /// attention(x)·O without its bias.
    fn attention_by_kernels(
        &self,
        layer: &Layer,
        x: &Tensor,
        step: &Step,
        heads: PagedHeads,
    ) -> Result<Tensor> {
        let qkv = x.matmul(&layer.qkv.matrix.t()?)?;
        let tensors = HeadTensors {
            bias: layer.qkv.bias.as_ref(),
            norms: layer.head_norms.as_ref().map(|norms| (norms, self.config.eps)),
            angles: layer.config.rotation.map(|rotation| step.angles[rotation]),
            growth: step.growth,
        };
        let queries = rotate(&qkv, &layer.kv, &step.shared, heads, &tensors)?;
        let scoring = self.config.scoring(&layer.config);
        let window =
            self.windows.iter().position(|window| *window == layer.config.window).unwrap_or_default();
        let tiles = &step.tiles[window];
        let attended = attend_blocks(&queries, &layer.kv, &step.shared, tiles, heads, scoring, x.dtype())?;
        attended.matmul(&layer.out.matrix.t()?)
    }

    /// Copies the description of a step to the device: first the tokens' ids.
    fn kernel_step(
        &self,
        heads: PagedHeads,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        draws: &[(usize, Draw)],
    ) -> Result<Step> {
        let mut words = Words::default();
        words.append(ids.iter().copied());
        let rows =
            || spans.iter().flat_map(|span| (span.first..span.first + span.count).map(move |at| (span, at)));
        let slots = words.append(rows().map(|(span, position)| token_slot(span, position)));
        let mut angles = Vec::with_capacity(self.rotaries.len());
        for rotary in &self.rotaries {
            let angles_at = |(_, position): (&Span<'_>, usize)| {
                let rotations = rotary.rotations_at(position);
                rotations.iter().map(|(cos, _)| cos).chain(rotations.iter().map(|(_, sin)| sin))
            };
            angles.push((
                words.append(rows().flat_map(angles_at).map(|number| number.to_bits())),
                rotary.half(),
            ));
        }
        let growth = self
            .config
            .query_growth
            .map(|growth| words.append(rows().map(|(_, position)| growth.at(position).to_bits())));
        let tables = words.all.len();
        let mut table = |span: &Span<'_>| {
            let blocks = (span.first + span.count).div_ceil(BLOCK);
            (words.append(span.blocks[..blocks].iter().copied()) - tables) as u32
        };
        let tables_of_spans: Vec<u32> = spans.iter().map(&mut table).collect();
        let tiles_of = |window: &Option<usize>| {
            let keys = match self.config.is_causal {
                true => Keys::Causal { window: *window },
                false => Keys::BothWays { window: *window },
            };
            PagedTiles::new(&mut words, spans, &tables_of_spans, heads, keys)
        };
        let tiles: Vec<PagedTiles> = self.windows.iter().map(tiles_of).collect();
        let wanted = (words.append(wanted.iter().map(|row| *row as u32)), wanted.len());
        let draws = Draws::new(&mut words, draws);
        let partials = tiles.iter().map(|tiles| tiles.partial_numbers(heads)).max().unwrap_or_default();
        let shared = PagedStep::new(words.all, slots, tables, partials, &self.device)?;
        Ok(Step { shared, angles, growth, tiles, wanted, draws, heads, rows: ids.len() })
    }
}
