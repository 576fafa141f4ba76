//! What two engines must have in common before one may read the other's blocks.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use thiserror::Error;

/// Shown in place of a factor that one side does not have.
const ABSENT: &str = "(absent)";

/// Why two engines do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CompatError {
    /// A factor differs.
    #[error("{factor} differs: own {own:?}, peer's {theirs:?}; start both engines with the same")]
    Factor {
        /// Which one.
        factor: String,
        /// Own value.
        own: String,
        /// The peer's value.
        theirs: String,
    },
    /// The hash that a vLLM peer sent is not the one that was configured.
    #[error(
        "compatibility hash differs: own {own}, peer's {theirs}; a vLLM peer's hash covers its exact \
         version, model name, dtype, heads, layers, attention backend and cache dtype: configure the \
         hash it serves, or set its enforce_handshake_compat to false"
    )]
    Hash {
        /// Own hash.
        own: String,
        /// The peer's hash.
        theirs: String,
    },
}

/// The factors that must be equal. Parallel sizes and block counts are deliberately not among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompatFactors {
    /// Version of the card and of the requests, [`PROTOCOL_VERSION`](super::PROTOCOL_VERSION).
    pub protocol: u32,
    /// The model, as the engines are told to name it.
    pub model: String,
    /// Element type of the KV cache.
    pub dtype: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Fingerprint of what the bytes of a block mean, of the whole model: it must not depend on the
    /// parallel size, which may differ between the engines.
    pub layout_fingerprint: [u8; 32],
    /// Anything else, by name: heads, head size, memory order, mode of operation. Compared before
    /// the fingerprint, so that a refusal names the most telling difference.
    pub extra: BTreeMap<String, String>,
}

impl CompatFactors {
    /// Name and value of every factor, in the order in which they are compared.
    #[must_use]
    pub fn pairs(&self) -> Vec<(&str, String)> {
        let mut pairs = vec![
            ("protocol", self.protocol.to_string()),
            ("model", self.model.clone()),
            ("dtype", self.dtype.clone()),
            ("block_tokens", self.block_tokens.to_string()),
        ];
        pairs.extend(self.extra.iter().map(|(k, v)| (k.as_str(), v.clone())));
        pairs.push(("layout_fingerprint", hex(&self.layout_fingerprint)));
        pairs
    }

    /// SHA-256 of the factors, 64 hexadecimal digits: what is served as `compatibility_hash` when
    /// no other is configured. No vLLM engine computes the same.
    #[must_use]
    pub fn hash(&self) -> String {
        let object = self
            .pairs()
            .into_iter()
            .map(|(k, v)| (k.to_owned(), Value::from(v)))
            .collect();
        sha256_of_python_json(&Value::Object(object))
    }
}

/// Compares factor by factor; a factor that only one side has differs.
///
/// # Errors
/// [`CompatError::Factor`] with the first difference.
pub fn check_compatible(own: &CompatFactors, theirs: &CompatFactors) -> Result<(), CompatError> {
    let own_pairs = own.pairs();
    let their_pairs = theirs.pairs();
    let value_in = |pairs: &[(&str, String)], factor: &str| {
        pairs
            .iter()
            .find(|(name, _)| *name == factor)
            .map_or_else(|| ABSENT.to_owned(), |(_, value)| value.clone())
    };
    let (fingerprint, rest) = match own_pairs.split_last() {
        Some((last, rest)) => (Some(last), rest),
        None => (None, own_pairs.as_slice()),
    };
    // Own factors, then those that only the peer has, then the fingerprint.
    let only_theirs = their_pairs
        .iter()
        .filter(|(name, _)| !own_pairs.iter().any(|(own_name, _)| own_name == name));
    for (factor, _) in rest.iter().chain(only_theirs).chain(fingerprint) {
        let own = value_in(&own_pairs, factor);
        let theirs = value_in(&their_pairs, factor);
        if own != theirs {
            return Err(CompatError::Factor {
                factor: (*factor).to_owned(),
                own,
                theirs,
            });
        }
    }
    Ok(())
}

/// The factors of vLLM's compatibility hash, for serving vLLM engines without asking one first.
/// Fields are named and typed as in vLLM's `NixlConnector`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VllmFactors {
    /// Exact version, such as `0.33.0`.
    pub vllm_version: String,
    /// `NIXL_CONNECTOR_VERSION`: 9 in vLLM 0.29.0, 15 in 0.33.0.
    pub nixl_connector_version: u32,
    /// Model string as given on vLLM's command line.
    pub model: String,
    /// Model dtype, such as `torch.bfloat16`.
    pub dtype: String,
    /// Total number of KV heads.
    pub num_kv_heads: u32,
    /// Head size.
    pub head_size: u32,
    /// Total number of hidden layers.
    pub num_hidden_layers: u32,
    /// Attention backend, such as `FLASH_ATTN`.
    pub attn_backend_name: String,
    /// Cache dtype, such as `auto` or `fp8`.
    pub cache_dtype: String,
    /// Whether the hybrid KV cache manager is on.
    pub is_hma_enabled: bool,
    /// Null, or the map that vLLM makes of an EAGLE or MTP configuration.
    pub speculative_config: Value,
    /// `pull` or `push`.
    pub transfer_mode: String,
}

