//! Read or recompute: the table of cases, and what holds for every input.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::num::NonZeroU32;
use std::time::Duration;

use kv_xfer::policy::{
    Action, COST_SAMPLES_NEEDED, CostModel, Decision, DecisionInput, LeaseAction,
    MAX_EFFECTIVE_THRESHOLD, ReadShape, Reason, decide, decide_with,
};
use proptest::prelude::*;

fn block(tokens: u32) -> NonZeroU32 {
    NonZeroU32::new(tokens).unwrap()
}

/// `remote` tokens at the holder, all of whose full blocks match, in a long prompt.
fn matching(block_tokens: u32, remote: u64) -> DecisionInput {
    DecisionInput {
        remote_tokens: remote,
        matched_tokens: remote / u64::from(block_tokens) * u64::from(block_tokens),
        prompt_tokens: 1_000_000,
        ..DecisionInput::new(block(block_tokens))
    }
}

fn read(first_block: u32, blocks: u32, tokens: u64) -> Action {
    Action::Read {
        first_block,
        blocks,
        tokens,
    }
}

fn outcome(input: DecisionInput) -> (Action, Reason) {
    let d = decide(&input);
    (d.action, d.reason)
}

#[test]
fn the_threshold_is_exact() {
    let below = (Action::Recompute, Reason::BelowThreshold);
    let nothing = (Action::Nothing, Reason::NoRemoteTokens);
    // Blocks of one token: counts are what they are.
    assert_eq!(outcome(matching(1, 0)), nothing);
    assert_eq!(outcome(matching(1, 1)), below);
    assert_eq!(outcome(matching(1, 63)), below);
    assert_eq!(
        outcome(matching(1, 64)),
        (read(0, 64, 64), Reason::WorthReading)
    );
    assert_eq!(
        outcome(matching(1, 65)),
        (read(0, 65, 65), Reason::WorthReading)
    );
    // Blocks of 16: the partial block at the end does not count.
    assert_eq!(outcome(matching(16, 0)), nothing);
    assert_eq!(outcome(matching(16, 63)), below);
    assert_eq!(
        outcome(matching(16, 64)),
        (read(0, 4, 64), Reason::WorthReading)
    );
    assert_eq!(
        outcome(matching(16, 65)),
        (read(0, 4, 64), Reason::WorthReading)
    );
    // It is what the read adds that is compared, not what the holder has.
    let input = DecisionInput {
        local_hit_tokens: 128,
        ..matching(16, 176)
    };
    assert_eq!(outcome(input), below);
    let input = DecisionInput {
        local_hit_tokens: 128,
        ..matching(16, 192)
    };
    assert_eq!(outcome(input), (read(8, 4, 64), Reason::WorthReading));
}

#[test]
fn a_threshold_of_zero_reads_however_little() {
    let zero = |block_tokens, remote| DecisionInput {
        threshold: 0,
        ..matching(block_tokens, remote)
    };
    assert_eq!(outcome(zero(1, 1)), (read(0, 1, 1), Reason::WorthReading));
    assert_eq!(
        outcome(zero(16, 16)),
        (read(0, 1, 16), Reason::WorthReading)
    );
    assert_eq!(outcome(zero(16, 15)), (Action::Nothing, Reason::NoMatch));
    assert_eq!(
        outcome(zero(16, 0)),
        (Action::Nothing, Reason::NoRemoteTokens)
    );
}

#[test]
fn a_partial_last_block_is_never_read() {
    assert_eq!(
        outcome(matching(16, 1007)),
        (read(0, 62, 992), Reason::WorthReading)
    );
}

#[test]
fn a_prompt_shorter_than_what_is_remote_bounds_the_read() {
    // 8 blocks there, 100 tokens here: the first 6 blocks, and never the last 7 of the 8.
    let input = DecisionInput {
        prompt_tokens: 100,
        matched_tokens: 96,
        ..matching(16, 128)
    };
    assert_eq!(outcome(input), (read(0, 6, 96), Reason::WorthReading));
    // Even if the caller claims that more matches than the prompt has.
    let input = DecisionInput {
        matched_tokens: 128,
        ..input
    };
    assert_eq!(outcome(input), (read(0, 6, 96), Reason::WorthReading));
}

#[test]
fn an_edited_history_is_read_up_to_the_edit() {
    let input = DecisionInput {
        matched_tokens: 160,
        ..matching(16, 4000)
    };
    assert_eq!(outcome(input), (read(0, 10, 160), Reason::WorthReading));
    let input = DecisionInput {
        matched_tokens: 0,
        ..input
    };
    assert_eq!(outcome(input), (Action::Nothing, Reason::NoMatch));
}

