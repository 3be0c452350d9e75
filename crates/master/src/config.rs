//! [`MasterConfig`]: all settings of a master.
//!
//! The table below declares each setting once; [`moontide_settings`] derives file, environment, flags and help texts from
//! it. A [`Server`](crate::Server) starts only with a configuration that passed [`MasterConfig::validate`], which reports
//! every invalid value with a hint.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::num::NonZeroU16;
use std::ops::Deref;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use moontide_auth::{CredentialFiles, Credentials, CredentialsError};
use moontide_meta::{Admission, OffloadTrigger, PlacementKind};
use moontide_proto::limits::ADDRESS_BYTES_MAX;
use moontide_settings::{
    Bytes, Component, HostNames, HostPort, InvalidConfig, InvalidSetting, Millis, choices, is_host_and_port,
    is_host_name, settings,
};
use moontide_types::limits::{GROUPS_MAX, LEASE_MS_MAX, OBJECT_BYTES_MAX, PAGE_BYTES, RESERVATION_MS_MAX};

use crate::election::RegistryAddress;

/// Default address of the gRPC server: loopback only, because there is no authentication.
pub const GRPC_LISTEN_DEFAULT: SocketAddr = local(7400);
/// Default address of the frame server.
pub const FRAME_LISTEN_DEFAULT: SocketAddr = local(7401);
/// Default address of the admin endpoints.
pub const ADMIN_LISTEN_DEFAULT: SocketAddr = local(7402);
/// Longer than a short stop of a node's process.
const SESSION_TTL_MS_DEFAULT: u32 = 10_000;
/// More than twice the longest observed stall during the prefault of a segment.
const NODE_REJOIN_WINDOW_MS_DEFAULT: u32 = 60_000;
const REPAIR_DELAY_MS_DEFAULT: u32 = 30_000;
/// A node of 256 GiB that joins full ones is as full as they are within half an hour, with a hundredth of its memory bandwidth.
const REBALANCE_BYTES_PER_S_DEFAULT: u64 = 128 << 20;
/// Ordinary placement keeps nodes within a few hundredths of each other.
const REBALANCE_SKEW_PERMILLE_DEFAULT: u16 = 100;
/// Below that, the copy takes a larger part of the network than what it saves.
const HOT_COPY_BYTES_DEFAULT: u64 = 4 << 20;
/// Longer than the pause between two requests of a busy conversation.
const HOT_COPY_IDLE_MS_DEFAULT: u32 = 60_000;
/// A stolen capability is accepted for twice that long at most. Reads from cached locations that are older than that cost a
/// refused request and a look-up.
const CAPABILITY_ROTATION_MS_DEFAULT: u32 = 300_000;
/// The longest lease or reservation, plus 1 % for clock drift.
const REALLOCATION_DELAY_MS_DEFAULT: u32 = max(LEASE_MS_MAX, RESERVATION_MS_MAX) / 100 * 101;
/// Time until a dead master is replaced; a master that stalls for longer loses its groups.
const REGISTRY_LEASE_MS_DEFAULT: u32 = 5_000;
/// Usage above which eviction starts, in thousandths.
const EVICTION_HIGH_WATERMARK_PERMILLE_DEFAULT: u16 = 980;
/// Usage below which eviction stops, in thousandths.
const EVICTION_LOW_WATERMARK_PERMILLE_DEFAULT: u16 = 960;
/// Objects larger than 256 MiB are striped, so that several nodes serve one object.
const STRIPE_BYTES_MAX_DEFAULT: u64 = 256 << 20;
/// Each connection takes a descriptor and 64 KiB: 64 MiB for all.
const CONNECTIONS_MAX_DEFAULT: u32 = 1024;
/// Calls in flight of one connection; at the limit the server stops reading from it.
const INFLIGHT_PER_CONNECTION_MAX_DEFAULT: u32 = 256;
/// 0: one thread per core.
const FRAME_THREADS_DEFAULT: u16 = 0;

const fn local(port: u16) -> SocketAddr {
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))
}

const fn max(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}

choices! {
    /// Names of placement policies.
    enum PlacementName for PlacementKind {
        PlacementKind::Random => "random",
        PlacementKind::FreeRatio => "free-ratio",
        PlacementKind::Topology => "topology",
    }
}

