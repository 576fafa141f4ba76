//! Where devices sit on PCI.

use std::fmt;
use std::fs;
use std::path::{Component, Path};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A PCI address, `domain:bus:device.function`. What names a device for good: ordinals and interface names differ from
/// process to process and from boot to boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct BusId {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device.
    pub device: u8,
    /// Function.
    pub function: u8,
}

/// Not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0} is no PCI address such as 0000:53:00.0")]
pub struct BadBusId(pub String);

impl FromStr for BusId {
    type Err = BadBusId;

    /// Reads `0000:53:00.0`, also with CUDA's eight digits of the domain and in capitals.
    fn from_str(text: &str) -> Result<Self, BadBusId> {
        let parse = || {
            let mut parts = text.split(':');
            let (domain, bus, rest) = (parts.next()?, parts.next()?, parts.next()?);
            let (device, function) = rest.split_once('.')?;
            if parts.next().is_some() {
                return None;
            }
            let byte = |digits: &str| u8::from_str_radix(digits, 16).ok();
            Some(Self {
                domain: u32::from_str_radix(domain, 16).ok()?,
                bus: byte(bus)?,
                device: byte(device)?,
                function: byte(function)?,
            })
        };
        parse().ok_or_else(|| BadBusId(text.to_owned()))
    }
}

impl fmt::Display for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl From<BusId> for String {
    fn from(bus: BusId) -> Self {
        bus.to_string()
    }
}

impl TryFrom<String> for BusId {
    type Error = BadBusId;

    fn try_from(text: String) -> Result<Self, BadBusId> {
        text.parse()
    }
}

/// The way from a root complex to a device: the names of the bridges, then the device itself.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PciPath(pub Vec<String>);

impl PciPath {
    /// Takes it from where a device's link in sysfs leads: `/sys/devices/pci0000:50/0000:50:01.0/0000:53:00.0`.
    #[must_use]
    pub fn of(device: &Path) -> Option<Self> {
        let names = device.components().filter_map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        });
        let path: Vec<String> = names
            .skip_while(|name| !name.starts_with("pci"))
            .map(str::to_owned)
            .collect();
        (!path.is_empty()).then_some(Self(path))
    }

    fn shared(&self, other: &Self) -> usize {
        let pairs = self.0.iter().zip(&other.0);
        pairs.take_while(|(a, b)| a == b).count()
    }
}

/// How far two devices are from each other, the nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distance {
    /// Below the same bridge: so many links of PCI from one to the other.
    SameBridge(u32),
    /// Below the same root complex only.
    SameRoot(u32),
    /// On the same NUMA node.
    SameNode,
    /// On different NUMA nodes.
    OtherNode,
    /// The place of one of them is not known.
    Unknown,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SameBridge(links) => write!(f, "same PCI bridge ({links} links)"),
            Self::SameRoot(links) => write!(f, "same PCI root ({links} links)"),
            Self::SameNode => f.write_str("same NUMA node"),
            Self::OtherNode => f.write_str("other NUMA node"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// A device's place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Place {
    /// Its way from the root complex.
    pub path: Option<PciPath>,
    /// Its NUMA node.
    pub numa: Option<u32>,
}

impl Place {
    /// Where a device is, by its folder in sysfs or a link to that.
    #[must_use]
    pub fn of(device: &Path) -> Self {
        Self {
            path: fs::canonicalize(device)
                .ok()
                .and_then(|real| PciPath::of(&real)),
            // -1 stands for "not known".
            numa: fs::read_to_string(device.join("numa_node"))
                .ok()
                .and_then(|text| text.trim().parse().ok()),
        }
    }

    /// How far it is to another place.
    #[must_use]
    pub fn distance(&self, other: &Self) -> Distance {
        if let (Some(a), Some(b)) = (&self.path, &other.path) {
            let shared = a.shared(b);
            let links = [a, b]
                .iter()
                .map(|path| path.0.len().saturating_sub(shared))
                .sum::<usize>();
            let links = u32::try_from(links).unwrap_or(u32::MAX);
            match shared {
                0 => {}
                1 => return Distance::SameRoot(links),
                _ => return Distance::SameBridge(links),
            }
        }
        match (self.numa, other.numa) {
            (Some(a), Some(b)) if a == b => Distance::SameNode,
            (Some(_), Some(_)) => Distance::OtherNode,
            _ => Distance::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_every_spelling() {
        let bus: BusId = "0000:53:00.0".parse().unwrap();
        assert_eq!("00000000:53:00.0".parse(), Ok(bus));
        assert_eq!(
            "0000:9C:1f.7".parse::<BusId>().unwrap().to_string(),
            "0000:9c:1f.7"
        );
        assert_eq!(bus.to_string(), "0000:53:00.0");
        for bad in [
            "",
            "53:00.0",
            "0000:53:00",
            "0000:53:00.0:1",
            "0000:153:00.0",
            "x:y:z.w",
        ] {
            assert!(bad.parse::<BusId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn nearer_devices_share_more_of_the_way() {
        let place = |path: &str, numa| Place {
            path: PciPath::of(Path::new(path)),
            numa,
        };
        let gpu = place(
            "/sys/devices/pci0000:50/0000:50:01.0/0000:51:00.0/0000:52:00.0",
            Some(0),
        );
        let beside = place(
            "/sys/devices/pci0000:50/0000:50:01.0/0000:51:01.0/0000:53:00.0",
            Some(0),
        );
        let root = place("/sys/devices/pci0000:50/0000:50:02.0/0000:60:00.0", Some(0));
        let node = place("/sys/devices/pci0000:70/0000:70:02.0", Some(0));
        let far = place("/sys/devices/pci0000:90/0000:90:02.0", Some(1));
        let nowhere = place("/gone", None);
        let distances: Vec<_> = [&beside, &root, &node, &far, &nowhere]
            .iter()
            .map(|other| gpu.distance(other))
            .collect();
        assert!(
            distances.is_sorted() && distances.windows(2).all(|d| d[0] != d[1]),
            "{distances:?}"
        );
        assert_eq!(gpu.distance(&beside), beside.distance(&gpu));
    }
}
