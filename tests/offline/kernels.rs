//! The GPU's kernels, as they are and launched as they are, on a device that is made of this CPU
//! (tests/fixtures/emulator): each against its formula in f64. What NVIDIA's compiler and cards make of them
//! is `make gpu-check`'s to show.

#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use half::{bf16, f16};
use libloading::Library;
use sconce::model::ops::Activation;
use sconce::model::ops::causal::{Scoring, Span};
use sconce::model::ops::gpu::{
    self, Addition, Argument, Drawn, Draws, ElementType, HeadSteps, Heads, Keys, Launch, Matrix, Norm,
    Normed, PagedHeads, PagedKv, PagedTiles, Plan, Pointer, Words,
};
use sconce::model::ops::kv::BLOCK;
use sconce::model::ops::pooling::{MAX_MODES, Mode, Pooling};
use sconce::model::random::Seed;
use sconce::model::sequences::sampler::{Sampler, Sampling, log_probabilities};

const ALL: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];

static DEVICE: LazyLock<Library> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{}.so", std::process::id()));
    let mut compiler = Command::new("c++");
    compiler.args([
        "-std=c++17",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-Wno-clobbered",
    ]);
    compiler.args(["-shared", "-fPIC", "-I"]).arg(root.join("src/model/ops/gpu"));
    compiler.arg("-o").arg(&library).arg(root.join("tests/fixtures/emulator/kernels.cpp"));
    assert!(compiler.status().unwrap().success(), "c++ cannot compile the kernels");
    let opened = open(&library);
    std::fs::remove_file(&library).unwrap();
    opened
});

#[expect(unsafe_code, reason = "opening a library runs its initialisers; it is our own")]
fn open(library: &Path) -> Library {
    // SAFETY: it has none but those of C++'s containers.
    unsafe { Library::new(library) }.unwrap()
}

type Entry = extern "C" fn(*const c_char, *const u32, u32, u32, *mut *mut c_void) -> c_int;

/// Runs one launch to its end. The emulator has one memory for all: one launch at a time.
#[expect(unsafe_code, reason = "a kernel takes what it is given for pointers, as on a device")]
fn run(launch: &Launch) {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _alone = ALONE.lock().unwrap();
    let name = CString::new(launch.kernel.clone()).unwrap();
    let mut values: Vec<u64> = launch
        .arguments
        .iter()
        .map(|argument| match argument {
            Argument::Pointer(at) => *at,
            Argument::U32(count) => u64::from(*count),
            Argument::F32(factor) => u64::from(factor.to_bits()),
        })
        .collect();
    let mut places: Vec<*mut c_void> =
        values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
    // SAFETY: the library's own signature; pointers lead to `Memory` that lives until after this call.
    let done = unsafe {
        let entry = DEVICE.get::<Entry>(b"launch").unwrap();
        entry(name.as_ptr(), launch.grid.as_ptr(), launch.threads, launch.shared_bytes, places.as_mut_ptr())
    };
    assert_eq!(done, 0, "{launch:?}");
}

/// A stretch of the device's memory, with something behind it that no kernel may touch.
struct Memory {
    words: Vec<u128>,
    bytes: usize,
}

const GUARD: u8 = 0xa5;

impl Memory {
    fn of_bytes(bytes: &[u8]) -> Self {
        let mut all = bytes.to_vec();
        all.resize(bytes.len().next_multiple_of(16) + 64, GUARD);
        let words = all.as_chunks::<16>().0.iter().map(|word| u128::from_ne_bytes(*word)).collect();
        Self { words, bytes: bytes.len() }
    }

    fn of(element_type: ElementType, values: &[f32]) -> Self {
        Self::of_bytes(&values.iter().flat_map(|x| stored(element_type, *x)).collect::<Vec<u8>>())
    }

    fn of_words(words: &[u32]) -> Self {
        Self::of_bytes(&words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>())
    }

    fn at(&self) -> Pointer {
        self.words.as_ptr().addr() as Pointer
    }

    fn read(&self, element_type: ElementType) -> Vec<f32> {
        let all: Vec<u8> = self.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert!(all[self.bytes..].iter().all(|byte| *byte == GUARD), "written behind its end");
        let pairs = all[..self.bytes].as_chunks::<2>().0.iter();
        match element_type {
            ElementType::F32 => {
                all[..self.bytes].as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
            }
            ElementType::F16 => pairs.map(|bytes| f16::from_ne_bytes(*bytes).to_f32()).collect(),
            ElementType::Bf16 => pairs.map(|bytes| bf16::from_ne_bytes(*bytes).to_f32()).collect(),
        }
    }
}

fn stored(element_type: ElementType, x: f32) -> Vec<u8> {
    match element_type {
        ElementType::F32 => x.to_ne_bytes().to_vec(),
        ElementType::F16 => f16::from_f32(x).to_ne_bytes().to_vec(),
        ElementType::Bf16 => bf16::from_f32(x).to_ne_bytes().to_vec(),
    }
}

/// The nearest value that a number of this kind has.
fn rounded(element_type: ElementType, values: &[f32]) -> Vec<f32> {
    Memory::of(element_type, values).read(element_type)
}

/// How far a result may be off that is rounded once, of size 1.
fn unit(element_type: ElementType) -> f64 {
    match element_type {
        ElementType::F32 => 2e-6,
        ElementType::F16 => 1e-3,
        ElementType::Bf16 => 8e-3,
    }
}

fn noise(count: usize, range: f32, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_769).wrapping_add(12_345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * range
    };
    (0..count).map(|_| next()).collect()
}

fn assert_near(ours: &[f32], right: &[f64], within: f64, what: &str) {
    assert_eq!(ours.len(), right.len(), "{what}");
    for (at, (x, y)) in ours.iter().zip(right).enumerate() {
        let off = (f64::from(*x) - y).abs();
        assert!(off <= within * y.abs().max(1.0), "{what}: number {at} is {x}, and should be {y}");
    }
}

fn matrix(memory: &Memory, element_type: ElementType, rows: usize, width: usize) -> Matrix {
    Matrix { address: memory.at(), element_type, rows: rows as u32, width: width as u32 }
}