choices! {
    /// Names of the events that write objects to disk.
    enum OffloadTriggerName for OffloadTrigger {
        OffloadTrigger::Evict => "evict",
        OffloadTrigger::Put => "put",
    }
}

choices! {
    /// Names of offload admission policies.
    enum AdmissionName for Admission {
        Admission::All => "all",
        Admission::Accessed => "accessed",
    }
}

settings! {
    /// All settings of a master.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct MasterConfig {
        /// Address of the gRPC server; port 0 selects a free port.
        grpc_listen: SocketAddr = GRPC_LISTEN_DEFAULT;
        /// Address of the frame server, which clients use by default.
        frame_listen: SocketAddr = FRAME_LISTEN_DEFAULT;
        /// Address of the admin endpoints (HTTP): metrics, health, listings.
        admin_listen: SocketAddr = ADMIN_LISTEN_DEFAULT;
        /// Further names of this host in requests to the admin endpoints, e.g. that of a service or a proxy.
        ///
        /// Requests for any other name are refused, except IP addresses, localhost, the name of the host and advertised names.
        admin_hosts: Vec<String> as HostNames = Vec::new();
        /// Address at which other processes reach the gRPC server.
        ///
        /// Required if grpc_listen is a wildcard, e.g. 0.0.0.0; otherwise none is grpc_listen.
        grpc_advertise: Option<String> as Option<HostPort> = None;
        /// Address at which other processes reach the frame server.
        ///
        /// Required if frame_listen is a wildcard; otherwise none is frame_listen.
        frame_advertise: Option<String> as Option<HostPort> = None;
        /// CA certificates in PEM format, from which the certificates of all peers must come; none for no TLS.
        ca: Option<PathBuf> = None, variable "MOONTIDE_CA";
        /// Certificate of this process in PEM format.
        cert: Option<PathBuf> = None, variable "MOONTIDE_CERT";
        /// Private key of this process in PEM format.
        key: Option<PathBuf> = None, variable "MOONTIDE_KEY";
        /// Serve hosts on the network without TLS: every process that reaches a port may do everything.
        insecure_no_tls: bool = false;
        /// Registry of a cluster with several masters: etcd://host:port,host:port/prefix or kubernetes://namespace/name.
        ///
        /// It stores the identity of the cluster, and data_dir is not used.
        registry: Option<String> = None;
        /// Lease of a master in the registry, in milliseconds.
        ///
        /// Other masters take over the groups of a master that does not renew its lease.
        registry_lease_ms: u32 as Millis = REGISTRY_LEASE_MS_DEFAULT,
            in 1_000..=60_000, "use a multiple of the longest pause of a healthy master; default 5000";
        /// Directory of the cluster's identity, without a registry.
        ///
        /// With none, every start creates a new cluster.
        data_dir: Option<PathBuf> = None;
        /// Number of groups of the cluster, 1 to 4096; fixed at the first use of data_dir or registry.
        ///
        /// None for the number that is stored there; for a new cluster, 1 without and 4 with a registry.
        groups: Option<u16> = None;
        /// Time without a heartbeat after which the session of a node ends, in milliseconds.
        session_ttl_ms: u32 as Millis = SESSION_TTL_MS_DEFAULT,
            in 100..=3_600_000, "use a multiple of the longest pause of a healthy node; default 10000";
        /// Time of a writer from PutStart to PutEnd, in milliseconds; at most 30000.
        reservation_ms: u32 as Millis = RESERVATION_MS_MAX,
            in 100..=RESERVATION_MS_MAX, "use the time that the slowest writer of one object needs; default 30000";
        /// Time without allocations in a segment that an earlier master or session used, in milliseconds.
        ///
        /// A value below the default is safe only without one-sided readers and writers.
        reallocation_delay_ms: u32 as Millis = REALLOCATION_DELAY_MS_DEFAULT,
            in 0..=3_600_000, "use slightly more than the longest lease; default 30300";
        /// Time within which an absent node may rejoin with its records, in milliseconds.
        ///
        /// The master remembers removals that long. Not shorter than the wait for reports after its start.
        node_rejoin_window_ms: u32 as Millis = NODE_REJOIN_WINDOW_MS_DEFAULT,
            in 0..=86_400_000, "use the duration of a restart of a node; default 60000";
        /// Time from the loss of replicas until they are copied again from others, in milliseconds.
        ///
        /// A node that only restarts or reconnects within it causes no copies. Objects with one replica are not copied.
        repair_delay_ms: u32 as Millis = REPAIR_DELAY_MS_DEFAULT,
            in 0..=86_400_000, "use the duration of a short outage; default 30000";
        /// Bytes per second that each node may receive from fuller nodes; 0 for none.
        ///
        /// A node that joins fills with objects of the others, the least used first.
        rebalance_bytes_per_s: u64 as Bytes = REBALANCE_BYTES_PER_S_DEFAULT, in 0..=1 << 40, "default 128MiB";
        /// Difference between the fullest and the emptiest node above which objects move, in thousandths of their memory.
        rebalance_skew_permille: u16 = REBALANCE_SKEW_PERMILLE_DEFAULT, in 1..=1000, "unit: thousandths; default 100";
        /// Bytes of an object that the processes of one host read in some seconds before its node gets a copy; 0 for no copies.
        ///
        /// An object must also be read at least 8 times. Copies take at most a tenth of the memory.
        hot_copy_bytes: u64 as Bytes = HOT_COPY_BYTES_DEFAULT, in 0..=1 << 40, "default 4MiB";
        /// Time after which such a copy is released if it is not read, in milliseconds.
        hot_copy_idle_ms: u32 as Millis = HOT_COPY_IDLE_MS_DEFAULT,
            in 1_000..=86_400_000, "use the longest pause between two uses; default 60000";
        /// Interval at which nodes get a new key for capabilities, in milliseconds.
        ///
        /// A capability is accepted for one to two intervals. Below 60000, puts that take long may start again.
        capability_rotation_ms: u32 as Millis = CAPABILITY_ROTATION_MS_DEFAULT,
            in 1_000..=86_400_000, "use more than twice the reservation_ms; default 300000";
        /// Usage of memory or slots above which eviction starts, in thousandths.
        eviction_high_watermark_permille: u16 = EVICTION_HIGH_WATERMARK_PERMILLE_DEFAULT,
            in 1..=1000, "unit: thousandths; default 980";
        /// Usage of memory or slots below which eviction stops, in thousandths.
        eviction_low_watermark_permille: u16 = EVICTION_LOW_WATERMARK_PERMILLE_DEFAULT;
        /// Placement policy of new objects.
        placement: PlacementKind as PlacementName = PlacementKind::FreeRatio;
        /// When objects are written to disk: when they are evicted from memory, or in the background after their put.
        ///
        /// With "put" a crash of a node loses few objects; every object is written, which increases SSD wear.
        offload: OffloadTrigger as OffloadTriggerName = OffloadTrigger::Evict;
        /// Objects that are written to disk when they are evicted from memory.
        ///
        /// "accessed" selects objects that were read since their put, which reduces SSD wear.
        offload_admission: Admission as AdmissionName = Admission::All;
        /// Longest stripe, a multiple of 256KiB; longer objects are striped.
        stripe_bytes_max: u64 as Bytes = STRIPE_BYTES_MAX_DEFAULT, in PAGE_BYTES..=OBJECT_BYTES_MAX, "default 256MiB";
        /// Connection limit of the frame server and of the gRPC server, each.
        connections_max: u32 = CONNECTIONS_MAX_DEFAULT, in 1..=1 << 20, "default 1024";
        /// Limit of calls of one connection that wait for nodes.
        ///
        /// At the limit the server stops reading from the connection.
        inflight_per_connection_max: u32 = INFLIGHT_PER_CONNECTION_MAX_DEFAULT, in 1..=1 << 16, "default 256";
        /// Number of threads of the frame server; 0 for one per core.
        frame_threads: u16 = FRAME_THREADS_DEFAULT, in 0..=1024, "0 is one thread per core";
    }
}

