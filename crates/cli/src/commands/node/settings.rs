//! [`Settings`]: what can be set of a node, by flags, environment and file alike.
//!
//! Each is optional here; what is not given stays as [`NodeConfig::default`] has it. The values' rules are
//! [`NodeConfig::validate`]'s.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args as ClapArgs, Command};
use moontide_node::{DiskConfig, HugePages, NodeConfig};
use moontide_types::NodeId;
use serde::{Deserialize, Deserializer};

use crate::text;

/// Types that are text on the command line and in the file.
macro_rules! from_text {
    ($($name:ident),*) => {$(
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$name, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

mod disk;

use disk::DiskSettings;

/// In front of a setting's name in the environment.
pub(super) const ENVIRONMENT_PREFIX: &str = "MOONTIDE_NODE_";

/// The file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum SettingsError {
    #[error("{file}: {source}; name a file that can be read, or leave --config out")]
    Unreadable { file: String, source: std::io::Error },
    #[error("{file}: {source}see `moontide node --print-config` for all settings")]
    Wrong { file: String, source: toml::de::Error },
}

/// What can be set. The names are those of [`NodeConfig`].
#[derive(Clone, Debug, Default, ClapArgs, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Settings {
    /// "host:port" of the master's gRPC; several with commas between them, any of which will do
    #[arg(long, env = "MOONTIDE_NODE_MASTER", value_name = "HOST:PORT")]
    master: Option<String>,
    /// The node's number, 16 hexadecimal digits; drawn at each start unless set
    #[arg(long, env = "MOONTIDE_NODE_NODE", value_name = "HEX")]
    node: Option<Number>,
    /// Memory for objects, as 4GiB; rounded down to whole segments
    #[arg(long, visible_alias = "memory", env = "MOONTIDE_NODE_MEMORY_BYTES", value_name = "SIZE")]
    memory_bytes: Option<Size>,
    /// Largest segment
    #[arg(long, env = "MOONTIDE_NODE_SEGMENT_BYTES_MAX", value_name = "SIZE")]
    segment_bytes_max: Option<Size>,
    /// One header per so many bytes of memory: about the size of an object
    #[arg(long, env = "MOONTIDE_NODE_SLOT_BYTES", value_name = "SIZE")]
    slot_bytes: Option<Size>,
    /// Where transfers are served over TCP, one address per network card; port 0 takes a free one
    #[arg(long, env = "MOONTIDE_NODE_LISTEN", value_name = "IP:PORT", value_delimiter = ',')]
    listen: Option<Vec<SocketAddr>>,
    /// Under which addresses others reach these; needed when one of them is a wildcard as 0.0.0.0
    #[arg(long, env = "MOONTIDE_NODE_ADVERTISE", value_name = "IP:PORT", value_delimiter = ',')]
    advertise: Option<Vec<String>>,
    /// Whether processes of this host may map the memory
    #[arg(long, env = "MOONTIDE_NODE_LOCAL", value_name = "BOOL")]
    local: Option<bool>,
    /// The Unix socket at which they ask; a path made from the node's number unless set
    #[arg(long, env = "MOONTIDE_NODE_DOOR", value_name = "PATH")]
    door: Option<PathBuf>,
    /// Label for placement: the host
    #[arg(long, env = "MOONTIDE_NODE_HOST")]
    host: Option<String>,
    /// Label for placement: the rack
    #[arg(long, env = "MOONTIDE_NODE_RACK")]
    rack: Option<String>,
    /// Label for placement: the zone
    #[arg(long, env = "MOONTIDE_NODE_ZONE")]
    zone: Option<String>,
    /// Where the page for operators is served; "none" for nowhere
    #[arg(long, env = "MOONTIDE_NODE_ADMIN_LISTEN", value_name = "IP:PORT")]
    admin_listen: Option<Listen>,
    /// How long objects are served to processes of this host while no master is heard
    #[arg(long, env = "MOONTIDE_NODE_LOCAL_STALE_MAX", value_name = "TIME")]
    local_stale_max: Option<Time>,
    /// How long a shutdown waits for transfers under way
    #[arg(long, env = "MOONTIDE_NODE_DRAIN", value_name = "TIME")]
    drain: Option<Time>,
    /// Pages of the memory: "if-allowed", or "reserved" for 2 MiB pages that the operator reserved
    #[arg(long, env = "MOONTIDE_NODE_HUGE", value_name = "PAGES")]
    huge: Option<Pages>,
    #[command(flatten)]
    disk: DiskSettings,
}

impl Settings {
    /// From a TOML file.
    pub(super) fn read(path: &Path) -> Result<Settings, SettingsError> {
        let file = path.display().to_string();
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(source) => return Err(SettingsError::Unreadable { file, source }),
        };
        toml::from_str(&text).map_err(|source| SettingsError::Wrong { file, source })
    }

    /// Puts what is given over what is there.
    pub(super) fn apply(self, config: &mut NodeConfig) {
        let Settings {
            master,
            node,
            memory_bytes,
            segment_bytes_max,
            slot_bytes,
            listen,
            advertise,
            local,
            door,
            host,
            rack,
            zone,
            admin_listen,
            local_stale_max,
            drain,
            huge,
            disk,
        } = self;
        set(&mut config.master, master);
        set(&mut config.node, node.map(|node| Some(node.0)));
        set(&mut config.memory_bytes, memory_bytes.map(|size| size.0));
        set(&mut config.segment_bytes_max, segment_bytes_max.map(|size| size.0));
        set(&mut config.slot_bytes, slot_bytes.map(|size| size.0));
        set(&mut config.listen, listen);
        set(&mut config.advertise, advertise);
        set(&mut config.local, local);
        set(&mut config.door, door.map(Some));
        set(&mut config.host, host);
        set(&mut config.rack, rack);
        set(&mut config.zone, zone);
        set(&mut config.admin_listen, admin_listen.map(|listen| listen.0));
        set(&mut config.local_stale_max, local_stale_max.map(|time| time.0));
        set(&mut config.drain, drain.map(|time| time.0));
        set(&mut config.huge, huge.map(|pages| pages.0));
        disk.apply(&mut config.disk);
    }
}

