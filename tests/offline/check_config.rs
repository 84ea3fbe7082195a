//! What is said of a pool's model and its options before anything is loaded: by `sconce check-config`, and by
//! `sconce launch`, which refuses the same.

#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use sconce::model::{CpuFeatures, Dtype, LoadSpec};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Runs a command with a model and one more setting.
fn sconce(command: &str, model: &Path, set: &str) -> (i32, String) {
    sconce_with(command, model, &[set.to_owned()])
}

/// Runs a command with a model and further settings.
fn sconce_with(command: &str, model: &Path, set: &[String]) -> (i32, String) {
    let mut process = Command::new(env!("CARGO_BIN_EXE_sconce"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("SCONCE_") || name == "AMQP_URL" {
            process.env_remove(&*name);
        }
    }
    let model = format!("pool[0].model={}", model.display());
    let devices = "pool[0].devices=cpu";
    // Nobody listens there: what `launch` does not refuse would be tried for a millisecond.
    let broker = ["broker.url=amqp://127.0.0.1:9", "broker.give_up_after=1ms"];
    let set = [&model, devices].into_iter().chain(set.iter().map(|set| &**set)).chain(broker);
    let output: Output = process.arg(command).args(set.flat_map(|set| ["--set", set])).output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code().unwrap(), format!("{out}\n{err}"))
}

#[test]
fn an_option_the_model_does_not_take_is_refused_before_anything_starts() {
    let wrong = [
        ("generate-llama", "contxt=64", "options.contxt: unknown key; did you mean `context`?"),
        ("generate-llama", "sequences=0", "options.sequences = 0: expected a whole number from 1 to 4096"),
        ("generate-llama", "context=1000000", "which is the model's"),
        ("tiny-prompts", "prompt_name=qeury", "a prompt of the model; this model has"),
        ("score-bert", "prompt_name=query", "this model takes `max_seq_length`"),
        ("score-bert", "max_seq_length=65", "max_seq_length"),
        ("tiny-vit", "max_pixels=many", "options.max_pixels = \"many\": expected a whole number, at least 1"),
    ];
    for (model, option, words) in wrong {
        for command in ["check-config", "launch"] {
            let (exit, said) = sconce(command, &fixture(model), &format!("pool[0].options.{option}"));
            assert_eq!(exit, 78, "{command} {option}: {said}");
            let origin = format!("(flag --set pool[0].options.{})", option.split('=').next().unwrap());
            assert!(said.contains(words) && said.contains(&origin), "{command} {option}: {said}");
        }
    }
    let (exit, said) = sconce("check-config", &fixture("generate-llama"), "pool[0].options.context=64");
    assert_eq!(exit, 0, "{said}");
    assert!(said.contains("llama for generate (/v1/chat/completions, /v1/completions)"), "{said}");
}

#[test]
fn a_model_without_a_chat_template_is_said_to_answer_no_chats() {
    let folder = tempfile::tempdir().unwrap();
    let kept = fixture("generate-llama");
    for file in fs::read_dir(&kept).unwrap() {
        let name = file.unwrap().file_name();
        if name != "chat_template.jinja" && name != "tokenizer_config.json" {
            symlink(kept.join(&name), folder.path().join(name)).unwrap();
        }
    }
    let describe = |model: &Path| sconce("check-config", model, "pool[0].options.context=64");
    let (exit, said) = describe(folder.path());
    assert_eq!(exit, 0, "{said}");
    assert!(said.contains("llama for generate (/v1/completions)"), "{said}");
    // Older files have the template here.
    let with_template = r#"{"chat_template": "{{ messages }}"}"#;
    fs::write(folder.path().join("tokenizer_config.json"), with_template).unwrap();
    assert!(describe(folder.path()).1.contains("(/v1/chat/completions, /v1/completions)"));
    // The fixture's metadata have no template.
    let (_, said) = describe(&fixture("gguf/granite.gguf"));
    assert!(said.contains("granite for generate (/v1/completions)"), "{said}");
}

