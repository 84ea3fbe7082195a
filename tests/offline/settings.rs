//! Settings as a user meets them: which layer wins, and how mistakes are reported.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use sconce::config::{
    Admin, Batch, Broker, CpuFeatures, Devices, Drain, Dtype, Fetch, Launcher, LoadedSettings, Pool, Python,
    Replace, Retry, S3, Secret, Settings, Telemetry, Tls, load, redact_url,
};

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).expect("written");
        path
    }
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    pairs.iter().map(owned).collect()
}

fn url(loaded: &LoadedSettings) -> &str {
    loaded.settings.broker.url[0].expose()
}

/// What is said of one file.
fn problems(text: &str) -> Vec<String> {
    let file = Folder::new();
    let path = file.file("a.toml", text);
    let error = load(&[path], Vec::new(), &[]).expect_err("mistakes");
    error.problems().iter().map(ToString::to_string).collect()
}

fn default_pool() -> Pool {
    Pool {
        name: "embed".to_owned(),
        task_queue: "sconce.tasks".to_owned(),
        background_queue: None,
        queue: Vec::new(),
        reply_queue: Some("sconce.replies".to_owned()),
        dead_letter_queue: "sconce.dead".to_owned(),
        reply_timeout: Duration::from_secs(90),
        large_reply: 1024 * 1024,
        model: "sentence-transformers/all-MiniLM-L6-v2".to_owned(),
        served_names: Vec::new(),
        devices: Devices::Auto,
        workers_per_device: 1,
        threads: None,
        dtype: Some(Dtype::F32),
        cpu_features: CpuFeatures::Auto,
        min_speed: 0.2,
        prefetch: None,
        prefetch_bytes: 64 * 1024 * 1024,
        prepared_bytes: 512 * 1024 * 1024,
        max_body: 8 * 1024 * 1024,
        max_inputs: 2048,
        allowed_sources: Vec::new(),
        fetch: Fetch {
            max_size: 256 << 20,
            timeout: Duration::from_secs(60),
            at_once: 4,
            memory: 1 << 30,
            min_rate: 16 << 10,
        },
        s3: S3 { endpoint: None, region: "us-east-1".into(), access_key_id: None, secret_access_key: None },
        batch: Batch {
            max_tokens: None,
            max_requests: 512,
            max_delay: Duration::from_millis(2),
            timeout: Duration::from_secs(300),
            encode_interval: None,
            encode_batch: None,
        },
        missing_folder: None,
        task: None,
        strict_model: false,
        sentinels: Default::default(),
        drain: Drain::HandBack,
        options: Default::default(),
        python: Python { executable: "python3".into(), path: Vec::new(), env: Default::default() },
        retry: Retry { max_attempts: 3, delay: Duration::from_secs(1), delay_max: Duration::from_secs(60) },
    }
}

#[test]
fn without_anything_written_the_documented_defaults_are_in_force() {
    let loaded = load(&[], Vec::new(), &[]).expect("valid defaults");
    let expected = Settings {
        broker: Broker {
            url: vec![Secret::new("amqp://guest:guest@127.0.0.1:5672/%2f")],
            declare: true,
            delivery_limit: 100,
            heartbeat: Duration::from_secs(20),
            connect_timeout: Duration::from_secs(10),
            confirm_timeout: Duration::from_secs(30),
            give_up_after: Duration::from_secs(600),
            consumer_timeout: Duration::from_secs(1_800),
            tls: Tls { ca_file: None, cert_file: None, key_file: None },
        },
        pools: vec![default_pool()],
        launcher: Launcher {
            name: None,
            shutdown_grace: Duration::from_secs(8),
            restart_delay: Duration::from_millis(500),
            restart_delay_max: Duration::from_secs(30),
            quick_failure: Duration::from_secs(10),
            max_quick_failures: 5,
            poison_deaths: 3,
            recycle_tasks: None,
            recycle_age: None,
            recycle_memory: None,
            replace: Replace::Overlap,
        },
        admin: Admin {
            listen: Some(([127, 0, 0, 1], 9464).into()),
            control_exchange: Some("sconce.control".to_owned()),
        },
        telemetry: Telemetry { otlp_endpoint: None, trace_sample: 1.0 },
    };
    assert_eq!(loaded.settings, expected);
}

