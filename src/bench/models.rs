//! What is read from another node: the KV of known models, in blocks as an allocator scatters them.

use kv_xfer::layout::{KvLayout, KvSplit, PoolOrder, Preset};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, json};

use super::cases::Case;
use super::contender::{Carrier, Contender, Group};
use super::proto::Shape;
use super::row::Who;
use super::worker::WorkerError;

/// Memory of one end, unless told otherwise.
const MOST_BYTES: u64 = 4 << 30;

/// One rank of a deployment.
const RANKS: [(Preset, u32); 4] = [
    (Preset::Qwen3_32B, 8),
    (Preset::Glm5, 8),
    (Preset::Llama3_3_70B, 8),
    (Preset::SmolLM2_135M, 1),
];

/// The cases: for each model, page size and order of the pool, prompts of several lengths, and so
/// many of them together, as far as the memory reaches.
///
/// # Errors
/// [`WorkerError`] when a layout cannot be made.
pub fn groups(quick: bool, max_bytes: Option<u64>, seed: u64) -> Result<Vec<Group>, WorkerError> {
    let bytes = max_bytes.unwrap_or(MOST_BYTES);
    let (ranks, pages, tokens, bursts): (&[_], &[u32], &[u32], &[u32]) = if quick {
        (&[(Preset::SmolLM2_135M, 1)], &[16], &[1024], &[1, 4])
    } else {
        (&RANKS, &[16, 64], &[8192, 32_768, 131_072], &[1, 8, 64])
    };
    let mut groups = Vec::new();
    for (preset, tp) in ranks {
        for page in pages {
            for order in [PoolOrder::LayerFirst, PoolOrder::BlockFirst] {
                let geometry = preset.geometry();
                let layout = KvLayout::new(&geometry, *tp, *page, order, KvSplit::Fused)?;
                let most = u32::try_from(bytes / layout.block_bytes().max(1)).unwrap_or(u32::MAX);
                let mut pool = 0;
                let mut cases = Vec::new();
                for (tokens, burst) in tokens
                    .iter()
                    .flat_map(|tokens| bursts.iter().map(move |burst| (tokens, burst)))
                {
                    let each = tokens.div_ceil(*page);
                    let all = each.saturating_mul(*burst);
                    if all > most {
                        continue;
                    }
                    pool = pool.max(all);
                    let together = match burst {
                        1 => String::new(),
                        burst => format!("-x{burst}"),
                    };
                    let name = format!(
                        "{}-tp{tp}-{order}-page{page}-{}k{together}",
                        preset.name(),
                        tokens / 1024
                    );
                    cases.push((name, each, *burst));
                }
                let regions = u32::try_from(layout.regions().len()).unwrap_or(u32::MAX);
                let cases: Vec<_> = cases
                    .into_iter()
                    .map(|(name, each, burst)| scattered(name, each, burst, pool, seed))
                    .collect();
                if cases.is_empty() {
                    continue;
                }
                let settings = Map::from_iter([
                    ("model".to_owned(), json!(preset.name())),
                    ("tp".to_owned(), json!(tp)),
                    ("block_tokens".to_owned(), json!(page)),
                ]);
                groups.push(Group {
                    shape: Shape {
                        regions,
                        blocks: pool,
                        // The model's own lengths count; this is their mean.
                        block_bytes: layout.block_bytes().div_ceil(regions.max(1).into()),
                    },
                    carrier: Carrier::Auto,
                    settings,
                    contenders: vec![
                        Contender::new(Who::KvXfer, ""),
                        Contender::new(Who::OneDescriptor, ""),
                    ],
                    cases,
                });
            }
        }
    }
    Ok(groups)
}

/// `burst` reads of `each` blocks, no two of which share a block.
fn scattered(name: String, each: u32, burst: u32, pool: u32, seed: u64) -> Case {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut tables = || {
        let mut all: Vec<u32> = (0..pool).collect();
        all.shuffle(&mut rng);
        let each = usize::try_from(each).unwrap_or(usize::MAX).max(1);
        let burst = usize::try_from(burst).unwrap_or(usize::MAX);
        all.chunks_exact(each)
            .take(burst)
            .map(<[u32]>::to_vec)
            .collect::<Vec<_>>()
    };
    let (remote, local) = (tables(), tables());
    Case {
        name,
        reads: remote.into_iter().zip(local).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_is_there_within_bounds() {
        let groups = groups(false, None, 1).unwrap();
        for (preset, _) in RANKS {
            assert!(
                groups
                    .iter()
                    .any(|group| group.settings["model"] == preset.name())
            );
        }
        for group in &groups {
            assert!(group.shape.bytes().unwrap() <= MOST_BYTES + (1 << 20));
            for case in &group.cases {
                let mut local: Vec<_> = case.reads.iter().flat_map(|(_, l)| l.clone()).collect();
                let count = local.len();
                local.sort_unstable();
                local.dedup();
                assert_eq!(local.len(), count, "{}", case.name);
                assert!(local.iter().all(|block| *block < group.shape.blocks));
            }
        }
    }

    #[test]
    fn bursts_have_as_many_reads_as_they_say() {
        let groups = groups(true, None, 1).unwrap();
        let cases: Vec<_> = groups.iter().flat_map(|group| &group.cases).collect();
        assert_eq!(cases[0].name, "SmolLM2-135M-tp1-layer-first-page16-1k");
        assert_eq!((cases[0].reads.len(), cases[0].blocks()), (1, 64));
        assert_eq!((cases[1].reads.len(), cases[1].blocks()), (4, 256));
    }
}
