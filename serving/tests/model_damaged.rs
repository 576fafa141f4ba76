//! Damaged files give errors that say so, never a panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::io::Cursor;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use proptest::prelude::*;
use serving::model::{Chunk, Loaded, Model, ModelConfig, ModelError};

const WIDTH: usize = 32;
const FFN: usize = 32;

/// The metadata and tensors of a small file.
struct File {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, QTensor)>,
}

fn file() -> File {
    let vocab: Vec<String> = std::iter::once("<|im_end|>".to_owned())
        .chain(('!'..='~').map(String::from))
        .chain(["ab".to_owned()])
        .collect();
    let number = |value: u32| Value::U32(value);
    let text = |value: &str| Value::String(value.to_owned());
    let texts = |values: &[String]| Value::Array(values.iter().map(|v| text(v)).collect());
    let types = vocab
        .iter()
        .enumerate()
        .map(|(i, _)| Value::I32(if i == 0 { 3 } else { 1 }));
    let metadata = [
        ("general.architecture", text("llama")),
        ("general.name", text("small")),
        ("general.alignment", number(32)),
        ("llama.block_count", number(1)),
        ("llama.context_length", number(64)),
        ("llama.embedding_length", number(WIDTH as u32)),
        ("llama.feed_forward_length", number(FFN as u32)),
        ("llama.attention.head_count", number(2)),
        ("llama.attention.head_count_kv", number(1)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("llama.rope.dimension_count", number(16)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.vocab_size", number(vocab.len() as u32)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("smollm")),
        ("tokenizer.ggml.tokens", texts(&vocab)),
        ("tokenizer.ggml.token_type", Value::Array(types.collect())),
        ("tokenizer.ggml.merges", texts(&["a b".to_owned()])),
        ("tokenizer.ggml.eos_token_id", number(0)),
        ("tokenizer.chat_template", text("{{ messages }}")),
    ];
    let mut tensors = Vec::new();
    let mut tensor = |name: &str, shape: &[usize]| {
        let values = Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&values, GgmlDType::F32).unwrap();
        tensors.push((format!("{name}.weight"), tensor));
    };
    tensor("token_embd", &[vocab.len(), WIDTH]);
    tensor("output_norm", &[WIDTH]);
    tensor("blk.0.attn_norm", &[WIDTH]);
    tensor("blk.0.attn_q", &[32, WIDTH]);
    tensor("blk.0.attn_k", &[16, WIDTH]);
    tensor("blk.0.attn_v", &[16, WIDTH]);
    tensor("blk.0.attn_output", &[WIDTH, 32]);
    tensor("blk.0.ffn_norm", &[WIDTH]);
    tensor("blk.0.ffn_gate", &[FFN, WIDTH]);
    tensor("blk.0.ffn_up", &[FFN, WIDTH]);
    tensor("blk.0.ffn_down", &[WIDTH, FFN]);
    File {
        metadata: metadata
            .map(|(key, value)| (key.to_owned(), value))
            .to_vec(),
        tensors,
    }
}

impl File {
    fn bytes(&self) -> Vec<u8> {
        let mut out = Cursor::new(Vec::new());
        let metadata: Vec<(&str, &Value)> = self
            .metadata
            .iter()
            .map(|(key, value)| (key.as_str(), value))
            .collect();
        let tensors: Vec<(&str, &QTensor)> = self
            .tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
            .collect();
        gguf_file::write(&mut out, &metadata, &tensors).unwrap();
        out.into_inner()
    }

    fn set(&mut self, key: &str, value: Value) {
        let found = self.metadata.iter_mut().find(|(name, _)| name == key);
        found.expect("the key is there").1 = value;
    }
}

fn open(bytes: &[u8]) -> Result<Loaded, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Loaded::open(&path)
}

fn refused(bytes: &[u8]) -> ModelError {
    match open(bytes) {
        Ok(_) => panic!("a damaged file was accepted"),
        Err(error) => error,
    }
}

#[test]
fn the_undamaged_file_is_a_model() {
    let loaded = open(&file().bytes()).unwrap();
    assert_eq!(loaded.model.config().vocab, loaded.tokenizer.vocab());
    assert_eq!(loaded.tokenizer.encode("ab").unwrap().len(), 1);
}

#[test]
fn a_missing_file_is_named() {
    let result = Model::load("/nowhere/model.gguf".as_ref());
    assert!(matches!(result, Err(ModelError::File { .. })));
}

#[test]
fn a_shorter_file_is_refused_at_every_length() {
    let bytes = file().bytes();
    // The last bytes are padding.
    for len in (0..bytes.len() - 32).step_by(97).chain(0..64) {
        refused(&bytes[..len]);
    }
}

