//! The stand-in for the CUDA driver, compiled and loaded: what is tested with it is our own logic, not a GPU.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::panic)]

use std::ffi::{c_int, c_long};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock};

/// The tests of a file share one "driver" and count what is in it: one goes at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Compiles C code as the CUDA driver. `None`, with a word on stderr, where there is no C compiler.
pub fn compile(name: &str, code: &str) -> Option<PathBuf> {
    let dir =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (source, library) = (dir.join("stub.c"), dir.join("libcuda.so"));
    std::fs::write(&source, code).unwrap();
    let built = Command::new("cc")
        .args([
            "-std=c11",
            "-O1",
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            "-pthread",
        ])
        // By this name it is found again by whoever opens the driver in this process.
        .args(["-Wl,-soname,libcuda.so", "-o"])
        .args([&library, &source])
        .status();
    match built {
        Ok(status) if status.success() => Some(library),
        Ok(status) => panic!("cc: {status}"),
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "skipped: no C compiler to make a stand-in for CUDA with ({error})"
            );
            None
        }
    }
}

/// The stand-in's own functions.
pub struct Stub {
    library: libloading::Library,
}

/// Compiles and loads the stand-in, before anybody looks for the driver.
pub fn stub() -> Option<&'static Stub> {
    static STUB: OnceLock<Option<Stub>> = OnceLock::new();
    STUB.get_or_init(|| {
        let path = compile("cuda", include_str!("stub.c"))?;
        // SAFETY: the library has no initialisers.
        let library = unsafe { libloading::Library::new(&path) }.unwrap();
        let _ = std::fs::remove_dir_all(path.parent().unwrap());
        Some(Stub { library })
    })
    .as_ref()
}

impl Stub {
    fn count(&self, name: &str) -> c_long {
        // SAFETY: a function of the stand-in with this signature.
        unsafe {
            self.library
                .get::<unsafe extern "C" fn() -> c_long>(name)
                .unwrap()()
        }
    }

    /// Contexts on this thread's stack.
    pub fn depth(&self) -> c_int {
        // SAFETY: a function of the stand-in with this signature.
        unsafe {
            self.library
                .get::<unsafe extern "C" fn() -> c_int>("stub_depth")
                .unwrap()()
        }
    }

    /// Allocations and reservations that have not been given back.
    pub fn live_allocations(&self) -> c_long {
        self.count("stub_live_allocations")
    }

    /// Memory by hand that has not been given back.
    pub fn live_handles(&self) -> c_long {
        self.count("stub_live_handles")
    }

    /// Flushes of what NICs have written.
    pub fn flushes(&self) -> c_long {
        self.count("stub_flushes")
    }

    /// Whether the last memory by hand was asked for as one that NICs can reach.
    pub fn last_rdma(&self) -> bool {
        // SAFETY: a function of the stand-in with this signature.
        unsafe {
            self.library
                .get::<unsafe extern "C" fn() -> c_int>("stub_last_rdma")
                .unwrap()()
                != 0
        }
    }

    /// Overrides a device attribute; `None` takes that back.
    pub fn set_attribute(&self, attribute: c_int, value: Option<c_int>) {
        let function = "stub_set_attribute";
        // SAFETY: a function of the stand-in with this signature.
        unsafe {
            self.library
                .get::<unsafe extern "C" fn(c_int, c_int)>(function)
                .unwrap()(attribute, value.map_or(0, |value| value + 1));
        }
    }

    /// Has every question about an event fail with this code; 0 takes that back.
    pub fn lose_events(&self, code: c_int) {
        // SAFETY: a function of the stand-in with this signature.
        unsafe {
            self.library
                .get::<unsafe extern "C" fn(c_int)>("stub_lose_events")
                .unwrap()(code)
        }
    }
}
