//! Mechanism of settings. The declarations are in the crates that use them.
//!
//! A crate declares each setting once, with [`settings!`]: field, type, default, help and range. The rest follows from
//! this table: the TOML file, the environment, the flags of a command, `--print-config` and the errors. Sources in
//! increasing order of precedence: defaults, file, environment, flags.
//!
//! Reading order: [`Settings`] and [`Component`], which a declaration implements; [`Kind`], the types of values;
//! [`load()`], which merges the sources; [`to_toml`], which prints a configuration; the errors.
//!
//! Invariants: a setting has one name, in the file `name` or `section.name`; the flag has `-` for `_` and `.`, the
//! variable is the prefix and the name in upper case. Every value has a text form that [`Kind::parse`] accepts.
//!
//! # Example: a component with two settings
//!
//! ```
//! use moontide_settings::{Bytes, Component, InvalidSetting, load, settings, to_toml};
//!
//! settings! {
//!     /// Settings of a cache.
//!     #[derive(Clone, Debug)]
//!     pub struct CacheConfig {
//!         /// Memory of the cache.
//!         memory_bytes: u64 as Bytes = 1 << 30, in 4096.., "give it at least one page";
//!         /// Number of threads.
//!         threads: u16 = 2;
//!     }
//! }
//!
//! impl Component for CacheConfig {
//!     const PREFIX: &'static str = "CACHE_";
//!     const COMMAND: &'static str = "cache";
//!
//!     fn check_rules(&self, _errors: &mut Vec<InvalidSetting>) {}
//! }
//!
//! // A flag overrides a variable, which overrides the default.
//! let environment = [("CACHE_MEMORY_BYTES", "2GiB"), ("CACHE_THREADS", "4")];
//! let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
//! let loaded = load(CacheConfig::default(), None, environment, [("threads", "8")])?;
//! assert_eq!((loaded.config.memory_bytes, loaded.config.threads), (2 << 30, 8));
//! loaded.check()?;
//! assert!(to_toml(&loaded.config, &CacheConfig::default()).contains("memory_bytes = \"2GiB\""));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod declare;
mod error;
mod file;
mod kind;
mod load;

pub use declare::{Component, OptionalSection, SetError, Setting, Settings, ValueRange};
pub use error::{InvalidConfig, InvalidSetting, Origin, SettingsError};
pub use file::to_toml;
pub use kind::{
    Bytes, Form, HostNames, HostPort, HostPorts, Kind, Millis, ValueInfo, is_host_and_port, is_host_name,
    parse_duration, parse_size,
};
pub use load::{Loaded, load, process_environment};

#[cfg(test)]
mod tests;
