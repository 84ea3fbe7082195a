//! The program with CUDA in it, on a GPU that is made of this CPU: tests/fixtures/emulator stands in for
//! NVIDIA's driver and cuBLAS, and does everything as late as CUDA allows. Run by `.ci/cuda`, since it needs
//! the build with CUDA: scripts/build-cuda test --test gpu.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

#[path = "support/emulator.rs"]
mod emulator;

use emulator::DRIVER;

/// The one of tests/fixtures/nvml that is whole and well, and another.
const GPU: &str = "GPU-a0000000-1111-2222-3333-444444444444";
const OTHER: &str = "GPU-b0000000-1111-2222-3333-444444444444";

/// A BERT of two layers with heads of so many numbers, with weights from a seed.
fn model(hidden: usize, heads: usize) -> tempfile::TempDir {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-bert-cls");
    let folder = tempfile::tempdir().unwrap();
    for entry in walk(&fixture) {
        let to = folder.path().join(entry.strip_prefix(&fixture).unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(&entry, &to).unwrap();
    }
    let change = |file: &str, changes: Value| {
        let path = folder.path().join(file);
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for (name, value) in changes.as_object().unwrap() {
            config[name] = value.clone();
        }
        fs::write(path, config.to_string()).unwrap();
    };
    let inner = 2 * hidden;
    change(
        "config.json",
        json!({"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": inner}),
    );
    change("1_Pooling/config.json", json!({"word_embedding_dimension": hidden}));
    let shapes = shapes(hidden, inner);
    let mut state = 7u32;
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let range = if name.contains("LayerNorm") { 1.0 } else { 0.2 };
            let numbers = (0..shape.iter().product::<usize>()).flat_map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * range).to_le_bytes()
            });
            let bytes = numbers.collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

/// The names and shapes of its tensors.
fn shapes(hidden: usize, inner: usize) -> Vec<(String, Vec<usize>)> {
    let mut shapes = vec![
        ("embeddings.word_embeddings.weight".to_owned(), vec![300, hidden]),
        ("embeddings.position_embeddings.weight".to_owned(), vec![64, hidden]),
        ("embeddings.token_type_embeddings.weight".to_owned(), vec![2, hidden]),
        // Of a head with one label, which embeddings do not read.
        ("pooler.dense.weight".to_owned(), vec![hidden, hidden]),
        ("pooler.dense.bias".to_owned(), vec![hidden]),
        ("classifier.weight".to_owned(), vec![1, hidden]),
        ("classifier.bias".to_owned(), vec![1]),
    ];
    let mut norms = vec!["embeddings.LayerNorm".to_owned()];
    for layer in 0..2 {
        let name = |part: &str| format!("encoder.layer.{layer}.{part}");
        norms.extend([name("attention.output.LayerNorm"), name("output.LayerNorm")]);
        for part in
            ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
        {
            shapes.push((name(&format!("{part}.weight")), vec![hidden, hidden]));
            shapes.push((name(&format!("{part}.bias")), vec![hidden]));
        }
        shapes.push((name("intermediate.dense.weight"), vec![inner, hidden]));
        shapes.push((name("intermediate.dense.bias"), vec![inner]));
        shapes.push((name("output.dense.weight"), vec![hidden, inner]));
        shapes.push((name("output.dense.bias"), vec![hidden]));
    }
    for norm in norms {
        shapes.push((format!("{norm}.weight"), vec![hidden]));
        shapes.push((format!("{norm}.bias"), vec![hidden]));
    }
    shapes
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

/// One run of `run-batch`.
struct Run<'a> {
    model: &'a Path,
    device: &'a str,
    settings: &'a [&'a str],
    variables: &'a [(&'a str, &'a str)],
    /// All texts four times in one task, and not each by itself.
    in_one_task: bool,
}

struct Ran {
    output: Output,
    /// By text.
    answers: HashMap<usize, Result<Vec<f64>, Value>>,
}