/// LayerNorm of rows that are sums already, by the formula.
fn normed(sums: &[f64], params: &[f32], eps: f64) -> Vec<f64> {
    let width = params.len() / 3;
    let norm = |row: &[f64]| -> Vec<f64> {
        let mean = row.iter().sum::<f64>() / width as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let each = row.iter().enumerate();
        each.map(|(at, x)| {
            let (weight, shift) = (f64::from(params[width + at]), f64::from(params[2 * width + at]));
            (x - mean) / (variance + eps).sqrt() * weight + shift
        })
        .collect()
    };
    sums.chunks_exact(width).flat_map(norm).collect()
}

#[test]
fn rows_are_added_and_normed() {
    for element_type in ALL {
        for (rows, width) in [(1, 4), (7, 32), (9, 384), (5, 768), (3, gpu::MAX_WIDTH as usize)] {
            let x = rounded(element_type, &noise(rows * width, 3.0, 1));
            let residual = rounded(element_type, &noise(rows * width, 2.0, 2));
            let params = noise(3 * width, 1.0, 3);
            let sum = |at: usize| f64::from(x[at]) + f64::from(residual[at]) + f64::from(params[at % width]);
            let right = normed(&(0..rows * width).map(sum).collect::<Vec<_>>(), &params, 1e-5);
            let (on_device, other) = (Memory::of(element_type, &x), Memory::of(element_type, &residual));
            let constants = Memory::of(ElementType::F32, &params);
            let norm = Norm { params: constants.at(), eps: 1e-5 };
            run(&gpu::add_norm(matrix(&on_device, element_type, rows, width), other.at(), norm));
            assert_near(
                &on_device.read(element_type),
                &right,
                unit(element_type),
                &format!("{element_type:?} {rows}×{width}"),
            );
        }
    }
}

#[test]
fn words_and_places_are_looked_up_and_normed() {
    let (ids, places, width) = ([3u32, 0, 9, 9, 1], [0u32, 1, 2, 0, 1], 36);
    for element_type in ALL {
        let words = rounded(element_type, &noise(10 * width, 1.0, 4));
        let positions = rounded(element_type, &noise(3 * width, 1.0, 5));
        let params = noise(3 * width, 1.0, 6);
        let sums: Vec<f64> = (0..ids.len() * width)
            .map(|at| {
                let (row, column) = (at / width, at % width);
                let (word, place) = (ids[row] as usize, places[row] as usize);
                let sum =
                    f64::from(words[word * width + column]) + f64::from(positions[place * width + column]);
                sum + f64::from(params[column])
            })
            .collect();
        let x = Memory::of(element_type, &vec![f32::NAN; ids.len() * width]);
        let tables = [Memory::of(element_type, &words), Memory::of(element_type, &positions)];
        let plan = Memory::of_words(&Plan::new(&ids, &places, &[3, 2], 16).words);
        let constants = Memory::of(ElementType::F32, &params);
        let norm = Norm { params: constants.at(), eps: 1e-12 };
        let tables = tables.each_ref().map(Memory::at);
        run(&gpu::embed(matrix(&x, element_type, ids.len(), width), tables, plan.at(), norm));
        assert_near(
            &x.read(element_type),
            &normed(&sums, &params, 1e-12),
            unit(element_type),
            &format!("{element_type:?}"),
        );
    }
}

#[test]
fn activations_are_those_of_the_formula_and_lose_no_nan() {
    type Formula = fn(f64) -> f64;
    let formulas: [(Activation, Formula); 3] = [
        (Activation::Gelu, |x| 0.5 * x * (1.0 + candle_core::cpu::erf::erf_f64(x / 2f64.sqrt()))),
        (Activation::GeluTanh, |x| 0.5 * x * (1.0 + (0.797_884_560_8 * (x + 0.044_715 * x * x * x)).tanh())),
        (Activation::Relu, |x| x.max(0.0)),
    ];
    for (activation, formula) in formulas {
        for element_type in ALL {
            let (rows, width) = (70, 52);
            let x = rounded(element_type, &noise(rows * width, 5.0, 7));
            let bias = rounded(element_type, &noise(width, 0.5, 8));
            let sum = |at: usize| formula(f64::from(x[at]) + f64::from(bias[at % width]));
            let right: Vec<f64> = (0..rows * width).map(sum).collect();
            let (on_device, by) = (Memory::of(element_type, &x), Memory::of(element_type, &bias));
            run(&gpu::activate(matrix(&on_device, element_type, rows, width), by.at(), activation));
            assert_near(
                &on_device.read(element_type),
                &right,
                unit(element_type),
                &format!("{activation:?} {element_type:?}"),
            );
            let none = Memory::of(element_type, &[f32::NAN; 4]);
            let nothing = Memory::of(element_type, &[0.0; 4]);
            run(&gpu::activate(matrix(&none, element_type, 1, 4), nothing.at(), activation));
            assert!(none.read(element_type).iter().all(|x| x.is_nan()), "{activation:?} {element_type:?}");
        }
    }
}

#[test]
fn pooling_on_the_device_is_pooling_on_the_host() {
    let (lengths, width) = ([5usize, 1, 40], 260);
    let skips = [2usize, 0, 17];
    let modes = vec![
        Mode::Mean,
        Mode::Cls,
        Mode::LastToken,
        Mode::Max,
        Mode::MeanSqrtLen,
        Mode::WeightedMean,
        Mode::Cls,
        Mode::Mean,
    ];
    assert_eq!(modes.len(), MAX_MODES);
    let pooling = Pooling { modes: modes.clone(), normalize: false };
    for element_type in ALL {
        let rows: usize = lengths.iter().sum();
        let mut x = rounded(element_type, &noise(rows * width, 2.0, 9));
        x[3 * width + 7] = f32::NAN;
        let mut rest = &*x;
        let mut right = Vec::new();
        for (length, skip) in lengths.into_iter().zip(skips) {
            let (text, others) = rest.split_at(length * width);
            right.extend(pooling.pool(text, width, skip));
            rest = others;
        }
        let ids: Vec<u32> = (0..rows as u32).collect();
        let plan = Plan::new(&ids, &ids, &lengths, 16);
        let (on_device, planned) = (Memory::of(element_type, &x), Memory::of_words(&plan.words));
        let skips = Memory::of_words(&skips.map(|skip| skip as u32));
        let out = Memory::of(ElementType::F32, &vec![0.0; lengths.len() * modes.len() * width]);
        let starts = planned.at() + 4 * plan.starts() as Pointer;
        run(&gpu::pool(
            out.at(),
            matrix(&on_device, element_type, rows, width),
            [starts, skips.at()],
            plan.texts as u32,
            &modes,
        ));
        for (at, (ours, right)) in out.read(ElementType::F32).iter().zip(&right).enumerate() {
            let same = (ours - right).abs() <= 1e-5 || ours.is_nan() && right.is_nan();
            assert!(same, "{element_type:?}: number {at} is {ours}, and should be {right}");
        }
    }
}

