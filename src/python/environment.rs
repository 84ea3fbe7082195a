//! The environment of a Python process. It is made from a list, so that no password of the worker's environment reaches
//! the class. Owns no state.

use std::ffi::OsString;

use crate::config::Python;

/// The variables that the process inherits from the worker.
const INHERITED: [&str; 6] = ["PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR"];
/// The names of the other variables of the locale begin with this. The process inherits them, too.
const LOCALE: &str = "LC_";
/// The variables from which numerical libraries take their number of threads.
const THREADS: [&str; 5] = [
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
];

/// The variables of a process. `device`: `cpu`, or the UUID of the only GPU that it sees. `worker`: the worker's variables.
/// Those of the settings come last, so that they replace others of the same name.
pub(super) fn variables(
    python: &Python,
    device: &str,
    threads: usize,
    worker: impl Iterator<Item = (OsString, OsString)>,
) -> Vec<(OsString, OsString)> {
    let is_inherited = |name: &OsString| {
        name.to_str().is_some_and(|name| INHERITED.contains(&name) || name.starts_with(LOCALE))
    };
    let mut variables: Vec<(OsString, OsString)> = worker.filter(|(name, _)| is_inherited(name)).collect();
    let mut set = |name: &str, value: &str| variables.push((name.into(), value.into()));
    set("CUDA_VISIBLE_DEVICES", if device == "cpu" { "" } else { device });
    set("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
    THREADS.iter().for_each(|name| set(name, &threads.to_string()));
    set("PYTHONUNBUFFERED", "1");
    if !python.path.is_empty() {
        set("PYTHONPATH", &python.path.join(":"));
    }
    python.env.iter().for_each(|(name, value)| set(name, value.expose()));
    variables
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::config::Secret;

    #[test]
    fn only_listed_variables_and_those_of_the_settings_reach_the_process() {
        let env = BTreeMap::from([("HF_HOME", "/data"), ("LANG", "C")]);
        let env = env.into_iter().map(|(name, value)| (name.to_owned(), Secret::new(value))).collect();
        let python = Python { executable: "python3".into(), path: vec!["/a".into(), "/b".into()], env };
        let own = [
            "PATH",
            "LC_ALL",
            "LANG",
            "AMQP_URL",
            "SCONCE_BROKER__URL",
            "LD_PRELOAD",
            "CUDA_VISIBLE_DEVICES",
        ];
        let own = own.into_iter().map(|name| (name.into(), "own".into()));
        let variables = variables(&python, "GPU-5a", 3, own);
        let found: BTreeMap<&str, &str> =
            variables.iter().map(|(name, value)| (name.to_str().unwrap(), value.to_str().unwrap())).collect();
        let expected = [
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
            ("CUDA_VISIBLE_DEVICES", "GPU-5a"),
            ("HF_HOME", "/data"),
            ("LANG", "C"),
            ("LC_ALL", "own"),
            ("MKL_NUM_THREADS", "3"),
            ("NUMEXPR_NUM_THREADS", "3"),
            ("OMP_NUM_THREADS", "3"),
            ("OPENBLAS_NUM_THREADS", "3"),
            ("PATH", "own"),
            ("PYTHONPATH", "/a:/b"),
            ("PYTHONUNBUFFERED", "1"),
            ("RAYON_NUM_THREADS", "3"),
        ];
        assert_eq!(found, BTreeMap::from(expected));
        assert!(
            super::variables(&python, "cpu", 1, std::iter::empty())
                .contains(&("CUDA_VISIBLE_DEVICES".into(), "".into()))
        );
    }
}
