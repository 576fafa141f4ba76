//! Text to tokens and back, as the GGUF file's metadata say.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::quantized::gguf_file::{Content, Value};
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer as Encoder};

use super::ModelError;
use super::config::{array, count, text};
use super::stream::TokenStream;

/// How the format marks tokens that are no text.
const CONTROL: i64 = 3;
/// Names of tokens that end a text beside the one that the metadata name.
const ENDS: &[&str] = &["<|endoftext|>", "<|im_end|>", "</s>"];

/// A byte-level BPE tokenizer. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    /// Takes the names of special tokens for these tokens.
    marked: Encoder,
    /// Takes them for text.
    plain: Encoder,
    bytes: Vec<TokenBytes>,
    specials: HashMap<String, u32>,
    eos: Vec<u32>,
}

/// What a token stands for.
#[derive(Debug, Clone)]
pub(super) enum TokenBytes {
    Text(Box<[u8]>),
    Special,
}

impl Tokenizer {
    /// Builds it from the metadata of a GGUF file.
    pub(super) fn from_gguf(content: &Content) -> Result<Self, ModelError> {
        let kind = text(content, "tokenizer.ggml.model")?;
        let splitter = text(content, "tokenizer.ggml.pre")?;
        if kind != "gpt2" || splitter != "smollm" {
            return Err(wrong(format!("it is of the kind `{kind}`, `{splitter}`")));
        }
        let names = strings(content, "tokenizer.ggml.tokens")?;
        let types = array(content, "tokenizer.ggml.token_type")?;
        if types.len() != names.len() {
            return Err(wrong(format!(
                "{} tokens have {} types",
                names.len(),
                types.len()
            )));
        }
        let is_special: Vec<bool> = types
            .iter()
            .map(|kind| whole(kind) == Some(CONTROL))
            .collect();
        let eos = count(content, "tokenizer.ggml.eos_token_id")?;
        let Some(eos_name) = names.get(eos) else {
            return Err(wrong(format!("token {eos} ends texts and does not exist")));
        };
        let eos_name = (*eos_name).to_owned();
        Self::build(
            &names,
            &is_special,
            &strings(content, "tokenizer.ggml.merges")?,
            &eos_name,
        )
    }

    fn build(
        names: &[&str],
        is_special: &[bool],
        merges: &[&str],
        eos: &str,
    ) -> Result<Self, ModelError> {
        let mut vocab = Vocab::default();
        for (id, name) in (0..).zip(names) {
            if vocab.insert((*name).to_owned(), id).is_some() {
                return Err(wrong(format!("two tokens are named `{name}`")));
            }
        }
        let merges = merges
            .iter()
            .map(|merge| pair(merge, &vocab))
            .collect::<Result<Merges, _>>()?;
        let byte_of = byte_of_char();
        let bytes = names
            .iter()
            .zip(is_special)
            .map(|(name, is_special)| match is_special {
                true => Ok(TokenBytes::Special),
                false => name
                    .chars()
                    .map(|c| byte_of.get(&c).copied())
                    .collect::<Option<Box<[u8]>>>()
                    .map(TokenBytes::Text)
                    .ok_or_else(|| wrong(format!("the token `{name}` stands for no bytes"))),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let mut specials = HashMap::new();
        for ((id, name), _) in (0..).zip(names).zip(is_special).filter(|(_, is)| **is) {
            specials.insert((*name).to_owned(), id);
        }
        let plain = encoder(vocab, merges)?;
        let mut marked = plain.clone();
        let mut added: Vec<&String> = specials.keys().collect();
        added.sort();
        marked
            .add_special_tokens(
                added
                    .iter()
                    .map(|name| AddedToken::from(name.as_str(), true)),
            )
            .map_err(|error| wrong(error.to_string()))?;
        let ends = std::iter::once(&eos).chain(ENDS);
        let mut eos: Vec<u32> = Vec::new();
        for id in ends.filter_map(|name| specials.get(*name)) {
            if !eos.contains(id) {
                eos.push(*id);
            }
        }
        if eos.is_empty() {
            return Err(wrong(
                "the token that ends texts is no special one".to_owned(),
            ));
        }
        Ok(Self {
            shared: Arc::new(Shared {
                marked,
                plain,
                bytes,
                specials,
                eos,
            }),
        })
    }

    /// The tokens of a text; names of special tokens in it become these tokens. For texts that are
    /// trusted to use them.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] when the vocabulary has no tokens for the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        encode(&self.shared.marked, text)
    }

    /// The tokens of a text in which names of special tokens are text like any other.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] when the vocabulary has no tokens for the text.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        encode(&self.shared.plain, text)
    }