#[test]
fn a_dtype_that_the_device_of_the_pool_does_not_have_is_refused_before_anything_starts() {
    for dtype in ["bf16", "int8"] {
        for command in ["check-config", "launch"] {
            // A string may be quoted as in a file.
            let (exit, said) = sconce(command, &fixture("tiny-clip"), &format!("pool[0].dtype=\"{dtype}\""));
            assert_eq!(exit, 82, "{command} {dtype}: {said}");
            assert!(said.contains(&format!("dtype is \"{dtype}\"")), "{command} {dtype}: {said}");
        }
    }
}

#[test]
fn int8_needs_widths_that_its_groups_divide() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "tokenizer.json"] {
        symlink(fixture("tiny-bert-cls").join(name), folder.path().join(name)).unwrap();
    }
    let config = fs::read_to_string(fixture("tiny-bert-cls").join("config.json")).unwrap();
    let narrow = config.replace("\"intermediate_size\": 64", "\"intermediate_size\": 40");
    assert_ne!(narrow, config);
    fs::write(folder.path().join("config.json"), narrow).unwrap();
    let (exit, said) = sconce("check-config", folder.path(), "pool[0].dtype=int8");
    assert_eq!(exit, 82, "{said}");
    assert!(said.contains("multiples of 32; the inner width is 40"), "{said}");
    for (model, width) in
        [("tiny-hibari", "the decoder's width is 24"), ("whisper-random", "the encoder's inner width is 48")]
    {
        let (exit, said) = sconce("check-config", &fixture(model), "pool[0].dtype=int8");
        assert_eq!(exit, 82, "{said}");
        assert!(said.contains("multiples of 32; ") && said.contains(width), "{said}");
    }
    let (exit, said) = sconce("check-config", folder.path(), "pool[0].dtype=auto");
    assert_eq!(exit, 0, "{said}");
    assert!(!said.contains("in int8"), "{said}");
}

#[test]
fn the_dtype_that_a_worker_will_try_first_is_shown() {
    let first = |cpu_features| {
        let spec = LoadSpec { is_dtype_auto: true, cpu_features, ..LoadSpec::new("a") };
        spec.candidates()[0].dtype.name()
    };
    let (best, none) = (first(CpuFeatures::Auto), first(CpuFeatures::None));
    assert_eq!(none, "f32");
    let mut expected = vec![("tiny-clip", "auto", "f32"), ("tiny-resnet/basic", "auto", "f32")];
    let with_linear_layers = ["tiny-bert-cls", "tiny-vit", "generate-llama"];
    expected.extend(with_linear_layers.map(|model| (model, "auto", best)));
    expected.push(("tiny-vit", "none", none));
    for (model, features, dtype) in expected {
        let settings = ["pool[0].dtype=auto".to_owned(), format!("pool[0].cpu_features={features}")];
        let (exit, said) = sconce_with("check-config", &fixture(model), &settings);
        assert_eq!(exit, 0, "{model}: {said}");
        assert!(said.contains(&format!(", in {dtype} (dtype = \"auto\")")), "{model} {features}: {said}");
    }
}

#[test]
fn a_whisper_of_english_only_is_not_said_to_translate() {
    let whisper = fixture("whisper-random");
    let (_, said) = sconce("check-config", &whisper, "pool[0].name=speech");
    assert!(said.contains("(/v1/audio/transcriptions, /v1/audio/translations)"), "{said}");
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        symlink(whisper.join(name), folder.path().join(name)).unwrap();
    }
    let settings = fs::read(whisper.join("generation_config.json")).unwrap();
    let mut settings: serde_json::Value = serde_json::from_slice(&settings).unwrap();
    settings["is_multilingual"] = false.into();
    fs::write(folder.path().join("generation_config.json"), settings.to_string()).unwrap();
    let (exit, said) = sconce("check-config", folder.path(), "pool[0].name=speech");
    assert_eq!(exit, 0, "{said}");
    assert!(said.contains("for transcribe (/v1/audio/transcriptions)"), "{said}");
}

