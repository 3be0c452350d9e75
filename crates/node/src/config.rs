//! [`NodeConfig`]: all settings of a node.
//!
//! The tables below declare each setting once; [`moontide_settings`] derives file, environment, flags and help texts from
//! them. [`NodeConfig::validate`] reports every invalid setting at once, each with a hint.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::Duration;

use moontide_auth::CredentialFiles;
use moontide_disk::{BackendKind, EvictionPolicy, IoEngine};
use moontide_heap::HugePages;
use moontide_proto::limits::{ADDRESS_BYTES_MAX, ADDRESSES_MAX, LABEL_BYTES_MAX};
use moontide_settings::{
    Bytes, Component, HostNames, HostPorts, InvalidConfig, InvalidSetting, Kind, ValueInfo, choices,
    is_host_and_port, is_host_name, settings,
};
use moontide_types::NodeId;

use crate::logic::segment_plan::SEGMENT_BYTES_MIN;

/// Address of the master's gRPC server: the master's own default port on the local host.
pub const MASTER_DEFAULT: &str = "127.0.0.1:7400";
/// Suits evaluation. Production nodes set `memory_bytes` to the memory that the host does not need otherwise.
pub const MEMORY_BYTES_DEFAULT: u64 = 1 << 30;
/// At this size, the report of a segment takes a few tens of megabytes, and a scan a few milliseconds.
pub const SEGMENT_BYTES_MAX_DEFAULT: u64 = 1 << 30;
/// A header has 128 bytes: with one slot per 8 KiB, headers take 1/64 of the memory.
pub const BYTES_PER_SLOT_DEFAULT: u64 = 8192;
/// Half the time for which a master keeps tombstones for an unreachable node.
pub const SELF_FENCE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// A transfer takes milliseconds. A shutdown does not wait longer than this for a reader that still holds a guard.
pub const DRAIN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(5);

/// An SSD that writes 1 GB/s writes 30 GB in this time. Service managers kill a process that stops for longer than 90 s.
pub const FLUSH_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// Default of [`DiskConfig::exclude_after`]: no working disk takes so long for an operation.
const EXCLUDE_AFTER_DEFAULT: Duration = Duration::from_secs(20);

/// Staging memory for records read from disk: 256 records of 1 MiB, the reads of about 0.1 s.
pub const STAGING_BYTES_DEFAULT: u64 = 256 << 20;
/// Threads that read from disk. One keeps a disk busy; with two, reads go on while one verifies the end of a record.
pub const READ_THREADS_DEFAULT: usize = 2;
/// Default of [`NodeConfig::copy_bytes_per_s`]: a fifth of a network of 10 Gbit/s.
pub const COPY_BYTES_PER_S_DEFAULT: u64 = 256 << 20;

/// Time a start waits for a master: to learn the number of groups, and to mount the segments.
pub const MASTER_START_TIMEOUT: Duration = Duration::from_secs(5);

choices! {
    /// Names of page kinds.
    enum HugePagesName for HugePages { HugePages::Auto => "auto", HugePages::Reserved => "reserved" }
}

choices! {
    /// Names of disk layouts.
    enum BackendName for BackendKind {
        BackendKind::Bucket => "bucket",
        BackendKind::File => "file",
        BackendKind::Offset => "offset",
    }
}

choices! {
    /// Names of eviction policies of a full disk.
    enum EvictionPolicyName for EvictionPolicy { EvictionPolicy::Fifo => "fifo", EvictionPolicy::Lru => "lru" }
}

choices! {
    /// Names of disk I/O engines.
    enum IoEngineName for IoEngine {
        IoEngine::Auto => "auto",
        IoEngine::Uring => "uring",
        IoEngine::Posix => "posix",
    }
}

