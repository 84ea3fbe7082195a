//! Text generation through the public interface of a model, held against what transformers computes with the
//! same weights (`scripts/make-generate-fixtures.py`), and against itself: a sequence's numbers are the same to
//! the bit in any company.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sconce::model::load::ModelFiles;
use sconce::model::load::gguf::Gguf;
use sconce::model::nets::decoder::config::DecoderConfig;
use sconce::model::nets::decoder::{Decoder, DecoderWeights};
use sconce::model::ops::causal::Span;
use sconce::model::ops::kv::{BLOCK, KvBlocks, KvNumbers};
use sconce::model::ops::{NumberFormat, RowFormat, may_use_int16, may_use_vnni};
use sconce::model::tasks::generate::{self, Answer, GenerateProcessor, Piece, Prompt, TextGenerator};
use sconce::model::{
    Advance, Device, Dtype, Effort, Feed, Generate, LoadSpec, Processor, Row, SizedInput, Slot, TaskError,
};
use sconce::protocol::{Headers, Message, Properties, TaskErrorKind};
use serde_json::{Value, json};

/// The context of a pool that computes a sequence as the reference library does, which begins with `prompt` tokens and ends
/// with `all`. Phi-3's angles depend on whether the context is longer than the original one of 128 tokens, and the reference
/// library's on whether the sequence is. They change in the middle of a sequence there, so that none fits one that grows past
/// 128 tokens.
fn context(name: &str, prompt: usize, all: usize) -> Option<usize> {
    match name.contains("phi3") {
        true if all <= 128 => Some(128),
        true if prompt <= 128 => None,
        _ => Some(256),
    }
}
const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

/// The names of the fixtures of models with random weights. Another one is tested as soon as its folder is there.
fn tiny() -> Vec<String> {
    let names = fixtures("", "");
    names.into_iter().filter(|name| name.starts_with("generate-")).collect()
}

/// The names in a folder of the fixtures that end like this, without that end, in order.
fn fixtures(folder: &str, end: &str) -> Vec<String> {
    let entries = std::fs::read_dir(fixture(folder)).expect("fixtures").flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter_map(|name| Some(name.strip_suffix(end)?.to_owned())).collect();
    names.sort();
    names
}

/// The tiny models with their folders, and the real one.
fn all_models() -> impl Iterator<Item = (String, PathBuf)> {
    let tiny = tiny().into_iter().map(|name| (name.clone(), fixture(&name)));
    tiny.chain(std::iter::once_with(|| ("smollm2".to_owned(), smollm2())))
}

fn smollm2() -> PathBuf {
    let path = root().join("models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is missing: run scripts/fetch-smollm2", path.display());
    path
}

fn expected(name: &str) -> Value {
    let file = std::fs::read(fixture(name).join("expected.json")).expect("a fixture");
    serde_json::from_slice(&file).expect("JSON")
}

fn spec(path: &Path, options: Value) -> LoadSpec {
    let Value::Object(options) = options else { panic!("options are an object") };
    let options = options.into_iter().collect();
    LoadSpec { max_inputs: 64, options, ..LoadSpec::new(path.to_str().expect("a path in UTF-8")) }
}

fn load(path: &Path, options: Value) -> (GenerateProcessor, TextGenerator) {
    sconce::model::sequences::grammar::set_program(env!("CARGO_BIN_EXE_sconce"));
    generate::load(&spec(path, options), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"))
}

fn message(url: &str, body: &Value) -> Message {
    let headers = Headers::from([("url".into(), url.into())]);
    let properties = Properties { headers, message_id: Some("task-1".into()), ..Properties::default() };
    Message { properties, body: body.to_string().into() }
}

/// A preprocessed task, whose inputs are all made.
type Prepared<P> = (<P as Processor>::Context, Vec<SizedInput<<P as Processor>::Input>>);

fn preprocess(
    processor: &GenerateProcessor,
    url: &str,
    body: &Value,
) -> Result<Prepared<GenerateProcessor>, TaskError> {
    let (context, inputs) = processor.preprocess(&message(url, body))?;
    Ok((context, inputs.all()?))
}

fn inputs(processor: &GenerateProcessor, url: &str, body: &Value) -> Vec<SizedInput<Prompt>> {
    preprocess(processor, url, body).unwrap_or_else(|error| panic!("{body}: {error}")).1
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|it| it.as_u64().expect("an id") as u32).collect()
}

/// When sequences begin, and in which chunks their prompts are fed.
#[derive(Clone, Copy)]
struct Plan {
    chunk: usize,
    /// Sequence i begins in step i times this.
    apart: usize,
}

/// Computes all prompts, and closes them. Returns the pieces and the answer of each.
fn run(
    generator: &mut TextGenerator,
    prompts: &[SizedInput<Prompt>],
    plan: Plan,
) -> Vec<(Vec<Piece>, Answer)> {
    let mut left: BTreeMap<usize, usize> = BTreeMap::new();
    let mut pieces = vec![Vec::new(); prompts.len()];
    let mut answers: Vec<Option<Answer>> = vec![None; prompts.len()];
    let mut step = 0;
    while answers.iter().any(Option::is_none) {
        for (index, prompt) in prompts.iter().enumerate() {
            if index * plan.apart == step || plan.apart == 0 && step == 0 {
                generator.open(Slot(index), &prompt.input).unwrap_or_else(|error| panic!("{error}"));
                left.insert(index, prompt.tokens);
            }
        }
        let rows: Vec<Row> = left
            .iter()
            .map(|(index, left)| Row { slot: Slot(*index), feed: Feed::Tokens((*left).clamp(1, plan.chunk)) })
            .collect();
        step += 1;
        for (row, advance) in rows.iter().zip(generator.step(&rows).unwrap_or_else(|error| panic!("{error}")))
        {
            let index = row.slot.0;
            let advance = advance.unwrap_or_else(|error| panic!("{error}"));
            if let Some(left) = left.get_mut(&index).filter(|_| !matches!(advance, Advance::Waits)) {
                *left = left.saturating_sub(row.feed.tokens());
            }
            match advance {
                Advance::Fed | Advance::Again | Advance::Waits => {}
                Advance::More(piece) => pieces[index].push(piece),
                Advance::Done(piece, answer) => {
                    pieces[index].extend(piece);
                    answers[index] = Some(answer);
                    left.remove(&index);
                    generator.close(row.slot);
                }
            }
        }
    }
    pieces.into_iter().zip(answers.into_iter().flatten()).collect()
}