impl Ran {
    fn said(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    fn vector(&self, text: usize) -> &[f64] {
        let answer =
            self.answers.get(&text).unwrap_or_else(|| panic!("text {text} is not answered: {}", self.said()));
        answer.as_ref().unwrap_or_else(|error| panic!("text {text}: {error}\n{}", self.said()))
    }
}

/// Of about 1 to 60 tokens.
fn texts() -> Vec<String> {
    let words = ["a", "cat", "rain", "the", "of", "river", "old", "sings", "under", "stone"];
    let text = |n: usize| (0..n).map(|at| words[(at * 7 + n) % words.len()]).collect::<Vec<_>>().join(" ");
    [1, 3, 14, 2, 9, 25, 5, 1, 40, 6, 12, 2, 30, 4, 8, 17].map(text).to_vec()
}

fn run(run: &Run<'_>) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let line = |(at, texts): (usize, Value)| {
        let body = json!({"model": run.model.file_name().unwrap().to_str(), "input": texts});
        let line =
            json!({"custom_id": at.to_string(), "method": "POST", "url": "/v1/embeddings", "body": body});
        format!("{line}\n")
    };
    let tasks = if run.in_one_task {
        vec![json!([texts(), texts(), texts(), texts()].concat())]
    } else {
        texts().into_iter().map(Value::from).collect()
    };
    fs::write(&input, tasks.into_iter().enumerate().map(line).collect::<String>()).unwrap();
    let mut command = run_batch(run.model, run.device, (&input, &output));
    for setting in run.settings {
        command.args(["--set", setting]);
    }
    let ran = command.envs(run.variables.iter().copied()).output().unwrap();
    let lines = fs::read_to_string(&output).unwrap_or_default();
    let answer = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        let at: usize = line["custom_id"].as_str().unwrap().parse().unwrap();
        let Some(data) = line["response"]["body"]["data"].as_array() else { return vec![(at, Err(line))] };
        let vector =
            |it: &Value| it["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        (at..).zip(data.iter().map(|it| Ok(vector(it)))).collect()
    };
    Ran { output: ran, answers: lines.lines().flat_map(answer).collect() }
}

fn run_batch(model: &Path, device: &str, (input, output): (&Path, &Path)) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command.arg("run-batch").arg("-i").arg(input).arg("-o").arg(output);
    command.arg("--model").arg(model).args(["--devices", device]);
    for variable in ["SCONCE_CONFIG", "AMQP_URL", "CUDA_VISIBLE_DEVICES"] {
        command.env_remove(variable);
    }
    command.env("LD_LIBRARY_PATH", &*DRIVER).env("EMULATED_GPUS", GPU);
    command
}

/// The scores of pairs of the texts, in one task.
fn scores(model: &Path, device: &str) -> Vec<f64> {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let body = json!({"text_1": "the old river", "text_2": texts(), "raw_scores": true});
    let line = json!({"custom_id": "a", "method": "POST", "url": "/v1/score", "body": body});
    fs::write(&input, format!("{line}\n")).unwrap();
    let ran = run_batch(model, device, (&input, &output)).args(["--set", SMALL]).output().unwrap();
    let answer: Value = serde_json::from_str(&fs::read_to_string(&output).unwrap_or_default())
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&ran.stderr)));
    let data = answer["response"]["body"]["data"].as_array().unwrap_or_else(|| panic!("{answer}"));
    data.iter().map(|it| it["score"].as_f64().unwrap()).collect()
}

fn largest_difference(a: &Ran, b: &Ran) -> f64 {
    let each =
        (0..texts().len()).flat_map(|at| a.vector(at).iter().zip(b.vector(at)).map(|(x, y)| (x - y).abs()));
    each.fold(0.0, f64::max)
}

/// Several batches, so that one is given to the device while it has another.
const SMALL: &str = "pool[0].batch.max_tokens=80";

#[test]
fn a_gpu_gives_what_a_cpu_gives_in_every_precision() {
    for (hidden, heads) in [(64, 2), (64, 1)] {
        let folder = model(hidden, heads);
        let model = folder.path();
        let cpu = run(&Run { model, device: "cpu", settings: &[SMALL], variables: &[], in_one_task: false });
        for (dtype, within) in [("f32", 2e-6), ("f16", 4e-3), ("bf16", 3e-2)] {
            let dtype = format!("pool[0].dtype={dtype}");
            let gpu = run(&Run {
                model,
                device: "cuda:0",
                settings: &[SMALL, &dtype],
                variables: &[],
                in_one_task: false,
            });
            let off = largest_difference(&gpu, &cpu);
            assert!(off < within, "{heads} heads of {hidden}, {dtype}: {off}");
            assert!(off > 0.0, "computed by the same device");
        }
    }
}

