//! Prepares tasks and writes replies, over the side channel: the inputs and what `finish` needs stay in the process, under
//! the task's id. Owns the ids.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::messages::{Description, FromProcess, Prepared, TemplateHeader, ToProcess};
use super::process::Process;
use super::replies::{self, Template};
use crate::model::{
    Body, Effort, Inputs, Message, Preprocessed, Processor, Route, SizedInput, Streaming, TaskError,
    TaskErrorKind,
};

/// The longest body, in bytes, that takes about ten milliseconds at most to read.
const MAX_USUAL_BODY: usize = 64 << 10;

/// The content type of a text that a class yields.
const TEXT: &str = "text/plain; charset=utf-8";

/// The CPU part of a class in Python.
pub struct PythonProcessor {
    pub(super) process: Arc<Process>,
    pub(super) routes: &'static [Route],
    pub(super) description: Description,
    pub(super) probe: Option<Message>,
    pub(super) max_inputs: usize,
    /// The id of the last task.
    pub(super) last_task: AtomicU64,
}

/// A task that the process holds until the last reference is gone.
pub(super) struct Held {
    pub(super) id: u64,
    process: Arc<Process>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.process.forget(self.id);
    }
}

/// What writes the reply of a task.
pub struct Context {
    held: Arc<Held>,
    template: Option<Template>,
    /// The tokens of all inputs.
    tokens: usize,
    has_parts: bool,
}

/// An input that the process holds.
pub struct Input {
    pub(super) held: Arc<Held>,
    pub(super) index: u32,
    bytes: usize,
}

/// The result of an input.
pub enum Output {
    /// A vector, or a number.
    Values(Vec<f32>),
    /// The process holds it.
    Kept,
    /// The whole reply of a task that ran beside others.
    Reply(Body),
}

impl PythonProcessor {
    /// Checks what the process has made of a task.
    fn checked(&self, prepared: &Prepared, texts: usize) -> Result<(), String> {
        let Prepared { tokens, bytes, template, .. } = prepared;
        let inputs = tokens.len();
        if bytes.len() != inputs || inputs > self.max_inputs || tokens.contains(&0) {
            return Err(format!(
                "{inputs} inputs with {} sizes in bytes, and perhaps without a token",
                bytes.len()
            ));
        }
        if template.is_some() != self.description.values || (template.is_some() && texts != inputs + 1) {
            return Err(format!("a template of {texts} texts for {inputs} inputs"));
        }
        Ok(())
    }

    /// The process has answered something that it must not.
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
        let (headers, mut dropped) = (replies::headers(message), Vec::new());
        let request = |drop| ToProcess::Prepare { task: id, url, content_type, headers, drop };
        let (answer, frame) = self.process.ask("preparing a task", request, &[&message.body], &mut dropped);
        // From now on the process holds it, also if it has refused it.
        let held = Arc::new(Held { id, process: self.process.clone() });
        let prepared = match answer {
            FromProcess::Prepared(prepared) if prepared.task == id => prepared,
            FromProcess::Refused(failure) if failure.task == id => {
                return Err(replies::task_error(failure, TaskErrorKind::Internal));
            }
            _ => return Err(self.broken("preparing a task", "an answer to something else")),
        };
        self.checked(&prepared, frame.buffers.len())
            .map_err(|problem| self.broken("preparing a task", &problem))?;
        let Prepared { tokens, bytes, template, parts, .. } = prepared;
        let sized = tokens.iter().zip(bytes).zip(0..).map(|((tokens, bytes), index)| {
            SizedInput::new(Input { held: held.clone(), index, bytes }, *tokens)
        });
        let inputs = Inputs::All(sized.collect());
        let template = template.map(|TemplateHeader { content_type, form }| Template {
            content_type,
            form,
            texts: frame.buffers,
        });
        let tokens = tokens.iter().fold(0, |sum: usize, tokens| sum.saturating_add(*tokens));
        Ok((Context { held, template, tokens, has_parts: parts }, inputs))
    }

    fn effort(&self, message: &Message) -> Effort {
        // Reading JSON of a megabyte takes Python a tenth of a second.
        let is_long = self.description.slow || message.body.len() > MAX_USUAL_BODY;
        if is_long { Effort::Long } else { Effort::Usual }
    }

    fn bytes(&self, input: &Input) -> usize {
        input.bytes
    }

    fn streaming(&self, context: &Context) -> Streaming {
        Streaming::Pieces.if_requested(context.has_parts)
    }

    fn are_parts_brief(&self, _: &Context) -> bool {
        true
    }

    fn parts(&self, _: &mut Context, _: usize, pieces: Vec<Body>) -> Vec<Body> {
        let are_texts = |one: &Body, next: &Body| one.content_type == TEXT && next.content_type == TEXT;
        let joined = |pieces: &[Body]| {
            let bytes: Vec<&[u8]> = pieces.iter().map(|piece| &*piece.bytes).collect();
            Some(Body::new(pieces.first()?.content_type.clone(), bytes.concat()))
        };
        pieces.chunk_by(are_texts).filter_map(joined).collect()
    }

    fn is_finish_slow(&self, context: &Context) -> bool {
        // The class's own `finish` may take as long as it likes.
        context.template.is_none() && !self.is_streaming()
    }

    fn finish(&self, context: Context, outputs: Vec<Output>) -> Result<Body, TaskError> {
        let Context { held, template, tokens, .. } = context;
        if let Some(template) = template {
            let values = outputs.into_iter().map(|output| match output {
                Output::Values(values) => values,
                Output::Kept | Output::Reply(_) => Vec::new(),
            });
            return template.fill(&values.collect::<Vec<_>>());
        }
        if let Some(Output::Reply(body)) = outputs.into_iter().next() {
            return Ok(body);
        }
        let (id, mut dropped) = (held.id, Vec::new());
        let request = |drop| ToProcess::Finish { task: id, usage_tokens: tokens, drop };
        let (answer, mut frame) = self.process.ask("writing a reply", request, &[], &mut dropped);
        match answer {
            FromProcess::Finished(reply) if reply.task == id => {
                Ok(Body::new(reply.content_type, frame.body()))
            }
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

impl PythonProcessor {
    fn is_streaming(&self) -> bool {
        self.description.work == super::messages::Work::Streams
    }
}
