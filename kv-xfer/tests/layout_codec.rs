//! A layout's bytes: one encoding per layout, everything else refused; and what the fingerprint
//! tells apart.
#![allow(clippy::unwrap_used)]

use kv_xfer::layout::{
    Attention, Dtype, Indexer, KvLayout, KvSplit, LayoutDecodeError, LayoutFactor,
    MAX_LAYOUT_BYTES, ModelGeometry, PoolOrder, Preset,
};
use proptest::prelude::*;

fn dtypes() -> impl Strategy<Value = Dtype> {
    prop::sample::select(vec![
        Dtype::F32,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::Fp8E4m3,
        Dtype::Fp8E5m2,
        Dtype::Int8,
    ])
}

prop_compose! {
    fn layouts()(
        name in "[^\\p{C}]{1,60}",
        layers in 1_u32..6,
        latent: bool,
        (heads, k, v) in (1_u32..9, 1_u32..4, 1_u32..4),
        dtype in dtypes(),
        indexer in prop::option::of((1_u32..200, 1_u32..6)),
        (tp, replicas) in (1_u32..9, 1_u32..3),
        block_tokens in 1_u32..65,
        block_first: bool,
        separate: bool,
    ) -> KvLayout {
        let attention = if latent {
            Attention::Mla { latent_dim: k * 64, rope_dim: v * 8 }
        } else {
            Attention::Gqa { kv_heads: heads, head_dim_k: k * 8, head_dim_v: v * 8 }
        };
        let indexer = indexer.map(|(bytes_per_token, n)| Indexer {
            bytes_per_token,
            layers: n.min(layers),
        });
        let model = ModelGeometry::new(name, layers, attention, dtype, indexer).unwrap();
        let tp = if latent { tp } else { heads * replicas };
        let order = if block_first { PoolOrder::BlockFirst } else { PoolOrder::LayerFirst };
        let split = if separate && !latent { KvSplit::Separate } else { KvSplit::Fused };
        KvLayout::new(&model, tp, block_tokens, order, split).unwrap()
    }
}

proptest! {
    #[test]
    fn layouts_round_trip(layout in layouts()) {
        let bytes = layout.to_bytes();
        prop_assert!(bytes.len() <= MAX_LAYOUT_BYTES);
        prop_assert_eq!(KvLayout::from_bytes(&bytes), Ok(layout));
    }

    #[test]
    fn truncated_and_longer_bytes_are_refused(layout in layouts()) {
        let mut bytes = layout.to_bytes();
        for len in 0..bytes.len() {
            prop_assert!(KvLayout::from_bytes(&bytes[..len]).is_err());
        }
        bytes.push(0);
        prop_assert_eq!(
            KvLayout::from_bytes(&bytes),
            Err(LayoutDecodeError::Trailing { extra: 1 })
        );
    }

    /// Changed bytes are refused, or are another layout in its own one encoding.
    #[test]
    fn changed_bytes_never_panic(
        layout in layouts(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = layout.to_bytes();
        // Small counts only, lest a changed layer count makes a slow test.
        for (at, value) in changes {
            *at.get_mut(&mut bytes) = value;
        }
        if let Ok(found) = KvLayout::from_bytes(&bytes) {
            prop_assert_eq!(found.to_bytes(), bytes);
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..100), magic: bool) {
        if magic {
            bytes.splice(0..0, *b"KVL\x01");
        }
        if let Ok(found) = KvLayout::from_bytes(&bytes) {
            prop_assert_eq!(found.to_bytes(), bytes);
        }
    }

    #[test]
    fn fingerprints_are_equal_exactly_when_layouts_are_compatible(a in layouts(), b in layouts()) {
        prop_assert_eq!(
            a.content_fingerprint() == b.content_fingerprint(),
            a.check_compatible(&b).is_ok()
        );
        prop_assert!(a.check_compatible(&a).is_ok());
    }
}

fn qwen(name: &str, layers: u32, dtype: Dtype) -> ModelGeometry {
    let attention = Preset::Qwen3_32B.geometry().attention();
    ModelGeometry::new(name, layers, attention, dtype, None).unwrap()
}

#[test]
fn name_and_pool_order_are_not_in_the_fingerprint() {
    let of = |name, order| {
        let model = qwen(name, 64, Dtype::Bf16);
        KvLayout::new(&model, 8, 16, order, KvSplit::Fused).unwrap()
    };
    let a = of("Qwen/Qwen3-32B", PoolOrder::LayerFirst);
    let b = of("/models/qwen", PoolOrder::BlockFirst);
    assert_eq!(a.content_fingerprint(), b.content_fingerprint());
    assert_eq!(a.check_compatible(&b), Ok(()));
}

#[test]
fn a_mismatch_names_its_factor_and_both_values() {
    let of = |layers, dtype, tp, block_tokens, split| {
        let model = qwen("m", layers, dtype);
        KvLayout::new(&model, tp, block_tokens, PoolOrder::LayerFirst, split).unwrap()
    };
    let ours = of(64, Dtype::Bf16, 8, 16, KvSplit::Fused);
    let glm = KvLayout::new(
        &Preset::Glm5.geometry(),
        8,
        64,
        PoolOrder::LayerFirst,
        KvSplit::Fused,
    )
    .unwrap();
    for (theirs, factor, local, remote) in [
        (glm, LayoutFactor::Layers, "64", "78"),
        (
            of(64, Dtype::Fp8E4m3, 8, 16, KvSplit::Fused),
            LayoutFactor::Dtype,
            "bfloat16",
            "fp8_e4m3",
        ),
        (
            of(64, Dtype::Bf16, 4, 16, KvSplit::Fused),
            LayoutFactor::TensorParallel,
            "8",
            "4",
        ),
        (
            of(64, Dtype::Bf16, 8, 64, KvSplit::Fused),
            LayoutFactor::BlockTokens,
            "16",
            "64",
        ),
        (
            of(64, Dtype::Bf16, 8, 16, KvSplit::Separate),
            LayoutFactor::Split,
            "fused",
            "separate",
        ),
    ] {
        let mismatch = ours.check_compatible(&theirs).unwrap_err();
        assert_eq!(mismatch.factor, factor);
        assert_eq!((&*mismatch.local, &*mismatch.remote), (local, remote));
        let text = mismatch.to_string();
        assert!(text.contains(local) && text.contains(remote), "{text}");
    }
}

/// The encoding is a promise between releases: when these change, so must the version.
#[test]
fn version_one_has_not_changed() {
    let layout = KvLayout::new(
        &Preset::Glm5.geometry(),
        8,
        64,
        PoolOrder::BlockFirst,
        KvSplit::Fused,
    )
    .unwrap();
    let expected: &[u8] =
        b"KVL\x01\x02\x01\x00\x02\0\0\x40\0\0\0\x4e\0\0\0\x01\x84\0\0\0\x4e\0\0\0\
        \x08\0\0\0\x40\0\0\0\x00\x01\x05\x00GLM-5";
    assert_eq!(layout.to_bytes(), expected);
    assert_eq!(
        layout.content_fingerprint().to_string(),
        "6cde67b9cd9e6b70b6d8e70b01e9d72cf25573fa1c72d60007971be0ae462b8b"
    );
}
