//! Decides which tasks are refused before anything is computed, and with which error.

use std::time::Duration;

use super::{Run, Shared};
use crate::engine::now;
use crate::model::Route;
use crate::protocol::raw_text::visible;
use crate::protocol::{MAX_HEADER_BYTES, Task, TaskError, TaskErrorKind, shorten};
use crate::worker::settle::Outcome;

impl Run<'_> {
    /// Returns the outcome of a task that must not be computed, whatever its body contains. None: it may be computed.
    pub(super) fn refusal(&self) -> Option<Outcome> {
        let Self { shared, accepted, .. } = self;
        let is_poison = accepted.deaths.as_ref().is_some_and(|deaths| deaths.poison.is_some());
        // No reply may go to such a queue.
        let reserved = accepted.task.reply_to().filter(|queue| shared.settlement.queues.is_reserved(queue));
        if let Some(queue) = reserved {
            Some(Outcome::Misaddressed(queue.to_owned()))
        } else if is_poison {
            Some(Outcome::Poison)
        } else if accepted.redeliveries >= shared.max_deliveries {
            Some(Outcome::OutOfDeliveries(accepted.redeliveries))
        } else {
            oversize_error(&accepted.task).map(Outcome::Failed)
        }
    }

    /// Checks what can be checked without reading the body.
    pub(super) fn check(&self) -> Result<(), TaskError> {
        let task = &*self.accepted.task;
        task.check_names()?;
        task.deadline()?;
        if let Some(error) = self.state.unwanted(now()) {
            return Err(error);
        }
        let properties = &task.message.properties;
        let size = task.message.body.len() as u64;
        if size > self.shared.max_body {
            let most = self.shared.max_body;
            let message =
                format!("the body is {size} bytes; this pool takes at most {most} (its setting max_body)");
            return Err(TaskError::new(TaskErrorKind::TooLarge, message));
        }
        if task.message.is_celery_task() {
            let message = "this is a task message of Celery, and sconce is no Celery worker. Call sconce from a Celery \
                           task: docs/celery.md shows how";
            return Err(TaskError::new(TaskErrorKind::BadInput, message));
        }
        let route = self.shared.route(task)?;
        if let Some(given) = task.message.media_type().filter(|given| !route.takes(given)) {
            let types = route.media_types;
            let message =
                format!("content_type is \"{}\"; this model reads {types:?}", shorten(&visible(&given), 80));
            return Err(TaskError::new(TaskErrorKind::Undecodable, message).with_param("content_type"));
        }
        match properties.content_encoding.as_deref().map(str::to_ascii_lowercase).as_deref() {
            None | Some("" | "utf-8" | "utf8" | "identity" | "binary") => Ok(()),
            Some(other) => {
                let message = format!(
                    "content_encoding \"{}\" is not supported; send utf-8",
                    shorten(&visible(other), 80)
                );
                Err(TaskError::new(TaskErrorKind::Undecodable, message).with_param("content_encoding"))
            }
        }
    }

    /// Refuses a task that would be on the device for longer than half of `QueueTimeouts::pool`, the time for which the
    /// worker may keep it: for the other half it may have to wait for other tasks of the same length.
    pub(super) fn check_time(&self, estimate: Option<Duration>) -> Result<(), TaskError> {
        let max = self.shared.settlement.queue_timeouts.pool / 2;
        match estimate.filter(|estimate| *estimate > max) {
            None => Ok(()),
            Some(estimate) => {
                let (estimate, max) = (estimate.as_secs(), max.as_secs());
                let message = format!(
                    "the answer may take {estimate} s at this worker's pace; with broker.consumer_timeout as it \
                     is, a task may take {max} s: ask for fewer tokens or steps, or send less"
                );
                Err(TaskError::new(TaskErrorKind::TooLarge, message))
            }
        }
    }
}

impl Shared {
    /// The model's route for the URL that the task requests.
    fn route(&self, task: &Task) -> Result<&Route, TaskError> {
        let routes = self.engine.routes();
        let requested = task.message.url();
        let route = match requested {
            None => routes.first(),
            Some(requested) => routes.iter().find(|route| route.url == requested || route.url == Route::ANY),
        };
        route.ok_or_else(|| {
            let served: Vec<&str> = routes.iter().map(|route| route.url).collect();
            let (requested, served) = (shorten(requested.unwrap_or_default(), 80), served.join(", "));
            let mut message = format!("url {requested:?} is not served here; this pool answers {served}");
            if let Some(meant) = routes.iter().find(|route| is_spelt_like(route.url, &requested)) {
                message += &format!("; did you mean {}?", meant.url);
            }
            TaskError::new(TaskErrorKind::UnknownUrl, message).with_param("url")
        })
    }
}

/// Whether two URLs differ in nothing but `-` and `_`, capitals, slashes at the end and `/v1` at the beginning: the
/// URLs of some requests are those of other servers, which spell them differently.
fn is_spelt_like(url: &str, other: &str) -> bool {
    let plain = |url: &str| {
        let url = url.to_ascii_lowercase().replace('-', "_");
        url.trim_end_matches('/').trim_start_matches("/v1").to_owned()
    };
    plain(url) == plain(other)
}

/// The error of a task whose headers are so large that it must not be delivered again.
fn oversize_error(task: &Task) -> Option<TaskError> {
    let bytes = task.message.properties.header_bytes();
    (bytes > MAX_HEADER_BYTES).then(|| {
        let message = format!("the headers have {bytes} bytes; a task may have {MAX_HEADER_BYTES}");
        TaskError::new(TaskErrorKind::TooLarge, message)
    })
}