const AT_ONCE: Plan = Plan { chunk: usize::MAX, apart: 0 };

/// The answer of a whole request.
fn reply((processor, generator): &mut (GenerateProcessor, TextGenerator), url: &str, body: &Value) -> Value {
    let (context, inputs) =
        preprocess(processor, url, body).unwrap_or_else(|error| panic!("{body}: {error}"));
    let answers = run(generator, &inputs, AT_ONCE).into_iter().map(|(_, answer)| answer);
    let body = processor.finish(context, answers.collect()).unwrap_or_else(|error| panic!("{error}"));
    let mut reply: Value = serde_json::from_slice(&body.bytes).expect("JSON");
    reply["seed"] = body.headers["seed"].as_i64().into();
    reply
}

/// The numbers of the next token after all of `ids`, fed in chunks.
fn logits(path: &Path, ids: &[u32], chunk: usize) -> Vec<f32> {
    logits_in(NumberFormat::F32, path, ids, chunk)
}

/// As [`logits`], with the matrices of safetensors files in this format.
fn logits_in(format: NumberFormat, path: &Path, ids: &[u32], chunk: usize) -> Vec<f32> {
    let (config, weights) = if path.is_file() {
        let gguf = Gguf::read(path).expect("a GGUF file");
        let config = DecoderConfig::from_gguf(&gguf).expect("metadata");
        let weights = DecoderWeights::from_gguf(gguf, &config);
        (config, weights)
    } else {
        let files = ModelFiles::locate(path.to_str().expect("UTF-8")).expect("a folder");
        let config = DecoderConfig::read(&files, "it").unwrap_or_else(|error| panic!("{error}"));
        let weights = DecoderWeights::from_safetensors(&files, &config, format)
            .unwrap_or_else(|error| panic!("{error}"));
        (config, weights)
    };
    let longest = context(&path.to_string_lossy(), ids.len(), ids.len()).unwrap_or_default().max(ids.len());
    let mut decoder = Decoder::load(&weights, &config, longest).unwrap_or_else(|error| panic!("{error}"));
    let blocks: Vec<u32> = (0..ids.len().div_ceil(BLOCK) as u32).collect();
    let mut kv = KvBlocks::new(config.kv_shape(KvNumbers::F32), blocks.len()).expect("memory");
    let mut last = Vec::new();
    for (index, part) in ids.chunks(chunk).enumerate() {
        let span = Span { blocks: &blocks, first: index * chunk, count: part.len() };
        decoder.forward(&mut kv, part, &[span], &[part.len() - 1], &mut last);
    }
    last
}

#[test]
fn tokens_are_those_of_the_reference_library() {
    for (name, path) in all_models() {
        let (name, path) = (&*name, &*path);
        let (processor, _) = load(path, json!({}));
        let expected = expected(name);
        for trip in expected["round_trips"].as_array().expect("a list") {
            let (text, ids) = (&trip["text"], numbers(&trip["ids"]));
            let ours = match preprocess(&processor, COMPLETIONS, &json!({"prompt": text, "max_tokens": 1})) {
                Ok((_, inputs)) => inputs[0].input.ids.to_vec(),
                Err(error) if error.message.contains("has no tokens") => Vec::new(),
                Err(error) => panic!("{error}"),
            };
            assert_eq!(ours, ids, "{name}: {text}");
        }
        for chat in expected["chats"].as_array().expect("a list") {
            let body = json!({"messages": chat["messages"], "max_tokens": 1});
            let ours = inputs(&processor, CHAT, &body).remove(0).input.ids.to_vec();
            assert_eq!(ours, numbers(&chat["ids"]), "{name}: {}", chat["rendered"]);
        }
    }
}

#[test]
fn safetensors_weights_with_fewer_bits_give_nearly_the_same_logits_however_the_prompt_is_cut() {
    for name in &tiny() {
        let path = fixture(name);
        // Weights of random numbers make differences larger from layer to layer.
        for (format, dtype, most) in
            [(NumberFormat::Bf16, Dtype::Bf16, 0.06), (NumberFormat::Bits8, Dtype::Int8, 0.2)]
        {
            let spec = LoadSpec { dtype, ..spec(&path, json!({})) };
            generate::load(&spec, &Device::Cpu).map(drop).unwrap_or_else(|error| panic!("{name}: {error}"));
            let expected = expected(name);
            let prompts = expected["prompts"].as_array().expect("a list");
            for ids in prompts.iter().map(|prompt| numbers(&prompt["ids"])) {
                let (exact, found) =
                    (logits(&path, &ids, ids.len()), logits_in(format, &path, &ids, ids.len()));
                let error: f32 = exact.iter().zip(&found).map(|(a, b)| (a - b).powi(2)).sum();
                let off = (error / exact.iter().map(|x| x * x).sum::<f32>()).sqrt();
                // Where another expert is chosen, the numbers are others.
                let most = if name.contains("moe") { 2.0 * most } else { most };
                assert!(off > 0.0 && off < most, "{name} {dtype:?}: {off}");
                assert_eq!(logits_in(format, &path, &ids, 3), found, "{name} {dtype:?}");
            }
        }
        let in_f16 = LoadSpec { dtype: Dtype::F16, ..spec(&path, json!({})) };
        let refused = generate::load(&in_f16, &Device::Cpu).err().expect("a refusal").to_string();
        assert!(
            refused.contains("dtype is \"f16\"; on a CPU text is generated in f32, bf16 or int8"),
            "{refused}"
        );
    }
    let int8 = LoadSpec { dtype: Dtype::Int8, ..spec(&smollm2(), json!({})) };
    let refused = generate::load(&int8, &Device::Cpu).err().expect("a refusal").to_string();
    assert!(refused.contains("the weights of a GGUF file are kept as in the file"), "{refused}");
}

