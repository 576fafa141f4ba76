//! `--memory`: where pools are, for the demo, the benches and the target alike.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use kv_xfer::layout::KvLayout;
use kv_xfer::memory::cuda::{CudaDevice, CudaError, CudaOptions};
use kv_xfer::memory::{HostOptions, KvPool, PoolError};
use serde::{Deserialize, Serialize};

/// Where pools are wished for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MemoryChoice {
    /// On the first GPU, where there is one, else on the host.
    #[default]
    Auto,
    /// In host memory.
    Host,
    /// On the GPU of an ordinal.
    Cuda(u32),
}

/// Where pools are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum PoolMemory {
    /// In host memory.
    #[default]
    Host,
    /// On the GPU of an ordinal.
    Cuda(u32),
}

impl MemoryChoice {
    /// What it comes to on this machine.
    ///
    /// # Errors
    /// [`CudaError`] when a GPU was asked for that cannot be had. Without one `auto` is the host's memory.
    pub fn resolve(self) -> Result<PoolMemory, CudaError> {
        match self {
            Self::Host => Ok(PoolMemory::Host),
            Self::Cuda(ordinal) => {
                CudaDevice::check(ordinal)?;
                Ok(PoolMemory::Cuda(ordinal))
            }
            Self::Auto => Ok(match CudaDevice::check(0) {
                Ok(()) => PoolMemory::Cuda(0),
                Err(why) => {
                    tracing::info!(%why, "pools are in host memory");
                    PoolMemory::Host
                }
            }),
        }
    }
}

impl FromStr for MemoryChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "host" => Ok(Self::Host),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| {
                    format!("{text} is no memory: choose auto, host or cuda:N, such as cuda:0")
                }),
        }
    }
}

impl fmt::Display for MemoryChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Host => f.write_str("host"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl PoolMemory {
    /// Makes a pool there; what the machine gave, in words: whether huge pages back it, or which GPU it is.
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn pool(
        self,
        layout: KvLayout,
        blocks: u32,
        options: &HostOptions,
    ) -> Result<(Arc<KvPool>, String), PoolError> {
        match self {
            Self::Host => {
                let (pool, report) = KvPool::host(layout, blocks, options)?;
                Ok((pool, report.huge_pages.to_string()))
            }
            Self::Cuda(ordinal) => {
                let options = CudaOptions::on(ordinal);
                let (pool, report) = KvPool::cuda(layout, blocks, &options)?;
                let device = report.device;
                Ok((pool, format!("{} at {}", device.name, device.bus_id)))
            }
        }
    }

    /// Whether the processor can reach it.
    #[must_use]
    pub fn is_host(self) -> bool {
        self == Self::Host
    }
}

impl fmt::Display for PoolMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl From<PoolMemory> for String {
    fn from(memory: PoolMemory) -> Self {
        memory.to_string()
    }
}

impl TryFrom<String> for PoolMemory {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.parse::<MemoryChoice>()? {
            MemoryChoice::Host => Ok(Self::Host),
            MemoryChoice::Cuda(ordinal) => Ok(Self::Cuda(ordinal)),
            MemoryChoice::Auto => Err("say which memory: host or cuda:N".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for text in ["auto", "host", "cuda:0", "cuda:15"] {
            assert_eq!(text.parse::<MemoryChoice>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "gpu",
            "cuda",
            "cuda:",
            "cuda:x",
            "cuda:-1",
            "cuda:99999999999",
        ] {
            let error = text.parse::<MemoryChoice>().unwrap_err();
            assert!(error.contains("cuda:N"), "{error}");
        }
        let json = serde_json::to_string(&PoolMemory::Cuda(1)).unwrap();
        assert_eq!(json, "\"cuda:1\"");
        assert_eq!(
            serde_json::from_str::<PoolMemory>(&json).unwrap(),
            PoolMemory::Cuda(1)
        );
        assert!(serde_json::from_str::<PoolMemory>("\"auto\"").is_err());
    }

    #[test]
    fn the_host_is_always_there() {
        assert_eq!(MemoryChoice::Host.resolve(), Ok(PoolMemory::Host));
        let auto = MemoryChoice::Auto.resolve().unwrap();
        match CudaDevice::count() {
            Ok(_) => assert_eq!(auto, PoolMemory::Cuda(0)),
            Err(_) => {
                assert_eq!(auto, PoolMemory::Host);
                assert!(MemoryChoice::Cuda(0).resolve().is_err());
            }
        }
    }
}
