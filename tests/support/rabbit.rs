//! RabbitMQ nodes of the test process: one that all tests share, and private ones to break. Each is
//! started by a small `sh` that holds the node's life: when its stdin ends, because the test process
//! is gone in whatever way, it kills the node and removes its folder.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::engine::{Engine, Place};
use super::wait::until;

/// Long, because several nodes may be starting on a machine that is busy with other things too.
const BOOT: Duration = Duration::from_secs(240);

/// For which an expression may fail in a node that has just taken its first connection.
const EVAL: Duration = Duration::from_secs(10);

/// One node.
pub struct Rabbit {
    keeper: Mutex<Keeper>,
    folder: PathBuf,
    name: String,
    environment: Vec<(&'static str, String)>,
    port: u16,
    tls_port: Option<u16>,
}

struct Keeper {
    child: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// How a private node is to be set up.
#[derive(Default)]
pub struct Conf {
    lines: String,
    tls: bool,
    cookie: Option<String>,
}

/// What a queue holds, by the broker's own account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    pub ready: u64,
    pub unacked: u64,
    pub consumers: u64,
}

impl Conf {
    /// A line of `rabbitmq.conf`.
    pub fn line(mut self, key: &str, value: impl std::fmt::Display) -> Self {
        let _ = writeln!(self.lines, "{key} = {value}");
        self
    }

    /// The secret by which nodes of a cluster know each other.
    pub fn cookie(mut self, cookie: &str) -> Self {
        self.cookie = Some(cookie.to_owned());
        self
    }

    /// Listens for TLS too; the certificates are further lines.
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }
}

