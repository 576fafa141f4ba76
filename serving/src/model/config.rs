//! The numbers that make a llama model, checked once.

use candle_core::quantized::gguf_file::{Content, Value};
use kv_xfer::layout::{Attention, Dtype, ModelGeometry};

use super::ModelError;

/// More than any model that a processor alone would run; keeps products of sizes far from overflow.
const MAX_WIDTH: usize = 1 << 16;
const MAX_LAYERS: usize = 512;
const MAX_VOCAB: usize = 1 << 20;
const MAX_CONTEXT: usize = 1 << 20;
/// Elements of a head come in whole vectors of the widest processor.
pub(super) const HEAD_STEP: usize = 16;

/// The shape of a llama model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Name, for people and for the identity.
    pub name: String,
    /// Layers.
    pub layers: usize,
    /// Elements of a token's activation.
    pub width: usize,
    /// Elements between the two halves of the feed-forward part.
    pub ffn_width: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads; divides the query heads.
    pub kv_heads: usize,
    /// Elements of a head, a multiple of 16.
    pub head_dim: usize,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Base of the rotary embedding's frequencies.
    pub rope_base: f32,
    /// Added under the root of the normalisation.
    pub norm_eps: f32,
}

impl ModelConfig {
    /// A model of a few thousand weights, for tests.
    #[must_use]
    pub fn tiny() -> Self {
        Self {
            name: "tiny".to_owned(),
            layers: 2,
            width: 64,
            ffn_width: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            context: 1024,
            vocab: 300,
            rope_base: 10_000.0,
            norm_eps: 1e-5,
        }
    }

    /// Reads it from the metadata of a GGUF file.
    pub(super) fn from_gguf(content: &Content) -> Result<Self, ModelError> {
        let architecture = text(content, "general.architecture")?;
        if architecture != "llama" {
            return Err(ModelError::Config {
                what: format!("its architecture is `{architecture}`"),
            });
        }
        let width = count(content, "llama.embedding_length")?;
        let heads = count(content, "llama.attention.head_count")?;
        let head_dim = match content.metadata.get("llama.attention.key_length") {
            Some(_) => count(content, "llama.attention.key_length")?,
            None => width.checked_div(heads).unwrap_or(0),
        };
        let config = Self {
            name: text(content, "general.name")?.to_owned(),
            layers: count(content, "llama.block_count")?,
            width,
            ffn_width: count(content, "llama.feed_forward_length")?,
            heads,
            kv_heads: count(content, "llama.attention.head_count_kv")?,
            head_dim,
            context: count(content, "llama.context_length")?,
            vocab: array(content, "tokenizer.ggml.tokens")?.len(),
            rope_base: float(content, "llama.rope.freq_base")?,
            norm_eps: float(content, "llama.attention.layer_norm_rms_epsilon")?,
        };
        config.check()?;
        let rotated = count(content, "llama.rope.dimension_count")?;
        if rotated != config.head_dim {
            return Err(wrong(format!(
                "{rotated} of a head's {} elements are rotated",
                config.head_dim
            )));
        }
        if content.metadata.contains_key("llama.vocab_size") {
            let vocab = count(content, "llama.vocab_size")?;
            if vocab != config.vocab {
                return Err(wrong(format!(
                    "its vocabulary has {vocab} tokens and {} texts",
                    config.vocab
                )));
            }
        }
        for key in content.metadata.keys() {
            if key.starts_with("llama.rope.scaling") {
                return Err(wrong(format!("it scales positions (`{key}`)")));
            }
        }
        Ok(config)
    }

    /// Checks that the numbers fit each other.
    pub(super) fn check(&self) -> Result<(), ModelError> {
        let counts = [
            ("layers", self.layers, MAX_LAYERS),
            ("width", self.width, MAX_WIDTH),
            ("feed-forward width", self.ffn_width, MAX_WIDTH),
            ("heads", self.heads, MAX_WIDTH),
            ("KV heads", self.kv_heads, MAX_WIDTH),
            ("elements of a head", self.head_dim, MAX_WIDTH),
            ("context", self.context, MAX_CONTEXT),
            ("vocabulary", self.vocab, MAX_VOCAB),
        ];
        for (what, value, max) in counts {
            if value == 0 || value > max {
                return Err(wrong(format!("{what} is {value}, outside 1..={max}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(wrong(format!(
                "{} heads do not share {} KV heads evenly",
                self.heads, self.kv_heads
            )));
        }
        if !self.head_dim.is_multiple_of(HEAD_STEP) {
            return Err(wrong(format!(
                "a head has {} elements, which is no multiple of {HEAD_STEP}",
                self.head_dim
            )));
        }
        if self.heads * self.head_dim > MAX_WIDTH {
            return Err(wrong("its heads are too wide together".to_owned()));
        }
        for (what, value) in [("rope base", self.rope_base), ("epsilon", self.norm_eps)] {
            if !value.is_finite() || value <= 0.0 {
                return Err(wrong(format!("its {what} is {value}")));
            }
        }
        Ok(())
    }

    /// What one token's KV consists of.
    pub(super) fn geometry(&self) -> Result<ModelGeometry, ModelError> {
        let small = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let attention = Attention::Gqa {
            kv_heads: small(self.kv_heads),
            head_dim_k: small(self.head_dim),
            head_dim_v: small(self.head_dim),
        };
        ModelGeometry::new(&self.name, small(self.layers), attention, Dtype::F16, None)
            .map_err(|error| wrong(error.to_string()))
    }
}

fn wrong(what: String) -> ModelError {
    ModelError::Config { what }
}

fn missing(key: &str) -> ModelError {
    ModelError::Metadata {
        key: key.to_owned(),
    }
}

/// A string of the metadata.
pub(super) fn text<'a>(content: &'a Content, key: &str) -> Result<&'a str, ModelError> {
    match content.metadata.get(key) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(missing(key)),
    }
}

/// An array of the metadata.
pub(super) fn array<'a>(content: &'a Content, key: &str) -> Result<&'a [Value], ModelError> {
    match content.metadata.get(key) {
        Some(Value::Array(values)) => Ok(values),
        _ => Err(missing(key)),
    }
}

/// A count of the metadata.
pub(super) fn count(content: &Content, key: &str) -> Result<usize, ModelError> {
    let value = match content.metadata.get(key) {
        Some(value @ (Value::U8(_) | Value::U16(_) | Value::U32(_) | Value::U64(_))) => {
            value.to_u64().ok()
        }
        Some(Value::I32(value)) => u64::try_from(*value).ok(),
        Some(Value::I64(value)) => u64::try_from(*value).ok(),
        _ => None,
    };
    value
        .and_then(|value| usize::try_from(value).ok())
        .ok_or_else(|| missing(key))
}

fn float(content: &Content, key: &str) -> Result<f32, ModelError> {
    match content.metadata.get(key) {
        Some(Value::F32(value)) => Ok(*value),
        _ => Err(missing(key)),
    }
}
