//! Settings: [`StoreConfig`] of a [`Store`](crate::Store), [`PutOptions`] of each put.
//!
//! The table of [`StoreConfig`] declares each setting once; [`moontide_settings`] derives file, environment, flags and
//! help texts of the commands from it. [`PutOptions`] are no settings: they belong to one call.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use moontide_auth::{CredentialFiles, Credentials};
use moontide_proto::Token;
use moontide_settings::{Component, Form, HostPorts, InvalidSetting, Kind, ValueInfo, settings};
use moontide_transfer::tcp::{CONNECTIONS_DEFAULT, CONNECTIONS_MAX};
use moontide_types::limits::{
    BATCH_KEYS_MAX, LEASE_MS_DEFAULT, PREFERRED_PLACES_MAX, REPLICAS_MAX, STRIPES_MAX,
};
use moontide_types::record::{Attributes, ParentHash, PinClass};
use moontide_types::{Place, Spread, Tenant};

use crate::error::StoreError;

/// Default address of the master: its default port on the local host.
pub const MASTER_DEFAULT: &str = "127.0.0.1:7400";

/// Default timeout of a call. A cache that takes longer to respond is slower than computing.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(5);

/// Default timeout of the first connection to a master: long enough for name resolution, short enough for interactive
/// use.
pub const CONNECT_DEFAULT: Duration = Duration::from_secs(3);

/// Default size of the location cache, in objects; an entry takes about 300 bytes.
pub const LOCATION_CACHE_ENTRIES_DEFAULT: usize = 1 << 16;

/// Default number of calls of tasks that run at a time. A few keep client and servers busy; more would only queue.
pub const ASYNC_CALLS_MAX_DEFAULT: usize = 16;

/// Default number of calls of tasks that may queue. Further calls fail at once, so that the caller can compute instead.
pub const ASYNC_QUEUE_MAX_DEFAULT: usize = 1024;

/// Limits of the timeouts.
const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(600);

settings! {
    /// Settings of a store.
    #[derive(Clone, Debug)]
    pub struct StoreConfig {
        /// Address of a master's gRPC server; several separated by commas.
        ///
        /// One reachable master is enough.
        master: String as HostPorts = MASTER_DEFAULT.into(), variable "MOONTIDE_MASTER";
        /// Tenant of the keys. With a certificate of a tenant it is that one.
        tenant: String = Tenant::DEFAULT.as_str().into(), variable "MOONTIDE_TENANT";
        /// CA certificates in PEM format, from which the certificates of masters and nodes must come; none for no TLS.
        ca: Option<PathBuf> = None, variable "MOONTIDE_CA";
        /// Certificate of this process in PEM format.
        cert: Option<PathBuf> = None, variable "MOONTIDE_CERT";
        /// Private key of this process in PEM format.
        key: Option<PathBuf> = None, variable "MOONTIDE_KEY";
        /// Timeout of a call.
        timeout: Duration = TIMEOUT_DEFAULT, in TIMEOUTS, "set the time after which computing is faster";
        /// Timeout of the first connection to a master.
        connect_timeout: Duration = CONNECT_DEFAULT, in TIMEOUTS, "set a few seconds";
        /// Map the memory of local nodes; otherwise they are reached like remote ones.
        shm: bool = true, variable "MOONTIDE_SHM";
        /// Verify bytes that are copied out of the memory of local nodes; other reads are always verified.
        verify_shm: bool = true;
        /// Objects whose location is cached; 0 asks the master for every get.
        location_cache_entries: usize = LOCATION_CACHE_ENTRIES_DEFAULT;
        /// When to read from a second replica because the first is slow: adaptive, off, or after a fixed time.
        hedge: Hedge as HedgeText = Hedge::Adaptive;
        /// TCP connections to each node.
        connections_per_node: usize = CONNECTIONS_DEFAULT, in 1..=CONNECTIONS_MAX, "two suffice for most networks";
        /// Use UCX where it is available.
        ///
        /// UCX reads are one-sided and need leases.
        ucx: bool = false;
        /// Rack of this process, for the choice of replicas; empty if unknown.
        rack: String = String::new();
        /// Zone of this process, for the choice of replicas; empty if unknown.
        zone: String = String::new();
        /// Calls of tasks that run at a time.
        async_calls_max: usize = ASYNC_CALLS_MAX_DEFAULT, in 1.., "a few keep client and servers busy";
        /// Calls of tasks that may queue; further calls fail at once.
        async_queue_max: usize = ASYNC_QUEUE_MAX_DEFAULT;
    }
    fields {
        /// Token that authenticates the client.
        token: Token = Token::NONE;
    }
}

