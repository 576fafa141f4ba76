//! The side channels of the world: every request is answered, refused, lost or damaged at once, and
//! may take time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::dice::Dice;
use super::fabric::Fabric;
use super::time::Time;
use crate::clock::{Clock, ManualClock, MonoTime};
use crate::descriptor::LeaseRef;
use crate::engine::{Answers, CardSource, ConnectError, FetchedPeer};
use crate::ids::{Incarnation, LeaseId, Rank};
use crate::peer::{Card, CardPolicy, ClockOffset, PeerAddr, PeerCard, decode_reply};
use crate::side_channel::{
    Handler, ReleaseRequest, RenewOutcome, RenewRequest, SideChannelError, Step,
};

/// How often what goes wrong, in a thousand.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct NetFaults {
    /// A request or its answer does not arrive.
    pub lost: u32,
    /// An answer of the address's last tenant arrives.
    pub stale: u32,
    /// A bit of a card is flipped.
    pub damaged: u32,
    pub slow: u32,
}

/// Who answers at an address.
struct Home {
    life: usize,
    answers: Arc<Answers>,
    clock: Arc<ManualClock>,
    card: Option<Card>,
}

#[derive(Default)]
struct Inner {
    homes: BTreeMap<PeerAddr, Home>,
    before: BTreeMap<PeerAddr, Card>,
    faults: NetFaults,
    dice: Option<Dice>,
    /// What holders have promised in their answers: which life, which lease, until when on its clock.
    promised: Vec<(usize, LeaseId, MonoTime)>,
    /// A damaged card was taken for a good one.
    believed_damage: bool,
}

/// All side channels. Clones share them.
#[derive(Clone)]
pub(super) struct Net {
    inner: Arc<Mutex<Inner>>,
    fabric: Fabric,
    time: Time,
}

impl Net {
    pub(super) fn new(fabric: Fabric, time: Time, faults: NetFaults, dice: Dice) -> Self {
        let dice = Some(dice);
        let inner = Inner {
            faults,
            dice,
            ..Inner::default()
        };
        Self {
            inner: Arc::new(Mutex::new(inner)),
            fabric,
            time,
        }
    }

    pub(super) fn set_faults(&self, faults: NetFaults) {
        self.inner.lock().faults = faults;
    }

    /// A life answers at an address from now on.
    pub(super) fn open(
        &self,
        addr: PeerAddr,
        life: usize,
        answers: Arc<Answers>,
        clock: Arc<ManualClock>,
    ) {
        let home = Home {
            life,
            answers,
            clock,
            card: None,
        };
        self.inner.lock().homes.insert(addr, home);
    }

    /// Nobody answers there any more.
    pub(super) fn close(&self, addr: &PeerAddr) {
        let mut inner = self.inner.lock();
        if let Some(Home {
            card: Some(card), ..
        }) = inner.homes.remove(addr)
        {
            inner.before.insert(addr.clone(), card);
        }
    }

    pub(super) fn take_promised(&self) -> Vec<(usize, LeaseId, MonoTime)> {
        std::mem::take(&mut self.inner.lock().promised)
    }

    pub(super) fn believed_damage(&self) -> bool {
        self.inner.lock().believed_damage
    }
}

impl Inner {
    fn roll(&mut self, per_mille: u32) -> bool {
        per_mille > 0
            && self
                .dice
                .as_mut()
                .is_some_and(|dice| dice.chance(per_mille))
    }

    /// How long one way takes.
    fn way(&mut self) -> Duration {
        let slow = self.roll(self.faults.slow);
        let longest = Duration::from_millis(if slow { 400 } else { 2 });
        let dice = self.dice.as_mut();
        dice.map_or(Duration::ZERO, |dice| {
            dice.time(Duration::from_micros(20), longest)
        })
    }
}

/// The side channels as one life sees them.
pub(super) struct LifeCards {
    net: Net,
    life: usize,
    clock: Arc<ManualClock>,
}

impl std::fmt::Debug for LifeCards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LifeCards({})", self.life)
    }
}

impl LifeCards {
    pub(super) fn new(net: Net, life: usize, clock: Arc<ManualClock>) -> Self {
        Self { net, life, clock }
    }

    /// The request has arrived; who answers it.
    fn send(
        &self,
        address: &PeerAddr,
        limit: Duration,
    ) -> Result<(usize, Arc<Answers>, Arc<ManualClock>), ConnectError> {
        let mut inner = self.net.inner.lock();
        let way = inner.way();
        let faults = inner.faults;
        let lost = inner.roll(faults.lost);
        let home = inner.homes.get(address).map(|home| {
            let (answers, clock) = (Arc::clone(&home.answers), Arc::clone(&home.clock));
            (home.life, answers, clock)
        });
        drop(inner);
        let Some(home) = home else {
            self.net.time.pass(way);
            let peer = address.clone();
            return Err(failed(
                address,
                SideChannelError::ConnectionRefused { peer },
            ));
        };
        if lost || !self.net.fabric.state().connected(self.life, home.0) {
            return Err(self.late(address, limit));
        }
        self.net.time.pass(way);
        Ok(home)
    }

