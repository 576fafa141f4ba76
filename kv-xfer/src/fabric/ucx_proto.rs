//! UCX's own report of how it carries out an operation, which it logs with `UCX_PROTO_INFO=y`.
//!
//! ```text
//! | remote memory read by ucp_get*(multi) into host memory from host |
//! | Range  | Description | Config     |
//! | 0..inf | zero-copy   | cma/memory |
//! ```

use super::requirement::Carrier;

/// An operation between two processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// A read of the peer's memory.
    Read,
    /// A write to it.
    Write,
}

impl Operation {
    fn titled(cell: &str) -> Option<Self> {
        if cell.starts_with("remote memory read by ucp_get") {
            Some(Self::Read)
        } else if cell.starts_with("remote memory write by ucp_put") {
            Some(Self::Write)
        } else {
            None
        }
    }
}

/// How UCX carries out an operation on pieces of some length.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Protocol {
    /// The operation.
    pub operation: Operation,
    /// Lengths, as UCX writes them: `0..inf`, `8257..262143`.
    pub range: String,
    /// How: `zero-copy`, `software emulation`, …
    pub how: String,
    /// Over what: `cma/memory`, `tcp/lo`, `50% on rc_mlx5/mlx5_0:1/path0 and …`.
    pub over: String,
}

impl Protocol {
    /// Finds them in a log, the last report of each operation. Tables of other operations are skipped.
    #[must_use]
    pub fn parse(log: &str) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        let mut operation = None;
        for line in log.lines() {
            let Some((_, row)) = line.split_once("| ") else {
                continue;
            };
            let cells: Vec<&str> = row
                .trim_end()
                .trim_end_matches('|')
                .split('|')
                .map(str::trim)
                .collect();
            let titled = cells.iter().find_map(|cell| Operation::titled(cell));
            match cells.as_slice() {
                _ if titled.is_some() => operation = titled,
                ["Range", ..] => {
                    if let Some(of) = operation {
                        found.retain(|protocol| protocol.operation != of);
                    }
                }
                [range, how, over] if range.contains("..") => {
                    if let Some(operation) = operation {
                        found.push(Self {
                            operation,
                            range: (*range).to_owned(),
                            how: (*how).to_owned(),
                            over: (*over).to_owned(),
                        });
                    }
                }
                _ => operation = None,
            }
        }
        found
    }

    /// What it goes over.
    #[must_use]
    pub fn carrier(&self) -> Option<Carrier> {
        self.over
            .split_whitespace()
            .filter_map(|word| word.split_once('/'))
            .find_map(|(transport, _)| Carrier::of_ucx(transport))
    }

    /// Whether the peer's processor takes part.
    #[must_use]
    pub fn is_emulated(&self) -> bool {
        self.how.contains("software emulation")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | ucp_context_0 inter-node cfg#1 | remote memory read by ucp_get* into host |
[1.2] [vm:1:0]   | Range  | Description | Config |
[1.2] [vm:1:0]   | 0..inf | software emulation | tcp/eth0 |
[1.2] [vm:1:0]   +--------+-------------+
[1.2] [vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.2] [vm:1:0]   +--------+-------------+-------------------------------------------+
[1.2] [vm:1:0]   | Range  | Description |                  Config                   |
[1.2] [vm:1:0]   +--------+-------------+-------------------------------------------+
[1.2] [vm:1:0]   | 0..inf | zero-copy   | cma/memory                                |
[1.2] [vm:1:0]   | active message by ucp_am_send*(fast-completion) from host memory |
[1.2] [vm:1:0]   | Range  | Description | Config |
[1.2] [vm:1:0]   | 0..8k  | short       | tcp/lo |
[1.2] [vm:1:0]   | remote memory write by ucp_put* from host memory to host |
[1.2] [vm:1:0]   | Range  | Description | Config |
[1.2] [vm:1:0]   | 0..2K   | short | rc_mlx5/mlx5_0:1 |
[1.2] [vm:1:0]   | 2K..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
";

    #[test]
    fn the_last_table_of_each_operation_counts() {
        let found = Protocol::parse(LOG);
        assert_eq!(found.len(), 3, "{found:?}");
        let of = |operation| found.iter().filter(move |p| p.operation == operation);
        let read = of(Operation::Read).next().unwrap();
        assert_eq!(
            (read.range.as_str(), read.how.as_str()),
            ("0..inf", "zero-copy")
        );
        assert_eq!(read.carrier(), Some(Carrier::Shm));
        assert!(!read.is_emulated());
        assert!(of(Operation::Write).all(|p| p.carrier() == Some(Carrier::Rdma)));
        let first = Protocol::parse(LOG.split_once("(multi)").unwrap().0);
        assert!(
            first.iter().all(Protocol::is_emulated) && first.len() == 1,
            "{first:?}"
        );
    }

    #[test]
    fn other_text_says_nothing() {
        for log in [
            "",
            "| ",
            "| | | |",
            "|||",
            "remote memory read by ucp_get",
            "| a..b | c | d |",
        ] {
            assert!(Protocol::parse(log).is_empty(), "{log:?}");
        }
    }
}
