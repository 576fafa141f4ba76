//! How much a descriptor may ask for, before anything is allocated for it.

/// Limits on what is decoded. The defaults hold every real conversation and bound the memory that a
/// hostile descriptor can claim to a small multiple of its own size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorLimits {
    /// Most blocks, over all groups. 262,144 by default: four million tokens in blocks of 16.
    pub max_blocks: u32,
    /// Highest block id. `i32::MAX` by default, the highest that vLLM's block tables hold; the
    /// peer's pool size is checked later with
    /// [`BlockRuns::check_within`](super::BlockRuns::check_within).
    pub max_block_id: u32,
    /// Most bytes of JSON text, and of a ticket's text. 8 MiB by default: the largest number of
    /// blocks with 16-byte hashes in base64, with every id written out.
    pub max_bytes: usize,
    /// Most KV-cache groups (arrays in `remote_block_ids`). 64 by default.
    pub max_groups: usize,
}

impl Default for DescriptorLimits {
    fn default() -> Self {
        Self {
            max_blocks: 1 << 18,
            max_block_id: i32::MAX.unsigned_abs(),
            max_bytes: 8 << 20,
            max_groups: 64,
        }
    }
}
