//! What the demo's blocks hold: a function of the tokens before and at a position, the layer, the
//! component, the head and the place in the row. Bytes that land in a wrong place, come from another
//! conversation, or are older than the tokens they should belong to, differ from what is expected
//! there; and the expectation is computed, never copied.

use kv_xfer::layout::{Attention, Chunk, Component, KvLayout};

/// Odd constants of multiplicative hashing (the golden ratio, and MurmurHash's finaliser).
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const MIX: u64 = 0xff51_afd7_ed55_8ccd;
/// Bytes generated at a time.
const WORD: usize = size_of::<u64>();

/// Names a token by all tokens up to and including it, as attention sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenKey(u64);

/// The names of a growing list of tokens.
#[derive(Debug, Clone)]
pub struct TokenKeys {
    last: u64,
    keys: Vec<TokenKey>,
}

impl TokenKeys {
    /// No tokens yet. Different seeds give different content everywhere.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            last: finish(seed ^ STEP),
            keys: Vec::new(),
        }
    }

    /// Names of `tokens` from the start.
    #[must_use]
    pub fn of(seed: u64, tokens: &[u32]) -> Self {
        let mut keys = Self::new(seed);
        keys.extend(tokens);
        keys
    }

    /// Appends tokens.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.keys.reserve(tokens.len());
        for token in tokens {
            self.last = finish(self.last.wrapping_mul(STEP) ^ u64::from(*token).wrapping_add(1));
            self.keys.push(TokenKey(self.last));
        }
    }

    /// The names, one per token.
    #[must_use]
    pub fn as_slice(&self) -> &[TokenKey] {
        &self.keys
    }

    /// The names of block `index` of `block_tokens` tokens; fewer, or none, at the end.
    #[must_use]
    pub fn block(&self, index: usize, block_tokens: u32) -> &[TokenKey] {
        let block_tokens = usize::try_from(block_tokens).unwrap_or(usize::MAX);
        let start = index.saturating_mul(block_tokens).min(self.keys.len());
        let end = start.saturating_add(block_tokens).min(self.keys.len());
        &self.keys[start..end]
    }
}

/// One layer's component of a block: what it is and how its bytes lie, `[heads][tokens][row]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkShape {
    layer: u32,
    component: Component,
    tokens: usize,
    heads: usize,
    row_bytes: usize,
}

impl ChunkShape {
    /// The shape of a chunk of a layout. `None` when the chunk is not one of the layout.
    #[must_use]
    pub fn of(layout: &KvLayout, chunk: &Chunk) -> Option<Self> {
        let heads = match (chunk.component, layout.model().attention()) {
            (Component::Kv | Component::K | Component::V, Attention::Gqa { kv_heads, .. }) => {
                (kv_heads / layout.tp()).max(1)
            }
            _ => 1,
        };
        let tokens = usize::try_from(layout.block_tokens()).ok()?;
        let heads = usize::try_from(heads).ok()?;
        let rows = heads.checked_mul(tokens)?;
        let len = usize::try_from(chunk.len).ok()?;
        let exact = rows > 0 && len.is_multiple_of(rows);
        exact.then(|| Self {
            layer: chunk.layer,
            component: chunk.component,
            tokens,
            heads,
            row_bytes: len / rows,
        })
    }

    /// Bytes of the chunk.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens * self.heads * self.row_bytes
    }

    /// Whether it holds no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the content for the tokens `keys` into `out`, a whole chunk. Rows of tokens that a
    /// last, partial block lacks are left alone.
    ///
    /// # Panics
    /// When `out` has another length than the chunk.
    pub fn fill(&self, keys: &[TokenKey], out: &mut [u8]) {
        assert_eq!(out.len(), self.len(), "a whole chunk");
        for (row, seed) in out.chunks_exact_mut(self.row_bytes).zip(self.seeds(keys)) {
            if let Some(seed) = seed {
                fill_row(seed, row);
            }
        }
    }

    /// Counts the bytes of `data`, a whole chunk, that are not what the tokens `keys` give. Rows of
    /// tokens that a last, partial block lacks are not looked at.
    ///
    /// # Panics
    /// When `data` has another length than the chunk.
    #[must_use]
    pub fn wrong_bytes(&self, keys: &[TokenKey], data: &[u8]) -> u64 {
        assert_eq!(data.len(), self.len(), "a whole chunk");
        data.chunks_exact(self.row_bytes)
            .zip(self.seeds(keys))
            .filter_map(|(row, seed)| Some(wrong_in_row(seed?, row)))
            .sum()
    }

    /// The seed of each row in the order in which rows lie; `None` for tokens that are not there.
    fn seeds<'a>(&self, keys: &'a [TokenKey]) -> impl Iterator<Item = Option<u64>> + use<'a> {
        let tokens = self.tokens;
        let place = finish(u64::from(self.layer) << 8 | code(self.component));
        (0..self.heads).flat_map(move |head| {
            let place = finish(place ^ head as u64);
            (0..tokens).map(move |token| Some(finish(keys.get(token)?.0 ^ place)))
        })
    }
}

fn code(component: Component) -> u64 {
    match component {
        Component::Kv => 1,
        Component::K => 2,
        Component::V => 3,
        Component::Latent => 4,
        Component::Indexer => 5,
        _ => 6,
    }
}

fn finish(x: u64) -> u64 {
    let x = (x ^ (x >> 32)).wrapping_mul(MIX);
    x ^ (x >> 29)
}