    /// The text of tokens. Special ones have none; bytes that are no UTF-8 become `U+FFFD`.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| self.bytes(*token).unwrap_or_default())
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Turns tokens into text one by one.
    #[must_use]
    pub fn stream(&self) -> TokenStream {
        TokenStream::new(self.clone())
    }

    /// Tokens that end a text, the model's own first.
    #[must_use]
    pub fn eos(&self) -> &[u32] {
        &self.shared.eos
    }

    /// The special token of a name.
    #[must_use]
    pub fn special(&self, name: &str) -> Option<u32> {
        self.shared.specials.get(name).copied()
    }

    /// Number of tokens.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.shared.bytes.len()
    }

    /// The bytes of a token of text; none for special and unknown ones.
    #[must_use]
    pub fn bytes(&self, token: u32) -> Option<&[u8]> {
        match self.shared.bytes.get(usize::try_from(token).ok()?)? {
            TokenBytes::Text(bytes) => Some(bytes),
            TokenBytes::Special => None,
        }
    }
}

fn encode(encoder: &Encoder, text: &str) -> Result<Vec<u32>, ModelError> {
    let encoding = encoder.encode_fast(text, false);
    let encoding = encoding.map_err(|error| wrong(error.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}

/// What llama.cpp calls `smollm`: every digit alone, then GPT-2's splitting into words.
fn encoder(vocab: Vocab, merges: Merges) -> Result<Encoder, ModelError> {
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).build();
    let mut encoder = Encoder::new(bpe.map_err(|error| wrong(error.to_string()))?);
    encoder.with_pre_tokenizer(Some(Sequence::new(vec![
        Digits::new(true).into(),
        ByteLevel::new(false, false, true).into(),
    ])));
    Ok(encoder)
}

/// The two halves of a merge. Their union must be a token too: the BPE builder relies on it.
fn pair(merge: &str, vocab: &Vocab) -> Result<(String, String), ModelError> {
    let halves = merge.split_once(' ').filter(|(left, right)| {
        vocab.contains_key(*left)
            && vocab.contains_key(*right)
            && vocab.contains_key(&format!("{left}{right}"))
    });
    let (left, right) = halves.ok_or_else(|| wrong(format!("`{merge}` merges no tokens")))?;
    Ok((left.to_owned(), right.to_owned()))
}

/// GPT-2 writes bytes as printable characters: those that are printable as themselves, the others,
/// in order, as characters from `U+0100` on.
fn byte_of_char() -> HashMap<char, u8> {
    let is_printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=u8::MAX).filter(|byte| !is_printable(byte));
    let printable = (0..=u8::MAX).filter(is_printable);
    printable
        .map(|byte| (char::from(byte), byte))
        .chain(('\u{100}'..).zip(others))
        .collect()
}

fn wrong(why: String) -> ModelError {
    ModelError::Tokenizer { why }
}

fn whole(value: &Value) -> Option<i64> {
    match value {
        Value::I32(value) => Some(i64::from(*value)),
        Value::U32(value) => Some(i64::from(*value)),
        _ => None,
    }
}

fn strings<'a>(content: &'a Content, key: &str) -> Result<Vec<&'a str>, ModelError> {
    let values = array(content, key)?.iter().map(|value| match value {
        Value::String(text) => Some(text.as_str()),
        _ => None,
    });
    let texts: Option<Vec<&str>> = values.collect();
    texts.ok_or_else(|| ModelError::Metadata {
        key: key.to_owned(),
    })
}
