//! [`MasterConfig`]: everything that can be set, in one struct.
//!
//! Filled in this order, later over earlier: defaults, a TOML file, the environment (`MOONTIDE_MASTER_<SETTING>`),
//! flags (`--<setting>`). A default is one constant; help texts and the printed file are made from the table below, so
//! that they cannot differ from what is in force. [`MasterConfig::validate`] seals the result: what starts a
//! [`Server`](crate::Server) has passed it, and each wrong value is named with what to do about it.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::num::NonZeroU16;
use std::ops::{Deref, RangeInclusive};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use moontide_meta::{Admission, PlacementKind};
use moontide_proto::limits::ADDRESS_BYTES_MAX;
use moontide_types::bounds::{
    GROUPS_DEFAULT, GROUPS_MAX, LEASE_MS_MAX, OBJECT_BYTES_MAX, PAGE_BYTES, RESERVATION_MS_MAX,
};
use serde::Deserialize;

use crate::election::RegistryAddress;

/// In front of a setting's name in the environment.
pub const ENVIRONMENT_PREFIX: &str = "MOONTIDE_MASTER_";

/// Where gRPC is served: this host only, until somebody says otherwise, because nothing proves who calls.
pub const GRPC_LISTEN_DEFAULT: SocketAddr = local(7400);
/// Where the framed protocol is served.
pub const FRAME_LISTEN_DEFAULT: SocketAddr = local(7401);
/// Where operators' HTTP is served.
pub const ADMIN_LISTEN_DEFAULT: SocketAddr = local(7402);
/// Long enough for a node whose process is stopped for a moment.
const SESSION_TTL_MS_DEFAULT: u32 = 10_000;
/// Twice the longest stall that was seen while a segment was being prefaulted, and some.
const ABSENCE_MAX_MS_DEFAULT: u32 = 60_000;
/// The longest lease or reservation, and 1 % for clocks that run apart.
const REALLOCATE_WAIT_MS_DEFAULT: u32 = max(LEASE_MS_MAX, RESERVATION_MS_MAX) / 100 * 101;
/// A master that dies is replaced after this time; one that stalls for longer loses its groups.
const LEASE_MS_DEFAULT: u32 = 5_000;
/// Eviction begins above this.
const HIGH_PERMILLE_DEFAULT: u16 = 950;
/// Eviction ends below this.
const LOW_PERMILLE_DEFAULT: u16 = 900;
/// Objects above 256 MiB are cut: several nodes then serve one.
const STRIPE_BYTES_MAX_DEFAULT: u64 = 256 << 20;
/// A descriptor and 64 KiB each: 64 MiB when all are in use.
const CONNECTIONS_MAX_DEFAULT: u32 = 1024;
/// Waiting calls of one connection; beyond that it is not read.
const INFLIGHT_PER_CONNECTION_MAX_DEFAULT: u32 = 256;
/// As many as cores.
const FRAME_THREADS_DEFAULT: u16 = 0;

const fn local(port: u16) -> SocketAddr {
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))
}

const fn max(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}

/// One setting, for help texts.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Its name in the file; in flags with `-` for `_`, in the environment in capitals.
    pub name: &'static str,
    /// What it is.
    pub help: &'static str,
    /// What it is unless set, as it would stand in the file.
    pub default: fn() -> Option<String>,
}

macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:expr;)*) => {
        /// Everything that can be set.
        #[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct MasterConfig {
            $($(#[doc = $doc])+ pub $name: $type,)*
        }

        impl Default for MasterConfig {
            fn default() -> MasterConfig {
                MasterConfig { $($name: $default,)* }
            }
        }

        impl MasterConfig {
            /// All settings, in the order of the file.
            pub const SETTINGS: &[Setting] = &[$(Setting {
                name: stringify!($name),
                help: concat!($($doc),+),
                default: || Value::show(&MasterConfig::default().$name),
            },)*];

            /// Sets one from text.
            fn set(&mut self, name: &str, text: &str) -> Result<(), SetError> {
                match name {
                    $(stringify!($name) => {
                        self.$name = <$type as Value>::read(text).ok_or(SetError::Value(<$type as Value>::EXPECTED))?;
                    })*
                    _ => return Err(SetError::Unknown),
                }
                Ok(())
            }

            /// Each setting's value as it would stand in the file; none if it is not set.
            fn values(&self) -> Vec<Option<String>> {
                vec![$(self.$name.show(),)*]
            }
        }
    };
}