impl StoreConfig {
    /// Returns the certificate files; `None`: no TLS.
    fn credential_files(&self) -> Result<Option<CredentialFiles>, &'static str> {
        CredentialFiles::of_settings(self.ca.as_deref(), self.cert.as_deref(), self.key.as_deref())
    }

    /// Loads the certificate of this process; `None`: no TLS.
    pub(crate) fn load_credentials(&self) -> Result<Option<Arc<Credentials>>, StoreError> {
        let files = self.credential_files().expect("validate() rejects incomplete settings");
        let loaded = files.map(Credentials::load).transpose();
        loaded.map_err(|error| StoreError::Credentials { reason: error.to_string().into() })
    }
}

impl Component for StoreConfig {
    const PREFIX: &'static str = "MOONTIDE_CLIENT_";
    const COMMAND: &'static str = "moontide ls";

    fn check_rules(&self, errors: &mut Vec<InvalidSetting>) {
        if let Err(missing) = self.credential_files() {
            let rule = "is not set, but other settings of TLS are".to_owned();
            errors.push(InvalidSetting::new(missing, rule, "set ca, cert and key, or none of them"));
        }
        if let Err(error) = Tenant::new(&self.tenant) {
            let rule = format!("is {:?}: {error}", self.tenant);
            errors.push(InvalidSetting::new(
                "tenant",
                rule,
                "use another name, or omit it for the default tenant",
            ));
        }
    }
}

/// Policy for reading from a second replica when the first is slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hedge {
    /// No hedging.
    Off,
    /// Hedge when the first replica takes much longer than reads of this size usually do.
    Adaptive,
    /// Hedge after a fixed delay.
    After(Duration),
}

/// Text form of [`Hedge`].
#[derive(Debug)]
enum HedgeText {}

impl Kind for HedgeText {
    type Value = Hedge;
    const INFO: ValueInfo = ValueInfo {
        placeholder: "adaptive|off|TIME",
        expected: "adaptive, off or a duration",
        example: "20ms",
        form: Form::Scalar,
        is_optional: false,
    };

    fn parse(text: &str) -> Option<Hedge> {
        match (text, bool::parse(text)) {
            ("adaptive", _) | (_, Some(true)) => Some(Hedge::Adaptive),
            (_, Some(false)) => Some(Hedge::Off),
            _ => Duration::parse(text).map(Hedge::After),
        }
    }

    fn text(value: &Hedge) -> String {
        match value {
            Hedge::Off => "off".to_owned(),
            Hedge::Adaptive => "adaptive".to_owned(),
            Hedge::After(delay) => Duration::text(delay),
        }
    }
}

impl StoreConfig {
    /// Returns the addresses listed in `master`.
    pub(crate) fn masters(&self) -> Vec<String> {
        self.master.split(',').map(|master| master.trim().to_owned()).collect()
    }

    /// Creates settings with this master address and defaults for everything else.
    pub fn new(master: impl Into<String>) -> StoreConfig {
        StoreConfig { master: master.into(), ..StoreConfig::default() }
    }

    pub(crate) fn validate(&self) -> Result<(), StoreError> {
        Tenant::new(&self.tenant).map_err(StoreError::Key)?;
        Ok(self.check()?)
    }

    /// Returns the lease that look-ups request: only one-sided reads need one.
    pub(crate) fn lease_ms(&self) -> u32 {
        if self.ucx { LEASE_MS_DEFAULT } else { 0 }
    }
}

