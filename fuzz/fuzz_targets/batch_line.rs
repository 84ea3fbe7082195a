//! A line of a batch file. A request's body is the line's own bytes; what is no request is answered
//! by one readable line; both kinds of output line are recognised as ours.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sconce::protocol::batch_line::{Notes, error_line, is_torn_output, parse, read_output, response_line};
use sconce_fuzz::LONGEST_ERROR;
use serde_json::value::RawValue;

fuzz_target!(|data: &[u8]| {
    match parse(data) {
        // What a data URL holds may be anything.
        Ok(request) if request.body.media_type.is_some() => {}
        Ok(request) => {
            let bytes = &request.body.bytes;
            assert!(data.windows(bytes.len()).any(|part| part == bytes));
            let (raw, body): (&RawValue, serde_json::Value) =
                match (serde_json::from_slice(bytes), serde_json::from_slice(bytes)) {
                    (Ok(raw), Ok(body)) => (raw, body),
                    // Nested too deeply for a general decoder: passed on as it is, the model decides.
                    _ => return,
                };
            assert!(body.is_object());
            let line = response_line(&request.custom_id, 200, "req_1", &Notes::new(), raw);
            check_output(&line, Some(&request.custom_id));
            let written: serde_json::Value = serde_json::from_slice(&line).expect("JSON");
            assert_eq!(written["response"]["body"], body);
        }
        Err(invalid) => {
            assert!(
                !invalid.problem.is_empty() && invalid.problem.len() <= LONGEST_ERROR,
                "{}",
                invalid.problem.len()
            );
            check_output(&error_line(7, &invalid), invalid.custom_id.as_deref());
        }
    }
    if let Ok(raw) = serde_json::from_slice::<&RawValue>(data) {
        check_output(&response_line("a", 200, "r", &Notes::new(), raw), Some("a"));
    }
    let _ = (is_torn_output(data), read_output(data).is_ok());
});

fn check_output(line: &[u8], custom_id: Option<&str>) {
    assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
    assert_eq!(read_output(line).expect("ours").custom_id.as_deref(), custom_id);
    assert!(is_torn_output(&line[..line.len() / 2]));
}
