//! Tickets: what was sealed comes back for its own request only, and every changed bit is found.
#![allow(clippy::unwrap_used)]

mod descriptor_common;

use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use descriptor_common::{key, names, open, ticket};
use kv_xfer::clock::MonoTime;
use kv_xfer::descriptor::{
    Binding, BlockRuns, ClusterKey, DescriptorLimits, SealedTicket, Ticket, TicketError,
    TicketFault,
};
use kv_xfer::ids::{EngineId, Incarnation, RequestId};
use proptest::prelude::*;

const SECRET: &str = "a secret of the cluster";

fn seal(ticket: Ticket, key: Option<&ClusterKey>) -> String {
    ticket.seal(key, &names().binding()).unwrap().to_text()
}

/// With a key and without.
fn keys() -> [Option<ClusterKey>; 2] {
    [None, Some(key(SECRET))]
}

#[test]
fn tickets_round_trip() {
    for key in keys() {
        for (ids, in_last) in [
            (vec![0], 1),
            (vec![0], 16),
            (vec![5, 6, 7, 3, 2, 9], 7),
            ((0..2000).rev().collect(), 16),
            ((0..2000).map(|i| i * 7 % 2003).collect(), 3),
        ] {
            let ticket = ticket(&ids, in_last);
            let text = seal(ticket.clone(), key.as_ref());
            assert_eq!(open(&text, key.as_ref(), &names().binding()), Ok(ticket));
        }
    }
}

#[test]
fn every_flipped_bit_of_the_bytes_is_an_error() {
    for key in keys() {
        let text = seal(ticket(&[5, 6, 7, 3, 2, 9], 7), key.as_ref());
        let bytes = BASE64.decode(&text).unwrap();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << bit;
                let opened = open(&BASE64.encode(&damaged), key.as_ref(), &names().binding());
                assert!(opened.is_err(), "byte {at} bit {bit}: {opened:?}");
            }
        }
    }
}

#[test]
fn every_flipped_bit_of_the_text_is_an_error() {
    for key in keys() {
        // Three lengths, so that the text ends in each way that base64 can end.
        for blocks in 1..=3 {
            let ids: Vec<u32> = (0..blocks).map(|i| i * 5).collect();
            let text = seal(ticket(&ids, 7), key.as_ref());
            for at in 0..text.len() {
                for bit in 0..8 {
                    let mut damaged = text.clone().into_bytes();
                    damaged[at] ^= 1 << bit;
                    let Ok(damaged) = String::from_utf8(damaged) else {
                        continue;
                    };
                    let opened = open(&damaged, key.as_ref(), &names().binding());
                    assert!(opened.is_err(), "byte {at} bit {bit}: {opened:?}");
                }
            }
        }
    }
}

#[test]
fn every_truncation_is_an_error() {
    for key in keys() {
        let text = seal(ticket(&[5, 6, 7, 3, 2, 9], 7), key.as_ref());
        for len in 0..text.len() {
            assert!(open(&text[..len], key.as_ref(), &names().binding()).is_err());
        }
        let bytes = BASE64.decode(&text).unwrap();
        for len in 0..bytes.len() {
            let short = BASE64.encode(&bytes[..len]);
            assert!(open(&short, key.as_ref(), &names().binding()).is_err());
        }
    }
}

#[test]
fn anything_added_is_an_error() {
    for key in keys() {
        let text = seal(ticket(&[5, 6, 7], 7), key.as_ref());
        for more in ["A", "=", "==", " ", "\n", "AAAA", "A".repeat(64).as_str()] {
            assert!(open(&format!("{text}{more}"), key.as_ref(), &names().binding()).is_err());
            assert!(open(&format!("{more}{text}"), key.as_ref(), &names().binding()).is_err());
        }
    }
}

#[test]
fn a_ticket_is_for_its_own_binding() {
    let (engine, request) = (
        EngineId::new("decode-1").unwrap(),
        RequestId::new("chatcmpl-other").unwrap(),
    );
    for key in keys() {
        let names = names();
        let ours = names.binding();
        let text = seal(ticket(&[1, 2, 3], 16), key.as_ref());
        assert!(open(&text, key.as_ref(), &ours).is_ok());
        for other in [
            Binding {
                engine: &engine,
                ..ours
            },
            Binding {
                request: &request,
                ..ours
            },
            Binding {
                tenant: Some("globex"),
                ..ours
            },
            Binding {
                tenant: Some(""),
                ..ours
            },
            Binding {
                tenant: None,
                ..ours
            },
            Binding {
                conversation: Some("conv-2"),
                ..ours
            },
            Binding {
                conversation: None,
                ..ours
            },
            // The same letters, divided otherwise.
            Binding {
                tenant: Some("acmeconv-1"),
                conversation: Some(""),
                ..ours
            },
            Binding {
                tenant: ours.conversation,
                conversation: ours.tenant,
                ..ours
            },
        ] {
            assert_eq!(open(&text, key.as_ref(), &other), Err(TicketError::BadTag));
        }
    }
}

#[test]
fn only_the_same_key_opens() {
    let names = names();
    let (ours, theirs) = (key(SECRET), key("another secret, as long"));
    let (keyed, plain) = (
        seal(ticket(&[1], 1), Some(&ours)),
        seal(ticket(&[1], 1), None),
    );
    let open = |text: &str, key| open(text, key, &names.binding()).map(|_| ());
    assert_eq!(open(&keyed, Some(&ours)), Ok(()));
    assert_eq!(open(&plain, None), Ok(()));
    assert_eq!(open(&keyed, Some(&theirs)), Err(TicketError::BadTag));
    assert_eq!(open(&keyed, None), Err(TicketError::NoKey));
    assert_eq!(
        open(&plain, Some(&ours)),
        Err(TicketError::NotAuthenticated)
    );
}

