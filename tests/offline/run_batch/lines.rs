//! What each input line becomes: the response format, the order, and an error line for each line
//! that cannot be answered.

use std::path::Path;

use serde_json::{Value, json};

use super::rig::{Rig, line, slow_lines};

fn model() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/all-MiniLM-L6-v2");
    assert!(folder.join("model.safetensors").is_file(), "the real weights are needed: make models");
    folder.to_str().unwrap().to_owned()
}

#[test]
fn lines_come_out_in_the_order_in_which_they_went_in() {
    // The first ones are the slowest, and each worker takes one at a time.
    let body = |n: u64| json!({"input": format!("text {n}"), "sleep_ms": (20 - n) * 5});
    let lines: Vec<_> = (0..20).map(|n| line(&format!("r-{n}"), body(n))).collect();
    let rig = Rig::new(&lines);
    let ended = rig.run_echo(&["--set", "pool[0].batch.max_requests=1"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    rig.assert_all_answered(20);
    assert_eq!(rig.left_behind(), Vec::<std::path::PathBuf>::new(), "in the temp folder");
}

#[test]
fn an_answered_line_has_the_fields_of_openais_batch_output() {
    let rig = Rig::new(&[line("only", json!({"input": "a"}))]);
    assert_eq!(rig.run_echo(&[]).code, Some(0));
    let answers = rig.answers();
    let answer = answers[0].as_object().unwrap();
    let mut names: Vec<_> = answer.keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["custom_id", "error", "id", "response"]);
    assert_eq!(answer["error"], Value::Null);
    let (id, request) = (answer["id"].as_str().unwrap(), answer["response"]["request_id"].as_str().unwrap());
    assert!(id.starts_with("batch_req_") && !request.is_empty(), "{answer:?}");
    assert_eq!(answer["response"]["status_code"], 200);
    assert_eq!(answer["response"]["body"], json!({"object": "echo", "input": "a", "model": "echo"}));
}

#[test]
fn a_line_that_is_no_request_has_an_error_line_and_a_blank_line_has_none() {
    let good = |id: &str| line(id, json!({"input": id}));
    let lines = [
        good("first"),
        String::new(),
        "{\"custom_id\": \"torn".into(),
        json!({"method": "POST", "url": "/v1/embeddings", "body": {}}).to_string(),
        "   ".into(),
        json!({"custom_id": "got", "method": "GET", "url": "/v1/embeddings", "body": {}}).to_string(),
        json!({"custom_id": "listed", "method": "POST", "url": "/v1/embeddings", "body": []}).to_string(),
        good("last"),
    ];
    let rig = Rig::new(&lines);
    let ended = rig.run_echo(&[]);
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let answers = rig.answers();
    assert_eq!(answers.len(), 6, "{answers:?}");
    for (index, custom_id) in [(0, "first"), (5, "last")] {
        assert_eq!(answers[index]["custom_id"], custom_id);
        assert_eq!(answers[index]["response"]["status_code"], 200);
    }
    let cases = [
        (1, Value::Null, "line 3: not JSON"),
        (2, Value::Null, "line 4: custom_id is missing"),
        (3, "got".into(), "line 6: method must be \"POST\", is \"GET\""),
        (4, "listed".into(), "line 7: body must be an object or a data URL, is an array"),
    ];
    for (index, custom_id, words) in cases {
        let answer = &answers[index];
        assert_eq!(answer["custom_id"], custom_id);
        assert_eq!(answer["response"], Value::Null);
        assert!(answer["error"]["message"].as_str().unwrap().starts_with(words), "{answer}");
    }
    assert!(ended.stderr.contains("6 of 6 lines answered now") && ended.stderr.contains("4 with an error"));
}

#[test]
fn a_finished_run_with_errors_exits_with_87_and_counts_them_over_all_runs() {
    let wrong = |n: usize| {
        let body = json!({"input": format!("text {n}"), "reply": "no data URL"});
        line(&format!("r-{n}"), body)
    };
    let mut lines: Vec<_> = (0..6).map(wrong).collect();
    lines.push("{}".into());
    lines.push(line("good", json!({"input": "a"})));
    let rig = Rig::new(&lines);
    let ended = rig.run_echo(&[]);
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let first = ended.stderr.lines().find(|line| line.contains(" × ")).unwrap().to_owned();
    assert!(first.contains("6 × 400: ") && ended.stderr.contains("7 with an error"), "{}", ended.stderr);
    assert!(ended.stderr.contains("1 × invalid_line: custom_id is missing"), "{}", ended.stderr);
    let written = rig.written();
    for lines in [8, 7] {
        let keep = written.match_indices('\n').nth(lines - 1).unwrap().0 + 1;
        std::fs::write(rig.output(), &written[..keep]).unwrap();
        let again = rig.run_echo(&["--json"]);
        assert_eq!(again.code, Some(87), "{}", again.stderr);
        assert!(
            again.stderr.contains("7 with an error") && again.stderr.contains(&first),
            "{}",
            again.stderr
        );
        let report: Value = serde_json::from_str(&again.stdout).unwrap();
        assert_eq!((&report["errors"], &report["errors_in_output"]), (&0.into(), &7.into()), "{report}");
        assert_eq!(report["commonest_errors"][0]["count"], 6, "{report}");
    }
}

#[test]
fn replies_that_are_not_json_stand_in_lines_and_a_run_continues_behind() {
    let reply = |url: &str| json!({"input": "a", "reply": url});
    let lines = [
        line("sound", reply("data:audio/wav;base64,UklGRv8ACg==")),
        line("text", reply("data:text/plain;base64,b25lCnR3byDDvA==")),
        line("json", json!({"input": "a"})),
        line("refused", reply("no data URL")),
    ];
    let rig = Rig::new(&lines);
    let bodies = || rig.answers().iter().map(|it| it["response"]["body"].clone()).collect::<Vec<_>>();
    let ended = rig.run_echo(&["--show"]);
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let whole = bodies();
    assert_eq!(whole[0], json!({"content_type": "audio/wav", "base64": "UklGRv8ACg=="}));
    assert_eq!(whole[1], "one\ntwo ü");
    assert_eq!(whole[2], json!({"object": "echo", "input": "a", "model": "echo"}));
    assert_eq!(whole[3]["error"]["param"], "reply");
    assert!(ended.stdout.contains("> text\none\ntwo ü\n"), "{}", ended.stdout);
    let ends: Vec<usize> = rig.written().match_indices('\n').map(|(at, _)| at + 1).collect();
    for (done, keep) in [(0, ends[0] - 9), (1, ends[0]), (1, ends[1] - 1), (2, ends[1] + 40)] {
        std::fs::write(rig.output(), &rig.written()[..keep]).unwrap();
        let ended = rig.run_echo(&[]);
        assert_eq!(ended.code, Some(87), "{}", ended.stderr);
        assert!(ended.stderr.contains(&format!("4 lines answered now, {done} before")), "{}", ended.stderr);
        assert_eq!(bodies(), whole);
    }
}

#[test]
fn a_report_says_who_answered_how_much_and_stands_alone_on_stdout() {
    let mut lines = slow_lines(10, 20);
    lines.push("{}".into());
    let rig = Rig::new(&lines);
    let ended = rig.run_echo(&["--json", "--set", "pool[0].batch.max_requests=2"]);
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&report["lines"], &report["inputs"], &report["errors"]), (&11.into(), &10.into(), &1.into()));
    assert_eq!((&report["model"], &report["devices"]), (&"echo".into(), &json!({"cpu": 10})));
    let workers = report["workers"].as_array().unwrap();
    let tasks: u64 = workers.iter().map(|worker| worker["tasks"].as_u64().unwrap()).sum();
    assert_eq!(tasks, 10, "{report:#}");
    // One batch takes 20 ms, at least.
    let seconds = report["seconds"].as_f64().unwrap();
    assert!(seconds >= 0.02 && report["device_busy_percent"].as_f64().unwrap() > 0.0, "{report:#}");
    let again = rig.run_echo(&["--json"]);
    let report: Value = serde_json::from_str(&again.stdout).unwrap();
    assert_eq!(
        (again.code, &report["lines"]),
        (Some(87), &0.into()),
        "the output holds an error of the first run"
    );
}