/// The largest difference is 3e-5 (Llama 3's), twice the difference of the library in f32 from itself in f64. A pool
/// with `dtype = "auto"` may choose bf16 on a CPU, whose log probabilities differ by 1e-4 to 2e-3 for a tied Granite.
#[test]
fn logits_are_those_of_the_reference_library_however_the_prompt_is_cut() {
    for name in &tiny() {
        for prompt in expected(name)["prompts"].as_array().expect("a list") {
            let ids = numbers(&prompt["ids"]);
            let ours = logits(&fixture(name), &ids, usize::MAX >> 1);
            for (ours, right) in ours.iter().zip(prompt["last_logits"].as_array().expect("a list")) {
                let off = (f64::from(*ours) - right.as_f64().expect("a number")).abs();
                assert!(off < 1e-3, "{name}, {} tokens: {off}", ids.len());
            }
            for chunk in [1, 7, 33] {
                assert_eq!(logits(&fixture(name), &ids, chunk), ours, "{name}: chunks of {chunk}");
            }
        }
    }
}

/// The folder of a model of images and text whose text part is that of `name`, as transformers saves it.
fn with_text_part(name: &str, model_type: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let read = |file: &str| std::fs::read(fixture(name).join(file)).expect("a fixture");
    let write =
        |file: &str, content: Vec<u8>| std::fs::write(folder.path().join(file), content).expect("a disk");
    let text: Value = serde_json::from_slice(&read("config.json")).expect("JSON");
    let config = json!({"model_type": model_type, "architectures": ["It"], "text_config": text});
    write("config.json", config.to_string().into_bytes());
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        write(file, read(file));
    }
    let tensors = candle_core::safetensors::load(fixture(name).join("model.safetensors"), &Device::Cpu);
    let renamed =
        tensors.expect("tensors").into_iter().map(|(key, tensor)| (format!("language_model.{key}"), tensor));
    let path = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&renamed.collect(), path).expect("a disk");
    folder
}

#[test]
fn the_text_part_of_a_model_of_images_and_text_is_the_decoder() {
    for (name, model_type) in [("generate-gemma3", "gemma3"), ("generate-ministral3", "mistral3")] {
        let folder = with_text_part(name, model_type);
        let ids = numbers(&expected(name)["prompts"][3]["ids"]);
        let whole = logits(&fixture(name), &ids, usize::MAX >> 1);
        assert_eq!(logits(folder.path(), &ids, usize::MAX >> 1), whole, "{name}");
    }
}

#[test]
fn logits_of_gguf_files_are_those_of_the_reference_library() {
    // llama.cpp reads these files with the same results (`scripts/make-gguf-fixtures.py`).
    for name in fixtures("gguf", ".gguf") {
        let fixture_name = format!("generate-{name}");
        let path = fixture("gguf").join(format!("{name}.gguf"));
        for prompt in expected(&fixture_name)["prompts"].as_array().expect("a list") {
            let ids = numbers(&prompt["ids"]);
            // Phi-3's context is found by its name.
            let ours = logits(&path, &ids, usize::MAX >> 1);
            for (ours, right) in ours.iter().zip(prompt["last_logits"].as_array().expect("a list")) {
                let off = (f64::from(*ours) - right.as_f64().expect("a number")).abs();
                assert!(off < 1e-3, "{name}, {} tokens: {off}", ids.len());
            }
        }
    }
}

#[test]
fn logits_of_real_quantised_weights_are_those_of_the_same_numbers_in_f32() {
    for prompt in expected("smollm2")["prompts"].as_array().expect("a list") {
        let ours = logits(&smollm2(), &numbers(&prompt["ids"]), usize::MAX >> 1);
        for pair in prompt["top_logits"].as_array().expect("a list") {
            let (id, right) = (pair[0].as_u64().expect("an id"), pair[1].as_f64().expect("a number"));
            let off = (f64::from(ours[id as usize]) - right).abs();
            assert!(off < 1e-3, "{}: token {id} is off by {off}", prompt["text"]);
        }
    }
}

#[test]
fn greedy_text_is_that_of_the_reference_library() {
    for (name, path) in all_models() {
        let (name, path) = (&*name, &*path);
        let of_context = |context: usize| match name {
            "smollm2" => load(path, json!({"activations": "f32"})),
            _ => load(path, json!({"activations": "f32", "context": context})),
        };
        let mut models = BTreeMap::new();
        for prompt in expected(name)["prompts"].as_array().expect("a list") {
            let count = prompt["greedy"].as_array().expect("a list").len();
            let tokens = numbers(&prompt["ids"]).len();
            let Some(context) = context(name, tokens, tokens + count) else { continue };
            let model = models.entry(context).or_insert_with(|| of_context(context));
            let body =
                json!({"prompt": prompt["ids"], "max_tokens": count, "temperature": 0, "ignore_eos": true});
            let ours = reply(model, COMPLETIONS, &body);
            assert_eq!(ours["choices"][0]["text"], prompt["text_out"], "{name}: {}", prompt["text"]);
        }
    }
}