/// softmax((Q + bias)·Kᵀ/√d)·V text by text.
fn attended(qkv: &[f32], q_bias: &[f32], heads: usize, lengths: &[usize]) -> Vec<f64> {
    let hidden = q_bias.len();
    let d = hidden / heads;
    let mut out = Vec::new();
    let mut start = 0;
    for &length in lengths {
        let at = |row: usize, part: usize, i: usize| {
            f64::from(qkv[(start + row) * 3 * hidden + part * hidden + i])
        };
        for query in 0..length {
            for head in 0..heads {
                let columns = head * d..(head + 1) * d;
                let score = |key: usize| -> f64 {
                    let product = |i: usize| (at(query, 0, i) + f64::from(q_bias[i])) * at(key, 1, i);
                    columns.clone().map(product).sum::<f64>() / (d as f64).sqrt()
                };
                let scores: Vec<f64> = (0..length).map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let value = |i: usize| {
                    weights.iter().enumerate().map(|(key, w)| w / sum * at(key, 2, i)).sum::<f64>()
                };
                out.extend(columns.clone().map(value));
            }
        }
        start += length;
    }
    out
}

/// Attention of random products on the device.
fn attend(heads: Heads, qkv: &[f32], q_bias: &[f32], lengths: &[usize]) -> Vec<f32> {
    let tokens: usize = lengths.iter().sum();
    let ids = vec![0; tokens];
    let plan = Plan::new(&ids, &ids, lengths, heads.queries_per_warp());
    let (on_device, bias) = (Memory::of(heads.element_type, qkv), Memory::of(ElementType::F32, q_bias));
    let planned = Memory::of_words(&plan.words);
    let out = Memory::of(heads.element_type, &vec![f32::NAN; tokens * q_bias.len()]);
    gpu::attend([out.at(), on_device.at(), bias.at()], heads, &plan, planned.at()).iter().for_each(run);
    out.read(heads.element_type)
}

#[test]
fn attention_is_its_formula_for_any_length() {
    let lengths = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 129];
    let tokens: usize = lengths.iter().sum();
    for element_type in ALL {
        for (count, size) in [(2, 32), (1, 64)] {
            let heads = Heads { element_type, count, size };
            let hidden = (count * size) as usize;
            let qkv = rounded(element_type, &noise(tokens * 3 * hidden, 1.5, 10));
            let q_bias = noise(hidden, 0.5, 11);
            let right = attended(&qkv, &q_bias, count as usize, &lengths);
            let ours = attend(heads, &qkv, &q_bias, &lengths);
            assert_near(&ours, &right, 2.0 * unit(element_type), &format!("{heads:?}"));
        }
    }
}

#[test]
fn a_text_gets_the_same_alone_and_among_others() {
    for element_type in ALL {
        let heads = Heads { element_type, count: 1, size: 32 };
        let (lengths, width) = ([70, 19, 130], 3 * 32);
        let qkv = rounded(element_type, &noise(219 * width, 1.0, 12));
        let q_bias = noise(32, 0.5, 13);
        let together = attend(heads, &qkv, &q_bias, &lengths);
        let alone = attend(heads, &qkv[70 * width..89 * width], &q_bias, &[19]);
        assert_eq!(together[70 * 32..89 * 32], alone, "{element_type:?}");
    }
}

#[test]
fn large_scores_do_not_overflow_and_what_is_no_number_stays_in_its_text() {
    for element_type in ALL {
        let heads = Heads { element_type, count: 1, size: 64 };
        let mut qkv = rounded(element_type, &noise(60 * 192, 30.0, 14));
        let right = attended(&qkv, &[0.0; 64], 1, &[40, 20]);
        // Weights near a tie are of scores that are rounded: only what clearly wins is compared.
        let ours = attend(heads, &qkv, &[0.0; 64], &[40, 20]);
        assert!(ours.iter().all(|x| x.is_finite()), "{element_type:?}");
        if element_type == ElementType::F32 {
            assert_near(&ours, &right, 1e-2, "f32");
        }
        qkv[41 * 192 + 64] = f32::NAN;
        let ours = attend(heads, &qkv, &[0.0; 64], &[40, 20]);
        assert!(ours[..40 * 64].iter().all(|x| x.is_finite()), "{element_type:?}: another text");
        assert!(ours[40 * 64..].iter().all(|x| x.is_nan()), "{element_type:?}: its own");
    }
}

