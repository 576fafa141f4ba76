//! The demo's prefill process: it decides, reads, and compares every byte with what it must be.

use std::time::{Duration, Instant};

use kv_xfer::descriptor::{DescriptorLimits, Params};
use kv_xfer::engine::{FailedBlocks, Landed, Prompt, ReadRequest, ReleasePolicy};
use kv_xfer::memory::OwnedBlocks;
use kv_xfer::policy::{Action, DEFAULT_THRESHOLD};
use serde_json::Value;

use super::allocator::FreeOrder;
use super::baseline;
use super::content::TokenKeys;
use super::history::History;
use super::messages::{FromPrefill, ToPrefill};
use super::report::{NixlReport, TurnReport};
use super::side::{Side, SideError};
use crate::proc::Parent;

/// A read of the demo ends by then.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// Serves the parent until it closes the pipe.
///
/// # Errors
/// [`SideError`], which has been told to the parent.
pub fn serve(parent: &mut Parent) -> Result<(), SideError> {
    let mut prefill = None;
    while let Some(message) = parent.recv()? {
        let answer = answer(&mut prefill, message, parent).inspect_err(|error| {
            // Should the pipe be gone too, the parent is not there to be told.
            let _ = parent.send(&FromPrefill::Failed {
                why: error.to_string(),
            });
        })?;
        parent.send(&answer)?;
    }
    Ok(())
}

struct Prefill {
    side: Side,
    decode_pid: u32,
}

fn answer(
    prefill: &mut Option<Prefill>,
    message: ToPrefill,
    parent: &Parent,
) -> Result<FromPrefill, SideError> {
    let out_of_turn = SideError::OutOfTurn("the prefill process was not started yet");
    match message {
        ToPrefill::Start { setup, decode_pid } => {
            let side = Side::start("prefill", setup, false)?;
            let info = side.engine.transport();
            let nixl = NixlReport {
                version: info.version.clone(),
                backend: info.backend.clone(),
                transport: "unknown".to_owned(),
            };
            *prefill = Some(Prefill { side, decode_pid });
            Ok(FromPrefill::Ready { nixl })
        }
        ToPrefill::Turn {
            turn,
            prompt,
            local_hit_tokens,
            order,
            kv_transfer_params,
            tell_when_submitted,
        } => {
            let prefill = prefill.as_mut().ok_or(out_of_turn)?;
            let mut told = || match tell_when_submitted {
                true => parent.send(&FromPrefill::Submitted),
                false => Ok(()),
            };
            let turn = Turn {
                number: turn,
                prompt: &prompt,
                local_hit_tokens,
                order,
            };
            prefill.turn(&turn, kv_transfer_params, &mut told)
        }
        ToPrefill::Baseline { pieces } => {
            let prefill = prefill.as_ref().ok_or(out_of_turn)?;
            let bytes = pieces.iter().map(|(_, len)| len).sum();
            let memcpy = baseline::plain_copy(bytes)
                .map_err(|_| SideError::OutOfTurn("the baseline has no bytes"))?;
            let raw = i32::try_from(prefill.decode_pid)
                .ok()
                .map(|pid| baseline::raw_read(pid, &pieces));
            let raw = match raw {
                Some(Ok(timing)) => Some(timing.gbps()),
                Some(Err(error)) => {
                    tracing::warn!(%error, "no process_vm_readv baseline");
                    None
                }
                None => None,
            };
            Ok(FromPrefill::Baseline {
                memcpy_gbps: memcpy.gbps(),
                process_vm_readv_gbps: raw,
            })
        }
        ToPrefill::Stop => {
            let Some(prefill) = prefill else {
                return Ok(FromPrefill::Stopped {
                    quarantined: 0,
                    leaked_blocks: 0,
                });
            };
            let leaked_blocks = match prefill.side.settle() {
                Ok(()) => 0,
                Err(SideError::NotBack { count, .. }) => count as u64,
                Err(error) => return Err(error),
            };
            let claimed = prefill.side.pool.claimed_blocks() as u64;
            Ok(FromPrefill::Stopped {
                quarantined: prefill.side.engine.stats().quarantined,
                leaked_blocks: leaked_blocks.max(claimed),
            })
        }
    }
}

struct Turn<'a> {
    number: u32,
    prompt: &'a History,
    local_hit_tokens: u32,
    order: FreeOrder,
}

