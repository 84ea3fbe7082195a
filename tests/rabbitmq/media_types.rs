//! What each command makes of replies that are not JSON.

use std::fs;

use serde_json::{Value, json};

use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

/// A command that ends well; what it printed of JSON.
async fn printed(settings: &Settings, arguments: &[&str]) -> Vec<Value> {
    let mut command = Sconce::run(settings, arguments);
    assert_eq!(command.exit_code().await, 0, "{arguments:?}: {}", command.log());
    command.lines_from(0).iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_takes_a_reply_of_any_media_type() {
    let settings = Settings::echo(Rabbit::shared().url());
    let sconce = Sconce::launched(&settings).await;
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let (from, to) = (input.to_str().expect("UTF-8"), output.to_str().expect("UTF-8"));
    let line = |number: usize| {
        let reply = ["data:audio/wav;base64,UklGRv8ACg==", "data:text/plain;base64,w7wK"][number / 2];
        let body = json!({"input": "a", "reply": reply});
        json!({"custom_id": number.to_string(), "method": "POST", "url": "/v1/embeddings", "body": body})
    };
    let lines: Vec<String> = (0..4).map(|number| line(number).to_string()).collect();
    fs::write(&input, lines.join("\n")).expect("an input");
    let sound = json!({"content_type": "audio/wav", "base64": "UklGRv8ACg=="});
    let expected = [sound.clone(), sound, "ü\n".into(), "ü\n".into()];

    let replies = printed(&settings, &["publish", "--wait", "-i", from]).await;
    assert_eq!(replies.iter().map(|reply| reply["body"].clone()).collect::<Vec<_>>(), expected);
    assert!(replies.iter().all(|reply| reply["status_code"] == 200), "{replies:?}");

    // Rows that share a task are asked one by one, because such a reply cannot be divided among them.
    for flags in [&[][..], &["--rows-per-task", "3"]] {
        printed(&settings, &[&["submit", "-i", from, "-o", to], flags].concat()).await;
        let written = fs::read_to_string(&output).expect("an output");
        let written = written.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let bodies: Vec<Value> = written.map(|line| line["response"]["body"].clone()).collect();
        assert_eq!(bodies, expected, "{flags:?}");
        // The next run has none of its lines.
        fs::write(&output, "").expect("an output");
    }

    let report = printed(&settings, &["bench", "--json", "-i", from, "--tasks", "20", "--warmup", "0"]).await;
    let report = report.last().expect("a report");
    assert_eq!((&report["succeeded"], &report["errors"]), (&20.into(), &json!({})), "{report}");
    assert!(report["tokens_per_second"].is_null(), "{report}");
    assert_eq!(sconce.stop().await, 0);
}
