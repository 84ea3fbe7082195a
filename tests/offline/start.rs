//! What ends a launcher, a worker or a command before it has a broker: which code it exits with, and what is named.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::sconce::{Sconce, Settings};

/// Nobody listens there, and nobody is to be asked.
const NOBODY: &str = "amqp://guest:s3cret@127.0.0.1:1";

fn settings() -> Settings {
    Settings::echo(NOBODY).set("launcher.restart_delay", "50ms")
}

/// A copy of a model's files but for the weights; and where those belong.
fn copy_without_weights(folder: &Path) -> PathBuf {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-bert-max");
    for file in ["config.json", "modules.json", "tokenizer.json", "1_Pooling/config.json"] {
        let copy = folder.join(file);
        fs::create_dir_all(copy.parent().expect("a folder")).expect("a folder");
        fs::copy(model.join(file), copy).expect("a copy");
    }
    folder.join("model.safetensors")
}

fn weights() -> Vec<u8> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-bert-max/model.safetensors");
    fs::read(file).expect("the weights")
}

#[tokio::test]
async fn a_model_that_cannot_be_loaded_exits_with_82_and_names_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = copy_without_weights(folder.path());
    let settings = settings().set("pool[0].model", folder.path().display());
    let whole = weights();
    let torn = &whole[..whole.len() / 2];
    for content in [None, Some(&b"\x40\x00\x00\x00\x00\x00\x00\x00{\"cut"[..]), Some(torn)] {
        if let Some(bytes) = content {
            fs::write(&file, bytes).expect("a file");
        }
        let mut sconce = Sconce::launch(&settings);
        assert_eq!(sconce.exit_code().await, 82, "{}", sconce.log());
        assert!(sconce.log().contains(file.to_str().expect("UTF-8")), "{}", sconce.log());
        assert_eq!(sconce.logged("starting the worker again"), 0, "tried once, then given up");
        let said: Vec<_> =
            sconce.log().lines().filter(|it| it.contains("ERROR")).map(str::to_owned).collect();
        assert_eq!(said.len(), 2, "the slot's end and the launcher's, each with the cause: {said:?}");
    }
}

#[tokio::test]
async fn weights_that_give_no_numbers_are_found_before_any_task_is_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = copy_without_weights(folder.path());
    let mut bytes = weights();
    let (length, rest) = bytes.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("8 bytes")) as usize;
    let header: Value = serde_json::from_slice(&rest[..length]).expect("a header");
    let tensor = &header["embeddings.LayerNorm.weight"]["data_offsets"];
    let place = |index: usize| 8 + length + tensor[index].as_u64().expect("an offset") as usize;
    for number in bytes[place(0)..place(1)].chunks_exact_mut(4) {
        number.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    fs::write(file, bytes).expect("a file");
    let settings =
        settings().set("pool[0].model", folder.path().display()).set("launcher.max_quick_failures", 1);
    let mut sconce = Sconce::launch(&settings);
    assert_eq!(sconce.exit_code().await, 82, "{}", sconce.log());
    let named = "tensor embeddings.LayerNorm.weight is not finite: its number 0 is NaN";
    assert!(sconce.log().contains(named), "{}", sconce.log());
    assert_eq!(sconce.logged("consuming"), 0);
}

