//! Checks of the libraries, from what they have said.

use kv_xfer::fabric::{Carrier, Check, Devices, libfabric_release};

use super::probe::{Answers, LIBFABRIC_VARIABLE};

/// What every check of LIBFABRIC comes to where there is nothing that it could use.
const NOT_NEEDED: &str = "nothing without EFA; for EFA ";

/// The checks.
pub fn checks(answers: &Answers, devices: &Devices) -> Vec<Check> {
    vec![
        nixl(answers),
        ucx(answers),
        backend(answers, devices),
        libfabric(answers, devices),
        plugin(answers, devices),
    ]
}

fn nixl(answers: &Answers) -> Check {
    let needed = "NIXL 1.4 or newer, whole";
    match &answers.nixl {
        Ok(nixl) => {
            let mut found = format!("NIXL {} ({})", nixl.version, nixl.library.display());
            for finding in &nixl.findings {
                found.push_str("; ");
                found.push_str(finding);
            }
            Check::new("NIXL", found, needed, "", true)
        }
        Err(error) => {
            let fix = "pip install nixl-cu12, and KVX_NIXL_DIR=<the folder of libnixl_capi.so>";
            Check::new("NIXL", error.clone(), needed, fix, false)
        }
    }
}

fn ucx(answers: &Answers) -> Check {
    let needed = "the UCX that comes with NIXL, with a transport that it may use";
    match &answers.ucx {
        Ok(ucx) => {
            let names: Vec<String> = ucx
                .resources
                .iter()
                .map(|(transport, device)| format!("{transport}/{device}"))
                .collect();
            let found = format!("UCX {}: {}", ucx.version, names.join(", "));
            let any = ucx
                .resources
                .iter()
                .any(|(t, _)| Carrier::of_ucx(t).is_some());
            Check::new("UCX", found, needed, &variables_fix(), any)
        }
        Err(error) => Check::new("UCX", error.clone(), needed, &variables_fix(), false),
    }
}

/// What would help a UCX that finds nothing to use.
fn variables_fix() -> String {
    let set: Vec<String> = [
        "UCX_TLS",
        "UCX_NET_DEVICES",
        "UCX_MODULES",
        "UCX_MODULE_DIR",
    ]
    .into_iter()
    .filter_map(|name| Some(format!("{name}={}", std::env::var(name).ok()?)))
    .collect();
    match set.as_slice() {
        [] => "UCX_LOG_LEVEL=info kvx demo shows what it tries; reinstall NIXL if its ucx folder is not whole".to_owned(),
        set => format!("unset {}, or allow more with it", set.join(" and ")),
    }
}

fn backend(answers: &Answers, devices: &Devices) -> Check {
    let needed = "NIXL can make an agent with it";
    let Err(error) = &answers.backend else {
        return Check::new("UCX backend", "works".to_owned(), needed, "", true);
    };
    // Among what it may use there must be something that notices dead peers.
    let only_memory = devices.rdma.is_empty()
        && answers.ucx.as_ref().is_ok_and(|ucx| {
            let tcp = |(transport, _): &(String, String)| transport == "tcp";
            !ucx.resources.iter().any(tcp)
        });
    let fix = match only_memory {
        true if std::env::var_os("UCX_TLS").is_none() => {
            "ip link set lo up: without RDMA, UCX needs a network interface that is up, if only to notice dead peers"
                .to_owned()
        }
        _ => variables_fix(),
    };
    Check::new("UCX backend", error.clone(), needed, &fix, false)
}

/// A check that counts only where there is EFA; what would help is said all the same.
fn for_efa(name: &str, found: String, needed: &str, fix: &str, devices: &Devices) -> Check {
    let efa = devices.efa().next().is_some() || !devices.efa_without_driver.is_empty();
    Check {
        name: name.to_owned(),
        found,
        needed: if efa {
            needed.to_owned()
        } else {
            format!("{NOT_NEEDED}{needed}")
        },
        fix: fix.to_owned(),
        ok: !efa,
    }
}

fn libfabric(answers: &Answers, devices: &Devices) -> Check {
    const NAME: &str = "libfabric";
    let nixl = answers.nixl.as_ref().ok();
    let version = nixl.map_or("unknown", |nixl| nixl.version.as_str());
    let needs = nixl.and_then(|nixl| nixl.needs_fabric.as_deref());
    let (needed, fix) = match needs {
        Some(symbols) => {
            let (oldest, way_out) = libfabric_release(symbols);
            (
                format!(
                    "{oldest} (symbols FABRIC_{symbols}), for the LIBFABRIC plugin of NIXL {version}"
                ),
                way_out,
            )
        }
        None => (
            format!(
                "a NIXL with the LIBFABRIC plugin; NIXL {version} has none that names what it needs"
            ),
            "pip install nixl-cu12",
        ),
    };
    match &answers.libfabric {
        Err(error) => {
            let mut check = for_efa(NAME, error.clone(), &needed, fix, devices);
            // Somebody has named it, so it is meant to be used.
            if std::env::var_os(LIBFABRIC_VARIABLE).is_some() {
                check.ok = false;
            }
            check
        }
        Ok(libfabric) => {
            let symbols = libfabric.symbols.as_deref();
            let mut names: Vec<&str> = libfabric
                .providers
                .iter()
                .map(|(p, _, _)| p.as_str())
                .collect();
            names.sort_unstable();
            names.dedup();
            let found = format!(
                "libfabric {} (symbols up to {}): {}",
                libfabric.version,
                symbols.map_or_else(|| "unknown".to_owned(), |s| format!("FABRIC_{s}")),
                names.join(", ")
            );
            let efa = names.contains(&"efa");
            if !new_enough(symbols, needs) {
                return for_efa(NAME, found, &needed, fix, devices);
            }
            if efa || devices.efa().next().is_none() {
                return Check::new(NAME, found, &needed, "", true);
            }
            let fix = "install the libfabric of Amazon's EFA installer and put /opt/amazon/efa/lib \
                       in front of LD_LIBRARY_PATH; `fi_info -p efa` must list the devices";
            for_efa(NAME, found, "the provider efa", fix, devices)
        }
    }
}

/// Whether symbols `1.9` will do where `1.10` is needed: no.
fn new_enough(has: Option<&str>, needs: Option<&str>) -> bool {
    let minor = |version: &str| version.split_once('.')?.1.parse::<u32>().ok();
    match (has.and_then(minor), needs.and_then(minor)) {
        (Some(has), Some(needs)) => has >= needs,
        (_, None) => true,
        (None, Some(_)) => false,
    }
}

fn plugin(answers: &Answers, devices: &Devices) -> Check {
    const NAME: &str = "LIBFABRIC plugin";
    let needed = "it loads: libfabric, libcudart.so.12, libcuda.so.1 and libhwloc.so.15 are found";
    match &answers.plugin {
        Ok(()) => Check::new(NAME, "loads".to_owned(), needed, "", true),
        Err(error) => for_efa(
            NAME,
            error.clone(),
            needed,
            "install what is named, or put its folder in LD_LIBRARY_PATH: pip install \
             nvidia-cuda-runtime-cu12, apt install libhwloc15, the NVIDIA driver, Amazon's EFA installer",
            devices,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbol_versions_are_compared_as_numbers() {
        assert!(new_enough(Some("1.10"), Some("1.9")));
        assert!(!new_enough(Some("1.9"), Some("1.10")));
        assert!(!new_enough(None, Some("1.7")));
        assert!(new_enough(None, None));
    }
}