#[test]
fn a_conversation_is_answered_as_by_the_reference_library() {
    let mut model = load(&smollm2(), json!({"activations": "f32"}));
    for chat in expected("smollm2")["chats"].as_array().expect("a list") {
        let body = json!({"messages": chat["messages"], "max_tokens": 64, "temperature": 0});
        let ours = reply(&mut model, CHAT, &body);
        assert_eq!(ours["choices"][0]["message"]["content"], chat["text_out"], "{}", chat["rendered"]);
        assert_eq!(ours["object"], "chat.completion");
    }
}

/// Prompts of different lengths and settings, each drawn with a temperature and its probabilities told.
fn mixed(processor: &GenerateProcessor) -> Vec<SizedInput<Prompt>> {
    let long = "The quick brown fox jumps over the lazy dog. ".repeat(12);
    let texts = [
        "Once upon a time".to_owned(),
        "The capital of France is".to_owned(),
        long.clone(),
        format!("{long}And then"),
        "A".to_owned(),
        "def fibonacci(n):\n".to_owned(),
        format!("{long}And so"),
        "1, 2, 3,".to_owned(),
    ];
    let body = |(index, text): (usize, &String)| {
        let temperature = [0.0, 0.7, 1.0][index % 3];
        let top_p = [1.0, 0.9][index % 2];
        let max_tokens = 12 + index * 5;
        json!({"prompt": text, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
               "seed": index, "logprobs": 5, "ignore_eos": true})
    };
    texts.iter().enumerate().map(|text| inputs(processor, COMPLETIONS, &body(text)).remove(0)).collect()
}

#[test]
fn a_sequence_is_the_same_to_the_bit_together_late_cut_or_partly_reused() {
    for options in [json!({}), json!({"kv_numbers": "bf16", "activations": "f32"})] {
        let (processor, _) = load(&smollm2(), options.clone());
        let fresh = || load(&smollm2(), options.clone()).1;
        let prompts = mixed(&processor);
        let mut alone = Vec::new();
        for prompt in &prompts {
            alone.extend(run(&mut fresh(), std::slice::from_ref(prompt), AT_ONCE));
        }
        let text = |runs: &[(Vec<Piece>, Answer)]| -> Vec<(String, Vec<_>)> {
            let of = |(_, answer): &(Vec<Piece>, Answer)| {
                (answer.text.clone(), answer.scores.clone().unwrap_or_default())
            };
            runs.iter().map(of).collect()
        };
        let right = text(&alone);
        assert!(right.iter().all(|(_, scores)| scores.len() >= 12), "{right:?}");
        for plan in
            [AT_ONCE, Plan { chunk: 1, apart: 0 }, Plan { chunk: 50, apart: 3 }, Plan { chunk: 7, apart: 5 }]
        {
            assert_eq!(text(&run(&mut fresh(), &prompts, plan)), right, "chunks of {}", plan.chunk);
        }
        // A second time in one generator, whose blocks hold the beginnings.
        let mut used = fresh();
        run(&mut used, &prompts, AT_ONCE);
        let again = run(&mut used, &prompts, Plan { chunk: 40, apart: 2 });
        assert_eq!(text(&again), right);
        assert!(again[2].1.cached >= 64, "{} tokens were reused", again[2].1.cached);
        assert_eq!(again[4].1.cached, 0);
    }
}

#[test]
fn with_windows_or_experts_a_sequence_is_the_same_to_the_bit_too() {
    for name in ["generate-mistral", "generate-gemma2", "generate-gemma3", "generate-qwen3_moe"] {
        let fresh = || load(&fixture(name), json!({"kv_tokens": 1024}));
        let (processor, mut used) = fresh();
        let expected = expected(name);
        let texts = expected["prompts"].as_array().expect("a list").iter().map(|prompt| &prompt["ids"]);
        let body = |(seed, ids): (usize, &Value)| {
            json!({"prompt": ids, "max_tokens": 60, "temperature": 0.8, "seed": seed, "logprobs": 3,
                   "ignore_eos": true})
        };
        let prompts: Vec<SizedInput<Prompt>> =
            texts.enumerate().map(|text| inputs(&processor, COMPLETIONS, &body(text)).remove(0)).collect();
        let results = |runs: Vec<(Vec<Piece>, Answer)>| -> Vec<_> {
            runs.into_iter().map(|(_, answer)| (answer.text, answer.scores)).collect()
        };
        let alone: Vec<_> = prompts
            .iter()
            .flat_map(|it| results(run(&mut fresh().1, std::slice::from_ref(it), AT_ONCE)))
            .collect();
        for plan in
            [AT_ONCE, Plan { chunk: 1, apart: 0 }, Plan { chunk: 50, apart: 3 }, Plan { chunk: 7, apart: 5 }]
        {
            assert_eq!(
                results(run(&mut fresh().1, &prompts, plan)),
                alone,
                "{name}: chunks of {}",
                plan.chunk
            );
            // Blocks that earlier runs left behind are reused.
            assert_eq!(results(run(&mut used, &prompts, plan)), alone, "{name}: {}", plan.chunk);
        }
    }
}

/// A copy of a model with random weights, whose `config.json` and tensors are changed.
fn changed(
    name: &str,
    config: &Value,
    change: impl Fn(&mut std::collections::HashMap<String, candle_core::Tensor>),
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = (|file: &str| fixture(name).join(file), |file: &str| folder.path().join(file));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from(file), to(file)).expect("a fixture");
    }
    let mut fields: Value =
        serde_json::from_slice(&std::fs::read(from("config.json")).expect("a fixture")).expect("JSON");
    config.as_object().expect("fields").iter().for_each(|(key, value)| fields[key] = value.clone());
    std::fs::write(to("config.json"), fields.to_string()).expect("a disk");
    let mut tensors =
        candle_core::safetensors::load(from("model.safetensors"), &Device::Cpu).expect("tensors");
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, to("model.safetensors")).expect("a disk");
    folder
}

