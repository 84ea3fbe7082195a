//! Which queues are made, and with which arguments. An existing queue is used as it is, whatever
//! its arguments; none is ever deleted.

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, Error, ErrorKind, ExchangeKind};

use super::convert::short;

/// The queues of a pool.
#[derive(Clone, Debug)]
pub struct Topology {
    /// Where tasks come from.
    pub task_queue: String,
    /// Where replies go by default.
    pub reply_queue: Option<String>,
    /// Where messages go that cannot be worked on.
    pub dead_letter_queue: String,
    /// Deliveries after which the broker itself dead-letters a task.
    pub delivery_limit: u32,
}

impl Topology {
    /// Makes what is missing.
    pub(super) async fn declare(&self, connection: &Connection) -> Result<(), Error> {
        if !exists(connection, &self.dead_letter_queue).await? {
            make(connection, &self.dead_letter_queue, quorum()).await?;
        }
        if let Some(queue) = &self.reply_queue
            && !exists(connection, queue).await?
        {
            // Not classic: that lives on one node of a cluster, and with it all replies would be unroutable.
            make(connection, queue, quorum()).await?;
        }
        if !exists(connection, &self.task_queue).await? {
            let mut arguments = quorum();
            let limit = i64::from(self.delivery_limit);
            arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(limit));
            arguments.insert("x-dead-letter-exchange".into(), text(&self.backstop(connection).await?));
            make(connection, &self.task_queue, arguments).await?;
        }
        Ok(())
    }

    /// The exchange through which the broker dead-letters: a headers exchange that lets through what
    /// died of the delivery limit, and drops what merely expired. A plain dead-letter route would
    /// park expired tasks and left-over sentinels among the dead letters.
    async fn backstop(&self, connection: &Connection) -> Result<String, Error> {
        let exchange = format!("{}.dlx", self.task_queue);
        let channel = connection.create_channel().await?;
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let none = FieldTable::default();
        channel.exchange_declare(short(&exchange), ExchangeKind::Headers, durable, none).await?;
        let mut died = FieldTable::default();
        // Plain `all` ignores headers that begin with `x-`.
        died.insert("x-match".into(), text("all-with-x"));
        died.insert("x-first-death-reason".into(), text("delivery_limit"));
        let queue = short(&self.dead_letter_queue);
        channel.queue_bind(queue, short(&exchange), "".into(), QueueBindOptions::default(), died).await?;
        channel.close(200, "done".into()).await?;
        Ok(exchange)
    }
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

fn quorum() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text("quorum"));
    arguments
}

/// Asks on a channel of its own, because the broker closes the channel to say no.
async fn exists(connection: &Connection, queue: &str) -> Result<bool, Error> {
    let channel = connection.create_channel().await?;
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(short(queue), passive, FieldTable::default()).await {
        Ok(_) => channel.close(200, "done".into()).await.map(|()| true),
        Err(error) if code(&error) == Some(404) => Ok(false),
        Err(error) => Err(error),
    }
}

async fn make(connection: &Connection, queue: &str, arguments: FieldTable) -> Result<(), Error> {
    let channel = connection.create_channel().await?;
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(short(queue), durable, arguments).await {
        Ok(_) => {
            tracing::info!(queue, "queue made");
            channel.close(200, "done".into()).await
        }
        // Somebody made it since we looked, with other arguments: it exists, which is enough.
        Err(error) if code(&error) == Some(406) => Ok(()),
        Err(error) => Err(error),
    }
}

fn code(error: &Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(amqp) => Some(amqp.get_id()),
        _ => None,
    }
}
