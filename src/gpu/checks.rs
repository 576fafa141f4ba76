//! What is checked.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kv_xfer::engine::{Landed, ReadError};
use kv_xfer::ids::BlockId;
use kv_xfer::memory::StreamOrder;
use kv_xfer::memory::cuda::{CudaStream, FlagState, StreamFlags};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::reader::{FlagGate, Held, Pair, error_of, gbps, wait};
use super::report::{Check, Rate};
use super::side::CheckError;

/// What blocks hold, and what they are overwritten with.
const SEED: u64 = 1;
const OTHER_SEED: u64 = 2;
/// How long a read that must wait is watched.
const A_WHILE: Duration = Duration::from_millis(50);
/// How often the revocations are tried again while all have come after the last byte.
const MOST_ROUNDS: u32 = 20;

/// Different blocks of a pool in an order that a busy allocator might give.
fn shuffled(count: u32, of: u32, seed: u64) -> Vec<u32> {
    let mut blocks: Vec<u32> = (0..of).collect();
    blocks.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    blocks.truncate(usize::try_from(count).unwrap_or(usize::MAX));
    blocks
}

/// What a check has found, and what carried its bytes.
pub type Found = (Check, Option<String>);

fn check(memory: &str, name: &'static str, ok: bool, found: String) -> Check {
    Check {
        memory: memory.to_owned(),
        name,
        ok,
        found,
    }
}

/// Reads all blocks but one, and looks at every byte: by the processor, and on the GPU by the GPU.
///
/// # Errors
/// [`CheckError`].
pub fn every_byte(pair: &mut Pair<'_>, memory: &str) -> Result<Found, CheckError> {
    let blocks = pair.shape.blocks.saturating_sub(1);
    let (remote, local) = (shuffled(blocks, blocks, 3), shuffled(blocks, blocks, 4));
    pair.spoil(&local)?;
    let offer = pair.lease(&remote, SEED)?;
    let outcome = wait(pair.read(&offer, &local, StreamOrder::default())?)?;
    let Landed { blocks, report } =
        outcome.map_err(|failure| CheckError::Wrong(failure.to_string()))?;
    let wrong = pair.wrong_bytes(SEED, &remote, &local)?;
    let on_device = pair.wrong_words_on_device(SEED, &remote, &local)?;
    drop(blocks);
    let by_gpu = match on_device {
        Some(words) => format!(", {words} wrong words on the GPU"),
        None => String::new(),
    };
    let found = format!("{} bytes, {wrong} wrong{by_gpu}", report.bytes);
    let ok = wrong == 0 && on_device.unwrap_or(0) == 0 && report.bytes > 0;
    let carrier = report.fabric.map(|fabric| fabric.to_string());
    Ok((check(memory, "every byte", ok, found), carrier))
}

/// Has the lease revoked, and the blocks overwritten, at some point of each of many reads. What is reported as landed must be
/// right; the rest must be told.
///
/// # Errors
/// [`CheckError`].
pub fn revoked(pair: &mut Pair<'_>, memory: &str, times: u32) -> Result<Found, CheckError> {
    let times = times.max(1);
    let blocks = pair.shape.blocks.saturating_sub(1);
    let (remote, local) = (shuffled(blocks, blocks, 5), shuffled(blocks, blocks, 6));
    // How long one takes, to revoke within it.
    let offer = pair.lease(&remote, SEED)?;
    let begin = Instant::now();
    wait(pair.read(&offer, &local, StreamOrder::default())?)?
        .map_err(|failure| CheckError::Wrong(failure.to_string()))?;
    let usual = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
    let (mut landed, mut lost, mut others, mut wrong) = (0, 0, Vec::new(), 0);
    let mut time = 0;
    // On a busy machine revocations may come late; some must come in time.
    while time < times || (lost == 0 && time < times.saturating_mul(MOST_ROUNDS)) {
        let offer = pair.lease(&remote, SEED)?;
        let after = usual.saturating_mul((time % times).into()) / u64::from(times);
        time += 1;
        pair.revoke(after, OTHER_SEED)?;
        let outcome = wait(pair.read(&offer, &local, StreamOrder::default())?)?;
        pair.revoked()?;
        match outcome {
            Ok(_) => {
                landed += 1;
                wrong += pair.wrong_bytes(SEED, &remote, &local)?;
            }
            Err(failure) => match error_of(failure) {
                ReadError::LeaseLost { .. } => lost += 1,
                error => others.push(error.to_string()),
            },
        }
    }
    let mut found = format!(
        "{time} reads: {lost} told that the lease was lost, {landed} landed before it with {wrong} wrong bytes"
    );
    if let Some(error) = others.first() {
        found.push_str(&format!(", {} failed: {error}", others.len()));
    }
    let ok = wrong == 0 && others.is_empty() && lost > 0;
    Ok((check(memory, "revoked during the read", ok, found), None))
}

