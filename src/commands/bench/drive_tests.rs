//! Tests of loads over a queue in memory, whose only worker takes a while for each task, in paused time.

use parking_lot::Mutex;

use super::*;
use crate::broker::Published;
use crate::broker::memory::Memory;
use crate::model::tasks::embed;
use crate::protocol::Properties;

/// A client of a worker that computes one task after the other, each for this long; none: it answers nothing.
fn client(each: Option<Duration>) -> Client {
    let (memory, free_at) = (Memory::default(), Mutex::new(Instant::now()));
    memory.set_workers(move |memory, task| {
        if let Some(each) = each {
            let mut free_at = free_at.lock();
            *free_at = Instant::now().max(*free_at) + each;
            let headers = [("status_code".to_owned(), 200.into())].into();
            let correlation_id = task.properties.correlation_id.clone();
            let properties = Properties { correlation_id, headers, ..Properties::default() };
            let reply = Message { properties, body: "{}".into() };
            let (memory, answered_at) = (memory.clone(), *free_at);
            tokio::spawn(async move {
                tokio::time::sleep_until(answered_at).await;
                memory.deliver([reply]);
            });
        }
        Published::Confirmed
    });
    Client::over(memory.open(), "tasks", "replies")
}

/// Drives a load of this many tasks without a warm-up.
async fn driven(each: Option<Duration>, tasks: usize, pace: Pace) -> (Measured, Option<anyhow::Error>) {
    let trailing = if let Pace::Closed(in_flight) = pace { in_flight - 1 } else { 0 };
    let plan = Plan { warmup: 0, tasks, trailing };
    let bodies = Bodies::texts(1, 2..=9, 1, Box::new(embed::FAMILY.sample));
    let timeout = Duration::from_secs(1);
    drive(&mut client(each), plan, bodies, pace, timeout, &ProgressBar::hidden()).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_open_loop_keeps_its_rate_and_a_slow_worker_shows_in_the_latency() {
    let rate = || Pace::Open(Arrivals::new(1, 100.0));
    let (quick, _) = driven(Some(Duration::from_millis(1)), 1_000, rate()).await;
    let achieved = quick.achieved_rate.unwrap();
    assert!((90.0..110.0).contains(&achieved), "{quick:?}");
    assert!(quick.latency_ms.as_ref().unwrap().p50 < 3.0, "{quick:?}");
    // Twice as many as the worker can do: the last of them waits for about half the time that they take.
    let (slow, _) = driven(Some(Duration::from_millis(20)), 150, rate()).await;
    assert!(slow.achieved_rate.unwrap() > 80.0, "{slow:?}");
    assert!(slow.latency_ms.as_ref().unwrap().max > 1_000.0, "{slow:?}");
    assert!((49.0..51.0).contains(&slow.tasks_per_second), "{slow:?}");
    assert_eq!((slow.succeeded, slow.unanswered), (150, 0));
}

#[tokio::test(start_paused = true)]
async fn a_closed_loop_has_no_more_under_way_than_asked() {
    let (closed, _) = driven(Some(Duration::from_millis(20)), 100, Pace::Closed(4)).await;
    let latency = closed.latency_ms.as_ref().unwrap();
    assert!((79.0..82.0).contains(&latency.p50) && latency.max < 82.0, "four of 20 ms: {closed:?}");
    assert!((49.0..51.0).contains(&closed.tasks_per_second), "{closed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_reply_that_does_not_come_is_waited_for_no_longer_than_asked() {
    let begun = Instant::now();
    let (measured, error) = driven(None, 5, Pace::Closed(2)).await;
    assert_eq!((measured.unanswered, measured.succeeded), (2, 0), "{measured:?}");
    let words = error.unwrap().to_string();
    assert_eq!(words, "no reply for 1s; 2 of 2 published tasks are not answered");
    assert_eq!(begun.elapsed().as_secs(), 1);
}
