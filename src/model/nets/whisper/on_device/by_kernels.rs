//! A step of Whisper's decoder on a GPU by the kernels of `ops::gpu`. The keys and values of texts and of windows are read
//! where they lie, in blocks. One copy to the device describes the step. The numbers between products are in the format of
//! the weights; queries, the keys and values of texts, and the sum of the sublayers' results are f32.

use candle_core::{DType, Result, Tensor};

use super::{DeviceWhisper, EPS, Layer, Linear, Norm, Span, WINDOW_BLOCKS, blocks_of, scale};
use crate::model::nets::cached_attention::token_slot;
use crate::model::nets::whisper::config::POSITIONS;
use crate::model::ops::causal::Scoring;
use crate::model::ops::gpu::cuda::{
    Added, HeadTensors, PagedStep, RowNorm, add, add_and_norm, attend_blocks, embed_rows, norm_of, rotate,
    write_kv,
};
use crate::model::ops::gpu::{ElementType, Keys, PagedHeads, PagedTiles, Words};
use crate::model::ops::kv::BLOCK;
use crate::model::ops::{Activation, bias_activation};

/// The parts of a step that all layers share.
struct Step {
    shared: PagedStep,
    rows: usize,
    /// The index of the list of the rows' positions in the words.
    positions: usize,
    text: Attention,
    windows: Attention,
    /// The index of the list of the rows whose logits are wanted, and its length.
    wanted: (usize, usize),
}

/// The attention over the texts or over the windows.
struct Attention {
    heads: PagedHeads,
    tiles: PagedTiles,
}

impl DeviceWhisper {
    /// Writes the keys and values of encoded windows `[windows·POSITIONS, width]` to the blocks of their slots.
    pub(super) fn write_windows(&self, heads: PagedHeads, slots: &[usize], encoded: &Tensor) -> Result<()> {
        let first_of = |slot: &usize| slot * WINDOW_BLOCKS * BLOCK;
        let places = slots.iter().flat_map(|slot| first_of(slot)..first_of(slot) + POSITIONS);
        let words = places.map(|place| place as u32).collect();
        let step = PagedStep::new(words, 0, 0, 0, &self.device)?;
        for Layer { cross_kv, window_kv, .. } in &self.layers {
            write_kv(&product(encoded, cross_kv)?, window_kv, &step, heads, &cross_kv.bias)?;
        }
        Ok(())
    }

