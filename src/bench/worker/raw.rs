//! The participants that need no NIXL: `process_vm_readv`, the system call under NIXL's shared
//! memory, and `memcpy`, the same pieces copied within the reader.

use std::io::IoSliceMut;
use std::time::Instant;

use kv_xfer::layout::RegionGeometry;
use memmap2::{Advice, MmapMut, MmapOptions};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use std::sync::Arc;

use kv_xfer::ids::BlockId;
use kv_xfer::memory::KvPool;

use super::blocks::{self, Checked};
use super::cases::{BlockLists, Cases, check_list, check_lists};
use super::error::WorkerError;
use super::settings::Settings;
use super::{Holder, NewCase, Reader, Start, process_cpu_us};
use crate::bench::pattern;
use crate::bench::proto::{Sample, Shape};

/// Most pieces that the kernel takes in one call (`IOV_MAX`).
const PIECES_PER_CALL: usize = 1024;
/// Most bytes that the kernel moves in one call, rounded down to whole pages below 2 GiB.
const BYTES_PER_CALL: usize = 0x7fff_f000;

/// Ordinary memory cut into regions of blocks.
struct Buffer {
    map: MmapMut,
    /// Length of a block and bytes of a region, for each region.
    regions: Vec<(usize, usize)>,
    blocks: u32,
}

impl Buffer {
    fn new(shape: &Shape, settings: &Settings) -> Result<Self, WorkerError> {
        let layout = settings.layout(shape)?;
        let mut regions = Vec::with_capacity(layout.regions().len());
        let mut bytes = 0_usize;
        for region in layout.regions() {
            let block = usize::try_from(region.block_len)?;
            let len = block.saturating_mul(usize::try_from(shape.blocks)?);
            bytes = bytes.saturating_add(len);
            regions.push((block, len));
        }
        let fail = |source| WorkerError::Map { bytes, source };
        let mut map = MmapOptions::new().len(bytes).map_anon().map_err(fail)?;
        if settings.huge_pages {
            // Refused where the kernel has none: then it is small pages.
            let _ = map.advise(Advice::HugePage);
        }
        // Every page is there from now on.
        map.fill(1);
        Ok(Self {
            map,
            regions,
            blocks: shape.blocks,
        })
    }

    fn fill(&mut self, seed: u64) {
        let mut rest = &mut self.map[..];
        for (number, (block_len, len)) in (0..).zip(&self.regions) {
            let (region, after) = rest.split_at_mut((*len).min(rest.len()));
            rest = after;
            for (block, bytes) in (0..).zip(region.chunks_exact_mut(*block_len)) {
                pattern::fill(seed, number, block, bytes);
            }
        }
    }

    /// The blocks of a list in every region, in the list's order.
    fn pieces<'a>(&'a self, list: &'a [u32]) -> Vec<&'a [u8]> {
        let mut pieces = Vec::new();
        let mut rest = &self.map[..];
        for (block_len, len) in &self.regions {
            let (region, after) = rest.split_at((*len).min(rest.len()));
            rest = after;
            for block in list {
                let at = usize::try_from(*block).unwrap_or(usize::MAX);
                let at = at.saturating_mul(*block_len);
                let piece = region.get(at..at.saturating_add(*block_len));
                pieces.push(piece.unwrap_or_default());
            }
        }
        pieces
    }

    /// The same, to be written into; a block that is listed twice is empty the second time.
    fn pieces_mut(&mut self, list: &[u32]) -> Vec<&mut [u8]> {
        let mut pieces = Vec::new();
        let mut rest = &mut self.map[..];
        for (block_len, len) in &self.regions {
            let (region, after) = rest.split_at_mut((*len).min(rest.len()));
            rest = after;
            let mut blocks: Vec<_> = region.chunks_exact_mut(*block_len).map(Some).collect();
            for block in list {
                let at = usize::try_from(*block).unwrap_or(usize::MAX);
                let piece = blocks.get_mut(at).and_then(Option::take);
                pieces.push(piece.unwrap_or_default());
            }
        }
        pieces
    }

    fn spoil(&mut self, lists: &BlockLists, sample: u32) {
        let list: Vec<u32> = blocks::spread(lists.local.len(), sample)
            .filter_map(|index| lists.local.get(index).copied())
            .collect();
        for piece in self.pieces_mut(&list) {
            piece.fill(blocks::SPOILED);
        }
    }