#[test]
fn each_layer_wins_over_those_before_it() {
    let folder = Folder::new();
    let first = folder.file("first.toml", "broker.url = 'amqp://first'\nbroker.declare = false");
    let second = folder.file("second.toml", "broker.url = 'amqp://second'");
    let files = [first.clone(), second];
    let platform = ("AMQP_URL", "amqp://platform");
    let own = ("SCONCE_BROKER__URL", "amqp://own");
    let flag = ("broker.url", "amqp://flag");

    let load = |files: &[PathBuf], environment: &[(&str, &str)], flags: &[(&str, &str)]| {
        load(files, pairs(environment), &pairs(flags)).expect("valid settings")
    };
    assert_eq!(url(&load(&files[..1], &[], &[])), "amqp://first");
    assert_eq!(url(&load(&files, &[], &[])), "amqp://second");
    assert_eq!(url(&load(&files, &[platform], &[])), "amqp://platform");
    assert_eq!(url(&load(&files, &[own, platform], &[])), "amqp://own");
    let all = load(&files, &[own, platform], &[flag]);
    assert_eq!(url(&all), "amqp://flag");
    assert!(!all.settings.broker.declare, "what no later layer names stays");

    let line = |start: &str| {
        let line = all.effective.lines().find(|line| line.starts_with(start));
        line.expect("a line").to_owned()
    };
    assert!(line("url").ends_with("# flag --set broker.url"));
    assert!(line("declare").ends_with(&format!("# file {}", first.display())));
    assert!(line("heartbeat").ends_with("# built-in default"));
}

#[test]
fn a_file_replaces_the_list_of_pools_and_leaves_out_what_it_likes() {
    let folder = Folder::new();
    let file = folder.file(
        "pools.toml",
        r#"
        [[pool]]
        name = "embed"
        devices = ["cuda:0"]
        [[pool]]
        name = "rerank"
        task_queue = "rerank.tasks"
        [pool.batch]
        max_delay = "5ms"
        "#,
    );
    let environment = pairs(&[
        ("SCONCE_POOL__1__BATCH__MAX_TOKENS", "9000"),
        ("SCONCE_POOL__1__DEVICES", r#"["cpu","cpu"]"#),
        ("SCONCE_POOL__0__BATCH__MAX_REQUESTS", "64"),
    ]);
    let flags = pairs(&[("pool.0.model", "echo")]);
    let loaded = load(&[file], environment, &flags).expect("valid settings");
    let [embed, rerank] = loaded.settings.pools.as_slice() else {
        panic!("two pools, not {}", loaded.settings.pools.len());
    };
    assert_eq!(embed.model, "echo");
    assert_eq!(embed.batch.max_requests, 64);
    assert_eq!(embed.batch.max_delay, Duration::from_millis(2));
    assert_eq!(rerank.batch.max_delay, Duration::from_millis(5));
    assert_eq!(rerank.batch.max_tokens, Some(9000));
    assert_eq!(rerank.batch.max_requests, 512);
    assert_eq!(rerank.devices, Devices::List(vec!["cpu".to_owned(), "cpu".to_owned()]));
    assert_eq!(rerank.dead_letter_queue, "sconce.dead");
}

#[test]
fn three_mistakes_are_told_at_once_with_path_value_expectation_and_origin() {
    let folder = Folder::new();
    let file = folder.file("bad.toml", "[broker]\nheartbeat = 20\n[[pool]]\nworker_per_device = 2\n");
    let environment = pairs(&[("SCONCE_POOL__0__BATCH__MAX_REQUESTS", "many")]);
    let error = load(std::slice::from_ref(&file), environment, &[]).expect_err("three mistakes");
    let file = file.display();
    assert_eq!(
        error.to_string(),
        format!(
            "3 problems in the settings:\n  \
             broker.heartbeat = 20: expected a duration with its unit, such as \"500ms\", \"20s\", \
             \"1m30s\" or \"1h\" (file {file})\n  \
             pool[0].batch.max_requests = \"many\": expected a whole number from 1 to 1000000 \
             (environment variable SCONCE_POOL__0__BATCH__MAX_REQUESTS)\n  \
             pool[0].worker_per_device: unknown key; did you mean `workers_per_device`? \
             (file {file})"
        )
    );
}

#[test]
fn two_pools_may_share_neither_name_nor_task_queue() {
    let said = problems("[[pool]]\nname = 'a'\n[[pool]]\nname = 'a'");
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].starts_with("pool[1].name = \"a\": expected a name of its own"), "{}", said[0]);
    let said = problems("[[pool]]\nname = 'a'\n[[pool]]\nname = 'b'\ntask_queue = 'sconce.tasks'");
    let [said] = &said[..] else { panic!("{said:?}") };
    let start = "pool[1].task_queue = \"sconce.tasks\": expected a task_queue of its own for each pool: \
                 pool[0].task_queue of the pool \"a\" (built-in default) and pool[1].task_queue of the pool \"b\" (file ";
    assert!(said.starts_with(start) && said.ends_with("a.toml) are the same"), "{said}");
}

#[test]
fn a_background_queue_that_is_another_pools_queue_names_both_pools() {
    let said =
        problems("[[pool]]\nname = 'a'\ntask_queue = 'q'\n[[pool]]\nname = 'b'\nbackground_queue = 'q'");
    let [said] = &said[..] else { panic!("{said:?}") };
    assert!(
        said.starts_with("pool[1].background_queue = \"q\": expected a background_queue of its own"),
        "{said}"
    );
    assert!(said.contains("pool[0].task_queue of the pool \"a\" (file "), "{said}");
    assert!(said.contains("pool[1].background_queue of the pool \"b\" (file "), "{said}");
}