#[test]
fn how_this_cpu_multiplies_bf16_is_shown_for_a_pool_that_computes_in_it() {
    let said = |dtype: &str, features: &str| {
        let settings = [format!("pool[0].dtype={dtype}"), format!("pool[0].cpu_features={features}")];
        let (exit, said) = sconce_with("check-config", &fixture("tiny-bert-cls"), &settings);
        assert_eq!(exit, 0, "{said}");
        said
    };
    let widened = "#   bf16 is widened to f32: the vector units in use have no instructions for it\n";
    assert!(said("bf16", "none").contains(widened));
    // The rate, after the last comma or colon, is measured in each process.
    let spec = LoadSpec { dtype: Dtype::Bf16, ..LoadSpec::new("a") };
    let note = spec.bf16_note().unwrap();
    let choice = note.split([',', ':']).next().unwrap();
    let shown = said("bf16", "auto");
    assert!(shown.contains(&format!("#   {choice}")), "{note}: {shown}");
    assert!(!said("f32", "auto").contains("#   bf16 is "));
    assert!(!said("auto", "none").contains("bf16, because"));
}

#[test]
fn vector_units_that_this_cpu_lacks_are_refused_before_anything_starts() {
    for (features, name) in CpuFeatures::ALL {
        let setting = format!("pool[0].cpu_features={name}");
        let (exit, said) = sconce("check-config", &fixture("tiny-bert-cls"), &setting);
        match features.check() {
            Ok(()) => assert_eq!(exit, 0, "{name}: {said}"),
            Err(reason) => {
                let (launched, _) = sconce("launch", &fixture("tiny-bert-cls"), &setting);
                assert_eq!((exit, launched), (78, 78), "{name}: {said}");
                assert!(said.contains(&reason) && said.contains("pool"), "{name}: {said}");
            }
        }
    }
}

/// Runs `sconce check-config` in a folder, with a settings file.
fn check_in(folder: &Path, file: &str) -> (i32, String) {
    let mut process = Command::new(env!("CARGO_BIN_EXE_sconce"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("SCONCE_") || name == "AMQP_URL" {
            process.env_remove(&*name);
        }
    }
    let cache = folder.join("no-cache");
    let output =
        process.arg("check-config").arg(file).current_dir(folder).env("HF_HUB_CACHE", cache).output();
    let output = output.unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code().unwrap(), format!("{out}\n{err}"))
}

#[test]
fn a_folder_is_relative_to_its_settings_file_and_precedes_a_hub_id() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    for name in ["config", "models", "elsewhere"] {
        fs::create_dir(root.join(name)).unwrap();
    }
    symlink(fixture("score-bert"), root.join("models/a")).unwrap();
    fs::create_dir(root.join("config/org")).unwrap();
    symlink(fixture("score-bert"), root.join("config/org/b")).unwrap();
    // A folder beside the file that has the name of a registered model.
    fs::create_dir(root.join("config/echo")).unwrap();
    let here = root.display();
    for (model, words) in [
        ("../models/a", format!("will load \"{here}/models/a\": bert for rerank")),
        ("org/b", format!("will load \"{here}/config/org/b\": bert for rerank")),
        ("echo", "will load \"echo\": registered".to_owned()),
        (
            "models/a",
            format!("there is no folder {here}/config/models/a, and the model is not in the hub's cache"),
        ),
        // A path is no id of the hub, so it is an error.
        ("./models/a", format!("{here}/config/models/a: no such folder")),
    ] {
        let file = root.join("config/a.toml");
        fs::write(&file, format!("[[pool]]\nmodel = \"{model}\"\ndevices = [\"cpu\"]")).unwrap();
        for written in [file.to_str().unwrap(), "../config/a.toml"] {
            let (exit, said) = check_in(&root.join("elsewhere"), written);
            let expected = if model == "./models/a" { 82 } else { 0 };
            assert!(exit == expected && said.contains(&words), "{model}, {exit}: {said}");
        }
    }
}

#[test]
fn the_default_model_is_found_where_fetch_model_puts_it() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("models")).unwrap();
    let fetched = folder.path().join("models/all-MiniLM-L6-v2");
    fs::write(folder.path().join("a.toml"), "").unwrap();
    let (_, said) = check_in(folder.path(), "a.toml");
    assert!(said.contains("/models/all-MiniLM-L6-v2, and the model is not in the hub's cache"), "{said}");
    symlink(fixture("score-bert"), &fetched).unwrap();
    let (exit, said) = check_in(folder.path(), "a.toml");
    let words = format!(
        "will load \"{}\"",
        fetched.parent().unwrap().canonicalize().unwrap().join("all-MiniLM-L6-v2").display()
    );
    assert!(exit == 0 && said.contains(&words), "{exit}: {said}");
}

