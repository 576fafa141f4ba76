//! The process that reads, and how it looks at what has landed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kv_xfer::descriptor::{DescriptorLimits, Params};
use kv_xfer::engine::{
    FailedBlocks, Offer, ReadError, ReadFailure, ReadHandle, ReadOutcome, ReadRequest,
    ReleasePolicy,
};
use kv_xfer::ids::BlockId;
use kv_xfer::memory::cuda::{CudaCompare, CudaMemory, CudaOptions, CudaStream, StreamFlag};
use kv_xfer::memory::{AccessError, Gate, MemoryError, OwnedBlocks, StreamOrder};
use kv_xfer::peer::PeerAddr;
use kv_xfer::side_channel::DialPolicy;

use super::proto::{FromHolder, ToHolder};
use super::side::{CheckError, Side, expected};
use crate::bench::pattern;
use crate::bench::proto::Shape;
use crate::memory::PoolMemory;
use crate::proc::Worker;

/// A read ends by then.
pub const READ_LIMIT: Duration = Duration::from_secs(20);
/// Time beyond it for the engine to say so.
const GRACE: Duration = Duration::from_secs(10);
/// Time for the other process to answer: it may have much to fill.
const ANSWER_LIMIT: Duration = Duration::from_secs(90);

/// A reader and its holder, with pools of one geometry.
#[derive(Debug)]
pub struct Pair<'a> {
    /// This process's end.
    pub side: Side,
    /// The geometry.
    pub shape: Shape,
    holder: &'a mut Worker,
}

impl<'a> Pair<'a> {
    /// Sets both ends up.
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn set_up(
        holder: &'a mut Worker,
        shape: Shape,
        there: PoolMemory,
        here: PoolMemory,
    ) -> Result<Self, CheckError> {
        let setup = ToHolder::Setup {
            shape,
            memory: there,
        };
        let FromHolder::Ready { host, port } = ask(holder, &setup)? else {
            return Err(out_of_turn());
        };
        let peer = PeerAddr::new(&host, port).map_err(|e| CheckError::Wrong(e.to_string()))?;
        let side = Side::start("reader", &shape, here, |config| {
            config.dial = DialPolicy::configured_only([peer]);
        })?;
        Ok(Self {
            side,
            shape,
            holder,
        })
    }

    /// Has the holder fill and lease blocks.
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn lease(&mut self, blocks: &[u32], seed: u64) -> Result<Offer, CheckError> {
        let wish = ToHolder::Lease {
            blocks: blocks.to_vec(),
            seed,
        };
        let FromHolder::Leased { kv_transfer_params } = ask(self.holder, &wish)? else {
            return Err(out_of_turn());
        };
        match Params::from_json_value(kv_transfer_params, &DescriptorLimits::default())? {
            Params::Remote(remote) => Ok(self.side.engine.accept(&remote, None, None)?),
            _ => Err(out_of_turn()),
        }
    }

    /// Tells the holder to revoke the lease soon; the answer comes by [`revoked`](Self::revoked).
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn revoke(&mut self, after_us: u64, seed: u64) -> Result<(), CheckError> {
        Ok(self.holder.send(&ToHolder::Revoke { after_us, seed })?)
    }

    /// Whether the lease still held when it was revoked.
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn revoked(&mut self) -> Result<bool, CheckError> {
        match self.holder.recv(ANSWER_LIMIT)? {
            FromHolder::Revoked { held } => Ok(held),
            FromHolder::Failed { why } => Err(CheckError::Wrong(format!("the holder: {why}"))),
            _ => Err(out_of_turn()),
        }
    }

    /// Starts a read of everything that is offered.
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn read(
        &self,
        offer: &Offer,
        local: &[u32],
        order: StreamOrder,
    ) -> Result<ReadHandle, CheckError> {
        let blocks = self.side.pool.claim(ids(local))?;
        self.side
            .engine
            .read_ordered(
                ReadRequest {
                    offer,
                    hashes: &offer.ticket().hashes,
                    span: 0..local.len(),
                    blocks,
                    timeout: READ_LIMIT,
                    release: ReleasePolicy::Never,
                },
                order,
            )
            .map_err(|refused| CheckError::Wrong(refused.to_string()))
    }

    /// Overwrites blocks here, so that what a read does not bring is noticed.
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn spoil(&self, blocks: &[u32]) -> Result<(), CheckError> {
        for block in blocks {
            self.side.fill(0xbad, *block)?;
        }
        Ok(())
    }

    /// Wrong bytes among blocks that have landed, looked at by the processor.
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn wrong_bytes(&self, seed: u64, remote: &[u32], local: &[u32]) -> Result<u64, CheckError> {
        let mut wrong = 0;
        for (number, region) in self.side.pool.regions().iter().enumerate() {
            let mut bytes = vec![0; usize::try_from(region.block_len).unwrap_or(0)];
            for (there, here) in remote.iter().zip(local) {
                self.side
                    .pool
                    .read_block(number, BlockId(*here), 0, &mut bytes)?;
                let region = u32::try_from(number).unwrap_or(u32::MAX);
                wrong += pattern::wrong_bytes(seed, region, *there, &bytes);
            }
        }
        Ok(wrong)
    }