#[test]
fn a_section_of_the_wrong_shape_is_one_problem() {
    for (text, complaint) in [
        ("broker = 'amqp://me:pw@h'", "broker = \"amqp://me:***@h\": expected a section"),
        ("launcher = 3", "launcher = 3: expected a section"),
        ("pool = []", "pool = []: expected at least one [[pool]]"),
        ("pool = [1]", "pool[0] = 1: expected a section"),
        ("[pool]\nname = 'a'", "pool = {…}: expected at least one [[pool]]"),
        ("[[pool]]\nbatch = 512", "pool[0].batch = 512: expected a section"),
        ("[broker.tsl]\nca_file = 'a'", "broker.tsl: unknown key; did you mean `tls`?"),
        ("[borker]\nurl = 'a'", "borker: unknown key; did you mean `broker`?"),
    ] {
        let said = problems(text);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with(complaint), "{}", said[0]);
        assert!(said[0].contains("a.toml)"), "{}", said[0]);
    }
}

#[test]
fn an_empty_variable_counts_as_set_except_the_platforms_address() {
    let error = load(&[], pairs(&[("SCONCE_BROKER__URL", "")]), &[]).expect_err("empty");
    assert!(error.to_string().contains("broker.url = \"\": expected an address"));
    let loaded = load(&[], pairs(&[("AMQP_URL", "")]), &[]).expect("absent");
    assert_eq!(url(&loaded), "amqp://guest:guest@127.0.0.1:5672/%2f");
}

#[test]
fn a_pool_is_never_made_by_a_variable() {
    let environment = pairs(&[("SCONCE_POOL__1__MODEL", "echo")]);
    let error = load(&[], environment, &[]).expect_err("no such pool").to_string();
    assert!(error.contains("SCONCE_POOL__1__MODEL: there is 1 pool, pool[0]"), "{error}");
}

#[test]
fn misplaced_variables_are_reported_with_the_mistakes_in_values() {
    let environment = pairs(&[("SCONCE_BROKER__UHL", "x"), ("SCONCE_BROKER__DECLARE", "x")]);
    let error = load(&[], environment, &[]).expect_err("two mistakes");
    assert_eq!(error.problems().len(), 2, "{error}");
}

#[test]
fn no_password_leaves_through_a_problem_or_a_debug_print() {
    for url in [
        "amqp://me:hunter2@host:port",
        "amqp://me:hun/hunter2@host",
        "amqps://me:hunter2",
        "http://me:hunter2@host",
        "[\"amqp://me:hunter2@host\"",
        "amqp://me:x,hunter2@ho st,amqp://me:hunter2@h2",
    ] {
        let error = load(&[], pairs(&[("AMQP_URL", url)]), &[]).expect_err(url);
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        assert!(!redact_url(url).contains("hunter2"));
    }
    let loaded = load(&[], pairs(&[("AMQP_URL", "amqp://me:hunter2@h")]), &[]);
    let loaded = loaded.expect("valid settings");
    assert!(!format!("{loaded:?}").contains("hunter2"));
}

#[test]
fn the_further_pools_of_the_compose_file_are_valid_once_their_marks_are_removed() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/config/compose/sconce.toml");
    let text = std::fs::read_to_string(path).expect("the settings of the containers");
    let first = text.find("# [[pool]]").expect("further pools");
    let folder = Folder::new();
    let further: String =
        text[first..].lines().map(|line| format!("{}\n", line.trim_start_matches("# "))).collect();
    let file = folder.file("sconce.toml", &format!("{}{further}", &text[..first]));
    let loaded = load(&[file], Vec::new(), &[]).expect("a valid file");
    let names: Vec<&str> = loaded.settings.pools.iter().map(|pool| pool.name.as_str()).collect();
    assert_eq!(names, ["embed", "speech", "speak"]);
}

#[test]
fn the_file_of_several_pools_is_valid() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/config/pools.toml"));
    let loaded = load(&[path], Vec::new(), &[]).expect("a valid file");
    let names: Vec<&str> = loaded.settings.pools.iter().map(|pool| pool.name.as_str()).collect();
    assert_eq!(names, ["embed", "rerank", "images", "speech", "speak", "text", "sparse"]);
    // The folders do not depend on the current folder.
    for (pool, folder) in
        [(0, "all-MiniLM-L6-v2"), (2, "efficientnet-lite0"), (3, "whisper-tiny.en"), (4, "hibari")]
    {
        let found = loaded.model_folder(pool).expect("a pool");
        assert_eq!(found, PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models").join(folder));
    }
}