#[test]
fn metadata_that_cannot_be_are_refused() {
    let number = |value| Value::U32(value);
    let cases = [
        ("general.architecture", Value::String("gpt2".to_owned())),
        ("general.alignment", number(0)),
        ("general.alignment", Value::U8(0)),
        ("general.alignment", number(u32::MAX)),
        ("llama.block_count", number(0)),
        ("llama.block_count", number(2)),
        ("llama.block_count", number(u32::MAX)),
        ("llama.block_count", Value::String("1".to_owned())),
        ("llama.context_length", number(u32::MAX)),
        ("llama.embedding_length", number(0)),
        ("llama.embedding_length", Value::U64(u64::MAX)),
        ("llama.attention.head_count", number(0)),
        ("llama.attention.head_count", number(3)),
        ("llama.attention.head_count_kv", number(0)),
        ("llama.attention.head_count_kv", number(2)),
        ("llama.rope.freq_base", Value::F32(f32::NAN)),
        ("llama.rope.dimension_count", number(8)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(-1.0)),
        ("llama.vocab_size", number(5)),
        ("tokenizer.ggml.model", Value::String("llama".to_owned())),
        ("tokenizer.ggml.pre", Value::String("qwen2".to_owned())),
        ("tokenizer.ggml.tokens", Value::Array(vec![])),
        ("tokenizer.ggml.token_type", Value::Array(vec![])),
        (
            "tokenizer.ggml.merges",
            Value::Array(vec![Value::String("a zz".to_owned())]),
        ),
        // Both are tokens, and longer together than any token.
        (
            "tokenizer.ggml.merges",
            Value::Array(vec![Value::String("<|im_end|> ab".to_owned())]),
        ),
        ("tokenizer.ggml.merges", Value::Array(vec![number(1)])),
        ("tokenizer.ggml.eos_token_id", number(9999)),
        ("tokenizer.ggml.eos_token_id", number(1)),
        ("tokenizer.chat_template", Value::String("{% if".to_owned())),
    ];
    for (key, value) in cases {
        let shown = format!("{value:?}");
        let mut file = file();
        file.set(key, value);
        let bytes = file.bytes();
        assert!(open(&bytes).is_err(), "{key} = {shown}");
    }
}

#[test]
fn missing_metadata_and_tensors_are_named() {
    for index in 0..file().metadata.len() {
        let mut file = file();
        let (key, _) = file.metadata.remove(index);
        let optional = ["general.alignment", "llama.vocab_size"].contains(&key.as_str());
        assert_eq!(open(&file.bytes()).is_ok(), optional, "{key}");
    }
    for index in 0..file().tensors.len() {
        let mut file = file();
        let (name, _) = file.tensors.remove(index);
        let error = refused(&file.bytes());
        assert!(error.to_string().contains(&name), "{error}");
    }
}

#[test]
fn a_weight_that_is_no_number_is_refused() {
    let mut file = file();
    let values = Tensor::full(f32::NAN, WIDTH, &Device::Cpu).unwrap();
    file.tensors[1].1 = QTensor::quantize(&values, GgmlDType::F32).unwrap();
    assert!(matches!(refused(&file.bytes()), ModelError::Tensor { .. }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn changed_bytes_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        in_header in any::<bool>(),
    ) {
        let mut bytes = file().bytes();
        let len = if in_header { 2200.min(bytes.len()) } else { bytes.len() };
        for (at, value) in changes {
            bytes[at.index(len)] = value;
        }
        let _ = open(&bytes);
    }
}

#[test]
fn chunks_and_pools_that_do_not_fit_are_refused() {
    let model = Model::seeded(ModelConfig::tiny(), 1).unwrap();
    let pool = |layout| {
        kv_xfer::memory::KvPool::host(layout, 4, &Default::default())
            .unwrap()
            .0
    };
    let good = pool(model.layout(16).unwrap());
    let table: Vec<_> = (0..4).map(kv_xfer::ids::BlockId).collect();
    let chunk = Chunk {
        tokens: &[1, 2],
        start: 0,
        blocks: &table,
        logits: true,
    };
    assert!(model.forward(&good, &[chunk]).is_ok());
    assert!(model.forward(&good, &[]).unwrap().is_empty());
    let outside = [kv_xfer::ids::BlockId(99)];
    for wrong in [
        Chunk {
            tokens: &[],
            ..chunk
        },
        Chunk {
            tokens: &[300],
            ..chunk
        },
        Chunk { start: 63, ..chunk },
        Chunk {
            start: usize::MAX,
            ..chunk
        },
        Chunk {
            start: 1024,
            ..chunk
        },
        Chunk {
            blocks: &[],
            ..chunk
        },
    ] {
        let result = model.forward(&good, &[chunk, wrong]);
        assert!(
            matches!(result, Err(ModelError::Chunk { index: 1, .. })),
            "{wrong:?}"
        );
    }
    let result = model.forward(
        &good,
        &[Chunk {
            blocks: &outside,
            ..chunk
        }],
    );
    assert!(matches!(result, Err(ModelError::Access(_))));

    let claim = good.claim(vec![table[0]]).unwrap();
    let result = model.forward(&good, &[chunk]);
    assert!(matches!(result, Err(ModelError::Access(_))));
    drop(claim);

    let other = Model::seeded(
        ModelConfig {
            layers: 3,
            ..ModelConfig::tiny()
        },
        1,
    )
    .unwrap();
    let result = model.forward(&pool(other.layout(16).unwrap()), &[chunk]);
    assert!(matches!(result, Err(ModelError::Pool { .. })));
    assert!(model.layout(0).is_err());
    assert!(
        Model::seeded(
            ModelConfig {
                head_dim: 17,
                ..ModelConfig::tiny()
            },
            1
        )
        .is_err()
    );
}
