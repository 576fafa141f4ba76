//! What a descriptor of 1,500 blocks costs to write and to read: `kv_transfer_params` as JSON, with a
//! sealed ticket.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod common;

use std::hint::black_box;
use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

use criterion::{Criterion, criterion_group};
use kv_xfer::clock::MonoTime;
use kv_xfer::descriptor::{
    Binding, BlockIdsJson, BlockRuns, ClusterKey, DescriptorLimits, Host, LeaseRef, Params,
    RemoteBlocks, Ticket, TransferMode,
};
use kv_xfer::identity::BlockHash;
use kv_xfer::ids::{BlockId, EngineId, Incarnation, LeaseId, LeaseWord, RequestId, WordSlot};
use kv_xfer::layout::LayoutFingerprint;

use common::{Budgets, US, shuffled};

const BLOCKS: usize = 1500;
const BLOCK_TOKENS: u32 = 16;

fn ticket(ids: &[BlockId]) -> Ticket {
    let hash = |block: u128| {
        let spread = (block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        BlockHash(spread.to_le_bytes())
    };
    Ticket {
        incarnation: Incarnation(0x0123_4567_89ab_cdef),
        lease: LeaseRef {
            id: LeaseId(42),
            slot: WordSlot(3),
            word: LeaseWord(0x1111_2222_3333_4444),
        },
        runs: BlockRuns::from_ids(ids),
        block_tokens: BLOCK_TOKENS,
        tokens: ids.len() as u64 * u64::from(BLOCK_TOKENS),
        hashes: (0..ids.len() as u128).map(hash).collect(),
        remaining: Duration::from_millis(479_500),
        stamp: MonoTime::from_nanos(987_654_321),
        fingerprint: LayoutFingerprint([0x5a; 32]),
    }
}

/// Everything a holder does once a lease is granted, but for the text itself.
fn seal(ticket: Ticket, ids: &[BlockId], key: Option<&ClusterKey>) -> RemoteBlocks {
    let engine = EngineId::new("decode-0").unwrap();
    let request = RequestId::new("chatcmpl-7f3a-0badcafe").unwrap();
    let tokens = ticket.tokens;
    let binding = Binding {
        engine: &engine,
        request: &request,
        tenant: Some("acme"),
        conversation: Some("conv-1"),
    };
    let sealed = ticket.seal(key, &binding).unwrap();
    RemoteBlocks {
        do_remote_prefill: false,
        do_remote_decode: true,
        remote_block_ids: vec![BlockRuns::from_ids(ids)],
        remote_engine_id: engine,
        remote_request_id: request,
        remote_host: Host::new("10.1.2.3").unwrap(),
        remote_port: NonZeroU16::new(5600).unwrap(),
        tp_size: NonZeroU32::new(8).unwrap(),
        dcp_size: NonZeroU32::MIN,
        pp_size: NonZeroU32::MIN,
        remote_num_tokens: tokens,
        remote_blocks_expiry_time: Some(12_345.5),
        transfer_mode: Some(TransferMode::Pull),
        ticket: Some(sealed),
        extra: serde_json::Map::new(),
    }
}

/// Everything a reader does before it can decide.
fn open(text: &str, key: Option<&ClusterKey>) -> usize {
    let params = Params::from_json_str(text, &DescriptorLimits::default()).unwrap();
    let Params::Remote(remote) = params else {
        panic!("not a descriptor of blocks");
    };
    let ticket = remote.verify_ticket(key, Some("acme"), Some("conv-1"));
    ticket.unwrap().unwrap().hashes.len()
}

fn descriptor(c: &mut Criterion) {
    let mut group = c.benchmark_group("descriptor");
    let mut budgets = Budgets::default();
    let key = ClusterKey::from_secret(b"a secret of the cluster").unwrap();
    let mut scattered = shuffled(100_000, 1);
    scattered.truncate(BLOCKS);
    let contiguous: Vec<_> = (0..1500).map(BlockId).collect();
    for (what, ids) in [("scattered", &scattered), ("contiguous", &contiguous)] {
        for (keyed, key) in [("no key", None), ("keyed", Some(&key))] {
            for (json, form) in [
                ("ids in the ticket only", BlockIdsJson::Omitted),
                ("ids written out", BlockIdsJson::Expanded),
            ] {
                let ready = ticket(ids);
                let name = format!("{what}, {keyed}, {json}");
                let write = |ready: Ticket| seal(ready, ids, key).to_json_string(form);
                let text = write(ready.clone());
                group.bench_function(format!("encode/{name}"), |b| {
                    b.iter_batched(|| ready.clone(), write, criterion::BatchSize::SmallInput);
                });
                group.bench_function(format!("decode/{name}"), |b| {
                    b.iter(|| open(black_box(&text), key));
                });
                budgets.spent(&format!("encode {name}"), 20 * US, || {
                    let ready = ready.clone();
                    let start = std::time::Instant::now();
                    black_box(write(ready));
                    start.elapsed()
                });
                budgets.time(&format!("decode {name}"), 20 * US, || open(&text, key));
            }
        }
    }
    group.finish();
    let long: Vec<_> = (0..150_000).map(BlockId).collect();
    let mut list = Vec::new();
    BlockRuns::from_ids(&long).encode_into(&mut list);
    let bytes = list.len() as f64;
    budgets.number("block list of 150,000 contiguous blocks", 63.0, bytes, "B");
    budgets.print("descriptor");
}

criterion_group!(benches, descriptor);
criterion::criterion_main!(benches);
