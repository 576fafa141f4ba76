//! Who is known, being met, or left alone for a while.
//!
//! ```text
//!            want            card
//!  (unknown) ───► Connecting ────► Ready ──lost──► Suspect ──want──► Connecting
//!                     │ failure, deadline    └─lost again─┐
//!                     ▼                                   ▼
//!                  Backoff(until) ◄───────────────────────┘
//!                     └─until passes─► Suspect
//! ```
//!
//! The table does no I/O. `want` says what to do; what came of it is reported with the attempt's
//! number, so that a late answer to an abandoned attempt changes nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use super::standing::{
    CardOutcome, Expired, MeetNext, PeerConfig, PeerError, PeerKey, PeerState, Want,
};
use crate::clock::MonoTime;
use crate::ids::{EngineId, Incarnation};

#[derive(Debug)]
struct Entry {
    state: PeerState,
    identity: Option<(EngineId, Option<Incarnation>)>,
    /// Attempts failed since the last card.
    connect_failures: u32,
    /// Losses since the last landed read.
    losses: u32,
    used: MonoTime,
}

/// All peers of an engine.
#[derive(Debug)]
pub struct PeerTable {
    config: PeerConfig,
    // Sorted, so that the same events have the same consequences in every run.
    entries: BTreeMap<PeerKey, Entry>,
    attempts: u64,
}

impl PeerTable {
    /// An empty table.
    #[must_use]
    pub fn new(config: PeerConfig) -> Self {
        Self {
            config,
            entries: BTreeMap::new(),
            attempts: 0,
        }
    }

    /// How a peer stands; `None` when it is unknown.
    #[must_use]
    pub fn state(&self, peer: &PeerKey) -> Option<PeerState> {
        self.entries.get(peer).map(|entry| entry.state)
    }

    /// A read wants this peer.
    ///
    /// # Errors
    /// [`PeerError::TableFull`] when it is unknown and every remembered peer is in use.
    pub fn want(&mut self, peer: &PeerKey, now: MonoTime) -> Result<Want, PeerError> {
        if !self.entries.contains_key(peer) {
            self.make_room(peer)?;
        }
        let deadline = now.saturating_add(self.config.connect_timeout);
        let entry = self.entries.entry(peer.clone()).or_insert(Entry {
            state: PeerState::Suspect,
            identity: None,
            connect_failures: 0,
            losses: 0,
            used: now,
        });
        entry.used = now;
        match entry.state {
            PeerState::Ready { incarnation, .. } => return Ok(Want::Use { incarnation }),
            PeerState::Connecting { deadline, .. } if now < deadline => {
                return Ok(Want::Connecting { deadline });
            }
            PeerState::Connecting { .. } => {
                // Its deadline has passed, `expire` has not run yet.
                let until = entry.fail_connect(&self.config, now);
                return Ok(Want::BackedOff { until });
            }
            PeerState::Backoff { until } if now < until => return Ok(Want::BackedOff { until }),
            PeerState::Backoff { .. } | PeerState::Suspect => {}
        }
        self.attempts = self.attempts.saturating_add(1);
        entry.state = PeerState::Connecting {
            attempt: self.attempts,
            deadline,
        };
        Ok(Want::Connect {
            attempt: self.attempts,
            deadline,
        })
    }

    /// A (verified) card came in.
    pub fn on_card(
        &mut self,
        peer: &PeerKey,
        attempt: u64,
        engine: &EngineId,
        incarnation: Option<Incarnation>,
        now: MonoTime,
    ) -> CardOutcome {
        let Some(entry) = self.attempt(peer, attempt) else {
            return CardOutcome::Stale;
        };
        entry.state = PeerState::Ready {
            incarnation,
            met: now,
        };
        entry.connect_failures = 0;
        let new = (engine.clone(), incarnation);
        match entry.identity.replace(new.clone()) {
            None => CardOutcome::First,
            Some(old) if old == new => CardOutcome::Same,
            Some((_, old)) => {
                entry.losses = 0;
                CardOutcome::Replaced { old }
            }
        }
    }

