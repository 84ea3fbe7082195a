//! `sconce devices`: shows this host's devices, the processes on them, and which workers would run where.

use std::io::Write;

use indicatif::HumanBytes;
use serde_json::json;

use super::Registry;
use crate::cli::Devices;
use crate::config::Assignment;
use crate::launcher::Host;
use crate::launcher::gpus::{Gpu, Memory};
use crate::shutdown::Exit;

/// Prints the devices and the planned slots. Settings that name a missing device are an error.
pub(super) fn run(arguments: &Devices, registry: &Registry) -> anyhow::Result<Exit> {
    let settings = registry.load(&arguments.settings, &[])?.settings;
    let host = Host::here();
    let planned = registry.plan(&settings, &host);
    let served = |slot: &Assignment| registry.describe(&slot.pool).ok().flatten();
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let slots: Vec<_> = planned.iter().flatten().map(|slot| slot_json(slot, served(slot))).collect();
        let error = planned.as_ref().err().map(ToString::to_string);
        let report = json!({
            "host": host.name, "cores": host.cores, "nvidia": host.gpus, "slots": slots, "error": error
        });
        writeln!(out, "{report:#}")?;
    } else {
        write_devices(&mut out, &host)?;
        for slot in planned.iter().flatten() {
            let served = served(slot).map(|served| format!(": {served}")).unwrap_or_default();
            let Assignment { slot, device, threads, pool, .. } = slot;
            writeln!(out, "{slot:<16} {device:<42} {}{served}, {threads} threads", pool.model)?;
        }
    }
    planned?;
    Ok(Exit::Done)
}

fn slot_json(slot: &Assignment, served: Option<String>) -> serde_json::Value {
    let Assignment { slot, device, threads, pool, .. } = slot;
    json!({
        "slot": slot, "device": device, "threads": threads, "model": pool.model, "pool": pool.name,
        "served": served
    })
}

fn write_devices(out: &mut impl Write, host: &Host) -> anyhow::Result<()> {
    writeln!(out, "cpu              {} cores", host.cores)?;
    let gpus = &host.gpus;
    for (index, gpu) in gpus.gpus.iter().enumerate() {
        writeln!(out, "cuda:{index:<11} {:<42} {}", gpu.uuid, description(gpu))?;
        for part in gpu.parts.iter().flatten() {
            writeln!(
                out,
                "{:16} {:<42} {}",
                "",
                part.uuid,
                part.memory.map(free_of_total).unwrap_or_default()
            )?;
        }
        for process in &gpu.processes {
            let memory = process.memory.map(|bytes| HumanBytes(bytes).to_string()).unwrap_or_default();
            writeln!(out, "{:16} process {:<34} {memory}", "", process.pid)?;
        }
    }
    match (&gpus.unknown, &gpus.driver, &gpus.cuda) {
        (Some(why), ..) => writeln!(out, "no GPUs: {why}")?,
        (None, driver, cuda) => {
            let or_unknown = |version: &Option<String>| version.clone().unwrap_or_else(|| "unknown".into());
            writeln!(out, "driver {}, CUDA up to {}", or_unknown(driver), or_unknown(cuda))?;
        }
    }
    match host.cuda {
        None => writeln!(out, "this build has no CUDA: CPU workers only (`make cuda` makes one that has)")?,
        Some(cuda) => {
            let ((major, minor), (from_major, from_minor)) = (cuda.version, cuda.compute_capability);
            writeln!(
                out,
                "this build has CUDA {major}.{minor}, for compute capability {from_major}.{from_minor} and later"
            )?;
        }
    }
    Ok(writeln!(out)?)
}

fn description(gpu: &Gpu) -> String {
    let capability =
        gpu.compute_capability.map(|(major, minor)| format!("compute capability {major}.{minor}"));
    let fault = gpu.fault.as_ref().map(|fault| format!("OUT OF ORDER: {fault}"));
    let mig = gpu.parts.as_ref().map(|parts| format!("divided by MIG into {}", parts.len()));
    let facts = [Some(gpu.name.clone()), gpu.memory.map(free_of_total), capability, mig, fault];
    facts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn free_of_total(memory: Memory) -> String {
    format!("{} of {} free", HumanBytes(memory.free), HumanBytes(memory.total))
}
