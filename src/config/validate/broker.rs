//! The rules of `[broker]` and `[broker.tls]`.

use std::path::PathBuf;
use std::time::Duration;

use super::super::settings::{Broker, Tls};
use super::WAIT;
use super::section::Section;
use super::urls::urls;
use super::values::{duration, optional_name, switch, whole};

/// AMQP carries the heartbeat as 16 bits of seconds, and takes 0 for "none".
const HEARTBEAT: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(u16::MAX as u64);

/// Reads `[broker]`.
pub(super) fn broker(mut section: Section<'_>) -> Option<Broker> {
    let urls = section.read("url", urls);
    let declare = section.read("declare", switch);
    let delivery_limit = section.read("delivery_limit", whole(1..=u64::from(u32::MAX)));
    let heartbeat = section.read("heartbeat", |value| {
        let heartbeat = duration(HEARTBEAT)(value)?;
        match heartbeat.subsec_nanos() {
            0 => Ok(heartbeat),
            _ => Err("a duration in whole seconds".to_owned()),
        }
    });
    let connect_timeout = section.read("connect_timeout", duration(WAIT));
    let confirm_timeout = section.read("confirm_timeout", duration(WAIT));
    let give_up_after = section.read("give_up_after", duration(WAIT));
    let consumer_timeout = section.read("consumer_timeout", duration(WAIT));
    let tls = section.section("tls").and_then(tls);
    section.finish();
    Some(Broker {
        urls: urls?,
        declare: declare?,
        delivery_limit: delivery_limit?,
        heartbeat: heartbeat?,
        connect_timeout: connect_timeout?,
        confirm_timeout: confirm_timeout?,
        give_up_after: give_up_after?,
        consumer_timeout: consumer_timeout?,
        tls: tls?,
    })
}

fn tls(mut section: Section<'_>) -> Option<Tls> {
    let ca_file = section.read("ca_file", optional_name);
    let cert_file = section.read("cert_file", optional_name);
    let key_file = section.read("key_file", optional_name);
    let one_alone = match (&cert_file, &key_file) {
        (Some(Some(_)), Some(None)) => Some(("key_file", "cert_file")),
        (Some(None), Some(Some(_))) => Some(("cert_file", "key_file")),
        _ => None,
    };
    if let Some((missing, written)) = one_alone {
        let other = section.path_of(written);
        let origin = section.origin_of(written);
        let expected = format!("a file, as {other} names one ({origin}): both or neither");
        section.refuse(missing, "", expected);
    }
    section.finish();
    let path = |file: Option<String>| file.map(PathBuf::from);
    Some(Tls { ca_file: path(ca_file?), cert_file: path(cert_file?), key_file: path(key_file?) })
}