    /// An attempt failed. Returns until when the peer is left alone; `None` when the attempt had
    /// been given up already.
    pub fn on_failure(&mut self, peer: &PeerKey, attempt: u64, now: MonoTime) -> Option<MonoTime> {
        let config = self.config;
        self.attempt(peer, attempt)
            .map(|entry| entry.fail_connect(&config, now))
    }

    /// A loaded peer was lost: forget what is loaded. The first loss after a landed read makes the
    /// next use meet it at once; repeated ones leave it alone for a while. Returns until when.
    /// Ignored when the peer is not loaded, or is another incarnation by now.
    pub fn on_lost(
        &mut self,
        peer: &PeerKey,
        lost: Option<Incarnation>,
        now: MonoTime,
    ) -> Option<MonoTime> {
        let entry = self.entries.get_mut(peer)?;
        match entry.state {
            PeerState::Ready { incarnation, .. } if incarnation == lost => {}
            _ => return None,
        }
        let until = now.saturating_add(pause(&self.config, entry.losses));
        entry.losses = entry.losses.saturating_add(1);
        entry.state = if entry.losses == 1 {
            PeerState::Suspect
        } else {
            PeerState::Backoff { until }
        };
        matches!(entry.state, PeerState::Backoff { .. }).then_some(until)
    }

    /// A read from this peer landed: its record is clean again.
    pub fn on_landed(&mut self, peer: &PeerKey) {
        if let Some(entry) = self.entries.get_mut(peer) {
            entry.losses = 0;
        }
    }

    /// Whether the loaded card is of the life that a descriptor, received at `received`, names.
    ///
    /// # Errors
    /// [`PeerError::PeerRestarted`] when it is not. With [`MeetNext::MeetAgain`] the peer has been
    /// made to be met again: forget what is loaded and want it.
    pub fn check_incarnation(
        &mut self,
        peer: &PeerKey,
        described: Incarnation,
        received: MonoTime,
        now: MonoTime,
    ) -> Result<(), PeerError> {
        let not_ready = || PeerError::NotReady { peer: peer.clone() };
        let entry = self.entries.get_mut(peer).ok_or_else(not_ready)?;
        let PeerState::Ready { incarnation, met } = entry.state else {
            return Err(not_ready());
        };
        let found = incarnation.ok_or_else(|| PeerError::NoIncarnation { peer: peer.clone() })?;
        if found == described {
            return Ok(());
        }
        let fresh = met >= received || now.saturating_since(met) < self.config.meet_again_min;
        let next = if fresh {
            MeetNext::Recompute
        } else {
            entry.state = PeerState::Suspect;
            MeetNext::MeetAgain
        };
        Err(PeerError::PeerRestarted {
            peer: peer.clone(),
            expected: described,
            found,
            next,
        })
    }

    /// Forgets a peer that nothing uses any more.
    pub fn forget(&mut self, peer: &PeerKey) {
        self.entries.remove(peer);
    }

    /// When [`expire`](Self::expire) has something to do next.
    #[must_use]
    pub fn next_timeout(&self) -> Option<MonoTime> {
        self.entries
            .values()
            .filter_map(|entry| match entry.state {
                PeerState::Connecting { deadline, .. } => Some(deadline),
                PeerState::Backoff { until } => Some(until),
                PeerState::Ready { .. } | PeerState::Suspect => None,
            })
            .min()
    }

    /// Acts on the deadlines that have passed.
    pub fn expire(&mut self, now: MonoTime) -> Vec<Expired> {
        let mut expired = Vec::new();
        for (peer, entry) in &mut self.entries {
            match entry.state {
                PeerState::Connecting { deadline, .. } if deadline <= now => {
                    let until = entry.fail_connect(&self.config, now);
                    let peer = peer.clone();
                    expired.push(Expired::Attempt { peer, until });
                }
                PeerState::Backoff { until } if until <= now => {
                    entry.state = PeerState::Suspect;
                    expired.push(Expired::Backoff { peer: peer.clone() });
                }
                _ => {}
            }
        }
        expired
    }

