//! What the operator must act on: the run ends with 82 and says what is wrong.

use std::fs;
use std::process::Command;

use serde_json::json;

use super::rig::{Rig, line};
use super::runs::{PACKAGE, TINY, answers_of, command, pools_of, statuses};

#[test]
fn a_class_that_cannot_be_served_ends_the_run_with_the_reason() {
    let import = "import no_such_module_anywhere\n";
    let signature = "import sconce_model\nclass Tiny(sconce_model.Model):\n    urls = ['/v1/embeddings']\n    def forward(self):\n        return []\n";
    let load =
        TINY.replace("    def forward", "    def load(self, *_):\n        None.weights\n\n    def forward");
    let no_folders = ["--set", "pool[0].python.path=[\"/nowhere\", \"/no/folder\"]"];
    let cases: [(&str, &str, &[&str], &str); 8] = [
        (import, "Tiny", &[], "No module named 'no_such_module_anywhere'"),
        (TINY, "Other", &[], "has no Other; its models: Tiny"),
        (signature, "Tiny", &[], "must be forward(self, batch)"),
        ("def :", "Tiny", &[], "SyntaxError"),
        (&load, "Tiny", &[], "AttributeError: 'NoneType' object has no attribute 'weights'"),
        (TINY, "Tiny", &no_folders, "pool.python.path names what does not exist: /nowhere, /no/folder"),
        (TINY, "Tiny", &["--set", "pool[0].options.depth=3"], "options.depth is no option of Tiny"),
        (TINY, "Tiny", &["--set", "pool[0].python.executable=no-such-python"], "no-such-python"),
    ];
    for (code, class, more, words) in cases {
        let (ended, answers) = answers_of(code, class, &["a"], more);
        assert_eq!(ended.code, Some(82), "{words}: {}", ended.stderr);
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        assert!(answers.is_empty(), "{answers:?}");
    }
}

#[test]
fn an_interpreter_without_the_package_is_refused() {
    let (ended, _) = answers_of(TINY, "Tiny", &["a"], &["--set", "pool[0].python.path=/usr"]);
    assert_eq!(ended.code, Some(82), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("No module named 'sconce_model'; install sconce-client"),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_file_in_the_current_folder_does_not_take_the_place_of_a_module() {
    let rig = Rig::new(&[line("r-0", json!({"input": "a"}))]);
    let here = rig.path("here");
    fs::create_dir(&here).unwrap();
    for module in ["queue", "json", "sconce_model"] {
        fs::write(here.join(module).with_extension("py"), "raise SystemExit('the wrong module')\n").unwrap();
    }
    let code = format!("import queue, sys\nassert {here:?} not in sys.path and '' not in sys.path\n{TINY}");
    let mut command = command(&rig, &code, "Tiny", &[]);
    command.current_dir(&here);
    let ended = rig.start_command(command).wait();
    assert_eq!((ended.code, statuses(&rig.answers())), (Some(0), vec![200]), "{}", ended.stderr);
}

#[test]
fn check_config_tells_all_that_is_wrong_with_the_classes() {
    let rig = Rig::new(&[]);
    fs::write(rig.path("tiny_class.py"), TINY).unwrap();
    let file = pools_of(&rig, &[("tiny", "./tiny_class.py:Tiny"), ("other", "./tiny_class.py:Other")]);
    let options = ["--set", "pool[0].options.depth=3", "--set", "pool[0].options.width=3"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command.env_remove("AMQP_URL").args(["check-config", &file]).args(options);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(82), "{said}");
    for words in
        ["options.depth is no option of Tiny", "options.width is no option", "has no Other; its models: Tiny"]
    {
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn a_class_that_fails_to_load_is_tried_again_and_then_given_up() {
    let code = TINY.replace(
        "    def forward",
        "    def load(self, *_):\n        raise OSError(\"the disk is full\")\n\n    def forward",
    );
    let (ended, _) = answers_of(&code, "Tiny", &["a"], &["--set", "launcher.max_quick_failures=2"]);
    assert_eq!(ended.code, Some(88), "{}", ended.stderr);
    assert!(ended.stderr.contains("OSError: the disk is full"), "{}", ended.stderr);
}

#[test]
fn a_launcher_without_python_refuses_such_a_pool() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command.env_remove("AMQP_URL").args(["launch", "--no-python"]);
    command.args(["--set", "pool[0].model=python:shop.models:Embedder", "--set", "pool[0].devices=cpu"]);
    command.args(["--set", "broker.url=amqp://127.0.0.1:9"]).args(["--set", "broker.give_up_after=1ms"]);
    let output = command.args(["--set", &format!("pool[0].python.path={PACKAGE}")]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(78), "{said}");
    assert!(said.contains("pool[0].model") && said.contains("--no-python"), "{said}");
}

#[test]
fn a_model_that_is_no_class_by_its_form_is_refused_with_what_is_expected() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command.env_remove("AMQP_URL").args(["check-config", "--set", "pool[0].model=python:models"]);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(78), "{said}");
    assert!(said.contains("python:MODULE:CLASS"), "{said}");
}
