//! The forward pass over a batch of chunks.

use half::f16;
use half::slice::HalfFloatSliceExt;
use kv_xfer::ids::BlockId;
use kv_xfer::memory::KvPool;
use rayon::prelude::*;

use super::attention::{QUERY_SPAN, Span};
use super::paged::PagedCache;
use super::rows;
use super::weights::{Layer, MIN_ROWS, values};
use super::{Model, ModelError};

/// Consecutive tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// Position of the first in its sequence. The KV of all before it is in the blocks.
    pub start: usize,
    /// The sequence's block table, which reaches to the chunk's end.
    pub blocks: &'a [BlockId],
    /// Whether the logits of the last token are wanted.
    pub logits: bool,
}

impl Chunk<'_> {
    fn end(&self) -> usize {
        self.start.saturating_add(self.tokens.len())
    }
}

impl Model {
    /// Runs the chunks as one batch: writes the KV of every token into the pool, and returns the
    /// logits of the last token of each chunk that asks for them, in the chunks' order.
    ///
    /// The bits of a token's KV and logits depend on the tokens up to it alone: not on how its
    /// sequence was cut into chunks, nor on what else was in the batches. Chunks of one batch must
    /// not depend on each other's KV: a sequence has one chunk in it.
    ///
    /// # Errors
    /// [`ModelError`] when the pool or a chunk does not fit the model, or a block cannot be used.
    /// Blocks of the chunks may have been written to.
    pub fn forward(
        &self,
        pool: &KvPool,
        chunks: &[Chunk<'_>],
    ) -> Result<Vec<Option<Vec<f32>>>, ModelError> {
        let cache = PagedCache::new(pool, &self.geometry, self.config.head_dim)?;
        for (index, chunk) in chunks.iter().enumerate() {
            self.check(&cache, chunk)
                .map_err(|why| ModelError::Chunk { index, why })?;
        }
        let mut batch = self.embed(chunks);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.layer(index, layer, &cache, chunks, &mut batch)?;
        }
        self.logits(chunks, &batch)
    }

    fn check(&self, cache: &PagedCache<'_>, chunk: &Chunk<'_>) -> Result<(), String> {
        let end = chunk.end();
        if chunk.tokens.is_empty() {
            return Err("it has no tokens".to_owned());
        }
        if end > self.config.context {
            let context = self.config.context;
            return Err(format!(
                "it ends at {end}, the model's context at {context}"
            ));
        }
        if end.div_ceil(cache.block_tokens) > chunk.blocks.len() {
            let blocks = chunk.blocks.len();
            return Err(format!("its {blocks} blocks do not reach its end at {end}"));
        }
        let unknown = |token: &&u32| usize::try_from(**token).is_ok_and(|t| t >= self.config.vocab);
        match chunk.tokens.iter().find(unknown) {
            Some(token) => Err(format!("the vocabulary has no token {token}")),
            None => Ok(()),
        }
    }