/// Options of a put.
#[derive(Clone, Debug)]
pub struct PutOptions {
    /// Replicas to write, each on a different node; 1 to 8.
    pub replicas: u8,
    /// Replicas that must be written for the put to succeed; 1 to `replicas`.
    pub replicas_min: u8,
    /// Disks that shall have the object, besides its replicas in memory; 0 to `replicas`. The nodes of the replicas that have a
    /// disk write it in the background after the put. The put does not wait for them, and succeeds without any disk.
    pub disk_replicas: u8,
    /// Stripes per replica, 1 to 1,024. `None`: the master chooses, and splits objects that are too long for a segment.
    pub stripes: Option<u16>,
    /// Whether to replace an object of the same key. If not, an existing object is kept and the put returns
    /// [`PutOutcome::AlreadyExists`](crate::PutOutcome::AlreadyExists). A put that replaces fails with `Pending` if the
    /// object is stored, but an unreachable node may return with the replaced version.
    pub upsert: bool,
    /// Time after which the object may be dropped. `None`: only when space is needed.
    pub ttl: Option<Duration>,
    /// Resistance to eviction.
    pub pin: PinClass,
    /// Label of objects that are leased and evicted together; 1 to 64 bytes.
    pub cohort: Option<Vec<u8>>,
    /// Hash of the preceding block; 1 to 32 bytes.
    pub parent: Option<Vec<u8>>,
    /// What the replicas must not share: each is on a different host, or in a different rack or zone. A replica that cannot be
    /// placed so is not made, now or by a later repair. Labels that nodes do not have are equal to nothing.
    pub spread: Option<Spread>,
    /// Nodes and segments to try first, in order; at most 8. Each replica takes the first one that has space and holds no
    /// other replica. Other nodes are used when these are full or absent.
    pub prefer: Vec<Place>,
    /// Whether to try local memory before other nodes, but after `prefer`. Ignored if `stripes` is set: stripes are
    /// spread over nodes.
    pub prefer_local: bool,
}

impl Default for PutOptions {
    fn default() -> PutOptions {
        PutOptions {
            replicas: 1,
            replicas_min: 1,
            disk_replicas: 0,
            stripes: None,
            upsert: false,
            ttl: None,
            pin: PinClass::None,
            cohort: None,
            parent: None,
            spread: None,
            prefer: vec![],
            prefer_local: true,
        }
    }
}

impl PutOptions {
    pub(crate) fn validate(&self) -> Result<(), StoreError> {
        let wrong = |what, rule| Err(StoreError::InvalidArgument { what, rule });
        if self.replicas == 0 || usize::from(self.replicas) > REPLICAS_MAX {
            return wrong("replicas", "1 to 8");
        }
        if self.replicas_min == 0 || self.replicas_min > self.replicas {
            return wrong("replicas_min", "1 to the number of replicas");
        }
        if self.disk_replicas > self.replicas {
            return wrong("disk_replicas", "0 to the number of replicas");
        }
        if self.stripes.is_some_and(|stripes| stripes == 0 || usize::from(stripes) > STRIPES_MAX) {
            return wrong("stripes", "1 to 1,024");
        }
        if self.prefer.len() > PREFERRED_PLACES_MAX {
            return wrong("prefer", "at most 8 places");
        }
        if self.parent.as_ref().is_some_and(|parent| ParentHash::new(parent).is_none()) {
            return wrong("parent", "1 to 32 bytes");
        }
        if self.attributes().check().is_err() {
            return wrong("cohort", "1 to 64 bytes");
        }
        Ok(())
    }

    pub(crate) fn attributes(&self) -> Attributes {
        Attributes {
            pin: self.pin,
            expires: None,
            cohort: self.cohort.as_deref().map(Into::into),
            parent: self.parent.as_deref().and_then(ParentHash::new),
            user_data: None,
            extra_replicas: self.replicas.saturating_sub(1),
            spread: self.spread,
            disk_replicas: self.disk_replicas,
        }
    }
}

/// Most keys in one request to a master.
pub(crate) const KEYS_PER_CALL: usize = BATCH_KEYS_MAX;
