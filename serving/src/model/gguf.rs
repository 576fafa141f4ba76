//! Reads a GGUF file whole: its metadata, its tensors, and the digest that names its revision.

use std::fs;
use std::io::Cursor;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::gguf_file::Content;

use super::ModelError;

/// The key whose value candle divides by.
const ALIGNMENT: &[u8] = b"\x11\0\0\0\0\0\0\0general.alignment";
/// A power of two that no file goes beyond.
const MAX_ALIGNMENT: u64 = 1 << 20;

/// A file in memory with its table of contents.
pub(super) struct Gguf {
    bytes: Vec<u8>,
    /// Metadata and where the tensors are.
    pub content: Content,
}

impl Gguf {
    pub(super) fn open(path: &Path) -> Result<Self, ModelError> {
        let bytes = fs::read(path).map_err(|source| ModelError::File {
            path: path.to_path_buf(),
            source,
        })?;
        Self::parse(bytes)
    }

    pub(super) fn parse(bytes: Vec<u8>) -> Result<Self, ModelError> {
        check_alignment(&bytes)?;
        let content =
            Content::read(&mut Cursor::new(&bytes)).map_err(|error| ModelError::Gguf {
                why: error.to_string(),
            })?;
        Ok(Self { bytes, content })
    }

    /// BLAKE3 of the whole file, as hexadecimal digits.
    pub(super) fn digest(&self) -> String {
        blake3::hash(&self.bytes).to_hex().to_string()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// A tensor of this shape, dequantised to f32.
    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let wrong = |why: String| ModelError::Tensor {
            name: name.to_owned(),
            why,
        };
        let info = self.content.tensor_infos.get(name);
        let info = info.ok_or_else(|| wrong("it is missing".to_owned()))?;
        // Checked before anything is computed from it: a product of damaged dimensions may overflow.
        if info.shape.dims() != shape {
            return Err(wrong(format!(
                "its shape is {:?}, not {shape:?}",
                info.shape.dims()
            )));
        }
        let device = Device::Cpu;
        let values = info
            .read(
                &mut Cursor::new(&self.bytes),
                self.content.tensor_data_offset,
                &device,
            )
            .and_then(|tensor| tensor.dequantize(&device))
            .and_then(|tensor| tensor.flatten_all()?.to_vec1::<f32>())
            .map_err(|error| wrong(error.to_string()))?;
        if values.iter().any(|value| !value.is_finite()) {
            return Err(wrong("it holds values that are no numbers".to_owned()));
        }
        Ok(values)
    }
}

/// Refuses an alignment of zero, by which candle would divide.
fn check_alignment(bytes: &[u8]) -> Result<(), ModelError> {
    for at in memchr::memmem::find_iter(bytes, ALIGNMENT) {
        let rest = bytes.get(at + ALIGNMENT.len()..).unwrap_or_default();
        let value = match rest {
            // Types of the format: u8, i8; u16, i16; u32, i32.
            [0 | 1, 0, 0, 0, value, ..] => u64::from(*value),
            [2 | 3, 0, 0, 0, a, b, ..] => u64::from(u16::from_le_bytes([*a, *b])),
            [4 | 5, 0, 0, 0, a, b, c, d, ..] => u64::from(u32::from_le_bytes([*a, *b, *c, *d])),
            _ => continue,
        };
        if value == 0 || value > MAX_ALIGNMENT {
            return Err(ModelError::Gguf {
                why: format!("its tensors are aligned to {value} bytes"),
            });
        }
    }
    Ok(())
}
