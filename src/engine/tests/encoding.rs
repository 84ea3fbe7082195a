//! Tests of sequences whose window is encoded before their first token, in paused time.

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::continuous::{Ended, Rig, sequence, state_of, with, words};
use super::*;
use crate::model::TaskErrorKind;

/// A sequence with a window of 400 ms and these tokens, whose steps take 10 ms.
fn window(prompt: usize, max_tokens: usize) -> Value {
    with(sequence(prompt, max_tokens), json!({"encode_ms": 400}))
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|n| n.to_string()).collect()
}

fn at(ended: &[Ended]) -> Vec<u64> {
    ended.iter().map(|ended| ended.at).collect()
}

/// The sizes of all passes so far.
fn sizes(rig: &Rig) -> Vec<usize> {
    let reports = rig.log.take().into_iter();
    reports
        .filter_map(|report| if let Report::PassEnded { inputs, .. } = report { Some(inputs) } else { None })
        .collect()
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_window_delays_sixteen_decoding_sequences_once_in_eight_steps() {
    let rig = Rig::new("script?sequences=24", 64);
    let (long, short) = (names(16), ["a", "b", "c", "d"]);
    let windows = async {
        rig.log.passes(5).await;
        join_all(short.map(|id| rig.run(id, window(2, 3)))).await
    };
    let (long, windows) =
        tokio::join!(join_all(long.iter().map(|id| rig.run(id, sequence(1, 100)))), windows);
    assert_eq!(at(&long), [1_000 + 4 * 400; 16]);
    assert!(long.iter().all(|ended| ended.text() == words(100)));
    // The first window begins at 60 ms. 8 steps of 10 ms lie between two windows. An answer takes three steps.
    assert_eq!(at(&windows), [490, 970, 1_450, 1_930]);
    let sizes = sizes(&rig);
    let encoded: Vec<usize> = (0..sizes.len()).filter(|pass| sizes[*pass] == 1).collect();
    assert_eq!(encoded, [6, 15, 24, 33]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_sequence_that_begins_again_encodes_again_and_keeps_its_pieces() {
    let rig = Rig::new("script?sequences=24", 64);
    let again = with(window(2, 6), json!({"encode_at": 3}));
    let (again, other) = tokio::join!(rig.run("again", again), rig.run("other", sequence(1, 100)));
    assert_eq!((again.text(), other.text()), (words(6).as_str(), words(100).as_str()));
    assert_eq!(other.at, 1_000 + 2 * 400);
    // The time is a step of 10 ms, the first window, 8 steps, of which 3 give pieces, the second window, and 3
    // steps that give pieces.
    assert!((900..1_000).contains(&again.at), "{}", again.at);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn four_windows_are_encoded_together_while_none_decodes() {
    let rig = Rig::new("script", 64);
    let ended = join_all(names(6).iter().map(|id| rig.run(id, window(4, 2)))).await;
    assert_eq!(at(&ended), [1_620, 1_620, 1_620, 1_620, 2_440, 2_440]);
    assert_eq!(sizes(&rig), [4, 4, 4, 2, 2, 2]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_denoising_model_has_no_prompt_and_takes_its_steps_at_once() {
    let rig = Rig::new("script", 64);
    let ended = rig.run("a", window(0, 20)).await;
    assert_eq!((ended.text(), ended.at), (&*words(20), 600));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn the_pools_encode_settings_override_those_of_the_model() {
    for (interval, source) in [(None, "script?encode_interval=2&encode_batch=1"), (Some(2), "script")] {
        let (batch, names) = (interval.map(|_| 1), names(3));
        let policy = Policy { encode_interval: interval, encode_batch: batch, ..policy(64) };
        let starter = crate::engine::continuous(crate::model::testing::script::load);
        let rig = Rig::of(&starter, |log| Setup { policy, ..setup(source, 64, log) });
        let (long, windows) = tokio::join!(
            rig.run("long", sequence(1, 20)),
            join_all(names.iter().map(|id| rig.run(id, window(1, 1))))
        );
        assert_eq!(long.at, 200 + 3 * 400, "{source}");
        assert_eq!(at(&windows), [410, 830, 1_250], "two steps lie between two windows");
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_hundred_windows_of_one_requester_delay_another_by_one_window() {
    let rig = Rig::new("script", 64);
    let names = names(100);
    let many = join_all(names.iter().map(|id| rig.run_as(state_of(id, 1), window(1, 20), None)));
    let other = async {
        rig.log.passes(10).await;
        let arrived_at = rig.ms();
        rig.run_as(state_of("other", 2), window(1, 1), None).await.at - arrived_at
    };
    let (many, waited) = tokio::join!(many, other);
    // The bound is two windows, one of the others and its own, each with eight steps of 10 ms, and one more step.
    assert!(waited <= 2 * (400 + 80) + 10, "{waited} ms");
    assert!(many.iter().all(|ended| ended.text() == words(20)));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn unwanted_tasks_end_after_the_current_window_and_free_their_slots() {
    let rig = Rig::new("script", 64);
    let [cancelled, withdrawn, waiting] = ["cancelled", "withdrawn", "waiting"].map(|id| state(id, None));
    let end = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        cancelled.cancel();
        waiting.cancel();
        assert!(withdrawn.withdraw(), "it is handed back though its window is being encoded");
    };
    let late = state("late", Some(Duration::from_millis(200)));
    let (gone, late, next, waited, (), ()) = tokio::join!(
        rig.run_as(cancelled.clone(), window(1, 100), None),
        rig.run_as(late, window(1, 100), None),
        rig.run("next", window(1, 3)),
        async {
            // Enqueued last, so that it is the fifth; four windows are encoded together.
            tokio::time::sleep(Duration::from_millis(1)).await;
            rig.run_as(waiting.clone(), window(1, 100), None).await
        },
        end,
        async {
            let run = rig.run_as(withdrawn.clone(), window(1, 100), None);
            let _ = tokio::time::timeout(Duration::from_secs(5), run).await.expect_err("no answer");
        },
    );
    assert_eq!((gone.error(), gone.at), (TaskErrorKind::Cancelled, 1_600));
    assert_eq!((late.error(), late.at), (TaskErrorKind::Expired, 1_600));
    assert_eq!((waited.error(), waited.at), (TaskErrorKind::Cancelled, 1_600));
    assert_eq!((next.text(), next.at), (&*words(3), 1_630));
    assert_eq!(sizes(&rig), [4, 1, 1, 1], "the fifth window was not encoded");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_failing_window_costs_the_others_nothing() {
    for how in ["error", "row", "panic"] {
        let bad = with(window(4, 20), json!({"fail_encode": how}));
        // Once together with other windows, and once while another sequence decodes.
        let rig = Rig::new("script?faults", 64);
        let (a, bad_one, b) =
            tokio::join!(rig.run("a", window(4, 5)), rig.run("bad", bad.clone()), rig.run("b", window(4, 5)));
        assert_eq!(
            (bad_one.error(), a.text(), b.text()),
            (TaskErrorKind::Fault, &*words(5), &*words(5)),
            "{how}"
        );
        let late = async {
            rig.log.passes(12).await;
            rig.run("bad", bad).await
        };
        let (long, bad) = tokio::join!(rig.run("long", sequence(4, 30)), late);
        assert_eq!((bad.error(), long.text()), (TaskErrorKind::Fault, &*words(30)), "{how}");
        assert_eq!(*rig.fault.lock(), None);
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn batches_of_windows_out_of_memory_are_halved_and_later_ones_are_smaller() {
    let rig = Rig::new("script?faults", 64);
    let tight = |fits: usize| with(window(0, 1), json!({"fail_encode": "oom", "fits": fits}));
    let ended = join_all(names(8).iter().map(|id| rig.run(id, tight(2)))).await;
    assert!(ended.iter().all(|ended| ended.text() == words(1)));
    assert_eq!(sizes(&rig), [4, 4, 2, 2, 2, 2]);
    rig.run("prompt", sequence(60, 1)).await;
    assert_eq!(sizes(&rig), [1], "the bound on prompt tokens is unchanged");
    let (long, none) = tokio::join!(rig.run("long", sequence(4, 30)), rig.run("none", tight(0)));
    assert_eq!((none.error(), long.text()), (TaskErrorKind::OutOfMemory, &*words(30)));
    assert_eq!(*rig.fault.lock(), None);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_device_failure_in_a_window_is_blamed_on_its_task_alone() {
    let rig = Rig::new("script?faults", 64);
    let bad = async {
        rig.log.passes(3).await;
        rig.run("bad", with(window(4, 20), json!({"fail_encode": "device"}))).await
    };
    let both = async { tokio::join!(rig.run("a", sequence(4, 100)), bad) };
    assert!(tokio::time::timeout(Duration::from_secs(60), both).await.is_err());
    assert_eq!(rig.fault.lock().as_deref(), Some("as the task asked for"));
    assert_eq!(rig.log.on_device().last(), Some(&vec!["bad".to_owned()]), "not those that decode");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_preempted_sequence_encodes_again_and_gives_the_same_text() {
    let rig = Rig::new("script?sequences=2", 64);
    let ordinary = |id: &'static str| rig.run(id, with(window(4, 10), json!({"stream": true})));
    let isolated = async {
        rig.log.passes(3).await;
        rig.engine.queue().isolate(Some(1));
        let ended = rig.run_as(state("suspect", None), window(4, 5), Some(1)).await;
        rig.engine.queue().isolate(None);
        ended
    };
    let (a, b, suspect) = tokio::join!(ordinary("a"), ordinary("b"), isolated);
    // Two windows, three steps, its own window and its own five steps.
    assert_eq!(suspect.at, 800 + 30 + 400 + 50);
    for ended in [&a, &b] {
        let parts: String = ended.parts.iter().map(|(_, part)| part.as_str()).collect();
        let words_once = (0..10).filter(|word| parts.matches(&format!("{word} ")).count() == 1).count();
        assert_eq!((ended.text(), words_once), (&*words(10), 10), "no piece twice: {parts}");
    }
    // Two windows, three steps, its window again, and all ten steps.
    assert_eq!(b.computed.compute, Duration::from_millis(800 + 30 + 400 + 100));
    // Two windows, and ten steps; meanwhile the other encodes its window again.
    assert_eq!(a.computed.compute, Duration::from_millis(800 + 100));
}