#[test]
fn a_local_hit_is_rounded_down_and_may_cover_all() {
    let hit = |tokens| DecisionInput {
        local_hit_tokens: tokens,
        ..matching(16, 320)
    };
    assert_eq!(outcome(hit(0)), (read(0, 20, 320), Reason::WorthReading));
    assert_eq!(outcome(hit(15)), (read(0, 20, 320), Reason::WorthReading));
    assert_eq!(outcome(hit(47)), (read(2, 18, 288), Reason::WorthReading));
    assert_eq!(
        outcome(hit(319)),
        (Action::Recompute, Reason::BelowThreshold)
    );
    for tokens in [320, 321, 5000, u64::MAX] {
        assert_eq!(
            outcome(hit(tokens)),
            (Action::Nothing, Reason::LocalHitCovers)
        );
    }
}

#[test]
fn a_lease_that_is_over_or_almost_is_not_used() {
    let lease = |remaining| DecisionInput {
        lease_remaining: remaining,
        ..matching(16, 320)
    };
    let expired = (Action::Recompute, Reason::LeaseExpired);
    assert_eq!(outcome(lease(Some(Duration::ZERO))), expired);
    assert_eq!(outcome(lease(Some(Duration::from_secs(5)))), expired);
    let good = (read(0, 20, 320), Reason::WorthReading);
    assert_eq!(outcome(lease(Some(Duration::from_millis(5001)))), good);
    assert_eq!(outcome(lease(None)), good);
}

#[test]
fn a_slow_path_or_a_lost_peer_is_not_used() {
    let input = DecisionInput {
        fabric_ok: false,
        ..matching(16, 320)
    };
    assert_eq!(
        outcome(input),
        (Action::Recompute, Reason::FabricNotAllowed)
    );
    let input = DecisionInput {
        peer_ok: false,
        ..matching(16, 320)
    };
    assert_eq!(outcome(input), (Action::Recompute, Reason::PeerUnavailable));
}

#[test]
fn reasons_have_stable_names() {
    for reason in Reason::ALL {
        let json = serde_json::to_value(reason).unwrap();
        assert_eq!(json, reason.as_str());
    }
    let d = decide(&DecisionInput {
        lease_remaining: Some(Duration::from_millis(60_500)),
        ..matching(16, 64)
    });
    let json = serde_json::to_value(d).unwrap();
    assert_eq!(json["action"], "read");
    assert_eq!(json["blocks"], 4);
    assert_eq!(json["reason"], "worth_reading");
    assert_eq!(json["lease"], "keep");
    assert_eq!(json["effective_threshold"], 64);
    assert_eq!(json["input"]["lease_remaining_s"], 60.5);
    assert_eq!(json["input"]["matched_tokens"], 64);
    assert!(json["estimate_s"].is_null());
}

const SHAPE: ReadShape = ReadShape {
    bytes_per_block: 1 << 20,
    descriptors_per_block: 64,
};

/// A model fed by a link of these costs (seconds) and a prefill of these.
fn trained(fixed: f64, per_byte: f64, per_descriptor: f64, per_token: f64) -> CostModel {
    let mut model = CostModel::new();
    for i in 0..64_u32 {
        let (bytes, descriptors) = ((1 + i % 7) << 20, 64 * (1 + i % 5));
        let took = fixed + f64::from(bytes) * per_byte + f64::from(descriptors) * per_descriptor;
        model.observe_read(
            bytes.into(),
            descriptors.into(),
            Duration::from_secs_f64(took),
        );
        model.observe_prefill(1000, Duration::from_secs_f64(1000.0 * per_token));
    }
    model
}

#[test]
fn the_cost_model_waits_for_its_samples() {
    let mut model = CostModel::new();
    model.observe_prefill(1000, Duration::from_millis(100));
    for _ in 1..COST_SAMPLES_NEEDED {
        model.observe_read(1 << 20, 64, Duration::from_millis(2));
        assert!(!model.is_ready());
        assert_eq!(model.read_time(SHAPE, 1), None);
        let plain = decide(&matching(16, 64));
        assert_eq!(decide_with(&matching(16, 64), &model, SHAPE), plain);
    }
    model.observe_read(1 << 20, 64, Duration::from_millis(2));
    assert!(model.is_ready());
    let time = model.read_time(SHAPE, 1).unwrap().as_secs_f64();
    assert!((time - 0.002).abs() < 1e-5, "{time}");
}

#[test]
fn the_cost_model_finds_the_costs() {
    let model = trained(1e-3, 1.0 / 10e9, 1e-6, 20e-6);
    let time = model.read_time(SHAPE, 100).unwrap().as_secs_f64();
    let truth = 1e-3 + 100.0 * (f64::from(1 << 20) / 10e9 + 64e-6);
    assert!((time / truth - 1.0).abs() < 0.01, "{time} for {truth}");
    // 168.9 µs a block are 10.56 µs a token; computing takes 20 µs: 1 ms / 9.44 µs = 105.9.
    let threshold = model.effective_threshold(SHAPE, block(16)).unwrap();
    assert!((104..=108).contains(&threshold), "{threshold}");
}

