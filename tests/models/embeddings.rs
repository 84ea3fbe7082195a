//! Sentence embeddings through the public interface of a model, held against what
//! sentence-transformers answers (`scripts/make-fixtures.py`).

use std::path::{Path, PathBuf};

use sconce::model::load::tokenizer::Tokens;
use sconce::model::nets::encoder::TextNetwork;
use sconce::model::tasks::embed::{self, EmbeddingProcessor};
use sconce::model::{Device, Dtype, Forward, LoadError, LoadSpec, Processor, SizedInput};
use sconce::protocol::{Message, TaskError, TaskErrorKind};
use serde_json::{Value, json};

const TOLERANCE: f64 = 1e-5;

type Loaded = (EmbeddingProcessor, TextNetwork);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

fn try_load(folder: &Path, dtype: Dtype) -> Result<Loaded, LoadError> {
    let served_names = vec!["text-embedding-3-small".into()];
    let source = folder.to_str().expect("a path in UTF-8");
    let spec = LoadSpec { served_names, max_inputs: 64, dtype, ..LoadSpec::new(source) };
    embed::load(&spec, &Device::Cpu)
}

fn load(folder: &Path) -> Loaded {
    try_load(folder, Dtype::F32).unwrap_or_else(|error| panic!("{error}"))
}

fn minilm() -> Loaded {
    load(&minilm_folder())
}

fn minilm_folder() -> PathBuf {
    let folder = root().join("models/all-MiniLM-L6-v2");
    assert!(folder.join("model.safetensors").is_file(), "the real weights are needed: make models");
    folder
}

/// A preprocessed task, whose inputs are all made.
type Prepared<P> = (<P as Processor>::Context, Vec<SizedInput<<P as Processor>::Input>>);

fn preprocess(
    processor: &EmbeddingProcessor,
    body: &Value,
) -> Result<Prepared<EmbeddingProcessor>, TaskError> {
    let message = Message { body: body.to_string().into(), ..Message::default() };
    let (context, inputs) = processor.preprocess(&message)?;
    Ok((context, inputs.all()?))
}

fn compute(model: &mut TextNetwork, inputs: &[&Tokens]) -> Vec<Vec<f32>> {
    let outputs = model.forward(inputs).unwrap_or_else(|error| panic!("{error}"));
    outputs.into_iter().map(|output| output.unwrap_or_else(|error| panic!("{error}"))).collect()
}

fn answer((processor, model): &mut Loaded, body: &Value) -> Value {
    let (context, inputs) = preprocess(processor, body).unwrap_or_else(|error| panic!("{body}: {error}"));
    let inputs: Vec<&Tokens> = inputs.iter().map(|sized| &sized.input).collect();
    let outputs = compute(model, &inputs);
    let body = processor.finish(context, outputs).expect("finite numbers");
    serde_json::from_slice(&body.bytes).expect("JSON")
}

fn refusal((processor, _): &Loaded, body: &Value) -> TaskError {
    preprocess(processor, body).err().unwrap_or_else(|| panic!("{body} was accepted"))
}

fn vector(answer: &Value, index: usize) -> Vec<f64> {
    serde_json::from_value(answer["data"][index]["embedding"].clone()).expect("a list of numbers")
}

fn assert_close(ours: &[f64], theirs: &[f64], tolerance: f64, what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let off = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off <= tolerance, "{what}: off by {off:e}");
}

/// Texts and vectors of a fixture.
fn expected(name: &str) -> Vec<(String, Vec<f64>)> {
    let file = std::fs::read(fixture(name).join("expected.json")).expect("a fixture");
    let rows: Vec<Value> = serde_json::from_slice(&file).expect("a list");
    let rows = rows.into_iter().map(|row| {
        let text = row["text"].as_str().expect("a text").to_owned();
        (text, serde_json::from_value(row["vector"].clone()).expect("numbers"))
    });
    rows.collect()
}

fn assert_equals_fixture(model: &mut Loaded, name: &str) {
    let rows = expected(name);
    let texts: Vec<&str> = rows.iter().map(|(text, _)| &**text).collect();
    let together = answer(model, &json!({ "input": texts }));
    for (index, (text, theirs)) in rows.iter().enumerate() {
        let start: String = text.chars().take(30).collect();
        assert_close(&vector(&together, index), theirs, TOLERANCE, &format!("{name}: {start:?}"));
        let alone = answer(model, &json!({ "input": text }));
        assert_close(&vector(&alone, 0), theirs, TOLERANCE, &format!("{name}, alone: {start:?}"));
    }
}