#[test]
fn gates_are_those_of_the_formula() {
    type Formula = fn(f64) -> f64;
    let formulas: [(Activation, Formula); 5] = [
        (Activation::Silu, |x| x / (1.0 + (-x).exp())),
        (Activation::Gelu, |x| 0.5 * x * (1.0 + candle_core::cpu::erf::erf_f64(x / 2f64.sqrt()))),
        (Activation::GeluTanh, |x| 0.5 * x * (1.0 + (0.797_884_560_8 * (x + 0.044_715 * x * x * x)).tanh())),
        (Activation::Relu, |x| x.max(0.0)),
        (Activation::Identity, |x| x),
    ];
    let (rows, inner) = (7, 36);
    for (activation, formula) in formulas {
        for element_type in ALL {
            for has_bias in [false, true] {
                let x = rounded(element_type, &noise(rows * 2 * inner, 4.0, 15));
                let bias = noise(2 * inner, if has_bias { 0.5 } else { 0.0 }, 16);
                let number = |row: usize, column: usize| {
                    f64::from(x[row * 2 * inner + column]) + f64::from(bias[column])
                };
                let right: Vec<f64> = (0..rows * inner)
                    .map(|at| (at / inner, at % inner))
                    .map(|(row, column)| formula(number(row, column)) * number(row, inner + column))
                    .collect();
                let (on_device, by) = (Memory::of(element_type, &x), Memory::of(ElementType::F32, &bias));
                let out = Memory::of(element_type, &vec![f32::NAN; rows * inner]);
                let x = matrix(&on_device, element_type, rows, 2 * inner);
                run(&gpu::gate(out.at(), x, if has_bias { by.at() } else { 0 }, activation));
                let what = format!("{activation:?} {element_type:?}, bias: {has_bias}");
                assert_near(&out.read(element_type), &right, unit(element_type), &what);
            }
        }
    }
}

/// A row divided by the root of its mean square, times the weights.
fn normed_by_squares(row: &[f64], weights: &[f32], eps: f64) -> Vec<f64> {
    let scale = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64 + eps).sqrt();
    row.iter().zip(weights).map(|(x, weight)| x * scale * f64::from(*weight)).collect()
}

#[test]
fn results_are_added_and_the_sums_are_normed() {
    let eps = 1e-3;
    for (result_type, y_type) in ALL.into_iter().flat_map(|a| ALL.map(|b| (a, b))) {
        for (rows, width) in [(3, 4), (5, 132), (2, 1280)] {
            for (has_bias, has_after, has_before) in
                [(false, false, true), (true, true, true), (false, true, false), (true, false, false)]
            {
                let x = noise(rows * width, 2.0, 17);
                let result = rounded(result_type, &noise(rows * width, 3.0, 18));
                let [bias, after, before] = [19, 20, 21].map(|seed| noise(width, 1.0, seed));
                let mut sums = Vec::new();
                let mut right = Vec::new();
                for (x, result) in x.chunks_exact(width).zip(result.chunks_exact(width)) {
                    let bias = |at: usize| if has_bias { f64::from(bias[at]) } else { 0.0 };
                    let mut added: Vec<f64> =
                        result.iter().enumerate().map(|(at, x)| f64::from(*x) + bias(at)).collect();
                    if has_after {
                        added = normed_by_squares(&added, &after, eps);
                    }
                    let sum: Vec<f64> = x.iter().zip(&added).map(|(x, y)| f64::from(*x) + 0.25 * y).collect();
                    right.extend(if has_before {
                        normed_by_squares(&sum, &before, eps)
                    } else {
                        sum.clone()
                    });
                    sums.extend(sum);
                }
                let f32_of = |numbers: &[f32]| Memory::of(ElementType::F32, numbers);
                let (x, y) = (f32_of(&x), Memory::of(y_type, &vec![f32::NAN; rows * width]));
                let result = Memory::of(result_type, &result);
                let [bias, after, before] = [&bias, &after, &before].map(|numbers| f32_of(numbers));
                let only_if = |is_there: bool, memory: &Memory| if is_there { memory.at() } else { 0 };
                let addition = Addition {
                    result: result.at(),
                    element_type: result_type,
                    bias: only_if(has_bias, &bias),
                    norm: only_if(has_after, &after),
                    factor: 0.25,
                };
                let normed =
                    Normed { y: y.at(), element_type: y_type, norm: only_if(has_before, &before), rows: 0 };
                let shape = [rows, width].map(|size| size as u32);
                run(&gpu::add_rms_norm(x.at(), Some(addition), Some(normed), eps as f32, shape));
                let what =
                    format!("{result_type:?} {y_type:?} {rows}×{width} {has_bias} {has_after} {has_before}");
                assert_near(&x.read(ElementType::F32), &sums, unit(ElementType::F32), &what);
                assert_near(&y.read(y_type), &right, unit(y_type), &what);
            }
        }
    }
}

#[test]
fn chosen_rows_are_normed_without_an_addition() {
    let (width, chosen, eps) = (40, [4u32, 0, 4], 1e-5);
    let (numbers, weights) = (noise(6 * width, 2.0, 22), noise(width, 1.0, 23));
    let row = |row: &u32| {
        let row = &numbers[*row as usize * width..][..width];
        normed_by_squares(&row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), &weights, eps)
    };
    let right: Vec<f64> = chosen.iter().flat_map(row).collect();
    let (x, norm) = (Memory::of(ElementType::F32, &numbers), Memory::of(ElementType::F32, &weights));
    let (y, rows) = (Memory::of(ElementType::F32, &vec![f32::NAN; 3 * width]), Memory::of_words(&chosen));
    let normed = Normed { y: y.at(), element_type: ElementType::F32, norm: norm.at(), rows: rows.at() };
    run(&gpu::add_rms_norm(x.at(), None, Some(normed), eps as f32, [3, width as u32]));
    assert_near(&y.read(ElementType::F32), &right, unit(ElementType::F32), "chosen rows");
    assert_eq!(x.read(ElementType::F32), numbers);
}

#[test]
fn embeddings_of_tokens_are_looked_up() {
    let (width, ids) = (1100, [2u32, 0, 2, 6]);
    for element_type in ALL {
        let table = rounded(element_type, &noise(7 * width, 1.0, 40));
        let row = |id: &u32| table[*id as usize * width..][..width].iter().map(|x| f64::from(*x) * 3.5);
        let right: Vec<f64> = ids.iter().flat_map(row).collect();
        let (on_device, list) = (Memory::of(element_type, &table), Memory::of_words(&ids));
        let x = Memory::of(ElementType::F32, &vec![f32::NAN; ids.len() * width]);
        let table = matrix(&on_device, element_type, 7, width);
        run(&gpu::embed_rows(x.at(), table, list.at(), 3.5, ids.len() as u32));
        assert_near(&x.read(ElementType::F32), &right, unit(ElementType::F32), &format!("{element_type:?}"));
    }
}