#[test]
fn a_model_whose_weights_are_cut_off_will_not_load() {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixture("generate-llama")).unwrap() {
        let file = file.unwrap();
        symlink(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let weights = folder.path().join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::remove_file(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
    let (exit, said) = sconce("check-config", folder.path(), "pool[0].name=text");
    assert_eq!(exit, 82, "{said}");
    assert!(said.contains("pool \"text\"") && said.contains("not a whole safetensors file"), "{said}");
    assert!(!said.contains("will load"), "{said}");
}

#[test]
fn weights_of_pytorch_are_read_and_a_call_in_them_is_refused_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json"] {
        symlink(fixture("tiny-bert-cls").join(name), folder.path().join(name)).unwrap();
    }
    let weights = folder.path().join("pytorch_model.bin");
    symlink(fixture("torch/pytorch_model.bin"), &weights).unwrap();
    let (exit, said) = sconce("check-config", folder.path(), "pool[0].name=text");
    assert_eq!(exit, 0, "{said}");
    fs::remove_file(&weights).unwrap();
    symlink(fixture("torch/command.bin"), &weights).unwrap();
    let (exit, said) = sconce("check-config", folder.path(), "pool[0].name=text");
    assert_eq!(exit, 82, "{said}");
    assert!(
        said.contains("pytorch_model.bin: not readable") && said.contains("posix.system is refused"),
        "{said}"
    );
}

#[test]
fn a_folder_that_is_not_on_this_host_is_refused_and_an_id_of_the_hub_is_not() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("models")).unwrap();
    let settings = folder.path().join("sconce.toml");
    let check = |model: &str| {
        fs::write(&settings, format!("[[pool]]\nmodel = {model:?}\n")).unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_sconce"));
        process.env("HF_HUB_CACHE", folder.path().join("cache")).arg("check-config").arg(&settings);
        let output = process.args(["--set", "pool[0].devices=cpu"]).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code().unwrap(), String::from_utf8(said).unwrap())
    };
    for (model, words) in [
        ("/no/such/model", "no such folder"),
        ("./models/no-such", "no such folder"),
        ("models/no-such", "models/no-such, although there is"),
        ("models/no/such", "neither an existing folder nor an id"),
        ("models/no-such.gguf", "no-such.gguf"),
    ] {
        let (exit, said) = check(model);
        assert_eq!(exit, 82, "{model}: {said}");
        assert!(said.contains(words), "{model}: {said}");
    }
    let (exit, said) = check("somebody/no-such-model");
    assert_eq!(exit, 0, "{said}");
    assert!(said.contains("the model is not in the hub's cache on this host"), "{said}");
}

/// Runs `check-config` with a copy of a decoder whose `config.json` is changed.
fn check_changed(name: &str, changes: &serde_json::Value) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixture(name)).unwrap() {
        let file = file.unwrap();
        symlink(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    changes.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    fs::remove_file(&path).unwrap();
    fs::write(&path, config.to_string()).unwrap();
    sconce("check-config", folder.path(), "pool[0].name=text")
}

#[test]
fn a_decoder_that_cannot_be_computed_is_refused_with_the_property_and_its_value() {
    let rope = serde_json::json!({"rope_type": "spiral", "rope_theta": 10000.0});
    for (name, changes, words) in [
        ("generate-llama", serde_json::json!({"rope_parameters": rope}), "rope scaling \"spiral\""),
        (
            "generate-qwen3_moe",
            serde_json::json!({"num_experts_per_tok": 7}),
            "num_experts_per_tok is 7, and num_experts 6",
        ),
        ("generate-llama", serde_json::json!({"hidden_act": "relu2"}), "hidden_act is \"relu2\""),
        (
            "generate-gemma",
            serde_json::json!({"use_bidirectional_attention": true}),
            "use_bidirectional_attention is true",
        ),
    ] {
        let (exit, said) = check_changed(name, &changes);
        assert_eq!(exit, 82, "{name} {changes}: {said}");
        assert!(said.contains(words) && !said.contains("will load"), "{name} {changes}: {said}");
    }
}
