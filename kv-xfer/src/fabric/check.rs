//! Checks a requirement before anything moves, from what is cheap to look at: devices and variables. That catches in
//! milliseconds what NIXL would take minutes to show as slow reads.

use std::path::Path;

use super::devices::Devices;
use super::requirement::{Carrier, Requirement, Unmet};
use super::settings::LIBFABRIC;

/// Transports of UCX that carry nothing between processes: within one, and between its memory and that of its GPUs.
const WITHIN: [&str; 5] = ["self", "cuda_copy", "gdr_copy", "rocm_copy", "ze_copy"];

/// What a check looks at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surroundings {
    /// The devices of the machine.
    pub devices: Devices,
    /// `UCX_TLS`, if the user has set it.
    pub ucx_tls: Option<String>,
    /// `FI_PROVIDER`, if it is set.
    pub fi_provider: Option<String>,
    /// Whether UCX has its module for EFA, where that is known, and may load it.
    pub ucx_efa: bool,
}

impl Surroundings {
    /// This process on this machine. `ucx_modules` are the modules of the UCX that NIXL uses.
    #[must_use]
    pub fn here(ucx_modules: &[String]) -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let forbidden = variable("UCX_MODULES").is_some_and(|modules| {
            let listed = |list: &str| list.split(',').any(|name| name == "efa");
            match modules.strip_prefix('^') {
                Some(without) => listed(without),
                None => !listed(&modules) && modules != "all",
            }
        });
        Self {
            devices: Devices::look(Path::new("/")),
            ucx_tls: variable("UCX_TLS"),
            fi_provider: variable("FI_PROVIDER"),
            ucx_efa: !forbidden && ucx_modules.iter().any(|module| module == "ib_efa"),
        }
    }

    /// Whether a backend can do what is required here, as far as devices and variables show.
    ///
    /// # Errors
    /// [`Unmet`], with what there is and what would help.
    pub fn check(&self, requirement: Requirement, backend: &str) -> Result<(), Unmet> {
        let unmet = |found: String, fix: &str| {
            Err(Unmet {
                wanted: requirement,
                found,
                fix: fix.to_owned(),
            })
        };
        let devices = &self.devices;
        match requirement {
            Requirement::Any | Requirement::Tcp | Requirement::Shm => {}
            Requirement::Efa if devices.efa().next().is_none() => {
                let fix = if devices.efa_without_driver.is_empty() {
                    "run on an instance with EFA network interfaces attached, in a container with \
                     /sys/class/infiniband and /dev/infiniband passed in; or require something else"
                } else {
                    "load the driver: modprobe efa (the EFA installer has it: \
                     sudo ./efa_installer.sh -y)"
                };
                return unmet(devices.summary(), fix);
            }
            Requirement::Rdma if devices.rdma.is_empty() => {
                return unmet(
                    devices.summary(),
                    "run on a machine with InfiniBand, RoCE or EFA, in a container with \
                     /sys/class/infiniband and /dev/infiniband passed in; or require something else",
                );
            }
            Requirement::Efa | Requirement::Rdma => {
                let wanted = |efa: bool| requirement == Requirement::Rdma || efa;
                let usable = |nic: &super::RdmaDevice| wanted(nic.is_efa()) && nic.is_usable();
                if !devices.rdma.iter().any(usable) {
                    return unmet(
                        devices.summary(),
                        "pass the devices into the container (docker run --device=/dev/infiniband \
                         --ulimit memlock=-1) and see that their ports are up",
                    );
                }
            }
            Requirement::Nvlink => {
                if devices.visible_gpus().next().is_none() {
                    return unmet(
                        devices.summary(),
                        "run on a machine with NVIDIA GPUs and their driver, in a container with \
                         --gpus all; or require something else",
                    );
                }
            }
        }
        if backend == LIBFABRIC {
            self.check_provider(requirement)
        } else {
            self.check_transports(requirement)
        }
    }

    fn check_provider(&self, requirement: Requirement) -> Result<(), Unmet> {
        let fail = |found: String, fix: String| {
            Err(Unmet {
                wanted: requirement,
                found,
                fix,
            })
        };
        match requirement.provider() {
            Err(lacks) => fail(
                format!("the backend LIBFABRIC: {lacks}"),
                "use the backend UCX".to_owned(),
            ),
            Ok(None) => Ok(()),
            Ok(Some(provider)) if self.fi_provider.as_deref() == Some(provider) => Ok(()),
            Ok(Some(provider)) => fail(
                match &self.fi_provider {
                    Some(other) => format!("FI_PROVIDER={other}"),
                    None => {
                        "FI_PROVIDER is not set, so that libfabric falls back to TCP without a word"
                            .to_owned()
                    }
                },
                format!("set FI_PROVIDER={provider} before NIXL is loaded"),
            ),
        }
    }

    fn check_transports(&self, requirement: Requirement) -> Result<(), Unmet> {
        if requirement == Requirement::Efa && !self.ucx_efa {
            return Err(Unmet {
                wanted: requirement,
                found: "a UCX that has no EFA module, or may not load it (UCX_MODULES)".to_owned(),
                fix: "use the backend LIBFABRIC with FI_PROVIDER=efa".to_owned(),
            });
        }
        self.transports(requirement).map(drop)
    }

    /// The transports that UCX may use: those that the user's `UCX_TLS` names, which must all be admitted, else those that the
    /// requirement admits and for which there are devices. `None`: those that UCX chooses.
    ///
    /// # Errors
    /// [`Unmet`] when `UCX_TLS` allows something else too, or nothing that could carry anything: it overrules whatever
    /// NIXL is told.
    pub fn transports(&self, requirement: Requirement) -> Result<Option<Vec<String>>, Unmet> {
        let Some(admitted) = requirement.ucx_transports() else {
            return Ok(None);
        };
        let Some(tls) = self.ucx_tls.as_deref() else {
            return Ok(Some(self.provided(admitted)));
        };
        let unmet = |what: String| {
            let wanted = self.provided(admitted).join(",");
            Err(Unmet {
                wanted: requirement,
                found: format!("UCX_TLS={tls}, which {what}"),
                fix: format!("unset UCX_TLS, or set UCX_TLS={wanted}"),
            })
        };
        if tls == "all" || tls.starts_with('^') {
            return unmet("does not say what may be used".to_owned());
        }
        let names: Vec<&str> = tls.split(',').map(str::trim).collect();
        for name in names.iter().copied().filter(|name| !WITHIN.contains(name)) {
            match Carrier::of_ucx(name) {
                Some(carrier) if requirement.admits(carrier) => {}
                Some(_) => return unmet(format!("allows {name}")),
                // UCX has other ways to write a name (`\tcp`, `tcp:aux`).
                None => return unmet(format!("names {name}, which is not known")),
            }
        }
        if !names.iter().any(|name| Carrier::of_ucx(name).is_some()) {
            return unmet("leaves none of its transports".to_owned());
        }
        Ok(Some(names.into_iter().map(str::to_owned).collect()))
    }

    /// Those of some transports that this machine has devices for; all of them where it has none for any. UCX warns of each
    /// one that it is told to use and does not have.
    fn provided(&self, transports: &[&str]) -> Vec<String> {
        let devices = &self.devices;
        let provided = |name: &&str| match Carrier::of_ucx(name) {
            Some(Carrier::Efa) => devices.efa().next().is_some(),
            Some(Carrier::Rdma) => devices.rdma.iter().any(|nic| !nic.is_efa()),
            Some(Carrier::Shm | Carrier::Tcp) => true,
            // `cuda_copy` makes UCX know GPU memory.
            Some(Carrier::Nvlink) | None => devices.visible_gpus().next().is_some(),
        };
        let some: Vec<&str> = transports.iter().copied().filter(provided).collect();
        let kept = if some.is_empty() { transports } else { &some };
        kept.iter().copied().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bare(tls: Option<&str>) -> Surroundings {
        Surroundings {
            devices: Devices::default(),
            ucx_tls: tls.map(str::to_owned),
            fi_provider: None,
            ucx_efa: true,
        }
    }

    #[test]
    fn a_machine_without_devices_says_what_it_lacks() {
        for (requirement, found) in [
            (Requirement::Efa, "no EFA device"),
            (Requirement::Rdma, "no RDMA device"),
            (Requirement::Nvlink, "no GPU"),
        ] {
            let unmet = bare(None).check(requirement, "UCX").unwrap_err();
            let text = unmet.to_string();
            assert!(
                text.contains(found) && text.contains(requirement.name()),
                "{text}"
            );
            assert!(!unmet.fix.is_empty());
        }
        for requirement in [Requirement::Any, Requirement::Tcp, Requirement::Shm] {
            bare(None).check(requirement, "UCX").unwrap();
        }
    }

    #[test]
    fn the_users_own_choice_is_kept_to() {
        let left = |tls, requirement| bare(Some(tls)).transports(requirement);
        assert_eq!(left("tcp,cma", Requirement::Any), Ok(None));
        let shm = left("cma,self", Requirement::Shm).unwrap().unwrap();
        assert_eq!(shm, ["cma", "self"]);
        let rdma = left("rc_mlx5,self", Requirement::Rdma).unwrap().unwrap();
        assert_eq!(rdma, ["rc_mlx5", "self"]);
        for (tls, requirement, why) in [
            ("tcp", Requirement::Shm, "allows tcp"),
            ("cma,self,tcp", Requirement::Shm, "allows tcp"),
            ("rc,sm", Requirement::Rdma, "allows sm"),
            ("all", Requirement::Tcp, "does not say"),
            ("^sm", Requirement::Tcp, "does not say"),
            ("self,cuda_copy", Requirement::Tcp, "leaves none"),
            // UCX takes both for TCP.
            ("sm,\\tcp", Requirement::Shm, "not known"),
            ("sm,tcp:aux", Requirement::Shm, "not known"),
        ] {
            let unmet = left(tls, requirement).unwrap_err().to_string();
            let told = [why, &format!("UCX_TLS={tls}")]
                .iter()
                .all(|part| unmet.contains(part));
            assert!(told, "{unmet}");
        }
    }

    #[test]
    fn only_what_has_devices_is_named() {
        let named = |requirement| bare(None).transports(requirement).unwrap().unwrap();
        assert_eq!(named(Requirement::Tcp), ["tcp"]);
        assert_eq!(named(Requirement::Shm), ["sm"]);
        // With no device at all UCX is to say so.
        assert_eq!(named(Requirement::Efa), ["srd", "cuda_copy"]);
    }

    #[test]
    fn libfabric_must_be_told_its_provider() {
        let mut here = bare(None);
        let unmet = here.check(Requirement::Tcp, LIBFABRIC).unwrap_err();
        assert!(unmet.fix.contains("FI_PROVIDER=tcp"), "{unmet}");
        here.fi_provider = Some("tcp".to_owned());
        here.check(Requirement::Tcp, LIBFABRIC).unwrap();
        assert!(here.check(Requirement::Shm, LIBFABRIC).is_err());
    }
}