impl Component for MasterConfig {
    const PREFIX: &'static str = "MOONTIDE_MASTER_";
    const COMMAND: &'static str = "moontide master";

    fn check_rules(&self, errors: &mut Vec<InvalidSetting>) {
        let mut rule = |holds: bool, setting: &str, rule: String, hint| {
            if !holds {
                errors.push(InvalidSetting::new(setting, rule, hint));
            }
        };
        rule(
            self.eviction_low_watermark_permille < self.eviction_high_watermark_permille,
            "eviction_low_watermark_permille",
            format!(
                "is {}, must be below eviction_high_watermark_permille = {}",
                self.eviction_low_watermark_permille, self.eviction_high_watermark_permille
            ),
            "set it lower, e.g. 20 below eviction_high_watermark_permille",
        );
        if let Some(groups) = self.groups {
            rule(
                (1..=GROUPS_MAX).contains(&groups),
                "groups",
                format!("is {groups}, must be 1 to {GROUPS_MAX}"),
                "omit it, or set more than 16 if the cluster will have more than 16 masters",
            );
        }
        rule(
            self.stripe_bytes_max.is_multiple_of(PAGE_BYTES),
            "stripe_bytes_max",
            format!("is {}, must be a multiple of {PAGE_BYTES}", self.stripe_bytes_max),
            "round it to whole pages of 256 KiB",
        );
        if let Some(Err(error)) = self.registry.as_deref().map(RegistryAddress::from_str) {
            rule(
                false,
                "registry",
                format!("is {:?}: {}", error.text, error.reason),
                "use etcd://host:port/prefix or kubernetes://namespace/name, or omit it for a single master",
            );
        }
        if let Err(missing) = self.credential_files() {
            let found = "is not set, but other settings of TLS are".to_owned();
            rule(false, missing, found, "set ca, cert and key, or none of them");
        }
        let addresses = [self.grpc_listen, self.frame_listen, self.admin_listen];
        let public = addresses.iter().find(|address| !address.ip().is_loopback());
        if let Some(address) = public.filter(|_| self.ca.is_none() && !self.insecure_no_tls) {
            let found = format!("is not set, and {address} can be reached from other hosts");
            rule(false, "ca", found, NO_TLS_HINT);
        }
        let listeners = [
            ("grpc_listen", self.grpc_listen),
            ("frame_listen", self.frame_listen),
            ("admin_listen", self.admin_listen),
        ];
        for (at, (setting, address)) in listeners.iter().enumerate() {
            for (other, same) in &listeners[..at] {
                rule(
                    address != same || address.port() == 0,
                    setting,
                    format!("is {address}, the same as {other}"),
                    "use a different port for each server",
                );
            }
        }
        for name in &self.admin_hosts {
            rule(
                is_host_name(name),
                "admin_hosts",
                format!("has {name:?}, no host name"),
                "set names without scheme and port, e.g. moontide.example",
            );
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
                    format!("is not set, and clients cannot connect to the wildcard {listen}"),
                    "set it to the name or address of this host and the port",
                ),
                Some(address) => rule(
                    address.len() <= ADDRESS_BYTES_MAX && is_host_and_port(address),
                    setting,
                    format!("is {address:?}, must be host:port of at most {ADDRESS_BYTES_MAX} bytes"),
                    "e.g. master-0.example:7400 or [2001:db8::1]:7400",
                ),
            }
        }
    }
}

