//! What a [`Store`](crate::Store) is told: [`StoreConfig`] once, [`PutOptions`] with each put.

use std::time::Duration;

use moontide_proto::Token;
use moontide_types::{NodeId, Tenant};
use moontide_types::bounds::{BATCH_KEYS_MAX, LEASE_MS_DEFAULT, REPLICAS_MAX, STRIPES_MAX};
use moontide_types::record::{Attributes, ParentHash, PinClass};

use crate::error::StoreError;

/// How long a call may take unless told otherwise. A cache that has not answered by then is slower than computing.
pub const DEADLINE_DEFAULT: Duration = Duration::from_secs(5);

/// How long reaching the master may take at the start: long enough for a name to be resolved, short enough for a person.
pub const CONNECT_DEFAULT: Duration = Duration::from_secs(3);

/// Where objects are is remembered for so many of them: about 300 bytes each.
pub const LOCATIONS_DEFAULT: usize = 1 << 16;

/// Calls of tasks that work at a time. More would only wait for each other: a handful keeps both sides busy.
pub const WORKING_DEFAULT: usize = 16;

/// Calls of tasks that may wait for their turn. Beyond that a call is refused at once: the caller can compute meanwhile.
pub const WAITING_DEFAULT: usize = 1024;

/// Where a store is and how it is used.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// `host:port` at which a master serves gRPC; several with commas between them where there are several, any of which
    /// will do.
    pub master: String,
    /// Whose keys are meant.
    pub tenant: String,
    /// Proof of who this is.
    pub token: Token,
    /// How long a call may take.
    pub deadline: Duration,
    /// How long reaching the master may take at the start.
    pub connect: Duration,
    /// Whether memory of nodes on this host is mapped. Otherwise they are reached like any other.
    pub local: bool,
    /// Whether bytes that are copied out of memory on this host are verified, as all others are.
    pub verify_local: bool,
    /// Objects whose place is remembered; 0 asks the master every time.
    pub locations: usize,
    /// When a second replica is asked beside a slow first one.
    pub hedge: Hedge,
    /// Connections to each node.
    pub connections: usize,
    /// Whether UCX is used where it is there. It reads one-sidedly, under leases.
    pub ucx: bool,
    /// Labels of where this process stands, for the choice of replicas; empty if unknown. The host is found out.
    pub rack: String,
    /// As `rack`.
    pub zone: String,
    /// Calls of tasks ([`AsyncStore`](crate::AsyncStore)) that work at a time.
    pub working: usize,
    /// Calls of tasks that may wait for their turn.
    pub waiting: usize,
}

/// When a second replica is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hedge {
    /// Never.
    Off,
    /// When the first takes much longer than reads of its size usually do.
    Adaptive,
    /// After a fixed time.
    After(Duration),
}

impl StoreConfig {
    /// The masters that are named, each by itself.
    pub(crate) fn masters(&self) -> Vec<String> {
        self.master.split(',').map(|master| master.trim().to_owned()).collect()
    }

    /// Everything but the master as by default.
    pub fn new(master: impl Into<String>) -> StoreConfig {
        StoreConfig {
            master: master.into(),
            tenant: Tenant::DEFAULT.as_str().into(),
            token: Token::NONE,
            deadline: DEADLINE_DEFAULT,
            connect: CONNECT_DEFAULT,
            local: true,
            verify_local: true,
            locations: LOCATIONS_DEFAULT,
            hedge: Hedge::Adaptive,
            connections: moontide_transfer::tcp::CONNECTIONS_DEFAULT,
            ucx: false,
            rack: String::new(),
            zone: String::new(),
            working: WORKING_DEFAULT,
            waiting: WAITING_DEFAULT,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), StoreError> {
        let wrong = |what, rule| Err(StoreError::Argument { what, rule });
        Tenant::new(&self.tenant).map_err(StoreError::Key)?;
        if !(1..=600_000).contains(&self.deadline.as_millis()) {
            return wrong("deadline", "1 ms to 600 s");
        }
        if !(1..=600_000).contains(&self.connect.as_millis()) {
            return wrong("connect", "1 ms to 600 s");
        }
        if self.connections == 0 || self.connections > moontide_transfer::tcp::CONNECTIONS_MAX {
            return wrong("connections", "1 to 16");
        }
        if self.working == 0 {
            return wrong("working", "at least 1");
        }
        Ok(())
    }

    /// Lease that look-ups ask for: only one-sided reads depend on one.
    pub(crate) fn lease_ms(&self) -> u32 {
        if self.ucx { LEASE_MS_DEFAULT } else { 0 }
    }
}

/// How an object is to be stored.
#[derive(Clone, Debug)]
pub struct PutOptions {
    /// Replicas wanted, each on another node.
    pub replicas: u8,
    /// Fewest that are acceptable.
    pub replicas_min: u8,
    /// Stripes per replica; `None` leaves it to the master, which cuts what is too long for a segment.
    pub stripes: Option<u16>,
    /// Replace an object of the same key; otherwise it stays and the put is [`Put::Existed`](crate::Put::Existed).
    pub upsert: bool,
    /// It may be forgotten after this time; `None`: when room is needed.
    pub ttl: Option<Duration>,
    /// How strongly it resists eviction.
    pub pin: PinClass,
    /// Label of objects that are leased and evicted together; 1 to 64 bytes.
    pub cohort: Option<Vec<u8>>,
    /// Hash of the block before this one; 1 to 32 bytes.
    pub parent: Option<Vec<u8>>,
    /// Prefer memory on this host, unless a number of stripes is given: these are spread.
    pub near: bool,
    /// Prefer this node, if it has room.
    pub prefer: Option<NodeId>,
}

impl Default for PutOptions {
    fn default() -> PutOptions {
        PutOptions {
            replicas: 1,
            replicas_min: 1,
            stripes: None,
            upsert: false,
            ttl: None,
            pin: PinClass::None,
            cohort: None,
            parent: None,
            near: true,
            prefer: None,
        }
    }
}

impl PutOptions {
    pub(crate) fn validate(&self) -> Result<(), StoreError> {
        let wrong = |what, rule| Err(StoreError::Argument { what, rule });
        if self.replicas == 0 || usize::from(self.replicas) > REPLICAS_MAX {
            return wrong("replicas", "1 to 8");
        }
        if self.replicas_min == 0 || self.replicas_min > self.replicas {
            return wrong("replicas_min", "1 to the number of replicas");
        }
        if self.stripes.is_some_and(|stripes| stripes == 0 || usize::from(stripes) > STRIPES_MAX) {
            return wrong("stripes", "1 to 1,024");
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
            note: None,
        }
    }
}

/// Keys in one request to a master.
pub(crate) const KEYS_PER_CALL: usize = BATCH_KEYS_MAX;
