//! The fabric of the world: memory, agents, and the windows in flight between them.
//!
//! Nothing moves by itself: the scheduler lands a descriptor, puts one on the wire to land later, ends
//! a window well or badly, or leaves it hanging. As in NIXL, a window that the engine gives back goes
//! on writing until its agent is destroyed, and destroying an agent may fail.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::dice::Dice;
use crate::ids::{AgentName, WordSlot};
use crate::layout::{MemKind, RegionGeometry};
use crate::memory::{ControlWords, Memory, MemoryError};
use crate::transport::{AfterError, Descriptor, FailureKind};

/// Address of the first byte of the world's memory.
const BASE: u64 = 0x1_0000;
/// Bytes between two pieces of memory that belong to nothing.
const GAP: usize = 64;

/// Whose memory a piece is, and what for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Pool,
    /// Lease words at the holder.
    LeaseWords,
    /// Their copies at the reader.
    Landing,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub base: u64,
    pub len: u64,
    pub life: usize,
    pub of: Use,
}

/// How one descriptor of a window is.
#[derive(Debug)]
enum Piece {
    Todo,
    /// Read at the peer, not yet written here.
    Wire(Vec<u8>),
    Landed,
}

/// What a window reports when it is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    Running,
    Done,
    Failed(FailureKind, AfterError),
}

/// A posted window.
#[derive(Debug)]
pub(super) struct Flight {
    pub id: u64,
    pub agent: usize,
    /// The life that posted it, and the one that it reads from.
    pub life: usize,
    pub from: usize,
    pub descriptors: Vec<Descriptor>,
    pieces: Vec<Piece>,
    pub end: End,
    /// Its failure has been reported; it may go on writing.
    told: bool,
    /// The scheduler does not move it.
    pub hangs: bool,
}

/// A write into memory, and where its bytes came from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Write {
    pub d: Descriptor,
    pub life: usize,
}

/// A lease word on its way to a reader.
#[derive(Debug, Clone, Copy)]
pub(super) struct WordRead {
    pub holder: usize,
    pub slot: u32,
    pub word: u64,
}

#[derive(Debug)]
pub(super) struct AgentState {
    pub life: usize,
    pub name: AgentName,
    pub registered: Vec<RegionGeometry>,
    pub inbox: Vec<(AgentName, Vec<u8>)>,
    pub gone: bool,
    /// The library refuses to destroy it.
    pub immortal: bool,
}

/// A notice on its way.
#[derive(Debug, Clone)]
pub(super) struct Letter {
    pub from: usize,
    pub sender: AgentName,
    /// The agent that it is for.
    pub to: usize,
    pub bytes: Vec<u8>,
}

/// How often what goes wrong, in a thousand.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FabricFaults {
    pub refuse: u32,
    pub doubtful_post: u32,
    pub slow_post: u32,
    pub unreachable: u32,
    pub immortal: u32,
    /// Posting moves the bytes within the call.
    pub at_once: u32,
}

#[derive(Default)]
pub(super) struct State {
    bytes: Vec<u8>,
    spans: Vec<Span>,
    pub agents: Vec<AgentState>,
    names: BTreeMap<AgentName, usize>,
    pub flights: Vec<Flight>,
    next: u64,
    pub letters: Vec<Letter>,
    /// Lives that are over.
    pub dead: Vec<bool>,
    /// Which place each life is at.
    pub places: Vec<usize>,
    /// Places that cannot reach each other.
    pub cut: Vec<(usize, usize)>,
    pub faults: FabricFaults,
    pub dice: Option<Dice>,
    pub writes: Vec<Write>,
    pub words: Vec<WordRead>,
    /// What an engine did that the transport forbids.
    pub misuse: Option<&'static str>,
    /// Time that a call took, for the clocks to be moved by.
    pub passed: std::time::Duration,
    pub windows: u64,
}

/// The fabric. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Fabric(Arc<Mutex<State>>);

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fabric")
    }
}

impl Fabric {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Zeroed memory of a life.
    pub(super) fn memory(&self, len: usize, life: usize, of: Use) -> FabricMemory {
        let mut state = self.state();
        let start = state.bytes.len();
        state
            .bytes
            .resize(start.saturating_add(len).saturating_add(GAP), 0);
        let base = BASE.saturating_add(start as u64);
        state.spans.push(Span {
            base,
            len: len as u64,
            life,
            of,
        });
        let fabric = self.clone();
        FabricMemory { fabric, base, len }
    }
}

