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
use sconce::model::ops::gpu::{self, Argument, ElementType, Heads, Launch, Matrix, Norm, Plan, Pointer};
use sconce::model::ops::pooling::{MAX_MODES, Mode, Pooling};

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
