//! Which providers libfabric offers here: what `fi_info` prints.
//!
//! libfabric is opened at run time and is the library whose file is named, not the one that NIXL's LIBFABRIC plugin would
//! take. Its providers run their own initialisers, some of them beside those of UCX: probe in a process of its own where
//! that could hurt.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library as DynamicLibrary, RTLD_LOCAL, RTLD_NOW, Symbol};

use crate::probe::{self, ProbeError};
use crate::process::mapped_libraries;

/// Name under which the dynamic linker finds libfabric.
pub const LIBFABRIC_NAME: &str = "libfabric.so.1";
/// Interface version that is asked for: old enough for every libfabric that NIXL can use.
const API: Version = Version { major: 1, minor: 9 };
/// More answers than any machine has; a list that does not end is cut there.
const MOST_ENDPOINTS: usize = 65_536;
/// `-FI_ENODATA`: no provider has anything to offer.
const NO_DATA: c_int = -61;
/// `FI_BUS_PCI`.
const BUS_PCI: u32 = 1;

/// A version of libfabric or of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Before the dot.
    pub major: u16,
    /// After it.
    pub minor: u16,
}

impl Version {
    fn from_raw(raw: u32) -> Self {
        let [a, b, c, d] = raw.to_be_bytes();
        Self {
            major: u16::from_be_bytes([a, b]),
            minor: u16::from_be_bytes([c, d]),
        }
    }

    fn to_raw(self) -> u32 {
        u32::from(self.major) << 16 | u32::from(self.minor)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Something that libfabric can open.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct Provider {
    /// Provider: `efa`, `tcp`, `shm`, `verbs;ofi_rxm`, …
    pub provider: String,
    /// Fabric.
    pub fabric: String,
    /// Domain: the device, such as `rdmap85s0-rdm` or `eth0`.
    pub domain: String,
    /// Version of the provider.
    pub version: Version,
    /// The device behind it, where libfabric says it.
    pub nic: Option<Nic>,
}

/// A device behind a provider.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct Nic {
    /// Its name, such as `rdmap85s0`.
    pub name: String,
    /// PCI domain, bus, device and function, where it is on PCI.
    pub pci: Option<(u16, u8, u8, u8)>,
    /// Speed of the link, bits per second; 0 when it is not said.
    pub bits_per_second: u64,
}

/// What libfabric says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibfabricReport {
    /// The file, or the name that the dynamic linker resolved.
    pub library: PathBuf,
    /// The file that was loaded, as far as that can be told.
    pub file: Option<PathBuf>,
    /// Its own version.
    pub version: Version,
    /// What it offers, each once, in its own order of preference.
    pub providers: Vec<Provider>,
}

impl LibfabricReport {
    /// Those of one provider, also below a utility layer: `tcp` finds `tcp;ofi_rxm`.
    pub fn of<'a>(&'a self, provider: &'a str) -> impl Iterator<Item = &'a Provider> + 'a {
        self.providers
            .iter()
            .filter(move |p| p.provider.split(';').next() == Some(provider))
    }
}

/// The beginning of `struct fi_info`, the same since libfabric 1.0 but for `nic`, which came with 1.7.
#[repr(C)]
struct FiInfo {
    next: *mut FiInfo,
    caps: u64,
    mode: u64,
    addr_format: u32,
    src_addrlen: usize,
    dest_addrlen: usize,
    src_addr: *mut c_void,
    dest_addr: *mut c_void,
    handle: *mut c_void,
    tx_attr: *mut c_void,
    rx_attr: *mut c_void,
    ep_attr: *mut c_void,
    domain_attr: *const FiDomainAttr,
    fabric_attr: *const FiFabricAttr,
    nic: *const FidNic,
}

#[repr(C)]
struct FiFabricAttr {
    fabric: *mut c_void,
    name: *const c_char,
    prov_name: *const c_char,
    prov_version: u32,
    api_version: u32,
}

#[repr(C)]
struct FiDomainAttr {
    domain: *mut c_void,
    name: *const c_char,
}

#[repr(C)]
struct FidNic {
    /// `struct fid`: class, context, operations.
    fid: [usize; 3],
    device_attr: *const FiDeviceAttr,
    bus_attr: *const FiBusAttr,
    link_attr: *const FiLinkAttr,
}