#[tokio::test]
async fn a_load_failure_is_logged_once_for_all_slots_and_again_at_the_end() {
    let two = || settings().set("pool[0].devices", r#"["cpu", "cpu"]"#);
    let folder = two().set("pool[0].model", "/no/such/folder");
    let hub = || {
        let hub = two().set("pool[0].model", "no-such/model");
        hub.set("launcher.restart_delay", "10ms").set("launcher.restart_delay_max", "10ms")
    };
    let offline = hub().environment("HF_HUB_OFFLINE", "1");
    let empty = tempfile::tempdir().expect("a folder");
    let unreachable = hub()
        .environment("HF_ENDPOINT", "http://127.0.0.1:9")
        .environment("HF_HOME", empty.path().to_str().expect("UTF-8"));
    for (settings, exit, cause) in [
        (folder, 82, "/no/such/folder: no such folder"),
        (
            offline,
            82,
            "no-such/model; from the Hugging Face hub: is not in the cache, and HF_HUB_OFFLINE is set",
        ),
        (unreachable, 86, "no-such/model; from the Hugging Face hub: "),
    ] {
        let mut sconce = Sconce::launch(&settings);
        assert_eq!(sconce.exit_code().await, exit, "{}", sconce.log());
        let log = sconce.log();
        assert_eq!(log.lines().filter(|line| line.contains(cause)).count(), 2, "{log}");
        let last = log.lines().last().unwrap_or_default();
        assert!(last.contains("all workers have ended") && last.contains(cause), "{log}");
    }
}

#[tokio::test]
async fn settings_with_three_mistakes_are_refused_with_all_three_named() {
    let wrong = settings()
        .set("pool[0].batch.max_delay", "\"soon\"")
        .set("pool[0].workers_per_device", "0")
        .set("launcher.shutdown_gracc", "1s");
    let mut sconce = Sconce::launch(&wrong);
    assert_eq!(sconce.exit_code().await, 78);
    let log = sconce.log();
    for words in ["pool[0].batch.max_delay", "soon", "workers_per_device", "shutdown_gracc", "shutdown_grace"]
    {
        assert!(log.contains(words), "{words}: {log}");
    }
    assert_eq!(sconce.workers().len(), 0);
}

#[tokio::test]
async fn a_device_that_is_not_here_is_refused_and_the_cpu_is_no_substitute() {
    for (devices, words) in [("[\"cuda:1\"]", "cuda:1"), ("[]", "devices"), ("[\"cpu\", \"tpu\"]", "tpu")] {
        let mut sconce = Sconce::launch(&settings().set("pool[0].devices", devices));
        assert_eq!(sconce.exit_code().await, 78, "{devices}");
        assert!(sconce.log().contains(words), "{devices}: {}", sconce.log());
        assert_eq!(sconce.logged("worker spawned"), 0);
    }
    let mut worker = Sconce::run(&settings(), &["worker", "--device", "cuda:1"]);
    assert_eq!(worker.exit_code().await, 83);
    assert!(worker.log().contains("cuda:1"), "{}", worker.log());
}

#[tokio::test]
async fn a_certificate_file_that_cannot_be_read_is_an_error_that_names_it() {
    let settings = Settings::echo("amqps://guest:s3cret@localhost:1/%2f");
    let mut sconce = Sconce::launch(&settings.set("broker.tls.ca_file", "/nowhere/ca.pem"));
    assert_eq!(sconce.exit_code().await, 78, "{}", sconce.log());
    assert!(sconce.log().contains("/nowhere/ca.pem"), "{}", sconce.log());
    assert!(!sconce.log().contains("s3cret"));
}

#[tokio::test]
async fn what_cannot_be_a_load_is_refused_before_anything_is_published() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("a file");
        path.display().to_string()
    };
    let (empty, broken) = (path("empty.jsonl", "\n\n"), path("broken.jsonl", "\"a\"\n\n{\"input\": \n"));
    let settings = Settings::echo(NOBODY);
    for (arguments, words) in [
        ("--in-flight 4 --rate 2".to_owned(), &["--in-flight", "--rate"][..]),
        ("--rate 0".to_owned(), &["--rate", "'0'", "more than 0"]),
        (format!("--input {empty}"), &["empty.jsonl", "holds no task"]),
        (format!("--input {broken}"), &["broken.jsonl", "line 3", "expected a JSON object"]),
        ("--input /no/such/file".to_owned(), &["/no/such/file"]),
        ("--pool other".to_owned(), &["\"other\""]),
    ] {
        let words_of = ["bench"].into_iter().chain(arguments.split_whitespace()).collect::<Vec<_>>();
        let mut bench = Sconce::run(&settings, &words_of);
        let code = bench.exit_code().await;
        let log = bench.log();
        assert_eq!(code, 64, "{arguments}: {log}");
        assert!(words.iter().all(|word| log.contains(word)), "{arguments}: no {words:?} in {log}");
    }
}

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).display().to_string()
}

#[tokio::test]
async fn results_that_cannot_be_written_are_refused_before_anything_is_published() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let recording = fixture("sound/short.mp3");
    fs::create_dir(path("folder")).expect("a folder");
    fs::write(path("out.jsonl"), "{\"custom_id\":\"a\",\"response\":null,\"error\":null}\n").expect("a file");
    fs::write(path("in.jsonl"), "").expect("a file");
    let (sound, images) = (fixture("whisper-random"), fixture("tiny-vit"));
    for (model, arguments, words) in [
        (&sound, &["publish", "--output", &path("folder"), &recording][..], "is a folder"),
        (&sound, &["publish", "--output", &path("c.srt"), &recording, &recording], "the result of one task"),
        (&sound, &["publish", "-i", &path("in.jsonl"), "--output", &path("c.srt")], "--input"),
        (&sound, &["publish", "--output", &path("c.png"), &recording], "c.png"),
        (&sound, &["publish", "--output", &path("c.jpg"), &recording], "jpg"),
        (&images, &["publish", "--wait", "no-such-cat.jpg"], "no-such-cat.jpg"),
        (&images, &["submit", "-i", "-", "-o", &path("out.jsonl")], "cannot be read again"),
        (&images, &["submit", "-i", &path("in.jsonl"), "-o", "/dev/stdout"], "/dev/stdout"),
        (
            &images,
            &["submit", "-i", &path("in.jsonl"), "-o", &path("o"), "--background"],
            "no background queue",
        ),
    ] {
        let mut command = Sconce::run(&settings().set("pool[0].model", model), arguments);
        assert_eq!(command.exit_code().await, 64, "{arguments:?}: {}", command.log());
        assert!(command.log().contains(words), "{arguments:?}: no {words:?} in {}", command.log());
    }
    assert!(!Path::new(&path("c.srt")).exists(), "a refused command leaves no file");
}
