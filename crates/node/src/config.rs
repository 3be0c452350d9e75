//! [`NodeConfig`]: everything that can be set, in one struct. [`NodeConfig::validate`] seals it: each wrong value is
//! named with what to do about it, all of them at once.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::Duration;

use moontide_disk::{BackendKind, EngineChoice, EvictionOrder};
use moontide_heap::HugePages;
use moontide_proto::limits::{ADDRESS_BYTES_MAX, ADDRESSES_MAX, LABEL_BYTES_MAX};
use moontide_types::NodeId;

use crate::decide::plan::SEGMENT_BYTES_MIN;

/// Where the master's gRPC is: its own default, on this host.
pub const MASTER_DEFAULT: &str = "127.0.0.1:7400";
/// Enough to try it out; a node in earnest is given what its host can spare.
pub const MEMORY_BYTES_DEFAULT: u64 = 1 << 30;
/// A segment's report is a few tens of megabytes, and a scan of it some milliseconds.
pub const SEGMENT_BYTES_MAX_DEFAULT: u64 = 1 << 30;
/// A header is 128 bytes: at 8 KiB a slot, headers take a 64th of the memory.
pub const SLOT_BYTES_DEFAULT: u64 = 8192;
/// Half of the time for which a master keeps in mind what was removed while a node is away.
pub const LOCAL_STALE_MAX_DEFAULT: Duration = Duration::from_secs(30);
/// A transfer takes milliseconds; who holds a guard for longer than this is cut off.
pub const DRAIN_DEFAULT: Duration = Duration::from_secs(5);

/// Room for what comes from disk on its way to readers: 256 records of 1 MiB, a tenth of a second's reading.
pub const STAGING_BYTES_DEFAULT: u64 = 256 << 20;
/// Threads that read from disk: one keeps a disk busy, two do while one of them verifies the end of a record.
pub const LOAD_THREADS_DEFAULT: usize = 2;

/// How long a start waits for the master: to be told how many groups there are, and to have its segments taken.
pub const MASTER_WAIT: Duration = Duration::from_secs(5);

/// Everything that can be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeConfig {
    /// "host:port" of the master's gRPC; several with commas between them where there are several masters, any of which will
    /// do.
    pub master: String,
    /// The node's number; none: drawn at random at each start.
    pub node: Option<NodeId>,
    /// Memory for payload. Rounded down to whole segments.
    pub memory_bytes: u64,
    /// Largest segment.
    pub segment_bytes_max: u64,
    /// One header slot per so many bytes of memory: about the size of an object.
    pub slot_bytes: u64,
    /// Where transfers are served over TCP, one address per rail; port 0 takes a free one.
    pub listen: Vec<SocketAddr>,
    /// "ip:port" under which others reach these; empty: what was bound. Needed when one of them is a wildcard.
    pub advertise: Vec<String>,
    /// Whether processes of this host may map the memory.
    pub local: bool,
    /// The Unix socket at which they ask; none: `moontide-<node in hex>.sock` in `$XDG_RUNTIME_DIR` or `/tmp/moontide-<uid>`.
    pub door: Option<PathBuf>,
    /// Label: the host. Its name unless set.
    pub host: String,
    /// Label: the rack.
    pub rack: String,
    /// Label: the zone.
    pub zone: String,
    /// Where the page for operators is served; none: nowhere.
    pub admin_listen: Option<SocketAddr>,
    /// How long objects are served to processes of this host while no master is heard.
    pub local_stale_max: Duration,
    /// How long a shutdown waits for transfers under way.
    pub drain: Duration,
    /// Pages of the memory.
    pub huge: HugePages,
    /// A disk for what does not fit into memory; none: it is lost.
    pub disk: Option<DiskConfig>,
}

/// A node's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// The directory. The node's number is kept there, too.
    pub dir: PathBuf,
    /// How records stand in it.
    pub backend: BackendKind,
    /// Most bytes; none: nine tenths of what is free on its file system at the start.
    pub limit_bytes: Option<u64>,
    /// Who goes first when they are used up.
    pub order: EvictionOrder,
    /// By which calls of the system it is read and written.
    pub engine: EngineChoice,
    /// Most bytes written per second; 0: as fast as it goes.
    pub write_bytes_per_s: u64,
    /// Memory for what comes from disk on its way to readers.
    pub staging_bytes: u64,
    /// Threads that read.
    pub load_threads: usize,
}

impl DiskConfig {
    /// A disk in this directory, everything else as usual.
    pub fn new(dir: impl Into<PathBuf>) -> DiskConfig {
        DiskConfig {
            dir: dir.into(),
            backend: BackendKind::default(),
            limit_bytes: None,
            order: EvictionOrder::default(),
            engine: EngineChoice::Auto,
            write_bytes_per_s: 0,
            staging_bytes: STAGING_BYTES_DEFAULT,
            load_threads: LOAD_THREADS_DEFAULT,
        }
    }
}

