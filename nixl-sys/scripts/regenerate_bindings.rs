//! Writes `src/bindings.rs` from `include/nixl_capi.h`, or with `--check` tells whether the two agree.
//!
//! Run through `scripts/regenerate-bindings.sh`, which sees to libclang.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(message) => {
            eprintln!("{message}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String, String> {
    let check = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--check") => true,
        Some(other) => {
            return Err(format!(
                "unknown argument `{other}`: pass --check or nothing"
            ));
        }
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target: PathBuf = root.join("src/bindings.rs");
    let fresh = generate(&root.join("include/nixl_capi.h"))?;

    if check {
        let present = std::fs::read_to_string(&target).map_err(|e| format!("{target:?}: {e}"))?;
        if present != fresh {
            return Err("src/bindings.rs is not what include/nixl_capi.h gives: \
                        run nixl-sys/scripts/regenerate-bindings.sh and commit the result"
                .into());
        }
        return Ok("src/bindings.rs is up to date".into());
    }
    std::fs::write(&target, fresh).map_err(|e| format!("{target:?}: {e}"))?;
    Ok("src/bindings.rs written".into())
}

fn generate(header: &Path) -> Result<String, String> {
    // Pinned, so that the output depends on neither the compiler nor the machine that runs this.
    let rust = bindgen::RustTarget::stable(85, 0).map_err(|e| e.to_string())?;
    bindgen::Builder::default()
        .header(header.to_string_lossy())
        .clang_arg("--target=x86_64-unknown-linux-gnu")
        .rust_target(rust)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .allowlist_item("nixl_capi_.*|NIXL_CAPI_.*")
        .dynamic_library_name("NixlCapi")
        .dynamic_link_require_all(false)
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .wrap_unsafe_ops(true)
        .use_core()
        .disable_header_comment()
        .raw_line("// Generated from include/nixl_capi.h by scripts/regenerate-bindings.sh; not edited by hand.")
        .generate_comments(false)
        .formatter(bindgen::Formatter::Rustfmt)
        .generate()
        .map(|bindings| bindings.to_string())
        .map_err(|e| e.to_string())
}
