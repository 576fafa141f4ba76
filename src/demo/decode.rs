//! The demo's decode process: it has the KV of a text in its blocks, leases and describes them.

use std::time::Duration;

use kv_xfer::descriptor::BlockIdsJson;
use kv_xfer::engine::{Direction, LeaseSpec};
use kv_xfer::ids::{BlockId, LeaseId, RequestId};

use super::content::TokenKeys;
use super::history::History;
use super::messages::{FromDecode, ToDecode};
use super::side::{Side, SideError};
use crate::proc::Parent;

/// Serves the parent until it closes the pipe.
///
/// # Errors
/// [`SideError`], which has been told to the parent.
pub fn serve(parent: &mut Parent) -> Result<(), SideError> {
    let mut decode = None;
    while let Some(message) = parent.recv()? {
        let answer = answer(&mut decode, message).inspect_err(|error| {
            // Should the pipe be gone too, the parent is not there to be told.
            let _ = parent.send(&FromDecode::Failed {
                why: error.to_string(),
            });
        })?;
        parent.send(&answer)?;
    }
    Ok(())
}

fn answer(decode: &mut Option<Decode>, message: ToDecode) -> Result<FromDecode, SideError> {
    let out_of_turn = SideError::OutOfTurn("the decode process was not started yet");
    match message {
        ToDecode::Start(setup) => {
            let side = Side::start("decode", setup, true)?;
            let address = side.engine.side_channel().ok_or(out_of_turn)?;
            let ready = FromDecode::Ready {
                host: address.host(),
                port: address.port(),
                engine_id: side.engine.engine_id().to_string(),
            };
            *decode = Some(Decode {
                side,
                requests: 0,
                newest: None,
            });
            Ok(ready)
        }
        ToDecode::Finish {
            history,
            ttl_ms,
            order,
            want_pieces,
        } => {
            let decode = decode.as_mut().ok_or(out_of_turn)?;
            decode.side.settle()?;
            let blocks = decode.side.alloc(usize::try_from(history.len())?, order)?;
            decode.finish(&history, blocks, Duration::from_millis(ttl_ms), want_pieces)
        }
        ToDecode::Revoke => decode.as_mut().ok_or(out_of_turn)?.revoke(),
        ToDecode::Stop => {
            let leaked_blocks = match decode {
                Some(decode) => match decode.side.settle() {
                    Ok(()) => 0,
                    Err(SideError::NotBack { count, .. }) => count as u64,
                    Err(error) => return Err(error),
                },
                None => 0,
            };
            Ok(FromDecode::Stopped { leaked_blocks })
        }
    }
}

struct Decode {
    side: Side,
    requests: u64,
    newest: Option<LeaseId>,
}

impl Decode {
    /// What a decode engine has done when an answer is complete: the KV of prompt and answer is in
    /// its blocks. They are leased and described.
    fn finish(
        &mut self,
        history: &History,
        blocks: Vec<BlockId>,
        ttl: Duration,
        want_pieces: bool,
    ) -> Result<FromDecode, SideError> {
        let tokens = history.tokens();
        self.fill(&tokens, &blocks)?;
        let pieces = if want_pieces {
            self.pieces(&blocks)
        } else {
            Vec::new()
        };
        self.requests += 1;
        let leased = self
            .side
            .engine
            .lease(LeaseSpec {
                request: RequestId::new(format!("demo-{}", self.requests))?,
                blocks,
                tokens: tokens.len() as u64,
                hashes: self.side.hashes(&tokens)?,
                ttl: Some(ttl),
                direction: Direction::DecodeToPrefill,
                tenant: None,
                conversation: None,
            })
            .map_err(|refused| SideError::Lease(refused.to_string()))?;
        self.newest = Some(leased.lease);
        let kv_transfer_params = leased.remote.to_json_value(BlockIdsJson::Expanded);
        Ok(FromDecode::Finished {
            kv_transfer_params,
            pieces,
        })
    }

    /// Writes each chunk's content, which depends on layer, component, position and all tokens up to
    /// there.
    fn fill(&self, tokens: &[u32], blocks: &[BlockId]) -> Result<(), SideError> {
        let keys = TokenKeys::of(self.side.setup.seed, tokens);
        let mut bytes = vec![0; self.side.largest_chunk()];
        for (index, block) in blocks.iter().enumerate() {
            let keys = keys.block(index, self.side.setup.block_tokens);
            for (chunk, shape) in self.side.chunks() {
                let bytes = bytes.get_mut(..shape.len()).unwrap_or_default();
                shape.fill(keys, bytes);
                let region = usize::try_from(chunk.region)?;
                self.side
                    .pool
                    .write_block(region, *block, chunk.offset, bytes)?;
            }
        }
        Ok(())
    }

    /// Address and length of every run of blocks in every region.
    fn pieces(&self, blocks: &[BlockId]) -> Vec<(u64, u64)> {
        let mut pieces: Vec<(u64, u64)> = Vec::new();
        for region in self.side.pool.regions() {
            for block in blocks {
                let Ok(addr) = region.block_addr(*block) else {
                    continue;
                };
                match pieces.last_mut() {
                    Some((start, len)) if start.saturating_add(*len) == addr => {
                        *len = len.saturating_add(region.block_len);
                    }
                    _ => pieces.push((addr, region.block_len)),
                }
            }
        }
        pieces
    }

    /// What a decode engine does when it needs the blocks back: they are the next request's at once.
    fn revoke(&mut self) -> Result<FromDecode, SideError> {
        let lease = self
            .newest
            .ok_or(SideError::OutOfTurn("there is no lease to revoke"))?;
        if self.side.engine.revoke(lease) {
            let freed = self
                .side
                .engine
                .freed()
                .recv_timeout(Duration::from_secs(10));
            let freed = freed.map_err(|_| SideError::NotBack {
                count: self.side.used(),
                waited: Duration::from_secs(10),
            })?;
            let other =
                vec![u32::MAX; freed.blocks.len() * usize::try_from(self.side.setup.block_tokens)?];
            self.fill(&other, &freed.blocks)?;
            self.side.free(&freed.blocks)?;
        }
        Ok(FromDecode::Revoked)
    }
}
