//! A reader that waits keeps the holder's lease, as vLLM's heartbeats do.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{config, engine, eventually, ids, layout, lease, sim_pool};
use kv_xfer::layout::PoolOrder;
use kv_xfer::transport::sim::SimFabric;

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_lease_that_is_kept_outlives_its_first_term() {
    let fabric = Arc::new(SimFabric::new());
    let pool = |blocks| sim_pool(&fabric, layout(PoolOrder::BlockFirst), blocks);
    let holder = engine(config("holder"), &pool(16), &fabric);
    let reader = engine(config("reader"), &pool(16), &fabric);
    let leased = lease(&holder, "kept", &ids(0..4), Some(30 * SECOND));
    let offer = reader.accept(&leased.remote, None, None).unwrap();
    assert!(reader.lease_remaining(&offer) <= 30 * SECOND);
    assert!(reader.keep(&offer, 300 * SECOND));
    eventually("the answer is known", || {
        reader.lease_remaining(&offer) > 200 * SECOND
    });
    assert_eq!(reader.stats().renewals, 1);
    // A copy of the offer knows it, too.
    assert!(reader.lease_remaining(&offer.clone()) > 200 * SECOND);

    holder.revoke(leased.lease);
    assert!(reader.keep(&offer, 300 * SECOND));
    eventually("the reader knows that it is over", || {
        reader.lease_remaining(&offer).is_zero()
    });
}

#[test]
fn a_holder_that_is_gone_leaves_the_lease_as_it_was_described() {
    let fabric = Arc::new(SimFabric::new());
    let pool = |blocks| sim_pool(&fabric, layout(PoolOrder::BlockFirst), blocks);
    let holder = engine(config("holder"), &pool(16), &fabric);
    let reader = engine(config("reader"), &pool(16), &fabric);
    let leased = lease(&holder, "gone", &ids(0..4), Some(30 * SECOND));
    let offer = reader.accept(&leased.remote, None, None).unwrap();
    drop(holder);
    assert!(reader.keep(&offer, 300 * SECOND));
    eventually("it was asked", || reader.stats().renewals == 1);
    assert!(reader.lease_remaining(&offer) <= 30 * SECOND);
}