settings! {
    /// Address and port on which gRPC is served; port 0 takes a free one.
    grpc_listen: SocketAddr = GRPC_LISTEN_DEFAULT;
    /// Address and port on which the framed protocol is served, which clients use by default.
    frame_listen: SocketAddr = FRAME_LISTEN_DEFAULT;
    /// Address and port of the HTTP door for operators: metrics, health, listings.
    admin_listen: SocketAddr = ADMIN_LISTEN_DEFAULT;
    /// "host:port" under which others reach gRPC; needed when grpc_listen is a wildcard as 0.0.0.0, otherwise the same.
    grpc_advertise: Option<String> = None;
    /// "host:port" under which others reach the framed protocol; as grpc_advertise.
    frame_advertise: Option<String> = None;
    /// Where masters meet, if there are several: "etcd://host:port,host:port/prefix" or "kubernetes://namespace/name". The
    /// cluster's identity is kept there, and data_dir is not used.
    registry: Option<String> = None;
    /// How long others wait for a master that does not renew its lease, in milliseconds.
    lease_ms: u32 = LEASE_MS_DEFAULT;
    /// Directory for the cluster's identity, where there is no registry; without one a restart begins a new cluster.
    data_dir: Option<PathBuf> = None;
    /// Groups of the cluster, 1 to 4096; fixed when data_dir is first used.
    groups: u16 = GROUPS_DEFAULT;
    /// A node's session ends after so many milliseconds without a heartbeat.
    session_ttl_ms: u32 = SESSION_TTL_MS_DEFAULT;
    /// How long a writer has from PutStart to PutEnd, in milliseconds; at most 30000.
    reservation_ms: u32 = RESERVATION_MS_MAX;
    /// How long nothing is given out in a segment that an earlier master or session used, in milliseconds. Shorter than
    /// the default is safe only where nobody reads or writes one-sidedly.
    reallocate_wait_ms: u32 = REALLOCATE_WAIT_MS_DEFAULT;
    /// How long a node that went away may come back with objects that were removed meanwhile, in milliseconds.
    absence_max_ms: u32 = ABSENCE_MAX_MS_DEFAULT;
    /// Eviction begins above this share of memory or slots, in thousandths.
    high_permille: u16 = HIGH_PERMILLE_DEFAULT;
    /// Eviction ends below this share, in thousandths.
    low_permille: u16 = LOW_PERMILLE_DEFAULT;
    /// Where new objects go: "random", "free-ratio" or "topology".
    placement: PlacementName = PlacementName(PlacementKind::FreeRatio);
    /// What is written to nodes' disks when it has to leave memory: "all", or "read-before" for what was read since it was
    /// put, which spares SSDs.
    offload_admission: AdmissionName = AdmissionName(Admission::All);
    /// Objects longer than this are cut into stripes, in bytes; a multiple of 262144.
    stripe_bytes_max: u64 = STRIPE_BYTES_MAX_DEFAULT;
    /// Most connections at the framed door, and as many at the gRPC door.
    connections_max: u32 = CONNECTIONS_MAX_DEFAULT;
    /// Most calls of one connection that wait for nodes at a time; beyond that the connection is not read.
    inflight_per_connection_max: u32 = INFLIGHT_PER_CONNECTION_MAX_DEFAULT;
    /// Threads of the framed door; 0 takes as many as there are cores.
    frame_threads: u16 = FRAME_THREADS_DEFAULT;
}

/// A placement by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementName(pub PlacementKind);

impl<'de> Deserialize<'de> for PlacementName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<PlacementName, D::Error> {
        let name = String::deserialize(deserializer)?;
        PlacementName::read(&name).ok_or_else(|| {
            serde::de::Error::invalid_value(serde::de::Unexpected::Str(&name), &PlacementName::EXPECTED)
        })
    }
}