/// Hint for a process that would serve a network without TLS.
const NO_TLS_HINT: &str = "create certificates with `moontide certs` and set ca, cert and key, or set insecure_no_tls if every \
                           process that reaches this host may read and change everything";

impl MasterConfig {
    /// Returns the certificate files; `None`: no TLS.
    fn credential_files(&self) -> Result<Option<CredentialFiles>, &'static str> {
        CredentialFiles::of_settings(self.ca.as_deref(), self.cert.as_deref(), self.key.as_deref())
    }

    /// Checks every value and all relations between them, and reports all errors.
    pub fn validate(self) -> Result<ValidConfig, InvalidConfig> {
        self.check()?;
        Ok(ValidConfig(self))
    }
}

/// A configuration that passed [`MasterConfig::validate`].
#[derive(Clone, Debug)]
pub struct ValidConfig(MasterConfig);

impl Deref for ValidConfig {
    type Target = MasterConfig;

    fn deref(&self) -> &MasterConfig {
        &self.0
    }
}

impl ValidConfig {
    /// Loads the certificate of this master; `None`: no TLS.
    pub(crate) fn load_credentials(&self) -> Result<Option<Arc<Credentials>>, CredentialsError> {
        let files = self.credential_files().expect("validate() rejects incomplete settings");
        files.map(Credentials::load).transpose()
    }

