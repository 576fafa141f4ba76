//! The model: a llama of some hundred million weights that processors alone run well enough.
//!
//! [`Model`] holds the weights and computes; the KV of every token lies in the blocks of a
//! [`kv_xfer::memory::KvPool`], as f16. [`Tokenizer`], [`ChatTemplate`] and the weights come from one
//! GGUF file, which [`Loaded`] opens; [`Sampler`] chooses tokens.
//!
//! The pass is *batch-invariant*: the bits of a token's KV and logits do not depend on how the work
//! was cut. Blocks that were read from another engine therefore equal those that would have been
//! computed, and greedy answers are equal by construction. It holds among machines whose processors
//! have the same vector instructions.
#![forbid(unsafe_code)]

mod attention;
mod chat;
mod config;
mod error;
mod forward;
mod gguf;
mod paged;
mod rows;
mod sampler;
mod simd;
mod stream;
mod tokenizer;
mod weights;

use std::path::Path;

use kv_xfer::identity::ModelIdentity;
use kv_xfer::layout::{KvLayout, KvSplit, ModelGeometry, PoolOrder};

pub use chat::ChatTemplate;
pub use config::ModelConfig;
pub use error::ModelError;
pub use forward::Chunk;
pub use sampler::{Sampler, SamplingParams};
pub use stream::TokenStream;
pub use tokenizer::Tokenizer;

use gguf::Gguf;
use rows::Rope;
use weights::Weights;

/// Weights, ready to compute.
pub struct Model {
    config: ModelConfig,
    geometry: ModelGeometry,
    identity: ModelIdentity,
    weights: Weights,
    rope: Rope,
}

impl Model {
    /// Loads the weights of a GGUF file.
    ///
    /// # Errors
    /// [`ModelError`] when the file cannot be read, is damaged, or holds another kind of model.
    pub fn load(path: &Path) -> Result<Self, ModelError> {
        Self::from_gguf(&Gguf::open(path)?)
    }

    fn from_gguf(file: &Gguf) -> Result<Self, ModelError> {
        let config = ModelConfig::from_gguf(&file.content)?;
        let weights = Weights::read(file, &config)?;
        Self::new(config, weights, &file.digest())
    }

    /// A model of random weights, for tests.
    ///
    /// # Errors
    /// [`ModelError::Config`] when the numbers do not fit each other.
    pub fn seeded(config: ModelConfig, seed: u64) -> Result<Self, ModelError> {
        config.check()?;
        let weights = Weights::seeded(&config, seed)?;
        Self::new(config, weights, &format!("seed-{seed}"))
    }

    fn new(config: ModelConfig, weights: Weights, revision: &str) -> Result<Self, ModelError> {
        let identity =
            ModelIdentity::new(&config.name, revision).map_err(|error| ModelError::Config {
                what: error.to_string(),
            })?;
        Ok(Self {
            geometry: config.geometry()?,
            rope: Rope::new(&config),
            identity,
            config,
            weights,
        })
    }

    /// The model's numbers.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What one token's KV consists of.
    #[must_use]
    pub fn geometry(&self) -> &ModelGeometry {
        &self.geometry
    }

    /// Which weights compute the KV: the model's name and the digest of its file.
    #[must_use]
    pub fn identity(&self) -> &ModelIdentity {
        &self.identity
    }

    /// How a pool for this model is cut: all layers of a block side by side, keys and values apart.
    ///
    /// # Errors
    /// [`ModelError::Layout`] when a block has no tokens, or too many.
    pub fn layout(&self, block_tokens: u32) -> Result<KvLayout, ModelError> {
        Ok(KvLayout::new(
            &self.geometry,
            1,
            block_tokens,
            PoolOrder::BlockFirst,
            KvSplit::Separate,
        )?)
    }
}

/// All that a GGUF file holds.
pub struct Loaded {
    /// The weights.
    pub model: Model,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Conversations to text.
    pub template: ChatTemplate,
}

impl Loaded {
    /// Opens a GGUF file.
    ///
    /// # Errors
    /// [`ModelError`] when the file cannot be read, is damaged, or holds another kind of model.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = Gguf::open(path)?;
        Ok(Self {
            tokenizer: Tokenizer::from_gguf(&file.content)?,
            template: ChatTemplate::from_gguf(&file.content)?,
            model: Model::from_gguf(&file)?,
        })
    }
}