/// What is admitted to disks, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionName(pub Admission);

impl AdmissionName {
    const ALL: [AdmissionName; 2] = [AdmissionName(Admission::All), AdmissionName(Admission::ReadBefore)];

    fn name(self) -> &'static str {
        match self.0 {
            Admission::All => "all",
            Admission::ReadBefore => "read-before",
        }
    }
}

impl<'de> Deserialize<'de> for AdmissionName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<AdmissionName, D::Error> {
        let name = String::deserialize(deserializer)?;
        AdmissionName::read(&name).ok_or_else(|| {
            serde::de::Error::invalid_value(serde::de::Unexpected::Str(&name), &AdmissionName::EXPECTED)
        })
    }
}

/// A type that a setting can have.
trait Value: Sized {
    /// What one writes.
    const EXPECTED: &'static str;
    /// From a flag or the environment.
    fn read(text: &str) -> Option<Self>;
    /// As it stands in the file; none if it is not set.
    fn show(&self) -> Option<String>;
}

macro_rules! plain_values {
    ($($type:ty: $expected:literal;)*) => {$(
        impl Value for $type {
            const EXPECTED: &'static str = $expected;
            fn read(text: &str) -> Option<Self> {
                text.parse().ok()
            }
            fn show(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    )*};
}

plain_values! {
    u16: "a whole number from 0 to 65535";
    u32: "a whole number from 0 to 4294967295";
    u64: "a whole number";
}

fn quoted(text: &str) -> Option<String> {
    Some(toml::Value::from(text).to_string())
}

impl Value for SocketAddr {
    const EXPECTED: &'static str = "an IP address and a port, as in 127.0.0.1:7400 or [::1]:7400";
    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn show(&self) -> Option<String> {
        quoted(&self.to_string())
    }
}

impl Value for Option<String> {
    const EXPECTED: &'static str = "a host and a port, as in master-0.example:7400";
    fn read(text: &str) -> Option<Self> {
        Some((!text.is_empty()).then(|| text.to_owned()))
    }
    fn show(&self) -> Option<String> {
        self.as_deref().and_then(quoted)
    }
}

impl Value for Option<PathBuf> {
    const EXPECTED: &'static str = "a directory";
    fn read(text: &str) -> Option<Self> {
        Some((!text.is_empty()).then(|| PathBuf::from(text)))
    }
    fn show(&self) -> Option<String> {
        self.as_deref().and_then(|path| quoted(&path.to_string_lossy()))
    }
}

impl Value for PlacementName {
    const EXPECTED: &'static str = "one of random, free-ratio, topology";
    fn read(text: &str) -> Option<Self> {
        PlacementKind::ALL.into_iter().find(|kind| kind.name() == text).map(PlacementName)
    }
    fn show(&self) -> Option<String> {
        quoted(self.0.name())
    }
}

impl Value for AdmissionName {
    const EXPECTED: &'static str = "one of all, read-before";
    fn read(text: &str) -> Option<Self> {
        AdmissionName::ALL.into_iter().find(|admission| admission.name() == text)
    }
    fn show(&self) -> Option<String> {
        quoted(self.name())
    }
}

/// Why a setting could not be set.
enum SetError {
    Unknown,
    Value(&'static str),
}

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A variable of the environment.
    Environment,
    /// A flag of the command.
    Flag,
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}: {source}; give --config a readable file, or leave it out", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("the configuration file {} is wrong: {source}\nsee `moontide master --print-config` for every setting", path.display())]
    Toml {
        /// Which one.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A variable or a flag cannot be read.
    #[error("{} cannot be {found:?}: it takes {expected}", written(setting, *origin))]
    Value {
        /// The setting.
        setting: String,
        /// Where it stood.
        origin: Origin,
        /// What stood there.
        found: String,
        /// What could.
        expected: &'static str,
    },
    /// There is no such setting.
    #[error("there is no setting {setting:?}; see `moontide master --help`")]
    Unknown {
        /// What was named.
        setting: String,
    },
}

/// How a setting is written there.
fn written(setting: &str, origin: Origin) -> String {
    match origin {
        Origin::Environment => format!("{ENVIRONMENT_PREFIX}{}", setting.to_ascii_uppercase()),
        Origin::Flag => format!("--{}", setting.replace('_', "-")),
    }
}

/// A configuration, and what was passed over on the way.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration, not validated yet.
    pub config: MasterConfig,
    /// Variables that begin like ours and name no setting. Not an error: Kubernetes makes such variables for every
    /// service, `MOONTIDE_MASTER_PORT` among them.
    pub unknown_variables: Vec<String>,
}

impl MasterConfig {
    /// Puts the layers together. `flags` are names of settings with their text.
    pub fn load<'f>(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (String, String)>,
        flags: impl IntoIterator<Item = (&'f str, &'f str)>,
    ) -> Result<Loaded, ConfigError> {
        let mut config = match file {
            Some(path) => Self::from_file(path)?,
            None => MasterConfig::default(),
        };
        let mut unknown_variables = Vec::new();
        for (variable, text) in environment {
            let Some(name) = variable.strip_prefix(ENVIRONMENT_PREFIX) else { continue };
            match config.set(&name.to_ascii_lowercase(), &text) {
                Ok(()) => {}
                Err(SetError::Unknown) => unknown_variables.push(variable),
                Err(SetError::Value(expected)) => {
                    let (setting, origin) = (name.to_ascii_lowercase(), Origin::Environment);
                    return Err(ConfigError::Value { setting, origin, found: text, expected });
                }
            }
        }
        for (name, text) in flags {
            let setting = name.replace('-', "_");
            config.set(&setting, text).map_err(|error| match error {
                SetError::Unknown => ConfigError::Unknown { setting: name.to_owned() },
                SetError::Value(expected) => {
                    ConfigError::Value { setting, origin: Origin::Flag, found: text.to_owned(), expected }
                }
            })?;
        }
        Ok(Loaded { config, unknown_variables })
    }

    fn from_file(path: &Path) -> Result<MasterConfig, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::File { path: path.to_owned(), source })?;
        toml::from_str(&text)
            .map_err(|source| ConfigError::Toml { path: path.to_owned(), source: Box::new(source) })
    }

    /// The configuration as a file that would give it again, with a comment for each setting.
    pub fn to_toml(&self) -> String {
        let mut out = String::from("# Settings of a Moontide master. Flags win over the environment");
        out.push_str(&format!(" ({ENVIRONMENT_PREFIX}<SETTING>),\n# which wins over this file.\n"));
        for (setting, value) in Self::SETTINGS.iter().zip(self.values()) {
            out.push('\n');
            for line in wrapped(setting.help.trim(), 100) {
                out.push_str(&format!("# {line}\n"));
            }
            let default = (setting.default)().unwrap_or_else(|| "not set".to_owned());
            out.push_str(&format!("# Default: {default}\n"));
            match value {
                Some(value) => out.push_str(&format!("{} = {value}\n", setting.name)),
                None => out.push_str(&format!("# {} = \n", setting.name)),
            }
        }
        out
    }

    /// Checks every value and every relation between them, and says all that is wrong at once.
    pub fn validate(self) -> Result<ValidConfig, InvalidConfig> {
        let mut wrong = Vec::new();
        self.check_numbers(&mut wrong);
        self.check_addresses(&mut wrong);
        if wrong.is_empty() { Ok(ValidConfig(self)) } else { Err(InvalidConfig { wrong }) }
    }

    fn check_numbers(&self, wrong: &mut Vec<WrongValue>) {
        let mut within = |setting, found: u64, range: RangeInclusive<u64>, advice| {
            if !range.contains(&found) {
                let rule = format!("is {found}, it must be {} to {}", range.start(), range.end());
                wrong.push(WrongValue { setting, rule, advice });
            }
        };
        within(
            "groups",
            self.groups.into(),
            1..=GROUPS_MAX.into(),
            "take the default of 16, or more if the cluster will have more than 16 masters",
        );
        within(
            "session_ttl_ms",
            self.session_ttl_ms.into(),
            100..=3_600_000,
            "take some times the longest pause of a healthy node; 10000 is usual",
        );
        within(
            "lease_ms",
            self.lease_ms.into(),
            1_000..=60_000,
            "take some times the longest pause of a healthy master; 5000 is usual",
        );
        within(
            "reservation_ms",
            self.reservation_ms.into(),
            100..=RESERVATION_MS_MAX.into(),
            "take what the slowest writer of one object needs; 30000 is usual",
        );
        within(
            "reallocate_wait_ms",
            self.reallocate_wait_ms.into(),
            0..=3_600_000,
            "take the longest lease and a little more; 30300 is usual",
        );
        within(
            "absence_max_ms",
            self.absence_max_ms.into(),
            0..=86_400_000,
            "take how long a node's restart lasts; 60000 is usual",
        );
        within(
            "high_permille",
            self.high_permille.into(),
            1..=1000,
            "it is a share in thousandths; 950 is usual",
        );
        within("connections_max", self.connections_max.into(), 1..=1 << 20, "1024 is usual");
        within(
            "inflight_per_connection_max",
            self.inflight_per_connection_max.into(),
            1..=1 << 16,
            "256 is usual",
        );
        within(
            "frame_threads",
            self.frame_threads.into(),
            0..=1024,
            "0 takes as many threads as there are cores",
        );
        within(
            "stripe_bytes_max",
            self.stripe_bytes_max,
            PAGE_BYTES..=OBJECT_BYTES_MAX,
            "268435456 is usual",
        );
        let mut rule = |holds: bool, setting, rule: String, advice| {
            if !holds {
                wrong.push(WrongValue { setting, rule, advice });
            }
        };
        rule(
            self.low_permille < self.high_permille,
            "low_permille",
            format!("is {}, it must be below high_permille = {}", self.low_permille, self.high_permille),
            "lower it; 50 below high_permille is usual",
        );
        rule(
            self.stripe_bytes_max.is_multiple_of(PAGE_BYTES),
            "stripe_bytes_max",
            format!("is {}, it must be a multiple of {PAGE_BYTES}", self.stripe_bytes_max),
            "round it to whole pages of 256 KiB",
        );
    }

    fn check_addresses(&self, wrong: &mut Vec<WrongValue>) {
        if let Some(Err(error)) = self.registry.as_deref().map(RegistryAddress::from_str) {
            let (setting, rule) = ("registry", format!("is {:?}: {}", error.text, error.why));
            let advice =
                "take etcd://host:port/prefix or kubernetes://namespace/name, or leave it out for one master";
            wrong.push(WrongValue { setting, rule, advice });
        }
        let mut rule = |holds: bool, setting, rule: String, advice| {
            if !holds {
                wrong.push(WrongValue { setting, rule, advice });
            }
        };
        let doors = [
            ("grpc_listen", self.grpc_listen),
            ("frame_listen", self.frame_listen),
            ("admin_listen", self.admin_listen),
        ];
        for (at, (setting, address)) in doors.iter().enumerate() {
            for (other, same) in &doors[..at] {
                rule(
                    address != same || address.port() == 0,
                    setting,
                    format!("is {address}, the same as {other}"),
                    "give each door a port of its own",
                );
            }
        }
        let advertised = [
            ("grpc_advertise", self.grpc_listen, &self.grpc_advertise),
            ("frame_advertise", self.frame_listen, &self.frame_advertise),
        ];
        for (setting, listen, advertise) in advertised {
            match advertise {
                None => rule(
                    !listen.ip().is_unspecified(),
                    setting,
                    format!("is not set, and nobody can connect to {listen}"),
                    "set it to the name or address of this host, with the port",
                ),
                Some(address) => rule(
                    is_host_and_port(address),
                    setting,
                    format!("is {address:?}, it must be host:port of at most {ADDRESS_BYTES_MAX} bytes"),
                    "write it as in master-0.example:7400 or [2001:db8::1]:7400",
                ),
            }
        }
    }
}