#[test]
fn a_plain_ticket_cannot_pass_for_a_keyed_one() {
    let ours = key(SECRET);
    let mut bytes = BASE64.decode(seal(ticket(&[1], 1), None)).unwrap();
    bytes[1] |= 1;
    assert_eq!(
        open(&BASE64.encode(bytes), Some(&ours), &names().binding()),
        Err(TicketError::BadTag)
    );
}

#[test]
fn other_versions_and_flags_are_named() {
    let bytes = BASE64.decode(seal(ticket(&[1], 1), None)).unwrap();
    let with = |at: usize, value| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        open(&BASE64.encode(bytes), None, &names().binding()).unwrap_err()
    };
    assert_eq!(with(0, 2), TicketError::Version { found: 2 });
    assert_eq!(with(1, 4), TicketError::UnknownFlags { flags: 4 });
}

#[test]
fn tickets_that_break_a_rule_are_not_sealed() {
    let good = || ticket(&[1, 2, 3], 16);
    let names = names();
    let fault = |ticket: Ticket| match ticket.seal(None, &names.binding()) {
        Err(TicketError::Fault(fault)) => fault,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        fault(Ticket {
            incarnation: Incarnation(0),
            ..good()
        }),
        TicketFault::NoIncarnation
    );
    assert_eq!(
        fault(Ticket {
            runs: BlockRuns::new(),
            ..good()
        }),
        TicketFault::NoBlocks
    );
    assert_eq!(
        fault(Ticket {
            block_tokens: 0,
            ..good()
        }),
        TicketFault::EmptyBlocks
    );
    for tokens in [0, 32, 49, u64::MAX] {
        assert!(matches!(
            fault(Ticket { tokens, ..good() }),
            TicketFault::TokenCount { blocks: 3, .. }
        ));
    }
    // 33 to 48 tokens need three blocks; only 48 fill the third.
    assert_eq!(
        fault(Ticket {
            tokens: 33,
            ..good()
        }),
        TicketFault::HashCount {
            expected: 2,
            found: 3
        }
    );
    assert!(matches!(
        fault(Ticket {
            remaining: Duration::MAX,
            ..good()
        }),
        TicketFault::TooLong { .. }
    ));
}

#[test]
fn long_texts_are_refused_before_they_are_read() {
    let limits = DescriptorLimits {
        max_bytes: 10,
        ..DescriptorLimits::default()
    };
    assert_eq!(
        SealedTicket::parse("AAAAAAAAAAA", &limits),
        Err(TicketError::TooLong {
            len: 11,
            max_bytes: 10
        })
    );
}

#[test]
fn the_end_is_rebased_onto_the_readers_clock() {
    let ticket = ticket(&[1], 1);
    let arrived = MonoTime::from_nanos(7);
    assert_eq!(ticket.ends_at(arrived), arrived + ticket.remaining);
}

/// The format is a promise between releases: when this text changes, so must the version.
#[test]
fn version_one_has_not_changed() {
    assert_eq!(seal(ticket(&[4, 5, 9], 7), None), PLAIN);
    assert_eq!(seal(ticket(&[4, 5, 9], 7), Some(&key(SECRET))), KEYED);
}

const PLAIN: &str = "AQDvzauJZ0UjASoAAAAAAAAAAwAAAEREMzMiIhERECcAW22kbwAAALFo3joAAAAAWlpaWlpaWlpaWlpaWlpaWlpa\
    WlpaWlpaWlpaWlpaWloCEQgCCAA1yO1cYMCc8xV8Sn-5eTeeapDbucCAOecr-JT-cvNuPFz0aeCoKZ3O4ywECjom\
    7QoA6uRJYQ3fkoUDWO2MWylV";
const KEYED: &str = "AQHvzauJZ0UjASoAAAAAAAAAAwAAAEREMzMiIhERECcAW22kbwAAALFo3joAAAAAWlpaWlpaWlpaWlpaWlpaWlpa\
    WlpaWlpaWlpaWlpaWloCEQgCCAA1yO1cYMCc8xV8Sn-5eTeeapDbucCAOecr-JT-cvNuPOowxWevOHqivRR7g2sN\
    8ArmXwl0fPhrUG4LR5aBQRnx";

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(open(&BASE64.encode(bytes), None, &names().binding()).is_err());
    }

    #[test]
    fn arbitrary_text_never_panics(text in ".{0,200}") {
        prop_assert!(open(&text, None, &names().binding()).is_err());
    }

    /// Several bytes changed at once, in a body that otherwise parses.
    #[test]
    fn mixed_up_tickets_are_errors(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        keyed: bool,
    ) {
        let key = keyed.then(|| key(SECRET));
        let text = seal(ticket(&[5, 6, 7, 3, 2, 9], 7), key.as_ref());
        let bytes = BASE64.decode(&text).unwrap();
        let mut damaged = bytes.clone();
        for (at, value) in changes {
            *at.get_mut(&mut damaged) = value;
        }
        let opened = open(&BASE64.encode(&damaged), key.as_ref(), &names().binding());
        prop_assert_eq!(opened.is_ok(), damaged == bytes);
    }

    #[test]
    fn random_tickets_round_trip(
        ids in prop::collection::vec(0_u32..1 << 24, 1..60),
        in_last in 1_u64..=16,
        nanos: u64,
        keyed: bool,
    ) {
        let key = keyed.then(|| key(SECRET));
        let mut ticket = ticket(&ids, in_last);
        ticket.remaining = Duration::from_nanos(nanos);
        let text = seal(ticket.clone(), key.as_ref());
        prop_assert_eq!(open(&text, key.as_ref(), &names().binding()), Ok(ticket));
    }
}
