//! The device memory that a worker needs, from the model's files alone: for the launcher, which loads no model.

use candle_core::{DType, Device};

use super::candle_dtype;
use super::config::NetworkConfig;
use super::kernels::MOST_SCORES;
use super::kernels::gpu::{Heads, Number};
use super::weights::Weights;
use crate::model::source::ModelFiles;
use crate::model::{Footprint, LoadSpec};

/// The device memory of a worker that computes `tokens` tokens at once. None if the model's files are not on
/// this host yet or are invalid; the worker will report that.
pub fn footprint(spec: &LoadSpec, tokens: usize) -> Option<Footprint> {
    let files = ModelFiles::at_hand(&spec.source)?;
    let config = NetworkConfig::read(&files, &spec.source).ok()?;
    let paths = files.weights().ok()?;
    let dtype = candle_dtype(spec.dtype);
    let weights = Weights::read(&paths, config.family.base(), &Device::Cpu, dtype).ok()?;
    Some(Footprint {
        weights: (weights.numbers() * dtype.size_in_bytes()) as u64,
        working: working(&config, tokens, dtype) as u64,
    })
}

/// The largest number of bytes in use at once while a layer is computed on a device.
fn working(config: &NetworkConfig, tokens: usize, dtype: DType) -> usize {
    // A text longer than the bound of a batch is computed alone.
    let tokens = tokens.max(config.positions);
    let heads =
        |number| Heads { number, count: config.heads as u32, size: (config.hidden / config.heads) as u32 };
    if !Number::of(dtype).is_some_and(|number| heads(number).fit()) {
        return numbers(config, tokens).saturating_mul(size_of::<f32>());
    }
    // Attention: the rows, queries, keys and values, attention's result, and that multiplied by O.
    // Feed-forward: the rows, the inner ones, and the result.
    let row = (6 * config.hidden).max(2 * config.hidden + config.inner);
    tokens.saturating_mul(row).saturating_mul(dtype.size_in_bytes())
}

/// The largest number of values in use at once if no kernel fits these heads: candle's operations then compute
/// a layer, each into a new tensor. For attention: the rows, queries, keys and values before and after
/// reordering, and a group's scores with their mask and in four steps of the softmax. For feed-forward: the
/// rows, and the inner ones before and after the activation. Counted as f32, in which candle computes where
/// precision matters.
fn numbers(config: &NetworkConfig, tokens: usize) -> usize {
    let longest = config.positions;
    let scores = tokens.saturating_mul(longest).min(MOST_SCORES).max(longest.saturating_mul(longest));
    let attention =
        tokens.saturating_mul(10 * config.hidden).saturating_add(scores.saturating_mul(5 * config.heads));
    attention.max(tokens.saturating_mul(3 * config.hidden + 3 * config.inner))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a fixture that cannot be read fails its test")]
mod tests {
    use super::*;
    use crate::config::Dtype;

    fn of(source: &str, dtype: Dtype, tokens: usize) -> Option<Footprint> {
        footprint(&LoadSpec { device: "GPU-a".to_owned(), dtype, ..LoadSpec::new(source) }, tokens)
    }

    #[test]
    fn half_precision_halves_the_weights_and_a_larger_batch_takes_more_room() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-bert-cls");
        let full = of(folder, Dtype::F32, 1_000).unwrap();
        let half = of(folder, Dtype::F16, 2_000).unwrap();
        let file = std::fs::metadata(format!("{folder}/model.safetensors")).unwrap().len();
        assert!(full.weights <= file && full.weights > file * 3 / 4, "{full:?} of a file of {file} bytes");
        assert_eq!(half.weights, full.weights / 2);
        assert!(half.working > full.working, "{half:?}");
        assert_eq!(of(folder, Dtype::F32, 1), of(folder, Dtype::F32, 2), "one long text, in both cases");
        assert!(of(folder, Dtype::F32, usize::MAX).is_some());
    }

    #[test]
    fn heads_that_have_a_kernel_keep_no_scores_and_compute_in_what_weights_are_kept_as() {
        let mini_lm = concat!(env!("CARGO_MANIFEST_DIR"), "/models/all-MiniLM-L6-v2");
        let working = |dtype| of(mini_lm, dtype, 16_384).unwrap().working;
        assert_eq!(working(Dtype::F32), 16_384 * 6 * 384 * 4);
        assert_eq!(working(Dtype::F16), working(Dtype::F32) / 2);
    }

    #[test]
    fn of_a_model_that_is_not_here_nothing_is_known() {
        assert_eq!(of("/no/such/folder", Dtype::F32, 1), None);
        assert_eq!(of("nobody/no-such-model-of-sconce", Dtype::F32, 1), None);
    }
}
