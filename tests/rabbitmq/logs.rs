//! What reaches a log of a service: never the body of a message, whatever filter is set.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::serve;
use crate::support::client::Task;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

/// What stands in no other message.
const MARKER: &str = "markerOfAReplyThatNobodyTakes";

/// The marker as text, as lists of its bytes, and as it stands in a longer base64 text, where its first byte
/// may be the first, second or third of a group.
fn spellings() -> Vec<String> {
    let numbers: Vec<_> = MARKER.bytes().map(|byte| byte.to_string()).collect();
    let mut spellings = vec![MARKER.to_owned(), numbers.join(", "), numbers.join(",")];
    for before in 0..3_usize {
        let bytes = [&[0_u8; 2][..before], MARKER.as_bytes()].concat();
        // Characters of six bits, without those that hold bits of other bytes too.
        let whole = (before * 8).div_ceil(6)..bytes.len() * 8 / 6;
        spellings.push(STANDARD.encode(&bytes)[whole].to_owned());
    }
    spellings
}

#[test]
fn the_marker_is_found_in_any_base64_text() {
    for before in ["", "a", "ab", "abc"] {
        let text = STANDARD.encode(format!("{before}{MARKER}, and more"));
        assert!(spellings()[3..].iter().any(|spelling| text.contains(spelling)), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_returned_reply_is_in_no_line_of_any_log_whatever_the_filter_says() {
    // Controlled, so that the launcher has a connection too.
    let settings = Settings::echo(Rabbit::shared().url()).controlled();
    let settings = settings.environment("SCONCE_LOG", "trace,lapin=trace");
    let (mut sconce, client, _inbox) = serve(&settings).await;
    sconce.wait_for_log("listening").await;
    let nowhere = format!("{}.nowhere", settings.name);
    for (at, filter) in ["trace", "sconce=debug,lapin=warn", "info"].into_iter().enumerate() {
        if at > 0 {
            let command = ["ctl", "log-level", filter, "--all", "--expect", "1", "--timeout", "20s"];
            let mut ctl = Sconce::run(&settings, &command);
            assert_eq!(ctl.exit_code().await, 0, "{}", ctl.log());
            // The worker's line has its filter among its fields.
            sconce.wait_for_log(&format!("filter={filter:?}")).await;
        }
        let id = format!("t{at}");
        let task = Task::new(json!({"input": MARKER, "sleep_ms": 1})).id(&id).reply_to(&nowhere);
        client.publish(&settings.tasks, task).await;
        let letter = client.get(&settings.dead).await;
        assert_eq!((letter.correlation_id.as_str(), letter.header("reason").as_str()), (&*id, "unroutable"));
        assert!(String::from_utf8_lossy(&letter.raw).contains(MARKER), "the reply or its task is parked");
    }
    sconce.signal(Signal::SIGTERM);
    assert_eq!(sconce.exit_code().await, 0);
    // The filters were in force: this line is one of the level DEBUG, which the last filter leaves out.
    assert_eq!(sconce.logged("forward pass begun"), 2, "{}", sconce.log());
    let log = sconce.log();
    for spelling in spellings() {
        assert!(!log.contains(&spelling), "{spelling} in {log}");
    }
}
