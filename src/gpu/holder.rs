//! The process whose blocks are read.

use std::time::Duration;

use kv_xfer::descriptor::BlockIdsJson;
use kv_xfer::engine::{Direction, LeaseSpec};
use kv_xfer::ids::{BlockId, LeaseId, RequestId};

use super::proto::{FromHolder, ToHolder};
use super::side::{CheckError, Side};
use crate::proc::Parent;

/// Leases outlast every step.
const TTL: Duration = Duration::from_secs(600);
/// Time for the blocks of a revoked lease to come back.
const COME_BACK: Duration = Duration::from_secs(10);

/// Serves the parent until it closes the pipe.
///
/// # Errors
/// [`CheckError`] when the parent is gone; everything else is answered.
pub fn serve(parent: &mut Parent) -> Result<(), CheckError> {
    let mut holder = Holder::default();
    while let Some(message) = parent.recv()? {
        let answer = holder
            .answer(message)
            .unwrap_or_else(|error| FromHolder::Failed {
                why: error.to_string(),
            });
        parent.send(&answer)?;
    }
    Ok(())
}

#[derive(Default)]
struct Holder {
    side: Option<Side>,
    leased: Option<LeaseId>,
    requests: u64,
}

impl Holder {
    fn answer(&mut self, message: ToHolder) -> Result<FromHolder, CheckError> {
        match message {
            ToHolder::Setup { shape, memory } => {
                self.side = None;
                self.leased = None;
                let side = Side::start("holder", &shape, memory, |config| {
                    config.holder.bind = Some(([127, 0, 0, 1], 0).into());
                    config.holder.default_ttl = TTL;
                })?;
                let address = side.engine.side_channel();
                let ready = address.map(|address| FromHolder::Ready {
                    host: address.host(),
                    port: address.port(),
                });
                self.side = Some(side);
                ready.ok_or_else(|| CheckError::Wrong("the holder serves nobody".to_owned()))
            }
            ToHolder::Lease { blocks, seed } => self.lease(&blocks, seed),
            ToHolder::Revoke { after_us, seed } => {
                self.revoke(Duration::from_micros(after_us), seed)
            }
        }
    }

    fn side(&self) -> Result<&Side, CheckError> {
        let side = self.side.as_ref();
        side.ok_or_else(|| CheckError::Wrong("the holder was not set up".to_owned()))
    }

    fn lease(&mut self, blocks: &[u32], seed: u64) -> Result<FromHolder, CheckError> {
        if let Some(last) = self.leased.take() {
            self.side()?.engine.revoke(last);
        }
        let side = self.side()?;
        while side.engine.freed().try_recv().is_ok() {}
        for block in blocks {
            side.fill(seed, *block)?;
        }
        self.requests += 1;
        let side = self.side()?;
        let leased = side
            .engine
            .lease(LeaseSpec {
                request: RequestId::new(format!("check-{}", self.requests))?,
                blocks: blocks.iter().copied().map(BlockId).collect(),
                tokens: blocks.len() as u64 * u64::from(side.pool.layout().block_tokens()),
                hashes: side.hashes(blocks.len())?,
                ttl: Some(TTL),
                direction: Direction::DecodeToPrefill,
                tenant: None,
                conversation: None,
            })
            .map_err(|refused| CheckError::Wrong(refused.to_string()))?;
        self.leased = Some(leased.lease);
        Ok(FromHolder::Leased {
            kv_transfer_params: leased.remote.to_json_value(BlockIdsJson::Omitted),
        })
    }

    fn revoke(&mut self, after: Duration, seed: u64) -> Result<FromHolder, CheckError> {
        std::thread::sleep(after);
        let lease = self.leased.take();
        let side = self.side()?;
        let held = lease.is_some_and(|lease| side.engine.revoke(lease));
        if held {
            let freed = side.engine.freed().recv_timeout(COME_BACK);
            let freed = freed.map_err(|_| {
                CheckError::Wrong("the revoked blocks did not come back".to_owned())
            })?;
            for block in freed.blocks {
                side.fill(seed, block.0)?;
            }
        }
        Ok(FromHolder::Revoked { held })
    }
}