#[test]
fn the_real_model_answers_as_sentence_transformers_does() {
    assert_equals_fixture(&mut minilm(), "minilm");
}

#[test]
fn each_architecture_and_pooling_answers_as_sentence_transformers_does() {
    for name in [
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
        "tiny-t5-gated",
        "tiny-prompts",
        "tiny-unpooled-prompt",
        "tiny-last-token",
        "tiny-dense",
        "tiny-dense-tanh",
        "tiny-layer-norm",
        "tiny-deberta",
        "tiny-deberta-v2",
        "tiny-qwen3",
        "tiny-qwen2-both-ways",
        "tiny-gemma3-both-ways",
    ] {
        assert_equals_fixture(&mut load(&fixture(name)), name);
    }
}

#[test]
fn weights_of_pytorch_give_the_same_vectors_as_safetensors() {
    let files: [&[&str]; 2] = [
        &["pytorch_model.bin"],
        &[
            "shards/pytorch_model-00001-of-00002.bin",
            "shards/pytorch_model-00002-of-00002.bin",
            "shards/pytorch_model.bin.index.json",
        ],
    ];
    for files in files {
        let folder = copy("tiny-bert-cls");
        std::fs::remove_file(folder.path().join("model.safetensors")).expect("removed");
        for file in files {
            let name = Path::new(file).file_name().expect("a name");
            std::fs::copy(fixture("torch").join(file), folder.path().join(name)).expect("a copy");
        }
        let settings = "sentence_bert_config.json";
        std::fs::copy(fixture("tiny-bert-cls").join(settings), folder.path().join(settings)).expect("a copy");
        std::fs::create_dir(folder.path().join("2_Normalize")).expect("a folder");
        assert_equals_fixture(&mut load(folder.path()), "tiny-bert-cls");
        // safetensors come first.
        std::fs::write(folder.path().join("model.safetensors"), "").expect("written");
        let error = load_error(&folder).to_string();
        assert!(error.contains("model.safetensors: not a whole safetensors file"), "{error}");
    }
}

#[test]
fn each_property_of_deberta_changes_the_vectors_as_in_the_reference() {
    let source = fixture("tiny-deberta-v2");
    let file = std::fs::read(source.join("variants.json")).expect("a fixture");
    let variants: Vec<Value> = serde_json::from_slice(&file).expect("a list");
    for variant in &variants {
        let folder = tempfile::tempdir().expect("a folder");
        for entry in source.read_dir().expect("a folder") {
            let entry = entry.expect("a file");
            std::os::unix::fs::symlink(entry.path(), folder.path().join(entry.file_name())).expect("a link");
        }
        let config = folder.path().join("config.json");
        let mut changed: Value =
            serde_json::from_slice(&std::fs::read(&config).expect("a file")).expect("JSON");
        for (name, value) in variant["change"].as_object().expect("properties") {
            changed[name] = value.clone();
        }
        std::fs::remove_file(&config).expect("a link");
        std::fs::write(&config, changed.to_string()).expect("a file");
        let together = answer(&mut load(folder.path()), &json!({ "input": variant["texts"] }));
        for (index, vector_of_text) in variant["vectors"].as_array().expect("vectors").iter().enumerate() {
            let theirs: Vec<f64> = serde_json::from_value(vector_of_text.clone()).expect("numbers");
            let what = variant["change"].to_string();
            assert_close(&vector(&together, index), &theirs, TOLERANCE, &what);
        }
    }
}

