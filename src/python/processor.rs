//! Prepares tasks and writes replies, over the side channel: the inputs and what `finish` needs stay in the process, under
//! the task's id. Owns the ids.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::messages::{Answer, Description, FromProcess, Prepared, ToProcess, Work};
use super::process::Process;
use super::replies::{self, Template};
use crate::model::{
    Body, Effort, Inputs, Message, Preprocessed, Processor, Route, SizedInput, Streaming, TaskError,
    TaskErrorKind,
};

/// Preparing a longer body, in bytes, counts as long work. Python takes a tenth of a second to read a megabyte of JSON.
const MAX_USUAL_BODY: usize = 64 << 10;

/// The content type of a text that a class yields.
const TEXT: &str = "text/plain; charset=utf-8";

/// Prepares tasks for a class in Python, and writes their replies.
pub struct PythonProcessor {
    pub(super) process: Arc<Process>,
    pub(super) routes: &'static [Route],
    pub(super) description: Description,
    pub(super) probe: Option<Message>,
    pub(super) max_inputs: usize,
    /// The id of the last task.
    pub(super) last_task: AtomicU64,
}

/// A task that the process holds. It is told to forget the task when this is dropped.
pub(super) struct Held {
    pub(super) id: u64,
    process: Arc<Process>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.process.forget(self.id);
    }
}

/// What is needed to write the reply of a task.
pub struct Context {
    held: Arc<Held>,
    /// Given if the outputs are numbers. Otherwise the process writes the reply.
    template: Option<Template>,
    wants_parts: bool,
}

/// An input, whose value is in the process.
pub struct Input {
    /// Its task.
    pub(super) held: Arc<Held>,
    /// Its index in the task.
    pub(super) index: u32,
    bytes: usize,
}

/// The result of an input.
pub enum Output {
    /// A vector, or one number.
    Numbers(Vec<f32>),
    /// Whatever the class has returned, which stays in the process.
    InProcess,
    /// The whole reply of a stream.
    Reply(Body),
}

impl PythonProcessor {
    /// Checks what the process says of a task. An error says what is wrong with it.
    fn check(&self, prepared: &Prepared, texts: usize) -> Result<(), String> {
        let Prepared { tokens, bytes, form, .. } = prepared;
        let inputs = tokens.len();
        if bytes.len() != inputs || inputs > self.max_inputs || tokens.contains(&0) {
            return Err(format!(
                "{inputs} inputs (at most {}) with {} sizes in bytes; each needs at least one token",
                self.max_inputs,
                bytes.len()
            ));
        }
        if form.is_some() != self.description.gives_numbers || (form.is_some() && texts != inputs + 1) {
            return Err(format!("{texts} texts around the outputs of {inputs} inputs"));
        }
        Ok(())
    }

    /// Gives the process up, since it has answered something that it must not. The error is for the task.
    fn broken(&self, doing: &str, problem: &str) -> TaskError {
        self.process.give_up(format!(
            "the Python process has sent something else than expected for {doing}: {problem}"
        ));
        TaskError::new(TaskErrorKind::Fault, "the process of the model is broken")
    }
}

impl Processor for PythonProcessor {
    type Context = Context;
    type Input = Input;
    type Piece = Body;
    type Output = Output;

    fn routes(&self) -> &[Route] {
        self.routes
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let id = self.last_task.fetch_add(1, Ordering::Relaxed) + 1;
        let first = self.routes.first();
        let url = message.url().or(first.map(|route| route.url)).unwrap_or_default();
        let route = self.routes.iter().find(|route| route.url == url).or(first);
        let content_type = message.properties.content_type.as_deref();
        let usual = || route?.media_types.first().copied().filter(|it| *it != Route::ANY_TYPE);
        let content_type = content_type.or_else(usual).unwrap_or(crate::protocol::JSON);
        let headers = replies::headers(message);
        let request = |drop| ToProcess::Prepare { task: id, url, content_type, headers, drop };
        let Answer { message, buffers } = self.process.ask("preparing a task", request, &[&message.body]);
        let held = Arc::new(Held { id, process: self.process.clone() });
        let prepared = match message {
            FromProcess::Prepared(prepared) if prepared.task == id => prepared,
            FromProcess::Refused(failure) if failure.task == id => {
                return Err(replies::task_error(failure, TaskErrorKind::Internal));
            }
            _ => return Err(self.broken("preparing a task", "an answer to something else")),
        };
        self.check(&prepared, buffers.len()).map_err(|problem| self.broken("preparing a task", &problem))?;
        let Prepared { tokens, bytes, form, parts: wants_parts, .. } = prepared;
        let sized = tokens.into_iter().zip(bytes).zip(0..).map(|((tokens, bytes), index)| {
            SizedInput::new(Input { held: held.clone(), index, bytes }, tokens)
        });
        let inputs = Inputs::All(sized.collect());
        let template = form.map(|form| Template { form, texts: buffers });
        Ok((Context { held, template, wants_parts }, inputs))
    }

    fn effort(&self, message: &Message) -> Effort {
        let is_long = self.description.has_preprocess || message.body.len() > MAX_USUAL_BODY;
        if is_long { Effort::Long } else { Effort::Usual }
    }

    fn bytes(&self, input: &Input) -> usize {
        input.bytes
    }

    fn streaming(&self, context: &Context) -> Streaming {
        Streaming::Pieces.if_requested(context.wants_parts)
    }

    fn are_parts_brief(&self, _: &Context) -> bool {
        true
    }

    fn parts(&self, _: &mut Context, _: usize, pieces: Vec<Body>) -> Vec<Body> {
        // Texts that have come together are one part.
        let are_texts = |one: &Body, next: &Body| one.content_type == TEXT && next.content_type == TEXT;
        let joined = |pieces: &[Body]| {
            let bytes: Vec<&[u8]> = pieces.iter().map(|piece| &*piece.bytes).collect();
            Some(Body::new(pieces.first()?.content_type.clone(), bytes.concat()))
        };
        pieces.chunk_by(are_texts).filter_map(joined).collect()
    }

    fn is_finish_slow(&self, context: &Context) -> bool {
        // The class's own `finish` may take as long as it likes. The reply of a stream is there already.
        context.template.is_none() && self.description.work == Work::Batches
    }

    fn finish(&self, context: Context, outputs: Vec<Output>) -> Result<Body, TaskError> {
        let Context { held, template, .. } = context;
        if let Some(template) = template {
            let vectors = outputs.into_iter().map(|output| match output {
                Output::Numbers(vector) => vector,
                Output::InProcess | Output::Reply(_) => Vec::new(),
            });
            return template.fill(&vectors.collect::<Vec<_>>());
        }
        if let Some(Output::Reply(body)) = outputs.into_iter().next() {
            return Ok(body);
        }
        let id = held.id;
        let mut answer =
            self.process.ask("writing a reply", |drop| ToProcess::Finish { task: id, drop }, &[]);
        let body = answer.body();
        match answer.message {
            FromProcess::Finished(reply) if reply.task == id => Ok(Body::new(reply.content_type, body)),
            FromProcess::Refused(failure) if failure.task == id => {
                Err(replies::task_error(failure, TaskErrorKind::Internal))
            }
            _ => Err(self.broken("writing a reply", "an answer to something else")),
        }
    }

    fn probe(&self) -> Option<Message> {
        self.probe.clone()
    }
}
