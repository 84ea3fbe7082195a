//! `sconce healthcheck`: queries a launcher's health over HTTP, as a probe would.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, anyhow};

use super::{load, tolerate_broken_pipe};
use crate::admin::{Check, LAUNCHER};
use crate::cli::Healthcheck;
use crate::commands::exits::ExitsWith as _;
use crate::launcher::launchers_at;
use crate::shutdown::Exit;

/// Prints the launcher's answer, and returns its verdict as the exit code.
pub(super) fn run(arguments: &Healthcheck) -> anyhow::Result<Exit> {
    let (base, own) = match &arguments.url {
        Some(url) => (url.trim_end_matches('/').to_owned(), None),
        None => {
            let settings = load(&arguments.settings, &[])?.settings;
            let address = settings
                .admin
                .listen
                .context("admin.listen = \"\": the launcher does not serve its health over HTTP");
            let address = address.exits_with(Exit::Config)?;
            (format!("http://{}", reachable(address)), Some(own_name(settings.launcher.name, address)?))
        }
    };
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
    // Another process may listen at this address; it may be another launcher.
    match (answer.header(LAUNCHER), own) {
        (None, _) => return Err(anyhow!("{base} is not a launcher").exits_with(Exit::Refused)),
        (Some(name), Some(own)) if name != own => {
            return Err(anyhow!("{base} is the launcher {name:?}, not {own:?}").exits_with(Exit::Refused));
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

/// The name of the launcher whose health is asked: the one of the settings, else that of the only running launcher of
/// this host that is set to this address.
fn own_name(configured: Option<String>, address: SocketAddr) -> anyhow::Result<String> {
    if let Some(name) = configured {
        return Ok(name);
    }
    let names =
        launchers_at(address.port()).context("/proc/net/unix cannot be read").exits_with(Exit::Refused)?;
    match &names[..] {
        [name] => Ok(name.clone()),
        [] => {
            let message = format!(
                "no launcher of this host is set to admin.listen = \"{address}\"; --url asks one elsewhere"
            );
            Err(anyhow!(message).exits_with(Exit::Refused))
        }
        several => {
            let message = format!(
                "the launchers {several:?} of this host are all set to port {}: set admin.listen to an own port for \
                 each, or launcher.name",
                address.port()
            );
            Err(anyhow!(message).exits_with(Exit::Refused))
        }
    }
}

/// Replaces the address of all interfaces by that of the loopback interface, which can be connected to.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}