#[test]
fn an_empty_input_is_done_at_once() {
    let rig = Rig::new(&[]);
    let ended = rig.run_echo(&[]);
    assert_eq!((ended.code, rig.written()), (Some(0), String::new()), "{}", ended.stderr);
}

#[test]
fn real_embeddings_and_refusals_stand_on_the_lines_of_their_requests() {
    let ask = |id: &str, body: Value| line(id, body);
    let mut lines = vec![
        ask("hello", json!({"input": "Hello, world!"})),
        ask("number", json!({"input": 7})),
        ask("nested", json!({"input": ["ok", {"no": 1}]})),
        ask("foreign", json!({"input": "x", "model": "gpt-9"})),
        ask("empty", json!({"input": []})),
        json!({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
            "body": {"input": "x"}})
        .to_string(),
        ask("format", json!({"input": "x", "encoding_format": "hex"})),
    ];
    lines.push(ask("two", json!({"input": ["Hello, world!", "again"], "encoding_format": "float"})));
    let rig = Rig::new(&lines);
    let ended = rig.start(&["--model", &model(), "--devices", "cpu"]).wait();
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let answers = rig.answers();
    let expected: Vec<Value> = serde_json::from_slice(
        &std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/minilm/expected.json"))
            .unwrap(),
    )
    .unwrap();
    assert_eq!(expected[0]["text"], "Hello, world!");
    for (index, count) in [(0, 1), (7, 2)] {
        let data = answers[index]["response"]["body"]["data"].as_array().unwrap();
        assert_eq!(data.len(), count);
        for (ours, theirs) in
            data[0]["embedding"].as_array().unwrap().iter().zip(expected[0]["vector"].as_array().unwrap())
        {
            assert!((ours.as_f64().unwrap() - theirs.as_f64().unwrap()).abs() < 1e-5, "{ours} {theirs}");
        }
    }
    let refusals = [
        (1, "number", 400, "input"),
        (2, "nested", 400, "input[1]"),
        (3, "foreign", 404, "model"),
        (4, "empty", 400, "input"),
        (5, "chat", 404, "url"),
        (6, "format", 400, "encoding_format"),
    ];
    for (index, custom_id, status, param) in refusals {
        let answer = &answers[index];
        assert_eq!(answer["custom_id"], custom_id);
        assert_eq!(answer["response"]["status_code"], status, "{answer}");
        let error = &answer["response"]["body"]["error"];
        assert_eq!(error["param"], param, "{answer}");
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
    let words = |index: usize| answers[index]["response"]["body"]["error"]["message"].as_str().unwrap();
    assert!(words(3).contains("gpt-9"), "{}", words(3));
    assert!(words(5).contains("/v1/chat/completions"), "{}", words(5));
    assert!(words(6).contains("hex"), "{}", words(6));
}

#[test]
fn weights_that_are_not_finite_are_named_and_exit_with_82_in_every_dtype() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-bert-cls");
    let rig = Rig::new(&[line("a", json!({"input": "a"}))]);
    let model = rig.path("broken");
    std::fs::create_dir_all(model.join("1_Pooling")).unwrap();
    for folder in ["", "1_Pooling"] {
        for file in std::fs::read_dir(fixture.join(folder)).unwrap() {
            let file = file.unwrap();
            if file.path().is_file() {
                std::fs::copy(file.path(), model.join(folder).join(file.file_name())).unwrap();
            }
        }
    }
    let weights = model.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    // A safetensors file begins with the length of its header.
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    bytes[8 + header..].as_chunks_mut().0.iter_mut().for_each(|number| *number = f32::NAN.to_le_bytes());
    std::fs::write(&weights, bytes).unwrap();
    for dtype in ["f32", "int8", "auto"] {
        let set = format!("pool[0].dtype={dtype}");
        let model = model.to_str().unwrap();
        let ended = rig.start(&["--model", model, "--devices", "cpu", "--set", &set]).wait();
        assert_eq!(ended.code, Some(82), "{dtype}: {}", ended.stderr);
        for words in ["model.safetensors: tensor ", "is not finite: its number 0 is NaN"] {
            assert!(ended.stderr.contains(words), "{dtype}: {}", ended.stderr);
        }
    }
}

