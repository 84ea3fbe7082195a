//! Results as files: a file for each recording, and a matrix of vectors.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::rig::{Ended, Rig, line};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Runs a model over `files`, whose results go to the folder `subs`.
fn run(rig: &Rig, files: &[&str], flags: &[&str]) -> Ended {
    let mut command = rig.bare_command();
    command.arg("--model").arg(fixture("whisper-random")).args(["--devices", "cpu", "--output-dir"]);
    command.arg(rig.path("subs")).args(flags).args(files.iter().map(|name| rig.path(name)));
    rig.start_command(command).wait()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn each_recording_gets_its_subtitles_and_a_later_run_makes_only_what_is_missing() {
    let rig = Rig::new(&[]);
    for (from, to) in [("short.mp3", "one.mp3"), ("short.flac", "episode 2.flac"), ("short.ogg", "three.ogg")]
    {
        fs::copy(fixture("sound").join(from), rig.path(to)).unwrap();
    }
    fs::write(rig.path("broken.wav"), "RIFF").unwrap();
    let all = ["one.mp3", "episode 2.flac", "broken.wav"];
    let ended = run(&rig, &all, &["--format", "srt"]);
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    assert!(ended.stderr.contains("broken.wav: 400: "), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("400").count(), 1, "an error is told once: {}", ended.stderr);
    let subs = rig.path("subs");
    let written = [".sconce.files.jsonl", ".sconce.files.jsonl.run.json", "episode 2.srt", "one.srt"];
    assert_eq!(names(&subs), written);
    let one = fs::read_to_string(subs.join("one.srt")).unwrap();
    assert!(one.is_empty() || one.starts_with("1\n00:00:"), "{one}");
    // A result that was corrected by hand stays, a broken input is tried again, and another one is added.
    fs::write(subs.join("one.srt"), "corrected").unwrap();
    fs::copy(fixture("sound/short.mp3"), rig.path("broken.wav")).unwrap();
    let ended = run(&rig, &["one.mp3", "episode 2.flac", "broken.wav", "three.ogg"], &["--format", "srt"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("2 of 4 lines answered now, 2 before"), "{}", ended.stderr);
    assert_eq!(fs::read_to_string(subs.join("one.srt")).unwrap(), "corrected");
    assert!(subs.join("three.srt").exists() && subs.join("broken.srt").exists());
    let ended = run(&rig, &["one.mp3"], &["--format", "srt"]);
    assert!(ended.stderr.contains("all 1 lines are answered already"), "{}", ended.stderr);
    let ended = run(&rig, &["one.mp3"], &["--format", "json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let reply: Value = serde_json::from_slice(&fs::read(subs.join("one.json")).unwrap()).unwrap();
    assert!(reply["text"].is_string(), "{reply}");
}

#[test]
fn names_and_formats_are_checked_before_any_work() {
    let rig = Rig::new(&[]);
    fs::copy(fixture("sound/short.mp3"), rig.path("one.mp3")).unwrap();
    fs::copy(fixture("sound/short.flac"), rig.path("one.flac")).unwrap();
    fs::write(rig.path("notes.doc"), "").unwrap();
    for (files, format, words) in [
        (&["one.mp3", "one.flac"][..], "srt", "one.srt would be the result of"),
        (&["one.mp3"], "wav", "only as .txt, .srt, .vtt, .json"),
        (&["one.mp3"], "jpg", "expected one of .txt"),
        (&["notes.doc"], "srt", "notes.doc ends with none of"),
        (&["missing.mp3"], "srt", "missing.mp3"),
        (&["tmp"], "srt", "tmp is a folder: name the files in it"),
    ] {
        let ended = run(&rig, files, &["--format", format]);
        assert_eq!(ended.code, Some(64), "{}", ended.stderr);
        assert!(ended.stderr.contains(words) && !rig.path("subs").exists(), "{}", ended.stderr);
    }
    fs::create_dir(rig.path("subs")).unwrap();
    fs::write(rig.path("subs/one.srt"), "mine").unwrap();
    let ended = run(&rig, &["one.mp3"], &["--format", "srt"]);
    assert_eq!(ended.code, Some(64), "{}", ended.stderr);
    assert!(ended.stderr.contains("one.srt exists, and was not written here"), "{}", ended.stderr);
    assert_eq!(fs::read_to_string(rig.path("subs/one.srt")).unwrap(), "mine");
    let mut command = rig.bare_command();
    command.arg("-i").arg(rig.input()).arg("-o").arg(rig.path("out.srt")).args(["--model", "echo"]);
    let ended = rig.start_command(command).wait();
    assert!(
        ended.code == Some(64) && ended.stderr.contains("out.srt would hold JSON lines"),
        "{}",
        ended.stderr
    );
}

#[test]
fn fields_are_part_of_each_request_and_of_what_a_result_is_known_by() {
    let rig = Rig::new(&[]);
    fs::copy(fixture("sound/short.mp3"), rig.path("one.mp3")).unwrap();
    let run = |fields: &[&str]| {
        let fields = fields.iter().flat_map(|field| ["--field", field]);
        run(&rig, &["one.mp3"], &["--format", "json"].into_iter().chain(fields).collect::<Vec<_>>())
    };
    let german = ["language=de", "response_format=verbose_json"];
    let ended = run(&german);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let reply: Value = serde_json::from_slice(&fs::read(rig.path("subs/one.json")).unwrap()).unwrap();
    assert_eq!(reply["language"], "de");
    assert!(run(&german).stderr.contains("all 1 lines are answered already"));
    for (fields, words) in [
        (&["language=fr"][..], "as it was before: --field language was \"de\", and is \"fr\""),
        (&["language=fr", "language=de"], "--field language is given twice"),
        (&["response_format=srt"], "response_format asks for .srt"),
        (&["language"], "expected NAME=VALUE"),
    ] {
        let ended = run(fields);
        assert_eq!(ended.code, Some(64), "{}", ended.stderr);
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
    }
    fs::remove_file(rig.path("subs/one.json")).unwrap();
    for (field, words) in [
        ("lang=de", "--field lang: /v1/audio/transcriptions has no such field; it takes"),
        ("language=klingon", "stopped, since it concerns all rows: language"),
        ("temperature=hot", "stopped, since it concerns all rows: temperature"),
    ] {
        let ended = run(&[field]);
        assert_eq!(ended.code, Some(64), "{}", ended.stderr);
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
        assert!(!rig.path("subs/one.json").exists());
    }
    assert_eq!(run(&german).code, Some(0), "what was refused is not in the way");
    for flags in [["--field", "a=1"], ["--id-column", "id"]] {
        let lines = rig.run_echo(&flags);
        assert_eq!(lines.code, Some(64), "{}", lines.stderr);
        assert!(lines.stderr.contains("--id-column, --url and --field apply to .csv"), "{}", lines.stderr);
        assert!(lines.stderr.contains("has its own URL and fields"), "{}", lines.stderr);
    }
}

#[test]
fn a_model_without_vectors_is_refused_for_a_matrix_before_or_at_its_first_reply() {
    let rig = Rig::new(&(0..3).map(|n| line(&format!("r-{n}"), json!({"input": "a"}))).collect::<Vec<_>>());
    let whisper = fixture("whisper-random").display().to_string();
    for (model, words) in [
        (whisper.as_str(), "x.npy takes vectors, and the model of pool \"embed\" gives none"),
        // Nobody knows what this one answers.
        ("echo", "it takes vectors, and the reply to \"r-0\" has none"),
    ] {
        let mut command = rig.bare_command();
        command.arg("-i").arg(rig.input()).arg("-o").arg(rig.path("x.npy"));
        command.args(["--model", model, "--devices", "cpu"]);
        let ended = rig.start_command(command).wait();
        assert_eq!(ended.code, Some(64), "{}", ended.stderr);
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
        assert!(names(rig.path("x.npy").parent().unwrap()).iter().all(|name| !name.starts_with("x.")));
    }
}

#[test]
fn a_refused_command_leaves_no_file() {
    let rig = Rig::new(&[line("a", json!({"input": "a"}))]);
    let ended = rig.start(&["--model", "echo", "--devices", "cuda:99"]).wait();
    assert_eq!(ended.code, Some(78), "{}", ended.stderr);
    assert!(!rig.output().exists() && !rig.made_by().exists(), "{:?}", names(rig.output().parent().unwrap()));
    // A file that was there stays, even if it is empty.
    fs::write(rig.output(), "").unwrap();
    assert_eq!(rig.start(&["--model", "echo", "--devices", "cuda:99"]).wait().code, Some(78));
    assert!(rig.output().exists() && !rig.made_by().exists());
    fs::write(rig.input(), "").unwrap();
    fs::remove_file(rig.output()).unwrap();
    assert_eq!(rig.run_echo(&[]).code, Some(0));
    assert!(rig.output().exists(), "no lines have no answers");
}

/// Runs an encoder over the rig's input, into this file.
fn vectors(rig: &Rig, output: &str) -> Ended {
    let mut command = rig.bare_command();
    command.arg("-i").arg(rig.input()).arg("-o").arg(rig.path(output));
    command.arg("--model").arg(fixture("tiny-bert-max")).args(["--devices", "cpu"]);
    rig.start_command(command).wait()
}

#[test]
fn vectors_are_a_matrix_in_the_order_of_the_rows_and_failed_rows_are_nan() {
    let embed = |id: &str, input: Value| line(id, json!({"input": input, "encoding_format": "base64"}));
    let mut lines = vec![embed("two", json!(["a", "b"]))];
    lines.extend((0..40).map(|n| embed(&format!("r-{n}"), json!(format!("text {n}")))));
    lines.push("no request".to_owned());
    let rig = Rig::new(&lines);
    let ended = vectors(&rig, "x.npy");
    assert_eq!(ended.code, Some(87), "{}", ended.stderr);
    assert!(ended.stderr.contains("the reply has 2 vectors"), "{}", ended.stderr);
    let matrix = fs::read(rig.path("x.npy")).unwrap();
    let header = String::from_utf8_lossy(&matrix[10..128]).into_owned();
    let columns: usize = header.split_once("(42, ").unwrap().1.split_once(')').unwrap().0.parse().unwrap();
    let rows: Vec<Vec<f32>> = matrix[128..]
        .chunks_exact(4 * columns)
        .map(|row| row.chunks_exact(4).map(|it| f32::from_le_bytes(it.try_into().unwrap())).collect())
        .collect();
    assert!(rows.len() == 42 && [0, 41].iter().all(|row: &usize| rows[*row].iter().all(|it| it.is_nan())));
    // The same as in JSON lines.
    assert_eq!(vectors(&rig, "x.jsonl").code, Some(87));
    let ids = fs::read_to_string(rig.path("x.ids.jsonl")).unwrap();
    let json = fs::read_to_string(rig.path("x.jsonl")).unwrap();
    for (row, (id, line)) in ids.lines().zip(json.lines()).enumerate() {
        let (id, line): (Value, Value) =
            (serde_json::from_str(id).unwrap(), serde_json::from_str(line).unwrap());
        assert_eq!(id["custom_id"], line["custom_id"]);
        if (1..41).contains(&row) {
            use base64::Engine as _;
            let text = line["response"]["body"]["data"][0]["embedding"].as_str().unwrap();
            let bytes = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
            let numbers: Vec<f32> =
                bytes.chunks_exact(4).map(|it| f32::from_le_bytes(it.try_into().unwrap())).collect();
            assert_eq!(rows[row], numbers);
        } else {
            assert!(!id["error"].is_null(), "{id}");
        }
    }
    // As after a kill: some lines are missing, and the last one is torn.
    let keep: usize = ids.split_inclusive('\n').take(20).map(str::len).sum();
    fs::write(rig.path("x.ids.jsonl"), &ids[..keep + 9]).unwrap();
    let ended = vectors(&rig, "x.npy");
    assert!(ended.stderr.contains("22 of 42 lines answered now, 20 before"), "{}", ended.stderr);
    assert!(fs::read(rig.path("x.npy")).unwrap() == matrix);
    let again = fs::read_to_string(rig.path("x.ids.jsonl")).unwrap();
    assert!(again.starts_with(&ids[..keep]) && again.lines().count() == 42, "{again}");
    let ended = vectors(&rig, "x.npy");
    assert!(ended.stderr.contains("all 42 lines are answered already"), "{}", ended.stderr);
    // A matrix without its lines is not replaced.
    let kept = fs::read(rig.path("x.ids.jsonl")).unwrap();
    fs::remove_file(rig.path("x.ids.jsonl")).unwrap();
    let ended = vectors(&rig, "x.npy");
    assert_eq!(ended.code, Some(64), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("x.ids.jsonl is missing, which tells what the 42 rows of"),
        "{}",
        ended.stderr
    );
    assert!(fs::read(rig.path("x.npy")).unwrap() == matrix && !rig.path("x.ids.jsonl").exists());
    fs::write(rig.path("x.ids.jsonl"), kept).unwrap();
    // Another matrix of this name is not replaced.
    fs::remove_file(rig.path("x.npy.run.json")).unwrap();
    let ended = vectors(&rig, "x.npy");
    assert_eq!(ended.code, Some(64), "{}", ended.stderr);
    assert!(ended.stderr.contains("x.npy exists, and was not written here"), "{}", ended.stderr);
}

#[test]
fn texts_that_were_cut_are_counted_at_the_end_and_in_the_report() {
    let long = "text ".repeat(200);
    let lines = [json!("short"), json!(long), json!([long, "short", long])];
    let lines = lines.into_iter().enumerate();
    let rig =
        Rig::new(&lines.map(|(n, input)| line(&n.to_string(), json!({"input": input}))).collect::<Vec<_>>());
    let mut command = rig.command(&["--devices", "cpu", "--json"]);
    command.arg("--model").arg(fixture("tiny-bert-max"));
    let ended = rig.start_command(command).wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("3 texts were longer than the model takes, and were cut\n"),
        "{}",
        ended.stderr
    );
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["truncated"], 3, "{report}");
}

#[cfg(feature = "tables")]
#[test]
fn a_table_is_answered_row_by_row_and_its_columns_stay_beside_the_vectors() {
    let rig = Rig::new(&[]);
    let rows: String = (0..50).map(|n| format!("{n:03},\"text, {n}\"\n")).collect();
    fs::write(rig.path("t.csv"), format!("number,words\n{rows}")).unwrap();
    let run = |input: &str, output: &str, column: &[&str]| {
        let mut command = rig.bare_command();
        command.arg("-i").arg(rig.path(input)).arg("-o").arg(rig.path(output)).args(column);
        command.arg("--model").arg(fixture("tiny-bert-max")).args(["--devices", "cpu"]);
        rig.start_command(command).wait()
    };
    let words = ["--column", "words"];
    let ended = run("t.csv", "t.parquet", &words);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(rig.path("t.parquet").exists() && !rig.path("t.parquet.part").exists());
    let ended = run("t.csv", "t.parquet", &words);
    assert!(ended.stderr.contains("all 50 lines are answered already"), "{}", ended.stderr);
    // The file can be read again, and its texts have the same vectors.
    assert_eq!(run("t.csv", "one.npy", &words).code, Some(0));
    assert_eq!(run("t.parquet", "two.npy", &words).code, Some(0));
    assert!(fs::read(rig.path("one.npy")).unwrap() == fs::read(rig.path("two.npy")).unwrap());
    fs::write(rig.path("open.csv"), "number,words\n1,one\n2,\"two\n3,three\n").unwrap();
    fs::write(rig.path("twice.csv"), "words,words\none,two\n").unwrap();
    for (input, output, column, problem) in [
        ("t.csv", "x.npy", &[][..], "--column must name the column"),
        ("open.csv", "x.npy", &words, "the quote that opens a cell in line 3 is not closed"),
        ("twice.csv", "x.npy", &words, "has 2 columns \"words\""),
        ("t.csv", "x.npy", &["--column", "text"], "no column \"text\", only number, words"),
        ("t.parquet", "x.parquet", &words, "has a column \"embedding\""),
    ] {
        let ended = run(input, output, column);
        assert_eq!(ended.code, Some(64), "{}", ended.stderr);
        assert!(ended.stderr.contains(problem), "{}", ended.stderr);
        let parts = ["x.npy", "x.ids.jsonl", "x.npy.run.json", "x.parquet.part", "x.parquet.ids.jsonl"];
        assert!(parts.iter().all(|name| !rig.path(name).exists()));
    }
    fs::write(rig.path("none.csv"), "number,words\n").unwrap();
    let ended = run("none.csv", "none.parquet", &words);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("none.parquet is not written: no row has a vector"), "{}", ended.stderr);
    let left: Vec<_> = names(rig.path("none.csv").parent().unwrap());
    assert_eq!(left.iter().filter(|name| name.starts_with("none.")).collect::<Vec<_>>(), ["none.csv"]);
    let ended = run("t.csv", "ids.npy", &["--column", "words", "--id-column", "number"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let ids = fs::read_to_string(rig.path("ids.ids.jsonl")).unwrap();
    let last: Value = serde_json::from_str(ids.lines().last().unwrap()).unwrap();
    assert_eq!(last["custom_id"], "049");
    assert!(fs::read(rig.path("one.npy")).unwrap() == fs::read(rig.path("ids.npy")).unwrap());
    let ended = run("t.csv", "t.parquet", &["--column", "number"]);
    assert_eq!(ended.code, Some(64), "{}", ended.stderr);
    let difference = "made with --column \"words\"; this run has --column \"number\": give another";
    assert!(ended.stderr.contains(difference), "{}", ended.stderr);
    fs::remove_file(rig.path("t.parquet")).unwrap();
    let ended = run("t.csv", "t.parquet", &words);
    assert_eq!(ended.code, Some(64), "{}", ended.stderr);
    assert!(ended.stderr.contains("t.parquet is missing, and"), "{}", ended.stderr);
    assert!(ended.stderr.contains("says that 50 of 50 rows are answered"), "{}", ended.stderr);
}