const ANY_LOCAL_PORT: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));

impl Default for NodeConfig {
    fn default() -> NodeConfig {
        NodeConfig {
            master: MASTER_DEFAULT.into(),
            node: None,
            memory_bytes: MEMORY_BYTES_DEFAULT,
            segment_bytes_max: SEGMENT_BYTES_MAX_DEFAULT,
            slot_bytes: SLOT_BYTES_DEFAULT,
            listen: vec![ANY_LOCAL_PORT],
            advertise: Vec::new(),
            local: true,
            door: None,
            host: host_name(),
            rack: String::new(),
            zone: String::new(),
            admin_listen: Some(ANY_LOCAL_PORT),
            local_stale_max: LOCAL_STALE_MAX_DEFAULT,
            drain: DRAIN_DEFAULT,
            huge: HugePages::IfAllowed,
            disk: None,
        }
    }
}

/// This host's name, as long as a label may be.
fn host_name() -> String {
    let uname = rustix::system::uname();
    let mut name = uname.nodename().to_string_lossy().into_owned();
    while name.len() > LABEL_BYTES_MAX {
        name.pop();
    }
    name
}

/// One wrong value.
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

impl NodeConfig {
    /// The masters that are named, each by itself.
    pub(crate) fn masters(&self) -> Vec<String> {
        self.master.split(',').map(|master| master.trim().to_owned()).collect()
    }

    /// Whether a node can be started with it.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        let mut wrong = Vec::new();
        let mut rule = |holds: bool, setting, rule: String, advice| {
            if !holds {
                wrong.push(WrongValue { setting, rule, advice });
            }
        };
        let master = &self.master;
        rule(
            self.masters().iter().all(|master| is_host_and_port(master)),
            "master",
            format!("is \"{master}\", not \"host:port\", or several with commas between them"),
            "name the master's gRPC address, as 127.0.0.1:7400",
        );
        rule(
            self.node != Some(NodeId(0)),
            "node",
            "is 0".into(),
            "take any other number, or leave it out to have one drawn",
        );
        let (memory, segment, least) = (self.memory_bytes, self.segment_bytes_max, SEGMENT_BYTES_MIN);
        rule(
            memory >= least,
            "memory_bytes",
            format!("is {memory}, less than {least}"),
            "give the node at least a segment of 1 MiB for each group of the cluster",
        );
        rule(
            segment >= least,
            "segment_bytes_max",
            format!("is {segment}, less than {least}"),
            "leave it at its default of 1 GiB, unless the memory is small",
        );
        rule(
            self.slot_bytes >= 512,
            "slot_bytes",
            format!("is {}, less than 512", self.slot_bytes),
            "an object takes at least 512 bytes: set it to the usual size of yours",
        );
        rule(
            !self.listen.is_empty(),
            "listen",
            "is empty".into(),
            "name an address for other hosts to reach this node by",
        );
        // One address is kept for the door.
        let (listens, most) = (self.listen.len().max(self.advertise.len()), ADDRESSES_MAX - 1);
        rule(
            listens <= most,
            "listen",
            format!("has {listens} addresses, more than {most}"),
            "name one per network card",
        );
        let wildcard = self.listen.iter().find(|address| address.ip().is_unspecified());
        rule(
            wildcard.is_none() || !self.advertise.is_empty(),
            "advertise",
            format!(
                "is empty, and listen has the wildcard {}",
                wildcard.map_or_else(String::new, ToString::to_string)
            ),
            "name the addresses under which other hosts reach this one",
        );
        for address in &self.advertise {
            let named = address.parse::<SocketAddr>().ok();
            rule(
                named.is_some_and(|a| !a.ip().is_unspecified() && a.port() != 0),
                "advertise",
                format!("has \"{address}\", not \"ip:port\""),
                "name an IP address and a port, as 10.0.0.7:7500",
            );
        }
        for (setting, label) in [("host", &self.host), ("rack", &self.rack), ("zone", &self.zone)] {
            let len = label.len();
            rule(
                len <= LABEL_BYTES_MAX,
                setting,
                format!("has {len} bytes, more than {LABEL_BYTES_MAX}"),
                "shorten the label",
            );
        }
        // Over a Unix socket's path the kernel has its own bound of 108, with the terminating zero.
        let door = self.door.as_ref().map_or(0, |door| door.as_os_str().len());
        rule(
            door < 108,
            "door",
            format!("has {door} bytes, more than 107"),
            "choose a shorter path for the socket",
        );
        rule(
            self.local_stale_max >= Duration::from_millis(100),
            "local_stale_max",
            format!("is {:?}, less than 100ms", self.local_stale_max),
            "give the master time for a few heartbeats",
        );
        rule(
            self.drain <= Duration::from_secs(3600),
            "drain",
            format!("is {:?}, more than an hour", self.drain),
            "a shutdown must end",
        );
        if let Some(disk) = &self.disk {
            rule(
                !disk.dir.as_os_str().is_empty(),
                "disk.dir",
                "is empty".into(),
                "name a directory on the SSD",
            );
            rule(
                disk.limit_bytes.is_none_or(|limit| limit >= DISK_BYTES_MIN),
                "disk.limit_bytes",
                format!("is {}, less than {DISK_BYTES_MIN}", disk.limit_bytes.unwrap_or(0)),
                "give the disk at least 64 MiB, or leave it out for nine tenths of what is free",
            );
            rule(
                (STAGING_BYTES_MIN..=STAGING_BYTES_MAX).contains(&disk.staging_bytes),
                "disk.staging_bytes",
                format!("is {}, not {STAGING_BYTES_MIN} to {STAGING_BYTES_MAX}", disk.staging_bytes),
                "give it a few times the largest object, and 256 MiB if memory is no matter",
            );
            let info = rustix::system::sysinfo();
            let half = u64::from(info.mem_unit) * info.totalram as u64 / 2;
            rule(
                disk.staging_bytes <= half,
                "disk.staging_bytes",
                format!("is {}, more than half of this machine's memory", disk.staging_bytes),
                "it is held in memory as long as the node runs: a few times the largest object is enough",
            );
            rule(
                (1..=64).contains(&disk.load_threads),
                "disk.load_threads",
                format!("is {}, not 1 to 64", disk.load_threads),
                "one or two keep an SSD busy",
            );
        }
        if wrong.is_empty() { Ok(()) } else { Err(InvalidConfig { wrong }) }
    }
}

