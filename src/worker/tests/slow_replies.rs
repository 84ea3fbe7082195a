//! Tests of replies that take long to write, which wait for their requester's turn.

use super::*;
use crate::model::{
    Body, Device, Effort, Forward, ForwardError, Inputs, LoadSpec, Preprocessed, Processor, Route,
    SizedInput, TaskError, clock,
};

/// The fields of a body: how many milliseconds and bytes its input takes, and what of the task takes long.
struct Fields {
    ms: u64,
    bytes: usize,
    is_long_to_prepare: bool,
    is_slow_to_finish: bool,
}

impl Fields {
    fn of(message: &Message) -> Self {
        let fields = body(message);
        let number = |name: &str| fields[name].as_u64().unwrap_or(0);
        let is = |name: &str| fields[name] == true;
        Self {
            ms: number("ms"),
            bytes: number("bytes") as usize,
            is_long_to_prepare: is("long_to_prepare"),
            is_slow_to_finish: is("slow_to_finish"),
        }
    }
}

/// Answers each task with nothing.
struct Nothing;

impl Processor for Nothing {
    /// Whether the reply takes long to write.
    type Context = bool;
    type Input = Fields;
    type Piece = ();
    type Output = ();

    fn routes(&self) -> &[Route] {
        &[Route { url: Route::ANY, media_types: &["application/json"] }]
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let fields = Fields::of(message);
        Ok((fields.is_slow_to_finish, Inputs::All(vec![SizedInput::new(fields, 1)])))
    }

    fn effort(&self, message: &Message) -> Effort {
        if Fields::of(message).is_long_to_prepare { Effort::Long } else { Effort::Usual }
    }

    fn bytes(&self, input: &Fields) -> usize {
        input.bytes
    }

    fn is_finish_slow(&self, is_slow: &bool) -> bool {
        *is_slow
    }

    fn finish(&self, _: bool, _: Vec<()>) -> Result<Body, TaskError> {
        Ok(Body::json("null".to_owned()))
    }
}

impl Forward for Nothing {
    type Input = Fields;
    type Output = ();
    type Pending = usize;

    fn submit(&mut self, batch: &[&Fields]) -> Result<usize, ForwardError> {
        batch.iter().for_each(|fields| clock::pass(Duration::from_millis(fields.ms)));
        Ok(batch.len())
    }

    fn wait(&mut self, count: usize) -> Result<Vec<Result<(), TaskError>>, ForwardError> {
        Ok((0..count).map(|_| Ok(())).collect())
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_group_of_suspects_runs_while_one_task_waits_for_the_turn_of_another() {
    let starter = one_pass(|_: &LoadSpec, _: &Device| Ok((Nothing, Nothing)));
    let rig = Rig::start_model(&starter, "nothing", |assignment| {
        assignment.pool.batch.max_requests = 1;
        assignment.pool.prepared_bytes = 1_000;
    });
    let wait = |ms| tokio::time::sleep(Duration::from_millis(ms));
    let of = |id, fields| task(id, "mine", &fields);
    // `held` keeps the memory until 600 ms, so that `long` has the turn and waits for memory until then. `slow` is computed
    // at 300 ms and waits for the turn. The suspect waits since 355 ms until no other task excludes its group.
    rig.memory.deliver([
        of("slow", json!({"ms": 300, "slow_to_finish": true})),
        of("second", json!({"ms": 300})),
        of("held", json!({"bytes": 1_000})),
    ]);
    wait(50).await;
    rig.memory.deliver([of("long", json!({"long_to_prepare": true}))]);
    wait(100).await;
    rig.memory.deliver_again(of("suspect", json!({})), 2);
    wait(300).await;
    assert!(rig.memory.published("mine").is_empty(), "`slow` waits for the turn");
    let replies = rig.memory.until_published("mine", 5).await;
    assert!(replies.iter().all(|reply| status(reply) == 200));
    let (_, events) = rig.finish().await;
    let isolated = |event: &Event| matches!(event, Event::Isolated { tasks, .. } if tasks.len() == 1);
    assert!(events.iter().any(isolated), "{events:?}");
}
