//! What RabbitMQ and lapin give when nobody adds anything: consumes with a prefetch, publishes each
//! reply (mandatory, confirmed), acks the task after the confirm, all of it pipelined. It answers as the
//! model `echo` does, but looks into no message, reconnects never and drains nothing.
//!
//! `bare_consumer URL QUEUE PREFETCH` says `{"ready": true}` once it consumes; ends with its stdin.

use std::io::{Write as _, stdout};

use anyhow::{Context as _, anyhow, ensure};
use futures_util::stream::FuturesOrdered;
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, PublisherConfirm};
use tokio::io::AsyncReadExt as _;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, queue, prefetch] = &arguments[..] else {
        return Err(anyhow!("usage: bare_consumer URL QUEUE PREFETCH"));
    };
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    channel.basic_qos(prefetch.parse().context("PREFETCH")?, BasicQosOptions::default()).await?;
    let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
    let mut tasks = channel.basic_consume(queue.as_str().into(), "".into(), options, arguments).await?;
    writeln!(stdout(), r#"{{"ready": true}}"#)?;
    stdout().flush()?;
    let mut stdin = tokio::io::stdin();
    let mut end = [0];
    let mut replies = FuturesOrdered::new();
    loop {
        tokio::select! {
            _ = stdin.read(&mut end) => break,
            task = tasks.next() => {
                let task = task.context("the consumer was cancelled")??;
                let confirm = reply(&channel, &task).await?;
                replies.push_back(async move { anyhow::Ok((task.delivery_tag, confirm.await?)) });
            }
            Some(confirmed) = replies.next() => {
                let mut last = confirmed?;
                loop {
                    ensure!(matches!(last.1, Confirmation::Ack(None)), "a reply was refused");
                    match replies.next().now_or_never().flatten() {
                        Some(confirmed) => last = confirmed?,
                        None => break,
                    }
                }
                channel.basic_ack(last.0, BasicAckOptions { multiple: true }).await?;
            }
        }
    }
    Ok(connection.close(200, "done".into()).await?)
}

/// Sends the reply to a task; its confirm is still to come.
#[expect(clippy::disallowed_methods, reason = "this is what the publisher is compared with")]
async fn reply(channel: &Channel, task: &Delivery) -> anyhow::Result<PublisherConfirm> {
    let reply_to = task.properties.reply_to().clone().context("a task without reply_to")?;
    let mut headers = FieldTable::default();
    headers.insert("status".into(), AMQPValue::LongString("succeeded".into()));
    headers.insert("status_code".into(), AMQPValue::LongInt(200));
    headers.insert("compute_us".into(), AMQPValue::LongLongInt(0));
    let mut properties = BasicProperties::default()
        .with_content_type("application/json".into())
        .with_type("reply".into())
        .with_delivery_mode(2)
        .with_headers(headers);
    if let Some(id) = task.properties.correlation_id() {
        properties = properties.with_correlation_id(id.clone());
    }
    let body = [br#"{"object":"echo","input":"#, &*task.data, br#","model":"echo"}"#].concat();
    let options = BasicPublishOptions { mandatory: true, immediate: false };
    Ok(channel.basic_publish("".into(), reply_to, options, &body, properties).await?)
}
