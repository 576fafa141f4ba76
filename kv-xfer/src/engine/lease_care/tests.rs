use parking_lot::Mutex;

use super::*;
use crate::clock::ManualClock;
use crate::descriptor::LeaseRef;
use crate::engine::connect::FetchedPeer;
use crate::ids::{Incarnation, LeaseId, LeaseWord, Rank, WordSlot};
use crate::peer::PeerAddr;
use crate::transport::{FailureKind, TransportError};

/// Holders that answer or not, and what they were asked.
#[derive(Debug, Default)]
struct Holders {
    answer: AtomicBool,
    asked: Mutex<Vec<u64>>,
}

fn unreachable() -> ConnectError {
    ConnectError::Transport(TransportError {
        operation: "ask",
        kind: FailureKind::PeerLost,
        cause: "no answer".into(),
        raw: None,
    })
}

impl Holders {
    fn ask(&self, lease: LeaseRef) -> Result<(), ConnectError> {
        self.asked.lock().push(lease.id.0);
        if self.answer.load(Ordering::SeqCst) {
            Ok(())
        } else {
            Err(unreachable())
        }
    }

    fn take(&self) -> Vec<u64> {
        std::mem::take(&mut self.asked.lock())
    }
}

impl CardSource for Holders {
    fn fetch(&self, _: &PeerAddr, _: Rank, _: Duration) -> Result<FetchedPeer, ConnectError> {
        Err(unreachable())
    }

    fn release(
        &self,
        _: &PeerAddr,
        _: Incarnation,
        lease: LeaseRef,
        _: Duration,
    ) -> Result<(), ConnectError> {
        self.ask(lease)
    }

    fn renew(
        &self,
        _: &PeerAddr,
        _: Incarnation,
        lease: LeaseRef,
        _: Duration,
        _: Duration,
    ) -> Result<Option<Duration>, ConnectError> {
        self.ask(lease).map(|()| None)
    }
}

fn care() -> (Arc<Holders>, Arc<ManualClock>, LeaseCare) {
    let (holders, clock) = (
        Arc::<Holders>::default(),
        Arc::new(ManualClock::new(MonoTime::ZERO)),
    );
    let care = LeaseCare::new(
        Arc::clone(&holders) as _,
        Arc::clone(&clock) as _,
        Arc::default(),
    );
    (holders, clock, care)
}

fn wish(lease: u64, port: u16, wish: LeaseWish) -> LeaseJob {
    LeaseJob {
        peer: PeerKey {
            addr: PeerAddr::new("holder", port).unwrap(),
            rank: Rank { pp: 0, tp: 0 },
        },
        incarnation: Incarnation(1),
        lease: LeaseRef {
            id: LeaseId(lease),
            slot: WordSlot(0),
            word: LeaseWord(1),
        },
        wish,
    }
}

fn release(lease: u64, port: u16) -> LeaseJob {
    wish(lease, port, LeaseWish::Release)
}

#[test]
fn a_holder_that_did_not_answer_is_asked_again_when_it_may_be_back() {
    let (holders, clock, mut care) = care();
    care.care_for(release(1, 1));
    assert_eq!(holders.take(), [1]);
    // It would hold up others.
    holders.answer.store(true, Ordering::SeqCst);
    care.care_for(release(2, 1));
    care.care_for(release(3, 2));
    assert!(!care.care_for_late());
    assert_eq!(holders.take(), [3]);
    clock.advance(SILENT_FOR);
    while care.care_for_late() {}
    assert_eq!(holders.take(), [1, 2]);
    clock.advance(SILENT_FOR);
    assert!(!care.care_for_late(), "nothing is released twice");
}

#[test]
fn a_holder_that_never_answers_costs_two_waits_however_many_leases_it_has() {
    let (holders, clock, mut care) = care();
    for lease in 0..MOST_LATE as u64 + 100 {
        care.care_for(release(lease, 1));
    }
    assert_eq!(holders.take(), [0]);
    assert_eq!(care.late.len(), MOST_LATE);
    clock.advance(SILENT_FOR);
    while care.care_for_late() {}
    assert_eq!(holders.take(), [0]);
    assert!(care.late.is_empty());
    clock.advance(SILENT_FOR);
    assert!(!care.care_for_late());
}

#[test]
fn renewals_are_not_put_off() {
    let (holders, clock, mut care) = care();
    let renew = LeaseWish::Renew {
        extension: Duration::from_secs(1),
        told_end: Arc::default(),
    };
    care.care_for(wish(1, 1, renew));
    assert_eq!(holders.take(), [1]);
    clock.advance(SILENT_FOR);
    assert!(!care.care_for_late());
}