#[test]
fn pairs_get_the_scores_on_a_gpu_that_they_get_on_a_cpu() {
    let folder = model(64, 2);
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["architectures"] = json!(["BertForSequenceClassification"]);
    config["id2label"] = json!({"0": "relevant"});
    fs::write(path, config.to_string()).unwrap();
    // With these it is a model for embeddings.
    for file in ["modules.json", "config_sentence_transformers.json"] {
        fs::remove_file(folder.path().join(file)).unwrap();
    }
    let (cpu, gpu) = (scores(folder.path(), "cpu"), scores(folder.path(), "cuda:0"));
    assert_eq!((cpu.len(), gpu.len()), (texts().len(), texts().len()));
    let off = cpu.iter().zip(&gpu).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off < 1e-5, "{off}");
    assert!(off > 0.0, "computed by the same device");
}

/// What greedy answers to several prompts of different lengths are, and how likely each token is.
struct Generated {
    output: Output,
    texts: Vec<String>,
    logprobs: Vec<f64>,
}

fn generate(device: &str, settings: &[&str], variables: &[(&str, &str)]) -> Generated {
    let prompts: Vec<Value> = texts().into_iter().map(Value::from).collect();
    generate_from("generate-llama", &prompts, device, settings, variables)
}

fn generate_from(
    model: &str,
    prompts: &[Value],
    device: &str,
    settings: &[&str],
    variables: &[(&str, &str)],
) -> Generated {
    let request = json!({"max_tokens": 24, "temperature": 0, "ignore_eos": true, "logprobs": 1});
    complete(model, prompts, &request, device, settings, variables)
}

/// The answers to requests that have these fields and a prompt.
fn complete(
    model: &str,
    prompts: &[Value],
    request: &Value,
    device: &str,
    settings: &[&str],
    variables: &[(&str, &str)],
) -> Generated {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model);
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let line = |(at, prompt): (usize, &Value)| {
        let mut body = request.clone();
        body["prompt"] = prompt.clone();
        let line =
            json!({"custom_id": at.to_string(), "method": "POST", "url": "/v1/completions", "body": body});
        format!("{line}\n")
    };
    fs::write(&input, prompts.iter().enumerate().map(line).collect::<String>()).unwrap();
    let mut command = run_batch(&model, device, (&input, &output));
    for setting in [&["launcher.max_quick_failures=1"], settings].concat() {
        command.args(["--set", setting]);
    }
    let ran = command.envs(variables.iter().copied()).output().unwrap();
    let lines = fs::read_to_string(&output).unwrap_or_default();
    let mut answers: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    answers.sort_by_key(|answer| answer["custom_id"].as_str().unwrap().parse::<usize>().unwrap());
    let choices = answers.iter().map(|answer| &answer["response"]["body"]["choices"][0]);
    let choices: Vec<&Value> = choices.filter(|choice| choice["text"].is_string()).collect();
    let numbers =
        |choice: &&Value| choice["logprobs"]["token_logprobs"].as_array().cloned().unwrap_or_default();
    Generated {
        texts: choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect(),
        logprobs: choices.iter().flat_map(numbers).map(|it| it.as_f64().unwrap()).collect(),
        output: ran,
    }
}

#[test]
fn a_gpu_continues_several_texts_at_once_as_a_cpu_does() {
    // Prompts are fed in chunks of at most this, beside the answers of others.
    let small = ["pool[0].batch.max_tokens=48"];
    let cpu = generate("cpu", &small, &[]);
    assert_eq!(cpu.texts.len(), texts().len());
    for (settings, within) in [
        (&[][..], 1e-4),
        (&["pool[0].options.kv_numbers=bf16"], 0.1),
        (&["pool[0].dtype=f16"], 0.1),
        (&["pool[0].dtype=bf16"], 0.5),
    ] {
        let gpu = generate("cuda:0", &[&small, settings].concat(), &[]);
        assert_eq!(gpu.logprobs.len(), cpu.logprobs.len(), "{}", String::from_utf8_lossy(&gpu.output.stderr));
        // Of texts that are the same: where one token differs, all later ones do.
        let pairs = cpu.texts.iter().zip(&gpu.texts).enumerate().filter(|(_, (a, b))| a == b);
        let same: Vec<usize> = pairs.map(|(at, _)| at).collect();
        let at = |all: &Vec<f64>, text: usize| all[24 * text..24 * (text + 1)].to_vec();
        let off = same.iter().flat_map(|text| {
            let (a, b) = (at(&cpu.logprobs, *text), at(&gpu.logprobs, *text));
            a.into_iter().zip(b).map(|(a, b)| (a - b).abs())
        });
        let off = off.fold(0.0, f64::max);
        assert!(off > 0.0 && off < within, "{settings:?}: {off}, {} texts are the same", same.len());
        // Random weights nearly tie more often than a model's.
        let least = if settings.is_empty() { cpu.texts.len() } else { cpu.texts.len() / 4 };
        assert!(same.len() >= least, "{settings:?}: {} texts are the same", same.len());
    }
}

