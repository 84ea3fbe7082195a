//! Which RabbitMQ the nodes run: Debian's, or the container image that `SCONCE_TEST_RABBITMQ_IMAGE`
//! names. Decides how a node's process is started, killed and spoken to; a container shares the
//! host's network, user and temporary folder, so that a node looks the same from outside.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// Reads commands; the end of them ends the node. `start`, `stop` and `remove` are the engine's.
const KEEPER: &str = r#"
while read command; do
  case $command in
    start) start "$@"; echo started ;;
    kill) stop; echo killed ;;
  esac
done
stop
remove
rm -rf "$FOLDER"
"#;

/// The folder first that has the scripts which do not switch the user.
const INSTALLED: &str = r#"
PATH=/usr/lib/rabbitmq/bin:$PATH
node=
start() { rabbitmq-server >>"$FOLDER/out" 2>&1 </dev/null & node=$!; }
stop() { [ -z "$node" ] || { kill -9 $node; wait $node; } 2>/dev/null; node=; }
remove() { :; }
"#;

/// `docker run` with its options in front of the image is in `$@`.
const CONTAINER: &str = r#"
start() { docker start "$CONTAINER" >>"$FOLDER/out" 2>&1 </dev/null || "$@" >>"$FOLDER/out" 2>&1 </dev/null; }
stop() { docker kill "$CONTAINER" >/dev/null 2>&1 </dev/null; }
remove() { docker rm -f "$CONTAINER" >/dev/null 2>&1 </dev/null; }
"#;

/// Without a limit, Erlang makes room for as many ports as the engine allows: a billion.
const SERVER: &str = r#"ulimit -n 65536 2>/dev/null
unset RABBITMQ_LOGS; PATH=/usr/lib/rabbitmq/bin:$PATH; exec rabbitmq-server >>"$FOLDER/out" 2>&1"#;
/// Without the node's ports, beside which rabbitmqctl would look for one of its own.
const CTL: &str = r#"unset RABBITMQ_NODE_PORT RABBITMQ_DIST_PORT
PATH=/usr/lib/rabbitmq/bin:$PATH; exec rabbitmqctl "$@""#;

/// Which RabbitMQ a node runs.
pub enum Engine {
    Installed,
    Image(String),
}

/// What a node is started with.
pub struct Place<'a> {
    pub folder: &'a Path,
    /// The container's name.
    pub container: &'a str,
    pub environment: &'a [(&'static str, String)],
}

impl Engine {
    /// The one that all nodes of this process run.
    pub fn chosen() -> &'static Self {
        static CHOSEN: OnceLock<Engine> = OnceLock::new();
        CHOSEN.get_or_init(|| match std::env::var("SCONCE_TEST_RABBITMQ_IMAGE") {
            Ok(image) if !image.is_empty() => Self::Image(image),
            _ => {
                let server = Path::new("/usr/lib/rabbitmq/bin/rabbitmq-server");
                assert!(server.is_file(), "these tests need RabbitMQ: sudo apt-get install rabbitmq-server");
                Self::Installed
            }
        })
    }

    /// The `sh` that holds a node's life; its stdin takes `start` and `kill`, its stdout answers.
    pub fn keeper(&self, place: &Place<'_>) -> Child {
        let functions = match self {
            Self::Installed => INSTALLED,
            Self::Image(_) => CONTAINER,
        };
        let mut sh = Command::new("sh");
        sh.args(["-c", &format!("{functions}{KEEPER}")]).arg("sh");
        sh.env("FOLDER", place.folder);
        match self {
            Self::Installed => drop(sh.envs(place.environment.iter().cloned())),
            Self::Image(image) => {
                share_epmd(image);
                sh.env("CONTAINER", place.container).args(run(image, place));
            }
        }
        sh.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh")
    }

    /// `rabbitmqctl` for a node, without its arguments.
    pub fn ctl(&self, place: &Place<'_>) -> Command {
        let mut command = match self {
            Self::Installed => Command::new("sh"),
            Self::Image(_) => Command::new("docker"),
        };
        match self {
            Self::Installed => drop(command.envs(place.environment.iter().cloned())),
            Self::Image(_) => drop(command.args(["exec", place.container, "sh"])),
        }
        command.args(["-c", CTL, "rabbitmqctl"]);
        command
    }

    /// `erl_call`, which evaluates in a node what it reads; none where the node is in a container, which may lack it.
    pub fn erl_call(&self, place: &Place<'_>, node: &str) -> Option<Command> {
        let Self::Installed = self else { return None };
        let cookie = std::fs::read_to_string(place.folder.join(".erlang.cookie")).ok()?;
        let mut command = Command::new("erl_call");
        command.args(["-sname", node, "-c", cookie.trim(), "-e"]);
        Some(command)
    }
}

/// `docker run …` for a node.
fn run(image: &str, place: &Place<'_>) -> Vec<String> {
    let shared = std::env::temp_dir().display().to_string();
    // What the node writes is ours, and what we wrote is its to read.
    let ours = std::fs::metadata(place.folder).expect("the node's folder");
    let mut words: Vec<String> = ["docker", "run", "-d", "--network", "host"].map(Into::into).into();
    words.extend(["--name".to_owned(), place.container.to_owned()]);
    words.extend(["--user".to_owned(), format!("{}:{}", ours.uid(), ours.gid())]);
    words.extend(["--volume".to_owned(), format!("{shared}:{shared}")]);
    words.extend(["--env".to_owned(), format!("FOLDER={}", place.folder.display())]);
    for (name, value) in place.environment {
        words.extend(["--env".to_owned(), format!("{name}={value}")]);
    }
    words.extend(["--entrypoint", "sh", image, "-c", SERVER].map(Into::into));
    words
}

/// Runs Erlang's port mapper beside the nodes, for as long as this process lives. A node would start
/// one inside its own container, and take it along when it is killed.
fn share_epmd(image: &str) {
    static EPMD: OnceLock<Child> = OnceLock::new();
    EPMD.get_or_init(|| {
        let name = format!("sconce-epmd-{}", std::process::id());
        let script = r#"
docker run -d --rm --name "$0" --network host --entrypoint epmd "$1" >/dev/null 2>&1 </dev/null
echo started
cat >/dev/null
docker rm -f "$0" >/dev/null 2>&1"#;
        let mut sh = Command::new("sh");
        sh.args([OsStr::new("-c"), script.as_ref(), name.as_ref(), image.as_ref()]);
        let mut keeper = sh.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh");
        let answers = keeper.stdout.take().expect("a pipe");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(answers), &mut String::new())
            .expect("docker");
        keeper
    });
}
