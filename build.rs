//! Finds the NIXL runtime that the tool, its tests and its benches load, or installs the pinned wheel
//! under the target folder, and tells them where it is:
//!
//! - `KVX_NIXL_LIB_DIR`: the folder of `libnixl_capi.so`, empty when there is none;
//! - `KVX_NIXL_FOUND_VERSION`: its version as far as it is known;
//! - `KVX_NIXL_SEARCH`: where was looked, and what was found there, separated by tabs;
//! - `KVX_NIXL_HELP`: the one command that helps where nothing was found.
//!
//! A build without NIXL succeeds; the tool then says at run time what is missing.

#[path = "build/locate.rs"]
mod locate;
#[path = "build/tool.rs"]
mod tool;
#[path = "build/wheel.rs"]
mod wheel;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use locate::{Found, find_in};
use wheel::{PINS, Pin};

/// Where NIXL's own installers put it.
const PREFIXES: &[&str] = &["/opt/nvidia/nvda_nixl", "/usr/local/nixl"];

/// Prints the folders that Python imports packages from.
const SITE_PACKAGES: &str = "
import site, sys, sysconfig
paths = [sysconfig.get_path('platlib'), sysconfig.get_path('purelib'), site.getusersitepackages()]
getsite = getattr(site, 'getsitepackages', None)
paths += getsite() if getsite else []
stdlib = sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib')
paths += [p for p in sys.path if p not in stdlib and not p.endswith(('lib-dynload', '.zip'))]
print('\\n'.join(dict.fromkeys(p for p in paths if p)))
";

fn main() -> ExitCode {
    for file in [
        "build.rs",
        "build/locate.rs",
        "build/tool.rs",
        "build/wheel.rs",
    ] {
        println!("cargo:rerun-if-changed={file}");
    }
    for name in [
        "KVX_NIXL_DIR",
        "NIXL_PREFIX",
        "KVX_NIXL_VERSION",
        "VIRTUAL_ENV",
    ] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let wanted = variable("KVX_NIXL_VERSION");
    let pin = match &wanted {
        None => PINS.first(),
        Some(version) => PINS.iter().find(|pin| pin.version == version),
    };
    let Some(pin) = pin else {
        let known: Vec<_> = PINS.iter().map(|pin| pin.version).collect();
        eprintln!(
            "KVX_NIXL_VERSION={} is not a supported NIXL version; use one of {} or unset it",
            wanted.unwrap_or_default(),
            known.join(", ")
        );
        return ExitCode::FAILURE;
    };
    let mut search = Search {
        wanted,
        log: Vec::new(),
    };
    let found = search.run(pin);
    report(&search, found.as_ref(), pin);
    ExitCode::SUCCESS
}

/// An environment variable that is set and not empty.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

struct Search {
    /// The version that was asked for.
    wanted: Option<String>,
    /// A line for each place that was looked at in vain.
    log: Vec<String>,
}

impl Search {
    fn run(&mut self, pin: &Pin) -> Option<Found> {
        if let Some(dir) = variable("KVX_NIXL_DIR") {
            // Said in so many words: taken as it is, and never replaced by something else.
            return self.explicit(Path::new(&dir));
        }
        if let Some(prefix) = variable("NIXL_PREFIX") {
            let found = self.place("NIXL_PREFIX", Path::new(&prefix));
            if found.is_some() {
                return found;
            }
            println!(
                "cargo:warning=NIXL_PREFIX={prefix} is passed over: {}",
                self.last()
            );
        }
        PREFIXES
            .iter()
            .find_map(|prefix| self.place("install prefix", Path::new(prefix)))
            .or_else(|| self.site_packages())
            .or_else(|| self.installed(pin))
    }

    fn explicit(&mut self, dir: &Path) -> Option<Found> {
        let Some(found) = find_in(dir) else {
            self.log.push(format!(
                "KVX_NIXL_DIR {}: no {} there (nothing else is tried while it is set)",
                dir.display(),
                locate::LIBRARY
            ));
            return None;
        };
        if let Some(wanted) = &self.wanted
            && !found.version.can_be(wanted)
        {
            println!(
                "cargo:warning=KVX_NIXL_DIR holds NIXL {}, not the {wanted} of KVX_NIXL_VERSION; \
                 the former is used",
                found.version
            );
        }
        Some(found)
    }

