//! How far the clocks of met peers are from ours, so that a descriptor's age can be told.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use parking_lot::Mutex;

use super::offer::Offer;
use crate::clock::MonoTime;
use crate::ids::Incarnation;
use crate::peer::{ClockOffset, PeerKey};

/// Most peers remembered.
const MAX_PEERS: usize = 4096;

/// Clock offsets, each of one life of a peer.
#[derive(Debug, Default)]
pub(crate) struct Clocks(Mutex<HashMap<PeerKey, (Incarnation, ClockOffset)>>);

impl Clocks {
    /// Remembers a sample; of two of the same life, the better one.
    pub(crate) fn learn(&self, peer: &PeerKey, life: Incarnation, sample: ClockOffset) {
        let mut known = self.0.lock();
        if known.len() >= MAX_PEERS {
            known.clear();
        }
        let entry = known.entry(peer.clone()).or_insert((life, sample));
        *entry = if entry.0 == life {
            (life, entry.1.better(sample))
        } else {
            (life, sample)
        };
    }

    /// When the lease behind an offer ends on our clock: long ago, if a read found it lost; as the holder
    /// answered to a renewal; before any, as far as its arrival tells, and earlier where the holder's
    /// clock is known and says so.
    pub(crate) fn lease_end(&self, offer: &Offer) -> MonoTime {
        if offer.lost.get().is_some() {
            return MonoTime::ZERO;
        }
        if let Some(end) = *offer.told_end.lock() {
            return end;
        }
        let ticket = &offer.ticket;
        let latest = ticket.ends_at(offer.arrived);
        let end_there = ticket.stamp.saturating_add(ticket.remaining).as_secs_f64();
        self.0
            .lock()
            .get(&offer.peer)
            .filter(|(life, _)| *life == ticket.incarnation)
            .and_then(|(_, offset)| offset.to_local(end_there))
            .map_or(latest, |end| end.min(latest))
    }
}
