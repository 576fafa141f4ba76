//! What moving the same bytes costs without NIXL: a plain copy within a process, and the system call
//! that NIXL's shared-memory path rests on.

use std::io::IoSliceMut;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use thiserror::Error;

/// Most pieces that the kernel takes in one call (`IOV_MAX`).
const PIECES_PER_CALL: usize = 1024;
/// Most bytes that the kernel moves in one call, rounded down to whole pages below 2 GiB.
const BYTES_PER_CALL: u64 = 0x7fff_f000;

/// A move that was timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Bytes moved.
    pub bytes: u64,
    /// How long it took.
    pub time: Duration,
}

impl Timing {
    /// Rate, GB/s (10^9 bytes a second).
    #[must_use]
    pub fn gbps(&self) -> f64 {
        self.bytes as f64 / self.time.as_secs_f64().max(1e-9) / 1e9
    }
}

/// Why a baseline could not be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BaselineError {
    /// There is nothing to move, or more than an address space holds.
    #[error("{bytes} bytes cannot be moved; give 1 to {} bytes", isize::MAX)]
    BadSize {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The kernel refused.
    #[error(
        "process_vm_readv from process {pid} failed ({errno}); it needs the same user, and \
         kernel.yama.ptrace_scope=0 when the process is not a child"
    )]
    Refused {
        /// The other process.
        pid: i32,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The kernel moved less than was asked for.
    #[error("process_vm_readv moved {moved} of {wanted} bytes: the other process unmapped some")]
    Short {
        /// Bytes moved by the call at fault.
        moved: u64,
        /// Bytes it was asked for.
        wanted: u64,
    },
}

/// Copies `bytes` bytes from one buffer to another, both in memory already.
///
/// # Errors
/// [`BaselineError::BadSize`].
pub fn plain_copy(bytes: u64) -> Result<Timing, BaselineError> {
    let source = touched(bytes, 1)?;
    let mut target = touched(bytes, 2)?;
    let start = Instant::now();
    target.copy_from_slice(std::hint::black_box(&source));
    std::hint::black_box(&mut target);
    Ok(Timing {
        bytes,
        time: start.elapsed(),
    })
}

/// Reads pieces (address and length in bytes, there) of another process's memory, one behind the other
/// into a buffer that is in memory already.
///
/// # Errors
/// [`BaselineError`] when there is nothing to read or the kernel refuses.
pub fn raw_read(pid: i32, pieces: &[(u64, u64)]) -> Result<Timing, BaselineError> {
    let total = pieces
        .iter()
        .try_fold(0_u64, |sum, (_, len)| sum.checked_add(*len));
    let bytes = total.unwrap_or(u64::MAX);
    let mut buffer = touched(bytes, 1)?;
    let calls = calls(pieces);
    let start = Instant::now();
    let mut rest = buffer.as_mut_slice();
    for call in calls {
        let wanted: usize = call.iter().map(|piece| piece.len).sum();
        let (target, after) = rest.split_at_mut(wanted);
        rest = after;
        let moved = process_vm_readv(Pid::from_raw(pid), &mut [IoSliceMut::new(target)], &call)
            .map_err(|errno| BaselineError::Refused { pid, errno })?;
        if moved != wanted {
            return Err(BaselineError::Short {
                moved: moved as u64,
                wanted: wanted as u64,
            });
        }
    }
    let time = start.elapsed();
    std::hint::black_box(&mut buffer);
    Ok(Timing { bytes, time })
}

/// Cuts the pieces into calls that the kernel takes.
fn calls(pieces: &[(u64, u64)]) -> Vec<Vec<RemoteIoVec>> {
    let mut calls = Vec::new();
    let mut call = Vec::new();
    let mut room = BYTES_PER_CALL;
    for &(mut addr, mut len) in pieces {
        while len > 0 {
            if room == 0 || call.len() == PIECES_PER_CALL {
                calls.push(std::mem::take(&mut call));
                room = BYTES_PER_CALL;
            }
            let part = len.min(room);
            call.push(RemoteIoVec {
                base: addr as usize,
                len: part as usize,
            });
            room -= part;
            len -= part;
            addr = addr.wrapping_add(part);
        }
    }
    if !call.is_empty() {
        calls.push(call);
    }
    calls
}

/// A buffer whose pages are all there.
fn touched(bytes: u64, value: u8) -> Result<Vec<u8>, BaselineError> {
    let bad = BaselineError::BadSize { bytes };
    let len = usize::try_from(bytes)
        .ok()
        .filter(|len| *len > 0)
        .ok_or(bad)?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(len).map_err(|_| bad)?;
    buffer.resize(len, value);
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_timed() {
        let timing = plain_copy(1 << 20).unwrap();
        assert_eq!(timing.bytes, 1 << 20);
        assert!(timing.gbps() > 0.0);
        for bytes in [0, u64::MAX] {
            assert_eq!(plain_copy(bytes), Err(BaselineError::BadSize { bytes }));
        }
    }

    #[test]
    fn calls_are_cut_to_what_the_kernel_takes() {
        let pieces: Vec<_> = (0..2500_u64).map(|i| (i * 100, 10)).collect();
        let lengths: Vec<_> = calls(&pieces).iter().map(Vec::len).collect();
        assert_eq!(lengths, [1024, 1024, 452]);
        let large = calls(&[(0x1000, BYTES_PER_CALL), (0x9000, 0), (0x5000, 5)]);
        assert_eq!(large.len(), 2);
        let cut = calls(&[(0, BYTES_PER_CALL + 7)]);
        assert_eq!(cut[1][0].base as u64, BYTES_PER_CALL);
        assert_eq!(cut[1][0].len, 7);
        assert!(calls(&[]).is_empty());
    }

    #[test]
    fn memory_of_a_process_is_read() {
        let data = vec![3_u8; 5000 * 16];
        let base = data.as_ptr().addr() as u64;
        let pieces: Vec<_> = (0..5000).rev().map(|i| (base + i * 16, 16)).collect();
        let pid = std::process::id() as i32;
        assert_eq!(raw_read(pid, &pieces).unwrap().bytes, 80_000);
    }

    #[test]
    fn what_cannot_be_read_is_a_typed_error() {
        let pid = std::process::id() as i32;
        assert!(matches!(
            raw_read(pid, &[(8, 16)]),
            Err(BaselineError::Refused { .. })
        ));
        assert_eq!(raw_read(pid, &[]), Err(BaselineError::BadSize { bytes: 0 }));
        assert!(matches!(
            raw_read(pid, &[(8, u64::MAX), (8, 2)]),
            Err(BaselineError::BadSize { .. })
        ));
    }
}
