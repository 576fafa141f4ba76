//! What a bench's process is told besides its role and its shape.

use std::net::SocketAddr;

use kv_xfer::engine::ReaderConfig;
use kv_xfer::layout::{Attention, Dtype, KvLayout, KvSplit, ModelGeometry, PoolOrder, Preset};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::error::WorkerError;
use crate::bench::proto::Shape;
use crate::bench::row::Who;
use crate::memory::PoolMemory;

/// Tokens of a block of a shape that names no model, where its length allows.
const BLOCK_TOKENS: u32 = 16;

/// The settings that this tool's own participants know. Unknown ones are ignored.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Which participant to be.
    pub who: Who,
    /// Ask for huge pages behind the blocks.
    pub huge_pages: bool,
    /// Threads of the engine that read; the engine's default when absent.
    pub lanes: Option<usize>,
    /// For `one-descriptor`: post the descriptors that the engine would, in one window.
    pub same_descriptors: bool,
    /// For `one-descriptor`: write instead of read; what was written is read back to be checked.
    pub write: bool,
    /// Where the pool is.
    pub memory: PoolMemory,
    /// Where a holder's side channel listens.
    pub bind: SocketAddr,
    /// The host that a holder names in its descriptions, if not the bound address.
    pub advertise: Option<String>,
    /// Also offer the memory to bare reads, through an agent of its own.
    pub ceiling: bool,
    /// Model whose geometry the pool has; the shape's own when absent.
    pub model: Option<String>,
    /// Tensor-parallel size of that model.
    pub tp: u32,
    /// Tokens of a block of that model.
    pub block_tokens: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            who: Who::KvXfer,
            huge_pages: true,
            lanes: None,
            same_descriptors: false,
            write: false,
            memory: PoolMemory::Host,
            bind: ([127, 0, 0, 1], 0).into(),
            advertise: None,
            ceiling: false,
            model: None,
            tp: 1,
            block_tokens: BLOCK_TOKENS,
        }
    }
}

impl Settings {
    /// Reads them.
    ///
    /// # Errors
    /// [`WorkerError`] when one has a bad value.
    pub fn parse(settings: Map<String, Value>) -> Result<Self, WorkerError> {
        serde_json::from_value(settings.into()).map_err(WorkerError::json("setting"))
    }

    /// How the engine reads.
    #[must_use]
    pub fn reader(&self) -> ReaderConfig {
        let default = ReaderConfig::default();
        ReaderConfig {
            lanes: self.lanes.unwrap_or(default.lanes),
            ..default
        }
    }

    /// How a pool of a shape is cut: by the model's geometry if one is named, else into layers (one
    /// for each region) whose blocks have the shape's length.
    ///
    /// # Errors
    /// [`WorkerError`] when there is no such layout.
    pub fn layout(&self, shape: &Shape) -> Result<KvLayout, WorkerError> {
        let order = match shape.regions {
            1 => PoolOrder::BlockFirst,
            _ => PoolOrder::LayerFirst,
        };
        let Some(name) = &self.model else {
            return plain_layout(shape, order);
        };
        let preset = Preset::by_name(name)
            .ok_or_else(|| WorkerError::Setting(format!("{name} is no known model")))?;
        let split = KvSplit::Fused;
        let layout = KvLayout::new(&preset.geometry(), self.tp, self.block_tokens, order, split)?;
        if layout.regions().len() as u64 != u64::from(shape.regions) {
            return Err(WorkerError::Setting(format!(
                "{name} has {} regions in this order, the shape has {}",
                layout.regions().len(),
                shape.regions
            )));
        }
        Ok(layout)
    }
}

/// A model of as many layers as the shape has regions, made up so that a layer's bytes of a block
/// are the shape's.
fn plain_layout(shape: &Shape, order: PoolOrder) -> Result<KvLayout, WorkerError> {
    let bad = || {
        WorkerError::Setting(format!(
            "blocks of {} bytes cannot be had; give a multiple of 8, up to some GiB",
            shape.block_bytes
        ))
    };
    if shape.block_bytes == 0 || !shape.block_bytes.is_multiple_of(8) {
        return Err(bad());
    }
    let tokens = if shape.block_bytes.is_multiple_of(u64::from(BLOCK_TOKENS)) {
        BLOCK_TOKENS
    } else {
        8
    };
    let row = u32::try_from(shape.block_bytes / u64::from(tokens)).map_err(|_| bad())?;
    let attention = Attention::Mla {
        latent_dim: row,
        rope_dim: 0,
    };
    let model = ModelGeometry::new("bench", shape.regions, attention, Dtype::Int8, None)?;
    Ok(KvLayout::new(&model, 1, tokens, order, KvSplit::Fused)?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: Value) -> Result<Settings, WorkerError> {
        let Value::Object(map) = value else {
            panic!("not an object")
        };
        Settings::parse(map)
    }

    #[test]
    fn layouts_are_those_of_the_shape() {
        for (regions, block_bytes) in [(1, 4096), (1, 2 << 20), (64, 8192), (3, 8), (1, 24)] {
            let shape = Shape {
                regions,
                blocks: 4,
                block_bytes,
            };
            let layout = parse(json!({})).unwrap().layout(&shape).unwrap();
            assert_eq!(layout.regions().len(), regions as usize);
            assert!(layout.regions().iter().all(|r| r.block_len == block_bytes));
        }
        let shape = Shape {
            regions: 1,
            blocks: 4,
            block_bytes: 12,
        };
        assert!(parse(json!({})).unwrap().layout(&shape).is_err());
    }

    #[test]
    fn a_models_geometry_counts_where_one_is_named() {
        let settings = parse(json!({"model": "Qwen3-32B", "tp": 8, "block_tokens": 16})).unwrap();
        let mut shape = Shape {
            regions: 64,
            blocks: 4,
            block_bytes: 8192,
        };
        assert_eq!(settings.layout(&shape).unwrap().block_bytes(), 64 * 8192);
        shape.regions = 1;
        assert_eq!(settings.layout(&shape).unwrap().regions().len(), 1);
        shape.regions = 7;
        assert!(settings.layout(&shape).is_err());
    }

    #[test]
    fn what_cannot_be_had_is_refused() {
        let error = parse(json!({"memory": "gpu"})).unwrap_err().to_string();
        assert!(error.contains("cuda:N"), "{error}");
        let memory = parse(json!({"memory": "cuda:1"})).unwrap().memory;
        assert_eq!(memory, PoolMemory::Cuda(1));
        assert!(parse(json!({"who": "nobody"})).is_err());
        assert_eq!(parse(json!({"lanes": 4})).unwrap().reader().lanes, 4);
        assert!(parse(json!({"unknown": [1]})).is_ok());
    }
}
