//! What stops a worker: the type `control.shutdown` or a body that is JSON `null`, and nothing else.
#![no_main]

use std::time::{Duration, SystemTime};

use libfuzzer_sys::fuzz_target;
use sconce::protocol::task::sentinel_is_expired;
use sconce::protocol::{Incoming, Sentinels, classify};
use sconce_fuzz::{message, written};

fuzz_target!(|data: &[u8]| {
    let message = message(data);
    let (properties, body) = (written(&message.properties), message.body.clone());
    let kind = message.properties.kind.clone().unwrap_or_default();
    let is_null = matches!(serde_json::from_slice(&body), Ok(serde_json::Value::Null));
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let unknown_control = kind.starts_with("control.") && kind != "control.shutdown";
    match classify(message, now, Sentinels::default(), || "made".into()) {
        Incoming::Sentinel(sentinel) => {
            assert!(kind == "control.shutdown" || (is_null && !unknown_control), "{kind:?} {body:?}");
            assert_eq!((written(&sentinel.properties), &sentinel.body), (properties, &body));
            // Once expired, always expired.
            let later = now + Duration::from_secs(1);
            let expires = sentinel.properties.expiration.is_none();
            assert!(
                !expires || !sentinel_is_expired(&sentinel, now) || sentinel_is_expired(&sentinel, later)
            );
        }
        Incoming::UnknownControl(task, named) => {
            assert!(unknown_control && named == kind);
            assert_eq!((written(&task.message.properties), &task.message.body), (properties, &body));
        }
        Incoming::Task(task) => {
            assert!(!is_null && !kind.starts_with("control."), "{kind:?} {body:?}");
            assert!(!task.id.is_empty());
            assert_eq!((written(&task.message.properties), &task.message.body), (properties, &body));
        }
    }
});
