//! Errors: each names the source, the setting, the invalid value and valid ones.

use std::fmt;
use std::path::PathBuf;

use crate::kind::ValueInfo;

/// Source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Line of a file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Key in the file.
        key: String,
    },
    /// Environment variable of this name.
    Variable(String),
    /// Command-line flag of this name, without `--`.
    Flag(String),
    /// Argument of a call.
    Argument(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File { path, line, key } => write!(f, "{key} in {}:{line}", path.display()),
            Origin::Variable(name) => write!(f, "environment variable {name}"),
            Origin::Flag(name) => write!(f, "--{name}"),
            Origin::Argument(name) => write!(f, "argument {name}"),
        }
    }
}

/// Error of the loading of settings.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error(
        "cannot read configuration file {}: {source}; set --config to a readable file, or omit it",
        path.display()
    )]
    File {
        /// Path of the file.
        path: PathBuf,
        /// I/O error of the read.
        source: std::io::Error,
    },
    /// The file is no TOML.
    #[error("invalid configuration file {}: {source}see `{command} --print-config` for all settings", path.display())]
    Toml {
        /// Path of the file.
        path: PathBuf,
        /// Position and reason.
        source: Box<toml::de::Error>,
        /// Command that prints a valid file.
        command: &'static str,
    },
    /// The value is invalid.
    #[error("{origin} has invalid value {found:?}; expected {expected}")]
    Value {
        /// Source of the value.
        origin: Origin,
        /// Invalid value.
        found: String,
        /// Description of valid values.
        expected: &'static ValueInfo,
    },
    /// The setting does not exist.
    #[error("{origin} is no setting; see `{command} --print-config` for all settings")]
    Unknown {
        /// Name and source.
        origin: Origin,
        /// Command that prints all settings.
        command: &'static str,
    },
}

/// An invalid value of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSetting {
    /// Key of the setting.
    pub setting: String,
    /// Current value and the violated rule.
    pub rule: String,
    /// How to correct the setting.
    pub hint: &'static str,
    /// Source of the value; `None` if it is a default, or if a program set it.
    pub origin: Option<Origin>,
}

impl InvalidSetting {
    /// Creates an error without an origin.
    pub fn new(setting: impl Into<String>, rule: impl Into<String>, hint: &'static str) -> InvalidSetting {
        InvalidSetting { setting: setting.into(), rule: rule.into(), hint, origin: None }
    }
}

impl fmt::Display for InvalidSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.setting, self.rule, self.hint)?;
        self.origin.as_ref().map_or(Ok(()), |origin| write!(f, " (set by {origin})"))
    }
}

/// All invalid settings of a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid configuration:{}", errors.iter().map(|error| format!("\n  {error}")).collect::<String>())]
pub struct InvalidConfig {
    /// At least one error.
    pub errors: Vec<InvalidSetting>,
}
