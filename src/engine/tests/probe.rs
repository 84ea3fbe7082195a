//! Tests of what a failed probe means when a model is loaded: a broken device, or a mistake of the model's author.

use super::*;
use crate::engine::{continuous, one_pass};
use crate::model::{
    Advance, Advances, Capacity, Feed, Forward, ForwardError, Generate, LoadError, Preprocessed, Row,
    SizedInput, Slot,
};

/// A model whose inputs are the bytes of a body. It refuses the input `r`, its computation fails on `f`, and it
/// reports its own fault on `i`. `e` has a window before its only step.
#[derive(Clone, Copy)]
struct Fussy {
    probe: &'static str,
}

fn judged(byte: u8) -> Result<u8, TaskError> {
    match byte {
        b'r' => Err(TaskError::bad_input("input", "r is refused")),
        b'i' => Err(TaskError::internal("not a number")),
        byte => Ok(byte),
    }
}

impl Processor for Fussy {
    type Context = ();
    type Input = u8;
    type Piece = ();
    type Output = u8;

    fn routes(&self) -> &[Route] {
        &[]
    }

    fn probe(&self) -> Option<Message> {
        Some(Message { body: self.probe.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        if message.body.starts_with(b"?") {
            return Err(TaskError::bad_input("body", "it begins with ?"));
        }
        let input = |byte: &u8| SizedInput {
            input: *byte,
            encode_tokens: usize::from(*byte == b'e'),
            tokens: usize::from(*byte != b'e'),
            answer_tokens: 1,
        };
        Ok(((), message.body.iter().map(input).collect::<Vec<_>>().into()))
    }

    fn finish(&self, (): (), outputs: Vec<u8>) -> Result<Body, TaskError> {
        Ok(Body::json(outputs))
    }
}

impl Forward for Fussy {
    type Input = u8;
    type Output = u8;
    type Pending = Vec<u8>;

    fn submit(&mut self, inputs: &[&u8]) -> Result<Vec<u8>, ForwardError> {
        Ok(inputs.iter().map(|input| **input).collect())
    }

    fn wait(&mut self, inputs: Vec<u8>) -> Result<Vec<Result<u8, TaskError>>, ForwardError> {
        if inputs.contains(&b'f') {
            return Err(ForwardError::Failed("no".into()));
        }
        Ok(inputs.into_iter().map(judged).collect())
    }
}

/// A network of one sequence at a time, whose output is its prompt. Holds that prompt, or `E` once its window is
/// encoded.
struct Sequences(u8);

impl Generate for Sequences {
    type Prompt = u8;
    type Piece = ();
    type Output = u8;

    fn capacity(&self) -> Capacity {
        Capacity { sequences: 2, tokens: 9, context: 9 }
    }

    fn open(&mut self, _: Slot, prompt: &u8) -> Result<(), TaskError> {
        self.0 = *prompt;
        if *prompt == b'r' { judged(*prompt).map(drop) } else { Ok(()) }
    }

    fn step(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        if rows[0].feed == Feed::Encode {
            assert_eq!(std::mem::replace(&mut self.0, b'E'), b'e');
            return Ok(vec![Ok(Advance::Fed)]);
        }
        match self.0 {
            b'e' => Err(ForwardError::Failed("its window is not encoded".into())),
            b'f' => Err(ForwardError::Failed("no".into())),
            prompt => Ok(vec![judged(prompt).map(|output| Advance::Done(None, output))]),
        }
    }

    fn close(&mut self, _: Slot) {}
}

/// The errors of loading a model with this probe: as a one-pass model, and as one of sequences.
fn loads(probe: &'static str) -> [Option<LoadError>; 2] {
    let model = Fussy { probe };
    let starters =
        [one_pass(move |_, _| Ok((model, model))), continuous(move |_, _| Ok((model, Sequences(0))))];
    starters.map(|starter| starter.start_here(setup("own", 64, &Log::default())).err())
}

#[tokio::test(flavor = "local")]
async fn a_refused_probe_is_its_authors_mistake_not_a_device_fault() {
    assert!(["a", "e"].iter().all(|probe| loads(probe).iter().all(Option::is_none)));
    for (probe, message) in [("?", "it begins with ?"), ("r", "r is refused")] {
        for error in loads(probe) {
            let Some(LoadError::Probe { model, reason }) = error else { panic!("{probe}: {error:?}") };
            assert_eq!((&*model, &*reason), ("own", message));
        }
    }
    let [one_pass, sequences] = loads("").map(|error| error.expect("it has no input").to_string());
    assert_eq!(one_pass, "model \"own\" refuses its own probe: it has no input");
    assert_eq!(sequences, "model \"own\" refuses its own probe: it has 0 sequences, but must have one");
    let [one_pass, sequences] = loads("ab");
    assert!(one_pass.is_none(), "one pass computes several inputs");
    assert!(matches!(sequences, Some(LoadError::Probe { .. })), "{sequences:?}");
}

#[tokio::test(flavor = "local")]
async fn a_probe_whose_computation_fails_is_a_fault_of_the_device() {
    for (probe, message) in [("f", "a known input fails: no"), ("i", "a known input fails: not a number")] {
        for error in loads(probe) {
            let Some(LoadError::Device { device, reason }) = error else { panic!("{probe}: {error:?}") };
            assert_eq!((&*device, &*reason), ("cpu", message));
        }
    }
}