    /// Returns the configured number of groups.
    pub(crate) fn groups(&self) -> Option<NonZeroU16> {
        self.groups.map(|groups| NonZeroU16::new(groups).expect("validate() rejects 0 groups"))
    }

    /// Returns the address of the registry.
    pub(crate) fn registry(&self) -> RegistryAddress {
        let address = self.registry.as_deref().map(RegistryAddress::from_str);
        address
            .map_or(RegistryAddress::None, |address| address.expect("validate() rejects invalid addresses"))
    }

    /// Returns the number of threads of the frame server.
    pub(crate) fn frame_threads(&self) -> usize {
        match self.frame_threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_settings::{Loaded, Settings, SettingsError, to_toml};
    use std::path::Path;

    fn load(
        file: Option<&str>,
        environment: &[(&str, &str)],
        flags: &[(&str, &str)],
    ) -> Result<Loaded<MasterConfig>, SettingsError> {
        let name = format!("moontide-config-{}-{:?}.toml", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name.replace(['(', ')'], ""));
        if let Some(text) = file {
            std::fs::write(&path, text).unwrap();
        }
        let environment = environment.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        let file = file.map(|_| path.as_path());
        let loaded =
            moontide_settings::load(MasterConfig::default(), file, environment, flags.iter().copied());
        let _ = std::fs::remove_file(&path);
        loaded
    }

    #[test]
    fn flags_override_environment_and_environment_overrides_file() {
        let file = Some(
            "groups = 4\nsession_ttl_ms = 2000\neviction_high_watermark_permille = 800\neviction_low_watermark_permille = 700\n",
        );
        let environment = [
            ("MOONTIDE_MASTER_SESSION_TTL_MS", "3000"),
            ("MOONTIDE_MASTER_EVICTION_HIGH_WATERMARK_PERMILLE", "810"),
            ("PATH", "/bin"),
        ];
        let config = load(file, &environment, &[("eviction-high-watermark-permille", "820")]).unwrap().config;
        let expected = MasterConfig {
            groups: Some(4),
            session_ttl_ms: 3000,
            eviction_high_watermark_permille: 820,
            eviction_low_watermark_permille: 700,
            ..MasterConfig::default()
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn empty_configuration_is_default_and_valid() {
        let config = load(None, &[], &[]).unwrap().config;
        assert_eq!(config, MasterConfig::default());
        assert_eq!(config.validate().unwrap().groups(), None);
    }

    #[test]
    fn printed_config_round_trips() {
        let flags = [
            ("data_dir", "/var/lib/moon \"tide\""),
            ("placement", "topology"),
            ("offload", "put"),
            ("offload-admission", "accessed"),
            ("grpc-listen", "[::1]:9"),
            ("frame_advertise", "a.example:7401"),
        ];
        for config in [MasterConfig::default(), load(None, &[], &flags).unwrap().config] {
            let printed = to_toml(&config, &MasterConfig::default());
            assert_eq!(load(Some(&printed), &[], &[]).unwrap().config, config, "{printed}");
            for setting in MasterConfig::table() {
                assert!(printed.contains(setting.name) && !setting.help().is_empty());
            }
        }
    }

    #[test]
    fn config_error_names_setting_and_accepted_values() {
        let text = |result: Result<Loaded<MasterConfig>, SettingsError>| result.unwrap_err().to_string();
        let error = text(load(None, &[("MOONTIDE_MASTER_GROUPS", "many")], &[]));
        assert!(error.contains("MOONTIDE_MASTER_GROUPS") && error.contains("whole number"), "{error}");
        let error = text(load(None, &[], &[("grpc-listen", "localhost")]));
        assert!(error.contains("--grpc-listen") && error.contains("127.0.0.1:7400"), "{error}");
        let error = text(load(None, &[], &[("speed", "1")]));
        assert!(error.contains("speed"), "{error}");
        let error = text(load(Some("gruops = 4\n"), &[], &[]));
        assert!(error.contains("gruops") && error.contains("--print-config"), "{error}");
        let error = text(load(Some("placement = \"best\"\n"), &[], &[]));
        assert!(error.contains("free-ratio"), "{error}");
        let error = text(load(Some("offload_admission = \"none\"\n"), &[], &[]));
        assert!(error.contains("accessed"), "{error}");
        let error = text(load(None, &[("MOONTIDE_MASTER_OFFLOAD_ADMISSION", "none")], &[]));
        assert!(error.contains("accessed"), "{error}");
        let error = text(moontide_settings::load(
            MasterConfig::default(),
            Some(Path::new("/nowhere/at/all.toml")),
            [],
            [],
        ));
        assert!(error.contains("/nowhere/at/all.toml"), "{error}");
    }

    #[test]
    fn unknown_environment_variables_are_reported_not_rejected() {
        let loaded = load(None, &[("MOONTIDE_MASTER_PORT", "tcp://10.0.0.1:7400")], &[]).unwrap();
        assert_eq!(loaded.unknown_variables, ["MOONTIDE_MASTER_PORT"]);
    }

    #[test]
    fn invalid_values_are_all_reported_with_setting_and_hint() {
        let cases: &[(&str, &str)] = &[
            ("groups", "0"),
            ("groups", "4097"),
            ("session_ttl_ms", "99"),
            ("reservation_ms", "0"),
            ("reservation_ms", "30001"),
            ("reallocation_delay_ms", "3600001"),
            ("node_rejoin_window_ms", "86400001"),
            ("repair_delay_ms", "86400001"),
            ("rebalance_bytes_per_s", "2TiB"),
            ("rebalance_skew_permille", "0"),
            ("hot_copy_bytes", "2TiB"),
            ("hot_copy_idle_ms", "999"),
            ("capability_rotation_ms", "999"),
            ("eviction_high_watermark_permille", "1001"),
            ("eviction_low_watermark_permille", "980"),
            ("stripe_bytes_max", "262145"),
            ("stripe_bytes_max", "0"),
            ("connections_max", "0"),
            ("inflight_per_connection_max", "0"),
            ("frame_threads", "1025"),
            ("grpc_advertise", "host"),
            ("grpc_advertise", "host:0"),
            ("grpc_advertise", "::1:7400"),
            ("frame_advertise", ":7401"),
            ("cert", "master.pem"),
        ];
        for &(setting, text) in cases {
            let invalid = load(None, &[], &[(setting, text)]).unwrap().config.validate().unwrap_err();
            let expected = if setting == "cert" { "ca" } else { setting };
            assert!(
                invalid.errors.iter().all(|error| error.setting == expected),
                "{setting}={text}: {invalid}"
            );
            assert!(invalid.errors.iter().all(|error| !error.hint.is_empty()));
        }
        let same =
            load(None, &[], &[("frame_listen", "127.0.0.1:7400")]).unwrap().config.validate().unwrap_err();
        assert_eq!(same.errors[0].setting, "frame_listen");
        let hidden = load(None, &[], &[("frame_listen", "0.0.0.0:7401"), ("insecure_no_tls", "true")])
            .unwrap()
            .config
            .validate()
            .unwrap_err();
        assert_eq!(hidden.errors[0].setting, "frame_advertise");
        let public =
            load(None, &[], &[("grpc_listen", "10.0.0.7:7400")]).unwrap().config.validate().unwrap_err();
        assert_eq!(public.errors[0].setting, "ca");
        assert!(public.to_string().contains("insecure_no_tls"), "{public}");
        let several =
            load(None, &[], &[("groups", "0"), ("connections_max", "0")]).unwrap().config.validate();
        assert_eq!(several.unwrap_err().errors.len(), 2, "all errors are reported at once");
    }

    #[test]
    fn listeners_may_share_port_zero() {
        let flags = [
            ("grpc_listen", "127.0.0.1:0"),
            ("frame_listen", "127.0.0.1:0"),
            ("admin_listen", "127.0.0.1:0"),
        ];
        assert!(load(None, &[], &flags).unwrap().config.validate().is_ok());
        assert!(is_host_and_port("[2001:db8::1]:7400") && is_host_and_port("10.0.0.1:1"));
    }
}
