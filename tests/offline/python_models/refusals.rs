//! What the operator must act on: the run ends with 82 and says what is wrong.

use std::process::Command;

use super::runs::{PACKAGE, TINY, answers_of};

#[test]
fn a_class_that_cannot_be_served_ends_the_run_with_the_reason() {
    let import = "import no_such_module_anywhere\n";
    let signature = "import sconce_model\nclass Tiny(sconce_model.Model):\n    urls = ['/v1/embeddings']\n    def forward(self):\n        return []\n";
    let cases: [(&str, &str, &[&str], &str); 6] = [
        (import, "Tiny", &[], "No module named 'no_such_module_anywhere'"),
        (TINY, "Other", &[], "has no Other; its models: Tiny"),
        (signature, "Tiny", &[], "must be forward(self, batch)"),
        ("def :", "Tiny", &[], "SyntaxError"),
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
    let (ended, _) = answers_of(TINY, "Tiny", &["a"], &["--set", "pool[0].python.path=/tmp"]);
    assert_eq!(ended.code, Some(82), "{}", ended.stderr);
    assert!(ended.stderr.contains("No module named sconce_model; install sconce-client"), "{}", ended.stderr);
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