/// Keys and values in blocks as they lie on the device: `[blocks, heads, …]`.
struct Blocks {
    keys: Vec<f32>,
    values: Vec<f32>,
    element_type: ElementType,
    heads: usize,
    width: usize,
}

impl Blocks {
    /// Blocks of what is no number.
    fn new(element_type: ElementType, blocks: usize, heads: usize, width: usize) -> Self {
        let numbers = vec![f32::NAN; blocks * heads * BLOCK * width];
        Self { keys: numbers.clone(), values: numbers, element_type, heads, width }
    }

    /// The places of a number in the memory of keys, and in that of values.
    fn places(&self, slot: usize, head: usize, i: usize) -> [usize; 2] {
        let (block, token) = (slot / BLOCK, slot % BLOCK);
        let chunk = if self.element_type == ElementType::F32 { 4 } else { 8 };
        let first = (block * self.heads + head) * BLOCK * self.width;
        [first + (i / chunk * BLOCK + token) * chunk + i % chunk, first + token * self.width + i]
    }

    fn on_device(&self) -> [Memory; 2] {
        [&self.keys, &self.values].map(|numbers| Memory::of(self.element_type, numbers))
    }
}

/// A sequence of which some rows are computed. Its keys and values are `[tokens, heads, width]`.
struct Sequence {
    first: usize,
    count: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
    table: Vec<u32>,
}

struct PagedCase {
    heads: PagedHeads,
    scoring: Scoring,
    keys: Keys,
    blocks: Blocks,
    sequences: Vec<Sequence>,
    /// `[rows, heads, width]`.
    queries: Vec<f32>,
}

impl PagedCase {
    /// Random sequences, each with the position of its first row and the number of rows. Their blocks are in disorder.
    fn new(heads: PagedHeads, spans: &[(usize, usize)], keys: Keys, cap: Option<f32>) -> Self {
        let element_type = heads.kv_type;
        let [kv_heads, width] = [heads.kv_count, heads.width].map(|size| size as usize);
        let blocks_of = |(first, count): &(usize, usize)| (first + count).div_ceil(BLOCK);
        let count = spans.iter().map(blocks_of).sum::<usize>() + 1;
        let mut free: Vec<u32> =
            (0..count as u32).rev().step_by(2).chain((0..count as u32).rev().skip(1).step_by(2)).collect();
        let mut blocks = Blocks::new(element_type, count, kv_heads, width);
        let mut sequences = Vec::new();
        for (seed, span) in (30..).zip(spans) {
            let tokens = span.0 + span.1;
            let numbers = |seed| rounded(element_type, &noise(tokens * kv_heads * width, 1.0, seed));
            let (keys, values) = (numbers(2 * seed), numbers(2 * seed + 1));
            let table = free.split_off(free.len() - blocks_of(span));
            for at in 0..keys.len() {
                let (token, head, i) = (at / width / kv_heads, at / width % kv_heads, at % width);
                let slot = table[token / BLOCK] as usize * BLOCK + token % BLOCK;
                let [key, value] = blocks.places(slot, head, i);
                (blocks.keys[key], blocks.values[value]) = (keys[at], values[at]);
            }
            sequences.push(Sequence { first: span.0, count: span.1, keys, values, table });
        }
        let rows: usize = spans.iter().map(|(_, count)| count).sum();
        let queries = noise(rows * heads.count as usize * width, 2.0, 29);
        let scoring = Scoring { scale: 0.7 / (width as f32).sqrt(), window: None, soft_cap: cap };
        Self { heads, scoring, keys, blocks, sequences, queries }
    }

    /// By the formula.
    fn right(&self) -> Vec<f64> {
        let PagedHeads { count, kv_count, width, .. } = self.heads;
        let [heads, kv_heads, width] = [count, kv_count, width].map(|size| size as usize);
        let mut out = Vec::new();
        let mut row = 0;
        for sequence in &self.sequences {
            let end = sequence.first + sequence.count;
            for position in sequence.first..end {
                let (Keys::Causal { window } | Keys::BothWays { window }) = self.keys;
                let begin = window.map_or(0, |window| (position + 1).saturating_sub(window));
                let last = match self.keys {
                    Keys::Causal { .. } => position + 1,
                    Keys::BothWays { .. } => window.map_or(end, |window| end.min(position + window)),
                };
                for head in 0..heads {
                    let query = &self.queries[(row * heads + head) * width..][..width];
                    let place = |key: usize| (key * kv_heads + head * kv_heads / heads) * width;
                    let score = |key: usize| -> f64 {
                        let key = &sequence.keys[place(key)..][..width];
                        let product: f64 =
                            query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                        let score = product * f64::from(self.scoring.scale);
                        self.scoring.soft_cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
                    };
                    let scores: Vec<f64> = (begin..last).map(score).collect();
                    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    let value = |i: usize| {
                        let each = weights.iter().zip(begin..last);
                        each.map(|(w, key)| w / sum * f64::from(sequence.values[place(key) + i])).sum::<f64>()
                    };
                    out.extend((0..width).map(value));
                }
                row += 1;
            }
        }
        out
    }

    /// On the device, with results of this type, of the sequences in the given order.
    fn on_device(&self, out_type: ElementType, order: &[usize]) -> Vec<f32> {
        let width = (self.heads.count * self.heads.width) as usize;
        let starts =
            self.sequences.iter().scan(0, |start, it| Some(std::mem::replace(start, *start + it.count)));
        let starts: Vec<usize> = starts.collect();
        let (mut spans, mut queries, mut tables, mut table_words) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for at in order {
            let Sequence { first, count, table, .. } = &self.sequences[*at];
            spans.push(Span { blocks: table, first: *first, count: *count });
            tables.push(table_words.len() as u32);
            table_words.extend(table);
            queries.extend(&self.queries[starts[*at] * width..][..count * width]);
        }
        let mut words = Words::default();
        let tiles = PagedTiles::new(&mut words, &spans, &tables, self.heads, self.keys);
        let (words, table_words) = (Memory::of_words(&words.all), Memory::of_words(&table_words));
        let partials = Memory::of(ElementType::F32, &vec![f32::NAN; tiles.partial_numbers(self.heads)]);
        let out = Memory::of(out_type, &vec![f32::NAN; queries.len()]);
        let queries = Memory::of(ElementType::F32, &queries);
        let [keys, values] = self.blocks.on_device();
        let kv = PagedKv { keys: keys.at(), values: values.at() };
        let launches = gpu::attend_blocks(
            (out.at(), out_type),
            [partials.at(), queries.at()],
            kv,
            self.heads,
            self.scoring,
            &tiles,
            [words.at(), table_words.at()],
        );
        launches.iter().for_each(run);
        partials.read(ElementType::F32);
        out.read(out_type)
    }

