//! UCX's own report of the lanes of a connection, as versions 1.22 and 1.23 log it.
//!
//! ```text
//! … ucp_worker.c:1914 UCX  INFO    ep_cfg[1]: intra-node rma_am(tcp/lo) am(tcp/lo cma/memory) …
//! ```

use std::collections::BTreeSet;

use super::requirement::Carrier;

/// One lane: what it is used for, and what carries it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lane {
    /// UCX's name of the use: `rma`, `rma_am` (emulated by active messages), `am`, `ka`.
    pub used_for: String,
    /// UCX's name of the transport: `tcp`, `cma`, `sysv`, `rc_mlx5`, `cuda_ipc`, …
    pub transport: String,
    /// The device behind it.
    pub device: String,
}

/// The lanes that a log mentions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UcxLanes {
    lanes: BTreeSet<Lane>,
}

impl UcxLanes {
    /// Finds the lanes in a log of level `info`. Lines that say something else are skipped.
    #[must_use]
    pub fn parse(log: &str) -> Self {
        Self::parse_scopes(log, &["intra-node ", "inter-node ", "self "])
    }

    /// Like [`parse`](Self::parse), without what an agent uses to itself.
    #[must_use]
    pub fn parse_peers(log: &str) -> Self {
        Self::parse_scopes(log, &["intra-node ", "inter-node "])
    }

    fn parse_scopes(log: &str, scopes: &[&str]) -> Self {
        let lanes = log
            .lines()
            .filter_map(|line| {
                scopes
                    .iter()
                    .find_map(|scope| line.split_once(scope))
                    .map(|(_, rest)| rest)
            })
            .flat_map(groups)
            .collect();
        Self { lanes }
    }

    /// Every lane.
    pub fn iter(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter()
    }

    /// Whether the log mentions none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// What carries the bytes of a read, in one word or a few: the transports of zero-copy lanes
    /// where there are any, else the transport that emulates reads with active messages.
    #[must_use]
    pub fn carrier(&self) -> String {
        let of = |wanted: &dyn Fn(&Lane) -> bool| {
            let names: BTreeSet<&str> = self
                .lanes
                .iter()
                .filter(|l| wanted(l))
                .map(|l| l.transport.as_str())
                .collect();
            names.into_iter().collect::<Vec<_>>().join("+")
        };
        // These reach only memory that UCX itself has shared, which no pool is.
        let attached = |lane: &Lane| matches!(lane.transport.as_str(), "sysv" | "posix");
        let direct = of(&|lane| lane.used_for == "rma" && !attached(lane));
        if !direct.is_empty() {
            return direct;
        }
        // A lane that copies between processes takes reads, although it is listed for messages.
        let memory =
            of(&|lane| lane.used_for == "am" && lane.device == "memory" && !attached(lane));
        let shared = of(&|lane| lane.device == "memory");
        let memory = if memory.is_empty() && of(&|lane| lane.used_for == "rma") == shared {
            shared
        } else {
            memory
        };
        if !memory.is_empty() {
            return memory;
        }
        let emulated = of(&|lane| lane.used_for == "rma_am");
        if emulated.is_empty() {
            "unknown".into()
        } else {
            format!("{emulated} (emulated)")
        }
    }
}

impl UcxLanes {
    /// What kind of thing carries the bytes of a read; `None` when that is not known, or not one kind.
    #[must_use]
    pub fn kind(&self) -> Option<Carrier> {
        let carrier = self.carrier();
        let names = carrier.trim_end_matches(" (emulated)");
        let kinds: BTreeSet<Option<Carrier>> = names.split('+').map(Carrier::of_ucx).collect();
        let mut kinds = kinds.into_iter();
        match (kinds.next(), kinds.next()) {
            (Some(kind), None) => kind,
            _ => None,
        }
    }

    /// The one-sided operations that are emulated with messages, so that the peer's processor takes part.
    #[must_use]
    pub fn emulated(&self) -> Vec<&'static str> {
        let uses = |name: &str| self.lanes.iter().any(|lane| lane.used_for == name);
        let mut emulated = Vec::new();
        if uses("rma_am") && !uses("rma") {
            emulated.extend(["read", "write"]);
        }
        if uses("amo_am") && !uses("amo") {
            emulated.push("atomic");
        }
        emulated
    }
}

/// The groups `use(transport/device …)` of a line.
fn groups(text: &str) -> Vec<Lane> {
    let mut lanes = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('(') {
        let Some((inside, next)) = after.split_once(')') else {
            break;
        };
        let used_for = before.split_whitespace().next_back().unwrap_or_default();
        for lane in inside.split_whitespace() {
            if let Some((transport, device)) = lane.split_once('/') {
                lanes.push(Lane {
                    used_for: used_for.to_owned(),
                    transport: transport.to_owned(),
                    device: device.to_owned(),
                });
            }
        }
        rest = next;
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_without_rdma_reads_by_cma_and_else_by_tcp() {
        let log = "x\n[1.2] [h:1:0] ucp_worker.c:1 UCX  INFO  0x1 intra-node cfg#1 \
                   rma_am(tcp/lo) amo_am(tcp/lo) am(tcp/lo cma/memory) ka(tcp/lo)\n";
        let lanes = UcxLanes::parse(log);
        assert_eq!(lanes.carrier(), "cma");
        assert_eq!(lanes.iter().count(), 5);
        let log = "… inter-node cfg#1 rma_am(tcp/eth0) am(tcp/eth0) ka(tcp/eth0)";
        assert_eq!(UcxLanes::parse(log).carrier(), "tcp (emulated)");
    }

    #[test]
    fn without_tcp_the_copying_lane_still_reads() {
        let log = "x intra-node cfg#0 rma(sysv/memory posix/memory) am(sysv/memory cma/memory)";
        assert_eq!(UcxLanes::parse(log).carrier(), "cma");
        assert_eq!(UcxLanes::parse(log).kind(), Some(Carrier::Shm));
        let log = "x intra-node cfg#0 rma(sysv/memory posix/memory) am(sysv/memory)";
        assert_eq!(UcxLanes::parse(log).carrier(), "posix+sysv");
    }

    #[test]
    fn a_zero_copy_lane_is_the_carrier() {
        let log = "… inter-node cfg#2 rma(rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1) am(rc_mlx5/mlx5_0:1)";
        assert_eq!(UcxLanes::parse(log).carrier(), "rc_mlx5");
    }

    #[test]
    fn other_text_says_nothing() {
        for log in [
            "",
            "intra-node ",
            "intra-node am(",
            "nothing(here/at all)",
            "intra-node am()",
        ] {
            assert!(UcxLanes::parse(log).is_empty(), "{log:?}");
            assert_eq!(UcxLanes::parse(log).carrier(), "unknown");
        }
    }
}
