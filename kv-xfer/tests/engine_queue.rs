//! Reads that wait for a place in the driver.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::*;
use kv_xfer::engine::{ReadRequest, ReleasePolicy};

#[test]
fn a_queued_read_starts_as_soon_as_a_place_is_free() {
    let pair = pair_with(|config| config.reader.active = 1);
    let blocks = ids(0..1);
    let (leased, offer) = pair.offer("r", &blocks);
    // One after the other, each over in a few steps of the driver. Were it to sleep for a second in
    // between, as it does when there is nothing to do, the last would not start in time.
    let handles: Vec<_> = (0..64)
        .map(|n| {
            let keep = ReadRequest {
                release: ReleasePolicy::Never,
                ..request(&offer, pair.claim([n]))
            };
            pair.reader.read(keep).unwrap()
        })
        .collect();
    for handle in handles {
        assert_eq!(wrong_bytes(&handle.wait().unwrap().blocks, &blocks, 1), 0);
    }
    assert!(pair.holder.revoke(leased.lease));
    pair.assert_clean();
}