    fn is_right(&self, out_type: ElementType, what: &str) {
        let order: Vec<usize> = (0..self.sequences.len()).collect();
        let what = format!("{what}: {:?} {out_type:?}", self.heads);
        // By the matrix units, queries and weights are rounded to the type of keys and values.
        let is_exact = self.heads.width < 64 || self.heads.kv_type == ElementType::F32;
        let unit = if is_exact { unit(out_type) } else { unit(out_type).max(unit(self.heads.kv_type)) };
        assert_near(&self.on_device(out_type, &order), &self.right(), 2.0 * unit, &what);
    }
}

const CAUSAL: Keys = Keys::Causal { window: None };

fn paged([count, kv_count, width]: [u32; 3], kv_type: ElementType) -> PagedHeads {
    let heads = PagedHeads { count, kv_count, width, kv_type };
    assert!(heads.have_kernel());
    heads
}

#[test]
fn attention_over_blocks_is_its_formula_for_any_heads() {
    let spans = [(0, 1), (31, 1), (40, 3), (140, 1), (0, 10)];
    for element_type in ALL {
        for (width, out_type) in [
            (64, ElementType::F16),
            (80, ElementType::F32),
            (96, ElementType::F32),
            (128, ElementType::Bf16),
            (256, ElementType::F32),
        ] {
            PagedCase::new(paged([4, 2, width], element_type), &spans, CAUSAL, None)
                .is_right(out_type, "widths");
        }
        if element_type == ElementType::F16 {
            continue;
        }
        for heads in [[2, 2, 8], [9, 3, 16], [8, 1, 24], [12, 1, 40], [5, 1, 144], [1, 1, 200]] {
            let case = PagedCase::new(paged(heads, element_type), &spans, CAUSAL, None);
            case.is_right(ElementType::F32, "heads");
        }
    }
}

#[test]
fn attention_over_blocks_has_windows_caps_and_both_directions() {
    let spans = [(0, 40), (700, 1), (130, 9), (900, 1)];
    for keys in [
        Keys::Causal { window: Some(1) },
        Keys::Causal { window: Some(50) },
        Keys::Causal { window: Some(600) },
        Keys::BothWays { window: None },
        Keys::BothWays { window: Some(20) },
    ] {
        for cap in [None, Some(1.5)] {
            let case = PagedCase::new(paged([4, 2, 16], ElementType::F32), &spans, keys, cap);
            case.is_right(ElementType::F32, &format!("{keys:?}, {cap:?}"));
            // By the matrix units.
            let case = PagedCase::new(paged([4, 2, 64], ElementType::F16), &spans, keys, cap);
            case.is_right(ElementType::F32, &format!("{keys:?}, {cap:?}"));
        }
    }
}

#[test]
fn a_long_context_is_cut_into_parts_that_are_joined() {
    for (heads, span) in [
        (paged([4, 2, 16], ElementType::Bf16), (2000, 1)),
        (paged([3, 3, 16], ElementType::Bf16), (700, 12)),
        (paged([16, 1, 16], ElementType::Bf16), (5000, 1)),
        (paged([3, 1, 64], ElementType::F16), (700, 50)),
        (paged([70, 1, 64], ElementType::F16), (600, 2)),
    ] {
        let case = PagedCase::new(heads, &[span], CAUSAL, None);
        case.is_right(ElementType::F32, &format!("{span:?}"));
    }
}

#[test]
fn a_sequence_gets_the_same_alone_and_in_company() {
    for heads in [paged([4, 2, 16], ElementType::F32), paged([4, 2, 64], ElementType::Bf16)] {
        let spans = [(400, 1), (0, 40), (77, 1), (600, 5)];
        let case = PagedCase::new(heads, &spans, CAUSAL, None);
        let together = case.on_device(ElementType::F32, &[3, 0, 1, 2]);
        let mut rest = &*together;
        for sequence in [3, 0, 1, 2] {
            let alone = case.on_device(ElementType::F32, &[sequence]);
            let (own, others) = rest.split_at(alone.len());
            rest = others;
            let near: Vec<f64> = alone.iter().map(|x| f64::from(*x)).collect();
            assert_near(own, &near, 1e-6, &format!("{heads:?}"));
        }
    }
}

#[test]
fn what_is_no_number_stays_in_its_sequence_and_large_scores_do_not_overflow() {
    for (heads, count) in
        [(paged([2, 1, 16], ElementType::F32), 1), (paged([2, 1, 64], ElementType::Bf16), 20)]
    {
        let mut case = PagedCase::new(heads, &[(300, count), (40, count)], CAUSAL, None);
        case.queries.iter_mut().for_each(|x| *x *= 1e4);
        let ours = case.on_device(ElementType::F32, &[0, 1]);
        assert!(ours.iter().all(|x| x.is_finite()));
        let slot = case.sequences[1].table[0] as usize * BLOCK;
        let [key, _] = case.blocks.places(slot, 0, 5);
        case.blocks.keys[key] = f32::NAN;
        let ours = case.on_device(ElementType::F32, &[0, 1]);
        let (others, own) = ours.split_at(ours.len() / 2);
        assert!(others.iter().all(|x| x.is_finite()) && own.iter().all(|x| x.is_nan()), "{heads:?}");
    }
}