/// Word `index` of a row.
fn word(seed: u64, index: usize) -> u64 {
    finish(seed.wrapping_add((index as u64).wrapping_mul(STEP)))
}

fn fill_row(seed: u64, row: &mut [u8]) {
    let (words, rest) = row.as_chunks_mut::<WORD>();
    let count = words.len();
    for (index, out) in words.iter_mut().enumerate() {
        *out = word(seed, index).to_le_bytes();
    }
    rest.copy_from_slice(&word(seed, count).to_le_bytes()[..rest.len()]);
}

fn wrong_in_row(seed: u64, row: &[u8]) -> u64 {
    let (words, rest) = row.as_chunks::<WORD>();
    let difference = words.iter().enumerate().fold(0, |all, (index, bytes)| {
        all | (u64::from_le_bytes(*bytes) ^ word(seed, index))
    });
    let tail = word(seed, words.len()).to_le_bytes();
    if difference == 0 && *rest == tail[..rest.len()] {
        return 0;
    }
    let mut expected = vec![0; row.len()];
    fill_row(seed, &mut expected);
    row.iter().zip(&expected).filter(|(a, b)| a != b).count() as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use kv_xfer::layout::{Dtype, KvSplit, PoolOrder, Preset};

    use super::*;

    fn shapes(preset: Preset, tp: u32, split: KvSplit) -> Vec<ChunkShape> {
        let model = preset.geometry_with(Dtype::Bf16);
        let layout = KvLayout::new(&model, tp, 16, PoolOrder::LayerFirst, split).unwrap();
        let chunks = layout.chunks().iter();
        chunks
            .map(|c| ChunkShape::of(&layout, c).unwrap())
            .collect()
    }

    fn filled(shape: &ChunkShape, keys: &[TokenKey]) -> Vec<u8> {
        let mut out = vec![0; shape.len()];
        shape.fill(keys, &mut out);
        out
    }

    #[test]
    fn what_was_filled_is_right_and_every_changed_byte_counts() {
        for shape in [
            shapes(Preset::Qwen3_32B, 8, KvSplit::Fused)[3],
            shapes(Preset::Llama3_3_70B, 4, KvSplit::Separate)[1],
            shapes(Preset::Glm5, 1, KvSplit::Fused)[1],
        ] {
            let keys = TokenKeys::of(1, &(0..16).collect::<Vec<_>>());
            let mut data = filled(&shape, keys.as_slice());
            assert_eq!(shape.wrong_bytes(keys.as_slice(), &data), 0);
            let last = data.len() - 1;
            for at in [0, 7, 131, last / 2, last] {
                data[at] ^= 0x10;
            }
            assert_eq!(shape.wrong_bytes(keys.as_slice(), &data), 5);
        }
    }

    #[test]
    fn content_depends_on_everything_that_names_it() {
        let all = shapes(Preset::Qwen3_32B, 4, KvSplit::Separate);
        let tokens: Vec<u32> = (0..32).collect();
        let mut edited = tokens.clone();
        edited[3] = 99;
        let mut seen = HashSet::new();
        let mut rows = 0;
        for keys in [
            TokenKeys::of(1, &tokens),
            TokenKeys::of(2, &tokens),
            TokenKeys::of(1, &edited),
        ] {
            for block in 0..2 {
                for shape in &all[..4] {
                    let data = filled(shape, keys.block(block, 16));
                    for row in data.chunks_exact(shape.row_bytes) {
                        seen.insert(row.to_vec());
                        rows += 1;
                    }
                }
            }
        }
        // Only the three tokens before the edit have the same history: 3 tokens, 4 chunks, 2 heads.
        assert_eq!(seen.len(), rows - 3 * 4 * 2);
    }

    #[test]
    fn a_swapped_or_shifted_row_is_noticed() {
        let shape = shapes(Preset::Qwen3_32B, 8, KvSplit::Fused)[0];
        let keys = TokenKeys::of(1, &[5; 32]);
        let mut data = filled(&shape, keys.block(0, 16));
        assert!(shape.wrong_bytes(keys.block(1, 16), &data) > data.len() as u64 * 9 / 10);
        data.rotate_left(WORD);
        assert!(shape.wrong_bytes(keys.block(0, 16), &data) > data.len() as u64 * 9 / 10);
    }

    #[test]
    fn a_partial_block_is_looked_at_as_far_as_it_goes() {
        let shape = shapes(Preset::Qwen3_32B, 4, KvSplit::Fused)[0];
        let keys = TokenKeys::of(1, &[5; 21]);
        assert_eq!(keys.block(1, 16).len(), 5);
        assert_eq!(keys.block(2, 16).len(), 0);
        assert_eq!(keys.block(usize::MAX, 16).len(), 0);
        let mut data = filled(&shape, keys.block(1, 16));
        let row = shape.row_bytes;
        data[row * 5..row * 16].fill(1);
        assert_eq!(shape.wrong_bytes(keys.block(1, 16), &data), 0);
        data[row * 16] ^= 1;
        assert_eq!(shape.wrong_bytes(keys.block(1, 16), &data), 1);
    }

    #[test]
    fn keys_grow_as_they_would_have_been_at_once() {
        let mut keys = TokenKeys::new(3);
        keys.extend(&[1, 2]);
        keys.extend(&[3]);
        assert_eq!(keys.as_slice(), TokenKeys::of(3, &[1, 2, 3]).as_slice());
    }
}