    fn check(&self, seed: u64, lists: &BlockLists, sample: u32) -> Checked {
        let sample: Vec<usize> = blocks::spread(lists.local.len(), sample).collect();
        let pick = |list: &[u32]| -> Vec<u32> {
            sample
                .iter()
                .filter_map(|at| list.get(*at).copied())
                .collect()
        };
        let (remote, local) = (pick(&lists.remote), pick(&lists.local));
        let mut checked = Checked::default();
        for (region, pieces) in (0..).zip(self.pieces(&local).chunks(local.len().max(1))) {
            for (piece, remote) in pieces.iter().zip(&remote) {
                checked.bytes += piece.len() as u64;
                checked.wrong += pattern::wrong_bytes(seed, region, *remote, piece);
            }
        }
        checked
    }
}

/// What a reader must know of a holder whose memory it reads by system call.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct RawCard {
    pid: i32,
    regions: Vec<RegionGeometry>,
}

/// Has memory to be read; does nothing.
pub struct RawHolder {
    pool: Arc<KvPool>,
}

impl RawHolder {
    /// Makes and fills the pool.
    pub fn start(args: &Start, about: &mut Map<String, Value>) -> Result<Self, WorkerError> {
        let pool = blocks::pool(&args.shape, &args.settings, about)?;
        blocks::fill(&pool, args.seed)?;
        Ok(Self { pool })
    }
}

impl Holder for RawHolder {
    fn card(&self) -> Result<Value, WorkerError> {
        let card = RawCard {
            pid: i32::try_from(std::process::id())?,
            regions: self.pool.regions().to_vec(),
        };
        serde_json::to_value(card).map_err(WorkerError::json("card"))
    }

    fn case(&mut self, name: &str, remote: Vec<u32>) -> Result<Option<Value>, WorkerError> {
        check_list(name, &remote, self.pool.block_count())?;
        Ok(None)
    }
}

/// The other end of a copy within one process: nothing.
pub struct NoHolder;

impl Holder for NoHolder {
    fn card(&self) -> Result<Value, WorkerError> {
        Ok(Value::Null)
    }

    fn case(&mut self, _: &str, _: Vec<u32>) -> Result<Option<Value>, WorkerError> {
        Ok(None)
    }
}

/// Where the bytes come from.
enum Source {
    Process(RawCard),
    Memory(Buffer),
}

/// Copies pieces from another process or from its own memory.
pub struct RawReader {
    source: Source,
    target: Buffer,
    seed: u64,
    cases: Cases<BlockLists>,
}

impl RawReader {
    /// By system call.
    pub fn by_system_call(args: &Start) -> Result<Self, WorkerError> {
        let card = args.card.clone().unwrap_or_default();
        let card = serde_json::from_value(card).map_err(WorkerError::json("card"))?;
        Self::start(args, Source::Process(card))
    }

    /// Within this process.
    pub fn by_copy(args: &Start) -> Result<Self, WorkerError> {
        let mut source = Buffer::new(&args.shape, &args.settings)?;
        source.fill(args.seed);
        Self::start(args, Source::Memory(source))
    }

    fn start(args: &Start, source: Source) -> Result<Self, WorkerError> {
        Ok(Self {
            source,
            target: Buffer::new(&args.shape, &args.settings)?,
            seed: args.seed,
            cases: Cases::default(),
        })
    }

    /// Moves one case's blocks. What a caller would have at hand already is not timed.
    fn read(&mut self, name: &str) -> Result<Sample, WorkerError> {
        let lists = self.cases.get(name)?;
        let mut local = self.target.pieces_mut(&lists.local);
        let bytes = local.iter().map(|piece| piece.len() as u64).sum();
        let count = local.len() as u64;
        let (cpu, start) = match &self.source {
            Source::Memory(source) => {
                let remote = source.pieces(&lists.remote);
                let start = (process_cpu_us(), Instant::now());
                for (to, from) in local.iter_mut().zip(&remote) {
                    to.copy_from_slice(from);
                }
                start
            }
            Source::Process(card) => {
                let mut calls = Vec::new();
                let mut remote = Vec::with_capacity(local.len());
                for region in &card.regions {
                    for block in &lists.remote {
                        let addr = region.block_addr(BlockId(*block))?;
                        remote.push(RemoteIoVec {
                            base: usize::try_from(addr)?,
                            len: usize::try_from(region.block_len)?,
                        });
                    }
                }
                let mut local = local.into_iter().map(IoSliceMut::new);
                for remote in cut(&remote) {
                    let local: Vec<_> = local.by_ref().take(remote.len()).collect();
                    calls.push((local, remote));
                }
                let pid = card.pid;
                let start = (process_cpu_us(), Instant::now());
                for (local, remote) in &mut calls {
                    let wanted = remote.iter().map(|piece| piece.len).sum();
                    let moved = process_vm_readv(Pid::from_raw(pid), local, remote)
                        .map_err(|errno| WorkerError::Readv { pid, errno })?;
                    if moved != wanted {
                        return Err(WorkerError::Short { moved, wanted });
                    }
                }
                start
            }
        };
        let total_us = start.elapsed().as_secs_f64() * 1e6;
        Ok(Sample {
            // The call is the read: it keeps the caller until the end.
            submit_us: total_us,
            total_us,
            first_layer_us: None,
            descriptors: count,
            bytes,
            cpu_us: process_cpu_us() - cpu,
        })
    }
}

