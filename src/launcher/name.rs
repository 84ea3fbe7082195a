//! Gives a launcher a name that no other launcher of this host has. The name is used in slots, replies, metrics and
//! remote control. The launcher claims it by binding an abstract Unix socket to which nobody connects. The kernel
//! releases the socket when the process ends, however it ends. A second such socket has the health port (that of
//! `admin.listen`) in its name, so that `sconce healthcheck` finds the launcher even while another process has taken
//! that port.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// The number of names that are tried if none is set: the host's name, and that name with the suffixes 2 to 64.
const MAX_AUTOMATIC_NAMES: usize = 64;

/// The name of a launcher. While this exists, no other launcher of the host can claim it.
#[derive(Debug)]
pub struct LauncherName {
    /// The name, such as `gpu1` or `gpu1-2`.
    pub name: String,
    /// Holds the name. None if the system does not let this process bind the socket.
    _claim: Option<UnixListener>,
    /// Holds the health port's socket, once that is published.
    _health_port: Option<UnixListener>,
}

impl LauncherName {
    /// Claims the `wanted` name. Without one, it claims the first free name of `host`, `host-2`, `host-3`, …
    ///
    /// # Errors
    /// The name, if another launcher of this host has it; `host`, if all automatic names are taken.
    pub fn claim(wanted: Option<&str>, host: &str) -> Result<Self, String> {
        let names = match wanted {
            Some(name) => vec![name.to_owned()],
            None => {
                let numbered = (2..=MAX_AUTOMATIC_NAMES).map(|number| format!("{host}-{number}"));
                std::iter::once(host.to_owned()).chain(numbered).collect()
            }
        };
        for name in &names {
            let address = SocketAddr::from_abstract_name(format!("sconce-launcher-{name}"));
            match address.and_then(|address| UnixListener::bind_addr(&address)) {
                Ok(claim) => {
                    return Ok(Self { name: name.clone(), _claim: Some(claim), _health_port: None });
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => {
                    tracing::warn!(name, %error, "cannot check whether another launcher has this name");
                    return Ok(Self { name: name.clone(), _claim: None, _health_port: None });
                }
            }
        }
        Err(names.into_iter().next().unwrap_or_default())
    }

    /// Publishes for [`launchers_at`] that `port` is this launcher's health port, as long as this exists.
    pub fn publish_health_port(&mut self, port: u16) {
        let address = SocketAddr::from_abstract_name(format!("{}{}", health_prefix(port), self.name));
        match address.and_then(|address| UnixListener::bind_addr(&address)) {
            Ok(socket) => self._health_port = Some(socket),
            Err(error) => {
                let message = "`sconce healthcheck` needs --url or launcher.name to find this launcher";
                tracing::warn!(name = self.name, %error, "{message}");
            }
        }
    }
}

/// The names of the running launchers of this host whose health port is `port`, sorted.
///
/// # Errors
/// The kernel's list of sockets cannot be read.
pub fn launchers_at(port: u16) -> io::Result<Vec<String>> {
    let prefix = format!("@{}", health_prefix(port));
    let sockets = std::fs::read_to_string("/proc/net/unix")?;
    let mut names: Vec<String> = sockets
        .lines()
        .filter_map(|line| line.split_once(&prefix))
        .map(|(_, name)| name.to_owned())
        .collect();
    names.sort_unstable();
    Ok(names)
}

/// The beginning of a health port's socket name; the launcher's name follows.
fn health_prefix(port: u16) -> String {
    format!("sconce-health-{port}=")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_of_a_host_have_unique_names_until_they_end() {
        let host = format!("test-{}", std::process::id());
        let claim = |wanted| LauncherName::claim(wanted, &host);
        let (first, second) = (claim(None).unwrap(), claim(None).unwrap());
        assert_eq!((first.name.as_str(), second.name), (host.as_str(), format!("{host}-2")));
        assert_eq!(claim(Some(&host)).unwrap_err(), host);
        drop(first);
        assert_eq!(claim(None).unwrap().name, host);
    }

    #[test]
    fn launchers_are_found_by_their_health_port_while_they_run() {
        let name = |number| format!("test of ports {}-{number}", std::process::id());
        let mut claims = [1, 2].map(|number| LauncherName::claim(Some(&name(number)), "").unwrap());
        claims.iter_mut().for_each(|claim| claim.publish_health_port(0));
        // Launchers of other tests may have this port in their settings.
        let own = || {
            let found = launchers_at(0).unwrap().into_iter();
            found.filter(|found| found.starts_with("test of ports")).collect::<Vec<_>>()
        };
        assert_eq!(own(), [name(1), name(2)]);
        let [first, _second] = claims;
        drop(first);
        assert_eq!(own(), [name(2)]);
    }
}
