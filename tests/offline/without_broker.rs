//! A service that finds no broker: its health and metrics over HTTP, its processes, and how it ends.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;

use nix::sys::signal::Signal;
use nix::unistd::{Pid, getpgid};

use crate::support::processes::lives;
use crate::support::sconce::{Sconce, Settings, http_get, signal};
use crate::support::wait::until;

/// Nobody listens there.
fn settings() -> Settings {
    Settings::echo("amqp://guest:guest@127.0.0.1:1/%2f").set("launcher.restart_delay", "50ms")
}

/// A service whose workers have loaded their models.
async fn ready(settings: &Settings, workers: usize) -> Sconce {
    let sconce = Sconce::launch(settings);
    sconce.wait_for_log_times("worker ready", workers).await;
    sconce
}

/// Runs `sconce healthcheck`, which is to end with `code` and to say `words`.
async fn healthcheck(settings: &Settings, flags: &[&str], code: i32, words: &[&str]) {
    let mut check = Sconce::run(settings, &[&["healthcheck"], flags].concat());
    assert_eq!(check.exit_code().await, code, "{flags:?}: {}", check.log());
    for word in words {
        assert!(check.log().contains(word), "{flags:?}: no {word:?} in {}", check.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_without_its_broker_lives_and_has_started_but_is_not_ready() {
    let settings = settings();
    let sconce = ready(&settings, 1).await;
    let admin = sconce.admin().await;
    for (path, status) in [("startupz", 200), ("livez", 200), ("readyz", 503)] {
        until(path, || async { (http_get(format!("{admin}/{path}")).await.0 == status).then_some(()) }).await;
    }
    let (_, words) = http_get(format!("{admin}/readyz")).await;
    assert!(words.contains(&format!("pool {}: no worker takes tasks", settings.name)), "{words}");
    for (flags, code) in [(&[][..], 1), (&["--live"], 0), (&["--startup"], 0)] {
        healthcheck(&settings, &[flags, &["--url", &admin]].concat(), code, &[]).await;
    }
    assert_eq!(sconce.stop().await, 0);
    healthcheck(&settings, &["--url", &admin], 1, &["is a launcher running there?"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_admin_port_is_tried_until_free_and_healthcheck_asks_its_own() {
    const LIVE: &[&str] = &["--live"];
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let unnamed = settings().set("admin.listen", &address);
    let name = format!("{}-launcher", unnamed.name);
    let settings = unnamed.clone().set("launcher.name", &name);
    let sconce = Sconce::launch(&settings);
    sconce.wait_for_log("another process listens there").await;
    drop(taken);
    sconce.wait_for_log("serving /metrics").await;
    healthcheck(&settings, LIVE, 0, &[]).await;
    healthcheck(&settings.clone().set("launcher.name", "another"), LIVE, 1, &[&name, "\"another\""]).await;
    healthcheck(&unnamed, LIVE, 0, &[]).await;
    // Another launcher that has not got the port is not healthy because this one is.
    let second = Sconce::launch(&unnamed.clone().set("launcher.name", format!("{name}-2")));
    second.wait_for_log("another process listens there").await;
    healthcheck(&unnamed, LIVE, 1, &[&format!("{name}-2")]).await;
    assert_eq!(second.stop().await, 0);
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a port");
    let elsewhere = unnamed.set("admin.listen", nobody.local_addr().expect("an address"));
    healthcheck(&elsewhere, LIVE, 1, &["no launcher of this host"]).await;
    let mut nowhere = Sconce::launch(&elsewhere.set("admin.listen", "192.0.2.1:1"));
    assert_eq!(nowhere.exit_code().await, 78);
    assert!(nowhere.log().contains("admin.listen = \"192.0.2.1:1\""), "{}", nowhere.log());
    let (_, plain) = http_get(format!("http://{address}/metrics")).await;
    assert!(plain.contains("# TYPE sconce_tasks_total counter") && !plain.contains("# EOF"), "{plain}");
    assert!(plain.contains(&format!("launcher={name:?}")), "{plain}");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_never_found_its_broker_stops_at_once_and_leaves_no_guard() {
    // A guard that waited for it would outlast the test.
    let sconce = ready(&settings().set("launcher.shutdown_grace", "1h"), 1).await;
    sconce.wait_for_log("127.0.0.1:1").await;
    let guard = sconce.guard().expect("a guard");
    assert_eq!(sconce.stop().await, 0, "it holds nothing");
    until("the guard is gone", || async { (!lives(guard)).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_absent_for_too_long_ends_the_worker_with_its_own_code() {
    let mut worker = Sconce::run(&settings().set("broker.give_up_after", "1s"), &["worker"]);
    assert_eq!(worker.exit_code().await, 81, "{}", worker.log());
    assert!(worker.log().contains("127.0.0.1:1"), "{}", worker.log());
}

/// The children of the thread of a process that has this name, by the kernel's account.
fn children_of_thread(process: u32, name: &str) -> BTreeSet<u32> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("a process").flatten();
    let read = |thread: &fs::DirEntry, file| fs::read_to_string(thread.path().join(file));
    let named: Vec<_> =
        threads.filter(|thread| read(thread, "comm").is_ok_and(|comm| comm.trim_end() == name)).collect();
    assert_eq!(named.len(), 1, "threads named {name}");
    let children = read(&named[0], "children").expect("the kernel lists children");
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The kernel ends a worker with the *thread* that spawned it (`PR_SET_PDEATHSIG`), so a thread that
/// ends when it is idle would take healthy workers along. The thread `main`, which runs the command, lives
/// as long as its process: workers that are its children are safe however long the launcher is idle.
#[tokio::test(flavor = "multi_thread")]
async fn workers_are_tied_to_the_main_thread_and_have_process_groups_of_their_own() {
    let sconce = ready(&settings().set("pool[0].workers_per_device", 2), 2).await;
    let group = |pid: u32| getpgid(Some(Pid::from_raw(pid as i32))).expect("a group");
    let checked = || {
        let workers: BTreeSet<_> = sconce.workers().into_iter().collect();
        let children = children_of_thread(sconce.pid(), "main");
        assert!(workers.len() == 2 && workers.is_subset(&children), "{workers:?} among {children:?}");
        // Ctrl-C is the launcher's.
        assert!(workers.iter().all(|worker| group(*worker) != group(sconce.pid())));
        workers
    };
    // One that is started again has the same parent.
    let killed = *checked().first().expect("two workers");
    signal(killed, Signal::SIGKILL);
    sconce.wait_for_log_times("worker ready", 3).await;
    assert!(!checked().contains(&killed));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_on_an_unfit_device_is_tried_again_and_counted_by_the_reason_until_it_is_fit() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    fs::write(&state, "wrong_result").expect("a file");
    let settings = settings()
        .set("pool[0].model", format!("echo?faults={}", state.display()))
        .set("launcher.restart_delay_max", "200ms")
        .set("launcher.max_quick_failures", 1000);
    let sconce = Sconce::launch(&settings);
    let admin = sconce.admin().await;
    sconce.wait_for_log_times("exit=83", 2).await;
    let slot = format!(r#"pool="{0}",slot="{0}/0""#, settings.name);
    let name = format!(r#"sconce_worker_restarts_total{{{slot},reason="wrong_result"}} "#);
    let counted = || async {
        let (_, page) = http_get(format!("{admin}/metrics")).await;
        let line = page.lines().find_map(|line| line.strip_prefix(&name)?.parse::<f64>().ok());
        line.filter(|count| *count >= 2.0).map(drop)
    };
    until("they are counted by their reason", counted).await;
    assert_eq!(sconce.logged("worker ready"), 0, "{}", sconce.log());
    fs::remove_file(&state).expect("the file");
    sconce.wait_for_log("worker ready").await;
    assert_eq!(sconce.stop().await, 0);
}