    /// The entry of an attempt that is still running.
    fn attempt(&mut self, peer: &PeerKey, number: u64) -> Option<&mut Entry> {
        self.entries.get_mut(peer).filter(|entry| {
            matches!(entry.state, PeerState::Connecting { attempt, .. } if attempt == number)
        })
    }

    /// Makes room for one more entry by forgetting the one that has not been used for longest.
    fn make_room(&mut self, wanted: &PeerKey) -> Result<(), PeerError> {
        if self.entries.len() < self.config.max_peers {
            return Ok(());
        }
        let idle = self
            .entries
            .iter()
            .filter(|(_, e)| matches!(e.state, PeerState::Suspect | PeerState::Backoff { .. }))
            .min_by_key(|(_, entry)| entry.used)
            .map(|(peer, _)| peer.clone());
        match idle {
            Some(peer) => {
                self.entries.remove(&peer);
                Ok(())
            }
            None => Err(PeerError::TableFull {
                peer: wanted.clone(),
                limit: self.config.max_peers,
            }),
        }
    }
}

impl Entry {
    fn fail_connect(&mut self, config: &PeerConfig, now: MonoTime) -> MonoTime {
        let until = now.saturating_add(pause(config, self.connect_failures));
        self.connect_failures = self.connect_failures.saturating_add(1);
        self.state = PeerState::Backoff { until };
        until
    }
}

