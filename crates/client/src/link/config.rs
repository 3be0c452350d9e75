//! What a link is told: [`LinkConfig`] once, [`Known`] whenever the client learns something. And [`LinkLoad`], what
//! it tells about itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_proto::Token;
use moontide_proto::convert::{CallerId, ConvertError, RequestContext};
use moontide_proto::limits::DEADLINE_MS_MAX;
use moontide_types::{MapVersion, Tenant, Term};

use super::error::LinkError;

/// How long calls wait unless told otherwise. A cache that has not answered by then is slower than computing.
pub const DEADLINE_MS_DEFAULT: u32 = 5_000;

/// How long connecting may take, name resolution and Hello included, unless told otherwise.
pub const CONNECT_MS_DEFAULT: u32 = 3_000;

/// Requests in flight on one link unless told otherwise: enough to cover the round trip, few enough for a master
/// that serves thousands of clients.
pub const INFLIGHT_DEFAULT: u16 = 64;

/// Most requests in flight that can be asked for: a request's number has 8 bits for its place in the table.
pub const INFLIGHT_MAX: u16 = 256;

/// Where a link leads, and how it behaves.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// Where the master serves the framed protocol: `host:port`.
    pub address: String,
    /// The calling process.
    pub caller: CallerId,
    /// Proof of who it is.
    pub token: Token,
    /// How long a call waits that does not say it itself: 1 to [`DEADLINE_MS_MAX`].
    pub deadline_ms: u32,
    /// How long connecting may take: 1 to [`DEADLINE_MS_MAX`]. A call that must connect waits no longer than its own deadline.
    pub connect_ms: u32,
    /// Most requests in flight: 1 to [`INFLIGHT_MAX`]. The master may grant fewer.
    pub inflight_max: u16,
}

impl LinkConfig {
    /// Everything but address and caller as by default.
    pub fn new(address: impl Into<String>, caller: CallerId) -> LinkConfig {
        LinkConfig {
            address: address.into(),
            caller,
            token: Token::NONE,
            deadline_ms: DEADLINE_MS_DEFAULT,
            connect_ms: CONNECT_MS_DEFAULT,
            inflight_max: INFLIGHT_DEFAULT,
        }
    }

    /// Checks every number against its bounds.
    pub fn validate(&self) -> Result<(), LinkError> {
        within("deadline_ms", self.deadline_ms, DEADLINE_MS_MAX)?;
        within("connect_ms", self.connect_ms, DEADLINE_MS_MAX)?;
        within("inflight_max", self.inflight_max.into(), INFLIGHT_MAX.into())?;
        Ok(())
    }

    /// The context of a call on keys of any groups.
    pub(super) fn context<'a>(
        &self,
        tenant: Tenant<'a>,
        known: Known,
        deadline_ms: u32,
    ) -> RequestContext<'a> {
        RequestContext {
            tenant,
            group: None,
            map_version: known.map_version,
            term: known.term,
            caller: self.caller,
            session: None,
            deadline_ms,
            token: self.token,
        }
    }

    /// When a call that starts now ends.
    pub(super) fn deadline(&self) -> Deadline {
        Deadline::after(self.deadline_ms)
    }

    /// When connecting that starts now has failed: it is cut short by the deadline of the call that needs it.
    pub(super) fn connect_until(&self, deadline: Option<Deadline>) -> Instant {
        let own = Deadline::after(self.connect_ms).at;
        deadline.map_or(own, |deadline| own.min(deadline.at))
    }
}

/// `1 ≤ found ≤ max`.
pub(super) fn within(field: &'static str, found: u32, max: u32) -> Result<(), ConvertError> {
    if found == 0 {
        return Err(ConvertError::TooSmall { field, found: 0, min: 1 });
    }
    if found > max {
        return Err(ConvertError::TooLarge { field, found: found.into(), max: max.into() });
    }
    Ok(())
}

/// What the client knows about its master; stands in the context of the calls that the link makes by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Version of the group map by which the master was chosen; 0 if there was none.
    pub map_version: MapVersion,
    /// The master's term; zero if it is not known.
    pub term: Term,
}

/// How busy a link is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkLoad {
    /// Requests in flight.
    pub in_flight: usize,
    /// Single keys that wait for a batch to come back.
    pub gathered: usize,
}

/// When a wait ends, and how long it was meant to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    pub(super) at: Instant,
    pub(super) ms: u32,
}

impl Deadline {
    pub(super) fn after(ms: u32) -> Deadline {
        Deadline { at: Instant::now() + Duration::from_millis(ms.into()), ms }
    }

    /// Nothing if it is over.
    pub(super) fn remaining(self) -> Option<Duration> {
        self.at.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }

    /// What a caller gets who waited in vain.
    pub(super) fn error(self, address: &Arc<str>) -> LinkError {
        LinkError::Deadline { address: address.clone(), deadline_ms: self.ms }
    }
}
