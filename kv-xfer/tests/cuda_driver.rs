//! Machines without a CUDA driver, and with one that is too old: typed errors, no panic.
#![allow(missing_docs, clippy::unwrap_used)]

mod cuda_common;

use std::io::Write;
use std::process::Command;

use cuda_common::compile;
use kv_xfer::memory::cuda::{CudaDevice, CudaError, CudaMemory, CudaOptions};

#[test]
fn a_machine_without_cuda_gets_a_typed_error() {
    match CudaDevice::count() {
        Err(error @ CudaError::NoDriver) => {
            let text = error.to_string();
            assert!(
                text.contains("libcuda.so.1") && text.contains("host memory"),
                "{text}"
            );
            // The same again, and from every way in.
            assert_eq!(CudaDevice::open(0).unwrap_err(), CudaError::NoDriver);
            assert_eq!(CudaDevice::driver_version(), Err(CudaError::NoDriver));
            let refused = CudaMemory::new(4096, &CudaOptions::on(0)).unwrap_err();
            assert_eq!(refused, CudaError::NoDriver);
        }
        found => {
            let _ = writeln!(
                std::io::stderr(),
                "skipped: this machine has a CUDA driver ({found:?})"
            );
        }
    }
}

/// Runs one of the tests below in a process of its own: a driver is loaded once.
fn alone(name: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_driver_that_lacks_a_function_is_named() {
    alone("old_driver");
}

#[test]
#[ignore = "run by the test above, in a process of its own"]
fn old_driver() {
    let code = "__attribute__((visibility(\"default\"))) int cuInit(unsigned f) { return f; }";
    let Some(path) = compile("old", code) else {
        return;
    };
    // SAFETY: the library has no initialisers.
    let library = unsafe { libloading::Library::new(path) }.unwrap();
    let error = CudaDevice::count().unwrap_err();
    assert!(
        matches!(error, CudaError::LacksFunction { name } if name.starts_with("cu")),
        "{error}"
    );
    assert!(error.to_string().contains("CUDA 12"), "{error}");
    drop(library);
}

#[test]
fn a_driver_without_gpus_is_told_from_none() {
    alone("no_gpus");
}

#[test]
#[ignore = "run by the test above, in a process of its own"]
fn no_gpus() {
    let stub = include_str!("cuda_common/stub.c");
    let code = stub.replace(
        "{ return flags == 0 ? OK : INVALID_VALUE; }",
        "{ (void)flags; return 100; }",
    );
    assert_ne!(code, stub);
    let Some(path) = compile("none", &code) else {
        return;
    };
    // SAFETY: the library has no initialisers.
    let library = unsafe { libloading::Library::new(path) }.unwrap();
    assert_eq!(CudaDevice::count(), Err(CudaError::NoDevice));
    assert!(
        CudaError::NoDevice
            .to_string()
            .contains("CUDA_VISIBLE_DEVICES")
    );
    drop(library);
}