#[test]
fn tensors_that_do_not_fit_the_configuration_are_named_with_both_shapes() {
    for (name, config, tensor, shapes) in [
        (
            "generate-llama",
            json!({"intermediate_size": 95}),
            "mlp.down_proj.weight",
            ["[64, 96]", "[64, 95]"],
        ),
        ("generate-phi3", json!({"num_key_value_heads": 4}), "qkv_proj.weight", ["[128, 64]", "[192, 64]"]),
        ("generate-qwen3", json!({"head_dim": 16}), "self_attn.q_proj.weight", ["[96, 64]", "[64, 64]"]),
        ("generate-qwen3_moe", json!({"num_local_experts": 5}), "mlp.gate.weight", ["[6, 32]", "[5, 32]"]),
        (
            "generate-qwen3_moe",
            json!({"moe_intermediate_size": 31}),
            "experts.0.gate_proj.weight",
            ["[32, 32]", "[31, 32]"],
        ),
        (
            "generate-gemma2",
            json!({"num_hidden_layers": 4, "layer_types": null}),
            "model.layers.3.",
            ["missing", ""],
        ),
    ] {
        let folder = changed(name, &config, |_| {});
        let refused = generate::load(&spec(folder.path(), json!({})), &Device::Cpu).err();
        let error = refused.unwrap_or_else(|| panic!("{name} {config}")).to_string();
        assert!(
            [tensor, shapes[0], shapes[1]].iter().all(|words| error.contains(words)),
            "{config}: {error}"
        );
    }
}

#[test]
fn a_router_without_numbers_fails_its_own_sequence_and_is_named() {
    // The embedding of one token is large in one of the numbers that the router reads, where its weights overflow.
    const TOKEN: u32 = 7;
    let folder = changed("generate-qwen3_moe", &json!({}), |tensors| {
        let mut change = |name: &str, change: &dyn Fn(&mut Vec<f32>)| {
            let tensor = &tensors[name];
            let mut numbers: Vec<f32> =
                tensor.flatten_all().and_then(|tensor| tensor.to_vec1()).expect("numbers");
            change(&mut numbers);
            let tensor =
                candle_core::Tensor::from_vec(numbers, tensor.shape(), &Device::Cpu).expect("a tensor");
            tensors.insert(name.to_owned(), tensor);
        };
        change("model.embed_tokens.weight", &|numbers| numbers[TOKEN as usize * 32] = 1e4);
        change("model.layers.0.post_attention_layernorm.weight", &|numbers| numbers[0] = 1.0);
        // Of the third expert. The other tokens have at most about 3 there, and this one has √32.
        change("model.layers.0.mlp.gate.weight", &|numbers| {
            numbers[2 * 32..3 * 32].fill(0.0);
            numbers[2 * 32] = 8e37;
        });
    });
    let words = "the router of layer 0 (mlp.gate, in GGUF files ffn_gate_inp) gave expert 2 the score inf";
    let on_host = || generate::load(&spec(folder.path(), json!({})), &Device::Cpu);
    let by_candle = || generate::load_onto(&spec(folder.path(), json!({})), &Device::Cpu);
    for load in [&on_host as &dyn Fn() -> _, &by_candle] {
        let (processor, mut generator) = load().unwrap_or_else(|error| panic!("{error}"));
        let prompt = |ids: &[u32]| {
            let body = json!({"prompt": [ids], "max_tokens": 8, "temperature": 0, "ignore_eos": true});
            inputs(&processor, COMPLETIONS, &body).remove(0)
        };
        let good = prompt(&[5, 6, 8, 9]);
        let alone = run(&mut generator, std::slice::from_ref(&good), AT_ONCE);
        let bad = [prompt(&[5, TOKEN, 8]), prompt(&[5, TOKEN, 8, 9])];
        for (slot, prompt) in [&bad[0], &good, &bad[1]].into_iter().enumerate() {
            generator.open(Slot(slot), &prompt.input).unwrap_or_else(|error| panic!("{error}"));
        }
        let rows: Vec<Row> = [3, 4, 2]
            .into_iter()
            .zip(0..)
            .map(|(tokens, slot)| Row { slot: Slot(slot), feed: Feed::Tokens(tokens) })
            .collect();
        let step = generator.step(&rows).unwrap_or_else(|error| panic!("{error}"));
        // The last of them is not fed wholly, so that nothing is chosen after it.
        for index in [0, 2] {
            let error = step[index].as_ref().expect_err("a fault");
            assert!(error.message.contains(words), "{error}");
        }
        assert!(step[1].is_ok());
        (0..3).for_each(|slot| generator.close(Slot(slot)));
        // Nothing of it is reused, and the next step is as if it had not been.
        assert_eq!(run(&mut generator, std::slice::from_ref(&good), AT_ONCE), alone);
    }
}

