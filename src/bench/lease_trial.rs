//! What very many leases cost a holder: time of each call, and memory.

use std::collections::HashSet;
use std::thread;
use std::time::{Duration, Instant};

use kv_xfer::engine::Engine;
use kv_xfer::ids::LeaseId;
use serde::{Deserialize, Serialize};

use super::fixture::{BenchError, LIMIT};
use super::here;
use super::holders::lease_spec;
use super::stats::Times;

/// Time to live of the leases that are to expire.
const SHORT: Duration = Duration::from_secs(3);
/// How often another lease is granted while they expire.
const BEAT: Duration = Duration::from_micros(200);

/// What leases cost. Pairs are the median and the 99th percentile, microseconds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct LeaseCosts {
    /// How many there were at once.
    pub count: u32,
    /// [`Engine::lease`], which also seals the description.
    pub grant_us: [f64; 2],
    /// [`Engine::renew`].
    pub renew_us: [f64; 2],
    /// [`Engine::revoke`].
    pub revoke_us: [f64; 2],
    /// Expiring, for each lease: from the first that came back to the last. They fall due within
    /// the time that renewing them takes.
    pub expire_us: f64,
    /// Longest [`Engine::lease`] of another request while all of them expired, microseconds.
    pub grant_while_expiring_max_us: f64,
    /// Resident memory that came with them, bytes for each lease.
    pub bytes_each: f64,
    /// Leases that did not come back exactly once.
    pub lost: u64,
}

/// Leases one block after the other.
struct Granting<'a> {
    engine: &'a Engine,
    requests: u64,
}

impl Granting<'_> {
    fn grant(&mut self, ttl: Duration) -> Result<(LeaseId, Duration), BenchError> {
        self.requests += 1;
        let pool = u64::from(self.engine.pool().block_count().max(1));
        let block = u32::try_from(self.requests % pool).unwrap_or(0);
        let spec = lease_spec((1 << 32) + self.requests, &[block], ttl)?;
        let start = Instant::now();
        let leased = self.engine.lease(spec);
        let took = start.elapsed();
        let leased = leased.map_err(|refused| BenchError::Lease(refused.to_string()))?;
        Ok((leased.lease, took))
    }

    fn grant_many(
        &mut self,
        count: u32,
        ttl: Duration,
    ) -> Result<(Vec<LeaseId>, Times), BenchError> {
        let mut leases = Vec::with_capacity(count as usize);
        let mut times = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let (lease, took) = self.grant(ttl)?;
            leases.push(lease);
            times.push(took);
        }
        Ok((leases, times.into_iter().collect()))
    }
}

/// Times a call for each lease, and counts those that did not hold.
fn timed(leases: &[LeaseId], call: impl Fn(LeaseId) -> bool) -> (Times, u64) {
    let mut ended = 0;
    let times = leases
        .iter()
        .map(|lease| {
            let start = Instant::now();
            ended += u64::from(!call(*lease));
            start.elapsed()
        })
        .collect();
    (times, ended)
}

/// Grants `count` leases of one block each, renews and revokes them, then grants as many again and
/// lets them expire.
///
/// # Errors
/// [`BenchError`] when one is refused.
pub fn run(engine: &Engine, count: u32) -> Result<LeaseCosts, BenchError> {
    let mut granting = Granting {
        engine,
        requests: 0,
    };
    let before = here::resident();
    let (leases, grants) = granting.grant_many(count, LIMIT)?;
    let grown = here::resident().saturating_sub(before);
    let (renewals, not_renewed) = timed(&leases, |lease| engine.renew(lease, LIMIT));
    let (revokes, not_revoked) = timed(&leases, |lease| engine.revoke(lease));
    let mut live: HashSet<LeaseId> = leases.into_iter().collect();
    let mut lost = not_renewed + not_revoked;
    while let Ok(freed) = engine.freed().recv_timeout(BEAT) {
        lost += u64::from(!live.remove(&freed.lease));
    }
    lost += live.len() as u64;

    let (leases, _) = granting.grant_many(count, SHORT)?;
    // Closer together than granting them leaves them.
    let _ = timed(&leases, |lease| engine.renew(lease, SHORT));
    let mut live: HashSet<LeaseId> = leases.into_iter().collect();
    let (mut first, mut last) = (None, Instant::now());
    let mut slowest = Duration::ZERO;
    let end = Instant::now() + LIMIT;
    let mut others = HashSet::new();
    while !live.is_empty() && Instant::now() < end {
        let (other, took) = granting.grant(LIMIT)?;
        if first.is_some() {
            slowest = slowest.max(took);
        }
        others.insert(other);
        engine.revoke(other);
        while let Ok(freed) = engine.freed().try_recv() {
            if live.remove(&freed.lease) {
                last = Instant::now();
                first.get_or_insert(last);
            } else {
                lost += u64::from(!others.remove(&freed.lease));
            }
        }
        thread::sleep(BEAT);
    }
    lost += live.len() as u64;
    let spread = first.map_or(Duration::ZERO, |first| {
        last.saturating_duration_since(first)
    });
    let each = f64::from(count.max(1));
    let pair = |times: &Times| [times.median(), times.quantile(0.99)];
    Ok(LeaseCosts {
        count,
        grant_us: pair(&grants),
        renew_us: pair(&renewals),
        revoke_us: pair(&revokes),
        expire_us: spread.as_secs_f64() * 1e6 / each,
        grant_while_expiring_max_us: slowest.as_secs_f64() * 1e6,
        bytes_each: grown as f64 / each,
        lost,
    })
}