#[test]
fn a_model_folder_that_is_not_there_is_named_and_exits_with_82() {
    let rig = Rig::new(&slow_lines(3, 0));
    let none = rig.path("no-such-model");
    let ended = rig.start(&["--model", none.to_str().unwrap(), "--devices", "cpu"]).wait();
    assert_eq!(ended.code, Some(82), "{}", ended.stderr);
    assert!(ended.stderr.contains(none.to_str().unwrap()), "{}", ended.stderr);
    assert!(rig.left_behind().is_empty());
    assert!(!rig.output().exists(), "an output of no model");
}

#[test]
fn an_input_that_is_not_there_is_named() {
    let rig = Rig::new(&[]);
    std::fs::remove_file(rig.input()).unwrap();
    let ended = rig.run_echo(&[]);
    assert_ne!(ended.code, Some(0));
    assert!(ended.stderr.contains(rig.input().to_str().unwrap()), "{}", ended.stderr);
    assert!(!rig.output().exists(), "an output of no input");
}

#[test]
fn a_device_that_is_not_here_is_refused_by_name() {
    let rig = Rig::new(&slow_lines(1, 0));
    let ended = rig.start(&["--model", "echo", "--devices", "cuda:7"]).wait();
    assert_eq!(ended.code, Some(78), "{}", ended.stderr);
    assert!(ended.stderr.contains("cuda:7"), "{}", ended.stderr);
    assert!(rig.left_behind().is_empty());
}