fn set<T>(target: &mut T, given: Option<T>) {
    if let Some(given) = given {
        *target = given;
    }
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// A line of the file; without a value it is a comment.
struct Printed {
    name: &'static str,
    value: Option<String>,
}

/// A configuration as a file that [`Settings::read`] takes. What is not set stands there as a comment.
pub(super) fn to_toml(config: &NodeConfig) -> String {
    let list = |list: Vec<String>| toml::Value::from(list).to_string();
    let time = |time: Duration| quoted(&format!("{}ms", time.as_millis()));
    let named = |name: &'static str, value: Option<String>| Printed { name, value };
    let values = [
        named("master", Some(quoted(&config.master))),
        named("node", config.node.map(|node| quoted(&format!("{:016x}", node.0)))),
        named("memory_bytes", Some(config.memory_bytes.to_string())),
        named("segment_bytes_max", Some(config.segment_bytes_max.to_string())),
        named("slot_bytes", Some(config.slot_bytes.to_string())),
        named("listen", Some(list(config.listen.iter().map(ToString::to_string).collect()))),
        named("advertise", Some(list(config.advertise.clone()))),
        named("local", Some(config.local.to_string())),
        named("door", config.door.as_ref().map(|door| quoted(&door.to_string_lossy()))),
        named("host", Some(quoted(&config.host))),
        named("rack", Some(quoted(&config.rack))),
        named("zone", Some(quoted(&config.zone))),
        named(
            "admin_listen",
            Some(quoted(&config.admin_listen.map_or("none".to_owned(), |address| address.to_string()))),
        ),
        named("local_stale_max", Some(time(config.local_stale_max))),
        named("drain", Some(time(config.drain))),
        named("huge", Some(quoted(Pages(config.huge).name()))),
    ];
    let described = Settings::augment_args(Command::new("settings"));
    let help = |id: &str| {
        let argument = described.get_arguments().find(|argument| argument.get_id() == id);
        argument.and_then(|argument| argument.get_help()).map(ToString::to_string).unwrap_or_default()
    };
    let mut file = String::from("# Settings of `moontide node`.\n");
    for Printed { name, value } in values {
        let help = help(name);
        let _ = match value {
            Some(value) => write!(file, "\n# {help}.\n{name} = {value}\n"),
            None => write!(file, "\n# {help}.\n# {name} = \n"),
        };
    }
    // Without a disk the whole table is a comment, with what would be in force.
    let (sign, disk) = match &config.disk {
        Some(disk) => ("", disk.clone()),
        None => ("# ", DiskConfig::new("")),
    };
    let _ = write!(file, "\n{sign}[disk]\n");
    for Printed { name, value } in disk::to_toml(&disk) {
        let help = help(&format!("disk_{name}"));
        let _ = match value {
            Some(value) => write!(file, "\n# {help}.\n{sign}{name} = {value}\n"),
            None => write!(file, "\n# {help}.\n# {name} = \n"),
        };
    }
    file
}

/// Variables that begin like ours and name no setting.
pub(super) fn unknown_variables() -> Vec<String> {
    let described = Settings::augment_args(Command::new("settings"));
    let known: Vec<_> = described.get_arguments().filter_map(|argument| argument.get_env()).collect();
    std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| {
            name.starts_with(ENVIRONMENT_PREFIX) && !known.iter().any(|known| *known == name.as_str())
        })
        .collect()
}