    /// Looks into one place; the version has to fit.
    fn place(&mut self, what: &str, root: &Path) -> Option<Found> {
        let why = match find_in(root) {
            None => "nothing there".to_owned(),
            Some(found) if !found.version.is_supported() => {
                format!("NIXL {} is older than 1.4", found.version)
            }
            Some(found) => match &self.wanted {
                Some(wanted) if !found.version.can_be(wanted) => {
                    format!("NIXL {}, but {wanted} was asked for", found.version)
                }
                _ => return Some(found),
            },
        };
        self.log.push(format!("{what} {}: {why}", root.display()));
        None
    }

    fn site_packages(&mut self) -> Option<Found> {
        let output = Command::new("python3").args(["-c", SITE_PACKAGES]).output();
        let paths = match output {
            Ok(output) if output.status.success() => output.stdout,
            Ok(output) => {
                self.log.push(format!(
                    "Python site-packages: python3 failed ({})",
                    output.status
                ));
                return None;
            }
            Err(error) => {
                self.log.push(format!(
                    "Python site-packages: cannot run python3 ({error})"
                ));
                return None;
            }
        };
        String::from_utf8_lossy(&paths)
            .lines()
            .map(PathBuf::from)
            .filter(|path| path.is_dir())
            .find_map(|path| self.place("Python site-packages", &path))
    }

    fn installed(&mut self, pin: &Pin) -> Option<Found> {
        let arch = variable("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
        let target = target_dir()?.join("nixl");
        let place = format!("pinned wheel {} under {}", pin.version, target.display());
        match wheel::install(pin, &arch, &target) {
            Ok(dir) => {
                let found = find_in(&dir);
                if found.is_none() {
                    self.log
                        .push(format!("{place}: the wheel holds no {}", locate::LIBRARY));
                }
                found
            }
            Err(why) => {
                self.log.push(format!("{place}: {why}"));
                None
            }
        }
    }

    fn last(&self) -> &str {
        self.log.last().map_or("", String::as_str)
    }
}

/// The target folder that the build's output folder lies in: the one that Cargo tags as a cache.
fn target_dir() -> Option<PathBuf> {
    let out = PathBuf::from(variable("OUT_DIR")?);
    out.ancestors()
        .find(|dir| dir.join("CACHEDIR.TAG").is_file())
        // <target>/<profile>/build/<package>/out
        .or_else(|| out.ancestors().nth(4))
        .map(Path::to_path_buf)
}

fn report(search: &Search, found: Option<&Found>, pin: &Pin) {
    let (dir, version) = match found {
        Some(found) => (found.dir.display().to_string(), found.version.to_string()),
        None => (String::new(), String::new()),
    };
    match found {
        Some(found) => {
            // A library that goes away makes Cargo run this again.
            let library = found.dir.join(locate::LIBRARY);
            println!("cargo:rerun-if-changed={}", library.display());
        }
        None => {
            // A file that never is: look again at the next build.
            println!("cargo:rerun-if-changed=build/no-nixl-found");
            println!(
                "cargo:warning=no NIXL runtime found ({}); the build goes on, `kvx` and its tests \
                 will not. What helps: {}",
                search.last(),
                wheel::command_that_helps(pin)
            );
        }
    }
    println!("cargo:rustc-env=KVX_NIXL_LIB_DIR={dir}");
    println!("cargo:rustc-env=KVX_NIXL_FOUND_VERSION={version}");
    println!(
        "cargo:rustc-env=KVX_NIXL_SEARCH={}",
        search.log.join("\t").replace('\n', " ")
    );
    println!(
        "cargo:rustc-env=KVX_NIXL_HELP={}",
        wheel::command_that_helps(pin)
    );
}