impl State {
    pub(super) fn roll(&mut self, per_mille: u32) -> bool {
        per_mille > 0
            && self
                .dice
                .as_mut()
                .is_some_and(|dice| dice.chance(per_mille))
    }

    /// The piece of memory that holds an address.
    pub(super) fn span(&self, addr: u64) -> Option<Span> {
        let after = self.spans.partition_point(|span| span.base <= addr);
        let span = self.spans.get(after.checked_sub(1)?)?;
        (addr < span.base.saturating_add(span.len)).then_some(*span)
    }

    fn range(&self, addr: u64, len: usize) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(addr.checked_sub(BASE)?).ok()?;
        let end = start.checked_add(len)?;
        (end <= self.bytes.len()).then_some(start..end)
    }

    fn read(&self, addr: u64, out: &mut [u8]) -> bool {
        let bytes = self
            .range(addr, out.len())
            .and_then(|range| self.bytes.get(range));
        bytes.map(|bytes| out.copy_from_slice(bytes)).is_some()
    }

    fn write(&mut self, addr: u64, data: &[u8]) -> bool {
        let range = self.range(addr, data.len());
        let bytes = range.and_then(|range| self.bytes.get_mut(range));
        bytes.map(|bytes| bytes.copy_from_slice(data)).is_some()
    }

    pub(super) fn is_dead(&self, life: usize) -> bool {
        self.dead.get(life).copied().unwrap_or(true)
    }

    /// Whether two lives can exchange anything now.
    pub(super) fn connected(&self, a: usize, b: usize) -> bool {
        let at = |life: usize| self.places.get(life).copied().unwrap_or(usize::MAX);
        let pair = (at(a).min(at(b)), at(a).max(at(b)));
        !self.is_dead(a) && !self.is_dead(b) && !self.cut.contains(&pair)
    }

    pub(super) fn agent_named(&self, name: &AgentName) -> Option<usize> {
        self.names.get(name).copied()
    }

    pub(super) fn add_agent(&mut self, life: usize, name: &AgentName) -> Option<usize> {
        if self.names.contains_key(name) {
            return None;
        }
        let immortal = self.roll(self.faults.immortal);
        let at = self.agents.len();
        self.names.insert(name.clone(), at);
        self.agents.push(AgentState {
            life,
            name: name.clone(),
            registered: Vec::new(),
            inbox: Vec::new(),
            gone: false,
            immortal,
        });
        Some(at)
    }

    /// Ends an agent and what it has in flight. False when the library refuses.
    pub(super) fn end_agent(&mut self, at: usize) -> bool {
        let Some(agent) = self.agents.get_mut(at) else {
            return true;
        };
        let refused = agent.immortal && !self.dead.get(agent.life).copied().unwrap_or(true);
        agent.gone = true;
        if !refused {
            self.flights.retain(|flight| flight.agent != at);
        }
        !refused
    }

    /// A process ends: its memory cannot be read, and nothing of it writes any more.
    pub(super) fn end_life(&mut self, life: usize) {
        if let Some(dead) = self.dead.get_mut(life) {
            *dead = true;
        }
        for agent in self.agents.iter_mut().filter(|agent| agent.life == life) {
            agent.gone = true;
        }
        self.flights.retain(|flight| flight.life != life);
    }

    /// Something new in flight.
    pub(super) fn launch(
        &mut self,
        agent: usize,
        life: usize,
        from: usize,
        descriptors: &[Descriptor],
        end: End,
    ) -> u64 {
        self.next = self.next.saturating_add(1);
        let id = self.next;
        self.flights.push(Flight {
            id,
            agent,
            life,
            from,
            pieces: descriptors.iter().map(|_| Piece::Todo).collect(),
            descriptors: descriptors.to_vec(),
            end,
            told: false,
            hangs: false,
        });
        id
    }

    /// What a window reports. `None`: it is not there any more.
    pub(super) fn ask(&mut self, id: u64) -> Option<End> {
        let at = self.flights.iter().position(|flight| flight.id == id)?;
        let flight = self.flights.get_mut(at)?;
        if flight.told {
            self.misuse = Some("a window was polled after it had failed");
            return Some(End::Running);
        }
        let end = flight.end.clone();
        match end {
            End::Running => {}
            End::Failed(_, AfterError::InDoubt) => flight.told = true,
            End::Done | End::Failed(..) => {
                self.flights.swap_remove(at);
            }
        }
        Some(end)
    }

    /// Reads one descriptor's bytes at the peer. False when nothing is left to be read.
    pub(super) fn fetch(&mut self, at: usize, piece: usize) -> bool {
        let Some(flight) = self.flights.get(at) else {
            return false;
        };
        let (life, from) = (flight.life, flight.from);
        if !matches!(flight.pieces.get(piece), Some(Piece::Todo)) || !self.connected(life, from) {
            return false;
        }
        let Some(d) = flight.descriptors.get(piece).copied() else {
            return false;
        };
        let bytes = self.look(d);
        if let Some(state) = self
            .flights
            .get_mut(at)
            .and_then(|f| f.pieces.get_mut(piece))
        {
            *state = Piece::Wire(bytes);
        }
        true
    }

    /// The bytes at a descriptor's remote end, now.
    pub(super) fn look(&mut self, d: Descriptor) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(d.len).unwrap_or(0)];
        self.read(d.remote, &mut bytes);
        if let Some(span) = self
            .span(d.remote)
            .filter(|span| span.of == Use::LeaseWords)
            && let Ok(word) = <[u8; 8]>::try_from(bytes.as_slice())
        {
            let slot = d.remote.saturating_sub(span.base) / 8;
            self.words.push(WordRead {
                holder: span.life,
                slot: u32::try_from(slot).unwrap_or(u32::MAX),
                word: u64::from_le_bytes(word),
            });
        }
        bytes
    }

    /// Writes a descriptor's bytes here.
    pub(super) fn land(&mut self, d: Descriptor, bytes: &[u8], life: usize) {
        self.write(d.local, bytes);
        self.writes.push(Write { d, life });
    }

    /// Writes what is on the wire. False when that is nothing.
    pub(super) fn arrive(&mut self, at: usize, piece: usize) -> bool {
        let Some(flight) = self.flights.get_mut(at) else {
            return false;
        };
        let Some(state) = flight.pieces.get_mut(piece) else {
            return false;
        };
        let Piece::Wire(bytes) = state else {
            return false;
        };
        let bytes = std::mem::take(bytes);
        *state = Piece::Landed;
        let life = flight.life;
        let d = flight.descriptors.get(piece).copied();
        let over = flight.pieces.iter().all(|p| matches!(p, Piece::Landed));
        if over && flight.end == End::Running {
            flight.end = End::Done;
        }
        if let Some(d) = d {
            self.land(d, &bytes, life);
        }
        true
    }

    /// Whether something in flight may write into `len` bytes from `addr`.
    pub(super) fn may_write(&self, addr: u64, len: u64) -> bool {
        self.flights.iter().any(|flight| {
            flight
                .descriptors
                .iter()
                .any(|d| d.local < addr.saturating_add(len) && addr < d.local.saturating_add(d.len))
        })
    }
}