settings! {
    /// Settings of a node.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct NodeConfig {
        /// Address of a master's gRPC server; several separated by commas.
        ///
        /// One reachable master is enough.
        master: String as HostPorts = MASTER_DEFAULT.into();
        /// Node id; none draws a random one at each start.
        ///
        /// A node with a disk takes the id that is stored there.
        node_id: Option<NodeId> = None;
        /// Memory for objects, rounded down to whole segments.
        ///
        /// Headers take another 128 bytes per slot.
        memory_bytes: u64 as Bytes = MEMORY_BYTES_DEFAULT,
            in SEGMENT_BYTES_MIN.., "set at least 1 MiB for each group of the cluster", alias "memory";
        /// Maximum segment size.
        segment_bytes_max: u64 as Bytes = SEGMENT_BYTES_MAX_DEFAULT,
            in SEGMENT_BYTES_MIN.., "keep the default of 1 GiB unless the memory is small";
        /// Bytes of memory per header slot: about the size of an object.
        bytes_per_slot: u64 as Bytes = BYTES_PER_SLOT_DEFAULT,
            in 512.., "an object takes at least 512 bytes: set the typical size of an object";
        /// TCP addresses of the data plane, one per network interface; port 0 takes a free port.
        listen: Vec<SocketAddr> = vec![ANY_LOCAL_PORT];
        /// Addresses under which peers reach listen; empty for the addresses of listen.
        ///
        /// Required if one of them is a wildcard such as 0.0.0.0.
        advertise: Vec<String> as AdvertisedAddresses = Vec::new();
        /// CA certificates in PEM format, from which the certificates of all peers must come; none for no TLS.
        ca: Option<PathBuf> = None, variable "MOONTIDE_CA";
        /// Certificate of this process in PEM format.
        cert: Option<PathBuf> = None, variable "MOONTIDE_CERT";
        /// Private key of this process in PEM format.
        key: Option<PathBuf> = None, variable "MOONTIDE_KEY";
        /// Serve hosts on the network without TLS: every process that reaches a port may do everything.
        insecure_no_tls: bool = false;
        /// Serve processes of this host over shared memory.
        shm: bool = true;
        /// Unix socket for shared-memory clients; none derives it from the node id.
        ///
        /// The path is then moontide-<node_id>.sock in $XDG_RUNTIME_DIR, or in /tmp/moontide-<uid>.
        shm_socket: Option<PathBuf> = None;
        /// Placement label: host.
        host: String = host_name(), shown "the host name";
        /// Placement label: rack.
        rack: String = String::new();
        /// Placement label: zone.
        zone: String = String::new();
        /// Address of the admin HTTP server; none disables it.
        admin_listen: Option<SocketAddr> = Some(ANY_LOCAL_PORT);
        /// Further names of this host in requests to the admin HTTP server, e.g. that of a service or a proxy.
        ///
        /// Requests for any other name are refused, except IP addresses, localhost and the name of the host.
        admin_hosts: Vec<String> as HostNames = Vec::new();
        /// Time without contact to a master after which the node stops serving reads.
        self_fence_timeout: Duration = SELF_FENCE_TIMEOUT_DEFAULT,
            in Duration::from_millis(100).., "set the time of at least a few heartbeats";
        /// Time a shutdown waits for objects in memory to move to other nodes; 0s moves nothing.
        drain_on_stop: Duration = Duration::ZERO,
            in Duration::ZERO..=Duration::from_secs(86_400), "set at most one day";
        /// Time a shutdown waits for transfers in flight.
        drain_timeout: Duration = DRAIN_TIMEOUT_DEFAULT,
            in Duration::ZERO..=Duration::from_secs(3600), "set at most one hour";
        /// Limit of copies from other nodes in bytes per second; 0 for no limit.
        ///
        /// Objects are copied when another node is drained.
        copy_bytes_per_s: u64 as Bytes = COPY_BYTES_PER_S_DEFAULT;
        /// Take all memory from the kernel after the start, in the background.
        ///
        /// Else the kernel provides each page when it is first written, which makes the first puts and copies into it slower.
        prefault: bool = false;
        /// Memory pages: those that the kernel provides, or preallocated 2 MiB huge pages ("reserved").
        huge_pages: HugePages as HugePagesName = HugePages::Auto;
    }
    sections {
        /// Disk tier; `None`: objects that do not fit into memory are lost.
        disk: DiskConfig;
    }
}