from_text!(Number, Time, Listen, Pages);

/// A node's number.
#[derive(Clone, Copy, Debug)]
struct Number(NodeId);

impl FromStr for Number {
    type Err = String;

    fn from_str(text: &str) -> Result<Number, String> {
        let digits = text.strip_prefix("0x").unwrap_or(text);
        let is_plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = is_plain.then(|| u64::from_str_radix(digits, 16).ok()).flatten();
        let number = number
            .ok_or_else(|| format!("{text:?} is no number of a node; write 1 to 16 hexadecimal digits"))?;
        Ok(Number(NodeId(number)))
    }
}

/// A number of bytes; in a file also without quotes.
#[derive(Clone, Copy, Debug)]
struct Size(u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        text::size(text).map(Size)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a size: 131072, \"64KiB\", \"512MiB\" or \"4GiB\"")]
        enum Written {
            Number(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(bytes) => Ok(Size(bytes)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// A length of time.
#[derive(Clone, Copy, Debug)]
struct Time(Duration);

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Time, String> {
        text::duration(text).map(Time)
    }
}

/// An address, or nowhere.
#[derive(Clone, Copy, Debug)]
struct Listen(Option<SocketAddr>);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Listen, String> {
        if text == "none" {
            return Ok(Listen(None));
        }
        let wrong = || format!("{text:?} is no address; write 127.0.0.1:7403, [::1]:7403 or none");
        text.parse().map(|address| Listen(Some(address))).map_err(|_| wrong())
    }
}

/// Which pages memory is made of.
#[derive(Clone, Copy, Debug)]
struct Pages(HugePages);

impl Pages {
    fn name(self) -> &'static str {
        match self.0 {
            HugePages::IfAllowed => "if-allowed",
            HugePages::Reserved => "reserved",
        }
    }
}

impl FromStr for Pages {
    type Err = String;

