//! Messages with short strings that are not UTF-8, such as the 16 bytes of a UUID as the correlation id: tasks are
//! answered with the bytes that their requesters know, and what cannot be meant so becomes a dead letter that every
//! client and version can read.

use serde_json::{Value, json};

use super::messages::serve;
use crate::support::client::Task;
use crate::support::rabbit::Rabbit;
use crate::support::raw_amqp::{Message, Raw, short};
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::until;

/// The bytes of a UUID.
const ID: &[u8] = b"\x9b\xdc\x3f\x00\xc1\x5e\x4a\xd6\x9f\x80\xff\x41\x00\xce\x7f\xfe";
/// As commands show it.
const SHOWN: &str = "\\x9b\\xdc?\\x00\\xc1^J֟\\x80\\xffA\\x00\\xce\\x7f\\xfe";

const HEADERS: u16 = 1 << 13;
const CORRELATION_ID: u16 = 1 << 10;
const REPLY_TO: u16 = 1 << 9;
const MESSAGE_ID: u16 = 1 << 7;
const TYPE: u16 = 1 << 5;
const APP_ID: u16 = 1 << 3;

/// A message to a queue. `properties` are flags and values, in AMQP's order.
fn message(queue: &str, properties: &[(u16, Vec<u8>)]) -> Message {
    let flags = properties.iter().fold(0, |flags, (flag, _)| flags | flag);
    let values = properties.iter().flat_map(|(_, value)| value.clone());
    let properties = flags.to_be_bytes().into_iter().chain(values).collect();
    Message { key: queue.into(), properties, body: json!({"input": "a"}).to_string().into() }
}

/// A table with one header.
fn header(name: &[u8], value: &str) -> Vec<u8> {
    let value = [b"S", &(value.len() as u32).to_be_bytes()[..], value.as_bytes()].concat();
    let table = [short(name), value].concat();
    [&(table.len() as u32).to_be_bytes()[..], &table].concat()
}

fn publish(messages: &[Message]) {
    let mut raw = Raw::connect(Rabbit::shared().address());
    messages.iter().for_each(|message| raw.publish(b"", message));
    raw.finish();
}

/// The next message of a queue.
async fn get(queue: &str) -> Message {
    until(&format!("a message in {queue}"), || async {
        Raw::connect(Rabbit::shared().address()).get(queue.as_bytes())
    })
    .await
}

fn contains(message: &Message, part: &[u8]) -> bool {
    message.properties.windows(part.len()).any(|window| window == part)
}