    /// Wrong 64-bit words among blocks that have landed, compared on the GPU with what was computed for them; `None` in
    /// host memory.
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn wrong_words_on_device(
        &self,
        seed: u64,
        remote: &[u32],
        local: &[u32],
    ) -> Result<Option<u64>, CheckError> {
        let Some(memory) = self.side.pool.memory().as_cuda() else {
            return Ok(None);
        };
        let mut compare = CudaCompare::new(memory.device())?;
        let mut wrong = 0;
        for (number, region) in (0..).zip(self.side.pool.regions()) {
            let len = region.block_len.saturating_mul(remote.len() as u64);
            let options = CudaOptions::on(memory.device().ordinal());
            let (want, _) = CudaMemory::new(len, &options)?;
            let all: Vec<u8> = remote
                .iter()
                .flat_map(|block| expected(seed, number, *block, region.block_len))
                .collect();
            kv_xfer::memory::Memory::write(&want, want.base(), &all)?;
            for (at, block) in (0..).zip(local) {
                let found = region
                    .block_addr(BlockId(*block))
                    .map_err(AccessError::from)?;
                let want_at = want.base() + region.block_len * at;
                wrong +=
                    compare.differing((memory, found), (&want, want_at), region.block_len / 8)?;
            }
        }
        Ok(Some(wrong))
    }
}

/// Waits for a read's end.
///
/// # Errors
/// [`CheckError`] when it does not end.
pub fn wait(mut handle: ReadHandle) -> Result<ReadOutcome, CheckError> {
    handle
        .wait_timeout(READ_LIMIT + GRACE)
        .ok_or_else(|| CheckError::Wrong("a read did not end by its deadline".to_owned()))
}

/// The error of a read that failed. Its blocks are let go if nothing can write into them.
#[must_use]
pub fn error_of(failure: ReadFailure) -> ReadError {
    if let FailedBlocks::Returned(blocks) = failure.blocks {
        drop::<OwnedBlocks>(blocks);
    }
    failure.error
}

/// Block ids.
#[must_use]
pub fn ids(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().copied().map(BlockId).collect()
}

fn ask(holder: &mut Worker, message: &ToHolder) -> Result<FromHolder, CheckError> {
    holder.send(message)?;
    match holder.recv(ANSWER_LIMIT)? {
        FromHolder::Failed { why } => Err(CheckError::Wrong(format!("the holder: {why}"))),
        answer => Ok(answer),
    }
}

fn out_of_turn() -> CheckError {
    CheckError::Wrong("the holder answered out of turn".to_owned())
}

/// Something for a read to wait for, which opens when it is told to: on a GPU, an event behind a stream's wait and a kernel;
/// else a flag.
#[derive(Debug)]
pub enum Held {
    /// A stream waits for the flag, and an event for the stream.
    Stream(StreamFlag),
    /// Nothing else waits.
    Flag(Arc<AtomicBool>),
}

impl Held {
    /// Lets it open.
    pub fn open(&self) {
        match self {
            Self::Stream(flag) => flag.give_up(),
            Self::Flag(flag) => flag.store(true, Ordering::Release),
        }
    }
}

/// The gate of a flag.
#[derive(Debug)]
pub struct FlagGate(pub Arc<AtomicBool>);

impl Gate for FlagGate {
    fn is_open(&self) -> Result<bool, MemoryError> {
        Ok(self.0.load(Ordering::Acquire))
    }
}

/// Median, least and most GB/s of `times` copies of `bytes` bytes within a memory.
///
/// # Errors
/// [`CheckError`].
pub fn copy_rates(memory: PoolMemory, bytes: u64, times: u32) -> Result<Vec<f64>, CheckError> {
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut rates = Vec::new();
    match memory {
        PoolMemory::Host => {
            let source = vec![1_u8; len];
            let mut target = vec![2_u8; len];
            for _ in 0..times {
                let begin = Instant::now();
                target.copy_from_slice(std::hint::black_box(&source));
                std::hint::black_box(&mut target);
                rates.push(gbps(bytes, begin.elapsed()));
            }
        }
        PoolMemory::Cuda(ordinal) => {
            let (memory, _) = CudaMemory::new(bytes.saturating_mul(2), &CudaOptions::on(ordinal))?;
            let stream = CudaStream::new(memory.device())?;
            let base = memory.base();
            // Once for the clocks to rise.
            for time in 0..=times {
                let begin = Instant::now();
                memory.copy_within(base, base.saturating_add(bytes), len, &stream)?;
                stream.synchronize()?;
                if time > 0 {
                    rates.push(gbps(bytes, begin.elapsed()));
                }
            }
        }
    }
    Ok(rates)
}

/// A rate.
#[must_use]
pub fn gbps(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(1e-9) / 1e9
}