impl Rabbit {
    /// The node that all tests of this process share, started at the first call.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Rabbit> = OnceLock::new();
        SHARED.get_or_init(Self::private)
    }

    /// A node of the caller's own.
    pub fn private() -> Self {
        Self::private_with(Conf::default())
    }

    /// A node of the caller's own, set up its way.
    pub fn private_with(conf: Conf) -> Self {
        let rabbit = Self::stopped(conf);
        rabbit.start();
        rabbit
    }

    /// A node that has an address but does not run yet.
    pub fn stopped(conf: Conf) -> Self {
        let [port, distribution, tls_port] = free_ports();
        let name = format!("sconce-{}-{port}@localhost", std::process::id());
        // Not a TempDir: a killed process would leave it behind, the keeper removes it always.
        let folder = tempfile::Builder::new().prefix("sconce-rabbit-").tempdir().expect("a folder").keep();
        let mut lines = format!("loopback_users = none\nlog.file.level = info\n{}", conf.lines);
        if conf.tls {
            let _ = writeln!(lines, "listeners.ssl.default = 127.0.0.1:{tls_port}");
        }
        fs::write(folder.join("rabbitmq.conf"), lines).expect("a settings file");
        if let Some(cookie) = conf.cookie {
            let file = folder.join(".erlang.cookie");
            fs::write(&file, cookie).expect("a cookie");
            fs::set_permissions(&file, fs::Permissions::from_mode(0o400)).expect("a cookie");
        }
        let mut environment = environment(&folder, &name);
        environment.push(("RABBITMQ_NODE_PORT", port.to_string()));
        environment.push(("RABBITMQ_DIST_PORT", distribution.to_string()));
        let place = Place { folder: &folder, container: container(&name), environment: &environment };
        let mut child = Engine::chosen().keeper(&place);
        let commands = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("a pipe"));
        let keeper = Mutex::new(Keeper { child, commands, answers });
        let tls_port = conf.tls.then_some(tls_port);
        Self { keeper, folder, name, environment, port, tls_port }
    }

    /// Starts the node, for the first time or again, and waits until it takes connections.
    pub fn start(&self) {
        self.command("start");
        let begun = Instant::now();
        while !self.runs() {
            let failed = begun.elapsed() > BOOT || self.log().contains("BOOT FAILED");
            assert!(!failed, "RabbitMQ does not start:\n{}", self.log());
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// `kill -9`.
    pub fn kill(&self) {
        self.command("kill");
    }

    /// The address for the user `guest` and the virtual host `/`.
    pub fn url(&self) -> String {
        self.url_for("guest:guest", "/")
    }

    /// The address for `user:password` and a virtual host.
    pub fn url_for(&self, user: &str, vhost: &str) -> String {
        format!("amqp://{user}@127.0.0.1:{}/{}", self.port, vhost.replace('/', "%2f"))
    }

    /// The address over TLS, of a node that has it.
    pub fn tls_url(&self) -> String {
        format!("amqps://guest:guest@localhost:{}/%2f", self.tls_port.expect("Conf::tls"))
    }

    /// Its name in its cluster.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Runs `rabbitmqctl`, and gives what it prints; panics where it fails.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        let begun = Instant::now();
        loop {
            match self.try_ctl(arguments) {
                Ok(printed) => return printed,
                // It takes connections a moment before it says of itself that it runs.
                Err(error) if error.contains("requires the 'rabbit' app to be running") => {
                    assert!(begun.elapsed() < BOOT, "rabbitmqctl {arguments:?}: {error}");
                }
                Err(error) => panic!("rabbitmqctl {arguments:?}: {error}"),
            }
        }
    }

    fn try_ctl(&self, arguments: &[&str]) -> Result<String, String> {
        let (folder, container) = (&self.folder, container(&self.name));
        let output = Engine::chosen()
            .ctl(&Place { folder, container, environment: &self.environment })
            .args(["-q", "--timeout", "60"])
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .expect("rabbitmqctl");
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let (out, error) = (text(&output.stdout), text(&output.stderr));
        if output.status.success() { Ok(out) } else { Err(out + &error) }
    }

    /// Evaluates an Erlang expression in the node, and gives its value as text. This takes milliseconds, where
    /// `rabbitmqctl` starts a virtual machine of its own, and computes for a second.
    pub fn eval(&self, expression: &str) -> String {
        let begun = Instant::now();
        loop {
            let (folder, container) = (&self.folder, container(&self.name));
            let place = Place { folder, container, environment: &self.environment };
            let spawned = Engine::chosen().erl_call(&place, &self.name).and_then(|mut erl_call| {
                erl_call.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().ok()
            });
            let Some(mut erl_call) = spawned else {
                return self.ctl(&["eval", expression]).trim().to_owned();
            };
            let mut input = erl_call.stdin.take().expect("a pipe");
            // A node that takes no connection yet is told by the output.
            let _ = writeln!(input, "{expression}");
            drop(input);
            let output = erl_call.wait_with_output().expect("erl_call");
            let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
            if let Some(value) = said.trim().strip_prefix("{ok,").and_then(|it| it.strip_suffix('}')) {
                return value.trim().to_owned();
            }
            assert!(begun.elapsed() < EVAL, "{expression}: {said}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Items of a queue of the virtual host `/`, as a tuple of what `rabbitmqctl list_queues` names so; none when the queue
    /// does not exist.
    pub fn queue_info(&self, queue: &str, items: &str) -> Option<String> {
        let info = self.eval(&format!(
            "case rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, <<\"{queue}\">>)) of \
             {{ok, Q}} -> list_to_tuple([V || {{_, V}} <- rabbit_amqqueue:info(Q, [{items}])]); _ -> none end."
        ));
        (info != "none").then_some(info)
    }

    /// Makes a user of the virtual host `/` that may configure, write and read what these expressions match.
    pub fn add_user(&self, name: &str, password: &str, permissions: [&str; 3]) {
        let (name, password) = (binary(name), binary(password));
        let [configure, write, read] = permissions.map(binary);
        let done = self.eval(&format!(
            "ok = rabbit_auth_backend_internal:add_user({name}, {password}, <<\"test\">>), \
             rabbit_auth_backend_internal:set_permissions({name}, <<\"/\">>, {configure}, {write}, {read}, <<\"test\">>)."
        ));
        assert_eq!(done, "ok");
    }

    /// Changes what a user of the virtual host `/` may configure, write and read.
    pub fn set_permissions(&self, name: &str, permissions: [&str; 3]) {
        let name = binary(name);
        let [configure, write, read] = permissions.map(binary);
        self.eval(&format!(
            "ok = rabbit_auth_backend_internal:set_permissions({name}, <<\"/\">>, {configure}, {write}, {read}, \
             <<\"test\">>)."
        ));
    }

    /// Sets with which routing keys a user may publish to a topic exchange of the virtual host `/`, and bind queues to it.
    pub fn set_topic_permissions(&self, name: &str, exchange: &str, permissions: [&str; 2]) {
        let (name, exchange) = (binary(name), binary(exchange));
        let [write, read] = permissions.map(binary);
        self.eval(&format!(
            "ok = rabbit_auth_backend_internal:set_topic_permissions({name}, <<\"/\">>, {exchange}, {write}, {read}, \
             <<\"test\">>)."
        ));
    }

    /// Lets a user have at most so many connections, or any number.
    pub fn limit_connections(&self, name: &str, most: Option<u32>) {
        let name = binary(name);
        let backend = "ok = rabbit_auth_backend_internal";
        self.eval(&match most {
            Some(most) => format!(
                "{backend}:set_user_limits({name}, <<\"{{\\\"max-connections\\\": {most}}}\">>, <<\"test\">>)."
            ),
            None => format!("{backend}:clear_user_limits({name}, <<\"max-connections\">>, <<\"test\">>)."),
        });
    }

    /// Sets the share of the machine's memory above which the node takes no messages.
    pub fn set_memory_watermark(&self, share: f64) {
        self.eval(&format!("ok = vm_memory_monitor:set_vm_memory_high_watermark({share:.9})."));
    }

    /// Makes the node, which is new, one of the cluster of another one.
    pub fn join(&self, other: &Self) {
        // RabbitMQ 3.10 has no module `rabbit_db_cluster`.
        self.eval(&format!(
            "rabbit:stop(), ok = case code:ensure_loaded(rabbit_db_cluster) of \
             {{module, Module}} -> Module:join('{name}', disc); \
             _ -> rabbit_mnesia:join_cluster('{name}', disc) end, ok = rabbit:start().",
            name = other.name
        ));
    }

    /// The channel and the prefetch of a queue's consumer; none unless it is the only one.
    pub fn only_consumer(&self, queue: &str) -> Option<(String, u32)> {
        let consumer = self.eval(&format!(
            "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, <<\"{queue}\">>)), \
             case rabbit_amqqueue:consumers(Q) of \
             [C] -> {{pid_to_list(element(1, C)), element(4, C)}}; _ -> none end."
        ));
        let (channel, prefetch) = consumer.trim_matches(['{', '}']).split_once(',')?;
        Some((channel.trim_matches('"').to_owned(), prefetch.trim().parse().expect("a number")))
    }

    /// The connection of a channel.
    pub fn connection_of(&self, channel: &str) -> String {
        self.eval(&format!(
            "[{{connection, C}}] = rabbit_channel:info(list_to_pid(\"{channel}\"), [connection]), pid_to_list(C)."
        ))
    }

    /// Changes the password of a user.
    pub fn change_password(&self, name: &str, password: &str) {
        let (name, password) = (binary(name), binary(password));
        self.eval(&format!(
            "rabbit_auth_backend_internal:change_password({name}, {password}, <<\"test\">>)."
        ));
    }

    /// What a queue of the virtual host `/` holds; none when it does not exist. Counts of quorum
    /// queues are some seconds old.
    pub fn stats(&self, queue: &str) -> Option<Stats> {
        let info = self.queue_info(queue, "messages_ready, messages_unacknowledged, consumers")?;
        let numbers: Vec<u64> =
            info.trim_matches(['{', '}']).split(',').filter_map(|it| it.trim().parse().ok()).collect();
        let [ready, unacked, consumers] = numbers[..] else { return None };
        Some(Stats { ready, unacked, consumers })
    }

    /// Waits until [`Rabbit::stats`] are so.
    pub async fn stats_become(&self, queue: &str, wanted: Stats) {
        let mut last = None;
        until(&format!("{queue} holds {wanted:?}"), || {
            last = self.stats(queue);
            let reached = last == Some(wanted);
            async move { reached.then_some(()) }
        })
        .await;
    }

    /// Closes every client connection whose name contains `name`, and says how many there were.
    pub fn cut(&self, name: &str) -> usize {
        let closed = self.eval(&format!(
            "length([rabbit_networking:close_connection(Pid, \"cut by a test\") || \
             [{{pid, Pid}}, {{client_properties, Properties}}] <- \
             rabbit_networking:connection_info_all([pid, client_properties]), \
             string:find(io_lib:format(\"~0p\", [Properties]), \"{name}\") =/= nomatch])."
        ));
        closed.parse().expect("a number")
    }

    /// The node's own log.
    pub fn log(&self) -> String {
        let mut log = fs::read_to_string(self.folder.join("out")).unwrap_or_default();
        for file in fs::read_dir(self.folder.join("log")).into_iter().flatten().flatten() {
            log.push_str(&fs::read_to_string(file.path()).unwrap_or_default());
        }
        log
    }

    fn command(&self, command: &str) {
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        let commands = keeper.commands.as_mut().expect("an open pipe");
        writeln!(commands, "{command}").expect("the keeper");
        commands.flush().expect("the keeper");
        let mut answer = String::new();
        keeper.answers.read_line(&mut answer).expect("the keeper");
    }

    /// Whether it takes connections: it says Connection.Start to whoever opens with AMQP's header.
    pub fn runs(&self) -> bool {
        let limit = Some(Duration::from_secs(2));
        let Ok(mut socket) = TcpStream::connect(self.address()) else { return false };
        let mut first = [0];
        socket.set_read_timeout(limit).is_ok()
            && socket.write_all(b"AMQP\x00\x00\x09\x01").is_ok()
            && socket.read_exact(&mut first).is_ok()
            && first == [1]
    }
}

impl Drop for Rabbit {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!(
                "--- end of the log of {} ---\n{}",
                self.name,
                lines[lines.len().saturating_sub(60)..].join("\n")
            );
        }
        let keeper = self.keeper.get_mut().unwrap_or_else(PoisonError::into_inner);
        keeper.commands = None;
        let _ = keeper.child.wait();
    }
}

/// A text in Erlang.
fn binary(text: &str) -> String {
    format!("<<\"{}\">>", text.replace('\\', "\\\\"))
}

/// The container of a node: its name without the host.
fn container(name: &str) -> &str {
    name.split('@').next().unwrap_or(name)
}

fn environment(folder: &Path, name: &str) -> Vec<(&'static str, String)> {
    let inside = |path: &str| folder.join(path).display().to_string();
    vec![
        ("HOME", inside("")),
        ("RABBITMQ_NODENAME", name.to_owned()),
        ("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1".to_owned()),
        ("RABBITMQ_MNESIA_BASE", inside("data")),
        ("RABBITMQ_LOG_BASE", inside("log")),
        ("RABBITMQ_CONFIG_FILE", inside("rabbitmq")),
        ("RABBITMQ_ENABLED_PLUGINS_FILE", inside("plugins")),
        ("RABBITMQ_PID_FILE", inside("pid")),
        // The node replaces its start script, so that the keeper's `$!` is the node.
        ("RABBITMQ_ALLOW_INPUT", "true".to_owned()),
        ("RABBITMQ_SERVER_START_ARGS", "-noinput".to_owned()),
        // Few schedulers, none of which spins: the tests share the machine with others. The tick is
        // when a channel looks for deliveries that have timed out.
        (
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
            "+S 2:2 +sbwt none -rabbit channel_tick_interval 1000".to_owned(),
        ),
        ("RABBITMQ_CTL_ERL_ARGS", "+S 1:1 +sbwt none".to_owned()),
    ]
}

/// Ports that nobody uses, and that nobody else is given before the node listens: no other node of
/// this process, and no connection, because they lie below the range that the system gives out.
fn free_ports<const N: usize>() -> [u16; N] {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 20_000;
    /// Where a process begins, so that two at a time do not walk through the same ports.
    const STRIDE: u32 = 509;
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id().wrapping_mul(STRIDE);
    let next = || {
        let port = FIRST + begin.wrapping_add(GIVEN.fetch_add(1, Ordering::Relaxed)) % COUNT;
        u16::try_from(port).expect("a port")
    };
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    [(); N].map(|()| (0..COUNT).map(|_| next()).find(is_free).expect("a free port"))
}
