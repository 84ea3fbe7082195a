//! Tests which family serves a model, and the rules that every family must follow.

use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::Path;

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Tensor};

use super::*;
use crate::model::family::{OptionDefault, Serves, Takes};
use crate::model::{Message, Properties, Route, Value};
use crate::protocol::endpoints::{CLASSIFY_URL, SPARSE_URL, SPEECH_URL, TOKEN_LABELS_URL, TRANSLATIONS_URL};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// What serves a folder with this one file.
fn served_with_file(file: &str, content: &str, task: Option<&str>) -> Result<Served, String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(file), content).unwrap();
    served(folder.path().to_str().unwrap(), task).map_err(|error| error.to_string())
}

/// Which family serves a model with this `config.json`.
fn family(config: &str, task: Option<&str>) -> Result<&'static str, String> {
    served_with_file("config.json", config, task).map(|served| served.family.name)
}

#[test]
fn an_architecture_is_served_for_its_first_task_or_the_requested_one() {
    let bert = r#"{"model_type":"bert"}"#;
    for task in [None, Some("embed")] {
        let served = served_with_file("config.json", bert, task).unwrap();
        assert_eq!(served.to_string(), "bert for embed (/v1/embeddings)");
    }
    assert_eq!(family(r#"{"model_type":"vit"}"#, None), Ok("classify"));
    assert_eq!(family(r#"{"model_type":"qwen3"}"#, None), Ok("generate"));
}

#[test]
fn a_head_with_one_label_scores_pairs_and_one_with_more_classifies() {
    let one =
        r#"{"model_type":"bert","architectures":["BertForSequenceClassification"],"id2label":{"0":"x"}}"#;
    assert_eq!(family(one, None), Ok("rerank"));
    assert_eq!(family(one, Some("classify")), Ok("classify"));
    assert_eq!(family(one, Some("embed")), Ok("embed"));
    let two = r#"{"model_type":"roberta","architectures":["RobertaForSequenceClassification"]}"#;
    assert_eq!(family(two, None), Ok("classify"));
    assert_eq!(family(two, Some("embed")), Ok("embed"));
    assert!(family(two, Some("rerank")).unwrap_err().contains("\"rerank\", but for classify, embed"));
}

#[test]
fn an_unknown_architecture_is_refused_with_the_known_ones() {
    let error = family(r#"{"model_type":"bart"}"#, None).unwrap_err();
    assert!(error.contains("\"bart\"") && error.contains("xlm-roberta, camembert"), "{error}");
    // Families with the same architectures are named together; decoders are not among those of all kinds.
    assert_eq!(error.matches("camembert").count(), 2, "{error}");
    for kinds in ["for rerank, classify, embed: bert", "for embed_sparse, token-classification: bert"] {
        assert!(error.contains(kinds) && error.contains("docs/own-models.md"), "{error}");
    }
    let error = family(r#"{"model_type":"bart","architectures":null,"id2label":[],"num_labels":"x"}"#, None)
        .unwrap_err();
    assert!(error.contains("\"bart\""), "its type is checked before its other fields: {error}");
    let error = family("{}", None).unwrap_err();
    assert!(error.contains("\"(none)\""), "{error}");
    let error = family(r#"{"model_type":"bert"}"#, Some("generate")).unwrap_err();
    assert!(error.contains("\"generate\", but for embed"), "{error}");
    let pipeline = r#"{"_class_name":"StableDiffusionXLPipeline"}"#;
    let error = served_with_file("model_index.json", pipeline, None).err().unwrap();
    assert!(error.contains("the pipeline \"StableDiffusionXLPipeline\""), "{error}");
    let error = served_with_file("README.md", "", None).err().unwrap();
    assert!(error.contains("config.json: the model has no such file"), "{error}");
}

/// What serves a folder with these files, and what it assumes.
fn assumed(
    config: &str,
    modules: Option<&str>,
    task: Option<&str>,
) -> Result<(&'static str, Vec<String>), String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    if let Some(modules) = modules {
        std::fs::write(folder.path().join("modules.json"), modules).unwrap();
    }
    let source = folder.path().to_str().unwrap();
    let family = served(source, task).map_err(|error| error.to_string())?.family.name;
    Ok((family, assumptions(source, task).unwrap()))
}

const POOLED: &str = r#"[{"type":"sentence_transformers.models.Transformer"},
    {"type":"sentence_transformers.models.Pooling","path":"1_Pooling"}]"#;

#[test]
fn modules_decide_before_architectures_and_a_task_before_both() {
    let config =
        |kind: &str, class: &str| format!(r#"{{"model_type":"{kind}","architectures":["{class}"]}}"#);
    let masked = config("mpnet", "MPNetForMaskedLM");
    assert_eq!(assumed(&masked, Some(POOLED), None), Ok(("embed", Vec::new())));
    let one =
        r#"{"model_type":"bert","architectures":["BertForSequenceClassification"],"id2label":{"0":"x"}}"#;
    assert_eq!(assumed(one, Some(POOLED), None), Ok(("embed", Vec::new())));
    assert_eq!(assumed(one, Some(POOLED), Some("rerank")), Ok(("rerank", Vec::new())));
    let alone = r#"[{"type":"sentence_transformers.models.Transformer"}]"#;
    assert_eq!(assumed(one, Some(alone), None), Ok(("rerank", Vec::new())), "a cross-encoder");
    let splade = r#"[{"type":"sentence_transformers.sparse_encoder.models.MLMTransformer"},
        {"type":"sentence_transformers.sparse_encoder.models.SpladePooling","path":"1_SpladePooling"}]"#;
    assert_eq!(assumed(&masked, Some(splade), None), Ok(("embed_sparse", Vec::new())));
    let (family, assumptions) = assumed(&masked, None, Some("embed_sparse")).unwrap();
    assert!(family == "embed_sparse" && assumptions[0].contains("the largest log(1 + max(logit, 0))"));
    let error = assumed(&config("bert", "BertModel"), Some(splade), None).unwrap_err();
    assert!(error.contains("SpladePooling module") && error.contains("pool.task may be embed"), "{error}");
    let embedder = config("qwen3", "Qwen3ForCausalLM");
    assert_eq!(assumed(&embedder, Some(POOLED), None), Ok(("embed", Vec::new())));
    assert_eq!(assumed(&embedder, Some(POOLED), Some("generate")), Ok(("generate", Vec::new())));
    let error = assumed(&config("vit", "ViTForImageClassification"), Some(POOLED), None).unwrap_err();
    assert!(error.contains("Pooling module") && error.contains("pool.task may be classify"), "{error}");
}

#[test]
fn a_class_of_the_repositorys_own_code_is_refused_unless_the_task_is_named() {
    let config = |kind: &str, class: &str| {
        format!(
            r#"{{"model_type":"{kind}","architectures":["{class}"],"auto_map":{{"AutoModel":"modeling.{class}"}}}}"#
        )
    };
    for (kind, class) in [
        ("qwen2", "Qwen2ForCausalLM"),
        ("nomic_bert", "NomicBertModel"),
        ("xlm-roberta", "XLMRobertaForSequenceClassification"),
        ("gemma3_text", "Gemma3ForCausalLM"),
    ] {
        assert!(assumed(&config(kind, class), None, None).is_ok(), "{class}");
    }
    let own = config("qwen3", "Qwen3BidirectionalModel");
    let error = assumed(&own, Some(POOLED), None).unwrap_err();
    assert!(error.contains("Qwen3BidirectionalModel is code in the model's repository"), "{error}");
    let (_, assumptions) = assumed(&own, Some(POOLED), Some("embed")).unwrap();
    assert!(assumptions[0].contains("Qwen3BidirectionalModel"), "{assumptions:?}");
}

#[test]
fn a_decoder_generates_unless_its_files_or_the_task_make_it_an_embedder_or_a_reranker() {
    let config = |class: &str| format!(r#"{{"model_type":"qwen3","architectures":["{class}"]}}"#);
    let causal = config("Qwen3ForCausalLM");
    assert_eq!(assumed(&causal, None, None), Ok(("generate", Vec::new())));
    let (_, of_embedder) = assumed(&causal, None, Some("embed")).unwrap();
    assert!(of_embedder[0].contains("the vector of its last token"), "{of_embedder:?}");
    let (_, of_reranker) = assumed(&causal, None, Some("rerank")).unwrap();
    assert!(of_reranker[0].contains("Qwen3-Reranker's model card"), "{of_reranker:?}");
    let scored = POOLED.replace("Pooling", "LogitScore");
    assert_eq!(assumed(&causal, Some(&scored), None), Ok(("rerank", Vec::new())));
    assert_eq!(assumed(&config("Qwen3Model"), None, None).unwrap().0, "embed");
    let labels = |count: usize| {
        let class = config("Qwen3ForSequenceClassification");
        class.replace('}', &format!(r#","num_labels":{count}}}"#))
    };
    assert_eq!(assumed(&labels(1), None, None).unwrap().0, "rerank");
    assert_eq!(assumed(&labels(3), None, None).unwrap().0, "classify");
    let llama = r#"{"model_type":"llama","architectures":["LlamaForCausalLM"]}"#;
    assert!(
        assumed(llama, None, Some("rerank")).unwrap_err().contains("\"rerank\", but for embed, generate")
    );
}

/// The family of a folder with these files.
fn family_of(files: &[(&str, &str)], task: Option<&str>) -> Result<&'static str, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    let served = served(folder.path().to_str().unwrap(), task).map_err(|error| error.to_string())?;
    Ok(served.family.name)
}

/// `modules.json` with a Transformer, and these modules after it.
fn modules(kinds: &[&str]) -> String {
    let module = |kind: &str| {
        let path = if kind == "Transformer" { String::new() } else { format!("1_{kind}") };
        serde_json::json!({"type": format!("sentence_transformers.models.{kind}"), "path": path})
    };
    let all: Vec<_> = ["Transformer"].iter().chain(kinds).map(|kind| module(kind)).collect();
    serde_json::json!(all).to_string()
}

/// `config.json` of this class, with one label if it is a classifier's.
fn config(kind: &str, class: &str) -> String {
    serde_json::json!({"model_type": kind, "architectures": [class], "id2label": {"0": "LABEL_0"}})
        .to_string()
}

#[test]
fn the_kind_that_sentence_transformers_names_decides_before_its_modules() {
    let scores = config("bert", "BertForSequenceClassification");
    let library = |kind: &str| format!(r#"{{"model_type":"{kind}"}}"#);
    let family = |library: &str, kinds: &[&str], config: &str, task: Option<&str>| {
        let modules = modules(kinds);
        let files = [
            ("config_sentence_transformers.json", library),
            ("modules.json", &*modules),
            ("config.json", config),
        ];
        family_of(&files, task)
    };
    // A cross-encoder's modules may be a Transformer alone.
    assert_eq!(family(&library("CrossEncoder"), &[], &scores, None), Ok("rerank"));
    assert_eq!(family(&library("CrossEncoder"), &["Pooling"], &scores, None), Ok("rerank"));
    let two = r#"{"model_type":"bert","architectures":["BertForSequenceClassification"]}"#;
    assert_eq!(family(&library("CrossEncoder"), &[], two, None), Ok("classify"));
    assert_eq!(family(&library("SentenceTransformer"), &[], &scores, None), Ok("embed"));
    assert_eq!(family(&library("CrossEncoder"), &[], &scores, Some("embed")), Ok("embed"));
    // Older files name no kind.
    assert_eq!(family("{}", &["Pooling", "Normalize"], &scores, None), Ok("embed"));
    assert_eq!(family("{}", &["LogitScore"], &scores, None), Ok("rerank"));
    assert_eq!(family("{}", &["Pooling", "LogitScore"], &scores, None), Ok("rerank"), "the last one decides");
    assert_eq!(family("{}", &[], &scores, None), Ok("rerank"));
    // What is not served is not guessed from the weights.
    let plain = config("bert", "BertModel");
    let error = family(&library("MultiVectorEncoder"), &["Dense"], &plain, None).unwrap_err();
    assert!(
        error.contains("config_sentence_transformers.json says that it is a MultiVectorEncoder")
            && error.contains("pool.task may be embed"),
        "{error}"
    );
    let error = family("{}", &["Dense", "Normalize", "MultiVectorMask"], &plain, None).unwrap_err();
    assert!(error.contains("modules.json has a MultiVectorMask module"), "{error}");
    let error = family(&library("CrossEncoder"), &[], &plain, None).unwrap_err();
    assert!(error.contains("is a CrossEncoder, and \"bert\" with these weights is not served"), "{error}");
}

#[test]
fn a_transformer_in_a_folder_is_refused_with_what_to_do() {
    let modules = r#"[{"type":"sentence_transformers.models.Transformer","path":"0_Transformer"},
        {"type":"sentence_transformers.models.Pooling","path":"1_Pooling"}]"#;
    let error = family_of(&[("modules.json", modules)], None).unwrap_err();
    assert!(error.contains("\"0_Transformer\"") && error.contains("move them there"), "{error}");
}

/// The classes and modules of the models that `docs/models.md` says load, as their files have them.
#[test]
fn published_models_are_served_for_the_task_in_the_docs() {
    let normalised: Option<&[&str]> = Some(&["Pooling", "Normalize"]);
    let pooled: Option<&[&str]> = Some(&["Pooling"]);
    let embedders = [
        ("sentence-transformers/all-MiniLM-L6-v2", "bert", "BertModel", normalised),
        ("sentence-transformers/all-MiniLM-L12-v2", "bert", "BertModel", normalised),
        ("sentence-transformers/all-mpnet-base-v2", "mpnet", "MPNetForMaskedLM", normalised),
        ("sentence-transformers/multi-qa-mpnet-base-dot-v1", "mpnet", "MPNetForMaskedLM", pooled),
        ("sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", "bert", "BertModel", pooled),
        ("BAAI/bge-small-en-v1.5", "bert", "BertModel", normalised),
        ("BAAI/bge-m3", "xlm-roberta", "XLMRobertaModel", normalised),
        ("intfloat/e5-base-v2", "bert", "BertModel", normalised),
        ("intfloat/multilingual-e5-base", "xlm-roberta", "XLMRobertaModel", normalised),
        ("thenlper/gte-base", "bert", "BertModel", normalised),
        ("nomic-ai/nomic-embed-text-v1.5", "nomic_bert", "NomicBertModel", pooled),
        ("Snowflake/snowflake-arctic-embed-m", "bert", "BertModel", normalised),
        ("nomic-ai/modernbert-embed-base", "modernbert", "ModernBertModel", normalised),
        ("sentence-transformers/LaBSE", "bert", "BertModel", Some(&["Pooling", "Dense", "Normalize"])),
    ];
    for (model, kind, class, kinds) in embedders {
        let modules = modules(kinds.unwrap());
        assert_eq!(assumed(&config(kind, class), Some(&modules), None), Ok(("embed", Vec::new())), "{model}");
    }
    let scorers = [
        ("cross-encoder/ms-marco-MiniLM-L6-v2", "bert", "BertForSequenceClassification"),
        ("BAAI/bge-reranker-base", "xlm-roberta", "XLMRobertaForSequenceClassification"),
    ];
    for (model, kind, class) in scorers {
        assert_eq!(assumed(&config(kind, class), None, None), Ok(("rerank", Vec::new())), "{model}");
    }
    let generators = [
        ("mistral", "MistralForCausalLM"),
        ("ministral3", "Ministral3ForCausalLM"),
        ("gemma", "GemmaForCausalLM"),
        ("gemma2", "Gemma2ForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("phi3", "Phi3ForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("smollm3", "SmolLM3ForCausalLM"),
        ("granite", "GraniteForCausalLM"),
        ("olmo2", "Olmo2ForCausalLM"),
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
    ];
    for (kind, class) in generators {
        assert_eq!(assumed(&config(kind, class), None, None), Ok(("generate", Vec::new())), "{class}");
    }
    let others = [
        ("vit", "ViTForImageClassification", "classify"),
        ("whisper", "WhisperForConditionalGeneration", "transcribe"),
    ];
    for (kind, class, task) in others {
        assert_eq!(assumed(&config(kind, class), None, None).unwrap().0, task, "{class}");
    }
    #[cfg(feature = "candle-transformers")]
    {
        let others = [
            ("clip", "CLIPModel", "text-image"),
            ("siglip", "SiglipModel", "text-image"),
            ("blip", "BlipForConditionalGeneration", "caption"),
        ];
        for (kind, class, task) in others {
            assert_eq!(assumed(&config(kind, class), None, None).unwrap().0, task, "{class}");
        }
        let pipeline = r#"{"_class_name":"StableDiffusionPipeline"}"#;
        assert_eq!(family_of(&[("model_index.json", pipeline)], None), Ok("image-generation"));
    }
}

#[test]
fn a_head_whose_weights_would_be_ignored_is_refused_unless_the_task_asks_for_it() {
    let config =
        |kind: &str, class: &str| format!(r#"{{"model_type":"{kind}","architectures":["{class}"]}}"#);
    for (kind, class) in [
        ("bert", "BertForMultipleChoice"),
        ("roberta", "RobertaForQuestionAnswering"),
        ("qwen3", "Qwen3ForQuestionAnswering"),
        ("llama", "LlamaForTokenClassification"),
    ] {
        let error = assumed(&config(kind, class), None, None).unwrap_err();
        assert!(error.contains(&format!("the head of {class} is not served")), "{error}");
    }
    let tokens = config("bert", "BertForTokenClassification");
    let labels = "the labels are called LABEL_0 and so on: config.json has no id2label".to_owned();
    assert_eq!(assumed(&tokens, None, None), Ok(("token-classification", vec![labels])));
    let (family, assumptions) = assumed(&tokens, None, Some("embed")).unwrap();
    assert!(family == "embed" && assumptions.len() == 2, "{assumptions:?}");
}

#[test]
fn what_the_files_do_not_tell_is_said_in_a_sentence_each() {
    let scores = config("bert", "BertForSequenceClassification");
    let (family, assumptions) = assumed(&scores, Some(&modules(&[])), Some("embed")).unwrap();
    assert_eq!(
        (family, assumptions.len()),
        ("embed", 2),
        "the mean, and the head is not used: {assumptions:?}"
    );
    let plain = r#"{"model_type":"bert","architectures":["BertModel"]}"#;
    let (_, assumptions) = assumed(plain, None, None).unwrap();
    assert!(
        matches!(&assumptions[..], [pooling] if pooling.contains("mean") && pooling.contains("modules.json"))
    );
    let masked = r#"{"model_type":"mpnet","architectures":["MPNetForMaskedLM"]}"#;
    let (_, assumptions) = assumed(masked, None, None).unwrap();
    assert_eq!(assumptions[1..], ["the head of MPNetForMaskedLM is not used"]);
    let two = r#"{"model_type":"roberta","architectures":["RobertaForSequenceClassification"]}"#;
    let (_, assumptions) = assumed(two, None, None).unwrap();
    assert!(assumptions[0].contains("LABEL_0"), "{assumptions:?}");
}

#[test]
fn of_a_model_of_images_and_text_only_a_folder_has_more_than_the_text_part() {
    let folder = r#"{"model_type":"gemma3","architectures":["Gemma3ForConditionalGeneration"]}"#;
    let (_, assumptions) = assumed(folder, None, None).unwrap();
    assert!(assumptions[0].contains("only the text part"), "{assumptions:?}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let architecture = gguf_file::Value::String("gemma3".into());
    let mut file = File::create(&path).unwrap();
    gguf_file::write(&mut file, &[("general.architecture", &architecture)], &[]).unwrap();
    assert!(super::assumptions(path.to_str().unwrap(), None).unwrap().is_empty());
}

#[test]
fn the_architecture_of_a_gguf_file_is_read_from_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut file = File::create(&path).unwrap();
    let architecture = gguf_file::Value::String("bert".into());
    gguf_file::write(&mut file, &[("general.architecture", &architecture)], &[]).unwrap();
    let error = served(path.to_str().unwrap(), None).err().unwrap().to_string();
    assert!(
        error.contains("\"bert\" in GGUF; served are for generate: llama, mistral3, qwen2, qwen3"),
        "{error}"
    );
    std::fs::write(&path, "GGUF").unwrap();
    let error = served(path.to_str().unwrap(), None).err().unwrap().to_string();
    assert!(error.contains("model.gguf"), "{error}");
}

#[test]
fn served_here_finds_no_model_that_is_not_on_this_host() {
    assert!(served_here("nobody/no-such-model-of-sconce", None).unwrap().is_none());
}

/// Checks that the processor of each family's example accepts the tasks that bench makes of these texts.
struct BenchTasks {
    texts: Vec<String>,
}

impl BenchTasks {
    fn check<P: Processor, N>(&mut self, family: &'static Family, load: Load<P, N>) {
        let (processor, _) = load(&family.example(root()), &Device::Cpu).unwrap();
        for texts in [&self.texts[..1], &self.texts] {
            let sample = (family.sample)(texts);
            let mut properties = Properties { content_type: sample.body.media_type, ..Properties::default() };
            if let Some(url) = sample.url {
                assert!(processor.routes().iter().any(|route| route.url == url), "{url}");
                properties.headers.insert("url".to_owned(), url.into());
            }
            let message = Message { properties, body: sample.body.bytes };
            let (_, inputs) = processor.preprocess(&message).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(inputs.all().unwrap().len(), sample.inputs, "{}", family.name);
        }
        let registered: Vec<&Route> = family.routes.iter().collect();
        assert!(processor.routes().iter().all(|route| registered.contains(&route)), "{}", family.name);
    }
}

impl Register for BenchTasks {
    fn one_pass<P, F>(&mut self, family: &'static Family, load: Load<P, F>)
    where
        P: Processor,
        F: Forward<Input = P::Input, Output = P::Output>,
    {
        self.check(family, load);
    }

    fn sequences<P, G>(&mut self, family: &'static Family, load: Load<P, G>)
    where
        P: Processor,
        G: Generate<Prompt = P::Input, Piece = P::Piece, Output = P::Output>,
    {
        self.check(family, load);
    }
}

#[test]
fn every_family_accepts_the_tasks_that_bench_makes_for_it() {
    register(&mut BenchTasks { texts: vec!["a candle".to_owned(), "the wall".to_owned()] });
}

#[test]
fn the_example_of_every_family_is_served_by_it_and_passes_its_check() {
    for (family, rules) in families_of_files() {
        let spec = family.example(root());
        let served = served(&spec.source, Some(family.name)).unwrap();
        assert!(std::ptr::eq(served.family, family), "{}", spec.source);
        (rules.check)(&spec).unwrap_or_else(|error| panic!("{error}"));
        let wrong = LoadSpec { options: [("promptname".to_owned(), 1.into())].into(), ..spec };
        assert!(matches!(family.check_options(&wrong), Err(LoadError::Option { .. })), "{}", family.name);
    }
}

#[test]
fn the_default_of_every_option_passes_its_check() {
    for family in families() {
        for option in family.options {
            if let OptionDefault::Value(json) = option.default {
                let value = serde_json::from_str(json).unwrap();
                let options = [(option.name.to_owned(), value)].into();
                family.check_options(&LoadSpec { options, ..LoadSpec::new("a") }).unwrap();
            }
        }
    }
}

/// Makes links to the files of a folder and of the folders in it.
fn link_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            link_files(&entry.path(), &target);
        } else {
            symlink(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn truncated_safetensors_fail_the_check() {
    let folder = tempfile::tempdir().unwrap();
    for (family, rules) in families_of_files() {
        let example = family.example(root());
        let copy = folder.path().join(family.example.model);
        link_files(Path::new(&example.source), &copy);
        // A model that speaks has a file for each voice. A pipeline has a folder for each network.
        let names = ["model.safetensors", "one.safetensors", "vae/diffusion_pytorch_model.safetensors"];
        let weights = names.map(|name| copy.join(name)).into_iter().find(|path| path.exists()).unwrap();
        let bytes = std::fs::read(&weights).unwrap();
        std::fs::remove_file(&weights).unwrap();
        std::fs::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
        let spec = LoadSpec::new(copy.to_str().unwrap());
        let error = (rules.check)(&spec).unwrap_err().to_string();
        assert!(error.contains("not a whole safetensors file"), "{error}");
    }
}

#[test]
fn every_kind_reads_weights_of_pytorch_and_runs_nothing_in_them() {
    let folder = tempfile::tempdir().unwrap();
    let command = root().join("tests/fixtures/torch/command.bin");
    let mut checked = 0;
    for (family, rules) in families_of_files() {
        let example = family.example(root());
        let copy = folder.path().join(family.example.model);
        link_files(Path::new(&example.source), &copy);
        let names =
            [("model", "pytorch_model"), ("vae/diffusion_pytorch_model", "vae/diffusion_pytorch_model")];
        let of_copy = |name: &str, ending: &str| copy.join(format!("{name}.{ending}"));
        let weights = names.iter().find(|(name, _)| of_copy(name, "safetensors").exists());
        // Those of a model that speaks are made by a script of ours.
        let Some((name, name_of_pytorch)) = weights else { continue };
        std::fs::remove_file(of_copy(name, "safetensors")).unwrap();
        symlink(&command, of_copy(name_of_pytorch, "bin")).unwrap();
        let spec = LoadSpec::new(copy.to_str().unwrap());
        let error = (rules.check)(&spec).unwrap_err().to_string();
        assert!(error.contains("posix.system is refused"), "{error}");
        checked += 1;
    }
    assert!(checked >= 5, "{checked}");
}

#[test]
fn a_truncated_gguf_file_fails_the_check() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let number = gguf_file::Value::U32;
    let metadata = [
        ("general.architecture", gguf_file::Value::String("llama".into())),
        ("llama.embedding_length", number(32)),
        ("llama.attention.head_count", number(2)),
        ("llama.block_count", number(1)),
        ("llama.feed_forward_length", number(32)),
        ("llama.context_length", number(64)),
        ("llama.vocab_size", number(2)),
    ];
    let metadata: Vec<(&str, &gguf_file::Value)> =
        metadata.iter().map(|(key, value)| (*key, value)).collect();
    let zeros = |rows: usize| {
        let zeros = Tensor::zeros((rows, 32), DType::F32, &Device::Cpu).unwrap();
        QTensor::quantize(&zeros, GgmlDType::F32).unwrap()
    };
    let tensors = [zeros(2), zeros(4)];
    let tensors = [("token_embd.weight", &tensors[0]), ("unused", &tensors[1])];
    gguf_file::write(&mut File::create(&path).unwrap(), &metadata, &tensors).unwrap();
    let check = |options: &[(&str, u64)]| {
        let options = options.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
        let spec = LoadSpec { options, ..LoadSpec::new(path.to_str().unwrap()) };
        (generate::FAMILY.files().unwrap().check)(&spec).map_err(|error| error.to_string())
    };
    assert_eq!(check(&[]), Ok(()));
    assert!(check(&[("context", 65)]).unwrap_err().contains("at most 64, which is the model's"));
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    let error = check(&[]).unwrap_err();
    assert!(
        error.contains("model.gguf") && error.contains("and it has") && error.contains(": 100 are missing"),
        "{error}"
    );
}

/// A number whose digits are grouped in threes by commas.
fn with_commas(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap()).collect();
    groups.join(",")
}

/// The list in the docs, written by `make default-settings`: the options of all families whose models are loaded from
/// files. An option that is the same in several families has one item.
fn options_list() -> String {
    let mut rows: Vec<(String, Vec<String>, String)> = Vec::new();
    for family in families().iter().filter(|family| matches!(family.serves, Serves::Files(_))) {
        let takes_images =
            |route: &Route| route.media_types.iter().any(|media_type| media_type.starts_with("image/"));
        let suffix = if family.routes.iter().any(takes_images) { ", images" } else { "" };
        let family_column = format!("{}{suffix}", family.name);
        for option in family.options {
            let values = match &option.takes {
                Takes::Whole(range) if *range.end() == u64::MAX => {
                    format!("from {}", with_commas(*range.start()))
                }
                Takes::Whole(range) => {
                    format!("{} to {}", with_commas(*range.start()), with_commas(*range.end()))
                }
                Takes::Switch => "true, false".to_owned(),
                Takes::Text => "text".to_owned(),
                Takes::Choice(names) => {
                    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
                }
            };
            let default = match option.default {
                OptionDefault::Derived(text) => text.to_owned(),
                OptionDefault::Value(json) => match serde_json::from_str(json).unwrap() {
                    Value::String(name) => format!("`{name}`"),
                    value => value.as_u64().map_or_else(|| value.to_string(), with_commas),
                },
            };
            let name = format!("`{}`", option.name);
            let rest = format!("{values}; default {default}: {}", option.help);
            match rows.iter_mut().find(|row| row.0 == name && row.2 == rest) {
                Some(row) => row.1.push(family_column.clone()),
                None => rows.push((name, vec![family_column.clone()], rest)),
            }
        }
    }
    let items =
        rows.iter().map(|(name, families, rest)| format!("- {name} ({}): {rest}\n", families.join("; ")));
    items.collect()
}

#[test]
fn the_docs_list_the_options_of_every_family() {
    let path = root().join("docs/models.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let [begin, end] = ["<!-- options, made by `make default-settings` -->\n", "<!-- end -->\n"];
    let (before, rest) = text.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    let updated = format!("{before}{begin}{}{end}{after}", options_list());
    if std::env::var_os("WRITE_DEFAULT_SETTINGS").is_some() {
        std::fs::write(&path, &updated).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text == updated, "docs/models.md lists other options: run `make default-settings`");
}

#[test]
fn a_field_that_no_request_of_a_url_has_is_refused_with_those_that_there_are() {
    for (url, name) in [
        (CLASSIFY_URL, "top_k"),
        (CLASSIFY_URL, "image_url"),
        (TOKEN_LABELS_URL, "stride"),
        (SPARSE_URL, "normalize"),
        (TRANSLATIONS_URL, "keywords"),
        ("/v1/of/mine", "anything"),
    ] {
        assert_eq!(check_field(url, name), Ok(()), "{url} {name}");
    }
    for (url, name) in [(SPARSE_URL, "aggregation_strategy"), (SPEECH_URL, "lang")] {
        let refused = check_field(url, name).unwrap_err();
        assert!(refused.starts_with(&format!("{url} has no such field; it takes ")), "{refused}");
    }
    assert!(check_field(SPARSE_URL, "x").unwrap_err().contains("prompt_name, threshold, top_k, truncate"));
}