/// The pause after a failure that `before` others preceded.
fn pause(config: &PeerConfig, before: u32) -> Duration {
    let factor = 1_u32.checked_shl(before).unwrap_or(u32::MAX);
    config
        .backoff_min
        .saturating_mul(factor)
        .min(config.backoff_max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Rank;
    use crate::peer::PeerAddr;

    const MS: Duration = Duration::from_millis(1);
    const A: Incarnation = Incarnation(0xa);
    const B: Incarnation = Incarnation(0xb);

    fn at(ms: u64) -> MonoTime {
        MonoTime::from_nanos(ms * 1_000_000)
    }

    fn key(port: u16) -> PeerKey {
        PeerKey {
            addr: PeerAddr::new("decode-0", port).unwrap(),
            rank: Rank::default(),
        }
    }

    fn engine() -> EngineId {
        EngineId::new("decode").unwrap()
    }

    fn connect(table: &mut PeerTable, now: u64) -> u64 {
        match table.want(&key(1), at(now)) {
            Ok(Want::Connect { attempt, .. }) => attempt,
            other => panic!("{other:?}"),
        }
    }

    fn met(incarnation: Incarnation, now: u64) -> PeerTable {
        let mut table = PeerTable::new(PeerConfig::default());
        let attempt = connect(&mut table, now);
        let got = table.on_card(&key(1), attempt, &engine(), Some(incarnation), at(now));
        assert_eq!(got, CardOutcome::First);
        table
    }

    #[test]
    fn a_peer_is_met_once() {
        let mut table = PeerTable::new(PeerConfig::default());
        let attempt = connect(&mut table, 0);
        assert_eq!(
            table.want(&key(1), at(1)),
            Ok(Want::Connecting { deadline: at(5000) })
        );
        assert_eq!(table.next_timeout(), Some(at(5000)));
        table.on_card(&key(1), attempt, &engine(), Some(A), at(2));
        assert_eq!(
            table.want(&key(1), at(3)),
            Ok(Want::Use {
                incarnation: Some(A)
            })
        );
        assert_eq!(table.next_timeout(), None);
        assert_eq!(table.check_incarnation(&key(1), A, at(3), at(3)), Ok(()));
    }

    #[test]
    fn pauses_double_up_to_five_seconds_and_end_with_success() {
        let mut table = PeerTable::new(PeerConfig::default());
        let mut now = 0;
        for pause in [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000] {
            let attempt = connect(&mut table, now);
            let until = at(now + pause);
            assert_eq!(table.on_failure(&key(1), attempt, at(now)), Some(until));
            assert_eq!(
                table.want(&key(1), at(now + pause - 1)),
                Ok(Want::BackedOff { until })
            );
            now += pause;
        }
        let attempt = connect(&mut table, now);
        table.on_card(&key(1), attempt, &engine(), Some(A), at(now));
        table.on_lost(&key(1), Some(A), at(now));
        let attempt = connect(&mut table, now);
        assert_eq!(
            table.on_failure(&key(1), attempt, at(now)),
            Some(at(now + 100))
        );
    }

    #[test]
    fn deadlines_pass_and_are_told() {
        let mut table = PeerTable::new(PeerConfig::default());
        let attempt = connect(&mut table, 0);
        assert_eq!(table.expire(at(4999)), vec![]);
        let until = at(5100);
        let peer = key(1);
        assert_eq!(
            table.expire(at(5000)),
            vec![Expired::Attempt { peer, until }]
        );
        // Too late, both ways.
        let late = table.on_card(&key(1), attempt, &engine(), Some(A), at(5001));
        assert_eq!(late, CardOutcome::Stale);
        assert_eq!(table.on_failure(&key(1), attempt, at(5001)), None);
        assert_eq!(table.next_timeout(), Some(until));
        let peer = key(1);
        assert_eq!(table.expire(until), vec![Expired::Backoff { peer }]);
        assert_eq!(table.next_timeout(), None);
        let second = connect(&mut table, 5100);
        assert_ne!(second, attempt);
        // Wanted after the deadline, before `expire` ran.
        assert!(matches!(
            table.want(&key(1), at(10_100)),
            Ok(Want::BackedOff { .. })
        ));
        assert_eq!(table.on_failure(&key(2), second, at(5200)), None);
    }

    #[test]
    fn a_restarted_peer_replaces_its_predecessor() {
        let mut table = met(A, 0);
        // The descriptor came after the card: the card may be the old one.
        let restarted = |next| {
            Err(PeerError::PeerRestarted {
                peer: key(1),
                expected: B,
                found: A,
                next,
            })
        };
        assert_eq!(
            table.check_incarnation(&key(1), B, at(1000), at(1000)),
            restarted(MeetNext::MeetAgain)
        );
        assert_eq!(
            table.check_incarnation(&key(1), B, at(1000), at(1000)),
            Err(PeerError::NotReady { peer: key(1) })
        );
        let attempt = connect(&mut table, 1000);
        assert_eq!(
            table.on_card(&key(1), attempt, &engine(), Some(B), at(1010)),
            CardOutcome::Replaced { old: Some(A) }
        );
        assert_eq!(
            table.check_incarnation(&key(1), B, at(1000), at(1010)),
            Ok(())
        );
    }

    #[test]
    fn a_descriptor_of_a_dead_engine_is_final() {
        let mut table = met(A, 0);
        let check = |table: &mut PeerTable, received, now| match table.check_incarnation(
            &key(1),
            B,
            at(received),
            at(now),
        ) {
            Err(PeerError::PeerRestarted { next, .. }) => next,
            other => panic!("{other:?}"),
        };
        assert_eq!(check(&mut table, 1000, 1000), MeetNext::MeetAgain);
        let attempt = connect(&mut table, 1000);
        let same = table.on_card(&key(1), attempt, &engine(), Some(A), at(1010));
        assert_eq!(same, CardOutcome::Same);
        // The card is newer than the descriptor now.
        assert_eq!(check(&mut table, 1000, 1500), MeetNext::Recompute);
        // More bad descriptors at once do not keep the engine dialling.
        assert_eq!(check(&mut table, 1100, 1100), MeetNext::Recompute);
        assert_eq!(check(&mut table, 1200, 1200), MeetNext::MeetAgain);
    }

    #[test]
    fn repeated_losses_back_off_until_a_read_lands() {
        let mut table = met(A, 0);
        let mut now = 0;
        for pause in [None, Some(200), Some(400)] {
            let until = pause.map(|p| at(now + p));
            assert_eq!(table.on_lost(&key(1), Some(A), at(now)), until);
            // Told again of the same loss: nothing changes.
            assert_eq!(table.on_lost(&key(1), Some(A), at(now)), None);
            now += pause.unwrap_or(0);
            let attempt = connect(&mut table, now);
            table.on_card(&key(1), attempt, &engine(), Some(A), at(now));
        }
        table.on_landed(&key(1));
        // A late report about another incarnation is of no concern.
        assert_eq!(table.on_lost(&key(1), Some(B), at(now)), None);
        assert!(matches!(
            table.state(&key(1)),
            Some(PeerState::Ready { .. })
        ));
        assert_eq!(table.on_lost(&key(1), Some(A), at(now)), None);
        assert_eq!(table.state(&key(1)), Some(PeerState::Suspect));
    }

    #[test]
    fn the_table_is_bounded() {
        let mut table = PeerTable::new(PeerConfig {
            max_peers: 2,
            ..PeerConfig::default()
        });
        let Ok(Want::Connect { attempt, .. }) = table.want(&key(1), at(0)) else {
            panic!()
        };
        table.want(&key(2), at(1)).unwrap();
        assert!(matches!(
            table.want(&key(3), at(2)),
            Err(PeerError::TableFull { limit: 2, .. })
        ));
        table.on_failure(&key(1), attempt, at(3));
        assert!(table.want(&key(3), at(4)).is_ok());
        assert_eq!(table.state(&key(1)), None);
        table.forget(&key(2));
        assert!(table.want(&key(4), at(5) + MS).is_ok());
    }

    #[test]
    fn vllm_peers_have_no_incarnation() {
        let mut table = PeerTable::new(PeerConfig::default());
        let attempt = connect(&mut table, 0);
        table.on_card(&key(1), attempt, &engine(), None, at(0));
        assert_eq!(
            table.check_incarnation(&key(1), A, at(0), at(0)),
            Err(PeerError::NoIncarnation { peer: key(1) })
        );
        assert_eq!(
            table.want(&key(1), at(0)),
            Ok(Want::Use { incarnation: None })
        );
    }

    proptest::proptest! {
        /// Whatever happens in whatever order: one attempt at a time per peer, every state but Ready
        /// ends by itself, and what is due is done.
        #[test]
        fn no_order_of_events_breaks_the_table(
            ops in proptest::collection::vec((0_u8..7, 1_u16..4, 0_u64..3000), 1..200)
        ) {
            let mut table = PeerTable::new(PeerConfig { max_peers: 2, ..PeerConfig::default() });
            let mut now = 0;
            let mut newest = std::collections::HashMap::new();
            for (op, port, step) in ops {
                now += step;
                let peer = key(port);
                let before = table.state(&peer);
                let attempt = newest.get(&port).copied().unwrap_or(0);
                match op {
                    0 | 1 => match table.want(&peer, at(now)) {
                        Ok(Want::Connect { attempt, deadline }) => {
                            let idle = !matches!(before, Some(
                                PeerState::Connecting { .. } | PeerState::Ready { .. }));
                            proptest::prop_assert!(idle && deadline > at(now));
                            newest.insert(port, attempt);
                        }
                        Ok(Want::Use { .. }) => {
                            let ready = matches!(before, Some(PeerState::Ready { .. }));
                            proptest::prop_assert!(ready);
                        }
                        Ok(Want::Connecting { deadline: until } | Want::BackedOff { until }) =>
                            proptest::prop_assert!(until > at(now)),
                        Err(_) => proptest::prop_assert_eq!(before, None),
                    },
                    2 => { table.on_card(&peer, attempt, &engine(), Some(A), at(now)); }
                    3 => { table.on_failure(&peer, attempt, at(now)); }
                    4 => { table.on_lost(&peer, Some(A), at(now)); }
                    5 => { let _ = table.check_incarnation(&peer, B, at(now), at(now)); }
                    _ => {
                        table.expire(at(now));
                        proptest::prop_assert!(table.next_timeout().is_none_or(|t| t > at(now)));
                    }
                }
                proptest::prop_assert!(table.entries.len() <= 2);
            }
        }
    }
}
