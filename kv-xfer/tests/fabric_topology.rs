//! Which NICs are near which GPU, on trees of a p5en: whatever the devices are called, and whatever is wrong with some.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod fabric_common;

use std::collections::{BTreeMap, BTreeSet};

use fabric_common::{GPUS, Machine, NICS_PER_GPU, gpu_bus, nic_bus, nic_name};
use kv_xfer::fabric::{Access, BusId, Devices, Distance, Topology};
use proptest::prelude::*;

const NICS: u32 = GPUS * NICS_PER_GPU;

/// The usable NICs nearest to each GPU, all by address.
fn affinity(machine: &Machine) -> BTreeMap<BusId, BTreeSet<Option<BusId>>> {
    let topology = Topology::of(&Devices::look(machine.root()));
    topology
        .gpus()
        .map(|gpu| (gpu, topology.nearest(gpu).map(|nic| nic.bus).collect()))
        .collect()
}

fn bus(text: &str) -> BusId {
    text.parse().unwrap()
}

/// What it is when only some NICs are whole.
fn expected(whole: impl Fn(u32) -> bool) -> BTreeMap<BusId, BTreeSet<Option<BusId>>> {
    (0..GPUS)
        .map(|gpu| {
            let own = gpu * NICS_PER_GPU..(gpu + 1) * NICS_PER_GPU;
            let nics = own
                .filter(|nic| whole(*nic))
                .map(|nic| Some(bus(&nic_bus(nic))));
            (bus(&gpu_bus(gpu)), nics.collect())
        })
        .collect()
}

#[test]
fn a_p5en_has_two_nics_beside_every_gpu() {
    let machine = Machine::p5en();
    let devices = Devices::look(machine.root());
    assert_eq!((devices.gpus.len(), devices.efa().count()), (8, 16));
    assert_eq!(devices.visible_gpus().count(), 8);
    assert_eq!(affinity(&machine), expected(|_| true));
    let topology = Topology::of(&devices);
    let nics = topology.nics(bus(&gpu_bus(0)));
    assert_eq!(nics.len(), 16);
    assert!(nics.is_sorted_by_key(|nic| nic.distance));
    let far = nics
        .iter()
        .filter(|nic| nic.distance == Distance::OtherNode);
    assert_eq!(far.count(), 8);
}

#[test]
fn a_device_that_is_broken_hides_no_other() {
    let machine = Machine::p5en();
    machine.refuse(2);
    machine.dangle(5);
    machine.put(
        &format!("sys/class/infiniband/{}/ports/1/state", nic_name(9)),
        "1: DOWN\n",
    );
    machine.remove(&format!("sys/class/infiniband/{}/ports", nic_name(12)));
    machine.remove("dev/infiniband/uverbs15");
    machine.put("sys/class/infiniband/nonsense", "");
    machine.put("sys/bus/pci/devices/nonsense/vendor", "0x10de");
    let devices = Devices::look(machine.root());
    assert_eq!(devices.rdma.len(), 17);
    let whole: Vec<&str> = devices
        .rdma
        .iter()
        .filter(|nic| nic.is_usable())
        .map(|nic| nic.name.as_str())
        .collect();
    // The one whose link dangles can be used; only its place is unknown.
    assert_eq!(whole.len(), 12);
    assert!(whole.contains(&"rdmap5s0"));
    let dangling = devices
        .rdma
        .iter()
        .find(|nic| nic.name == "rdmap5s0")
        .unwrap();
    assert!(dangling.bus.is_none() && !dangling.faults.is_empty());
    let refused = devices
        .rdma
        .iter()
        .find(|nic| nic.name == "rdmap2s0")
        .unwrap();
    assert!(matches!(refused.access, Access::Refused(_)), "{refused:?}");
    assert!(
        devices.summary().contains("rdmap2s0"),
        "{}",
        devices.summary()
    );
    let left = affinity(&machine);
    assert_eq!(left, expected(|nic| ![2, 5, 9, 12, 15].contains(&nic)));
}

#[test]
fn a_container_that_sees_some_gpus_gets_their_nics() {
    let machine = Machine::p5en();
    for hidden in [0, 1, 2, 3, 6, 7] {
        machine.remove(&format!("dev/nvidia{hidden}"));
    }
    let devices = Devices::look(machine.root());
    let visible: Vec<BusId> = devices.visible_gpus().map(|gpu| gpu.bus).collect();
    assert_eq!(visible, [bus(&gpu_bus(4)), bus(&gpu_bus(5))]);
    let topology = Topology::of(&devices);
    for (ordinal, gpu) in visible.into_iter().enumerate() {
        // CUDA calls them 0 and 1; their NICs are those of GPUs 4 and 5.
        let near: Vec<_> = topology.nearest(gpu).map(|nic| nic.nic.clone()).collect();
        let first = 8 + 2 * u32::try_from(ordinal).unwrap();
        assert_eq!(near, [nic_name(first), nic_name(first + 1)]);
    }
    assert!(
        devices.summary().contains("of which 2 can be used"),
        "{}",
        devices.summary()
    );
}

#[test]
fn a_gpu_whose_own_nics_are_gone_takes_the_next_nearest() {
    let machine = Machine::p5en();
    machine.refuse(0);
    machine.refuse(1);
    let topology = Topology::of(&Devices::look(machine.root()));
    let near: Vec<_> = topology.nearest(bus(&gpu_bus(0))).collect();
    assert_eq!(near.len(), 6, "those of the same NUMA node");
    assert!(near.iter().all(|nic| nic.distance == Distance::SameNode));
}

#[test]
fn nothing_is_found_where_nothing_is() {
    let machine = Machine::plain();
    assert_eq!(Devices::look(machine.root()), Devices::default());
    assert_eq!(
        Devices::look(&machine.root().join("nowhere")),
        Devices::default()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn names_and_numbers_do_not_matter(
        nics in Just((0..NICS).collect::<Vec<_>>()).prop_shuffle(),
        gpus in Just((0..GPUS).collect::<Vec<_>>()).prop_shuffle(),
        broken in proptest::collection::btree_set(0..NICS, 0..4),
    ) {
        let machine = Machine::p5en_numbered(&nics, &gpus);
        for nic in &broken {
            let number = nics.get(usize::try_from(*nic).unwrap()).unwrap();
            machine.refuse(*number);
        }
        let found = affinity(&machine);
        for (gpu, nics) in expected(|nic| !broken.contains(&nic)) {
            // One that has lost both of its own takes others, which is tested above.
            if !nics.is_empty() {
                prop_assert_eq!(found.get(&gpu), Some(&nics));
            }
        }
    }
}
