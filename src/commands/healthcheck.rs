//! `sconce healthcheck`: queries a launcher's health over HTTP. Without `--url` it accepts only the answer of its own
//! launcher: the one that the settings name, or the only one of this host with the port of `admin.listen`.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, anyhow};

use super::{load, tolerate_broken_pipe};
use crate::admin::{Check, LAUNCHER_HEADER};
use crate::cli::Healthcheck;
use crate::commands::exits::ExitsWith as _;
use crate::launcher::launchers_at;
use crate::shutdown::Exit;

/// Prints the launcher's answer. Returns exit code 0 if the check passes, and 1 if it fails.
pub(super) fn run(arguments: &Healthcheck) -> anyhow::Result<Exit> {
    let (base, expected_name) = match &arguments.url {
        Some(url) if url.contains("://") => (url.trim_end_matches('/').to_owned(), None),
        Some(address) => (format!("http://{}", address.trim_end_matches('/')), None),
        None => {
            let settings = load(&arguments.settings, &[])?.settings;
            let address = settings
                .admin
                .listen
                .context("admin.listen = \"\": the launcher does not serve its health over HTTP");
            let address = address.exits_with(Exit::Config)?;
            let name = launcher_name(settings.launcher.name, address)?;
            (format!("http://{}", reachable(address)), Some(name))
        }
    };
    if base.split_once("://").is_some_and(|(_, rest)| rest.contains('/')) {
        let message =
            format!("--url is an address without a path, such as http://gpu1:9464, and not {base:?}");
        return Err(anyhow!(message).exits_with(Exit::Usage));
    }
    let check = match (arguments.live, arguments.startup) {
        (true, _) => Check::Live,
        (_, true) => Check::Startup,
        _ => Check::Ready,
    };
    let url = format!("{base}{}", check.path());
    let agent = ureq::AgentBuilder::new().timeout(arguments.timeout).build();
    let (answer, exit) = match agent.get(&url).call() {
        Ok(answer) => (answer, Exit::Done),
        Err(ureq::Error::Status(_, answer)) => (answer, Exit::Refused),
        Err(error) => return Err(anyhow!("{error}; is a launcher running there?").exits_with(Exit::Refused)),
    };
    // Another process may have taken this address, possibly another launcher.
    match (answer.header(LAUNCHER_HEADER), expected_name) {
        (None, _) => return Err(anyhow!("{base} answers, but is no launcher").exits_with(Exit::Refused)),
        (Some(name), Some(expected)) if name != expected => {
            return Err(
                anyhow!("{base} is the launcher {name:?}, not {expected:?}").exits_with(Exit::Refused)
            );
        }
        _ => {}
    }
    let text = answer
        .into_string()
        .with_context(|| format!("{url}: unreadable answer"))
        .exits_with(Exit::Refused)?;
    tolerate_broken_pipe(write!(std::io::stdout(), "{text}"))?;
    Ok(exit)
}

/// The name of the launcher whose health is checked: `launcher.name` of the settings, or else the name of the only
/// running launcher of this host with the port of `address`.
fn launcher_name(configured: Option<String>, address: SocketAddr) -> anyhow::Result<String> {
    if let Some(name) = configured {
        return Ok(name);
    }
    let names =
        launchers_at(address.port()).context("/proc/net/unix cannot be read").exits_with(Exit::Refused)?;
    match &names[..] {
        [name] => Ok(name.clone()),
        [] => {
            let message = format!(
                "no launcher of this host serves its health at admin.listen = \"{address}\"; --url checks one elsewhere"
            );
            Err(anyhow!(message).exits_with(Exit::Refused))
        }
        several => {
            let message = format!(
                "the launchers {several:?} of this host all have port {} in admin.listen: give each another port, or \
                 set launcher.name to the one to check",
                address.port()
            );
            Err(anyhow!(message).exits_with(Exit::Refused))
        }
    }
}

/// The address to connect to: the loopback address if the launcher listens on all interfaces.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}
