//! The weights, dequantised once, as matrices that candle multiplies by.

use candle_core::{Device, Storage, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::gguf::Gguf;
use super::{ModelConfig, ModelError};

/// candle multiplies a single row by another kernel, with other roundings than two rows or more.
/// A row must have the same bits in every batch, so no batch has fewer rows.
pub(super) const MIN_ROWS: usize = 2;

/// A matrix that rows are multiplied by.
pub(super) struct Linear {
    /// `[inputs, outputs]`, contiguous or a transposed view.
    weight: Tensor,
    inputs: usize,
}

impl Linear {
    /// From rows of `[outputs, inputs]`, kept as `[inputs, outputs]`: candle reads that faster when
    /// there are few rows, which is when the weights' way from memory is what takes time.
    fn new(rows: &[f32], outputs: usize, inputs: usize) -> Result<Self, ModelError> {
        let mut columns = vec![0.0; rows.len()];
        for (output, row) in rows.chunks_exact(inputs).enumerate() {
            for (column, value) in columns.chunks_exact_mut(outputs).zip(row) {
                column[output] = *value;
            }
        }
        let weight = Tensor::from_vec(columns, (inputs, outputs), &Device::Cpu)?;
        Ok(Self { weight, inputs })
    }

    /// Multiplies rows, at least [`MIN_ROWS`] of them.
    pub(super) fn apply(&self, rows: Vec<f32>) -> Result<Tensor, ModelError> {
        let count = rows.len() / self.inputs;
        let rows = Tensor::from_vec(rows, (count, self.inputs), &Device::Cpu)?;
        Ok(rows.matmul(&self.weight)?)
    }
}

/// Shows a product's values where they lie.
pub(super) fn values<R>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R, ModelError> {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(f(storage.as_slice::<f32>()?)),
        _ => Err(candle_core::Error::Msg("a product is not on the processor".to_owned()).into()),
    }
}

/// One layer.
pub(super) struct Layer {
    pub attention_norm: Vec<f32>,
    /// Queries of all heads, keys, values.
    pub qkv: Linear,
    pub attention_out: Linear,
    pub ffn_norm: Vec<f32>,
    /// Gate, then up.
    pub gate_up: Linear,
    pub down: Linear,
}

/// All of them.
pub(super) struct Weights {
    /// One row per token of the vocabulary.
    pub embedding: Vec<f32>,
    pub layers: Vec<Layer>,
    pub output_norm: Vec<f32>,
    pub output: Linear,
}

/// Where weights come from: a name and a shape, slowest dimension first.
type Source<'a> = dyn FnMut(&str, &[usize]) -> Result<Vec<f32>, ModelError> + 'a;

impl Weights {
    /// Those of a file.
    pub(super) fn read(file: &Gguf, config: &ModelConfig) -> Result<Self, ModelError> {
        // An output of its own is there only where it is not the embedding.
        let own_output = file.has("output.weight");
        Self::build(config, own_output, &mut |name, shape| {
            file.tensor(name, shape)
        })
    }

    /// Random ones of a size that keeps activations near one.
    pub(super) fn seeded(config: &ModelConfig, seed: u64) -> Result<Self, ModelError> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        Self::build(config, false, &mut |_, shape| {
            let count = shape.iter().product();
            let Some(inputs) = shape.get(1) else {
                return Ok(vec![1.0; count]);
            };
            // Uniform of variance one over the inputs.
            let half = (3.0 / *inputs as f32).sqrt();
            let value = |_| (rng.random::<f32>() * 2.0 - 1.0) * half;
            Ok((0..count).map(value).collect())
        })
    }

    fn build(
        config: &ModelConfig,
        own_output: bool,
        source: &mut Source<'_>,
    ) -> Result<Self, ModelError> {
        let (width, ffn) = (config.width, config.ffn_width);
        let queries = config.heads * config.head_dim;
        let keys = config.kv_heads * config.head_dim;
        let embedding = source("token_embd.weight", &[config.vocab, width])?;
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            let mut tensor =
                |name: &str, shape: &[usize]| source(&format!("blk.{index}.{name}.weight"), shape);
            let mut qkv = tensor("attn_q", &[queries, width])?;
            qkv.extend(tensor("attn_k", &[keys, width])?);
            qkv.extend(tensor("attn_v", &[keys, width])?);
            let mut gate_up = tensor("ffn_gate", &[ffn, width])?;
            gate_up.extend(tensor("ffn_up", &[ffn, width])?);
            layers.push(Layer {
                attention_norm: tensor("attn_norm", &[width])?,
                qkv: Linear::new(&qkv, queries + 2 * keys, width)?,
                attention_out: Linear::new(
                    &tensor("attn_output", &[width, queries])?,
                    width,
                    queries,
                )?,
                ffn_norm: tensor("ffn_norm", &[width])?,
                gate_up: Linear::new(&gate_up, 2 * ffn, width)?,
                down: Linear::new(&tensor("ffn_down", &[width, ffn])?, width, ffn)?,
            });
        }
        let output_norm = source("output_norm.weight", &[width])?;
        let output = if own_output {
            let rows = source("output.weight", &[config.vocab, width])?;
            Linear::new(&rows, config.vocab, width)?
        } else {
            Linear::new(&embedding, config.vocab, width)?
        };
        Ok(Self {
            embedding,
            layers,
            output_norm,
            output,
        })
    }
}