    /// One row per token, padded to the fewest rows that are multiplied.
    fn embed(&self, chunks: &[Chunk<'_>]) -> Vec<f32> {
        let width = self.config.width;
        let mut batch = Vec::new();
        for token in chunks.iter().flat_map(|chunk| chunk.tokens) {
            batch.extend_from_slice(&self.weights.embedding[*token as usize * width..][..width]);
        }
        pad(&mut batch, width);
        batch
    }

    fn layer(
        &self,
        index: usize,
        layer: &Layer,
        cache: &PagedCache<'_>,
        chunks: &[Chunk<'_>],
        batch: &mut [f32],
    ) -> Result<(), ModelError> {
        let eps = self.config.norm_eps;
        let normed = rows::rms_norm(batch, &layer.attention_norm, eps);
        let qkv = layer.qkv.apply(normed)?;
        let attended = values(&qkv, |qkv| self.attend(index, cache, chunks, qkv))??;
        let product = layer.attention_out.apply(attended)?;
        values(&product, |product| rows::add(batch, product))?;

        let normed = rows::rms_norm(batch, &layer.ffn_norm, eps);
        let gate_up = layer.gate_up.apply(normed)?;
        let gated = values(&gate_up, |rows| rows::gate(rows, self.config.ffn_width))?;
        let product = layer.down.apply(gated)?;
        values(&product, |product| rows::add(batch, product))
    }

    /// Stores the rows' keys and values, then lets their queries attend.
    fn attend(
        &self,
        layer: usize,
        cache: &PagedCache<'_>,
        chunks: &[Chunk<'_>],
        qkv: &[f32],
    ) -> Result<Vec<f32>, ModelError> {
        let (dim, kv_heads) = (self.config.head_dim, self.config.kv_heads);
        let group = self.config.heads / kv_heads;
        let (queries, keys) = (self.config.heads * dim, kv_heads * dim);
        let row_len = queries + 2 * keys;
        let mut spans = Vec::new();
        let mut first_row = 0;
        for chunk in chunks {
            for from in (0..chunk.tokens.len()).step_by(QUERY_SPAN) {
                let len = QUERY_SPAN.min(chunk.tokens.len() - from);
                for head in 0..kv_heads {
                    spans.push((chunk, from, first_row + from, len, head));
                }
            }
            first_row += chunk.tokens.len();
        }
        // All keys first: a chunk's later spans see the earlier ones.
        let queries_of = |&(chunk, from, row, len, head): &(&Chunk<'_>, _, _, _, _)| {
            let rows = &qkv[row * row_len..(row + len) * row_len];
            let mut query_rows = Vec::with_capacity(len * group * dim);
            let mut key_rows = Vec::with_capacity(len * dim);
            let mut value_rows = Vec::with_capacity(len * dim);
            for (i, row) in rows.chunks_exact(row_len).enumerate() {
                let position = chunk.start + from + i;
                let part = |from: usize, len: usize| &row[from..from + len];
                let at = query_rows.len();
                query_rows.extend_from_slice(part(head * group * dim, group * dim));
                self.rope.rotate(&mut query_rows[at..], position);
                let at = key_rows.len();
                key_rows.extend_from_slice(part(queries + head * dim, dim));
                self.rope.rotate(&mut key_rows[at..], position);
                value_rows.extend_from_slice(part(queries + keys + head * dim, dim));
            }
            let mut half = vec![f16::ZERO; len * dim];
            for (component, rows) in [key_rows, value_rows].iter().enumerate() {
                half.convert_from_f32_slice(rows);
                let position = chunk.start + from;
                cache.write(layer, component, head, chunk.blocks, position, &half)?;
            }
            Ok::<_, ModelError>(query_rows)
        };
        let rotated: Vec<Vec<f32>> = spans.par_iter().map(queries_of).collect::<Result<_, _>>()?;
        let work = spans.par_iter().zip(rotated).with_max_len(1);
        let outs: Vec<Vec<f32>> = work
            .map(|(&(chunk, from, _, _, kv_head), queries)| {
                let span = Span {
                    cache,
                    layer,
                    kv_head,
                    group,
                    head_dim: dim,
                    blocks: chunk.blocks,
                    position: chunk.start + from,
                    queries,
                };
                span.attend()
            })
            .collect::<Result<_, _>>()?;
        let mut attended = vec![0.0; first_row.max(MIN_ROWS) * queries];
        for (&(_, _, row, _, head), out) in spans.iter().zip(&outs) {
            for (i, out) in out.chunks_exact(group * dim).enumerate() {
                let at = (row + i) * queries + head * group * dim;
                attended[at..at + group * dim].copy_from_slice(out);
            }
        }
        Ok(attended)
    }

    fn logits(
        &self,
        chunks: &[Chunk<'_>],
        batch: &[f32],
    ) -> Result<Vec<Option<Vec<f32>>>, ModelError> {
        let width = self.config.width;
        let mut last_rows = Vec::new();
        let mut end = 0;
        for chunk in chunks {
            end += chunk.tokens.len();
            if chunk.logits {
                last_rows.extend_from_slice(&batch[(end - 1) * width..end * width]);
            }
        }
        if last_rows.is_empty() {
            return Ok(vec![None; chunks.len()]);
        }
        pad(&mut last_rows, width);
        let normed = rows::rms_norm(&last_rows, &self.weights.output_norm, self.config.norm_eps);
        let product = self.weights.output.apply(normed)?;
        values(&product, |logits| {
            let mut logits = logits.chunks_exact(self.config.vocab);
            let mut next = || logits.next().map(<[f32]>::to_vec);
            chunks
                .iter()
                .map(|chunk| chunk.logits.then(&mut next).flatten())
                .collect()
        })
    }
}

fn pad(rows: &mut Vec<f32>, width: usize) {
    let least = MIN_ROWS * width;
    if rows.len() < least {
        rows.resize(least, 0.0);
    }
}
