//! Which devices and transports UCX finds here: what `ucx_info -d` would say of the UCX that NIXL brings, which comes
//! without that tool.
//!
//! The context is made and printed by UCX itself. Loading UCX patches functions of libc and starts threads: probe in a
//! process of its own.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library as DynamicLibrary, RTLD_LOCAL, RTLD_NOW, Symbol};

use crate::probe::{self, ProbeError};

/// `UCP_PARAM_FIELD_FEATURES`.
const FIELD_FEATURES: u64 = 1;
/// `UCP_FEATURE_RMA`.
const FEATURE_RMA: u64 = 1 << 1;
/// `UCP_FEATURE_AM`.
const FEATURE_AM: u64 = 1 << 6;
/// `struct ucp_params` is some 100 bytes long in all versions; what is not announced is not read.
const PARAMS_WORDS: usize = 64;
/// The oldest UCX that NIXL works with has these functions.
const OLDEST: (u32, u32) = (1, 10);

/// A transport on a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct UcxResource {
    /// Transport: `tcp`, `cma`, `rc_mlx5`, `srd`, `cuda_ipc`, …
    pub transport: String,
    /// Device: `eth0`, `memory`, `mlx5_0:1`, …
    pub device: String,
}

impl UcxResource {
    /// A transport on a device.
    pub fn new(transport: &str, device: &str) -> Self {
        Self {
            transport: transport.to_owned(),
            device: device.to_owned(),
        }
    }
}

impl fmt::Display for UcxResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.transport, self.device)
    }
}

/// What UCX says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UcxReport {
    /// The file, or the name that the dynamic linker resolved.
    pub library: PathBuf,
    /// Its version.
    pub version: String,
    /// What it can use under the variables that this process has.
    pub resources: Vec<UcxResource>,
}

type GetVersion = unsafe extern "C" fn(*mut c_uint, *mut c_uint, *mut c_uint);
type ConfigRead = unsafe extern "C" fn(*const c_char, *const c_char, *mut *mut c_void) -> c_int;
type ConfigRelease = unsafe extern "C" fn(*mut c_void);
type InitVersion =
    unsafe extern "C" fn(c_uint, c_uint, *const u64, *const c_void, *mut *mut c_void) -> c_int;
type Cleanup = unsafe extern "C" fn(*mut c_void);
type PrintInfo = unsafe extern "C" fn(*const c_void, *mut libc::FILE);

/// The `libucp` of an installation: beside NIXL in a wheel, else under the name by which the dynamic linker finds it.
pub fn ucx_library(ucx_modules_dir: Option<&Path>) -> PathBuf {
    let beside = ucx_modules_dir.and_then(Path::parent).and_then(|dir| {
        let mut names: Vec<PathBuf> = std::fs::read_dir(dir)
            .ok()?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| {
                let name = path.file_name().and_then(|name| name.to_str());
                name.is_some_and(|name| name.starts_with("libucp") && name.contains(".so"))
            })
            .collect();
        names.sort();
        names.into_iter().next()
    });
    beside.unwrap_or_else(|| PathBuf::from("libucp.so.0"))
}

