//! Which tokens a block holds: chained block hashes.
//!
//! A block's KV depends on every token before it, on the weights, and (by choice) on the tenant. So
//! its hash covers all of these: `root = H(model, salt, block size)`, `h₀ = H(root ‖ tokens₀)`,
//! `hᵢ = H(hᵢ₋₁ ‖ tokensᵢ)`. Two blocks with one hash hold the same KV, up to the numerics of the
//! machines that computed it. Where two chains part they stay apart, so the blocks that may be reused
//! are the longest equal prefix: [`matching_prefix`].
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::ids::{MAX_NAME_BYTES, NameError};

/// Separates chain roots from every other use of BLAKE3; changes with the chain's definition.
const ROOT_CONTEXT: &str = "kv-xfer 2026 block hash chain v1";

/// Why a chain was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// The model's name or revision is not acceptable.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A block must hold at least one token.
    #[error("a block of zero tokens has no hash; give the pool's block size")]
    EmptyBlock,
}

/// Which weights computed the KV. Engines that share KV must write it letter for letter alike:
/// agree on the hub's name and commit, not on local paths.
///
/// Independent of the layout, which [`LayoutFingerprint`](crate::layout::LayoutFingerprint) covers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelIdentity {
    name: Arc<str>,
    revision: Arc<str>,
}

impl ModelIdentity {
    /// An identity from the model's name and its revision (a commit, a tag, a digest of the weights;
    /// empty when there is only one). LoRA adapters change KV: put them into the revision.
    ///
    /// # Errors
    /// [`NameError`] when the name is empty, or either is too long or holds a control character.
    pub fn new(name: impl AsRef<str>, revision: impl AsRef<str>) -> Result<Self, NameError> {
        let (name, revision) = (name.as_ref(), revision.as_ref());
        if name.is_empty() {
            return Err(NameError::Empty { what: "model name" });
        }
        check("model name", name)?;
        check("model revision", revision)?;
        Ok(Self {
            name: Arc::from(name),
            revision: Arc::from(revision),
        })
    }

    /// The model's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its revision; may be empty.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.revision
    }
}

impl fmt::Display for ModelIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.revision.is_empty() {
            return Ok(());
        }
        write!(f, "@{}", self.revision)
    }
}

fn check(what: &'static str, text: &str) -> Result<(), NameError> {
    if text.len() > MAX_NAME_BYTES {
        return Err(NameError::TooLong {
            what,
            len: text.len(),
        });
    }
    match text.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, _)) => Err(NameError::Control { what, at }),
        None => Ok(()),
    }
}

/// Bytes that keep tenants' blocks apart: equal tokens under different salts have different hashes,
/// so that neither KV nor its presence leaks from one tenant to another. Never shown.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Salt(Arc<[u8]>);

impl Salt {
    /// A salt of any length. The empty one is [`Salt::none`].
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        Self(Arc::from(bytes))
    }

    /// No separation: blocks are shared by all who have none.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// True when there is no separation.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Salt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_none() {
            "Salt(none)"
        } else {
            "Salt(…)"
        })
    }
}

/// The chained hash of one full block: the first 128 bits of a BLAKE3 digest.
///
/// 128 bits because a descriptor carries one per block, and they are most of its size. Among 2⁴⁰
/// blocks the chance of any accidental collision is below 2⁻⁴⁸; finding other tokens for a given
/// hash takes 2¹²⁸ work. The chain itself runs over all 256 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// Bytes of a hash.
    pub const LEN: usize = 16;
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

/// Hashes a token sequence block by block.
///
/// ```
/// use kv_xfer::identity::{HashChain, ModelIdentity, Salt, matching_prefix};
///
/// let model = ModelIdentity::new("Qwen/Qwen3-32B", "9216db5")?;
/// let chain = HashChain::new(&model, &Salt::none(), 4)?;
/// let ours = chain.hash_blocks(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
/// let theirs = chain.hash_blocks(&[1, 2, 3, 4, 5, 6, 7, 0]);
/// assert_eq!(ours.len(), 2); // the ninth token fills no block
/// assert_eq!(matching_prefix(&ours, &theirs), 1);
/// # Ok::<(), kv_xfer::identity::IdentityError>(())
/// ```
#[derive(Clone)]
pub struct HashChain {
    root: [u8; 32],
    block_tokens: usize,
    /// Digest of the last full block that `extend` has seen; `root` before the first.
    state: [u8; 32],
    /// Tokens behind it, fewer than a block.
    pending: Vec<u32>,
}