#[test]
fn a_prompt_is_put_before_each_text_by_request_or_by_the_pools_setting() {
    for name in ["tiny-prompts", "tiny-nomic", "tiny-unpooled-prompt", "tiny-qwen3"] {
        let mut model = load(&fixture(name));
        let file = std::fs::read(fixture(name).join("prompted.json")).expect("a fixture");
        let rows: Vec<Value> = serde_json::from_slice(&file).expect("a list");
        for row in &rows {
            let body = json!({"input": row["text"], "prompt_name": row["prompt_name"]});
            let theirs: Vec<f64> = serde_json::from_value(row["vector"].clone()).expect("numbers");
            assert_close(&vector(&answer(&mut model, &body), 0), &theirs, TOLERANCE, &body.to_string());
            let options = [("prompt_name".to_owned(), row["prompt_name"].clone())];
            let spec =
                LoadSpec { options: options.into(), ..LoadSpec::new(fixture(name).to_str().expect("UTF-8")) };
            let mut of_pool = embed::load(&spec, &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
            let plain = answer(&mut of_pool, &json!({"input": row["text"]}));
            assert_close(&vector(&plain, 0), &theirs, TOLERANCE, &body.to_string());
        }
        let error = refusal(&model, &json!({"input": "a", "prompt_name": "nobody"}));
        assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("prompt_name")));
        assert!(error.message.contains("\"nobody\"") && error.message.contains("query"), "{error}");
    }
    let options = [("prompt".to_owned(), json!("query"))];
    let spec = LoadSpec {
        options: options.into(),
        ..LoadSpec::new(fixture("tiny-prompts").to_str().expect("UTF-8"))
    };
    let error = embed::load(&spec, &Device::Cpu).err().expect("an unknown option").to_string();
    assert!(error.contains("pool.options.prompt: unknown key; this model takes `prompt_name`"), "{error}");
}

#[test]
fn a_long_text_is_cut_and_counted_or_refused() {
    let (processor, _) = load(&fixture("tiny-bert-cls"));
    let long = "the tide carries a message ".repeat(40);
    let (context, inputs) =
        preprocess(&processor, &json!({"input": ["a", long]})).unwrap_or_else(|error| panic!("{error}"));
    let vectors = inputs.iter().map(|_| vec![0.5; 32]).collect();
    let body = processor.finish(context, vectors).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(body.headers["truncated"].as_i64(), Some(1));
    let error = preprocess(&processor, &json!({"input": ["a", long], "truncate": false})).err();
    assert_eq!(error.expect("it is too long").param.as_deref(), Some("input[1]"));
}

/// What benches/RESULTS.md says of them, with the published model's numbers of length 1.
#[test]
fn lower_precision_is_as_close_as_documented() {
    let all = [
        (Dtype::F16, 1e-3, 0.999_99),
        (Dtype::Bf16, 5e-3, 0.999_5),
        // The numbers between layers are rounded too. AVX2 rounds the matrices to fewer bits than VNNI.
        (Dtype::Int8, 2e-2, 0.997),
    ];
    for (dtype, off, cosine) in all {
        let mut model = try_load(&minilm_folder(), dtype).unwrap_or_else(|error| panic!("{error}"));
        let rows = expected("minilm");
        let texts: Vec<&str> = rows.iter().map(|(text, _)| &**text).collect();
        let together = answer(&mut model, &json!({ "input": texts }));
        for (index, (text, theirs)) in rows.iter().enumerate() {
            let ours = vector(&together, index);
            let start: String = text.chars().take(30).collect();
            assert_close(&ours, theirs, off, &format!("{dtype:?}: {start:?}"));
            let along: f64 = ours.iter().zip(theirs).map(|(a, b)| a * b).sum();
            assert!(along > cosine, "{dtype:?}: {start:?}: cosine {along}");
        }
    }
}

