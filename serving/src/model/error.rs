//! What can go wrong with a model, its tokenizer and its template.

use std::io;
use std::path::PathBuf;

use kv_xfer::layout::LayoutError;
use kv_xfer::memory::AccessError;
use thiserror::Error;

/// Why a model could not be loaded or run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file cannot be read.
    #[error("cannot read the model {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The bytes are not those of a GGUF file.
    #[error("the model file is damaged or no GGUF file: {why}; delete it and fetch it again")]
    Gguf {
        /// In the reader's words.
        why: String,
    },
    /// A key of the metadata is missing or of another type.
    #[error("the model file has no usable `{key}`; use a GGUF of a llama model")]
    Metadata {
        /// Which key.
        key: String,
    },
    /// The metadata say something that cannot be, or that this engine does not compute.
    #[error("the model cannot be run: {what}; use a GGUF of a small llama model")]
    Config {
        /// What.
        what: String,
    },
    /// A tensor is missing or of another shape or type.
    #[error("tensor `{name}`: {why}; the model file is damaged or of another architecture")]
    Tensor {
        /// Which.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// The tokenizer cannot be built from the metadata.
    #[error("the tokenizer of the model file cannot be used: {why}")]
    Tokenizer {
        /// What is wrong.
        why: String,
    },
    /// The chat template cannot be used.
    #[error("the chat template of the model file cannot be used: {why}")]
    Template {
        /// What is wrong.
        why: String,
    },
    /// A message of a conversation is not one.
    #[error("message {index}: {why}")]
    Message {
        /// Its index.
        index: usize,
        /// What is wrong with it.
        why: String,
    },
    /// The pool is cut for another model, or in a way that the model does not use.
    #[error("the KV pool does not fit the model: {why}; make it with Model::layout")]
    Pool {
        /// What does not fit.
        why: String,
    },
    /// The layout cannot be made.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A chunk asks for what the model or the chunk's own blocks do not have.
    #[error("chunk {index}: {why}")]
    Chunk {
        /// Its index in the batch.
        index: usize,
        /// What is wrong with it.
        why: String,
    },
    /// The pool refused: a block is outside of it or the destination of a read.
    #[error("the KV cache could not be used: {0}")]
    Access(#[from] AccessError),
    /// The matrix library refused.
    #[error("the computation failed: {0}")]
    Compute(#[from] candle_core::Error),
}