fn is_host_and_port(address: &str) -> bool {
    address.len() <= ADDRESS_BYTES_MAX
        && address.rsplit_once(':').is_some_and(|(host, port)| {
            let bare = host.strip_prefix('[').map_or(Some(host), |inner| inner.strip_suffix(']'));
            bare.is_some_and(|bare| {
                !bare.is_empty()
                    && (bare != host || !bare.contains(':'))
                    && !bare.contains(char::is_whitespace)
            }) && port.parse::<u16>().is_ok_and(|port| port != 0)
        })
}

/// Lines of at most `width` characters, cut between words.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// A configuration that [`MasterConfig::validate`] has passed.
#[derive(Clone, Debug)]
pub struct ValidConfig(MasterConfig);

impl Deref for ValidConfig {
    type Target = MasterConfig;

    fn deref(&self) -> &MasterConfig {
        &self.0
    }
}

impl ValidConfig {
    /// Groups of the cluster.
    pub(crate) fn groups(&self) -> NonZeroU16 {
        NonZeroU16::new(self.groups).expect("validate() refuses 0 groups")
    }

    /// Where masters meet.
    pub(crate) fn registry(&self) -> RegistryAddress {
        let address = self.registry.as_deref().map(RegistryAddress::from_str);
        address.map_or(RegistryAddress::None, |address| address.expect("validate() refuses what is none"))
    }

