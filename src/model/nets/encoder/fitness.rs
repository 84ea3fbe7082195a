//! Compares a network on its device with the same network on a CPU, over known texts. Owns no state.

use super::TextNetwork;
use super::head::Head;
use crate::model::load::tokenizer::{TextTokenizer, Tokens};
use crate::model::nets::fitness::{self, Compared};
use crate::model::{Forward, ForwardError, LoadError, LoadSpec};

/// Tokens of the known texts, without special tokens: the shortest text, a sentence, a paragraph.
const LENGTHS: [usize; 3] = [1, 20, 150];
/// Further texts. They are what people write.
const SENTENCES: [&str; 12] = [
    "The train to Edinburgh leaves at 7:45 from platform 3.",
    "How do I reset the password of my account?",
    "Rain is expected in the north; the south stays dry until Thursday evening.",
    "fn main() { println!(\"{}\", 6 * 7); }",
    "Order #48213: two cotton shirts, size M, EUR 39.90 each, delivered on 3 May.",
    "The cell divides after its chromosomes have been copied.",
    "Cheap flights",
    "I waited for forty minutes, nobody answered the phone, and then the line was cut off.",
    "Der Vertrag verlängert sich um ein Jahr, wenn ihn niemand kündigt.",
    "La bibliothèque ferme à dix-huit heures le samedi.",
    "El paciente tomó la medicina dos veces al día durante una semana.",
    "東京の天気は明日から晴れます。",
];

/// Compares the vectors that `model` computes for the known texts with those of `reference`, the same network on a CPU
/// in f32. Each computes all texts in one batch. If the settings name no number format and there is a head, further
/// texts are pairs (each sentence with the next one, and with itself), and the scores that the head computes are
/// compared, too.
///
/// # Errors
/// [`LoadError::Unfit`] with the first text that differs, or if the scores differ, [`LoadError::Device`] if the device
/// fails.
pub(super) fn compare(
    model: &mut TextNetwork,
    mut reference: TextNetwork,
    head: Option<&Head>,
    tokenizer: &TextTokenizer,
    spec: &LoadSpec,
) -> Result<(), LoadError> {
    let mut texts = known_texts(tokenizer);
    texts.extend(SENTENCES.iter().filter_map(|sentence| tokenizer.text(sentence).ok()));
    if spec.is_dtype_auto && head.is_some() {
        texts.extend(known_pairs(tokenizer));
    }
    let failed = |error: ForwardError| fitness::failed(spec, &error);
    let found = vectors(model, &texts).map_err(failed)?;
    let expected = vectors(&mut reference, &texts).map_err(failed)?;
    compare_vectors(&texts, found.into_iter().zip(expected), head, spec)
}

/// Compares the vectors of texts, each as the network computes it and as a CPU computes it in f32. If the settings name
/// no number format, also compares the scores that `head` computes from them.
fn compare_vectors(
    texts: &[Tokens],
    vectors: impl Iterator<Item = (Option<Vec<f32>>, Option<Vec<f32>>)>,
    head: Option<&Head>,
    spec: &LoadSpec,
) -> Result<(), LoadError> {
    let compared = texts.iter().zip(vectors).map(|(text, (found, expected))| Compared {
        what: format!("text of {} tokens", text.ids.len()),
        found,
        expected,
    });
    let compared: Vec<_> = compared.collect();
    fitness::compare_all(spec, &compared)?;
    let Some(head) = head.filter(|_| spec.is_dtype_auto) else { return Ok(()) };
    let finite = compared.into_iter().filter_map(|input| Some((input.found?, input.expected?)));
    let (found, expected): (Vec<_>, Vec<_>) = finite.unzip();
    fitness::compare_scores(spec, &head.apply(&found), &head.apply(&expected))
}

/// Pairs of sentences that belong together, and of sentences that do not.
fn known_pairs(tokenizer: &TextTokenizer) -> Vec<Tokens> {
    let pieces: Vec<_> = SENTENCES.iter().filter_map(|sentence| tokenizer.pieces(sentence).ok()).collect();
    let pairs = pieces.iter().zip(pieces.iter().cycle().skip(1));
    pairs
        .flat_map(|(first, next)| [(first, next), (first, first)])
        .map(|(first, second)| tokenizer.pair(first, second))
        .collect()
}