/// Every number format that a worker may choose passes its check with a published model.
#[test]
fn a_chosen_precision_passes_its_check() {
    for dtype in [Dtype::Int8, Dtype::Bf16] {
        let source = minilm_folder();
        let spec = LoadSpec {
            dtype,
            is_dtype_auto: true,
            ..LoadSpec::new(source.to_str().expect("a path in UTF-8"))
        };
        embed::load(&spec, &Device::Cpu).map(drop).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn a_result_does_not_depend_on_its_batch_mates() {
    // On a CPU only f16 rounds the numbers between layers to 16 bits.
    for (dtype, tolerance) in
        [(Dtype::F32, 2e-6), (Dtype::F16, 2e-3), (Dtype::Bf16, 2e-6), (Dtype::Int8, 2e-6)]
    {
        for name in ["tiny-bert-cls", "tiny-roberta"] {
            mates_change_nothing(&fixture(name), dtype, tolerance);
        }
    }
}

fn mates_change_nothing(folder: &Path, dtype: Dtype, tolerance: f64) {
    let (processor, mut model) = try_load(folder, dtype).unwrap_or_else(|error| panic!("{error}"));
    let mut state = 7u32;
    let mut next = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    for _ in 0..40 {
        let texts: Vec<Vec<u32>> =
            (0..=next(12)).map(|_| (0..=next(29)).map(|_| 5 + next(290)).collect()).collect();
        let (_, inputs) = preprocess(&processor, &json!({ "input": texts })).expect("good ids");
        let inputs: Vec<&Tokens> = inputs.iter().map(|sized| &sized.input).collect();
        let together = compute(&mut model, &inputs);
        for (input, together) in inputs.iter().zip(together) {
            let alone = compute(&mut model, &[*input]).remove(0);
            let wide = |vector: Vec<f32>| vector.into_iter().map(f64::from).collect::<Vec<_>>();
            assert_close(&wide(together), &wide(alone), tolerance, "together and alone");
        }
    }
}

#[test]
fn token_ids_give_what_their_text_gives_with_or_without_special_tokens() {
    let mut model = minilm();
    let text = answer(&mut model, &json!({"input": "hello world"}));
    for ids in [json!([7592, 2088]), json!([101, 7592, 2088, 102])] {
        let body = json!({ "input": ids });
        assert_eq!(preprocess(&model.0, &body).expect("good ids").1[0].tokens, 4);
        let by_ids = answer(&mut model, &body);
        assert_close(&vector(&by_ids, 0), &vector(&text, 0), 1e-7, "ids");
        assert_eq!(by_ids["usage"], json!({"prompt_tokens": 4, "total_tokens": 4}));
    }
}

#[test]
fn usage_counts_the_tokens_that_were_computed() {
    let mut model = minilm();
    let long = "word ".repeat(600);
    let body = json!({"input": ["", long, "hello world"]});
    assert_eq!(answer(&mut model, &body)["usage"]["prompt_tokens"], 2 + 256 + 4);
}

#[test]
fn fewer_dimensions_are_cut_and_normalised_again() {
    let mut model = minilm();
    let whole = vector(&answer(&mut model, &json!({"input": "hello"})), 0);
    let cut = vector(&answer(&mut model, &json!({"input": "hello", "dimensions": 100})), 0);
    let length = whole[..100].iter().map(|x| x * x).sum::<f64>().sqrt();
    let right: Vec<f64> = whole[..100].iter().map(|x| x / length).collect();
    assert_close(&cut, &right, 1e-6, "cut");
    let error = refusal(&model, &json!({"input": "hello", "dimensions": 385}));
    assert_eq!(error.kind, TaskErrorKind::BadInput);
    assert_eq!(error.message, "dimensions is 385; this model gives 384 numbers");
}

#[test]
fn a_model_is_known_by_its_names_and_no_other() {
    let mut model = minilm();
    let named = |name: &str| json!({"input": "a", "model": name});
    for name in ["sentence-transformers/all-MiniLM-L6-v2", "text-embedding-3-small"] {
        assert_eq!(answer(&mut model, &named(name))["model"], "all-MiniLM-L6-v2");
    }
    let error = refusal(&model, &named("gpt-5"));
    assert_eq!(error.kind, TaskErrorKind::UnknownModel);
    assert!(error.message.contains("gpt-5") && error.message.contains("all-MiniLM-L6-v2"));
}

#[test]
fn ids_that_cannot_be_computed_are_refused_by_name() {
    let model = minilm();
    let cases = [
        (json!([[5], [30522]]), "input[1] holds the token id 30522; this model has ids below 30522"),
        (
            json!(vec![5; 255]),
            "input holds 255 token ids (257 with special tokens); this model takes at most 256",
        ),
        (json!([[5], []]), "input[1] is an empty list"),
    ];
    for (input, message) in cases {
        let error = refusal(&model, &json!({ "input": input }));
        assert_eq!((error.kind, &*error.message), (TaskErrorKind::BadInput, message));
    }
    assert!(preprocess(&model.0, &json!({"input": vec![5; 254]})).is_ok());
}

#[test]
fn over_the_limit_of_inputs_is_too_large() {
    let error = refusal(&load(&fixture("tiny-bert-cls")), &json!({"input": vec!["a"; 65]}));
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert_eq!(error.message, "input holds 65 items; this pool takes at most 64");
}

#[test]
fn base64_holds_the_same_numbers() {
    use base64::Engine as _;
    let mut model = load(&fixture("tiny-distilbert"));
    let float = vector(&answer(&mut model, &json!({"input": "hello"})), 0);
    let body = json!({"input": "hello", "encoding_format": "base64"});
    let text = answer(&mut model, &body)["data"][0]["embedding"].clone();
    let bytes = base64::engine::general_purpose::STANDARD.decode(text.as_str().expect("base64"));
    let bytes = bytes.expect("base64");
    let numbers = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four")));
    assert_eq!(numbers.map(f64::from).map(|x| x as f32).collect::<Vec<_>>().len(), 32);
    let numbers = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four")));
    assert_close(&numbers.map(f64::from).collect::<Vec<_>>(), &float, 1e-6, "base64");
}

/// A copy of a fixture, to be damaged.
fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("1_Pooling")).expect("a folder");
    for file in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "sentence_bert_config.json",
        "modules.json",
        "1_Pooling/config.json",
        "model.safetensors",
    ] {
        std::fs::copy(fixture(name).join(file), folder.path().join(file)).expect("a copy");
    }
    folder
}

