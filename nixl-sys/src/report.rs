//! What was loaded, in plain fields and in words.

use std::fmt;
use std::path::PathBuf;

use crate::discovery::Layout;

/// What was found when the library was opened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadReport {
    /// The path asked for.
    pub requested: PathBuf,
    /// The file loaded: the path with every symbolic link resolved.
    pub library: PathBuf,
    /// How the installation is laid out.
    pub layout: Layout,
    /// The version family that the library's functions show.
    pub family: VersionFamily,
    /// The exact version, where the installation says it.
    pub version: Option<String>,
    /// Functions of newer versions that this library lacks.
    pub missing_functions: Vec<&'static str>,
    /// Whether a lost peer can be told from other failures.
    pub detailed_status: bool,
    /// Where NIXL looks for plugins.
    pub plugins_dir: PathBuf,
    /// The backend plugins there. That a plugin is there does not say that it can be loaded.
    pub plugins: Vec<String>,
    /// Where UCX looks for its modules, if that is known.
    pub ucx_modules_dir: Option<PathBuf>,
    /// The UCX modules there.
    pub ucx_modules: Vec<String>,
    /// The variables of this process that NIXL, UCX and libfabric read, sorted by name.
    pub environment: Vec<(String, String)>,
    /// What is wrong and was allowed by the caller, or could not be checked.
    pub findings: Vec<Finding>,
}

/// Versions that can be told apart by what the library exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum VersionFamily {
    /// 1.4: statuses are folded into a few.
    V1_4,
    /// 1.5 or newer.
    V1_5,
    /// Some functions of 1.5 and not others: between the two.
    Between,
}

impl fmt::Display for VersionFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1_4 => "1.4",
            Self::V1_5 => "1.5 or newer",
            Self::Between => "between 1.4 and 1.5",
        })
    }
}

/// Something about the installation that the user should know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// There are no plugins, and the caller allowed it: no backend can be created.
    PluginsMissing(PathBuf),
    /// There are no UCX modules, and the caller allowed it: UCX will use TCP for everything.
    UcxModulesMissing(PathBuf),
    /// Where this installation's UCX keeps its modules is not known, so they were not checked.
    UcxModulesUnchecked,
    /// NIXL cannot look at its configuration file, and the caller allowed it: no agent can be created.
    UnreadableConfig(PathBuf, String),
    /// The symbol that tells a lost peer from other failures is missing.
    NoDetailedStatus,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PluginsMissing(dir) => {
                write!(
                    f,
                    "no NIXL plugins in {}: no backend can be created",
                    dir.display()
                )
            }
            Self::UcxModulesMissing(dir) => {
                write!(
                    f,
                    "no UCX modules in {}: UCX will use TCP for everything",
                    dir.display()
                )
            }
            Self::UcxModulesUnchecked => f.write_str(
                "UCX comes from outside this installation and its modules were not checked: \
                 see which transport it chooses",
            ),
            Self::UnreadableConfig(path, reason) => {
                write!(
                    f,
                    "NIXL cannot read {} ({reason}): no agent can be created",
                    path.display()
                )
            }
            Self::NoDetailedStatus => f.write_str("a lost peer cannot be told from other failures"),
        }
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.version {
            Some(version) => writeln!(f, "NIXL {version}")?,
            None => writeln!(f, "NIXL {}", self.family)?,
        }
        writeln!(f, "  library      {}", self.library.display())?;
        if self.requested != self.library {
            writeln!(f, "  asked for    {}", self.requested.display())?;
        }
        writeln!(f, "  layout       {}", self.layout)?;
        writeln!(f, "  functions    {}", self.family)?;
        if !self.missing_functions.is_empty() {
            writeln!(f, "  lacks        {}", self.missing_functions.join(", "))?;
        }
        writeln!(f, "  plugins      {}", listed(&self.plugins))?;
        writeln!(f, "  ucx modules  {}", listed(&self.ucx_modules))?;
        for (name, value) in &self.environment {
            writeln!(f, "  environment  {name}={value}")?;
        }
        for finding in &self.findings {
            writeln!(f, "  finding      {finding}")?;
        }
        Ok(())
    }
}

fn listed(names: &[String]) -> String {
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}
