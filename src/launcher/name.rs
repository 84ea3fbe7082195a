//! Gives a launcher a name that no other launcher of this host has. The name is used in slots, replies, metrics and
//! remote control. The launcher claims it by binding an abstract Unix socket to which nobody connects. The kernel
//! releases the socket when the process ends, however it ends.

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
                    return Ok(Self { name: name.clone(), _claim: Some(claim) });
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => {
                    tracing::warn!(name, %error, "cannot check whether another launcher has this name");
                    return Ok(Self { name: name.clone(), _claim: None });
                }
            }
        }
        Err(names.into_iter().next().unwrap_or_default())
    }
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
}