/// A copy of all files of a fixture, to be damaged.
fn copy_whole(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let mut cp = std::process::Command::new("cp");
    let copied = cp.arg("-r").arg(fixture(name).join(".")).arg(folder.path()).status();
    assert!(copied.expect("cp").success());
    folder
}

fn load_error(folder: &tempfile::TempDir) -> LoadError {
    try_load(folder.path(), Dtype::F32).err().expect("a damaged model was loaded")
}

fn edit(folder: &tempfile::TempDir, file: &str, from: &str, to: &str) {
    let path = folder.path().join(file);
    let text = std::fs::read_to_string(&path).expect("a text");
    assert!(text.contains(from), "{file} has no {from}");
    std::fs::write(path, text.replace(from, to)).expect("written");
}

#[test]
fn a_missing_file_is_named() {
    for file in ["config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"] {
        let folder = copy("tiny-bert-max");
        std::fs::remove_file(folder.path().join(file)).expect("removed");
        let error = load_error(&folder);
        assert!(matches!(&error, LoadError::File { path, .. } if path.ends_with(file)), "{error}");
    }
}

#[test]
fn weights_that_are_cut_off_or_corrupt_are_an_error_with_a_reason() {
    let whole = std::fs::read(fixture("tiny-bert-max/model.safetensors")).expect("weights");
    let mut foreign = whole.clone();
    foreign[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    for bytes in [&whole[..whole.len() - 100], &whole[..500], &whole[..5], &[], &foreign] {
        let folder = copy("tiny-bert-max");
        std::fs::write(folder.path().join("model.safetensors"), bytes).expect("written");
        let error = load_error(&folder).to_string();
        assert!(error.contains("model.safetensors: not a whole safetensors file"), "{error}");
    }
}

#[test]
fn a_missing_tensor_and_one_of_another_shape_are_named() {
    let folder = copy("tiny-bert-max");
    edit(&folder, "config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    let error = load_error(&folder).to_string();
    assert!(error.contains("encoder.layer.2.attention.self.query.weight is missing"), "{error}");
    let folder = copy("tiny-bert-max");
    edit(&folder, "config.json", "\"intermediate_size\": 64", "\"intermediate_size\": 65");
    let error = load_error(&folder).to_string();
    assert!(error.contains("[64, 32]") && error.contains("[65, 32]"), "{error}");
}

#[test]
fn what_is_not_computed_here_is_refused_by_name() {
    let cases = [
        ("config.json", "\"bert\"", "\"convbert\"", "convbert"),
        ("config.json", "\"gelu_new\"", "\"silu\"", "silu"),
        ("modules.json", "pooling.Pooling", "dense.Dense", "Dense"),
        (
            "modules.json",
            "pooling.Pooling",
            "weighted_layer_pooling.WeightedLayerPooling",
            "WeightedLayerPooling",
        ),
        ("modules.json", "sentence_transformers.base", "custom_st.base", "custom_st.base.modules"),
        ("modules.json", "1_Pooling", "../1_Pooling", "outside of the model"),
        ("1_Pooling/config.json", "\"max\"", "\"middle\"", "\"middle\""),
        (
            "1_Pooling/config.json",
            "\"max\"",
            "[\"cls\",\"cls\",\"cls\",\"cls\",\"cls\",\"cls\",\"cls\",\"cls\",\"cls\"]",
            "9 modes",
        ),
        ("sentence_bert_config.json", "last_hidden_state", "pooler_output", "pooler_output"),
        ("sentence_bert_config.json", "feature-extraction", "fill-mask", "fill-mask"),
    ];
    for (file, from, to, named) in cases {
        let folder = copy("tiny-bert-max");
        edit(&folder, file, from, to);
        let error = load_error(&folder);
        assert!(matches!(error, LoadError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(named), "{error}");
    }
}

#[test]
fn modules_after_the_pooling_are_read_and_checked_by_name() {
    let cases = [
        (
            "2_Dense/config.json",
            "\"in_features\": 32",
            "\"in_features\": 31",
            "the vectors before it have 32 numbers",
        ),
        (
            "2_Dense/config.json",
            "\"out_features\": 48",
            "\"out_features\": 0",
            "out_features of the Dense module is 0",
        ),
        ("2_Dense/config.json", "\"out_features\": 48", "\"out_features\": 65537", "is 65537; 1 to 65536"),
        ("2_Dense/config.json", "\"out_features\": 48", "\"out_features\": 47", "[48, 32]"),
        ("2_Dense/config.json", "\"bias\": false", "\"bias\": true", "linear.bias is missing"),
        (
            "2_Dense/config.json",
            "linear.Identity",
            "activation.Softplus",
            "torch.nn.modules.activation.Softplus",
        ),
        ("2_Dense/config.json", "torch.nn", "os", "os.modules.linear.Identity"),
        ("2_Dense/config.json", "\"bias\": false", "\"use_residual\": true", "use_residual"),
        ("2_Dense/config.json", "\"sentence_embedding\"", "\"token_embeddings\"", "token_embeddings"),
        ("modules.json", "normalize.Normalize", "pooling.Pooling", "lists"),
        ("modules.json", "3_Dense", "9_Dense", "9_Dense"),
    ];
    for (file, from, to, named) in cases {
        let folder = copy_whole("tiny-dense");
        edit(&folder, file, from, to);
        let error = load_error(&folder).to_string();
        assert!(error.contains(named), "{file}, {to}: {error}");
    }
    let folder = copy_whole("tiny-dense");
    let path = folder.path().join("3_Dense/model.safetensors");
    let mut bytes = std::fs::read(&path).expect("weights");
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).expect("written");
    let error = load_error(&folder).to_string();
    assert!(error.contains("3_Dense/model.safetensors") && error.contains("linear.weight"), "{error}");
}

#[test]
fn a_dense_module_decides_the_width_and_only_a_last_normalize_applies_to_fewer_dimensions() {
    let lengths = |name: &str| {
        let mut model = load(&fixture(name));
        let mut length = |body: Value| {
            let vector = vector(&answer(&mut model, &body), 0);
            (vector.len(), vector.iter().map(|x| x * x).sum::<f64>().sqrt())
        };
        let body = |dimensions: usize| json!({"input": "hello", "dimensions": dimensions});
        let (whole, cut) = (length(json!({"input": "hello"})), length(body(5)));
        (whole, cut, refusal(&model, &body(whole.0 + 1)).message)
    };
    let (whole, cut, message) = lengths("tiny-dense");
    assert_eq!((whole.0, cut.0), (24, 5));
    assert!((whole.1 - 1.0).abs() < 1e-5 && (cut.1 - 1.0).abs() < 1e-5, "{whole:?} {cut:?}");
    assert_eq!(message, "dimensions is 25; this model gives 24 numbers");
    let (whole, cut, _) = lengths("tiny-layer-norm");
    assert_eq!((whole.0, cut.0), (20, 5));
    assert!(cut.1 < whole.1 && (cut.1 - 1.0).abs() > 1e-3, "{whole:?} {cut:?}");
}

#[test]
fn the_digest_covers_the_weights_of_modules() {
    let digest = |folder: &Path| {
        sconce::model::registry::digest(folder.to_str().expect("UTF-8"), None).expect("a digest")
    };
    let folder = copy_whole("tiny-dense");
    assert_eq!(digest(folder.path()), digest(&fixture("tiny-dense")));
    let path = folder.path().join("2_Dense/model.safetensors");
    let mut bytes = std::fs::read(&path).expect("weights");
    *bytes.last_mut().expect("bytes") ^= 1;
    std::fs::write(&path, bytes).expect("written");
    assert_ne!(digest(folder.path()), digest(&fixture("tiny-dense")));
}

#[test]
fn a_text_that_leaves_no_token_beside_the_prompt_is_refused() {
    let folder = copy_whole("tiny-unpooled-prompt");
    // The tokenizer adds no token after the text.
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    tokenizer["post_processor"] = Value::Null;
    std::fs::write(&path, tokenizer.to_string()).expect("written");
    let model = load(folder.path());
    let error = refusal(&model, &json!({"input": ["a", ""], "prompt_name": "query"}));
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("input[1]")));
    assert!(error.message.contains("no token is left for the vector"), "{error}");
    assert!(preprocess(&model.0, &json!({"input": ["a", "b"], "prompt_name": "document"})).is_ok());
}