#[repr(C)]
struct FiDeviceAttr {
    name: *const c_char,
}

#[repr(C)]
struct FiBusAttr {
    bus_type: u32,
    domain: u16,
    bus: u8,
    device: u8,
    function: u8,
}

#[repr(C)]
struct FiLinkAttr {
    address: *const c_char,
    mtu: usize,
    speed: usize,
}

type FiVersion = unsafe extern "C" fn() -> u32;
type FiGetinfo = unsafe extern "C" fn(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const FiInfo,
    info: *mut *mut FiInfo,
) -> c_int;
type FiFreeinfo = unsafe extern "C" fn(info: *mut FiInfo);

/// Opens libfabric and asks what it offers. `library` is its file, or a bare name to be searched for as the dynamic linker
/// does: [`LIBFABRIC_NAME`].
///
/// It stays loaded until the process ends: its providers cannot be unloaded. Opening it runs its initialisers and those
/// of its providers, so it must be as trusted as the program.
///
/// # Errors
/// [`ProbeError`], which tells a library that is missing from one that is something else.
pub fn libfabric(library: &Path) -> Result<LibfabricReport, ProbeError> {
    if library.components().count() > 1 {
        probe::refuse_other_files(library)?;
    }
    // SAFETY: this runs the initialisers of libfabric, which touch nothing of Rust's; that the path is to be trusted is
    // what the caller answers for.
    let handle = unsafe { DynamicLibrary::open(Some(library), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| probe::not_loaded(library, &error))?;
    // Never closed: providers start threads.
    let handle = std::mem::ManuallyDrop::new(handle);
    let lacks = |function| ProbeError::MissingFunction {
        library: library.to_path_buf(),
        function,
    };
    // SAFETY: libfabric has had this function with this type since 1.0.
    let fi_version: Symbol<FiVersion> =
        unsafe { handle.get(b"fi_version\0") }.map_err(|_| lacks("fi_version"))?;
    // SAFETY: as above.
    let fi_getinfo: Symbol<FiGetinfo> =
        unsafe { handle.get(b"fi_getinfo\0") }.map_err(|_| lacks("fi_getinfo"))?;
    // SAFETY: as above.
    let fi_freeinfo: Symbol<FiFreeinfo> =
        unsafe { handle.get(b"fi_freeinfo\0") }.map_err(|_| lacks("fi_freeinfo"))?;

    // SAFETY: it takes nothing and returns a number.
    let version = Version::from_raw(unsafe { fi_version() });
    if version < API {
        return Err(ProbeError::TooOld {
            library: library.to_path_buf(),
            found: version.to_string(),
            needed: API.to_string(),
        });
    }
    let mut list: *mut FiInfo = ptr::null_mut();
    // Without hints, every provider says all that it has.
    // SAFETY: null stands for "any" in all of these; `list` is where the answer goes.
    let status = unsafe {
        fi_getinfo(
            API.to_raw(),
            ptr::null(),
            ptr::null(),
            0,
            ptr::null(),
            &raw mut list,
        )
    };
    let mut providers = Vec::new();
    match status {
        0 => {
            let mut next: *const FiInfo = list;
            for _ in 0..MOST_ENDPOINTS {
                // SAFETY: `next` is null or an element of the list that libfabric has just made, which nobody changes. Its
                // layout is that of version 1.9 or newer, checked above.
                let Some(info) = (unsafe { next.as_ref() }) else {
                    break;
                };
                // SAFETY: the element is of that list.
                let provider = unsafe { describe(info) };
                if !providers.contains(&provider) {
                    providers.push(provider);
                }
                next = info.next;
            }
            if !list.is_null() {
                // SAFETY: the list is libfabric's, and nothing points into it any more.
                unsafe { fi_freeinfo(list) };
            }
        }
        NO_DATA => {}
        status => {
            return Err(ProbeError::Failed {
                library: library.to_path_buf(),
                function: "fi_getinfo",
                status,
            });
        }
    }
    Ok(LibfabricReport {
        library: library.to_path_buf(),
        file: loaded_file(library),
        version,
        providers,
    })
}

/// The file behind a name that the dynamic linker resolved.
fn loaded_file(library: &Path) -> Option<PathBuf> {
    if library.components().count() > 1 {
        return Some(library.to_path_buf());
    }
    mapped_libraries(&[library.to_str()?]).into_iter().next()
}

/// # Safety
///
/// `info` was returned by `fi_getinfo` and not freed yet.
unsafe fn describe(info: &FiInfo) -> Provider {
    // SAFETY: the attributes of an answer are null or valid until it is freed.
    let fabric = unsafe { info.fabric_attr.as_ref() };
    // SAFETY: as above.
    let domain = unsafe { info.domain_attr.as_ref() };
    // SAFETY: as above; `nic` is part of the structure since libfabric 1.7.
    let nic = unsafe { info.nic.as_ref() };
    Provider {
        // SAFETY: the strings of an answer are null or valid until it is freed.
        provider: fabric.map_or_else(String::new, |f| unsafe { text(f.prov_name) }),
        // SAFETY: as above.
        fabric: fabric.map_or_else(String::new, |f| unsafe { text(f.name) }),
        // SAFETY: as above.
        domain: domain.map_or_else(String::new, |d| unsafe { text(d.name) }),
        version: Version::from_raw(fabric.map_or(0, |f| f.prov_version)),
        // SAFETY: as above.
        nic: nic.map(|nic| unsafe { describe_nic(nic) }),
    }
}

/// # Safety
///
/// `nic` belongs to an answer that is not freed yet.
unsafe fn describe_nic(nic: &FidNic) -> Nic {
    // SAFETY: the attributes of a NIC are null or valid as long as it is.
    let device = unsafe { nic.device_attr.as_ref() };
    // SAFETY: as above.
    let bus = unsafe { nic.bus_attr.as_ref() };
    // SAFETY: as above.
    let link = unsafe { nic.link_attr.as_ref() };
    Nic {
        // SAFETY: as above.
        name: device.map_or_else(String::new, |d| unsafe { text(d.name) }),
        pci: bus
            .filter(|bus| bus.bus_type == BUS_PCI)
            .map(|bus| (bus.domain, bus.bus, bus.device, bus.function)),
        bits_per_second: link.map_or(0, |link| link.speed as u64),
    }
}

/// # Safety
///
/// `string` is null or a C string.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: it is a C string, as the caller promises, and is copied at once.
    unsafe { CStr::from_ptr(string) }
        .to_string_lossy()
        .into_owned()
}

