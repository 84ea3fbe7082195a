//! Control lines, both ways. What is read is written and read again as the same; what is not is an
//! error that is short and repeats no password.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sconce::config::Assignment;
use sconce::protocol::control::{Command, Event, decode, encode};
use serde::{Serialize, de::DeserializeOwned};

const SECRET: &str = "S3CRET";

fuzz_target!(|data: &[u8]| {
    let line = String::from_utf8_lossy(data);
    check::<Command>(&line);
    check::<Event>(&line);
    if let Ok(Command::Start { assignment, .. }) = decode(&line) {
        match serde_json::from_value::<Assignment>(assignment) {
            Ok(assignment) => {
                let shown = format!("{assignment:?}");
                let addresses = assignment.broker.url.iter();
                assert!(
                    !shown.contains(SECRET) || !addresses.clone().any(|url| url.expose().contains(SECRET))
                );
                let again = serde_json::to_value(&assignment).expect("an assignment is JSON");
                assert_eq!(serde_json::from_value::<Assignment>(again).expect("as it was"), assignment);
            }
            Err(error) => drop(error),
        }
    }
});

fn check<T: Serialize + DeserializeOwned>(line: &str) {
    match decode::<T>(line) {
        Ok(value) => {
            let written = encode(&value);
            assert_eq!(written.iter().filter(|byte| **byte == b'\n').count(), 1);
            let text = std::str::from_utf8(&written).expect("UTF-8");
            let again = decode::<T>(text.trim_end()).unwrap_or_else(|error| panic!("{error}"));
            // Numbers with a point may move by a last digit.
            assert!(encode(&again) == written || text.contains('.') || text.contains("\"assignment\":"));
        }
        Err(error) => {
            let shown = format!("{error} {error:?}");
            assert!(shown.len() < 2_000, "{} bytes", shown.len());
            assert!(!error.to_string().contains('\n'));
            assert!(!shown.contains(SECRET), "{shown}");
        }
    }
}