#[test]
fn pipes_are_refused_at_once_and_repeated_ids_are_told() {
    let rig = Rig::new(&[line("a", json!({"input": "x"})), line("a", json!({"input": "y"}))]);
    let (input, output) = (rig.input(), rig.output());
    let refused = |from: &str, to: &str| {
        let mut command = rig.command(&["--model", "echo", "--devices", "cpu"]);
        let arguments: Vec<String> = command.get_args().map(|it| it.to_string_lossy().into_owned()).collect();
        let arguments = arguments.into_iter().map(|it| match it {
            it if it == input.to_string_lossy() => from.to_owned(),
            it if it == output.to_string_lossy() => to.to_owned(),
            it => it,
        });
        command = std::process::Command::new(command.get_program());
        command.args(arguments.collect::<Vec<_>>());
        rig.start_command(command).wait()
    };
    for (from, to, words) in [
        ("-", "out", "--input - is not a file"),
        ("/dev/null", "out", "--input /dev/null is not a file"),
        (input.to_str().unwrap(), "-", "--output - is not a file"),
    ] {
        let ended = refused(from, to);
        assert_eq!(ended.code, Some(64), "{}", ended.stderr);
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
    }
    let ended = rig.run_echo(&[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("custom_ids that occur again: 1, first on line 2 (\"a\")"),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_data_url_is_sent_as_the_bytes_and_the_media_type_that_it_holds() {
    let raw = line("raw", json!("data:text/plain;base64,eA=="));
    let rig = Rig::new(&[raw, line("torn", json!("data:text/plain,x"))]);
    let ended = rig.run_echo(&[]);
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    let answers = rig.answers();
    let error = &answers[0]["response"]["body"]["error"];
    assert_eq!(error["param"], "content_type", "{answers:?}");
    assert!(error["message"].as_str().unwrap().contains("text/plain"), "{error}");
    assert!(answers[1]["error"]["message"].as_str().unwrap().contains("in base64"), "{answers:?}");
}
