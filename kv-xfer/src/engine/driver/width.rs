//! Which peers have agents in the helper lanes.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::{Driver, Fencing};
use crate::engine::connect::{Errand, Widening};
use crate::engine::lane::LaneCommand;
use crate::engine::link::Width;
use crate::engine::workers::Teardown;
use crate::transport::Transport;

/// A read of at least so many windows is worth further agents.
const WIDE_FROM: u64 = 4;

impl<T: Transport> Driver<T> {
    /// Has further agents made for a read's peer, if the read is large and there are none.
    pub(super) fn widen_for(&mut self, place: usize) {
        let helpers = self.channels.lanes.len();
        let Some(read) = self.read(place).filter(|_| helpers > 0) else {
            return;
        };
        let large = read.report.bytes >= self.config.window_bytes.saturating_mul(WIDE_FROM)
            || read.report.descriptors_unmerged
                >= WIDE_FROM.saturating_mul(self.config.window_descriptors as u64);
        let peer = read.job.peer.clone();
        let narrow = |width| width == Width::Narrow;
        if !large || !self.links.get(&peer).is_some_and(|link| narrow(link.width)) {
            return;
        }
        let wide = self.links.values().filter(|link| !narrow(link.width));
        if wide.count() >= self.config.wide_peers && !self.narrow_one() {
            return;
        }
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        link.width = Width::Widening;
        let _ = self.channels.errands.send(Errand::Widen(Widening {
            link: link.id,
            peer: link.peer.clone(),
            metadata: Arc::clone(&link.metadata),
            words: link.words,
            agents: helpers,
            limit: self.config.connect_timeout,
        }));
    }

    /// Takes the lanes' agents from the longest idle of the peers that have some.
    fn narrow_one(&mut self) -> bool {
        let idle = self
            .links
            .values()
            .filter(|link| matches!(link.width, Width::Wide(_)) && !self.uses_link(link.id))
            .min_by_key(|link| link.used)
            .map(|link| link.id);
        let Some(id) = idle else { return false };
        let Some(link) = self.links.values_mut().find(|link| link.id == id) else {
            return false;
        };
        let Width::Wide(agents) = std::mem::replace(&mut link.width, Width::Narrow) else {
            return false;
        };
        let fence = self.new_fence(Vec::new(), agents);
        self.detach(id, agents, fence);
        true
    }

    /// Further agents have been made.
    pub(super) fn on_widened(&mut self, link: u64, agents: Vec<T::Agent>) {
        let helpers = self.channels.lanes.len();
        let found = self.links.values_mut().find(|l| l.id == link);
        let Some(found) = found.filter(|_| self.stopping.is_none()) else {
            // Its peer was parted from meanwhile.
            for agent in agents {
                let fence = self.new_fence(Vec::new(), 1);
                self.tear_down(Teardown {
                    fence,
                    agent,
                    requests: Vec::new(),
                    flush: false,
                });
            }
            return;
        };
        let mut attached = 0;
        for (lane, agent) in self.channels.lanes.iter().zip(agents) {
            let command = LaneCommand::Attach {
                link,
                peer: found.peer.clone(),
                agent: Box::new(agent),
            };
            if !lane.tell(command) {
                tracing::error!("a helper lane is gone");
                break;
            }
            attached += 1;
        }
        // None, because they could not be made: the link keeps its own, and is asked no more.
        found.width = Width::Wide(attached.min(helpers));
    }

    /// Gives a read's next window to a helper lane that has room. False if none has.
    pub(super) fn give_to_lane(&mut self, place: usize) -> bool {
        let Some(read) = self.reads.get_mut(place).and_then(Option::as_mut) else {
            return false;
        };
        let Some(link) = self.links.get(&read.job.peer) else {
            return false;
        };
        let Width::Wide(agents) = link.width else {
            return false;
        };
        for (index, lane) in self.channels.lanes.iter().take(agents).enumerate() {
            if !lane.has_room() {
                continue;
            }
            let batch = self.spare.pop().unwrap_or_default();
            match read.cut_for(index, place, &self.config, batch) {
                Ok((window, cost)) => {
                    let id = link.id;
                    self.cost = cost;
                    if lane.post(id, window).is_err() {
                        tracing::error!("a helper lane is gone with a window of a read");
                    }
                    return true;
                }
                Err(batch) => self.spare.push(batch),
            }
        }
        false
    }

    /// A number under which agents are destroyed, and what waits for it.
    pub(super) fn new_fence(
        &mut self,
        reads: Vec<(
            usize,
            crate::engine::handle::ReadId,
            crate::memory::OwnedBlocks,
        )>,
        agents: usize,
    ) -> u64 {
        let fence = self.next_fence;
        self.next_fence = fence.wrapping_add(1);
        let fencing = Fencing {
            agents,
            failed: false,
            reads,
        };
        if agents > 0 {
            self.fencing.insert(fence, fencing);
        }
        fence
    }

    /// Has the lanes give up their agents for a link.
    pub(super) fn detach(&self, link: u64, agents: usize, fence: u64) {
        for lane in self.channels.lanes.iter().take(agents) {
            // A lane that is gone never reports: what is in doubt stays so.
            let _ = lane.tell(LaneCommand::Detach { link, fence });
        }
    }
}