impl HashChain {
    /// A chain for one model, one tenant and one block size in tokens.
    ///
    /// # Errors
    /// [`IdentityError::EmptyBlock`] when `block_tokens` is zero.
    pub fn new(
        model: &ModelIdentity,
        salt: &Salt,
        block_tokens: u32,
    ) -> Result<Self, IdentityError> {
        if block_tokens == 0 {
            return Err(IdentityError::EmptyBlock);
        }
        let mut hasher = blake3::Hasher::new_derive_key(ROOT_CONTEXT);
        // Each part behind its length, so that no two triples give the same bytes.
        for part in [model.name.as_bytes(), model.revision.as_bytes(), &salt.0] {
            hasher.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
            hasher.update(part);
        }
        hasher.update(&block_tokens.to_le_bytes());
        let root = *hasher.finalize().as_bytes();
        Ok(Self {
            root,
            block_tokens: usize::try_from(block_tokens).unwrap_or(usize::MAX),
            state: root,
            pending: Vec::new(),
        })
    }

    /// The hashes of the full blocks of a whole sequence, whatever was given to
    /// [`extend`](Self::extend). A last block that is not full has none.
    #[must_use]
    pub fn hash_blocks(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let blocks = tokens.chunks_exact(self.block_tokens);
        let mut hashes = Vec::with_capacity(blocks.len());
        let mut state = self.root;
        let mut bytes = Vec::new();
        for block in blocks {
            state = step(&state, block, &mut bytes);
            hashes.push(truncate(&state));
        }
        hashes
    }

    /// Appends tokens to the sequence given so far and returns the hashes of the blocks that they
    /// filled, in order.
    pub fn extend(&mut self, tokens: &[u32]) -> Vec<BlockHash> {
        self.pending.extend_from_slice(tokens);
        let blocks = self.pending.chunks_exact(self.block_tokens);
        let rest = blocks.remainder().len();
        let mut hashes = Vec::with_capacity(blocks.len());
        let mut bytes = Vec::new();
        for block in blocks {
            self.state = step(&self.state, block, &mut bytes);
            hashes.push(truncate(&self.state));
        }
        let done = self.pending.len().saturating_sub(rest);
        self.pending.drain(..done);
        hashes
    }

    /// Tokens in a block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        u32::try_from(self.block_tokens).unwrap_or(u32::MAX)
    }
}

/// Shows neither digests nor tokens: they are made from the salt.
impl fmt::Debug for HashChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HashChain")
            .field("block_tokens", &self.block_tokens)
            .field("pending", &self.pending.len())
            .finish_non_exhaustive()
    }
}

/// How many leading blocks are equal: the blocks that may be reused.
#[must_use]
pub fn matching_prefix(ours: &[BlockHash], theirs: &[BlockHash]) -> usize {
    ours.iter()
        .zip(theirs)
        .take_while(|(ours, theirs)| ours == theirs)
        .count()
}

/// `H(previous ‖ tokens)`, tokens as little-endian words. `bytes` is scratch.
fn step(previous: &[u8; 32], tokens: &[u32], bytes: &mut Vec<u8>) -> [u8; 32] {
    bytes.clear();
    bytes.extend_from_slice(previous);
    for token in tokens {
        bytes.extend_from_slice(&token.to_le_bytes());
    }
    *blake3::hash(bytes).as_bytes()
}

