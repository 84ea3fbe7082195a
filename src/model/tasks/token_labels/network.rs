//! A network that labels the tokens of texts. Decides when the entities of a task are too many for a reply: while its
//! texts are computed, and not after the last one. Owns the network.

use std::collections::HashSet;
use std::sync::Arc;

use super::body::{MAX_REPLY_BYTES, MIN_ENTITY_BYTES, Strategy, reply_too_large};
use super::entities::{Labelled, Token, entities, label_parts};
use crate::model::load::tokenizer::Tokens;
use crate::model::nets::encoder::TextNetwork;
use crate::model::nets::held::{Held, Share};
use crate::model::ops::probabilities::softmax;
use crate::model::{Forward, ForwardError, TaskError};

/// How a task's tokens become entities.
pub struct TaskLabels {
    pub(super) strategy: Strategy,
    /// Labels of tokens, or kinds of entities, that are left out.
    pub(super) ignored: HashSet<String>,
    /// The number of tokens that a window shares with the one before.
    pub(super) stride: usize,
    /// The fewest bytes that the entities found so far take in the reply.
    pub(super) bytes: Held,
}

/// A window of a text.
pub struct WindowInput {
    pub(super) tokens: Tokens,
    /// The tokens that are labelled: all but added special ones.
    pub(super) labelled: Arc<[Token]>,
    /// Whether it is not the first window of its text.
    pub(super) is_further: bool,
    pub(super) task: Arc<TaskLabels>,
}

/// The tokens or words of a window, with their labels.
pub struct LabelledWindow {
    pub(super) parts: Vec<Labelled>,
    _share: Share,
}

/// A network for texts with a head that labels tokens.
pub struct TokenLabelNetwork {
    pub(super) network: TextNetwork,
    pub(super) names: Arc<[String]>,
}

impl Forward for TokenLabelNetwork {
    type Input = WindowInput;
    type Output = LabelledWindow;
    type Pending = Vec<Result<LabelledWindow, TaskError>>;

    fn submit(&mut self, inputs: &[&WindowInput]) -> Result<Self::Pending, ForwardError> {
        let tokens: Vec<&Tokens> = inputs.iter().map(|input| &input.tokens).collect();
        let outputs = self.network.forward(&tokens)?.into_iter().zip(inputs);
        Ok(outputs.map(|(logits, input)| input.label(logits?, &self.names)).collect())
    }

    fn wait(&mut self, pending: Self::Pending) -> Result<Self::Pending, ForwardError> {
        Ok(pending)
    }
}

impl WindowInput {
    /// Labels the tokens or words, given the logits of all tokens, `[tokens, labels]`.
    ///
    /// # Errors
    /// `TooLarge` if the task has so many entities that its reply would be too large.
    fn label(&self, mut logits: Vec<f32>, names: &[String]) -> Result<LabelledWindow, TaskError> {
        let (width, task) = (names.len(), &self.task);
        logits.chunks_exact_mut(width).for_each(softmax);
        let parts =
            label_parts(&self.labelled, task.strategy, |token| &logits[token.index * width..][..width]);
        // An entity among the tokens that the window before has too may be the same.
        let first = if self.is_further { task.stride } else { 0 };
        let found = entities(0, &self.labelled, &parts, names, task.strategy, &task.ignored);
        let new = found.iter().filter(|entity| parts[entity.parts.start].tokens.start >= first);
        let share = task.bytes.add(new.map(|entity| MIN_ENTITY_BYTES + entity.name.len()).sum());
        if task.bytes.total() > MAX_REPLY_BYTES {
            return Err(reply_too_large());
        }
        Ok(LabelledWindow { parts, _share: share })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::TaskErrorKind;

    #[test]
    fn a_task_ends_once_its_entities_exceed_a_reply_and_outputs_that_are_gone_do_not_count() {
        let names = ["O", "B-PER", "I-PER"].map(str::to_owned);
        let task = |ignored: &[&str], stride| TaskLabels {
            strategy: Strategy::None,
            ignored: ignored.iter().map(|name| (*name).to_owned()).collect(),
            stride,
            bytes: Held::default(),
        };
        let count = 1_000;
        let token = |index| Token { index, id: 0, span: [index as u32; 2], continues_word: false };
        let labelled: Arc<[Token]> = (0..count).map(token).collect();
        let tokens = Tokens { ids: vec![0; count], second: count, truncated: false, unpooled: 0 };
        let window = |task: &Arc<TaskLabels>, is_further| WindowInput {
            tokens: tokens.clone(),
            labelled: labelled.clone(),
            is_further,
            task: task.clone(),
        };
        // Each is a person.
        let logits = || [0.0, 9.0, 0.0].repeat(count);
        let label = |task: &Arc<TaskLabels>, is_further| window(task, is_further).label(logits(), &names);
        let most = MAX_REPLY_BYTES / (count * (MIN_ENTITY_BYTES + "B-PER".len()));
        let all = Arc::new(task(&[], 0));
        let mut outputs: Vec<_> = (0..most).map(|_| label(&all, false).unwrap()).collect();
        assert_eq!(outputs[0].parts.len(), count);
        assert_eq!(label(&all, false).err().unwrap().kind, TaskErrorKind::TooLarge);
        outputs.pop();
        outputs.push(label(&all, false).unwrap());
        drop(outputs);
        assert_eq!(all.bytes.total(), 0);
        // Labels that are left out do not count, and neither do tokens that the window before has too.
        let (ignoring, overlapping) = (Arc::new(task(&["B-PER"], 0)), Arc::new(task(&[], count)));
        for _ in 0..2 * most {
            assert_eq!(label(&ignoring, false).unwrap().parts.len(), count);
            assert!(label(&overlapping, true).is_ok());
        }
    }
}
