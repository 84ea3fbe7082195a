//! Tests of the settings' rules, and of the generated default file.

use super::super::{default_file, load};
use super::{Devices, Pool};

/// The problems of settings with these flags.
fn problems_with(flags: &[(&str, &str)]) -> Vec<String> {
    let flags: Vec<_> = flags.iter().map(|(path, value)| ((*path).to_owned(), (*value).to_owned())).collect();
    match load(&[], Vec::new(), &flags) {
        Ok(_) => Vec::new(),
        Err(error) => error.problems().iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn values_out_of_bounds_are_refused_with_what_was_expected() {
    for (path, value, expected) in [
        ("broker.url", "http://h", "an address with amqp://"),
        ("broker.declare", "yes", "true or false"),
        ("broker.delivery_limit", "0", "a whole number from 1"),
        ("broker.heartbeat", "0s", "a duration from 1s to 18h12m15s"),
        ("broker.heartbeat", "1500ms", "a duration in whole seconds"),
        ("broker.connect_timeout", "10", "a duration with its unit"),
        ("broker.confirm_timeout", "0s", "a duration from 1ms"),
        ("broker.give_up_after", "", "a duration with its unit"),
        ("broker.consumer_timeout", "0s", "a duration from 1ms"),
        ("pool[0].name", "", "a name that is not empty"),
        ("pool[0].model", "", "a name that is not empty"),
        ("pool[0].task_queue", "", "the name of a queue"),
        ("pool[0].dead_letter_queue", "", "the name of a queue"),
        ("pool[0].reply_queue", "amq.reply", "a queue name that does not start"),
        ("pool[0].served_names", "a,,b", "a list without empty names"),
        ("pool[0].devices", "", "\"auto\", or a list of devices"),
        ("pool[0].devices", "[]", "\"auto\", or a list of devices"),
        ("pool[0].devices", "cpu,,cpu", "\"auto\", or a list of devices"),
        ("pool[0].devices", "auto,cpu", "\"auto\", or a list of devices"),
        ("pool[0].devices", "cuda:1,cpu,cuda:1", "each GPU once, not cuda:1"),
        ("pool[0].workers_per_device", "0", "a whole number from 1"),
        ("pool[0].threads", "0", "\"auto\" or a whole number from 1"),
        ("pool[0].prefetch", "2001", "\"auto\" or a whole number from 1 to 2000"),
        ("pool[0].max_body", "8", "a size with its unit"),
        ("pool[0].max_body", "0B", "a size from 1B to 512MiB"),
        ("pool[0].max_inputs", "-1", "a whole number from 1"),
        ("pool[0].allowed_sources", "https://host/in", "URLs of the form scheme://host:port/path/"),
        ("pool[0].fetch.at_once", "0", "a whole number from 1 to 64"),
        ("pool[0].s3.endpoint", "minio", "\"\", or an address such as"),
        ("pool[0].s3.access_key_id", "AKIA", "both access_key_id and secret_access_key"),
        ("pool[0].batch.max_tokens", "lots", "\"auto\" or a whole number from 1"),
        ("pool[0].batch.max_requests", "0", "a whole number from 1"),
        ("pool[0].batch.max_delay", "2m", "a duration from 0s to 1m"),
        ("launcher.shutdown_grace", "0s", "a duration from 1ms"),
        ("launcher.restart_delay", "soon", "a duration with its unit"),
        ("launcher.max_quick_failures", "0", "a whole number from 1"),
        ("launcher.poison_deaths", "0", "a whole number from 1"),
        ("launcher.recycle_tasks", "0", "\"never\" or a whole number"),
        ("launcher.recycle_age", "0s", "\"never\" or a duration from 1ms"),
        ("launcher.recycle_memory", "0B", "\"never\" or a size from 1B"),
        ("launcher.replace", "sometimes", "\"overlap\" or \"in_turn\""),
        ("admin.listen", "9464", "an address and a port"),
        ("admin.listen", "localhost:9464", "an address and a port"),
        ("admin.control_exchange", "amq.topic", "a name that does not start with `amq.`"),
        ("pool[0].batch.timeout", "0s", "a duration from 1ms"),
        ("telemetry.otlp_endpoint", "127.0.0.1:4318", "\"\", or an address with http:// or https://"),
        ("telemetry.otlp_endpoint", "http://me:0", "an address whose port is a number"),
        ("telemetry.trace_sample", "1.5", "a number from 0 to 1"),
        ("pool[0].retry.max_attempts", "101", "a whole number from 1 to 100"),
        ("pool[0].retry.delay", "0s", "a duration from 1ms"),
        ("pool[0].retry.delay_max", "999ms", "at least pool[0].retry.delay = \"1s\""),
    ] {
        let problems = problems_with(&[(path, value)]);
        let start = format!("{path} = \"{value}\": expected {expected}");
        let end = format!("(flag --set {path})");
        assert_eq!(problems.len(), 1, "{path} {value}: {problems:?}");
        assert!(problems[0].starts_with(&start), "{} != {start}", problems[0]);
        assert!(problems[0].ends_with(&end), "{}", problems[0]);
    }
}

#[test]
fn values_at_their_bounds_are_accepted() {
    for (path, value) in [
        ("broker.declare", "false"),
        ("broker.heartbeat", "1s"),
        ("pool[0].reply_queue", ""),
        ("pool[0].reply_queue", &"q".repeat(255)),
        ("pool[0].task_queue", &"q".repeat(236)),
        ("pool[0].devices", "cpu,cpu"),
        ("pool[0].devices", "cuda:0"),
        ("pool[0].prefetch", "2000"),
        ("pool[0].prefetch", "512"),
        ("pool[0].max_body", "512MiB"),
        ("pool[0].allowed_sources", "file:///data/,s3://bucket/"),
        ("pool[0].batch.max_tokens", "auto"),
        ("pool[0].batch.max_delay", "0ms"),
        ("admin.listen", ""),
        ("admin.listen", "[::]:0"),
        ("admin.control_exchange", ""),
        ("launcher.replace", "in_turn"),
        ("launcher.recycle_tasks", "never"),
        ("launcher.recycle_memory", "1GiB"),
    ] {
        assert_eq!(problems_with(&[(path, value)]), Vec::<String>::new());
    }
    let long = "ü".repeat(128);
    let problems = problems_with(&[("pool[0].task_queue", &long)]);
    assert!(problems[0].contains("at most 236 bytes"), "{}", problems[0]);
}

#[test]
fn a_prefetch_too_small_to_fill_a_batch_names_both_settings() {
    let problems = problems_with(&[("pool[0].prefetch", "16"), ("pool[0].batch.max_requests", "17")]);
    assert!(problems[0].starts_with("pool[0].prefetch = 16: expected \"auto\" or at least"));
    assert!(problems[0].contains("pool[0].batch.max_requests = 17"), "{}", problems[0]);
    let alone = problems_with(&[("pool[0].prefetch", "16")]);
    assert_eq!(alone, Vec::<String>::new(), "max_requests = 512 is only the default");
}

#[test]
fn replies_and_dead_letters_must_not_go_to_the_task_queue() {
    for key in ["pool[0].reply_queue", "pool[0].dead_letter_queue"] {
        let problems = problems_with(&[(key, "sconce.tasks")]);
        let start = format!("{key} = \"sconce.tasks\": expected a queue other than");
        assert_eq!(problems.len(), 1);
        assert!(problems[0].starts_with(&start), "{}", problems[0]);
        assert!(problems[0].contains("pool[0].task_queue (built-in default)"));
    }
}

#[test]
fn queues_are_written_in_one_of_two_ways_and_their_form_is_checked() {
    let two = "[{name = \"a\"}, {name = \"b\", share = 2.5, background = true}]";
    assert_eq!(problems_with(&[("pool[0].queue", two)]), Vec::<String>::new());
    for key in ["task_queue", "background_queue"] {
        let problems = problems_with(&[("pool[0].queue", two), (&format!("pool[0].{key}"), "x")]);
        assert_eq!(problems.len(), 1);
        assert!(problems[0].starts_with(&format!("pool[0].{key} = \"x\": expected to be left out")));
        assert!(problems[0].contains("pool[0].queue ([[pool.queue]], "), "{}", problems[0]);
    }
    let many =
        format!("[{}]", (0..33).map(|n| format!("{{name = \"q{n}\"}}")).collect::<Vec<_>>().join(", "));
    for (written, expected) in [
        ("x", "a list of queues"),
        ("[{share = 1}]", "a name for each queue"),
        ("[{name = \"amq.x\"}]", "does not start with `amq.`"),
        ("[{name = \"a\", share = 0}]", "share of \"a\" to be a number from 0.001 to 1000"),
        ("[{name = \"a\", share = -1}]", "share of \"a\""),
        ("[{name = \"a\", background = 1}]", "background of \"a\" to be true or false"),
        ("[{name = \"a\", prefetch = 1}]", "got prefetch"),
        ("[{name = \"a\"}, {name = \"a\"}]", "got \"a\" twice"),
        (&many, "at most 32 queues, got 33"),
    ] {
        let problems = problems_with(&[("pool[0].queue", written)]);
        assert_eq!(problems.len(), 1, "{written}");
        assert!(problems[0].contains(expected), "{}", problems[0]);
    }
    let problems = problems_with(&[("pool[0].queue", two), ("pool[0].dead_letter_queue", "b")]);
    assert!(problems[0].contains("a queue other than pool[0].queue"), "{}", problems[0]);
}

#[test]
fn the_short_forms_follow_from_a_list_of_queues() {
    let pool = |settings: &[(&str, &str)]| {
        let flags: Vec<_> = settings.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        load(&[], [], &flags).unwrap().settings.pools.remove(0)
    };
    let names = |pool: &Pool| pool.queues().into_iter().map(|it| it.name).collect::<Vec<_>>();
    let listed = pool(&[("pool[0].queue", "[{name = \"a\"}, {name = \"b\", background = true}]")]);
    assert_eq!((listed.task_queue.as_str(), listed.background_queue.as_deref()), ("a", None));
    assert_eq!(names(&listed), ["a", "b"]);
    assert!(!listed.queues()[1].returns_to_first);
    let short = pool(&[("pool[0].background_queue", "b")]);
    assert_eq!(names(&short), ["sconce.tasks", "b"]);
    assert!(short.queues()[1].returns_to_first && short.queues()[1].background);
    assert_eq!(short.queue_prefetch_bytes(), short.prefetch_bytes / 2);
}

#[test]
fn settings_that_mean_nothing_for_a_class_in_python_are_refused_by_name() {
    let others = [
        ("pool[0].task", "rerank"),
        ("pool[0].strict_model", "true"),
        ("pool[0].cpu_features", "avx2"),
        ("pool[0].min_speed", "0.5"),
        ("pool[0].allowed_sources", "https://host/in/"),
        ("pool[0].batch.encode_interval", "4"),
        ("pool[0].batch.encode_batch", "4"),
    ];
    assert_eq!(problems_with(&others), Vec::<String>::new());
    let problems =
        problems_with(&[&others[..], &[("pool[0].model", "python:shop.models:Embedder")]].concat());
    assert_eq!(problems.len(), others.len(), "{problems:?}");
    for ((path, _), problem) in others.iter().zip(&problems) {
        let expected = format!("{path}: expected to be left out: it means nothing for a class in Python");
        assert!(problem.starts_with(&expected), "{problem}");
    }
    let defaults =
        [("pool[0].model", "python:m:C"), ("pool[0].task", "auto"), ("pool[0].strict_model", "false")];
    assert_eq!(problems_with(&defaults), Vec::<String>::new());
}

#[test]
fn an_option_of_a_model_that_is_no_finite_number_is_refused_by_name() {
    for (name, value) in
        [("ratio", "inf"), ("ratio", "-inf"), ("ratios", "[1.0, nan]"), ("table", "{ a = inf }")]
    {
        let path = format!("pool[0].options.{name}");
        let problems = problems_with(&[(path.as_str(), value)]);
        assert_eq!(problems.len(), 1, "{name} = {value}: {problems:?}");
        assert!(problems[0].starts_with(&path), "{problems:?}");
        assert!(problems[0].contains("expected numbers that are finite"), "{problems:?}");
    }
}

#[test]
fn a_certificate_and_its_key_come_together() {
    for (written, missing) in [("cert_file", "key_file"), ("key_file", "cert_file")] {
        let written = format!("broker.tls.{written}");
        let problems = problems_with(&[(&written, "a.pem")]);
        assert_eq!(problems.len(), 1);
        let start = format!("broker.tls.{missing} = \"\": expected a file, as {written}");
        assert!(problems[0].starts_with(&start), "{}", problems[0]);
    }
}

#[test]
fn the_restart_delay_must_not_exceed_its_ceiling() {
    let problems = problems_with(&[("launcher.restart_delay", "31s")]);
    let expected = "launcher.restart_delay_max = \"30s\": expected at least \
                    launcher.restart_delay = \"31s\" (flag --set launcher.restart_delay) \
                    (built-in default)";
    assert_eq!(problems, vec![expected.to_owned()]);
}

#[test]
fn one_device_without_a_comma_is_a_list_of_one() {
    let flags = [("pool[0].devices".to_owned(), "cuda:1".to_owned())];
    let loaded = load(&[], Vec::new(), &flags).expect("valid");
    let expected = Devices::List(vec!["cuda:1".to_owned()]);
    assert_eq!(loaded.settings.pools[0].devices, expected);
}

#[test]
fn the_default_file_is_made_from_the_definitions() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/config/default.toml");
    // `make default-settings` writes it.
    if std::env::var_os("WRITE_DEFAULT_SETTINGS").is_some() {
        std::fs::write(path, default_file()).expect("written");
    }
    let file = std::fs::read_to_string(path).expect("the file");
    assert!(file == default_file(), "config/default.toml is out of date: run `make default-settings`");
}