    fn from_str(text: &str) -> Result<Pages, String> {
        let all = [HugePages::IfAllowed, HugePages::Reserved].map(Pages);
        let found = all.into_iter().find(|pages| pages.name() == text);
        found.ok_or_else(|| format!("{text:?} is neither if-allowed nor reserved"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_node::{BackendKind, EngineChoice, EvictionOrder};

    #[test]
    fn what_is_printed_is_read_as_the_same() {
        let changed = NodeConfig {
            node: Some(NodeId(0xfeed)),
            memory_bytes: 5 << 30,
            listen: vec!["10.0.0.7:7500".parse().unwrap(), "[::1]:0".parse().unwrap()],
            advertise: vec!["10.0.0.7:7500".to_owned()],
            local: false,
            door: Some("/run/moontide.sock".into()),
            rack: "r\"12".to_owned(),
            admin_listen: None,
            drain: Duration::from_millis(1250),
            huge: HugePages::Reserved,
            disk: Some(DiskConfig::new("/mnt/ssd/moon \"tide\"")),
            ..NodeConfig::default()
        };
        let all_of_a_disk = DiskConfig {
            backend: BackendKind::Offset,
            limit_bytes: Some(200 << 30),
            order: EvictionOrder::Lru,
            engine: EngineChoice::Posix,
            write_bytes_per_s: 500 << 20,
            staging_bytes: 64 << 20,
            load_threads: 3,
            ..DiskConfig::new("/mnt/ssd")
        };
        let with_disk = NodeConfig { disk: Some(all_of_a_disk), ..NodeConfig::default() };
        for config in [NodeConfig::default(), changed, with_disk] {
            let printed = to_toml(&config);
            let read: Settings =
                toml::from_str(&printed).unwrap_or_else(|error| panic!("{error}\n{printed}"));
            let mut again = NodeConfig::default();
            read.apply(&mut again);
            assert_eq!(again, config, "{printed}");
            assert!(printed.matches("\n# ").count() >= 24, "{printed}");
        }
    }

    #[test]
    fn later_settings_win() {
        let file: Settings =
            toml::from_str("memory_bytes = \"2GiB\"\nrack = \"a\"\nslot_bytes = 4096\n").unwrap();
        let flags: Settings = toml::from_str("rack = \"b\"").unwrap();
        let mut config = NodeConfig::default();
        file.apply(&mut config);
        flags.apply(&mut config);
        assert_eq!((config.memory_bytes, config.slot_bytes, config.rack.as_str()), (2 << 30, 4096, "b"));
    }

    #[test]
    fn a_directory_turns_the_disk_on_and_other_layers_may_add_to_it() {
        let applied = |layers: &[&str]| {
            let mut config = NodeConfig::default();
            for layer in layers {
                toml::from_str::<Settings>(layer).unwrap().apply(&mut config);
            }
            config
        };
        assert_eq!(applied(&["rack = \"a\""]).disk, None);
        let disk =
            applied(&["[disk]\ndir = \"/ssd\"\norder = \"lru\"", "[disk]\nlimit_bytes = \"1GiB\""]).disk;
        let expected =
            DiskConfig { order: EvictionOrder::Lru, limit_bytes: Some(1 << 30), ..DiskConfig::new("/ssd") };
        assert_eq!(disk, Some(expected));
        let invalid = applied(&["[disk]\nlimit_bytes = \"1GiB\""]).validate().unwrap_err();
        assert_eq!(invalid.wrong[0].setting, "disk.dir", "a limit without a disk is refused: {invalid}");
    }

    #[test]
    fn wrong_values_are_refused() {
        for wrong in [
            "memory = 1",
            "memory_bytes = -1",
            "memory_bytes = \"much\"",
            "node = \"node-7\"",
            "drain = 5",
            "admin_listen = \"here\"",
            "huge = \"yes\"",
            "unknown = 1",
            "disk = \"/ssd\"",
            "[disk]\ndisk_dir = \"/ssd\"",
            "[disk]\nbackend = \"tape\"",
            "[disk]\norder = \"random\"",
            "[disk]\nengine = \"aio\"",
            "[disk]\nlimit_bytes = \"most\"",
            "[disk]\nload_threads = -1",
        ] {
            assert!(toml::from_str::<Settings>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_setting_has_a_variable_of_its_name() {
        for argument in Settings::augment_args(Command::new("settings")).get_arguments() {
            let expected = format!("{ENVIRONMENT_PREFIX}{}", argument.get_id().as_str().to_uppercase());
            assert_eq!(argument.get_env().and_then(|name| name.to_str()), Some(expected.as_str()));
        }
    }
}