settings! {
    /// Settings of the disk tier.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct DiskConfig {
        /// Directory of the disk tier, on an SSD; several for several SSDs, by commas or repeated flags; empty for no disk
        /// tier.
        ///
        /// They also store the node id.
        dir: Vec<PathBuf> = Vec::new();
        /// Disk layout.
        backend: BackendKind as BackendName = BackendKind::default();
        /// Disk space limit of each directory; none for 90 % of the free space at the start.
        limit_bytes: Option<u64> as Option<Bytes> = None, alias "disk-limit";
        /// Eviction policy of a full disk.
        eviction_policy: EvictionPolicy as EvictionPolicyName = EvictionPolicy::default();
        /// Disk I/O engine; auto is uring where the kernel allows it.
        io_engine: IoEngine as IoEngineName = IoEngine::Auto;
        /// Write rate limit of each directory in bytes per second; 0 for no limit.
        write_bytes_per_s: u64 as Bytes = 0, alias "disk-write-limit";
        /// Time a shutdown waits for objects in memory to be written to disk; 0s writes nothing.
        flush_timeout: Duration = FLUSH_TIMEOUT_DEFAULT,
            in Duration::ZERO..=Duration::from_secs(3600), "set at most one hour";
        /// Staging memory for records read from disk.
        staging_bytes: u64 as Bytes = STAGING_BYTES_DEFAULT,
            in STAGING_BYTES_MIN..=STAGING_BYTES_MAX,
            "set a few times the size of the largest object; the default is 256 MiB",
            alias "disk-staging";
        /// Time after which one of several directories that fails or does not respond is excluded.
        exclude_after: Duration = EXCLUDE_AFTER_DEFAULT,
            in Duration::from_secs(1)..=Duration::from_secs(3600), "set 1 s to one hour";
        /// Threads that read from each directory.
        read_threads: usize = READ_THREADS_DEFAULT, in 1..=64, "one or two threads saturate an SSD";
    }
}

impl DiskConfig {
    /// Returns settings for a disk tier in `dir`, with defaults for everything else.
    pub fn new(dir: impl Into<PathBuf>) -> DiskConfig {
        DiskConfig { dir: vec![dir.into()], ..DiskConfig::default() }
    }
}

const ANY_LOCAL_PORT: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));

/// Returns the host name, truncated to the maximum length of a label.
fn host_name() -> String {
    let uname = rustix::system::uname();
    let mut name = uname.nodename().to_string_lossy().into_owned();
    while name.len() > LABEL_BYTES_MAX {
        name.pop();
    }
    name
}

/// Addresses for other hosts. [`NodeConfig::validate`] checks them, so that it reports all errors at once.
#[derive(Debug)]
enum AdvertisedAddresses {}

impl Kind for AdvertisedAddresses {
    type Value = Vec<String>;
    const INFO: ValueInfo = <Vec<SocketAddr> as Kind>::INFO;

    fn parse(text: &str) -> Option<Vec<String>> {
        <Vec<String>>::parse(text)
    }

    fn text(value: &Vec<String>) -> String {
        <Vec<String>>::text(value)
    }
}

fn is_address(text: &str) -> bool {
    text.len() <= ADDRESS_BYTES_MAX && is_host_and_port(text)
}

impl NodeConfig {
    /// Returns the addresses in `master`.
    pub(crate) fn masters(&self) -> Vec<String> {
        self.master.split(',').map(|master| master.trim().to_owned()).collect()
    }

    /// Checks all settings. Fails with every invalid one.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        self.check()
    }
}

/// Hint for a process that would serve a network without TLS.
const NO_TLS_HINT: &str = "create certificates with `moontide certs` and set ca, cert and key, or set insecure_no_tls if every \
                           process that reaches this host may read and change everything";

impl NodeConfig {
    /// Returns the certificate files; `None`: no TLS.
    pub(crate) fn credential_files(&self) -> Result<Option<CredentialFiles>, &'static str> {
        CredentialFiles::of_settings(self.ca.as_deref(), self.cert.as_deref(), self.key.as_deref())
    }
}

impl Component for NodeConfig {
    const PREFIX: &'static str = "MOONTIDE_NODE_";
    const COMMAND: &'static str = "moontide node";