#[test]
fn heads_are_normed_and_rotated_and_keys_and_values_reach_their_blocks() {
    let (rows, heads, kv_heads, width) = (5, 5, 2, 24);
    let slots = [70u32, 0, 33, 95, 1];
    let all_heads = heads + 2 * kv_heads;
    for (n, kv_type) in ALL.into_iter().flat_map(|a| ALL.map(|b| (a, b))) {
        for (norms_all, pairs) in [(None, 12), (Some(false), 12), (Some(true), 8), (None, 0)] {
            let qkv = rounded(n, &noise(rows * all_heads * width, 2.0, 24));
            let bias = noise(all_heads * width, 0.5, 25);
            let norm_width = |count| if norms_all == Some(true) { count * width } else { width };
            let norms = [noise(norm_width(heads), 1.0, 26), noise(norm_width(kv_heads), 1.0, 27)];
            let angles = noise(rows * 2 * pairs, 1.0, 28);
            let growth = [1.0, 2.0, 0.5, 1.5, 3.0];
            // By the formula, each row on its own.
            let mut queries = Vec::new();
            let mut blocks = Blocks::new(kv_type, 3, kv_heads, width);
            for row in 0..rows {
                let number = |at: usize| f64::from(qkv[row * all_heads * width + at]) + f64::from(bias[at]);
                for head in 0..all_heads {
                    let kind = if head < heads { 0 } else { 1 + (head - heads) / kv_heads };
                    let (first, count) = [(0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)][kind];
                    let mut x: Vec<f64> = (head * width..(head + 1) * width).map(number).collect();
                    match norms_all {
                        Some(false) if kind < 2 => x = normed_by_squares(&x, &norms[kind], 1e-5),
                        Some(true) if kind < 2 => {
                            let all: Vec<f64> =
                                (first * width..(first + count) * width).map(number).collect();
                            let all = normed_by_squares(&all, &norms[kind], 1e-5);
                            x = all[(head - first) * width..][..width].to_vec();
                        }
                        _ => {}
                    }
                    if kind < 2 {
                        for pair in 0..pairs {
                            let (a, b) = (x[pair], x[pair + pairs]);
                            let angle = |at: usize| f64::from(angles[row * 2 * pairs + at]);
                            let (cos, sin) = (angle(pair), angle(pairs + pair));
                            (x[pair], x[pair + pairs]) = (a * cos - b * sin, b * cos + a * sin);
                        }
                    }
                    for (i, x) in x.into_iter().enumerate() {
                        let [key, value] = blocks.places(slots[row] as usize, head - first, i);
                        match kind {
                            0 => queries.push(x * f64::from(growth[row])),
                            1 => blocks.keys[key] = x as f32,
                            _ => blocks.values[value] = x as f32,
                        }
                    }
                }
            }
            let f32_of = |numbers: &[f32]| Memory::of(ElementType::F32, numbers);
            let [on_device, bias, angles, factors] =
                [Memory::of(n, &qkv), f32_of(&bias), f32_of(&angles), f32_of(&growth)];
            let weights = norms.each_ref().map(|norm| f32_of(norm));
            let (out, places) = (f32_of(&vec![f32::NAN; queries.len()]), Memory::of_words(&slots));
            let [keys, values] = Blocks::new(kv_type, 3, kv_heads, width).on_device();
            let kv = PagedKv { keys: keys.at(), values: values.at() };
            let steps = HeadSteps {
                bias: bias.at(),
                norms: if norms_all.is_some() { weights.each_ref().map(Memory::at) } else { [0; 2] },
                norms_all: norms_all == Some(true),
                eps: 1e-5,
                angles: angles.at(),
                pairs: pairs as u32,
                growth: factors.at(),
            };
            let qkv = matrix(&on_device, n, rows, all_heads * width);
            let heads = paged([heads, kv_heads, width].map(|size| size as u32), kv_type);
            run(&gpu::rotate(out.at(), kv, qkv, places.at(), heads, steps));
            let what = format!("{n:?} {kv_type:?} {norms_all:?} {pairs}");
            assert_near(&out.read(ElementType::F32), &queries, 2.0 * unit(ElementType::F32), &what);
            for (memory, expected) in [(keys, blocks.keys), (values, blocks.values)] {
                let (written, unwritten): (Vec<_>, Vec<_>) =
                    memory.read(kv_type).into_iter().zip(expected).partition(|(_, right)| !right.is_nan());
                assert!(unwritten.iter().all(|(x, _)| x.is_nan()), "{what}: written elsewhere");
                let (ours, right): (Vec<f32>, Vec<f64>) =
                    written.into_iter().map(|(x, right)| (x, f64::from(right))).unzip();
                assert_near(&ours, &right, 2.0 * unit(kv_type), &what);
            }
        }
    }
}

/// The tokens that the device chooses for these positions of one answer.
fn chosen_on_device(
    logits: &[f32],
    element_type: ElementType,
    vocabulary: usize,
    draws: &[(usize, gpu::Draw)],
    masks: &[u32],
    finish: (f32, Option<f32>),
) -> Vec<Drawn> {
    let mut words = Words { all: vec![9; 5] };
    let planned = Draws::new(&mut words, draws);
    let (on_device, words) = (Memory::of(element_type, logits), Memory::of_words(&words.all));
    let results = Memory::of_words(&vec![0; planned.words_of_results()]);
    let masks = Memory::of_words(masks);
    let scratch = Memory::of(ElementType::F32, &vec![f32::NAN; draws.len() * vocabulary]);
    let rows = logits.len() / vocabulary;
    let logits = matrix(&on_device, element_type, rows, vocabulary);
    run(&gpu::choose([results.at(), scratch.at(), words.at(), masks.at()], logits, finish, planned));
    scratch.read(ElementType::F32);
    let written: Vec<u32> = results.read(ElementType::F32).into_iter().map(f32::to_bits).collect();
    planned.results(&written, draws)
}