#[test]
fn a_gpu_computes_each_architecture_of_decoders_as_a_cpu_does() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let names = fs::read_dir(&fixtures).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = names.filter(|name| name.starts_with("generate-")).collect();
    assert!(names.len() >= 15, "{names:?}");
    for name in names {
        let expected = fs::read(fixtures.join(&name).join("expected.json")).unwrap();
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        // No token of their answers nearly ties with another one.
        let prompts = expected["prompts"].as_array().unwrap().iter().map(|it| it["ids"].clone());
        let prompts: Vec<Value> = prompts.collect();
        let small = ["pool[0].batch.max_tokens=48"];
        let [cpu, gpu] = ["cpu", "cuda:0"].map(|device| generate_from(&name, &prompts, device, &small, &[]));
        let said = String::from_utf8_lossy(&gpu.output.stderr);
        assert_eq!(cpu.texts.len(), prompts.len(), "{name}");
        assert_eq!(gpu.texts, cpu.texts, "{name}: {said}");
        let off = cpu.logprobs.iter().zip(&gpu.logprobs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off > 0.0 && off < 1e-3, "{name}: {off}");
    }
}

/// The calls of a step that computes one token of one sequence, after a prompt of so many tokens. The token is the likeliest
/// one; `logprobs` is the number of likeliest tokens that are listed.
fn calls_of_a_step(model: &str, prompt: usize, logprobs: Option<usize>, settings: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("counts");
    let prompts = [json!(vec![5; prompt])];
    // Each further token is a further step.
    let [few, more] = [4, 12].map(|tokens| {
        let variables = [("EMULATED_COUNTS", file.to_str().unwrap())];
        let mut request = json!({"max_tokens": tokens, "temperature": 0, "ignore_eos": true});
        if let Some(count) = logprobs {
            request["logprobs"] = json!(count);
        }
        let ran = complete(model, &prompts, &request, "cuda:0", settings, &variables);
        assert_eq!(ran.texts.len(), 1, "{}", String::from_utf8_lossy(&ran.output.stderr));
        let counts: serde_json::Map<String, Value> =
            serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        counts
    });
    let difference = |(name, count): (&String, &Value)| {
        let difference = count.as_u64().unwrap() - few[name].as_u64().unwrap();
        assert_eq!(difference % 8, 0, "{name}");
        (name.clone(), Value::from(difference / 8))
    };
    more.iter().map(difference).collect::<serde_json::Map<_, _>>().into()
}

#[test]
fn a_step_of_a_decoder_makes_nine_calls_for_each_layer_and_waits_once() {
    // Each of the two layers has 4 products and 5 launches. Beside them are the product with the head, and launches for
    // the token embeddings, the first norm, the last norm and the choice of the token. The step's description has the
    // token's id, its slot, 8 cosines and 8 sines, a block, a tile of 8 words, the row whose result is wanted, and a draw
    // of 14 words.
    let numbers = |launches: usize, words: usize, bytes: usize| {
        json!({
            "launches": launches, "products": 9, "copies_to_device": 1, "bytes_to_device": 4 * words,
            "copies_to_host": 1, "bytes_to_host": bytes, "copies": 0, "fills": 0, "waits": 1
        })
    };
    assert_eq!(calls_of_a_step("generate-llama", 3, None, &[]), numbers(14, 42, 4));
    let bf16 = ["pool[0].dtype=bf16", "pool[0].options.kv_numbers=bf16"];
    assert_eq!(calls_of_a_step("generate-llama", 3, None, &bf16), numbers(14, 42, 4));
    // Of the 400 logits, only the probabilities that are wanted reach the host: the token's, and of two listed ones.
    assert_eq!(calls_of_a_step("generate-llama", 3, Some(2), &bf16), numbers(14, 42, 24));
    // After 580 tokens each layer has one launch more, which joins the parts of the keys. There are 19 blocks, 3 tiles,
    // and a join of 4 words.
    let long = with_context(1024);
    assert_eq!(calls_of_a_step(long.path().to_str().unwrap(), 580, None, &[]), numbers(16, 80, 4));
}