/// A read waits for a stream that still writes its blocks, and a stream that uses them waits for the read.
///
/// # Errors
/// [`CheckError`].
pub fn order(pair: &mut Pair<'_>, memory: &str) -> Result<Found, CheckError> {
    let spare = pair.shape.blocks.saturating_sub(1);
    let (remote, local) = ([0, 1, 2], [2, 0, 1]);
    let offer = pair.lease(&remote, SEED)?;
    let pool = Arc::clone(&pair.side.pool);
    let region = *pool
        .regions()
        .first()
        .ok_or_else(|| CheckError::Wrong("the pool has no regions".to_owned()))?;
    let addr = |block| {
        region
            .block_addr(BlockId(block))
            .map_err(|error| CheckError::Wrong(error.to_string()))
    };
    let len = usize::try_from(region.block_len).unwrap_or(0);
    let mut order = StreamOrder::default();
    let gpu = pool.memory().as_cuda();
    let (held, user) = match gpu {
        Some(memory) => {
            let flags = StreamFlags::new(memory.device(), 2)?;
            let take = || {
                let flag = flags.take();
                flag.ok_or_else(|| CheckError::Wrong("no flag".to_owned()))
            };
            let (before, after) = (take()?, take()?);
            // What writes into the destination until it is let go, and what uses it afterwards.
            let writer = CudaStream::new(memory.device())?;
            before.hold(&writer)?;
            memory.set(addr(2)?, 0x77, len, &writer)?;
            order = order.after(writer.record()?).then(after.signal());
            let user = CudaStream::new(memory.device())?;
            after.hold(&user)?;
            memory.copy_within(addr(2)?, addr(spare)?, len, &user)?;
            (Held::Stream(before), Some((user, after)))
        }
        None => {
            let flag = Arc::new(AtomicBool::new(false));
            order = order.after(FlagGate(Arc::clone(&flag)));
            (Held::Flag(flag), None)
        }
    };
    let mut handle = pair.read(&offer, &local, order)?;
    let early = handle.wait_timeout(A_WHILE).is_some();
    held.open();
    let outcome = wait(handle)?;
    let mut faults = Vec::new();
    if early {
        faults.push("it ended before its stream was let go");
    }
    match outcome {
        Ok(_) if pair.wrong_bytes(SEED, &remote, &local)? != 0 => {
            faults.push("wrong bytes have landed")
        }
        Ok(_) => {}
        Err(_) => faults.push("it failed"),
    }
    if let Some((user, flag)) = user {
        user.synchronize()?;
        if flag.state() != FlagState::Landed {
            faults.push("the flag does not say that it has landed");
        }
        if pair.wrong_bytes(SEED, &[0], &[2])? != 0 {
            faults.push("what a stream was to use is wrong");
        }
        let mut used = vec![0; len];
        pool.read_block(0, BlockId(spare), 0, &mut used)?;
        if crate::bench::pattern::wrong_bytes(SEED, 0, 0, &used) != 0 {
            faults.push("a stream has used blocks before they had landed");
        }
    }
    let found = match (faults.is_empty(), gpu.is_some()) {
        (true, true) => "a read waited for a stream, and a stream for the read".to_owned(),
        (true, false) => "a read waited until it was let go".to_owned(),
        (false, _) => faults.join("; "),
    };
    Ok((
        check(memory, "order with streams", faults.is_empty(), found),
        None,
    ))
}

/// Reads all blocks but one, several times.
///
/// # Errors
/// [`CheckError`].
pub fn rate(
    pair: &mut Pair<'_>,
    memory: &str,
    copies: &[f64],
    times: u32,
) -> Result<Rate, CheckError> {
    let blocks = pair.shape.blocks.saturating_sub(1);
    let (remote, local) = (shuffled(blocks, blocks, 7), shuffled(blocks, blocks, 8));
    let offer = pair.lease(&remote, SEED)?;
    let mut rates = Vec::new();
    let (mut bytes, mut descriptors) = (0, 0);
    // Once to meet.
    for time in 0..=times {
        let begin = Instant::now();
        let landed = wait(pair.read(&offer, &local, StreamOrder::default())?)?
            .map_err(|failure| CheckError::Wrong(failure.to_string()))?;
        let took = begin.elapsed();
        (bytes, descriptors) = (landed.report.bytes, landed.report.descriptors);
        if time > 0 {
            rates.push(gbps(bytes, took));
        }
    }
    Ok(Rate {
        memory: memory.to_owned(),
        regions: pair.shape.regions,
        block_bytes: pair.shape.block_bytes,
        bytes,
        read_gbps: median(&rates),
        read_gbps_range: (
            rates.iter().copied().fold(f64::INFINITY, f64::min),
            rates.iter().copied().fold(0.0, f64::max),
        ),
        copy_gbps: median(copies),
        descriptors,
    })
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}