#[test]
fn tokens_are_chosen_as_on_the_host() {
    let plain = Sampling::at(0.8);
    let cases = [
        Sampling::at(0.0),
        plain,
        Sampling { top_k: 5, ..plain },
        Sampling { top_p: 0.6, ..plain },
        Sampling { min_p: 0.2, temperature: 1.7, ..plain },
        Sampling { top_k: 40, top_p: 0.9, min_p: 0.01, ..plain },
        Sampling { top_k: 3000, top_p: 0.95, ..plain },
        Sampling { temperature: 0.0, repetition_penalty: 1.4, ..plain },
        Sampling {
            top_p: 0.9,
            frequency_penalty: 0.7,
            presence_penalty: 0.5,
            repetition_penalty: 1.2,
            ..plain
        },
    ];
    let (vocabulary, rows) = (1003, 4);
    let seed = Seed { task: 11, sequence: 3 };
    for element_type in ALL {
        // Logits of 16 bits have many ties.
        let logits = rounded(element_type, &noise(rows * vocabulary, 6.0, 31));
        for sampling in cases {
            let (finish, prompt) = ((1.25, Some(20.0)), [3, 8, 8, 900]);
            let mut on_host = Sampler::new(sampling, seed, &prompt);
            let mut on_device = Sampler::new(sampling, seed, &prompt);
            let mut right = Vec::new();
            let mut draws = Vec::new();
            for position in 0..rows {
                // The last rows first.
                let row = rows - 1 - position;
                let of_row = &logits[row * vocabulary..][..vocabulary];
                let mut finished: Vec<f32> = of_row.iter().map(|x| 20.0 * (x / 1.25 / 20.0).tanh()).collect();
                let id = on_host.choose(&mut finished, position);
                draws.push((row, on_device.draw(position)));
                on_device.take(id.unwrap(), position);
                right.push(id);
            }
            let drawn = chosen_on_device(&logits, element_type, vocabulary, &draws, &[], finish);
            let chosen: Vec<Option<u32>> = drawn.iter().map(|drawn| drawn.id).collect();
            assert_eq!(chosen, right, "{element_type:?} {sampling:?}");
        }
    }
}

#[test]
fn equally_likely_tokens_are_drawn_in_the_order_of_their_ids_and_none_without_finite_numbers() {
    let draw = |uniform, sampling| gpu::Draw {
        uniform,
        ..Sampler::new(sampling, Seed { task: 1, sequence: 0 }, &[]).draw(0)
    };
    let chosen = |logits: &[f32], uniform, sampling| {
        let draws = [(0, draw(uniform, sampling))];
        chosen_on_device(logits, ElementType::F32, logits.len(), &draws, &[], (1.0, None))[0].id
    };
    let even = [1.5; 600];
    let plain = Sampling::at(1.0);
    assert_eq!(chosen(&even, 0.5, Sampling::at(0.0)), Some(0));
    assert_eq!(chosen(&even, 0.5001, plain), Some(300));
    assert_eq!(chosen(&even, 0.9999, Sampling { top_k: 10, ..plain }), Some(9));
    assert_eq!(chosen(&even, 0.0, Sampling { top_p: 0.25, ..plain }), Some(0));
    assert_eq!(chosen(&even, 0.9999, Sampling { top_p: 0.25, ..plain }), Some(149));
    assert_eq!(chosen(&[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0], 0.6, plain), Some(3));
    for broken in [f32::NAN, f32::INFINITY] {
        assert_eq!(chosen(&[0.0, broken, 1.0], 0.5, plain), None);
    }
    assert_eq!(chosen(&[f32::NEG_INFINITY; 3], 0.5, plain), None);
}

#[test]
fn masked_tokens_are_not_chosen_and_probabilities_are_those_of_all_tokens() {
    let (vocabulary, rows) = (1003_usize, 5);
    let logits = noise(rows * vocabulary, 6.0, 33);
    let words = vocabulary.div_ceil(32);
    // Of the first mask every seventh token may be chosen, of the second one none.
    let mut masks = vec![0_u32; 2 * words];
    let is_allowed = |id: usize| id % 7 == 3;
    (0..vocabulary).filter(|id| is_allowed(*id)).for_each(|id| masks[id / 32] |= 1 << (id % 32));
    for sampling in [Sampling::at(0.0), Sampling::at(1.1), Sampling { top_p: 0.8, ..Sampling::at(1.0) }] {
        let seed = |row| Seed { task: 5, sequence: row };
        let draw = |(row, is_masked, logprobs): (usize, bool, Option<usize>)| {
            let mut sampler = Sampler::new(sampling, seed(row as u64), &[]);
            (row, gpu::Draw { is_masked, logprobs, ..sampler.draw(0) })
        };
        let cases = [
            (1, true, Some(3)),
            (0, false, None),
            (4, false, Some(0)),
            (2, true, None),
            (3, false, Some(20)),
        ];
        let draws = cases.map(draw);
        let drawn = chosen_on_device(&logits, ElementType::F32, vocabulary, &draws, &masks, (1.0, None));
        for ((row, is_masked, count), drawn) in cases.into_iter().zip(drawn) {
            let of_row = &logits[row * vocabulary..][..vocabulary];
            let mut allowed = of_row.to_vec();
            for (id, x) in allowed.iter_mut().enumerate() {
                // The second mask is that of row 2.
                if is_masked && (row == 2 || !is_allowed(id)) {
                    *x = f32::NEG_INFINITY;
                }
            }
            let right = Sampler::new(sampling, seed(row as u64), &[]).choose(&mut allowed, 0);
            assert_eq!(drawn.id, right, "{row} {sampling:?}");
            assert_eq!(drawn.top.len(), count.unwrap_or_default());
            let (Some(count), Some(id)) = (count, right) else { continue };
            let (logprob, top) = log_probabilities(of_row, id, count);
            assert!((drawn.logprob - logprob).abs() < 1e-5, "{} {logprob}", drawn.logprob);
            for (found, right) in drawn.top.iter().zip(&top) {
                assert_eq!(found.0, right.0);
                assert!((found.1 - right.1).abs() < 1e-5, "{found:?} {right:?}");
            }
        }
    }
    // Of tokens with the same number, the first ones are listed.
    let draw = gpu::Draw {
        logprobs: Some(4),
        ..Sampler::new(Sampling::at(0.0), Seed { task: 1, sequence: 0 }, &[]).draw(0)
    };
    let drawn =
        chosen_on_device(&[1.0, 2.0, 1.0, 2.0, 1.0], ElementType::F32, 5, &[(0, draw)], &[], (1.0, None));
    assert_eq!(drawn[0].top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3, 0, 2]);
}