impl VllmFactors {
    /// The hash, 64 hexadecimal digits: SHA-256 of Python's `json.dumps(factors, sort_keys=True)`.
    #[must_use]
    pub fn hash(&self) -> String {
        let mut factors = Map::new();
        let mut put = |name: &str, value: Value| factors.insert(name.to_owned(), value);
        put("vllm_version", self.vllm_version.as_str().into());
        put("nixl_connector_version", self.nixl_connector_version.into());
        put("model", self.model.as_str().into());
        put("dtype", self.dtype.as_str().into());
        put("num_kv_heads", self.num_kv_heads.into());
        put("head_size", self.head_size.into());
        put("num_hidden_layers", self.num_hidden_layers.into());
        put("attn_backend_name", self.attn_backend_name.as_str().into());
        put("cache_dtype", self.cache_dtype.as_str().into());
        put("is_hma_enabled", self.is_hma_enabled.into());
        put("speculative_config", self.speculative_config.clone());
        put("transfer_mode", self.transfer_mode.as_str().into());
        sha256_of_python_json(&Value::Object(factors))
    }
}

fn sha256_of_python_json(value: &Value) -> String {
    let mut text = String::new();
    python_json(value, &mut text);
    hex(&Sha256::digest(text.as_bytes()))
}

/// Writes `value` as Python's `json.dumps(value, sort_keys=True)` does: `", "` and `": "` between,
/// everything outside ASCII as `\uXXXX`. (Python writes large floats differently; no factor is one.)
fn python_json(value: &Value, out: &mut String) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                python_json(item, out);
            }
            out.push(']');
        }
        Value::Object(entries) => {
            // Python sorts by code point, which is the byte order of UTF-8.
            let sorted: BTreeMap<_, _> = entries.iter().collect();
            out.push('{');
            for (i, (key, item)) in sorted.into_iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                python_string(key, out);
                out.push_str(": ");
                python_json(item, out);
            }
            out.push('}');
        }
        Value::String(text) => python_string(text, out),
        Value::Null | Value::Bool(_) | Value::Number(_) => out.push_str(&value.to_string()),
    }
}

fn python_string(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='\u{7e}' => out.push(c),
            // Python escapes U+007F not at all.
            '\u{7f}' => out.push(c),
            _ => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out.push('"');
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qwen(version: &str, connector: u32) -> VllmFactors {
        VllmFactors {
            vllm_version: version.into(),
            nixl_connector_version: connector,
            model: "Qwen/Qwen3-32B".into(),
            dtype: "torch.bfloat16".into(),
            num_kv_heads: 8,
            head_size: 128,
            num_hidden_layers: 64,
            attn_backend_name: "FLASH_ATTN".into(),
            cache_dtype: "auto".into(),
            is_hma_enabled: true,
            speculative_config: Value::Null,
            transfer_mode: "pull".into(),
        }
    }

    #[test]
    fn vllm_hashes_are_reproduced() {
        assert_eq!(
            qwen("0.29.0", 9).hash(),
            "66bf7f67b998a61320157fd6ae07e9d5fc1384f130fca0592df9efd4a239fb16"
        );
        assert_eq!(
            qwen("0.33.0", 15).hash(),
            "d7fdf3eed56a7565fcead270b39e658ab05cb25ababa3c6626358a2e200391d2"
        );
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value = serde_json::json!({
            "b": [1, true, null, -2], "a": {"é": "\u{1F600}\n\"\\\u{7f}\u{1}/"}, "c": {}
        });
        let mut out = String::new();
        python_json(&value, &mut out);
        assert_eq!(
            out,
            "{\"a\": {\"\\u00e9\": \"\\ud83d\\ude00\\n\\\"\\\\\u{7f}\\u0001/\"}, \
             \"b\": [1, true, null, -2], \"c\": {}}"
        );
    }

    fn factors() -> CompatFactors {
        CompatFactors {
            protocol: 1,
            model: "m".into(),
            dtype: "bf16".into(),
            block_tokens: 16,
            layout_fingerprint: [7; 32],
            extra: [("heads", "8"), ("head_size", "128"), ("mode", "pull")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into(),
        }
    }

    #[test]
    fn each_factor_refuses_by_name() {
        type Flip = fn(&mut CompatFactors);
        let flips: [(&str, &str, &str, Flip); 9] = [
            ("protocol", "1", "2", |f| f.protocol = 2),
            ("model", "m", "n", |f| f.model = "n".into()),
            ("dtype", "bf16", "fp8", |f| f.dtype = "fp8".into()),
            ("block_tokens", "16", "32", |f| f.block_tokens = 32),
            ("heads", "8", "4", |f| {
                f.extra.insert("heads".into(), "4".into());
                // Fewer heads change the fingerprint too; the heads are what is named.
                f.layout_fingerprint = [9; 32];
            }),
            ("head_size", "128", "64", |f| {
                f.extra.insert("head_size".into(), "64".into());
            }),
            ("mode", "pull", "(absent)", |f| {
                f.extra.remove("mode");
            }),
            ("mem", "(absent)", "VRAM", |f| {
                f.extra.insert("mem".into(), "VRAM".into());
            }),
            (
                "layout_fingerprint",
                "0707070707070707070707070707070707070707070707070707070707070707",
                "0807070707070707070707070707070707070707070707070707070707070707",
                |f| f.layout_fingerprint[0] = 8,
            ),
        ];
        for (factor, own, theirs, flip) in flips {
            let mut other = factors();
            flip(&mut other);
            assert_ne!(other.hash(), factors().hash());
            assert_eq!(
                check_compatible(&factors(), &other),
                Err(CompatError::Factor {
                    factor: factor.into(),
                    own: own.into(),
                    theirs: theirs.into()
                })
            );
        }
        assert_eq!(check_compatible(&factors(), &factors()), Ok(()));
    }
}
