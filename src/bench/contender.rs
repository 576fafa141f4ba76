//! Who takes part in a bench, and how: which program, in which setting, over which transport.

use std::path::Path;
use std::process::Command;

use serde_json::{Map, Value, json};

use super::cases::Case;
use super::error::BenchError;
use super::foreign;
use super::proto::Shape;
use super::row::Who;

/// The setting of `one-descriptor` that posts what the engine would.
pub const SAME_DESCRIPTORS: &str = "same descriptors";
/// The setting of NIXL's Python package that is its default.
pub const PROGRESS_THREAD: &str = "progress-thread";
/// Its other one.
pub const NO_PROGRESS_THREAD: &str = "no-progress-thread";
/// The setting of this tool's participants without huge pages.
pub const SMALL_PAGES: &str = "small pages";

/// What is to carry the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// Whatever UCX chooses.
    Auto,
    /// TCP and nothing else.
    Tcp,
}

impl Carrier {
    /// Its name in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
        }
    }

    /// What follows the shape in a case's name.
    #[must_use]
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Auto => "",
            Self::Tcp => "-tcp",
        }
    }

    const fn variables(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Auto => &[],
            Self::Tcp => &[("UCX_TLS", "tcp")],
        }
    }
}

/// A participant in one of its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contender {
    /// Who.
    pub who: Who,
    /// How it is set; empty for its default.
    pub setting: String,
}

impl Contender {
    /// A participant in a setting.
    #[must_use]
    pub fn new(who: Who, setting: &str) -> Self {
        Self {
            who,
            setting: setting.to_owned(),
        }
    }

    /// How it is called.
    #[must_use]
    pub fn name(&self) -> String {
        match self.setting.as_str() {
            "" => self.who_name(),
            setting => format!("{} ({setting})", self.who_name()),
        }
    }

    /// The name of the participant in rows.
    #[must_use]
    pub fn who_name(&self) -> String {
        match serde_json::to_value(self.who) {
            Ok(Value::String(name)) => name,
            _ => String::new(),
        }
    }

    /// Whether its failure is a failure of this project.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        matches!(self.who, Who::KvXfer | Who::OneDescriptor)
    }

    /// Whether UCX carries its bytes and can be asked how.
    #[must_use]
    pub fn uses_ucx(&self) -> bool {
        !matches!(self.who, Who::Mooncake | Who::Memcpy | Who::ProcessVmReadv)
    }

    /// The program that plays it. `kvx` is this tool.
    ///
    /// # Errors
    /// [`BenchError::Absent`] when it cannot be had here.
    pub fn command(&self, kvx: &Path, carrier: Carrier) -> Result<Command, BenchError> {
        let mut command = match self.who {
            Who::NixlPython | Who::NixlSys | Who::Mooncake => {
                foreign::participant(self.who, &self.setting)?
            }
            _ => {
                let mut command = Command::new(kvx);
                command.arg("bench-worker");
                command
            }
        };
        command.envs(carrier.variables().iter().copied());
        Ok(command)
    }

    /// What its processes are told.
    #[must_use]
    pub fn settings(&self, carrier: Carrier, of_group: &Map<String, Value>) -> Map<String, Value> {
        let mut settings = of_group.clone();
        let mut set = |name: &str, value: Value| {
            settings.insert(name.to_owned(), value);
        };
        set("who", self.who_name().into());
        set("transport", carrier.name().into());
        match self.setting.as_str() {
            SAME_DESCRIPTORS => set("same_descriptors", true.into()),
            PROGRESS_THREAD => set("progress_thread", true.into()),
            NO_PROGRESS_THREAD => set("progress_thread", false.into()),
            SMALL_PAGES => set("huge_pages", false.into()),
            setting => {
                let lanes = setting
                    .strip_suffix(" lanes")
                    .or_else(|| setting.strip_suffix(" lane"))
                    .and_then(|lanes| lanes.parse::<u32>().ok());
                if let Some(lanes) = lanes {
                    set("lanes", json!(lanes));
                }
            }
        }
        settings
    }
}

/// Cases over one shape, by the same participants.
#[derive(Debug, Clone)]
pub struct Group {
    /// The memory of both ends.
    pub shape: Shape,
    /// What is to carry the bytes.
    pub carrier: Carrier,
    /// What every participant is told besides.
    pub settings: Map<String, Value>,
    /// Who takes part.
    pub contenders: Vec<Contender>,
    /// The reads.
    pub cases: Vec<Case>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_say_what_the_setting_is_called() {
        let told = |who, setting| Contender::new(who, setting).settings(Carrier::Tcp, &Map::new());
        assert_eq!(told(Who::KvXfer, "4 lanes")["lanes"], 4);
        assert_eq!(told(Who::KvXfer, "1 lane")["lanes"], 1);
        assert_eq!(told(Who::KvXfer, "")["who"], "kv-xfer");
        assert_eq!(told(Who::KvXfer, "")["transport"], "tcp");
        assert_eq!(told(Who::KvXfer, SMALL_PAGES)["huge_pages"], false);
        assert_eq!(
            told(Who::OneDescriptor, SAME_DESCRIPTORS)["same_descriptors"],
            true
        );
        assert_eq!(
            told(Who::NixlPython, NO_PROGRESS_THREAD)["progress_thread"],
            false
        );
    }
}