/// What a GPU runs, on the CPU.
fn by_candle(path: &Path, options: Value, dtype: Dtype) -> (GenerateProcessor, TextGenerator) {
    let spec = LoadSpec { dtype, ..spec(path, options) };
    generate::load_onto(&spec, &Device::Cpu).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn by_candle_texts_are_the_references_also_cut_or_with_reused_beginnings() {
    for (name, path) in all_models() {
        let (name, path) = (&*name, &*path);
        let (processor, mut generator) = by_candle(path, json!({"context": 256}), Dtype::F32);
        let expected = expected(name);
        let all = expected["prompts"].as_array().expect("a list");
        let has_context = |prompt: &&Value| {
            let tokens = numbers(&prompt["ids"]).len();
            context(name, tokens, tokens + 48) == Some(256)
        };
        let prompts: Vec<&Value> = all.iter().filter(has_context).collect();
        let ask = |prompt: &&Value| {
            let count = prompt["greedy"].as_array().expect("a list").len();
            let body =
                json!({"prompt": prompt["ids"], "max_tokens": count, "temperature": 0, "ignore_eos": true});
            inputs(&processor, COMPLETIONS, &body).remove(0)
        };
        let asked: Vec<SizedInput<Prompt>> = prompts.iter().map(ask).collect();
        let longest = prompts.iter().map(|prompt| numbers(&prompt["ids"]).len()).max().unwrap_or_default();
        let plans = [AT_ONCE, Plan { chunk: 1, apart: 0 }, Plan { chunk: 40, apart: 3 }];
        // The real weights are large: once.
        let plans = if name == "smollm2" { &plans[2..] } else { &plans[..] };
        for (run_number, plan) in plans.iter().copied().enumerate() {
            let answers = run(&mut generator, &asked, plan);
            for ((_, answer), prompt) in answers.iter().zip(&prompts) {
                assert_eq!(answer.text, prompt["text_out"], "{name}, {}: {}", plan.chunk, prompt["text"]);
            }
            let cached: usize = answers.iter().map(|(_, answer)| answer.cached).sum();
            assert_eq!(cached > 0, run_number > 0 && longest > BLOCK, "{name}");
        }
    }
}

#[test]
fn by_candles_operations_a_sequence_is_nearly_the_same_in_any_company() {
    let (processor, mut generator) = by_candle(&smollm2(), json!({"kv_tokens": 4096}), Dtype::F32);
    let mut prompts = mixed(&processor);
    prompts.truncate(5);
    let alone: Vec<_> =
        prompts.iter().flat_map(|it| run(&mut generator, std::slice::from_ref(it), AT_ONCE)).collect();
    let together = run(&mut generator, &prompts, Plan { chunk: 50, apart: 1 });
    let (mut same, mut all, mut most) = (0, 0, 0.0_f32);
    for ((_, alone), (_, together)) in alone.iter().zip(&together) {
        let scores = |answer: &Answer| answer.scores.clone().expect("they were asked for");
        let (alone, together) = (scores(alone), scores(together));
        all += alone.len();
        for (a, b) in alone.iter().zip(&together).take_while(|(a, b)| a.bytes == b.bytes) {
            same += 1;
            most = most.max((a.logprob - b.logprob).abs());
        }
    }
    assert!(most < 1e-3, "{most}");
    // A token that is drawn among the least likely ones may be another, and what follows it is another text.
    assert!(same * 10 > all * 8, "{same} of {all}");
}

#[test]
fn what_makes_no_sense_on_a_gpu_is_refused_by_name() {
    let spec = spec(&fixture("generate-llama"), json!({"activations": "int8"}));
    let error = generate::load_onto(&spec, &Device::Cpu).err().map(|error| error.to_string());
    let expected = "a GPU computes with the weights' dtype";
    assert!(error.as_ref().is_some_and(|error| error.contains(expected)), "{error:?}");
}

#[test]
fn with_several_threads_the_numbers_are_the_same() {
    let (processor, mut one) = load(&smollm2(), json!({}));
    let prompts = mixed(&processor);
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    let alone = pool(1).install(|| run(&mut one, &prompts, AT_ONCE));
    let mut two = load(&smollm2(), json!({})).1;
    assert_eq!(pool(2).install(|| run(&mut two, &prompts, AT_ONCE)), alone);
}

/// Calls `each` with the logits after each of these tokens.
fn each_logits(
    decoder: &mut Decoder,
    config: &DecoderConfig,
    numbers: KvNumbers,
    ids: &[u32],
    mut each: impl FnMut(usize, &[f32]),
) {
    const CHUNK: usize = 64;
    let blocks: Vec<u32> = (0..ids.len().div_ceil(BLOCK) as u32).collect();
    let mut kv = KvBlocks::new(config.kv_shape(numbers), blocks.len()).expect("memory");
    let mut logits = Vec::new();
    for (chunk, ids) in ids.chunks(CHUNK).enumerate() {
        let span = Span { blocks: &blocks, first: chunk * CHUNK, count: ids.len() };
        let wanted: Vec<usize> = (0..ids.len()).collect();
        decoder.forward(&mut kv, ids, &[span], &wanted, &mut logits);
        let rows = logits.chunks_exact(config.vocabulary).enumerate();
        rows.for_each(|(row, logits)| each(chunk * CHUNK + row, logits));
    }
}

/// The mean of the negative log-likelihoods of the tokens after the first.
fn mean_nll(decoder: &mut Decoder, config: &DecoderConfig, numbers: KvNumbers, ids: &[u32]) -> f64 {
    let mut total = 0.0;
    each_logits(decoder, config, numbers, &ids[..ids.len() - 1], |position, row| {
        let most = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
        let sum: f64 = row.iter().map(|x| (f64::from(*x) - most).exp()).sum();
        total += sum.ln() + most - f64::from(row[ids[position + 1] as usize]);
    });
    total / (ids.len() - 1) as f64
}

fn gemma3() -> PathBuf {
    let path = root().join("models/gemma-3-270m/gemma-3-270m-q4_k_m.gguf");
    assert!(path.is_file(), "{} is missing: run scripts/fetch-gemma3", path.display());
    path
}

#[test]
fn gemma3_has_the_tokens_of_llama_cpp_and_the_numbers_of_transformers() {
    let expected = expected("gemma-3-270m");
    let (processor, _) = load(&gemma3(), json!({"context": 512}));
    let gguf = Gguf::read(&gemma3()).expect("a GGUF file");
    let config = DecoderConfig::from_gguf(&gguf).expect("metadata");
    let weights = DecoderWeights::from_gguf(gguf, &config);
    let mut decoder = Decoder::load(&weights, &config, 1_024).unwrap_or_else(|error| panic!("{error}"));
    for prompt in expected["prompts"].as_array().expect("a list") {
        let (text, ids) = (&prompt["text"], numbers(&prompt["ids"]));
        let ours = inputs(&processor, COMPLETIONS, &json!({"prompt": text})).remove(0).input.ids;
        assert_eq!(*ours, *ids, "{text}");
        // llama.cpp rounds the activations to 8 bits, so that some of its tokens are not the likeliest: by as much as in
        // transformers, in f32.
        let all = [&ids[..], &numbers(&prompt["greedy"])].concat();
        let mut behind = 0.0_f32;
        each_logits(&mut decoder, &config, KvNumbers::F32, &all[..all.len() - 1], |position, row| {
            if position + 1 >= ids.len() {
                let most = row.iter().copied().fold(f32::MIN, f32::max);
                behind = behind.max(most - row[all[position + 1] as usize]);
            }
        });
        let expected = prompt["behind"].as_f64().expect("a number");
        assert!((f64::from(behind) - expected).abs() < 2e-3, "{text}: {behind}, not {expected}");
    }
    let perplexity = &expected["perplexity"];
    let ours = mean_nll(&mut decoder, &config, KvNumbers::F32, &numbers(&perplexity["ids"]));
    for (name, most) in [("nll", 1e-4), ("rounded_nll", 0.02)] {
        let off = (ours - perplexity[name].as_f64().expect("a number")).exp() - 1.0;
        assert!(off.abs() < most, "{name}: perplexity is off by {:.4} %", off * 100.0);
    }
}

#[test]
fn the_perplexity_of_a_real_text_is_that_of_the_reference_library() {
    let expected = &expected("smollm2")["perplexity"];
    let ids = numbers(&expected["ids"]);
    let gguf = Gguf::read(&smollm2()).expect("a GGUF file");
    let config = DecoderConfig::from_gguf(&gguf).expect("metadata");
    let mut weights = DecoderWeights::from_gguf(gguf, &config);
    let mut kinds = vec![
        (RowFormat::F32, KvNumbers::F32, 1e-4),
        (RowFormat::F32, KvNumbers::Bf16, 0.005),
        (RowFormat::Int16, KvNumbers::F32, 1e-4),
        (RowFormat::Int8, KvNumbers::F32, 0.005),
    ];
    kinds.retain(|(rows, ..)| match rows {
        RowFormat::Int16 => may_use_int16(),
        RowFormat::Int8 => may_use_vnni(),
        RowFormat::F32 | RowFormat::Bf16 => true,
    });
    for (rows, numbers, most) in kinds {
        weights.multiply_rows_as(rows);
        let mut decoder = Decoder::load(&weights, &config, 1_024).unwrap_or_else(|error| panic!("{error}"));
        let ours = mean_nll(&mut decoder, &config, numbers, &ids);
        let right = expected["nll"].as_f64().expect("a number");
        let off = (ours - right).exp() - 1.0;
        assert!(off.abs() < most, "{rows:?}, {numbers:?}: perplexity is off by {:.4} %", off * 100.0);
    }
}

#[test]
fn answers_end_at_stop_strings_tokens_and_limits() {
    let mut model = load(&smollm2(), json!({}));
    let counting = "Count: one, two, three, four, five,";
    let ask = |more: Value| {
        let mut body = json!({"prompt": counting, "max_tokens": 20, "temperature": 0});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    };
    let whole = reply(&mut model, COMPLETIONS, &ask(json!({})));
    let text = whole["choices"][0]["text"].as_str().expect("a text").to_owned();
    assert!(text.contains(" eight") && whole["choices"][0]["finish_reason"] == "length", "{whole}");
    let stopped = reply(&mut model, COMPLETIONS, &ask(json!({"stop": [" eig", "nine"]})));
    assert_eq!(stopped["choices"][0]["text"], text[..text.find(" eig").expect("it is there")]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert!(stopped["usage"]["completion_tokens"].as_u64() < Some(20));
    let echoed = reply(&mut model, COMPLETIONS, &ask(json!({"echo": true, "n": 2, "max_tokens": 3})));
    let both: Vec<&str> = (0..2).filter_map(|index| echoed["choices"][index]["text"].as_str()).collect();
    assert!(both.len() == 2 && both.iter().all(|text| text.starts_with(counting)), "{echoed}");
    assert_eq!(echoed["usage"]["completion_tokens"], 6);
}

#[test]
fn a_seed_repeats_a_text_and_a_task_without_one_has_that_of_its_id() {
    let mut model = load(&fixture("generate-qwen2"), json!({"seed": 3}));
    let drawn =
        |seed: Value| json!({"prompt": "the", "max_tokens": 12, "n": 3, "seed": seed, "ignore_eos": true});
    let mut text = |body: Value| {
        let reply = reply(&mut model, COMPLETIONS, &body);
        (reply["choices"].clone(), reply["seed"].clone())
    };
    let (first, seed) = text(drawn(json!(5)));
    assert_eq!((text(drawn(json!(5))).0, seed), (first.clone(), json!(5)));
    assert_ne!(first[0]["text"], first[1]["text"], "answers of one task differ");
    let (own, seed) = text(drawn(Value::Null));
    assert_eq!(text(drawn(Value::Null)), (own.clone(), seed.clone()), "its message_id keys it");
    assert_eq!(text(drawn(seed)).0, own, "the seed in the reply repeats it");
    let mut other = load(&fixture("generate-qwen2"), json!({"seed": 4}));
    assert_ne!(reply(&mut other, COMPLETIONS, &drawn(Value::Null))["choices"], own);
}

#[test]
fn parts_add_up_to_the_reply() {
    let (processor, mut generator) = load(&smollm2(), json!({}));
    let body = json!({"messages": [{"role": "user", "content": "Say hello in three languages."}], "max_tokens": 24,
                      "stream": true, "stream_options": {"include_usage": true}, "temperature": 0, "n": 2});
    let (mut context, inputs) = preprocess(&processor, CHAT, &body).unwrap_or_else(|error| panic!("{error}"));
    let runs = run(&mut generator, &inputs, AT_ONCE);
    let mut chunks: Vec<Value> = Vec::new();
    let mut answers = Vec::new();
    for (index, (pieces, answer)) in runs.into_iter().enumerate() {
        for pieces in pieces.chunks(3) {
            let parts = processor.parts(&mut context, index, pieces.to_vec());
            chunks
                .extend(parts.iter().map(|part| serde_json::from_slice::<Value>(&part.bytes).expect("JSON")));
        }
        answers.push(answer);
    }
    let whole = processor.finish(context, answers).unwrap_or_else(|error| panic!("{error}"));
    let whole: Value = serde_json::from_slice(&whole.bytes).expect("JSON");
    let last = chunks.pop().expect("chunks");
    assert_eq!((last["choices"].as_array().map(Vec::len), &last["usage"]), (Some(0), &whole["usage"]));
    for index in 0..2 {
        let own: Vec<&Value> =
            chunks.iter().map(|it| &it["choices"][0]).filter(|it| it["index"] == index).collect();
        let text: String = own.iter().filter_map(|it| it["delta"]["content"].as_str()).collect();
        assert_eq!(whole["choices"][index]["message"]["content"], text);
        assert_eq!(own[0]["delta"]["role"], "assistant");
        assert_eq!(own.last().expect("chunks")["finish_reason"], whole["choices"][index]["finish_reason"]);
    }
    assert!(
        chunks.iter().all(|chunk| chunk["id"] == whole["id"] && chunk["object"] == "chat.completion.chunk")
    );
}

#[test]
fn a_response_format_is_kept_at_any_temperature() {
    let mut model = load(&smollm2(), json!({}));
    let schema = json!({"type": "object", "required": ["name", "age"], "additionalProperties": false,
                        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99, "minimum": 0}}});
    let ask = |format: &Value, seed: usize| {
        json!({"messages": [{"role": "user", "content": "Describe a person."}], "max_tokens": 60, "n": 3,
               "temperature": 1.5, "seed": seed, "response_format": format})
    };
    let json_schema = json!({"type": "json_schema", "json_schema": {"name": "person", "schema": schema}});
    let regex = json!({"type": "regex", "regex": "(yes|no), [a-z]{3}[.]"});
    for seed in 0..2 {
        for choice in
            reply(&mut model, CHAT, &ask(&json_schema, seed))["choices"].as_array().expect("choices")
        {
            let text = choice["message"]["content"].as_str().expect("a text");
            let person: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert!(person["name"].is_string() && person["age"].as_u64() <= Some(99), "{person}");
            assert_eq!(choice["finish_reason"], "stop");
        }
        for choice in reply(&mut model, CHAT, &ask(&regex, seed))["choices"].as_array().expect("choices") {
            let text = choice["message"]["content"].as_str().expect("a text");
            let word =
                text.strip_prefix("yes, ").or(text.strip_prefix("no, ")).and_then(|it| it.strip_suffix('.'));
            assert!(
                word.is_some_and(|it| it.len() == 3 && it.bytes().all(|it| it.is_ascii_lowercase())),
                "{text}"
            );
        }
    }
}