/// Opens UCX and asks what it can use. `library` is the file of libucp, or a bare name to be searched for as the dynamic
/// linker does. UCX reads its variables from the environment: what `UCX_TLS` forbids is not listed.
///
/// It stays loaded until the process ends. Opening it runs its initialisers, so it must be as trusted as the program.
///
/// # Errors
/// [`ProbeError`]; [`ProbeError::Failed`] of `ucp_init_version` when UCX has no transport that it may use.
pub fn ucx(library: &Path) -> Result<UcxReport, ProbeError> {
    if library.components().count() > 1 {
        probe::refuse_other_files(library)?;
    }
    // SAFETY: this runs the initialisers of UCX, which touch nothing of Rust's; that the path is to be trusted is what the
    // caller answers for.
    let handle = unsafe { DynamicLibrary::open(Some(library), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| probe::not_loaded(library, &error))?;
    // Never closed: UCX has threads and patched functions of libc.
    let handle = std::mem::ManuallyDrop::new(handle);
    let lacks = |function| ProbeError::MissingFunction {
        library: library.to_path_buf(),
        function,
    };
    // SAFETY: UCX has had this function with this type since 1.0.
    let get_version: Symbol<GetVersion> =
        unsafe { handle.get(b"ucp_get_version\0") }.map_err(|_| lacks("ucp_get_version"))?;
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: it writes one number to each of the three places.
    unsafe { get_version(&raw mut major, &raw mut minor, &raw mut release) };
    let version = format!("{major}.{minor}.{release}");
    if (major, minor) < OLDEST {
        return Err(ProbeError::TooOld {
            library: library.to_path_buf(),
            found: version,
            needed: format!("{}.{}", OLDEST.0, OLDEST.1),
        });
    }
    // SAFETY: UCX has had these functions with these types since 1.0.
    let config_read: Symbol<ConfigRead> =
        unsafe { handle.get(b"ucp_config_read\0") }.map_err(|_| lacks("ucp_config_read"))?;
    // SAFETY: as above.
    let config_release: Symbol<ConfigRelease> =
        unsafe { handle.get(b"ucp_config_release\0") }.map_err(|_| lacks("ucp_config_release"))?;
    // SAFETY: as above.
    let init: Symbol<InitVersion> =
        unsafe { handle.get(b"ucp_init_version\0") }.map_err(|_| lacks("ucp_init_version"))?;
    // SAFETY: as above.
    let cleanup: Symbol<Cleanup> =
        unsafe { handle.get(b"ucp_cleanup\0") }.map_err(|_| lacks("ucp_cleanup"))?;
    // SAFETY: as above.
    let print_info: Symbol<PrintInfo> = unsafe { handle.get(b"ucp_context_print_info\0") }
        .map_err(|_| lacks("ucp_context_print_info"))?;
    let failed = |function, status| ProbeError::Failed {
        library: library.to_path_buf(),
        function,
        status,
    };

    let mut config = ptr::null_mut();
    // SAFETY: null stands for "no prefix" and "no file"; `config` is where the answer goes.
    let status = unsafe { config_read(ptr::null(), ptr::null(), &raw mut config) };
    if status != 0 {
        return Err(failed("ucp_config_read", status));
    }
    let mut params = [0_u64; PARAMS_WORDS];
    {
        let [fields, features, ..] = &mut params;
        *fields = FIELD_FEATURES;
        *features = FEATURE_RMA | FEATURE_AM;
    }
    let mut context = ptr::null_mut();
    // SAFETY: the first two words of the parameters are the field mask and the features, and the mask says that nothing
    // else of them is to be read; the configuration is UCX's own; `context` is where the answer goes.
    let status = unsafe { init(major, minor, params.as_ptr(), config, &raw mut context) };
    // SAFETY: the configuration is UCX's own and not used again.
    unsafe { config_release(config) };
    if status != 0 {
        return Err(failed("ucp_init_version", status));
    }
    // SAFETY: the context is live.
    let text = unsafe { printed(|file| print_info(context, file)) };
    // SAFETY: the context is live and not used again.
    unsafe { cleanup(context) };
    let text = text.ok_or_else(|| failed("open_memstream", -1))?;
    Ok(UcxReport {
        library: library.to_path_buf(),
        version,
        resources: resources(&text),
    })
}

/// What is printed to a file of the C library's; `None` when there is no memory for it.
///
/// # Safety
///
/// `print` does nothing with the file but write to it.
unsafe fn printed(print: impl FnOnce(*mut libc::FILE)) -> Option<String> {
    let mut buffer: *mut c_char = ptr::null_mut();
    let mut len = 0_usize;
    // SAFETY: both places live until after the file is closed.
    let file = unsafe { libc::open_memstream(&raw mut buffer, &raw mut len) };
    if file.is_null() {
        return None;
    }
    print(file);
    // SAFETY: the file is open, and this is its last use. It sets `buffer` and `len`.
    unsafe { libc::fclose(file) };
    if buffer.is_null() {
        return None;
    }
    // SAFETY: the C library says that `len` bytes are there.
    let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) };
    let text = String::from_utf8_lossy(bytes).into_owned();
    // SAFETY: the buffer came from `open_memstream`, which has it freed by its user; nothing refers to it any more.
    unsafe { libc::free(buffer.cast()) };
    Some(text)
}

/// Finds the lines `# resource 1 : md 1 dev 1 flags -- tcp/eth0`.
fn resources(text: &str) -> Vec<UcxResource> {
    let mut found = Vec::new();
    for line in text.lines() {
        let line = line.trim_start_matches(['#', ' ']);
        let Some(last) = line
            .strip_prefix("resource ")
            .and_then(|rest| rest.split_whitespace().next_back())
        else {
            continue;
        };
        if let Some((transport, device)) = last.split_once('/') {
            found.push(UcxResource::new(transport, device));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_found_in_what_ucx_prints() {
        let text = "#\n# UCP context\n#\n#     component 1  :  tcp\n#            md 1  :  component 1  tcp \n#\n\
                    #      resource 0  :  md 0  dev 0  flags -- self/memory\n\
                    #      resource 1  :  md 1  dev 1  flags -- tcp/eth0\n\
                    #      resource 7  :  md 5  dev 3  flags s- rc_mlx5/mlx5_0:1\n\
                    #      resource 8  :\n";
        let names: Vec<String> = resources(text).iter().map(ToString::to_string).collect();
        assert_eq!(names, ["self/memory", "tcp/eth0", "rc_mlx5/mlx5_0:1"]);
    }

    #[test]
    fn the_ucx_of_a_wheel_is_beside_its_modules() {
        let wheel = tempfile::tempdir().unwrap();
        let modules = wheel.path().join("ucx");
        std::fs::create_dir(&modules).unwrap();
        assert_eq!(ucx_library(Some(&modules)), Path::new("libucp.so.0"));
        let library = wheel.path().join("libucp-1a2b.so.0.0.0");
        std::fs::write(&library, "").unwrap();
        assert_eq!(ucx_library(Some(&modules)), library);
        assert_eq!(ucx_library(None), Path::new("libucp.so.0"));
    }
}
