//! What keeps devices from being used, and what a machine amounts to, on trees of other machines.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod fabric_common;

use fabric_common::{Machine, limits, nic_name};
use kv_xfer::fabric::{
    Check, Counters, Devices, Findings, Moved, Requirement, UCX, Verdict, preflight,
};
use nixl_sys::UcxResource;

fn check(machine: &Machine, name: &str) -> Check {
    let checks = preflight(machine.root(), &Devices::look(machine.root()));
    let found = checks.into_iter().find(|check| check.name == name);
    found.unwrap_or_else(|| panic!("no check {name}"))
}

/// What UCX would say on a machine with EFA or without.
fn findings(machine: &Machine, transports: &[&str]) -> Findings {
    let devices = Devices::look(machine.root());
    Findings {
        checks: preflight(machine.root(), &devices),
        devices,
        ucx: Some(
            transports
                .iter()
                .map(|name| UcxResource::new(name, "x"))
                .collect(),
        ),
        ucx_works: true,
        ..Findings::default()
    }
}

#[test]
fn a_whole_p5en_passes_everything() {
    let machine = Machine::p5en();
    let checks = preflight(machine.root(), &Devices::look(machine.root()));
    for check in &checks {
        assert!(check.ok && check.fix.is_empty(), "{check:?}");
    }
    assert!(checks.len() >= 9);
}

#[test]
fn each_fault_is_found_by_its_check_and_has_a_fix() {
    type Break = fn(&Machine);
    let faults: [(&str, Break, &str, &str); 9] = [
        (
            "memlock",
            |m| m.put("proc/self/limits", &limits("65536")),
            "64 KiB",
            "ulimit -l unlimited",
        ),
        (
            "vm.max_map_count",
            |m| m.put("proc/sys/vm/max_map_count", "65530"),
            "65530",
            "sysctl -w vm.max_map_count",
        ),
        (
            "huge pages",
            |m| m.put("proc/meminfo", "HugePages_Total: 0\n"),
            "0 of 0",
            "vm.nr_hugepages",
        ),
        (
            "GPU memory for RDMA",
            |m| {
                m.put(
                    "proc/driver/nvidia/version",
                    "NVRM version: NVIDIA UNIX x86_64 Kernel Module",
                )
            },
            "neither",
            "modprobe nvidia_peermem",
        ),
        (
            "EFA driver",
            |m| {
                m.remove("sys/module/efa");
                m.remove("sys/class/infiniband");
                m.remove("sys/bus/pci/drivers");
            },
            "not loaded",
            "modprobe efa",
        ),
        (
            "device files",
            |m| m.remove("dev/infiniband/uverbs3"),
            "15 of 16",
            "--device=/dev/infiniband",
        ),
        (
            "/dev/shm",
            |m| {
                m.put(
                    "proc/self/mounts",
                    "shm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n",
                )
            },
            "64 MiB",
            "--shm-size",
        ),
        (
            "copies between processes",
            |m| m.put("proc/sys/kernel/yama/ptrace_scope", "1\n"),
            "ptrace_scope = 1",
            "ptrace_scope=0",
        ),
        (
            "loopback interface",
            |m| m.put("sys/class/net/lo/flags", "0x8\n"),
            "down",
            "ip link set lo up",
        ),
    ];
    for (name, damage, found, fix) in faults {
        let machine = Machine::p5en();
        assert!(check(&machine, name).ok, "{name}");
        damage(&machine);
        let check = check(&machine, name);
        assert!(!check.ok, "{check:?}");
        assert!(check.found.contains(found), "{check:?}");
        assert!(check.fix.contains(fix), "{check:?}");
        assert!(!check.needed.is_empty());
    }
}

#[test]
fn an_empty_tree_is_no_reason_to_panic() {
    let machine = Machine::plain();
    let nowhere = machine.root().join("nowhere");
    let checks = preflight(&nowhere, &Devices::look(&nowhere));
    assert!(checks.iter().any(|check| !check.ok), "no /dev/shm there");
    for text in [
        "",
        "\0\u{1}",
        "Max locked memory",
        "99999999999999999999999",
    ] {
        for file in [
            "proc/self/limits",
            "proc/self/mounts",
            "proc/meminfo",
            "sys/class/net/lo/flags",
        ] {
            machine.put(file, text);
        }
        machine.put("proc/sys/vm/max_map_count", text);
        let _ = preflight(machine.root(), &Devices::look(machine.root()));
    }
}

#[test]
fn memory_limits_matter_to_rdma_only() {
    let machine = Machine::plain();
    machine.put("proc/self/limits", &limits("65536"));
    let memlock = check(&machine, "memlock");
    assert!(memlock.ok && memlock.found == "64 KiB", "{memlock:?}");
    assert_eq!(findings(&machine, &["tcp", "cma"]).verdict(), Verdict::Shm);
}

