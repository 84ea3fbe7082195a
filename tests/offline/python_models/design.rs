//! The verification of the first design: each worker has a process of its own with a model of its own, on its own device,
//! with its own seed, and with nothing of its parents.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde_json::{Value, json};

use super::rig::{Rig, eventually, line};
use super::runs::{PACKAGE, start};

/// Writes what it sees of itself to a file when it is loaded, and answers only once both workers are loaded.
const WITNESS: &str = r#"
import json, os, random, time
from pathlib import Path
import sconce_model

HERE = Path(__file__).parent

class Witness(sconce_model.Model):
    urls = ["/v1/embeddings"]

    def load(self, device, dtype, options):
        random.seed(self.worker.seed)
        self.drawn = random.random()
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                pass  # that of listdir itself
        seen = {
            "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "device": device,
            "slot": self.worker.slot, "seed": self.worker.seed, "drawn": self.drawn,
            "environment": dict(os.environ), "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)),
            "sockets": sum("socket:" in link for link in links),
        }
        (HERE / f"new-{os.getpid()}").write_text(json.dumps(seen))
        (HERE / f"new-{os.getpid()}").rename(HERE / f"seen-{os.getpid()}.json")

    def forward(self, batch):
        while len(list(HERE.glob("seen-*.json"))) < 2:
            time.sleep(0.01)
        time.sleep(0.05)
        return [[self.drawn, float(os.getpid())] for _ in batch]
"#;

#[test]
fn each_worker_has_its_own_process_device_model_and_seed_and_no_password() {
    let lines: Vec<String> = (0..40).map(|n| line(&format!("r-{n}"), json!({"input": "text"}))).collect();
    let rig = Rig::new(&lines);
    let file = rig.path("witness_class.py");
    fs::write(&file, WITNESS).unwrap();
    let model = format!("pool[0].model=python:{}:Witness", file.display());
    let path = format!("pool[0].python.path={PACKAGE}");
    let mut command = rig.command(&["--devices", "cpu,cpu", "--set", &model, "--set", &path]);
    command.args(["--set", "pool[0].batch.max_requests=2", "--set", "pool[0].threads=3"]);
    command.env("SCONCE_BROKER__URL", "amqp://user:secret-word@host/%2f").env("OTHER_SECRET", "secret-word");
    let ended = rig.start_command(command).wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let folder = rig.path("");
    let seen: Vec<Value> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension().is_some_and(|ending| ending == "json")
                && path.to_string_lossy().contains("seen-")
        })
        .map(|path| serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap())
        .collect();
    assert_eq!(seen.len(), 2, "{seen:?}");
    let all = |field: &str| seen.iter().map(|it| it[field].to_string()).collect::<BTreeSet<_>>().len();
    for field in ["pid", "parent", "group", "slot", "seed", "drawn"] {
        assert_eq!(all(field), 2, "{field}: {seen:?}");
    }
    for it in &seen {
        assert_eq!((&it["pid"], &it["device"]), (&it["group"], &json!("cpu")));
        assert!(!it.to_string().contains("secret-word"), "{it}");
        let environment = &it["environment"];
        assert_eq!(
            (&environment["CUDA_VISIBLE_DEVICES"], &environment["OMP_NUM_THREADS"]),
            (&json!(""), &json!("3"))
        );
        assert!(it["files"].to_string().contains("/dev/null"), "{it}");
        assert_eq!(it["sockets"], json!(2), "only its two channels: {it}");
    }
    // Both have worked, each with its own model.
    let mut drawn = BTreeMap::<String, BTreeSet<String>>::new();
    for answer in rig.answers() {
        let vector = &answer["response"]["body"]["data"][0]["embedding"];
        drawn.entry(vector[1].to_string()).or_default().insert(vector[0].to_string());
    }
    assert_eq!(drawn.len(), 2, "{drawn:?}");
    assert!(drawn.values().all(|numbers| numbers.len() == 1), "{drawn:?}");
}

#[test]
fn a_worker_that_is_started_again_has_the_same_seed() {
    let rig = Rig::new(&[line("r-0", json!({"input": "text"}))]);
    let code = WITNESS.replace(
        "        while len(",
        "        if len(list(HERE.glob(\"seen-*.json\"))) < 2:\n            os._exit(1)\n        while len(",
    );
    let ended = start(&rig, &code, "Witness", &[]).wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let seeds = eventually("both processes have written", || {
        let files = fs::read_dir(rig.path("")).unwrap().map(|entry| entry.unwrap().path());
        let files = files.filter(|path| path.to_string_lossy().contains("seen-"));
        let seeds: Vec<Value> = files
            .map(|path| {
                serde_json::from_str::<Value>(&fs::read_to_string(path).unwrap()).unwrap()["seed"].clone()
            })
            .collect();
        (seeds.len() == 2).then_some(seeds)
    });
    assert_eq!(seeds[0], seeds[1]);
}