/// Less than this is not worth a file.
const DISK_BYTES_MIN: u64 = 64 << 20;

/// Room for the longest stripe that a master cuts, and some.
const STAGING_BYTES_MIN: u64 = 8 << 20;
const STAGING_BYTES_MAX: u64 = 1 << 40;

fn is_host_and_port(text: &str) -> bool {
    let fits = text.len() <= ADDRESS_BYTES_MAX;
    fits && text.rsplit_once(':').is_some_and(|(host, port)| {
        let host_is_one = !host.is_empty() && (!host.contains(':') || host.starts_with('['));
        host_is_one && !host.contains(['/', ' ']) && port.parse::<u16>().is_ok_and(|port| port != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_can_be_used() {
        assert_eq!(NodeConfig::default().validate(), Ok(()));
    }

    #[test]
    fn each_wrong_value_is_named_with_advice() {
        type Change = fn(&mut NodeConfig);
        let cases: &[(&str, Change)] = &[
            ("master", |c| c.master = "localhost".into()),
            ("master", |c| c.master = "http://localhost:7400".into()),
            ("master", |c| c.master = "localhost:0".into()),
            ("master", |c| c.master = "::1:7400".into()),
            ("node", |c| c.node = Some(NodeId(0))),
            ("memory_bytes", |c| c.memory_bytes = 1000),
            ("segment_bytes_max", |c| c.segment_bytes_max = 0),
            ("slot_bytes", |c| c.slot_bytes = 0),
            ("listen", |c| c.listen.clear()),
            ("listen", |c| c.listen = vec![ANY_LOCAL_PORT; 32]),
            ("advertise", |c| c.listen = vec!["0.0.0.0:7500".parse().unwrap()]),
            ("advertise", |c| c.advertise = vec!["host:7500".into()]),
            ("advertise", |c| c.advertise = vec!["0.0.0.0:7500".into()]),
            ("host", |c| c.host = "h".repeat(65)),
            ("rack", |c| c.rack = "r".repeat(65)),
            ("zone", |c| c.zone = "z".repeat(65)),
            ("door", |c| c.door = Some("d".repeat(108).into())),
            ("local_stale_max", |c| c.local_stale_max = Duration::ZERO),
            ("drain", |c| c.drain = Duration::from_secs(3601)),
        ];
        for (setting, change) in cases {
            let mut config = NodeConfig::default();
            change(&mut config);
            let invalid = config.validate().expect_err(setting);
            assert!(invalid.wrong.iter().all(|w| w.setting == *setting && !w.advice.is_empty()), "{invalid}");
        }
        let several = NodeConfig { memory_bytes: 0, slot_bytes: 0, ..NodeConfig::default() };
        assert_eq!(several.validate().unwrap_err().wrong.len(), 2, "all that is wrong is said at once");
    }

    #[test]
    fn a_wildcard_with_an_advertised_address_can_be_used() {
        let config = NodeConfig {
            listen: vec!["0.0.0.0:7500".parse().unwrap()],
            advertise: vec!["10.0.0.7:7500".into()],
            master: "[::1]:7400".into(),
            ..NodeConfig::default()
        };
        assert_eq!(config.validate(), Ok(()));
    }
}