impl Prefill {
    fn turn(
        &mut self,
        turn: &Turn<'_>,
        params: Option<Value>,
        submitted: &mut dyn FnMut() -> Result<(), crate::proc::ProcError>,
    ) -> Result<FromPrefill, SideError> {
        let tokens = turn.prompt.tokens();
        let mut report = TurnReport {
            turn: turn.number,
            prompt_tokens: tokens.len() as u64,
            local_hit_tokens: u64::from(turn.local_hit_tokens),
            decision: "recompute".to_owned(),
            reason: "nothing_offered".to_owned(),
            ..TurnReport::default()
        };
        let remote = match params.map(|p| Params::from_json_value(p, &DescriptorLimits::default()))
        {
            Some(Ok(Params::Remote(remote))) => remote,
            Some(Ok(Params::Miss(_))) | None => {
                return Ok(FromPrefill::Turn {
                    report,
                    wrong_bytes: 0,
                });
            }
            Some(Err(error)) => return Err(error.into()),
        };
        let offer = self.side.engine.accept(&remote, None, None)?;
        let hashes = self.side.hashes(&tokens)?;
        let start = Instant::now();
        let decision = self.side.engine.decide(
            &offer,
            &Prompt {
                tokens: tokens.len() as u64,
                hashes: &hashes,
                local_hit_tokens: u64::from(turn.local_hit_tokens),
                threshold: DEFAULT_THRESHOLD,
            },
        );
        report.reason = decision.reason.as_str().to_owned();
        let Action::Read {
            first_block,
            blocks,
            tokens: read_tokens,
        } = decision.action
        else {
            self.side.engine.release(&offer);
            return Ok(FromPrefill::Turn {
                report,
                wrong_bytes: 0,
            });
        };
        let wanted = usize::try_from(read_tokens)?;
        let destination = self.side.alloc(wanted, turn.order)?;
        let destination = self.side.pool.claim(destination)?;
        let first = usize::try_from(first_block)?;
        let span = first..first.saturating_add(usize::try_from(blocks)?);
        let request = ReadRequest {
            offer: &offer,
            hashes: &hashes,
            span,
            blocks: destination,
            timeout: READ_LIMIT,
            release: ReleasePolicy::Always,
        };
        let before = Instant::now();
        let handle = self.side.engine.read(request);
        report.submit_us = before.elapsed().as_secs_f64() * 1e6;
        let handle = handle.map_err(|refused| SideError::Submit(refused.to_string()))?;
        submitted()?;
        match handle.wait() {
            Ok(Landed {
                blocks,
                report: read,
            }) => {
                report.total_ms = start.elapsed().as_secs_f64() * 1e3;
                report.decision = "read".to_owned();
                report.read_tokens = read_tokens;
                report.bytes = read.bytes;
                report.descriptors_unmerged = read.descriptors_unmerged;
                report.descriptors = read.descriptors;
                report.runs = read.runs;
                report.gbps = read.bytes as f64 / read.total.as_secs_f64().max(1e-9) / 1e9;
                let wrong_bytes = self.wrong_bytes(&tokens, first, &blocks)?;
                report.verified = read.bytes.saturating_sub(wrong_bytes);
                self.side.free(&blocks.into_ids())?;
                Ok(FromPrefill::Turn {
                    report,
                    wrong_bytes,
                })
            }
            Err(failure) => {
                report.total_ms = start.elapsed().as_secs_f64() * 1e3;
                report.reason = failure.error.name().to_owned();
                match failure.blocks {
                    FailedBlocks::Returned(blocks) => self.side.free(&blocks.into_ids())?,
                    FailedBlocks::Quarantined { .. } => self.side.settle()?,
                }
                Ok(FromPrefill::Turn {
                    report,
                    wrong_bytes: 0,
                })
            }
        }
    }

    /// Compares every byte of the blocks with the content that this prompt's tokens must have: worked
    /// out here, not copied from the other process.
    fn wrong_bytes(
        &self,
        tokens: &[u32],
        first: usize,
        blocks: &OwnedBlocks,
    ) -> Result<u64, SideError> {
        let keys = TokenKeys::of(self.side.setup.seed, tokens);
        let mut bytes = vec![0; self.side.largest_chunk()];
        let mut wrong = 0;
        for index in 0..blocks.len() {
            let keys = keys.block(first.saturating_add(index), self.side.setup.block_tokens);
            for (chunk, shape) in self.side.chunks() {
                let bytes = bytes.get_mut(..shape.len()).unwrap_or_default();
                let region = usize::try_from(chunk.region)?;
                blocks.read_at(index, region, chunk.offset, bytes)?;
                wrong += shape.wrong_bytes(keys, bytes);
            }
        }
        Ok(wrong)
    }
}
