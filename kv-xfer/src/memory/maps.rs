//! What the kernel says is mapped in this process.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use thiserror::Error;

/// Why the process's mappings could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MapsError {
    /// The file could not be read.
    #[error("cannot read /proc/self/maps; mount /proc")]
    Io(#[from] io::Error),
    /// A line has an unknown form.
    #[error("/proc/self/maps has a line of unknown form: {line:?}; report this as a bug")]
    Line {
        /// The line.
        line: String,
    },
}

/// First address after `addr` that is not mapped readable and writable; `addr` itself when it is not.
pub(super) fn mapped_until(addr: u64) -> Result<u64, MapsError> {
    mapped_until_in(BufReader::new(File::open("/proc/self/maps")?), addr)
}

fn mapped_until_in(maps: impl BufRead, addr: u64) -> Result<u64, MapsError> {
    let mut until = addr;
    // Lines are sorted by address.
    for line in maps.lines() {
        let line = line?;
        let Some((start, end, usable)) = parse(&line) else {
            return Err(MapsError::Line { line });
        };
        if end <= until {
            continue;
        }
        if start > until || !usable {
            break;
        }
        until = end;
    }
    Ok(until)
}

/// Start, end and whether readable and writable.
fn parse(line: &str) -> Option<(u64, u64, bool)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    Some((
        u64::from_str_radix(start, 16).ok()?,
        u64::from_str_radix(end, 16).ok()?,
        permissions.starts_with("rw"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "1000-3000 rw-p 00000000 00:00 0 \n\
                        3000-4000 rw-s 00000000 00:00 0 [heap]\n\
                        4000-5000 r--p 00000000 00:00 0 \n\
                        8000-9000 rw-p 00000000 00:00 0 \n";

    #[test]
    fn neighbours_are_joined_and_holes_end_it() {
        let until = |addr| mapped_until_in(MAPS.as_bytes(), addr).unwrap();
        assert_eq!(until(0x0), 0x0);
        assert_eq!(until(0x1000), 0x4000);
        assert_eq!(until(0x3fff), 0x4000);
        assert_eq!(until(0x4000), 0x4000);
        assert_eq!(until(0x8800), 0x9000);
        assert_eq!(until(0xa000), 0xa000);
    }

    #[test]
    fn unknown_lines_are_typed_errors() {
        for text in ["x\n", "1000 rw-p\n", "1000-zz rw-p\n", "1000-2000\n"] {
            assert!(matches!(
                mapped_until_in(text.as_bytes(), 0x1000),
                Err(MapsError::Line { .. })
            ));
        }
    }

    #[test]
    fn the_stack_is_mapped() {
        let here = 0u64;
        let addr = std::ptr::from_ref(&here).addr() as u64;
        assert!(mapped_until(addr).unwrap() > addr);
    }
}