#[test]
fn what_cannot_be_answered_is_refused_with_the_field_and_the_numbers() {
    let (processor, _) = load(&fixture("generate-llama"), json!({"context": 64}));
    let refusal = |url: &str, body: Value| {
        let error = preprocess(&processor, url, &body).err().unwrap_or_else(|| panic!("{body} is taken"));
        assert_eq!(error.kind, TaskErrorKind::BadInput, "{body}");
        (error.param.unwrap_or_default(), error.message)
    };
    let (param, message) = refusal(COMPLETIONS, json!({"prompt": "a ".repeat(100), "max_tokens": 8}));
    assert!(param == "prompt" && message.contains("holds 64") && message.contains("may have 8"), "{message}");
    let (param, message) = refusal(COMPLETIONS, json!({"prompt": [[1, 2], [1, 70_000]]}));
    assert!(param == "prompt[1]" && message.contains("70000"), "{message}");
    assert_eq!(refusal(COMPLETIONS, json!({"prompt": "a", "max_tokens": 64})).0, "prompt");
    assert_eq!(
        refusal(CHAT, json!({"messages": [{"role": "user", "content": "a"}], "tools": [{}]})).0,
        "tools"
    );
    let format = json!({"prompt": "a", "response_format": {"type": "regex", "regex": "("}});
    assert_eq!(refusal(COMPLETIONS, format).0, "response_format");
    let (truncating, _) = load(&fixture("generate-llama"), json!({"context": 64, "truncate_prompts": true}));
    let cut = inputs(&truncating, COMPLETIONS, &json!({"prompt": "a ".repeat(100), "max_tokens": 8}));
    assert_eq!((cut[0].tokens, cut[0].answer_tokens), (56, 8));
}

#[test]
fn a_prompt_too_long_is_refused_before_the_next_and_large_bodies_wait() {
    let (processor, _) = load(&fixture("generate-llama"), json!({"context": 64}));
    let body = json!({"prompt": ["a ".repeat(100), ""], "max_tokens": 1});
    let error = preprocess(&processor, COMPLETIONS, &body).err().expect("it is too long");
    assert_eq!(error.param.as_deref(), Some("prompt[0]"), "{error}");
    assert!(error.message.contains("this pool holds 64 of both together"), "{error}");
    let effort =
        |bytes: usize| processor.effort(&message(COMPLETIONS, &json!({"prompt": "a".repeat(bytes)})));
    assert_eq!([effort(100), effort(10_000)], [Effort::Usual, Effort::Long]);
}
