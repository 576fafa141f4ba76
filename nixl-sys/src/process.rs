//! What is already in this process.

use std::path::{Path, PathBuf};

/// Files mapped into this process whose names start with one of `prefixes`.
///
/// Empty where `/proc` cannot be read: then nothing is known, and nothing is claimed.
pub(crate) fn mapped_libraries(prefixes: &[&str]) -> Vec<PathBuf> {
    match std::fs::read_to_string("/proc/self/maps") {
        Ok(maps) => libraries_in(&maps, prefixes),
        Err(_) => Vec::new(),
    }
}

fn libraries_in(maps: &str, prefixes: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in maps.lines() {
        let Some(start) = line.find('/') else {
            continue;
        };
        let path = Path::new(line[start..].trim_end_matches(" (deleted)"));
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else {
            continue;
        };
        if prefixes.iter().any(|p| name.starts_with(p)) && !found.iter().any(|f| f == path) {
            found.push(path.to_path_buf());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_library_is_named_once() {
        let maps = "7f00-7f01 r--p 00000000 fe:00 1 /opt/nixl/libnixl.so\n\
                    7f01-7f02 r-xp 00001000 fe:00 1 /opt/nixl/libnixl.so\n\
                    7f02-7f03 r-xp 00001000 fe:00 2 /old dir/libucs-1.so.0 (deleted)\n\
                    7f03-7f04 rw-p 00000000 00:00 0 [heap]\n\
                    7f04-7f05 r-xp 00001000 fe:00 3 /usr/lib/libc.so.6\n";
        assert_eq!(
            libraries_in(maps, &["libnixl.so", "libucs"]),
            [
                PathBuf::from("/opt/nixl/libnixl.so"),
                PathBuf::from("/old dir/libucs-1.so.0")
            ]
        );
    }
}