#[test]
fn the_verdict_is_what_devices_and_software_can_do_together() {
    let whole = Machine::p5en();
    let verdict = |machine: &Machine, transports: &[&str]| findings(machine, transports).verdict();
    assert_eq!(
        verdict(&whole, &["srd", "tcp", "cma", "cuda_ipc"]),
        Verdict::Efa
    );
    // EFA is there and would be left unused.
    assert_eq!(
        verdict(&whole, &["tcp", "cma", "cuda_ipc"]),
        Verdict::Broken
    );
    let locked = Machine::p5en();
    locked.put("proc/self/limits", &limits("65536"));
    assert_eq!(verdict(&locked, &["srd", "tcp", "cma"]), Verdict::Broken);
    let container = Machine::p5en();
    for number in 0..16 {
        container.remove(&format!("dev/infiniband/uverbs{number}"));
    }
    assert_eq!(verdict(&container, &["srd", "tcp", "cma"]), Verdict::Broken);
    let gpus = Machine::p5en();
    gpus.remove("sys/class/infiniband");
    for nic in 0..16 {
        gpus.remove(&format!(
            "sys/bus/pci/devices/{}",
            fabric_common::nic_bus(nic)
        ));
    }
    assert_eq!(verdict(&gpus, &["tcp", "cma", "cuda_ipc"]), Verdict::Nvlink);
    let plain = Machine::plain();
    assert_eq!(verdict(&plain, &["tcp", "cma"]), Verdict::Shm);
    assert_eq!(verdict(&plain, &["tcp"]), Verdict::TcpOnly);
    assert_eq!(verdict(&plain, &[]), Verdict::Broken);
}

#[test]
fn other_rdma_is_told_from_efa() {
    let machine = Machine::plain();
    let class = "sys/class/infiniband/mlx5_0";
    machine.put(&format!("{class}/ports/1/state"), "4: ACTIVE");
    machine.put(&format!("{class}/ports/1/counters/port_rcv_data"), "1000");
    machine.put(&format!("{class}/ports/1/counters/port_xmit_data"), "0");
    machine.put("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0");
    machine.put("dev/infiniband/uverbs0", "");
    let found = findings(&machine, &["rc_mlx5", "tcp"]);
    assert_eq!(found.verdict(), Verdict::Rdma);
    found.check(Requirement::Rdma).unwrap();
    let unmet = found.check(Requirement::Efa).unwrap_err().to_string();
    assert!(
        unmet.contains("no EFA device") && unmet.contains("only rdma"),
        "{unmet}"
    );
    let here = kv_xfer::fabric::Surroundings {
        devices: found.devices,
        ucx_tls: None,
        fi_provider: None,
        ucx_efa: false,
    };
    here.check(Requirement::Rdma, UCX).unwrap();
    assert!(here.check(Requirement::Efa, UCX).is_err());
    let named = |here: &kv_xfer::fabric::Surroundings| here.transports(Requirement::Rdma);
    assert_eq!(named(&here).unwrap().unwrap(), ["rc", "dc", "ud"]);
    let p5en = Machine::p5en();
    let here = kv_xfer::fabric::Surroundings {
        devices: findings(&p5en, &[]).devices,
        ..here
    };
    // Without `cuda_copy` UCX takes GPU memory for the host's.
    assert_eq!(named(&here).unwrap().unwrap(), ["srd", "cuda_copy"]);
    let before = Counters::read(machine.root());
    machine.put(&format!("{class}/ports/1/counters/port_rcv_data"), "3500");
    // Words of four bytes.
    assert_eq!(
        Counters::read(machine.root()).witness(&before, Moved::Read, 10_000),
        Ok(10_000)
    );
}

#[test]
fn counters_say_whether_the_bytes_went_over_the_nics() {
    let machine = Machine::p5en();
    let before = Counters::read(machine.root());
    assert!(!before.is_empty());
    machine.count(&nic_name(0), 2_000_000, 600_000);
    machine.count(&nic_name(1), 0, 395_000);
    let after = Counters::read(machine.root());
    assert_eq!(after.witness(&before, Moved::Read, 1_000_000), Ok(995_000));
    // What was received otherwise does not count as read.
    let other = after.witness(&before, Moved::Read, 2_000_000).unwrap_err();
    assert!(other.to_string().contains("went another way"), "{other}");
    assert!(after.witness(&before, Moved::Written, 1).is_err());
    // A device that started anew, or came later, counts nothing.
    machine.count(&nic_name(0), 0, 0);
    let later = Counters::read(machine.root());
    assert!(later.witness(&after, Moved::Read, 1).is_err());
    machine.remove(&format!("sys/class/infiniband/{}", nic_name(1)));
    assert_eq!(Counters::read(machine.root()).since(&after).count(), 15);
    assert!(Counters::read(Machine::plain().root()).is_empty());
}