/// Runs `sconce dead` with these words, and returns what it said.
async fn dead(settings: &Settings, words: &[&str]) -> String {
    let mut sconce = Sconce::run(settings, &[&["dead"], words].concat());
    assert_eq!(sconce.exit_code().await, 0, "{words:?}: {}", sconce.log());
    sconce.log()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_ids_are_any_bytes_is_answered_with_them_and_holds_up_nobody() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (sconce, client, mut inbox) = serve(&settings).await;
    let own = format!("{}.own", settings.replies);
    Raw::connect(Rabbit::shared().address()).declare(own.as_bytes());
    let longest = [0xff; 255];
    let ids = |id: &[u8]| {
        let reply_to = (REPLY_TO, short(own.as_bytes()));
        message(
            &settings.tasks,
            &[(CORRELATION_ID, short(id)), reply_to, (MESSAGE_ID, short(id)), (APP_ID, short(id))],
        )
    };
    // The last two are text: one of the characters by which bytes are escaped, and U+FFFD.
    let all: [&[u8]; 5] = [ID, &longest, b"\xff", "\u{f7ff}".as_bytes(), "\u{fffd}".as_bytes()];
    publish(&all.map(ids));
    client.publish(&settings.tasks, Task::new(json!({"input": "behind"})).id("behind")).await;
    assert_eq!(inbox.next().await.correlation_id, "behind");
    let mut answered = Vec::new();
    for _ in all {
        answered.push(get(&own).await);
    }
    for id in all {
        assert!(answered.iter().any(|reply| contains(reply, &short(id))), "{id:?}: {answered:?}");
    }
    assert!(!sconce.log().contains("lost the broker"), "{}", sconce.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_type_or_header_name_that_is_not_utf_8_is_refused_and_its_dead_letter_is_readable() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (sconce, client, mut inbox) = serve(&settings).await;
    let reply_to = || (REPLY_TO, short(settings.replies.as_bytes()));
    publish(&[
        message(
            &settings.tasks,
            &[(HEADERS, header(b"na\xffme", "value")), (CORRELATION_ID, short(b"headers")), reply_to()],
        ),
        message(
            &settings.tasks,
            &[
                (CORRELATION_ID, short(b"type")),
                reply_to(),
                (MESSAGE_ID, short(ID)),
                (TYPE, short(b"\x80kind")),
            ],
        ),
    ]);
    for (param, reason) in [
        ("headers", r#"the header name "na\xffme" is not UTF-8"#),
        ("type", r#"the type "\x80kind" is not UTF-8"#),
    ] {
        let reply = inbox.take(1).await.remove(0);
        assert_eq!((reply.correlation_id.as_str(), reply.status_code()), (param, 400), "{reply:?}");
        assert_eq!(reply.body["error"]["param"], param);
        assert_eq!(reply.body["error"]["message"], reason);
    }
    let letters = [client.get(&settings.dead).await, client.get(&settings.dead).await];
    let raw = |header: &str| serde_json::from_str::<Value>(header).expect("JSON");
    assert_eq!(raw(&letters[0].header("raw_strings")), json!({"header_names": ["bmH/bWU="]}));
    assert_eq!(letters[0].header("na\\xffme"), "value");
    let expected = json!({"header_names": [], "message_id": "m9w/AMFeStafgP9BAM5//g==", "type": "gGtpbmQ="});
    assert_eq!(raw(&letters[1].header("raw_strings")), expected);
    assert_eq!(letters[1].header("task_id"), SHOWN);
    assert!(!sconce.log().contains("lost the broker"), "{}", sconce.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_read_dead_letters_with_any_bytes_and_requeue_them_as_they_were() {
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].name", "pool");
    crate::amqp_rig::declare_queues(&settings, 20).await;
    let own = format!("{}.own", settings.replies);
    Raw::connect(Rabbit::shared().address()).declare(own.as_bytes());
    let ids = |key: &str| {
        message(
            key,
            &[(CORRELATION_ID, short(ID)), (REPLY_TO, short(own.as_bytes())), (MESSAGE_ID, short(ID))],
        )
    };
    let named = message(
        &settings.dead,
        &[
            (HEADERS, header(b"na\xffme", "value")),
            (CORRELATION_ID, short(b"named")),
            (REPLY_TO, short(own.as_bytes())),
        ],
    );
    publish(&[ids(&settings.dead), named]);
    let listed = dead(&settings, &["list", "--json"]).await;
    assert!(listed.contains("named") && listed.contains("\\\\x9b"), "{listed}");
    let shown = dead(&settings, &["show", "named"]).await;
    assert!(shown.contains("na\\xffme"), "{shown}");
    dead(&settings, &["requeue", "--all"]).await;
    let sconce = Sconce::launched(&settings).await;
    let answered = [get(&own).await, get(&own).await];
    assert!(answered.iter().any(|reply| contains(reply, &short(ID))), "{answered:?}");
    assert!(answered.iter().any(|reply| contains(reply, &short(b"named"))), "{answered:?}");
    assert!(!sconce.log().contains("lost the broker"), "{}", sconce.log());
    publish(&[ids(&settings.dead)]);
    dead(&settings, &["purge", "--all", "--yes"]).await;
    assert_eq!(Raw::connect(Rabbit::shared().address()).get(settings.dead.as_bytes()), None);
}