/// Texts of several lengths, with tokens from the whole vocabulary.
fn known_texts(tokenizer: &TextTokenizer) -> Vec<Tokens> {
    let (room, vocabulary) = (tokenizer.room(), u64::from(tokenizer.vocabulary()));
    let text = |(index, length): (usize, &usize)| {
        let tokens = (*length).min(room) as u64;
        // 7,919 is a prime, so that the tokens of a text differ if the vocabulary is larger than the text, and is no
        // multiple of the prime.
        let ids = (0..tokens).map(|n| ((index as u64 + n + 1) * 7_919 % vocabulary) as u32).collect();
        tokenizer.ids(ids, "known").ok()
    };
    LENGTHS.iter().enumerate().filter_map(text).collect()
}

/// Each text's vector; none if not all its numbers are finite.
fn vectors(model: &mut TextNetwork, texts: &[Tokens]) -> Result<Vec<Option<Vec<f32>>>, ForwardError> {
    let texts: Vec<&Tokens> = texts.iter().collect();
    Ok(model.forward(&texts)?.into_iter().map(Result::ok).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a fixture that cannot be read fails its test")]
mod tests {
    use std::path::{Path, PathBuf};

    use candle_core::Device;

    use super::*;
    use crate::config::Dtype;
    use crate::model::nets::fitness::{distance, tolerance};
    use crate::model::tasks::embed::{EmbeddingProcessor, load};
    use crate::model::tasks::labels;
    use crate::model::{LoadSpec, Unfit};

    const NAME: &str = "tiny-bert-cls";
    const TENSOR: &str = "bert.encoder.layer.0.output.dense.weight";
    const FIXTURES: [&str; 15] = [
        "tiny-bert-cls",
        "tiny-bert-max",
        "tiny-roberta",
        "tiny-xlm-roberta",
        "tiny-distilbert",
        "tiny-mpnet",
        "tiny-nomic",
        "tiny-modernbert",
        "tiny-electra",
        "tiny-t5",
        "tiny-deberta",
        "tiny-deberta-v2",
        "tiny-qwen3",
        "tiny-qwen2-both-ways",
        "tiny-gemma3-both-ways",
    ];

    /// Decoders do not compute in f16 on a CPU.
    const DECODERS: [&str; 3] = ["tiny-qwen3", "tiny-qwen2-both-ways", "tiny-gemma3-both-ways"];

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
    }

    fn spec(folder: &Path, dtype: Dtype) -> LoadSpec {
        LoadSpec { dtype, ..LoadSpec::new(folder.to_str().unwrap()) }
    }

    fn loaded(folder: &Path, dtype: Dtype) -> (EmbeddingProcessor, TextNetwork) {
        load(&spec(folder, dtype), &Device::Cpu).unwrap()
    }

    /// The largest error of the known texts in these number formats.
    fn largest_error(folder: &Path, dtype: Dtype) -> f64 {
        let (processor, mut reference) = loaded(folder, Dtype::F32);
        let texts = known_texts(&processor.tokenizer);
        assert_eq!(texts.len(), LENGTHS.len());
        let expected = vectors(&mut reference, &texts).unwrap();
        let found = vectors(&mut loaded(folder, dtype).1, &texts).unwrap();
        let pairs = found.iter().zip(&expected);
        pairs.map(|(a, b)| distance(a.as_ref().unwrap(), b.as_ref().unwrap())).fold(0.0, f64::max)
    }

    /// A copy of the model, with the numbers of one tensor changed by `change`.
    fn corrupted(change: impl Fn(usize, f32) -> f32) -> tempfile::TempDir {
        let copy = tempfile::tempdir().unwrap();
        let mut cp = std::process::Command::new("cp");
        assert!(cp.arg("-r").arg(fixture(NAME).join(".")).arg(copy.path()).status().unwrap().success());
        let path = copy.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let (start, end) = metadata.info(TENSOR).unwrap().data_offsets;
        let numbers = &mut bytes[8 + header + start..8 + header + end];
        for (index, number) in numbers.chunks_exact_mut(4).enumerate() {
            let changed = change(index, f32::from_le_bytes(number.try_into().unwrap()));
            number.copy_from_slice(&changed.to_le_bytes());
        }
        std::fs::write(path, bytes).unwrap();
        copy
    }

    #[test]
    fn every_model_stays_within_half_the_tolerance_of_its_precision() {
        for name in FIXTURES {
            for dtype in [Dtype::F16, Dtype::Bf16, Dtype::Int8] {
                if dtype == Dtype::F16 && DECODERS.contains(&name) {
                    continue;
                }
                let error = largest_error(&fixture(name), dtype);
                assert!(
                    error > 0.0 && error <= tolerance(dtype) / 2.0,
                    "{name} {}: {error:.2e}",
                    dtype.name()
                );
            }
        }
    }

    #[test]
    fn a_device_that_computes_with_corrupted_weights_is_refused() {
        let (processor, _) = loaded(&fixture(NAME), Dtype::F32);
        // One bit of one exponent is wrong.
        let one_bit = |index, number| if index == 5 { number * 65_536.0 } else { number };
        let none = |_, _| 0.0;
        let nan = |index, number| if index == 5 { f32::NAN } else { number };
        let changes: [&dyn Fn(usize, f32) -> f32; 3] = [&one_bit, &none, &nan];
        for (index, change) in changes.into_iter().enumerate() {
            let folder = corrupted(change);
            let (_, mut model) = loaded(folder.path(), Dtype::F32);
            let (_, reference) = loaded(&fixture(NAME), Dtype::F32);
            let error =
                compare(&mut model, reference, None, &processor.tokenizer, &spec(folder.path(), Dtype::Bf16))
                    .unwrap_err();
            let LoadError::Unfit { why, reason, .. } = &error else { panic!("{index}: {error}") };
            assert_eq!(*why, Unfit::WrongResult);
            assert!(reason.contains("3 tokens") && reason.contains("bf16"), "{index}: {reason}");
        }
    }

    #[test]
    fn the_scores_of_rerankers_in_a_chosen_precision_are_compared() {
        for name in ["score-bert", "score-roberta", "score-xlm-roberta"] {
            let chosen = LoadSpec { is_dtype_auto: true, ..spec(&fixture(name), Dtype::Bf16) };
            let (processor, mut network) = labels::load(&chosen, &Device::Cpu).unwrap();
            let head = network.head.take().unwrap();
            let pairs = known_pairs(&processor.tokenizer);
            assert_eq!(pairs.len(), 2 * SENTENCES.len(), "{name}");
            let exact = vectors(&mut network, &pairs).unwrap();
            let check = |error: f32, head| {
                // An error of this share of the vector's length.
                let wrong = |(index, vector): (usize, &Option<Vec<f32>>)| {
                    let vector = vector.as_ref().unwrap();
                    let noise =
                        (0..vector.len()).map(|at| ((index * 31 + at * at) as f32).sin()).collect::<Vec<_>>();
                    let norm = |numbers: &[f32]| numbers.iter().map(|x| x * x).sum::<f32>().sqrt();
                    let scale = error * norm(vector) / norm(&noise);
                    Some(vector.iter().zip(&noise).map(|(x, noise)| x + scale * noise).collect())
                };
                let wrong: Vec<Option<Vec<f32>>> = exact.iter().enumerate().map(wrong).collect();
                compare_vectors(&pairs, wrong.into_iter().zip(exact.clone()), head, &chosen)
            };
            assert!(check(0.07, None).is_ok(), "{name}");
            let error = check(0.07, Some(&head)).unwrap_err().to_string();
            assert!(error.contains("the scores of known inputs in bf16"), "{name}: {error}");
            assert!(check(0.01, Some(&head)).is_ok(), "{name}");
        }
    }

    #[test]
    fn weights_that_are_not_finite_are_named_and_do_not_blame_the_device() {
        let folder = corrupted(|_, _| f32::NAN);
        let (processor, mut model) = loaded(folder.path(), Dtype::F32);
        let (_, reference) = loaded(folder.path(), Dtype::F32);
        let spec = spec(folder.path(), Dtype::Int8);
        let error = compare(&mut model, reference, None, &processor.tokenizer, &spec);
        let Err(LoadError::File { path, reason }) = error else { panic!("{error:?}") };
        assert!(path.ends_with("model.safetensors"), "{path:?}");
        assert!(reason.contains(TENSOR) && reason.contains("number 0 is NaN"), "{reason}");
    }
}