/// A piece of the world's memory.
pub(super) struct FabricMemory {
    fabric: Fabric,
    base: u64,
    len: usize,
}

impl std::fmt::Debug for FabricMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FabricMemory({:#x})", self.base)
    }
}

impl FabricMemory {
    pub(super) fn base(&self) -> u64 {
        self.base
    }

    fn holds(&self, addr: u64, len: usize) -> Result<(), MemoryError> {
        let end = addr.saturating_add(len as u64);
        if addr >= self.base && end <= self.base.saturating_add(self.len as u64) {
            return Ok(());
        }
        let len = len as u64;
        Err(MemoryError::OutOfRange { addr, len })
    }

    fn word(&self, slot: WordSlot) -> u64 {
        self.base
            .saturating_add(u64::from(slot.0).saturating_mul(8))
    }
}

impl Memory for FabricMemory {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        self.holds(addr, out.len())?;
        self.fabric.state().read(addr, out);
        Ok(())
    }

    fn write(&self, addr: u64, data: &[u8]) -> Result<(), MemoryError> {
        self.holds(addr, data.len())?;
        self.fabric.state().write(addr, data);
        Ok(())
    }
}

impl ControlWords for FabricMemory {
    fn region(&self) -> RegionGeometry {
        RegionGeometry {
            base: self.base,
            block_len: 8,
            block_stride: 8,
            block_count: u32::try_from(self.len / 8).unwrap_or(0),
            mem: MemKind::Dram,
            device: 0,
        }
    }

    fn load(&self, slot: WordSlot) -> Option<u64> {
        let mut word = [0; 8];
        self.read(self.word(slot), &mut word).ok()?;
        Some(u64::from_le_bytes(word))
    }

    fn store(&self, slot: WordSlot, value: u64) -> bool {
        self.write(self.word(slot), &value.to_le_bytes()).is_ok()
    }
}
