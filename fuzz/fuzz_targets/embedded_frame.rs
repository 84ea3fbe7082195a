//! A byte stream into the embedded queue's server: how it is cut into reads does not matter, and what
//! is read is written and read again as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sconce::broker::embedded::reread;

fuzz_target!(|data: &[u8]| {
    let (at, stream) = match data {
        [first, rest @ ..] => (usize::from(*first) * rest.len() / 255, rest),
        [] => return,
    };
    let whole = reread([stream]);
    let (left, right) = stream.split_at(at);
    assert_eq!(reread([left, right]), whole, "cut at {at}");
    match whole {
        Ok(written) => assert_eq!(reread([&written[..]]), Ok(written)),
        Err(words) => assert!(words.len() < 1_000, "{} bytes", words.len()),
    }
});