    fn check_rules(&self, errors: &mut Vec<InvalidSetting>) {
        let mut rule = |holds: bool, setting: &str, rule: String, hint| {
            if !holds {
                errors.push(InvalidSetting::new(setting, rule, hint));
            }
        };
        let master = &self.master;
        rule(
            self.masters().iter().all(|master| is_address(master)),
            "master",
            format!("is \"{master}\", not \"host:port\" or a comma-separated list of them"),
            "set the address of a master's gRPC server, e.g. 127.0.0.1:7400",
        );
        rule(
            self.node_id != Some(NodeId(0)),
            "node_id",
            "is 0".into(),
            "set another id, or omit it for a random one",
        );
        rule(
            !self.listen.is_empty(),
            "listen",
            "is empty".into(),
            "set an address under which other hosts reach this node",
        );
        // One address is reserved for the shm socket.
        let (count, max) = (self.listen.len().max(self.advertise.len()), ADDRESSES_MAX - 1);
        rule(
            count <= max,
            "listen",
            format!("has {count} addresses, more than {max}"),
            "set one per network interface",
        );
        let wildcard = self.listen.iter().find(|address| address.ip().is_unspecified());
        rule(
            wildcard.is_none() || !self.advertise.is_empty(),
            "advertise",
            format!(
                "is empty, and listen has the wildcard {}",
                wildcard.map_or_else(String::new, ToString::to_string)
            ),
            "set the addresses under which other hosts reach this one",
        );
        if let Err(missing) = self.credential_files() {
            rule(
                false,
                missing,
                "is not set, but other settings of TLS are".into(),
                "set ca, cert and key, or none of them",
            );
        }
        let public = self.listen.iter().chain(&self.admin_listen).find(|address| !address.ip().is_loopback());
        if let Some(address) = public.filter(|_| self.ca.is_none() && !self.insecure_no_tls) {
            let found = format!("is not set, and {address} can be reached from other hosts");
            rule(false, "ca", found, NO_TLS_HINT);
        }
        for address in &self.advertise {
            let parsed = address.parse::<SocketAddr>().ok();
            rule(
                parsed.is_some_and(|a| !a.ip().is_unspecified() && a.port() != 0),
                "advertise",
                format!("has \"{address}\", not \"ip:port\""),
                "set an IP address and a port, e.g. 10.0.0.7:7500",
            );
        }
        for name in &self.admin_hosts {
            rule(
                is_host_name(name),
                "admin_hosts",
                format!("has \"{name}\", no host name"),
                "set names without scheme and port, e.g. moontide.example",
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
        // The kernel limits the path of a Unix socket to 108 bytes, including the terminating zero.
        let socket = self.shm_socket.as_ref().map_or(0, |socket| socket.as_os_str().len());
        rule(
            socket < 108,
            "shm_socket",
            format!("has {socket} bytes, more than 107"),
            "set a shorter path for the socket",
        );
        if let Some(disk) = &self.disk {
            rule(
                !disk.dir.is_empty() && disk.dir.iter().all(|dir| !dir.as_os_str().is_empty()),
                "disk.dir",
                "has no directory, but other disk settings are set".into(),
                "set a directory on an SSD, or omit the other disk settings",
            );
            let nested =
                |one: usize, other: usize| one != other && disk.dir[other].starts_with(&disk.dir[one]);
            let numbers = 0..disk.dir.len();
            rule(
                !numbers.clone().any(|one| numbers.clone().any(|other| nested(one, other))),
                "disk.dir",
                "has a directory twice, or one within another".into(),
                "set directories on different SSDs",
            );
            rule(
                disk.limit_bytes.is_none_or(|limit| limit >= DISK_BYTES_MIN),
                "disk.limit_bytes",
                format!("is {}, less than {DISK_BYTES_MIN}", disk.limit_bytes.unwrap_or(0)),
                "set at least 64 MiB, or omit it for 90 % of the free space",
            );
            let info = rustix::system::sysinfo();
            let half = u64::from(info.mem_unit) * info.totalram as u64 / 2;
            rule(
                disk.staging_bytes <= half,
                "disk.staging_bytes",
                format!("is {}, more than half of the memory of this host", disk.staging_bytes),
                "staging is allocated for the lifetime of the node: a few MiB for each concurrent read are enough",
            );
        }
    }
}

/// A smaller disk tier is not useful.
const DISK_BYTES_MIN: u64 = 64 << 20;

/// Minimum of `staging_bytes`: a few parts of records, in which nodes read from disk.
const STAGING_BYTES_MIN: u64 = 8 << 20;
const STAGING_BYTES_MAX: u64 = 1 << 40;

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_settings::{Loaded, Settings, SettingsError, to_toml};

    #[test]
    fn default_config_is_valid() {
        assert_eq!(NodeConfig::default().validate(), Ok(()));
    }

    #[test]
    fn validate_names_each_invalid_setting_with_advice() {
        type Change = fn(&mut NodeConfig);
        let cases: &[(&str, Change)] = &[
            ("master", |c| c.master = "localhost".into()),
            ("master", |c| c.master = "http://localhost:7400".into()),
            ("master", |c| c.master = "localhost:0".into()),
            ("master", |c| c.master = "::1:7400".into()),
            ("node_id", |c| c.node_id = Some(NodeId(0))),
            ("memory_bytes", |c| c.memory_bytes = 1000),
            ("segment_bytes_max", |c| c.segment_bytes_max = 0),
            ("bytes_per_slot", |c| c.bytes_per_slot = 0),
            ("listen", |c| c.listen.clear()),
            ("listen", |c| c.listen = vec![ANY_LOCAL_PORT; 32]),
            ("advertise", |c| {
                (c.listen, c.insecure_no_tls) = (vec!["0.0.0.0:7500".parse().unwrap()], true);
            }),
            ("ca", |c| c.listen = vec!["10.0.0.7:7500".parse().unwrap()]),
            ("ca", |c| c.admin_listen = Some("10.0.0.7:7500".parse().unwrap())),
            ("ca", |c| (c.cert, c.key) = (Some("c".into()), Some("k".into()))),
            ("cert", |c| (c.ca, c.key) = (Some("a".into()), Some("k".into()))),
            ("key", |c| (c.ca, c.cert) = (Some("a".into()), Some("c".into()))),
            ("advertise", |c| c.advertise = vec!["host:7500".into()]),
            ("advertise", |c| c.advertise = vec!["0.0.0.0:7500".into()]),
            ("host", |c| c.host = "h".repeat(65)),
            ("rack", |c| c.rack = "r".repeat(65)),
            ("zone", |c| c.zone = "z".repeat(65)),
            ("shm_socket", |c| c.shm_socket = Some("d".repeat(108).into())),
            ("self_fence_timeout", |c| c.self_fence_timeout = Duration::ZERO),
            ("drain_timeout", |c| c.drain_timeout = Duration::from_secs(3601)),
        ];
        for (setting, change) in cases {
            let mut config = NodeConfig::default();
            change(&mut config);
            let invalid = config.validate().expect_err(setting);
            assert!(invalid.errors.iter().all(|w| w.setting == *setting && !w.hint.is_empty()), "{invalid}");
        }
        let several = NodeConfig { memory_bytes: 0, bytes_per_slot: 0, ..NodeConfig::default() };
        assert_eq!(
            several.validate().unwrap_err().errors.len(),
            2,
            "all invalid settings are reported at once"
        );
    }

    #[test]
    fn wildcard_listen_with_advertised_address_is_valid() {
        let config = NodeConfig {
            listen: vec!["0.0.0.0:7500".parse().unwrap()],
            advertise: vec!["10.0.0.7:7500".into()],
            insecure_no_tls: true,
            master: "[::1]:7400".into(),
            ..NodeConfig::default()
        };
        assert_eq!(config.validate(), Ok(()));
    }

    fn load(
        file: &str,
        environment: &[(&str, &str)],
        flags: &[(&str, &str)],
    ) -> Result<Loaded<NodeConfig>, SettingsError> {
        let name = format!("moontide-node-{}-{:?}.toml", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name.replace(['(', ')'], ""));
        std::fs::write(&path, file).unwrap();
        let environment = environment.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        let loaded =
            moontide_settings::load(NodeConfig::default(), Some(&path), environment, flags.iter().copied());
        let _ = std::fs::remove_file(&path);
        loaded
    }

    #[test]
    fn printed_toml_round_trips() {
        let changed = NodeConfig {
            node_id: Some(NodeId(0xfeed)),
            memory_bytes: 5 << 30,
            listen: vec!["10.0.0.7:7500".parse().unwrap(), "[::1]:0".parse().unwrap()],
            advertise: vec!["10.0.0.7:7500".to_owned()],
            ca: Some("/etc/moontide/ca.pem".into()),
            insecure_no_tls: true,
            shm: false,
            shm_socket: Some("/run/moontide.sock".into()),
            rack: "r\"12".to_owned(),
            admin_listen: None,
            drain_timeout: Duration::from_millis(1250),
            huge_pages: HugePages::Reserved,
            disk: Some(DiskConfig::new("/mnt/ssd/moon \"tide\"")),
            ..NodeConfig::default()
        };
        let every_disk_setting = DiskConfig {
            backend: BackendKind::Offset,
            limit_bytes: Some(200 << 30),
            eviction_policy: EvictionPolicy::Lru,
            io_engine: IoEngine::Posix,
            write_bytes_per_s: 500 << 20,
            staging_bytes: 64 << 20,
            read_threads: 3,
            ..DiskConfig::new("/mnt/ssd")
        };
        let with_disk = NodeConfig { disk: Some(every_disk_setting), ..NodeConfig::default() };
        for config in [NodeConfig::default(), changed, with_disk] {
            let printed = to_toml(&config, &NodeConfig::default());
            let again = load(&printed, &[], &[]).unwrap_or_else(|error| panic!("{error}\n{printed}"));
            assert_eq!(again.config, config, "{printed}");
            assert!(printed.matches("\n# ").count() >= 24, "{printed}");
        }
    }

    #[test]
    fn later_settings_win() {
        let file = "memory_bytes = \"2GiB\"\nrack = \"a\"\nbytes_per_slot = 4096\n";
        let config = load(file, &[], &[("rack", "b")]).unwrap().config;
        assert_eq!((config.memory_bytes, config.bytes_per_slot, config.rack.as_str()), (2 << 30, 4096, "b"));
    }

    #[test]
    fn disk_dir_enables_disk_and_later_layers_merge() {
        assert_eq!(load("rack = \"a\"", &[], &[]).unwrap().config.disk, None);
        let file = "[disk]\ndir = \"/ssd\"\neviction_policy = \"lru\"";
        let disk = load(file, &[("MOONTIDE_NODE_DISK_LIMIT_BYTES", "1GiB")], &[]).unwrap().config.disk;
        let expected = DiskConfig {
            eviction_policy: EvictionPolicy::Lru,
            limit_bytes: Some(1 << 30),
            ..DiskConfig::new("/ssd")
        };
        assert_eq!(disk, Some(expected));
        let invalid = load("[disk]\nlimit_bytes = \"1GiB\"", &[], &[]).unwrap().check().unwrap_err();
        assert_eq!(
            invalid.errors[0].setting, "disk.dir",
            "a limit without a directory is rejected: {invalid}"
        );
    }

    #[test]
    fn invalid_values_are_rejected() {
        for wrong in [
            "memory = 1",
            "memory_bytes = -1",
            "memory_bytes = \"much\"",
            "node_id = \"node-7\"",
            "drain_timeout = 5",
            "admin_listen = \"here\"",
            "huge_pages = \"yes\"",
            "unknown = 1",
            "disk = \"/ssd\"",
            "[disk]\ndisk_dir = \"/ssd\"",
            "[disk]\nbackend = \"tape\"",
            "[disk]\neviction_policy = \"random\"",
            "[disk]\nio_engine = \"aio\"",
            "[disk]\nlimit_bytes = \"most\"",
            "[disk]\nread_threads = -1",
        ] {
            assert!(load(wrong, &[], &[]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_setting_has_matching_environment_variable() {
        // The certificate is that of the process, whatever it is.
        let shared = ["MOONTIDE_CA", "MOONTIDE_CERT", "MOONTIDE_KEY"];
        for setting in NodeConfig::table() {
            if setting.variable.is_some_and(|variable| shared.contains(&variable)) {
                continue;
            }
            let key = setting.key().replace('.', "_").to_uppercase();
            assert_eq!(setting.variable(NodeConfig::PREFIX), format!("MOONTIDE_NODE_{key}"));
        }
    }
}
