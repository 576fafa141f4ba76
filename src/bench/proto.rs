//! What a bench's processes say to each other: one JSON object a line, over standard input and
//! output or, for a holder on another node, over TCP.
//!
//! Two processes make a pair: a **holder**, whose blocks are read, and a **reader**. Every
//! participant (this tool, NIXL's Python package, another crate, another engine) speaks this, so
//! that one parent can have all of them do the same reads in turn. On standard output a line counts
//! only when it begins with [`MARK`]: libraries print there too.
//!
//! Order: `Setup` to the holder, its `card` into `Setup` of the reader; then, for every case, `Case`
//! to the holder, its `ticket` into `Case` of the reader; then any number of `Run`. `Cpu` and
//! `Quit` at any time. Each request has exactly one answer, in order.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What a line on standard output begins with.
pub const MARK: &str = "kvx1 ";

/// Which end of the reads a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Its blocks are read.
    Holder,
    /// It reads.
    Reader,
}

/// The memory of both ends: `regions` arrays of `blocks` blocks of `block_bytes` bytes each.
/// Block `b` of region `r` starts at byte `b * block_bytes` of that region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// Regions: the layers of a layer-first pool; 1 for a block-first one.
    pub regions: u32,
    /// Blocks of each region.
    pub blocks: u32,
    /// Bytes of a block in one region.
    pub block_bytes: u64,
}

impl Shape {
    /// Bytes of all regions, if they can be counted.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        u64::from(self.regions)
            .checked_mul(self.blocks.into())?
            .checked_mul(self.block_bytes)
    }
}

/// A request, as `{"op": "...", ...}`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum Request {
    /// Make memory and be ready. A holder fills it with the [pattern](super::pattern).
    Setup {
        /// Which end.
        role: Role,
        /// The memory.
        shape: Shape,
        /// Seed of the pattern.
        seed: u64,
        /// What only some participants know: `transport` (`auto`, `tcp`), `progress_thread`
        /// (`true`, `false`), `lanes`, `memory` (`host`, `cuda:0`), ... Unknown ones are ignored.
        #[serde(default)]
        settings: Map<String, Value>,
        /// The holder's card, for the reader.
        #[serde(default)]
        card: Option<Value>,
    },
    /// A read to come: blocks `remote[i]` of every region go to blocks `local[i]`.
    Case {
        /// Its name; a second case of this name replaces the first.
        name: String,
        /// Block ids at the holder.
        remote: Vec<u32>,
        /// Block ids at the reader.
        local: Vec<u32>,
        /// What the holder answered to this case, for the reader.
        #[serde(default)]
        ticket: Option<Value>,
    },
    /// Do it, so many times, one after the other. Only for readers.
    Run {
        /// Cases to read together: all are submitted, then all awaited.
        names: Vec<String>,
        /// How often.
        times: u32,
        /// Blocks of each case to check after the last time, spread over it; `0` checks none. They
        /// are overwritten before that time, outside of what is measured, so that what an earlier
        /// read brought does not count.
        verify: u32,
        /// Pause before each time, microseconds.
        #[serde(default)]
        pause_us: u64,
    },
    /// Tell the processor time used so far.
    Cpu,
    /// End.
    Quit,
}

/// An answer, as `{"re": "...", ...}`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "re", rename_all = "kebab-case")]
pub enum Answer {
    /// `Setup` is done.
    Ready {
        /// What the reader needs to know; opaque to the parent.
        #[serde(default)]
        card: Option<Value>,
        /// What it runs on: `library`, `version`, `transport`, `memory`, ..., for the report.
        #[serde(default)]
        about: Map<String, Value>,
    },
    /// `Case` is taken.
    Case {
        /// What the reader needs to know; opaque to the parent.
        #[serde(default)]
        ticket: Option<Value>,
    },
    /// `Run` is done.
    Ran {
        /// One for each time.
        samples: Vec<Sample>,
        /// Bytes checked.
        checked_bytes: u64,
        /// Of those, wrong.
        wrong_bytes: u64,
    },
    /// Processor time of the whole process, all threads, user and system.
    Cpu {
        /// Microseconds.
        us: u64,
    },
    /// Gone right after this.
    Bye,
    /// It cannot be done; the process goes on.
    Failed {
        /// Why, in the participant's own words.
        error: String,
    },
}

/// One time of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// How long submitting kept the caller, microseconds (all cases of the run together).
    pub submit_us: f64,
    /// From before the submission until the caller knew that every byte was there, microseconds.
    pub total_us: f64,
    /// Until the first layer was known to be there, microseconds, where the participant can tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_layer_us: Option<f64>,
    /// Descriptors that went to the transport, after merging, where the participant can tell.
    pub descriptors: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Processor time of the reader's process in this time, microseconds.
    pub cpu_us: f64,
}