fn truncate(digest: &[u8; 32]) -> BlockHash {
    let mut hash = [0; BlockHash::LEN];
    for (to, from) in hash.iter_mut().zip(digest) {
        *to = *from;
    }
    BlockHash(hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chain(model: &str, revision: &str, salt: &[u8], block_tokens: u32) -> HashChain {
        let model = ModelIdentity::new(model, revision).unwrap();
        HashChain::new(&model, &Salt::new(salt), block_tokens).unwrap()
    }

    /// The definition, written out a second time.
    #[test]
    fn the_chain_is_as_defined() {
        let mut root = Vec::new();
        for part in [&b"Qwen/Qwen3-32B"[..], b"main", b"tenant"] {
            root.extend_from_slice(&(part.len() as u64).to_le_bytes());
            root.extend_from_slice(part);
        }
        root.extend_from_slice(&2_u32.to_le_bytes());
        let h = blake3::derive_key("kv-xfer 2026 block hash chain v1", &root);
        let h0 = blake3::hash(&[&h[..], &[1, 0, 0, 0, 2, 0, 0, 0]].concat());
        let h1 = blake3::hash(&[&h0.as_bytes()[..], &[3, 0, 0, 0, 0, 1, 0, 0]].concat());
        let hashes = chain("Qwen/Qwen3-32B", "main", b"tenant", 2).hash_blocks(&[1, 2, 3, 256, 5]);
        assert_eq!(hashes.len(), 2);
        assert_eq!(hashes[0].0[..], h0.as_bytes()[..16]);
        assert_eq!(hashes[1].0[..], h1.as_bytes()[..16]);
    }

    /// Hashes are a promise between releases.
    #[test]
    fn known_answers_have_not_changed() {
        let show = |hashes: Vec<BlockHash>| {
            hashes
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" ")
        };
        let tokens: Vec<u32> = (0..32).collect();
        assert_eq!(
            show(chain("m", "", b"", 16).hash_blocks(&tokens)),
            "46ae35bc1dba977569021161cb3db87f 32f362d07e2aa9e5e84c6dc1dfa5984f"
        );
        assert_eq!(
            show(chain("m", "r", b"s", 32).hash_blocks(&tokens)),
            "40f5580d244008c130fa6b954a36f2c6"
        );
    }

    #[test]
    fn parts_of_the_root_do_not_run_together() {
        let tokens = [1, 2, 3, 4];
        let of =
            |model, revision, salt: &[u8]| chain(model, revision, salt, 2).hash_blocks(&tokens);
        let all = [
            of("ab", "c", b""),
            of("a", "bc", b""),
            of("abc", "", b""),
            of("a", "b", b"c"),
            of("a", "", b"bc"),
        ];
        for (i, a) in all.iter().enumerate() {
            for b in &all[..i] {
                assert_eq!(matching_prefix(a, b), 0);
            }
        }
    }

    #[test]
    fn short_and_bad_inputs() {
        let chain = chain("m", "", b"", 4);
        assert!(chain.hash_blocks(&[]).is_empty());
        assert!(chain.hash_blocks(&[1, 2, 3]).is_empty());
        let model = ModelIdentity::new("m", "").unwrap();
        assert_eq!(
            HashChain::new(&model, &Salt::none(), 0).err(),
            Some(IdentityError::EmptyBlock)
        );
        assert!(ModelIdentity::new("", "r").is_err());
        assert!(ModelIdentity::new("m", "a\nb").is_err());
    }

    #[test]
    fn salts_are_never_shown() {
        assert_eq!(format!("{:?}", Salt::new(b"secret")), "Salt(…)");
        let shown = format!("{:?}", chain("m", "", b"secret", 4));
        assert!(!shown.contains("root"), "{shown}");
    }

    proptest! {
        #[test]
        fn an_edit_changes_its_block_and_all_after_it_and_none_before(
            tokens in prop::collection::vec(any::<u32>(), 1..100),
            at: prop::sample::Index,
            other: u32,
            block_tokens in 1_u32..20,
        ) {
            let at = at.index(tokens.len());
            let mut edited = tokens.clone();
            edited[at] = other;
            prop_assume!(edited != tokens);
            let chain = chain("m", "r", b"", block_tokens);
            let (a, b) = (chain.hash_blocks(&tokens), chain.hash_blocks(&edited));
            let first = (at / block_tokens as usize).min(a.len());
            prop_assert_eq!(&a[..first], &b[..first]);
            prop_assert!(a[first..].iter().zip(&b[first..]).all(|(a, b)| a != b));
            prop_assert_eq!(matching_prefix(&a, &b), first);
        }

        #[test]
        fn model_revision_salt_and_block_size_change_everything(
            tokens in prop::collection::vec(any::<u32>(), 20..60),
        ) {
            let ours = chain("m", "r", b"s", 4).hash_blocks(&tokens);
            for other in [
                chain("n", "r", b"s", 4),
                chain("m", "q", b"s", 4),
                chain("m", "r", b"t", 4),
                chain("m", "r", b"", 4),
                chain("m", "r", b"s", 5),
            ] {
                let theirs = other.hash_blocks(&tokens);
                prop_assert!(ours.iter().all(|hash| !theirs.contains(hash)));
            }
        }

        #[test]
        fn extending_gives_the_same_hashes_in_any_pieces(
            tokens in prop::collection::vec(any::<u32>(), 0..100),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
            block_tokens in 1_u32..20,
        ) {
            let whole = chain("m", "r", b"", block_tokens);
            let mut pieces = whole.clone();
            let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(tokens.len() + 1)).collect();
            cuts.extend([0, tokens.len()]);
            cuts.sort_unstable();
            let hashes: Vec<BlockHash> = cuts
                .windows(2)
                .flat_map(|cut| pieces.extend(&tokens[cut[0]..cut[1]]))
                .collect();
            prop_assert_eq!(&hashes, &whole.hash_blocks(&tokens));
            // And the whole is not disturbed by what was extended.
            prop_assert_eq!(&hashes, &pieces.hash_blocks(&tokens));
        }

        #[test]
        fn a_longer_sequence_begins_with_the_shorter_ones_blocks(
            tokens in prop::collection::vec(any::<u32>(), 0..80),
            len: prop::sample::Index,
        ) {
            let chain = chain("m", "r", b"", 8);
            let long = chain.hash_blocks(&tokens);
            let short = chain.hash_blocks(&tokens[..len.index(tokens.len() + 1)]);
            prop_assert_eq!(matching_prefix(&long, &short), short.len());
        }
    }
}
