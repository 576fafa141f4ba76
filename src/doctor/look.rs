//! Looks at everything and puts it together.

use std::collections::BTreeMap;
use std::path::Path;

use kv_xfer::fabric::{Devices, Findings, Topology, preflight};
use nixl_sys::UcxResource;

use super::probe::{Answers, LibfabricFound, UcxFound};
use super::report::{DoctorReport, GpuNics};
use super::software;
use crate::proc::Interrupt;

/// What a recorded machine's libraries said.
const RECORDING: &str = "kvx-probe.json";

/// Looks at a machine, `/` for this one.
pub fn look(root: &Path, interrupt: &Interrupt) -> (DoctorReport, Findings) {
    let devices = Devices::look(root);
    let recording = root.join(RECORDING);
    let answers = if recording.exists() {
        Answers::recorded(&recording).unwrap_or_else(|error| Answers {
            nixl: Err(error.clone()),
            backend: Err(error.clone()),
            ucx: Err(error.clone()),
            libfabric: Err(error.clone()),
            plugin: Err(error),
        })
    } else {
        Answers::ask(interrupt)
    };
    let mut checks = software::checks(&answers, &devices);
    checks.extend(preflight(root, &devices));
    let findings = Findings {
        checks,
        ucx: answers.ucx.as_ref().ok().map(resources),
        ucx_works: answers.backend.is_ok(),
        libfabric: answers.libfabric.as_ref().ok().map(providers),
        libfabric_works: answers.plugin.is_ok(),
        devices,
    };
    let report = DoctorReport {
        verdict: findings.verdict(),
        required: None,
        unmet: None,
        local: findings.local(),
        remote: findings.remote(),
        carriers: findings.carriers().into_iter().collect(),
        found: findings.devices.summary(),
        checks: findings.checks.clone(),
        nixl: answers.nixl.ok(),
        ucx: answers.ucx.ok(),
        libfabric: answers.libfabric.ok(),
        gpus: topology(&findings.devices),
        rdma: findings.devices.rdma.clone(),
        peer: None,
    };
    (report, findings)
}

fn resources(found: &UcxFound) -> Vec<UcxResource> {
    let pairs = found.resources.iter();
    pairs
        .map(|(transport, device)| UcxResource::new(transport, device))
        .collect()
}

fn providers(found: &LibfabricFound) -> Vec<String> {
    let all = found.providers.iter();
    all.map(|(provider, _, _)| provider.clone()).collect()
}

fn topology(devices: &Devices) -> BTreeMap<String, GpuNics> {
    let topology = Topology::of(devices);
    let gpus = devices.gpus.iter().map(|gpu| {
        let nearest: Vec<_> = topology.nearest(gpu.bus).collect();
        let distance = nearest.first().map(|nic| nic.distance.to_string());
        let nics = GpuNics {
            model: gpu.model.clone(),
            numa: gpu.place.numa,
            usable: gpu.access == kv_xfer::fabric::Access::Open,
            nics: nearest.iter().map(|nic| nic.nic.clone()).collect(),
            distance: distance.unwrap_or_default(),
        };
        (gpu.bus.to_string(), nics)
    });
    gpus.collect()
}