#[test]
fn a_gpu_draws_the_tokens_that_a_cpu_draws() {
    let prompts: Vec<Value> = texts().into_iter().map(Value::from).collect();
    for changes in [
        json!({"temperature": 0.9}),
        json!({"temperature": 1.2, "top_p": 0.7, "top_k": 30}),
        json!({"temperature": 0.7, "min_p": 0.1, "frequency_penalty": 0.5, "repetition_penalty": 1.3}),
        json!({"temperature": 0.9, "response_format": {"type": "regex", "regex": "(yes|no), [a-z ]{3,12}[.]"}}),
    ] {
        let mut request = json!({"max_tokens": 24, "ignore_eos": true, "seed": 5});
        for (name, value) in changes.as_object().unwrap() {
            request[name] = value.clone();
        }
        let [cpu, gpu] =
            ["cpu", "cuda:0"].map(|device| complete("generate-llama", &prompts, &request, device, &[], &[]));
        assert_eq!(cpu.texts.len(), prompts.len(), "{changes}");
        assert_eq!(gpu.texts, cpu.texts, "{changes}: {}", String::from_utf8_lossy(&gpu.output.stderr));
    }
}

/// The fixture of a Llama for longer sequences.
fn with_context(tokens: usize) -> tempfile::TempDir {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/generate-llama");
    let folder = tempfile::tempdir().unwrap();
    for entry in walk(&fixture) {
        fs::copy(&entry, folder.path().join(entry.file_name().unwrap())).unwrap();
    }
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(tokens);
    fs::write(path, config.to_string()).unwrap();
    folder
}

#[test]
fn a_gpu_continues_a_long_text_as_a_cpu_does() {
    let model = with_context(1024);
    let prompts: Vec<Value> =
        [700, 3].map(|length| json!((0..length).map(|at| 5 + at * 7 % 300).collect::<Vec<_>>())).to_vec();
    let [cpu, gpu] = ["cpu", "cuda:0"]
        .map(|device| generate_from(model.path().to_str().unwrap(), &prompts, device, &[], &[]));
    assert_eq!(cpu.logprobs.len(), 48);
    assert_eq!(gpu.texts, cpu.texts, "{}", String::from_utf8_lossy(&gpu.output.stderr));
    let off = cpu.logprobs.iter().zip(&gpu.logprobs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off > 0.0 && off < 1e-3, "{off}");
}

#[test]
fn a_device_that_computes_a_decoder_wrongly_takes_no_work() {
    for idle in ["attend_blocks", "rotate", "add_rms_norm", "gate"] {
        let ran = generate("cuda:0", &[], &[("EMULATED_IDLE", idle)]);
        let said = String::from_utf8_lossy(&ran.output.stderr);
        assert!(said.contains("the vector of a known prompt of 40 tokens"), "{idle}: {said}");
        assert!(ran.texts.is_empty() && !ran.output.status.success());
    }
}

#[test]
fn a_step_that_finds_no_memory_is_halved_and_no_text_is_lost() {
    let cpu = generate("cpu", &[], &[]);
    let halved = generate("cuda:0", &[], &[("EMULATED_MEMORY", "1400000")]);
    let said = String::from_utf8_lossy(&halved.output.stderr);
    assert!(said.contains("trying its halves") && said.contains("OUT_OF_MEMORY"), "{said}");
    assert_eq!(halved.texts, cpu.texts);
}