#[test]
fn without_modules_json_vectors_are_the_mean_and_not_normalised() {
    let folder = copy("tiny-bert-cls");
    std::fs::remove_file(folder.path().join("modules.json")).expect("removed");
    let mut model = load(folder.path());
    let vector = vector(&answer(&mut model, &json!({"input": "hello"})), 0);
    let length = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!((length - 1.0).abs() > 1e-3, "length {length}");
}

/// Changes a JSON file of a copied model.
fn set(folder: &tempfile::TempDir, file: &str, changes: &Value) {
    let path = folder.path().join(file);
    let mut fields: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    changes.as_object().expect("fields").iter().for_each(|(name, value)| fields[name] = value.clone());
    std::fs::remove_file(&path).expect("a file or link");
    std::fs::write(&path, fields.to_string()).expect("written");
}

#[test]
fn tokenizer_config_json_overrules_tokenizer_json_as_in_the_reference() {
    let lower = json!({"tokenizer_class": "BertTokenizer", "do_lower_case": false});
    let prefix = json!({"tokenizer_class": "RobertaTokenizer", "add_prefix_space": true});
    for (name, changes, text, theirs) in [
        ("tiny-dense", lower, "ALL", [-0.03727737, -0.1035995, 0.132169, -0.1115242]),
        ("tiny-roberta", prefix, "x", [0.01971088, 0.03436652, 0.04227127, -0.1056335]),
    ] {
        let folder = copy_whole(name);
        set(&folder, "tokenizer_config.json", &changes);
        let ours = vector(&answer(&mut load(folder.path()), &json!({"input": text})), 0);
        assert_close(&ours[..4], &theirs, TOLERANCE, name);
    }
}

#[test]
fn arguments_of_the_librarys_loaders_are_refused_by_name() {
    for (arguments, named) in [
        (json!({"tokenizer_args": {"model_max_length": 8}}), "tokenizer_args has model_max_length"),
        (json!({"config_kwargs": {"is_causal": false}}), "config_kwargs has is_causal"),
        (json!({"processing_kwargs": {"text": {"max_length": 8}}}), "processing_kwargs has text"),
    ] {
        let folder = copy_whole("tiny-dense");
        set(&folder, "sentence_bert_config.json", &arguments);
        let error = load_error(&folder).to_string();
        assert!(error.contains(named), "{error}");
    }
    let folder = copy_whole("tiny-dense");
    let harmless = json!({"model_args": {"attn_implementation": "sdpa"}, "processing_kwargs": {"text": {}}});
    set(&folder, "sentence_bert_config.json", &harmless);
    load(folder.path());
}

#[test]
fn an_empty_text_without_special_tokens_is_refused() {
    let folder = copy_whole("tiny-qwen3");
    set(&folder, "tokenizer.json", &json!({"post_processor": null}));
    let model = load(folder.path());
    let error = refusal(&model, &json!({"input": ["a", ""]}));
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("input[1]")));
}