/// Cuts pieces into calls that the kernel takes, in order.
fn cut(mut pieces: &[RemoteIoVec]) -> Vec<&[RemoteIoVec]> {
    let mut calls = Vec::new();
    while !pieces.is_empty() {
        let mut bytes = 0_usize;
        let fit = pieces.iter().take(PIECES_PER_CALL).take_while(|piece| {
            bytes = bytes.saturating_add(piece.len);
            bytes <= BYTES_PER_CALL
        });
        // A piece that is longer by itself comes back short, which is reported.
        let (call, rest) = pieces.split_at(fit.count().max(1));
        calls.push(call);
        pieces = rest;
    }
    calls
}

impl Reader for RawReader {
    fn case(&mut self, case: NewCase) -> Result<(), WorkerError> {
        check_lists(&case.name, &case.lists, self.target.blocks)?;
        self.cases.put(case.name, case.lists);
        Ok(())
    }

    fn once(&mut self, names: &[String]) -> Result<Sample, WorkerError> {
        let mut sum = Sample {
            submit_us: 0.0,
            total_us: 0.0,
            first_layer_us: None,
            descriptors: 0,
            bytes: 0,
            cpu_us: 0.0,
        };
        for name in names {
            let one = self.read(name)?;
            sum.submit_us += one.submit_us;
            sum.total_us += one.total_us;
            sum.descriptors += one.descriptors;
            sum.bytes += one.bytes;
            sum.cpu_us += one.cpu_us;
        }
        Ok(sum)
    }

    fn spoil(&mut self, name: &str, sample: u32) -> Result<(), WorkerError> {
        self.target.spoil(self.cases.get(name)?, sample);
        Ok(())
    }

    fn check(&mut self, name: &str, sample: u32) -> Result<Checked, WorkerError> {
        Ok(self.target.check(self.seed, self.cases.get(name)?, sample))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(card: Option<Value>) -> Start {
        Start {
            shape: Shape {
                regions: 2,
                blocks: 600,
                block_bytes: 64,
            },
            seed: 5,
            settings: Settings::default(),
            card,
        }
    }

    fn reads_right(mut reader: RawReader) {
        let lists = BlockLists {
            remote: (0..600).rev().collect(),
            local: (0..600).map(|block| (block * 7) % 600).collect(),
        };
        let name = || "c".to_owned();
        let case = NewCase {
            name: name(),
            lists,
            ticket: None,
        };
        reader.case(case).unwrap();
        reader.spoil("c", 600).unwrap();
        let whole = 2 * 600 * 64;
        let checked = reader.check("c", 600).unwrap();
        assert_eq!(checked.bytes, whole);
        assert!(checked.wrong > whole * 9 / 10);
        let sample = reader.once(&[name()]).unwrap();
        assert_eq!((sample.bytes, sample.descriptors), (whole, 1200));
        let checked = reader.check("c", 600).unwrap();
        assert_eq!((checked.bytes, checked.wrong), (whole, 0));
    }

    #[test]
    fn pieces_come_from_a_process() {
        let holder = RawHolder::start(&args(None), &mut Map::new()).unwrap();
        let card = holder.card().unwrap();
        reads_right(RawReader::by_system_call(&args(Some(card))).unwrap());
    }

    #[test]
    fn pieces_come_from_memory() {
        reads_right(RawReader::by_copy(&args(None)).unwrap());
    }

    #[test]
    fn calls_are_cut_to_what_the_kernel_takes() {
        let piece = |len| RemoteIoVec { base: 0, len };
        let lengths =
            |pieces: &[RemoteIoVec]| cut(pieces).iter().map(|c| c.len()).collect::<Vec<_>>();
        assert_eq!(lengths(&[]), [0usize; 0]);
        assert_eq!(lengths(&vec![piece(8); 2500]), [1024, 1024, 452]);
        assert_eq!(lengths(&vec![piece(2 << 20); 1024]), [1023, 1]);
        assert_eq!(lengths(&[piece(BYTES_PER_CALL + 1), piece(1)]), [1, 1]);
    }
}