#[test]
fn keys_and_values_that_do_not_fit_on_the_gpu_are_named_with_their_bytes() {
    let settings = ["pool[0].options.kv_tokens=100000"];
    let ran = generate("cuda:0", &settings, &[("EMULATED_MEMORY", "8000000")]);
    let said = String::from_utf8_lossy(&ran.output.stderr);
    for words in ["keys and values of 100512 tokens need 51462144 bytes", "OUT_OF_MEMORY", "lower kv_tokens"]
    {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    assert!(ran.texts.is_empty() && !ran.output.status.success());
}

#[test]
fn a_batch_that_finds_no_memory_is_halved_and_nothing_is_lost() {
    let folder = model(64, 2);
    let model = folder.path();
    let whole = run(&Run { model, device: "cuda:0", settings: &[], variables: &[], in_one_task: true });
    // The weights, and what the worker's own test takes, which are some two hundred tokens: NVML knows of 79 GiB, and so
    // does the plan. The inputs of a task come together, and so all are in one batch.
    let variables = [("EMULATED_MEMORY", "1300000")];
    let halved =
        run(&Run { model, device: "cuda:0", settings: &[], variables: &variables, in_one_task: true });
    let said = halved.said();
    assert!(said.contains("trying its halves") && said.contains("OUT_OF_MEMORY"), "{said}");
    assert!(largest_difference(&halved, &whole) < 1e-6);
}

#[test]
fn a_worker_that_is_shown_another_gpu_takes_no_work() {
    let words = format!("CUDA shows this process {OTHER} in its place");
    is_given_up(&[("EMULATED_SHOWS", OTHER)], &[], &[&words]);
}

#[test]
fn a_device_that_fails_at_its_work_is_given_up_with_no_wrong_answer() {
    let folder = tempfile::tempdir().unwrap();
    let fault = folder.path().join("fault");
    fs::write(&fault, "").unwrap();
    is_given_up(&[("EMULATED_FAULT", fault.to_str().unwrap())], &[], &["illegal memory access"]);
}

/// Its launcher gives it up, in these words, and no text is answered.
fn is_given_up(variables: &[(&str, &str)], settings: &[&str], words: &[&str]) {
    let folder = model(64, 2);
    let settings = [&["launcher.max_quick_failures=1"], settings].concat();
    let ran = run(&Run {
        model: folder.path(),
        device: "cuda:0",
        settings: &settings,
        variables,
        in_one_task: false,
    });
    for word in words {
        assert!(ran.said().contains(word), "{word:?} is not in {}", ran.said());
    }
    assert!(!ran.output.status.success());
    assert!(ran.answers.values().all(Result::is_err), "{:?}", ran.answers.keys());
}

#[test]
fn a_device_that_multiplies_wrongly_takes_no_work() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = folder.path().join("wrong");
    fs::write(&wrong, "").unwrap();
    let variables = [("EMULATED_WRONG", wrong.to_str().unwrap())];
    is_given_up(
        &variables,
        &["pool[0].dtype=f16"],
        &["it multiplies wrongly", "1 rows are wrong, row 0 first"],
    );
}

#[test]
fn a_device_that_multiplies_rightly_but_computes_wrongly_takes_no_work() {
    for dtype in ["f32", "f16", "bf16"] {
        let setting = format!("pool[0].dtype={dtype}");
        let differs = format!("tokens in {dtype} differs from that of a CPU");
        is_given_up(&[("EMULATED_IDLE", "activate")], &[&setting], &["the vector of a known text", &differs]);
    }
    is_given_up(&[("EMULATED_IDLE", "attend")], &[], &["the vector of a known text"]);
}

#[test]
fn a_device_far_slower_than_its_clock_says_takes_no_work_unless_allowed() {
    // A multiprocessor with a terahertz.
    let fast = [("EMULATED_CLOCK", "1000000000")];
    is_given_up(&fast, &[], &["it multiplies too slowly", "of the 128000 that", "20.0 % is asked for"]);
    let folder = model(64, 2);
    let settled = |settings: &[&str], clock| {
        let variables = [("EMULATED_CLOCK", clock)];
        run(&Run {
            model: folder.path(),
            device: "cuda:0",
            settings,
            variables: &variables,
            in_one_task: false,
        })
    };
    assert!(settled(&["pool[0].min_speed=0"], "1000000000").answers.values().all(Result::is_ok));
    assert!(settled(&[], "1000").answers.values().all(Result::is_ok), "a megahertz");
}

#[test]
fn a_device_that_the_driver_calls_failed_loses_its_worker_and_gets_none() {
    let folder = tempfile::tempdir().unwrap();
    let story = folder.path().join("story");
    fs::write(&story, "").unwrap();
    let variables = [("NVML_STORY", story.to_str().unwrap())];
    let words = ["killing the worker", "wants the GPU reset", "slot given up"];
    std::thread::scope(|scope| {
        // Told only once the worker runs. Otherwise none is started on the device.
        scope.spawn(|| {
            while !has_worker(&story) {
                std::thread::yield_now();
            }
            fs::write(&story, format!("wants {GPU} 1\n")).unwrap();
        });
        is_given_up(&variables, &["launcher.max_quick_failures=2"], &words);
    });
}

/// Whether a worker runs that was given this story.
fn has_worker(story: &Path) -> bool {
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let holds = |file: PathBuf, words: &str| {
        fs::read(file).is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(words))
    };
    let story = story.to_str().unwrap();
    processes
        .into_iter()
        .any(|it| holds(it.join("cmdline"), "\0worker\0") && holds(it.join("environ"), story))
}