    /// Computes a step, and returns the logits after the rows `wanted`.
    pub(super) fn forward_by_kernels(
        &mut self,
        heads: PagedHeads,
        ids: &[u32],
        spans: &[Span],
        wanted: &[usize],
    ) -> Result<Vec<f32>> {
        let step = self.kernel_step(heads, ids, spans, wanted)?;
        let x = embed_rows(&self.token_embeddings, (0, step.rows), &step.shared, 1.0)?;
        let positions = embed_rows(&self.positions, (step.positions, step.rows), &step.shared, 1.0)?;
        let positions = Added { result: &positions, bias: None, norm: None, factor: 1.0 };
        let first_norm = self.layers.first().map(|layer| row_norm(&layer.norm));
        let mut y = add_and_norm(&x, Some(&positions), first_norm, self.dtype, EPS)?;
        let mut kept = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let Layer { qkv, text_kv, cross_q, window_kv, up, .. } = layer;
            let all = product(&y, qkv)?;
            let queries = rotate(&all, Some(text_kv), &step.shared, step.text.heads, &bias_of(qkv))?;
            let attended = self.attend(&queries, text_kv, &step, &step.text)?;
            y = self.add_product(&x, &attended, &layer.out, &layer.cross_norm)?;

            let queries = product(&y, cross_q)?;
            let queries = rotate(&queries, None, &step.shared, step.windows.heads, &bias_of(cross_q))?;
            let attended = self.attend(&queries, window_kv, &step, &step.windows)?;
            y = self.add_product(&x, &attended, &layer.cross_out, &layer.inner_norm)?;
            if self.keeps_queries(index, spans) {
                kept.push((index, queries));
            }

            let inner = bias_activation(product(&y, up)?, &up.bias, Activation::Gelu)?;
            match self.layers.get(index + 1) {
                Some(next) => y = self.add_product(&x, &inner, &layer.down, &next.norm)?,
                None => add(&x, &added(&product(&inner, &layer.down)?, &layer.down), EPS)?,
            }
        }
        let mut logits = None;
        if !wanted.is_empty() {
            let last = norm_of(&x, step.wanted, &step.shared, row_norm(&self.norm), self.dtype, EPS)?;
            logits = Some(last.matmul(&self.token_embeddings.t()?)?.to_dtype(DType::F32)?);
        }
        let rows = |span: &Span| {
            let slot = span.slot;
            (span.first..span.first + span.count).map(move |position| (slot, position))
        };
        self.copy_results(logits, &kept, &spans.iter().flat_map(rows).collect::<Vec<_>>())
    }

    /// x ← x + `result`·W + bias. Returns norm(x).
    fn add_product(&self, x: &Tensor, result: &Tensor, linear: &Linear, norm: &Norm) -> Result<Tensor> {
        let result = product(result, linear)?;
        add_and_norm(x, Some(&added(&result, linear)), Some(row_norm(norm)), self.dtype, EPS)
    }

    fn attend(
        &self,
        queries: &Tensor,
        kv: &[Tensor; 2],
        step: &Step,
        Attention { heads, tiles }: &Attention,
    ) -> Result<Tensor> {
        let scoring = Scoring { scale: scale(heads.width as usize) as f32, window: None, soft_cap: None };
        attend_blocks(queries, kv, &step.shared, tiles, *heads, scoring, self.dtype)
    }

    /// Copies the description of a step to the device: first the tokens' ids.
    fn kernel_step(&self, heads: PagedHeads, ids: &[u32], spans: &[Span], wanted: &[usize]) -> Result<Step> {
        let mut words = Words::default();
        words.append(ids.iter().copied());
        let texts = self.texts(spans);
        let rows =
            || texts.iter().flat_map(|text| (text.first..text.first + text.count).map(move |at| (text, at)));
        let positions = words.append(rows().map(|(_, position)| position as u32));
        let slots = words.append(rows().map(|(text, position)| token_slot(text, position)));
        let tables = words.all.len();
        let mut table = |blocks: &[u32]| (words.append(blocks.iter().copied()) - tables) as u32;
        let text_tables: Vec<u32> = texts.iter().map(|text| table(text.blocks)).collect();
        let window_tables = spans.iter().map(|span| table(&blocks_of(span.slot, WINDOW_BLOCKS)));
        let window_tables: Vec<u32> = window_tables.collect();
        let mut attention = |heads, tables: &[u32], keys| Attention {
            heads,
            tiles: PagedTiles::new(&mut words, &texts, tables, heads, keys),
        };
        let text_heads = PagedHeads { kv_type: ElementType::F32, ..heads };
        let text = attention(text_heads, &text_tables, Keys::Causal { window: None });
        let windows = attention(heads, &window_tables, Keys::Across { count: POSITIONS });
        let wanted = (words.append(wanted.iter().map(|row| *row as u32)), wanted.len());
        let partials = [&text, &windows].map(|it| it.tiles.partial_numbers(it.heads));
        let partials = partials.into_iter().max().unwrap_or_default();
        let shared = PagedStep::new(words.all, slots, tables, partials, &self.device)?;
        Ok(Step { shared, rows: ids.len(), positions, text, windows, wanted })
    }
}

/// x·W without the bias.
fn product(x: &Tensor, linear: &Linear) -> Result<Tensor> {
    x.matmul(&linear.matrix.t()?)
}

/// What is added to x after the product with the last layer of a sublayer.
fn added<'a>(result: &'a Tensor, linear: &'a Linear) -> Added<'a> {
    Added { result, bias: Some(&linear.bias), norm: None, factor: 1.0 }
}

fn bias_of(linear: &Linear) -> HeadTensors<'_> {
    HeadTensors { bias: Some(&linear.bias), ..HeadTensors::default() }
}

fn row_norm(norm: &Norm) -> RowNorm<'_> {
    RowNorm { weight: &norm.weight, shift: Some(&norm.shift) }
}