#[test]
fn the_cost_model_moves_the_threshold_both_ways_within_bounds() {
    // A fast link and a slow engine: one block is worth it.
    let fast = trained(100e-6, 1.0 / 20e9, 1e-7, 1e-3);
    assert_eq!(fast.effective_threshold(SHAPE, block(16)), Some(16));
    assert_eq!(
        decide_with(&matching(16, 16), &fast, SHAPE).reason,
        Reason::WorthReading
    );
    // A link slower than the engine: only very long reads, which would teach the model better.
    let slow = trained(5e-3, 1.0 / 0.1e9, 1e-6, 10e-6);
    assert_eq!(
        slow.effective_threshold(SHAPE, block(16)),
        Some(MAX_EFFECTIVE_THRESHOLD)
    );
    let d = decide_with(&matching(16, 1000), &slow, SHAPE);
    assert_eq!(d.reason, Reason::BelowThreshold);
    assert_eq!(d.effective_threshold, MAX_EFFECTIVE_THRESHOLD);
    // Off stays off.
    let off = DecisionInput {
        threshold: 0,
        ..matching(16, 1000)
    };
    assert_eq!(decide_with(&off, &slow, SHAPE).reason, Reason::WorthReading);
    // Blocks longer than the bound are still one block.
    assert_eq!(slow.effective_threshold(SHAPE, block(8192)), Some(8192));
}

#[test]
fn a_read_that_would_outlast_its_lease_is_refused() {
    let slow = trained(1e-3, 1.0 / 0.1e9, 1e-6, 1.0);
    // 1,000 blocks of 1 MiB at 100 MB/s: 10.5 s and the margin of 5 s.
    let lease = |s| DecisionInput {
        lease_remaining: Some(Duration::from_secs(s)),
        ..matching(16, 16_000)
    };
    let d = decide_with(&lease(15), &slow, SHAPE);
    assert_eq!(
        (d.action, d.reason),
        (Action::Recompute, Reason::LeaseTooShort)
    );
    assert_eq!(d.lease, LeaseAction::Release);
    assert!(d.estimate.is_some_and(|t| t > Duration::from_secs(10)));
    assert_eq!(
        decide_with(&lease(16), &slow, SHAPE).reason,
        Reason::WorthReading
    );
    assert_eq!(
        decide_with(&lease(5), &slow, SHAPE).reason,
        Reason::LeaseExpired
    );
}

#[test]
fn odd_measurements_do_no_harm() {
    let mut model = CostModel::new();
    for i in 0..100_u64 {
        model.observe_read(0, 0, Duration::ZERO);
        model.observe_read(u64::MAX, u64::MAX, Duration::from_nanos(1));
        model.observe_read(1, 0, Duration::MAX);
        model.observe_prefill(0, Duration::MAX);
        model.observe_prefill(u64::MAX, Duration::from_nanos(i));
        model.observe_prefill(1, Duration::MAX);
        let d = decide_with(&matching(16, 1000), &model, SHAPE);
        assert!((16..=MAX_EFFECTIVE_THRESHOLD).contains(&d.effective_threshold));
    }
}

fn check(input: &DecisionInput, d: &Decision) -> Result<(), TestCaseError> {
    let block_tokens = u64::from(input.block_tokens.get());
    prop_assert_eq!(d.input, *input);
    prop_assert_eq!(
        d.lease == LeaseAction::Keep,
        d.reason == Reason::WorthReading
    );
    let Action::Read {
        first_block,
        blocks,
        tokens,
    } = d.action
    else {
        prop_assert_ne!(d.reason, Reason::WorthReading);
        return Ok(());
    };
    let end = (u64::from(first_block) + u64::from(blocks)) * block_tokens;
    prop_assert!(blocks > 0);
    prop_assert_eq!(tokens, u64::from(blocks) * block_tokens);
    prop_assert!(tokens >= d.effective_threshold);
    prop_assert!(end <= input.matched_tokens && end <= input.remote_tokens);
    prop_assert!(end <= input.prompt_tokens);
    prop_assert_eq!(
        u64::from(first_block),
        input.local_hit_tokens / block_tokens
    );
    prop_assert!(input.fabric_ok && input.peer_ok);
    prop_assert!(input.lease_remaining.is_none_or(|t| t > input.lease_margin));
    Ok(())
}

proptest! {
    #[test]
    fn a_read_is_inside_everything_that_bounds_it(
        counts in prop::array::uniform4(prop_oneof![0..400_u64, any::<u64>()]),
        block_tokens in prop_oneof![1..40_u32, 1..=u32::MAX],
        threshold in prop_oneof![Just(0), Just(64_u64), any::<u64>()],
        lease in prop::option::of(0..20_u64),
        good in prop::array::uniform2(prop::bool::weighted(0.9)),
    ) {
        let input = DecisionInput {
            remote_tokens: counts[0],
            matched_tokens: counts[1],
            prompt_tokens: counts[2],
            local_hit_tokens: counts[3],
            threshold,
            lease_remaining: lease.map(Duration::from_secs),
            fabric_ok: good[0],
            peer_ok: good[1],
            ..DecisionInput::new(block(block_tokens))
        };
        check(&input, &decide(&input))?;
        check(&input, &decide_with(&input, &trained(1e-3, 1e-9, 1e-6, 1e-4), SHAPE))?;
    }
}