/// The newest version of libfabric's symbols that a file names: for a library the newest that it offers, for a plugin the
/// newest that it needs. `None` when the file names none or cannot be read.
///
/// A plugin loads only if the library offers what it needs; the dynamic linker says so in a line that NIXL shows nobody.
pub fn fabric_symbols(file: &Path) -> Option<Version> {
    let bytes = std::fs::read(file).ok()?;
    newest_symbols(&bytes)
}

fn newest_symbols(bytes: &[u8]) -> Option<Version> {
    const NAME: &[u8] = b"FABRIC_1.";
    bytes
        .windows(NAME.len())
        .enumerate()
        .filter(|(_, window)| *window == NAME)
        .filter_map(|(at, _)| {
            let rest = bytes.get(at.checked_add(NAME.len())?..)?;
            let digits: Vec<u8> = rest
                .iter()
                .copied()
                .take(4)
                .take_while(u8::is_ascii_digit)
                .collect();
            let minor = std::str::from_utf8(&digits).ok()?.parse().ok()?;
            Some(Version { major: 1, minor })
        })
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_libfabric_writes_them() {
        assert_eq!(Version::from_raw(0x0002_0005).to_string(), "2.5");
        assert_eq!(Version { major: 1, minor: 9 }.to_raw(), 0x0001_0009);
        assert!(
            Version { major: 1, minor: 9 }
                < Version {
                    major: 1,
                    minor: 10
                }
        );
    }

    #[test]
    fn the_newest_symbol_version_counts() {
        let file = b"\x7fELF..FABRIC_1.0\0FABRIC_1.10\0FABRIC_1.9\0FABRIC_1.\0FABRIC_1";
        assert_eq!(newest_symbols(file).unwrap().to_string(), "1.10");
        assert_eq!(newest_symbols(b"nothing"), None);
        assert_eq!(
            newest_symbols(b"FABRIC_1.99999999"),
            Some(Version {
                major: 1,
                minor: 9999
            })
        );
    }
}