    /// The answer arrives, unless it is lost.
    fn answer(&self, address: &PeerAddr, limit: Duration) -> Result<(), ConnectError> {
        let mut inner = self.net.inner.lock();
        let faults = inner.faults;
        let (way, lost) = (inner.way(), inner.roll(faults.lost));
        drop(inner);
        if lost {
            return Err(self.late(address, limit));
        }
        self.net.time.pass(way);
        Ok(())
    }

    /// Nothing has come by the limit. The scheduler makes the time pass for meetings, by holding
    /// their results back; here it passes in part only, so that a history is not all waiting.
    fn late(&self, address: &PeerAddr, limit: Duration) -> ConnectError {
        self.net.time.pass(limit / 64);
        let (peer, step) = (address.clone(), Step::Reply);
        let after = limit;
        failed(address, SideChannelError::Timeout { peer, step, after })
    }
}

fn failed(address: &PeerAddr, cause: SideChannelError) -> ConnectError {
    ConnectError::SideChannel {
        address: address.to_string(),
        cause: Arc::new(cause),
    }
}

impl CardSource for LifeCards {
    fn fetch(
        &self,
        address: &PeerAddr,
        rank: Rank,
        limit: Duration,
    ) -> Result<FetchedPeer, ConnectError> {
        let sent = self.clock.now();
        {
            let mut inner = self.net.inner.lock();
            let faults = inner.faults;
            if inner.roll(faults.stale)
                && let Some(card) = inner.before.get(address).cloned()
            {
                let offset = None;
                return Ok(FetchedPeer { card, offset });
            }
        }
        let (_, answers, holder_clock) = self.send(address, limit)?;
        let none = || ConnectError::Refused("there is no such rank".into());
        let bytes = answers.card(rank).ok_or_else(none)?;
        let stamp = holder_clock.now();
        self.answer(address, limit)?;
        let mut inner = self.net.inner.lock();
        let faults = inner.faults;
        let damaged = inner.roll(faults.damaged);
        let known = inner.homes.get(address).and_then(|home| home.card.clone());
        let card = match known {
            Some(card) if !damaged => card,
            known => {
                let mut bytes = bytes.to_vec();
                if damaged && let Some(dice) = inner.dice.as_mut() {
                    let (at, bit) = (dice.below(bytes.len()), dice.below(8));
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte ^= 1 << bit;
                    }
                }
                match decode_reply(address, &bytes, &CardPolicy::default()) {
                    Ok(PeerCard::KvXfer(card)) => {
                        if damaged {
                            // What is not ours may be rewritten: the card itself is not.
                            inner.believed_damage |= known.is_some_and(|known| known != *card);
                        } else if let Some(home) = inner.homes.get_mut(address) {
                            home.card = Some((*card).clone());
                        }
                        *card
                    }
                    Ok(_) => return Err(ConnectError::Refused("a vLLM engine".into())),
                    Err(error) => return Err(ConnectError::Card(Arc::new(error))),
                }
            }
        };
        let offset = ClockOffset::sample(sent, self.clock.now(), stamp.as_secs_f64());
        Ok(FetchedPeer { card, offset })
    }

    fn release(
        &self,
        address: &PeerAddr,
        incarnation: Incarnation,
        lease: LeaseRef,
        limit: Duration,
    ) -> Result<(), ConnectError> {
        let (_, answers, _) = self.send(address, limit)?;
        let lease = lease.id;
        answers.release(&ReleaseRequest { incarnation, lease });
        self.answer(address, limit)
    }

    fn renew(
        &self,
        address: &PeerAddr,
        incarnation: Incarnation,
        lease: LeaseRef,
        extension: Duration,
        limit: Duration,
    ) -> Result<Option<Duration>, ConnectError> {
        let (life, answers, clock) = self.send(address, limit)?;
        let lease = lease.id;
        let outcome = answers.renew(&RenewRequest {
            incarnation,
            lease,
            extension,
        });
        let left = match outcome {
            RenewOutcome::Renewed { remaining } | RenewOutcome::Refused { remaining } => {
                let until = clock.now() + remaining;
                self.net.inner.lock().promised.push((life, lease, until));
                Some(remaining)
            }
            RenewOutcome::UnknownLease | RenewOutcome::Restarted { .. } => None,
        };
        self.answer(address, limit)?;
        Ok(left)
    }
}
