//! Several pools in one run: each line goes to the pool that answers its URL.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::rig::Rig;

fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn line(id: &str, url: &str, body: Value) -> String {
    json!({"custom_id": id, "method": "POST", "url": url, "body": body}).to_string()
}

/// A settings file with a pool for each of these models.
fn pools(rig: &Rig, models: &[(&str, &str)]) -> String {
    let pool = |(name, model): &(&str, &str)| {
        format!(
            "[[pool]]\nname = {name:?}\ntask_queue = \"{name}.tasks\"\ndead_letter_queue = \"{name}.dead\"\n\
             model = {:?}\ndevices = [\"cpu\"]\nthreads = 1\n",
            fixture(model)
        )
    };
    let path = rig.path("pools.toml");
    std::fs::write(&path, models.iter().map(pool).collect::<String>()).unwrap();
    path.to_str().unwrap().to_owned()
}

const ALL: [(&str, &str); 4] = [
    ("embed", "tiny-bert-cls"),
    ("rerank", "score-bert"),
    ("labels", "score-roberta"),
    ("images", "tiny-vit"),
];

fn lines() -> Vec<String> {
    let image = STANDARD.encode(std::fs::read(Path::new(&fixture("images/rgb.png"))).unwrap());
    let url = format!("data:image/png;base64,{image}");
    vec![
        line("scores", "/v1/score", json!({"text_1": "a", "text_2": ["b", "c"]})),
        line("vectors", "/v1/embeddings", json!({"input": ["a", "b"]})),
        line("image", "/classify", json!({"image_url": url, "model": "tiny-vit"})),
        line("ranks", "/v1/rerank", json!({"query": "q", "documents": ["a", "b"]})),
        line("label", "/classify", json!({"input": "a"})),
        line("nobody", "/v1/chat/completions", json!({"messages": []})),
        line("bad", "/v1/rerank", json!({"query": "q", "documents": []})),
    ]
}

#[test]
fn each_line_goes_to_the_pool_that_answers_its_url() {
    let rig = Rig::new(&lines());
    let file = pools(&rig, &ALL);
    let ended = rig.start(&["--config", &file]).wait();
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let answers = rig.answers();
    let statuses: Vec<_> = answers.iter().map(|it| it["response"]["status_code"].as_u64().unwrap()).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 404, 400], "{answers:?}");
    let body = |index: usize| &answers[index]["response"]["body"];
    assert_eq!(body(0)["data"].as_array().map(Vec::len), Some(2));
    assert_eq!(body(1)["data"][1]["object"], "embedding");
    assert_eq!(body(2).as_array().map(Vec::len), Some(5));
    assert_eq!(body(3)["results"].as_array().map(Vec::len), Some(2));
    assert_eq!(body(4)["data"][0]["num_classes"], 3);
    assert!(body(5)["error"]["message"].as_str().unwrap().contains("/v1/chat/completions"));
    let again = rig.start(&["--config", &file]).wait();
    assert!(again.stderr.contains("all 7 lines are answered already"), "{}", again.stderr);
    let other = rig.start(&["--config", &file, "--pool", "embed"]).wait();
    assert_eq!(other.code, Some(64), "{}", other.stderr);
    assert!(other.stderr.contains("4 pools"), "{}", other.stderr);
}

#[test]
fn a_file_that_several_pools_take_needs_the_name_of_one() {
    let rig = Rig::new(&[]);
    std::fs::write(rig.path("a.txt"), "a").unwrap();
    let run = |models: &[(&str, &str)], flags: &[&str]| {
        let mut command = rig.bare_command();
        command.args(["--config", &pools(&rig, models), "--format", "json", "--output-dir"]);
        command.arg(rig.path("results")).arg(rig.path("a.txt")).args(flags);
        rig.start_command(command).wait()
    };
    let two = [("one", "tiny-bert-cls"), ("two", "tiny-bert-cls"), ("images", "tiny-vit")];
    for flags in [&[][..], &["--url", "/v1/embeddings"]] {
        let ended = run(&two, flags);
        assert_eq!(ended.code, Some(64), "{}", ended.stderr);
        let words = "the pools \"one\", \"two\" take it: choose one with --pool";
        assert!(ended.stderr.contains(words) && !rig.path("results").exists(), "{}", ended.stderr);
    }
    for (models, flags) in [(&two[..], &["--pool", "two"][..]), (&two[1..], &[])] {
        let ended = run(models, flags);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        std::fs::remove_dir_all(rig.path("results")).unwrap();
    }
}

#[test]
fn only_the_named_pools_run_and_flags_are_of_one() {
    let rig = Rig::new(&lines()[..2]);
    let file = pools(&rig, &ALL);
    let ended = rig.start(&["--config", &file, "--model", "echo"]).wait();
    assert_eq!(ended.code, Some(64), "{}", ended.stderr);
    assert!(ended.stderr.contains("choose it with --pool"), "{}", ended.stderr);
    let ended = rig.start(&["--config", &file, "--pool", "embed"]).wait();
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let statuses: Vec<_> = rig.answers().iter().map(|it| it["response"]["status_code"].clone()).collect();
    assert_eq!(statuses, [json!(404), json!(200)]);
}
