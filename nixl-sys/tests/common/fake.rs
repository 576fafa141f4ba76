//! Libraries that look like NIXL, made from the header.
//!
//! Every function writes something to each of its results, remembers that it was called, and succeeds, unless a test
//! leaves it out or replaces it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

const PREAMBLE: &str = r#"
#include <stdlib.h>
#include <string.h>
#include "nixl_capi.h"

static const char *last_call = "none";
const char *fake_last_call(void) { return last_call; }
static long object[8];
"#;

/// One declaration of the header.
pub struct Declaration {
    pub name: String,
    pub text: String,
    arguments: Vec<String>,
}

/// All declarations of the header.
pub fn declarations() -> Vec<Declaration> {
    let header = include_str!("../../include/nixl_capi.h");
    let mut code = String::new();
    let mut rest = header;
    while let Some((before, comment)) = rest.split_once("/*") {
        code.push_str(before);
        rest = comment.split_once("*/").unwrap().1;
    }
    code.push_str(rest);

    let code: Vec<&str> = code.split_whitespace().collect();
    let code = code.join(" ");
    code.split(';')
        .filter_map(|statement| {
            let text = statement.trim();
            let (head, arguments) = text.strip_suffix(')')?.split_once('(')?;
            let (_, name) = head.rsplit_once(' ')?;
            if !name.starts_with("nixl_capi_") {
                return None;
            }
            let text = text[text.find(if name == "nixl_capi_is_stub" {
                "bool"
            } else {
                "nixl_capi_status_t"
            })?..]
                .to_owned();
            let arguments = arguments.split(',').map(|a| a.trim().to_owned()).collect();
            Some(Declaration {
                name: name.to_owned(),
                text,
                arguments,
            })
        })
        .collect()
}

impl Declaration {
    fn definition(&self) -> String {
        let mut body = format!("last_call = \"{}\";", self.name);
        for argument in &self.arguments {
            body.push_str(&fill(argument));
        }
        let result = if self.name == "nixl_capi_is_stub" {
            "false"
        } else {
            "NIXL_CAPI_SUCCESS"
        };
        format!("{} {{ {body} return {result}; }}\n", self.text)
    }
}

/// What the fake writes behind an argument: 4 for numbers, "text" for strings and bytes, a live object for handles.
fn fill(argument: &str) -> String {
    let Some(at) = argument.rfind(['*', ' ']) else {
        return String::new();
    };
    let (ty, name) = argument.split_at(at + 1);
    match ty.trim() {
        "nixl_capi_mem_type_t *" => format!("*{name} = NIXL_CAPI_MEM_VRAM;"),
        "nixl_capi_cost_t *" | "size_t *" | "int64_t *" => format!("*{name} = 4;"),
        "bool *" => format!("*{name} = true;"),
        "const char **" | "const void **" => format!("*{name} = \"text\";"),
        "char **" => format!("*{name} = strdup(\"text\");"),
        "void **" => format!("*{name} = strdup(\"text\");"),
        "nixl_capi_xfer_telemetry_t" => {
            format!(
                "{name}->start_time_us = 1; {name}->post_duration_us = 2; {name}->xfer_duration_us = 3; {name}->total_bytes = 4; {name}->desc_count = 5;"
            )
        }
        handle if handle.starts_with("nixl_capi_") && handle.ends_with("_t *") => {
            format!("*{name} = (void *)object;")
        }
        _ => String::new(),
    }
}

/// An installation with a fake library, laid out like a wheel.
pub struct Fake {
    omitted: BTreeSet<String>,
    extra: String,
}

impl Fake {
    pub fn complete() -> Self {
        Self {
            omitted: BTreeSet::new(),
            extra: String::new(),
        }
    }

    pub fn without(mut self, functions: &[&str]) -> Self {
        self.omitted
            .extend(functions.iter().map(|f| (*f).to_owned()));
        self
    }

    /// Replaces one function by the given C code.
    pub fn with(self, function: &str, code: &str) -> Self {
        let mut fake = self.without(&[function]);
        fake.extra.push_str(code);
        fake
    }

    /// Adds C code.
    pub fn adding(mut self, code: &str) -> Self {
        self.extra.push_str(code);
        self
    }

    /// Compiles it into a folder of its own.
    pub fn install(self) -> Installation {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let installation = Installation { root, _dir: dir };
        for folder in [
            installation.library_dir(),
            installation.plugins(),
            installation.ucx_modules(),
        ] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::create_dir(installation.root.join("nixl_cu12-9.8.7.dist-info")).unwrap();
        std::fs::write(installation.plugins().join("libplugin_UCX.so"), "").unwrap();
        std::fs::write(installation.ucx_modules().join("libuct_cma.so.0"), "").unwrap();

        let mut code = PREAMBLE.to_owned();
        for declaration in declarations() {
            if !self.omitted.contains(&declaration.name) {
                code.push_str(&declaration.definition());
            }
        }
        code.push_str(&self.extra);
        compile(&code, &installation.library());
        installation
    }
}

pub struct Installation {
    pub root: PathBuf,
    _dir: TempDir,
}

impl Installation {
    pub fn library_dir(&self) -> PathBuf {
        self.root.join(".nixl_cu12.mesonpy.libs")
    }

    pub fn library(&self) -> PathBuf {
        self.library_dir().join("libnixl_capi.so")
    }

    pub fn plugins(&self) -> PathBuf {
        self.library_dir().join("plugins")
    }

    pub fn ucx_modules(&self) -> PathBuf {
        self.root.join("nixl_cu12.libs/ucx")
    }
}

/// Compiles C code into a shared library.
pub fn compile(code: &str, library: &Path) {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let source = library.with_extension("c");
    std::fs::write(&source, code).unwrap();
    let output = cc::Build::new()
        .target(&target)
        .host(&target)
        .opt_level(0)
        .out_dir(library.parent().unwrap())
        .cargo_metadata(false)
        .get_compiler()
        .to_command()
        .args(["-shared", "-fPIC", "-Wno-unused-parameter", "-Werror", "-I"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/include"))
        .arg("-o")
        .args([library, &source])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    std::fs::remove_file(source).unwrap();
}