    /// Threads of the framed door.
    pub(crate) fn frame_threads(&self) -> usize {
        match self.frame_threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads.into(),
        }
    }
}

/// A value that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongValue {
    /// The setting.
    pub setting: &'static str,
    /// What it is and must be.
    pub rule: String,
    /// What to do about it.
    pub advice: &'static str,
}

impl fmt::Display for WrongValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.setting, self.rule, self.advice)
    }
}

/// Everything that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the configuration cannot be used:{}", wrong.iter().map(|wrong| format!("\n  {wrong}")).collect::<String>())]
pub struct InvalidConfig {
    /// At least one.
    pub wrong: Vec<WrongValue>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(
        file: Option<&str>,
        environment: &[(&str, &str)],
        flags: &[(&str, &str)],
    ) -> Result<Loaded, ConfigError> {
        let name = format!("moontide-config-{}-{:?}.toml", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name.replace(['(', ')'], ""));
        if let Some(text) = file {
            std::fs::write(&path, text).unwrap();
        }
        let environment = environment.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        let loaded = MasterConfig::load(file.map(|_| path.as_path()), environment, flags.iter().copied());
        let _ = std::fs::remove_file(&path);
        loaded
    }

    #[test]
    fn file_then_environment_then_flags() {
        let file = Some("groups = 4\nsession_ttl_ms = 2000\nhigh_permille = 800\nlow_permille = 700\n");
        let environment = [
            ("MOONTIDE_MASTER_SESSION_TTL_MS", "3000"),
            ("MOONTIDE_MASTER_HIGH_PERMILLE", "810"),
            ("PATH", "/bin"),
        ];
        let config = load(file, &environment, &[("high-permille", "820")]).unwrap().config;
        let expected = MasterConfig {
            groups: 4,
            session_ttl_ms: 3000,
            high_permille: 820,
            low_permille: 700,
            ..MasterConfig::default()
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn nothing_set_is_all_defaults_and_valid() {
        let config = load(None, &[], &[]).unwrap().config;
        assert_eq!(config, MasterConfig::default());
        assert_eq!(config.validate().unwrap().groups().get(), 16);
    }

    #[test]
    fn the_printed_file_gives_the_same_configuration_again() {
        let flags = [
            ("data_dir", "/var/lib/moon \"tide\""),
            ("placement", "topology"),
            ("offload-admission", "read-before"),
            ("grpc-listen", "[::1]:9"),
            ("frame_advertise", "a.example:7401"),
        ];
        for config in [MasterConfig::default(), load(None, &[], &flags).unwrap().config] {
            let printed = config.to_toml();
            assert_eq!(toml::from_str::<MasterConfig>(&printed).unwrap(), config, "{printed}");
            for setting in MasterConfig::SETTINGS {
                assert!(printed.contains(setting.name) && !setting.help.trim().is_empty());
            }
        }
    }

    #[test]
    fn what_cannot_be_read_is_named_with_what_could() {
        let text = |result: Result<Loaded, ConfigError>| result.unwrap_err().to_string();
        let wrong = text(load(None, &[("MOONTIDE_MASTER_GROUPS", "many")], &[]));
        assert!(wrong.contains("MOONTIDE_MASTER_GROUPS") && wrong.contains("whole number"), "{wrong}");
        let wrong = text(load(None, &[], &[("grpc-listen", "localhost")]));
        assert!(wrong.contains("--grpc-listen") && wrong.contains("127.0.0.1:7400"), "{wrong}");
        let wrong = text(load(None, &[], &[("speed", "1")]));
        assert!(wrong.contains("speed"), "{wrong}");
        let wrong = text(load(Some("gruops = 4\n"), &[], &[]));
        assert!(wrong.contains("gruops") && wrong.contains("--print-config"), "{wrong}");
        let wrong = text(load(Some("placement = \"best\"\n"), &[], &[]));
        assert!(wrong.contains("free-ratio"), "{wrong}");
        let wrong = text(load(Some("offload_admission = \"none\"\n"), &[], &[]));
        assert!(wrong.contains("read-before"), "{wrong}");
        let wrong = text(load(None, &[("MOONTIDE_MASTER_OFFLOAD_ADMISSION", "none")], &[]));
        assert!(wrong.contains("read-before"), "{wrong}");
        let wrong = text(MasterConfig::load(Some(Path::new("/nowhere/at/all.toml")), [], []));
        assert!(wrong.contains("/nowhere/at/all.toml"), "{wrong}");
    }

    #[test]
    fn variables_of_other_programs_are_passed_over() {
        let loaded = load(None, &[("MOONTIDE_MASTER_PORT", "tcp://10.0.0.1:7400")], &[]).unwrap();
        assert_eq!(loaded.unknown_variables, ["MOONTIDE_MASTER_PORT"]);
    }

    #[test]
    fn each_wrong_value_is_found_and_named() {
        let cases: &[(&str, &str)] = &[
            ("groups", "0"),
            ("groups", "4097"),
            ("session_ttl_ms", "99"),
            ("reservation_ms", "0"),
            ("reservation_ms", "30001"),
            ("reallocate_wait_ms", "3600001"),
            ("absence_max_ms", "86400001"),
            ("high_permille", "1001"),
            ("low_permille", "950"),
            ("stripe_bytes_max", "262145"),
            ("stripe_bytes_max", "0"),
            ("connections_max", "0"),
            ("inflight_per_connection_max", "0"),
            ("frame_threads", "1025"),
            ("grpc_advertise", "host"),
            ("grpc_advertise", "host:0"),
            ("grpc_advertise", "::1:7400"),
            ("frame_advertise", ":7401"),
        ];
        for &(setting, text) in cases {
            let invalid = load(None, &[], &[(setting, text)]).unwrap().config.validate().unwrap_err();
            assert!(
                invalid.wrong.iter().all(|wrong| wrong.setting == setting),
                "{setting}={text}: {invalid}"
            );
            assert!(invalid.wrong.iter().all(|wrong| !wrong.advice.is_empty()));
        }
        let same =
            load(None, &[], &[("frame_listen", "127.0.0.1:7400")]).unwrap().config.validate().unwrap_err();
        assert_eq!(same.wrong[0].setting, "frame_listen");
        let hidden =
            load(None, &[], &[("frame_listen", "0.0.0.0:7401")]).unwrap().config.validate().unwrap_err();
        assert_eq!(hidden.wrong[0].setting, "frame_advertise");
        let several =
            load(None, &[], &[("groups", "0"), ("connections_max", "0")]).unwrap().config.validate();
        assert_eq!(several.unwrap_err().wrong.len(), 2, "all that is wrong is said at once");
    }

    #[test]
    fn doors_may_share_a_free_port_number() {
        let flags = [
            ("grpc_listen", "127.0.0.1:0"),
            ("frame_listen", "127.0.0.1:0"),
            ("admin_listen", "127.0.0.1:0"),
        ];
        assert!(load(None, &[], &flags).unwrap().config.validate().is_ok());
        assert!(is_host_and_port("[2001:db8::1]:7400") && is_host_and_port("10.0.0.1:1"));
    }
}
